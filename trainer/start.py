"""
How a run begins: which settings it has, which folder, and which checkpoint it starts from.

    config, name = start.parse_named(argv, processes)      # settings, from a config file or from a run that goes on
    with start.held(config, name) as folder: ...           # the folder, which no other process writes to
    saved = start.starting_point(config, data)             # its own checkpoint, another run's (branch_from), or None

A run that was given no folder is called out/<name>, out/<name>-2, ... The name says which config file, and what was typed on
top of it. out/latest points to the newest run in out/.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re

import torch

import configurator
import ln_kernel
import schedule
from configurator import FIELDS, FREE, Config
from data import tokens
from rightbatch.kernels import cpp
from system import files, points
from system.errors import ConfigError, explain, short
from trainer import checkpoint, hardware, huggingface, log

OUT, LATEST = "out", "latest"
NAME_LENGTH = 60  # characters of a run's folder: what is longer says "more", and config.json has it
HERE_ONLY = ("out_dir", "resume", "stop_tokens")  # of one start alone: a run that goes on does not take them from its folder
STEERED = ("batch_schedule", "batch_objective", "batch_size_start", "batch_size", "log_interval")  # how gns finds its batch
ROUNDING = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")  # of the environment
PARTS = {"model": dict, "optimizer": dict, "rng": dict, "scaler": dict, "state": dict, "gns": dict, "schedule": dict,
         "config": dict, "data": dict, "vocab_size": int}  # of a checkpoint that a run can go on from
DATA_KEYS = ("train_sha256", "val_sha256", "vocab_size", "dtype", "tokenizer", "characters")  # of meta.json: what was read


# -- settings

def parse(argv, processes: int = 1) -> Config:
    """The checked Config of a command line, for a run of so many processes."""
    return parse_named(argv, processes)[0]


def parse_named(argv, processes: int = 1) -> tuple[Config, str | None]:
    """(Config, name) of [config file or run folder] [--key=value ...]. The name is for the run's folder; None where one is
    given."""
    given, typed = configurator.read_arguments(argv)
    if len(given) > 1:
        raise ConfigError(f"one config file or run folder at most, got {' '.join(given)} (options are --key=value)")
    run = known_run(given, typed)
    if run:
        branches = run == typed.get("branch_from")
        values, name = of_run(run, typed, branches), None
        if branches and "out_dir" not in typed:
            name = os.path.basename(os.path.normpath(run))
    else:
        file = given[0] if given else configurator.DEFAULT_FILE
        values, name = configurator.read_file(file), os.path.splitext(os.path.basename(file))[0]
        if typed.get("out_dir", values["out_dir"]):
            name = None
        else:
            values["out_dir"] = os.path.join(OUT, name)
    if name:
        name = run_name(name, {k: v for k, v in typed.items() if v != values[k]})
    if not run:
        values |= of_pretrained(values, typed)
    config, shorter = shorten(Config(**values | typed), typed)
    configurator.check_values(config)
    config, fitted = fit(config, processes, typed)
    configurator.check_batches(config, processes)
    if os.environ.get("RANK", "0") == "0":
        for words in filter(None, (shorter, fitted, without_effect(config, typed), cost_unseen(config, processes))):
            print(words, flush=True)
    return config, name


def known_run(given, typed):
    """The run folder whose settings this command starts from, or None: the one that is named, the one that is resumed, or the
    one that is branched from."""
    if typed.get("out_dir") == "":
        del typed["out_dir"]
    if given and os.path.isdir(given[0]):
        wrong = [f"--{key}={typed[key]}" for key in ("out_dir", "branch_from") if key in typed]
        wrong += ["--resume=False"] if typed.get("resume") == "False" else []
        if wrong:
            raise ConfigError(f"{given[0]} is a run to go on with, which {wrong[0]} contradicts: leave one out; a new run from "
                              f"its checkpoint is python train.py --branch_from={given[0]}")
        if not os.path.isfile(os.path.join(given[0], "config.json")):
            raise ConfigError(f"{given[0]} is a folder without config.json, so no run of train.py: give a config file or a run "
                              "folder")
        typed |= {"out_dir": target_of(given[0]), "resume": "True"}
        return typed["out_dir"]
    out_dir, resume, source = typed.get("out_dir"), typed.get("resume", "False"), typed.get("branch_from")
    named = [out_dir if resume != "False" else None, source] if not given else []
    return next((folder for folder in named if folder and holds_settings(folder)), None)


def target_of(folder):
    """The folder behind a link such as out/latest."""
    folder = folder.rstrip("/") or folder
    return os.path.normpath(os.path.join(os.path.dirname(folder), os.readlink(folder))) if os.path.islink(folder) else folder


def holds_settings(folder):
    """Whether a run has begun there: settings and a checkpoint."""
    return os.path.isfile(os.path.join(folder, "config.json")) and bool(checkpoint.saved_in(folder))


def of_pretrained(values, typed):
    """What init_from says about the model. Typed keys must agree with it."""
    source = typed.get("init_from", values["init_from"])
    if source == "scratch":
        typed["init_from"] = source = ""
    if not source:
        return {}
    if source == "resume":
        raise ConfigError("init_from='resume': go on with a run by python train.py out/run, or --resume=True")
    shape, positions = huggingface.settings(source)
    wrong = [key for key in shape if key in typed and typed[key] != shape[key]]
    if wrong:
        raise ConfigError(f"{wrong[0]}={typed[wrong[0]]!r}: init_from={source!r} has {shape[wrong[0]]!r}: leave it out")
    if typed.get("block_size", values["block_size"]) > positions:
        raise ConfigError(f"block_size={typed.get('block_size', values['block_size'])}: init_from={source!r} knows {positions} "
                          f"positions: take at most {positions}")
    return shape


def of_run(folder, typed, branches):
    """The settings with which a run goes on or branches. A longer run ends its schedules where they ended, so that all before
    is as it was."""
    old = configurator.read_run(folder)
    values = vars(old) | {key: FIELDS[key].default for key in HERE_ONLY}
    if branches:
        return values | {"branch_from": ""}
    if typed.get("max_tokens", 0) > old.max_tokens:
        values |= {key: getattr(old, key) or old.max_tokens for key in ("decay_tokens", "batch_tokens")}
    return values


def shorten(c, typed):
    """(config, words or None): a run that was made shorter than its warm-up gets a warm-up of a twentieth."""
    if "max_tokens" not in typed or "warmup_tokens" in typed or c.warmup_tokens < c.max_tokens:
        return c, None
    fits = c.max_tokens // 20
    words = f"warmup_tokens={c.warmup_tokens} is taken as {fits}: a twentieth of a run of {c.max_tokens} tokens"
    return dataclasses.replace(c, warmup_tokens=fits), words


def fit(c, processes, typed):
    """(config, words for the user or None): settings whose batches come out whole on so many processes. The batches are what
    is computed, the micro-batch only how, so it is the micro-batch that gives way: a run is the same on one device and on
    eight. Only a first batch too small to be shared is rounded up. What was typed is taken as it is."""
    kind, new = schedule.kind(c), {}
    quantum, chosen = c.micro_batch_size * processes, "micro_batch_size" in typed
    if processes == 1:
        return c, None
    if "batch_size_start" in kind.keys and "batch_size_start" not in typed:
        unit = quantum if chosen else processes
        new["batch_size_start"] = -(-c.batch_size_start // unit) * unit
    sizes = configurator.said(lambda: kind.sizes(dataclasses.replace(c, **new)))
    share = math.gcd(*(-(-size // processes) for size in sizes))  # check_batches refuses a batch that cannot be shared
    if share and not chosen:
        new["micro_batch_size"] = max(m for m in range(1, c.micro_batch_size + 1) if share % m == 0)
    new = {key: value for key, value in new.items() if value != getattr(c, key)}
    if not new:
        return c, None
    taken = " and ".join(f"{key}={getattr(c, key)} is taken as {value}" for key, value in new.items())
    words = f"{taken}: batches of {', '.join(map(str, sorted(set(sizes))))} are then whole on {processes} processes"
    if "micro_batch_size" in new and kind.keys:
        larger = " ".join(f"--{key}={schedule.to_quanta(getattr(c, key), quantum)}" for key in kind.keys)
        words += f"; {larger} would keep micro_batch_size={c.micro_batch_size}"
    return dataclasses.replace(c, **new), words


def without_effect(c, typed):
    """Words about what was typed for another batch schedule than the one that is chosen, or None."""
    meant = {"batch_steps": ("steps",), "batch_file": ("file",),
             "batch_size_start": [name for name, kind in schedule.SCHEDULES.items() if "batch_size_start" in kind.keys]}
    meant |= {key: ("gns",) for key in FIELDS if key.startswith(("batch_gns_", "batch_objective", "batch_shrink"))}
    idle = [key for key in meant if key in typed and c.batch_schedule not in meant[key]]
    return f"{', '.join(idle)}: without effect under batch_schedule={c.batch_schedule}" if idle else None


def cost_unseen(c, processes):
    """Words where the controller cannot see what communication costs, so that it would hold its batch for ever; else None."""
    quantum = c.micro_batch_size * processes
    steered = (c.batch_schedule, c.batch_objective, c.parallel) == ("gns", "time", "fsdp")
    if not steered or processes == 1 or c.batch_size_start > quantum:
        return None
    return (f"batch_size_start={c.batch_size_start}: one micro-batch a step. Under parallel=fsdp its communication cannot be "
            f"told from its computation, so the batch will stay too small: --batch_size_start={2 * quantum} shows it")


# -- the folder

class Taken(Exception):
    """Another process writes there."""


def run_name(base, changed):
    """A folder's name from that of the config and {key: value} on top of it. What only says where or how to run is left out."""
    name, parts = base, [f"-{key}={name_part(value)}" for key, value in changed.items()
                         if FIELDS[key].metadata["change"] != FREE]
    for part in parts:
        if len(name + part) > NAME_LENGTH:
            return name + "-more"
        name += part
    return name


