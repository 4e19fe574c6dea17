"""
The log of a run: log.jsonl (the truth, one object per line), a readable line and a progress bar in the terminal, and,
if asked for, wandb (wandb_log.py). An undetermined value is null in the file.
"""

import contextlib
import json
import math
import os
import sys
import time
import zlib

from configurator import ConfigError
from system import files, terminal
from trainer import checkpoint, tensors

NAME = "log.jsonl"
START = b'{"step":'  # of each row
SAID = "is not what it was when the checkpoint was written", "was changed by another program while the run went on"  # in a row
TIMES = {"seconds", "dt_ms", "tok_per_sec", "mfu"}  # never undetermined, nor below zero
COUNTS = {"step": 0, "tokens": 0, "examples": 0, "bad_steps": 0, "batch_size": 1, "accum": 1,
          "row": 0}  # whole numbers, at least so many; row is the number of a line


def read(out_dir, newest=None):
    """The rows of a run's log; a last line cut off by a kill is left out. Any other line that is no row, that is missing or in
    another place is an error: what follows from half a log would be wrong in silence. newest: checkpoint, {} for none."""
    path, newest = os.path.join(out_dir, NAME), newest_checkpoint(out_dir) if newest is None else newest
    data = read_bytes(path)
    rows = [row_of(line) for line in data.split(b"\n")[:-1]]
    if None in rows:
        raise ConfigError(f"{path}: line {rows.index(None) + 1} is not a row of a run's log: the file is damaged, or not from "
                          "train.py")
    if (wrong := out_of_place(rows)) is not None:
        raise ConfigError(f"{path}: line {wrong + 1} does not follow from the line before: lines are missing, or in another "
                          "order; restore the file from a copy")
    if newest and not begins_as(data, newest["log"]) and not checkpoint.trouble(newest["path"]) and not any(
            row["step"] >= newest["state"]["step"] and any(words in row.get("event", "") for words in SAID) for row in rows):
        raise ConfigError(f"{path} is not the log that {newest['path']} was saved with: lines are missing from it, or were "
                          "changed; restore the file from a copy")
    for row in rows:
        row.pop("row", None)
    return rows


def newest_checkpoint(out_dir):
    """What it says of itself, in which a damaged part may stay unseen; {} for none that can be read."""
    with contextlib.suppress(Exception):
        path = checkpoint.saved_in(out_dir)[0]
        if os.path.isfile(path):
            state = tensors.load(path, "cpu", mmap=True)
            return {"path": path, "state": {"step": int(state["state"]["step"])},
                    "log": {key: int(state["log"][key]) for key in ("size", "crc")}}
    return {}


def begins_as(data, known):
    kept = data[:known["size"]]
    return (len(kept), zlib.crc32(kept)) == (known["size"], known["crc"])


def out_of_place(rows):
    """The first row that does not follow from the one before, None where all do. Rows of older versions have no number."""
    return next((i for i, row in enumerate(rows) if row.get("row", i) != i or not follows(row, rows[i - 1:i])), None)


def follows(row, before):
    return all(row["step"] >= other["step"] and row["tokens"] >= other["tokens"] for other in before)


def read_bytes(path):
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would keep us waiting
        raise ConfigError(f"{path} is no file")
    with open(path, "rb") as f:
        return f.read()


