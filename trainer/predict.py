"""
What one run says about other batches: from its log.jsonl to steps, tokens and seconds at any batch (whatif.py shows them).

A run is cut into phases, one per logged row: so many steps, at the batch and the noise scale of that row. gns.py turns them
into steps at another batch, the cost of a step t0 + t1 B turns those into seconds. Every quantity with an error is a triple
(value, low, high) at 95%.

Assumes a learning rate tuned for each batch. Intervals cover errors of the measurement, not of the theory.

Letters: B sequences in a step, N noise scale in sequences, t0 and t1 seconds of a step and of each sequence in it.
"""

import dataclasses
import math

import numpy as np

import configurator
import gns
from configurator import ConfigError
from rightbatch.common import named
from rightbatch.decision import MEASURED, TUNED, Cost, Noise, mean_noise, right_batch
from trainer import log
from trainer.curves import curve, reach
from trainer.noise_scale import source

CHECKED = "How far predictions were checked: docs/whatif.md."
NOISE = {"gns/total_adam": "the whole model's in Adam's metric, every step exact",
         "gns/body": "the whole model's in the plain metric, every step exact",
         "gns/calibrated_adam": "the whole model's in Adam's metric: the norm layers' times a measured factor",
         "gns/calibrated": "the whole model's in the plain metric: the norm layers' times a measured factor",
         "gns/total": "all weights' in the plain metric, every step exact"}
EVALUATIONS = 4  # fewer tell too little of where a loss was reached
PHASES = 1000  # that a log is cut into at most: the noise scale changes little from one to the next
ENDS = "value", "low", "high"  # of a Noise
STAGES = 8  # of a schedule: enough to follow the noise scale, few enough to read


@dataclasses.dataclass
class Run:
    folder: str
    rows: list  # all of the log
    steps: list  # the logged steps among them, in order
    config: dict
    facts: dict  # the rest of config.json
    block: int  # tokens in a sequence
    devices: int
    micro: int  # sequences of one forward pass on one device

    @property
    def quantum(self):
        return self.micro * self.devices


@dataclasses.dataclass
class Machine:
    """What the table is for: the run's own machine, or the one that the command line asks for."""
    devices: int
    micro: int
    cost: Cost | None
    measured: bool

    @property
    def quantum(self):
        return self.devices * self.micro


# -- from the log to phases


def read(folder):
    try:
        rows = log.read(folder)
    except OSError as e:
        raise ConfigError(f"{folder}: no readable {log.NAME} ({e.strerror}): give the folder of a run, its out_dir") from None
    steps = [row for row in rows if "train/loss" in row and "batch_size" in row]
    if not steps:
        raise ConfigError(f"{folder}: its {log.NAME} has no logged step yet: wait for the first (log_interval steps)")
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


def triple(row, key):
    """(value, low, high) of a row, or None while undetermined."""
    values = tuple(row.get(key + end) for end in ("", "_low", "_high"))
    return None if None in values or not (values[0] > 0 and values[1] <= values[0] <= values[2]) else values


def noise_key(run):
    """The log key of the noise scale to predict from: the one that the run goes by; in a log without the key gns, the whole
    model's, in Adam's metric if there. Where there is none, the reason and what to change: another metric would give other
    numbers, and the norm layers' own value predicts nothing."""
    newest = next((row for row in reversed(run.steps) if triple(row, "gns")), None)
    if newest:
        return source(newest)
    metrics = ("", "_adam") if run.config.get("gns_metric") == "plain" else ("_adam", "")
    keys = [key for metric in metrics for key in ("gns/total_adam" if metric else "gns/body", f"gns/calibrated{metric}")]
    if not any("gns" in row for row in run.steps):
        found = next((key for key in keys if any(triple(row, key) for row in run.steps)), None)
        if found:
            return found
    mode = run.config.get("gns") or ("norm" if "gns/norm" in run.steps[-1] else "off")
    if max(row["batch_size"] for row in run.steps) == 1:
        raise ConfigError(f"{run.folder}: batch_size=1: a step of one sequence has no noise scale, so there is no prediction; "
                          "train with batch_size=2 or more")
    if mode == "off":
        raise ConfigError(f"{run.folder}: gns='off': its noise scale was not measured, so there is no prediction; "
                          "train with --gns=norm, which costs next to nothing")
    if mode == "norm" and not any(key in row for row in run.steps for key in keys):
        raise ConfigError(f"{run.folder}: gns_calibrate=False: it measured the norm layers alone, whose noise scale is not "
                          "the whole model's, so there is no prediction; use --gns_calibrate=True or --gns=exact")
    factors = [f"gns/calibration{metric}" for metric in metrics]
    calibrated = mode != "norm" or any(row.get(key) is not None for row in run.steps for key in factors)
    why = ("the gradient is too small against its noise; train for more tokens, with a larger batch_size or a longer "
           "gns_half_life_tokens" if calibrated else "the factor from the norm layers to the whole model was still being "
           "measured; train for more tokens")
    raise ConfigError(f"{run.folder}: its noise scale is undetermined in {'all ' if len(run.steps) > 1 else ''}"
                      f"{log.plural(len(run.steps), 'logged row')} ({log.count(run.steps[-1]['tokens'])} tokens), so there is "
                      f"no prediction: {why}")


