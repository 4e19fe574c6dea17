"""
The log of a run: log.jsonl (the truth, one object per line), a readable line and a progress bar in the terminal, and,
if asked for, wandb (wandb_log.py). An undetermined value is null in the file.

A checkpoint knows size and checksum of the log. A resume goes back to those rows, and writes the later ones again. A log that
is another one is refused, by a resume and by every reader; it is never repaired.
"""

import contextlib
import itertools
import json
import math
import os
import sys
import time
import zlib

from system import terminal
from system.errors import ConfigError
from trainer import checkpoint, tensors

NAME = "log.jsonl"
TIMES = {"seconds", "dt_ms", "tok_per_sec", "mfu"}  # never undetermined, nor below zero
COUNTS = {"step": 0, "tokens": 0, "examples": 0, "bad_steps": 0, "batch_size": 1, "accum": 1,
          "row": 0}  # whole numbers, at least so many; row is the number of a line


def read(out_dir, compare=True):
    """The rows of a run's log. A last line that a kill cut off is left out. Any other line that is no row, is missing or is out
    of place is an error: half a log would give wrong answers in silence. compare: the log with the newest checkpoint."""
    path = os.path.join(out_dir, NAME)
    data = read_bytes(path)
    rows = [row_of(line) for line in data.split(b"\n")[:-1]]
    if None in rows:
        raise ConfigError(f"{path}: line {rows.index(None) + 1} is not a row of a run's log: the file is damaged, or not from "
                          "train.py")
    if (wrong := out_of_place(rows)) is not None:
        raise ConfigError(f"{path}: line {wrong + 1} does not follow from the line before: lines are missing, or in another "
                          "order; restore the file from a copy")
    saved, known = known_log(out_dir) if compare else (None, None)
    if saved and not begins_as(data, known) and not checkpoint.trouble(saved):
        raise ConfigError(f"{path} is not the log that {saved} was saved with: lines are missing from it, or were "
                          "changed; restore the file from a copy")
    for row in rows:
        row.pop("row", None)
    return rows


def check(out_dir, known):
    """Refuse to go on with another log than the one that a checkpoint knows (RunLog.state). Where there is none, or an empty
    one, the log begins anew."""
    path = os.path.join(out_dir, NAME)
    if os.path.lexists(path) and (data := read_bytes(path)) and not begins_as(data, known):
        raise ConfigError(f"{path} is not the log that the checkpoint was saved with: lines are missing from it, or were "
                          "changed; restore the file from a copy, or move it away: the log then begins anew")


def known_log(out_dir):
    """(path of the newest checkpoint, {"size", "crc"} of the log in it); (None, None) where it cannot be read. Reads this part
    alone: other parts may be damaged."""
    with contextlib.suppress(Exception):
        path = checkpoint.saved_in(out_dir)[0]
        if os.path.isfile(path):
            known = tensors.load(path, "cpu", mmap=True)["log"]
            return path, {key: int(known[key]) for key in ("size", "crc")}
    return None, None


def begins_as(data, known):
    kept = data[:known["size"]]
    return (len(kept), zlib.crc32(kept)) == (known["size"], known["crc"])


def out_of_place(rows):
    """The index of the first row that does not follow from the one before; None where all do. Rows of older versions have no
    number."""
    step = tokens = 0
    for i, row in enumerate(rows):
        if row.get("row", i) != i or row["step"] < step or row["tokens"] < tokens:
            return i
        step, tokens = row["step"], row["tokens"]
    return None


def read_bytes(path):
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would keep us waiting
        raise ConfigError(f"{path} is no file")
    with open(path, "rb") as f:
        return f.read()


