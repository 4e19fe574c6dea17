"""
Checkpoints: one dictionary of tensors and plain values in ckpt.pt. Written beside the old one, flushed to the disk, then
moved over it, so that a kill at any moment leaves a complete file; loaded with weights_only=True.
"""

import dataclasses
import json
import os

import torch

import configurator
import schedule
from configurator import ConfigError

NAME = "ckpt.pt"
FORMAT = 1


def write_atomically(path, write):
    """Call write(file) on a temporary neighbour, then put it in place of `path`."""
    temporary = path + ".tmp"
    with open(temporary, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name survives a power cut, too
    finally:
        os.close(folder)


def write_json(path, value):
    write_atomically(path, lambda f: f.write((json.dumps(value, indent=2) + "\n").encode()))


def save(out_dir, state):
    write_atomically(os.path.join(out_dir, NAME), lambda f: torch.save({"format": FORMAT, **state}, f))


def load(out_dir, device="cpu", mmap=False):
    """mmap: several processes of a machine share one copy in memory; use it up before the next save replaces the file."""
    path = os.path.join(out_dir, NAME)
    if not os.path.isfile(path):
        raise ConfigError(f"{out_dir}: no {NAME} to load there")
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=mmap)
        version = state["format"]
    except Exception as e:
        raise ConfigError(f"{path} is not a readable checkpoint ({type(e).__name__}): "
                          "it is damaged, or not from train.py") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, this program reads {FORMAT}")
    return state


def check_same_run(state, config, checksum, branch=False):
    """A resume that would compute something else says which key differs; a branch may change more."""
    old, new = state["config"], dataclasses.asdict(config)
    free = configurator.free_keys(branch) - set(() if branch else schedule.fixed_on_resume(config))
    differ = [k for k in new if k not in free and k in old and _plain(old[k]) != _plain(new[k])]
    what = "branch" if branch else "resume"
    if differ:
        listed = ", ".join(f"{k} is {new[k]!r}, the checkpoint has {old[k]!r}" for k in differ)
        raise ConfigError(f"{what}: {listed}; give the old value, or start a new out_dir")
    if state["data_checksum"] != checksum:
        raise ConfigError(f"{what}: dataset={config.dataset!r} has other contents than the checkpoint's (its train.bin was "
                          "prepared anew): restore it, or start a new out_dir")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value
