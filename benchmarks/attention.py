"""
bench.py attention: the attention kernel beside torch's own, forward and backward, on the QKV product as a model has it.

    python bench.py attention
    python bench.py attention --threads=1 --seconds=3 --out=/tmp/attention.json

torch: split, views and transpositions as nanoGPT has them around F.scaled_dot_product_attention. In bf16 also torch's float32
kernel with the casts around it. FLOPs are those of the products that causal attention needs, half of T x T: two forward, five
backward. The ceiling is hardware.matmul_ceiling. Errors are root mean squares against float64, ours over torch's.
"""

import functools
import os

import torch

from benchmarks.tools import PHASES, interleave, paired, peak_bytes, plain, spread, two_phases, write_json
from rightbatch.kernels.attention import causal_attention, torch_attention
from trainer import hardware

SHAPES = [(8, 128, 4, 32), (12, 256, 6, 64), (1, 1024, 12, 64)]  # B, T, heads, size: quickstart, char, gpt_111m of bench.py


def arguments(parser):
    parser.add_argument("--threads", type=int, default=0, help="default: torch's")
    parser.add_argument("--seconds", type=float, default=10.0, help="per shape and dtype")
    parser.add_argument("--out", default="results/attention.json")


def variants_of(H, dtype):
    """{name: qkv -> output}"""
    variants = {"ours": lambda qkv: causal_attention(qkv, H, impl="cpu"), "torch": lambda qkv: torch_attention(qkv, H)}
    if dtype == torch.bfloat16:
        variants["torch, float32"] = lambda qkv: torch_attention(qkv.float(), H).to(dtype)
    return variants


def errors(attention, qkv, dy, expected):
    """Root mean square error of output, dq, dk, dv."""
    y = attention(qkv)
    found = [y.detach(), *torch.autograd.grad(y, qkv, dy)[0].chunk(3, dim=-1)]
    return [float((a.double() - b).square().mean().sqrt()) for a, b in zip(found, expected)]


def measure(B, T, H, D, dtype, seconds):
    generator = torch.Generator().manual_seed(0)
    qkv, dy = (torch.randn(B, T, n * H * D, generator=generator).to(dtype) for n in (3, 1))
    qkv.requires_grad_()
    attentions = variants_of(H, dtype)
    runs = {name: two_phases(functools.partial(attention, qkv), lambda y: torch.autograd.grad(y, qkv, dy), "cpu")
            for name, attention in attentions.items()}
    before = hardware.matmul_ceiling("cpu", dtype)
    samples = interleave(runs, seconds)
    ceiling = max(before, hardware.matmul_ceiling("cpu", dtype))
    times = {name: {p: spread(phases[p]) for p in PHASES} for name, phases in samples.items()}
    ratios = {name: {p: paired(samples["ours"][p], samples[name][p]) for p in PHASES} for name in runs if name != "ours"}
    exact = qkv.detach().double().requires_grad_()
    y = torch_attention(exact, H)
    expected = [y.detach(), *torch.autograd.grad(y, exact, dy.double())[0].chunk(3, dim=-1)]
    ours, theirs = (errors(attentions[name], qkv, dy, expected) for name in ("ours", "torch"))
    flops = {"forward": 2 * B * T * T * H * D, "backward": 5 * B * T * T * H * D, "both": 7 * B * T * T * H * D}
    rates = {p: flops[p] / (times["ours"][p]["median_ms"] / 1e3) for p in PHASES}
    return {"dtype": plain(dtype), "B": B, "T": T, "heads": H, "size": D, "times": times, "ratios": ratios,
            "flops_per_s": rates, "ceiling_flops_per_s": ceiling,
            "error_over_torch": {name: a / b for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs)},
            "peak_bytes": {name: peak_bytes(run) for name, run in runs.items()}}


def row(r):
    ratio, theirs = r["ratios"]["torch"], r["times"]["torch"]["both"]["median_ms"]
    cells = " / ".join(f"{ratio[p]['ratio']:.2f}" for p in PHASES)
    rates = " / ".join(f"{r['flops_per_s'][p] / 1e9:.0f}" for p in PHASES)
    memory = r["peak_bytes"]["ours"] / r["peak_bytes"]["torch"]
    wide = f"{r['ratios']['torch, float32']['both']['ratio']:.2f}" if "torch, float32" in r["ratios"] else ""
    return (f"{r['dtype']:9}{r['B']:4} x {r['T']:<5}{r['heads']:3} x {r['size']:<4}{theirs:9.2f}{cells:>21} "
            f"({ratio['both']['ratio_q1']:.2f} to {ratio['both']['ratio_q3']:.2f}){wide:>10}{rates:>18} of "
            f"{r['ceiling_flops_per_s'] / 1e9:<6.0f}{max(r['error_over_torch'].values()):7.2f}{memory:8.2f}")


def run(args):
    if args.threads:
        torch.set_num_threads(args.threads)
    hardware.prepare_cpu()
    print(f"{hardware.cpu_name()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}; ours over torch's, "
          "forward / backward / both: median of rounds (quartiles of both); error and peak memory over torch's")
    print(f"{'dtype':9}{'B x T':>7}{'heads':>9}{'torch ms':>14}{'ours / torch':>21}{'(quartiles)':>15}{'/ float32':>10}"
          f"{'GFLOP/s':>18} {'of':9}{'error':>7}{'memory':>8}")
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for shape in SHAPES:
            rows.append(measure(*shape, dtype, args.seconds))
            print(row(rows[-1]), flush=True)
    write_json(args.out, {"threads": torch.get_num_threads(), "shapes": rows})
