"""What several test files share: tiny runs and their folders, processes, synthetic logs, the oracle of the model's norms."""

import copy
import hashlib
import json
import os
import socket
import subprocess
import sys

import numpy as np
import torch

from model import GPT, GPTConfig
from trainer import checkpoint, log

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# a run of some 20 steps that takes a second
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, micro_batch_size=4, batch_size=16, batch_size_start=4,
            max_tokens=3200, warmup_tokens=320, gns_half_life_tokens=1000, eval_tokens=1600, eval_iters=4, log_interval=1,
            checkpoint_tokens=640, device="cpu", dtype="float32", compile="False")


def write_dataset(folder, train, val, vocab_size=256, dtype="uint8", **meta):
    """Tokens become a dataset's three files; the folder's name is returned."""
    os.makedirs(folder, exist_ok=True)
    checksums = {}
    for name, ids in (("train", train), ("val", val)):
        data = np.asarray(ids, dtype=dtype).tobytes()
        checksums[f"{name}_sha256"] = hashlib.sha256(data).hexdigest()
        with open(os.path.join(folder, f"{name}.bin"), "wb") as f:
            f.write(data)
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump({"format": 1, "vocab_size": vocab_size, "dtype": dtype, "tokenizer": "bytes", "train_tokens": len(train),
                   "val_tokens": len(val), **checksums, "source": "test", **meta}, f)
    return str(folder)


def environment(**more):
    """The environment of a process that a test starts."""
    return {**{k: v for k, v in os.environ.items() if k != "WANDB_MODE"}, "OMP_NUM_THREADS": "1", **more}


def run_script(*args, script="train.py", **kwargs):
    """A script in a process of its own, as a user starts it."""
    return subprocess.run([sys.executable, os.path.join(ROOT, script), *args], capture_output=True, text=True,
                          env=environment(**kwargs.pop("env", {})), stdin=subprocess.DEVNULL, timeout=300, **kwargs)


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def as_args(settings):
    return [f"--{k}={v}" for k, v in settings.items()]


def torchrun(ranks, script, *args, options=()):
    """A script on several ranks of this machine, started and not waited for."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}",
               *options, script, *args]
    return subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


TIMED = {"dt_ms", "tok_per_sec", "mfu", "seconds"}  # everything else must come out the same


def untimed(out_dir):
    """The rows of a log without what a clock measured."""
    return [{k: v for k, v in row.items() if k not in TIMED and not k.startswith("step_time/")} for row in log.read(out_dir)]


def same_tensors(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_tensors(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same_tensors(x, y) for x, y in zip(a, b))
    return a == b


def assert_same_run(a, b):
    assert untimed(a) == untimed(b)
    x, y = checkpoint.load(str(a)), checkpoint.load(str(b))
    for key in ("model", "optimizer", "rng", "gns"):
        assert same_tensors(x[key], y[key]), key


def tree(folder):
    """{path: content} of every file."""
    return {os.path.join(d, f): open(os.path.join(d, f), "rb").read() for d, _, files in os.walk(folder) for f in files}


BLOCK, MICRO = 64, 8
KEY = "gns/calibrated_adam"


def write_run(folder, batches, noise=20.0, t0=0.05, t1=0.002, per_row=10, key=KEY, processes=1, cost=False, evaluate=1,
              slow=None, drop=(), **config):
    """A log with one row for each of `batches`: noise(i) or a number gives the noise scale, t0 + t1 B the seconds of a step."""
    os.makedirs(folder, exist_ok=True)
    drop = {*drop, *(("gns", "gns_low", "gns_high") if key in drop else ())}
    rows, step, examples, seconds = [{"step": 0, "tokens": 0, "val/loss": 5.0}], 0, 0, 0.0
    for i, batch in enumerate(batches):
        dt = (t0 + t1 * batch) * (slow[i] if slow is not None else 1.0)
        step, examples, seconds = step + per_row, examples + per_row * batch, seconds + per_row * dt
        N = noise(i) if callable(noise) else noise
        value, low, high = N if isinstance(N, tuple) else (N, N and 0.8 * N, N and 1.3 * N)
        loss = 5 - 3 * (i + 1) / len(batches)
        row = {"step": step, "tokens": examples * BLOCK, "examples": examples, "train/loss": loss, "batch_size": batch,
               "accum": max(1, batch // (MICRO * processes)), "dt_ms": 1e3 * dt, "seconds": seconds,
               "gns/norm": 3.0, "gns/norm_low": 2.0, "gns/norm_high": 4.0,
               **{name + end: v for name in (key, "gns") for end, v in (("", value), ("_low", low), ("_high", high))}}
        if cost:
            row |= {f"step_time/{name}_ms{end}": 1e3 * v * f for name, v in (("fixed", t0), ("per_sequence", t1))
                    for end, f in (("", 1.0), ("_low", 0.9), ("_high", 1.1))}
        rows.append({k: v for k, v in row.items() if k not in drop})
        if evaluate and (i + 1) % evaluate == 0:
            rows.append({"step": step, "tokens": examples * BLOCK, "val/loss": loss})
    with open(os.path.join(folder, log.NAME), "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    model = dict(n_layer=2, n_embd=32, block_size=BLOCK, micro_batch_size=MICRO, gns="norm", gns_calibrate=True)
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump({"config": {**model, **config}, "processes": processes, "parameters": 50_000, "data": {"vocab_size": 64}}, f)
    return str(folder)


def rewrite(run, change):
    """Each logged step of a run, changed."""
    path = os.path.join(run, log.NAME)
    with open(path) as f:
        rows = [json.loads(line) for line in f]
    with open(path, "w") as f:
        f.writelines(json.dumps(change(row) if "train/loss" in row else row) + "\n" for row in rows)


RAMP = [8 * (1 + i // 10) for i in range(40)]  # 8 to 32


def exact_rows(n=400, factor=2.0, seed=0):
    """Rows of an exact run in which the total's noise scale is `factor` times the norm layers', both rising."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        level = 5 + 20 * i / n
        row = {"step": i + 1, "tokens": 1000 * (i + 1), "train/loss": 1.0}
        for group, times in (("total", factor), ("norm", 1.0), ("block_0", 1.5), ("block_1", 3.0)):
            tr, sq = times * level * rng.normal(1, 0.1), rng.normal(1, 0.1)
            row |= {f"gns/{group}_step_sq_norm": sq, f"gns/{group}_step_tr_sigma": tr, f"gns/{group}": times * level,
                    f"gns/{group}_sq_norm": 1.0, f"gns/{group}_tr_sigma": times * level}
        rows.append(row)
    return rows


