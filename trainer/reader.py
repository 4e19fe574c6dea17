"""
The one reader of a run's log, for whoever starts from a log: whatif.py, closing words, pictures, sweeps. What steers a run
reads no log: it has the noise scale and the cost of a step as values (TrainingStep.noise, .cost).

    run = reader.read("out/quickstart")
    noise, cost = noise_of(run.steps[-1]), cost_of(run.steps[-1])        # decision.Noise and Cost, None while undetermined
    way = curve(run.rows, "val"); reach(way, 2.2)                        # {"tokens", "steps", "seconds"} to that loss
"""

import dataclasses

import numpy as np

import configurator
from configurator import ConfigError
from rightbatch.decision import Cost, Noise
from trainer import log

# log key of a noise scale of the whole model: what it is of, and how it was measured
NOISE = {"gns/total_adam": ("the whole model in Adam's metric", "every step exact"),
         "gns/body": ("the whole model", "every step exact"),
         "gns/calibrated_adam": ("the whole model in Adam's metric", "from the norm layers' by a measured factor"),
         "gns/calibrated": ("the whole model", "from the norm layers' by a measured factor"),
         "gns/total": ("all weights", "every step exact")}
MEASURES = "tokens", "steps", "seconds"
SMOOTHING = 0.02  # half-life of a smoothed training loss, as a share of the run


@dataclasses.dataclass
class Run:
    folder: str
    rows: list  # all of the log
    steps: list  # the logged steps among them, in order (log.steps)
    config: dict
    facts: dict  # the rest of config.json
    block: int  # tokens in a sequence
    devices: int
    micro: int  # sequences of one forward pass on one device

    @property
    def quantum(self):
        return self.micro * self.devices


def read(folder) -> Run:
    rows = load(folder)
    steps = log.steps(rows) or no_step(folder)
    try:
        config, facts = configurator.read_facts(folder)
    except FileNotFoundError:
        config, facts = {}, {}
    last = steps[-1]
    if not (config.get("block_size") or last.get("examples")):
        raise ConfigError(f"{folder}: neither config.json nor {log.NAME} tells the tokens of a sequence (block_size)")
    block = config.get("block_size") or last["tokens"] // last["examples"]
    micro = config.get("micro_batch_size") or min(row["batch_size"] // row.get("accum", 1) for row in steps)
    return Run(folder, rows, steps, config, facts, block, facts.get("processes", 1), micro)


def load(folder) -> list:
    """The rows of a run's log, with at least one step among them."""
    try:
        rows = log.read(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: no readable {log.NAME} ({e.strerror}): give the folder of a run, its out_dir") from None
    return rows if any("train/loss" in row for row in rows) else no_step(folder)


def no_step(folder):
    raise ConfigError(f"{folder}: its {log.NAME} has no logged step yet: wait for the first (log_interval steps)")


def series(rows, key):
    """(tokens, values) of the rows that have the key; an undetermined value is a gap."""
    have = [row for row in rows if key in row]
    return [row["tokens"] for row in have], [float("nan") if row[key] is None else row[key] for row in have]


# -- noise scale and cost of a step


def noise_of(row, key="gns") -> Noise | None:
    """The noise scale under a key of a row, by default the one that the run goes by; None while undetermined."""
    values = tuple(row.get(key + end) for end in ("", "_low", "_high"))
    if None in values or not (values[0] > 0 and values[1] <= values[0] <= values[2]):
        return None
    return Noise(*values, NOISE.get(source(row) if key == "gns" else key, ("the whole model",))[0])


def named_noise(key) -> str:
    """What a noise scale is of, and how it was measured."""
    return "{}, {}".format(*NOISE.get(key, ("the whole model", "by the log's word")))


def source(row) -> str | None:
    """The key in NOISE whose value the row also has as `gns`."""
    return next((key for key in NOISE if row.get(key) is not None and row[key] == row.get("gns")), None)


def newest_noise(rows):
    """(Noise, its row) of the newest row that has one, (None, None) where none has."""
    return next(((noise, row) for row in reversed(rows) if (noise := noise_of(row))), (None, None))


def cost_of(row) -> Cost | None:
    """The cost of a step as the run measured it itself, or None."""
    fixed, each = (tuple(row.get(f"step_time/{name}_ms{end}") for end in ("", "_low", "_high"))
                   for name in ("fixed", "per_sequence"))
    if None in (*fixed, *each) or not (0 < each[1] <= each[0] <= each[2] and 0 <= fixed[1] <= fixed[0] <= fixed[2]):
        return None
    return Cost(tuple(1e-3 * v for v in fixed), tuple(1e-3 * v for v in each))


# -- loss


def curve(rows, source):
    """{"tokens", "steps", "seconds", "loss"} as arrays over the evaluations ("val") or logged steps ("train", smoothed), and
    whether the run "died"."""
    steps = [row for row in rows if row.get("train/loss") is not None]
    points = steps if source == "train" else [row for row in rows if row.get("val/loss") is not None]
    if not points:
        raise ConfigError(f"a run without a finite {source}/loss cannot be compared")
    tokens, loss, number = (np.array([row[key] for row in points], dtype=float) for key in ("tokens", f"{source}/loss", "step"))
    if source == "train":
        loss = smoothed_loss(tokens, loss, SMOOTHING * tokens[-1])
    clock = ([0, *(row["step"] for row in steps)], [0.0, *(row.get("seconds", np.nan) for row in steps)])
    return {"tokens": tokens, "steps": number, "seconds": np.interp(number, *clock), "loss": loss, "died": log.died(rows)}


def smoothed_loss(tokens, loss, half_life):
    """Average that forgets half of what it holds in half_life tokens, corrected at the start."""
    total = weight = before = 0.0
    result = []
    for t, value in zip(tokens, loss):
        keep = 2.0 ** (-(t - before) / half_life)
        total, weight, before = keep * total + (1 - keep) * value, keep * weight + (1 - keep), t
        result.append(total / weight)
    return np.array(result)


def reach(way, level):
    """{measure: value} where a curve first comes down to `level`, on straight lines between its points; None if never, and
    for a run that died: what it reached is of no use."""
    below = np.flatnonzero(way["loss"] <= level)
    if way.get("died") or not len(below):
        return None
    i, before = below[0], max(below[0] - 1, 0)
    share = 1.0 if i == 0 else (way["loss"][before] - level) / (way["loss"][before] - way["loss"][i])
    return {m: float(way[m][before] + share * (way[m][i] - way[m][before])) for m in MEASURES}
