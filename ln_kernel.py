"""LayerNorm and RMSNorm whose backward pass also yields every example's squared gradient norm.

    y = layer_norm(x, weight, bias, probe)      # x (B, ..., C), an example is one index of the first dimension
    y = rms_norm(x, weight, probe)
    x, y = add_layer_norm(x, branch, weight, bias, probe)      # x + branch and its norm, as residual streams need them
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

import torch
import torch.nn.functional as F
from torch import Tensor

# ---- public functions

def layer_norm(x, weight, bias=None, probe=None, eps=1e-5, impl="auto", metric=None):
    """F.layer_norm over the last dimension; probe (2, B), or (4, B) with a metric (2, C), gets squared norms."""
    return _norm(x, weight, bias, probe, metric, eps, False, impl)


def rms_norm(x, weight, probe=None, eps=1e-5, impl="auto", metric=None):
    """F.rms_norm over the last dimension; probe (1, B), or (2, B) with a metric (1, C), gets squared norms."""
    return _norm(x, weight, None, probe, metric, eps, True, impl)


def add_layer_norm(x, branch, weight, bias=None, probe=None, eps=1e-5, impl="auto", metric=None):
    """x + branch, and layer_norm of it. The kernels do both in one pass, and in one pass backward."""
    return _add_norm(x, branch, weight, bias, probe, metric, eps, False, impl)


def add_rms_norm(x, branch, weight, probe=None, eps=1e-5, impl="auto", metric=None):
    """x + branch, and rms_norm of it."""
    return _add_norm(x, branch, weight, None, probe, metric, eps, True, impl)


def choose_impl(device):
    """(name, reason) of what impl="auto" uses on this device."""
    from rightbatch.kernels import backends
    return backends.choose(torch.device(device).type)


# ---- one path for all: check, pick, apply

def _norm(x, weight, bias, probe, metric, eps, rms, impl):
    if impl == "torch":
        if probe is not None:
            raise ValueError("impl='torch' has no per-example norms: pass probe=None, or use impl='auto'")
        return F.rms_norm(x, weight.shape, weight, eps) if rms else F.layer_norm(x, weight.shape, weight, bias, eps)
    _check(x, weight, probe, metric, rms)
    kind = "cpu" if x.is_cpu else x.device.type
    out_dtype = _output_dtype(x, kind)
    if torch.compiler.is_compiling():
        name = _resolve_name(impl, kind, x.dtype, out_dtype)
        if name != "ref":
            return norm_forward_op(x, weight, bias, probe, metric, eps, rms, out_dtype, name)[0]
        functions = ref_forward, ref_backward   # the compiler looks into them: it can fuse them
    else:
        backend = _resolve(impl, kind, x.dtype, out_dtype)
        if backend.norm is not None:
            return backend.norm(x, weight, bias, probe, metric, eps, rms)
        functions = backend.forward, backend.backward
    return _apply(x, weight, bias, probe, metric, (eps, rms, out_dtype, *functions))


def _add_norm(x, branch, weight, bias, probe, metric, eps, rms, impl):
    if impl != "torch" and branch.shape == x.shape:
        kind = "cpu" if x.is_cpu else x.device.type
        out_dtype = _output_dtype(x, kind)
        if torch.compiler.is_compiling():
            name = _resolve_adding(impl, kind, x.dtype, out_dtype)
            if name is not None and torch.promote_types(x.dtype, branch.dtype) == x.dtype:
                _check(x, weight, probe, metric, rms)
                return add_norm_op(x, branch, weight, bias, probe, metric, eps, rms, out_dtype, name)[:2]
        else:
            backend = _resolve(impl, kind, x.dtype, out_dtype)
            if backend.add_norm is not None and branch.dtype == out_dtype:
                _check(x, weight, probe, metric, rms)
                return backend.add_norm(x, branch, weight, bias, probe, metric, eps, rms)
            if backend.add_forward is not None and torch.promote_types(x.dtype, branch.dtype) == x.dtype:
                _check(x, weight, probe, metric, rms)
                return _AddNorm.apply(x, branch, weight, bias, probe, metric, (eps, rms, out_dtype, backend))
    x = x + branch
    return x, _norm(x, weight, bias, probe, metric, eps, rms, impl)


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


@torch.compiler.assume_constant_result
def _resolve_adding(*args):
    backend = _resolve(*args)
    return None if backend.add_forward is None else backend.name


class _Norm(torch.autograd.Function):
    """ref and triton in eager mode. The custom op below does the same, but with twice the overhead per call; cpu has its
    autograd in C++, for a CPU's calls are as short as the way through Python."""

    @staticmethod
    def forward(ctx, x, weight, bias, probe, metric, settings):
        eps, rms, out_dtype, compute, ctx.differentiate = settings   # one argument: each has its price
        y, stats = compute(x, weight, bias, eps, rms, out_dtype)
        ctx.save_for_backward(x, weight, stats, metric)
        ctx.args = rms, bias is not None, probe is not None
        return y

    @staticmethod
    def backward(ctx, dy):
        if torch.is_grad_enabled():   # what once_differentiable is for, at a tenth of its price
            raise RuntimeError("the norm layers' backward pass cannot be differentiated again: create_graph=True needs "
                               "norm_impl='torch'")
        x, weight, stats, metric = ctx.saved_tensors
        dx, dw, db, sq = ctx.differentiate(dy, x, weight, stats, metric, *ctx.args)
        return dx, dw, db, sq, None, None


