"""
bench.py step --against PATH --whole: train.py of a nanoGPT checkout and ours, as whole processes in turn.

    python bench.py step --against=../nanoGPT --whole --models=char --rounds=3

Both train the same model on the same text with a line for every step, and each tells the time of its own steps: theirs in its
printed lines, ours in log.jsonl. So everything that a loop does is in it: batches from the disk, the log line, the noise scale
with its calibration. Theirs is in float32, which its loop takes on a CPU; ours in the dtype that is asked for. The first steps
of a process warm up and do not count.
"""

import os
import pickle
import re
import statistics
import sys
import tempfile

import numpy as np

from benchmarks import against
from benchmarks.tools import MODELS, TRAIN, interleave, plain, process, quartiles, write_json
from trainer import batches, hardware, log

WARM_UP, STEPS, VOCABULARY = 5, 40, 256  # steps of a process; bytes


def their_data(folder):
    """The standard library's bytes in nanoGPT's format."""
    ours = batches.Dataset("stdlib", block_size=1)
    for split in ("train", "val"):
        ids = np.fromfile(os.path.join(ours.folder, f"{split}.bin"), ours.dtype)
        ids.astype(np.uint16).tofile(os.path.join(folder, f"{split}.bin"))
    with open(os.path.join(folder, "meta.pkl"), "wb") as f:
        pickle.dump({"vocab_size": VOCABULARY}, f)


def train(command, name, values, folder=None):
    """What a train.py prints; the vocabulary is that of the data."""
    given = [f"--{k}={v}" for k, v in values.items() if k != "vocab_size"]
    return process([sys.executable, command, *given], name, cwd=folder)


def their_steps(path, shape, micro, steps, folder):
    """Milliseconds of each step of their train.py."""
    their_data(folder)
    said = train("train.py", f"{path}: train.py", {
        **shape, "dataset": folder, "out_dir": os.path.join(folder, "out"), "device": "cpu", "dtype": "float32",
        "compile": False, "batch_size": micro, "gradient_accumulation_steps": 1, "dropout": 0.0, "bias": True,
        "max_iters": steps, "log_interval": 1, "eval_interval": 10**9, "eval_iters": 1, "decay_lr": False,
        "learning_rate": 1e-4}, path)
    return [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", said, re.MULTILINE)][1:]  # the first evaluates


def our_steps(shape, micro, steps, dtype, folder):
    """Milliseconds of each step of train.py."""
    out = os.path.join(folder, "ours")
    train(TRAIN, "ours: train.py", {
        **shape, "dataset": "stdlib", "out_dir": out, "device": "cpu", "dtype": dtype, "micro_batch_size": micro,
        "batch_schedule": "constant", "batch_size": micro, "batch_size_start": micro, "learning_rate": 1e-4, "min_lr": 0,
        "lr_decay": "none", "max_tokens": steps * micro * shape["block_size"], "warmup_tokens": 0, "log_interval": 1,
        "eval_tokens": 0, "eval_iters": 1, "checkpoint_tokens": 0})
    return [row["dt_ms"] for row in log.read(out) if "dt_ms" in row]


def compare(name, path, dtype, rounds):
    """Mean milliseconds of a step in each process, both sides in turn, and the ratio of each round."""
    (shape, micro), steps = MODELS[name], STEPS

    def side(steps_of, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            return {"ms": statistics.fmean(steps_of(*arguments, folder)[WARM_UP:])}
    samples = interleave({"ours": lambda: side(our_steps, shape, micro, steps, dtype),
                          "theirs": lambda: side(their_steps, path, shape, micro, steps)}, 0, rounds, warm_up=0)
    means = {name: phases["ms"] for name, phases in samples.items()}
    return {"shape": {**shape, "vocab_size": VOCABULARY}, "micro_batch": micro, "steps_of_a_process": steps - WARM_UP,
            "mean_ms_of_each_process": means, "ratio": quartiles([t / o for o, t in zip(means["ours"], means["theirs"])])}


def run(args):
    against.their_module(args.against)
    path, dtype, report = os.path.abspath(args.against), plain(hardware.pick_dtype(args.dtype, "cpu")), {}
    for name in args.models.split(","):
        report[name] = compare(name, path, dtype, args.rounds)
        print(f"{name}: whole processes in turn, {args.rounds} of each; ours in {dtype}, theirs in float32: ours / theirs "
              "{1:.3f} ({0:.3f} to {2:.3f})".format(*report[name]["ratio"]), flush=True)
        write_json(args.out, {"dtypes": {"ours": dtype, "theirs": "float32"}, "models": report})
    return 0
