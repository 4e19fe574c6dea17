"""
Whether other processes want the cores that this run computes on. Its threads wait for each other many times in a step, and
while they wait they spin. Where another process has taken the core of one, all others wait for it: with one more process on
two cores a run may be ten times slower, and one thread would be faster than two.

The number of threads decides the order of sums, so it is never changed in a run: the user is told, once, and what to type.
"""

import os
import time
from dataclasses import dataclass

TAKEN = 0.3  # cores in use by others, from which on it is said: less is what any machine does in the background
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
    own = times.user + times.system + times.children_user + times.children_system
    return None if everybody is None else Usage(time.monotonic(), everybody, own)


def cpu_seconds(text, cores):
    """Seconds that these cores were not idle, from /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal, ..."""
    ticks = 0
    for line in text.splitlines():
        name, *numbers = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            numbers = [int(n) for n in numbers[:8]]
            ticks += sum(numbers) - sum(numbers[3:5])
    return ticks / TICK


def taken_by_others(before, after):
    """Cores that others used between two moments; 0 where that is not known."""
    if before is None or after is None or after.clock - before.clock < 0.1:
        return 0.0
    return max(0.0, (after.everybody - before.everybody) - (after.own - before.own)) / (after.clock - before.clock)


def words(taken, threads, cores, out_dir):
    """What to tell the user, or None: who computes with one thread waits for nobody, and free cores harm nobody."""
    if threads == 1 or taken < TAKEN or taken + threads < cores + TAKEN:
        return None
    fewer = max(1, min(threads - 1, int(cores - taken)))
    return (f"other processes use {taken:.1f} of {cores} cores: {threads} threads that wait for each other are slow then. "
            f"Faster: Ctrl-C, and OMP_NUM_THREADS={fewer} python train.py {out_dir}")
