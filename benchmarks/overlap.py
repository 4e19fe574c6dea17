"""
bench.py overlap: when the gradients of a step are ready under DDP, and how much of their transfer the backward pass hides.

    torchrun --nproc_per_node=2 bench.py overlap
    torchrun --nproc_per_node=8 bench.py overlap --device=cuda --model=n_layer=10,n_head=12,n_embd=768,block_size=2048 --micro=8

first_ready, half_ready: the share of the backward pass after which the first gradient, and half of all numbers, are there.
hidden: the share of the transfer that takes no time of its own. 0 where gradients travel after the backward pass.
"""

import argparse
import contextlib
import statistics

import torch
import torch.distributed as dist

from benchmarks import tools
from configurator import Config
from model import GPT, GPTConfig
from trainer import distributed, hardware
from trainer.step import TrainingStep

SHAPE = dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=256)


def shape(text):
    """n_layer=2,n_embd=64: changes to the quickstart's model."""
    try:
        given = {k: int(v) for k, v in (word.split("=") for word in text.split(","))}
        GPTConfig(**given)
    except (ValueError, TypeError) as e:
        raise argparse.ArgumentTypeError(f"{text!r}: expected for example n_layer=2,n_embd=64 ({e})") from None
    return {**SHAPE, **given}


def arguments(parser):
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--model", type=shape, default=SHAPE)
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--compile", default="auto", choices=["auto", "True", "False"])
    parser.add_argument("--out", default="results/overlap.json")


@contextlib.contextmanager
def watched(step):
    """[{"begin", "ready": [(numbers, moment)], "end"}] of its backward passes inside. The hooks go again: through them the
    model would outlive its process group, which ends a process with an abort."""
    passes, backward = [], step.optimizer.backward

    def noted(loss):
        passes.append({"begin": step.timer.now(), "ready": []})
        backward(loss)
        passes[-1]["end"] = step.timer.now()
    step.optimizer.backward = noted
    hooks = [p.register_post_accumulate_grad_hook(lambda p: passes[-1]["ready"].append((p.numel(), step.timer.now())))
             for p in step.parameters.values()]
    try:
        yield passes
    finally:
        del step.optimizer.backward
        for hook in hooks:
            hook.remove()


def measured(step, batch, rounds):
    """Of each round three micro-steps, of which the last communicates: seconds of the last two, and readiness of the last."""
    found = []
    with watched(step) as passes:
        for _ in range(3 + rounds):   # the first compile
            step.accumulate([batch] * 3, 3, 1, 2)
            *_, second, last = step.timer.marks[1:]
            first = step.timer.marks[-3]
            step.update(1e-4, 0.95, 0.1)
            hardware.synchronize(step.device)
            found.append({"compute": step.timer.between(first, second), "communicating": step.timer.between(second, last),
                          **readiness(passes[-1], step.timer.between)})
    return {name: statistics.median(row[name] for row in found[3:]) for name in found[0]}


def readiness(one, between):
    """Shares of a backward pass after which the first gradient, and half of all numbers, are there."""
    whole, total, half, before = between(one["begin"], one["end"]), sum(n for n, _ in one["ready"]), None, 0
    for numel, moment in one["ready"]:
        before += numel
        if half is None and before >= total / 2:
            half = between(one["begin"], moment) / whole
    return {"first_ready": between(one["begin"], one["ready"][0][1]) / whole, "half_ready": half}


def transfer_seconds(step, rounds):
    """All gradients at once, with nothing to hide behind."""
    flat, times = torch.ones(sum(p.numel() for p in step.parameters.values()), device=step.device), []
    for _ in range(2 + rounds):
        step.ranks.host_sum(0)  # all have come here
        hardware.synchronize(step.device)
        begin = step.timer.now()
        dist.all_reduce(flat)
        end = step.timer.now()
        hardware.synchronize(step.device)
        times.append(step.timer.between(begin, end))
    return statistics.median(times[2:])


def run(args):
    device = tools.pick_device(args.device)
    config = Config(gns="norm", gns_calibrate=False, micro_batch_size=args.micro, compile=args.compile, parallel="ddp",
                    batch_size=3 * args.micro * distributed.world_size(), batch_schedule="constant")
    if distributed.world_size() < 2:
        print("bench.py overlap needs two processes or more: torchrun --nproc_per_node=2 bench.py overlap")
        return 2
    ranks = distributed.start(config, device)
    dtype = hardware.prepare(config, device)
    torch.manual_seed(0)
    step = TrainingStep(GPT(GPTConfig(**args.model)).to(device), config, ranks, device, dtype)
    batch = tuple(t.to(device) for t in tools.batch_of(args.model, args.micro, ranks.rank))
    found = measured(step, batch, args.rounds)
    transfer = transfer_seconds(step, args.rounds)
    exposed = found["communicating"] - found["compute"]
    report = {"processes": ranks.world, "compiled": step.compiled, "first_ready": found["first_ready"],
              "half_ready": found["half_ready"], "hidden": 1 - exposed / transfer, "compute_ms": 1e3 * found["compute"],
              "communicating_ms": 1e3 * found["communicating"], "transfer_ms": 1e3 * transfer}
    if ranks.first:
        print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in report.items()), flush=True)
        tools.write_json(args.out, report, device)
    del step
    ranks.stop()
