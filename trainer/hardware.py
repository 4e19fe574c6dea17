"""
What this machine is and what it is good at: device, number format, cores, memory, and how fast its matrix products are.
"""

import contextlib
import ctypes
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch

from system.cores import usable_cores
from system.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> str:
    """The device that a setting names; auto takes the best of this machine."""
    cuda, why_not = cuda_available()
    there = [d for d, ok in (("cuda", cuda), ("mps", torch.backends.mps.is_available()), ("cpu", True)) if ok]
    if name == "auto":
        if why_not and os.environ.get("RANK", "0") == "0":
            print(f"the GPU is not used, {there[0]} is: {why_not}", file=sys.stderr, flush=True)
        return there[0]
    if name not in there:
        raise ConfigError(f"device={name!r} is not there; this machine has {', '.join(reversed(there))}"
                          + (f" ({why_not})" if name == "cuda" and why_not else ""))
    return name


def cuda_available() -> tuple[bool, str | None]:
    """(whether torch can use a GPU, why it cannot use one that is there, or None). Torch itself warns, in a paragraph."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    warned = next((" ".join(str(w.message).split()) for w in caught if "CUDA" in str(w.message)), None)
    if warned and not available:
        return False, warned.split(" (Triggered")[0]
    if not available and torch.version.cuda is None and os.path.exists("/dev/nvidia0"):
        return False, f"torch {torch.__version__} is built without CUDA: install the build of pypi.org"
    return available, None


def idle_gpus(device, world, argv):
    """What to type to use all GPUs of this machine, or None where they are used."""
    n = torch.cuda.device_count() if device == "cuda" and world == 1 else 1
    words = f"one of {n} GPUs is used; all: torchrun --nproc_per_node={n} train.py {shlex.join(argv)}"
    return words.rstrip() if n > 1 else None


def pick_dtype(name, device):
    """The number format; auto takes bfloat16 where the device has instructions for it: without them a CPU is a hundred times
    slower than in float32."""
    if name != "auto":
        return DTYPES[name]
    capabilities = torch.cpu.get_capabilities() if device == "cpu" else {}
    fast = (torch.cuda.is_bf16_supported(including_emulation=False) if device == "cuda" else
            capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.bfloat16 if fast else torch.float32


def prepare(config, device):
    """The number format of a run; threads, memory and TF32 as it wants them."""
    if device == "cpu":
        prepare_cpu()
    elif config.tf32:
        torch.set_float32_matmul_precision("high")
    if config.deterministic and device == "cuda":
        make_deterministic()
    return pick_dtype(config.dtype, device)


def make_deterministic():
    """The same bits from the same numbers on a GPU. Without it sums run in the order in which threads arrive: in the backward
    pass of embeddings as Inductor compiles it, and of attention. An operation that has no such form is named in a warning.

    cuBLAS works in a workspace of fixed size, which it reads from the environment at its first product. Of the attention
    kernels flash alone has a deterministic backward pass; float32, which flash does not take, is left with the plain form."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which it would do to find bugs
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    from torch._inductor import config
    config.deterministic = True  # choose kernels by rule, not by a race


def autocast(device, dtype):
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def prepare_cpu():
    """As many threads as usable cores, and freed memory kept: glibc would give each large activation back to the kernel
    and fault it in again, zeroed, at the next step."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    if platform.libc_ver()[0] == "glibc":
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def matmul_ceiling(device, dtype, seconds=0.1, clock=time.perf_counter):
    """FLOP/s of a square matrix product, the best of a fraction of a second: what 100% MFU means on this machine.

    On a CPU it is the sum over as many threads as torch has, each with products of its own, in the CPU time of that thread:
    what another process takes of the cores at that moment does not count."""
    cpu = device == "cpu"
    n, threads, timer = (1024, torch.get_num_threads(), time.thread_time) if cpu else (4096, 1, clock)
    together = threading.Barrier(threads)

    def measure(_=None):
        if cpu:
            torch.set_num_threads(1)  # of this thread
        # a GPU draws less power for ones, and clocks higher, than for data. The run's own random numbers stay untouched
        random = None if cpu else torch.Generator(device).manual_seed(0)
        a, b = (torch.ones(n, n) if cpu else torch.randn(n, n, device=device, generator=random) for _ in range(2))
        a, b, times = a.to(dtype), b.to(dtype), []
        a @ b
        together.wait()
        stop = clock() + seconds
        while len(times) < 3 or clock() < stop:
            synchronize(device)
            start = timer()
            a @ b
            synchronize(device)
            times.append(timer() - start)
        return 2 * n**3 / min(times)
    if not cpu:
        return measure()  # in this thread, which has chosen its GPU
    with ThreadPoolExecutor(threads) as pool:
        rates = list(pool.map(measure, range(threads)))
    torch.set_num_threads(threads)
    return sum(rates)


def total_memory(device):
    """Bytes of the device; None where that is not known."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None


def synchronize(device):
    if device != "cpu":
        getattr(torch, device).synchronize()


def facts(device):
    """Versions and machine, for config.json: enough to know later where a number came from."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True,
                             text=True, timeout=10)
        commit = git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    known = {"commit": commit, "python": sys.version.split()[0], "torch": torch.__version__,
             "platform": platform.platform(), "cores": usable_cores(), "threads": torch.get_num_threads(),
             "device": device_name(device)}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        known |= {"cuda": torch.version.cuda, "multiprocessors": gpu.multi_processor_count, "memory_bytes": gpu.total_memory,
                  "l2_bytes": getattr(gpu, "L2_cache_size", None), "gpus": torch.cuda.device_count()}
    return known


def device_name(device):
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name() if device == "cpu" else device


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
