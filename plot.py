"""
Pictures of runs, from their log.jsonl alone.

    python plot.py out/quickstart                   # out/quickstart/report.png
    python plot.py out/run_a out/run_b              # both over each other, in compare.png
    python plot.py out/run_a out/run_b --out=a.png
    python plot.py --compare fixed=out/a,out/b linear=out/c,out/d    # what it took to reach each loss, over seeds:
                                                                     # a table, compare.json and compare.png
    python plot.py --layers out/exact               # a run with gns=exact: phase plot, groups, blocks, regression
"""

import argparse
import math
import os
import sys

import numpy as np

import configurator
import gns
from configurator import ConfigError
from trainer import checkpoint, log, noise

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
    key = noise.shown(measured)
    tokens, value = series(measured, key)
    low, high = (series(measured, key + end)[1] for end in ("_low", "_high"))
    ax.fill_between(tokens, [max(v, 1e-2) for v in low], high, color=color, alpha=0.2, lw=0,
                    label="95% interval" if alone else None)
    ax.plot(tokens, value, color=color, label=f"noise scale, {noise.NOISE[key]}" if alone else f"{name}, noise scale")
    if alone and key != "gns/norm":
        ax.plot(*series(rows, "gns/norm"), color=color, lw=1, ls=":", label="noise scale, the norm layers")
    known = [v for v in value if v == v] + batch
    ax.set_ylim(max(0.05, min(known) / 3), max(known) * 3)


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


# -- compare: tokens, steps and seconds to reach a loss, group against group (Gray et al. 2024, Figure 9)

MEASURES = ("tokens", "steps", "seconds")
SMOOTHING = 0.02  # half-life of a smoothed training loss, as a share of the run


def curve(rows, source):
    """{"tokens", "steps", "seconds", "loss"} as arrays over the evaluations ("val") or logged steps ("train", smoothed)."""
    steps = [r for r in rows if r.get("train/loss") is not None]
    points = steps if source == "train" else [r for r in rows if r.get("val/loss") is not None]
    tokens = np.array([r["tokens"] for r in points], dtype=float)
    loss = np.array([r[f"{source}/loss"] for r in points], dtype=float)
    if source == "train":
        loss = smoothed_loss(tokens, loss, SMOOTHING * tokens[-1])
    clock = ([0, *(r["step"] for r in steps)], [0.0, *(r.get("seconds", np.nan) for r in steps)])
    number = np.array([r["step"] for r in points], dtype=float)
    return {"tokens": tokens, "steps": number, "seconds": np.interp(number, *clock), "loss": loss}


def smoothed_loss(tokens, loss, half_life):
    """Average over the tokens so far that forgets half in half_life, corrected at the start."""
    total = weight = before = 0.0
    result = []
    for t, value in zip(tokens, loss):
        keep = 2.0 ** (-(t - before) / half_life)
        total, weight, before = keep * total + (1 - keep) * value, keep * weight + (1 - keep), t
        result.append(total / weight)
    return np.array(result)


def reach(run, level):
    """{measure: value} where the curve first comes down to `level`, on straight lines between its points; None if never."""
    below = np.flatnonzero(run["loss"] <= level)
    if not len(below):
        return None
    i = below[0]
    if i == 0:
        return {m: float(run[m][0]) for m in MEASURES}
    share = (run["loss"][i - 1] - level) / (run["loss"][i - 1] - run["loss"][i])
    return {m: float(run[m][i - 1] + share * (run[m][i] - run[m][i - 1])) for m in MEASURES}


def spread(values):
    """Mean, lowest, highest and standard deviation over seeds; None where a run is missing, since the rest would mislead."""
    if not values or any(v is None for v in values):
        return None
    return {"mean": float(np.mean(values)), "low": min(values), "high": max(values),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None, "runs": len(values)}


def at_level(runs, level):
    """What a group's runs took to reach `level`, and how many of them did."""
    reached = [reach(run, level) for run in runs]
    return {"reached": sum(r is not None for r in reached), **{m: spread([r and r[m] for r in reached]) for m in MEASURES}}


def less(first, other):
    """The share that each run of `other` took less than the mean of `first`: (mean, low, high), or None."""
    if not (first and other) or first["mean"] <= 0:
        return None
    return {"mean": 1 - other["mean"] / first["mean"], "low": 1 - other["high"] / first["mean"],
            "high": 1 - other["low"] / first["mean"]}


