"""
One run at a glance, or several over each other: loss, noise scale against batch size, its two parts, learning rate, speed.

    python plot.py out/quickstart
"""

import os

from configurator import ConfigError
from plots import style, whatif
from plots.style import COLORS
from trainer import predict
from trainer.reader import load, newest_noise, noise_of, series, source


def draw(*out_dirs, path=None):
    """report.png of one run, compare.png of several, in the folder of the first; returns its path."""
    runs = [(os.path.basename(os.path.normpath(d)), load(d)) for d in out_dirs]
    path = path or os.path.join(out_dirs[0], "report.png" if len(runs) == 1 else "compare.png")
    figure = style.pyplot().figure(figsize=(11, 8.2), layout="constrained")
    grid = figure.add_gridspec(4, 6)
    loss_ax, gns_ax, answer_ax = (figure.add_subplot(grid[:2, :3]), figure.add_subplot(grid[:2, 3:]),
                                  figure.add_subplot(grid[2:, 2:4]))
    part_ax, lr_ax, rate_ax = figure.add_subplot(grid[2:, :2]), figure.add_subplot(grid[2, 4:]), figure.add_subplot(grid[3, 4:])
    for color, (name, rows) in zip(COLORS * 9, runs):
        draw_loss(loss_ax, rows, name, color, alone=len(runs) == 1)
        draw_noise(gns_ax, rows, name, color, alone=len(runs) == 1)
        draw_parts(part_ax, rows, name, color, alone=len(runs) == 1)
        style.line(lr_ax, *series(rows, "lr"), color=color)
        style.line(rate_ax, *series(rows, "tok_per_sec"), color=color)
    titles = {loss_ax: "Loss (nats per token)", gns_ax: "Noise scale and batch (sequences)", part_ax: "Its parts, norm layers",
              lr_ax: "Learning rate", rate_ax: "Tokens per second"}
    for ax, title in titles.items():
        ax.set_title(title)
        style.counts(ax.xaxis)
        if ax is not lr_ax:
            ax.set_xlabel("tokens")
        if ax in (gns_ax, part_ax) and ax.lines:
            ax.set_yscale("log")
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    draw_answer(answer_ax, out_dirs if len(runs) == 1 else ())
    style.decades(gns_ax.yaxis)
    style.counts(rate_ax.yaxis)
    rate_ax.set_ylim(bottom=0)
    style.save(figure, path)
    return path


def draw_answer(ax, out_dirs):
    """Predicted time against batch, the run's own batches, and the right one with its interval."""
    try:
        folder, = out_dirs
        result, run, phases = predict.of_run(folder)
    except (ConfigError, ValueError):
        return ax.remove()
    cost = predict.step_cost(run)
    whatif.draw_against_batch(ax, "seconds" if cost else "steps", result, phases, run.block, cost)


def draw_loss(ax, rows, name, color, alone):
    style.line(ax, *series(rows, "train/loss"), color=color, alpha=0.45, lw=1.2,
               label="train, each logged step" if alone else None)
    ax.plot(*series(rows, "val/loss"), color=COLORS[1] if alone else color, marker="o", ms=4,
            label="validation" if alone else f"{name}, validation")


def draw_noise(ax, rows, name, color, alone):
    tokens, batch = series(rows, "batch_size")
    style.line(ax, tokens, batch, color=COLORS[1] if alone else color, ls="--", drawstyle="steps-post",
               label="batch size" if alone else f"{name}, batch")
    measured = [row for row in rows if "gns/norm" in row]
    if not measured:
        return
    tokens, gap = [row["tokens"] for row in measured], (float("nan"),) * 3
    value, low, high = zip(*(noise.triple if (noise := noise_of(row)) else gap for row in measured))
    newest, _ = newest_noise(measured)
    ax.fill_between(tokens, [max(v, 1e-2) for v in low], high, color=color, alpha=0.2, lw=0,
                    label="95% interval" if alone else None)
    style.line(ax, tokens, value, color=color,
               label=f"noise scale{f', {newest.of}' if newest else ''}" if alone else f"{name}, noise scale")
    if alone:
        key = norm_key(rows)
        style.line(ax, *series(rows, key), color=color, lw=1, ls=":",
                   label="noise scale, the norm layers" + (" in that metric" if key.endswith("_adam") else ""))
    known = [v for v in value if v == v] + batch
    ax.set_ylim(max(0.05, min(known) / 3), max(known) * (8 if alone else 3))  # room for the legend


def norm_key(rows):
    """The norm layers' noise scale in the metric that the run goes by."""
    return "gns/norm_adam" if any((source(row) or "").endswith("_adam") for row in rows) else "gns/norm"


def draw_parts(ax, rows, name, color, alone):
    key = norm_key(rows)
    tokens, sq_norm = series(rows, f"{key}_sq_norm")
    if not tokens:
        ax.text(0.5, 0.5, "not measured (gns=off)", ha="center", transform=ax.transAxes)
        return
    style.line(ax, tokens, style.positive(series(rows, f"{key}_tr_sigma")[1]), color=color,
               label="noise, tr Σ" if alone else f"{name}, tr Σ")
    style.line(ax, tokens, style.positive(sq_norm), color=COLORS[2] if alone else color, ls="-" if alone else ":",
               label="signal, |G|²" if alone else f"{name}, |G|²")
