"""
bench.py triton: compile the CUDA kernels for GPUs that are not here, and report registers, spills, barriers and traffic.

    python bench.py triton
"""

import itertools
import re
import subprocess
import tempfile

from benchmarks.tools import write_json

A100 = 108   # multiprocessors, for the table of programs
DTYPES = [("bf16", "bf16"), ("fp32", "bf16"), ("fp32", "fp32")]   # of x and dy (y); the second is what autocast gives


def arguments(parser):
    parser.add_argument("--out", default="results/triton.json")


def compiled_kernel(kernel_fn, types, constants, arch, num_warps):
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


def inspect(name, dtype, out_dtype, arch, C):
    """A kernel with the addition of a branch, as the residual stream launches it."""
    from rightbatch.kernels import ln_triton
    fn = getattr(ln_triton, f"{name}_kernel")
    tiled = C > ln_triton.WHOLE_ROW and name != "forward"
    launch = ln_triton.launch(ln_triton.TILE if tiled else C)
    types = {n: "i32" for n in fn.arg_names} | {n: f"*{dtype}" for n in ("x", "total", "dtotal", "dx")}
    types |= {n: f"*{out_dtype}" for n in ("y", "dy", "branch", "dbranch")}
    types |= {n: "*fp32" for n in ("w", "b", "stats", "means", "partials")} | {"eps": "fp32"}
    constants = {"RMS": False, "BIAS": True, "BLOCK": launch["BLOCK"]}
    if name == "backward":
        constants |= ({} if tiled else {"means": None}) | ({"dbranch": None} if dtype == out_dtype else {})
    compiled = compiled_kernel(fn, types, {n: v for n, v in constants.items() if n in fn.arg_names}, arch, launch["num_warps"])
    registers, spilled = resources(compiled)
    text = inner_loop(compiled)
    return {"kernel": name, "x": dtype, "dy": out_dtype, "C": C, "sm": arch, "num_warps": launch["num_warps"],
            "registers": registers, "spill_bytes": spilled,
            "barriers_per_row": len(re.findall(r"\bbar\.sync\b|\bbarrier\.sync\b", text)),
            "bytes_per_channel_and_row": bytes_per_channel(text, launch["BLOCK"], launch["num_warps"])}


def inspect_head(dtype, arch):
    """The head's cross entropy. Its first loop reads a logit, its second reads and writes it."""
    from trainer import head_triton
    fn, options = head_triton.cross_entropy_kernel, head_triton.OPTIONS
    types = {"logits": f"*{dtype}", "targets": "*i64", "losses": "*fp32", "stride": "i32", "V": "i32"}
    compiled = compiled_kernel(fn, types, {"BLOCK": options["BLOCK"]}, arch, options["num_warps"])
    registers, spilled = resources(compiled)
    return {"dtype": dtype, "sm": arch, "num_warps": options["num_warps"], "registers": registers, "spill_bytes": spilled}


def programs(B, C, T=2048):
    """Programs and launches of a backward pass with a bias on an A100."""
    from rightbatch.kernels import ln_triton
    parts, tiles, _ = ln_triton.plan(B, T, C, A100)
    finish = 2 * -(-C // ln_triton.FINISH["TILE"])
    return {"B": B, "T": T, "C": C, "programs": B * parts * tiles, "rows_per_program": T // parts, "finish_programs": finish,
            "launches": 3 + (tiles > 1)}   # backward, finish, the sum of the tiles' norms; the means of rows that are cut


def run(args):
    rows, head = [], []
    for dtype, arch in itertools.product(("bf16", "fp32"), (80, 90, 100)):
        head.append(inspect_head(dtype, arch))
        print("cross entropy: " + ", ".join(f"{k} {v}" for k, v in head[-1].items()), flush=True)
    print("Traffic includes weight (and bias): 4 (8) bytes that stay in the caches from row to row.")
    print("{:10}{:6}{:6}{:>6}{:>4}{:>6}{:>10}{:>12}{:>9}{:>18}".format(
        "kernel", "x", "dy", "C", "sm", "warps", "registers", "spill bytes", "barriers", "bytes/channel/row"))
    for name, (x, dy), arch, C in itertools.product(("forward", "means", "backward"), DTYPES, (80, 90, 100),
                                                    (768, 2048, 4096, 8192, 16384)):
        if name == "means" and C <= 4096:
            continue
        rows.append(inspect(name, x, dy, arch, C))
        print("{:10}{:6}{:6}{:6}{:4}{:6}{:10}{:12}{:9}{:18.1f}".format(*rows[-1].values()), flush=True)
    grids = [programs(B, C) for B, C in itertools.product((1, 2, 4, 8, 32), (768, 1024, 2048, 4096, 8192))]
    print(f"\nBackward on {A100} multiprocessors:")
    for row in grids:
        print(", ".join(f"{k} {v}" for k, v in row.items()))
    write_json(args.out, {"kernels": rows, "multiprocessors": A100, "backward": grids, "cross_entropy": head})
