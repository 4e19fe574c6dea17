"""
How a run of several processes ends before its end: on every process, within seconds and in words.

A rank that is killed: gloo notices at once (the connection breaks); NCCL would wait for its timeout. So each rank has a thread,
the Watchdog, that counts a number up in the store of the rendezvous and looks at its neighbour's; one that has stood still for
Watchdog.LIMIT seconds ends the run. It needs no launcher: ranks started by hand or by srun are watched just as well. torchrun,
where it is there, ends the others faster, and with --max-restarts starts all again; resume='auto' then goes on from the last
checkpoint.

A rank that fails: end(error, watchdog) says it once, whoever meets it.
"""

import datetime
import json
import os
import re
import sys
import threading
import time
import traceback

import torch.distributed as dist

from system import errors
from system.errors import ConfigError

TIMEOUT = datetime.timedelta(minutes=30)  # of a collective: longer than rank 0 may take to write a checkpoint
COMMUNICATION = re.compile(r"gloo|nccl|connection|broken pipe|socket|store", re.IGNORECASE)


def world_size() -> int:
    """The number of processes of this run, from torchrun's environment."""
    return environment("WORLD_SIZE", 1, least=1)


def environment(name, default=None, least=0) -> int:
    """A whole number that the launcher sets."""
    text = os.environ.get(name, default)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number < 2**31:
        raise ConfigError(f"{name}={text} in the environment: expected a whole number of at least {least}: start with "
                          f"torchrun, or unset {name}")
    return number


def connect(keeps_store=False, timeout=TIMEOUT):
    """The store where ranks meet: torchrun keeps it, or else rank 0. torchrun may keep it over a restart, with the addresses of
    dead ranks in it (its static rendezvous, torch 2.13), so every attempt has keys of its own."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=keeps_store, timeout=timeout,
                          wait_for_workers=False)
    return dist.PrefixStore(f"rightbatch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Watchdog(threading.Thread):
    """Ends this process, in words, when another one of the run is gone. Keys in the store: beat/<rank>, a number that a living
    rank counts up; dead, what happened, once somebody knows; error/<rank>, what a rank is about to leave with."""

    BEAT = 1.0  # seconds
    LIMIT = 30.0  # standing still for so long is death; a busy machine may stall a thread for some seconds

    def __init__(self, rank, world):
        super().__init__(daemon=True, name="watchdog")
        self.rank, self.world, self.closing, self.lock = rank, world, threading.Event(), threading.Lock()
        self.store = connect()  # of its own: the group's is busy while the main thread waits for something in it
        self.store.set(f"beat/{rank}", "0")
        for other in range(world):
            self.store.wait([f"beat/{other}"], datetime.timedelta(seconds=60))
        self.start()

    def run(self):
        """Each rank looks at the next one only; what it finds goes to all through `dead`."""
        neighbour = (self.rank + 1) % self.world
        beat, seen, since = 0, None, time.monotonic()
        while not self.closing.wait(self.BEAT):
            beat += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beat))
                now = self.store.get(f"beat/{neighbour}")
                dead = self.store.get("dead").decode() if self.store.check(["dead"]) else None
            except RuntimeError:
                if self.closing.is_set():
                    return
                self.end("rank 0 (or the launcher), which keeps the rendezvous, is gone")
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.LIMIT:
                dead = dead or f"rank {neighbour} has not answered for {self.LIMIT:.0f} seconds"
                self.tell(dead)
            if dead:
                time.sleep(2 * self.BEAT)  # the main thread may be about to say it better, or be the one that failed
                self.end(dead)

    def tell(self, what):
        try:
            if not self.store.check(["dead"]):
                self.store.set("dead", what)
        except RuntimeError:
            pass

    def who_died(self):
        """After a broken connection: who stands still. Takes some beats."""
        def beats():
            return [self.store.get(f"beat/{r}") for r in range(self.world)]
        try:
            before = beats()
            for _ in range(5):
                time.sleep(self.BEAT)
                if self.store.check(["dead"]):
                    return self.store.get("dead").decode()
            still = [str(r) for r, (a, b) in enumerate(zip(before, beats())) if a == b]
        except RuntimeError:
            return "rank 0 (or the launcher), which keeps the rendezvous, is gone"
        if not still:
            return None
        self.tell(f"rank {' and rank '.join(still)} died (killed, or failed: its own output says why)")
        return self.store.get("dead").decode()

    def end(self, what):
        with self.lock:  # one thread speaks, and does not come back
            print(f"rank {self.rank} of {self.world}: {what}; this process ends, too. The same command with --resume=auto goes "
                  "on from the last checkpoint", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def close(self):
        self.closing.set()
        self.join()


# -- a rank that fails

def end(error, watchdog=None):
    """Say why the run ends, and end this process, with the others. Returns where one process met a bug, whose traceback Python
    prints."""
    words = errors.explain(error)
    if isinstance(error, ConfigError) or (words and not watchdog):
        report(words, watchdog)
    elif watchdog:
        fail(error, words, watchdog)


def fail(error, words, watchdog):
    """An error of this rank: say on every rank what happened to which one, and leave now."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and COMMUNICATION.search(str(error))):
        watchdog.end(watchdog.who_died() or f"communication failed ({first_line})")
    if words:
        print(f"error: rank {watchdog.rank}: {words}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    watchdog.tell(f"rank {watchdog.rank} failed: {type(error).__name__}: {first_line}")
    leave(1)


def report(words, watchdog):
    """An error that the user can mend: one line, from rank 0, unless it is this rank's alone.

    torchrun writes half a screen about each process that fails. So the others, with the same error as rank 0, leave first
    and quietly; what torchrun then says is about rank 0 and ends with the error itself (its error file). torch's own `record`
    would put a traceback there."""
    try:
        world, rank = world_size(), environment("RANK", 0)
    except ConfigError:
        world = 1  # the error itself, most likely
    if not watchdog and not (world > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        errors.die(words)  # one process, or no place yet where they could meet
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if rank == 0:
        print(f"error: {words}", file=sys.stderr, flush=True)
    same = exchange(watchdog, rank, world, words).get(0) == words
    if rank > 0 and not same:
        print(f"error: rank {rank}: {words}", file=sys.stderr, flush=True)
    if rank == 0:
        time.sleep(0.5)  # it may keep the store that the others are reading
    elif error_file and same and os.environ.get("LOCAL_RANK") != "0":  # one process of each machine fails
        leave(0)
    if error_file:
        with open(error_file, "w", encoding="utf-8") as f:
            json.dump({"message": {"message": f"error: {words}", "extraInfo": {"timestamp": str(int(time.time()))}}}, f)
    leave(2)


def leave(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: taking down a process group whose members are gone can wait for ever


def exchange(watchdog, rank, world, mine, seconds=10):
    """What the ranks leave with, as far as known within some seconds: {rank: message}."""
    said = {}
    try:
        store = watchdog.store if watchdog else connect(timeout=datetime.timedelta(seconds=seconds))
        store.set(f"error/{rank}", mine)
        deadline = time.monotonic() + seconds
        while len(said) < world and time.monotonic() < deadline:
            for r in range(world):
                if r not in said and store.check([f"error/{r}"]):
                    said[r] = store.get(f"error/{r}").decode()
            time.sleep(0.05)
        if watchdog:
            watchdog.tell(f"rank {rank} left: {mine}")
    except RuntimeError:
        pass
    return said
