"""
What this machine is and what it is good at: device, number format, cores, memory, and how fast its matrix products are.
"""

import contextlib
import ctypes
import math
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
import warnings

import torch

from configurator import ConfigError
from system.cores import usable_cores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name):
    cuda, why_not = cuda_available()
    available = {"cpu": True, "cuda": cuda, "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(d for d in ("cuda", "mps", "cpu") if available[d])
        if why_not and os.environ.get("RANK", "0") == "0":
            print(f"the GPU is not used, {name} is: {why_not}", file=sys.stderr, flush=True)
    if not available[name]:
        there = [d for d, ok in available.items() if ok]
        raise ConfigError(f"device={name!r} is not there; this machine has {', '.join(there)}"
                          + (f" ({why_not})" if name == "cuda" and why_not else ""))
    return name


def cuda_available():
    """(whether torch can use a GPU, why it cannot use one that is there, or None). Torch itself warns, in a paragraph."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        return True, None
    said = next((" ".join(str(w.message).split()) for w in caught if "CUDA" in str(w.message)), None)
    if said:
        return False, said.split(" (Triggered")[0]
    if torch.version.cuda is None and os.path.exists("/dev/nvidia0"):
        return False, f"torch {torch.__version__} is built without CUDA: install the build of pypi.org"
    return False, None


def idle_gpus(device, world, argv):
    """What to type to use all GPUs of this machine, or None where they are used."""
    n = torch.cuda.device_count() if device == "cuda" and world == 1 else 1
    words = f"one of {n} GPUs is used; all: torchrun --nproc_per_node={n} train.py {shlex.join(argv)}"
    return words.rstrip() if n > 1 else None


def pick_dtype(name, device):
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if fast_bfloat16(device) else torch.float32


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


def fast_bfloat16(device):
    """Whether the device has bf16 matrix instructions; without them a CPU is a hundred times slower than in fp32."""
    if device == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device == "cpu":
        capabilities = torch.cpu.get_capabilities()
        return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return False


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
    """FLOP/s of a square matrix product, the best of a fraction of a second: what 100% MFU means on this machine."""
    if device == "cpu":
        return cpu_ceiling(dtype, seconds)
    n = 4096  # a GPU draws less power for ones, and clocks higher, than for data; a generator of its own leaves the run's alone
    random = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=random).to(dtype) for _ in range(2))
    best, stop = math.inf, clock() + seconds
    while clock() < stop or best == math.inf:
        synchronize(device)
        start = clock()
        a @ b
        synchronize(device)
        best = min(best, clock() - start)
    return 2 * n**3 / best


def cpu_ceiling(dtype, seconds, n=1024):
    """The sum over as many threads as torch has, each with products of its own, in the CPU time of that thread: what another
    process takes of the cores at that moment does not count."""
    threads, found = torch.get_num_threads(), []
    together = threading.Barrier(threads)

    def measure():
        torch.set_num_threads(1)  # of this thread
        a, b = (torch.ones(n, n, dtype=dtype) for _ in range(2))  # not randn: the run's RNG stays untouched
        a @ b
        together.wait()
        times, stop = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < stop:
            start = time.thread_time()
            a @ b
            times.append(time.thread_time() - start)
        found.append(2 * n**3 / min(times))

    workers = [threading.Thread(target=measure) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    torch.set_num_threads(threads)
    return sum(found)


def total_memory(device):
    """Bytes of the device; None where that is not known."""
    if device == "cuda":
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device == "cpu" else None
    except (AttributeError, ValueError, OSError):
        return None


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


def facts(device):
    """Versions and machine, for config.json: enough to know later where a number came from."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=root, capture_output=True,
                             text=True, timeout=10)
        commit = git.stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        commit = None
    return {"commit": commit, "python": sys.version.split()[0], "torch": torch.__version__,
            "platform": platform.platform(), "cores": usable_cores(), "threads": torch.get_num_threads(),
            "device": device_name(device), **(gpu_facts() if device == "cuda" else {})}


def device_name(device):
    return torch.cuda.get_device_name() if device == "cuda" else cpu_name() if device == "cpu" else device


def gpu_facts():
    p = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"cuda": torch.version.cuda, "multiprocessors": p.multi_processor_count, "memory_bytes": p.total_memory,
            "l2_bytes": getattr(p, "L2_cache_size", None), "gpus": torch.cuda.device_count()}


def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
