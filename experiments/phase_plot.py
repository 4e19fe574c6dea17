"""
The two parts of the noise scale, |G|^2 and tr(Sigma), by kind of layer over a run (Gray et al. 2024, arXiv 2411.00999,
Figure 5)

    python experiments/phase_plot.py                   # three runs with gns=exact: five minutes on two cores
    python experiments/phase_plot.py --config config/gpt_111m.py --device cuda

norm_predicts.py and estimator_variance.py use the same runs.
"""

import sys

import numpy as np
from common import Runs, parse, write

from plots import layers, style

PAPER = ("The paper: |G|^2 and tr(Sigma) of the norm layers trace paths like those of the other layers, and their noise scale "
         "rises with the others'.")
SETTINGS = dict(max_tokens=1_500_000, warmup_tokens=75_000, gns_half_life_tokens=75_000)
TINY = dict(max_tokens=6400)  # 20 logged steps are the least to say something about
FOLDER = "exact_groups"
BURN_IN = 0.1  # of the run: at the start |G|^2 falls by orders of magnitude within a few steps


def exact_runs(config, args, seeds):
    """Folder of a run per seed in which every parameter's noise scale is measured in every step."""
    config.gns, config.log_interval = "exact", 1
    runs = Runs(config, args)
    runs.do({f"seed{seed}": dict(seed=seed) for seed in seeds})
    return [runs.path(f"seed{seed}") for seed in seeds]


def log_parts(rows, group):
    """(n, 2) logarithms of |G|^2 and tr(Sigma), averaged as logged; NaN where an average is not above zero."""
    parts = np.array([[row[f"gns/{group}_sq_norm"], row[f"gns/{group}_tr_sigma"]] for row in rows], dtype=float)
    return np.log(np.where(parts > 0, parts, np.nan))


def numbers(rows, points=25):
    """Per group: the change of both parts and of the noise scale from BURN_IN to the end, and Pearson r of each part's
    logarithm with the total's over that stretch."""
    late = [row for row in rows if row["tokens"] > BURN_IN * rows[-1]["tokens"]]
    total, result = log_parts(late, "total"), {}
    for group in layers.groups_of(rows)[0]:
        parts = log_parts(late, group)
        known = np.isfinite(parts).all(1) & np.isfinite(total).all(1)
        first, last = parts[known][[0, -1]]
        r = [np.corrcoef(parts[known, i], total[known, i])[0, 1] for i in (0, 1)]
        some = np.linspace(0, known.sum() - 1, min(points, known.sum())).astype(int)
        result[group] = {"sq_norm_factor": np.exp(last - first)[0], "tr_sigma_factor": np.exp(last - first)[1],
                         "gns_first": np.exp(first[1] - first[0]), "gns_last": np.exp(last[1] - last[0]),
                         "r_log_sq_norm": r[0], "r_log_tr_sigma": r[1],
                         "path": [[float(f"{v:.4g}") for v in point] for point in np.exp(parts[known][some])]}
    return result


def finding(seeds):
    """What came out; seeds [numbers() of each]."""
    def span(key, names, digits="2g"):
        values = [f"{v:.{digits}}" for v in sorted(groups[name][key] for groups in seeds for name in names)]
        return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    others = [g for g in seeds[0] if g not in ("norm", "total")]
    rose = sum(group["gns_last"] > group["gns_first"] for groups in seeds for group in groups.values())
    tried = sum(len(groups) for groups in seeds)
    r = min(groups["norm"][key] for groups in seeds for key in ("r_log_sq_norm", "r_log_tr_sigma"))
    first = seeds[0]
    return (f"Here, {len(seeds)} seeds: over the last {1 - BURN_IN:.0%} of the run the norm layers' |G|^2 went to "
            f"{span('sq_norm_factor', ['norm'])} of its value and their tr(Sigma) to {span('tr_sigma_factor', ['norm'])}, the "
            f"other groups' to {span('sq_norm_factor', others)} and {span('tr_sigma_factor', others)}; the noise scale rose in "
            f"{rose} of {tried} groups (first seed: norm {first['norm']['gns_first']:.3g} to {first['norm']['gns_last']:.3g}, "
            f"total {first['total']['gns_first']:.3g} to {first['total']['gns_last']:.3g}); logarithms of the norm layers' "
            f"parts follow the total's with Pearson r {span('r_log_sq_norm', ['norm'], '2f')} (|G|^2) and "
            f"{span('r_log_tr_sigma', ['norm'], '2f')} (tr Sigma): "
            + ("alike." if r > 0.8 and rose == tried else "not alike in all."))


def draw(rows, path):
    figure, (phase, over) = style.pyplot().subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    late = [row for row in rows if row["tokens"] > BURN_IN * rows[-1]["tokens"]]
    layers.draw_phase(phase, late)
    layers.draw_noise_scales(over, rows, layers.groups_of(rows)[0], style.COLORS, "Noise scale by group (sequences)")
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "phase_plot", __doc__, seeds=3, settings=SETTINGS, tiny=TINY, folder=FOLDER)
    rows = [layers.exact_rows(run) for run in exact_runs(config, args, seeds=range(args.seeds))]
    seeds = [numbers(own) for own in rows]
    draw(rows[0], write(args, config, PAPER, finding(seeds), {"burn_in": BURN_IN, "groups": seeds[0], "other_seeds": [
        {group: {k: v for k, v in own.items() if k != "path"} for group, own in groups.items()} for groups in seeds[1:]]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
