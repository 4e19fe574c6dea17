"""Linear, embedding and position embedding whose backward pass also yields each example's squared gradient norm.

    probe = torch.zeros(2, B, requires_grad=True)        # weight row, bias row
    y = per_example.linear(x, weight, bias, probe)       # the same y as F.linear(x, weight, bias)
    loss.backward()
    probe.grad                                           # (2, B): |c_b|^2 of weight and bias

What the norms are norms of: c_b, the contribution of example b to `weight.grad` as the backward pass holds it. With
a loss that is a mean over B_loss examples c_b = g_b / B_loss (and fp16 loss scaling multiplies it by s), so
|g_b|^2 = B_loss^2 / s^2 * |c_b|^2. Nothing here knows or undoes either factor: gns.py does.

Only parameters that require grad are counted: the rows of a frozen one are zero. With `metric` (Adam's p_j =
1/(sqrt(v_hat_j)+eps), the shape of the parameter), the probe of a linear gets two more with sum_j p_j c_j^2 in place of
sum_j c_j^2. Tables have none: see rightbatch/rows.py.

Letters: B examples, T positions in each, C channels in, O channels out, V vocabulary (= O of the head).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Per-example weight gradients are formed in pieces of at most this many bytes, in one buffer that is used again and
# again. On quiet cores 5, 8 and 64 MB (whole pairs of examples) differed by less than the noise; on contended ones every
# parallel region may wait for a thread, and 16 MB did better than 5. 32 MiB hold 12 examples of a 384 x 1536 layer.
CHUNK_BYTES = 32 * 2**20
FLOPS_PER_BYTE = 4  # what one byte moved costs; see cheaper_method

# ---- the weight gradient of a linear layer, c_b = g_b^T x_b and dW = sum_b c_b, together with |c_b|^2, two ways

def cheaper_method(T: int, C: int, O: int) -> str:
    """It names the method, "gram" or "simultaneous", that adds less to the plain weight gradient, for one float32 example.

                     extra FLOPs        extra bytes
    simultaneous     0                  4 * 4 C O                    c_b written, read for its norm, added to dW
    gram             2 T^2 (C + O)      4 * (5 T^2 + 4 T (C + O))    Gram matrices written, read, multiplied, summed;
                                                                     g and x centred

    FLOPS_PER_BYTE weighs one against the other. It is a constant and not measured at start-up, so that the choice
    (and with it the rounding of every run) follows from the shapes alone."""
    simultaneous = FLOPS_PER_BYTE * 16 * C * O
    gram = 2 * T * T * (C + O) + FLOPS_PER_BYTE * (20 * T * T + 16 * T * (C + O))
    return "gram" if gram < simultaneous else "simultaneous"


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """Norms and sums over examples are float32 whatever the products are, float64 for float64."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def pieces(n_examples: int, n_rows: int, row_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    """It cuts n_examples matrices of n_rows rows into pieces (b0, b1, r0, r1) of at most CHUNK_BYTES: several whole
    examples, or, when one example is too large, some rows of one. One row is the least.

    Examples come in fours, then two, then one, because torch.bmm on a CPU gives whole examples to threads: 3 examples
    on 2 threads took 1.4 times as long per example as 2 or 4."""
    rows = min(n_rows, max(1, CHUNK_BYTES // row_bytes))
    fit = max(1, CHUNK_BYTES // (rows * row_bytes))
    for r0 in range(0, n_rows, rows):
        b0 = 0
        while b0 < n_examples:
            n = min(fit, n_examples - b0)
            n = n // 4 * 4 or n // 2 * 2 or n
            yield b0, b0 + n, r0, min(r0 + rows, n_rows)
            b0 += n


def simultaneous(g: Tensor, x: Tensor, p: Tensor | None = None, idx: Tensor | None = None
                 ) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gray et al. 2024 (arXiv 2411.00999), "simultaneous" per-example norms: it forms the products that the parameter gradient
    consists of anyway, takes their norms, adds them up.

        c_b = g_b^T x_b    (O, C)        sq_norm_b = sum_ij c_bij^2        dW = sum_b c_b

    g (B, T, O), x (B, T, C), p (O, C) or None, idx (B, S) or None
    -> dW (O, C), sq_norms (1, B) or (2, B) with p, rows c_b[idx_b] (B, S, C) or None"""
    (B, _, O), C, dtype = g.shape, x.shape[2], accumulation_dtype(g)
    dW = g.new_empty(O, C, dtype=dtype)
    sq_norms = g.new_zeros(1 if p is None else 2, B, dtype=dtype)
    picked = None if idx is None else g.new_zeros(B, idx.shape[1], C, dtype=dtype)
    cuts = list(pieces(B, O, C * g.element_size()))
    buffer = g.new_empty(max((b1 - b0) * (r1 - r0) for b0, b1, r0, r1 in cuts) * C)
    for b0, b1, r0, r1 in cuts:
        out = dW[r0:r1]
        # A lone first example is dW so far: write it there and save two passes (with B = 1, all of the cost).
        in_place = b0 == 0 and b1 == 1 and p is None and dtype == g.dtype
        c = out[None] if in_place else buffer[: (b1 - b0) * (r1 - r0) * C].view(b1 - b0, r1 - r0, C)
        torch.bmm(g[b0:b1, :, r0:r1].mT, x[b0:b1], out=c)
        # By rows first: one running float32 sum over millions of squares would lose digits.
        sq_norms[0, b0:b1] += torch.linalg.vector_norm(c, dim=2, dtype=dtype).square_().sum(1)
        if b0 == 0 and not in_place:
            torch.sum(c, 0, dtype=dtype, out=out)
        elif not in_place:
            for c_b in c:
                out += c_b
        if idx is not None and picked is not None:
            at = idx[b0:b1] - r0  # in this piece; rows of others add zero
            rows = c[torch.arange(b1 - b0, device=c.device)[:, None], at.clamp(0, r1 - r0 - 1)]
            picked[b0:b1] += rows.masked_fill_(((at < 0) | (at >= r1 - r0))[..., None], 0)
        if p is not None:  # last, because it overwrites c
            c = c.to(dtype).square_().mul_(p[r0:r1])
            sq_norms[1, b0:b1] += c.sum(2).sum(1)
    return dW, sq_norms, picked


