"""
Does steering by the noise scale pay, in real seconds, on machines that differ?

    python data/python/prepare.py
    python experiments/steering.py                     # four machines (hosts.py; needs root): two hours on two quiet cores
    python experiments/steering.py --machines=one,two

Constant batches 4 to 256, each with its own best learning rate; the paper's linear ramp and seesaw, 8 to 64; and
batch_schedule=gns with its defaults, batch_objective=time, from 8, up to 256. Those three share one learning rate. Whole runs
of three lengths over three seeds, the learning rate falling to a tenth: ends are compared with ends.

gns really runs on each machine: its decisions depend on what a step costs there. What it is compared with trains the same
whatever the machine, so those runs are made once, on one process (the constant ones of 4 to 128 by prediction.py, whose numbers
file is read), and their seconds on a machine are steps times the time of a step without any tracking, measured there at each
batch. One constant run on each machine checks that: its real seconds stand beside those.
Regret: seconds of gns, over those of the best constant batch to the same final loss, less 1. Medians over seeds: one seed of
batch 64 nearly diverged, which must not make that batch look bad.

Machines that we do not have: t(B) = t0 + B in units of t1, with t0 of 1 to 256 sequences. gns runs there with that cost given
(priced.py), and pays for tracking and exact steps what they cost in the quickstart.
"""

import os
import shutil
import statistics
import sys

import hosts
import numpy as np
import prediction
from common import ROOT, Experiment

import configurator
import schedule
from plots import style
from sweeps import jobs
from system import errors
from trainer import log

PAPER = ("The paper: a linear batch schedule, guided by the noise scale, reached the fixed run's loss in 18% less training "
         "time. It does not ask what a step costs.")
CONSTANTS, LARGEST, QUANTUM = (4, 8, 16, 32, 64, 128, 256), 256, 8
FACTOR = 2.0  # on the learning rate, of everything but the constant batches: theirs came out between 1.9 and 3
RAMP = dict(batch_size_start=QUANTUM, batch_size=64)
GNS = dict(batch_schedule="gns", batch_size_start=QUANTUM, batch_size=LARGEST)
FIXED = {"linear": dict(batch_schedule="linear", **RAMP), "seesaw": dict(batch_schedule="seesaw", **RAMP)}
LENGTHS = (0.5, 1.0, 2.0)  # of the fixed schedules, over max_tokens
LONG = (1.5, 2.5, 4.0)  # of the batch of LARGEST
# lengths of gns, so that its final losses lie within those of the constant batches
STEERED = {"one": (0.6, 0.8, 1.1), "two": (0.6, 0.8, 1.1), "200mbit": (0.8, 1.1, 1.6), "50mbit": (1.0, 1.4, 2.0)}
RATIOS, PRICED_LENGTHS = (1, 4, 16, 64, 256), (0.8, 0.8, 1.0, 1.2, 1.6)  # t0 / t1 of machines we do not have, in sequences
STEPS, EVERY, SEQUENCES = 60, 10, 8000  # of the runs that time a step; without a slow link at least so many sequences
TRACKED = 1.04  # a sequence that is tracked, over one that is not (quickstart)


def settings(config, length, seed, **changes):
    """What a run of another schedule than a constant batch changes in the config."""
    tokens = round(config.max_tokens * length)
    return dict(max_tokens=tokens, warmup_tokens=round(prediction.WARM_UP * tokens), seed=seed,
                learning_rate=config.learning_rate * FACTOR, min_lr=config.min_lr * FACTOR, **changes)


# -- runs that are the same on every machine

def known_ends(folder, config):
    """{batch: [(tokens, final losses)]} of prediction.py."""
    found = prediction.known(folder, config)["tokens_and_final_losses"]
    return {int(b): [(tokens, losses) for tokens, losses in ends] for b, ends in found.items() if int(b) in CONSTANTS}


