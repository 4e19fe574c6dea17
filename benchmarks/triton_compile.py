"""
bench.py triton: compile the CUDA kernels for GPUs that are not here, and report registers, spills, barriers and traffic.

    python bench.py triton

The kernels get the arguments of a real launch, on a CUDA device that is not there (fake_cuda.py), through Triton's own binder.
"""

import itertools
import math
import re
import subprocess
import sys
import tempfile

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import fake_cuda
from benchmarks.tools import BENCH, write_json

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAIRS = [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")]   # of x and dy (y); the second is what autocast gives


def arguments(parser):
    parser.add_argument("--out", default="results/triton.json")


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


def inner_loop(compiled):
    """The PTX of the loop over rows, or of a kernel without one."""
    ptx = compiled.asm["ptx"]
    loop = re.search(r"^(\$L__BB\w+):.*This Inner Loop Header.*?bra\s+\1;", ptx, re.S | re.M)
    return loop.group() if loop else ptx


def bytes_per_channel(text, block, num_warps):
    """Global bytes that one turn of the loop moves, per channel."""
    total = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfu](\d+)\s", text):
        wide = int(vector or 1) * int(bits) // 8
        total += wide * 32 * num_warps if wide > 4 else 0   # the scalars of a row (mean, rstd) are the same address
    return total / block


def residual_norm(B, T, C, dtype, out_dtype):
    """Launches of a norm layer in the residual stream, forward and backward, its norms in a metric, too."""
    from rightbatch.kernels import ln_triton
    with fake_cuda.pretended() as launches:
        x, y = (torch.empty(B, T, C, device="cuda", dtype=d) for d in (dtype, out_dtype))
        w, metric = torch.empty(C, device="cuda"), torch.empty(2, C, device="cuda")
        _, _, stats = ln_triton.forward(x, y, w, w, 1e-5, False, out_dtype)
        ln_triton.backward(x, y, x, w, stats, metric, False, True, True, out_dtype)
        ln_triton.tap(y, x, 1e-5, False, True)
    return {launched.name.removesuffix("_kernel"): launched for launched in launches}


def inspect(name, dtype, out_dtype, arch, C):
    """A kernel with the addition of a branch, as the residual stream launches it."""
    launched = residual_norm(8, 2048, C, DTYPES[dtype], DTYPES[out_dtype])[name]
    compiled = fake_cuda.compiled(launched, arch)
    registers, spilled = resources(compiled)
    text, warps, block = inner_loop(compiled), launched.named["num_warps"], launched.named.get("BLOCK")
    return {"kernel": name, "x": dtype, "dy": out_dtype, "C": C, "sm": arch, "num_warps": warps,
            "registers": registers, "spill_bytes": spilled,
            "barriers_per_row": len(re.findall(r"\bbar\.sync\b|\bbarrier\.sync\b", text)),
            "bytes_per_channel_and_row": bytes_per_channel(text, block, warps) if block else 0.0}   # finish has no rows


def inspect_head(dtype, arch):
    """The head's cross entropy. Its first loop reads a logit, its second reads and writes it."""
    from rightbatch.kernels import head_loss, head_triton
    with fake_cuda.pretended() as launches:
        logits = torch.empty(64, head_loss.padded(50257), device="cuda", dtype=DTYPES[dtype])[:, :50257]
        targets = torch.empty(64, device="cuda", dtype=torch.int64)
        head_triton.softmax_minus_onehot_(logits, targets, torch.empty(64, device="cuda"))
    registers, spilled = resources(fake_cuda.compiled(launches[0], arch))
    return {"dtype": dtype, "sm": arch, "num_warps": launches[0].named["num_warps"], "registers": registers,
            "spill_bytes": spilled}


class TorchsKernels(TorchDispatchMode):
    """Counts the kernels that torch's own operations would launch."""
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "aten" and not func.is_view and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def programs(B, C, T=2048):
    """Programs and launches of a backward pass with a bias, in a metric, on an A100, from the launches themselves."""
    from rightbatch.kernels import ln_triton
    with fake_cuda.pretended() as launches:
        x, w = torch.empty(B, T, C, device="cuda"), torch.empty(C, device="cuda")
        stats, metric = torch.empty(2, B * T, device="cuda"), torch.empty(2, C, device="cuda")
        with TorchsKernels() as others:
            ln_triton.backward(x, x, x, w, stats, metric, False, True, True, torch.bfloat16)
    by_name = {launched.name: math.prod(launched.grid) for launched in launches}
    parts = launches[-1].arguments["parts"]
    return {"B": B, "T": T, "C": C, "programs": by_name["backward_kernel"], "rows_per_program": T // parts,
            "finish_programs": by_name["finish_kernel"], "launches": len(launches) + others.count}


def run(args):
    if not fake_cuda.here():
        return fake_cuda.inside(BENCH, *sys.argv[1:])
    rows, head = [], []
    for dtype, arch in itertools.product(DTYPES, (80, 90, 100)):
        head.append(inspect_head(dtype, arch))
        print("cross entropy: " + ", ".join(f"{k} {v}" for k, v in head[-1].items()), flush=True)
    print("Traffic includes weight (and bias): 4 (8) bytes that stay in the caches from row to row.")
    print("{:10}{:6}{:6}{:>6}{:>4}{:>6}{:>10}{:>12}{:>9}{:>18}".format(
        "kernel", "x", "dy", "C", "sm", "warps", "registers", "spill bytes", "barriers", "bytes/channel/row"))
    for name, (x, dy), arch, C in itertools.product(("forward", "means", "backward", "finish", "tap"), PAIRS, (80, 90, 100),
                                                    (768, 2048, 4096, 8192, 16384)):
        if name == "means" and C <= 4096 or name == "finish" and (x, dy) != PAIRS[0] or name == "tap" and C > 4096:
            continue
        rows.append(inspect(name, x, dy, arch, C))
        print("{:10}{:6}{:6}{:6}{:4}{:6}{:10}{:12}{:9}{:18.1f}".format(*rows[-1].values()), flush=True)
    grids = [programs(B, C) for B, C in itertools.product((1, 2, 4, 8, 32), (768, 1024, 2048, 4096, 8192))]
    print(f"\nBackward on {fake_cuda.A100.multi_processor_count} multiprocessors:")
    for row in grids:
        print(", ".join(f"{k} {v}" for k, v in row.items()))
    write_json(args.out, {"multiprocessors": fake_cuda.A100.multi_processor_count, "kernels": rows, "backward": grids,
                          "cross_entropy": head})
