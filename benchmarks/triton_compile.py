"""
bench.py triton: compile the CUDA kernels for GPUs that are not here, and report registers, spills and global traffic.

    python bench.py triton
"""

import itertools
import re
import subprocess
import tempfile

from benchmarks.tools import write_json


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


def bytes_per_channel(compiled, block, num_warps):
    """Global bytes that one turn of the row loop (or a kernel without loop) moves, per channel: from the PTX."""
    ptx = compiled.asm["ptx"]
    loop = re.search(r"^(\$L__BB\w+):.*This Inner Loop Header.*?bra\s+\1;", ptx, re.S | re.M)
    total = 0
    for vector, bits in re.findall(r"(?:ld|st)\.global\S*?(?:\.v(\d))?\.[bfu](\d+)\s", loop.group() if loop else ptx):
        wide = int(vector or 1) * int(bits) // 8
        total += wide * 32 * num_warps if wide > 4 else 0   # the scalars of a row (mean, rstd) are the same address
    return total / block


def inspect(name, dtype, arch, C):
    from rightbatch.kernels import ln_triton
    fn, launch = getattr(ln_triton, f"{name}_kernel"), ln_triton.launch(C)
    types = {n: "i32" for n in fn.arg_names} | {n: f"*{dtype}" for n in ("x", "y", "dy", "dx")}
    types |= {n: "*fp32" for n in ("w", "b", "stats", "partials")} | {"eps": "fp32"}
    constants = {"RMS": False, "BIAS": True, "BLOCK": launch["BLOCK"]}
    compiled = compiled_kernel(fn, types, constants, arch, launch["num_warps"])
    registers, spilled = resources(compiled)
    traffic = bytes_per_channel(compiled, launch["BLOCK"], launch["num_warps"])
    return {"kernel": name, "dtype": dtype, "C": C, "sm": arch, "num_warps": launch["num_warps"],
            "registers": registers, "spill_bytes": spilled, "bytes_per_channel_and_row": traffic}


def run(args):
    rows = []
    print("Traffic of the forward includes weight and bias: 8 bytes that stay in L2 from row to row.")
    print("{:10}{:6}{:>6}{:>4}{:>6}{:>10}{:>12}{:>18}".format(
        "kernel", "dtype", "C", "sm", "warps", "registers", "spill bytes", "bytes/channel/row"))
    for name, dtype, arch, C in itertools.product(("forward", "backward"), ("bf16", "fp32"), (80, 90),
                                                  (768, 2048, 4096, 8192)):
        rows.append(inspect(name, dtype, arch, C))
        print("{:10}{:6}{:6}{:4}{:6}{:10}{:12}{:18.1f}".format(*rows[-1].values()), flush=True)
    write_json(args.out, {"kernels": rows})