GPT_SHAPE = dict(n_layer=2, n_head=2, n_embd=24, block_size=12, vocab_size=37)


def make_gpt(seed=0, **overrides):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**GPT_SHAPE, **overrides}))
    with torch.no_grad():  # norm weights of exactly 1 and biases of exactly 0 would hide mistakes
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def gpt_batch(n, seed=1, T=12):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(GPT_SHAPE["vocab_size"], (n, T + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def contributions(model, x, y, n, metrics=None):
    """The oracle: a loop over examples with plain autograd in float64. {parameter name: [|g_b / n|^2 for each b]}"""
    model = copy.deepcopy(model).double()
    model.config.activation_checkpointing = "none"
    squares = {name: [] for name, _ in model.named_parameters()}
    for b in range(len(x)):
        model.zero_grad()
        (model(x[b:b + 1], y[b:b + 1])[1] / n).backward()
        for name, p in model.named_parameters():
            weight = 1 if metrics is None else metrics.get(name, torch.zeros(())).double()
            squares[name].append(float((weight * p.grad**2).sum()))
    return {name: torch.tensor(v, dtype=torch.float64) for name, v in squares.items()}


def measured(model, x, y, micro, forward=None, mode="norm", metrics=None):
    """Probe gradients over all micro-batches, (sites, 2 or 4, B), as the training loop takes them."""
    forward = model if forward is None else forward
    accum = len(x) // micro
    norms = []
    for i in range(0, len(x), micro):
        probes = torch.zeros(len(model.probe_sites(mode)), 4 if metrics else 2, micro, requires_grad=True)
        _, loss = forward(x[i:i + micro], y[i:i + micro], probes=probes, metrics=metrics)
        (loss / accum).backward()
        norms.append(probes.grad)
    return torch.cat(norms, -1)


def check_against_oracle(model, x, y, micro, forward=None, mode="norm", metrics=None):
    ours = measured(model, x, y, micro, forward, mode, metrics).double()
    parameters = dict(model.named_parameters())
    sites = model.probe_sites(mode)
    for first_row, weights in ((0, None), (2, metrics)) if metrics else ((0, None),):
        truth = contributions(model, x, y, len(x), weights)
        for site, (name, _, layer) in enumerate(sites):
            assert name in parameters and (layer is None or f"h.{layer}." in name)
            torch.testing.assert_close(ours[site, first_row], truth[name], rtol=1e-5, atol=0)
            bias = name.replace("weight", "bias")
            expected = truth[bias] if bias in parameters else torch.zeros(len(x), dtype=torch.float64)
            torch.testing.assert_close(ours[site, first_row + 1], expected, rtol=1e-5, atol=1e-30)
