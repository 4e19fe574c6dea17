"""Benchmarks, always side by side with what they are compared with, in one run. Each is a file of benchmarks/.

    python bench.py kernel          norm kernels against torch's own, ref, and a copy of the same bytes (4 minutes)
    python bench.py kernel --threads=1 --seconds=2 --out=/tmp/kernel.json
    python bench.py attention       the attention kernel against torch's own: time, FLOP/s, error, memory
    python bench.py triton          compile the CUDA kernels, no GPU needed: registers, spills, global traffic
    python bench.py step            whole training steps: tracking off, norm, exact, and off with torch's own LayerNorm
    python bench.py step --ranks=2  the same under DDP
    python bench.py step --against=../nanoGPT      our step beside that of a nanoGPT checkout: tokens/s, ratio, losses
    python bench.py tracking        what tracking costs in whole runs
    python bench.py watch           what watch costs in Hugging Face's GPT-2 and Llama
    torchrun --nproc_per_node=2 bench.py overlap   when gradients are ready under DDP, and how much of their transfer is hidden
    python bench.py gpu             the acceptance run of somebody who has a GPU (make gpu, docs/gpu.md)

Variants take turns within each round, so that whatever else the machine does falls on all of them; medians and
quartiles over rounds. The tables go to the screen, every number to results/<command>.json.
"""

import argparse
import sys

from benchmarks import attention, gpu, kernel, overlap, step, tracking, triton_compile, watch
from system import output
from system.errors import ConfigError, die

# command: what it measures, the file that does; each has arguments(parser) and run(args)
COMMANDS = {
    "kernel": ("norm kernels against torch's own", kernel),
    "attention": ("the attention kernel on this CPU", attention),
    "triton": ("compile the CUDA kernels and report", triton_compile),
    "step": ("whole training steps", step),
    "overlap": ("when gradients are ready under DDP, and what of their transfer is hidden", overlap),
    "tracking": ("what tracking costs in whole runs", tracking),
    "watch": ("what watch adds to a step of GPT-2 and Llama, as transformers has them", watch),
    "gpu": ("whether all works on this machine's GPU, and how fast", gpu)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (what, file) in COMMANDS.items():
        file.arguments(commands.add_parser(name, help=what, allow_abbrev=False))
    args = parser.parse_args()
    try:
        if args.out:
            output.check(args.out)  # before it measures for minutes
        return COMMANDS[args.command][1].run(args)
    except ConfigError as e:
        die(e)


if __name__ == "__main__":
    sys.exit(main())
