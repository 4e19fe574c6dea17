"""
What one run says about other batches: from its log to steps, tokens and seconds at any batch (whatif.py shows them).

A run is cut into phases, one per logged row: so many steps, at the batch and the noise scale of that row. gns.py turns them
into steps at another batch, the cost of a step t0 + t1 B turns those into seconds. Every quantity with an error is a triple
(value, low, high) at 95%.

Assumes a learning rate tuned for each batch. Intervals cover errors of the measurement, not of the theory.

Letters: B sequences in a step, N noise scale in sequences, t0 and t1 seconds of a step and of each sequence in it.
"""

import dataclasses
import math

import numpy as np

import gns
from configurator import ConfigError
from rightbatch.common import named
from rightbatch.decision import TUNED, Cost, Noise, Triple, mean_noise, right_batch
from trainer import log
from trainer.reader import NOISE, Run, cost_of, curve, newest_noise, noise_of, reach, read, source

CHECKED = "How far predictions were checked: docs/whatif.md."
EVALUATIONS = 4  # fewer tell too little of where a loss was reached
PHASES = 1000  # that a log is cut into at most: the noise scale changes little from one to the next
ENDS = "value", "low", "high"  # of a Noise
STAGES = 8  # of a schedule: enough to follow the noise scale, few enough to read


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


@dataclasses.dataclass
class Phase:
    steps: float
    batch: float  # mean over its steps
    noise: Noise
    seconds: float


# -- from the log to phases


def noise_key(run: Run) -> str:
    """The log key of the noise scale that the run goes by. Where it is never determined: the reason and what to change. Another
    metric would give other numbers, and the norm layers' own value predicts nothing."""
    _, row = newest_noise(run.steps)
    if row:
        return source(row) or "gns"
    if not any("gns" in row for row in run.steps) and any(noise_of(row, key) for row in run.steps for key in NOISE):
        raise ConfigError(f"{run.folder}: its log does not say which noise scale the run went by (gns): it is of an earlier "
                          "version; resume the run, or train anew")
    mode = run.config.get("gns") or ("norm" if "gns/norm" in run.steps[-1] else "off")
    if max(row["batch_size"] for row in run.steps) == 1:
        raise ConfigError(f"{run.folder}: batch_size=1: a step of one sequence has no noise scale, so there is no prediction; "
                          "train with batch_size=2 or more")
    if mode == "off":
        raise ConfigError(f"{run.folder}: gns='off': its noise scale was not measured, so there is no prediction; "
                          "train with --gns=norm, which costs next to nothing")
    if mode == "norm" and not any(key in row for row in run.steps for key in NOISE):
        raise ConfigError(f"{run.folder}: gns_calibrate=False: it measured the norm layers alone, whose noise scale is not "
                          "the whole model's, so there is no prediction; use --gns_calibrate=True or --gns=exact")
    calibrated = mode != "norm" or any(row.get(f"gns/calibration{metric}") for row in run.steps for metric in ("", "_adam"))
    why = ("the gradient is too small against its noise; train for more tokens, with a larger batch_size or a longer "
           "gns_half_life_tokens" if calibrated else "the factor from the norm layers to the whole model was still being "
           "measured; train for more tokens")
    raise ConfigError(f"{run.folder}: its noise scale is undetermined in {'all ' if len(run.steps) > 1 else ''}"
                      f"{log.plural(len(run.steps), 'logged row')} ({log.count(run.steps[-1]['tokens'])} tokens), so there is "
                      f"no prediction: {why}")


def wider(noise: Noise, by: float) -> Noise:
    """The same noise scale, its interval `by` times as wide, in logarithms."""
    value, low, high = noise.triple
    return Noise(value, value * (low / value) ** by if low > 0 else 0.0, value * (high / value) ** by, noise.of)


