"""
Time of the norm kernel with per-example norms against torch's LayerNorm (Gray et al. 2024, arXiv 2411.00999, Figure 8)

    python experiments/kernel_speed.py                         # half a minute; alone on the machine, or ratios blur
    python experiments/kernel_speed.py --config config/gpt_111m.py --device cuda

Forward and backward over the width, for micro_batch_size examples of block_size rows. `python bench.py kernel` has more shapes.
"""

import sys

from common import parse, write

import ln_kernel
from benchmarks import kernel, tools
from plots import style
from trainer import hardware

PAPER = "The paper: on an H100 its kernel with per-example norms takes no longer than torch's LayerNorm without."
SETTINGS = dict(micro_batch_size=4, block_size=256)
WIDTHS, SECONDS = (256, 512, 768, 1024, 2048, 4096), 4.0  # seconds for each width
VARIANTS = {"torch": "torch's LayerNorm", "ours": "ours, with norms", "ours, no probe": "ours, without",
            "copy": "copy of the same bytes"}


def measure(B, T, C, dtype, device, seconds):
    """{variant: time of forward + backward: median and quartiles, in ms and over torch's of the same round}."""
    variants = {name: v for name, v in kernel.variants_of(B, T, C, dtype, device).items() if name in VARIANTS}
    both = {name: phases["both"] for name, phases in tools.interleave(variants, seconds).items()}
    return {name: {**tools.spread(times), **tools.paired(times, both["torch"])} for name, times in both.items()}


def finding(widths, device, impl):
    ratios = {C: times["ours"]["ratio"] for C, times in widths.items()}
    mean, worst = tools.geomean(ratios.values()), max(ratios, key=ratios.get)
    told = ("no longer at any width" if max(ratios.values()) <= 1.0 else "no longer on average" if mean <= 1.0 else
            "longer on average")
    return (f"Here: on {device} the {impl} kernel with norms takes {mean:.2f} of the time of torch's LayerNorm (geometric mean "
            f"over widths {min(ratios)} to {max(ratios)}, worst {ratios[worst]:.2f} at {worst}): {told}.")


def draw(widths, path):
    figure, (time, ratio) = style.pyplot().subplots(1, 2, figsize=(13, 5), layout="constrained")
    for color, (name, label) in zip((style.COLORS[6], *style.COLORS[:3]), VARIANTS.items()):
        for ax, keys in ((time, ("median_ms", "q1_ms", "q3_ms")), (ratio, ("ratio", "ratio_q1", "ratio_q3"))):
            middle, low, high = ([times[name][key] for times in widths.values()] for key in keys)
            ax.plot(list(widths), middle, color=color, marker="o", ms=4, label=label)
            ax.fill_between(list(widths), low, high, color=color, alpha=0.15, lw=0)
    time.set_title("Forward + backward (ms; band: quartiles)")
    time.set_yscale("log")
    style.decades(time.yaxis)
    ratio.set_title("over torch's LayerNorm in the same round")
    ratio.set_ylim(bottom=0)
    time.legend()
    for ax in (time, ratio):
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(widths), [str(C) for C in widths])
        ax.set_xlabel("width")
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "kernel_speed", __doc__, settings=SETTINGS)
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.prepare_cpu()
    B, T, widths = config.micro_batch_size, config.block_size, {}
    for C in (16, 32) if args.tiny else WIDTHS:
        widths[C] = measure(B, T, C, dtype, device, seconds=0 if args.tiny else SECONDS)
        print(f"width {C}: {widths[C]['ours']['median_ms']:.3f} ms, {widths[C]['ours']['ratio']:.2f} of torch's", flush=True)
    text = finding(widths, hardware.facts(device)["device"], ln_kernel.choose_impl(device)[0])
    numbers = {"examples": B, "rows": T, "dtype": str(dtype).removeprefix("torch."), "widths": widths}
    draw(widths, write(args, config, PAPER, text, numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
