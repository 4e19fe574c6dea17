"""
The log of a run: log.jsonl (the truth, one object per line), a readable line and a progress bar in the terminal, and,
if asked for, wandb with the same keys. An undetermined value is null in the file and left out of wandb.
"""

import contextlib
import json
import math
import os
import sys
import time

from trainer import checkpoint

NAME = "log.jsonl"


def read(out_dir):
    """The rows of a run's log; a last line cut off by a kill is left out."""
    rows = []
    with open(os.path.join(out_dir, NAME), encoding="utf-8") as f:
        for line in f:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


class RunLog:
    def __init__(self, config, resume_step=None, wandb_id=None):
        self.config = config
        self.path = os.path.join(config.out_dir, NAME)
        if resume_step is not None:
            self._drop_after(resume_step)
        self.file = open(self.path, "w" if resume_step is None else "a", encoding="utf-8")
        self.bar = sys.stdout.isatty()
        self.wandb = start_wandb(config, wandb_id) if config.wandb_log else None

    def _drop_after(self, step):
        """Lines of steps that the checkpoint does not know will be written again by the resumed run."""
        rows = [r for r in read(self.config.out_dir) if r["step"] <= step] if os.path.exists(self.path) else []
        text = "".join(json.dumps(r) + "\n" for r in rows)
        checkpoint.write_atomically(self.path, lambda f: f.write(text.encode()))

    def write(self, row):
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log({k: v for k, v in row.items() if v is not None})

    def say(self, text):
        """A line in the terminal, above the progress bar."""
        print(("\r\033[K" if self.bar else "") + text, flush=True)

    def event(self, step, tokens, text):
        self.write({"step": step, "tokens": tokens, "event": text})
        self.say(text)

    def progress(self, share, text):
        if self.bar:
            width = 24
            filled = int(share * width)
            print(f"\r\033[K[{'#' * filled}{'.' * (width - filled)}] {share:4.0%} {text}", end="", flush=True)

    def close(self):
        self.file.close()
        if self.bar:
            print("\r\033[K", end="", flush=True)
        if self.wandb:
            self.wandb.finish()


class NoLog:
    """What ranks other than the first write to."""
    bar = wandb = None

    def nothing(self, *_):
        pass

    write = say = event = progress = close = nothing


def start_wandb(config, run_id):
    """A wandb run that never asks and never blocks: offline where there is no key or the server does not answer."""
    import wandb  # slow to import, so only when used
    settings = dict(silent=True, init_timeout=10)
    options = dict(project=config.wandb_project, id=run_id, resume="allow", dir=config.out_dir, config=vars(config),
                   name=config.wandb_run_name or os.path.basename(os.path.normpath(config.out_dir)))
    mode = os.environ.get("WANDB_MODE") or ("online" if wandb_key() else "offline")
    why = "asked for" if os.environ.get("WANDB_MODE") else "no key"
    try:
        run = wandb.init(mode=mode, settings=wandb.Settings(**settings), **options)
    except Exception as e:
        why, mode = (str(e) or type(e).__name__).splitlines()[0], "offline"
        run = wandb.init(mode=mode, settings=wandb.Settings(**settings), **options)
    if mode == "offline":
        print(f"wandb: offline ({why}): the run is in {run.dir.removesuffix('/files')}; "
              "send it later with wandb sync", flush=True)
    run.define_metric("tokens")
    run.define_metric("*", step_metric="tokens")
    return run


def wandb_key():
    """Whether wandb could log in without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def count(n):
    """1234567 -> 1.23M"""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.3g}{letter}" if n / size < 1000 else f"{n / size:.0f}{letter}"
    return f"{n:.0f}" if n == int(n) else f"{n:.3g}"


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