def wider(value, low, high, by):
    """The triple with its interval `by` times as wide, in logarithms."""
    return value, (value * (low / value) ** by if low > 0 else 0.0), value * (high / value) ** by


def noise_values(steps, key):
    """([triple per row], rows that had one). Where a row has none:

    - calibrated, and the norm layers' own is there: that times the nearest factor known, the last before or else the first
      after. The factor drifts little, so its interval counts twice;
    - else the last value before, its interval twice as wide;
    - else, before the first, that one, with an interval from 0: the noise scale starts low and rises.
    """
    known = [triple(row, key) for row in steps]
    norm = [triple(row, key.replace("calibrated", "norm")) if "calibrated" in key else None for row in steps]
    first = next(i for i, t in enumerate(known) if t)
    source, values = None, []
    for i, t in enumerate(known):
        source = i if t else source
        near = first if source is None else source
        if t:
            values.append(t)
        elif norm[i] and norm[near]:
            factor = tuple(v / known[near][0] for v in wider(*known[near], by=2))
            values.append(gns.product((norm[i][0] * known[near][0] / norm[near][0], *(
                v * known[near][0] / norm[near][0] for v in norm[i][1:])), factor))
        elif source is None:
            values.append((known[first][0], 0.0, known[first][2]))
        else:
            values.append(wider(*known[source], by=2))
    return values, sum(t is not None for t in known)


@dataclasses.dataclass
class Phase:
    steps: float
    batch: float  # mean over its steps
    noise: Noise
    seconds: float


