"""
Where the backward pass is overheard. Two autograd functions, both an identity as far as the model can tell:

    leaf --Gather--> z (B, n), zeros --+
    x -----------------------------Tap-+--> y, as the norm layer returned it

Tap saves x and sees dy. It sends c_b = sum_t dy xhat (and sum_t dy, for a bias) to z. Gather sends sum_b c_b, sum_b c_b^2
(elementwise) and the counts of this forward pass on to the leaf. Autograd adds up what it has to: the calls of a module
that is used several times in z, before the squares; micro-batches in leaf.grad, after them. The leaf's shape does not depend
on B. No parameter's gradient is read, so that whatever is done to those (clipping, averaging, sharding) does not matter.

B examples, T positions, C channels, n = C or 2C numbers per example: weight, then bias.
"""

import warnings

import torch

HEAD = 6  # counts at the end of a leaf: forward passes, examples, lengths, lengths^2, sum of (own share in the pass)^2, tokens


def length(n):
    return 2 * n + HEAD


def new_leaf(n, dtype, device):
    """Nobody reads a leaf, only its gradient: one number stands for all."""
    return torch.zeros((), dtype=dtype, device=device).expand(length(n)).requires_grad_()


def head(B, tokens, lengths, dtype, device):
    """The counts of one forward pass. lengths (B,): what each example weighs in the loss; None where they are equal."""
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
    @staticmethod
    def forward(ctx, leaf, counts, B):
        # Not saved: checkpointing compares what two passes save, and only one of them may come here.
        ctx.counts, ctx.leaf, ctx.before = counts, leaf, None
        return leaf.new_zeros(()).expand(B, (leaf.numel() - HEAD) // 2)

    @staticmethod
    def backward(ctx, c):
        if torch.compiler.is_compiling():
            return torch.cat([c.sum(0), c.square().sum(0), ctx.counts]), None, None
        sums, squares, counts = c.sum(0), c.square().sum(0), ctx.counts
        if ctx.before is not None and ctx.leaf.grad is not None:  # a second backward pass in this step: the same examples
            c = ctx.before + c
            squares, counts = c.square().sum(0) - ctx.before.square().sum(0), torch.zeros_like(counts)
        ctx.before = c
        return torch.cat([sums, squares, counts]), None, None


class Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, x, z, norm, batch_dim, segments, fused):
        ctx.save_for_backward(x)  # a closure would keep it alive under checkpointing
        ctx.args = batch_dim, segments, fused
        ctx.norm = norm
        # Neither a view nor a copy: what comes after may write into y, as it may into the norm's own output.
        return y.view_as(y) if torch.compiler.is_compiling() else y.data

    @staticmethod
    def backward(ctx, dy):
        if torch.compiler.is_compiling():
            return dy, None, norm_rows(ctx.norm, dy, *ctx.saved_tensors, *ctx.args), None, None, None, None
        if torch.is_grad_enabled():
            warnings.warn("backward with create_graph=True: what a gradient of gradients adds, as in a gradient penalty, does "
                          "not come by here and is not measured", stacklevel=2)
        try:
            c = norm_rows(ctx.norm, dy, *ctx.saved_tensors, *ctx.args) if ctx.needs_input_grad[2] else None
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            c = lost(ctx.norm, dy, *ctx.args)
        return dy, None, c, None, None, None, None


def lost(norm, dy, batch_dim, segments, fused):
    """NaN, which leaves the step out: the input is not what it was, though the norm layer itself can do without. From now on
    the layer's tap has a copy."""
    norm.copies = True
    warnings.warn(f"{norm.name}: its input is changed in place after it. watch keeps a copy from now on, and leaves this step "
                  "out", stacklevel=2)
    B = segments[1] if segments else dy.shape[0 if norm.channels > 0 else batch_dim]
    acc = torch.promote_types(dy.dtype, torch.float32)
    return dy.new_full((B, norm.shape.numel() * (1 + norm.bias)), float("nan"), dtype=acc)


def norm_rows(norm, dy, x, batch_dim, segments, fused=False):
    """(B, n): every example's gradient of weight(, bias). segments: (document of each position (B, T), how many), or None."""
    plain = batch_dim != 0 or segments is not None or norm.eps is None or torch.compiler.is_compiling()  # who fuses by himself
    c = None if plain else kernel_rows(norm, dy, x, fused)
    return torch_rows(norm, dy, x, batch_dim, segments) if c is None else c


def kernel_rows(norm, dy, x, fused):
    """The same in one pass over x and dy, or None where no kernel takes it. On a CPU the kernel is C++ and has to be compiled,
    half a minute for 0.4% of a step: only for whoever asked for our kernels (fused)."""
    kind = x.device.type
    if kind == "cpu" and not fused or x.dtype == torch.float64:
        return None
    from rightbatch.kernels import backends
    tap = backends.resolve("auto", kind, x.dtype, dy.dtype).tap
    return None if tap is None else tap(dy.detach(), x.detach(), norm.eps, not norm.centred, norm.bias)


def torch_rows(norm, dy, x, batch_dim, segments):
    acc = torch.promote_types(x.dtype, torch.float32)
    x, dy = x.detach().to(acc), dy.detach().to(acc)
    C = norm.shape
    if norm.eps is None:
        xhat = norm.plain(x)
    else:
        xhat = torch.nn.functional.layer_norm(x, C, eps=norm.eps) if norm.centred else \
            torch.nn.functional.rms_norm(x, C, eps=norm.eps)
    product = dy * xhat if norm.eps is None else xhat.mul_(dy)  # in place: on a CPU fresh memory takes longer than the product
    rows = [sum_positions(product, norm, batch_dim, segments)]
    if norm.bias:
        rows.append(sum_positions(dy, norm, batch_dim, segments))
    return rows[0] if len(rows) == 1 else torch.cat(rows, 1)


def sum_positions(v, norm, batch_dim, segments):
    if norm.channels > 0:  # (B, C, ...)
        return v.flatten(2).sum(2)
    v, C = v.movedim(batch_dim, 0), norm.shape.numel()
    if segments is None:
        return v.reshape(v.shape[0], -1, C).sum(1)
    document, n = segments
    positions = v.reshape(document.numel(), -1, C).sum(1)
    return v.new_zeros(n + 1, C).index_add_(0, document.reshape(-1) % (n + 1), positions)[:n]  # -1, padding, is the last
