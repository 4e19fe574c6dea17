"""
Pictures of runs, from their log.jsonl alone.

    python plot.py out/quickstart                   # out/quickstart/report.png
    python plot.py out/run_a out/run_b              # both over each other, in compare.png
    python plot.py out/run_a out/run_b --out=a.png
    python plot.py --layers out/exact               # a run with gns=exact: phase plot, groups, blocks, regression
"""

import argparse
import math
import os
import sys

import numpy as np

import configurator
import gns
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


def groups_of(rows):
    """Groups of an exact run that have a pair in every step, total first, blocks apart."""
    keys = [k.removeprefix("gns/").removesuffix("_step_tr_sigma") for k in rows[-1] if k.endswith("_step_tr_sigma")]
    kinds = [k for k in ("total", "norm", "attention", "mlp", "embedding", "head") if k in keys]
    return kinds, [k for k in keys if k.startswith("block_")]


def smoothed(rows, group, half_life_tokens, early=0.2):
    """The noise scale of a group after each row, from the rows' own pairs, smoothed anew. NaN where undetermined."""
    scale, found, tokens = gns.NoiseScale(half_life_tokens, early), [], 0
    for row in rows:
        scale.update(row[f"gns/{group}_step_sq_norm"], row[f"gns/{group}_step_tr_sigma"], row["tokens"] - tokens)
        tokens = row["tokens"]
        found.append(scale.tr_sigma / scale.sq_norm if scale.sq_norm > 0 else float("nan"))
    return np.array(found)


def regression(total, part, blocks=10):
    """Slope and Pearson r of total on part, and the slope's 95% interval: a jackknife over contiguous stretches of the run,
    since neighbouring values share their examples."""
    def fit(keep):
        x, y = part[keep], total[keep]
        return np.polyfit(x, y, 1)[0], np.corrcoef(x, y)[0, 1]
    known = np.flatnonzero(np.isfinite(total) & np.isfinite(part))
    slope, r = fit(known)
    without = np.array([fit(np.setdiff1d(known, stretch))[0] for stretch in np.array_split(known, blocks)])
    error = math.sqrt((blocks - 1) / blocks * ((without - without.mean()) ** 2).sum())
    z = gns.student_t(0.95, blocks - 1)
    return {"slope": slope, "slope_low": slope - z * error, "slope_high": slope + z * error, "r": r}


def layer_numbers(rows, burn_in=0.1):
    """{smoothing half-life in tokens: {group: regression of the total on it}}, the first part of the run left out."""
    end, kinds = rows[-1]["tokens"], groups_of(rows)[0]
    late = np.array([row["tokens"] > burn_in * end for row in rows])
    numbers = {}
    for share in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
        half_life = int(share * end)
        total = smoothed(rows, "total", half_life)[late]
        numbers[half_life] = {g: regression(total, smoothed(rows, g, half_life)[late]) for g in kinds if g != "total"}
    return numbers


def layers(out_dir, path=None):
    """Inside the model, from a run with gns=exact: phase plot, noise scale per group and per block, and how well each group
    predicts the total (Gray et al. 2024, figures 5 and 7). Returns (path of the PNG, the regression's numbers)."""
    rows = [r for r in load(out_dir) if r.get("gns/total_step_tr_sigma") is not None]
    if len(rows) < 20:
        raise ConfigError(f"{out_dir}: {len(rows)} logged steps with gns=exact, at least 20 are needed "
                          "(log_interval=1 logs all)")
    path = path or os.path.join(out_dir, "layers.png")
    (kinds, blocks), numbers = groups_of(rows), layer_numbers(rows)
    plt = pyplot()
    figure, ((phase, over), (depth, fit)) = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
    nan = float("nan")
    for color, group in zip(COLORS, kinds):
        signal, noise = (series(rows, f"gns/{group}_{part}")[1] for part in ("sq_norm", "tr_sigma"))
        signal, noise = ([v if v and v > 0 else nan for v in values] for values in (signal, noise))
        phase.plot(signal, noise, color=color, lw=1.2)
        phase.plot(signal[-1:], noise[-1:], "o", color=color, label=group)
        over.plot(*series(rows, f"gns/{group}"), color=color, label=group, lw=2.4 if group == "total" else 1.5)
        if group != "total":
            half_lives = list(numbers)
            fit.plot(half_lives, [numbers[h][group]["r"] for h in half_lives], color=color, marker="o", ms=4,
                     label=f"{group}: slope {numbers[half_lives[-1]][group]['slope']:.2f}")
    shades = plt.get_cmap("viridis")
    for i, block in enumerate(blocks):
        depth.plot(*series(rows, f"gns/{block}"), color=shades(0.9 * i / len(blocks)), label=block.replace("_", " "))
    for ax, title, x, y in ((phase, "Phase plot (dot: end of the run)", "signal, |G|²", "noise, tr Σ"),
                            (over, "Noise scale by group (sequences)", "tokens", ""),
                            (depth, "Noise scale by block (sequences)", "tokens", ""),
                            (fit, "Pearson r with the total", "smoothing half-life (tokens)", "")):
        ax.set_title(title)
        ax.set_xlabel(x)
        ax.set_ylabel(y)
        ax.legend()
    phase.set_xscale("log")
    phase.set_yscale("log")
    fit.set_xscale("log")
    fit.set_ylim(top=1.02)
    for ax in (over, depth):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    for ax in (over, depth, fit):
        ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path, numbers


def layers_table(numbers):
    lines = ["total on group: slope (95% interval), Pearson r, by smoothing half-life in tokens"]
    for half_life, groups in numbers.items():
        lines.append(f"{log.count(half_life):>6}  " + "  ".join(
            f"{g} {n['slope']:.2f} ({n['slope_low']:.2f} to {n['slope_high']:.2f}), {n['r']:.3f}" for g, n in groups.items()))
    return "\n".join(lines)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="+", metavar="out_dir")
    parser.add_argument("--out", help="the PNG to write")
    parser.add_argument("--layers", action="store_true", help="the inside of one run with gns=exact")
    args = parser.parse_args(argv)
    try:
        if args.layers:
            for out_dir in args.out_dirs:
                path, numbers = layers(out_dir, args.out)
                print(layers_table(numbers), path, sep="\n")
        else:
            print(report(*args.out_dirs, path=args.out))
    except ConfigError as e:
        configurator.die(e)
    return 0


if __name__ == "__main__":
    sys.exit(main())
