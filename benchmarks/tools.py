"""
The benchmarks share turns, medians and quartiles, peak memory, processes, the models that are timed, and our step on them.
"""

import functools
import itertools
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from configurator import Config, ConfigError
from model import GPT, Attention, GPTConfig, Norm
from system import output
from system.memory import peak_bytes  # noqa: F401, one home for benchmarks and sweeps
from trainer import distributed, hardware
from trainer.step import TrainingStep, to_host

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BENCH, TRAIN = (os.path.join(ROOT, name) for name in ("bench.py", "train.py"))
MODELS = {  # GPTConfig, micro-batch
    "quickstart": (dict(n_layer=4, n_head=4, n_embd=128, block_size=128, vocab_size=256), 8),
    "char": (dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65), 12),
    "wikitext2": (dict(n_layer=6, n_head=6, n_embd=192, block_size=256, vocab_size=50257), 4),
    "gpt_111m": (dict(n_layer=10, n_head=12, n_embd=768, block_size=1024, vocab_size=50257), 1),
}


def interleave(variants, seconds, min_rounds=5, warm_up=2):
    """Run every variant once a round, in a new order each round, since each leaves its mark on the caches. A variant is
    called and returns {phase: seconds}, or None to sit a round out. Returns {name: {phase: [seconds]}}."""
    for run in variants.values():
        for _ in range(warm_up):          # first touch of memory, threads, caches; none for whole processes
            run()
    samples = {name: defaultdict(list) for name in variants}
    end, rounds, order = time.perf_counter() + seconds, 0, list(variants.items())
    while time.perf_counter() < end or rounds < min_rounds:
        rounds += 1
        random.Random(rounds).shuffle(order)
        for name, run in order:
            for phase, t in (run() or {}).items():
                samples[name][phase].append(t)
    return samples


@functools.cache
def half_a_gigabyte():
    return torch.empty(1 << 29, dtype=torch.int8, device="cuda")


def now(device, first=False):
    """A moment: by the clock, or a CUDA event. Before the first of a call the device writes half a gigabyte: its L2 forgets the
    tensors, and Python has launched the call by the time it is done, so that kernels are timed and not launches."""
    if device != "cuda":
        hardware.synchronize(device)
        return time.perf_counter()
    if first:
        half_a_gigabyte().zero_()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b):
    """Seconds from one moment to the other."""
    if isinstance(a, float):
        return b - a
    b.synchronize()
    return a.elapsed_time(b) / 1e3


PHASES = ("forward", "backward", "both")


def two_phases(forward, backward, device, every=1):
    """Times forward() and backward(what that returned) apart. every: take part in one of so many rounds (for slow ones)."""
    calls = 0

    def run():
        nonlocal calls
        calls += 1
        if calls > 2 and calls % every:
            return None
        start = now(device, first=True)
        out = forward()
        middle = now(device)
        backward(out)
        end = now(device)
        return {"forward": between(start, middle), "backward": between(middle, end), "both": between(start, end)}
    return run


def in_turn(calls, device):
    """Times one call after the other, and holds what each returned until it is its turn again."""
    held, turns = [call() for call in calls], itertools.cycle(range(len(calls)))

    def run():
        i = next(turns)
        start = now(device, first=True)
        out = calls[i]()
        end = now(device)
        held[i] = out
        return {"backward": between(start, end)}
    return run


def quartiles(samples):
    return statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3


def spread(samples):
    """Median and quartiles in ms, and how many samples they stand on."""
    q1, median, q3 = quartiles(samples)
    return {"median_ms": median * 1e3, "q1_ms": q1 * 1e3, "q3_ms": q3 * 1e3, "n": len(samples)}


def paired(times, base):
    """Each round's time over that round's base: a disturbance that falls on both cancels."""
    q1, median, q3 = quartiles([a / b for a, b in zip(times, base)])
    return {"ratio": median, "ratio_q1": q1, "ratio_q3": q3}


def told(r):
    """The ratio of `paired` with its quartiles, in words."""
    return f"{r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f})"