def comparison(groups, source="auto", levels=40):
    """All numbers of a comparison; groups {name: [rows of a run, ...]}, the first is what the others are held against.

    The headline loss is the worst of the lowest losses of the first group's runs: each of them got there.
    """
    if source == "auto":
        evaluated = min(sum("val/loss" in r for r in rows) for runs in groups.values() for rows in runs)
        source = "val" if evaluated >= 4 else "train"
    curves = {name: [curve(rows, source) for rows in runs] for name, runs in groups.items()}
    first = next(iter(curves))
    target = float(max(run["loss"].min() for run in curves[first]))
    top = float(min(run["loss"][0] for runs in curves.values() for run in runs))
    bottom = float(max(run["loss"].min() for runs in curves.values() for run in runs))
    grid = sorted({*np.linspace(top, min(bottom, target), levels).tolist(), target}, reverse=True)
    result = {"loss": source, "first": first, "target": target, "groups": {}}
    for name, runs in curves.items():
        final = spread([next((r["val/loss"] for r in reversed(rows) if r.get("val/loss") is not None), None)
                        for rows in groups[name]])
        table = [{"loss": level, **at_level(runs, level)} for level in grid]
        for row, base in zip(table, result["groups"].get(first, {}).get("levels", table)):
            row["less"] = {m: less(base[m], row[m]) for m in MEASURES}
        result["groups"][name] = {"runs": len(runs), "final_val_loss": final, "levels": table,
                                  "total": {m: spread([float(run[m][-1]) for run in runs]) for m in MEASURES},
                                  "at_target": next(row for row in table if row["loss"] == target)}
    return result


def percent(share, what):
    return f"as many {what}" if abs(share) < 0.005 else f"{abs(share):.0%} {'fewer' if share > 0 else 'more'} {what}"


def verdict(name, group, first):
    """One sentence about a group against the first. Fewer of the one for more of the other is a trade, never a saving."""
    at, base = group["at_target"], first["at_target"]
    if at["reached"] < group["runs"]:
        return f"{name}: {at['reached']} of {group['runs']} runs got there"
    tokens, steps = (at["less"][m]["mean"] for m in ("tokens", "steps"))
    text = f"{name}: {percent(tokens, 'tokens')} and {percent(steps, 'steps')}"
    apart = any(at[m]["low"] > base[m]["high"] or at[m]["high"] < base[m]["low"] for m in ("tokens", "steps"))
    if min(tokens, steps) < -0.005 < 0.005 < max(tokens, steps):
        text += (": reads more tokens to take fewer steps, a trade and no saving" if tokens < 0
                 else ": takes more steps to read fewer tokens, a trade")
    elif max(tokens, steps) >= 0.005:
        text += ": a saving"
    elif min(tokens, steps) <= -0.005:
        text += ": worse"
    return text + ("" if apart else "; the seeds' ranges overlap in both")


def compare_table(result):
    """The comparison in words and columns."""
    first = result["groups"][result["first"]]
    what = "validation" if result["loss"] == "val" else "smoothed training"

    def cell(value, show):
        if value is None:
            return "-"
        return show(value["mean"]) + (f" ({show(value['low'])}-{show(value['high'])})" if value["runs"] > 1 else "")

    rows = [("group", "runs", "tokens", "steps", "seconds", "final val loss", "in all: tokens", "steps")]
    for name, group in result["groups"].items():
        at = group["at_target"]
        rows.append((name, str(group["runs"]), *(cell(at[m], log.count) for m in MEASURES),
                     cell(group["final_val_loss"], "{:.4f}".format), cell(group["total"]["tokens"], log.count),
                     cell(group["total"]["steps"], log.count)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"To reach a {what} loss of {result['target']:.4f}, which every run of {result['first']} did "
             "(mean over seeds, lowest and highest in brackets):", ""]
    lines += ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]
    lines += ["", f"Against {result['first']}:"]
    lines += ["  " + verdict(name, group, first) for name, group in result["groups"].items() if group is not first]
    return "\n".join(lines)


