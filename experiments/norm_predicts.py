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
from common import parse, write
from phase_plot import FOLDER, SETTINGS, TINY, exact_runs

from plots import layers, style

PAPER = ("The paper: the norm layers' noise scale predicts the total's, with a Pearson r near 1, the better the more both are "
         "smoothed. Its published run has a slope of about 2 (1.94, r 0.993, read off its plot); 1.4 is quoted second-hand.")


def over_seeds(per_seed):
    """[layer_numbers of a run] -> {half-life: {group: mean slope and r over runs; lowest and highest of each, where the
    slope's are the ends of its 95% intervals}}."""
    def of(values):
        key = {k: [v[k] for v in values] for k in values[0]}
        return {"slope": float(np.mean(key["slope"])), "slope_low": min(key["slope_low"]), "slope_high": max(key["slope_high"]),
                "r": float(np.mean(key["r"])), "r_low": min(key["r"]), "r_high": max(key["r"])}
    return {h: {g: of([seed[h][g] for seed in per_seed]) for g in per_seed[0][h]} for h in per_seed[0]}


def finding(numbers, adam):
    (short, least), *_, (long, most) = sorted(numbers.items())
    norm = most["norm"]
    others = ", ".join(f"{g} {most[g]['r']:.3f}" for g in most if g != "norm")
    claim = ("so they predict it" if norm["r_low"] > 0.9 else "so they predict it roughly" if norm["r_low"] > 0.7 else
             "so they do not predict it")
    more = "smoothing more helps" if norm["r"] > least["norm"]["r"] else "smoothing more does not help"
    return (f"Here: Pearson r {norm['r']:.3f} ({norm['r_low']:.3f} to {norm['r_high']:.3f} over runs) and slope "
            f"{norm['slope']:.2f} (95% intervals {norm['slope_low']:.2f} to {norm['slope_high']:.2f}) of the total on the norm "
            f"layers at a half-life of {long:,} tokens, r {least['norm']['r']:.3f} and slope {least['norm']['slope']:.2f} at "
            f"{short:,}: {claim}, and {more}; the other groups' r at the longest: {others}; in Adam's metric the norm layers' "
            "r {r:.3f} ({r_low:.3f} to {r_high:.3f}), slope {slope:.2f} ({slope_low:.2f} to {slope_high:.2f}).".format(
                **adam[max(adam)]["norm"]))


def draw(rows, numbers, adam, path):
    figure, (over, slope, r) = style.pyplot().subplots(1, 3, figsize=(16, 5), layout="constrained")
    half_life = sorted(numbers)[len(numbers) // 2]
    tokens = [row["tokens"] for row in rows]
    for color, group in zip(style.COLORS, layers.groups_of(rows)[0]):
        scale = layers.smoothed(rows, group, half_life)
        over.plot(tokens, scale, color=color, label=group, lw=2.4 if group == "total" else 1.5)
        if group == "norm":
            over.plot(tokens, scale * numbers[half_life]["norm"]["slope"], color=color, ls=":", label="norm x slope")
    over.set_title(f"Noise scale, half-life {half_life:,} tokens")
    over.set_xlabel("tokens")
    over.set_ylabel("sequences")
    over.set_ylim(bottom=0)
    style.counts(over.xaxis)
    over.legend()
    layers.draw_fit(slope, numbers, "slope", "Slope of the total on each group")
    norm = [numbers[h]["norm"] for h in numbers]
    slope.fill_between(list(numbers), [n["slope_low"] for n in norm], [n["slope_high"] for n in norm], color=style.COLORS[1],
                       alpha=0.2, lw=0)
    slope.legend(loc="upper right", ncols=2)
    slope.axhline(1.94, color="#888888", ls="--", lw=1)
    slope.annotate("the paper's run, norm: 1.94", (min(numbers), 1.94), xytext=(0, 4), textcoords="offset points",
                   color="#666666")
    layers.draw_fit(r, numbers, "r", "Pearson r with the total")
    r.plot(list(adam), [groups["norm"]["r"] for groups in adam.values()], "s--", ms=4, color=style.COLORS[1],
           label=f"norm, Adam's metric: slope {adam[max(adam)]['norm']['slope']:.2f}")
    drawn = [*(own["r"] for groups in numbers.values() for own in groups.values()), *(g["norm"]["r"] for g in adam.values())]
    r.set_ylim(bottom=min(drawn) - 0.15)  # room for the legend
    r.legend(loc="lower right")
    r.fill_between(list(numbers), [n["r_low"] for n in norm], [n["r_high"] for n in norm], color=style.COLORS[1], alpha=0.2,
                   lw=0)
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "norm_predicts", __doc__, seeds=3, settings=SETTINGS, tiny=TINY, folder=FOLDER)
    per_seed = [layers.exact_rows(run) for run in exact_runs(config, args, seeds=range(args.seeds))]
    numbers, adam = (over_seeds([layers.regressions(rows, metric=metric) for rows in per_seed]) for metric in ("", "_adam"))
    draw(per_seed[0], numbers, adam, write(args, config, PAPER, finding(numbers, adam), {
        "seeds": args.seeds, "half_life_tokens": numbers, "half_life_tokens_adam": adam}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
