"""
What is the critical batch size? Three independent answers, in one picture.

    python data/python/prepare.py
    python experiments/prediction.py           # its numbers file is read
    python experiments/critical_batch.py       # five runs and three probes: ten minutes on two cores

    curve    S = Smin (1 + C / B) through the steps of constant batches 4 to 128 to the same final loss, each with its own
             learning rate (trainer/tradeoff.py; McCandlish et al. 2018, arXiv 1812.06162): more than a hundred runs
    probe    the run goes on from its checkpoint with k times its batch: the largest batch that loses nothing
             (sweep.py branch; Merrill et al. 2025, arXiv 2505.23971): five runs at each of three points
    noise    the noise scale that one run measures on its way, in Adam's metric and plain
The curve answers for a whole run, so beside it stands the noise scale's mean over a run (trainer/predict.py). The probe
answers for one moment.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys

import prediction
from common import Runs, parse, write

from plots import style
from sweeps import branch
from trainer import predict, tradeoff

PAPER = ("The paper: does not ask. McCandlish et al. 2018: the noise scale and the critical batch agree within a factor of two "
         "or three.")
SOURCE = 16  # the batch of the run that is measured and probed
POINTS, FACTORS, WINDOW = (0.15, 0.3, 0.6), "1,2,4,8,16", 0.2  # of the longest run, its batch, and of the longest run
KEYS = {"gns/calibrated_adam": "Adam's metric", "gns/calibrated": "plain"}


def curves(ends, block):
    """[{"loss", "tokens" at SOURCE, "critical", "low", "high", ...}] at the final losses of SOURCE's runs. Each seed of each
    batch is a point."""
    found = []
    for tokens, losses in ends[SOURCE]:
        loss = statistics.fmean(losses)
        points = []
        for batch, own in ends.items():
            for seed in range(len(own[0][1])):
                taken = prediction.taken([(n, [those[seed]]) for n, those in own], loss)
                points += [(taken / block / batch, taken / block)] if taken else []
        found.append({"loss": loss, "tokens": tokens, **tradeoff.fit(points)})
    return found


def means(runs, factor, seed):
    """{key: [{"tokens", "loss", "critical", "low", "high"}]} of whole runs: the noise scale's mean, one run each."""
    result = {key: [] for key in KEYS}
    for length in prediction.LENGTHS:
        run = predict.read(runs.path(prediction.run_name(SOURCE, length, factor, seed, "norm")))
        for key in (k for k in KEYS if any(predict.triple(row, k) for row in run.steps)):
            phases = predict.phases(run, predict.noise_values(run.steps, key)[0], run.steps[-1]["step"])
            result[key].append({"tokens": run.steps[-1]["tokens"], **dict(zip(("critical", "low", "high"),
                                                                            predict.mean_noise(phases)))})
    return result


def way(runs, name):
    """{key: [(tokens, value, low, high)]} of one run, moment by moment."""
    steps = predict.read(runs.path(name)).steps
    return {key: [(r["tokens"], *triple) for r in steps for triple in [predict.triple(r, key)] if triple] for key in KEYS}


def probes(run, config, jobs):
    """[branch.json] at each point of the run."""
    found = []
    for share in POINTS:
        at = round(config.max_tokens * max(prediction.LENGTHS) * share)
        with contextlib.ExitStack() as held:
            window = round(config.max_tokens * max(prediction.LENGTHS) * WINDOW)
            branch.branch(argparse.Namespace(run=run, at=str(at), factors=FACTORS, jobs=jobs, tolerance=0.01, dry_run=False,
                                             window=str(window), held=held))
        with open(os.path.join(run, "branch", str(at), "branch.json")) as f:
            found.append(json.load(f))
    return found


