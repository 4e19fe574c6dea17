"""
Does one run replace the sweep? From single runs, the steps of every other batch to a loss, against the runs that took them.

    python data/python/prepare.py
    python experiments/prediction.py                       # 3 x 96: some 100 runs, 40 minutes on two quiet cores
    python experiments/prediction.py --seeds 1             # a first look
    python experiments/prediction.py --name=prediction_quickstart --out=out/prediction_quickstart --n_layer=4 --n_embd=128 \\
        --n_head=4 --max_tokens=2000000

Constant batches, each trained over several lengths, the learning rate falling to a tenth at the end of each: what somebody
would do who trains at that batch. Each batch has its own best learning rate, by final validation loss at the middle length, on
a seed that is not reported: in factors of two, further until the best is not at an end, then the top of a parabola through the
best three. From each single run, by each candidate noise scale (norm layers, calibrated, total; plain, Adam's metric): the
tokens that another batch needs to end at the same loss, over those that it does need, by the final losses of its own runs (a
parabola over the logarithm of the tokens, no extrapolation). Then the factor on the noise scale that would have predicted best.
At the middle length the source runs are made twice, with gns=norm, which calibrates, and gns=exact: the same up to rounding.
"""

import itertools
import json
import math
import os
import statistics
import sys

import numpy as np
from common import Experiment

import configurator
import gns
from plots import style
from trainer import predict, reader

PAPER = ("The paper: predicts nothing of this kind. McCandlish et al. 2018 (arXiv 1812.06162, section 2) say that a step of "
         "batch B makes the share B / (B + N) of the progress of one without noise.")
SETTINGS = dict(dataset="python", n_layer=3, n_embd=96, n_head=3, max_tokens=3_000_000, batch_size_start=8, eval_iters=256,
                eval_tokens=0, checkpoint_tokens=0)
TINY = dict(dataset="stdlib", max_tokens=2560, learning_rate=3e-2, min_lr=3e-3)
BATCHES, SOURCES = (4, 8, 16, 32, 64, 128), (8, 16, 32)
LENGTHS, MIDDLE = (0.5, 0.7, 1.0, 1.4, 2.0), 1.0  # of a run, over max_tokens: five losses to predict from each source batch
COARSE = (0.5, 1.0, 2.0)  # of the other batches, which are only predicted
LONGER = 32  # above this batch runs are longer, by the square root: or they would end above every other's loss
WARM_UP, WARM_UP_STEPS = 0.05, 24  # as a share of the run, and at least
REFERENCE, FARTHEST = 16, 64  # the search for a learning rate starts at sqrt(batch / REFERENCE) and ends at this factor
CANDIDATES = {"gns/total_adam": "exact", "gns/calibrated_adam": "norm", "gns/norm_adam": "exact",
              "gns/total": "exact", "gns/calibrated": "norm", "gns/norm": "exact"}  # key: the run that has it


def run_name(batch, length, factor, seed, mode):
    return f"batch{batch}_length{length:g}_lr{factor:g}_seed{seed}_{mode}"


def tokens_of(batch, length, config):
    """Tokens of a run."""
    return round(config.max_tokens * length * math.sqrt(max(1, batch / LONGER)))


def changes(batch, length, factor, seed, mode, config):
    """What a run changes in the config."""
    return constant_batch(batch, tokens_of(batch, length, config), factor, seed, mode, config)


def constant_batch(batch, tokens, factor, seed, mode, config):
    """What a run of one batch and so many tokens changes in the config; factor: on the learning rate."""
    warm_up = min(tokens, max(round(WARM_UP * tokens), WARM_UP_STEPS * batch * config.block_size))
    return dict(batch_schedule="constant", batch_size=batch, batch_size_start=batch, max_tokens=tokens, warmup_tokens=warm_up,
                micro_batch_size=min(batch, config.micro_batch_size), seed=seed, learning_rate=config.learning_rate * factor,
                min_lr=config.min_lr * factor, gns=mode)


def lengths_of(batch):
    return LENGTHS if batch in SOURCES else COARSE


