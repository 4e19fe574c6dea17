"""
Norm layers, found by what they do and not by what they are called.

A norm layer computes y = (offset + weight) * xhat + bias, elementwise. Its xhat does not depend on the parameters, is the same
for 2x as for x, and for each example uses that example alone. All of it is tried out on a copy of the module with random
parameters, in float64. Then an example's gradient of weight is sum_t dy xhat, and of bias sum_t dy.
"""

import contextlib
import copy
import functools
import inspect
import random
from dataclasses import dataclass

import numpy as np
import torch

MATRICES = torch.nn.Linear, torch.nn.Embedding, torch.nn.modules.conv._ConvNd
LARGEST = 2**18  # numbers in a weight of several dimensions: what is larger is a matrix, and trying it out would take gigabytes


class WatchError(ValueError):
    """The model, or the way it is trained, has no noise scale that could be measured. The message says what to do."""


@dataclass
class Norm:
    """How a module normalises. `eps` None: neither LayerNorm nor RMSNorm over the last dimension; xhat is then recomputed by
    the module itself, with parameters that leave xhat as it is."""
    shape: torch.Size # of weight and bias
    channels: int      # the dimension of x where weight begins: 1, or -k for the last k
    offset: int        # 1 where a weight of zero means the identity, as in Gemma
    bias: bool
    centred: bool = True
    eps: float | None = None
    plain: object = None  # x -> xhat, where eps is None
    name: str = ""
    copies: bool = False  # what comes behind it writes into its input: keep a copy
    fused: bool = False  # our kernel computes it (fuse.py)


def bare(module, parameters):
    """The forward pass of a copy of the module with other parameters; the module itself stays as it is, no hook of it runs."""
    clone, parameters = twin(module), dict.fromkeys(module._parameters) | parameters  # a bias that is not there stays None
    clone.__dict__ |= {"training": True, "_parameters": parameters}
    return functools.partial(type(module).forward, clone)


def twin(module):
    """A copy of a module, its buffers and its children, without hooks. What it counts or keeps is none of the module's."""
    def own(value):
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return copy.copy(value) if isinstance(value, (dict, list, set)) else value
    clone = object.__new__(type(module))  # copy.copy would ask FSDP, which refuses
    clone.__dict__ = {name: {} if name.endswith("_hooks") else own(value) for name, value in vars(module).items()
                      if name != "forward"}
    clone.__dict__ |= {"_buffers": {name: own(value) for name, value in module._buffers.items()},
                       "_modules": {name: child and twin(child) for name, child in module._modules.items()}}
    return clone


@contextlib.contextmanager
def no_trace():
    """Leave the global generators as they were, whatever a module that is tried draws from them."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def recognise(module):
    """A Norm, or a word on why it is none, or None where it does not look like one at all."""
    if isinstance(module, MATRICES):
        return None
    parameters = {k: p for k, p in module._parameters.items() if p is not None}
    shapes = {p.shape for p in parameters.values()}
    if not 1 <= len(parameters) <= 2 or len(shapes) != 1 or any(p.numel() for c in module.children() for p in c.parameters()):
        return None
    shape = shapes.pop()
    if not 1 <= len(shape) <= 3 or isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
        return None  # BatchNorm has a message of its own
    if len(shape) > 1 and shape.numel() > LARGEST and not isinstance(module, torch.nn.LayerNorm):
        return None
    if type(module).forward is torch.nn.Module.forward:
        return None
    inputs = list(inspect.signature(module.forward).parameters.values())
    others = [p.name for p in inputs[1:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    try:
        with no_trace():
            generator = torch.Generator().manual_seed(0)
            for channels, sizes in layouts(shape):
                norm = try_out(module, list(parameters), shape, channels, sizes, generator)
                if norm and not others:
                    return norm
    except Exception:  # a module that is no norm may do anything with an input of ours
        pass
    gated = others and "norm" in type(module).__name__.lower()
    return f"takes a second input ({', '.join(others)})" if gated else None


def layouts(shape):
    t = 3 if 3 not in shape else 5
    yield -len(shape), (2, t, *shape)
    if len(shape) == 1:
        yield 1, (2, *shape, t, t + 1)
        yield 1, (2, *shape, t)


def try_out(module, names, shape, channels, sizes, generator):
    def run(x, *values):
        return bare(module, {k: v.to(x) for k, v in zip(names, values)})(x.clone())

    def normalise(x):
        return run(x, one, *rest) - run(x, zero, *rest)

    def spread(v):
        return v if channels < 0 else v.view(*shape, *[1] * (len(sizes) - 2))

    x = torch.randn(sizes, dtype=torch.float64, generator=generator)
    zero, one, (w, b) = torch.zeros(shape), torch.ones(shape), torch.randn(2, *shape, generator=generator)
    bias = len(names) == 2
    rest = (zero,) if bias else ()
    try:
        shift = run(x, zero, *rest)  # offset * xhat
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None  # not this layout
    if not isinstance(shift, torch.Tensor) or shift.shape != x.shape:
        return None
    xhat = normalise(x)
    offset = 0 if close(shift, 0 * xhat) else 1
    affine = (offset + spread(w.double())) * xhat + (spread(b.double()) if bias else 0)
    other = torch.cat([x[:1], x.new_ones(1, *sizes[1:])])
    if not (close(run(x, w, *((b,) if bias else ())), affine) and close(shift, offset * xhat)
            and close(normalise(1e4 * x), normalise(2e4 * x)) and close(normalise(other)[0], xhat[0]) and xhat.std() > 0.1):
        return None
    norm = Norm(shape, channels, offset, bias)
    norm.plain = bare(module, dict(zip(names, (one - offset, zero))))
    if channels == -1:
        fit(norm, x, xhat, normalise)
    return norm


def fit(norm, x, xhat, run):
    """eps of LayerNorm or RMSNorm, from an input so small that eps shows: xhat = x / sqrt(mean x^2 + eps)."""
    small = 1e-4 * x
    for centred in (True, False):
        c = small - small.mean(-1, keepdim=True) if centred else small
        rstd = (run(small) * c).sum(-1) / (c * c).sum(-1)  # 1 / sqrt(mean c^2 + eps)
        eps = max(0.0, float((rstd**-2 - c.square().mean(-1)).median()))
        if close(normalised(x, centred, eps), xhat) and close(normalised(small, centred, eps), run(small)):
            norm.centred, norm.eps = centred, eps
            return


def normalised(x, centred, eps):
    c = x - x.mean(-1, keepdim=True) if centred else x
    return c * (c.square().mean(-1, keepdim=True) + eps).rsqrt()


def close(a, b):
    return torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)  # some norms compute in float32 whatever they get