def compare(groups, path="compare.png", source="auto"):
    """Table, JSON and picture of {name: [out_dir, ...]}; returns the table."""
    loaded = {name: [load(d) for d in dirs] for name, dirs in groups.items()}
    result = comparison(loaded, source)
    base = path.removesuffix(".png")
    checkpoint.write_json(base + ".json", {**result, "runs": groups})
    draw_compare(result, {name: [curve(rows, result["loss"]) for rows in runs] for name, runs in loaded.items()}, base + ".png")
    return f"{compare_table(result)}\n\nPicture: {base}.png    Numbers: {base}.json"


def draw_compare(result, curves, path):
    plt = pyplot()
    figure, (loss_ax, less_ax, pareto_ax) = plt.subplots(1, 3, figsize=(15, 5), layout="constrained")
    what, labels = "Validation" if result["loss"] == "val" else "Smoothed training", []
    for color, (name, runs) in zip(COLORS * 9, curves.items()):
        group = result["groups"][name]
        grid = np.linspace(max(r["tokens"][0] for r in runs), min(r["tokens"][-1] for r in runs), 200)
        losses = np.array([np.interp(grid, r["tokens"], r["loss"]) for r in runs])
        loss_ax.plot(grid, losses.mean(0), color=color, label=f"{name} ({len(runs)} run{'s' if len(runs) > 1 else ''})")
        loss_ax.fill_between(grid, losses.min(0), losses.max(0), color=color, alpha=0.2, lw=0)
        rows = [row for row in group["levels"] if row["less"]["tokens"]]
        if name != result["first"]:
            part = {end: [100 * row["less"]["tokens"][end] for row in rows] for end in ("mean", "low", "high")}
            less_ax.plot([row["loss"] for row in rows], part["mean"], color=color, label=name)
            less_ax.fill_between([row["loss"] for row in rows], part["low"], part["high"], color=color, alpha=0.2, lw=0)
        at = group["at_target"]
        if at["tokens"]:
            error = [[[at[m]["mean"] - at[m]["low"]], [at[m]["high"] - at[m]["mean"]]] for m in ("steps", "tokens")]
            pareto_ax.errorbar(at["steps"]["mean"], at["tokens"]["mean"], xerr=error[0], yerr=error[1], fmt="o", ms=8,
                               color=color, capsize=3)
            labels.append((at["tokens"]["mean"], at["steps"]["mean"], name))
    for i, (tokens, steps, name) in enumerate(sorted(labels)):  # neighbours one below, one above: they do not meet
        pareto_ax.annotate(name, (steps, tokens), xytext=(8, 6 if i % 2 else -15), textcoords="offset points")
    loss_ax.set_title(f"{what} loss over tokens")
    loss_ax.set_xlabel("tokens")
    top, bottom = (pick(run["loss"]) for pick, run in ((np.median, next(iter(curves.values()))[0]), (np.min, {
        "loss": np.concatenate([r["loss"] for runs in curves.values() for r in runs])})))
    loss_ax.set_ylim(bottom - 0.1 * (top - bottom), top + 1.5 * (top - bottom) + 1e-9)
    loss_ax.axhline(result["target"], color="#888888", lw=1, ls=":")
    less_ax.set_title(f"Fewer tokens to a loss than {result['first']} (%)")
    less_ax.set_xlabel(f"{what.lower()} loss reached")
    less_ax.axhline(0, color=COLORS[0], lw=1.8)
    less_ax.invert_xaxis()
    less_ax.set_ylim(max(less_ax.get_ylim()[0], -100), min(less_ax.get_ylim()[1], 100))
    pareto_ax.set_title(f"What a loss of {result['target']:.3f} takes")
    pareto_ax.set_xlabel("optimizer steps")
    pareto_ax.set_ylabel("tokens")
    pareto_ax.margins(0.25)
    pareto_ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    pareto_ax.yaxis.set_major_formatter(lambda v, _: log.count(v))
    loss_ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    for ax in (loss_ax, less_ax):
        if ax.get_legend_handles_labels()[0]:
            ax.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_groups(words):
    """{name: [out_dir, ...]} of name=dir,dir arguments."""
    groups = {}
    for word in words:
        name, eq, dirs = word.partition("=")
        dirs = [d for d in dirs.split(",") if d]
        if not (name and eq and dirs):
            raise ConfigError(f"--compare: '{word}' is not name=out_dir,out_dir")
        if name in groups:
            raise ConfigError(f"--compare: group '{name}' comes twice")
        groups[name] = dirs
    if len(groups) < 2:
        raise ConfigError("--compare: needs at least two groups, name=out_dir,out_dir each; the first is what the others are "
                          "held against")
    return groups




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


