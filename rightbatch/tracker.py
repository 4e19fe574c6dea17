"""
What is measured in a training step, between the probes and the noise scale (gns.py). It knows a model's parameters and
sites, and nothing of the trainer around it.

    tracker = Tracker(dict(model.named_parameters()), {mode: model.probe_sites(mode) for mode in ("norm", "exact", "rows")},
                      tables(model), micro_batch_size=8, half_life_tokens=250_000)
    tracker.begin()
    given = tracker.given()                                  # for each micro-batch, to the model: {}, or what its forward takes
    loss = model(x, y, **given)[1]; loss.backward()
    tracker.take(given)
    record = tracker.record()                                # after the last, before clipping: {name: tensor}
    tracker.absorb(values, B, tokens)                        # later, on the host: the record, with loss_scale and param_sq,
                                                             # the squared norm of each parameter's gradient
    tracker.row()                                            # the keys of a log line

On the device nothing is asked of the host: what the probes got is kept as it is. Sums over examples and sites, the unbiased
pair of each group and the averages are made on the host, for every step, when somebody wants to see them.

Groups: norm; in exact mode also attention, mlp, embedding, head (if untied), body, total, and block_0, block_1, ...
The whole model is its body: every weight but the tables (rows.py says which and why). In the optimizer's metric total is the
body, and tables have no numbers; the plain total has all weights, as in the paper.
Calibration: one step in rows.EVERY samples a few rows of each weight of the body, for the factor from the norm layers to it.
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

# rows of the probes that hold squared norms, and the name of |G|^2 in the record: plain, and in the optimizer's metric
PLAIN, ADAM = (slice(0, 2), "param_sq"), (slice(2, 4), "param_psq")


class Tracker:
    def __init__(self, parameters, sites, tables=(), mode="norm", *, micro_batch_size, half_life_tokens, calibrate=False,
                 metric=None, row_metric=None, sharded=False, seed=0, rank=0, world=1, device="cpu"):
        """parameters: {name: parameter}. sites: {"norm": [...], "exact": [...], "rows": [...]}. tables: parameters that are
        none of the body. metric: a function of {name: parameter} that gives weights per coordinate as ({name: this process's
        part}, {name: whole}), or None while there are none; row_metric: of [(parameter, row numbers)] whole ones, flat, one
        after the other. sharded: each process has a part of every gradient."""
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
        self.newest_pairs, self.newest_norms = {}, None  # of the newest step alone: log keys; its example_sq

    # -- on the device, during a step

    def begin(self):
        self.steps += 1
        self.taken, self.sampled, self.weights, self.sample = [], [], None, None
        if self.metric and self.mode != "off":
            self.weights = self.metric(self.watched[self.mode])
        if self.meter.calibrations and self.heights and rows.samples(self.steps):
            self.sample = self.draw()

    def draw(self):
        """{rows (S, k) of this step, pairs [(name, rows)] of their parameters, flat: their metric, metrics: {name: part}}"""
        chosen = torch.tensor(rows.draw(self.seed, self.steps, self.heights, self.per_weight))
        chosen = chosen.to(self.device, non_blocking=True)
        of_site = chosen.unbind()
        pairs = [(name, of_site[site]) for name, site in self.row_parameters]
        flat = None
        if self.weights and self.row_metric:
            flat = self.row_metric([(self.parameters[name], own) for name, own in pairs])
        metrics = None if flat is None else {name: part.view(self.per_weight, *self.parameters[name].shape[1:])
                                             for (name, _), part in zip(pairs, flat.split(self.row_sizes))}
        return {"rows": chosen, "pairs": pairs, "flat": flat, "metrics": metrics}

    def given(self):
        """What the next micro-batch passes to the model."""
        if self.mode == "off":
            return {}
        given = {"probes": self.probes_for(len(self.sites[self.mode]), self.weights),
                 "metrics": self.weights and self.weights[1]}
        if self.sample:
            probes = self.probes_for(len(self.sites["rows"]), self.sample["metrics"])
            given["sample"] = probes, self.sample["rows"], self.sample["metrics"]
        return given

    def probes_for(self, sites, metrics):
        """Kept, so that torch.compile sees the same leaf."""
        height = 4 if metrics else 2
        if (sites, height) not in self.probes:
            self.probes[sites, height] = torch.zeros(sites, height, self.micro_batch_size, device=self.device,
                                                     requires_grad=True)
        return self.probes[sites, height]

    def take(self, given, keep=True):
        """After the backward pass of one micro-batch: keep its norms."""
        for probes, kept in ((given.get("probes"), self.taken), (given.get("sample", (None,))[0], self.sampled)):
            if probes is not None:
                kept += [probes.grad] * keep
                probes.grad = None

    def record(self):
        """The step's norms as {name: tensor}, before clipping, to be summed over processes. In the scale of the backward pass,
        which example_sq undoes."""
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
        """(1 or 2 metrics, parameters): squared norms of the sampled rows of the step's gradient, of this process's part."""
        parts = [rows.picked(local(p.grad), own, p.shape[0], self.rank, self.world).flatten()
                 for name, own in sample["pairs"] for p in [self.parameters[name]]]
        squares = torch.cat(parts).float().square_()
        weighed = [squares] if sample["flat"] is None else [squares, squares * sample["flat"]]
        return torch.stack([part for flat in weighed for part in torch._foreach_norm(flat.split(self.row_sizes), 1)])

    def in_order(self, taken):
        """One process: (micro-batch, S, rows, example). Several: one more axis for the rank, zeros in the others' places, so
        that the sum over processes is a gather. A few numbers per site and example, little beside gradients."""
        if self.world == 1:
            return taken[0] if len(taken) == 1 else torch.stack(taken)
        everyone = taken[0].new_zeros(len(taken), self.world, *taken[0].shape)
        everyone[:, self.rank] = torch.stack(taken)
        return everyone

    # -- on the host, for every step in order

    def absorb(self, values, B, tokens):
        """Bring the averages up to date with one step; values: its record as {name: flat float64 array}."""
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
        pairs, sampled = {}, {}
        for metric, (suffix, (own, name)) in enumerate(self.metrics.items()):
            if name in big:
                pairs |= self.group_pairs(suffix, sq[:, :, own], big[name], B)
                if "rows_sq" in values and values["rows_big"].size > metric * len(self.row_parameters):
                    rows_big = values["rows_big"].reshape(-1, len(self.row_parameters))
                    rows_sq = self.example_sq("rows_sq", values, len(self.heights), B, 2 * len(rows_big))[:, :, own]
                    sampled[suffix] = self.calibration_pairs(sq[:len(rows_sq), :, own], rows_sq, big[name], rows_big[metric], B)
        self.meter.add(pairs, tokens, sampled)
        self.newest_pairs = {f"gns/{name}_step_{part}": number for name, pair in pairs.items()
                             for part, number in zip(("sq_norm", "tr_sigma"), pair)}

    def group_pairs(self, suffix, sq, param_sq, B):
        """{name: (sq_norm, tr_sigma)} of one step in one metric. sq (micro-batch, S, 2, example); param_sq (P,) of the mean
        gradient of all B."""
        sums = sq.sum((0, 2, 3)) / B
        return {group + suffix: gns.unbiased_pair(float(sums[sites].sum()), float(param_sq[params].sum()), 1, B)
                for group, (sites, params) in self.members[self.mode].items() if group + suffix in self.meter.scales}

    def calibration_pairs(self, sq, sampled, param_sq, rows_big, B):
        """The pairs of the body and of the norm layers, by the same examples, so that their errors cancel. sq and
        sampled (micro-batch, S, 2, example) of norm layers and sampled rows; param_sq (P,), rows_big of every sampled one."""
        examples = sq.shape[0] * sq.shape[3]
        small, big = float(sq.sum()) / examples, float(param_sq[self.members["norm"]["norm"][1]].sum())
        scale = self.row_scale[[site for _, site in self.row_parameters]]
        more = float(sampled.sum((0, 2, 3)) @ self.row_scale) / examples
        body = gns.unbiased_pair(small + more, big + float(rows_big @ scale), 1, B)
        return body, gns.unbiased_pair(small, big, 1, B)

    def example_sq(self, name, values, sites, B, height):
        """|g_b|^2 as (micro-batch, site, row, example of the micro-batch); rows: weight, bias, perhaps both in the metric. Each
        process's n_local examples had a share 1/n_local in its loss: backward held c_b = loss_scale * g_b / n_local."""
        n_local = B // self.world
        sq = values[name].reshape(-1, sites, height, self.micro_batch_size)
        return sq * (n_local / float(values["loss_scale"][0])) ** 2

    def tokens_to_factor(self, suffix, tokens_per_step):
        """Roughly, the tokens until there is a factor; None where nothing tells, or there is one."""
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
    """Of one step's |g_b|^2. The standard error is a jackknife of their mean with |G|^2 held, since norms alone do not tell how
    |G|^2 moves when an example is left out: good for tr_sigma, which is nearly that mean."""
    B = len(example)
    found = {"gns/example_max": float(example.max()), "gns/example_median": float(np.median(example))}
    if B > 1:
        found["gns/step_tr_sigma_se"] = float(example.std(ddof=1)) / B**0.5 / (1 - 1 / B)
    return found