# Function.apply without its look for functorch transforms, which these functions do not have rules for anyway
_apply = super(torch.autograd.Function, _Norm).apply


class _AddNorm(torch.autograd.Function):
    """x + branch and its norm, for backends without autograd of their own."""

    @staticmethod
    def forward(ctx, x, branch, weight, bias, probe, metric, settings):
        eps, rms, out_dtype, backend = settings
        total, y, stats = backend.add_forward(x, branch, weight, bias, eps, rms, out_dtype)
        ctx.save_for_backward(total, weight, stats, metric)
        ctx.args, ctx.differentiate = (rms, bias is not None, probe is not None, branch.dtype), backend.add_backward
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx, dtotal, dy):
        if torch.is_grad_enabled():
            raise RuntimeError("the norm layers' backward pass cannot be differentiated again: create_graph=True needs "
                               "norm_impl='torch'")
        total, weight, stats, metric = ctx.saved_tensors
        if dy is None:
            return dtotal, None if dtotal is None else dtotal.to(ctx.args[3]), None, None, None, None, None
        return *ctx.differentiate(dtotal, dy, total, weight, stats, metric, *ctx.args), None, None


# ---- ref: plain torch

def ref_forward(x, weight, bias, eps, rms, out_dtype):
    """y and stats, (1 or 2, rows): rstd(, mean)."""
    acc = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(acc)
    mean = [] if rms else [centred.mean(-1, keepdim=True)]
    if not rms:
        centred = centred - mean[0]
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = centred * rstd * weight.to(acc)
    if bias is not None:
        y = y + bias.to(acc)
    return y.to(out_dtype), torch.stack([rstd, *mean]).flatten(1)


def ref_backward(dy, x, weight, stats, metric, rms, has_bias, tracked):
    """dx, dweight, dbias or None, sq or None."""
    acc, B, C = stats.dtype, x.shape[0], x.shape[-1]
    rstd, *mean = stats.view(-1, *x.shape[:-1], 1)
    d, centred = dy.to(acc), x.to(acc)
    xhat = (centred if rms else centred - mean[0]) * rstd
    g = d * weight.to(acc)
    dx = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if not rms:
        dx = dx - g.mean(-1, keepdim=True)

    c = [(d * xhat).reshape(B, -1, C).sum(1)]
    if has_bias:
        c.append(d.reshape(B, -1, C).sum(1))
    elif not rms:
        c.append(torch.zeros_like(c[0]))
    dw, db = c[0].sum(0).to(weight.dtype), c[1].sum(0).to(weight.dtype) if has_bias else None
    sq = [v.square().sum(-1) for v in c] if tracked else None
    if tracked and metric is not None:
        sq += [(v.square() * p).sum(-1) for v, p in zip(c, metric)]
    return (dx * rstd).to(x.dtype), dw, db, torch.stack(sq) if tracked else None


# ---- the same as custom ops, opaque to torch.compile: no graph break

@functools.cache
def _backend(name):
    from rightbatch.kernels import backends
    return backends.BACKENDS[name]


@torch.library.custom_op("rightbatch::norm_forward", mutates_args=())
def norm_forward_op(x: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor | None,
                    metric: Tensor | None, eps: float, rms: bool, out_dtype: torch.dtype,
                    impl: str) -> tuple[Tensor, Tensor]:
    return _backend(impl).forward(x, weight, bias, eps, rms, out_dtype)


