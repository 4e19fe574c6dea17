"""Benchmarks, always side by side with what they are compared with, in one run.

    python bench.py kernel          norm kernels against torch's own, ref, and a copy of the same bytes (4 minutes)
    python bench.py kernel --threads=1 --seconds=2 --out=/tmp/kernel.json
    python bench.py triton          compile the CUDA kernels, no GPU needed: registers, spills, global traffic
    python bench.py step            whole training steps: tracking off, norm, exact, and off with torch's own LayerNorm
    python bench.py step --models=char --dtype=float32 --others      and per-sample gradients by torch.func, Opacus and
                                                     BackPACK (pip install -r requirements-bench.txt)
    python bench.py step --ranks=2  the same under DDP
    python bench.py step --against=../nanoGPT      our step beside that of a nanoGPT checkout: tokens/s, ratio, losses
    python bench.py profile --models=char,config/wikitext2.py      where a step's time goes, part by part
    python bench.py data --text=book.txt           tokenisation beside tiktoken's own, and its memory
    python bench.py startup         from the command `python train.py` to its first lines

Variants take turns within each round, so that whatever else the machine does falls on all of them; medians and
quartiles over rounds. The tables go to the screen, every number to results/<command>.json.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

import ln_kernel
from benchmarks.tools import (
    MODELS,
    Step,
    adamw,
    batch_of,
    clip_and_step,
    geomean,
    interleave,
    paired,
    plain,
    spread,
    write_json,
)
from configurator import Config, die
from rightbatch.kernels.backends import BACKENDS
from trainer import distributed, hardware

# ---- kernel: B examples of T rows of C channels; per C a tensor that fits the caches and one that does not

SHAPES = [(16, 128, 256), (32, 256, 256), (4, 256, 768), (8, 1024, 768),
          (4, 128, 2048), (4, 1024, 2048), (2, 128, 4096), (4, 512, 4096)]
PHASES = ("forward", "backward", "both")
CACHES, BYTES = 32 << 20, {"float32": 4, "bfloat16": 2}   # the last-level cache of the machine that results/ are from


def now(device):
    hardware.synchronize(device)
    return time.perf_counter()


def norm_variant(norm, inputs, dy, every=1):
    """Times norm() and its backward apart. every: take part in one of so many rounds (for slow ones)."""
    calls, device = 0, dy.device.type

    def run():
        nonlocal calls
        calls += 1
        if calls > 2 and calls % every:
            return None
        start = now(device)
        y = norm()
        middle = now(device)
        torch.autograd.grad(y, inputs, dy)
        end = now(device)
        return {"forward": middle - start, "backward": end - middle, "both": end - start}
    return run


def operator_variant(x, w, b, dy, impl):
    """The kernels without autograd, as a copy is without: two operator calls."""
    forward, backward = BACKENDS[impl].forward, BACKENDS[impl].backward
    x, w, b, device = x.detach(), w.detach(), b.detach(), dy.device.type

    def run():
        start = now(device)
        y, stats = forward(x, w, b, 1e-5, False, x.dtype)
        middle = now(device)
        backward(dy, x, w, stats, None, False, True, True)
        end = now(device)
        del y
        return {"forward": middle - start, "backward": end - middle, "both": end - start}
    return run


def copy_variant(x_and_dy):
    """The memory floor: as many bytes as the forward (x in, y out) and the backward (x and dy in, dx out) must move,
    half read, half written, from the same inputs to a new output."""
    both, device = x_and_dy.flatten(), x_and_dy.device.type
    x, one_and_a_half = both[:len(both) // 2], both[:3 * len(both) // 4]

    def run():
        start = now(device)
        y = x.clone()
        middle = now(device)
        one_and_a_half.clone()
        end = now(device)
        del y
        return {"forward": middle - start, "backward": end - middle, "both": end - start}
    return run


def kernel_inputs(B, T, C, dtype, device="cpu"):
    x_and_dy, (w, b) = torch.randn(2, B, T, C, device=device).to(dtype), torch.randn(2, C, device=device)
    x, dy = x_and_dy
    return x_and_dy, x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), dy


def kernel_variants(B, T, C, dtype, device="cpu"):
    x_and_dy, x, w, b, dy = kernel_inputs(B, T, C, dtype, device)
    w_same = w.detach().to(dtype).requires_grad_()   # F.rms_norm has no fused path for mixed dtypes: let it have its best
    probe, probe_rms = (torch.zeros(rows, B, device=device, requires_grad=True) for rows in (2, 1))
    layer_norm, rms_norm = ln_kernel.layer_norm, ln_kernel.rms_norm
    return {
        "torch": norm_variant(lambda: F.layer_norm(x, (C,), w, b), (x, w, b), dy),
        "ours": norm_variant(lambda: layer_norm(x, w, b, probe), (x, w, b, probe), dy),
        "ours, no probe": norm_variant(lambda: layer_norm(x, w, b), (x, w, b), dy),
        "ours alone": operator_variant(x, w, b, dy, ln_kernel.choose_impl(device)[0]),
        "copy": copy_variant(x_and_dy),
        "torch rms": norm_variant(lambda: F.rms_norm(x, (C,), w_same, 1e-5), (x, w_same), dy),
        "ours rms": norm_variant(lambda: rms_norm(x, w, probe_rms), (x, w, probe_rms), dy),
        "ref": norm_variant(lambda: layer_norm(x, w, b, probe, impl="ref"), (x, w, b, probe), dy, every=4),
    }


def backward_from_memory(B, T, C, dtype, device="cpu"):
    """The memory floor and what is held against it, with tensors that are in no cache: each call gets the next of so many
    inputs that the caches forget them, and its output is held until these come again. The code stays warm: emptying the
    caches before each call would time the interpreter."""
    backend = BACKENDS[ln_kernel.choose_impl(device)[0]]
    n = max(2, 4 * CACHES // (2 * B * T * C * BYTES[plain(dtype)]))

    def copy():
        x_and_dy = kernel_inputs(B, T, C, dtype, device)[0].flatten()
        return x_and_dy[:3 * len(x_and_dy) // 4].clone

    def alone():
        _, x, w, b, dy = (t.detach() for t in kernel_inputs(B, T, C, dtype, device))
        stats = backend.forward(x, w, b, 1e-5, False, dtype)[1]
        return functools.partial(backend.backward, dy, x, w, stats, None, False, True, True)

    def through_autograd():
        _, x, w, b, dy = kernel_inputs(B, T, C, dtype, device)
        probe = torch.zeros(2, B, device=device, requires_grad=True)
        y = ln_kernel.layer_norm(x, w, b, probe)
        return functools.partial(torch.autograd.grad, y, (x, w, b, probe), dy, retain_graph=True)

    makers = {"ours alone": alone, "ours": through_autograd, "copy": copy}
    return {name: in_turn([make() for _ in range(n)], device) for name, make in makers.items()}   # to each its own inputs


def in_turn(calls, device):
    """Times one call after the other, and holds what each returned until it is its turn again."""
    held, turns = [call() for call in calls], itertools.cycle(range(len(calls)))

    def run():
        i = next(turns)
        start = now(device)
        out = calls[i]()
        end = now(device)
        held[i] = out
        return {"backward": end - start}
    return run


RATIOS = [("ours", "torch"), ("ours, no probe", "torch"), ("ours rms", "torch rms"), ("ours", "copy"),
          ("ours alone", "copy"), ("ref", "torch")]


def kernel(args):
    if args.threads:
        torch.set_num_threads(args.threads)
    hardware.prepare_cpu()   # as train.py does
    impl, reason = ln_kernel.choose_impl("cpu")
    print(f"{hardware.cpu_name()}, {torch.get_num_threads()} threads; ours = {impl} ({reason})")
    if os.getloadavg()[0] > 0.5:
        print(f"This machine is busy (load {os.getloadavg()[0]:.1f}): threads wait for each other, and ratios blur.")
    print("Time ratios, forward / backward / both:")
    print(f"{'dtype':9}{'B, T, C':>16} {'torch ms':>9}  " + "".join(f"{a + ' / ' + b:>24}" for a, b in RATIOS))
    shapes = []
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, C in SHAPES:
            variants = kernel_variants(B, T, C, dtype)
            samples = interleave(variants, args.seconds)
            times = {name: {p: spread(phases[p]) for p in PHASES} for name, phases in samples.items()}
            ratios = {f"{a} / {b}": {p: times[a][p]["median_ms"] / times[b][p]["median_ms"] for p in PHASES}
                      for a, b in RATIOS}
            if C >= 2048:
                cold = interleave(backward_from_memory(B, T, C, dtype), args.seconds / 3)
                cold = {n: spread(phases["backward"]) for n, phases in cold.items()}
                times |= {f"{n}, from memory": {"backward": spreads} for n, spreads in cold.items()}
                ratios |= {f"{n} / copy, from memory": {"backward": cold[n]["median_ms"] / cold["copy"]["median_ms"]}
                           for n in ("ours alone", "ours")}
            name = str(dtype).removeprefix("torch.")
            shapes.append({"dtype": name, "B": B, "T": T, "C": C, "ratios": ratios, "times": times})
            cells = ["/".join(f"{ratios[f'{a} / {b}'][p]:.2f}" for p in PHASES) for a, b in RATIOS]
            print(f"{name:9}{f'{B}, {T}, {C}':>16} {times['torch']['both']['median_ms']:9.3f}  "
                  + "".join(f"{cell:>24}" for cell in cells), flush=True)
    summary = summarise(shapes)
    print(*summary, sep="\n")
    write_json(args.out, {"impl": impl, "threads": torch.get_num_threads(), "summary": summary, "shapes": shapes})


def summarise(shapes):
    lines = []
    for dtype in ("float32", "bfloat16"):
        for a, b in RATIOS[:3]:
            both = [s["ratios"][f"{a} / {b}"]["both"] for s in shapes if s["dtype"] == dtype]
            lines.append(f"{dtype}: {a} / {b}, forward + backward: geometric mean {geomean(both):.2f}, "
                         f"worst {max(both):.2f}")
        long = [s for s in shapes if s["dtype"] == dtype and s["C"] >= 2048]
        small, large = ([s for s in long if (3 * s["B"] * s["T"] * s["C"] * BYTES[dtype] <= CACHES) == fits]
                        for fits in (True, False))
        for how, rows, end in (("from memory to memory", long, ", from memory"),
                               ("the same tensors again, too large for the caches", large, ""),
                               ("the same tensors again, in the caches if nobody else needs them", small, "")):
            alone, through = (max(s["ratios"][f"{ours} / copy{end}"]["backward"] for s in rows)
                              for ours in ("ours alone", "ours"))
            lines.append(f"{dtype}: backward / copy of the same bytes at C >= 2048, {how}: worst {alone:.2f} for the "
                         f"operator alone, as the copy is one, {through:.2f} through autograd")
    return lines


# ---- triton: compile for GPUs that are not here

def compile_triton(kernel_fn, types, constants, arch, num_warps):
    """The compiled kernel, as a launch would get it for pointers and C divisible by 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    names = kernel_fn.arg_names
    aligned = [i for i, n in enumerate(names) if n not in constants and (types[n].startswith("*") or n == "C")]
    source = triton.compiler.ASTSource(
        fn=kernel_fn,
        signature={n: "constexpr" if n in constants else types[n] for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32),
                          options={"num_warps": num_warps, "enable_fp_fusion": True})


