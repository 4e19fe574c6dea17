"""What every case of the attack stands on: a command in a fork of this process, a run to compare with, what is a refusal."""

import builtins
import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback

TINY = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, micro_batch_size=4, batch_size=16, batch_size_start=4,
            max_tokens=6400, warmup_tokens=320, gns_half_life_tokens=1000, gns_calibrate=True, eval_tokens=1600,
            eval_iters=4, log_interval=1, checkpoint_tokens=640, dropout=0.1, device="cpu", dtype="float32", compile="False")
TIMED = {"dt_ms", "tok_per_sec", "mfu", "seconds"}
SECONDS = 60  # a case that takes longer hangs
GARBAGE = ["", "-1", "0", "1e400", "9" * 25, "9" * 400, "9" * 5000, "nan", "-inf", "1e18", "1e9", "True", "None", "()",
           "(" * 300, "(1,", "[1, 'a']", "{}", "'", "\\", "ä", "\udcff", "a\nb", "/dev/null", "/dev/zero", "..", "x" * 5000,
           "0x10", "1_0", "1j", "0.5"]
TEXTS = [b"", b"\0", b"\xff\xfe", b"\0" * 4096, b"[" * 100_000, b"{}", b"[]", b"null", b"1", b'"x"', b"raise KeyError",
         b"import sys; sys.exit(3)", b"batch_size = 10**400", b"seed = 9e999", b"lr = 1", b"out_dir = 'a\\0b'",
         b"n_layer = print", b"1e9999999 8", b"0 1e9999999", b"0 8\n0 8", b"0:8"]


# -- processes

def dataset(folder):
    rng = random.Random(0)
    os.makedirs(folder)
    meta = {"format": 1, "vocab_size": 64, "dtype": "uint8", "tokenizer": "bytes"}
    for split, n in (("train", 4000), ("val", 1000)):
        ids, now = bytearray(), 0
        for _ in range(n):
            now = (now + rng.choice([1, 3, 7])) % 64
            ids.append(now)
        with open(os.path.join(folder, f"{split}.bin"), "wb") as f:
            f.write(ids)
        meta |= {f"{split}_tokens": n, f"{split}_sha256": hashlib.sha256(ids).hexdigest()}
    with open(os.path.join(folder, "meta.json"), "w") as f:
        json.dump(meta, f)
    return folder


class Child:
    """main(arguments) of a command, train.py if not told otherwise, in a fork of this process."""

    def __init__(self, work, arguments, prepare=lambda: None, env=None, stdout=None, command="train"):
        self.errors, self.output = (os.path.join(work, f"{name}-{random.random()}") for name in ("stderr", "stdout"))
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            out = os.open(self.output, os.O_WRONLY | os.O_CREAT) if stdout is None else stdout
            os.dup2(out, 1)
            os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT), 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            os.environ.update(env or {})
            if command == "train":  # not every run's picture
                from plots import report
                report.draw = lambda out_dir: ""
            prepare()
            code = importlib.import_module(command).main(arguments)
        except SystemExit as e:
            code = e.code
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def wait(self, seconds=SECONDS):
        """The exit code, negative for a signal, None for a hang, which is ended."""
        while time.monotonic() - self.started < seconds:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.code = None
        return None

    def error(self):
        return read(self.errors)

    def has_no_kernel(self):
        """Whether it says that no kernel could be had: then it rightly computes other bits."""
        return "norm layers: ref" in read(self.output) or "norm layers use plain torch" in self.error()


def read(path):
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as f:
        return f.read()
    return ""


# -- the oracle

def result(out):
    """What a run leaves: rows without times, and weights."""
    from trainer import checkpoint, log
    rows = [{k: v for k, v in row.items() if k not in TIMED and not k.startswith("step_time/")} for row in log.read(out)]
    return rows, checkpoint.load(out)["model"]


def same(a, b):
    import torch
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


