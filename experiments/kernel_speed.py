"""
Time of the norm kernel with per-example norms against torch's LayerNorm (Gray et al. 2024, arXiv 2411.00999, Figure 8)

    python experiments/kernel_speed.py                         # half a minute; alone on the machine, or ratios blur
    python experiments/kernel_speed.py --config config/gpt_111m.py --device cuda

Forward and backward over the width, for micro_batch_size examples of block_size rows. `python bench.py kernel` has more shapes.
"""

import sys

from common import Experiment

import ln_kernel
from benchmarks import kernel, tools
from plots import style
from trainer import hardware

PAPER = "The paper: on an H100 its kernel with per-example norms takes no longer than torch's LayerNorm without."
WIDTHS, SECONDS = (256, 512, 768, 1024, 2048, 4096), 4.0  # seconds for each width
VARIANTS = {"torch": "torch's LayerNorm", "ours": "ours, with norms", "ours, no probe": "ours, without",
            "copy": "copy of the same bytes"}


def times_of(B, T, C, dtype, device, seconds):
    """{variant: time of forward + backward: median and quartiles, in ms and over torch's of the same round}."""
    variants = {name: v for name, v in kernel.variants_of(B, T, C, dtype, device).items() if name in VARIANTS}
    both = {name: phases["both"] for name, phases in tools.interleave(variants, seconds).items()}
    return {name: {**tools.spread(times), **tools.paired(times, both["torch"])} for name, times in both.items()}


def measure(runs):
    config, tiny = runs.config, runs.args.tiny
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    hardware.prepare_cpu()
    widths = {C: times_of(config.micro_batch_size, config.block_size, C, dtype, device, 0 if tiny else SECONDS)
              for C in ((16, 32) if tiny else WIDTHS)}
    return {"examples": config.micro_batch_size, "rows": config.block_size, "dtype": tools.plain(dtype),
            "impl": ln_kernel.choose_impl(device)[0], "widths": widths}, None


def finding(result):
    ratios = {C: times["ours"]["ratio"] for C, times in result["widths"].items()}
    worst = max(ratios, key=ratios.get)
    return (f"Here: the {result['impl']} kernel with norms takes {tools.geomean(ratios.values()):.2f} of the time of torch's "
            f"LayerNorm (geometric mean over widths {min(ratios)} to {max(ratios)}, worst {ratios[worst]:.2f} at {worst}).")


def draw(result, _, path):
    widths = result["widths"]
    figure, (time, ratio) = style.panels(2, 13, 5)
    for color, (name, label) in zip((style.COLORS[6], *style.COLORS[:3]), VARIANTS.items()):
        for ax, keys in ((time, ("median_ms", "q1_ms", "q3_ms")), (ratio, ("ratio", "ratio_q1", "ratio_q3"))):
            middle, low, high = ([times[name][key] for times in widths.values()] for key in keys)
            ax.plot(list(widths), middle, color=color, marker="o", ms=4, label=label)
            ax.fill_between(list(widths), low, high, color=color, alpha=0.15, lw=0)
    style.dress(time, "Forward + backward (ms; band: quartiles)", "width", "doublings", "log")
    style.dress(ratio, "over torch's LayerNorm in the same round", "width", "doublings", "zero")
    style.save(figure, path)


main = Experiment("kernel_speed", __doc__, PAPER, measure, finding, draw, settings=dict(micro_batch_size=4, block_size=256))

if __name__ == "__main__":
    sys.exit(main())
