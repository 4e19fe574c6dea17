"""
A batch schedule in the terms of a trainer (whatif.py --export): ours, Megatron-LM, OLMo-core, torchtitan. Option names are
theirs. What a trainer cannot express stands in a comment, with how far off the nearest that it can is.

Stages are predict.stages_of: [{"tokens": where it starts, "batch": sequences, "steps"}].
"""

import math

from rightbatch.decision import TUNED
from trainer import predict


def to_steps(stages, run, machine, phases):
    """batch_steps of this trainer."""
    pairs = ", ".join(f"{int(s['tokens'])}:{s['batch']}" for s in stages)
    end = end_of(stages, run.block)
    return [f'--batch_schedule=steps --batch_steps="{pairs}" --micro_batch_size={machine.micro} --max_tokens={end}']


def end_of(stages, block):
    """Tokens at the end of the last stage."""
    return math.ceil(stages[-1]["tokens"] + stages[-1]["steps"] * stages[-1]["batch"] * block)


def to_megatron(stages, run, machine, phases):
    samples = end_of(stages, run.block) // run.block
    shape = f"--seq-length {run.block} --micro-batch-size {machine.micro} --train-samples {samples}"
    if len(stages) == 1:
        return [f"{shape} --global-batch-size {stages[0]['batch']}"]
    pairs = " ".join(f"{int(s['tokens'])}:{s['batch']}" for s in stages)
    lines = ["# thresholds are tokens, given --seq-length; --global-batch-size must be left out or be the largest batch",
             f'{shape} --step-batch-size-schedule "{pairs}"',
             "# releases before April 2026 do not know that option. They have one ramp, linear in samples:"]
    ramp = fit_ramp(stages, machine.quantum, run.block)
    if ramp is None:
        return lines + ["#   which cannot fall, as this schedule does: not expressible"]
    start, increment, over, top = ramp
    off = compare(stages, lambda tokens: ramp_at(ramp, tokens / run.block), phases, run.block, machine.cost)
    return lines + [f"# {shape} --rampup-batch-size {start} {increment} {over} --global-batch-size {top}",
                    f"#   the nearest such ramp: {off}"]


def ramp_at(ramp, samples):
    """Megatron's rule: an increment after each equal share of the ramp's samples."""
    start, increment, over, top = ramp
    return top if samples >= over else min(top, start + increment * int(samples * (top - start) / increment / over))


def fit_ramp(stages, quantum, block):
    """(start, increment, samples, top) of the linear ramp nearest to the stages, by the mean of |log(batch)| over tokens."""
    batches = [s["batch"] for s in stages]
    if batches != sorted(batches):
        return None
    end = end_of(stages, block)
    places = [(i + 0.5) / 200 * end for i in range(200)]
    wanted = [predict.schedule_at(stages)(t) for t in places]

    def off(ramp):
        return sum(abs(math.log(ramp_at(ramp, t / block) / b)) for t, b in zip(places, wanted))
    return min(((batches[0], quantum, max(1, round(share / 50 * end / block)), batches[-1]) for share in range(1, 76)), key=off)


def compare(stages, batch_at, phases, block, cost):
    """What another schedule takes, against the stages, in words."""
    best, other = (predict.price(phases, at, block, cost) for at in (predict.schedule_at(stages), batch_at))
    parts = [f"{other[key] / best[key] - 1:+.1%} {name}" for key, name in (("seconds", "time"), ("tokens", "tokens"),
                                                                          ("steps", "steps")) if best[key]]
    return ", ".join(parts) + " to the same loss, predicted"


def to_olmo(stages, run, machine, phases):
    """OLMo-core changes a batch by whole factors only: each stage takes the nearest doubling of the smallest batch."""
    near = []
    for s in stages if len(stages) > 1 else []:
        batch = machine.quantum * 2 ** max(0, round(math.log2(s["batch"] / machine.quantum)))
        if not near or near[-1]["batch"] != batch:
            near.append({"tokens": s["tokens"], "batch": batch})
    near = near or stages
    sizes = ", ".join(str(s["batch"] * run.block) for s in near)
    starts = ", ".join(f"Duration.tokens({int(s['tokens'])})" for s in near)
    lines = ["# batch sizes are in tokens; a callback of the trainer's config",
             "# it multiplies the learning rate by the square root of each change of the batch, by itself"]
    if len(stages) > 1:
        lines.append("# it changes the batch by whole factors only, so each stage takes the nearest doubling: "
                     + compare(stages, predict.schedule_at(near), phases, run.block, machine.cost))
    return lines + [f"# train until {end_of(stages, run.block)} tokens",
                    f"BatchSizeSchedulerCallback(batch_sizes=[{sizes}], schedule=[{starts}])"]


def to_torchtitan(stages, run, machine, phases):
    lines, steps = [], 0
    if len(stages) > 1:
        lines = ["# torchtitan has one batch per run and no schedule of it: one run per stage, each going on from the",
                 "# checkpoint of the one before. --training.steps counts from the first; the learning rate falls over",
                 "# --lr_scheduler.total_steps, all of them"]
    total = sum(math.ceil(s["steps"]) for s in stages)
    for s in stages:
        steps += math.ceil(s["steps"])
        lines.append(f"--training.seq_len {run.block} --training.local_batch_size {machine.micro} "
                     f"--training.global_batch_size {s['batch']} --training.steps {steps} --lr_scheduler.total_steps {total}")
    return lines


FORMATS = {"steps": to_steps, "megatron": to_megatron, "olmo": to_olmo, "torchtitan": to_torchtitan}


def text(name, stages, run, machine, phases, objective):
    """The whole export; its comments begin with #."""
    head = [f"# batches for {objective} on {machine.devices} x {machine.micro} sequences, from {run.folder} by whatif.py",
            f"# {TUNED}"]
    return "\n".join(head + FORMATS[name](stages, run, machine, phases))