def gram(g: Tensor, x: Tensor, idx: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Li et al. 2022 (arXiv 2110.05679), "ghost" norms: it gets the same number without forming c_b,

        |g_b^T x_b|^2 = sum_ts (g_bt . g_bs) (x_bt . x_bs)

    and dW in one product, as torch does it. Where c_b = sum_t g_bt x_bt^T nearly cancels over t, the terms above are
    larger than their sum by the square of that ratio, and a large common part in x times a g that sums to zero
    cost half of the digits. So the means over t are taken out first, g_bt = m + g'_bt and x_bt = n + x'_bt,

        c_b = T m n^T + sum_t g'_bt x'_bt^T
        |c_b|^2 = T^2 |m|^2 |n|^2 + 2 T sum_t (m . g'_bt) (n . x'_bt) + sum_ts (g'_bt . g'_bs) (x'_bt . x'_bs)

    and Gram matrices are never formed below float32, autocast or not.

    Arguments and results as for `simultaneous`, without p: a weighted norm does not factor."""
    (B, T, O), C, dtype = g.shape, x.shape[2], accumulation_dtype(g)
    dW = g.reshape(B * T, O).t().mm(x.reshape(B * T, C)).to(dtype)
    sq_norms = g.new_zeros(1, B, dtype=dtype)
    for b0, b1, t0, t1 in pieces(B, T, (T + C + O) * dtype.itemsize):  # Gram matrices and centred copies
        m, n = g[b0:b1].mean(1, keepdim=True, dtype=dtype), x[b0:b1].mean(1, keepdim=True, dtype=dtype)
        g_n, x_n = g[b0:b1] - m, x[b0:b1] - n
        if t0 == 0:
            sq_norms[0, b0:b1] += T * T * (m.square().sum(2) * n.square().sum(2)).squeeze(1)
            sq_norms[0, b0:b1] += 2 * T * ((g_n @ m.mT) * (x_n @ n.mT)).sum((1, 2))
        g_gram = torch.bmm(g_n[:, t0:t1], g_n.mT)
        x_gram = torch.bmm(x_n[:, t0:t1], x_n.mT)
        sq_norms[0, b0:b1] += g_gram.mul_(x_gram).sum(2).sum(1)
    if idx is None:
        return dW, sq_norms, None
    # Row idx_bs of c_b is sum_t g[b, t, idx_bs] x[b, t]: the columns of g that are asked for, times x.
    S = idx.shape[1]
    picked = g.new_empty(B, S, C, dtype=dtype)
    for b0, b1, s0, s1 in pieces(B, S, T * dtype.itemsize):
        columns = g[b0:b1].gather(2, idx[b0:b1, None, s0:s1].expand(-1, T, -1))
        picked[b0:b1, s0:s1] = torch.bmm(columns.mT.to(dtype), x[b0:b1].to(dtype))
    return dW, sq_norms, picked


def weight_grad(g: Tensor, x: Tensor, p: Tensor | None, idx: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """It returns dW, sq_norms and rows by the cheaper method.

    torch.compile sees one opaque operation: the loops and the buffer that they use again are the point of the two methods, and
    tracing would unroll the one and undo the other. Eager mode skips the dispatcher."""
    if torch.compiler.is_compiling():
        return weight_grad_op(g, x, p, idx)
    _, T, C = x.shape
    if p is None and cheaper_method(T, C, g.shape[2]) == "gram":
        return gram(g, x, idx)
    return simultaneous(g, x, p, idx)


@torch.library.custom_op("rightbatch::weight_grad", mutates_args=())
def weight_grad_op(g: Tensor, x: Tensor, p: Tensor | None, idx: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dW, sq_norms, picked = weight_grad(g, x, p, idx)
    return dW, sq_norms, g.new_empty(0) if picked is None else picked


@weight_grad_op.register_fake
def _(g, x, p, idx):
    (B, _, O), C, dtype = g.shape, x.shape[2], accumulation_dtype(g)
    picked = g.new_empty(0) if idx is None else g.new_empty(B, idx.shape[1], C, dtype=dtype)
    return g.new_empty(O, C, dtype=dtype), g.new_empty(1 if p is None else 2, B, dtype=dtype), picked


class Overheard(torch.autograd.Function):
    """An identity on y, whose backward pass gives norms(gradient of y, *others) to the probe; norms None: zeros. linked: the
    second result is a zero of y's shape, and what comes back to it is one more argument of norms."""

    @staticmethod
    def forward(ctx, y, probe, norms, linked, *others):
        ctx.save_for_backward(*others)
        ctx.norms, ctx.linked, ctx.shape = norms, linked, probe.shape
        ctx.set_materialize_grads(False)  # nothing may come back to the zero
        return y.view_as(y), y.new_zeros((), dtype=accumulation_dtype(y)).expand(y.shape) if linked else None

    @staticmethod
    def backward(ctx, g, came_back):
        others, sq = ctx.saved_tensors, None
        if g is not None:
            arguments = (g, *others, came_back) if ctx.linked else (g, *others)
            sq = g.new_zeros(ctx.shape) if ctx.norms is None else ctx.norms(*arguments)
        return g, sq, None, None, *[None] * len(others)


# ---- linear

class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, probe, p_weight, p_bias, link_rows, link_idx):
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # Cast here, as autocast would inside F.linear, to have the copies for the backward pass.
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        ctx.save_for_backward(x, weight, p_weight, p_bias, link_idx)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, g):
        x, weight, p_weight, p_bias, link_idx = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        g3, x3 = g.reshape(len(x), -1, weight.shape[0]), x.reshape(len(x), -1, weight.shape[1])  # (B, T, O), (B, T, C)
        zero = g.new_zeros(len(x), dtype=accumulation_dtype(g))
        sq = [zero] * (2 if p_weight is None else 4)
        dx = dW = db = rows = None
        if needs_x:
            dx = g3.flatten(0, 1).mm(weight).view(x.shape).to(x_dtype)
        if needs_weight:
            dW, sq_weight, rows = weight_grad(g3, x3, p_weight, link_idx)
            dW = dW.to(weight_dtype)
            sq[0::2] = sq_weight.unbind(0)
        if needs_bias:
            c = g3.sum(1, dtype=zero.dtype)  # (B, O)
            db = c.sum(0).to(bias_dtype)
            sq[1] = c.square().sum(1)
            if p_bias is not None:
                sq[3] = (c.square() * p_bias).sum(1)
        return dx, dW, db, torch.stack(sq), None, None, rows if ctx.needs_input_grad[6] else None, None


