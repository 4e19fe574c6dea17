"""
A Tracker makes noise scales (meter.py) of what a model's probes measure in training steps. It knows the model's parameters
and sites, and nothing of the trainer around it.

    tracker = Tracker(dict(model.named_parameters()), {mode: model.probe_sites(mode) for mode in ("norm", "exact", "rows")},
                      tables(model), micro_batch_size=8, half_life_tokens=250_000)
    tracker.begin()
    given = tracker.given()                                  # for each micro-batch: arguments of the model's forward, or {}
    loss = model(x, y, **given)[1]; loss.backward()
    tracker.take(given)
    record = tracker.record()                                # after the last micro-batch, before clipping: {name: tensor}
    tracker.absorb(values, B, tokens)                        # later, on the host: the record, with loss_scale and param_sq,
                                                             # the squared norm of each parameter's gradient
    tracker.row()                                            # the keys of a log line

During a step nothing waits for the device: what the probes got is kept as it is. Sums over examples and sites, the unbiased
pair of each group and the averages are made on the host, for every step, when somebody wants to see them.

Groups: norm; in exact mode also attention, mlp, embedding, head (if untied), body, total, and block_0, block_1, ...
The whole model is its body: every weight but the tables (rows.py says which and why). In the optimizer's metric total is the
body, and tables have no numbers; the plain total has all weights, as in the paper.
Calibration: some steps (rows.samples) sample a few rows of each weight of the body, for the factor from the norm layers to it.
Several processes: each measures its own B / world examples, and records are summed over processes. |G|^2 is of the gradient
after averaging: every process has all of it (copies = world), or a part (copies = 1).

A site is a (parameter name, group, layer) whose probe gets norms; the bias beside that weight belongs to it.
B examples in the step, S sites, P parameters, O rows of a weight.
"""

import numpy as np
import torch

from rightbatch import gns, rows
from rightbatch.common import local
from rightbatch.decision import Noise
from rightbatch.meter import Meter
from rightbatch.metric import weighted_sq

# of each metric: which rows of the probes have its squared norms, and the name of its |G|^2 in the record
PLAIN, ADAM = (slice(0, 2), "param_sq"), (slice(2, 4), "param_psq")


