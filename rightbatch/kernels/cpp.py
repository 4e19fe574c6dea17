"""The C++ kernels as torch operators, compiled at first use. Their autograd is in C++, too: through Python a norm layer spends
as long on the way into the kernel as in it.
"""

import functools
import os
import types
from pathlib import Path

import torch

from rightbatch.kernels import build


def operators(*names):
    """These operators of the library, by name; RuntimeError or OSError says why they cannot be had."""
    ops, error, _ = _library()
    if error is not None:
        raise error
    return types.SimpleNamespace(**{name: getattr(ops, name).default for name in names})   # no search for the overload


def identity():
    """Which library it is, the first digits of its SHA-256; None where none can be had."""
    return _library()[2]


@functools.cache
def _library():
    """(operators, None, identity), or (None, error, None): what failed once is not compiled again."""
    ops = torch.ops.rightbatch_cpu
    try:
        path = os.path.realpath(build.build())
        if hasattr(ops, "norm") and path not in torch.ops.loaded_libraries:
            raise RuntimeError("another build of it is loaded in this process")   # torch would end the process
        torch.ops.load_library(path)
        digest = build.digest_of(Path(path)).read_text()
    except (OSError, RuntimeError) as e:
        return None, e, None
    return ops, None, digest[:12]
