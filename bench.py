"""Benchmarks, always side by side with what they are compared with, in one run.

    python bench.py kernel          norm kernels against torch's own, ref, and a copy of the same bytes (3 minutes)
    python bench.py kernel --threads=1 --seconds=2 --out=/tmp/kernel.json
    python bench.py triton          compile the CUDA kernels, no GPU needed: registers, spills, global traffic

Variants take turns within each round, so that whatever else the machine does falls on all of them; medians and
quartiles over rounds. The tables go to the screen, every number to results/<command>.json.
"""

import argparse
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F

import hardware
import ln_kernel

# ---- shared: timing and reporting

def interleave(variants, seconds, min_rounds=5):
    """Run every variant once a round, in a new order each round, since each leaves its mark on the caches. A variant is
    called and returns {phase: seconds}, or None to sit a round out. Returns {name: {phase: [seconds]}}."""
    for run in variants.values():
        run(), run()                      # warm-up: first touch of memory, threads, caches
    samples = {name: defaultdict(list) for name in variants}
    end, rounds, order = time.perf_counter() + seconds, 0, list(variants.items())
    while time.perf_counter() < end or rounds < min_rounds:
        rounds += 1
        random.Random(rounds).shuffle(order)
        for name, run in order:
            for phase, t in (run() or {}).items():
                samples[name][phase].append(t)
    return samples


def spread(samples):
    """Median and quartiles in ms, and how many samples they stand on."""
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return {"median_ms": median * 1e3, "q1_ms": q1 * 1e3, "q3_ms": q3 * 1e3, "n": len(samples)}


def geomean(values):
    return math.exp(statistics.fmean(math.log(v) for v in values))


def write_json(path, report):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {**hardware.facts("cpu"), "load_average": os.getloadavg()[0]}
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine, **report}
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {path}")


# ---- kernel: B examples of T rows of C channels; per C a tensor that fits the caches and one that does not

SHAPES = [(16, 128, 256), (32, 256, 256), (4, 256, 768), (8, 1024, 768),
          (4, 128, 2048), (4, 1024, 2048), (2, 128, 4096), (4, 512, 4096)]
PHASES = ("forward", "backward", "both")


def norm_variant(norm, inputs, dy, every=1):
    """Times norm() and its backward apart. every: take part in one of so many rounds (for slow ones)."""
    calls = 0

    def run():
        nonlocal calls
        calls += 1
        if calls > 2 and calls % every:
            return None
        start = time.perf_counter()
        y = norm()
        middle = time.perf_counter()
        torch.autograd.grad(y, inputs, dy)
        end = time.perf_counter()
        return {"forward": middle - start, "backward": end - middle, "both": end - start}
    return run


def copy_variant(x_and_dy):
    """The memory floor: as many bytes as the forward (x in, y out) and the backward (x and dy in, dx out) must move,
    half read, half written, from the same inputs to a new output."""
    both = x_and_dy.flatten()
    x, one_and_a_half = both[:len(both) // 2], both[:3 * len(both) // 4]

    def run():
        start = time.perf_counter()
        y = x.clone()
        middle = time.perf_counter()
        one_and_a_half.clone()
        end = time.perf_counter()
        del y
        return {"forward": middle - start, "backward": end - middle, "both": end - start}
    return run


def kernel_variants(B, T, C, dtype):
    x_and_dy = torch.randn(2, B, T, C).to(dtype)
    x, dy = x_and_dy
    w, b = torch.randn(2, C)
    w_same = w.to(dtype).requires_grad_()   # F.rms_norm has no fused path for mixed dtypes: let it have its best
    for t in (x, w, b):
        t.requires_grad_()
    probe, probe_rms = torch.zeros(2, B, requires_grad=True), torch.zeros(1, B, requires_grad=True)
    layer_norm, rms_norm = ln_kernel.layer_norm, ln_kernel.rms_norm
    return {
        "torch": norm_variant(lambda: F.layer_norm(x, (C,), w, b), (x, w, b), dy),
        "ours": norm_variant(lambda: layer_norm(x, w, b, probe), (x, w, b, probe), dy),
        "ours, no probe": norm_variant(lambda: layer_norm(x, w, b), (x, w, b), dy),
        "copy": copy_variant(x_and_dy),
        "torch rms": norm_variant(lambda: F.rms_norm(x, (C,), w_same, 1e-5), (x, w_same), dy),
        "ours rms": norm_variant(lambda: rms_norm(x, w, probe_rms), (x, w, probe_rms), dy),
        "ref": norm_variant(lambda: layer_norm(x, w, b, probe, impl="ref"), (x, w, b, probe), dy, every=4),
    }


RATIOS = [("ours", "torch"), ("ours, no probe", "torch"), ("ours rms", "torch rms"), ("ours", "copy"), ("ref", "torch")]


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
            samples = interleave(kernel_variants(B, T, C, dtype), args.seconds)
            times = {name: {p: spread(phases[p]) for p in PHASES} for name, phases in samples.items()}
            ratios = {f"{a} / {b}": {p: times[a][p]["median_ms"] / times[b][p]["median_ms"] for p in PHASES}
                      for a, b in RATIOS}
            name = str(dtype).removeprefix("torch.")
            shapes.append({"dtype": name, "B": B, "T": T, "C": C, "ratios": ratios, "times": times})
            cells = ["/".join(f"{r[p]:.2f}" for p in PHASES) for r in ratios.values()]
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
        floor = [s["ratios"]["ours / copy"]["backward"] for s in shapes if s["dtype"] == dtype and s["C"] >= 2048]
        lines.append(f"{dtype}: backward / copy of the same bytes at C >= 2048: "
                     f"geometric mean {geomean(floor):.2f}, worst {max(floor):.2f}")
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
    import ln_triton
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
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
