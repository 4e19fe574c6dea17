"""What a run starts from: nothing, its own checkpoint (resume), or another run's (branch_from)."""

import os

import torch

import ln_kernel
from configurator import ConfigError
from trainer import checkpoint, log


def starting_point(config, data, mmap=False):
    """The checkpoint to go on from, or None for a fresh run; never a run written over another one. That of another run,
    with branch_from, is marked as "branched"."""
    there = bool(checkpoint.saved_in(config.out_dir))
    if config.resume == "True" or (config.resume == "auto" and there):
        saved = checkpoint.load(config.out_dir, mmap=mmap)
        checkpoint.check_same_run(saved, config, data.checksum)
        return saved
    logged = os.path.isfile(os.path.join(config.out_dir, log.NAME))
    if there or (logged and any("train/loss" in row for row in log.read(config.out_dir))):  # else it ended before its start
        raise ConfigError(f"out_dir={config.out_dir!r} already holds a run: continue it with --resume=True, "
                          "give another --out_dir, or remove it first")
    return branch_point(config, data, mmap) if config.branch_from else None


def branch_point(config, data, mmap):
    saved = checkpoint.load(config.branch_from, mmap=mmap)
    checkpoint.check_same_run(saved, config, data.checksum, branch=True)
    tokens = saved["state"]["tokens"]
    if tokens >= config.end_tokens():
        raise ConfigError(f"branch_from={config.branch_from!r}: its checkpoint is at {tokens} tokens, this run ends at "
                          f"{config.end_tokens()}")
    return {**saved, "branched": True, "schedule": None}  # its own batches


def arithmetic(config, ranks, step):
    """What the last digits of a run depend on, beside its fixed keys."""
    return {"dtype": str(step.dtype).removeprefix("torch."), "device": step.device, "threads": torch.get_num_threads(),
            "norm layers": ln_kernel.choose_impl(torch.device(step.device))[0],
            "micro_batch_size": config.micro_batch_size, "processes": ranks.world}


def differences(old, new):
    """What a resumed run computes otherwise than the one before, in words; None if nothing."""
    differ = [f"{key} {new[key]} (was {old[key]})" for key in new if old and key in old and old[key] != new[key]]
    if not differ:
        return None
    quantum = old["micro_batch_size"] * old["processes"], new["micro_batch_size"] * new["processes"]
    words = f"resumed with {', '.join(differ)}: sums are rounded otherwise, so losses will differ in their last digits"
    if old["dtype"] != new["dtype"]:
        words += ", and by more for another dtype"
    if quantum[0] != quantum[1]:
        words += "; batches that a schedule computes are multiples of micro_batch_size x processes and may differ, too"
    return words
