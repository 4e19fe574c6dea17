"""
What per-example gradient norms cost, three ways: FLOPs (Gray et al. 2024, arXiv 2411.00999, Table 1 and Figure 3) and bytes
moved (Figure 4), by formulas that a test compares with counts of the operations.

    python experiments/costs.py                            # seconds; flop_cost.json and io_cost.json
    python experiments/costs.py --config config/wikitext2.py    # and that model

    simultaneous   every linear layer: the examples' weight gradients are formed apart, measured, and added (Gray et al. 2024)
    gram           every linear layer: inner product of two T x T Gram matrices per example, beside the plain weight gradient
                   (Li et al. 2022, arXiv 2110.05679)
    norm only      the norm layers alone
The first two include the norm layers. Embeddings are left out: a look-up's gradient has no product.
All counts are of what is added to the plain weight gradient of a micro-batch. B examples, T positions, K channels in, L out.
Bytes are 4 a value, as in the paper; every operation reads its inputs from memory and writes its output there.
"""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from common import ROOT, Experiment

from plots import style
from trainer import plan, start

METHODS = ("simultaneous", "gram", "norm only")
VOCABULARY = plan.GPT2_VOCABULARY
BATCH = 8  # the paper's micro-batch
LENGTHS = [2**i for i in range(7, 17)]  # 128 to 64k


class Shape(NamedTuple):
    n_layer: int
    width: int

    def linears(self):
        """[(K, L)] of every matrix that multiplies."""
        C = self.width
        return self.n_layer * [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)] + [(C, VOCABULARY)]

    def norms(self):
        return 2 * self.n_layer + 1


def models(config_file=None):
    """{name: Shape}: the paper's, GPT-3's larger ones (Brown et al. 2020), and that of --config."""
    files = {"70M": "gpt_70m", "111M": "gpt_111m", "161M": "gpt_161m", "1.3B": "gpt_1_3b"}
    files = {name: os.path.join(ROOT, "config", f"{file}.py") for name, file in files.items()}
    if config_file:
        files[os.path.basename(config_file).removesuffix(".py")] = config_file
    configs = {name: start.parse([file]) for name, file in files.items()}
    return {**{name: Shape(config.n_layer, config.n_embd) for name, config in configs.items()},
            "6.7B": Shape(32, 4096), "13B": Shape(40, 5120), "175B": Shape(96, 12288)}


# -- formulas

def flops(method, B, T, K, L):
    """FLOPs beyond the plain weight gradient, 2 B T K L (Gray et al. 2024, Table 1; a sum of n counts n, not n - 1)."""
    return {"simultaneous": 3 * B * K * L,  # the norm 2, the sum over examples 1; the product itself is the same
            "gram": 2 * B * T * T * (K + L) + 2 * B * T * T,  # two Gram matrices, and their inner product
            "norm only": 6 * B * K}[method]  # weight and bias: the norm 2, the sum over examples 1 each


def model_flops(shape, B, T):
    """Forward and backward of the whole model: as GPT.flops_per_token."""
    matrices = sum(K * L for K, L in shape.linears())
    return B * T * (6 * matrices + 6 * shape.n_layer * T * shape.width)


def moved(method, B, T, K, L):
    """Bytes beyond those of the plain weight gradient, which reads x and g and writes K L values."""
    return 4 * {"simultaneous": 3 * B * K * L + B,  # the examples' gradients written, read for the norm, read for the sum
                "gram": B * T * (K + L) + 4 * B * T * T + 3 * B,  # x and g read again; Gram matrices written, and read
                "norm only": 6 * B * K + 2 * B}[method]


def model_bytes(shape, B, T):
    """The model's own products with its matrices: forward, input gradient and weight gradient, each of which reads or writes
    x, g (or y) and the matrix once. Attention and elementwise operations come on top."""
    return 4 * 3 * sum(B * T * (K + L) + K * L for K, L in shape.linears())


class Cost(NamedTuple):
    name: str  # of the numbers file
    unit: str
    extra: Callable  # (method, B, T, K, L) beyond the plain gradient
    model: Callable  # (shape, B, T) of the model itself
    paper: str