def experiment(runs, seeds, tuning_seed):
    """({batch: best factor on the learning rate}, {batch: {factor: final loss}}), after all runs."""
    def do(those, **how):
        runs.do({run_name(*run): changes(*run, runs.config) for run in those}, **how)

    def try_out(those):
        wanted = {(b, f): (b, MIDDLE, f, tuning_seed, "norm") for b, f in those}
        do(wanted.values(), may_die=True)
        return {key: runs.final_loss(run_name(*run)) for key, run in wanted.items()}
    tried = tune(try_out)
    best = {b: top(own) for b, own in tried.items()}
    for seed in seeds:  # whole seeds, one after the other
        do([(b, n, best[b], seed, "norm") for b in BATCHES for n in lengths_of(b)])
        do([(b, MIDDLE, best[b], seed, "exact") for b in SOURCES])
    return best, tried


def tune(try_out, batches=None, centre=1.0):
    """{batch: {factor: loss}}, in factors of two around the square-root rule and on until the best is not at an end.
    try_out([(batch, factor)]) -> {(batch, factor): loss}; centre: the first factor at REFERENCE."""
    guess = {b: centre * 2.0 ** round(math.log2(b / REFERENCE) / 2) for b in batches or BATCHES}
    tried, open_ends = {b: {} for b in guess}, [(b, f) for b, g in guess.items() for f in (g / 2, g, 2 * g)]
    while open_ends:
        for (b, f), loss in try_out(open_ends).items():
            tried[b][f] = loss
        best = {b: min(own, key=own.get) for b, own in tried.items()}
        beyond = [(b, f) for b in guess for f in (best[b] / 2, best[b] * 2)]
        open_ends = [(b, f) for b, f in beyond if f not in tried[b] and 1 / FARTHEST <= f <= FARTHEST]
    return tried


def top(tried):
    """The factor at the lowest loss of a parabola through the best of {factor: loss} and its neighbours, in logarithms; the
    best itself where a neighbour is missing or died."""
    factor = min(tried, key=tried.get)
    low, mid, high = (tried.get(f, math.inf) for f in (factor / 2, factor, factor * 2))
    bend = low + high - 2 * mid
    return round(factor * 2 ** ((low - high) / (2 * bend)), 4) if 0 < bend < math.inf else factor


def final_losses(runs, best, seeds):
    """{batch: [(tokens, [final validation loss of each seed]) of each length]}"""
    return {b: [(tokens_of(b, n, runs.config), [runs.final_loss(run_name(b, n, best[b], s, "norm")) for s in seeds])
                for n in lengths_of(b)] for b in BATCHES}


def taken(ends, loss):
    """The tokens of a run that ends at `loss`, from [(tokens, final losses)], by a parabola over the logarithm of the tokens;
    None outside of it."""
    tokens = np.log([n for n, _ in ends])
    fine = np.linspace(tokens[0], tokens[-1], 1000)
    losses = np.polyval(np.polyfit(tokens, [statistics.fmean(those) for _, those in ends], 2), fine)
    if not (np.diff(losses) < 0).all() or not losses[-1] <= loss <= losses[0]:
        return None
    return math.exp(np.interp(-loss, -losses, fine))


def predictions(runs, best, seeds, ends):
    """[{length, loss, source, batch, seed, key, phases, taken}]: everything that the table is made of; taken in steps."""
    found = []
    for source, length, seed, (key, mode) in itertools.product(SOURCES, LENGTHS, seeds, CANDIDATES.items()):
        if mode == "exact" and length != MIDDLE:
            continue
        run = reader.read(runs.path(run_name(source, length, best[source], seed, mode)))
        loss = statistics.fmean(ends[source][LENGTHS.index(length)][1])
        if not any(reader.noise_of(row, key) for row in run.steps):
            continue  # never determined
        phases = predict.at(predict.phases_of(run, key, run.steps[-1]["step"]))
        for batch in (b for b in BATCHES if b != source):
            tokens = taken(ends[batch], loss)
            if tokens:
                found.append(dict(length=length, loss=loss, source=source, batch=batch, seed=seed, key=key, phases=phases,
                                  taken=tokens / (batch * run.block)))
    return found


