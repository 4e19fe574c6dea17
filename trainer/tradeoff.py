"""
Tokens against steps over batch sizes: the curve through runs that reached the same loss (McCandlish et al. 2018, arXiv
1812.06162, section 2), and beside it what one run alone predicts.

    (S / Smin - 1)(E / Emin - 1) = 1,   with B = E / S the same as   S = Smin (1 + C / B),   C = Emin / Smin

S steps, E sequences, B = E / S the batch. C is the critical batch: at B = C a run takes twice the fewest steps and reads twice
the fewest sequences. The fit is of log S with B as it is: a run that learns more slowly by some share takes that share more of
both. The interval holds every C whose best fit is not clearly worse (profile likelihood, Student's t).
"""

import math

import numpy as np

import gns
from configurator import ConfigError
from rightbatch.decision import TUNED, mean_noise
from trainer import log, predict, reader

REACH = 1e4  # how far beyond the batches a critical batch is looked for
APART = 1.05  # batches closer than this share are one


def fit(points, level=0.95):
    """{"critical", "low", "high", "steps", "examples", ...} of [(steps, examples)], one pair for each run, or {"refused": why}.
    low 0.0 or high None: the runs set no bound on that side."""
    steps, examples = (np.array(v, dtype=float) for v in zip(*points)) if points else (np.zeros(0), np.zeros(0))
    batch = examples / np.maximum(steps, 1e-300)
    sizes = distinct(batch)
    if len(sizes) < 3:
        return {"refused": f"it takes runs at three batch sizes or more, here {len(sizes)} reached the loss"}
    freedom = len(points) - 2

    def squares(u):
        """Sums of squared errors of log S for each C = e^u, with the best Smin for it."""
        rest = np.log(steps) - np.log1p(np.exp(u)[:, None] / batch)
        return ((rest - rest.mean(1, keepdims=True)) ** 2).sum(1)
    ends = left, right = math.log(sizes[0] / REACH), math.log(sizes[-1] * REACH)
    for _ in range(5):  # ever closer to the lowest
        grid = np.linspace(left, right, 1001)
        lowest = int(np.argmin(squares(grid)))
        left, right = grid[max(lowest - 1, 0)], grid[min(lowest + 1, 1000)]
    best, least = grid[lowest], float(squares(grid).min())
    limit = least * (1 + gns.student_t(level, freedom) ** 2 / freedom) + 1e-18
    low, high = (next(iter(way[squares(way) > limit]), None) for way in (np.linspace(best, end, 10_001) for end in ends))
    if low is None and high is None:
        return {"refused": "the runs differ too much from seed to seed, or their batches too little, to bend a curve"}
    fewest = math.exp(float(np.mean(np.log(steps) - np.log1p(math.exp(best) / batch))))
    return {"critical": math.exp(best), "low": 0.0 if low is None else math.exp(low),
            "high": None if high is None else math.exp(high), "steps": fewest, "examples": fewest * math.exp(best),
            "spread": math.sqrt(least / freedom), "runs": len(points), "batches": sizes}


def distinct(batches):
    sizes = []
    for b in sorted(batches):
        if not sizes or b > APART * sizes[-1]:
            sizes.append(float(b))
    return sizes


def steps_at(curve, batch):
    """Steps of the fitted curve."""
    return curve["steps"] * (1 + curve["critical"] / batch)


def predicted(folder, steps, batches):
    """What one run alone says, from its noise scale up to its step `steps`: {"key", "critical", "low", "high", "steps": {batch:
    steps}}. None where its log does not tell."""
    try:
        run = reader.read(folder)
        key = predict.noise_key(run)
    except ConfigError:
        return None
    phases = predict.phases_of(run, key, steps)
    if not phases:
        return None
    critical, low, high = mean_noise(phases).triple
    return {"key": key, "critical": critical, "low": low, "high": high,
            "steps": {b: predict.steps_at(phases, b)[0] for b in batches}}


def of_runs(runs, block):
    """The fit, and beside it the prediction of one run at each batch. runs [(folder, steps, tokens)] of constant batches, to
    the same loss; block: tokens in a sequence, None where runs differ in it."""
    if runs and block is None:
        return {"refused": "the logs do not tell one length of a sequence for all runs (block_size)", "predictions": []}
    points = [(folder, steps, tokens / block) for folder, steps, tokens in runs if steps > 0]
    curve = fit([(steps, examples) for _, steps, examples in points])
    sizes = distinct(examples / steps for _, steps, examples in points)
    predictions = []
    for size in sizes:
        folder, steps, _ = next(p for p in points if size <= p[2] / p[1] <= APART * size)
        prediction = predicted(folder, steps, sizes)
        if prediction:
            predictions.append({"run": folder, "batch": size, **prediction})
    return {**curve, "block": block, "points": [(s, e) for _, s, e in points], "predictions": predictions}


def words(curve, loss):
    """Lines about the curve; loss in words."""
    if "refused" in curve:
        lines = [f"Critical batch: not fitted, {curve['refused']}."]
    else:
        low, high = curve["low"], curve["high"]
        between = (f"95% interval {low:.3g} to {high:.3g}" if low and high else f"{low:.3g} or more" if low else
                   f"{high:.3g} or less")
        lines = [f"Critical batch, by the curve through tokens and steps of {curve['runs']} runs at {len(curve['batches'])} "
                 f"batch sizes, to {loss}: {curve['critical']:.3g} sequences ({between}). There a run takes twice the fewest "
                 f"steps ({log.count(round(curve['steps']))}) and twice the fewest tokens "
                 f"({log.count(round(curve['examples'] * curve['block']))}). Runs lie {curve['spread']:.1%} off the curve."]
    for key in dict.fromkeys(p["key"] for p in curve["predictions"]):
        each = ", ".join(f"{p['critical']:.3g} ({p['low']:.3g} to {p['high']:.3g}) from batch {p['batch']:.3g}"
                         for p in curve["predictions"] if p["key"] == key)
        lines.append(f"One run alone predicts, by the noise scale of {reader.named_noise(key)}: {each}.")
    return [*lines, TUNED] if "refused" not in curve or curve["predictions"] else lines
