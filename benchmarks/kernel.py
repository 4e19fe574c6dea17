"""
bench.py kernel: the norm kernels against torch's own, ref, and a copy of the same bytes.

    python bench.py kernel          # 4 minutes
    python bench.py kernel --threads=1 --seconds=2 --out=/tmp/kernel.json
"""

import functools
import os

import torch
import torch.nn.functional as F

import ln_kernel
from benchmarks.tools import PHASES, geomean, in_turn, interleave, pick_device, plain, spread, two_phases, write_json
from rightbatch.kernels.backends import BACKENDS
from trainer import hardware

# B examples of T rows of C channels; per C a tensor that fits the caches and one that does not
SHAPES = [(16, 128, 256), (32, 256, 256), (4, 256, 768), (8, 1024, 768),
          (4, 128, 2048), (4, 1024, 2048), (2, 128, 4096), (4, 512, 4096)]
CACHES, BYTES = 32 << 20, {"float32": 4, "bfloat16": 2}   # the last-level cache of the machine that results/ are from


def arguments(parser):
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--seconds", type=float, default=9.0, help="per shape and dtype")
    parser.add_argument("--out", default="results/kernel.json")


def norm_variant(norm, inputs, dy, every=1):
    return two_phases(norm, lambda y: torch.autograd.grad(y, inputs, dy), dy.device.type, every)


def operator_variant(x, w, b, dy, impl):
    """The kernels without autograd, as a copy is without: two operator calls."""
    forward, backward = BACKENDS[impl].forward, BACKENDS[impl].backward
    x, w, b = x.detach(), w.detach(), b.detach()
    return two_phases(lambda: forward(x, None, w, b, 1e-5, False, x.dtype),
                      lambda out: backward(None, dy, x, w, out[2], None, False, True, True, None), dy.device.type)


def copy_variant(x_and_dy):
    """The memory floor: as many bytes as the forward (x in, y out) and the backward (x and dy in, dx out) must move,
    half read, half written, from the same inputs to a new output."""
    both = x_and_dy.flatten()
    x, one_and_a_half = both[:len(both) // 2], both[:3 * len(both) // 4]
    return two_phases(x.clone, lambda y: one_and_a_half.clone(), both.device.type)


def inputs_of(B, T, C, dtype, device="cpu"):
    x_and_dy, (w, b) = torch.randn(2, B, T, C, device=device).to(dtype), torch.randn(2, C, device=device)
    x, dy = x_and_dy
    return x_and_dy, x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), dy


def variants_of(B, T, C, dtype, device="cpu"):
    x_and_dy, x, w, b, dy = inputs_of(B, T, C, dtype, device)
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
        x_and_dy = inputs_of(B, T, C, dtype, device)[0].flatten()
        return x_and_dy[:3 * len(x_and_dy) // 4].clone

    def alone():
        _, x, w, b, dy = (t.detach() for t in inputs_of(B, T, C, dtype, device))
        stats = backend.forward(x, None, w, b, 1e-5, False, dtype)[2]
        return functools.partial(backend.backward, None, dy, x, w, stats, None, False, True, True, None)

    def through_autograd():
        _, x, w, b, dy = inputs_of(B, T, C, dtype, device)
        probe = torch.zeros(2, B, device=device, requires_grad=True)
        y = ln_kernel.layer_norm(x, w, b, probe)
        return functools.partial(torch.autograd.grad, y, (x, w, b, probe), dy, retain_graph=True)

    makers = {"ours alone": alone, "ours": through_autograd, "copy": copy}
    return {name: in_turn([make() for _ in range(n)], device) for name, make in makers.items()}   # to each its own inputs


RATIOS = [("ours", "torch"), ("ours, no probe", "torch"), ("ours rms", "torch rms"), ("ours", "copy"),
          ("ours alone", "copy"), ("ref", "torch")]


def run(args):
    if args.threads:
        torch.set_num_threads(args.threads)
    device = pick_device(args.device)
    hardware.prepare_cpu()   # as train.py does
    impl, reason = ln_kernel.choose_impl(device)
    print(f"{hardware.facts(device)['device']}, {torch.get_num_threads()} threads; ours = {impl} ({reason})")
    if os.getloadavg()[0] > 0.5:
        print(f"This machine is busy (load {os.getloadavg()[0]:.1f}): threads wait for each other, and ratios blur.")
    print("Time ratios, forward / backward / both:")
    print(f"{'dtype':9}{'B, T, C':>16} {'torch ms':>9}  " + "".join(f"{a + ' / ' + b:>24}" for a, b in RATIOS))
    shapes = []
    for dtype in (torch.float32, torch.bfloat16):
        for B, T, C in SHAPES:
            samples = interleave(variants_of(B, T, C, dtype, device), args.seconds)
            times = {name: {p: spread(phases[p]) for p in PHASES} for name, phases in samples.items()}
            ratios = {f"{a} / {b}": {p: times[a][p]["median_ms"] / times[b][p]["median_ms"] for p in PHASES}
                      for a, b in RATIOS}
            if C >= 2048:
                cold = interleave(backward_from_memory(B, T, C, dtype, device), args.seconds / 3)
                cold = {n: spread(phases["backward"]) for n, phases in cold.items()}
                times |= {f"{n}, from memory": {"backward": spreads} for n, spreads in cold.items()}
                ratios |= {f"{n} / copy, from memory": {"backward": cold[n]["median_ms"] / cold["copy"]["median_ms"]}
                           for n in ("ours alone", "ours")}
            name = plain(dtype)
            shapes.append({"dtype": name, "B": B, "T": T, "C": C, "ratios": ratios, "times": times})
            cells = ["/".join(f"{ratios[f'{a} / {b}'][p]:.2f}" for p in PHASES) for a, b in RATIOS]
            print(f"{name:9}{f'{B}, {T}, {C}':>16} {times['torch']['both']['median_ms']:9.3f}  "
                  + "".join(f"{cell:>24}" for cell in cells), flush=True)
    lines = verdict(shapes)
    print(*lines, sep="\n")
    write_json(args.out, {"impl": impl, "threads": torch.get_num_threads(), "summary": lines, "shapes": shapes}, device)


def verdict(shapes):
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
