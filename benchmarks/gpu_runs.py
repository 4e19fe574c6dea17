"""The part of bench.py gpu that runs train.py in processes of its own: resuming, several GPUs, a killed rank."""

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks import tools
from benchmarks.tools import check
from trainer import checkpoint, log


def train_command(s, out, processes=1, **keys):
    settings = {**s.training, "device": s.device, "out_dir": out, "batch_size_start": 32, "warmup_tokens": 0, "eval_tokens": 0,
                "eval_iters": 4, "log_interval": 1, "checkpoint_tokens": 0, "batch_schedule": "constant", **keys}
    python = tools.torchrun(processes) if processes > 1 else [sys.executable]
    return [*python, tools.TRAIN, *(f"--{k}={v}" for k, v in settings.items())]


def train(s, out, processes=1, **keys):
    tools.process(train_command(s, out, processes, **keys), "train.py")
    return [row["train/loss"] for row in log.read(out) if "train/loss" in row]


def resume(s):
    """Bit for bit, with dropout and deterministic=True."""
    for compile in s.compile:
        with tempfile.TemporaryDirectory() as folder:
            keys = dict(dropout=0.1, deterministic=True, compile=compile)
            whole, two = os.path.join(folder, "whole"), os.path.join(folder, "two")
            train(s, whole, **keys)
            train(s, two, stop_tokens=s.stop, **keys)
            train(s, two, resume=True, **keys)
            a, b = (checkpoint.load(out)["model"] for out in (whole, two))
            differ = sum(not torch.equal(a[name], b[name]) for name in a)
        yield check(f"a resumed run has the weights of the uninterrupted one, compile={compile}", differ == 0, differ=differ)


def several(s, processes=None):
    """DDP and FSDP against one process."""
    n = processes or torch.cuda.device_count()
    if n < 2:
        yield check("several GPUs", None, found=n)
        return
    n = 2 if n < 4 else 4
    with tempfile.TemporaryDirectory() as folder:
        one = train(s, os.path.join(folder, "one"), dtype="float32")
        for parallel, compile, recompute in itertools.product(s.parallel, s.compile, s.checkpointing):
            name = f"{parallel}-{compile}-{recompute}"
            found = train(s, os.path.join(folder, name), n, parallel=parallel, compile=compile, dtype="float32",
                          activation_checkpointing=recompute)
            apart = max(abs(a / b - 1) for a, b in zip(one, found, strict=True))
            yield check(f"{n} processes, {parallel}, compile={compile}, checkpointing={recompute}: losses of one process",
                        apart < 1e-3, apart=apart)
        for compile in s.compile:
            yield overlapped(s, os.path.join(folder, "overlap.json"), n, compile)
        yield killed(s, os.path.join(folder, "killed"), n)


def overlapped(s, out, n, compile):
    """Gradients must be ready early, or nothing of their transfer can be hidden behind the backward pass."""
    shape = ",".join(f"{k}={v}" for k, v in s.model.items() if not isinstance(v, tuple))
    command = [tools.BENCH, "overlap", f"--device={s.device}", f"--model={shape}", f"--micro={s.micro}", f"--rounds={s.rounds}",
               f"--compile={compile}", f"--out={out}"]
    tools.process([*tools.torchrun(n), *command], "bench.py overlap")
    with open(out) as f:
        found = json.load(f)
    numbers = {k: found[k] for k in ("first_ready", "half_ready", "hidden", "compute_ms", "communicating_ms", "transfer_ms")}
    return check(f"{n} processes, DDP, compile={compile}: half of the gradient is ready in the first 0.9 of the backward pass",
                 found["half_ready"] < 0.9, **numbers)


def killed(s, out, n):
    """A rank that dies ends the run."""
    command = train_command(s, out, n, max_tokens=10**9)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not os.path.exists(os.path.join(out, log.NAME)):
        time.sleep(0.5)
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as f:
        os.kill(int(f.read().split()[-1]), signal.SIGKILL)
    began = time.monotonic()
    try:
        code = process.wait(timeout=180)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        code = 0
    return check("a killed rank ends the run", code != 0, seconds=round(time.monotonic() - began, 1))