def geomean(values):
    return math.exp(statistics.fmean(math.log(v) for v in values))


def pick_device(name):
    """cuda where there is one; a CPU rather than Apple's MPS, of which no benchmark knows."""
    return "cpu" if name == "auto" and hardware.pick_device(name) != "cuda" else hardware.pick_device(name)


def chosen(option, words, among, what):
    """The names that --option=a,b chooses; all of them where it is not given."""
    names = words.split(",") if words else list(among)
    unknown = [name for name in names if name not in among]
    if unknown:
        raise ConfigError(f"--{option}={words}: unknown {what} '{unknown[0]}', expected some of {', '.join(among)}")
    return names


def check(name, ok, **numbers):
    """One line of an acceptance run; ok None: a number without a limit."""
    return {"check": name, "ok": None if ok is None else bool(ok), **numbers}


def plain(dtype):
    return str(dtype).removeprefix("torch.")


def write_json(path, report, device="cpu"):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = {**hardware.facts(device), "load_average": os.getloadavg()[0]}
    report = {"command": command(), "date": time.strftime("%Y-%m-%d"), "machine": machine, **report}
    output.write_json(path, report, indent=1)
    print(f"written: {path}")


def command():
    """The command line, with the folders of this machine left out of its paths."""
    words = [re.sub(r"(^|[=,])/[^,]*/", r"\1", word) for word in sys.argv[1:]]
    return " ".join(["python", os.path.basename(sys.argv[0]), *words])


# ---- processes

def torchrun(processes):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def process(command, name, **how):
    """The output of a process that has ended; one that failed is a ConfigError with its own complaint."""
    done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, capture_output=True, **how)
    if done.returncode:
        raise ConfigError(f"{name} ended with {done.returncode}: {complaint(done.stderr)}")
    return done.stdout


def complaint(stderr):
    """The first error in what a process said; torchrun says much more after it."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"(?i)^(\[rank\d+\]: )?[\w.]*error:", line)), (lines or [""])[-1])[:500]


# ---- training steps


def batch_of(shape, micro, number=0):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(shape["vocab_size"], (micro, shape["block_size"] + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


class Step:
    """train.py's step on one micro-batch (of each process, under DDP). What train.py does with the numbers of each step at its
    logged steps is done after each here, so that each is charged; the log line itself is not. `like`: see TrainingStep."""

    def __init__(self, shape, micro, mode, adam=False, norm_impl="auto", attention_impl="auto", dtype=torch.float32, ranks=None,
                 like=None, device="cpu", compile="auto"):
        torch.manual_seed(0)
        self.impls, self.ranks = {Norm: norm_impl, Attention: attention_impl}, ranks or distributed.Ranks(device=device)
        self.tokens = micro * shape["block_size"]
        config = Config(gns=mode, gns_adam=adam, gns_calibrate=False, micro_batch_size=micro, learning_rate=1e-4,
                        compile=compile)
        self.model, self.device = like.model if like else GPT(GPTConfig(**shape)).to(device), device
        self.inner = TrainingStep(self.model, config, self.ranks, device, dtype, like=like and like.inner)
        self.chosen = [(module, self.impls[type(module)]) for module in self.model.modules() if type(module) in self.impls]
        self.batch = tuple(t.to(device) for t in batch_of(shape, micro))

    def __call__(self):
        hardware.synchronize(self.device)
        start = time.perf_counter()
        self.step(*self.batch)  # ends with a copy to the host, which waits for the device
        return {"step": time.perf_counter() - start}

    def step(self, x, y):
        """Returns the loss."""
        record = self.measured(x, y)
        self.inner.absorb(*to_host([record]), record)
        return record.numbers["loss"]

    def measured(self, x, y):
        """The step itself, without what train.py does at its logged steps."""
        for module, impl in self.chosen:  # the model is shared by several steps
            module.impl = impl
        config = self.inner.config
        self.inner.accumulate([(x, y)], 1, 1, 1 + self.tokens)
        return self.inner.update(config.learning_rate, config.beta2, config.weight_decay)
