"""A CUDA device that is not there: fake_cuda.cpp, compiled once, and what torch asks for in Python.

    with pretended() as launches: step.accumulate(...)       # shapes, dtypes and devices; no numbers
    compiled(launches[0], arch=90)                           # the kernel that this launch would have got on an H100

To be loaded in a process of its own (LD_PRELOAD), before torch, which asks once whether there is CUDA: `inside` starts one.
"""

import contextlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import types
from typing import NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_cuda.cpp")
A100 = types.SimpleNamespace(name="A100", major=8, minor=0, multi_processor_count=108, total_memory=80 << 30,
                             L2_cache_size=40 << 20, warp_size=32, regs_per_multiprocessor=65536,
                             max_threads_per_multi_processor=2048, max_threads_per_block=1024,
                             shared_memory_per_block=48 << 10, shared_memory_per_block_optin=163 << 10)


def build(folder):
    """The library, or (None) why not."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        return None, "no C++ compiler for the fake CUDA device"
    torch_dir, path = os.path.dirname(torch.__file__), os.path.join(folder, "fake_cuda.so")
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_dir}/include", SOURCE, "-o", path,
               f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_dir}/lib"]
    done = subprocess.run(command, capture_output=True, text=True)
    return (path, None) if done.returncode == 0 else (None, f"the fake CUDA device does not compile: {done.stderr[-300:]}")


def here():
    """Whether this process has the device."""
    return "fake_cuda.so" in os.environ.get("LD_PRELOAD", "")


def inside(*command):
    """The exit code of a Python command in a process that has the device."""
    with tempfile.TemporaryDirectory() as folder:
        library, why_not = build(folder)
        if library is None:
            print(why_not)
            return 2
        return subprocess.run([sys.executable, *command], env={**os.environ, "LD_PRELOAD": library}).returncode


class Event:
    def __init__(self, enable_timing=False):
        self.record = self.synchronize = lambda: None
        self.elapsed_time = lambda other: 1.0


class Launched(NamedTuple):
    """A launch of a Triton kernel that was not made."""
    name: str
    arguments: dict  # by name
    grid: tuple
    kernel: object
    given: tuple  # positional arguments, and those by name, options among them
    named: dict


class Kernel:
    """A Triton kernel whose launches are checked against its signature and kept."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **named):
            own = {k: v for k, v in named.items() if k in self.kernel.arg_names}
            bound = inspect.signature(self.kernel.fn).bind(*args, **own).arguments
            for name, value in bound.items():
                if isinstance(value, torch.Tensor):
                    assert value.is_cuda and (value.is_contiguous() or "stride" in bound), name
            assert all(isinstance(n, int) and n > 0 for n in grid)
            self.launches.append(Launched(self.kernel.fn.__name__, bound, grid, self.kernel, args, named))
        return launch


class Pointer:
    """What Triton asks of a tensor: its dtype, and whether it is aligned."""

    def __init__(self, tensor):
        self.dtype, self.offset = tensor.dtype, tensor.storage_offset() * tensor.element_size()

    def data_ptr(self):
        return 4096 + self.offset

    def ptr_range(self):
        return 0


def triton_driver(arch):
    """Triton believes that this GPU is there."""
    import triton
    from triton.backends.compiler import GPUTarget
    driver = types.SimpleNamespace(get_current_device=lambda: arch, get_current_stream=lambda device: 0,
                                   get_current_target=lambda: GPUTarget("cuda", arch, 32))
    return mock.patch.object(triton.runtime.driver, "_active", driver)


def compiled(launched, arch):
    """The kernel that Triton makes for the arguments of a launch: its own binder, specialisation and compiler."""
    def seen(value):
        return Pointer(value) if isinstance(value, torch.Tensor) else value
    with triton_driver(arch):
        return launched.kernel.run(*map(seen, launched.given), grid=launched.grid, warmup=True,
                                   **{name: seen(value) for name, value in launched.named.items()})


class NoHostSync(TorchDispatchMode):
    """A copy from the device to the host waits for the device. .item(), bool, float and nonzero fail on fake tensors anyway."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        results = [a for a in torch.utils._pytree.tree_leaves(out) if isinstance(a, torch.Tensor)]
        if any(t.is_cuda for t in tensors) and any(t.is_cpu for t in results):
            raise AssertionError(f"host sync: {func}")
        return out


@contextlib.contextmanager
def pretended(compiling=False):
    """Fake tensors on "cuda", Triton kernels that check their arguments, and no copy to the host. compiling: without that last
    one, under which torch.compile traces nothing; a graph has no way to the host anyway."""
    from rightbatch.kernels import head_triton, ln_triton
    launches = []
    with contextlib.ExitStack() as stack:
        def put(place, name, value):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        for name, value in dict(_initialized=True, is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1,
                                is_bf16_supported=lambda *_, **__: True, Event=Event, synchronize=lambda *_: None,
                                get_device_properties=lambda *_: A100, device_of=lambda t: contextlib.nullcontext(),
                                get_device_capability=lambda *_: (A100.major, A100.minor),
                                _get_device_properties=lambda *_: A100, default_generators=(torch.default_generator,),
                                _exchange_device=lambda i: 0, _maybe_exchange_device=lambda i: 0,
                                get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8), set_rng_state=lambda *_: None,
                                get_device_name=lambda *_: "a GPU that is not there").items():
            put(torch.cuda, name, value)
        put(torch._C, "_cuda_getDevice", lambda: 0)
        put(torch.version, "cuda", torch.version.cuda or "13.0")
        put(ln_triton, "try_launch", lambda: None)
        for module in (ln_triton, head_triton):
            for name in [n for n in vars(module) if n.endswith("_kernel")]:
                put(module, name, Kernel(getattr(module, name), launches))
        stack.enter_context(FakeTensorMode())
        if compiling:   # the state of a generator that is not there cannot be part of a graph
            from torch._functorch import config
            stack.enter_context(config.patch(graphsafe_rng_functionalization=False))
        else:
            stack.enter_context(NoHostSync())
        yield launches
