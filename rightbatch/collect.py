"""
A Collector adds up a closed step: q = sum |c_b|^2 and big = |sum c_b|^2 of norm layers and of the body, over all ranks.

S sites, B examples, c_b what example b adds to the gradient.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rightbatch import moments, taps
from rightbatch.sites import body_of

AT_ONCE = 2**24  # numbers that are added up together: mode="exact" has as many as the model has weights


class Ranks:
    """The processes that share a batch."""

    def __init__(self, group=None):
        self.group = group

    def several(self):
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def world(self):
        return dist.get_world_size(self.group) if self.several() else 1

    def sum(self, tensor):
        if self.several():
            dist.all_reduce(tensor, group=self.group)

    def everyone(self, value):
        """[value of each rank]; all of them have to call."""
        values = [value] * self.world()
        if self.several():
            dist.all_gather_object(values, value, group=self.group)
        return values


@dataclass
class Part:
    """The sums over some sites."""
    pairs: torch.Tensor    # (q and big, plain and Adam's metric)
    adam: bool             # whether there is Adam's metric
    weights: torch.Tensor  # how many weights the sites stand for
    counts: torch.Tensor   # taps.Counts


class Collector:
    def __init__(self, model, norms, ranks, adam, left_out):
        """adam: the Moments of the optimizers. left_out: {name: why not}."""
        self.norms, self.ranks, self.adam, self.left_out = norms, ranks, adam, left_out
        self.body = sum(p.numel() for p in body_of(model))

    def collect(self, layers, direct, spoiled=False):
        """Empty the leaves into (numbers, counts). numbers: {"norm": (q, big) of the norm layers, "body": (q, big) of these and
        `layers`, "coverage": (how many weights of the body are measured, how many it has)}, and "norm_adam" and "body_adam"
        where Adam steps all of their weights. direct: there is a body even without `layers`.
        spoiled: this rank cannot measure the step, so that no rank does."""
        parts = [self.part(sites, spoiled) for sites in (self.norms, *chunks(layers)) if sites]
        numbers, counts = {}, torch.stack([part.counts for part in parts]).amax(0)  # a layer may have missed some passes
        groups = {"norm": parts[:1] if self.norms else []} | ({"body": parts} if layers or direct else {})
        for name, members in groups.items():
            for i, metric in enumerate(("", "_adam")):
                if members and (not i or all(part.adam for part in members)):
                    numbers[name + metric] = tuple(torch.stack([part.pairs[:, i] for part in members]).sum(0))
        if "body" in groups:
            numbers["coverage"] = torch.stack([part.weights for part in parts]).sum(), counts.new_full((), self.body)
        return numbers, counts

    def part(self, sites, spoiled=False):
        """The Part of some sites: norm layers, which are added up as one, or others, which may drop out one by one."""
        norms, sizes = sites[0].norm is not None, [site.size for site in sites]
        like = next((site.leaf for site in sites if site.leaf is not None), torch.zeros((), dtype=torch.float32))
        taken = [take(site, like).split([n, n, taps.HEAD]) for site, n in zip(sites, sizes)]
        sums, squares = (torch.cat([of_site[i] for of_site in taken]) for i in (0, 1))
        counts, metric = torch.stack([of_site[2] for of_site in taken]), self.metric(sites)

        def totals(numbers):  # (plain and Adam's metric, S); zeros without Adam: ranks that have it need as many numbers here
            weighed = numbers, numbers * (0.0 if metric is None else metric)
            return torch.stack([part.sum() for v in weighed for part in ([v] if norms else v.split(sizes))]).view(2, -1)
        q = totals(squares)
        good, share, weights = self.flags(sites, q)
        flat = torch.cat([sums, q.flatten(), counts[:, 0], good, counts.amax(0)])
        if spoiled:
            flat = torch.full_like(flat, float("nan"))
        self.ranks.sum(flat)
        sums, q, passes, good, counts = flat.split([len(sums), q.numel(), len(sites), len(good), taps.HEAD])
        pairs = torch.stack([q.view(2, -1), totals(sums.square())])  # (q and big, metric, S)
        if not norms:
            good = (passes > 0) & (good == self.ranks.world())
            pairs, weights = torch.where(good, pairs / share, 0.0), weights * good
        return Part(pairs.sum(2), metric is not None, weights.sum(), counts)

    def flags(self, sites, like):
        """For each site whether it is measured here, the share of its rows, its weights. Of norm layers: their weights."""
        weights = [float(sum(site.shapes[name].numel() for name in site.trained)) for site in sites]
        if sites[0].norm is not None:
            nothing = like.new_ones(0)
            return nothing, nothing, like.new_full((1,), sum(weights))
        return torch.tensor([[float(site.name not in self.left_out) for site in sites],
                             [site.count / site.height for site in sites], weights]).to(like, non_blocking=True)

    def metric(self, sites):
        """Adam's metric for the numbers of all sites, in one vector, or None."""
        own = [(site, name, p) for site in sites for name, p in site.trained.items()]

        def pick(seconds):
            return moments.rows_of([(v, site.rows, site.dim if name == "weight" else 0)
                                    for v, (site, name, _) in zip(seconds, own)])
        # FullyShardedDataParallel puts shards of other shapes in the parameters' places
        as_built = all(self.adam.group(p) is None or self.adam.second(p).shape == site.shapes[name] for site, name, p in own)
        return self.adam.of_all([p for *_, p in own], pick) if as_built else None


def chunks(sites):
    """The sites in lists, each of at most AT_ONCE numbers or of one site."""
    lists, size = [], 0
    for site in sites:
        size += site.size
        if not lists or size > AT_ONCE:
            lists.append([])
            size = site.size
        lists[-1].append(site)
    return lists


def take(site, like):
    """What a site's leaf got since the last step, zeros like another leaf if nothing; the leaf is empty afterwards."""
    grad = site.leaf.grad if site.open else None
    if grad is not None:
        site.leaf.grad = None
    n = taps.length(site.size)
    return like.new_zeros(n) if grad is None or len(grad) != n else grad