@norm_forward_op.register_fake
def _(x, weight, bias, probe, metric, eps, rms, out_dtype, impl):
    acc = torch.promote_types(x.dtype, torch.float32)
    rows = x.numel() // x.shape[-1]
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty((1 if rms else 2, rows), dtype=acc)


@torch.library.custom_op("rightbatch::norm_backward", mutates_args=())
def norm_backward_op(dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, metric: Tensor | None, rms: bool,
                     has_bias: bool, tracked: bool, impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = _backend(impl).backward(dy, x, weight, stats, metric, rms, has_bias, tracked)
    return tuple(x.new_empty(0) if g is None else g for g in grads)   # an op cannot return None


@norm_backward_op.register_fake
def _(dy, x, weight, stats, metric, rms, has_bias, tracked, impl):
    rows = (1 if rms else 2) * (1 if metric is None else 2)
    return (x.new_empty(x.shape), weight.new_empty(weight.shape),
            weight.new_empty(weight.shape) if has_bias else x.new_empty(0),
            stats.new_empty((rows, x.shape[0])) if tracked else x.new_empty(0))


def _setup_context(ctx, inputs, output):
    x, weight, bias, probe, metric, _, rms, _, impl = inputs
    ctx.save_for_backward(x, weight, output[1], metric)
    ctx.args = rms, bias is not None, probe is not None, impl


def _op_backward(ctx, dy, _):
    x, weight, stats, metric = ctx.saved_tensors
    _, has_bias, tracked, _ = ctx.args
    dx, dw, db, sq = norm_backward_op(dy, x, weight, stats, metric, *ctx.args)
    return dx, dw, db if has_bias else None, sq if tracked else None, None, None, None, None, None


norm_forward_op.register_autograd(_op_backward, setup_context=_setup_context)


@torch.library.custom_op("rightbatch::add_norm", mutates_args=())
def add_norm_op(x: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, probe: Tensor | None,
                metric: Tensor | None, eps: float, rms: bool, out_dtype: torch.dtype,
                impl: str) -> tuple[Tensor, Tensor, Tensor]:
    return _backend(impl).add_forward(x, branch, weight, bias, eps, rms, out_dtype)


@add_norm_op.register_fake
def _(x, branch, weight, bias, probe, metric, eps, rms, out_dtype, impl):
    return x.new_empty(x.shape), *norm_forward_op(x, weight, bias, probe, metric, eps, rms, out_dtype, impl)


@torch.library.custom_op("rightbatch::add_norm_backward", mutates_args=())
def add_norm_backward_op(dtotal: Tensor | None, dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, metric: Tensor | None,
                         rms: bool, has_bias: bool, tracked: bool, branch_dtype: torch.dtype,
                         impl: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The branch's gradient is empty where it is that of x: an op may not return a tensor twice."""
    grads = _backend(impl).add_backward(dtotal, dy, x, weight, stats, metric, rms, has_bias, tracked, branch_dtype)
    dx, dbranch, *rest = (x.new_empty(0) if g is None else g for g in grads)
    return dx, x.new_empty(0) if dbranch is dx else dbranch, *rest


@add_norm_backward_op.register_fake
def _(dtotal, dy, x, weight, stats, metric, rms, has_bias, tracked, branch_dtype, impl):
    dx, *rest = norm_backward_op(dy, x, weight, stats, metric, rms, has_bias, tracked, impl)
    return dx, x.new_empty(0) if branch_dtype == x.dtype else x.new_empty(x.shape, dtype=branch_dtype), *rest


def _setup_add_context(ctx, inputs, output):
    _, branch, weight, bias, probe, metric, _, rms, _, impl = inputs
    ctx.save_for_backward(output[0], weight, output[2], metric)
    ctx.args = rms, bias is not None, probe is not None, branch.dtype, impl
    ctx.set_materialize_grads(False)


def _add_op_backward(ctx, dtotal, dy, _):
    x, weight, stats, metric = ctx.saved_tensors
    _, has_bias, tracked, branch_dtype, _ = ctx.args
    if dy is None:
        return dtotal, None if dtotal is None else dtotal.to(branch_dtype), *[None] * 8
    dx, dbranch, dw, db, sq = add_norm_backward_op(dtotal, dy, x, weight, stats, metric, *ctx.args)
    dbranch = dx if branch_dtype == x.dtype else dbranch
    return dx, dbranch, dw, db if has_bias else None, sq if tracked else None, *[None] * 5


add_norm_op.register_autograd(_add_op_backward, setup_context=_setup_add_context)
