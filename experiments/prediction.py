"""
Does one run replace the sweep? From single runs, the steps of every other batch to a loss, against the runs that took them.

    python data/python/prepare.py
    python experiments/prediction.py                       # 3 x 96: some 50 runs, half an hour on two quiet cores
    python experiments/prediction.py --seeds 1             # a first look
    python experiments/prediction.py --name=prediction_decay --out=out/prediction_decay --lr_decay=linear
    python experiments/prediction.py --name=prediction_quickstart --out=out/prediction_quickstart --n_layer=4 --n_embd=128 \\
        --n_head=4

Constant batches, each with its own best learning rate: by final validation loss, on a seed that is not reported, in factors of
two, and further until the best is not at an end. After the warm-up the learning rate stays as it is. If it fell with the
tokens, a larger batch would reach a loss later, at a lower learning rate, and look better than it is. So runs of large batches
can be longer, too: above 32 the tokens grow with the batch, or they would end before they reach what the others do.
Runs at the source batches are made twice, with gns=norm, which calibrates, and with gns=exact: the same up to rounding.
From each source run, by each candidate noise scale (norm layers, calibrated, total; plain, Adam's metric): predicted over
really taken steps, to five losses in either half of the larger batch's training. Then the factor on the noise scale that would
have predicted best.
"""

import itertools
import math
import statistics
import sys

import numpy as np
from common import Runs, parse, write

import gns
from plots import style
from plots.compare import curve, reach
from trainer import predict

PAPER = ("The paper: predicts nothing of this kind. McCandlish et al. 2018 (arXiv 1812.06162, section 2) say that a step of "
         "batch B makes the share B / (B + N) of the progress of one without noise.")
SETTINGS = dict(dataset="python", n_layer=3, n_embd=96, n_head=3, max_tokens=3_000_000, warmup_tokens=150_000,
                lr_decay="none", gns_half_life_tokens=250_000, batch_size_start=8, eval_iters=128)
TINY = dict(dataset="stdlib", gns_calibrate_tokens=64, max_tokens=2560)
BATCHES, SOURCES = (4, 8, 16, 32, 64, 128), (8, 16, 32)
LONGER, WARM_UP = 32, 32  # tokens grow from this batch on; steps of warm-up, at least
REFERENCE, FARTHEST = 16, 64  # the search for a learning rate starts at sqrt(batch / REFERENCE) and ends at this factor
CANDIDATES = {"gns/total_adam": "exact", "gns/calibrated_adam": "norm", "gns/norm_adam": "exact",
              "gns/total": "exact", "gns/calibrated": "norm", "gns/norm": "exact"}  # key: the run that has it


def run_name(batch, factor, seed, mode):
    return f"batch{batch}_lr{factor:g}_seed{seed}_{mode}"


def experiment(runs, seeds, tuning_seed):
    """({batch: best factor on the learning rate}, {batch: {factor: final loss}}), after all runs."""
    config = runs.config

    def wanted(those):
        return {run_name(b, f, s, mode): dict(
            batch_schedule="constant", batch_size=b, batch_size_start=b, micro_batch_size=min(b, config.micro_batch_size),
            seed=s, learning_rate=config.learning_rate * f, min_lr=config.min_lr * f, gns=mode, **length(b, config))
            for b, f, s, mode in those}

    def try_out(those):
        runs.do(wanted((b, f, tuning_seed, "norm") for b, f in those), may_die=True)
        return {(b, f): runs.final_loss(run_name(b, f, tuning_seed, "norm")) for b, f in those}
    tried = tune(try_out)
    best = {b: min(own, key=own.get) for b, own in tried.items()}
    runs.do(wanted((b, best[b], s, mode) for s in seeds for mode in ("norm", "exact") for b in BATCHES
                   if mode == "norm" or b in SOURCES))
    return best, tried


def length(batch, config):
    """Tokens of a run, of its warm-up, and between evaluations, which losses are interpolated from."""
    tokens = config.max_tokens * max(LONGER, batch) // LONGER
    return dict(max_tokens=tokens, warmup_tokens=max(config.warmup_tokens, WARM_UP * batch * config.block_size),
                eval_tokens=max(1, tokens // 40))


def tune(try_out):
    """{batch: {factor: loss}}, in factors of two around the square-root rule and on until the best is not at an end.
    try_out([(batch, factor)]) -> {(batch, factor): loss}"""
    guess = {b: 2.0 ** round(math.log2(b / REFERENCE) / 2) for b in BATCHES}
    tried, open_ends = {b: {} for b in BATCHES}, [(b, f) for b, g in guess.items() for f in (g / 2, g, 2 * g)]
    while open_ends:
        for (b, f), loss in try_out(open_ends).items():
            tried[b][f] = loss
        best = {b: min(own, key=own.get) for b, own in tried.items()}
        beyond = [(b, f) for b in BATCHES for f in (best[b] / 2, best[b] * 2)]
        open_ends = [(b, f) for b, f in beyond if f not in tried[b] and 1 / FARTHEST <= f <= FARTHEST]
    return tried


def taken(runs, best, seeds):
    """{batch: [validation curve of each seed]}"""
    return {b: [validation_curve(runs.rows(run_name(b, best[b], s, "norm"))) for s in seeds] for b in BATCHES}


def validation_curve(rows):
    found = curve(rows, "val")
    return {**found, "loss": falling(found["loss"])}


def falling(values):
    """The nearest curve, by squares, that never rises (pool adjacent violators). A running minimum would reach every loss too
    early where the curve is noisy."""
    blocks = []  # mean, length
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            (b, m), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * m) / (n + m), n + m))
    return np.array([mean for mean, length in blocks for _ in range(length)])


