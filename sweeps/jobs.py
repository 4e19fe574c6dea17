"""
Runs of train.py, several at a time, each in a folder of its own and continued where it was.
"""

import contextlib
import dataclasses
import functools
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

import configurator
from configurator import ConfigError
from system import cores, files
from trainer import checkpoint, log

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")


def arguments(parser):
    parser.add_argument("--jobs", default="1", help="runs at a time, each on its share of the cores, or on a GPU of its own")
    parser.add_argument("--in_process", action="store_true", help="for runs of seconds: no process for each")


def run_training(config, alone=True, start=subprocess.Popen, **changes):
    """train.py with `config` and changes to it, in a process of its own or, for runs of seconds, in this one; what it
    printed goes to train.out."""
    values = {**vars(config), "wandb_log": False, **changes}
    os.makedirs(values["out_dir"], exist_ok=True)
    arguments = [f"--{k}={v}" for k, v in values.items()]
    words = os.path.join(values["out_dir"], "train.out")
    checkpoint.unshare(words)
    with open(words, "a", encoding="utf-8") as out:
        if not alone:
            import train
            with contextlib.redirect_stdout(out):
                code = train.main(arguments)
            if code >= 128:  # train.py took the signal and saved
                raise KeyboardInterrupt
            if code:
                raise ConfigError(f"{values['out_dir']}: it ended without a finite loss")
            return
        process = start([sys.executable, TRAIN, *arguments], stdout=out, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                        text=True)
        try:
            message = process.communicate()[1].strip().splitlines()
        except BaseException:  # Ctrl-C here: let it save
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise ConfigError(f"{values['out_dir']}: train.py ended with {process.returncode}: {(message or ['no message'])[-1]}")


def tokens_done(out_dir):
    """Where the checkpoint of a run stands; -1 if there is none."""
    return checkpoint.load(out_dir, mmap=True)["state"]["tokens"] if checkpoint.saved_in(out_dir) else -1


def visible_gpus():
    """Their names for CUDA_VISIBLE_DEVICES."""
    n = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(i) for i in range(n)])[:n]


class Group:
    """Several runs {name: Config}, one folder each under `folder`: finished ones are not run again, broken ones go on."""

    def __init__(self, wanted, folder, at_once=1, alone=True, env=None):
        if at_once < 1:
            raise ConfigError(f"--jobs={at_once}: at least one run at a time")
        # one run per GPU, each on the next that is free; on a CPU they share the cores
        gpus = visible_gpus() if alone and all(c.device in ("auto", "cuda") for c in wanted.values()) else []
        self.at_once = min(at_once, max(1, len(wanted)), len(gpus) or at_once)
        self.free = queue.SimpleQueue()
        for gpu in gpus or [None] * self.at_once:
            self.free.put(gpu)
        self.folder, self.alone = folder, alone
        self.wanted = {name: dataclasses.replace(c, out_dir=os.path.join(folder, name)) for name, c in wanted.items()}
        self.failed, self.children, self.lock = {}, set(), None
        self.env = {**os.environ, **(env or {})}
        if self.at_once > 1:
            self.env.setdefault("OMP_NUM_THREADS", str(max(1, cores.usable_cores() // self.at_once)))

    def left(self):
        """{name: tokens to go} of the runs that are not finished. A folder with a run of other settings is an error."""
        left = {}
        for name, config in self.wanted.items():
            if checkpoint.saved_in(config.out_dir):
                same_settings(config, configurator.read_run(config.out_dir))
            if (done := tokens_done(config.out_dir)) < config.end_tokens():
                left[name] = config.end_tokens() - max(0, done)
        return left

    def do(self, after_each=lambda: None, before=lambda: None):
        """Run what is missing, in a folder that is this process's alone. Interrupted, the runs save their checkpoints, and
        KeyboardInterrupt goes on to the caller."""
        with files.only_writer(self.folder, ConfigError) as self.lock:
            before()
            names = list(self.left())
            print(f"{len(self.wanted) - len(names)} of {len(self.wanted)} runs are done, {len(names)} to do, "
                  f"{self.at_once} at a time", flush=True)
            ended = functools.partial(self.report, self.tokens(), time.monotonic(), after_each)
            if not self.alone:
                for name in names:
                    self.one(name)
                    ended(name)
                return
            pool = ThreadPoolExecutor(self.at_once)
            try:
                running = {pool.submit(self.one, name): name for name in names}
                for future in as_completed(running):
                    future.result()
                    ended(running[future])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in list(self.children):
                    child.terminate()  # train.py saves and leaves
                raise
            finally:
                pool.shutdown(wait=True)

    def do_all(self, **how):
        """The same; a run that fails is an error."""
        self.do(**how)
        if self.failed:
            raise ConfigError(f"{len(self.failed)} of {len(self.wanted)} runs failed, {next(iter(self.failed.values()))}")

    def one(self, name):
        config, gpu = self.wanted[name], self.free.get()
        start = functools.partial(self.start, env=self.env if gpu is None else {**self.env, "CUDA_VISIBLE_DEVICES": gpu})
        try:
            run_training(config, self.alone, start, resume="auto", wandb_log=config.wandb_log)
            self.failed.pop(name, None)
        except ConfigError as e:
            self.failed[name] = str(e)
        except SystemExit:  # in this process, a ConfigError has been said already
            self.failed[name] = "see above"
        finally:
            self.free.put(gpu)

    def start(self, command, **options):
        # the lock goes to the child: if this process is killed, nobody starts the same run a second time while it goes on
        child = subprocess.Popen(command, pass_fds=[self.lock] if self.lock else [], **options)
        self.children.add(child)
        return child

    def tokens(self):
        """Tokens of all runs so far, from their logs."""
        return sum(newest(config.out_dir).get("tokens", 0) for config in self.wanted.values())

    def report(self, before, started, after_each, name):
        """One line about a run that has ended, and how far the sweep is."""
        now, whole = self.tokens(), sum(c.end_tokens() for c in self.wanted.values())
        last = newest(self.wanted[name].out_dir, "val/loss")
        said = f"failed: {self.failed[name]}" if name in self.failed else (
            f"validation loss {last['val/loss']:.4f}" if last else "done")
        done = sum(newest(c.out_dir).get("tokens", 0) >= c.end_tokens() for c in self.wanted.values())
        rate = (now - before) / (time.monotonic() - started)
        left = f", {log.duration(max(0, whole - now) / rate)} left" if rate else ""
        print(f"{name}: {said} | {done} of {len(self.wanted)} done, {min(1, now / whole):.0%} of the tokens{left}", flush=True)
        after_each()


def newest(out_dir, key="tokens"):
    """The last row of a run's log that has `key`; {} if there is none."""
    try:
        return next((row for row in reversed(log.read(out_dir)) if row.get(key) is not None), {})
    except (OSError, ConfigError):  # only to say how far it is
        return {}


def same_settings(config, old):
    free = configurator.free_keys()
    differ = [k for k, v in vars(config).items() if k not in free and getattr(old, k) != v]
    if differ:
        listed = ", ".join(f"{k} is {getattr(config, k)!r}, there it is {getattr(old, k)!r}" for k in differ)
        raise ConfigError(f"{config.out_dir} holds a run with other settings: {listed}; give another --out_dir, or remove it")
