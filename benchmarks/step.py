"""
bench.py step: forward, backward, measurement, clipping and AdamW, on random tokens.

    python bench.py step            # tracking off, norm, exact, and off with torch's own LayerNorm
    python bench.py step --models=char --dtype=float32 --others      # and per-sample gradients by torch.func, Opacus and
                                                                     # BackPACK (pip install -r requirements-bench.txt)
    python bench.py step --ranks=2                 # the same under DDP
    python bench.py step --against=../nanoGPT      # our step beside that of a nanoGPT checkout: against.py
    python bench.py step --against=../nanoGPT --whole      # their train.py and ours, whole processes in turn: whole.py
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

from benchmarks import against, tools, whole
from benchmarks.tools import BENCH, MODELS, batch_of, interleave, paired, peak_bytes, plain, spread, write_json
from configurator import Config, ConfigError
from trainer import distributed, hardware


def arguments(parser):
    parser.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}, by comma")
    parser.add_argument("--against", metavar="PATH", help="a nanoGPT checkout: time its step and ours in turns")
    parser.add_argument("--whole", action="store_true", help="with --against: its train.py and ours, whole processes in turn")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as train.py picks it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cuda: compiled, as train.py does")
    parser.add_argument("--others", action="store_true", help="also torch.func, Opacus and BackPACK")
    parser.add_argument("--only", help="variants to compare with off, by comma: norm,norm + adam,exact; default: all")
    parser.add_argument("--ranks", type=int, default=1, help="processes, with DDP over gloo")
    parser.add_argument("--processes", type=int, default=1, help="so many, one after the other, each with all rounds")
    parser.add_argument("--seconds", type=float, default=30.0, help="per model, at least")
    parser.add_argument("--rounds", type=int, default=7, help="at least so many per model")
    parser.add_argument("--out", help="default: results/step.json, step_against.json or step_whole.json")


class PlainGPT(torch.nn.Module):
    """The same GPT of plain torch modules alone, which is what per-sample gradient packages know. Positions are looked up
    with a batch dimension, and the head is not tied: the packages support neither."""

    def __init__(self, n_layer, n_head, n_embd, block_size, vocab_size):
        super().__init__()
        self.n_head, nn = n_head, torch.nn
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "ln_1": nn.LayerNorm(n_embd), "c_attn": nn.Linear(n_embd, 3 * n_embd), "proj": nn.Linear(n_embd, n_embd),
            "ln_2": nn.LayerNorm(n_embd), "c_fc": nn.Linear(n_embd, 4 * n_embd), "out": nn.Linear(4 * n_embd, n_embd)})
            for _ in range(n_layer))
        self.ln_f, self.head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        B, T = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(T, device=idx.device).expand(B, T))
        for m in self.blocks:
            qkv = m["c_attn"](m["ln_1"](x)).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
            x = x + m["proj"](y.transpose(1, 2).reshape(B, T, -1))
            x = x + m["out"](F.gelu(m["c_fc"](m["ln_2"](x))))
        return self.head(self.ln_f(x))


def sample_norms(per_sample):
    """(B,) squared norms over all parameters, from per-sample gradients (B, ...) each."""
    return sum(g.flatten(1).square().sum(1) for g in per_sample)


def finish_with_per_sample(optimizer, parameters, per_sample):
    """What the noise scale needs beside the norms: the mean gradient; then the same clipping and update as ours."""
    norms = sample_norms(per_sample)
    for p, g in zip(parameters, per_sample):
        p.grad = g.mean(0)
    tools.clip_and_step(optimizer, parameters)
    return norms


def plain_step(shape, micro, package):
    """The step of PlainGPT: alone, or with every per-sample gradient from one of the packages."""
    torch.manual_seed(0)
    model = PlainGPT(**shape)
    x, y = batch_of(shape, micro)
    if package == "opacus":
        from opacus import GradSampleModule
        model = GradSampleModule(model, loss_reduction="mean")
    parameters = list(model.parameters())
    optimizer = tools.adamw(parameters)

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def one_example(values, idx, target):
        return loss_of(torch.func.functional_call(model, values, (idx[None],)), target[None])

    def run():
        start = time.perf_counter()
        if package == "torch.func":
            values = {n: p.detach() for n, p in model.named_parameters()}
            per_sample = torch.func.vmap(torch.func.grad(one_example), in_dims=(None, 0, 0))(values, x, y)
            finish_with_per_sample(optimizer, parameters, list(per_sample.values()))
        else:
            loss_of(model(x), y).backward()
            if package == "opacus":
                per_sample = [p.grad_sample for p in parameters]
                finish_with_per_sample(optimizer, parameters, per_sample)
                for p in parameters:
                    p.grad_sample = None
            else:
                tools.clip_and_step(optimizer, parameters)
        return {"step": time.perf_counter() - start}
    return run


def backpack_reason():
    """BackPACK extends modules it knows; whether it takes this model is found by trying a tiny one."""
    import backpack
    from backpack.extensions import BatchL2Grad
    model, loss = PlainGPT(1, 1, 8, 4, 5), torch.nn.CrossEntropyLoss()
    try:
        model, loss = backpack.extend(model, use_converter=False), backpack.extend(loss)
        x, y = batch_of({"vocab_size": 5, "block_size": 4}, 2)
        with backpack.backpack(BatchL2Grad()):
            loss(model(x).flatten(0, 1), y.flatten()).backward()
        missing = [n for n, p in model.named_parameters() if not hasattr(p, "batch_l2")]
        return f"no per-sample norms for {len(missing)} parameters" if missing else None
    except Exception as e:
        return f"{type(e).__name__}: {str(e).splitlines()[0][:120]}"


def variants_of(name, others, ranks, dtype, only=None, device="cpu"):
    shape, micro = MODELS[name]
    settings = {"off, torch's norm": dict(mode="off", norm_impl="torch"), "off": dict(mode="off"), "norm": dict(mode="norm"),
                "norm + adam": dict(mode="norm", adam=True), "exact": dict(mode="exact"),
                "exact + adam": dict(mode="exact", adam=True),
                "norm + torch's attention": dict(mode="norm", attention_impl="torch")}
    if only:
        wanted = only.split(",")
        unknown = [name for name in wanted if name not in settings]
        if unknown:
            raise ConfigError(f"--only={only}: unknown variant '{unknown[0]}', expected some of "
                              f"{', '.join(list(settings)[1:])}")
        settings = {name: options for name, options in settings.items() if name == "off, torch's norm" or name in wanted}
    variants, first = {}, None
    for variant, options in settings.items():
        variants[variant] = tools.Step(shape, micro, dtype=dtype, ranks=ranks, like=first, device=device, **options)
        first = first or variants[variant]
    if others:
        variants["plain modules, off"] = plain_step(shape, micro, None)
        for package in ("torch.func", "opacus"):
            variants[f"plain modules, {package}"] = plain_step(shape, micro, package)
        print(f"BackPACK: {backpack_reason() or 'supports the model'}")
    return variants


def run(args):
    """Our step in its variants; with --against PATH our step beside nanoGPT's."""
    if args.whole and not args.against:
        raise ConfigError("--whole: give a nanoGPT checkout with --against=PATH")
    usual, name = (("char", "step_whole") if args.whole else ("char,gpt_111m", "step_against") if args.against else
                   ("quickstart,char,gpt_111m", "step"))
    args.models, args.out = args.models or usual, args.out or f"results/{name}.json"
    unknown = [name for name in args.models.split(",") if name not in MODELS]
    if unknown:
        raise ConfigError(f"--models={args.models}: unknown model '{unknown[0]}', expected some of {', '.join(MODELS)}")
    if args.against:
        return whole.run(args) if args.whole else against.run(args)
    if args.processes > 1:
        return in_processes(args)
    if args.ranks > 1 and "RANK" not in os.environ:  # start over, as so many processes
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        return subprocess.run([*launch, BENCH, *sys.argv[1:]]).returncode
    device = "cpu" if args.others else tools.pick_device(args.device)
    ranks = distributed.start(Config(batch_schedule="constant", batch_size=8 * args.ranks), device)
    hardware.prepare_cpu()
    report, dtype = {}, hardware.pick_dtype(args.dtype, device)
    if args.others and dtype != torch.float32:
        raise ConfigError(f"--others: the other packages run in float32, ours would in {plain(dtype)}: add --dtype=float32")
    for name in args.models.split(","):
        variants = variants_of(name, args.others, ranks, dtype, args.only, device)
        samples = interleave(variants, 0 if args.ranks > 1 else args.seconds, min_rounds=args.rounds)  # ranks need equal rounds
        report[name] = {variant: {**spread(phases["step"]), **paired(phases["step"], samples["off, torch's norm"]["step"]),
                                  "peak_bytes": peak_bytes(variants[variant], device=device)}
                        for variant, phases in samples.items()}
        if ranks.first:
            print(table(name, report[name], args.ranks, plain(dtype)), flush=True)
    if ranks.first:
        write_json(args.out, {"threads": torch.get_num_threads(), "ranks": args.ranks, "dtype": plain(dtype), "models": report},
                   device)
    ranks.stop()