def resources(compiled):
    """Registers per thread, and bytes of stack plus local memory, where spills go."""
    import triton
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", f.name]
        text = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def bytes_per_channel(compiled, block, num_warps):
    """Global bytes that one turn of the row loop (or a kernel without loop) moves, per channel: from the PTX."""
    ptx = compiled.asm["ptx"]
    loop = re.search(r"^(\$L__BB\w+):.*This Inner Loop Header.*?bra\s+\1;", ptx, re.S | re.M)
    total = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfu](\d+)\s", loop.group() if loop else ptx):
        wide = int(vector or 1) * int(bits) // 8
        total += wide * 32 * num_warps if wide > 4 else 0   # the scalars of a row (mean, rstd) are the same address
    return total / block


def inspect_triton(name, dtype, arch, C):
    from rightbatch.kernels import ln_triton
    fn, launch = getattr(ln_triton, f"{name}_kernel"), ln_triton.launch(C)
    types = {n: "i32" for n in fn.arg_names} | {n: f"*{dtype}" for n in ("x", "y", "dy", "dx")}
    types |= {n: "*fp32" for n in ("w", "b", "stats", "partials")} | {"eps": "fp32"}
    constants = {"RMS": False, "BIAS": True, "BLOCK": launch["BLOCK"]}
    compiled = compile_triton(fn, types, constants, arch, launch["num_warps"])
    registers, spilled = resources(compiled)
    traffic = bytes_per_channel(compiled, launch["BLOCK"], launch["num_warps"])
    return {"kernel": name, "dtype": dtype, "C": C, "sm": arch, "num_warps": launch["num_warps"],
            "registers": registers, "spill_bytes": spilled, "bytes_per_channel_and_row": traffic}