COSTS = (
    Cost("flop_cost", "FLOPs", flops, model_flops,
         "The paper: simultaneous norms need fewer FLOPs than those of Li et al. at every length, and their share of the "
         "model's FLOPs does not grow with it, as the other's does."),
    Cost("io_cost", "bytes", moved, model_bytes,
         "The paper: simultaneous norms move fewer bytes than those of Li et al. for long sequences, more for short ones and "
         "very large models; the norm layers alone move far fewer than either."))


def model_extra(formula, shape, method, B, T):
    norms = shape.norms() * formula("norm only", B, T, shape.width, shape.width)
    return norms + (0 if method == "norm only" else sum(formula(method, B, T, K, L) for K, L in shape.linears()))


def crossover(formula, shape, B=BATCH):
    """The length from which on simultaneous costs less than gram, by bisection: gram grows with T, simultaneous does not."""
    low, high = 0.0, 1e9
    for _ in range(100):
        T = (low + high) / 2
        gram_is_less = model_extra(formula, shape, "gram", B, T) < model_extra(formula, shape, "simultaneous", B, T)
        low, high = (T, high) if gram_is_less else (low, T)
    return high


def numbers(cost, config_file=None):
    """Of all models and lengths: the extra cost, its share of the model's own, and the crossover."""
    result = {}
    for name, shape in models(config_file).items():
        extra = {m: [model_extra(cost.extra, shape, m, BATCH, T) for T in LENGTHS] for m in METHODS}
        share = {m: [e / cost.model(shape, BATCH, T) for e, T in zip(extra[m], LENGTHS)] for m in METHODS}
        result[name] = {"layers": shape.n_layer, "width": shape.width, "crossover": crossover(cost.extra, shape),
                        "extra": extra, "share": share}
    return {"unit": cost.unit, "batch": BATCH, "lengths": LENGTHS, "models": result}


def finding(result):
    lengths, found, at = result["lengths"], result["models"], result["lengths"].index(2048)
    small, large = (pick(found.values(), key=lambda m: m["width"]) for pick in (min, max))
    gram_wins = [name for name, m in found.items() if m["extra"]["gram"][at] < m["extra"]["simultaneous"][at]]
    extra, share = found["111M"]["extra"], found["111M"]["share"]
    return (f"Here, in {result['unit']}: simultaneous costs less than gram from {small['crossover']:,.0f} tokens on at width "
            f"{small['width']}, from {large['crossover']:,.0f} at {large['width']}; at T = 2048 gram costs less for "
            f"{', '.join(gram_wins) or 'none'}. At 111M simultaneous adds {share['simultaneous'][0]:.2%} to the model's own at "
            f"T = {lengths[0]} and {share['simultaneous'][-1]:.4%} at {lengths[-1]}, gram {share['gram'][0]:.2%} and "
            f"{share['gram'][-1]:.0%}; the norm layers alone add 1/{extra['simultaneous'][at] / extra['norm only'][at]:,.0f} "
            "of what simultaneous adds.")


def draw(result, _, path):
    figure, (total, share, cross) = style.panels(3, 16, 5)
    for key, ax, title in (("extra", total, f"Added {result['unit']} per micro-batch of {result['batch']}"),
                           ("share", share, f"Share of the model's own {result['unit']}")):
        for color, method in zip(style.COLORS, METHODS):
            for name, dashes in (("111M", ":"), ("1.3B", "--"), ("13B", "-")):
                ax.plot(result["lengths"], result["models"][name][key][method], color=color, ls=dashes,
                        label=f"{method}, {name}" if ax is share else None)
        style.dress(ax, title, "sequence length T", x="doublings", yscale="log")
    for name, m in result["models"].items():
        cross.plot(m["width"], m["crossover"], "o", color=style.COLORS[6])
        cross.annotate(name, (m["width"], m["crossover"]), xytext=(6, -12), textcoords="offset points")
    style.dress(cross, "Length from which simultaneous costs less", "width", "doublings", "doublings")
    style.save(figure, path)


def main(argv=None):
    for cost in COSTS:
        def measure(runs, cost=cost):
            return numbers(cost, runs.args.config), None
        Experiment(cost.name, __doc__, cost.paper, measure, finding, draw, script="costs")(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