def noise_values(steps, key) -> list[Noise]:
    """The noise scale of each row. A row without one goes by the last row before it that has one, else by the first after:

    - it takes the norm layers' own noise scale, if it has that, times the other row's factor, which drifts little: the interval
      of the other row counts twice;
    - else it takes the value of a row before with twice the interval, that of a row after with an interval from 0: the noise
      scale starts low and rises.
    """
    known = [noise_of(row, key) for row in steps]
    norm = [noise_of(row, key.replace("calibrated", "norm")) if "calibrated" in key else None for row in steps]
    first = next(i for i, noise in enumerate(known) if noise)
    last, values = None, []
    for i, noise in enumerate(known):
        last = i if noise else last
        near = first if last is None else last
        there = known[near]
        if noise:
            values.append(noise)
        elif norm[i] and norm[near]:
            factor = tuple(v / there.value for v in wider(there, by=2).triple)
            scaled = norm[i].times(there.value / norm[near].value)
            values.append(Noise(*gns.product(scaled.triple, factor), there.of))
        else:
            values.append(Noise(there.value, 0.0, there.high, there.of) if last is None else wider(there, by=2))
    return values


def beginning(run: Run) -> dict:
    """{"step", "tokens", "seconds"} where the log begins: in a branch, where it left its run, whose clock went on in it."""
    start, first = run.rows[0] if "train/loss" not in run.rows[0] else {"step": 0, "tokens": 0}, run.steps[0]
    seconds = first["seconds"] - first.get("dt_ms", 0.0) / 1e3 * (first["step"] - start["step"])
    return {"step": start["step"], "tokens": start["tokens"], "seconds": max(seconds, 0.0) if start["step"] > 0 else 0.0}


def phases_of(run: Run, key: str, until: float) -> list[Phase]:
    """A phase for each row up to step `until`, which may lie between two rows. In a long log a phase is several rows, so that
    there are at most PHASES."""
    before, count, noises, phases = beginning(run), len(run.steps), noise_values(run.steps, key), []
    every = math.ceil(count / PHASES)
    for i in range((count - 1) % every, count, every):  # ends with the last row
        row = run.steps[i]
        steps = row["step"] - before["step"]
        if steps <= 0:
            continue
        share = min(1.0, (until - before["step"]) / steps)
        if share <= 0:
            break
        batch = (row["tokens"] - before["tokens"]) / (run.block * steps)
        phases.append(Phase(share * steps, batch, noises[i], share * (row["seconds"] - before["seconds"])))
        before = row
    return phases


def at(phases, end="value"):
    """Phases as gns.py takes them, all with the same end of their noise scales (decision.mean_noise says why)."""
    return [(p.steps, p.batch, getattr(p.noise, end)) for p in phases]


def target(run: Run, to_loss=None):
    """(loss, "validation" or "smoothed training", step): where the run reached `to_loss`, or its end."""
    evaluated = [row for row in run.rows if row.get("val/loss") is not None]
    last = run.steps[-1]
    if to_loss is None:
        if evaluated and evaluated[-1]["step"] == last["step"]:
            return evaluated[-1]["val/loss"], "validation", last["step"]
        return float(curve(run.steps, "train")["loss"][-1]), "smoothed training", last["step"]
    by, kind = ("val", "validation") if len(evaluated) >= EVALUATIONS else ("train", "smoothed training")
    way = curve([*run.steps, *evaluated], by)
    there = reach(way, to_loss)
    if there is None or there["steps"] <= beginning(run)["step"]:  # reached before it began: that took no step of this run
        raise ConfigError(f"--to_loss={to_loss:g}: {run.folder} went from {way['loss'][0]:.4f} to {way['loss'].min():.4f} "
                          f"({kind} loss); a prediction does not reach beyond what the run did")
    return to_loss, kind, there["steps"]


def at_the_end(run: Run, until) -> bool:
    """Whether step `until` is the end of a finished run, where the learning rate has come down."""
    last, tokens = run.steps[-1], max(run.config.get(key) or 0 for key in ("max_tokens", "decay_tokens"))
    return until >= last["step"] and last["tokens"] >= tokens and run.config.get("lr_decay") != "none"


# -- what a step costs


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


def fit_cost(batch, seconds) -> Cost | None:
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


def step_cost(run: Run) -> Cost | None:
    """The cost of a step in the newest row that has it, else a fit to the times of all rows; None where neither tells."""
    measured = next(filter(None, map(cost_of, reversed(run.steps))), None)
    timed = [(row["tokens"] - before["tokens"], row["step"] - before["step"], row["dt_ms"])
             for before, row in zip(run.steps, run.steps[1:]) if row.get("dt_ms")]  # not the first row: it warms up
    return measured or fit_cost([t / (run.block * s) for t, s, _ in timed], [1e-3 * ms for *_, ms in timed])


