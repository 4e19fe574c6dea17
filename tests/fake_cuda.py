"""A CUDA device that is not there: fake_cuda.cpp, compiled once, and what torch asks for in Python.

    with pretended(): step.accumulate(...)       # shapes, dtypes and devices; no numbers

To be loaded in a process of its own (LD_PRELOAD), before torch, which asks once whether there is CUDA.
"""

import contextlib
import inspect
import os
import shutil
import subprocess
import types
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_cuda.cpp")


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


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self):
        pass

    def elapsed_time(self, other):
        return 1.0


class Launch:
    """A Triton kernel whose launch is checked against its signature and not made."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, enable_fp_fusion=True, **named):
            bound = inspect.signature(self.kernel.fn).bind(*args, **named).arguments
            for name, value in bound.items():
                if isinstance(value, torch.Tensor):
                    assert value.is_cuda and (value.is_contiguous() or "stride" in bound), name
            assert all(isinstance(n, int) and n > 0 for n in grid)
            self.launches.append((self.kernel.fn.__name__, bound))
        return launch


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
def pretended(launches=None):
    """Fake tensors on "cuda", Triton kernels that check their arguments, and no copy to the host."""
    from rightbatch.kernels import ln_triton
    from trainer import head_triton
    launches = [] if launches is None else launches
    properties = types.SimpleNamespace(multi_processor_count=108, total_memory=80 << 30, L2_cache_size=40 << 20)
    with contextlib.ExitStack() as stack:
        def put(place, name, value):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        for name, value in dict(_initialized=True, is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1,
                                is_bf16_supported=lambda **_: True, Event=Event, synchronize=lambda *_: None,
                                get_device_properties=lambda *_: properties, device_of=lambda t: contextlib.nullcontext(),
                                _exchange_device=lambda i: 0, _maybe_exchange_device=lambda i: 0,
                                get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8), set_rng_state=lambda *_: None,
                                get_device_name=lambda *_: "a GPU that is not there").items():
            put(torch.cuda, name, value)
        put(torch._C, "_cuda_getDevice", lambda: 0)
        put(ln_triton, "try_launch", lambda: None)
        for module in (ln_triton, head_triton):
            for name in [n for n in vars(module) if n.endswith("_kernel")]:
                put(module, name, Launch(getattr(module, name), launches))
        stack.enter_context(FakeTensorMode())
        stack.enter_context(NoHostSync())
        yield launches
