"""
The metric that an optimizer steps in. Adam does not step along the gradient: it divides each coordinate by sqrt(v). In its
metric a squared norm is sum_j p_j g_j^2 with p_j = 1 / (sqrt(v_hat_j) + eps).
"""

import math

import torch


def adam_metric(second_moments, step, beta2, eps):
    """[p] for Adam's second moments [v] after `step` updates. Vectors are done together: there are many, and they are small."""
    if step.device.type == "cpu":
        scale = max(1 - beta2 ** step.item(), 1 - beta2) ** -0.5  # step is 0 if the first update was skipped
    else:  # the same, without asking the device
        scale = (1 - beta2 ** step).clamp_min(1 - beta2).rsqrt()

    def weights(v):
        root = v.sqrt().mul_(scale).add_(eps)
        # a coordinate that never had a gradient (a token not seen yet) has no weight: 1/eps would drown all others
        return torch.threshold_(root, eps, math.inf).reciprocal_()
    vectors = [v for v in second_moments if v.dim() == 1]
    together = iter(weights(torch.cat(vectors)).split([v.numel() for v in vectors]) if vectors else ())
    return [next(together) if v.dim() == 1 else weights(v) for v in second_moments]


def weighted_sq(grads, weights):
    """(n,) sums of w g^2, one for each of n gradients; vectors together, as above, those of one length in one sum."""
    vectors = [(g, w) for g, w in zip(grads, weights) if g.dim() == 1]
    together = iter(())
    if vectors:
        squares = torch.cat([g for g, _ in vectors])
        squares = (squares * torch.cat([w for _, w in vectors])).mul_(squares)
        lengths = [g.numel() for g, _ in vectors]
        if len(set(lengths)) == 1:
            sums = squares.view(len(lengths), lengths[0]).sum(1)
        else:
            sums = torch.stack(torch._foreach_norm(squares.split(lengths), 1))  # they are not negative
        if len(vectors) == len(grads):
            return sums
        together = iter(sums.unbind())
    return torch.stack([next(together) if g.dim() == 1 else (w * g).mul_(g).sum() for g, w in zip(grads, weights)])
