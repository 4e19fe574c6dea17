"""
The gradient noise scale of any model, in any training loop.

    from rightbatch import watch
    w = watch(model)                 # before torch.compile; DDP and FSDP before or after
    ...                              # forward and backward, as often as you accumulate
    w.step()                         # after the last backward pass of a step; with watch(model, optimizer) by itself
    print(w)                         # noise scale 38 [32, 46] sequences
    log(w.row())                     # {"gns/norm": 38.1, "gns/norm_low": ..., ...}, the keys of train.py
    print(w.whatif())                # the right batch on this machine; needs the optimizer, and mode="exact" or calibrate_every

The model's code, its results and its state_dict stay as they are. docs/watch.md has the recipes and what is assumed.

Letters: B examples, c_b what example b adds to the gradient, q = sum |c_b|^2, big = |sum c_b|^2, h = sum of squared shares.
"""

import itertools
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rightbatch import gns, step_time, taps
from rightbatch.decision import Cost, Decision
from rightbatch.exact import Exact
from rightbatch.fuse import fuse, unfuse
from rightbatch.metric import adam_metric
from rightbatch.recognise import Norm, WatchError, recognise
from rightbatch.tracker import EARLY, named, scale_row

FETCH = 512     # steps that may wait on the device when nobody asks for a report
IGNORED = -100  # the label that losses leave out, by torch's convention
MIXES = "BatchNorm mixes examples: no example has a gradient of its own"


def watch(model, optimizer=None, *, mode="norm", fused=False, calibrate_every=0, batch_dim=0, skip=(), scaler=None,
          half_life_tokens=250_000, lengths="auto", token_mean="auto", group=None, close_steps=True):
    """
    A Watch of the model: print it, or log its row().

    model             finds LayerNorms and RMSNorms by what they do; w.left_out says what it left out, and why
    optimizer         closes steps by itself, reports in Adam's metric, too, and lets w.whatif() time the update
    mode              "norm", or "exact": all layers that can be had, at the price of their gradients once more
    fused             let our kernels compute the norm layers that are recognised, and their taps: faster, the same up to
                      rounding. On a CPU they are compiled once, which takes half a minute
    calibrate_every   with mode="norm": every so many steps is exact, and tells the factor from norm layers to the whole model
    batch_dim         the dimension of examples in the layers' inputs: 1 for (T, B, C)
    skip              names of modules to leave out; a name stands for all below it
    scaler            torch.amp.GradScaler, whose factor changes between steps
    half_life_tokens  averages forget half in so many tokens, or in a fifth of those seen, if less
    lengths           what an example weighs in the loss: "auto" counts labels that are not ignored, else the attention mask;
                      "equal"; w.weights(n) says it for one forward pass
    token_mean        "micro": each forward pass's loss is a mean over its own tokens (and averaged over accumulation, ranks).
                      "step": all tokens of the step weigh alike. "auto": step where the model is given num_items_in_batch, as
                      Hugging Face's Trainer does
    group             process group that holds the batch
    close_steps       False: the optimizer is for its metric alone, and w.step() is called by you
    """
    return Watch(**locals())


@dataclass
class Site:
    """One watched norm layer."""
    name: str
    module: torch.nn.Module
    norm: Norm
    leaf: torch.Tensor | None = None
    hidden_calls: int = 0  # calls without gradients in the newest forward pass: reentrant checkpointing

    @property
    def parameters(self):
        """weight(, bias), as they are now: sharding and to_empty put others in their place."""
        return [p for p in self.module._parameters.values() if p is not None]

    @property
    def size(self):
        return self.norm.shape.numel() * (1 + self.norm.bias)


