"""
What per-example gradient norms cost, three ways, counted on the operations themselves. For flop_cost.py and io_cost.py.

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
from common import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import configurator
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
    shapes = {}
    for name, file in files.items():
        config = configurator.parse([file])
        shapes[name] = Shape(config.n_layer, config.n_embd)
    return {**shapes, "6.7B": Shape(32, 4096), "13B": Shape(40, 5120), "175B": Shape(96, 12288)}


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
    """Bytes that operations read and write, each tensor once per operation, nothing kept in a cache between two."""

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
