"""Causal attention on the product of x with the QKV matrix, as it lies in memory.

    y = causal_attention(qkv, n_head)           # qkv (B, T, 3 * C), queries, keys, values; y (B, T, C)

Implementations (`impl`)
    cpu     attention.cpp: float32 and bf16, forward and backward, no copy and no transposition around it. Scores, softmax
            and sums are float32. For the backward pass it keeps qkv, y and one float per head and time
    torch   F.scaled_dot_product_attention on transposed views. Any device and dtype, dropout, higher derivatives
    auto    cpu where it can, otherwise torch

B batch, T time, C channels, C = n_head * head size.
"""

import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rightbatch.kernels import cpp

IMPLS = ("auto", "cpu", "torch")
DTYPES, MAX_SIZE = (torch.float32, torch.bfloat16), 256


def causal_attention(qkv, n_head, cosine=False, dropout=0.0, impl="auto"):
    """cosine: queries and keys of root mean square 1 (F.rms_norm over the head), which bounds the scores by sqrt(size)."""
    if impl not in IMPLS:
        raise ValueError(f"unknown impl {impl!r}: expected one of {', '.join(IMPLS)}")
    if qkv.is_cpu and torch.is_autocast_enabled("cpu") and qkv.dtype == torch.float32:
        qkv = qkv.to(torch.get_autocast_dtype("cpu"))   # as torch's own does
    fits = qkv.is_cpu and qkv.dtype in DTYPES and dropout == 0 and qkv.shape[2] <= 3 * n_head * MAX_SIZE and qkv.numel() > 0
    if impl == "torch" or not fits or not _built():
        return torch_attention(qkv, n_head, cosine, dropout)
    eps = torch.finfo(torch.float32).eps if cosine else -1.0   # what F.rms_norm takes for bf16, too
    if torch.compiler.is_compiling():
        return attention_forward_op(qkv, n_head, eps)[0]
    return _library().attention(qkv, n_head, eps)


def torch_attention(qkv, n_head, cosine=False, dropout=0.0):
    B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
    # (B, nh, T, hs) each; by split, whose backward writes the gradients side by side in one pass
    q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in qkv.split(C, dim=2))
    if cosine:
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    return y.transpose(1, 2).reshape(B, T, C)


@functools.cache
def _library() -> Any:
    """The compiled operators, or None, with one warning, where they cannot be had."""
    try:
        return cpp.operators("attention", "attention_forward", "attention_backward")
    except (OSError, RuntimeError) as e:
        warnings.warn(f"attention uses torch's own, slower: no C++ kernel ({e})", stacklevel=2)
        return None


@torch.compiler.assume_constant_result   # decided while tracing, never traced: it may run a C++ compiler
def _built():
    return _library() is not None


# ---- as custom ops, opaque to torch.compile: no graph break

@torch.library.custom_op("rightbatch::attention_forward", mutates_args=())
def attention_forward_op(qkv: Tensor, n_head: int, eps: float) -> tuple[Tensor, Tensor]:
    return _library().attention_forward(qkv, n_head, eps)


@attention_forward_op.register_fake
def _(qkv, n_head, eps):
    B, T, C = *qkv.shape[:2], qkv.shape[2] // 3
    return qkv.new_empty((B, T, C)), qkv.new_empty((B, n_head, T), dtype=torch.float32)


@torch.library.custom_op("rightbatch::attention_backward", mutates_args=())
def attention_backward_op(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, n_head: int, eps: float) -> Tensor:
    return _library().attention_backward(dout, qkv, out, lse, n_head, eps)


@attention_backward_op.register_fake
def _(dout, qkv, out, lse, n_head, eps):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, ctx.n_head, ctx.eps = inputs
    ctx.save_for_backward(qkv, *output)


def _op_backward(ctx, dout, _):
    return attention_backward_op(dout, *ctx.saved_tensors, ctx.n_head, ctx.eps), None, None


attention_forward_op.register_autograd(_op_backward, setup_context=_setup_context)
