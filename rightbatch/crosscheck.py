"""
The classical noise scale: compares gradients of micro-batches, and of processes, with the step's. Noisier than per-example
norms, since its small batch has many examples, and it holds a second copy of the gradient.
"""

import torch

from rightbatch import gns


class CrossCheck:
    def __init__(self, parameters, groups, micro_batch_size, meter, world=1, average=None):
        """parameters: a list. groups: {name: mask over it}. meter: takes the averages, by group and what is compared. average:
        mean over processes of a list of tensors, in place."""
        self.parameters, self.groups, self.micro_batch_size = parameters, groups, micro_batch_size
        self.world, self.average, self.meter = world, average, meter
        for kind in ("micro", "rank") if world > 1 else ("micro",):
            for group in groups:
                meter.scale(f"{group}_{kind}")
        self.begin()

    # -- on the device, during a step

    def begin(self):
        self.held: list[torch.Tensor] = []  # the gradient accumulated so far
        self.micro_sq = self.rank_sq = None  # mean squared norms of the gradients of micro-batches, of this process

    def take(self, accum):
        """After a micro-batch's backward pass: its gradient's norms. The gradient is kept here, away from p.grad."""
        grads = [p.grad for p in self.parameters]
        sq = squares(grads) * accum**2  # of the micro-batch's own mean
        self.micro_sq = sq / accum if self.micro_sq is None else self.micro_sq + sq / accum
        if self.held:
            torch._foreach_add_(self.held, grads)
        else:
            self.held = grads
        for p in self.parameters:
            p.grad = None

    def release(self):
        """After the last micro-batch: the step's gradient goes back to the parameters."""
        if self.world > 1 and self.average:
            self.rank_sq = squares(self.held)  # of this process's own mean
            self.average(self.held)
        for p, held in zip(self.parameters, self.held):
            p.grad = held
        self.held = []

    def record(self, loss_scale):
        """To be summed over processes."""
        found = {"micro_sq": self.micro_sq, "rank_sq": self.rank_sq}
        return {name: sq / loss_scale**2 / self.world for name, sq in found.items() if sq is not None}

    # -- on the host

    def absorb(self, record, B, tokens):
        for kind, n_small in (("micro", self.micro_batch_size), ("rank", B // self.world)):
            if f"{kind}_sq" in record and B > n_small:
                for group, mask in self.groups.items():
                    small, big = float(record[f"{kind}_sq"][mask].sum()), float(record["param_sq"][mask].sum())
                    self.meter.add({f"{group}_{kind}": gns.unbiased_pair(small, big, n_small, B)}, tokens)


def squares(tensors):
    return torch.stack(torch._foreach_norm(tensors)).float().square()