def triton_command(args):
    rows = []
    print("Traffic of the forward includes weight and bias: 8 bytes that stay in L2 from row to row.")
    print("{:10}{:6}{:>6}{:>4}{:>6}{:>10}{:>12}{:>18}".format(
        "kernel", "dtype", "C", "sm", "warps", "registers", "spill bytes", "bytes/channel/row"))
    for name, dtype, arch, C in itertools.product(("forward", "backward"), ("bf16", "fp32"), (80, 90),
                                                  (768, 2048, 4096, 8192)):
        rows.append(inspect_triton(name, dtype, arch, C))
        print("{:10}{:6}{:6}{:4}{:6}{:10}{:12}{:18.1f}".format(*rows[-1].values()), flush=True)
    write_json(args.out, {"kernels": rows})


# ---- step: forward, backward, measurement, clipping and AdamW, on random tokens

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
    clip_and_step(optimizer, parameters)
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
    optimizer = adamw(parameters)

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
                clip_and_step(optimizer, parameters)
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


def peak_bytes(run, warm_up=True):
    """Largest number of bytes that torch's CPU allocator held during one step, above what it held before: exact, unlike RSS."""
    from torch.profiler import ProfilerActivity, profile
    if warm_up:
        run()
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        held += e.nbytes()
        peak = max(peak, held)
    return peak


