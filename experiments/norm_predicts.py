"""
Do the norm layers predict the whole model's noise scale? (Gray et al. 2024, arXiv 2411.00999, Figure 7)

    python experiments/norm_predicts.py                # the three runs with gns=exact of phase_plot.py
    python experiments/norm_predicts.py --seeds 5
    python experiments/norm_predicts.py --config config/gpt_111m.py --device cuda

The total's noise scale regressed on each group's, over the run, for several half-lives of the averages; in the plain metric,
which is the paper's, and in the one that Adam steps in.
"""

import sys

import numpy as np
from common import Experiment
from phase_plot import SHARED, exact_runs

from plots import layers, style

PAPER = ("The paper: the norm layers' noise scale predicts the total's, with a Pearson r near 1, the better the more both are "
         "smoothed. Its published run has a slope of about 2 (1.94, r 0.993, read off its plot); 1.4 is quoted second-hand.")


def over_seeds(per_seed):
    """[layers.regressions of a run] -> {half-life: {group: mean slope and r over runs; lowest and highest of each, where the
    slope's are the ends of its 95% intervals}}."""
    def of(fits):
        every = {k: [fit[k] for fit in fits] for k in fits[0]}
        return {"slope": float(np.mean(every["slope"])), "slope_low": min(every["slope_low"]),
                "slope_high": max(every["slope_high"]), "r": float(np.mean(every["r"])), "r_low": min(every["r"]),
                "r_high": max(every["r"])}
    return {h: {g: of([seed[h][g] for seed in per_seed]) for g in per_seed[0][h]} for h in per_seed[0]}


def finding(result):
    (short, least), *_, (long, most) = sorted(result["half_life_tokens"].items())
    adam, others = result["half_life_tokens_adam"], ", ".join(f"{g} {own['r']:.3f}" for g, own in most.items() if g != "norm")
    words = "Pearson r {r:.3f} ({r_low:.3f} to {r_high:.3f} over runs), slope {slope:.2f} ({slope_low:.2f} to {slope_high:.2f})"
    return (f"Here, the total on the norm layers at a half-life of {long:,} tokens: {words.format(**most['norm'])}; r "
            f"{least['norm']['r']:.3f} at {short:,}; the other groups' r at the longest: {others}; in Adam's metric "
            f"{words.format(**adam[max(adam)]['norm'])}.")


def draw(result, rows, path):
    plain, adam = result["half_life_tokens"], result["half_life_tokens_adam"]
    figure, (over, slope, r) = style.panels(3, 16, 5)
    half_life = sorted(plain)[len(plain) // 2]
    for color, group in zip(style.COLORS, layers.groups_of(rows)[0]):
        over.plot([row["tokens"] for row in rows], layers.smoothed(rows, group, half_life), color=color, label=group)
    style.dress(over, f"Noise scale, half-life {half_life:,} tokens (sequences)", "tokens", "counts", "zero")
    slope.axhline(1.94, color="#888888", ls="--", lw=1, label="the paper's run, norm")
    r.plot(list(adam), [groups["norm"]["r"] for groups in adam.values()], "s--", ms=4, color=style.COLORS[1],
           label=f"norm, Adam's metric: slope {adam[max(adam)]['norm']['slope']:.2f}")
    for ax, what, title in ((slope, "slope", "Slope of the total on each group"), (r, "r", "Pearson r with the total")):
        norm = [groups["norm"] for groups in plain.values()]
        ax.fill_between(list(plain), [n[f"{what}_low"] for n in norm], [n[f"{what}_high"] for n in norm],
                        color=style.COLORS[1], alpha=0.2, lw=0)
        layers.draw_fit(ax, plain, what, title)
    style.save(figure, path)


def measure(runs):
    per_seed = [layers.exact_rows(run) for run in exact_runs(runs, runs.args.seeds)]
    plain, adam = (over_seeds([layers.regressions(rows, metric=metric) for rows in per_seed]) for metric in ("", "_adam"))
    return {"seeds": runs.args.seeds, "half_life_tokens": plain, "half_life_tokens_adam": adam}, per_seed[0]


main = Experiment("norm_predicts", __doc__, PAPER, measure, finding, draw, seeds=3, **SHARED)

if __name__ == "__main__":
    sys.exit(main())
