import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

torch.set_num_threads(1)  # tiny tensors: a second thread only adds waiting, and sums keep one order

# a run of some 20 steps that takes a second
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, micro_batch_size=4, batch_size=16, batch_size_start=4,
            max_tokens=3200, warmup_tokens=320, gns_half_life_tokens=1000, eval_tokens=1600, eval_iters=4, log_interval=1,
            checkpoint_tokens=640, device="cpu", dtype="float32", compile="False")


def write_dataset(folder, train, val, vocab_size=256, dtype="uint8", **meta):
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


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """Bytes with some structure, so that a tiny model learns: each byte follows from the one before, mostly."""
    rng = np.random.default_rng(0)
    ids = np.cumsum(rng.choice([1, 3, 7], 5000)) % 64
    return write_dataset(tmp_path_factory.mktemp("data") / "tiny", ids[:4000], ids[4000:], vocab_size=64)


@pytest.fixture
def tiny(tmp_path, tiny_data, monkeypatch):
    """tiny(module, *arguments): an experiment in its tiny setting; returns its numbers file. tiny.runs: folders it ran."""
    from plots import report
    from sweeps import jobs
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")  # not every run's picture
    real = jobs.run_training

    def run_training(config, *how, **changes):
        run.runs.append(os.path.basename(config.out_dir))
        return real(config, *how, **changes)

    def run(module, *arguments):
        name = module.__name__
        assert module.main(["--tiny", "--out", str(tmp_path / "out"), "--results", str(tmp_path), f"--dataset={tiny_data}",
                            *arguments]) == 0
        assert os.path.getsize(tmp_path / f"{name}.png") > 10_000
        with open(tmp_path / f"{name}.json") as f:
            result = json.load(f)
        assert result["paper"].startswith("The paper") and result["finding"].startswith("Here")
        assert str(tmp_path) not in json.dumps(result), "no path of this machine in a committed file"
        return result
    run.runs = []
    monkeypatch.setattr(jobs, "run_training", run_training)
    return run


@pytest.fixture
def tiny_args(tiny_data):
    """Command line of a tiny run: tiny_args(out_dir=..., key=value ...)."""
    def args(**overrides):
        return [f"--{k}={v}" for k, v in {"dataset": tiny_data, **TINY, **overrides}.items()]
    return args


def run_script(*args, script="train.py", **kwargs):
    """A script in a process of its own, as a user starts it."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **kwargs.pop("env", {})}
    env.pop("WANDB_MODE", None)
    return subprocess.run([sys.executable, os.path.join(ROOT, script), *args], capture_output=True, text=True, env=env,
                          stdin=subprocess.DEVNULL, timeout=300, **kwargs)
