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
from trainer import checkpoint, screen

NAME = "log.jsonl"


def read(out_dir):
    """The rows of a run's log; a last line cut off by a kill is left out. Any other line that is no row is an error: what
    follows from half a log would be wrong in silence."""
    path = os.path.join(out_dir, NAME)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path} is no file")
    with open(path, "rb") as f:
        lines = f.read().split(b"\n")[:-1]
    rows = [row_of(line) for line in lines]
    if None in rows:
        raise ConfigError(f"{path}: line {rows.index(None) + 1} is not a row of a run's log: the file is damaged, or not from "
                          "train.py")
    return rows


def row_of(line):
    """{key: number, text or None} of a line, None if it is no such thing."""
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not {"step", "tokens"} <= row.keys():
        return None
    fits = all(isinstance(v, str) if k == "event" else is_number(v) or (v is None and k not in ("step", "tokens"))
               for k, v in row.items())
    return row if fits else None


def is_number(value):
    return type(value) in (int, float) and abs(value) < 2**1000


def died(rows):
    """Whether a run has ended without a finite loss: the newest one that it logged is none."""
    losses = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
    return bool(losses) and losses[-1] is None


def say(text, end="\n"):
    """A line in the terminal. Where nobody listens any more (a closed pipe, a lost terminal), the talking ends, not the run."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class RunLog:
    def __init__(self, config, resume_step=None, wandb_id=None, known=None):
        """known: state() of the log when the checkpoint of resume_step was written; None where the log begins there."""
        self.config, self.path = config, os.path.join(config.out_dir, NAME)
        self.size = self.crc = 0
        self.news = self.reopen(resume_step, known) if known else None  # what is lost of the file, in words
        self.file = open(self.path, "ab" if known else "wb")
        self.bar = sys.stdout.isatty()
        self.wandb = None
        if config.wandb_log:
            from trainer import wandb_log
            self.wandb = wandb_log.WandbLog(config, wandb_id, read(config.out_dir))

    def reopen(self, step, known):
        """Go back to the rows that the checkpoint knows: the resumed run writes the later ones again. A file that does not
        begin with them is kept aside, and what can be read of it is gone on with."""
        data = b""
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as f:
            data = f.read()
        kept, rest = data[:known["size"]], data[known["size"]:]
        if (len(kept), zlib.crc32(kept)) == (known["size"], known["crc"]):
            words = None
            if rest:
                say(f"{rest.count(10)} rows of the log are newer than the checkpoint, of step {step}: they are written again")
                os.truncate(self.path, len(kept))
        else:
            rows = [row for row in map(row_of, data.split(b"\n")[:-1]) if row and row["step"] <= step]
            kept = "".join(json.dumps(row) + "\n" for row in rows).encode()
            aside = self.path + ".damaged"
            with contextlib.suppress(FileNotFoundError):
                os.replace(self.path, aside)
            checkpoint.write_atomically(self.path, lambda f: f.write(kept))
            words = (f"{self.path} is not what it was when the checkpoint was written: " + (
                     f"it is kept as {os.path.basename(aside)}, {len(rows)} rows of it can be read and stay" if data else
                     "it is gone, the rows before this one are lost"))
        self.size, self.crc = len(kept), zlib.crc32(kept)
        return words

    def write(self, row):
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        line = (json.dumps(row) + "\n").encode()
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self.path) from None
        self.size, self.crc = self.size + len(line), zlib.crc32(line, self.crc)
        if self.wandb:
            self.wandb.write(row)

    def state(self):
        """Size and checksum of the file, which is on the disk then."""
        os.fsync(self.file.fileno())
        return {"size": self.size, "crc": self.crc}

    @property
    def columns(self):
        """Of the terminal, which may change while the run goes on."""
        return screen.width() if self.bar else None

    def say(self, text):
        """A line in the terminal, above the progress bar."""
        say(("\r\033[K" if self.bar else "") + screen.wrapped(text, self.columns))

    def event(self, step, tokens, text):
        self.write({"step": step, "tokens": tokens, "event": text})
        self.say(text)

    def progress(self, share, text):
        if self.bar:
            width = 24
            filled = int(share * width)
            say(f"\r\033[K[{'#' * filled}{'.' * (width - filled)}] {share:4.0%} {text}", end="")

    def close(self):
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