def refusal(child):
    """Why a process that ended early is no good, or '' if it said what is wrong in one line."""
    if child.code is None:
        return "hang"
    text = child.error()
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    if any(line.startswith("Traceback") for line in text.splitlines()):  # torch's own warnings may quote one
        return "traceback: " + text.strip().splitlines()[-1][:150]
    if "unrecognized arguments" in text:  # the attack itself typed what does not exist: nothing was tried
        return text.strip()[-150:]
    good = child.code == 2 and len(lines) == 1 and text.endswith(lines[0] + "\n")
    return "" if good else f"exit {child.code}: {text[-150:]!r}"


class Harness:
    def __init__(self, work, rng):
        import configurator
        self.work, self.rng, self.number, self.keys = work, rng, 0, list(configurator.FIELDS)
        self.left_out = []  # commands that this version does not have, of the kind that is tried now
        self.data = dataset(os.path.join(work, "data"))
        self.whole = self.folder()
        assert self.train(self.whole).wait() == 0, "a run without an attack"
        self.reference = result(self.whole)
        self.stopped = self.folder()  # some checkpoints, half of the way
        assert self.train(self.stopped, stop_tokens=3200).wait() == 0

    def folder(self, like=None):
        self.number += 1
        path = os.path.join(self.work, str(self.number))
        if like:
            shutil.copytree(like, path)
        return path

    def train(self, out, prepare=lambda: None, env=None, stdout=None, more=(), **changes):
        values = {**TINY, "dataset": self.data, "out_dir": out, "resume": "auto", **changes}
        return Child(self.work, [*(f"--{k}={v}" for k, v in values.items()), *more], prepare, env, stdout)

    def command(self, name, *arguments, prepare=lambda: None, env=None):
        return Child(self.work, [str(a) for a in arguments], prepare, env, command=name)

    def wait_for_log(self, child, out, size=0):
        """Until the log of a run is so long, or the run takes too long; returns its path."""
        log = os.path.join(out, "log.jsonl")
        while child.started + SECONDS > time.monotonic() and not (os.path.exists(log) and os.path.getsize(log) >= size):
            time.sleep(0.005)
        return log

    def outcome(self, child, out, reference=None):
        """Of a run that should have come to its end."""
        child.wait()
        if child.code != 0:
            bad = refusal(child)
            return ("failed", bad) if bad else ("refused", "")
        try:
            if same(result(out), reference or self.reference):
                return "survived", ""
        except Exception as e:
            return "failed", f"unreadable result: {e}"
        log = os.path.join(out, "log.jsonl")
        if child.has_no_kernel():
            return "refused", "another kernel"
        text = open(log).read()
        said = os.path.exists(log + ".damaged") or "it is gone" in text or "was changed by another program" in text
        return ("refused", "kept aside") if said else ("failed", "silent change")

    def resumed(self, out):
        return self.outcome(self.train(out), out)



def flip(data, rng):
    data = bytearray(data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def tree(folder):
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(path, name), "rb") as f:
                found[name] = f.read()
    return found


# -- a process that is killed where it hurts most

DEADLY = ("fsync", "replace", "link", "unlink", "write")


def deadly(name, nth, before):
    """prepare() of a Child that is killed at its nth call of os.<name>, before or after it; write: in the middle of a write."""
    def prepare():
        calls = [0]

        def due():
            calls[0] += 1
            return calls[0] == nth

        def die():
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "write":
            real_open = builtins.open
            builtins.open = lambda file, mode="r", *a, **k: (
                Torn(real_open(file, mode, *a, **k), due, die) if "b" in mode and set("wa") & set(mode) else
                real_open(file, mode, *a, **k))
            return
        real = getattr(os, name)

        def call(*args, **kwargs):
            now = due()
            if now and before:
                die()
            value = real(*args, **kwargs)
            if now:
                die()
            return value
        setattr(os, name, call)
    return prepare


class Torn:
    """A file of which half of some write reaches the disk."""

    def __init__(self, file, due, die):
        self.__dict__.update(file=file, due=due, die=die)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, data):
        if self.due():
            self.file.flush()
            os.write(self.file.fileno(), bytes(data)[:len(data) // 2])
            self.die()
        return self.file.write(data)
