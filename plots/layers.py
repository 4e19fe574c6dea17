"""
The inside of a run with gns=exact: phase plot, noise scale of each group and block, and how well each group predicts the total
(Gray et al. 2024, arXiv 2411.00999, figures 5 and 7).

    python plot.py --layers out/exact
"""

import math
import os

import numpy as np

import gns
from configurator import ConfigError
from plots import style
from plots.style import COLORS
from trainer import log
from trainer.reader import load, series


def groups_of(rows):
    """Groups of an exact run that have a pair in every step, total first, blocks apart."""
    keys = [k.removeprefix("gns/").removesuffix("_step_tr_sigma") for k in rows[-1] if k.endswith("_step_tr_sigma")]
    kinds = [k for k in ("total", "norm", "attention", "mlp", "embedding", "head") if k in keys]
    return kinds, [k for k in keys if k.startswith("block_")]


def smoothed(rows, group, half_life_tokens, early=0.2):
    """The noise scale of a group after each row, from the rows' own pairs, smoothed anew. NaN where undetermined."""
    scale, values, tokens = gns.NoiseScale(half_life_tokens, early), [], 0
    for row in rows:
        scale.update(row[f"gns/{group}_step_sq_norm"], row[f"gns/{group}_step_tr_sigma"], row["tokens"] - tokens)
        tokens = row["tokens"]
        values.append(scale.tr_sigma / scale.sq_norm if scale.sq_norm > 0 else float("nan"))
    return np.array(values)


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


def regressions(rows, burn_in=0.1, metric=""):
    """{smoothing half-life in tokens: {group: regression of the total on it}}, the first part of the run left out; metric
    "_adam" for Adam's."""
    rows = [row for row in rows if f"gns/total{metric}_step_tr_sigma" in row]  # there is no metric in the first step
    end, kinds = rows[-1]["tokens"], [g for g in groups_of(rows)[0] if f"gns/{g}{metric}_step_tr_sigma" in rows[-1]]
    late = np.array([row["tokens"] > burn_in * end for row in rows])
    numbers = {}
    for share in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2):
        half_life = int(share * end)
        total = smoothed(rows, f"total{metric}", half_life)[late]
        numbers[half_life] = {g: regression(total, smoothed(rows, g + metric, half_life)[late]) for g in kinds if g != "total"}
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
    for color, group in zip(COLORS, groups_of(rows)[0]):
        signal, noise = (style.positive(series(rows, f"gns/{group}_{part}")[1]) for part in ("sq_norm", "tr_sigma"))
        ax.plot(signal, noise, color=color, lw=1.2)
        ax.plot(signal[-1:], noise[-1:], "o", color=color, label=group)
    ax.set(title="Phase plot (dot: end of the run)", xlabel="signal, |G|²", ylabel="noise, tr Σ", xscale="log", yscale="log")
    ax.legend()


def draw_noise_scales(ax, rows, names, colors, title):
    for color, name in zip(colors, names):
        ax.plot(*series(rows, f"gns/{name}"), color=color, label=name.replace("_", " "), lw=2.4 if name == "total" else 1.5)
    style.dress(ax, title, "tokens", "counts", "log")


def draw_fit(ax, numbers, what, title):
    """`what` ("r" or "slope") of the regression of the total on each group, over the smoothing."""
    half_lives = list(numbers)
    for color, group in zip(COLORS[1:], numbers[half_lives[0]]):
        values = [numbers[h][group] for h in half_lives]
        ax.plot(half_lives, [v[what] for v in values], color=color, marker="o", ms=4,
                label=group if what == "slope" else f"{group}: slope {values[-1]['slope']:.2f}")
    ax.set(title=title, xlabel="smoothing half-life (tokens)", xscale="log")
    ax.set_xticks(half_lives, minor=False)
    ax.xaxis.set_minor_formatter(lambda *_: "")
    style.counts(ax.xaxis)
    if what == "r":
        ax.set_ylim(top=1.02)
    ax.legend()


def draw(out_dir, path=None):
    """layers.png of a run; returns (its path, the regressions' numbers)."""
    rows = exact_rows(out_dir)
    path = path or os.path.join(out_dir, "layers.png")
    (kinds, blocks), numbers = groups_of(rows), regressions(rows)
    plt = style.pyplot()
    figure, ((phase, over), (depth, fit)) = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
    draw_phase(phase, rows)
    draw_noise_scales(over, rows, kinds, COLORS, "Noise scale by group (sequences)")
    shades = [plt.get_cmap("viridis")(0.9 * i / len(blocks)) for i in range(len(blocks))]
    draw_noise_scales(depth, rows, blocks, shades, "Noise scale by block (sequences)")
    draw_fit(fit, numbers, "r", "Pearson r with the total")
    style.save(figure, path)
    return path, numbers


def table(numbers):
    lines = ["total on group: slope (95% interval), Pearson r, by smoothing half-life in tokens"]
    for half_life, groups in numbers.items():
        lines.append(f"{log.count(half_life):>6}  " + "  ".join(
            f"{g} {n['slope']:.2f} ({n['slope_low']:.2f} to {n['slope_high']:.2f}), {n['r']:.3f}" for g, n in groups.items()))
    return "\n".join(lines)
