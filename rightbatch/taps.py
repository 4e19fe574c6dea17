"""
Two autograd functions overhear the backward pass. The model cannot tell: y stays what the layer returned, dy goes on to it.

    leaf --Gather--> z (B, n), zeros --+
    x, y --------------------------Tap-+--> y, as the layer returned it

Tap saves x and sees dy. It sends each example's gradient c_b to z: of a norm layer sum_t dy xhat (and sum_t dy, for a bias), of
another some rows of sum_t dy x^T. Gather sends sum_b c_b, sum_b c_b^2 (elementwise) and the counts of this forward pass on to
the leaf. Autograd adds up in both places. In z it adds the calls of a module that is used several times, before the squares;
in leaf.grad it adds micro-batches, after them. The leaf's shape does not depend on B. No parameter's gradient is read, so it
does not matter what is done to those (clipping, averaging, sharding).

B examples, T positions, C channels, n numbers per example: weight, then bias.
"""

import warnings
from typing import NamedTuple

import torch

from rightbatch.gradients import norm_rows, row_gradients

KEPT = 2**20  # a layer that is no norm keeps no more numbers for a second backward pass through the same forward pass


class Counts(NamedTuple):
    """The end of a leaf's gradient: sums over the forward passes of a step."""
    passes: float
    examples: float
    lengths: float     # sum of what each example weighs in the loss
    squares: float     # sum of its square
    own: float         # sum of the square of each example's share in the loss of its own pass
    tokens: float

    def squared_shares(self, whole: bool) -> float:
        """h, the sum of the square of each example's share in the step's loss. whole: that loss is one mean over all tokens of
        the step; otherwise it is the mean of the losses of its passes."""
        if whole:
            return self.squares / self.lengths**2 if self.lengths else 0
        return self.own / self.passes**2


HEAD = len(Counts._fields)


def length(n):
    return 2 * n + HEAD


def new_leaf(n, dtype, device):
    """A leaf for n numbers per example. Nobody reads a leaf, only its gradient, so that one zero in memory is enough."""
    return torch.zeros((), dtype=dtype, device=device).expand(length(n)).requires_grad_()


def head(B, tokens, lengths, dtype, device):
    """The Counts of one forward pass. lengths (B,): what each example weighs in the loss; None where they are equal."""
    if lengths is None:
        counts = torch.ones(HEAD, dtype=dtype, device=device)  # torch.tensor would copy a list to the device, and wait for it
        for where, value in ((slice(1, 4), B), (4, 1 / B), (5, tokens)):
            counts[where].fill_(value)
        return counts
    lengths = lengths.detach().to(device, dtype)
    total, squares = lengths.sum(), lengths.square().sum()
    one = torch.ones_like(total)
    return torch.stack([one, B * one, total, squares, squares / total.square(), tokens * one])


class Gather(torch.autograd.Function):
    """The calls of a layer meet here in one forward pass: backward gets examples' gradients and sends sums to the leaf."""

    @staticmethod
    def forward(ctx, leaf, counts, B, site, left_out):
        # No save_for_backward: checkpointing compares what its two calls save, and only one of them may come here.
        ctx.counts, ctx.leaf, ctx.site, ctx.left_out, ctx.before, ctx.seen = counts, leaf, site, left_out, None, False
        return leaf.new_zeros(()).expand(B, (leaf.numel() - HEAD) // 2)

    @staticmethod
    def backward(ctx, c):
        if torch.compiler.is_compiling():
            return torch.cat([c.sum(0), c.square().sum(0), ctx.counts]), None, None, None, None
        sums, squares, counts = c.sum(0), c.square().sum(0), ctx.counts
        if ctx.seen and ctx.leaf.grad is not None:  # a second backward pass in this step, whose examples are the same
            counts = torch.zeros_like(counts)
            if ctx.before is None:
                ctx.left_out[ctx.site.name] = "two backward passes go through one forward pass, and it is too large to keep"
            else:
                c = ctx.before + c
                squares = c.square().sum(0) - ctx.before.square().sum(0)
        ctx.before, ctx.seen = c if ctx.site.norm or c.numel() <= KEPT else None, True
        return torch.cat([sums, squares, counts]), None, None, None, None


class Tap(torch.autograd.Function):
    """An identity on y whose backward sends each example's gradient to z. names: the parameters whose gradients these are.
    norm: how a norm layer computes (recognise.py), None for another layer. rows: which rows of its weight; None: all."""

    @staticmethod
    def forward(ctx, y, x, z, rows, site, names, norm, batch_dim, segments, left_out):
        ctx.save_for_backward(x)  # as ctx.x it would stay alive under checkpointing
        ctx.site, ctx.names, ctx.norm, ctx.rows, ctx.left_out = site, names, norm, rows, left_out
        ctx.args, ctx.size = (batch_dim, segments), 0 if z is None else z.shape[1]
        # Neither a view nor a copy: the model may change y in place, as it may the layer's own output.
        return y.view_as(y) if torch.compiler.is_compiling() else y.data

    @staticmethod
    def backward(ctx, dy):
        c = None
        if ctx.needs_input_grad[2]:
            c = measured(ctx, dy) if torch.compiler.is_compiling() else tried(ctx, dy)
        return dy, None, c, None, None, None, None, None, None, None


def measured(ctx, dy):
    """(B, n): each example's gradient of what the site measures."""
    if ctx.norm is None:
        return row_gradients(ctx.site, ctx.names, ctx.rows, dy, *ctx.saved_tensors, *ctx.args)
    return ctx.site.of_names(norm_rows(ctx.norm, dy, *ctx.saved_tensors, *ctx.args), ctx.names)


def tried(ctx, dy):
    """measured, or None and an entry in left_out: training goes on whatever a layer does to its input."""
    if torch.is_grad_enabled():
        warnings.warn("backward with create_graph=True: what a gradient of gradients adds, as in a gradient penalty, does "
                      "not come by here and is not measured", stacklevel=2)
    try:
        with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
            return measured(ctx, dy)
    except Exception as error:
        if ctx.norm is None:
            words = str(error).splitlines()[0] if str(error) else repr(error)
            ctx.left_out[ctx.site.name] = f"could not be measured: {words}"
            return None
        if "modified by an inplace operation" not in str(error):
            raise
        return lost(ctx.norm, ctx.size, dy, *ctx.args)


def lost(norm, size, dy, batch_dim, segments):
    """NaN for every example, which leaves the step out: a norm layer's input was changed in place after the layer, which does
    not need it any more, while its tap does. From now on the tap keeps a copy."""
    norm.copies = True
    warnings.warn(f"{norm.name}: its input is changed in place after it. watch keeps a copy from now on, and leaves this step "
                  "out", stacklevel=2)
    B = segments[1] if segments else dy.shape[0 if norm.channels > 0 else batch_dim]
    return dy.new_full((B, size), float("nan"), dtype=torch.promote_types(dy.dtype, torch.float32))
