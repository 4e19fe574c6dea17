"""
Bytes moved for per-example gradient norms (Gray et al. 2024, arXiv 2411.00999, Figure 4)

    python experiments/io_cost.py                              # seconds: formulas, checked against counted bytes
    python experiments/io_cost.py --config config/wikitext2.py      # and that model

4 bytes a value, as in the paper; every operation reads its inputs from memory and writes its output there.
"""

import sys

import costs

PAPER = ("The paper: simultaneous norms move fewer bytes than those of Li et al. for long sequences, more for short ones and "
         "very large models; the norm layers alone move far fewer than either.")


def moved(method, B, T, K, L):
    """Bytes beyond those of the plain weight gradient, which reads x and g and writes K L values."""
    return 4 * {"simultaneous": 3 * B * K * L + B,  # the examples' gradients written, read for the norm, read for the sum
                "gram": B * T * (K + L) + 4 * B * T * T + 3 * B,  # x and g read again; Gram matrices written, and read
                "norm only": 6 * B * K + 2 * B}[method]


def model_bytes(shape, B, T):
    """The model's own products with its matrices: forward, input gradient and weight gradient, each of which reads or writes
    x, g (or y) and the matrix once. Attention and elementwise operations come on top."""
    return 4 * 3 * sum(B * T * (K + L) + K * L for K, L in shape.linears())


def finding(result):
    models, (small, large) = result["models"], costs.smallest_and_largest(result)
    at = result["lengths"].index(2048)
    gram_wins = [name for name, m in models.items() if m["extra"]["gram"][at] < m["extra"]["simultaneous"][at]]
    simultaneous, gram, norm = (models["111M"]["extra"][m][at] for m in costs.METHODS)
    return (f"Here: simultaneous moves fewer bytes than gram from {small['crossover']:,.0f} tokens on at width "
            f"{small['width']}, from {large['crossover']:,.0f} at {large['width']}, "
            f"{small['crossover'] / small['width']:.1f} and {large['crossover'] / large['width']:.1f} times the width; at "
            f"T = 2048 gram moves fewer for {', '.join(gram_wins) or 'none'}; the norm layers alone add "
            f"1/{simultaneous / norm:,.0f} of what simultaneous adds and 1/{gram / norm:,.0f} of what gram adds at 111M.")


def main(argv=None):
    return costs.experiment(argv, "io_cost", __doc__, PAPER, moved, model_bytes, 1, finding, "bytes",
                            "bytes of the model's own products")


if __name__ == "__main__":
    sys.exit(main())