def exact_rows(out_dir):
    """The logged steps of a run with gns=exact, enough of them to say something."""
    rows = [r for r in load(out_dir) if r.get("gns/total_step_tr_sigma") is not None]
    if len(rows) < 20:
        raise ConfigError(f"{out_dir}: {len(rows)} logged steps with gns=exact, at least 20 are needed "
                          "(log_interval=1 logs all)")
    return rows


def draw_phase(ax, rows):
    """Noise over signal, each group's path through the run."""
    nan = float("nan")
    for color, group in zip(COLORS, groups_of(rows)[0]):
        sq_norm, tr_sigma = (series(rows, f"gns/{group}_{part}")[1] for part in ("sq_norm", "tr_sigma"))
        sq_norm, tr_sigma = ([v if v and v > 0 else nan for v in values] for values in (sq_norm, tr_sigma))
        ax.plot(sq_norm, tr_sigma, color=color, lw=1.2)
        ax.plot(sq_norm[-1:], tr_sigma[-1:], "o", color=color, label=group)
    ax.set_title("Phase plot (dot: end of the run)")
    ax.set_xlabel("signal, |G|²")
    ax.set_ylabel("noise, tr Σ")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.legend()


def draw_noise_scales(ax, rows, names, colors, title):
    for color, name in zip(colors, names):
        ax.plot(*series(rows, f"gns/{name}"), color=color, label=name.replace("_", " "), lw=2.4 if name == "total" else 1.5)
    ax.set_title(title)
    ax.set_xlabel("tokens")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    ax.legend()


def draw_fit(ax, numbers, what, title):
    """`what` ("r" or "slope") of the regression of the total on each group, over the smoothing."""
    half_lives = list(numbers)
    for color, group in list(zip(COLORS[1:], numbers[half_lives[0]])):
        values = [numbers[h][group] for h in half_lives]
        ax.plot(half_lives, [v[what] for v in values], color=color, marker="o", ms=4,
                label=group if what == "slope" else f"{group}: slope {values[-1]['slope']:.2f}")
    ax.set_title(title)
    ax.set_xlabel("smoothing half-life (tokens)")
    ax.set_xscale("log")
    ax.set_xticks(half_lives, minor=False)
    ax.xaxis.set_minor_formatter(lambda *_: "")
    ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    if what == "r":
        ax.set_ylim(top=1.02)
    ax.legend()


def layers(out_dir, path=None):
    """Inside the model, from a run with gns=exact: phase plot, noise scale per group and per block, and how well each group
    predicts the total (Gray et al. 2024, figures 5 and 7). Returns (path of the PNG, the regression's numbers)."""
    rows = exact_rows(out_dir)
    path = path or os.path.join(out_dir, "layers.png")
    (kinds, blocks), numbers = groups_of(rows), layer_numbers(rows)
    plt = pyplot()
    figure, ((phase, over), (depth, fit)) = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
    draw_phase(phase, rows)
    draw_noise_scales(over, rows, kinds, COLORS, "Noise scale by group (sequences)")
    shades = [plt.get_cmap("viridis")(0.9 * i / len(blocks)) for i in range(len(blocks))]
    draw_noise_scales(depth, rows, blocks, shades, "Noise scale by block (sequences)")
    draw_fit(fit, numbers, "r", "Pearson r with the total")
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
    parser.add_argument("out_dirs", nargs="*", metavar="out_dir")
    parser.add_argument("--out", help="the PNG to write")
    parser.add_argument("--compare", nargs="+", metavar="name=out_dir,out_dir", help="groups of runs; the first is the base")
    parser.add_argument("--loss", choices=("auto", "val", "train"), default="auto",
                        help="what --compare goes by: validation loss, or training loss, smoothed")
    parser.add_argument("--layers", action="store_true", help="the inside of one run with gns=exact")
    args = parser.parse_args(argv)
    if bool(args.compare) == bool(args.out_dirs):
        parser.error("give run folders, or --compare with groups of them")
    try:
        if args.compare:
            print(compare(parse_groups(args.compare), args.out or "compare.png", args.loss))
        elif args.layers:
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
