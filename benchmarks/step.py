"""
bench.py step: forward, backward, measurement, clipping and AdamW, on random tokens.

    python bench.py step            # tracking off, norm, exact, and off with torch's own LayerNorm
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

import torch

from benchmarks import against, tools, whole
from benchmarks.tools import BENCH, MODELS, interleave, paired, peak_bytes, plain, spread, told, write_json
from configurator import Config, ConfigError
from trainer import distributed, hardware


def arguments(parser):
    parser.add_argument("--models", default="", help=f"some of {', '.join(MODELS)}, by comma")
    parser.add_argument("--against", metavar="PATH", help="a nanoGPT checkout: time its step and ours in turns")
    parser.add_argument("--whole", action="store_true", help="with --against: its train.py and ours, whole processes in turn")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as train.py picks it")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="cuda: compiled, as train.py does")
    parser.add_argument("--only", help="variants to compare with off, by comma: norm,norm + adam,exact; default: all")
    parser.add_argument("--ranks", type=int, default=1, help="processes, with DDP over gloo")
    parser.add_argument("--processes", type=int, default=1, help="so many, one after the other, each with all rounds")
    parser.add_argument("--seconds", type=float, default=30.0, help="per model, at least")
    parser.add_argument("--rounds", type=int, default=7, help="at least so many per model")
    parser.add_argument("--out", help="default: results/step.json, step_against.json or step_whole.json")


SETTINGS = {"off, torch's norm": dict(mode="off", norm_impl="torch"), "off": dict(mode="off"), "norm": dict(mode="norm"),
            "norm + adam": dict(mode="norm", adam=True), "exact": dict(mode="exact"),
            "exact + adam": dict(mode="exact", adam=True),
            "norm + torch's attention": dict(mode="norm", attention_impl="torch")}


def variants_of(name, ranks, dtype, only=None, device="cpu"):
    """{variant: our step in it}, all on one model."""
    (base, *others), variants = SETTINGS, {}
    for variant in [base, *tools.chosen("only", only, others, "variant")]:
        shape, micro = MODELS[name]
        variants[variant] = tools.Step(shape, micro, dtype=dtype, ranks=ranks, like=variants.get(base), device=device,
                                       **SETTINGS[variant])
    return variants


def run(args):
    """Our step in its variants; with --against PATH our step beside nanoGPT's."""
    if args.whole and not args.against:
        raise ConfigError("--whole: give a nanoGPT checkout with --against=PATH")
    usual, name = (("char", "step_whole") if args.whole else ("char,gpt_111m", "step_against") if args.against else
                   ("quickstart,char,gpt_111m", "step"))
    args.models, args.out = args.models or usual, args.out or f"results/{name}.json"
    tools.chosen("models", args.models, MODELS, "model")
    if args.against:
        return whole.run(args) if args.whole else against.run(args)
    if args.processes > 1:
        return in_processes(args)
    if args.ranks > 1 and "RANK" not in os.environ:  # start over, as so many processes
        return subprocess.run([*tools.torchrun(args.ranks), BENCH, *sys.argv[1:]]).returncode
    device = tools.pick_device(args.device)
    ranks = distributed.start(Config(batch_schedule="constant", batch_size=8 * args.ranks), device)
    hardware.prepare_cpu()
    report, dtype = {}, hardware.pick_dtype(args.dtype, device)
    for name in args.models.split(","):
        variants = variants_of(name, ranks, dtype, args.only, device)
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
        lines.append(f"  {variant:26} {r['median_ms']:9.1f} ms   {told(r)}   "
                     f"{r['peak_bytes'] / 2**20:8.1f} MiB   {r['peak_bytes'] / any_row['peak_bytes']:.3f}")
    return "\n".join(lines)
