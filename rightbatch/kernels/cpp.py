"""The C++ kernels as torch operators, compiled at first use. Their autograd is in C++, too: through Python a norm layer spends
as long on the way into the kernel as in it.
"""

import functools
import os
import types

import torch

from rightbatch.kernels import build


def operators(*names):
    """These operators of the library, by name; RuntimeError or OSError says why they cannot be had."""
    ops, error = _library()
    if error is not None:
        raise error
    return types.SimpleNamespace(**{name: getattr(ops, name).default for name in names})   # no search for the overload


@functools.cache
def _library():
    """(operators, None), or (None, error): what failed once is not compiled again."""
    ops = torch.ops.rightbatch_cpu
    try:
        path = os.path.realpath(build.build())
        if hasattr(ops, "norm") and path not in torch.ops.loaded_libraries:
            raise RuntimeError("another build of it is loaded in this process")   # torch would end the process
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as e:
        return None, e
    return ops, None
