"""
Runs of train.py, several at a time, each in a folder of its own and continued where it was.
"""

import contextlib
import dataclasses
import functools
import os
import queue
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait

import torch

import configurator
from configurator import ConfigError
from system import cores, files
from trainer import checkpoint, log

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")


def arguments(parser):
    parser.add_argument("--jobs", default="1", help="runs at a time, each on its share of the cores, or on a GPU of its own")
    parser.add_argument("--in_process", action="store_true", help="for runs of seconds: no process for each")


def read_config(run):
    """The Config of a run folder."""
    return configurator.read_run(run)


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


class Devices:
    """Where runs at the same time go: one per GPU, each to the next that is free. On a CPU they share the cores."""

    def __init__(self, at_once, runs, device="auto"):
        if at_once < 1:
            raise ConfigError(f"--jobs={at_once}: at least one run at a time")
        at_once = min(at_once, max(1, runs))
        ids = visible_gpus() if device in ("auto", "cuda") else []
        self.at_once, self.free = min(at_once, len(ids) or at_once), queue.SimpleQueue()
        for name in ids or [None] * at_once:
            self.free.put(name)
        if at_once > self.at_once:
            print(f"--jobs={at_once}: {self.at_once} at a time, one per GPU", flush=True)

    @contextlib.contextmanager
    def one(self):
        """What a run's environment needs for its device."""
        name = self.free.get()
        try:
            yield {} if name is None else {"CUDA_VISIBLE_DEVICES": name}
        finally:
            self.free.put(name)


def visible_gpus():
    """Their names for CUDA_VISIBLE_DEVICES."""
    n = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return (named or [str(i) for i in range(n)])[:n]


def run_all(jobs, at_once):
    """Call all functions, `at_once` of them at a time; the first error ends it."""
    if at_once == 1:
        return [job() for job in jobs]
    with ThreadPoolExecutor(at_once) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


class Group:
    """Several runs {name: Config}, one folder each under `folder`: finished ones are not run again, broken ones go on."""

    def __init__(self, wanted, folder, at_once=1, alone=True, env=None):
        device = next((config.device for config in wanted.values()), "auto")
        self.devices = Devices(at_once, len(wanted), device if alone else "cpu")
        at_once = self.devices.at_once
        self.folder, self.at_once, self.alone = folder, at_once, alone
        self.wanted = {name: dataclasses.replace(c, out_dir=os.path.join(folder, name)) for name, c in wanted.items()}
        self.failed, self.children, self.lock = {}, set(), None
        self.env = {**os.environ, **(env or {})}
        if at_once > 1:
            self.env.setdefault("OMP_NUM_THREADS", str(max(1, cores.usable_cores() // at_once)))

    def missing(self):
        """Names of the runs that are not finished. A folder with a run of other settings is an error."""
        names = []
        for name, config in self.wanted.items():
            if checkpoint.saved_in(config.out_dir):
                same_settings(config, read_config(config.out_dir))
            if tokens_done(config.out_dir) < end_of(config):
                names.append(name)
        return names

    def do(self, after_each=lambda: None):
        """Run what is missing. Interrupted, the runs save their checkpoints, and KeyboardInterrupt goes on to the caller."""
        names = self.missing()
        print(f"{len(self.wanted) - len(names)} of {len(self.wanted)} runs are done, {len(names)} to do, "
              f"{self.at_once} at a time", flush=True)
        before, started = self.tokens(), time.monotonic()
        with files.only_writer(self.folder, ConfigError) as self.lock:
            if not self.alone:
                for name in names:
                    self.one(name)
                    self.report(name, before, started)
                    after_each()
                return
            pool = ThreadPoolExecutor(self.at_once)
            try:
                running = {pool.submit(self.one, name): name for name in names}
                while running:
                    done, _ = wait(running, timeout=5, return_when="FIRST_COMPLETED")
                    for future in done:
                        future.result()
                        self.report(running.pop(future), before, started)
                        after_each()
                    if running and sys.stdout.isatty():
                        print(f"\r\033[K{self.state(before, started)}", end="", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in list(self.children):
                    child.send_signal(signal.SIGTERM)  # train.py saves and leaves
                raise
            finally:
                pool.shutdown(wait=True)

    def one(self, name):
        config = self.wanted[name]
        try:
            with self.devices.one() as env:
                start = functools.partial(self.start, env={**self.env, **env})
                run_training(config, self.alone, start, resume="auto", wandb_log=config.wandb_log)
            self.failed.pop(name, None)
        except ConfigError as e:
            self.failed[name] = str(e)
        except SystemExit:  # in this process, a ConfigError has been said already
            self.failed[name] = "see above"

    def start(self, command, **options):
        # the lock goes to the child: if this process is killed, nobody starts the same run a second time while it goes on
        child = subprocess.Popen(command, pass_fds=[self.lock] if self.lock else [], **options)
        self.children.add(child)
        return child

    def tokens(self):
        """Tokens of all runs so far, from their logs: {name: tokens}."""
        return {name: newest(config.out_dir).get("tokens", 0) for name, config in self.wanted.items()}

    def state(self, before, started):
        """How far the sweep is, in words."""
        now, all_tokens = self.tokens(), sum(end_of(c) for c in self.wanted.values())
        fresh = sum(now.values()) - sum(before.values())
        left = max(0, all_tokens - sum(now.values()))
        done = sum(now[name] >= end_of(config) for name, config in self.wanted.items())
        rate = fresh / (time.monotonic() - started)
        return (f"{done} of {len(self.wanted)} done, {min(1, sum(now.values()) / all_tokens):.0%} of the tokens"
                + (f", {log.duration(left / rate)} left" if rate else ""))

    def report(self, name, before, started):
        bad = self.failed.get(name)
        last = newest(self.wanted[name].out_dir, "val/loss")
        said = f"failed: {bad}" if bad else f"validation loss {last['val/loss']:.4f}" if last else "done"
        print(("\r\033[K" if sys.stdout.isatty() else "") + f"{name}: {said} | {self.state(before, started)}", flush=True)


def end_of(config):
    """Tokens at which a run is finished."""
    return min(config.stop_tokens or config.max_tokens, config.max_tokens)


def newest(out_dir, key="tokens"):
    """The last row of a run's log that has `key`; {} if there is none."""
    try:
        return next((row for row in reversed(log.read(out_dir)) if row.get(key) is not None), {})
    except (OSError, ConfigError):  # only to say how far it is
        return {}


def same_settings(config, old, free=None):
    free = configurator.free_keys() if free is None else free
    differ = [k for k, v in vars(config).items() if k not in free and getattr(old, k) != v]
    if differ:
        listed = ", ".join(f"{k} is {getattr(config, k)!r}, there it is {getattr(old, k)!r}" for k in differ)
        raise ConfigError(f"{config.out_dir} holds a run with other settings: {listed}; give another --out_dir, or remove it")
