"""
Groups of runs against each other: tokens, steps and seconds that each took to reach a loss, over seeds (Gray et al. 2024,
arXiv 2411.00999, Figure 9). Deciding is comparison(), saying table() and verdict(), drawing draw().

    python plot.py --compare fixed=out/a,out/b linear=out/c,out/d
"""

import os

import numpy as np

from configurator import ConfigError
from plots import comparable, style
from system import output
from trainer import log, tradeoff
from trainer.reader import MEASURES, curve, load, reach


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
    alive = [run for run in curves[first] if not run["died"]]
    if not alive:
        raise ConfigError(f"--compare: all runs of {first} ended without a finite loss: nothing to hold the others against")
    target = float(max(run["loss"].min() for run in alive))
    top = float(min(run["loss"][0] for runs in curves.values() for run in runs))
    bottom = float(max(run["loss"].min() for runs in curves.values() for run in runs))
    losses = sorted({*np.linspace(top, min(bottom, target), levels).tolist(), target}, reverse=True)
    result = {"loss": source, "first": first, "target": target, "groups": {}}
    for name, runs in curves.items():
        final = spread([None if log.died(rows) else
                        next((r["val/loss"] for r in reversed(rows) if r.get("val/loss") is not None), None)
                        for rows in groups[name]])
        reached = [{"loss": level, **at_level(runs, level)} for level in losses]
        for row, base in zip(reached, result["groups"].get(first, {}).get("levels", reached)):
            row["less"] = {m: less(base[m], row[m]) for m in MEASURES}
        result["groups"][name] = {"runs": len(runs), "died": sum(run["died"] for run in runs), "final_val_loss": final,
                                  "levels": reached,
                                  "total": {m: spread([float(run[m][-1]) for run in runs]) for m in MEASURES},
                                  "at_target": next(row for row in reached if row["loss"] == target)}
    return result


# -- saying

def cell(value, show, none="-"):
    """Text of a spread: its mean, lowest and highest in brackets."""
    if value is None:
        return none
    return show(value["mean"]) + (f" ({show(value['low'])}-{show(value['high'])})" if value["low"] != value["high"] else "")


def table(result):
    what = "validation" if result["loss"] == "val" else "smoothed training"
    cells = [("group", "runs", "tokens", "steps", "seconds", "final val loss", "in all: tokens", "steps")]
    for name, group in result["groups"].items():
        runs = f"{group['runs']}, {group['died']} died" if group["died"] else str(group["runs"])
        cells.append((name, runs, *(cell(group["at_target"][m], log.count) for m in MEASURES),
                      cell(group["final_val_loss"], "{:.4f}".format), cell(group["total"]["tokens"], log.count),
                      cell(group["total"]["steps"], log.count)))
    return (f"To reach a {what} loss of {result['target']:.4f}, which every run of {result['first']} did (mean over seeds, "
            f"lowest and highest in brackets):\n\n{style.table(cells, str.ljust)}")


def verdict(result):
    first = result["groups"][result["first"]]
    lines = ["  " + against(name, group, first) for name, group in result["groups"].items() if group is not first]
    return "\n".join([f"Against {result['first']}:", *lines])


def percent(share, what):
    return f"as many {what}" if abs(share) < 0.005 else f"{abs(share):.0%} {'fewer' if share > 0 else 'more'} {what}"


def against(name, group, first):
    """One sentence about a group against the first. Fewer of the one for more of the other is a trade, never a saving."""
    at, base = group["at_target"], first["at_target"]
    if at["reached"] < group["runs"]:
        died = f", {group['died']} ended without a finite loss" if group["died"] else ""
        return f"{name}: {at['reached']} of {group['runs']} runs got there{died}"
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


# -- drawing

def draw(result, loaded, path):
    """loaded {name: [rows of a run, ...]}, as comparison() had them."""
    figure, (loss_ax, less_ax, pareto_ax) = style.panels(3, 15, 5)
    curves = {name: [curve(rows, result["loss"]) for rows in runs] for name, runs in loaded.items()}
    what = "Validation" if result["loss"] == "val" else "Smoothed training"
    draw_losses(loss_ax, curves)
    loss_ax.axhline(result["target"], color="#888888", lw=1, ls=":")
    draw_less(less_ax, result)
    draw_pareto(pareto_ax, result)
    style.dress(loss_ax, f"{what} loss over tokens", "tokens", "counts")
    style.dress(less_ax, f"Fewer tokens to a loss than {result['first']} (%)", f"{what.lower()} loss reached")
    style.dress(pareto_ax, f"What a loss of {result['target']:.3f} takes", "optimizer steps", ylabel="tokens")
    style.save(figure, path)


