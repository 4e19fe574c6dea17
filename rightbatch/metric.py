"""
The metric that an optimizer steps in. Adam does not step along the gradient: it divides each coordinate by sqrt(v). In its
metric a squared norm is sum_j p_j g_j^2 with p_j = 1 / (sqrt(v_hat_j) + eps).
"""

import torch


def adam_metric(second_moments, step, beta2, eps):
    """[p] for Adam's second moments [v] after `step` updates."""
    correction = (1 - beta2 ** step).clamp_min(1 - beta2)  # the first step may have been skipped, as not finite
    roots = torch._foreach_sqrt(torch._foreach_div(second_moments, correction))
    weights = torch._foreach_reciprocal(torch._foreach_add(roots, eps))
    # a coordinate that never had a gradient (a token not seen yet) has no metric: 1/eps would drown all others
    return [p * (v > 0) for p, v in zip(weights, second_moments)]
