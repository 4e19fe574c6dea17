"""
bench.py profile: where a training step spends its time, part by part, in a table that adds up to the step.

    python bench.py profile --models=char,gpt_111m
    python bench.py profile --models=config/wikitext2.py --micro=4

One clock is always attributed to exactly one part and is switched at the borders, so the parts add up to the step by
construction. Forward: modules switch it as they begin and end. Backward: every node of autograd's graph gets a hook that
switches the clock to the part in which the node was made, known by its sequence number; the node of a parameter belongs to
the parameter's part. On a CPU operations are done when they return, and backward runs on one thread, so this is all it
takes; it does not work on a GPU. Its own cost is reported: profiled and plain steps take turns.

FLOPs are those of matrix products (GPT.flops_per_token), the ceiling is hardware.matmul_ceiling, and MFU is their ratio.
`other` is residual additions, dropout and Python between the parts. `tracking` has the pass for |G|^2, needed by clipping, too.
"""

import bisect
import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict

import numpy as np
import torch

import configurator
from benchmarks.tools import MODELS, Step, interleave, plain, spread, write_json
from configurator import ConfigError
from model import GPTConfig
from trainer import batches, hardware

PARTS = ("data", "embedding", "norms", "attention", "MLP", "head + loss", "tracking", "optimizer", "other")


def arguments(parser):
    parser.add_argument("--models", default="char", help=f"some of {', '.join(MODELS)}, or config files, by comma")
    parser.add_argument("--gns", default="norm", choices=("off", "norm", "exact"))
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="auto: as train.py picks it")
    parser.add_argument("--micro", type=int, default=0, help="micro-batch; default: the model's own")
    parser.add_argument("--seconds", type=float, default=20.0, help="per model, at least")
    parser.add_argument("--rounds", type=int, default=7, help="at least so many per model")
    parser.add_argument("--out", default="results/profile.json")


