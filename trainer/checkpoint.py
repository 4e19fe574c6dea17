"""
Checkpoints: one dictionary of tensors and plain values in ckpt.pt. Written beside the old one, flushed to the disk, then
moved over it, so that a kill at any moment leaves a complete file; loaded by tensors.py, which trusts no file.

A file ends with a checksum of all before it, which is compared on load: torch writes CRCs and does not look at them. ckpt.pt
is the newest, ckpt.1.pt the one before, ckpt.best.pt the saved one with the lowest validation loss. A damaged newest one gives
way to the one before, in words. Everybody reads through load().
"""

import contextlib
import dataclasses
import errno
import functools
import os
import re
import stat
import sys
import zlib

import torch

import configurator
import schedule
from configurator import ConfigError
from system import files
from trainer import tensors

NAME, BEST = "ckpt.pt", "ckpt.best.pt"
FORMAT = 2
FILES = r"ckpt(\.\w+)?\.pt|log\.jsonl|config\.json|step_time\.json"  # of a run; nobody else writes them
PICTURES = r"(report|compare|layers|whatif)\.png|compare\.json"
OURS = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM  # not the file's fault
MARK = b"\nrightbatch crc32 "  # and eight hex digits: how a checkpoint ends


# -- files

def unshare(path):
    """Before a file is written in place: one that has a second name, as cp -al gives it for a backup, becomes our own."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for
            raise ConfigError(f"{path} is no file: remove it")
        if found.st_nlink > 1:
            with open(path, "rb") as f:
                data = f.read()
            files.write_atomically(path, lambda f: f.write(data))


def keep_aside(path):
    """Rename a damaged file, so that nothing takes its place; returns its new name. Earlier ones stay."""
    aside, number = path + ".damaged", 1
    while os.path.lexists(aside):
        aside, number = f"{path}.damaged.{number}", number + 1
    os.replace(path, aside)
    return aside


# -- saving

def numbered(out_dir, age):
    return os.path.join(out_dir, f"ckpt.{age}.pt" if age else NAME)


def save(out_dir, state, keep=1, best=False):
    def write(f):
        torch.save({"format": FORMAT, **state}, f)
        f.write(MARK + b"%08x" % f.crc)
    files.write_atomically(numbered(out_dir, 0), write, ready=lambda: rotate(out_dir, keep))
    if best:
        with files.about(os.path.join(out_dir, BEST)):
            also_call(numbered(out_dir, 0), os.path.join(out_dir, BEST))


def rotate(out_dir, keep):
    """Make room for a new ckpt.pt: the one that is there gets a second name, so that there is a ckpt.pt at every moment."""
    there = ages(out_dir)
    for age in there:
        if age >= keep:  # more were kept before
            with files.about(numbered(out_dir, age)):
                os.unlink(numbered(out_dir, age))
    row = next(age for age in range(len(there) + 1) if age not in there)  # of them, from ckpt.pt on without a gap
    for age in range(min(row, keep - 1), 0, -1):
        move = also_call if age == 1 else os.replace
        with files.about(numbered(out_dir, age)):
            move(numbered(out_dir, age - 1), numbered(out_dir, age))


def also_call(path, name):
    """A second name for a file; a second file where the file system has no such thing."""
    second = files.beside(name)
    try:
        try:
            os.link(path, second)
        except OSError:
            import shutil
            shutil.copyfile(path, second)
        os.replace(second, name)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(second)  # replace leaves it where both were the same file already


# -- loading

def saved_in(out_dir):
    """The checkpoints of a folder, the newest first. Some may be missing between: a kill, or somebody who removed one."""
    return [numbered(out_dir, age) for age in ages(out_dir)]


def ages(out_dir):
    """0 for ckpt.pt, 1 for ckpt.1.pt, ...: those that are there."""
    try:
        found = [re.fullmatch(r"ckpt(?:\.([1-9][0-9]{0,5}))?\.pt", name) for name in os.listdir(out_dir)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1] or 0) for match in found if match)


def load(out_dir, device="cpu", mmap=False):
    """The newest checkpoint that is whole; its "path" says which. mmap: several processes of a machine share one copy in
    memory; use it up before the next save replaces the file."""
    paths, bad = saved_in(out_dir), []
    if not paths:
        raise ConfigError(f"{out_dir}: no {NAME} to load there")
    for path in paths:
        try:
            state = read(path, device, mmap)
        except ConfigError as e:
            bad.append(str(e))
            continue
        if bad:
            tell(f"{'; '.join(bad)}. Taking the one before instead: {path}")
        return {**state, "path": path}
    best = os.path.join(out_dir, BEST)
    also = f"; {best} has the weights of the lowest validation loss" if os.path.exists(best) and not trouble(best) else ""
    raise ConfigError("; ".join(bad) + also)


def load_best(out_dir, device="cpu"):
    """The checkpoint with the lowest validation loss; the newest where there is none."""
    best = os.path.join(out_dir, BEST)
    if not os.path.exists(best):
        return load(out_dir, device)
    try:
        return {**read(best, device, False), "path": best}
    except ConfigError as e:
        tell(f"{e}. Taking the newest instead")
        return load(out_dir, device)


def read(path, device, mmap):
    found = trouble(path)
    if found:
        raise ConfigError(f"{path} is not a readable checkpoint: {found}")
    try:
        state = tensors.load(path, device, mmap)
        version = state["format"]
    except Exception as e:
        if isinstance(e, MemoryError) or getattr(e, "errno", None) in OURS or "allocate memory" in str(e):
            raise  # the file may be good
        words = f": {e}" if type(e) is ValueError else f" ({type(e).__name__})"
        raise ConfigError(f"{path} is not a readable checkpoint{words}") from None
    if version != FORMAT:
        raise ConfigError(f"{path} has format {version}, this program reads {FORMAT}")
    return state


def trouble(path):
    """What is wrong with the bytes of a checkpoint, or ''."""
    try:
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            return "it is no file"
        return summed(path, info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
    except OSError as e:
        if e.errno in OURS:
            raise
        return e.strerror


@functools.lru_cache(maxsize=1000)
def summed(path, size, *_):
    """Compares the checksum, once for each file as it is: a sweep asks many times."""
    crc, left, block = 0, size - len(MARK) - 8, memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as f:
        while left > 0 and (n := f.readinto(block[:min(left, len(block))])):
            crc, left = zlib.crc32(block[:n], crc), left - n
        end = f.read(len(MARK) + 8)
    if not end.startswith(MARK):
        return "it has no checksum at its end, so it was cut short or changed, or this version of train.py did not write it"
    return "" if end == MARK + b"%08x" % crc else "it is damaged, its checksum does not match"


def promote(out_dir, path):
    """Make the checkpoint that was read the newest. Damaged ones that came before it stay beside it, as *.damaged."""
    for newer in saved_in(out_dir):
        if newer == path:
            break
        keep_aside(newer)
    if path != numbered(out_dir, 0):
        also_call(path, numbered(out_dir, 0))


def tell(text):
    """To the user, on stderr, from one process."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def differing(old, config, branch=False):
    """Keys in which a resume, or a branch, of a run with the settings `old` would compute something else. A run may become
    longer, as long as its schedules end where they ended."""
    new = dataclasses.asdict(config)
    free = configurator.free_keys(branch) - set(() if branch else schedule.fixed_on_resume(config))
    keys = {k for k in new if k not in free and k in old and _plain(old[k]) != _plain(new[k])}
    ends = ("decay_tokens", "batch_tokens")
    if not branch and config.max_tokens > old["max_tokens"] and all(new[k] == (old.get(k) or old["max_tokens"]) for k in ends):
        keys -= {"max_tokens", *ends}
    return [k for k in new if k in keys]


def check_same_run(state, config, data, branch=False):
    """A resume that would compute something else says which key differs; a branch may change more. data: meta.json's."""
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
    differ = [k for k in ("train_sha256", "val_sha256", "vocab_size", "dtype", "tokenizer", "characters")
              if k in state["data"] and state["data"][k] != data.get(k)]
    if differ:
        raise ConfigError(f"{what}: dataset={config.dataset!r} has other contents than the checkpoint's (it was prepared anew; "
                          f"{', '.join(differ)} in meta.json): restore it, or start a new out_dir")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value