def name_part(value):
    if isinstance(value, str):
        value = os.path.basename(value.rstrip("/"))
    elif isinstance(value, float):
        value = f"{value:g}"
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    elif isinstance(value, int) and not isinstance(value, bool):
        value = next((f"{value // size}{letter}" for letter, size in reversed(points.SUFFIXES.items())
                      if value and value % size == 0), value)
    return re.sub(r"[^A-Za-z0-9._+,-]", "_", str(value))


def numbered(name, number):
    return os.path.join(OUT, name if number == 1 else f"{name}-{number}")


@contextlib.contextmanager
def held(config, name):
    """Hold the folder of a run and yield its path: the one that is given; or the newest run of this name, where the run is to
    go on; or a new one."""
    folder = config.out_dir if name is None else to_go_on_with(config, name)
    if folder:
        with files.only_writer(folder, ConfigError):
            yield folder
        return
    for number in itertools.count(1):
        folder = numbered(name, number)
        with contextlib.suppress(Taken), files.only_writer(folder, Taken):
            if not holds_a_run(folder):
                yield folder
                return


def holds_a_run(folder):
    """Whether there is something to lose: a run that ended before its first step is none."""
    logged = os.path.isfile(os.path.join(folder, log.NAME))
    return bool(checkpoint.saved_in(folder)) or logged and any("train/loss" in row for row in log.read(folder))