def phases(run, values, until):
    """The run up to step `until` (which may lie between two rows), row by row, or, in a long log, PHASES times."""
    start = run.rows[0] if "train/loss" not in run.rows[0] else {"step": 0, "tokens": 0}
    before = {"seconds": 0.0, **start}
    if start["step"] > 0:  # a branch: its clock went on from the run it left
        before["seconds"] = max(run.steps[0].get("seconds", 0.0) - run.steps[0].get("dt_ms", 0.0) / 1e3
                                * (run.steps[0]["step"] - start["step"]), 0.0)
    found, every = [], -(-len(values) // PHASES)
    for row, noise in reversed(list(zip(run.steps, values))[::-1][::every]):
        steps = row["step"] - before["step"]
        if steps <= 0:
            continue
        share = min(1.0, (until - before["step"]) / steps)
        if share <= 0:
            break
        batch = (row["tokens"] - before["tokens"]) / (run.block * steps)
        seconds = row.get("seconds", before["seconds"]) - before["seconds"]
        found.append(Phase(share * steps, batch, Noise(*noise), share * seconds))
        before = {"seconds": before["seconds"], **row}
    return found


def at(phases, end="value"):
    """Phases as gns.py takes them, with the noise scale's value, low or high end. The errors of neighbouring rows come from the
    same averages, so all rows are low together or high together."""
    return [(p.steps, p.batch, getattr(p.noise, end)) for p in phases]


def target(run, to_loss=None):
    """(loss, "validation" or "smoothed training", step): where the run reached `to_loss`, or its end."""
    evaluated = [r for r in run.rows if r.get("val/loss") is not None]
    last = run.steps[-1]
    if to_loss is None:
        if evaluated and evaluated[-1]["step"] == last["step"]:
            return evaluated[-1]["val/loss"], "validation", last["step"]
        return float(curve(run.steps, "train")["loss"][-1]), "smoothed training", last["step"]
    source = "val" if len(evaluated) >= EVALUATIONS else "train"
    kind = {"val": "validation", "train": "smoothed training"}[source]
    way = curve([*run.steps, *evaluated] if source == "val" else run.steps, source)
    got = reach(way, to_loss)
    if got is None or got["steps"] <= 0:
        raise ConfigError(f"--to_loss={to_loss:g}: {run.folder} went from {way['loss'][0]:.4f} to {way['loss'].min():.4f} "
                          f"({kind} loss); a prediction does not reach beyond what the run did")
    return to_loss, kind, got["steps"]


def at_the_end(run, until):
    """Whether step `until` is the end of a finished run, where the learning rate has come down."""
    last, tokens = run.steps[-1], max(run.config.get(key) or 0 for key in ("max_tokens", "decay_tokens"))
    return until >= last["step"] and last["tokens"] >= tokens and run.config.get("lr_decay") != "none"


# -- what a step costs


def logged_cost(row):
    """As the run measured it itself, from a row, or None."""
    names = ("step_time/fixed_ms", "step_time/per_sequence_ms")
    if any(row.get(n) is None for n in names) or not row[names[1]] > 0:
        return None
    fixed, each = (tuple(1e-3 * (v if row.get(n + end) is None else row[n + end]) for end in ("", "_low", "_high"))
                   for n in names for v in [row[n]])
    if not (0 < each[1] <= each[0] <= each[2] and fixed[1] <= fixed[0] <= fixed[2]):
        return None
    return Cost(tuple(max(v, 0.0) for v in fixed), each, MEASURED)


def line(x, y):
    """(t0, t1) of y = t0 + t1 x by Huber's estimate on relative residuals: a busy machine makes single rows slow."""
    t0, t1, robust = 0.0, float(np.median(y / x)), np.ones(len(x))
    for _ in range(30):
        guess = np.maximum(t0 + t1 * x, 1e-12)
        w = robust / guess**2
        mean_x, mean_y = (w * x).sum() / w.sum(), (w * y).sum() / w.sum()
        t1 = (w * (x - mean_x) * (y - mean_y)).sum() / max((w * (x - mean_x) ** 2).sum(), 1e-300)
        t0 = mean_y - t1 * mean_x
        off = np.abs(y - t0 - t1 * x) / guess
        robust = np.minimum(1.0, 1.345 * max(1.4826 * np.median(off), 1e-9) / np.maximum(off, 1e-12))
    return t0, t1


def fit_cost(batch, seconds):
    """Cost from the mean batch and the seconds of a step in each row, or None where they do not tell t0 from t1. Errors by the
    jackknife over five contiguous stretches: neighbouring rows are slow together, and shorter stretches would not show it."""
    if len(batch) < 10 or max(batch) < 1.5 * min(batch):
        return None
    x, y, blocks = np.asarray(batch, float), np.asarray(seconds, float), 5
    whole, parts = line(x, y), np.array_split(np.arange(len(x)), blocks)
    without = np.array([line(np.delete(x, part), np.delete(y, part)) for part in parts])
    error = gns.student_t(0.95, blocks - 1) * np.sqrt((blocks - 1) / blocks * ((without - without.mean(0)) ** 2).sum(0))
    if not whole[1] - error[1] > 0:
        return None
    fixed, each = ((float(v), float(v - e), float(v + e)) for v, e in zip(whole, error))
    return Cost(tuple(max(v, 0.0) for v in fixed), each, "fitted to the step times of the log")


def step_cost(run):
    """Cost, by the newest row that has it or by a fit to all of them; None where the run cannot tell."""
    measured = next(filter(None, map(logged_cost, reversed(run.steps))), None)
    timed = [(row["tokens"] - before["tokens"], row["step"] - before["step"], row["dt_ms"])
             for before, row in zip(run.steps, run.steps[1:]) if row.get("dt_ms")]  # not the first row: it warms up
    return measured or fit_cost([t / (run.block * s) for t, s, _ in timed], [1e-3 * ms for *_, ms in timed])


# -- other batches


def ordered(value, *others):
    return value, min(value, *others), max(value, *others)


def steps_at(phases, batch):
    """Steps at a constant batch, as a triple. A noise scale that reads low makes phases of smaller batches count for too much,
    those of larger ones for too little. The two lie apart in the run, so their errors do not cancel: in quadrature."""
    value = gns.equivalent_steps(at(phases), batch)
    parts = [p for p in ([p for p in phases if p.batch < batch], [p for p in phases if p.batch > batch]) if p]
    parts = [ordered(*(gns.equivalent_steps(at(part, end), batch) for end in ENDS)) for part in parts]
    down, up = math.hypot(*(v - low for v, low, _ in parts)), math.hypot(*(high - v for v, _, high in parts))
    return value, value - down, value + up


def row_at(phases, batch, block, cost, rate=None):
    """What reaching the loss at a constant batch takes; rate is money per second."""
    steps = steps_at(phases, batch)
    row = {"batch": batch}
    row |= named("steps", steps) | named("tokens", tuple(s * batch * block for s in steps))
    seconds = gns.product(steps, cost.step(batch)) if cost else (None, None, None)
    row |= named("seconds", seconds)
    return row | (named("money", tuple(s * rate for s in seconds)) if rate and cost else {})


def fastest_constant(phases, cost, quantum):
    """The multiple of the quantum that takes the least time."""
    return right_batch(mean_noise(phases), cost, quantum).time.batch


def stages(phases, objective, cost, quantum, block):
    """The best schedule in at most STAGES stages of equal progress: [{"tokens": where it starts, "batch", "steps"}]. Within a
    stage its mean noise scale decides, so each has the best constant batch that it can have."""
    done, groups = 0.0, [[] for _ in range(STAGES)]
    whole = gns.fewest(at(phases))[0]
    for phase in phases:
        own = phase.steps * gns.progress(phase.batch, phase.noise.value)
        groups[min(STAGES - 1, int(STAGES * (done + own / 2) / whole))].append(phase)
        done += own
    found, tokens = [], 0.0
    for group in filter(None, groups):
        batch = getattr(right_batch(mean_noise(group), cost, quantum), objective).batch
        steps = gns.equivalent_steps(at(group), batch)
        if found and found[-1]["batch"] == batch:
            found[-1]["steps"] += steps
        else:
            found.append({"tokens": tokens, "batch": batch, "steps": steps})
        tokens += steps * batch * block
    return found


def price(phases, batch_at, block, cost):
    """{"steps", "tokens", "seconds"} of a schedule, batch_at(tokens), for the same progress, phase by phase."""
    tokens = steps = seconds = 0.0
    for phase in phases:
        batch = batch_at(tokens)
        more = gns.equivalent_steps(at([phase]), batch)
        tokens, steps = tokens + more * batch * block, steps + more
        seconds += more * cost.step(batch)[0] if cost else 0.0
    return {"steps": steps, "tokens": tokens, "seconds": seconds if cost else None}


def schedule_at(found):
    """batch_at(tokens) of stages."""
    return lambda tokens: next(s["batch"] for s in reversed(found) if s["tokens"] <= tokens)


def own(phases, block, cost):
    """What the run itself took, by the log and, in seconds, by the cost of its steps."""
    return {"batch_low": min(p.batch for p in phases), "batch_high": max(p.batch for p in phases),
            "steps": sum(p.steps for p in phases), "tokens": sum(p.steps * p.batch for p in phases) * block,
            "seconds": sum(p.steps * cost.step(p.batch)[0] for p in phases) if cost else None,
            "seconds_taken": sum(p.seconds for p in phases)}


def lost(phases, cost, quantum, block):
    """{what: {share, low, high}}: how much more the run's own schedule took than the best one; below zero it took less. Ranges
    are over the corners of the noise scale's and the step cost's intervals, the best batch chosen anew in each."""
    def more(end, t0, t1):
        those = [dataclasses.replace(p, noise=Noise(*3 * [getattr(p.noise, end)])) for p in phases]
        there = Cost((t0,) * 3, (t1,) * 3, "") if t1 else None
        mine = own(those, block, there)
        found = {"tokens": mine["tokens"] / (gns.equivalent_steps(at(those), quantum) * quantum * block) - 1}
        if there:
            batch = fastest_constant(those, there, quantum)
            found["time"] = mine["seconds"] / (gns.equivalent_steps(at(those), batch) * there.step(batch)[0]) - 1
            plan = stages(those, "time", there, quantum, block)
            found["time_schedule"] = mine["seconds"] / sum(s["steps"] * there.step(s["batch"])[0] for s in plan) - 1
        return found
    costs = [(cost.fixed[i], cost.per_sequence[j]) for i, j in ((0, 0), (1, 2), (2, 1))] if cost else [(0.0, 0.0)]
    corners = [more(end, *pair) for pair in costs for end in ENDS]
    return {what: dict(zip(("share", "low", "high"), ordered(*(c[what] for c in corners)))) for what in corners[0]}


def deadline(phases, seconds, cost, quantum, block, rate=None):
    """The batch that reaches the loss within `seconds` with the fewest tokens, which is the smallest that does, or, where there
    is none, the fastest."""
    steps, examples = gns.fewest(at(phases))
    ends = gns.batches_within(seconds, steps, examples, cost.fixed[0], cost.per_sequence[0])
    batch = ends and max(1, math.ceil(ends[0] / quantum - 1e-9)) * quantum
    possible = bool(ends) and batch <= ends[1] * (1 + 1e-9)
    row = row_at(phases, batch if possible else fastest_constant(phases, cost, quantum), block, cost, rate)
    return {"within": seconds, "possible": possible, **row}


def default_batches(phases, noise, best, quantum):
    """From the smallest to far above everything of interest, doubling."""
    top = 4 * max([noise.value, max(p.batch for p in phases), *([best] if best else [])])
    found = [quantum]
    while found[-1] < top and len(found) < 16:
        found.append(2 * found[-1])
    return found


# -- all of it


def predict(run, machine, to_loss=None, batches=None, rate=None):
    """(result, phases): what whatif.py shows, as plain values. batches: those of the table. rate: money per second."""
    key = noise_key(run)
    values, _ = noise_values(run.steps, key)
    loss, kind, until = target(run, to_loss)
    found = phases(run, values, until)
    known = [triple(row, key) is not None for row in run.steps][:1 + sum(row["step"] < until for row in run.steps)]
    cost, quantum, block = machine.cost, machine.quantum, run.block
    mean = mean_noise(found)
    right = right_batch(mean, cost, quantum)
    batches = batches or default_batches(found, mean, cost and right.time.batch, quantum)
    fits = machine.measured or min(p.batch for p in found) >= quantum  # below, the cost of a step is another
    mine = own(found, block, cost if fits else None)
    result = {"run": run.folder, "loss": loss, "loss_kind": kind, "at_the_end": at_the_end(run, until), "assumes": TUNED,
              "rows": [row_at(found, b, block, cost, rate) for b in batches],
              "step_time": step_time(cost), "right_batch": right.numbers(),
              "right_batch_at_the_end": right_batch(found[-1].noise, cost, quantum).numbers(),
              "noise": {"key": key, "rows": len(known), "determined": sum(known), **named("mean", mean.triple),
                        "lowest": min(p.noise.value for p in found), "highest": max(p.noise.value for p in found),
                        "at_the_end": found[-1].noise.value},
              "own": mine, "lost": lost(found, cost, quantum, block) if fits else None,
              "machine": {"devices": machine.devices, "quantum": quantum, "measured": machine.measured}}
    if cost:
        best = stages(found, "time", cost, quantum, block)
        result["best_constant"] = row_at(found, fastest_constant(found, cost, quantum), block, cost, rate)
        result["best_schedule"] = {"stages": best, **price(found, schedule_at(best), block, cost)}
    return result, found


def of_run(folder):
    """(result, run, phases) of a run on its own machine."""
    run = read(folder)
    result, found = predict(run, Machine(run.devices, run.micro, step_cost(run), True))
    return result, run, found


def step_time(cost):
    if cost is None:
        return {"fixed_ms": None, "per_sequence_ms": None}
    return {**cost.milliseconds(), "source": cost.source}
