"""
How good a step's gradient is, and what the optimizer makes of it: grad_stats=True, measured at logged steps.

    python train.py --grad_stats=True --log_interval=1

g_k is the mean gradient of micro-batch k, K of them in a step (on each of `world` processes), G their mean before clipping, N
the number of parameters, m and v Adam's moments (bias-corrected) after the update, w the parameters. Log keys:

    grad/coherence           mean cosine of g_k and g_k+1: 0 for pure noise, 1 where all say the same. null if K = 1
    grad/coherence_total     mean cosine of g_k and G: 1/sqrt(K world) for pure noise, since G holds g_k. null if K world = 1
    grad/mean grad/variance  of the N coordinates of G
    grad/norm_after_k        norm of the mean of the step's first k micro-batches, k = 1, 2, 4, ... below K: |G| as it grows
                             (of each process's own, root mean square over processes); and mean_after_k, variance_after_k
    adam/snr                 mean of |m| / (sqrt(v) + eps) over coordinates that ever had a gradient: 1 where gradients repeat
                             themselves, sqrt(2/pi (1-beta1)/(1+beta1)) = 0.18 at beta1 = 0.9 for pure noise
    update/norm              |w after - w before|, clipping, learning rate and weight decay included
    update/ratio             that over |w before|

Nothing is asked of the host, and nothing that training reads is touched, so losses and weights are the same bits with and
without. It costs passes over the gradient, and memory for two to three more of it (micro-batch, the one before, sum).
FSDP never forms a micro-batch's gradient whole: there coherence and *_after_k are left out (one line says so).
"""

import torch
from torch.autograd.graph import register_multi_grad_hook

from rightbatch.common import local


class GradStats:
    def __init__(self, parameters, optimizer, ranks):
        self.params, self.optimizer, self.ranks = parameters, optimizer, ranks
        self.count = sum(p.numel() for p in self.params)
        self.last = {}

    # -- on the device, during a step

    def begin(self, accum):
        """Before the micro-batches of a step that is measured."""
        self.accum, self.taken = accum, 0
        self.micro = self.previous = self.units = self.hook = None
        self.record, self.cosines = {}, []
        self.whole = not self.ranks.sharded  # gradients of single micro-batches are to be had
        if self.whole and accum * self.ranks.world > 1:
            # the gradient on its way to p.grad: of this micro-batch alone, and of this process alone under DDP
            self.hook = register_multi_grad_hook(self.params, self.keep)

    def keep(self, grads):
        self.micro = grads

    def take(self, held, loss_scale):
        """After the backward pass of a micro-batch; `held` is the accumulated gradient where p.grad is not."""
        if not self.hook:
            return
        self.taken += 1
        size = norm(self.micro)
        if self.previous:
            before, before_size = self.previous
            self.cosines.append(dot(before, self.micro) / (before_size * size))
        self.units = self.units or [torch.zeros_like(g) for g in self.micro]
        for total, g in zip(self.units, self.micro):
            total.addcdiv_(g, size)
        self.previous, self.micro = (self.micro, size), None
        k = self.taken
        if k < self.accum and k & (k - 1) == 0:
            grads, scale = held or [p.grad for p in self.params], self.accum / k / loss_scale
            self.record |= {f"stats/sq_after_{k}": (norm(grads) * scale).square() / self.ranks.world,
                            f"stats/mean_after_{k}": total_of(grads) * scale / self.count / self.ranks.world}

    def before_update(self):
        """With G in p.grad, before it is clipped."""
        world, replicas = self.ranks.world, 1 if self.ranks.sharded else self.ranks.world
        grads = [local(p.grad) for p in self.params]
        self.record["stats/mean"] = total_of(grads) / self.count / replicas
        if self.hook:
            self.hook.remove()
            if self.cosines:
                self.record["stats/coherence"] = torch.stack(self.cosines).mean() / world
            # sum_k <g_k / |g_k|, G / |G|> / K: each cosine's mean, without keeping every g_k
            self.record["stats/coherence_total"] = dot(self.units, grads) / norm(grads) / self.accum / world
        self.hook = self.micro = self.previous = self.units = None
        self.before = [local(p).detach().clone() for p in self.params]

    def after_update(self):
        """The step's numbers as {name: tensor}, to be summed over processes."""
        replicas = 1 if self.ranks.sharded else self.ranks.world
        weight_sq = norm(self.before).square()
        moved = torch._foreach_sub([local(p).detach() for p in self.params], self.before)
        ratio, seen = self.adam_snr()
        self.record |= {"stats/update_sq": norm(moved).square() / replicas, "stats/weight_sq": weight_sq / replicas,
                        "stats/snr": ratio / replicas, "stats/seen": seen / replicas}
        self.before = None
        return self.record

    def adam_snr(self):
        """Sum of |m| / (sqrt(v) + eps) over coordinates with v > 0, and their number."""
        ratio, seen = [], []
        for state, group in filter(None, map(self.optimizer.moments, self.params)):  # none if the first step was not finite
            m, v = local(state["exp_avg"]), local(state["exp_avg_sq"])
            first, second = (1 - b ** state["step"] for b in group["betas"])
            # the division by `first` can wait; v is 0 where there never was a gradient, and so is m
            ratio.append((m.abs() / ((v / second).sqrt() + group["eps"])).sum() / first)
            seen.append((v > 0).sum().float())
        zero = torch.zeros((), device=local(self.params[0]).device)
        return (torch.stack(ratio).sum(), torch.stack(seen).sum()) if ratio else (zero, zero)

    # -- on the host

    def absorb(self, values):
        """The numbers of the newest step, from the arrays of its record."""
        stats = {k.removeprefix("stats/"): float(v[0]) for k, v in values.items() if k.startswith("stats/")}
        self.last = log_keys(stats, float(values["param_sq"].sum()), self.count) if stats else {}

    def row(self):
        return self.last


def log_keys(stats, grad_sq, count):
    row = {"grad/coherence": stats.get("coherence"), "grad/coherence_total": stats.get("coherence_total"),
           "grad/mean": stats["mean"], "grad/variance": grad_sq / count - stats["mean"] ** 2,
           "adam/snr": stats["snr"] / stats["seen"] if stats["seen"] else None,
           "update/norm": stats["update_sq"] ** 0.5, "update/ratio": (stats["update_sq"] / stats["weight_sq"]) ** 0.5}
    for name, sq in stats.items():
        if name.startswith("sq_after_"):
            k, mean = name.removeprefix("sq_after_"), stats[name.replace("sq", "mean", 1)]
            row |= {f"grad/norm_after_{k}": sq**0.5, f"grad/mean_after_{k}": mean,
                    f"grad/variance_after_{k}": sq / count - mean**2}
    return row


def norm(tensors):
    return torch.stack(torch._foreach_norm(tensors)).float().norm()


def dot(a, b):
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(a, b)]).float().sum()


def total_of(tensors):
    return torch.stack([t.sum() for t in tensors]).float().sum()
