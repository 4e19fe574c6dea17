"""What every case of the attack stands on: a command in a fork of this process, a run to compare with, what is a refusal."""

import builtins
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback

from tests import helpers

TINY = {**helpers.TINY, "n_layer": 1, "max_tokens": 6400, "gns_calibrate": True, "dropout": 0.1}
SECONDS = 60  # a case that takes longer hangs
CHECKPOINTS = "ckpt.pt", "ckpt.1.pt", "ckpt.best.pt"
GARBAGE = ["", "-1", "0", "1e400", "9" * 25, "9" * 400, "9" * 5000, "nan", "-inf", "1e18", "1e9", "True", "None", "()",
           "(" * 300, "(1,", "[1, 'a']", "{}", "'", "\\", "ä", "\udcff", "a\nb", "/dev/null", "/dev/zero", "..", "x" * 5000,
           "0x10", "1_0", "1j", "0.5"]
TEXTS = [b"", b"\0", b"\xff\xfe", b"\0" * 4096, b"[" * 100_000, b"{}", b"[]", b"null", b"1", b'"x"', b"raise KeyError",
         b"import sys; sys.exit(3)", b"batch_size = 10**400", b"seed = 9e999", b"lr = 1", b"out_dir = 'a\\0b'",
         b"n_layer = print", b"1e9999999 8", b"0 1e9999999", b"0 8\n0 8", b"0:8"]
HOSTILE = [None, 0, -1, 1, 2, 0.5, 1e300, -1e300, 10**20, 2**62, True, "x", [], {}]  # for a value of a JSON file


# -- how a case ends: it returns where all that comes out is what comes out without the attack

class FailedError(Exception):
    """Something is lost, wrong in silence, or without words."""


class RefusedError(Exception):
    """It ended with one line of words, or said what is lost."""


class UntriedError(Exception):
    """Nothing could be tried: no disk may be mounted here, or nobody could have noticed."""


def expect(good, words):
    """A case fails, with these words, unless something is as it should be."""
    if not good:
        raise FailedError(words)


# -- processes

class Child:
    """main(arguments) of a command, train.py if not told otherwise, in a fork of this process."""

    def __init__(self, work, arguments, prepare=lambda: None, env=None, command="train"):
        self.errors, self.output = (os.path.join(work, f"{name}-{random.random()}") for name in ("stderr", "stdout"))
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            os.dup2(os.open(self.output, os.O_WRONLY | os.O_CREAT), 1)
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
        self.kill(signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.code = None
        return None

    def kill(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def ended(self):
        """Whether it is over; it can still be waited for."""
        return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))

    def error(self):
        return read(self.errors)

    def has_no_kernel(self):
        """Whether it says that no kernel could be had: then it rightly computes other bits."""
        return "norm layers: ref" in read(self.output) or "norm layers use plain torch" in self.error()

    def refused(self, about="", names=""):
        """It must have ended with one line of words, which name a path where one is given."""
        wrong = refusal(self)
        if not wrong and names not in self.error():
            wrong = f"names no file: {self.error()[-150:]!r}"
        expect(not wrong, f"{about}: {wrong}")

    def answered(self, about="", codes=(0,), names="", seconds=SECONDS):
        """It may have done what was asked; else it must have been refused, which ends the case."""
        if self.wait(seconds) not in codes or "Traceback" in self.error():
            self.refused(about, names)
            raise RefusedError


def read(path):
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as f:
        return f.read()
    return ""


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


# -- the oracle

def result(out):
    """What a run leaves: rows without times, and weights."""
    from trainer import checkpoint
    return helpers.untimed(out), checkpoint.load(out)["model"]


