"""
What is measured in a training step, between the probes and the noise scale (gns.py). It knows a model's parameters and
sites, and nothing of the trainer around it.

    tracker = Tracker(dict(model.named_parameters()), {mode: model.probe_sites(mode) for mode in ("norm", "exact")},
                      micro_batch_size=8, half_life_tokens=250_000)
    tracker.begin(tokens_before, tokens_after)
    given = tracker.given()                                  # for each micro-batch, to the model: {} or {probes, metrics}
    loss = model(x, y, **given)[1]; loss.backward()
    tracker.take(given)
    record = tracker.record()                                # after the last, before clipping: {name: tensor}
    tracker.absorb(values, B, tokens)                        # later, on the host: the record, with loss_scale and param_sq,
                                                             # the squared norm of each parameter's gradient
    tracker.row()                                            # the keys of a log line

On the device nothing is asked of the host: what the probes got is kept as it is. Sums over examples and sites, the unbiased
pair of each group and the averages are made on the host, for every step, when somebody wants to see them.

Groups: norm; in exact mode also attention, mlp, embedding, head (if untied), total, and block_0, block_1, ...
Calibration: now and then a step is exact, for the factor from the norm layers to the whole model. EXACT_EXAMPLES of its
examples are measured in all layers: the mean of |g_b|^2 over some of them estimates the same number as over all.
Several processes: each measures its own B / world examples, and records are summed over processes. |G|^2 is of the gradient
after averaging: every process has all of it (copies = world), or a part (copies = 1).

A site is a (parameter name, group, layer) whose probe gets norms; the bias beside that weight belongs to it.
B examples in the step, S sites, P parameters.
"""

import math

import numpy as np
import torch

from rightbatch import gns
from rightbatch.metric import weighted_sq

EXACT_EARLY = 12  # exact steps for calibration while the tokens grow e-fold, at first
EXACT_MOST = 8  # at most one exact step in so many, later
EXACT_EXAMPLES = 8  # examples that are measured in all layers in such a step, rounded up to micro-batches
ALL = 2**31  # micro-batches: more than any step has
# rows of the probes that hold squared norms, and the name of |G|^2 in the record: plain, and in the optimizer's metric
PLAIN, ADAM = (slice(0, 2), "param_sq"), (slice(2, 4), "param_psq")