class Tracker:
    def __init__(self, parameters, sites, tables=(), mode="norm", *, micro_batch_size, half_life_tokens, calibrate=False,
                 metric=None, row_metric=None, sharded=False, seed=0, rank=0, world=1, device="cpu"):
        """parameters: {name: parameter}. sites: {"norm": [...], "exact": [...], "rows": [...]}. tables: parameters that are not
        of the body. metric: a function of {name: parameter} that returns a weight per coordinate as ({name: this process's
        part}, {name: whole}), or None while there are none. row_metric: a function of [(parameter, row numbers)] that returns
        the weights of these rows in one flat tensor. sharded: each process has a part of every gradient."""
        self.parameters, self.sites, self.mode, self.sharded = parameters, sites, mode, sharded
        self.micro_batch_size, self.metric, self.row_metric = micro_batch_size, metric, row_metric
        self.rank, self.world, self.device, self.seed = rank, world, device, seed
        self.copies = 1 if sharded else world  # processes that hold the same gradient
        names = list(parameters)
        self.tables = {name for name, p in parameters.items() if any(p is table for table in tables)}
        self.members = {kind: membership(sites[kind], names, self.tables) for kind in ("norm", "exact")}
        covered = self.members["exact"]["total"][1]
        assert covered.all(), f"no site for {[n for n, c in zip(names, covered) if not c]}"
        self.masks = {"norm": self.members["norm"]["norm"][1], "exact": self.members["exact"]["body"][1]}
        self.watched = {kind: {n: p for (n, p), inside in zip(parameters.items(), mask) if inside}
                        for kind, mask in self.masks.items()}
        self.groups = list(self.members[mode]) if mode != "off" else []
        self.metrics = {"": PLAIN} | ({"_adam": ADAM} if metric else {})
        plain_only = {"embedding", "head", "body"} | {group for group in self.groups if group.startswith("block_")}
        self.meter = Meter(half_life_tokens, whole={"": "body", "_adam": "total_adam"} if mode == "exact" else {})
        for suffix in self.metrics:
            for group in self.groups:
                if not (suffix and group in plain_only):
                    self.meter.scale(group + suffix)
            if mode == "norm" and calibrate:
                self.meter.calibration(suffix)
        self.heights = [parameters[name].shape[0] for name, _, _ in sites["rows"]]
        self.per_weight = min([rows.ROWS, *self.heights])
        self.row_scale = np.array(self.heights) / self.per_weight
        self.row_parameters = [(name, site) for site, (weight, _, _) in enumerate(sites["rows"])
                               for name in (weight, weight.removesuffix("weight") + "bias") if name in parameters]
        self.row_sizes = [self.per_weight * parameters[name][:1].numel() for name, _ in self.row_parameters]
        self.steps = 0  # begun so far
        self.probes, self.taken, self.sampled, self.weights, self.sample = {}, [], [], None, None
        self.newest_pairs, self.newest_norms = {}, None  # the newest step's log keys, and its example_sq

    # -- on the device, during a step

    def begin(self):
        self.steps += 1
        self.taken, self.sampled, self.weights, self.sample = [], [], None, None
        if self.metric and self.mode != "off":
            self.weights = self.metric(self.watched[self.mode])
        if self.meter.calibrations and self.heights and rows.samples(self.steps):
            self.sample = self.draw()

    def draw(self):
        """This step's sample: {"rows": (S, k) row numbers, "pairs": [(parameter name, row numbers)], "flat": the metric's
        weights of these rows, "metrics": {parameter name: its part of flat}}."""
        chosen = torch.tensor(rows.draw(self.seed, self.steps, self.heights, self.per_weight))
        chosen = chosen.to(self.device, non_blocking=True)
        numbers = chosen.unbind()
        pairs = [(name, numbers[site]) for name, site in self.row_parameters]
        flat = None
        if self.weights and self.row_metric:
            flat = self.row_metric([(self.parameters[name], own) for name, own in pairs])
        metrics = None if flat is None else {name: part.view(self.per_weight, *self.parameters[name].shape[1:])
                                             for (name, _), part in zip(pairs, flat.split(self.row_sizes))}
        return {"rows": chosen, "pairs": pairs, "flat": flat, "metrics": metrics}

    def given(self):
        """The arguments of the model for the next micro-batch."""
        if self.mode == "off":
            return {}
        given = {"probes": self.probes_for(len(self.sites[self.mode]), self.weights),
                 "metrics": self.weights and self.weights[1]}
        if self.sample:
            probes = self.probes_for(len(self.sites["rows"]), self.sample["metrics"])
            given["sample"] = probes, self.sample["rows"], self.sample["metrics"]
        return given

    def probes_for(self, sites, metrics):
        """Zeros for so many sites; the same tensor in every step, so that torch.compile sees the same leaf."""
        height = 4 if metrics else 2
        if (sites, height) not in self.probes:
            self.probes[sites, height] = torch.zeros(sites, height, self.micro_batch_size, device=self.device,
                                                     requires_grad=True)
        return self.probes[sites, height]

    def take(self, given, keep=True):
        """After the backward pass of a micro-batch: take its norms from the probes. keep: for the record of this step."""
        for probes, kept in ((given.get("probes"), self.taken), (given.get("sample", (None,))[0], self.sampled)):
            if probes is not None:
                kept += [probes.grad] * keep
                probes.grad = None

    def record(self):
        """The step's norms as {name: tensor}, before clipping, to be summed over processes. Examples' norms are in the loss
        scale of the backward pass, which example_sq undoes."""
        record = {name: self.in_order(taken) for name, taken in (("sq", self.taken), ("rows_sq", self.sampled)) if taken}
        if self.weights and self.taken:
            part = self.weights[0]
            grads = [local(self.parameters[name].grad) for name in part]
            record["param_psq"] = weighted_sq(grads, list(part.values())) / self.copies  # of the watched parameters alone
        if self.sampled and self.sample:
            record["rows_big"] = self.rows_of_gradient(self.sample) / self.copies
        self.weights = self.sample = None  # as large as the model in exact mode
        return record

    def rows_of_gradient(self, sample):
        """(1 or 2 metrics, parameters): squared norms of the sampled rows in this process's part of the step's gradient."""
        parts = [rows.picked(local(p.grad), own, p.shape[0], self.rank, self.world).flatten()
                 for name, own in sample["pairs"] for p in [self.parameters[name]]]
        squares = torch.cat(parts).float().square_()
        weighed = [squares] if sample["flat"] is None else [squares, squares * sample["flat"]]
        return torch.stack([part for flat in weighed for part in torch._foreach_norm(flat.split(self.row_sizes), 1)])

    def in_order(self, taken):
        """(micro-batch, S, rows, example); with several processes (micro-batch, rank, S, rows, example), zeros in the places of
        other ranks, so that a sum over processes gathers. It is a few numbers per site and example, little beside gradients."""
        if self.world == 1:
            return taken[0] if len(taken) == 1 else torch.stack(taken)
        everyone = taken[0].new_zeros(len(taken), self.world, *taken[0].shape)
        everyone[:, self.rank] = torch.stack(taken)
        return everyone

    # -- on the host, for every step in order

    def absorb(self, values, B, tokens):
        """Add one step to the averages. values: its record as {name: flat float64 array}."""
        if self.mode == "off":
            return
        sq = self.example_sq("sq", values, len(self.sites[self.mode]), B, 4 if "param_psq" in values else 2)
        self.newest_pairs, self.newest_norms = {}, sq
        if B == 1:
            return  # one example says nothing about noise
        big = {"param_sq": values["param_sq"]}
        if "param_psq" in values:  # there is no metric before the optimizer's first step
            big["param_psq"] = np.zeros(len(self.parameters))
            big["param_psq"][self.masks[self.mode]] = values["param_psq"]
        rows_big = rows_sq = np.empty(0)
        if "rows_sq" in values:
            rows_big = values["rows_big"].reshape(-1, len(self.row_parameters))  # (1 or 2 metrics, parameter)
            rows_sq = self.example_sq("rows_sq", values, len(self.heights), B, 2 * len(rows_big))
        pairs, sampled = {}, {}
        for metric, (suffix, (own, name)) in enumerate(self.metrics.items()):
            if name in big:
                pairs |= self.group_pairs(suffix, sq[:, :, own], big[name], B)
                if metric < len(rows_big):
                    sampled[suffix] = self.calibration_pairs(sq[:, :, own], rows_sq[:, :, own], big[name], rows_big[metric], B)
        self.meter.add(pairs, tokens, sampled)
        self.newest_pairs = {f"gns/{name}_step_{part}": number for name, pair in pairs.items()
                             for part, number in zip(("sq_norm", "tr_sigma"), pair)}

    def group_pairs(self, suffix, sq, param_sq, B):
        """{name: (sq_norm, tr_sigma)} of one step in one metric. sq: (micro-batch, S, 2, example); param_sq: (P,) of the step's
        gradient."""
        sums = sq.sum((0, 2, 3)) / B
        return {group + suffix: gns.unbiased_pair(float(sums[sites].sum()), float(param_sq[params].sum()), 1, B)
                for group, (sites, params) in self.members[self.mode].items() if group + suffix in self.meter.scales}

    def calibration_pairs(self, sq, sampled, param_sq, rows_big, B):
        """(pair of the body, pair of the norm layers) from the same examples, so that their errors cancel. sq, sampled:
        (micro-batch, S, 2, example) of norm layers, of sampled rows; param_sq, rows_big: of the step's gradient, likewise."""
        small, big = float(sq.sum()) / B, float(param_sq[self.members["norm"]["norm"][1]].sum())
        scale = self.row_scale[[site for _, site in self.row_parameters]]
        more = float(sampled.sum((0, 2, 3)) @ self.row_scale) / B
        body = gns.unbiased_pair(small + more, big + float(rows_big @ scale), 1, B)
        return body, gns.unbiased_pair(small, big, 1, B)

    def example_sq(self, name, values, sites, B, height):
        """|g_b|^2 as (micro-batch, site, row, example of the micro-batch); rows: weight, bias, then both in the metric if there
        is one. In backward each of a process's n_local examples had c_b = loss_scale * g_b / n_local, as its loss is a mean."""
        n_local = B // self.world
        sq = values[name].reshape(-1, sites, height, self.micro_batch_size)
        return sq * (n_local / float(values["loss_scale"][0])) ** 2

    def tokens_to_factor(self, suffix, tokens_per_step):
        """Roughly, the tokens until there is a factor; None if there is one, or the steps so far do not tell."""
        steps = self.meter.steps_to_go(suffix, self.steps) if suffix in self.meter.calibrations else None
        return steps * tokens_per_step if steps else None

    def noise(self, suffix: str) -> Noise | None:
        """The whole model's noise scale, plain ("") or in the optimizer's metric ("_adam"); None while it is undetermined."""
        return self.meter.noise(suffix)

    def row(self):
        """The keys of a log line."""
        row = dict(self.newest_pairs)
        if self.newest_norms is not None:
            row |= example_statistics(self.newest_norms[:, :, PLAIN[0]].sum((1, 2)).reshape(-1))
        return row | self.meter.row()

    def state_dict(self):
        return {"steps": self.steps, **self.meter.state_dict()}

    def load_state_dict(self, state):
        self.steps = state["steps"]
        self.meter.load_state_dict(state, new=False)


