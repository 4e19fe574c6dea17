"""
bench.py passes: passes over memory that a step of bf16 could do without, where they happen, by torch's profiler.

    python bench.py passes

Autocast casts the weights in each micro-step, and their gradients back. Linear layers sum their outputs' gradients for the
bias. The embedding's gradient is a dense matrix, most of it zeros. A pass that takes 1% of a step on two of three models would
be worth taking out. Timed inside the step (the embedding's alone): alone, with cold caches, sums take twice as long. Weights
are those of the blocks. GELU is none of these passes: it keeps its input, and copies nothing.
"""

import bisect
import statistics
import time

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.tools import MODELS, Step, quartiles, silent_stderr, write_json
from trainer import hardware

WORTH = 0.01  # of a step
PASSES = ("casts of weights", "casts of their gradients", "bias sums", "dense embedding gradient")


def arguments(parser):
    parser.add_argument("--models", default="quickstart,char,gpt_111m", help=f"some of {', '.join(MODELS)}, by comma")
    parser.add_argument("--rounds", type=int, default=15, help="steps that are profiled, one by one")
    parser.add_argument("--out", default="results/passes.json")


def which(event, weights, biases):
    """The pass that an operation of the profile is, or None."""
    shape, dtype = (what[0] if what else None for what in (event.shapes(), event.dtypes()))
    if event.name() == "aten::copy_" and tuple(sorted(shape)) in weights:
        return PASSES[0] if dtype == "c10::BFloat16" else PASSES[1]
    return PASSES[2] if event.name() == "aten::sum" and len(shape) == 2 and shape[1] in biases else None


def shares(step, rounds):
    """{pass: [its share of each step]}"""
    weights = {tuple(sorted(p.shape)) for p in step.model.h.parameters() if p.dim() == 2}
    biases = {p.shape[0] for name, p in step.model.h.named_parameters() if name.endswith(".bias") and ".ln_" not in name}
    own, seconds = [], []
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        for _ in range(rounds):
            own.append((time.time_ns(), dict.fromkeys(PASSES, 0.0)))
            seconds.append(step()["step"])
    starts = [start for start, _ in own]
    for event in prof.profiler.kineto_results.events():
        name = which(event, weights, biases)
        if name:
            own[bisect.bisect(starts, event.start_ns()) - 1][1][name] += event.duration_ns() / 1e9
    for _, times in own:
        times[PASSES[3]] = embedding_gradient(step)
    return {name: [times[name] / s for (_, times), s in zip(own, seconds)] for name in PASSES}


def embedding_gradient(step):
    """Seconds of the dense gradient alone: the profiler's own memory makes the heap grow by a matrix of that size in each step,
    page by page, and would be counted."""
    weight, ids = step.model.wte.weight, step.batch[0].reshape(-1)
    dx = torch.ones(len(ids), weight.shape[1])
    start = time.perf_counter()
    torch.ops.aten.embedding_dense_backward(dx, ids, len(weight), -1, False)
    return time.perf_counter() - start


def measure(name, rounds):
    shape, micro = MODELS[name]
    step = Step(shape, micro, "norm", adam=True, dtype=torch.bfloat16)
    for _ in range(3):
        step()
    return {k: dict(zip(("q1", "median", "q3"), quartiles(own))) for k, own in shares(step, rounds).items()}


def run(args):
    hardware.prepare_cpu()
    result = {name: measure(name, args.rounds) for name in args.models.split(",")}
    print(f"{'share of a step (quartiles)':42}" + "".join(f"{name:>26}" for name in result))
    for k in PASSES:
        said = [f"{own[k]['median']:.2%} ({own[k]['q1']:.2%} to {own[k]['q3']:.2%})" for own in result.values()]
        print(f"{k:42}" + "".join(f"{words:>26}" for words in said))
    worth = [k for k in PASSES if statistics.median(own[k]["median"] for own in result.values()) >= WORTH]
    finding = (f"Worth taking out, at {WORTH:.0%} of a step on most models: {', '.join(worth)}." if worth else
               f"None of them takes {WORTH:.0%} of a step on most of the models.")
    print(finding)
    write_json(args.out, {"finding": finding, "threads": torch.get_num_threads(), "shares": result})
    return 0