def in_processes(args):
    """The same in several processes, one after the other: their medians differ by up to a per cent, more than the rounds of one
    would have it (where memory lies, probably)."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.processes):
            own = ["--processes=1", f"--out={folder}/{i}.json"]   # the last word counts
            code = subprocess.run([sys.executable, BENCH, *sys.argv[1:], *own]).returncode
            if code:
                return code
            with open(f"{folder}/{i}.json") as f:
                reports.append(json.load(f))
    over = {name: {variant: [r["models"][name][variant]["ratio"] for r in reports] for variant in rows}
            for name, rows in reports[0]["models"].items()}
    for name, rows in over.items():
        for variant, ratios in rows.items():
            print(f"{name}, {variant}: median {statistics.median(ratios):.3f} of {args.processes} processes' medians, "
                  f"{min(ratios):.3f} to {max(ratios):.3f}")
    write_json(args.out, {"ratios": over, "processes": reports})


def table(name, rows, ranks, dtype):
    any_row = next(iter(rows.values()))
    lines = [f"{name}, {dtype}: {ranks} process{'es' if ranks > 1 else ''} of {torch.get_num_threads()} threads, load "
             f"{os.getloadavg()[0]:.1f}, {any_row['n']} rounds; time over that of the same round's step with tracking off and "
             "torch's own LayerNorm: median (quartiles); bytes held at the peak"]
    for variant, r in rows.items():
        ratio = f"{r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f})"
        lines.append(f"  {variant:26} {r['median_ms']:9.1f} ms   {ratio}   "
                     f"{r['peak_bytes'] / 2**20:8.1f} MiB   {r['peak_bytes'] / any_row['peak_bytes']:.3f}")
    return "\n".join(lines)
