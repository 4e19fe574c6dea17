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
    for p, v in zip(weights, second_moments):
        p.mul_(v > 0)  # a coordinate that never had a gradient (a token not seen yet) has none: 1/eps would drown all others
    return weights
