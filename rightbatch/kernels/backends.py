"""Who computes the norm layers: BACKENDS, which of them impl="auto" means on a device, and who takes a call.

A further backend is one more entry in BACKENDS. Its functions have the arguments and results of ln_kernel's ref:

    forward(x, branch or None, weight, bias, eps, rms, out_dtype) -> x + branch or None, y, stats
    backward(dtotal or None, dy, what was normalised, weight, stats, metric, rms, has_bias, tracked, branch_dtype or None)
        -> dx, dbranch, dweight, dbias, sq, each or None

and, where it has them,

    norm(x, branch or None, weight, bias, probe, metric, eps, rms) -> x + branch or None, y       with autograd of its own
    tap(dy, x, eps, rms, bias) -> (B, C or 2C)                        each example's gradient of weight(, bias), from x and dy
    try_launch()                                                      raises where no kernel runs
"""

import dataclasses
import functools
import importlib.util
import itertools
import os
import textwrap
import types
import warnings
from collections.abc import Callable

import torch

from rightbatch import ln_kernel

REF = "ref"   # takes what no other does


@dataclasses.dataclass(eq=False)
class Backend:
    """What it needs is imported, compiled and tried when it is first used."""

    name: str
    devices: tuple          # types of device it runs on; (): any
    dtypes: frozenset       # pairs of x's and y's that it takes; empty: any
    load: Callable          # -> an object with the functions above, or an error that says what is missing
    why: str                # to take it
    optional: bool = False  # asked for by name where it cannot be had, ref takes over; others raise their error

    functions = functools.cached_property(lambda self: self.load())
    forward = functools.cached_property(lambda self: self.functions.forward)   # attributes after their first use: norm
    backward = functools.cached_property(lambda self: self.functions.backward)   # layers ask at each call
    norm = functools.cached_property(lambda self: getattr(self.functions, "norm", None))
    tap = functools.cached_property(lambda self: getattr(self.functions, "tap", None))

    @functools.cached_property
    def available(self):
        """(whether it works here, why or why not). Tried once; a failure is said once."""
        try:
            getattr(self.functions, "try_launch", bool)()
        except Exception as e:   # whatever a compiler, a driver or an import raises
            warnings.warn(f"norm layers use plain torch, several times slower: {e}", stacklevel=2)
            return False, textwrap.shorten(str(e), 300)
        return True, self.why


def _load_cpu():
    from rightbatch.kernels import cpp
    try:
        return cpp.operators("norm", "forward", "backward", "tap")
    except (OSError, RuntimeError) as e:
        raise RuntimeError(f"no C++ kernel ({e})") from e


def _load_triton():
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("triton is not installed: install the version that this torch requires")
    from rightbatch.kernels import ln_triton
    return ln_triton


_float, _half, _bf16 = torch.float32, torch.float16, torch.bfloat16
BACKENDS = {backend.name: backend for backend in (   # of those for a device, "auto" means the first that works
    Backend(REF, (), frozenset(), lambda: types.SimpleNamespace(forward=ln_kernel.ref_forward, backward=ln_kernel.ref_backward),
            "plain torch"),
    Backend("cpu", ("cpu",), frozenset({(_float, _float), (_float, _bf16), (_bf16, _bf16)}), _load_cpu,
            "compiled C++ kernel; bench.py kernel compares it with torch's own", optional=True),
    Backend("triton", ("cuda", "cpu") if os.environ.get("TRITON_INTERPRET") == "1" else ("cuda",),
            frozenset(itertools.product((_float, _half, _bf16), repeat=2)), _load_triton,
            "fused Triton kernel (not yet measured on a GPU)"),
)}


@functools.cache
def choose(kind):
    """(name, reason) of what "auto" means on this type of device."""
    reasons = []
    for backend in BACKENDS.values():
        if kind in backend.devices:
            works, reason = backend.available
            if works:
                return backend.name, reason
            reasons.append(reason)
    return REF, "plain torch: " + ("; ".join(reasons) or f"no kernel for {kind}")


def resolve(impl, kind, dtype, out_dtype):
    """The backend that takes a call with x on this type of device, of this dtype, and y of that."""
    name = choose(kind)[0] if impl == "auto" else impl
    if name not in BACKENDS:
        raise ValueError(f"unknown impl {name!r}: expected one of auto, {', '.join(BACKENDS)}, torch")
    backend = BACKENDS[name]
    if backend.devices and kind not in backend.devices:
        raise ValueError(f"impl={name!r} needs a {backend.devices[0].upper()} tensor, got one on {kind}")
    takes = not backend.dtypes or (dtype, out_dtype) in backend.dtypes
    return backend if takes and (not backend.optional or backend.available[0]) else BACKENDS[REF]
