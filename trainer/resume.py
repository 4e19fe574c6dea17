"""What a run starts from: nothing, its own checkpoint (resume), or another run's (branch_from)."""

import contextlib
import os

import torch

import configurator
import ln_kernel
from configurator import ConfigError
from data import tokens
from rightbatch.kernels import cpp
from trainer import checkpoint, hardware, log

STEERED = ("batch_schedule", "batch_objective", "batch_size_start", "batch_size", "log_interval")  # how gns finds its batch
ROUNDING = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")  # of the environment
PARTS = {"model": dict, "optimizer": dict, "rng": dict, "scaler": dict, "state": dict, "gns": dict, "schedule": dict,
         "config": dict, "data": dict, "vocab_size": int}  # of a checkpoint that a run can go on from


def starting_point(config, data, mmap=False):
    """The checkpoint to go on from, or None for a fresh run; never a run written over another one. That of another run,
    with branch_from, is marked as "branched"."""
    there = bool(checkpoint.saved_in(config.out_dir))
    if config.resume == "True" or (config.resume == "auto" and there):
        saved = checkpoint.load(config.out_dir, mmap=mmap)
        check_parts(saved, {"log": dict, "arithmetic": dict})
        checkpoint.check_same_run(saved, config, data.meta)
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
    check_parts(saved)
    checkpoint.check_same_run(saved, config, data.meta, branch=True)
    tokens = saved["state"]["tokens"]
    if tokens >= config.end_tokens():
        raise ConfigError(f"branch_from={config.branch_from!r}: its checkpoint is at {tokens} tokens, this run ends at "
                          f"{config.end_tokens()}")
    same = all(saved["config"].get(key) == getattr(config, key) for key in STEERED)
    go_on = config.batch_schedule == "gns" and same  # from the batch that was found; else its own batches
    return {**saved, "branched": True, "schedule": saved["schedule"] if go_on else None}


def check_parts(saved, more=None):
    """Its checksum fits, but whoever wrote it may have been another program, or another version of this one."""
    with restoring(saved["path"]):
        for key, kind in {**PARTS, **(more or {})}.items():
            if not isinstance(saved[key], kind):
                raise TypeError(key)
        counts = [saved["state"]["tokens"], saved["config"]["max_tokens"]]
        if more:
            counts += [saved["log"][key] for key in ("size", "crc")]
            counts += [saved["arithmetic"][key] for key in ("micro_batch_size", "processes")]
        plain = [*saved["config"].values(), *saved["data"].values(), *saved.get("arithmetic", {}).values()]
        if any(torch.is_tensor(value) for value in plain):  # they are compared with settings
            raise TypeError("a tensor among the settings")
        if not all(type(n) is int and 0 <= n < 2**63 for n in counts):
            raise TypeError("a count that is none")
        configurator.checked(saved["config"].items(), saved["path"])
        tokens.check_meta(saved["data"])


@contextlib.contextmanager
def restoring(path):
    """What does not fit while a checkpoint is taken over is one line."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        if configurator.explain(e):  # too little memory
            raise
        words = configurator.short(" ".join(str(e).split()))
        raise ConfigError(f"{path} does not hold what this version of train.py saves ({type(e).__name__}: {words}): it was "
                          "edited, or written by another version; start a new out_dir") from None


def arithmetic(config, ranks, step):
    """What the last digits of a run depend on, beside its fixed keys."""
    cpu = step.device == "cpu"
    return {"dtype": str(step.dtype).removeprefix("torch."), "device": step.device, "threads": torch.get_num_threads(),
            "norm layers": ln_kernel.choose_impl(torch.device(step.device))[0], "compiled": step.compiled,
            "torch": str(torch.__version__), "machine": hardware.device_name(step.device), "parallel": config.parallel,
            "instructions": torch.backends.cpu.get_cpu_capability(), "kernels": cpp.identity() if cpu else None,
            "environment": " ".join(f"{name}={os.environ[name]}" for name in ROUNDING if name in os.environ) or "plain",
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
