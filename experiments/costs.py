"""
What per-example gradient norms cost, three ways: formulas, checked against counts of the operations. For flop_cost.py and
io_cost.py.

    simultaneous   every linear layer: the examples' weight gradients are formed apart, measured, and added (Gray et al. 2024)
    gram           every linear layer: inner product of two T x T Gram matrices per example, beside the plain weight gradient
                   (Li et al. 2022, arXiv 2110.05679)
    norm only      the norm layers alone
The first two include the norm layers. Embeddings are left out: a look-up's gradient has no product.
All counts are of what is added to the plain weight gradient of a micro-batch. B examples, T positions, K channels in, L out.
"""

import os
from typing import NamedTuple

import numpy as np
import torch
from common import ROOT, parse, write
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import configurator
from plots import style
from trainer import plan

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
    configs = {name: configurator.parse([file]) for name, file in files.items()}
    return {**{name: Shape(config.n_layer, config.n_embd) for name, config in configs.items()},
            "6.7B": Shape(32, 4096), "13B": Shape(40, 5120), "175B": Shape(96, 12288)}


# -- the operations; inputs x (B, T, K), g (B, T, L); each returns what it must, weight gradient first

def plain(x, g):
    return g.flatten(0, 1).T @ x.flatten(0, 1)


def simultaneous(x, g):
    c = torch.bmm(g.mT, x)  # (B, L, K)
    return c.sum(0), torch.linalg.vector_norm(c, dim=(1, 2))


def gram(x, g):
    x_gram, g_gram = torch.bmm(x, x.mT).flatten(1), torch.bmm(g, g.mT).flatten(1)  # (B, T T)
    return plain(x, g), torch.bmm(x_gram[:, None], g_gram[:, :, None]).flatten().sqrt()


def norm_plain(x_hat, g):
    return (x_hat * g).sum((0, 1)), g.sum((0, 1))


def norm_only(x_hat, g):
    weight, bias = (x_hat * g).sum(1), g.sum(1)  # (B, C)
    return weight.sum(0), bias.sum(0), torch.linalg.vector_norm(weight, dim=1), torch.linalg.vector_norm(bias, dim=1)


# -- counting

class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write: each tensor once per operation, nothing kept in a cache between two."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = {t.untyped_storage()._cdata: t for t in args if isinstance(t, torch.Tensor)}.values()
            self.bytes += sum(t.numel() * t.itemsize for t in (*read, out))
        return out


def flops_of_sum(x, *_, **__):
    return int(np.prod(x))  # a shape, as FlopCounterMode passes it


FLOPS = {torch.ops.aten.sum: flops_of_sum, torch.ops.aten.mul: flops_of_sum,
         torch.ops.aten.linalg_vector_norm: lambda x, *_, **__: 2 * int(np.prod(x))}  # products are torch's own counts


def measured(operation, B, T, K, L):
    """(FLOPs, bytes) of an operation on shapes alone: no memory, no arithmetic."""
    x, g = torch.empty(B, T, K, device="meta"), torch.empty(B, T, L, device="meta")
    with FlopCounterMode(display=False, custom_mapping=FLOPS) as flops, Traffic() as traffic:
        operation(x, g)
    return flops.get_total_flops(), traffic.bytes


def measured_extra(B, T, K, L):
    """{method: (FLOPs, bytes) beyond the plain gradient}; for norm only the width is K."""
    def extra(operation, base, *shape):
        return tuple(np.subtract(measured(operation, B, T, *shape), measured(base, B, T, *shape)).tolist())
    return {"simultaneous": extra(simultaneous, plain, K, L), "gram": extra(gram, plain, K, L),
            "norm only": extra(norm_only, norm_plain, K, K)}


# -- formulas: formula(method, B, T, K, L) beyond the plain gradient

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


def numbers(formula, own_cost, which, config_file=None):
    """Numbers of all models and lengths: extra cost, its share of the model's own, and the crossover; and how far
    the formula is from the count (`which` of FLOPs, bytes) of the operations of each linear layer."""
    result, error = {}, 0.0
    for name, shape in models(config_file).items():
        extra = {m: [model_extra(formula, shape, m, BATCH, T) for T in LENGTHS] for m in METHODS}
        share = {m: [e / own_cost(shape, BATCH, T) for e, T in zip(extra[m], LENGTHS)] for m in METHODS}
        result[name] = {"layers": shape.n_layer, "width": shape.width, "crossover": crossover(formula, shape), "extra": extra,
                        "share": share}
        for K, L in set(shape.linears()):
            for T in LENGTHS[::4]:  # polynomials of degree 2: three lengths settle it
                counted = measured_extra(BATCH, T, K, L)
                error = max(error, *(abs(formula(m, BATCH, T, K, L) / counted[m][which] - 1) for m in METHODS))
    return {"batch": BATCH, "lengths": LENGTHS, "largest_error_of_formula": error, "models": result}


def draw(result, path, unit, of_what):
    figure, (total, share, cross) = style.panels(3, 16, 5)
    for key, ax in (("extra", total), ("share", share)):
        for color, method in zip(style.COLORS, METHODS):
            for name, dashes in (("111M", ":"), ("1.3B", "--"), ("13B", "-")):
                ax.plot(result["lengths"], result["models"][name][key][method], color=color, ls=dashes,
                        label=f"{method}, {name}")
        ax.set(yscale="log", xlabel="sequence length T")
        style.doublings(ax)
    total.set_title(f"Added {unit} per micro-batch of {result['batch']}")
    share.set_title(f"Share of {of_what}")
    share.legend(ncols=3, fontsize=8)
    for name, m in result["models"].items():
        cross.plot(m["width"], m["crossover"], "o", color=style.COLORS[6])
        if name not in ("70M", "161M"):  # beside 111M there is no room
            cross.annotate(name, (m["width"], m["crossover"]), xytext=(6, -12), textcoords="offset points")
    cross.set(title="Length from which simultaneous costs less", xlabel="width", ylabel="crossover, tokens")
    cross.set_yscale("log", base=2)
    cross.margins(0.15)
    style.doublings(cross)
    style.plain(cross.yaxis)
    style.save(figure, path)


def smallest_and_largest(result):
    return [pick(result["models"].values(), key=lambda m: m["width"]) for pick in (min, max)]


def experiment(argv, name, doc, paper, formula, own_cost, which, finding, unit, of_what):
    args, config = parse(argv, name, doc)
    result = numbers(formula, own_cost, which, args.config)
    draw(result, write(args, config, paper, finding(result), result), unit, of_what)
    return 0