def row_of(line):
    """{key: number, text or None} of a line; None for a line that is no row."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not {"step", "tokens"} <= row.keys():
        return None
    return row if all(fits(*item) for item in row.items()) else None


def fits(key, value):
    """Whether a run can have written this value under this key."""
    if key == "event":
        return isinstance(value, str)
    if key in COUNTS:
        return type(value) is int and COUNTS[key] <= value < 2**63
    if value is None:
        return key not in TIMES
    return type(value) in (int, float) and abs(value) < 2**1000 and not (key in TIMES and value < 0)


def steps(rows):
    """The rows of logged steps. Each has at least a loss, a batch and its time."""
    return [row for row in rows if {"train/loss", "batch_size", "seconds"} <= row.keys()]


def died(rows):
    """Whether the last loss of a log is not finite."""
    losses = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
    return bool(losses) and losses[-1] is None


def say(text, end="\n"):
    """A line in the terminal, now."""
    print(text, end=end, flush=True)


class RunLog:
    """What a run writes. Where another program changes log.jsonl while the run goes on, its rows go to log.1.jsonl from there
    on: nothing is repaired, and nothing that is on the disk is written over."""

    def __init__(self, config, step=None, known=None):
        """known: state() of the log when the checkpoint of `step` was written; None where the log begins there."""
        self.folder, self.path = config.out_dir, os.path.join(config.out_dir, NAME)
        self.size = self.crc = self.rows = 0  # bytes, checksum and number of all rows, in this file and those before it
        self.before = 0  # bytes in the files before the one that is open
        self.newest = 0, 0  # step and tokens of the last row
        self.news = None  # words where rows are lost
        with contextlib.suppress(FileNotFoundError):
            data = read_bytes(self.path)  # refuses what is no file
            if known and data:
                self.go_back(step, known, data)
            else:
                os.unlink(self.path)
        if known and known["size"] > self.size:
            self.news = f"{self.path} is gone: the log begins anew at step {step}"
        self.file = open(self.path, "ab")
        self.bar = sys.stdout.isatty()
        self.wandb = None  # a WandbLog, where rows go there, too

    def go_back(self, step, known, data):
        """Go back to the rows that the checkpoint knows: the resumed run writes the later ones again."""
        checkpoint.unshare(self.path)
        kept, later = data[:known["size"]].splitlines(), data[known["size"]:]
        self.size, self.crc, self.rows = known["size"], known["crc"], len(kept)
        if kept and (last := row_of(kept[-1])):
            self.newest = last["step"], last["tokens"]
        if newer := later.count(b"\n"):  # a line that a kill cut off is none
            say(f"the log is {plural(newer, 'row')} ahead of the checkpoint of step {step}: they are written again")
        if later:
            os.truncate(self.path, self.size)

    def write(self, row):
        self.look()
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

    def look(self):
        """Go on in a new file where somebody removed, replaced, cut or wrote to the one that is open."""
        with contextlib.suppress(FileNotFoundError):
            mine, named = os.fstat(self.file.fileno()), os.stat(self.path)
            if os.path.samestat(mine, named) and mine.st_size == self.size - self.before:
                return
        changed, others = self.path, (os.path.join(self.folder, f"log.{number}.jsonl") for number in itertools.count(1))
        self.path = next(path for path in others if not os.path.lexists(path))
        self.file.close()
        self.file, self.before = open(self.path, "xb"), self.size
        self.event(*self.newest, f"{changed} was changed by another program while the run went on: from here on the rows go to "
                                 f"{self.path}. Nothing reads a log that was changed: restore it from a copy, with these rows "
                                 "behind it")

    def state(self):
        """Size and checksum of all rows, for a checkpoint. Afterwards the rows are on the disk."""
        self.look()
        os.fsync(self.file.fileno())
        return {"size": self.size, "crc": self.crc}

    @property
    def columns(self):
        """The width of the terminal, which may change while the run goes on; None without a bar."""
        return terminal.width() if self.bar else None

    def say(self, text):
        """A line in the terminal, above the progress bar."""
        say((terminal.CLEAR if self.bar else "") + terminal.wrapped(text, self.columns))

    def event(self, step, tokens, text):
        self.write({"step": step, "tokens": tokens, "event": text})
        self.say(text)

    def progress(self, share, text):
        """The bar of a terminal that has one (self.bar)."""
        filled = int(share * 24)
        say(f"{terminal.CLEAR}[{'#' * filled:.<24}] {share:4.0%} {text}", end="")

    def close(self):
        self.look()
        self.file.close()
        if self.bar:
            say(terminal.CLEAR, end="")

    def publish(self, words=""):
        """End the run in wandb. words: its closing words, none where it will go on."""
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