def membership(sites, names, tables=()):
    """{group: (mask over sites, mask over parameters)}; a site's bias goes with its weight."""
    kinds = {kind for _, kind, _ in sites}
    groups = ["norm"]
    if kinds - {"norm"}:
        layers = sorted({layer for _, _, layer in sites if layer is not None})
        groups += [kind for kind in ("attention", "mlp", "embedding", "head") if kind in kinds]
        groups += ["body", "total", *(f"block_{layer}" for layer in layers)]
    masks = {}
    for group in groups:
        belongs = [group in (kind, "total", f"block_{layer}", "body" if name not in tables else "")
                   for name, kind, layer in sites]
        weights = {name for (name, _, _), inside in zip(sites, belongs) if inside}
        inside = weights | {name.removesuffix("weight") + "bias" for name in weights}
        masks[group] = np.array(belongs), np.array([name in inside for name in names])
    return masks


def example_statistics(example):
    """The log keys of one step's |g_b|^2. The standard error is that of their mean, with |G|^2 held, as norms alone do not tell
    how |G|^2 moves when an example is left out. That is good enough for tr_sigma, which is nearly this mean."""
    B = len(example)
    row = {"gns/example_max": float(example.max()), "gns/example_median": float(np.median(example))}
    if B > 1:
        row["gns/step_tr_sigma_se"] = float(example.std(ddof=1)) / B**0.5 / (1 - 1 / B)
    return row
