"""
The metric that an optimizer steps in. Adam does not step along the gradient: it divides each coordinate by sqrt(v). In its
metric a squared norm is sum_j p_j g_j^2 with p_j = 1 / (sqrt(v_hat_j) + eps).
"""

import torch


def adam_metric(second_moments, step, beta2, eps):
    """[p] for Adam's second moments [v] after `step` updates."""
    correction = (1 - beta2 ** step).clamp_min(1 - beta2)  # step is 0 if the first update was skipped
    weights = torch._foreach_div(second_moments, correction)
    torch._foreach_sqrt_(weights)
    torch._foreach_add_(weights, eps)
    torch._foreach_reciprocal_(weights)
    # a coordinate that never had a gradient (a token not seen yet) has no weight: 1/eps would drown all others
    pairs = list(zip(weights, second_moments))
    vectors = [pair for pair in pairs if pair[0].dim() < 2]
    if vectors:
        torch._foreach_mul_([p for p, _ in vectors], torch._foreach_sign([v for _, v in vectors]))
    for p, v in pairs:
        if p.dim() >= 2:  # one by one: each makes a temporary of its size
            p.mul_(v > 0)
    return weights


def weighted_sq(grads, weights):
    """(n,) sums of w g^2, one for each of n gradients. Vectors are done together: there are many, and they are small."""
    found = [None] * len(grads)
    small = [i for i, g in enumerate(grads) if g.dim() < 2]
    if small:
        root = torch.cat([weights[i] for i in small]).sqrt_()
        pieces = root.mul_(torch.cat([grads[i] for i in small])).split([len(grads[i]) for i in small])
        for i, norm in zip(small, torch._foreach_norm(pieces)):
            found[i] = norm.square()
    for i, g in enumerate(grads):
        if found[i] is None:
            found[i] = (weights[i] * g.square()).sum()
    return torch.stack(found)
