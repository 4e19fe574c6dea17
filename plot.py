"""
Pictures of runs, from their log.jsonl alone.

    python plot.py out/quickstart                   # out/quickstart/report.png
    python plot.py out/run_a out/run_b              # both over each other, in compare.png
    python plot.py out/run_a out/run_b --out=a.png
"""

import argparse
import os
import sys

import configurator
import log
from configurator import ConfigError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")  # Okabe & Ito, safe for all eyes
STYLE = {"font.size": 12, "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
         "legend.frameon": False, "legend.fontsize": 10.5, "lines.linewidth": 1.8}


def series(rows, key):
    """(tokens, values) of the rows that have the key; an undetermined value is a gap."""
    have = [r for r in rows if key in r]
    return [r["tokens"] for r in have], [float("nan") if r[key] is None else r[key] for r in have]


def load(out_dir):
    try:
        rows = log.read(out_dir)
    except OSError as e:
        raise ConfigError(f"{out_dir}: no readable {log.NAME} ({e.strerror})") from None
    if not any("train/loss" in r for r in rows):
        raise ConfigError(f"{out_dir}: its {log.NAME} has no logged step yet")
    return rows


def pyplot():
    import matplotlib  # slow to import, so only when a picture is drawn
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update(STYLE)
    return plt


def report(*out_dirs, path=None):
    """Loss, noise scale against batch size, its two components, learning rate and throughput. Returns the PNG's path."""
    runs = [(os.path.basename(os.path.normpath(d)), load(d)) for d in out_dirs]
    path = path or (os.path.join(out_dirs[0], "report.png") if len(runs) == 1 else "compare.png")
    plt = pyplot()
    figure = plt.figure(figsize=(11, 8.2), layout="constrained")
    grid = figure.add_gridspec(4, 2)
    loss_ax, gns_ax = figure.add_subplot(grid[:2, 0]), figure.add_subplot(grid[:2, 1])
    part_ax, lr_ax, rate_ax = figure.add_subplot(grid[2:, 0]), figure.add_subplot(grid[2, 1]), figure.add_subplot(grid[3, 1])
    for color, (name, rows) in zip(COLORS * 9, runs):
        draw_loss(loss_ax, rows, name, color, alone=len(runs) == 1)
        draw_noise(gns_ax, rows, name, color, alone=len(runs) == 1)
        draw_parts(part_ax, rows, name, color, alone=len(runs) == 1)
        lr_ax.plot(*series(rows, "lr"), color=color)
        rate_ax.plot(*series(rows, "tok_per_sec"), color=color)
    loss_ax.set_title("Loss (nats per token)")
    gns_ax.set_title("Noise scale and batch (sequences)")
    part_ax.set_title("Its parts, norm layers")
    lr_ax.set_title("Learning rate")
    rate_ax.set_title("Tokens per second")
    rate_ax.set_ylim(bottom=0)
    rate_ax.yaxis.set_major_formatter(lambda v, _: log.count(v))
    for ax in (gns_ax, part_ax):
        if ax.lines:
            ax.set_yscale("log")
    gns_ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    gns_ax.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if str(v)[0] in "25" else "")
    for ax in (loss_ax, gns_ax, part_ax, rate_ax, lr_ax):
        ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
        if ax is not lr_ax:
            ax.set_xlabel("tokens")
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_loss(ax, rows, name, color, alone):
    ax.plot(*series(rows, "train/loss"), color=color, alpha=0.45, lw=1.2, label="train, each logged step" if alone else None)
    ax.plot(*series(rows, "val/loss"), color=COLORS[1] if alone else color, marker="o", ms=4,
            label="validation" if alone else f"{name}, validation")


def draw_noise(ax, rows, name, color, alone):
    tokens, batch = series(rows, "batch_size")
    ax.step(tokens, batch, color=COLORS[1] if alone else color, ls="--", where="post",
            label="batch size" if alone else f"{name}, batch")
    measured = [row for row in rows if "gns/norm" in row]
    if not measured:
        return
    key = log.noise_key(measured)
    tokens, value = series(measured, key)
    low, high = (series(measured, key + end)[1] for end in ("_low", "_high"))
    ax.fill_between(tokens, [max(v, 1e-2) for v in low], high, color=color, alpha=0.2, lw=0,
                    label="95% interval" if alone else None)
    ax.plot(tokens, value, color=color, label=f"noise scale, {log.NOISE[key]}" if alone else f"{name}, noise scale")
    if alone and key != "gns/norm":
        ax.plot(*series(rows, "gns/norm"), color=color, lw=1, ls=":", label="noise scale, the norm layers")
    known = [v for v in value if v == v] + batch
    ax.set_ylim(max(0.5, min(known) / 3), max(known) * 3)


def draw_parts(ax, rows, name, color, alone):
    tokens, sq_norm = series(rows, "gns/norm_sq_norm")
    if not tokens:
        ax.text(0.5, 0.5, "not measured (gns=off)", ha="center", transform=ax.transAxes)
        return
    nan = float("nan")
    ax.plot(tokens, [v if v and v > 0 else nan for v in series(rows, "gns/norm_tr_sigma")[1]], color=color,
            label="noise, tr Σ" if alone else f"{name}, tr Σ")
    ax.plot(tokens, [v if v and v > 0 else nan for v in sq_norm], color=COLORS[2] if alone else color,
            ls="-" if alone else ":", label="signal, |G|²" if alone else f"{name}, |G|²")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="+", metavar="out_dir")
    parser.add_argument("--out", help="the PNG to write")
    args = parser.parse_args(argv)
    try:
        print(report(*args.out_dirs, path=args.out))
    except ConfigError as e:
        configurator.die(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
