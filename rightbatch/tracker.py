"""
What is measured in a training step, between the probes (model.py) and the noise scale (gns.py).

On the device, once per step and without asking the host: the squared norm of every parameter's gradient, and what the
probes got, as it is. On the host, for every step, but at logged steps only: sums over examples and sites, which of them belong
to which group, the unbiased pair of each group, and the averages.

Groups: norm; in exact mode also attention, mlp, embedding, head (if untied), total, and block_0, block_1, ...
With several processes (distributed.py) each measures its own n_local examples; sums go over ranks once per step, in one
flat tensor. |G|^2 is of the gradient after averaging: the same on every rank under DDP, a part on each under FSDP.
B examples in the step, S sites, P parameters.
"""

import numpy as np
import torch

import gns
from trainer.distributed import Ranks, local

EARLY = 0.2  # averages never look back further than about this share of the tokens seen so far


class Tracker:
    def __init__(self, model, optimizer, config, device, ranks=None):
        self.config, self.device, self.optimizer, self.ranks = config, device, optimizer, ranks or Ranks()
        self.names, self.params = zip(*model.named_parameters())
        self.sites = {mode: model.probe_sites(mode) for mode in ("norm", "exact")}
        self.members = {mode: membership(sites, self.names) for mode, sites in self.sites.items()}
        covered = self.members["exact"]["total"][1]
        assert covered.all(), f"no site for {[n for n, c in zip(self.names, covered) if not c]}"
        groups = {"off": [], "norm": ["norm"], "exact": list(self.members["exact"])}[config.gns]
        self.groups = groups
        self.scales = {group: self.new_scale() for group in groups}
        # Adam's metric must be whole on each rank: a few vectors for the norm layers, a second model for exact mode
        self.adam = config.gns_adam and not (self.ranks.sharded and config.gns == "exact")
        if self.adam:
            self.scales |= {f"{group}_adam": self.new_scale() for group in groups if not group.startswith("block_")}
        if config.gns_crosscheck:
            small = ("micro", "rank") if self.ranks.world > 1 else ("micro",)
            self.scales |= {f"{group}_{kind}": self.new_scale() for kind in small for group in ("norm", "total")}
        self.calibration = None
        if config.gns == "norm" and config.gns_calibrate_tokens:
            self.calibration = gns.Calibration(config.gns_half_life_tokens, EARLY)
        self.norm_sites = [i for i, site in enumerate(self.sites["exact"]) if site[1] == "norm"]
        self.probes, self.taken, self.held, self.micro_sq, self.rank_sq = {}, [], None, None, None
        self.last, self.newest = {}, None  # numbers of the newest step alone; its mode and example_sq

    def new_scale(self):
        return gns.NoiseScale(self.config.gns_half_life_tokens, EARLY)

    # -- on the device, during a step

    def begin(self, before, after):
        """What the step from `before` to `after` tokens passes to the model: {} or {probes, metrics}."""
        config = self.config
        self.mode, self.metrics = config.gns, None
        if self.calibration and (before == 0 or before // config.gns_calibrate_tokens < after // config.gns_calibrate_tokens):
            self.mode = "exact"
        elif self.adam and config.gns != "off":
            self.metrics = adam_metrics(self.optimizer, self.tracked_parameters())
        self.taken, self.held, self.micro_sq, self.rank_sq = [], None, None, None
        if self.mode == "off":
            return {}
        metrics = self.metrics
        if metrics and self.ranks.sharded:
            metrics = self.ranks.gather_shards(metrics, {n: p.shape for n, p in self.tracked_parameters()})
        return {"probes": self.zeros(len(self.sites[self.mode]), 4 if self.metrics else 2), "metrics": metrics}

    def zeros(self, sites, rows):
        key = (sites, rows)
        if key not in self.probes:
            self.probes[key] = torch.zeros(sites, rows, self.config.micro_batch_size, device=self.device, requires_grad=True)
        return self.probes[key]

    def tracked_parameters(self):
        return [(n, p) for n, p in zip(self.names, self.params) if self.mode == "exact" or ".ln_" in f".{n}"]

    def take(self, given, accum):
        """After the backward pass of one micro-batch: keep its norms, and, for the cross-check, its whole gradient's."""
        if given:
            self.taken.append(given["probes"].grad)
            given["probes"].grad = None
        if self.config.gns_crosscheck:
            grads = [p.grad for p in self.params]
            sq = torch.stack(torch._foreach_norm(grads)).float().square() * accum**2  # of the micro-batch's own mean
            self.micro_sq = sq / accum if self.micro_sq is None else self.micro_sq + sq / accum
            if self.held is None:
                self.held = grads
            else:
                torch._foreach_add_(self.held, grads)
            for p in self.params:
                p.grad = None

    def release(self):
        """The accumulated gradient, where the cross-check kept it apart from the parameters."""
        if self.held is not None:
            if self.ranks.world > 1:
                self.rank_sq = torch.stack(torch._foreach_norm(self.held)).float().square()  # of this rank's own mean
                self.ranks.average(self.held)
            for p, held in zip(self.params, self.held):
                p.grad = held

    def finish(self, loss, loss_scale):
        """The step's numbers as {name: tensor}, before clipping; of the norms, all that backward held."""
        world, replicas = self.ranks.world, 1 if self.ranks.sharded else self.ranks.world
        param_sq = torch.stack(torch._foreach_norm([local(p.grad) for p in self.params])).float().square()
        record = {"loss": loss if world == 1 else loss / world, "param_sq": param_sq if replicas == 1 else param_sq / replicas}
        if self.taken:
            record["sq"] = self.in_order(self.taken)
            if self.metrics:
                weighted = {n: (self.metrics[n] * local(p.grad).square()).sum() for n, p in self.tracked_parameters()}
                zero = param_sq.new_zeros(())
                record["param_psq"] = torch.stack([weighted.get(n, zero) for n in self.names]) / replicas
        if self.micro_sq is not None:
            record["micro_sq"] = self.micro_sq / loss_scale**2 / world
        if self.rank_sq is not None:
            record["rank_sq"] = self.rank_sq / loss_scale**2 / world
        record = self.sum_over_ranks(record)
        record["loss_scale"] = loss_scale
        record["bad"] = torch.logical_not(torch.isfinite(record["param_sq"].sum()) & torch.isfinite(record["loss"])).float()
        return record

    def in_order(self, taken):
        """(S, 2 or 4, example) of each micro-batch; of several ranks (micro-batch, rank, S, 2 or 4, example), with zeros where
        other ranks' examples are: the sum is a gather. It is a few numbers per site and example, little beside gradients."""
        if self.ranks.world == 1:
            return taken[0] if len(taken) == 1 else torch.stack(taken)
        everyone = taken[0].new_zeros(len(taken), self.ranks.world, *taken[0].shape)
        everyone[:, self.ranks.rank] = torch.stack(taken)
        return everyone

    def sum_over_ranks(self, record):
        if self.ranks.world == 1 or not record:
            return record
        flat = self.ranks.sum(torch.cat([t.reshape(-1) for t in record.values()]))
        return {name: piece.view(t.shape) for (name, t), piece in
                zip(record.items(), flat.split([t.numel() for t in record.values()]))}

    # -- on the host, for every step in order

    @staticmethod
    def fetch(records):
        """[{name: tensor}] of several steps -> [{name: flat float64 array}], in one transfer."""
        flat = torch.cat([t.reshape(-1) for record in records for t in record.values()]).cpu().double().numpy()
        ends = np.cumsum([t.numel() for record in records for t in record.values()]).tolist()
        pieces = iter([flat[begin:end] for begin, end in zip([0, *ends], ends)])
        return [{name: next(pieces) for name in record} for record in records]

    def absorb(self, record, mode, B, tokens):
        """Bring the averages up to date with one step; record {name: flat float64 array}."""
        if mode != "off":
            sq = self.example_sq(record["sq"], mode, B, record["loss_scale"])
            self.last, self.newest = {}, (mode, sq)
            site_sq, weighted = sq[:, :, :2].sum((0, 2, 3)), sq.shape[2] > 2
        if B == 1:
            return  # one example says nothing about noise
        for group, (sites, params) in self.members.get(mode, {}).items():
            if group not in self.scales:
                continue
            sq_norm, tr_sigma = pair(site_sq[sites], record["param_sq"][params], B)
            self.scales[group].update(sq_norm, tr_sigma, tokens)
            self.last |= {f"gns/{group}_step_sq_norm": sq_norm, f"gns/{group}_step_tr_sigma": tr_sigma}
            if weighted and f"{group}_adam" in self.scales:
                self.scales[f"{group}_adam"].update(*pair(sq[:, sites, 2:], record["param_psq"][params], B), tokens)
        if self.calibration:
            pairs = [pair(site_sq[sites], record["param_sq"][params], B)
                     for sites, params in (self.members[mode][g] for g in ("total", "norm"))] if mode == "exact" else ()
            self.calibration.update(self.scales["norm"], tokens, *pairs)
        for kind, n_small in (("micro", self.config.micro_batch_size), ("rank", B // self.ranks.world)):
            if f"{kind}_sq" in record and B > n_small:
                for group in ("norm", "total"):
                    params = self.members["exact"][group][1]
                    small, big = float(record[f"{kind}_sq"][params].sum()), float(record["param_sq"][params].sum())
                    self.scales[f"{group}_{kind}"].update(*gns.unbiased_pair(small, big, n_small, B), tokens)

    def example_sq(self, sq, mode, B, loss_scale):
        """|g_b|^2 as (micro-batch, site, row, example of the micro-batch); rows: weight, bias(, both in Adam's metric). Each
        process's n_local examples had a share 1/n_local in its loss, so that backward held c_b = loss_scale * g_b / n_local."""
        n_local, m = B // self.ranks.world, self.config.micro_batch_size
        return sq.reshape(B // m, len(self.sites[mode]), -1, m) * (n_local / float(loss_scale[0])) ** 2

    def row(self):
        """The keys of a log line."""
        row = dict(self.last)
        if self.newest:
            mode, sq = self.newest
            own = sq[:, self.norm_sites] if mode != self.config.gns else sq  # a calibration step logs what its neighbours do
            example = own[:, :, :2].sum((1, 2)).reshape(-1)
            row |= {"gns/example_max": float(example.max()), "gns/example_median": float(np.median(example))}
            B = len(example)
            if B > 1:
                # Jackknife over examples of the mean `small`, with `big` held, since norms alone do not tell how |G|^2 moves
                # when an example is left out: good for tr_sigma, which is nearly `small`; of sq_norm it would say too little.
                row["gns/step_tr_sigma_se"] = float(example.std(ddof=1)) / B**0.5 / (1 - 1 / B)
        for name, scale in self.scales.items():
            low, high = scale.interval() or (None, None)
            row |= {f"gns/{name}": scale.gns, f"gns/{name}_low": low, f"gns/{name}_high": high,
                    f"gns/{name}_sq_norm": scale.sq_norm, f"gns/{name}_tr_sigma": scale.tr_sigma}
        if self.calibration:
            for name, value in (("calibration", self.calibration.factor()),
                                ("calibrated", self.calibration.apply(self.scales["norm"]))):
                value, low, high = value or (None, None, None)
                row |= {f"gns/{name}": value, f"gns/{name}_low": low, f"gns/{name}_high": high}
        return row

    def numbers(self):
        """What ranks must agree on."""
        return {f"gns/{name}_{part}": getattr(scale, part) for name, scale in self.scales.items()
                for part in ("sq_norm", "tr_sigma")}

    def state_dict(self):
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()},
                "calibration": self.calibration.state_dict() if self.calibration else None}

    def load_state_dict(self, state):
        for name, scale in self.scales.items():
            if name in state["scales"]:  # those that depend on the number of processes may be new
                scale.load_state_dict(state["scales"][name])
        if self.calibration:
            self.calibration.load_state_dict(state["calibration"])


def membership(sites, names):
    """{group: (mask over sites, mask over parameters)}; a site's bias goes with its weight."""
    groups, own = {}, {"norm": lambda s: s[1] == "norm"}
    if any(group != "norm" for _, group, _ in sites):
        kinds = [g for g in ("attention", "mlp", "embedding", "head") if any(s[1] == g for s in sites)]
        layers = sorted({s[2] for s in sites if s[2] is not None})
        own |= {g: (lambda s, g=g: s[1] == g) for g in kinds}
        own |= {"total": lambda s: True}
        own |= {f"block_{i}": (lambda s, i=i: s[2] == i) for i in layers}
    for group, belongs in own.items():
        inside = {s[0] for s in sites if belongs(s)}
        inside |= {n.removesuffix("weight") + "bias" for n in inside}
        groups[group] = (np.array([belongs(s) for s in sites]), np.array([n in inside for n in names]))
    return groups


def pair(example_sq, param_sq, B):
    return gns.unbiased_pair(float(example_sq.sum()) / B, float(param_sq.sum()), 1, B)


def adam_metrics(optimizer, named):
    """{name: p_j = 1 / (sqrt(v_hat_j) + eps)}, the metric that Adam steps in, or None before its first step."""
    state = [optimizer.state.get(p) for _, p in named]
    if not all(state):
        return None
    group = optimizer.param_groups[0]
    v, beta2 = [local(s["exp_avg_sq"]) for s in state], group["betas"][1]
    correction = (1 - beta2 ** state[0]["step"]).clamp_min(1 - beta2)  # the first step may have been skipped, as not finite
    denominators = torch._foreach_add(torch._foreach_sqrt(torch._foreach_div(v, correction)), group["eps"])
    # a coordinate that never had a gradient (a token not seen yet) has no metric: 1/eps would drown all others
    return {name: p * (second > 0) for (name, _), p, second in zip(named, torch._foreach_reciprocal(denominators), v)}
