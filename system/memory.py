"""
Memory: of this machine, of this process, and of one step.
"""

import contextlib
import os
import sys


def available() -> int | None:
    """Bytes that this machine could give to a new process; None where that is not known."""
    return line_of("/proc/meminfo", "MemAvailable")


def now() -> int | None:
    """Bytes that this process holds; None where that is not known."""
    return line_of("/proc/self/status", "VmRSS")


def peak() -> int:
    """The most bytes that this program has held."""
    most = line_of("/proc/self/status", "VmHWM")  # ru_maxrss would also remember the process that started it
    if most is None:
        import resource
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return most


def line_of(path, key):
    """The bytes that a line of one of Linux's files names; None elsewhere."""
    try:
        with open(path) as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key + ":"))
    except (OSError, StopIteration):
        return None


def peak_bytes(run, warm_up: bool = True, device: str = "cpu") -> int:
    """Largest number of bytes that torch's allocator held during one call, above what it held before: exact, unlike RSS."""
    import torch
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    from torch.profiler import ProfilerActivity, profile
    if warm_up:
        run()
    with silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        held += e.nbytes()
        most = max(most, held)
    return most


@contextlib.contextmanager
def silent_stderr():
    """The profiler's C++ side chats on file descriptor 2."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