# -- other batches


def ordered(value, *others) -> Triple:
    return value, min(value, *others), max(value, *others)


def steps_at(phases, batch) -> Triple:
    """Steps at a constant batch. A noise scale that reads low makes phases of smaller batches count for too much, phases of
    larger ones for too little. The two lie apart in the run, so their errors are independent and add in quadrature."""
    value = gns.equivalent_steps(at(phases), batch)
    smaller, larger = [p for p in phases if p.batch < batch], [p for p in phases if p.batch > batch]
    parts = [ordered(*(gns.equivalent_steps(at(part, end), batch) for end in ENDS)) for part in (smaller, larger) if part]
    down, up = math.hypot(*(v - low for v, low, _ in parts)), math.hypot(*(high - v for v, _, high in parts))
    return value, value - down, value + up


def row_at(phases, batch, block, cost, rate=None) -> dict:
    """What reaching the loss at a constant batch takes; rate is money per second."""
    steps = steps_at(phases, batch)
    row = {"batch": batch}
    row |= named("steps", steps) | named("tokens", tuple(s * batch * block for s in steps))
    seconds = gns.product(steps, cost.step(batch)) if cost else (None, None, None)
    row |= named("seconds", seconds)
    return row | (named("money", tuple(s * rate for s in seconds)) if rate and cost else {})


def fastest_constant(phases, cost, quantum) -> int:
    return right_batch(mean_noise(phases), cost, quantum).time.batch


def stages_of(phases, objective, cost, quantum, block) -> list:
    """The best schedule in at most STAGES stages of equal progress: [{"tokens": where it starts, "batch", "steps"}]. Within a
    stage its mean noise scale decides, so each has the best constant batch that it can have."""
    done, groups = 0.0, [[] for _ in range(STAGES)]
    whole = gns.fewest(at(phases))[0]
    for phase in phases:
        progress = phase.steps * gns.progress(phase.batch, phase.noise.value)
        groups[min(STAGES - 1, int(STAGES * (done + progress / 2) / whole))].append(phase)
        done += progress
    stages, tokens = [], 0.0
    for group in filter(None, groups):
        batch = getattr(right_batch(mean_noise(group), cost, quantum), objective).batch
        steps = gns.equivalent_steps(at(group), batch)
        if stages and stages[-1]["batch"] == batch:
            stages[-1]["steps"] += steps
        else:
            stages.append({"tokens": tokens, "batch": batch, "steps": steps})
        tokens += steps * batch * block
    return stages


def price(phases, batch_at, block, cost) -> dict:
    """{"steps", "tokens", "seconds"} of a schedule, batch_at(tokens), for the same progress, phase by phase."""
    tokens = steps = seconds = 0.0
    for phase in phases:
        batch = batch_at(tokens)
        more = gns.equivalent_steps(at([phase]), batch)
        tokens, steps = tokens + more * batch * block, steps + more
        seconds += more * cost.step(batch)[0] if cost else 0.0
    return {"steps": steps, "tokens": tokens, "seconds": seconds if cost else None}


def schedule_at(stages):
    """batch_at(tokens) of stages."""
    return lambda tokens: next(s["batch"] for s in reversed(stages) if s["tokens"] <= tokens)


def taken_by_run(phases, block, cost) -> dict:
    """What the run itself took, by the log and, in seconds, by the cost of its steps."""
    return {"batch_low": min(p.batch for p in phases), "batch_high": max(p.batch for p in phases),
            "steps": sum(p.steps for p in phases), "tokens": sum(p.steps * p.batch for p in phases) * block,
            "seconds": sum(p.steps * cost.step(p.batch)[0] for p in phases) if cost else None,
            "seconds_taken": sum(p.seconds for p in phases)}