def row_sq_norms(g: Tensor, x: Tensor, rows: Tensor, p_weight: Tensor | None = None, p_bias: Tensor | None = None,
                 weight: bool = True, bias: bool = True) -> Tensor:
    """It computes |c_b|^2 of k rows of a linear layer's weight and of its bias: c_b = g_b[:, rows]^T x_b, a small product.

    g (B, T, O), x (B, T, C), rows (k,), p_weight (k, C), p_bias (k,) -> (2, B), or (4, B) with a metric"""
    dtype, picked = accumulation_dtype(g), g.index_select(2, rows)  # (B, T, k)
    if g.dtype == torch.float16:  # which one example's gradient may leave
        picked, x = picked.float(), x.float()
    sq = [g.new_zeros(g.shape[0], dtype=dtype)] * (2 if p_weight is None and p_bias is None else 4)
    if weight:
        squares = torch.bmm(picked.mT, x).to(dtype).square_().flatten(1)  # (B, k C)
        sq[0::2] = [squares.sum(1)] if p_weight is None else [squares.sum(1), squares @ p_weight.flatten()]
    if bias:
        squares = picked.sum(1, dtype=dtype).square_()  # (B, k)
        sq[1::2] = [squares.sum(1)] if p_bias is None else [squares.sum(1), squares @ p_bias]
    return torch.stack(sq)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, probe: Tensor | None = None,
           metric: tuple[Tensor, Tensor | None] | None = None, link: tuple[Tensor, Tensor] | None = None,
           rows: Tensor | None = None) -> Tensor:
    """It computes F.linear(x, weight, bias); probe.grad gets the rows |c_b|^2 of weight and bias (zero without a bias).

    x (B, ..., C), weight (O, C), bias (O,), probe (2, B)
    metric: (p_weight (O, C), p_bias (O,) or None) adds the two rows sum_j p_j c_j^2: probe (4, B). Simultaneous only.
    link:   from embedding(..., tied=True) with the same weight, see there
    rows:   row numbers (k,): the norms of these rows of weight and bias alone; the metric is then of these rows, too"""
    if not tracked("linear", probe, 2 if metric is None else 4, x.shape[0]):
        return F.linear(x, weight, bias)
    p_weight, p_bias = (None, None) if metric is None else metric
    if metric is not None and bias is not None and p_bias is None:
        raise ValueError("linear: there is a bias, so metric needs (p_weight, p_bias); got p_bias=None")
    if rows is None:
        return Linear.apply(x, weight, bias, probe, p_weight, p_bias, *(link or (None, None)))
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))  # as F.linear would: one copy for both
    trained = weight.requires_grad, bias is not None and bias.requires_grad

    def norms(g, x, rows, p_weight, p_bias):
        return row_sq_norms(g.flatten(1, -2), x.flatten(1, -2), rows, p_weight, p_bias, *trained)
    return Overheard.apply(F.linear(x, weight, bias), probe, norms, False, x.detach(), rows, p_weight, p_bias)[0]


