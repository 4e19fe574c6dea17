"""
FLOPs of per-example gradient norms (Gray et al. 2024, arXiv 2411.00999, Table 1 and Figure 3)

    python experiments/flop_cost.py                            # seconds: formulas, checked against torch's FLOP counter
    python experiments/flop_cost.py --config config/wikitext2.py    # and that model
"""

import sys

import costs

PAPER = ("The paper: simultaneous norms need fewer FLOPs than those of Li et al. at every length, and their share of the "
         "model's FLOPs does not grow with it, as the other's does.")


def flops(method, B, T, K, L):
    """FLOPs beyond the plain weight gradient, 2 B T K L (Gray et al. 2024, Table 1; a sum of n counts n, not n - 1)."""
    return {"simultaneous": 3 * B * K * L,  # the norm 2, the sum over examples 1; the product itself is the same
            "gram": 2 * B * T * T * (K + L) + 2 * B * T * T,  # two Gram matrices, and their inner product
            "norm only": 6 * B * K}[method]  # weight and bias: the norm 2, the sum over examples 1 each


def model_flops(shape, B, T):
    """Forward and backward of the whole model: as GPT.flops_per_token."""
    matrices = sum(K * L for K, L in shape.linears())
    return B * T * (6 * matrices + 6 * shape.n_layer * T * shape.width)


def finding(result):
    lengths, (small, large) = result["lengths"], costs.smallest_and_largest(result)
    always = max(m["crossover"] for m in result["models"].values()) < lengths[0]
    simultaneous, gram, norm = (result["models"]["111M"]["share"][m] for m in costs.METHODS)
    at = lengths.index(2048)
    return (f"Here: simultaneous needs fewer FLOPs than gram from {small['crossover']:.0f} tokens on at width {small['width']}"
            f", from {large['crossover']:.0f} at {large['width']}, so {'' if always else 'not '}at every length from "
            f"{lengths[0]}; at 111M it adds {simultaneous[0]:.2%} to forward and backward at T = {lengths[0]}, "
            f"{simultaneous[at]:.3%} at 2048 and {simultaneous[-1]:.4%} at {lengths[-1]}, gram {gram[0]:.2%}, {gram[at]:.0%} "
            f"and {gram[-1]:.0%}, the norm layers alone 1/{simultaneous[at] / norm[at]:,.0f} of simultaneous.")


def main(argv=None):
    return costs.experiment(argv, "flop_cost", __doc__, PAPER, flops, model_flops, 0, finding, "FLOPs",
                            "forward and backward FLOPs")


if __name__ == "__main__":
    sys.exit(main())