@contextlib.contextmanager
def silent_stderr():
    """The profiler's C++ side chats on file descriptor 2."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def step_variants(name, others, ranks, dtype, only=None):
    shape, micro = MODELS[name]
    settings = {"off, torch's norm": dict(mode="off", norm_impl="torch"), "off": dict(mode="off"), "norm": dict(mode="norm"),
                "norm + adam": dict(mode="norm", adam=True), "exact": dict(mode="exact"),
                "exact + adam": dict(mode="exact", adam=True)}
    if only:
        unknown = [variant for variant in only.split(",") if variant not in settings]
        if unknown:
            die(f"--only={only}: unknown variant '{unknown[0]}', expected some of {', '.join(list(settings)[1:])}")
        settings = {variant: options for variant, options in settings.items()
                    if variant == "off, torch's norm" or variant in only.split(",")}
    variants, first = {}, None
    for variant, options in settings.items():
        variants[variant] = Step(shape, micro, dtype=dtype, ranks=ranks, like=first, **options)
        first = first or variants[variant]
    if others:
        variants["plain modules, off"] = plain_step(shape, micro, None)
        for package in ("torch.func", "opacus"):
            variants[f"plain modules, {package}"] = plain_step(shape, micro, package)
        reason = backpack_reason()
        print(f"BackPACK: {reason or 'supports the model'}")
    return variants


def step(args):
    """Our step in its variants; with --against PATH our step beside nanoGPT's."""
    args.models = args.models or ("char,gpt_111m" if args.against else "quickstart,char,gpt_111m")
    args.out = args.out or f"results/step{'_against' if args.against else ''}.json"
    unknown = [name for name in args.models.split(",") if name not in MODELS]
    if unknown:
        die(f"--models={args.models}: unknown model '{unknown[0]}', expected some of {', '.join(MODELS)}")
    if args.against:
        from benchmarks import against as bench_against
        return bench_against.against(args)
    if args.processes > 1:
        return step_in_processes(args)
    if args.ranks > 1 and "RANK" not in os.environ:  # start over, as so many processes
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        return subprocess.run([*launch, os.path.abspath(__file__), *sys.argv[1:]]).returncode
    ranks = distributed.start(Config(batch_schedule="constant", batch_size=8 * args.ranks), "cpu")
    hardware.prepare_cpu()
    report, dtype = {}, hardware.pick_dtype(args.dtype, "cpu")
    if args.others and dtype != torch.float32:
        die(f"--others: the other packages run in float32, ours would in {plain(dtype)}: add --dtype=float32")
    for name in args.models.split(","):
        variants = step_variants(name, args.others, ranks, dtype, args.only)
        samples = interleave(variants, 0 if args.ranks > 1 else args.seconds, min_rounds=args.rounds)  # ranks need equal rounds
        report[name] = {variant: {**spread(phases["step"]), **paired(phases["step"], samples["off, torch's norm"]["step"]),
                                  "peak_bytes": peak_bytes(variants[variant])} for variant, phases in samples.items()}
        if ranks.first:
            print(step_table(name, report[name], args.ranks, plain(dtype)), flush=True)
    if ranks.first:
        write_json(args.out, {"threads": torch.get_num_threads(), "ranks": args.ranks, "dtype": plain(dtype), "models": report})
    ranks.stop()


