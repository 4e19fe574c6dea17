"""
Functions that compute each example's gradient of a layer's weights from the layer's input x and its output's gradient dy.

B examples, T positions, C channels, n numbers per example: weight, then bias.
"""

import torch
from torch.nn.grad import conv1d_weight, conv2d_weight


def norm_rows(norm, dy, x, batch_dim, segments):
    """(B, n): each example's gradient of weight(, bias). segments: (document of each position (B, T), how many), or None."""
    # a compiler fuses the plain version itself; the kernels take (B, T, C) alone, whose rows are the examples
    plain = batch_dim != 0 or segments is not None or norm.eps is None or torch.compiler.is_compiling()
    c = None if plain else kernel_rows(norm, dy, x)
    return torch_rows(norm, dy, x, batch_dim, segments) if c is None else c


def kernel_rows(norm, dy, x):
    """norm_rows in one pass over x and dy, or None where no kernel takes it. On a CPU the kernel is C++, and compiling it takes
    half a minute, to save 0.4% of a step: it is taken only if our kernels were asked for (fused)."""
    kind = x.device.type
    if kind == "cpu" and not norm.fused or x.dtype == torch.float64:
        return None
    from rightbatch.kernels import backends
    tap = backends.resolve("auto", kind, x.dtype, dy.dtype).tap
    return None if tap is None else tap(dy.detach(), x.detach(), norm.eps, not norm.centred, norm.bias)


def torch_rows(norm, dy, x, batch_dim, segments):
    """norm_rows in plain torch."""
    acc = torch.promote_types(x.dtype, torch.float32)
    x, dy = x.detach().to(acc), dy.detach().to(acc)
    if norm.eps is None:
        product = dy * norm.plain(x)
    else:
        normalise = torch.nn.functional.layer_norm if norm.centred else torch.nn.functional.rms_norm
        product = normalise(x, norm.shape, eps=norm.eps).mul_(dy)  # in place: on a CPU new memory takes longer than the product
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
    return by_document(v.reshape(segments[0].numel(), -1, C).sum(1), segments)


def by_document(v, segments):
    """(positions, n) -> (documents, n), sums. Padding is document -1, here the last, which is cut off."""
    document, n = segments
    return v.new_zeros(n + 1, v.shape[1]).index_add_(0, document.reshape(-1) % (n + 1), v)[:n]


# -- rows of linear layers and convolutions


def row_gradients(site, names, own, dy, x, batch_dim, segments):
    """(B, n): each example's gradient of the rows `own` of weight or bias or both, as `names` say; all rows if own is None."""
    acc, k = torch.promote_types(dy.dtype, torch.float32), site.count
    if site.kind == "convolution":
        g = (dy if own is None else dy.index_select(1, own)).to(acc)
        parts = {"weight": lambda: convolution_rows(site.module, own, g, x.to(acc)), "bias": lambda: g.flatten(2).sum(2)}
    else:
        dy, x = dy.movedim(batch_dim, 0), x.movedim(batch_dim, 0)
        B, C = x.shape[0], x.shape[-1]
        g = (dy if own is None else dy.index_select(-1, own)).to(acc)
        if segments is None:
            g, x = g.reshape(B, -1, k), x.reshape(B, -1, C)
            parts = {"weight": lambda: torch.bmm(g.mT, x.to(acc)).flatten(1), "bias": lambda: g.sum(1)}
        else:
            g, x = g.reshape(-1, k), x.reshape(-1, C).to(acc)
            parts = {"weight": lambda: torch.cat([by_document(v[:, None] * x, segments) for v in g.unbind(1)], 1),
                     "bias": lambda: by_document(g, segments)}
    gradients = [parts[name]() for name in names]
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients, 1)


def convolution_rows(module, own, g, x):
    """(B, n) of a convolution's weight, whose rows are output channels: examples become groups of one larger convolution, and
    the gradient of its weight is all of theirs."""
    B, k, groups = len(x), g.shape[1], module.groups
    if groups > 1 and own is not None:  # each row with the input channels of its own group
        x = x.unflatten(1, (groups, -1)).index_select(1, own // (module.out_channels // groups)).flatten(1, 2)
        groups = k
    weight_grad = conv1d_weight if x.dim() == 3 else conv2d_weight
    gradient = weight_grad(x.reshape(1, -1, *x.shape[2:]), (B * k, *module.weight.shape[1:]), g.reshape(1, -1, *g.shape[2:]),
                           module.stride, module.padding, module.dilation, B * groups)
    return gradient.view(B, -1)
