"""LayerNorm and RMSNorm whose backward pass also yields every example's squared gradient norm.

    y = layer_norm(x, weight, bias, probe)      # x (B, ..., C), an example is one index of the first dimension
    y = rms_norm(x, weight, probe)
    x, y = norm(x, weight, bias, probe, branch=branch)         # x + branch and its norm, as residual streams need them
    y.backward(...);  probe.grad                # (2, B) for layer_norm: row 0 weight, row 1 bias; (1, B) for rms_norm

`probe` is float32 zeros that require grad. The gradient it gets is not that of a zero: it is |c_b|^2, where c_b is what
example b adds to weight.grad (bias.grad). With a mean loss c_b = g_b / B: the caller undoes that (tracker.py). A norm
layer needs c_b on the way to weight.grad anyway, so its length costs one pass over B * C numbers and no pass over x.
With `metric` p (2, C) (rms_norm: (1, C)) the probe has twice the rows; the second half gets sum_j p_j c_bj^2.
`probe=None` runs the same kernels: output and all other gradients are the same bits.

Implementations (`impl`), the same arithmetic each (rightbatch/kernels/backends.py):
    ref     plain torch. Any device, float64 too. The oracle that the others are tested against
    cpu     rightbatch/kernels/cpp.py: C++, compiled at first use
    triton  rightbatch/kernels/ln_triton.py, for CUDA. Tested in Triton's interpreter and compiled for sm_80, sm_90 and
            sm_100, but never run on a real GPU
    torch   F.layer_norm / F.rms_norm, without probe: what the others are compared with
    auto    choose_impl(device)

Under autocast the output has the autocast dtype (x may be the float32 residual stream), which saves the next linear
its cast. Mean, rstd and norms are float32 throughout, float64 for float64 x.

B examples, C channels, rows = all dimensions but the last flattened, T = rows / B, c = (B, C) per-example gradients.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- public functions

def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, probe: Tensor | None = None, eps: float = 1e-5,
               impl: str = "auto", metric: Tensor | None = None) -> Tensor:
    """It computes F.layer_norm over the last dimension; probe (2, B), or (4, B) with a metric (2, C), gets squared norms."""
    return norm(x, weight, bias, probe, metric, eps=eps, impl=impl)[1]


def rms_norm(x: Tensor, weight: Tensor, probe: Tensor | None = None, eps: float = 1e-5, impl: str = "auto",
             metric: Tensor | None = None) -> Tensor:
    """It computes F.rms_norm over the last dimension; probe (1, B), or (2, B) with a metric (1, C), gets squared norms."""
    return norm(x, weight, None, probe, metric, rms=True, eps=eps, impl=impl)[1]


def norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, probe: Tensor | None = None, metric: Tensor | None = None,
         branch: Tensor | None = None, rms: bool = False, eps: float = 1e-5, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """It returns x + branch, or x where there is no branch, and the norm of that. The kernels do both in one pass, and in one
    pass backward."""
    if impl == "torch":
        if probe is not None:
            raise ValueError("impl='torch' has no per-example norms: pass probe=None, or use impl='auto'")
        x = x if branch is None else x + branch
        return x, F.rms_norm(x, weight.shape, weight, eps) if rms else F.layer_norm(x, weight.shape, weight, bias, eps)
    kind = "cpu" if x.is_cpu else x.device.type
    out_dtype = _output_dtype(x, kind)
    if branch is not None and (branch.shape != x.shape or branch.dtype != out_dtype or
                               x.dtype not in (out_dtype, torch.float32)):   # no kernel adds it
        return norm(x + branch, weight, bias, probe, metric, None, rms, eps, impl)
    _check(x, weight, probe, metric, rms)
    tensors = x, branch, weight, bias, probe, metric
    if torch.compiler.is_compiling():
        name = _resolve_name(impl, kind, x.dtype, out_dtype)
        if name != "ref":
            total, y, _ = norm_forward_op(*tensors, eps, rms, out_dtype, name)
        else:   # the compiler looks into these functions: it can fuse them
            total, y = _apply(*tensors, (eps, rms, out_dtype, ref_forward, ref_backward))
    else:
        backend = _resolve(impl, kind, x.dtype, out_dtype)
        if backend.norm is not None:
            total, y = backend.norm(*tensors, eps, rms)
        else:
            total, y = _apply(*tensors, (eps, rms, out_dtype, backend.forward, backend.backward))
    return x if branch is None else total, y


def choose_impl(device: torch.device | str) -> tuple[str, str]:
    """It returns (name, reason) of what impl="auto" uses on this device."""
    from rightbatch.kernels import backends
    return backends.choose(torch.device(device).type)


# ---- what the arguments mean

def _output_dtype(x, kind):
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _check(x, weight, probe, metric, rms):
    shape, kinds = x.shape, 1 if rms else 2
    if len(shape) < 2 or weight.shape != shape[-1:]:
        raise ValueError(f"expected x (B, ..., C) and weight (C,), got {tuple(shape)} and {tuple(weight.shape)}")
    if metric is not None and metric.shape != (kinds, shape[-1]):
        raise ValueError(f"expected metric {(kinds, shape[-1])}, got {tuple(metric.shape)}")
    rows = kinds if metric is None else 2 * kinds
    if probe is not None and probe.shape != (rows, shape[0]):
        raise ValueError(f"expected probe {(rows, shape[0])} for x {tuple(shape)}, got {tuple(probe.shape)}")


@functools.cache   # every norm layer asks, at each call
def _resolve(impl, kind, dtype, out_dtype):
    from rightbatch.kernels import backends
    return backends.resolve(impl, kind, dtype, out_dtype)


@torch.compiler.assume_constant_result   # decided while tracing, never traced: it may run a C++ compiler
def _resolve_name(*args):
    return _resolve(*args).name


# ---- ref: plain torch

def ref_forward(x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rms: bool,
                out_dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
    """It returns x + branch (None without a branch), y, and stats (1 or 2, rows): rstd(, mean)."""
    total = x if branch is None else x + branch
    acc = torch.promote_types(x.dtype, torch.float32)
    centred = total.to(acc)
    mean = [] if rms else [centred.mean(-1, keepdim=True)]
    if not rms:
        centred = centred - mean[0]
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return None if branch is None else total, y.to(out_dtype), torch.stack([rstd, *mean]).flatten(1)


def ref_backward(dtotal: Tensor | None, dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, metric: Tensor | None, rms: bool,
                 has_bias: bool, tracked: bool, branch_dtype: torch.dtype | None) -> tuple[Tensor | None, ...]:
    """It returns dx, dbranch, dweight, dbias and sq, None for what is not there. x: what was normalised; dtotal: what arrives
    for x + branch from its other uses."""
    acc, B, C = stats.dtype, x.shape[0], x.shape[-1]
    rstd, *mean = stats.view(-1, *x.shape[:-1], 1)
    d, centred = dy.to(acc), x.to(acc)
    xhat = (centred if rms else centred - mean[0]) * rstd
    g = d * weight.to(acc)
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if not rms:
        dx = dx - g.mean(-1, keepdim=True)
    dx = (dx * rstd).to(x.dtype)
    if dtotal is not None:
        dx = dx + dtotal

    c = [(d * xhat).reshape(B, -1, C).sum(1)]
    if has_bias:
        c.append(d.reshape(B, -1, C).sum(1))
    elif not rms:
        c.append(torch.zeros_like(c[0]))
    dw, db = c[0].sum(0).to(weight.dtype), c[1].sum(0).to(weight.dtype) if has_bias else None
    sq = None
    if tracked:
        weighed = () if metric is None else [(v.square() * p).sum(-1) for v, p in zip(c, metric)]
        sq = torch.stack([*(v.square().sum(-1) for v in c), *weighed])
    return dx, None if branch_dtype is None else dx.to(branch_dtype), dw, db, sq


# ---- autograd of the backends that have none of their own

def _keep(ctx, x, branch, weight, bias, probe, metric, rms, total, stats):
    ctx.save_for_backward(x if branch is None else total, weight, stats, metric)
    ctx.args = rms, bias is not None, probe is not None, None if branch is None else branch.dtype
    ctx.set_materialize_grads(False)


def _gradients(ctx, differentiate, dtotal, dy):
    """dx, dbranch, dweight, dbias, sq."""
    if dy is None:   # of both results the sum alone was used
        return dtotal, None if dtotal is None else dtotal.to(ctx.args[3]), None, None, None
    x, weight, stats, metric = ctx.saved_tensors
    return differentiate(dtotal, dy, x, weight, stats, metric, *ctx.args)


class _Norm(torch.autograd.Function):
    """ref and triton in eager mode. The custom op below does the same, but with twice the overhead per call; cpu has its
    autograd in C++, for a CPU's calls are as short as the way through Python."""

    @staticmethod
    def forward(ctx, x, branch, weight, bias, probe, metric, settings):
        eps, rms, out_dtype, compute, ctx.differentiate = settings   # one argument: each has its price
        total, y, stats = compute(x, branch, weight, bias, eps, rms, out_dtype)
        _keep(ctx, x, branch, weight, bias, probe, metric, rms, total, stats)
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        if torch.is_grad_enabled():   # what once_differentiable is for, at a tenth of its price
            raise RuntimeError("the norm layers' backward pass cannot be differentiated again: create_graph=True needs "
                               "norm_impl='torch'")
        return *_gradients(ctx, ctx.differentiate, dtotal, dy), None, None


