"""
Per-example norms against the gradients of ranks, in one data-parallel run (Gray et al. 2024, arXiv 2411.00999, the 1.3B model)

    python experiments/cross_rank.py                       # 5 minutes, two processes on two cores
    python experiments/cross_rank.py --config config/gpt_1_3b.py --device cuda      # all devices of this machine

Without per-example norms, a data-parallel run can still compare each rank's gradient (B / ranks examples) with their mean,
and each micro-batch's. All three estimates are taken from the same steps: same signal, same noise, different B_small.
Under gns=exact (the default here) of the whole model, under gns=norm of the norm layers.
"""

import math
import sys

import numpy as np
import torch
from common import Runs, parse, write

from plots import style
from sweeps import jobs
from trainer import hardware

PAPER = ("The paper: with per-example norms (B_small = 1) the noise scale has the least variance; comparing the gradients of "
         "data-parallel ranks, as in its 1.3B run, gives the same value with more.")
SETTINGS = dict(gns="exact", gns_adam=False, micro_batch_size=4, batch_size=16, batch_schedule="constant", max_tokens=400_000,
                warmup_tokens=20_000, gns_half_life_tokens=100_000, log_interval=5)
TINY = dict(gns="exact", micro_batch_size=2, batch_size=16, batch_schedule="constant", max_tokens=7680,
            gns_half_life_tokens=3000)
BURN_IN = 0.25  # of the run: the averages fill, and the noise scale moves faster than they do
KINDS = {"": "per example", "_micro": "micro-batches", "_rank": "ranks"}  # suffix of the log key: the small norms


class Ranks(jobs.Group):
    """Runs of several processes each, one after the other."""

    def __init__(self, wanted, folder, *_, **__):
        device = hardware.pick_device(next(iter(wanted.values())).device)
        self.ranks = max(2, torch.cuda.device_count()) if device == "cuda" else 2
        super().__init__(wanted, folder, env={"OMP_NUM_THREADS": str(max(1, hardware.usable_cores() // self.ranks))})

    def start(self, command, **options):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return super().start([*launch, *command[1:]], **options)


class RankRuns(Runs):
    group = Ranks


def compare(rows, group):
    """{kind: {"gns", "low", "high" at the end, "determined": share of the logged steps after the burn-in with an interval,
    "width": median of log(high / low) over those, None if none}}, and the ratio of each to per example."""
    end = rows[-1]["tokens"]
    late = [r for r in rows if r["tokens"] > BURN_IN * end]
    result = {}
    for suffix, kind in KINDS.items():
        key = f"gns/{group}{suffix}"
        widths = [math.log(r[f"{key}_high"] / r[f"{key}_low"]) for r in late if r[key] and r[f"{key}_low"]]
        ratios = [r[key] / r[f"gns/{group}"] for r in late if r[key] and r[f"gns/{group}"]]
        result[kind] = {"gns": rows[-1][key], "low": rows[-1][f"{key}_low"], "high": rows[-1][f"{key}_high"],
                        "determined": len(widths) / len(late), "width": float(np.median(widths)) if widths else None,
                        "ratio": float(np.median(ratios)) if ratios else None}
    return result


def finding(results, small, ranks):
    """What came out, in one sentence; results [one of compare() per seed], small {kind: B_small}."""
    mine, theirs = ([r[kind] for r in results] for kind in ("per example", "ranks"))
    told = "; ".join(f"{kind} (B_small {small[kind]}) " + (
        "undetermined" if results[0][kind]["gns"] is None else "{gns:.3g} ({low:.3g} to {high:.3g})".format(**results[0][kind]))
        for kind in KINDS.values())
    text = f"Here: on {ranks} ranks the noise scale ends at {told}"
    if any(r["width"] is None for r in mine):
        return text + "; the per-example estimate itself is undetermined, so the run is too short to compare."
    if any(r["width"] is None for r in theirs):
        return text + "; only the per-example estimate has a bounded interval, so the other's variance is beyond comparison."
    times = float(np.mean([b["width"] / a["width"] for a, b in zip(mine, theirs)]))
    both = [(a, b) for a, b in zip(mine, theirs) if a["gns"] and b["gns"]]
    apart = sum(a["low"] > b["high"] or b["low"] > a["high"] for a, b in both)
    text += f"; the ranks' interval is {times:.1f} times as wide, in the logarithm" if times > 1 else (
        f"; the ranks' interval is no wider ({times:.2f} times), unlike the paper")
    if not both:
        return text + ", and undetermined at the end."
    return text + (", and the two agree within their intervals." if not apart else
                   f", and the two disagree beyond their intervals in {apart} of {len(both)} runs.")


def draw(path, rows, group, results):
    figure, (over, wide) = style.pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    steps = [r for r in rows if f"gns/{group}" in r and r["tokens"] > 0.1 * rows[-1]["tokens"]]
    nan = float("nan")
    for color, (suffix, kind) in reversed(list(zip(style.COLORS, KINDS.items()))):
        key = f"gns/{group}{suffix}"
        tokens, value = style.series(steps, key)
        low, high = (np.array(style.series(steps, key + side)[1], dtype=float) for side in ("_low", "_high"))
        over.fill_between(tokens, np.maximum(low, 1e-2), high, color=color, alpha=0.18, lw=0)
        over.plot(tokens, value, color=color, label=kind)
        wide.plot(tokens, [h / lo if lo and lo > 0 else nan for lo, h in zip(low, high)], color=color, label=kind)
    known = [r[f"gns/{group}"] for r in steps if r[f"gns/{group}"]]
    if known:
        over.set_ylim(min(known) / 5, max(known) * 5)
    over.set_title(f"Noise scale, {'whole model' if group == 'total' else 'norm layers'} (sequences), 95% interval")
    wide.set_title("Width of the interval, high / low")
    for ax in (over, wide):
        ax.set_yscale("log")
        style.decades(ax.yaxis)
        ax.set_xlabel("tokens")
        style.counts(ax.xaxis)
        ax.legend(*(list(reversed(part)) for part in ax.get_legend_handles_labels()))
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "cross_rank", __doc__, seeds=3, settings=SETTINGS, tiny=TINY)
    config.gns_crosscheck, config.eval_tokens, args.jobs = True, 0, 1  # a run has all devices
    runs, group = RankRuns(config, args), "total" if config.gns == "exact" else "norm"
    names = [f"seed{seed}" for seed in range(args.seeds)]
    runs.do({name: dict(seed=seed) for seed, name in enumerate(names)})
    rows = [[r for r in runs.rows(name) if f"gns/{group}_rank" in r] for name in names]
    results, batch = [compare(r, group) for r in rows], rows[0][-1]["batch_size"]
    ranks = batch // (rows[0][-1]["accum"] * config.micro_batch_size)
    small = {"per example": 1, "micro-batches": config.micro_batch_size, "ranks": batch // ranks}
    path = write(args, config, PAPER, finding(results, small, ranks),
                 {"group": group, "ranks": ranks, "batch_size": batch, "b_small": small, "seeds": results})
    draw(path, rows[0], group, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