@dataclass
class Pass:
    """What the newest forward pass of the model brings: B examples, tokens, lengths (B,) or None; whether its loss is a part of
    one mean over the whole step."""
    B: int | None = None
    tokens: int = 0
    lengths: torch.Tensor | None = None
    whole: bool = False
    segments: tuple | None = None  # (document of each position (B, T), number of documents): these are the examples
    inside: bool = False
    z: dict = field(default_factory=dict)       # site -> where its calls of this pass meet
    counts: dict = field(default_factory=dict)  # (dtype, device) -> taps.head


@dataclass
class Last:
    """One step: its examples, mean |g_b|^2 and |mean g_b|^2 over the watched parameters, both up to one common factor. With
    unequal shares of the loss `effective` is Kish's number of examples, and `small` goes with it."""
    examples: int
    small: float
    big: float
    effective: float


class Hook:
    """A bound method as a module hook. A copy of the model (an average of weights, a pickle) gets one that does nothing."""

    def __init__(self, call, *before):
        self.call, self.before = call, before

    def __call__(self, *args):
        return self.call(*self.before, *args)

    def __reduce_ex__(self, protocol):
        return Silent, ()


class Silent:
    def __call__(self, *args):
        return None


class Watch:
    """What watch() returns, which documents the options."""

    def __init__(self, model, optimizer, *, mode, fused, calibrate_every, batch_dim, skip, scaler, half_life_tokens, lengths,
                 token_mean, group, close_steps):
        for name, value, choices in (("mode", mode, ("norm", "exact")), ("lengths", lengths, ("auto", "equal")),
                                     ("token_mean", token_mean, ("auto", "micro", "step"))):
            if value not in choices:
                raise WatchError(f"{name}={value!r}: expected one of {', '.join(choices)}")
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
            scaler, optimizer = scaler or getattr(optimizer, "scaler", None), optimizer.optimizer
        self.model, self.optimizer, self.scaler, self.group = model, optimizer, scaler, group
        self.batch_dim, self.lengths, self.token_mean, self.half_life_tokens = batch_dim, lengths, token_mean, half_life_tokens
        self.calibrate_every = calibrate_every
        self.current, self.given, self.documents = Pass(), None, None
        self.waiting, self.checked, self.steps = [], False, 0
        self.newest, self.newest_length, self.overflows = None, None, 0  # of the steps that were fetched
        self.find(model, mode, [skip] if isinstance(skip, str) else skip)
        self.fused = fuse(self.sites) if fused else {}
        self.scales, self.covered = {}, [0.0, 0.0]
        self.calibrations = {}  # "", and "_adam" in Adam's metric
        self.timed, self.timer, self.saved_times = None, None, None
        self.asked = False  # to be told when the backward pass at work is over
        self.events, self.closed = [], None  # moments (step_time.from_hooks) of the step at work, of the one in the optimizer
        self.depth = 0  # of optimizer.step: a subclass that calls the one of its base runs the hooks twice
        self.quantum, self.groups = 1, {}  # of the optimizer: parameter -> its group
        self.scaler_states = getattr(scaler, "_per_optimizer_states", None)
        self.handles = [model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True),
                        model.register_forward_hook(Hook(self.end), always_call=True)]
        self.handles += [s.module.register_forward_hook(Hook(self.tap, s), with_kwargs=True) for s in self.sites]
        self.close_steps = close_steps
        if optimizer is not None:
            self.attach(optimizer)

    def find(self, model, mode, skip):
        check_model(model)
        self.sites, self.left_out = find_sites(model, skip)
        if mode == "norm" and not self.sites and "frozen" in self.left_out.values():
            warnings.warn("the norm layers are frozen, and what their noise scale would be misleads: watching the layers that "
                          "are trained instead, as with mode='exact'", stacklevel=4)
            mode = "exact"
        if mode == "norm" and not self.sites:
            raise WatchError("nothing to watch: " + (
                "its BatchNorm mixes examples: no example has a gradient of its own" if MIXES in self.left_out.values() else
                "it has no norm layer with a weight: mode='exact' watches the other layers"))
        exact = mode == "exact" or self.calibrate_every
        self.mode, self.exact = mode, Exact(model, self, lambda name: skips(name, skip)) if exact else None
        if mode == "exact" and not self.sites and not self.exact.layers:
            raise WatchError("nothing to watch: no layer that is trained is a norm, linear, embedding or convolution")
        self.make_leaves()

    def make_leaves(self):
        """Ahead of the layers, which may be compiled: a leaf is not made within a graph."""
        for site in self.sites:
            if site.leaf is None and not site.parameters[0].is_meta:
                self.leaf(site, site.parameters[0])

    # -- in the forward pass

    def begin(self, model, args, kwargs):
        if torch.is_grad_enabled():
            self.depth = 0  # an optimizer.step that raised did not say that it was over
            self.passed("forward")
            self.open_pass(model, args, kwargs)

    def forget_skipped(self):
        """GradScaler leaves out a step that overflowed: the optimizer's hook does not run, and what that step left must not go
        into the next. Its update() puts a new dict in the place of the old one, which tells without asking the device."""
        if self.scaler is None or torch.compiler.is_compiling():
            return
        states = getattr(self.scaler, "_per_optimizer_states", None)
        if states is not self.scaler_states and any(s.leaf is not None and s.leaf.grad is not None for s in self.watched):
            self.overflows += 1
            self.events = []
            for s in self.watched:
                s.leaf.grad = None
            if self.exact:
                self.exact.sums = {}
        self.scaler_states = states

    def open_pass(self, model, args, kwargs):
        self.forget_skipped()
        first = next((t for t in tensors((args, kwargs)) if t.dim() >= 2), None)
        B = None if first is None else first.shape[min(self.batch_dim, 1)]
        tokens = 0 if first is None else first.numel() if not first.is_floating_point() else B
        self.make_leaves()
        given, segments, self.given, self.documents = self.given, self.documents, None, None
        lengths = given
        if given is None and self.lengths == "auto":
            lengths = lengths_of(model, kwargs, B, segments)
        whole = self.token_mean == "step" or self.token_mean == "auto" and kwargs.get("num_items_in_batch") is not None
        self.current = Pass(B, tokens, lengths, whole, segments, inside=True)
        for site in self.sites:
            site.hidden_calls = 0
        if self.exact:
            self.exact.begin()

    def end(self, *_):
        self.current.inside = False
        self.current.z = {}

    def tap(self, site, module, args, kwargs, y):
        """Forward hook of a norm layer: pass its output through Tap."""
        now = self.current
        if not torch.is_grad_enabled():
            site.hidden_calls += now.inside
            return None
        if not y.requires_grad or not any(p.requires_grad for p in site.parameters):
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        B = self.check_call(site, x, y)
        B = now.segments[1] if now.segments else B
        z = now.z.get(site.name)
        if z is None:
            z = taps.Gather.apply(self.leaf(site, x), self.counts(x, B), B)
            if now.inside:
                now.z[site.name] = z
        return taps.Tap.apply(y, x, z, site.norm, self.batch_dim, now.segments, site.name in self.fused)

    def check_call(self, site, x, y):
        if is_dtensor(x) or is_dtensor(y):
            raise WatchError(f"{site.name}: an example is spread over ranks (sequence parallelism), so that no rank has its "
                             f"gradient. Watch a model without it, or skip=({site.name!r},)")
        if site.hidden_calls > 1 and not self.current.inside:
            raise WatchError(f"{site.name} is used several times in a forward pass under reentrant checkpointing, which runs "
                             "backward for each alone: use_reentrant=False")
        dim = 0 if site.norm.channels > 0 else self.batch_dim
        B, expected = x.shape[dim], self.current.B
        if expected is not None and B != expected:
            raise WatchError(f"{site.name} sees {B} examples in its input {tuple(x.shape)}, the model sees {expected}: pass "
                             f"batch_dim={1 - dim} if the batch is there, or skip=({site.name!r},) if it is folded away")
        documents = self.current.segments and self.current.segments[0].shape
        if documents and (site.norm.channels > 0 or x.movedim(dim, 0).shape[:2] != documents):
            raise WatchError(f"{site.name}: its input {tuple(x.shape)} does not begin with {tuple(documents)}, the positions "
                             f"of w.segments. skip=({site.name!r},) leaves it out")
        return B

    def leaf(self, site, x):
        """Made for the device that the model is on when it is used; a compiled model's are made before it is traced."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if site.leaf is None or site.leaf.device != x.device or site.leaf.dtype != dtype:
            site.leaf = taps.new_leaf(site.size, dtype, x.device)
            if site is self.sites[-1]:
                site.leaf.register_post_accumulate_grad_hook(self.in_backward)
        return site.leaf

    def counts(self, x, B):
        key = torch.promote_types(x.dtype, torch.float32), x.device
        if key not in self.current.counts:
            self.current.counts[key] = taps.head(B, self.current.tokens or B, self.current.lengths, *key)
        return self.current.counts[key]

    def weights(self, n):
        """What each example of the next forward pass weighs in its loss, (B,): number of its tokens, or any other measure."""
        self.given = torch.as_tensor(n)

    def segments(self, ids, n=None):
        """Documents packed into the rows of the next forward pass, which are the examples then: the number of each position's
        document, (B, T), from 0 on and different in every row; -1 is padding. n: how many, where ids are on a device that would
        have to be asked. Attention must not cross documents."""
        if self.exact:
            raise WatchError("w.segments works with mode='norm' and without calibration")
        ids = torch.as_tensor(ids)
        self.documents = ids, int(ids.max()) + 1 if n is None else n

    # -- what a step costs

    def attach(self, optimizer):
        """The optimizer whose metric is reported, and whose step ends a step."""
        if optimizer is not self.timed:
            self.handles += [optimizer.register_step_pre_hook(self.before_optimizer),
                             optimizer.register_step_post_hook(lambda *_: self.updated())]
        self.optimizer, self.timed, self.groups = optimizer, optimizer, {}

    def clock(self):
        """Made when training begins: before, the model may be on another device, or on none."""
        if self.timer is None:
            device = next(self.model.parameters()).device.type
            self.timer = step_time.StepTime(device, 1, self.half_life_tokens, self.world())
            self.timer.load_state_dict(self.saved_times)
        return self.timer

    def start(self):
        """Before the first forward pass of a step: its time counts from here. Only a compiled model needs it, for w.whatif()
        and with a GradScaler: hooks inside of it cannot look at a clock, nor at the scaler."""
        self.forget_skipped()
        self.passed("start")

    def passed(self, what):
        if self.timed and not torch.compiler.is_compiling():
            self.events.append((what, self.clock().now()))

    def in_backward(self, leaf):
        """Some layer has its gradient: look at the clock when all have theirs."""
        if self.timed and not self.asked:
            self.asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_over)

    def backward_over(self):
        self.asked = False
        self.passed("backward")

    def updated(self):
        """The optimizer has stepped. If the next forward pass began before, nothing can be told."""
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        if self.closed is not None and not self.events:
            self.closed.append(("update", self.clock().now()))
        self.closed = None

    # -- after the backward passes of a step

    def before_optimizer(self, optimizer, args, kwargs):
        """A closure computes the gradients inside of optimizer.step: then the step ends behind it."""
        self.depth += 1
        if self.depth > 1 or not self.close_steps:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self.step()

        def closure_and_step():
            loss = closure()
            self.step()
            return loss
        return (optimizer, closure_and_step), {}

    @torch.no_grad()
    def step(self):
        """Close a step: after its last backward pass, before the optimizer moves. Nothing waits for the device."""
        self.check_gradients()
        numbers, counts = self.norm_numbers() if self.sites else ({}, None)
        if self.exact and self.exact.on:
            more, counts = self.exact_numbers(numbers, counts)
            numbers |= more
        scale = getattr(self.scaler, "_scale", None)
        scale = 1.0 if scale is None else scale.to(counts.device)  # .get_scale() would wait for the device
        pairs = torch.stack([number for pair in numbers.values() for number in pair]) / (scale * self.world()) ** 2
        calibrates = self.mode == "norm" and self.exact and self.exact.on
        self.events, self.closed, self.asked = [], self.events, False
        self.waiting.append((torch.cat([counts, pairs]), list(numbers), self.current.whole, [] if calibrates else self.closed))
        self.steps += 1
        if self.exact and self.mode == "norm":
            self.exact.on = self.steps % self.calibrate_every == 0
        if not self.checked or len(self.waiting) >= FETCH:
            self.fetch()

    @property
    def watched(self):
        return [*self.sites, *(self.exact.layers if self.exact else ())]

    def check_gradients(self):
        if not self.distributed() and not any(s.leaf is not None and s.leaf.grad is not None for s in self.watched):
            raise WatchError("no watched layer got a gradient since the last step: was the model compiled before watch(model) "
                             "(later hooks are ignored: watch first), or is w.step() before loss.backward()?")

    def norm_numbers(self):
        """({"norm": (q, big)}, counts), and "norm_adam" in Adam's metric; over all ranks. The leaves are emptied."""
        device = next((s.leaf.device for s in self.sites if s.leaf is not None), "cpu")
        parts = []
        for s in self.sites:
            grad = None if s.leaf is None else s.leaf.grad
            parts.append((s.size, torch.zeros(2 * s.size + taps.HEAD, device=device) if grad is None else grad))
            if s.leaf is not None:
                s.leaf.grad = None
        flat = torch.cat([g[:n] for n, g in parts] + [g[n:2 * n] for n, g in parts] + [
            torch.stack([g[2 * n:] for n, g in parts]).amax(0)])  # a layer may be left out of some passes, never of all
        self.sum_over_ranks(flat)
        n = sum(s.size for s in self.sites)
        sums, squares, counts = flat.split([n, n, taps.HEAD])
        numbers = {"norm": (squares.sum(), sums.square().sum())}
        metric = self.norm_metric()
        if metric is not None:
            numbers["norm_adam"] = (metric * squares).sum(), (metric * sums.square()).sum()
        return numbers, counts

    def norm_metric(self):
        """Adam's metric of all watched norm parameters in one vector, or None. Those of one group of the optimizer step
        together, so that a few operations do for all."""
        parameters = [p for s in self.sites for p in s.parameters]
        groups = [self.adam_group(p) for p in parameters]
        if any(group is None for group in groups):
            return None
        parts = []
        for _, members in itertools.groupby(zip(groups, parameters), key=lambda pair: id(pair[0])):
            members = list(members)
            moments = torch.cat([self.second_moment(p).reshape(-1) for _, p in members])
            parts.append(self.adam_metric(moments, *members[0]))
        return torch.cat(parts)

    def exact_numbers(self, norm, counts):
        """The same for all layers; "coverage": |G|^2 of what is measured, and of all that is trained."""
        (q, big, q_adam, big_adam, rest), own_counts = self.exact.collect(self.sites)
        parts = torch.stack([q, q_adam, *own_counts])
        self.sum_over_ranks(parts)
        q, q_adam, own_counts = parts[0], parts[1], parts[2:]
        zero = (q.new_zeros(()),) * 2
        total = [a + b for a, b in zip((q, big), norm.get("norm", zero))]
        found = {"total": total, "coverage": (total[1], total[1] + rest)}
        if big_adam is not None and ("norm_adam" in norm or not self.sites):
            found["total_adam"] = [a + b for a, b in zip((q_adam, big_adam), norm.get("norm_adam", zero))]
        return found, own_counts if counts is None else counts

    def metric_of(self, p):
        """Adam's metric of a parameter, or None: another optimizer, or before its first step."""
        group = self.adam_group(p)
        return None if group is None else self.adam_metric(self.second_moment(p), group, p)

    def adam_metric(self, moments, group, p):
        """Of second moments that have made as many steps as p."""
        step = self.optimizer.state[p]["step"]
        if getattr(step, "device", None) != moments.device:  # on the host: a copy would wait for the device, a number does not
            step = torch.full((), float(step), device=moments.device)
        return adam_metric([moments], step, group["betas"][1], group["eps"])[0]

    def second_moment(self, p):
        v = self.optimizer.state[p]["exp_avg_sq"]
        return v.full_tensor() if is_dtensor(v) else v

    def adam_group(self, p):
        """The group of the optimizer that p is in, if Adam steps there and has a second moment of p."""
        if self.optimizer is None or "exp_avg_sq" not in self.optimizer.state.get(p, {}):
            return None
        if p not in self.groups:
            self.groups = {other: group for group in self.optimizer.param_groups for other in group["params"]}
        return self.groups[p] if "betas" in self.groups[p] else None  # Adafactor has no betas

    def distributed(self):
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def world(self):
        return dist.get_world_size(self.group) if self.distributed() else 1

    def sum_over_ranks(self, tensor):
        if self.distributed():
            dist.all_reduce(tensor, group=self.group)

    def hook(self, call, *before):
        return Hook(call, *before)

    # -- on the host, when somebody asks

    @property
    def last(self):
        """The newest step alone, a Last; None before the first."""
        self.fetch()
        return self.newest

    @property
    def mean_length(self):
        """Tokens that count in an example of the newest step."""
        self.fetch()
        return self.newest_length

    @property
    def skipped(self):
        """Steps that were not measured: their gradient was not finite, or GradScaler left them out."""
        self.fetch()
        return self.overflows

    def fetch(self):
        """Bring the averages up to date, with one transfer for all steps that wait."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        flat = iter(torch.cat([numbers.double() for numbers, *_ in waiting]).tolist())
        for _, names, whole, events in waiting:
            counts = [next(flat) for _ in range(taps.HEAD)]
            self.absorb({name: (next(flat), next(flat)) for name in names}, whole, events, *counts)

    def absorb(self, numbers, whole, events, passes, B, total, squares, own, tokens):
        if not all(abs(v) < float("inf") for pair in numbers.values() for v in pair):
            self.overflows += 1  # a gradient that is not finite: GradScaler leaves such a step out, too
            return
        if B <= 1:
            if not self.checked:
                raise WatchError("one example in the whole step: its noise cannot be told from its gradient. Take a batch of "
                                 "at least two, by micro-batch, accumulation or ranks")
            return
        self.checked = True
        h = squares / total**2 if whole else own / passes**2
        self.newest_length = tokens / B if total == B else total / B
        coverage = numbers.pop("coverage", None)
        if coverage:
            self.covered = [old + new for old, new in zip(self.covered, coverage)]
        q, big = numbers["total" if self.mode == "exact" else "norm"]
        self.newest = Last(round(B), q / h, big, 1 / h)
        pairs = {name: gns.unequal_pair(*pair, h, B) for name, pair in numbers.items()}
        for name, pair in pairs.items():
            if self.mode == "exact" or name.startswith("norm"):
                self.scale(name).update(*pair, tokens)
        for metric in ("", "_adam") if self.mode == "norm" and self.calibrate_every else ():
            if f"norm{metric}" in pairs:
                self.calibrated(metric).update(self.scales[f"norm{metric}"], tokens, pairs.get(f"total{metric}"),
                                               pairs[f"norm{metric}"])
        self.quantum = max(1, round(B * self.world() / passes))
        if events:
            self.timer.absorb_hooks(events, passes / self.world(), B, tokens)

    def scale(self, name):
        return self.scales.setdefault(name, gns.NoiseScale(self.half_life_tokens, EARLY))

    def calibrated(self, metric):
        return self.calibrations.setdefault(metric, gns.Calibration(self.half_life_tokens, EARLY))

    def row(self, all_ranks=False):
        """The log keys: the noise scale in examples with its 95% interval, |G|^2 and tr(Sigma); None while undetermined. The
        cost of a step and the right batch once they are known; all_ranks as in whatif."""
        self.fetch()
        row = scale_row(self.scales)
        for metric, calibration in self.calibrations.items():
            row |= named(f"gns/calibration{metric}", calibration.factor())
            row |= named(f"gns/calibrated{metric}", calibration.apply(self.scale(f"norm{metric}")))
        if self.exact:
            row["gns/coverage_percent"] = self.coverage
        estimate = self.step_cost(all_ranks)
        return row | step_time.row(estimate) | self.decide(estimate).row()

    def whatif(self, all_ranks=False):
        """The right batch on this machine, a Decision: print it, or read .right. Each rank has its own clock; with all_ranks,
        which all have to call then, the slowest one's counts, as it should."""
        self.fetch()
        return self.decide(self.step_cost(all_ranks))

    def step_cost(self, all_ranks):
        """{"fixed", "per_sequence"} as triples in seconds, or None."""
        own = self.timer and self.timer.estimate()
        if not (all_ranks and self.distributed()):
            return own
        everyone = [None] * self.world()
        dist.all_gather_object(everyone, own, group=self.group)
        return step_time.slowest(everyone)

    def decide(self, estimate):
        noise, of_what, missing = self.whole_noise()
        if self.coverage is not None and self.coverage < 99:
            of_what += f", {self.coverage:.0f}% of its squared gradient"
        cost = estimate and Cost(estimate["fixed"], estimate["per_sequence"], "measured")
        if cost is None:
            missing.append("What a step costs is not known: " + (
                "give watch the optimizer, whose step ends it." if not self.timed else
                "Apple's MPS does not tell the time without waiting." if self.timer and self.timer.device == "mps" else
                f"too few steps were timed, {step_time.WARM_UP} to warm up not counted. In a compiled model, call w.start() "
                "before a step's first forward pass."))
        return Decision(noise, of_what, cost, self.quantum, self.newest.examples if self.newest else 0, missing)

    def whole_noise(self):
        """(noise scale of the whole model as a triple or None, of what, [why not]). In Adam's metric where Adam steps."""
        measured = "total" if self.mode == "exact" else "norm"
        metric = "_adam" if f"{measured}_adam" in self.scales else ""
        of_what = "the whole model" + (" in Adam's metric" if metric else "")
        if self.mode == "exact":
            scale = self.scale(f"total{metric}")
            interval = scale.interval()
            noise = interval and (scale.gns, *interval)
        elif self.calibrate_every:
            noise = self.calibrated(metric).apply(self.scale(f"norm{metric}"))
        else:
            return None, of_what, ["Which batch is right follows from the whole model's noise scale. The norm layers' is "
                                   "proportional to it, and the factor is missing: watch(..., calibrate_every=100) measures "
                                   "it, or mode='exact' all layers."]
        if not noise or not noise[0] > 0:
            return None, of_what, [f"The noise scale of {of_what} is undetermined yet: the gradient is lost in its noise."]
        missing = [] if self.coverage >= 50 else [
            f"Only {self.coverage:.0f}% of the squared gradient is measured, which may not speak for the whole: "
            "w.exact.left_out and parameters without a layer are not in it."]
        return noise, of_what, missing

    @property
    def coverage(self):
        """Per cent of the squared gradient that exact steps measured, or None before the first."""
        return 100 * self.covered[0] / self.covered[1] if self.covered[1] else None

    def __str__(self):
        self.fetch()
        name = "total" if self.mode == "exact" else "norm"
        words = [f"noise scale {self.say(name)} sequences"]
        if f"{name}_adam" in self.scales:
            words.append(f"in Adam's metric {self.say(name + '_adam')}")
        whole = self.whole_noise() if self.calibrations else (None,)
        if whole[0]:
            words.append("of {} {:.3g} [{:.3g}, {:.3g}]".format(whole[1], *whole[0]))
        if self.coverage is not None:
            words.append(f"{self.coverage:.0f}% of the squared gradient measured" + (
                " in exact steps" if self.mode == "norm" else ""))
        return "; ".join(words)

    def say(self, name):
        scale = self.scale(name)
        interval = scale.interval()
        return f"{scale.gns:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]" if interval else "undetermined yet, in"

    def state_dict(self):
        self.fetch()
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()}, "covered": list(self.covered),
                "steps": self.steps, "calibrations": {metric: c.state_dict() for metric, c in self.calibrations.items()},
                "step_time": self.timer.state_dict() if self.timer else self.saved_times}

    def load_state_dict(self, state):
        for name, scale in state["scales"].items():
            self.scale(name).load_state_dict(scale)
        self.steps, self.covered = state["steps"], list(state["covered"])
        for metric, calibration in state["calibrations"].items():
            self.calibrated(metric).load_state_dict(calibration)
        self.saved_times, self.timer = state["step_time"], None

    def close(self):
        """Take everything out of the model and the optimizer again."""
        for handle in self.handles + (self.exact.handles if self.exact else []):
            handle.remove()
        unfuse(self.fused)
        self.handles, self.fused = [], {}