def known(folder, config):
    """The numbers of this experiment, for others that build on it; they must be of the same model, data and tokens."""
    path = os.path.join(folder, "prediction.json")
    try:
        with open(path) as f:
            found = json.load(f)
    except OSError:
        sys.exit(f"error: {path} is missing: python experiments/prediction.py writes it")
    for key in ("dataset", "n_layer", "n_head", "n_embd", "block_size", "max_tokens"):
        there, here = found["settings"].get(key, configurator.FIELDS[key].default), getattr(config, key)
        if there != here:
            sys.exit(f"error: {key}={here}: {path} is of {there}; run experiments/prediction.py with it, or leave it")
    return found


def ratio(p, factor=1.0):
    """Predicted over taken steps, with every noise scale times `factor`."""
    return gns.equivalent_steps([(s, b, n * factor) for s, b, n in p["phases"]], p["batch"]) / p["taken"]


def errors(those, factor=1.0):
    """Median and worst of |log(predicted / taken)| as shares, the median ratio, and how many."""
    logs = [np.log(ratio(p, factor)) for p in those]
    return {"median_error": float(np.expm1(np.median(np.abs(logs)))), "worst_error": float(np.expm1(np.max(np.abs(logs)))),
            "median_ratio": float(np.exp(np.median(logs))), "predictions": len(logs)} if logs else None


def far(p):
    """Twice or half the batch is 1, four times or a quarter 2, ..."""
    return abs(round(np.log2(p["batch"] / p["source"])))


def table(found):
    """{key: {distance: errors, those of the longer runs, by length of the run, factor that would have been best}}"""
    result = {}
    for key in CANDIDATES:
        own = [p for p in found if p["key"] == key]
        result[key] = {f"x{2**d}": errors([p for p in own if far(p) == d]) for d in (1, 2, 3, 4)}
        late = [p for p in own if p["length"] >= MIDDLE]
        result[key]["second_half"] = {f"x{2**d}": errors([p for p in late if far(p) == d]) for d in (1, 2)}
        result[key]["by_length"] = {f"{n:g}": {f"x{2**d}": errors([p for p in own if p["length"] == n and far(p) == d])
                                               for d in (1, 2)} for n in LENGTHS}
        if own:
            factor = float(min(np.geomspace(0.25, 8, 121), key=lambda f: np.median([abs(np.log(ratio(p, f))) for p in own])))
            result[key]["best_factor"] = factor
            result[key]["with_best_factor"] = {f"x{2**d}": errors([p for p in own if far(p) == d], factor) for d in (1, 2)}
    return result


def finding(result):
    told = []
    for key, own in result["table"].items():
        if own["x2"]:
            far = f", {own['x4']['median_error']:.0%} for four times or a quarter" if own["x4"] else ""
            told.append(f"by {key} {own['x2']['median_error']:.0%} for twice or half the batch{far} (best with the noise scale "
                        f"times {own['best_factor']:.2g})")
    return f"Here, the median error of predicted tokens and steps: {'; '.join(told) or 'no prediction'}."


def draw(_, found, path):
    """Predicted over taken, by candidate, against the distance in batch."""
    figure, axes = style.pyplot().subplots(2, 3, figsize=(13, 7.5), layout="constrained", sharey=True, sharex=True)
    for ax, key in zip(axes.flat, CANDIDATES):
        for color, source in zip(style.COLORS, SOURCES):
            those = [p for p in found if p["key"] == key and p["source"] == source]
            ax.plot([p["batch"] / source for p in those], [ratio(p) for p in those], "o", ms=4, alpha=0.6, color=color,
                    label=f"from batch {source}")
        ax.axhline(1, color="#888888", lw=1)
        ax.axhspan(1 / 1.1, 1.1, color=style.COLORS[2], alpha=0.12, lw=0)
        style.dress(ax, key, x="doublings", y="log")
    figure.supxlabel("batch over that of the run predicted from")
    figure.supylabel("tokens and steps to the same final loss, predicted over taken")
    style.save(figure, path)


def measure(runs):
    seeds = list(range(1, runs.args.seeds + 1))
    best, tried = experiment(runs, seeds, tuning_seed=0)
    ends = final_losses(runs, best, seeds)
    found = predictions(runs, best, seeds, ends)
    return {"learning_rate_factors": best, "tuning": tried, "tokens_and_final_losses": ends,
            "table": table(found)}, found


main = Experiment("prediction", __doc__, PAPER, measure, finding, draw, SETTINGS, TINY, seeds=3)

if __name__ == "__main__":
    sys.exit(main())