def row_of(line):
    """{key: number, text or None} of a line, None if it is no such thing."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not {"step", "tokens"} <= row.keys():
        return None
    return row if all(fits(*item) for item in row.items()) else None


def fits(key, value):
    if key == "event":
        return isinstance(value, str)
    if key in COUNTS:
        return type(value) is int and COUNTS[key] <= value < 2**63
    if value is None:
        return key not in TIMES
    return type(value) in (int, float) and abs(value) < 2**1000 and not (key in TIMES and value < 0)


def readable(data, step):
    """(rows, their bytes) up to a step, of a file that is damaged."""
    lines = data.split(b"\n")[:-1]
    rows = [row_of(line) or row_of(line[max(0, line.rfind(START)):]) for line in lines]  # one may begin behind a torn one
    rows, kept = sorted((row for row in rows if row and row["step"] <= step), key=lambda row: row["step"]), []
    for row in rows:
        if follows(row, kept[-1:]):
            kept.append({**row, "row": len(kept)})
    return kept, "".join(json.dumps(row) + "\n" for row in kept).encode()


def steps(rows):
    """The rows of logged steps, with all that every one of them has."""
    return [row for row in rows if {"train/loss", "batch_size", "seconds"} <= row.keys()]


def died(rows):
    """Whether a run has ended without a finite loss: the newest one that it logged is none."""
    losses = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
    return bool(losses) and losses[-1] is None


def say(text, end="\n"):
    """A line in the terminal, now."""
    print(text, end=end, flush=True)


class RunLog:
    def __init__(self, config, resume_step=None, wandb_id=None, known=None):
        """known: state() of the log when the checkpoint of resume_step was written; None where the log begins there."""
        self.config, self.path = config, os.path.join(config.out_dir, NAME)
        self.size = self.crc = self.rows = 0
        self.newest = 0, 0  # step and tokens of the last row
        self.news = self.reopen(resume_step, known) if known else self.begin()  # what is lost of the file, in words
        self.file = open(self.path, "a+b")
        self.bar = sys.stdout.isatty()
        self.wandb = None
        if config.wandb_log:
            from trainer import wandb_log
            self.wandb = wandb_log.WandbLog(config, wandb_id, read(config.out_dir, newest={}))

    def reopen(self, step, known):
        """Go back to the rows that the checkpoint knows: the resumed run writes the later ones again. A file that does not
        begin with them is kept aside, and what can be read of it is gone on with."""
        data = b""
        with contextlib.suppress(FileNotFoundError):
            data = read_bytes(self.path)
            checkpoint.unshare(self.path)
        kept, rest = data[:known["size"]], data[known["size"]:]
        if begins_as(data, known):
            words = None
            if rest:
                say(f"{rest.count(10)} rows of the log are newer than the checkpoint, of step {step}: they are written again")
                os.truncate(self.path, len(kept))
        else:
            rows, kept = readable(data, step)
            aside = self.put(kept)
            words = (f"{self.path} {SAID[0]}: " + (
                     f"it is kept as {aside}, {len(rows)} rows of it can be read and stay" if data else
                     "it is gone, the rows before this one are lost"))
        self.size, self.crc, self.rows = len(kept), zlib.crc32(kept), kept.count(b"\n")
        last = row_of(kept[:-1].rpartition(b"\n")[2]) or {"step": step, "tokens": 0}
        self.newest = last["step"], last["tokens"]
        return words

    def begin(self):
        with contextlib.suppress(FileNotFoundError):
            read_bytes(self.path)  # refuses what is no file
            os.unlink(self.path)

    def put(self, data):
        """Other contents for the file; returns the name under which those that it had are kept, or None."""
        aside = []

        def make_room():
            if os.path.lexists(self.path):
                aside.append(os.path.basename(checkpoint.keep_aside(self.path)))
        files.write_atomically(self.path, lambda f: f.write(data), ready=make_room)
        return aside[0] if aside else None

    def write(self, row):
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps({**row, "row": self.rows}) + "\n").encode()
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self.path) from None
        self.size, self.crc, self.rows = self.size + len(line), zlib.crc32(line, self.crc), self.rows + 1
        self.newest = row["step"], row["tokens"]
        if self.wandb:
            self.wandb.write(row)

    def state(self):
        """Size and checksum of the file, which is on the disk then."""
        if not self.intact():
            self.event(*self.newest, self.mend())
        os.fsync(self.file.fileno())
        return {"size": self.size, "crc": self.crc}

    def intact(self):
        """Whether the file still has its name and its size: nobody removed, replaced or cut it while the run goes on."""
        try:
            mine, named = os.fstat(self.file.fileno()), os.stat(self.path)
        except FileNotFoundError:
            return False
        return os.path.samestat(mine, named) and mine.st_size == self.size

    def mend(self):
        """Write the file again, from what this process still holds of it. Returns words."""
        data = os.pread(self.file.fileno(), max(self.size, os.fstat(self.file.fileno()).st_size), 0)
        whole = (len(data), zlib.crc32(data)) == (self.size, self.crc)
        rows, kept = (None, data) if whole else readable(data, self.newest[0])
        aside = self.put(kept)
        self.file.close()
        self.file, self.size, self.crc, self.rows = open(self.path, "a+b"), len(kept), zlib.crc32(kept), kept.count(b"\n")
        return (f"{self.path} {SAID[1]}: "
                + (f"what was there is kept as {aside}, " if aside else "")
                + ("all rows are written again" if whole else f"{len(rows)} rows can be read and stay"))

    @property
    def columns(self):
        """Of the terminal, which may change while the run goes on."""
        return terminal.width() if self.bar else None

    def say(self, text):
        """A line in the terminal, above the progress bar."""
        say(("\r\033[K" if self.bar else "") + terminal.wrapped(text, self.columns))

    def event(self, step, tokens, text):
        self.write({"step": step, "tokens": tokens, "event": text})
        self.say(text)

    def progress(self, share, text):
        if self.bar:
            width = 24
            filled = int(share * width)
            say(f"\r\033[K[{'#' * filled}{'.' * (width - filled)}] {share:4.0%} {text}", end="")

    def close(self):
        if not self.intact():
            self.event(*self.newest, self.mend())
        self.file.close()
        if self.bar:
            say("\r\033[K", end="")

    def publish(self, words=""):
        """The end, for wandb; words: what the run said there, none where it will go on."""
        if self.wandb:
            self.wandb.close(words)


class NoLog:
    """What ranks other than the first write to."""
    bar = wandb = news = columns = None

    def nothing(self, *_):
        pass

    write = say = event = progress = close = publish = nothing


def count(n):
    """1234567 -> 1.23M"""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}" if n / size < 1000 else f"{n / size:.0f}{letter}"
    return f"{n:.0f}" if n == int(n) else f"{n:.3g}"


def plural(n, thing):
    return f"{n} {thing}{'' if n == 1 else 's'}"


def duration(seconds):
    seconds = int(seconds + 0.5)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}"
    return f"{seconds // 60}:{seconds % 60:02d}"


class Clock:
    """Seconds of training: stops during evaluation, checkpoints and pictures."""

    def __init__(self, total=0.0):
        self.total, self.started = total, time.perf_counter()

    def seconds(self):
        return self.total + (time.perf_counter() - self.started if self.started is not None else 0.0)

    @contextlib.contextmanager
    def paused(self):
        self.total, self.started = self.seconds(), None
        yield
        self.started = time.perf_counter()