def finding(fitted, noise, probed):
    known = [f for f in fitted if "critical" in f]
    if not known:
        return "Here: no curve could be fitted."
    parts = ["Here, by the curve: " + ", ".join(
        f"{f['critical']:.0f} ({f['low']:.0f} to {f['high'] or math.inf:.0f}) to a loss of {f['loss']:.2f}" for f in known)]
    for key, words in KEYS.items():
        parts.append(f"one run's mean noise scale, {words}: " + ", ".join(f"{m['critical']:.0f}" for m in noise[key]))
    for p in probed:
        until = f"{p['largest_within']} to {p['first_beyond']}" if p["first_beyond"] else f"{p['largest_within']} or more"
        there = f" (noise scale there {p['noise_scale']['value']:.0f})" if p["noise_scale"] else ""
        parts.append(f"by the probe at {p['at'] / 1e6:.1f}M tokens: {until}{there}")
    return "; ".join(parts) + "."


def draw(fitted, noise, moments, probed, path):
    plt = style.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained", sharey=True)
    colors = dict(zip(KEYS, style.COLORS[1:]))
    known = [f for f in fitted if "critical" in f]
    errors = [[f["critical"] - f["low"] for f in known], [(f["high"] or 4 * f["critical"]) - f["critical"] for f in known]]
    axes[0].errorbar([f["tokens"] for f in known], [f["critical"] for f in known], errors, fmt="o-", capsize=3,
                     color=style.COLORS[0], label="curve through constant batches, 95%")
    for key, words in ((k, words) for k, words in KEYS.items() if noise[k]):
        own = noise[key]
        axes[0].fill_between([m["tokens"] for m in own], [m["low"] for m in own], [m["high"] for m in own], color=colors[key],
                             alpha=0.2, lw=0)
        axes[0].plot([m["tokens"] for m in own], [m["critical"] for m in own], "s-", ms=4, color=colors[key],
                     label=f"noise scale of one run, mean over it, {words}")
        tokens, values, low, high = zip(*moments[key])
        axes[1].fill_between(tokens, low, high, color=colors[key], alpha=0.2, lw=0)
        axes[1].plot(tokens, values, color=colors[key], label=f"noise scale, {words}")
    for p in probed:
        top = p["first_beyond"] or 2 * p["largest_within"]
        axes[1].plot([p["at"]] * 2, [p["largest_within"], top], "-", lw=6, color=style.COLORS[0], solid_capstyle="butt",
                     label="probe: loses nothing, loses 0.01 nats" if p is probed[0] else None)
    for ax, title in zip(axes, ("A whole run", "A moment of one run")):
        ax.set_title(title)
        ax.set_yscale("log")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda v, _: f"{v / 1e6:g}M")
        ax.xaxis.set_minor_formatter(lambda v, _: "")
        ax.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        ax.legend(fontsize=9)
    axes[0].set_xticks([m["tokens"] for m in next(iter(noise.values()))])
    axes[0].xaxis.set_major_formatter(lambda v, _: f"{v / 1e6:.2g}M")
    axes[0].set_xlabel("tokens of the run at batch 16 that ends at the same loss")
    axes[1].set_xlabel("tokens")
    axes[0].set_ylabel("critical batch, sequences")
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "critical_batch", __doc__, settings=prediction.SETTINGS, tiny=prediction.TINY,
                         folder="prediction")
    known = prediction.known(args.results, config)
    ends = {int(b): own for b, own in known["tokens_and_final_losses"].items()}
    factor, seed, runs = known["learning_rate_factors"][str(SOURCE)], 1, Runs(config, args)
    runs.do({prediction.run_name(*run): prediction.changes(*run, config)
             for n in prediction.LENGTHS for run in [(SOURCE, n, factor, seed, "norm")]})
    longest = prediction.run_name(SOURCE, max(prediction.LENGTHS), factor, seed, "norm")
    probed = probes(runs.path(longest), config, args.jobs)
    fitted, noise = curves(ends, config.block_size), means(runs, factor, seed)
    path = write(args, config, PAPER, finding(fitted, noise, probed), {"curve": fitted, "noise": noise, "probes": probed})
    draw(fitted, noise, way(runs, longest), probed, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