def step_in_processes(args):
    """The same in several processes, one after the other: their medians differ by up to a per cent, more than the rounds of one
    would have it (where memory lies, probably)."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.processes):
            own = ["--processes=1", f"--out={folder}/{i}.json"]   # the last word counts
            code = subprocess.run([sys.executable, os.path.abspath(__file__), *sys.argv[1:], *own]).returncode
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


def step_table(name, rows, ranks, dtype):
    any_row = next(iter(rows.values()))
    lines = [f"{name}, {dtype}: {ranks} process{'es' if ranks > 1 else ''} of {torch.get_num_threads()} threads, load "
             f"{os.getloadavg()[0]:.1f}, {any_row['n']} rounds; time over that of the same round's step with tracking off and "
             "torch's own LayerNorm: median (quartiles); bytes held at the peak"]
    for variant, r in rows.items():
        ratio = f"{r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f})"
        lines.append(f"  {variant:26} {r['median_ms']:9.1f} ms   {ratio}   "
                     f"{r['peak_bytes'] / 2**20:8.1f} MiB   {r['peak_bytes'] / any_row['peak_bytes']:.3f}")
    return "\n".join(lines)


def profile(args):
    from benchmarks import profile as bench_profile
    return bench_profile.profile(args)


def data(args):
    from benchmarks import data as bench_data
    return bench_data.data(args)


# ---- startup: from the command to the first lines that a user sees

def first_lines(arguments):
    """Seconds from the start of `python train.py` to its first line, its first evaluation and its first logged step."""
    marks = {"first line": "", "evaluation": "validation loss", "first logged step": " tok/s"}
    with tempfile.TemporaryDirectory() as folder:
        start, found = time.perf_counter(), {}
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
        run = subprocess.Popen([sys.executable, script, *arguments, f"--out_dir={folder}/run"], text=True,
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            for line in run.stdout:
                seconds = time.perf_counter() - start
                found = {name: seconds for name, words in marks.items() if words in line} | found
                if len(found) == len(marks):
                    return {name: found[name] for name in marks}
        finally:
            run.kill()
            run.communicate()
    die(f"train.py ended with exit code {run.returncode} before its first logged step")


def startup(args):
    first_lines(args.arguments)  # compiles the norm kernel and prepares the data, if they are not there
    starts = [first_lines(args.arguments) for _ in range(args.starts)]
    report = {name: spread([start[name] for start in starts]) for name in starts[0]}
    print(f"python train.py {' '.join(args.arguments)}: seconds from the command, {args.starts} starts: median (quartiles)")
    for name, r in report.items():
        print(f"  {name:20}{r['median_ms'] / 1e3:6.2f} ({r['q1_ms'] / 1e3:.2f} to {r['q3_ms'] / 1e3:.2f})")
    write_json(args.out, {"starts": report})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    p = commands.add_parser("kernel", help="norm kernels on this CPU")
    p.add_argument("--threads", type=int, default=0, help="default: torch's")
    p.add_argument("--seconds", type=float, default=9.0, help="per shape and dtype")
    p.add_argument("--out", default="results/kernel.json")
    p.set_defaults(run=kernel)
    p = commands.add_parser("triton", help="compile the CUDA kernels and report")
    p.add_argument("--out", default="results/triton.json")
    p.set_defaults(run=triton_command)
    p = commands.add_parser("step", help="whole training steps on this CPU")
    p.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}, by comma")
    p.add_argument("--against", metavar="PATH", help="a nanoGPT checkout: time its step and ours in turns")
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as train.py picks it")
    p.add_argument("--others", action="store_true", help="also torch.func, Opacus and BackPACK")
    p.add_argument("--only", help="variants to compare with off, by comma: norm,norm + adam,exact; default: all")
    p.add_argument("--ranks", type=int, default=1, help="processes, with DDP over gloo")
    p.add_argument("--processes", type=int, default=1, help="so many, one after the other, each with all rounds")
    p.add_argument("--seconds", type=float, default=30.0, help="per model, at least")
    p.add_argument("--rounds", type=int, default=7, help="at least so many per model")
    p.add_argument("--out", help="default: results/step.json, or results/step_against.json")
    p.set_defaults(run=step)
    p = commands.add_parser("profile", help="a step by its parts, on this CPU")
    p.add_argument("--models", default="char", help=f"some of {', '.join(MODELS)}, or config files, by comma")
    p.add_argument("--gns", default="norm", choices=("off", "norm", "exact"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as train.py picks it")
    p.add_argument("--micro", type=int, default=0, help="micro-batch; default: the model's own")
    p.add_argument("--seconds", type=float, default=20.0, help="per model, at least")
    p.add_argument("--rounds", type=int, default=7, help="at least so many per model")
    p.add_argument("--out", default="results/profile.json")
    p.set_defaults(run=profile)
    p = commands.add_parser("data", help="tokenisation: rate beside tiktoken's own, and memory")
    p.add_argument("--text", required=True, help="a UTF-8 text, which is repeated")
    p.add_argument("--megabytes", type=float, default=10.0, help="of text for the rates; memory also with ten times that")
    p.add_argument("--seconds", type=float, default=20.0, help="at least")
    p.add_argument("--rounds", type=int, default=5, help="at least so many")
    p.add_argument("--out", default="results/data.json")
    p.set_defaults(run=data)
    p = commands.add_parser("startup", help="time to the first lines of train.py")
    p.add_argument("--starts", type=int, default=5)
    p.add_argument("--out", default="results/startup.json")
    p.add_argument("arguments", nargs="*", help="for train.py, after --")
    p.set_defaults(run=startup)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