def far_ends(runs, seeds):
    """The same of the largest batch, at the best of three learning rates, by a seed that is not reported."""
    def name(factor, length, seed):
        return f"batch{LARGEST}_lr{factor:g}_length{length:g}_seed{seed}"

    def do(those):
        runs.do({name(f, n, s): prediction.constant_batch(LARGEST, round(runs.config.max_tokens * n), f, s, "norm", runs.config)
                 for f, n, s in those}, may_die=True)
    do([(f, LONG[0], 0) for f in (1.0, 2.0, 4.0)])
    best = prediction.top({f: runs.final_loss(name(f, LONG[0], 0)) for f in (1.0, 2.0, 4.0)})
    do([(best, n, s) for s in seeds for n in LONG])
    return best, [(round(runs.config.max_tokens * n), [runs.final_loss(name(best, n, s)) for s in seeds]) for n in LONG]


def fixed_ends(runs, seeds):
    """{schedule: [(tokens, final losses)]}"""
    runs.do({f"{kind}_length{n:g}_seed{s}": settings(runs.config, n, s, **own)
             for kind, own in FIXED.items() for s in seeds for n in LENGTHS})
    return {kind: [(round(runs.config.max_tokens * n),
                    [runs.final_loss(f"{kind}_length{n:g}_seed{s}") for s in seeds]) for n in LENGTHS] for kind in FIXED}


# -- machines

def real(name, out, config, changes):
    """One run on that machine; not again where it is finished, with these settings."""
    folder = os.path.join(out, name, changes.pop("name"))
    processes = hosts.MACHINES[name][0]
    micro = min(QUANTUM, changes["batch_size"]) // processes
    own = {**vars(config), **changes, "out_dir": folder, "micro_batch_size": micro}
    finished = jobs.tokens_done(folder) >= own["max_tokens"]
    if finished:
        try:
            jobs.same_settings(configurator.Config(**own), configurator.read_run(folder))
        except configurator.ConfigError as e:
            errors.die(e)
    else:  # its seconds are real ones: never half a run
        shutil.rmtree(folder, ignore_errors=True)
        hosts.train(name, own)
    return log.read(folder)


def step_times(name, args, config, turn):
    """{batch: seconds of a step}, each measured by a run of its own, without tracking."""
    found, (processes, link) = {}, hosts.MACHINES[name]
    for batch in (b for b in CONSTANTS if b >= processes):
        steps = STEPS if link else max(STEPS, SEQUENCES // batch)
        rows = real(name, args.out, config, dict(
            name=f"untracked{batch}_{turn}", batch_schedule="constant", batch_size=batch,
            max_tokens=steps * batch * config.block_size, warmup_tokens=0, log_interval=EVERY, gns="off",
            gns_calibrate=False, eval_iters=8))
        first, *_, last = [r for r in log.steps(rows) if r["step"] >= 2 * EVERY]
        found[batch] = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])  # hiccups and all, as in a run
    print(f"{name}: seconds of a step, {turn}: {', '.join(f'{b}: {t:.4f}' for b, t in found.items())}", flush=True)
    return found


def summary(rows):
    """What became of a run of gns."""
    steps = log.steps(rows)
    return {"tokens": steps[-1]["tokens"], "steps": steps[-1]["step"], "seconds": steps[-1]["seconds"],
            "loss": [r["val/loss"] for r in rows if "val/loss" in r][-1], "walk": walk_of(steps)}


def walk_of(steps):
    """[[batch, steps]] of a log."""
    found, before = [], 0
    for r in steps:
        if not found or found[-1][0] != r["batch_size"]:
            found.append([r["batch_size"], 0])
        found[-1][1] += r["step"] - before
        before = r["step"]
    return found


# -- seconds to a loss