def to_go_on_with(config, name):
    """The newest run of this name, of these settings if there is one; None to start anew."""
    if config.resume == "False":
        return None
    runs = runs_called(re.escape(name) + r"(-[2-9]|-[1-9]\d+)?")
    same = [run for run in runs if same_settings(run, config)]
    if config.resume == "auto" or same:
        return same[0] if same else None
    if runs:
        return runs[0]  # the checkpoint's own check says what differs
    others = runs_called(rf"(?!{LATEST}$).*")
    there = f"the newest is python train.py {others[0]}" if others else "without --resume=True a new one starts"
    raise ConfigError(f"resume: there is no run {numbered(name, 1)} to go on with; {there}")


def runs_called(pattern):
    """The folders in out/ of runs with such a name, the newest first."""
    names = os.listdir(OUT) if os.path.isdir(OUT) else []
    runs = [os.path.join(OUT, name) for name in names if re.fullmatch(pattern, name)]
    return sorted((run for run in runs if checkpoint.saved_in(run)), key=newest_write, reverse=True)


def newest_write(run):
    paths = [os.path.join(run, log.NAME), *checkpoint.saved_in(run)]
    return max((os.path.getmtime(path) for path in paths if os.path.exists(path)), default=0)


def same_settings(run, config):
    try:
        return not differing(vars(configurator.read_run(run)), config)
    except ConfigError:
        return False


def point_to(folder):
    """Make out/latest point to a run in out/. Where there are no links, or something else has that name, it stays away."""
    parent, name = os.path.split(os.path.normpath(folder))
    link = os.path.join(OUT, LATEST)
    if parent != OUT or name == LATEST or (os.path.lexists(link) and not os.path.islink(link)):
        return
    temporary = f"{link}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError, NotImplementedError):
        os.symlink(name, temporary)
        os.replace(temporary, link)
    with contextlib.suppress(OSError):
        os.unlink(temporary)


# -- the checkpoint that it starts from

def starting_point(config, data, mmap=False):
    """The checkpoint to go on from, or None for a fresh run, whose folder must not hold a run. The checkpoint of branch_from is
    marked as "branched"."""
    if config.resume == "True" or (config.resume == "auto" and checkpoint.saved_in(config.out_dir)):
        saved = own_checkpoint(config, data, mmap)
        log.check(config.out_dir, saved["log"])
        return saved
    if holds_a_run(config.out_dir):
        raise ConfigError(f"out_dir={config.out_dir!r} already holds a run: continue it with --resume=True, "
                          "give another --out_dir, or remove it first")
    return branch_point(config, data, mmap) if config.branch_from else None


