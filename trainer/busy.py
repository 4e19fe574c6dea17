"""
Other processes on the cores that this run computes on.

A run's threads wait for each other many times in a step, and spin while they wait. Where another process has taken the core of
one of them, the others spin for as long as it keeps it, and the run crawls. So a run looks what others use of its cores, once a
second at most. As long as they do, its threads sleep while they wait. The number of threads stays, and with it the order of
sums: every bit is the same.

How: libgomp, which torch's CPU builds bring, lets threads spin for a short moment only where it manages more of them than there
are cores. IdleTeam makes it so: one more thread, with a team of its own, that does nothing.
"""

import os
import threading
import time
from dataclasses import dataclass

import torch

TAKEN, FREE = 0.3, 0.1  # cores in use by others: from so many on threads sleep, below so many they spin again
SECONDS = 1.0  # between two looks
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass
class Usage:
    """A moment: the clock, and CPU seconds since some start, of everybody on our cores and of this process."""
    clock: float
    everybody: float
    own: float


def usage(path="/proc/stat"):
    """Now; None where the system does not say."""
    try:
        with open(path) as f:
            everybody = cpu_seconds(f.read(), os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):
        return None
    times = os.times()
    return Usage(time.monotonic(), everybody, times.user + times.system + times.children_user + times.children_system)


def cpu_seconds(text, cores):
    """Seconds that these cores were at work, from /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
    ticks = 0
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            numbers = [int(n) for n in numbers[:8]]
            ticks += sum(numbers) - sum(numbers[3:5])
    return ticks / TICK


def taken_by_others(before, after):
    """Cores that others used between two moments."""
    seconds = after.clock - before.clock
    return max(0.0, (after.everybody - before.everybody) - (after.own - before.own)) / seconds


class IdleTeam:
    """A second team of OpenMP threads that does nothing, as long as it is held."""

    def __init__(self):
        self.made, self.done = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.hold, daemon=True, name="idle team")
        self.thread.start()
        self.made.wait()

    def hold(self):
        torch.ones(1 << 20).sum()  # large enough to be shared among threads
        self.made.set()
        self.done.wait()

    def release(self):
        self.done.set()
        self.thread.join()


class Cores:
    """What a run does about its neighbours. One process on a CPU; several have one thread each, which wait otherwise."""

    def __init__(self, threads, look=usage, team=IdleTeam):
        self.threads, self.usage, self.make_team = threads, look, team
        self.before, self.team, self.said = look() if threads > 1 else None, None, False

    def look(self):
        """Called often. Words for the user, once, or None."""
        if self.before is None or time.monotonic() - self.before.clock < SECONDS:
            return None
        now = self.usage()
        if now is None:
            return None
        taken, self.before = taken_by_others(self.before, now), now
        if self.team and taken < FREE:
            self.close()
        elif not self.team and taken >= TAKEN:
            self.team = self.make_team()
            if not self.said:
                self.said = True
                return (f"other processes use {taken:.1f} of the cores. From now on this run's {self.threads} threads sleep "
                        "while they wait for each other, instead of spinning: slower than alone, the same bits")
        return None

    def close(self):
        if self.team:
            self.team.release()
            self.team = None