def losses(one, other):
    """{half: five losses} that all curves of two batches reach, evenly spaced in steps of the larger batch's first run."""
    lowest = max(float(c["loss"].min()) for c in one + other)
    run = min(one[0], other[0], key=lambda c: c["steps"][-1] / c["tokens"][-1])
    end = reach(run, lowest)["steps"]
    at = {"first half": np.linspace(0.1, 0.5, 5), "second half": np.linspace(0.6, 1.0, 5)}
    return {half: [float(np.interp(share * end, run["steps"], run["loss"])) for share in shares]
            for half, shares in at.items()}


def predictions(runs, best, seeds, curves):
    """[{half, loss, source, batch, seed, key, phases, taken}]: everything that the table is made of."""
    found = []
    for source, seed, (key, mode) in itertools.product(SOURCES, seeds, CANDIDATES.items()):
        run = predict.read(runs.path(run_name(source, best[source], seed, mode)))
        if not any(predict.triple(row, key) for row in run.steps):
            continue  # never determined
        way, noise = validation_curve(run.rows), predict.noise_values(run.steps, key)[0]
        for batch in (b for b in BATCHES if b != source):
            for half, levels in losses(curves[source], curves[batch]).items():
                for loss in levels:
                    reached, steps = reach(way, loss), [r["steps"] for r in (reach(c, loss) for c in curves[batch]) if r]
                    if reached and reached["steps"] > 0 and steps and min(steps) > 0:
                        phases = predict.at(predict.phases(run, noise, reached["steps"]))
                        found.append(dict(half=half, loss=loss, source=source, batch=batch, seed=seed, key=key, phases=phases,
                                          taken=statistics.fmean(steps)))
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
    """{key: {half: {distance: errors}}}, and the factor that would have been best in the second half."""
    result = {}
    for key in CANDIDATES:
        own = [p for p in found if p["key"] == key]
        late = [p for p in own if p["half"] == "second half"]
        result[key] = {half: {f"x{2**d}": errors([p for p in own if p["half"] == half and far(p) == d]) for d in (1, 2, 3, 4)}
                       for half in ("first half", "second half")}
        if late:
            factor = float(min(np.geomspace(0.25, 8, 121), key=lambda f: np.median([abs(np.log(ratio(p, f))) for p in late])))
            result[key]["best_factor"] = factor
            result[key]["with_best_factor"] = {f"x{2**d}": errors([p for p in late if far(p) == d], factor) for d in (1, 2)}
    return result


def finding(result):
    late = {key: own["second half"] for key, own in result.items() if own["second half"]["x2"]}
    if not late:
        return "Here: no prediction: the noise scale was undetermined, or no loss was reached by all."
    best = min(late, key=lambda key: late[key]["x2"]["median_error"])
    chosen = late.get("gns/calibrated_adam", late[best])
    text = (f"Here, in the second half of training: by {best} the steps of twice or half the batch are predicted with a median "
            f"error of {late[best]['x2']['median_error']:.0%}")
    if late[best]["x4"]:
        text += f", of four times or a quarter with {late[best]['x4']['median_error']:.0%}"
    text += f"; by gns/calibrated_adam, which a run goes by, with {chosen['x2']['median_error']:.0%}"
    return text + (f" and {chosen['x4']['median_error']:.0%}." if chosen["x4"] else ".")


def draw(found, path):
    """Predicted over taken, by candidate, against the distance in batch; second half of training."""
    plt = style.pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5), layout="constrained", sharey=True, sharex=True)
    for ax, key in zip(axes.flat, CANDIDATES):
        for color, source in zip(style.COLORS, SOURCES):
            own = [p for p in found if p["key"] == key and p["source"] == source and p["half"] == "second half"]
            ax.plot([p["batch"] / source for p in own], [ratio(p) for p in own], "o", ms=4, alpha=0.6, color=color,
                    label=f"from batch {source}")
        ax.axhline(1, color="#888888", lw=1)
        ax.axhspan(1 / 1.1, 1.1, color=style.COLORS[2], alpha=0.12, lw=0)
        ax.set_title(key)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_yticks([0.5, 0.7, 0.9, 1.1, 1.4, 2.0], labels=["0.5", "0.7", "0.9", "1.1", "1.4", "2"])
        ax.minorticks_off()
        ax.xaxis.set_major_formatter(lambda v, _: f"x {v:g}")
    axes[0, 0].legend()
    figure.supxlabel("batch over that of the run predicted from")
    figure.supylabel("steps, predicted over taken")
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "prediction", __doc__, seeds=3, settings=SETTINGS, tiny=TINY)
    runs, seeds = Runs(config, args), list(range(1, args.seeds + 1))
    best, tried = experiment(runs, seeds, tuning_seed=0)
    found = predictions(runs, best, seeds, taken(runs, best, seeds))
    result = table(found)
    path = write(args, config, PAPER, finding(result), {"learning_rate_factors": best, "tuning": tried, "table": result})
    draw(found, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
