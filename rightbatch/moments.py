"""
Moments finds Adam's second moments in the optimizers that keep them, of whole parameters, of a few rows, of shards of either,
and makes the metric of them (metric.py).
"""

import itertools

import torch
import torch.distributed as dist

from rightbatch import rows
from rightbatch.common import is_dtensor, whole
from rightbatch.metric import adam_metric


class Moments:
    def __init__(self, optimizers):
        """optimizers: a list, which may grow."""
        self.optimizers, self.groups = optimizers, {}  # parameter -> (its optimizer, its group there)

    def group(self, p):
        """The optimizer's group that p is in; None unless the optimizer is an Adam, says after how many steps it is, and has a
        second moment of p already."""
        if not any("exp_avg_sq" in optimizer.state.get(p, {}) for optimizer in self.optimizers):
            return None
        if p not in self.groups:
            self.groups = {other: (o, group) for o in self.optimizers for group in o.param_groups for other in group["params"]}
        optimizer, group = self.groups.get(p, (None, {}))  # state may outlive the place in a group
        if optimizer is None or "exp_avg_sq" not in optimizer.state.get(p, {}) or self.steps(p) is None:
            return None
        two_betas = len(group.get("betas", ())) == 2  # Adafactor has none, Adan has three and divides by the third's moment
        return group if two_betas and isinstance(group.get("eps"), (float, int)) else None

    def steps(self, p):
        """The optimizer's steps so far: beside the moments, or in the group (Lamb's step, schedule-free's k); None: unknown."""
        optimizer, group = self.groups[p]
        counts = optimizer.state[p].get("step"), group.get("step"), group.get("k")
        return next((n for n in counts if isinstance(n, (int, float, torch.Tensor))), None)

    def second(self, p):
        """The second moment whose root Adam divides by: with amsgrad, the largest so far. Perhaps sharded."""
        state = self.groups[p][0].state[p]
        return state.get("max_exp_avg_sq", state["exp_avg_sq"])

    def of_all(self, parameters, pick):
        """Adam's metric in one vector, or None unless Adam steps all parameters. pick: [second moment] -> [flat], the numbers
        wanted of each. Parameters of one group step together, so that a few operations do for all."""
        groups = [self.group(p) for p in parameters]
        if any(group is None for group in groups):
            return None
        flat = pick([self.second(p) for p in parameters])
        parts = []
        for _, members in itertools.groupby(zip(groups, parameters, flat), key=lambda member: id(member[0])):
            _, (first, *_), moments = zip(*members)
            parts.append(self.metric(torch.cat(moments), first))
        return torch.cat(parts)

    def metric(self, moments, p):
        """The metric of second moments, flat, of parameters in p's group that have made as many steps as p."""
        group, step = self.groups[p][1], self.steps(p)
        if getattr(step, "device", None) != moments.device:  # a step on the host: copying it would wait for the device
            step = torch.full((), float(step or 0), device=moments.device)
        return adam_metric([moments], step, group["betas"][1], group["eps"])[0]


def rows_of(wanted):
    """[(moment, row numbers or None for all, which dimension has the rows)] -> [flat, row after row]. A process has a part of
    each sharded moment's rows. The parts are summed in one call per process group, and nothing else is sent."""
    flats, spread = [], {}  # spread: group -> the positions in flats that have parts
    for v, own, dim in wanted:
        group = None
        if own is None:
            part = whole(v)
        elif is_dtensor(v):
            part, group = part_of_rows(v, own.to(v.device), dim)
        else:
            part = v.index_select(dim, own.to(v.device))
        flat = part.movedim(dim, 0).flatten()
        if group is not None:
            spread.setdefault(group, []).append(len(flats))
        flats.append(flat)
    for group, where in spread.items():
        together = torch.cat([flats[i] for i in where])
        dist.all_reduce(together, group=group)
        for i, part in zip(where, together.split([len(flats[i]) for i in where])):
            flats[i] = part
    return flats


def part_of_rows(v, own, dim):
    """(rows of a sharded tensor, zero where another process has them; the group to sum over, None if they are whole)."""
    sharded = [i for i, placement in enumerate(v.placements) if not placement.is_replicate()]
    if len(sharded) != 1 or type(v.placements[sharded[0]]).__name__ != "Shard":  # shards of shards are gathered
        return whole(v).index_select(dim, own), None
    (mesh_dim,), local, cut = sharded, v.to_local(), v.placements[sharded[0]].dim
    rank, world = v.device_mesh.get_local_rank(mesh_dim), v.device_mesh.size(mesh_dim)
    if cut == dim:
        part = rows.picked(local.movedim(dim, 0), own, v.shape[dim], rank, world).movedim(0, dim)
    else:
        part = local.new_zeros([len(own) if i == dim else size for i, size in enumerate(v.shape)])
        first = min(rank * -(-v.shape[cut] // world), v.shape[cut])
        part.narrow(cut, first, local.shape[cut]).copy_(local.index_select(dim, own))
    return part, v.device_mesh.get_group(mesh_dim)