# ---- embedding, and the cross term of a matrix that is embedding and head at once

def embedding_sq_norms(g: Tensor, idx: Tensor, head_rows: Tensor | None = None) -> Tensor:
    """Row v of example b's contribution is the sum over the positions t that hold token v,

        c_bv = sum_{t: idx_bt = v} g_bt        sq_norm_b = sum_v c_bv^2

    An example holds at most T distinct tokens, so the sums go to T slots, not V. Tied to a head with contribution a_b,
    |a_b + c_b|^2 = |a_b|^2 + |c_b|^2 + 2 <a_b, c_b>. The first term is the head's; the last needs a_b only in
    the rows of the example's tokens: <a_b, c_b> = sum_t g_bt . a_b[idx_bt].

    g (B, T, C), idx (B, T), head_rows a_b[idx_b] (B, T, C) or None -> (1, B)"""
    B, T, C = g.shape
    ordered, order = idx.sort(dim=1)
    number = F.pad((ordered[:, 1:] != ordered[:, :-1]).cumsum(1), (1, 0))  # of each distinct token, from 0
    slot = torch.empty_like(number).scatter_(1, order, number) + T * torch.arange(B, device=g.device)[:, None]
    g = g.to(accumulation_dtype(g))
    sums = torch.ops.aten.embedding_dense_backward(g, slot, B * T, -1, False).view(B, T, C)
    sq_norms = torch.linalg.vector_norm(sums, dim=2).square().sum(1)
    if head_rows is not None:
        sq_norms = sq_norms + 2 * (g * head_rows).sum(2).sum(1)
    return sq_norms[None]


