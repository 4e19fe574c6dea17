"""
Files that a user names on a command line. Nothing is replaced that he did not mean: a device or a pipe is written to, a link
stays and its target is written, and a file that a run or a dataset lives from is refused.

    output.check(path)              # before the work
    output.write(path, data)        # a file: all of it, or what was there before
"""

import json
import os
import re
import stat
import sys

from system import files
from system.errors import ConfigError

# {files that show whose a folder is: the names in it that only the program itself writes}
OWNED = {("log.jsonl", "ckpt.pt", "ckpt.best.pt", "lock"):
         rf"{files.OF_A_RUN}|train\.out|lock|.*\.damaged(\.\d+)?",
         ("meta.json", "train.bin"): r"(train|val)\.bin|(meta|verified)\.json|meta\.pkl",
         ("sweep.json",): r"sweep\.json", ("branch.json",): r"branch\.json"}


def check(path):
    """Refuse, in words, what must not be written over."""
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    for signs, names in OWNED.items():
        if re.fullmatch(names, name) and any(os.path.lexists(os.path.join(folder, sign)) for sign in signs):
            raise ConfigError(f"{path}: the run or dataset in {folder} lives from its {name}: give another name to write to")
    if os.path.exists(path) and stat.S_ISBLK(os.stat(path).st_mode):
        raise ConfigError(f"{path} is a disk, not a file: give another name to write to")


def write(path, data):
    path = os.fspath(path)
    check(path)
    try:
        descriptor = open_already(path)
        if descriptor is None:
            return files.write_atomically(os.path.realpath(path), lambda f: f.write(data))
        with open(descriptor, "wb") as f:
            f.write(data)
    except OSError as e:
        raise OSError(e.errno, e.strerror, path) from None


def open_already(path):
    """A descriptor of a path that must not be replaced by a file: a pipe (which waits for its reader), a device, or what stdout
    or stderr already go to (/dev/stdout). None for any other path."""
    try:
        status = os.stat(path)  # through links, and through /dev/fd, where a pipe has no other name
    except OSError:
        return None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
            if os.path.samestat(os.fstat(stream.fileno()), status):
                return os.dup(stream.fileno())
        except (OSError, ValueError, AttributeError):  # it is closed, or no file at all
            continue
    return None if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) else os.open(path, os.O_WRONLY)


def write_json(path, value, indent=2):
    write(path, (json.dumps(value, indent=indent) + "\n").encode())