def seconds_to(loss, kind, ends, times, config):
    """Of a constant batch or a fixed schedule, to end at `loss`; None outside of what its runs reached."""
    tokens = prediction.taken([(n, [statistics.median(losses)]) for n, losses in ends], loss)
    if tokens is None or (isinstance(kind, int) and kind not in times):
        return None
    if isinstance(kind, int):
        return tokens / (kind * config.block_size) * times[kind]
    changed = type(config)(**{**vars(config), **settings(config, tokens / config.max_tokens, 0, **FIXED[kind])})
    batches, done, seconds = schedule.build(changed, QUANTUM), 0, 0.0
    while done < tokens:
        batch = batches.at(done)
        done, seconds = done + batch * config.block_size, seconds + float(np.interp(batch, list(times), list(times.values())))
    return seconds


def compared(steered, ends, times, config):
    """One loss: {"loss", "gns", every other kind: seconds to it or None, "best": constant batch, "regret": {kind: share}}"""
    loss, seconds = (statistics.median(r[key] for r in steered) for key in ("loss", "seconds"))
    others = {kind: seconds_to(loss, kind, own, times, config) for kind, own in ends.items()}
    constant = {b: s for b, s in others.items() if isinstance(b, int) and s}
    if not constant:
        return {"loss": loss, "gns": seconds, "best": None}
    best = min(constant, key=constant.get)
    everything = {"gns": seconds, **{kind: s for kind, s in others.items() if s}}
    tried = list(times)
    around = tried[max(0, tried.index(best) - 1):tried.index(best) + 2]
    return {"loss": loss, "seconds": {str(k): s for k, s in everything.items()}, "best": best,
            "bracketed": all(b in constant for b in around),  # else a neighbour that never ended at this loss may be better
            "sweep_seconds": sum(constant.values()),
            "regret": {str(k): s / constant[best] - 1 for k, s in everything.items()},
            "regret_of_seeds": [r["seconds"] / (seconds_to(r["loss"], best, ends[best], times, config) or float("nan")) - 1
                                for r in steered]}


def on_machine(name, args, config, seeds, ends):
    """Everything of one machine."""
    with hosts.machine(name):
        before = step_times(name, args, config, "before")  # and after: a machine's speed drifts over minutes
        runs = {n: [summary(real(name, args.out, config, {"name": f"gns_length{n:g}_seed{s}", **settings(config, n, s, **GNS)}))
                    for s in seeds] for n in STEERED[name]}
        after = step_times(name, args, config, "after")
        times = {b: (before[b] + after[b]) / 2 for b in before}
        losses = {f"{n:g}": compared(those, ends, times, config) for n, those in runs.items()}
        best = next((own["best"] for own in losses.values() if own["best"]), QUANTUM)
        check = checked(name, args, config, best, times)
    return {"step_seconds": times, "after_over_before": {b: after[b] / before[b] for b in before}, "losses": losses,
            "runs": {f"{n:g}": those for n, those in runs.items()}, "check": check}


def checked(name, args, config, batch, times):
    """A whole constant run on the machine: its seconds, and what steps times the time of a step says."""
    tokens = round(config.max_tokens * STEERED[name][0])
    rows = real(name, args.out, config, {"name": f"check{batch}", "gns_calibrate": False,
                                         **prediction.constant_batch(batch, tokens, FACTOR, 1, "off", config)})
    last = log.steps(rows)[-1]
    return {"batch": batch, "steps": last["step"], "seconds": last["seconds"], "priced": last["step"] * times[batch]}


class Priced(jobs.Group):
    """Runs with a given cost of a step."""

    def start(self, command, **options):
        python, _, *arguments = command
        return super().start([python, os.path.join(ROOT, "experiments", "priced.py"), *arguments], **options)


def priced_seconds(walk, ratio):
    """Of a run of gns, in units of t1."""
    return sum(steps * (ratio + batch * TRACKED) for batch, steps in walk)