class Tracker:
    def __init__(self, parameters, sites, mode="norm", *, micro_batch_size, half_life_tokens, calibrate_tokens=0, metric=None,
                 rank=0, world=1, copies=1, device="cpu"):
        """parameters: {name: parameter}. sites: {"norm": [...], "exact": [...]}. metric: a function of {name: parameter} that
        gives weights per coordinate as ({name: this process's part}, {name: whole}), or None while there are none."""
        self.parameters, self.sites, self.mode = parameters, sites, mode
        self.micro_batch_size, self.calibrate_tokens, self.metric = micro_batch_size, calibrate_tokens, metric
        self.rank, self.world, self.copies, self.device = rank, world, copies, device
        names = list(parameters)
        self.members = {kind: membership(those, names) for kind, those in sites.items()}
        covered = self.members["exact"]["total"][1]
        assert covered.all(), f"no site for {[n for n, c in zip(names, covered) if not c]}"
        self.masks = {"norm": self.members["norm"]["norm"][1], "exact": covered}
        self.watched = {kind: {n: p for (n, p), inside in zip(parameters.items(), mask) if inside}
                        for kind, mask in self.masks.items()}
        self.groups = list(self.members[mode]) if mode != "off" else []
        self.metrics = {"": PLAIN} | ({"_adam": ADAM} if metric else {})
        self.scales = {group + suffix: gns.NoiseScale(half_life_tokens, gns.EARLY) for suffix in self.metrics
                       for group in self.groups if not (suffix and group.startswith("block_"))}
        calibrated = self.metrics if mode == "norm" and calibrate_tokens else ()
        self.calibrations = {suffix: gns.Calibration(half_life_tokens, gns.EARLY) for suffix in calibrated}
        self.norm_sites = [i for i, site in enumerate(sites["exact"]) if site[1] == "norm"]
        self.probes, self.taken, self.weights = {}, [], None
        self.newest_pairs, self.newest_norms = {}, None  # of the newest step alone: log keys; its example_sq

    # -- on the device, during a step

    def begin(self, before, after):
        """A step from `before` to `after` tokens."""
        self.taken, self.weights = [], None
        self.calibrating = bool(self.calibrations) and calibrates(before, after, self.calibrate_tokens)
        if self.metric and self.mode != "off":
            self.weights = self.metric(self.watched["exact" if self.calibrating else self.mode])
        self.exact_micro_batches = exact_micro_batches(self.micro_batch_size, self.world)
        if self.metric and not self.weights:  # norm layers have one: without it they would be compiled once more
            self.exact_micro_batches = ALL

    def given(self):
        """What the next micro-batch passes to the model: {} or {probes, metrics}."""
        if self.mode == "off":
            return {}
        mode = "exact" if self.calibrating and len(self.taken) < self.exact_micro_batches else self.mode
        metrics = {name: self.weights[1][name] for name in self.watched[mode]} if self.weights else None
        return {"probes": self.probes_for(len(self.sites[mode]), 4 if metrics else 2), "metrics": metrics}

    def probes_for(self, sites, rows):
        """Kept, so that torch.compile sees the same leaf."""
        if (sites, rows) not in self.probes:
            self.probes[sites, rows] = torch.zeros(sites, rows, self.micro_batch_size, device=self.device, requires_grad=True)
        return self.probes[sites, rows]

    def take(self, given):
        """After the backward pass of one micro-batch: keep its norms."""
        if given:
            self.taken.append(given["probes"].grad)
            given["probes"].grad = None

    def record(self):
        """The step's norms as {name: tensor}, before clipping, to be summed over processes. In the scale of the backward pass,
        which example_sq undoes."""
        if not self.taken:
            return {}
        exact = self.exact_micro_batches if self.calibrating else 0
        parts = {"exact_sq": self.taken[:exact], "sq": self.taken[exact:]}
        record = {name: self.in_order(taken) for name, taken in parts.items() if taken}
        if self.weights:
            part = self.weights[0]
            grads = [local(self.parameters[name].grad) for name in part]
            record["param_psq"] = weighted_sq(grads, list(part.values())) / self.copies  # of the watched parameters alone
            self.weights = None  # as large as the model in an exact step
        return record

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
        measured, parts = {}, [self.example_sq("sq", values, self.mode, B)] if "sq" in values else []
        if "exact_sq" in values:
            measured["exact"] = self.example_sq("exact_sq", values, "exact", B)
            parts.insert(0, measured["exact"][:, self.norm_sites])
        measured[self.mode] = np.concatenate(parts)
        self.newest_pairs, self.newest_norms = {}, measured[self.mode]
        if B == 1:
            return  # one example says nothing about noise
        param_sq = {"param_sq": values["param_sq"]}
        if "param_psq" in values:  # there is no metric before the optimizer's first step
            param_sq["param_psq"] = np.zeros(len(self.parameters))
            param_sq["param_psq"][self.masks["exact" if "exact" in measured else self.mode]] = values["param_psq"]
        for suffix, (rows, big) in self.metrics.items():
            if big in param_sq:
                sums = {mode: (sq[:, :, rows].sum((0, 2, 3)), sq.shape[0] * sq.shape[3]) for mode, sq in measured.items()}
                self.absorb_metric(suffix, sums, param_sq[big], B, tokens)

    def absorb_metric(self, suffix, sums, param_sq, B, tokens):
        """One step in one metric. sums: {mode: ((S,) summed over the examples measured in that mode, how many)}; param_sq (P,)
        of the mean gradient of all B."""
        pairs = {mode: {group: gns.unbiased_pair(float(sq[sites].sum()) / n, float(param_sq[params].sum()), 1, B)
                        for group, (sites, params) in self.members[mode].items()} for mode, (sq, n) in sums.items()}
        for group, (sq_norm, tr_sigma) in pairs[self.mode].items():
            if group + suffix in self.scales:
                self.scales[group + suffix].update(sq_norm, tr_sigma, tokens)
                step = f"gns/{group}{suffix}_step"
                self.newest_pairs |= {f"{step}_sq_norm": sq_norm, f"{step}_tr_sigma": tr_sigma}
        if suffix in self.calibrations:  # both of the same examples, so that their errors cancel
            both = (pairs["exact"]["total"], pairs["exact"]["norm"]) if "exact" in pairs else ()
            self.calibrations[suffix].update(self.scales["norm" + suffix], tokens, *both)

    def example_sq(self, name, values, mode, B):
        """|g_b|^2 as (micro-batch, site, row, example of the micro-batch); rows: weight, bias, perhaps both in the metric. Each
        process's n_local examples had a share 1/n_local in its loss: backward held c_b = loss_scale * g_b / n_local."""
        n_local, rows = B // self.world, 4 if "param_psq" in values else 2
        sq = values[name].reshape(-1, len(self.sites[mode]), rows, self.micro_batch_size)
        return sq * (n_local / float(values["loss_scale"][0])) ** 2

    def row(self):
        """The keys of a log line."""
        row = dict(self.newest_pairs)
        if self.newest_norms is not None:
            row |= example_statistics(self.newest_norms[:, :, PLAIN[0]].sum((1, 2)).reshape(-1))
        row |= scale_row(self.scales)
        for suffix, calibration in self.calibrations.items():
            row |= named(f"gns/calibration{suffix}", calibration.factor())
            row |= named(f"gns/calibrated{suffix}", calibration.apply(self.scales["norm" + suffix]))
        return row

    def state_dict(self):
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()},
                "calibrations": {suffix: calibration.state_dict() for suffix, calibration in self.calibrations.items()}}

    def load_state_dict(self, state):
        for name, scale in self.scales.items():
            if name in state["scales"]:  # fsdp measures fewer than one process, and one may go on where the other was
                scale.load_state_dict(state["scales"][name])
        for suffix, calibration in self.calibrations.items():
            if suffix in state["calibrations"]:
                calibration.load_state_dict(state["calibrations"][suffix])


