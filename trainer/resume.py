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
    if holds_a_run(config.out_dir):
        raise ConfigError(f"out_dir={config.out_dir!r} already holds a run: continue it with --resume=True, "
                          "give another --out_dir, or remove it first")
    return branch_point(config, data, mmap) if config.branch_from else None


def holds_a_run(folder):
    """Whether there is something to lose: a run that ended before its first step is none."""
    logged = os.path.isfile(os.path.join(folder, log.NAME))
    return bool(checkpoint.saved_in(folder)) or logged and any("train/loss" in row for row in log.read(folder))


def extension(old, config):
    """What it means that a resumed run became longer, in words; None if it did not."""
    if not old or config.max_tokens <= old["max_tokens"]:
        return None
    tokens = {key: log.count(getattr(config, key)) for key in ("max_tokens", "decay_tokens")}
    rate = f"the learning rate has decayed by then and stays at min_lr={config.min_lr:g}"
    if config.lr_decay == "none":
        rate = f"the learning rate stays at {config.learning_rate:g}"
    return (f"the run is longer now: {tokens['max_tokens']} tokens instead of {log.count(old['max_tokens'])}. All before "
            f"{tokens['decay_tokens']} stays as it was; {rate}. To let it decay over all of the longer run, branch: "
            f"python train.py --branch_from={config.out_dir} --max_tokens={config.max_tokens}")


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