# Function.apply without its look for functorch transforms, which this function does not have rules for anyway
_below: Any = super(torch.autograd.Function, _Norm)
_apply = _below.apply


# ---- the same as one pair of custom ops, opaque to torch.compile: no graph break. An op cannot return None, nor a tensor twice

@functools.cache
def _backend(name):
    from rightbatch.kernels import backends
    return backends.BACKENDS[name]


@torch.library.custom_op("rightbatch::norm_forward", mutates_args=())
def norm_forward_op(x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, probe: Tensor | None,
                    metric: Tensor | None, eps: float, rms: bool, out_dtype: torch.dtype,
                    impl: str) -> tuple[Tensor, Tensor, Tensor]:
    total, y, stats = _backend(impl).forward(x, branch, weight, bias, eps, rms, out_dtype)
    return x.new_empty(0) if branch is None else total, y, stats


@norm_forward_op.register_fake
def _(x, branch, weight, bias, probe, metric, eps, rms, out_dtype, impl):
    acc, rows = torch.promote_types(x.dtype, torch.float32), x.numel() // x.shape[-1]
    return (x.new_empty(0 if branch is None else x.shape), x.new_empty(x.shape, dtype=out_dtype),
            x.new_empty((1 if rms else 2, rows), dtype=acc))


@torch.library.custom_op("rightbatch::norm_backward", mutates_args=())
def norm_backward_op(dtotal: Tensor | None, dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, metric: Tensor | None,
                     rms: bool, has_bias: bool, tracked: bool, branch_dtype: torch.dtype | None,
                     impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = _backend(impl).backward(dtotal, dy, x, weight, stats, metric, rms, has_bias, tracked, branch_dtype)
    dx, dbranch, dw, db, sq = (x.new_empty(0) if g is None else g for g in grads)
    return dx, x.new_empty(0) if branch_dtype == x.dtype else dbranch, dw, db, sq


@norm_backward_op.register_fake
def _(dtotal, dy, x, weight, stats, metric, rms, has_bias, tracked, branch_dtype, impl):
    rows = (1 if rms else 2) * (1 if metric is None else 2)
    same = branch_dtype in (None, x.dtype)
    return (x.new_empty(x.shape), x.new_empty(0 if same else x.shape, dtype=None if same else branch_dtype),
            weight.new_empty(weight.shape), weight.new_empty(weight.shape) if has_bias else x.new_empty(0),
            stats.new_empty((rows, x.shape[0])) if tracked else x.new_empty(0))


def _setup_context(ctx, inputs, output):
    x, branch, weight, bias, probe, metric, _, rms, _, ctx.impl = inputs
    total, _, stats = output
    _keep(ctx, x, branch, weight, bias, probe, metric, rms, total, stats)


def _op_backward(ctx, dtotal, dy, _):
    def differentiate(dtotal, dy, x, *args):
        dx, dbranch, dw, db, sq = norm_backward_op(dtotal, dy, x, *args, ctx.impl)
        _, has_bias, tracked, branch_dtype = ctx.args
        dbranch = dx if branch_dtype == x.dtype else dbranch if branch_dtype else None
        return dx, dbranch, dw, db if has_bias else None, sq if tracked else None
    return *_gradients(ctx, differentiate, dtotal, dy), *[None] * 5


norm_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