def on_made_up_machines(runs, seeds, ends):
    """{t0 / t1: what `compared` says}, in units of t1."""
    result = {}
    for ratio, length in zip(RATIOS, PRICED_LENGTHS):
        times = {b: float(ratio + b) for b in CONSTANTS}
        runs.group = lambda *a, **how: Priced(*a, **how, env={"STEP_COST": f"{ratio * 1e-3},1e-3"})
        names = {s: f"ratio{ratio}_length{length:g}_seed{s}" for s in seeds}
        runs.do({name: settings(runs.config, length, s, **GNS) for s, name in names.items()})
        steered = [summary(runs.rows(name)) for name in names.values()]
        for r in steered:
            r["seconds"] = priced_seconds(r["walk"], ratio)
        result[str(ratio)] = {**compared(steered, ends, times, runs.config), "walk": steered[0]["walk"]}
    return result


# -- what came out

def finding(result):
    def said(results, kind="gns"):
        regrets = [own["regret"][kind] for own in results if kind in own.get("regret", ()) and own["bracketed"]]
        return f"{min(regrets):+.0%} to {max(regrets):+.0%}" if regrets else "not comparable"
    each = []
    for name, machine in result["machines"].items():
        losses = machine["losses"].values()
        best = ", ".join(str(b) for b in sorted({own["best"] for own in losses if own["best"]}))
        each.append(f"{name} {said(losses)} (best constant {best}; linear {said(losses, 'linear')}, seesaw "
                    f"{said(losses, 'seesaw')})")
    priced = ", ".join(f"{ratio}: {own['regret']['gns']:+.0%} (best {own['best']})"
                       for ratio, own in result["priced"].items() if own["best"] and own["bracketed"])
    return ("Here, seconds of gns to a loss, with no sweep over batches, over those of the best constant batch: "
            f"{'; '.join(each)}. Priced, t0/t1 of {priced or 'none'}.")


def draw(result, _, path):
    """Regret against constant batch, with the schedules as lines, one panel a machine."""
    machines = result["machines"]
    figure, axes = style.panels(len(machines), 4 * len(machines), 4.2, sharey=True, squeeze=False)
    for ax, (name, own) in zip(axes.flat, machines.items()):
        for shade, told in zip((0.35, 0.65, 1.0), (r for r in own["losses"].values() if r["best"])):
            regret = told["regret"]
            batches = [b for b in CONSTANTS if str(b) in regret]
            ax.plot(batches, [1 + regret[str(b)] for b in batches], "o-", ms=4, color=style.COLORS[0], alpha=shade,
                    label=f"constant, to a loss of {told['loss']:.2f}")
            for color, kind in zip(style.COLORS[1:], ("gns", *FIXED)):
                if kind in regret:
                    ax.axhline(1 + regret[kind], color=color, alpha=shade, ls="-" if kind == "gns" else "--",
                               label=kind if shade == 1.0 else None)
        style.dress(ax, hosts.WORDS[name], "batch, sequences", "doublings", "log")
    axes[0, 0].set_ylabel("seconds, over the best constant batch")
    style.save(figure, path)


def measure(runs):
    args, config, seeds = runs.args, runs.config, list(range(1, runs.args.seeds + 1))
    names, ends = hosts.names(args.machines), known_ends(args.results, config)
    factor, ends[LARGEST] = far_ends(runs, seeds)
    ends |= fixed_ends(runs, seeds)
    return {"tokens_and_final_losses": {k: ends[k] for k in (LARGEST, *FIXED)}, "learning_rate_factor": {str(LARGEST): factor},
            "priced": on_made_up_machines(runs, seeds, ends),
            "machines": {name: on_machine(name, args, config, seeds, ends) for name in names}}, None


main = Experiment("steering", __doc__, PAPER, measure, finding, draw, prediction.SETTINGS, prediction.TINY, seeds=3,
                  options={"--machines": dict(default=",".join(hosts.MACHINES), help="some of them, by comma")})

if __name__ == "__main__":
    sys.exit(main())
