"""
Every noise scale that one could go by, at one moment of a run, from the gradients of single examples.

    measure(step, data, first, count)      # {"body/coord/1": {"sq_norm": ..., "tr_sigma": ...}, ...}

Groups: norm layers; the body, which is all weights but the tables (token and position embedding, head); all weights. Metrics:
p = v^(-e/2) with Adam's v of that moment; e = 0 is the plain metric, 1 Adam's. v is that of each coordinate, or its mean over a
row or a tensor.
The gradient's sum and the sum of its squares tell all of them: |g_b|^2 in a metric is linear in the squares of its coordinates.
"""

import math
from collections import defaultdict

import numpy as np
import torch

import gns
from rightbatch.metric import adam_metric

BLOCKS = 8  # of examples, for the jackknife
GROUPS, GRAINS, EXPONENTS = ("norm", "body", "all"), ("coord", "row", "tensor"), (0.0, 0.5, 1.0, 1.5, 2.0)
METRICS = [("coord", 0.0), *((grain, e) for grain in GRAINS for e in EXPONENTS[1:])]  # v^0 is the same for every grain
NAMES = [f"{group}/{grain}/{e:g}" for group in GROUPS for grain, e in METRICS]


def short(value, digits=4):
    """A number as it is kept: four digits; None for what is none."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def group_of(model):
    """{parameter name: its groups}"""
    tables = {model.wte.weight, model.wpe.weight, model.lm_head.weight}
    return {name: ("all", *(() if p in tables else ("body",)), *(("norm",) if ".ln_" in f".{name}" else ()))
            for name, p in model.named_parameters()}


def contract(values, v):
    """(k, metrics): values (k, coordinates) summed in all METRICS, p = v^(-e/2). v has the parameter's shape; where it is 0, as
    of a token not seen yet, there is no weight, as in train.py. A vector counts as one row."""
    rows = v.view(v.shape[0] if v.dim() > 1 else 1, -1)
    grains = {"coord": (values, rows.flatten()), "row": (values.view(len(values), *rows.shape).sum(2), rows.mean(1)),
              "tensor": (values.sum(1, keepdim=True), rows.mean()[None])}
    found = [values.sum(1, keepdim=True)]
    for grain in GRAINS:
        sums, v = grains[grain]
        root = torch.where(v > 0, v, math.inf).rsqrt().sqrt()  # v^(-1/4)
        found.append(sums @ torch.stack([root**(2 * e) for e in EXPONENTS[1:]], 1))
    return torch.cat(found, 1)


def measure(step, data, first, count, blocks=BLOCKS):
    """{candidate: {sq_norm, tr_sigma, error (of their ratio, a share), momentum (m G), momentum_sq (|m|^2)}} by gradients of
    single examples, first .. first + count - 1 of the run, m Adam's first moment. Nothing of the run is touched: no .grad, no
    random number."""
    model, seed = step.model, step.config.seed
    named = dict(model.named_parameters())
    sums = {name: p.new_zeros(2, blocks, p.numel()) for name, p in named.items()}  # of g and of g^2
    sizes = np.bincount([i * blocks // count for i in range(count)], minlength=blocks)
    for i in range(count):
        loss = model(*data.train_batch(seed, first + i, 1, step.device))[1]
        for name, g in zip(named, torch.autograd.grad(loss, list(named.values()))):
            own = sums[name][:, i * blocks // count]
            own[0] += g.flatten()
            own[1].addcmul_(g.flatten(), g.flatten())
    found, belongs = defaultdict(lambda: 0.0), group_of(model)
    for name, p in named.items():
        state, group = step.optimizer.moments(p)
        v = adam_metric([state["exp_avg_sq"]], state["step"], group["betas"][1], group["eps"])[0].to(p.dtype)
        v = torch.where(v > 0, v**-2, 0.0)  # again, with its correction
        m = (state["exp_avg"] / (1 - group["betas"][0] ** state["step"])).flatten()
        g, sq = sums.pop(name)
        whole = g.sum(0)
        means = torch.cat([whole[None] / count, (whole - g) / torch.tensor(count - sizes)[:, None]])  # all; but a block
        parts = {"small": sq, "big": means**2, "momentum": (means[0] * m)[None], "momentum_sq": (m * m)[None]}
        for key, values in parts.items():
            value = contract(values, v).double().numpy()
            for own in belongs[name]:
                found[own, key] = found[own, key] + value
    return {f"{group}/{grain}/{e:g}": estimate(*(found[group, key][:, k] for key in parts), count, sizes)
            for group in GROUPS for k, (grain, e) in enumerate(METRICS)}


def estimate(small, big, momentum, momentum_sq, count, sizes):
    """One candidate's numbers from sums of |g_b|^2 by block and |mean of g|^2 of all and without each block."""
    sq_norm, tr_sigma = gns.unbiased_pair(small.sum() / count, big[0], 1, count)
    without = [gns.unbiased_pair((small.sum() - own) / (count - n), rest, 1, count - n)
               for own, rest, n in zip(small, big[1:], sizes)]
    others = np.array([tr / sq for sq, tr in without])
    error = math.sqrt((len(sizes) - 1) / len(sizes) * ((others - others.mean()) ** 2).sum()) * abs(sq_norm / tr_sigma)
    return {"sq_norm": float(sq_norm), "tr_sigma": float(tr_sigma), "error": error, "momentum": float(momentum[0]),
            "momentum_sq": float(momentum_sq[0])}
