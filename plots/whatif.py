"""Picture of a prediction (whatif.py): time, tokens and, with several device counts, devices, against the batch."""

import numpy as np

from plots import style
from plots.style import COLORS
from rightbatch.decision import MEASURED, TUNED
from trainer import log, predict


def draw(result, phases, block, cost, path):
    panels = ["seconds" if cost else "steps", "tokens", *(["devices"] if result.get("devices") else [])]
    figure, axes = style.panels(len(panels), 5.5 * len(panels), 4.8)
    for ax, what in zip(axes, panels):
        if what == "devices":
            draw_devices(ax, result["devices"])
        else:
            draw_against_batch(ax, what, result, phases, block, cost)
    figure.suptitle(f"{result['run']}: what other batches would take to a {result['loss_kind']} loss of {result['loss']:.4g}",
                    x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.supxlabel(f"{TUNED} Bands: 95% intervals of what was measured. Errors of the theory are not in them.",
                     fontsize=9.5)
    style.save(figure, path)
    return path


def draw_against_batch(ax, what, result, phases, block, cost):
    """One curve with its band, the run's own batches, and the right one with its interval."""
    low, high = min(r["batch"] for r in result["rows"]), max(r["batch"] for r in result["rows"])
    grid = np.geomspace(low, high, 80) if high > low else np.array([low])
    rows = [predict.row_at(phases, float(b), block, cost) for b in grid]
    ax.fill_between(grid, [r[f"{what}_low"] for r in rows], [r[f"{what}_high"] for r in rows], color=COLORS[0], alpha=0.2, lw=0)
    ax.plot(grid, [r[what] for r in rows], color=COLORS[0], label="predicted, constant batch")
    own, right = result["own"], result["right_batch"]
    first, last = own["batch_low"], own["batch_high"]
    if own.get(what):
        ax.plot([first, last], [own[what]] * 2, color=COLORS[1], marker="o", ms=6, lw=3,
                label=f"this run, batch {first:.0f}" + (f" to {last:.0f}" if last > first else "") + speed_words(what, cost))
    aim = {"seconds": "time", "tokens": "tokens", "steps": "balance"}[what]
    if right.get(aim):
        if right.get(f"{aim}_low") and right[f"{aim}_high"] > right[f"{aim}_low"]:
            ax.axvspan(right[f"{aim}_low"], min(right[f"{aim}_high"], grid[-1]), color=COLORS[2], alpha=0.13, lw=0)
        words = {"time": "fastest", "tokens": "fewest tokens", "balance": "the noise scale"}[aim]
        ax.axvline(right[aim], color=COLORS[2], ls="--", label=f"{words}: {right[aim]:.3g}")
    if what == "seconds" and "deadline" in result:
        ax.axhline(result["deadline"]["within"], color=COLORS[3], ls=":", label="the deadline")
    ax.set(title=f"Predicted {'time' if what == 'seconds' else what} against batch", xlabel="batch (sequences)", yscale="log")
    style.doublings(ax)
    lowest, highest = min(r[f"{what}_low"] for r in rows), max(r[f"{what}_high"] for r in rows)
    ticks = [float(f"{lowest * (highest / lowest) ** (i / 5):.2g}") for i in range(6)] if highest > lowest else [lowest]
    size, unit = unit_of(highest) if what == "seconds" else (1, "")
    ax.set_yticks(ticks, labels=[log.count(t / size) for t in ticks])
    ax.minorticks_off()
    ax.set_ylabel(unit)
    ax.legend(loc="upper left", bbox_to_anchor=(0, -0.16), borderaxespad=0, fontsize=9)  # below: curves and bands are all over


def speed_words(what, cost):
    """At which speed the run's own batches are drawn."""
    if what != "seconds":
        return ""
    return {MEASURED: ", at its last speed", "by formula": ", by formula"}.get(cost.source, ", at the fitted speed")


def unit_of(seconds):
    """(seconds, name) of the unit in which a time is easy to read."""
    return (1, "seconds") if seconds < 600 else (60, "minutes") if seconds < 36_000 else (3600, "hours")


def draw_devices(ax, rows):
    """Time and device-hours over the number of devices, each at its right batch."""
    counts = [r["devices"] for r in rows]
    ax.plot(counts, [r["seconds"] / rows[0]["seconds"] for r in rows], color=COLORS[0], marker="o", label="time")
    hours = [r["device_hours"] / rows[0]["device_hours"] for r in rows]
    ax.plot(counts, hours, color=COLORS[1], marker="o", label="device-hours")
    ax.set(title=f"Devices, against {counts[0]}", xlabel="devices, each number at its right batch", yscale="log")
    style.doublings(ax, counts)
    for row in rows:
        ax.annotate(f"batch {row['batch']:g}", (row["devices"], row["seconds"] / rows[0]["seconds"]), xytext=(3, -13),
                    textcoords="offset points", fontsize=9, color="#444444")
    style.decades(ax.yaxis, "{:g}x".format)
    ax.margins(0.14)
    ax.legend()
