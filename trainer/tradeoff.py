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
from trainer import log, predict

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

    def off(u):
        """Sum of squared errors of log S, with C = e^u and the best Smin for it."""
        rest = np.log(steps) - np.log1p(math.exp(u) / batch)
        return float(((rest - rest.mean()) ** 2).sum())
    grid = np.linspace(math.log(sizes[0] / REACH), math.log(sizes[-1] * REACH), 1001)
    values = [off(u) for u in grid]
    i = int(np.argmin(values))
    best = smallest(off, grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)])
    limit = off(best) * (1 + gns.student_t(level, freedom) ** 2 / freedom) + 1e-18
    low, high = (edge(lambda u: off(u) - limit, best, end) for end in (grid[0], grid[-1]))
    if low is None and high is None:
        return {"refused": "the runs differ too much from seed to seed, or their batches too little, to bend a curve"}
    fewest = math.exp(float(np.mean(np.log(steps) - np.log1p(math.exp(best) / batch))))
    return {"critical": math.exp(best), "low": 0.0 if low is None else math.exp(low),
            "high": None if high is None else math.exp(high), "steps": fewest, "examples": fewest * math.exp(best),
            "spread": math.sqrt(off(best) / freedom), "runs": len(points), "batches": sizes}


def distinct(batches):
    found = []
    for b in sorted(batches):
        if not found or b > APART * found[-1]:
            found.append(float(b))
    return found


def smallest(function, left, right):
    """Where a function with one valley is smallest."""
    for _ in range(100):
        a, b = left + (right - left) / 3, right - (right - left) / 3
        left, right = (left, b) if function(a) <= function(b) else (a, right)
    return (left + right) / 2


def edge(function, inside, end):
    """Where a function that is below zero inside crosses it on the way to `end`; None if it does not."""
    if function(end) <= 0:
        return None
    for _ in range(100):
        middle = (inside + end) / 2
        inside, end = (middle, end) if function(middle) <= 0 else (inside, middle)
    return (inside + end) / 2


def steps_at(found, batch):
    """Steps of the fitted curve."""
    return found["steps"] * (1 + found["critical"] / batch)


def predicted(folder, steps, batches):
    """What one run alone says, from its noise scale up to its step `steps`: {"key", "critical", "low", "high", "steps": {batch:
    steps}}. None where its log does not tell."""
    try:
        run = predict.read(folder)
        key = predict.noise_key(run)
    except ConfigError:
        return None
    phases = predict.phases(run, predict.noise_values(run.steps, key)[0], steps)
    if not phases:
        return None
    critical, low, high = predict.mean_noise(phases).triple
    return {"key": key, "critical": critical, "low": low, "high": high,
            "steps": {b: predict.steps_at(phases, b)[0] for b in batches}}


def of_runs(runs, block):
    """The fit, and beside it the prediction of one run at each batch. runs [(folder, steps, tokens)] of constant batches, to
    the same loss; block: tokens in a sequence, None where runs differ in it."""
    if runs and block is None:
        return {"refused": "the logs do not tell one length of a sequence for all runs (block_size)", "predictions": []}
    points = [(folder, steps, tokens / block) for folder, steps, tokens in runs if steps > 0]
    found = fit([(steps, examples) for _, steps, examples in points])
    sizes = distinct(examples / steps for _, steps, examples in points)
    predictions = []
    for size in sizes:
        folder, steps, _ = next(p for p in points if size <= p[2] / p[1] <= APART * size)
        own = predicted(folder, steps, sizes)
        if own:
            predictions.append({"run": folder, "batch": size, **own})
    return {**found, "block": block, "points": [(s, e) for _, s, e in points], "predictions": predictions}


def words(found, loss):
    """Lines about the curve; loss in words."""
    if "refused" in found:
        lines = [f"Critical batch: not fitted, {found['refused']}."]
    else:
        low, high = found["low"], found["high"]
        between = (f"95% interval {low:.3g} to {high:.3g}" if low and high else f"{low:.3g} or more" if low else
                   f"{high:.3g} or less")
        lines = [f"Critical batch, by the curve through tokens and steps of {found['runs']} runs at {len(found['batches'])} "
                 f"batch sizes, to {loss}: {found['critical']:.3g} sequences ({between}). There a run takes twice the fewest "
                 f"steps ({log.count(round(found['steps']))}) and twice the fewest tokens "
                 f"({log.count(round(found['examples'] * found['block']))}). Runs lie {found['spread']:.1%} off the curve."]
    for key in dict.fromkeys(p["key"] for p in found["predictions"]):
        own = [p for p in found["predictions"] if p["key"] == key]
        each = ", ".join(f"{p['critical']:.3g} ({p['low']:.3g} to {p['high']:.3g}) from batch {p['batch']:.3g}" for p in own)
        lines.append(f"One run alone predicts, by its noise scale ({predict.NOISE[key]}): {each}.")
    return [*lines, predict.TUNED] if "refused" not in found or found["predictions"] else lines