def own_checkpoint(config, data, mmap=False):
    """The newest checkpoint of this run."""
    saved = checkpoint.load(config.out_dir, mmap=mmap)
    check_parts(saved, {"log": dict, "arithmetic": dict})
    check_same_run(saved, config, data.meta)
    return saved


def branch_point(config, data, mmap):
    """The newest checkpoint of another run, to start this one from."""
    saved = checkpoint.load(config.branch_from, mmap=mmap)
    check_parts(saved)
    check_same_run(saved, config, data.meta, branch=True)
    at = saved["state"]["tokens"]
    if at >= config.end_tokens():
        raise ConfigError(f"branch_from={config.branch_from!r}: its checkpoint is at {at} tokens, this run ends at "
                          f"{config.end_tokens()}")
    same = all(saved["config"].get(key) == getattr(config, key) for key in STEERED)
    go_on = config.batch_schedule == "gns" and same  # from the batch that was found; else its own batches
    return {**saved, "branched": True, "schedule": saved["schedule"] if go_on else None}


def check_parts(saved, more=None):
    """Refuse a checkpoint that lacks a part or has one of another kind: its checksum fits, but whoever wrote it may have been
    another program, or another version of this one."""
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
            raise TypeError("a count that is no whole number")
        configurator.checked(saved["config"].items(), saved["path"])
        tokens.check_meta(saved["data"])


@contextlib.contextmanager
def restoring(path):
    """Where a checkpoint does not fit while it is taken over, the error becomes one line."""
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as e:
        if explain(e):  # too little memory
            raise
        words = short(" ".join(str(e).split()))
        raise ConfigError(f"{path} does not hold what this version of train.py saves ({type(e).__name__}: {words}): it was "
                          "edited, or written by another version; start a new out_dir") from None


def differing(old, config, branch=False):
    """Keys in which a resume, or a branch, of a run with the settings `old` would compute something else. A run may become
    longer, as long as its schedules end where they ended."""
    new, old = dataclasses.asdict(config), {k: tuple(v) if isinstance(v, list) else v for k, v in old.items()}
    free = configurator.free_keys(branch) - set(() if branch else schedule.fixed_on_resume(config))
    keys = {k for k in new if k not in free and k in old and old[k] != new[k]}
    ends = ("decay_tokens", "batch_tokens")
    if not branch and config.max_tokens > old["max_tokens"] and all(new[k] == (old.get(k) or old["max_tokens"]) for k in ends):
        keys -= {"max_tokens", *ends}
    return [k for k in new if k in keys]


def check_same_run(state, config, data, branch=False):
    """Refuse a resume or a branch that would compute something else, by the keys that differ. data: what meta.json holds."""
    old, what = state["config"], "branch" if branch else "resume"
    differ = differing(old, config, branch)
    if differ:
        listed = ", ".join(f"{k} is {getattr(config, k)!r}, the checkpoint has {old[k]!r}" for k in differ)
        other = "start a new out_dir"
        if differ == ["max_tokens"] and config.max_tokens > old["max_tokens"]:
            other = f"make it longer with python train.py {config.out_dir} --max_tokens={config.max_tokens}"
        elif not branch and set(differ) <= configurator.free_keys(branch=True):
            typed = " ".join(f"--{k}={getattr(config, k)}" for k in differ)
            other = f"start a new run from this one's checkpoint with python train.py --branch_from={config.out_dir} {typed}"
        raise ConfigError(f"{what}: {listed}; give the old value, or {other}")
    differ = [k for k in DATA_KEYS if k in state["data"] and state["data"][k] != data.get(k)]
    if differ:
        raise ConfigError(f"{what}: dataset={config.dataset!r} has other contents than the checkpoint's (it was prepared anew; "
                          f"{', '.join(differ)} in meta.json): restore it, or start a new out_dir")


def extension(old, config):
    """Words about a resumed run that became longer; None where it did not."""
    if not old or config.max_tokens <= old["max_tokens"]:
        return None
    rate = (f"stays at {config.learning_rate:g}" if config.lr_decay == "none" else
            f"has decayed by then and stays at min_lr={config.min_lr:g}")
    return (f"the run is longer now: {log.count(config.max_tokens)} tokens instead of {log.count(old['max_tokens'])}. All "
            f"before {log.count(config.decay_tokens)} stays as it was; the learning rate {rate}. To let it decay over all of "
            f"the longer run, branch: python train.py --branch_from={config.out_dir} --max_tokens={config.max_tokens}")


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
    """Words about what a resumed run computes otherwise than before; None where nothing differs."""
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