class Harness:
    def __init__(self, work, rng):
        self.work, self.rng, self.number, self.made = work, rng, 0, {}
        ids = [0]
        for step in random.Random(0).choices([1, 3, 7], k=4999):
            ids.append((ids[-1] + step) % 64)
        self.data = helpers.write_dataset(os.path.join(work, "data"), ids[:4000], ids[4000:], vocab_size=64)
        self.whole, self.stopped = self.run(), self.run(stop_tokens=3200)  # the latter with some checkpoints, half of the way
        self.reference = result(self.whole)

    def once(self, name, make):
        """What several cases need, made by the first of them."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def chance(self, share):
        return self.rng.random() < share

    def folder(self, like=None):
        self.number += 1
        path = os.path.join(self.work, str(self.number))
        if like:
            shutil.copytree(like, path)
        return path

    def some_folder(self, share=0.5):
        """A new one, or that of a run that was stopped half of the way."""
        return self.folder(self.stopped if self.chance(share) else None)

    def train(self, out, prepare=lambda: None, env=None, more=(), **changes):
        values = {**TINY, "dataset": self.data, "out_dir": out, "resume": "auto", **changes}
        return Child(self.work, [*helpers.as_args(values), *more], prepare, env)

    def run(self, **changes):
        """The folder of a run without an attack."""
        out = self.folder()
        expect(self.train(out, **changes).wait() == 0, "a run without an attack")
        return out

    def command(self, name, *arguments, prepare=lambda: None, env=None):
        return Child(self.work, [str(a) for a in arguments], prepare, env, name)

    def some_command(self, asked, **how):
        """(one of such commands, which is started, its words)"""
        words = self.rng.choice(asked)
        return self.command(*words, **how), " ".join(map(str, words))

    def pause(self, *seconds):
        """A random time between two, or one of several."""
        time.sleep(self.rng.uniform(*seconds) if len(seconds) == 2 else self.rng.choice(seconds))

    def wait_for_log(self, child, out, size=0):
        """Until the log of a run is so long, or the run takes too long; returns its path."""
        log = os.path.join(out, "log.jsonl")
        while child.started + SECONDS > time.monotonic() and not (os.path.exists(log) and os.path.getsize(log) >= size):
            time.sleep(0.005)
        return log

    def came_to_its_end(self, child, out, reference=None, about=""):
        """A run that was attacked: bit for bit the run without the attack, or refused."""
        if child.wait() != 0:
            child.refused(about)
            raise RefusedError
        try:
            if helpers.same_tensors(result(out), reference or self.reference):
                return
        except Exception as e:
            changed = "was changed by another program" in read(os.path.join(out, "log.1.jsonl"))
            raise (RefusedError() if changed else FailedError(f"{about}: unreadable result: {e}")) from None
        said = "the log begins anew" in read(os.path.join(out, "log.jsonl"))
        expect(said or child.has_no_kernel(), f"{about}: silent change")
        raise RefusedError

    def resumed(self, out, reference=None, **changes):
        self.came_to_its_end(self.train(out, **changes), out, reference)


# -- damage

def flip(data, rng):
    data = bytearray(data)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def rewrite(path, change):
    """A file of its own (names of one file share their damage) with change(its content), or none for None."""
    with open(path, "rb") as f:
        data = change(f.read())
    os.unlink(path)
    if data is not None:
        with open(path, "wb") as f:
            f.write(data)


def damage(path, rng):
    """Zeros, a cut, nothing at all, foreign content, a flipped bit."""
    def change(data):
        at = rng.randrange(max(1, len(data)))
        return rng.choice([data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096:], data[:at], None, rng.choice(TEXTS),
                           data[:at] + b"garbage\n" + data[at:], flip(data or b"x", rng)])
    with contextlib.suppress(FileNotFoundError):
        rewrite(path, change)


def change_values(path, rng):
    """Values of a JSON file, or of rows of a log, that are no such values; keys that are gone."""
    try:
        with open(path) as f:
            lines = [f.read()] if path.endswith(".json") else f.read().splitlines()
        if not all(isinstance(json.loads(line), dict) for line in lines):
            return
    except (OSError, ValueError, RecursionError):  # damaged already
        return
    for _ in range(rng.choice([1, 3, 30])):
        i = rng.randrange(len(lines))
        whole = json.loads(lines[i])
        if not whole:
            break
        change_a_value(whole, rng, HOSTILE, deeper=0.6, gone=0.2)
        lines[i] = json.dumps(whole)
    rewrite(path, lambda _: "".join(line + "\n" for line in lines).encode())


def change_a_value(where, rng, values, deeper, gone):
    """One value somewhere in a dictionary of dictionaries becomes another, or is gone."""
    while rng.random() < deeper and (inner := [v for v in where.values() if isinstance(v, dict) and v]):
        where = rng.choice(inner)
    key = rng.choice(list(where) or ["new"])
    if rng.random() < gone:
        where.pop(key, None)
    else:
        where[key] = rng.choice(values)


# -- a process that is killed where it hurts most

def deadly(rng, writes, others):
    """prepare() of a Child that is killed at one of its first calls of os.fsync and the like, before or after it, or in the
    middle of a write to a file."""
    name, before = rng.choice(["fsync", "replace", "link", "unlink", "write"]), rng.random() < 0.5
    nth = rng.randint(1, writes if name == "write" else others)
    calls = iter(range(1, 1 << 30))

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        if name == "write":
            real_open = builtins.open
            builtins.open = lambda file, mode="r", *a, **k: (
                Torn(real_open(file, mode, *a, **k), lambda: next(calls) == nth, die) if "b" in mode and set("wa") & set(mode)
                else real_open(file, mode, *a, **k))
            return
        real = getattr(os, name)

        def call(*args, **kwargs):
            due = next(calls) == nth
            if due and before:
                die()
            value = real(*args, **kwargs)
            if due:
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