def embedding(idx: Tensor, weight: Tensor, probe: Tensor | None = None, tied: bool = False
              ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """It computes F.embedding(idx, weight); probe.grad gets the row |c_b|^2.

    idx (B, T), weight (V, C), probe (1, B)
    tied: return (output, link). When the head is linear(..., weight, link=link) and the weight rows of its probe are
    this one's (autograd adds what both send), they hold the norms of the *sum* of both uses, cross term included. The link
    is a zero (B, T, C), whose gradient brings back the rows of the head's c_b, and the ids."""
    output, link = F.embedding(idx, weight), None
    if tracked("embedding", probe, 1, idx.shape[0]):
        output, zero = Overheard.apply(output, probe, embedding_sq_norms if weight.requires_grad else None, tied, idx)
        link = zero, idx
    return (output, link) if tied else output


# ---- position embedding

def add_positions(x: Tensor, weight: Tensor, probe: Tensor | None = None) -> Tensor:
    """It computes x + weight[:T]; x (B, T, C), weight (at least T, C), probe (1, B)."""
    output = x + weight[:x.shape[1]]
    if not tracked("add_positions", probe, 1, len(x)):
        return output
    return Overheard.apply(output, probe, position_sq_norms if weight.requires_grad else None, False)[0]


def position_sq_norms(g: Tensor) -> Tensor:
    """Each position occurs once in an example, so c_b is the gradient g_b itself."""
    return torch.linalg.vector_norm(g.to(accumulation_dtype(g)), dim=2).square().sum(1)[None]


def tracked(name: str, probe: Tensor | None, rows: int, B: int) -> bool:
    """It tells whether there is a probe to fill, and refuses one of another shape."""
    if probe is not None and tuple(probe.shape) != (rows, B):
        raise ValueError(f"{name}: probe has shape {tuple(probe.shape)}, expected {(rows, B)}: rows, examples")
    return probe is not None and probe.requires_grad and torch.is_grad_enabled()