def draw_losses(ax, curves):
    """Mean and range over seeds; the axis leaves the steep start out."""
    for color, (name, runs) in zip(style.COLORS * 9, curves.items()):
        ends = max(r["tokens"][0] for r in runs), min(r["tokens"][-1] for r in runs)
        tokens = np.unique(np.linspace(*ends, 200))  # one, where there is one evaluation
        losses = np.array([np.interp(tokens, r["tokens"], r["loss"]) for r in runs])
        style.line(ax, tokens, losses.mean(0), color=color, label=f"{name} ({len(runs)} run{'s' if len(runs) > 1 else ''})")
        ax.fill_between(tokens, losses.min(0), losses.max(0), color=color, alpha=0.2, lw=0)
    top = np.median(next(iter(curves.values()))[0]["loss"])
    bottom = min(r["loss"].min() for runs in curves.values() for r in runs)
    ax.set_ylim(bottom - 0.1 * (top - bottom), top + 1.5 * (top - bottom) + 1e-9)


def draw_less(ax, result):
    """How many tokens less than the first group, in per cent, at each loss."""
    for color, (name, group) in zip(style.COLORS * 9, result["groups"].items()):
        rows = [row for row in group["levels"] if row["less"]["tokens"]]
        if name != result["first"]:
            losses = [row["loss"] for row in rows]
            mean, low, high = ([100 * row["less"]["tokens"][end] for row in rows] for end in ("mean", "low", "high"))
            style.line(ax, losses, mean, color=color, label=name)
            ax.fill_between(losses, low, high, color=color, alpha=0.2, lw=0)
    ax.axhline(0, color=style.COLORS[0], lw=1.8)
    ax.invert_xaxis()
    ax.set_ylim(max(ax.get_ylim()[0], -100), min(ax.get_ylim()[1], 100))


def draw_pareto(ax, result):
    """Tokens against steps at the headline loss, with the range of the seeds."""
    for color, (name, group) in zip(style.COLORS * 9, result["groups"].items()):
        steps, tokens = (group["at_target"][m] for m in ("steps", "tokens"))
        if tokens:
            xerr, yerr = ([[v["mean"] - v["low"]], [v["high"] - v["mean"]]] for v in (steps, tokens))
            ax.errorbar(steps["mean"], tokens["mean"], xerr=xerr, yerr=yerr, fmt="o", ms=8, color=color, capsize=3, label=name)
    ax.margins(0.25)
    style.counts(ax.xaxis)
    style.counts(ax.yaxis)
    draw_tradeoff(ax, result.get("tradeoff") or {})


def draw_tradeoff(ax, fitted):
    """The fitted curve of tokens against steps, and that of one run's prediction, the middle one."""
    sizes = fitted.get("batches") or [p["batch"] for p in fitted.get("predictions", [])]
    if not sizes:
        return
    batch = np.geomspace(sizes[0] / 2, sizes[-1] * 2, 100)
    if "critical" in fitted:
        steps = tradeoff.steps_at(fitted, batch)
        ax.plot(steps, steps * batch * fitted["block"], color="#444444", lw=1.4, label="fitted curve")
    if fitted["predictions"]:
        one = fitted["predictions"][len(fitted["predictions"]) // 2]
        start = one["steps"][one["batch"]] / (1 + one["critical"] / one["batch"])
        steps = start * (1 + one["critical"] / batch)
        ax.plot(steps, steps * batch * fitted["block"], color="#888888", lw=1.4, ls="--",
                label=f"predicted from the run at batch {one['batch']:.3g}")
    for axis, scale in ((ax.xaxis, ax.set_xscale), (ax.yaxis, ax.set_yscale)):
        scale("log")
        style.decades(axis, log.count)


# -- the command

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


def compare(groups, path=None, source="auto"):
    """Writes JSON and picture of {name: [out_dir, ...]}; returns table and verdict."""
    beside_the_first = os.path.join(next(iter(groups.values()))[0], "compare")
    base = beside_the_first if path is None else path.removesuffix(".png")
    for name in (base + ".json", base + ".png"):
        output.check(name)
    careful = comparable.check([d for dirs in groups.values() for d in dirs])
    loaded = {name: [load(d) for d in dirs] for name, dirs in groups.items()}
    result = comparison(loaded, source)
    result["tradeoff"] = tradeoff_of(result, groups, loaded)
    output.write_json(base + ".json", {**result, "runs": groups, "careful": careful})
    draw(result, loaded, base + ".png")
    curve_words = tradeoff.words(result["tradeoff"], f"the loss of {result['target']:.4f}")
    return "\n".join([*careful, table(result), "", verdict(result), "", *curve_words, "",
                      f"Picture: {base}.png    Numbers: {base}.json"])


def tradeoff_of(result, groups, loaded):
    """The curve through all runs that kept one batch until they reached the headline loss."""
    runs, blocks = [], set()
    for name, dirs in groups.items():
        for folder, rows in zip(dirs, loaded[name]):
            there = reach(curve(rows, result["loss"]), result["target"])
            sizes = {r["batch_size"] for r in rows if "batch_size" in r and there and r["step"] <= there["steps"]}
            if there and len(sizes) == 1:
                blocks.add(next((r["tokens"] // r["examples"] for r in reversed(rows) if r.get("examples")), None))
                runs.append((folder, there["steps"], there["tokens"]))
    return tradeoff.of_runs(runs, blocks.pop() if len(blocks) == 1 else None)
