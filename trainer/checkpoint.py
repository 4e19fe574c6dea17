"""
Checkpoints: one dictionary of tensors and plain values in ckpt.pt. Written beside the old one, flushed to the disk, then
moved over it, so that a kill at any moment leaves a complete file; loaded by tensors.py, which trusts no file.

A file ends with a checksum of all before it, which is compared on load: torch writes CRCs and does not look at them. ckpt.pt
is the newest, ckpt.1.pt the one before, ckpt.best.pt the saved one with the lowest validation loss. A damaged newest one gives
way to the one before, in words. Everybody reads through load().
"""

import contextlib
import errno
import functools
import os
import re
import stat
import sys
import zlib

import torch

from system import files
from system.errors import ConfigError
from trainer import tensors

NAME, BEST = "ckpt.pt", "ckpt.best.pt"
FORMAT = 3
READS = 2, FORMAT  # format 2 has other averages of the noise scale, which begin anew
OURS = errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM  # this process cannot read it: it may be good
MARK = b"\nrightbatch crc32 "  # and eight hex digits: how a checkpoint ends


# -- files

def unshare(path):
    """Make a file our own before it is written in place: under a second name, as cp -al gives it for a backup, it stays."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise ConfigError(f"{path} is no file: remove it")
        if status.st_nlink > 1:
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
    free = next(age for age in range(len(there) + 1) if age not in there)  # the youngest age that no checkpoint has
    for age in range(min(free, keep - 1), 0, -1):
        move = also_call if age == 1 else os.replace
        with files.about(numbered(out_dir, age)):
            move(numbered(out_dir, age - 1), numbered(out_dir, age))


def also_call(path, name):
    """A second name for a file; a copy where the file system has no links."""
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
    """The checkpoints of a folder by number: 0 for ckpt.pt, 1 for ckpt.1.pt, ..."""
    try:
        matches = [re.fullmatch(r"ckpt(?:\.([1-9][0-9]{0,5}))?\.pt", name) for name in os.listdir(out_dir)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1] or 0) for match in matches if match)


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
    wrong = trouble(path)
    if wrong:
        raise ConfigError(f"{path} is not a readable checkpoint: {wrong}")
    try:
        state = tensors.load(path, device, mmap)
        version = state["format"]
    except Exception as e:
        if isinstance(e, MemoryError) or getattr(e, "errno", None) in OURS or "allocate memory" in str(e):
            raise
        words = f": {e}" if type(e) is ValueError else f" ({type(e).__name__})"
        raise ConfigError(f"{path} is not a readable checkpoint{words}") from None
    if version not in READS:
        raise ConfigError(f"{path} has format {version}, this program reads {' and '.join(map(str, READS))}")
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
    """What the checksum tells is wrong, or ''. Remembered as long as size, times and inode stay: a sweep asks many times."""
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
