"""
The two parts of the noise scale, |G|^2 and tr(Sigma), by kind of layer over a run (Gray et al. 2024, arXiv 2411.00999,
Figure 5)

    python experiments/phase_plot.py                   # three runs with gns=exact: five minutes on two cores
    python experiments/phase_plot.py --config config/gpt_111m.py --device cuda

norm_predicts.py and estimator_variance.py use the same runs.
"""

import sys

import numpy as np
from common import Experiment

from plots import layers, style

PAPER = ("The paper: |G|^2 and tr(Sigma) of the norm layers trace paths like those of the other layers, and their noise scale "
         "rises with the others'.")
SHARED = dict(  # of all that use these runs; 20 logged steps are the least to say something about
    settings=dict(max_tokens=1_500_000, warmup_tokens=75_000, gns_half_life_tokens=75_000), tiny=dict(max_tokens=6400),
    folder="exact_groups")
BURN_IN = 0.1  # of the run: at the start |G|^2 falls by orders of magnitude within a few steps


def exact_runs(runs, seeds):
    """Folder of a run per seed in which every parameter's noise scale is measured in every step."""
    runs.config.gns, runs.config.log_interval = "exact", 1
    runs.do({f"seed{seed}": dict(seed=seed) for seed in range(seeds)})
    return [runs.path(f"seed{seed}") for seed in range(seeds)]


def log_parts(rows, group):
    """(n, 2) logarithms of |G|^2 and tr(Sigma), averaged as logged; NaN where an average is not above zero."""
    parts = np.array([[row[f"gns/{group}_sq_norm"], row[f"gns/{group}_tr_sigma"]] for row in rows], dtype=float)
    return np.log(np.where(parts > 0, parts, np.nan))


def late(rows):
    return [row for row in rows if row["tokens"] > BURN_IN * rows[-1]["tokens"]]


def numbers(rows):
    """Per group: the change of both parts and of the noise scale from BURN_IN to the end, and Pearson r of each part's
    logarithm with the total's over that stretch."""
    total, result = log_parts(late(rows), "total"), {}
    for group in layers.groups_of(rows)[0]:
        parts = log_parts(late(rows), group)
        known = np.isfinite(parts).all(1) & np.isfinite(total).all(1)
        first, last = parts[known][[0, -1]]
        r = [np.corrcoef(parts[known, i], total[known, i])[0, 1] for i in (0, 1)]
        result[group] = {"sq_norm_factor": np.exp(last - first)[0], "tr_sigma_factor": np.exp(last - first)[1],
                         "gns_first": np.exp(first[1] - first[0]), "gns_last": np.exp(last[1] - last[0]),
                         "r_log_sq_norm": r[0], "r_log_tr_sigma": r[1]}
    return result


def finding(result):
    seeds = [result["groups"], *result["other_seeds"]]
    rose = [group["gns_last"] > group["gns_first"] for groups in seeds for group in groups.values()]
    r = [sorted(groups["norm"][key] for groups in seeds) for key in ("r_log_sq_norm", "r_log_tr_sigma")]
    first = "; ".join("{} {gns_first:.3g} to {gns_last:.3g}".format(name, **seeds[0][name]) for name in ("norm", "total"))
    return (f"Here, {len(seeds)} seeds: over the last {1 - BURN_IN:.0%} of the run the noise scale rose in {sum(rose)} of "
            f"{len(rose)} groups (first seed: {first}); logarithms of the norm layers' parts follow the total's with Pearson r "
            f"{r[0][0]:.2f} to {r[0][-1]:.2f} (|G|^2) and {r[1][0]:.2f} to {r[1][-1]:.2f} (tr Sigma).")


def draw(_, rows, path):
    figure, (phase, over) = style.panels(2, 13, 5.5)
    layers.draw_phase(phase, late(rows))
    layers.draw_noise_scales(over, rows, layers.groups_of(rows)[0], style.COLORS, "Noise scale by group (sequences)")
    style.save(figure, path)


def measure(runs):
    rows = [layers.exact_rows(run) for run in exact_runs(runs, runs.args.seeds)]
    groups, *others = [numbers(one) for one in rows]
    return {"burn_in": BURN_IN, "groups": groups, "other_seeds": others}, rows[0]


main = Experiment("phase_plot", __doc__, PAPER, measure, finding, draw, seeds=3, **SHARED)

if __name__ == "__main__":
    sys.exit(main())