def lost(phases, cost, quantum, block) -> dict:
    """{what: {share, low, high}}: how much more the run's own schedule took than the best one; below zero it took less. Ranges
    are over the corners of the noise scale's and the step cost's intervals, the best batch chosen anew in each."""
    def more(end, t0, t1):
        sure = [dataclasses.replace(p, noise=Noise(*3 * [getattr(p.noise, end)])) for p in phases]
        there = Cost((t0,) * 3, (t1,) * 3, "") if t1 else None
        taken = taken_by_run(sure, block, there)
        shares = {"tokens": taken["tokens"] / (gns.equivalent_steps(at(sure), quantum) * quantum * block) - 1}
        if there:
            batch = fastest_constant(sure, there, quantum)
            shares["time"] = taken["seconds"] / (gns.equivalent_steps(at(sure), batch) * there.step(batch)[0]) - 1
            stages = stages_of(sure, "time", there, quantum, block)
            shares["time_schedule"] = taken["seconds"] / sum(s["steps"] * there.step(s["batch"])[0] for s in stages) - 1
        return shares
    costs = [(cost.fixed[i], cost.per_sequence[j]) for i, j in ((0, 0), (1, 2), (2, 1))] if cost else [(0.0, 0.0)]
    corners = [more(end, *pair) for pair in costs for end in ENDS]
    return {what: dict(zip(("share", "low", "high"), ordered(*(c[what] for c in corners)))) for what in corners[0]}


def deadline(phases, seconds, cost, quantum, block, rate=None) -> dict:
    """The batch that reaches the loss within `seconds` with the fewest tokens, which is the smallest that does, or, where there
    is none, the fastest."""
    steps, examples = gns.fewest(at(phases))
    ends = gns.batches_within(seconds, steps, examples, cost.fixed[0], cost.per_sequence[0])
    batch = ends and max(1, math.ceil(ends[0] / quantum - 1e-9)) * quantum
    possible = bool(ends) and batch <= ends[1] * (1 + 1e-9)
    row = row_at(phases, batch if possible else fastest_constant(phases, cost, quantum), block, cost, rate)
    return {"within": seconds, "possible": possible, **row}


# -- all of it


def predict(run: Run, machine: Machine, to_loss=None, batches=None, rate=None):
    """(result, phases): what whatif.py shows, as plain values. batches: the table's, by default from the smallest to far above
    everything of interest, doubling. rate: money per second."""
    key = noise_key(run)
    loss, kind, until = target(run, to_loss)
    phases = phases_of(run, key, until)
    rows = run.steps[:1 + sum(row["step"] < until for row in run.steps)]  # the last of them reaches `until`
    cost, quantum, block = machine.cost, machine.quantum, run.block
    mean, last = mean_noise(phases), phases[-1].noise
    right = right_batch(mean, cost, quantum)
    top = 4 * max(mean.value, right.time.batch if cost else 0, *(p.batch for p in phases))
    batches = batches or [quantum * 2**i for i in range(16) if i == 0 or quantum * 2 ** (i - 1) < top]
    priced = machine.measured or min(p.batch for p in phases) >= quantum  # a smaller batch there costs more than `cost` says
    result = {"run": run.folder, "loss": loss, "loss_kind": kind, "at_the_end": at_the_end(run, until), "assumes": TUNED,
              "rows": [row_at(phases, b, block, cost, rate) for b in batches],
              "step_time": ({**cost.milliseconds(), "source": cost.source} if cost else
                            {"fixed_ms": None, "per_sequence_ms": None}),
              "right_batch": right.numbers(), "right_batch_at_the_end": right_batch(last, cost, quantum).numbers(),
              "noise": {"key": key, "rows": len(rows), "determined": sum(noise_of(row, key) is not None for row in rows),
                        **named("mean", mean.triple), "lowest": min(p.noise.value for p in phases),
                        "highest": max(p.noise.value for p in phases), "at_the_end": last.value},
              "own": taken_by_run(phases, block, cost if priced else None),
              "lost": lost(phases, cost, quantum, block) if priced else None,
              "machine": {"devices": machine.devices, "quantum": quantum, "measured": machine.measured}}
    if cost:
        stages = stages_of(phases, "time", cost, quantum, block)
        result["best_constant"] = row_at(phases, right.time.batch, block, cost, rate)
        result["best_schedule"] = {"stages": stages, **price(phases, schedule_at(stages), block, cost)}
    return result, phases


def of_run(folder):
    """(result, run, phases) of a run on its own machine."""
    run = read(folder)
    result, phases = predict(run, Machine(run.devices, run.micro, step_cost(run), True))
    return result, run, phases
