"""
FLOPs of per-example gradient norms (Gray et al. 2024, arXiv 2411.00999, Table 1 and Figure 3)

    python experiments/flop_cost.py                            # seconds: formulas, checked against torch's FLOP counter
    python experiments/flop_cost.py --config config/wikitext2.py    # and that model
"""

import sys

import costs
import numpy as np
from common import parse, write

from plots import style

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


def model_extra(formula, shape, method, B, T):
    norms = shape.norms() * formula("norm only", B, T, shape.width, shape.width)
    return norms + (0 if method == "norm only" else sum(formula(method, B, T, K, L) for K, L in shape.linears()))


def crossover(formula, shape, B=costs.BATCH):
    """The length from which on simultaneous costs less than gram, by bisection: gram grows with T, simultaneous does not."""
    low, high = 0.0, 1e9
    for _ in range(100):
        T = (low + high) / 2
        costs = [model_extra(formula, shape, method, B, T) for method in ("gram", "simultaneous")]
        low, high = (T, high) if costs[0] < costs[1] else (low, T)
    return high


def numbers(formula, own_cost, which, config_file=None):
    """Numbers of all models and lengths: extra cost, its share of the model's own, and the crossover; and how far
    the formula is from the count (`which` of FLOPs, bytes) of the operations of each linear layer."""
    result, error = {}, 0.0
    for name, shape in costs.models(config_file).items():
        extra = {m: [model_extra(formula, shape, m, costs.BATCH, T) for T in costs.LENGTHS] for m in costs.METHODS}
        share = {m: [e / own_cost(shape, costs.BATCH, T) for e, T in zip(extra[m], costs.LENGTHS)] for m in costs.METHODS}
        result[name] = {"layers": shape.n_layer, "width": shape.width, "crossover": crossover(formula, shape), "extra": extra,
                        "share": share}
        for K, L in set(shape.linears()):
            for T in costs.LENGTHS[::4]:  # polynomials of degree 2: three lengths settle it
                counted = costs.measured_extra(costs.BATCH, T, K, L)
                error = max(error, *(abs(formula(m, costs.BATCH, T, K, L) / counted[m][which] - 1) for m in costs.METHODS))
    return {"batch": costs.BATCH, "lengths": costs.LENGTHS, "largest_error_of_formula": error, "models": result}


def draw(result, path, unit, of_what):
    plt = style.pyplot()
    figure, (total, share, cross) = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    shown = dict(zip(("111M", "1.3B", "13B"), (":", "--", "-")))
    for key, ax in (("extra", total), ("share", share)):
        for color, method in zip(style.COLORS, costs.METHODS):
            for name, dashes in shown.items():
                ax.plot(result["lengths"], result["models"][name][key][method], color=color, ls=dashes)
        ax.set_yscale("log")
    lines = [plt.Line2D([], [], color=color) for color in style.COLORS[:3]]
    lines += [plt.Line2D([], [], color="#444444", ls=dashes) for dashes in shown.values()]
    total.legend(lines, [*costs.METHODS, *shown], ncols=2)
    total.set_title(f"Added {unit} per micro-batch of {result['batch']}")
    share.set_title(f"Share of {of_what}")
    widths, lengths = zip(*((m["width"], m["crossover"]) for m in result["models"].values()))
    order = np.argsort(widths)
    cross.plot(np.array(widths)[order], np.array(lengths)[order], "o-", color=style.COLORS[6])
    for name, m in result["models"].items():
        if name not in ("70M", "161M"):  # beside 111M there is no room
            cross.annotate(name, (m["width"], m["crossover"]), xytext=(6, -12), textcoords="offset points")
    cross.set_yscale("log", base=2)
    cross.margins(0.15)
    cross.set_title("Length from which simultaneous costs less")
    cross.set_xlabel("width")
    cross.set_ylabel("crossover, tokens")
    cross.text(0.05, 0.9, "simultaneous cheaper", transform=cross.transAxes, color=style.COLORS[0])
    cross.text(0.95, 0.05, "gram cheaper", transform=cross.transAxes, color=style.COLORS[1], ha="right")
    for ax in (total, share):
        ax.set_xscale("log", base=2)
        ax.set_xlabel("sequence length T")
    for axis in (total.xaxis, share.xaxis, cross.xaxis, cross.yaxis):
        if axis is cross.xaxis:
            cross.set_xscale("log", base=2)
        axis.set_major_formatter(lambda v, _: f"{v / 1024:g}k" if v >= 1024 else f"{v:g}")
    style.save(figure, path)


def finding(result):
    models, lengths = result["models"], result["lengths"]
    small, large = (pick(models.values(), key=lambda m: m["width"]) for pick in (min, max))
    always = max(m["crossover"] for m in models.values()) < lengths[0]
    share = {m: models["111M"]["share"][m] for m in costs.METHODS}
    at = lengths.index(2048)
    everywhere = f"so at every length from {lengths[0]}" if always else "so not at every length"
    return (f"Here: simultaneous needs fewer FLOPs than gram from {small['crossover']:.0f} tokens on at width {small['width']}"
            f", from {large['crossover']:.0f} at {large['width']}, {everywhere}"
            f"; at 111M it adds {share['simultaneous'][0]:.2%} to forward and backward at T = {lengths[0]}, "
            f"{share['simultaneous'][at]:.3%} at 2048 and {share['simultaneous'][-1]:.4%} at {lengths[-1]}, gram "
            f"{share['gram'][0]:.2%}, {share['gram'][at]:.0%} and {share['gram'][-1]:.0%}, the norm layers alone "
            f"1/{share['simultaneous'][at] / share['norm only'][at]:,.0f} of simultaneous.")


def main(argv=None):
    args, config = parse(argv, "flop_cost", __doc__)
    result = numbers(flops, model_flops, which=0, config_file=args.config)
    draw(result, write(args, config, PAPER, finding(result), result), "FLOPs", "forward and backward FLOPs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