def membership(sites, names):
    """{group: (mask over sites, mask over parameters)}; a site's bias goes with its weight."""
    kinds = {kind for _, kind, _ in sites}
    groups = ["norm"]
    if kinds - {"norm"}:
        layers = sorted({layer for _, _, layer in sites if layer is not None})
        groups += [kind for kind in ("attention", "mlp", "embedding", "head") if kind in kinds]
        groups += ["total", *(f"block_{layer}" for layer in layers)]
    masks = {}
    for group in groups:
        belongs = [group in (kind, "total", f"block_{layer}") for _, kind, layer in sites]
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


def scale_row(scales):
    """The log keys of {name: NoiseScale}."""
    row = {}
    for name, scale in scales.items():
        interval = scale.interval()
        row |= named(f"gns/{name}", interval and (scale.gns, *interval))
        row |= {f"gns/{name}_sq_norm": scale.sq_norm, f"gns/{name}_tr_sigma": scale.tr_sigma}
    return row


def named(key, estimate):
    """{key, key_low, key_high} of (value, low, high), or of None."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), estimate or (None, None, None)))


def calibrates(before, after, every):
    """Whether the step from `before` to `after` tokens is exact: one in `every` tokens, and at most one in EXACT_MOST steps. At
    first they are closer, so that the averages, which look back over a share of the tokens alone, always hold several; but of
    steps of one size never two in a row, since the others tell what a step costs."""
    two = 2 * (after - before)
    if before < EXACT_EARLY * every:
        begun, ended = before // two, after // two
        return before == 0 or ended > begun > 0 and (
            math.floor(EXACT_EARLY * math.log(ended)) > math.floor(EXACT_EARLY * math.log(begun)))
    return crossed(before, after, max(every, EXACT_MOST * (after - before)))


def exact_micro_batches(micro_batch_size, world):
    """Those of each process that are exact in an exact step."""
    return -(-EXACT_EXAMPLES // (micro_batch_size * world))


def crossed(before, after, every):
    """Whether a multiple of `every` lies above `before` and not above `after`."""
    return every > 0 and after // every > before // every


def local(tensor):
    """This process's part of a sharded tensor, the tensor itself if it is none."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
