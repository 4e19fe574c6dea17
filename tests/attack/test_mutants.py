"""Checkpoints that somebody made to do harm, with a checksum that fits. Each is loaded in a process that may crash."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch

from configurator import ConfigError
from system import files
from tests.attack import attack, hostile
from trainer import checkpoint, tensors

HERE = os.path.dirname(os.path.abspath(__file__))
MUTANTS = int(os.environ.get("ATTACK_MUTANTS", 300))
HARMLESS = {"a scalar", "one element", "empty", "longer", "int64", "float64", "bfloat16", "not finite", "all bits", "a list",
            "a view of more", "empty and huge"}  # dense, of another shape or type: whoever uses it compares that


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case is a fork")
def test_no_checkpoint_crashes_a_run_or_ends_it_with_a_traceback(tmp_path):
    options = "--only=mutants", f"--out={tmp_path / 'table.json'}", f"--cases={100 * MUTANTS // attack.KINDS['mutants'] + 1}"
    done = subprocess.run([sys.executable, os.path.join(HERE, "attack.py"), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    row = json.loads((tmp_path / "table.json").read_text())["kinds"]["mutants"]
    assert row["tried"] >= MUTANTS and min(row["refused"], row["survived"]) > MUTANTS / 10


@pytest.mark.parametrize("kind", sorted(hostile.TENSORS.keys() - HARMLESS))
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_not_plain_is_named_in_one_line(tmp_path, kind):
    mine, other = torch.randn(4, 4), torch.randn(8, 4)
    try:
        bad = hostile.TENSORS[kind](mine, other)
        checkpoint.save(str(tmp_path), {"optimizer": {"moment": bad, "other": other}})
    except (RuntimeError, AttributeError, ValueError) as e:
        pytest.skip(f"torch cannot save it: {e}")
    with pytest.raises(ConfigError, match="ckpt.pt is not a readable checkpoint: .*(moment|holds|more than)") as e:
        checkpoint.load(str(tmp_path))
    assert "\n" not in str(e.value)


def test_tied_weights_may_share_memory_and_nothing_else_may():
    weight = torch.randn(4, 4)
    found = tensors.checked({"model": {"wte": weight, "lm_head": weight}}, "cpu", 64)
    assert found["model"]["wte"] is weight
    for state in ({"model": {"a": weight, "b": weight[:2]}}, {"model": {"a": weight}, "optimizer": {"b": weight}},
                  {"model": {"a": weight, "b": weight[2:]}}):
        with pytest.raises(ValueError, match="share memory"):
            tensors.checked(state, "cpu", 1000)
    with pytest.raises(ValueError, match="larger than the file"):
        tensors.checked({"model": {"a": weight}}, "cpu", 63)


@pytest.mark.parametrize("kind", ["endless", "itself", "deep", "key", "set", "attributes"])
def test_what_else_a_checkpoint_may_bring_is_refused(tmp_path, kind, monkeypatch):
    checkpoint.save(str(tmp_path), {"model": {"a": torch.randn(3, 3)}})
    whole = (tmp_path / "ckpt.pt").read_bytes()
    rng = random.Random(1)
    rng.choice = lambda options, choice=rng.choice: kind if kind in options else choice(options)
    monkeypatch.setattr(hostile, "HOSTILE", [None])
    _, data = hostile.value_changed(whole, rng)
    files.write_atomically(str(tmp_path / "ckpt.pt"), lambda f: (
        f.write(data), f.write(checkpoint.MARK + b"%08x" % f.crc)))
    with pytest.raises(ConfigError, match="not a readable checkpoint"):
        checkpoint.load(str(tmp_path))


def test_too_little_memory_or_too_many_open_files_damage_no_checkpoint(tmp_path, monkeypatch):
    for _ in range(2):
        checkpoint.save(str(tmp_path), {"x": 1}, keep=2)
    for error in (MemoryError(), RuntimeError("can't allocate memory"), OSError(24, "Too many open files")):
        def fail(*_args, error=error, **_keys):
            raise error
        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", fail)
            with pytest.raises(type(error)):
                checkpoint.load(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["ckpt.1.pt", "ckpt.pt"] and checkpoint.load(str(tmp_path))["x"] == 1
