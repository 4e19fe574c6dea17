"""
The loss of a run over tokens, steps and seconds, from its log, and where it first reached a loss.
"""

import numpy as np

from configurator import ConfigError
from trainer import log

MEASURES = ("tokens", "steps", "seconds")
SMOOTHING = 0.02  # half-life of a smoothed training loss, as a share of the run


def curve(rows, source):
    """{"tokens", "steps", "seconds", "loss"} as arrays over the evaluations ("val") or logged steps ("train", smoothed), and
    whether the run "died"."""
    steps = [r for r in rows if r.get("train/loss") is not None]
    points = steps if source == "train" else [r for r in rows if r.get("val/loss") is not None]
    tokens = np.array([r["tokens"] for r in points], dtype=float)
    loss = np.array([r[f"{source}/loss"] for r in points], dtype=float)
    if not points:
        raise ConfigError(f"a run without a finite {source}/loss cannot be compared")
    if source == "train":
        loss = smoothed_loss(tokens, loss, SMOOTHING * tokens[-1])
    clock = ([0, *(r["step"] for r in steps)], [0.0, *(r.get("seconds", np.nan) for r in steps)])
    number = np.array([r["step"] for r in points], dtype=float)
    return {"tokens": tokens, "steps": number, "seconds": np.interp(number, *clock), "loss": loss,
            "died": log.died(rows)}


def smoothed_loss(tokens, loss, half_life):
    """Average over the tokens so far that forgets half in half_life, corrected at the start."""
    total = weight = before = 0.0
    result = []
    for t, value in zip(tokens, loss):
        keep = 2.0 ** (-(t - before) / half_life)
        total, weight, before = keep * total + (1 - keep) * value, keep * weight + (1 - keep), t
        result.append(total / weight)
    return np.array(result)


def reach(run, level):
    """{measure: value} where the curve first comes down to `level`, on straight lines between its points; None if never, and
    for a run that died: what it reached is of no use."""
    if run.get("died"):
        return None
    below = np.flatnonzero(run["loss"] <= level)
    if not len(below):
        return None
    i = below[0]
    if i == 0:
        return {m: float(run[m][0]) for m in MEASURES}
    share = (run["loss"][i - 1] - level) / (run["loss"][i - 1] - run["loss"][i])
    return {m: float(run[m][i - 1] + share * (run[m][i] - run[m][i - 1])) for m in MEASURES}