class Clock:
    """Seconds by (phase, part): of the present part until switched."""

    def __init__(self):
        self.seconds, self.now = defaultdict(float), None
        self.marks = []  # (sequence number of the next node, part) at each switch in the forward pass

    def switch(self, part, phase=None):
        t = time.perf_counter()
        if self.now:
            self.seconds[self.now] += t - self.since
        self.now = part and (phase or self.now[0], part)
        if self.now and self.now[0] == "forward":
            self.marks.append((torch.autograd._get_sequence_nr(), part))
        self.since = time.perf_counter() if part is None else t

    def resume(self, part, phase):
        """After switch(None): what came between belongs to no part."""
        self.now, self.since = (phase, part), time.perf_counter()

    @contextlib.contextmanager
    def inside(self, part):
        before = self.now[1]
        self.switch(part)
        yield
        self.switch(before)

    def part_of(self, node):
        if hasattr(node, "variable"):
            return self.part_of_parameter.get(id(node.variable), "other")
        i = bisect.bisect_right(self.marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1
        return self.marks[i][1] if i >= 0 else "tracking"  # the probes' own views


def parameter_part(name):
    kinds = {"wte": "embedding", "wpe": "embedding", "lm_head": "head + loss", "attn": "attention", "mlp": "MLP"}
    return next((kinds[word] for word in name.split(".") if word in kinds), "norms")


@contextlib.contextmanager
def watched(model, clock):
    """The model's parts switch the clock while they run, also where checkpointing runs them again in backward."""
    def watch(owner, name, part, after=None):
        run = getattr(owner, name)

        def timed(*args, **kwargs):
            with clock.inside(part):
                result = run(*args, **kwargs)
            if after:
                clock.switch(after)
            return result
        setattr(owner, name, timed)
        patched.append((owner, name))
    patched = []
    watch(model, "embed", "embedding")
    for block in model.h:
        for name, part in (("ln_1", "norms"), ("attn", "attention"), ("ln_2", "norms"), ("mlp", "MLP")):
            watch(getattr(block, name), "forward", part)
    watch(model.ln_f, "forward", "norms", after="head + loss")  # all that follows
    try:
        yield
    finally:
        for owner, name in patched:
            delattr(owner, name)  # the class's own is there again


def hook_backward(loss, clock):
    """A hook on every node that backward will run; returns the handles."""
    todo, seen, handles = [loss.grad_fn], {loss.grad_fn}, []
    while todo:
        node = todo.pop()
        part = clock.part_of(node)
        handles.append(node.register_prehook(lambda grads, part=part: clock.switch(part)))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return handles


def profiled(step, batch):
    """One step of tools.Step, in parts: {(phase, part): seconds}."""
    clock, inner = Clock(), step.inner
    clock.part_of_parameter = {id(p): parameter_part(name) for name, p in step.model.named_parameters()}
    clock.resume("data", "rest")
    x, y = batch()
    clock.switch("tracking")
    with watched(step.model, clock), switching(inner, clock):
        step.step(x, y)
    clock.switch(None)
    return dict(clock.seconds)


@contextlib.contextmanager
def switching(inner, clock):
    """A TrainingStep whose forward, backward and update switch the clock."""
    optimizer, handles = inner.optimizer, []
    forward, backward, update = inner.run_model, optimizer.backward, optimizer.clip_and_step

    def timed_forward(x, y, **given):
        clock.switch("other", "forward")
        logits, loss = forward(x, y, **given)
        clock.switch(None)
        handles.extend(hook_backward(loss, clock))
        clock.resume("other", "backward")
        return logits, loss

    def timed_backward(loss):
        backward(loss)
        clock.switch("tracking", "rest")

    def timed_update(record):
        clock.switch("optimizer")
        update(record)
        clock.switch("tracking")
    inner.run_model, optimizer.backward, optimizer.clip_and_step = timed_forward, timed_backward, timed_update
    try:
        yield
    finally:
        inner.run_model = forward
        del optimizer.backward, optimizer.clip_and_step  # the class's own are there again
        for handle in handles:
            handle.remove()


def flops(shape, micro):
    """{part: FLOPs of its matrix products in one step}."""
    c, V, T = shape["n_embd"], shape["vocab_size"], shape["block_size"]
    tokens, layers = micro * T, shape["n_layer"]
    return {"attention": tokens * layers * (6 * 4 * c * c + 6 * T * c), "MLP": tokens * layers * 6 * 8 * c * c,
            "head + loss": tokens * 6 * V * c}


def model_of(name, micro):
    """(shape, micro-batch) of a bench model or a config file."""
    if name in MODELS:
        shape, usual = MODELS[name]
        return shape, micro or usual
    if not os.path.isfile(name):
        raise ConfigError(f"--models={name}: expected one of {', '.join(MODELS)}, or a config file")
    config = configurator.parse([name])
    names = {f.name for f in dataclasses.fields(GPTConfig)} & set(configurator.FIELDS)
    try:
        vocab_size = batches.Dataset(config.dataset, config.block_size).vocab_size
    except ConfigError:
        vocab_size = 256 if config.dataset == "stdlib" else 50257  # not prepared; all others are GPT-2's BPE
    return {"vocab_size": vocab_size, **{k: getattr(config, k) for k in names}}, micro or config.micro_batch_size


@contextlib.contextmanager
def token_file(shape):
    """A dataset of random tokens, so that data come the way they come in training."""
    with tempfile.TemporaryDirectory() as folder:
        n = max(1 << 20, 4 * shape["block_size"])
        tokens = np.random.default_rng(0).integers(shape["vocab_size"], size=n, dtype=np.uint16)
        checksum = hashlib.sha256(tokens.tobytes()).hexdigest()
        for split in ("train", "val"):
            tokens.tofile(f"{folder}/{split}.bin")
        with open(f"{folder}/meta.json", "w") as f:
            json.dump({"vocab_size": shape["vocab_size"], "dtype": "uint16", "tokenizer": "random", "train_tokens": n,
                       "val_tokens": n, "train_sha256": checksum, "val_sha256": checksum}, f)
        yield batches.Dataset(folder, shape["block_size"])


def middle(rows):
    """The mean of the middle half of the steps, by their total: outliers left out, and parts still add up."""
    rows = sorted(rows, key=lambda row: sum(row.values()))
    rows = rows[len(rows) // 4:len(rows) - len(rows) // 4]
    return {key: statistics.fmean(row.get(key, 0.0) for row in rows) for key in {k for row in rows for k in row}}


def profile_model(name, mode, dtype, micro, seconds, rounds):
    shape, micro = model_of(name, micro)
    step, found, number = Step(shape, micro, mode, dtype=dtype), [], 0
    with token_file(shape) as data:
        def batch():
            nonlocal number
            number += micro
            return data.train_batch(0, number, micro, "cpu")

        def unhooked():
            start = time.perf_counter()
            step.step(*batch())
            return {"step": time.perf_counter() - start}

        def in_parts():
            found.append(profiled(step, batch))
            return {"step": sum(found[-1].values())}
        before = hardware.matmul_ceiling("cpu", dtype)
        samples = interleave({"plain": unhooked, "profiled": in_parts}, seconds, rounds)
        ceiling = max(before, hardware.matmul_ceiling("cpu", dtype))
    times, work = middle(found[2:]), flops(shape, micro)
    total = sum(times.values())
    rows = {part: {**{f"{phase}_ms": 1e3 * times.get((phase, part), 0.0) for phase in ("forward", "backward", "rest")},
                   "ms": 1e3 * sum(t for (_, p), t in times.items() if p == part), "flops": work.get(part, 0)}
            for part in PARTS}
    for row in rows.values():
        row |= {"share": row["ms"] / (1e3 * total), "mfu": row["flops"] / (row["ms"] / 1e3 * ceiling) if row["flops"] else None}
    medians = {variant: spread(phases["step"]) for variant, phases in samples.items()}
    return {"gns": mode, "dtype": plain(dtype), "micro_batch": micro, "shape": shape, "parts": rows,
            "step_ms": 1e3 * total, "ceiling_flops": ceiling, "mfu": sum(work.values()) / (total * ceiling),
            "tokens_per_second": micro * shape["block_size"] / total, **medians,
            "overhead": medians["profiled"]["median_ms"] / medians["plain"]["median_ms"] - 1}


def table(name, report):
    lines = [f"{name}: gns={report['gns']}, {report['dtype']}, micro-batch {report['micro_batch']}, "
             f"{torch.get_num_threads()} threads, "
             f"{report['profiled']['n']} steps, load {os.getloadavg()[0]:.1f}; matrix products reach "
             f"{report['ceiling_flops'] / 1e9:.0f} GFLOP/s",
             "  {:12}{:>12}{:>12}{:>10}{:>10}{:>8}{:>9}{:>7}".format("part", "forward ms", "backward ms", "rest ms", "all ms",
                                                                     "share", "GFLOP", "MFU")]
    for part, r in report["parts"].items():
        lines.append(f"  {part:12}{r['forward_ms']:12.2f}{r['backward_ms']:12.2f}{r['rest_ms']:10.2f}{r['ms']:10.2f}"
                     f"{r['share']:8.1%}" + (f"{r['flops'] / 1e9:9.1f}{r['mfu']:7.0%}" if r["flops"] else ""))
    phases = [sum(r[f"{phase}_ms"] for r in report["parts"].values()) for phase in ("forward", "backward", "rest")]
    lines.append(f"  {'the step':12}{phases[0]:12.2f}{phases[1]:12.2f}{phases[2]:10.2f}{report['step_ms']:10.2f}{1:8.1%}"
                 f"{sum(r['flops'] for r in report['parts'].values()) / 1e9:9.1f}{report['mfu']:7.0%}")
    lines.append(f"  {report['tokens_per_second']:.0f} tokens/s; a step without the profile's hooks: "
                 f"{report['plain']['median_ms']:.2f} ms, so they cost {report['overhead']:+.1%}")
    return "\n".join(lines)


def run(args):
    hardware.prepare_cpu()
    report, dtype = {}, hardware.pick_dtype(args.dtype, "cpu")
    for name in args.models.split(","):
        report[name] = profile_model(name, args.gns, dtype, args.micro, args.seconds, args.rounds)
        print(table(name, report[name]), flush=True)
    write_json(args.out, {"threads": torch.get_num_threads(), "models": report})