# ---------------------------------------------------------------------------------------------------------------------
# What can be watched


def check_model(model):
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.DataParallel):
            raise WatchError("DataParallel copies the model in every forward pass: start with torchrun, under DDP")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise WatchError(f"{name or 'the model'} is compiled already, and torch.compile ignores later hooks: call "
                             "watch(model) before torch.compile(model)")


def find_sites(model, skip):
    """(sites, {name: why not})."""
    sites, left_out = [], {}
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and skips(name, skip):
            left_out[name] = "skipped"
        elif isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and own:
            left_out[name] = MIXES
        elif own:
            norm = recognise(module)
            if isinstance(norm, Norm) and any(p.requires_grad for p in own):
                sites.append(Site(name, module, norm))
            elif norm:
                left_out[name] = "frozen" if isinstance(norm, Norm) else norm
    return sites, left_out


def skips(name, skip):
    return any(name == s or name.startswith(f"{s}.") for s in skip)


def tensors(values):
    """All tensors in nested arguments, in order."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for v in values:
            yield from tensors(v)
    elif hasattr(values, "values"):
        for v in values.values():
            yield from tensors(v)


def lengths_of(model, kwargs, B, segments):
    """(B,) tokens of each example that count in the loss, or None where there is nothing to tell them from."""
    labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
    shift, counts = 0, None
    if isinstance(labels, torch.Tensor):
        if labels.dim() != 2 or labels.is_floating_point() or labels.shape[0] != B:
            return None
        shift = shift_of(model)
        counts = labels[:, shift:] != IGNORED  # what position t predicts
    elif isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == B:
        counts = mask
    if segments is None:
        return None if counts is None else counts.sum(1)
    document, n = segments
    document = document[:, :document.shape[1] - shift]
    counts = torch.ones_like(document) if counts is None else counts.long()
    return counts.new_zeros(n + 1).index_add_(0, document.reshape(-1) % (n + 1), counts.reshape(-1))[:n]


def shift_of(model):
    """1 where the model shifts labels to the left itself, as causal language models of Hugging Face do."""
    inner = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
    causal = inner is not None and inner.loss_type in (None, "ForCausalLM", "ForConditionalGeneration")
    return int(causal and not inner.config.is_encoder_decoder)


def is_dtensor(t):
    return hasattr(t, "placements")
