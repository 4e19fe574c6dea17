"""
The gradient noise scale of any model, in any training loop.

    from rightbatch import watch
    w = watch(model)                 # before torch.compile; DDP and FSDP before or after
    ...                              # forward and backward, as often as you accumulate
    w.step()                         # after the last backward pass of a step; with watch(model, optimizer) by itself
    print(w)                         # noise scale 38 [32, 46] sequences
    log(w.row())                     # {"gns/norm": 38.1, "gns/norm_low": ..., ...}, the keys of train.py

The model's code, its results and its state_dict stay as they are. docs/watch.md has the recipes and what is assumed.

Letters: B examples, c_b what example b adds to the gradient, q = sum |c_b|^2, big = |sum c_b|^2, h = sum of squared shares.
"""

import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rightbatch import gns, taps
from rightbatch.exact import Exact
from rightbatch.fuse import fuse, unfuse
from rightbatch.recognise import Norm, WatchError, recognise

EARLY = 0.2     # averages never look back further than about this share of the tokens seen so far
FETCH = 512     # steps that may wait on the device when nobody asks for a report
IGNORED = -100  # the label that losses leave out, by torch's convention
MIXES = "BatchNorm mixes examples: no example has a gradient of its own"


def watch(model, optimizer=None, **options):
    """A Watch of the model; see its class."""
    return Watch(model, optimizer, **options)


@dataclass
class Site:
    """One watched norm layer."""
    name: str
    module: torch.nn.Module
    norm: Norm
    leaf: torch.Tensor | None = None
    parameters: list = field(default_factory=list)  # weight(, bias)
    hidden_calls: int = 0  # calls without gradients in the newest forward pass: reentrant checkpointing

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
    """
    model             finds LayerNorms and RMSNorms by what they do; w.left_out says what it left out, and why
    optimizer         closes steps by itself, and reports in Adam's metric, too
    mode              "norm", or "exact": all layers that can be had, at the price of their gradients once more
    fused             let our kernels compute the norm layers that are recognised: faster, the same up to rounding
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

    def __init__(self, model, optimizer=None, *, mode="norm", fused=False, calibrate_every=0, batch_dim=0, skip=(),
                 scaler=None, half_life_tokens=250_000, lengths="auto", token_mean="auto", group=None, close_steps=True):
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
        self.last, self.mean_length, self.skipped = None, None, 0
        self.find(model, mode, [skip] if isinstance(skip, str) else skip)
        self.fused = fuse(self.sites) if fused else {}
        self.scales, self.covered = {}, [0.0, 0.0]
        self.calibration = gns.Calibration(half_life_tokens, EARLY) if calibrate_every else None
        self.handles = [model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True),
                        model.register_forward_hook(Hook(self.end), always_call=True)]
        self.handles += [s.module.register_forward_hook(Hook(self.tap, s), with_kwargs=True) for s in self.sites]
        if optimizer is not None and close_steps:
            self.handles.append(optimizer.register_step_pre_hook(self.before_optimizer))

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
        for site in self.sites:
            if not site.parameters[0].is_meta:
                self.leaf(site, site.parameters[0])

    # -- in the forward pass

    def begin(self, model, args, kwargs):
        if not torch.is_grad_enabled():
            return
        first = next((t for t in tensors((args, kwargs)) if t.dim() >= 2), None)
        B = None if first is None else first.shape[min(self.batch_dim, 1)]
        tokens = 0 if first is None else first.numel() if not first.is_floating_point() else B
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
        return taps.Tap.apply(y, x, z, site.norm, self.batch_dim, now.segments)

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
        return site.leaf

    def counts(self, x, B):
        key = torch.promote_types(x.dtype, torch.float32), x.device
        if key not in self.current.counts:
            self.current.counts[key] = taps.head(B, self.current.tokens or B, self.current.lengths, *key)
        return self.current.counts[key]

    def weights(self, n):
        """What each example of the next forward pass weighs in its loss, (B,): number of its tokens, or any other measure."""
        self.given = torch.as_tensor(n)

    def segments(self, ids):
        """Documents packed into the rows of the next forward pass, which are the examples then: the number of each position's
        document, (B, T), from 0 on and different in every row; -1 is padding. Attention must not cross documents."""
        if self.exact:
            raise WatchError("w.segments works with mode='norm' and without calibration")
        ids = torch.as_tensor(ids)
        self.documents = ids, int(ids.max()) + 1

    # -- after the backward passes of a step

    def before_optimizer(self, optimizer, args, kwargs):
        """A closure computes the gradients inside of optimizer.step: then the step ends behind it."""
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
        self.waiting.append((torch.cat([counts, pairs]), list(numbers), self.current.whole))
        self.steps += 1
        if self.exact and self.mode == "norm":
            self.exact.on = self.steps % self.calibrate_every == 0
        if not self.checked or len(self.waiting) >= FETCH:
            self.fetch()

    def check_gradients(self):
        watched = self.sites or self.exact.layers
        if not self.distributed() and not any(s.leaf is not None and s.leaf.grad is not None for s in watched):
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
        metric = [self.metric_of(p) for s in self.sites for p in s.parameters]
        if all(p is not None for p in metric):
            metric = torch.cat([p.reshape(-1) for p in metric])
            numbers["norm_adam"] = (metric * squares).sum(), (metric * sums.square()).sum()
        return numbers, counts

    def exact_numbers(self, norm, counts):
        """The same for all layers; "coverage": |G|^2 of what is measured, and of all that is trained."""
        numbers, own_counts = self.exact.collect(self.sites)
        q, big, q_adam, big_adam, rest = numbers
        parts = torch.stack([q, q_adam, *own_counts])
        self.sum_over_ranks(parts)
        q, q_adam, own_counts = parts[0], parts[1], parts[2:]
        zero = (q.new_zeros(()),) * 2
        total = [a + b for a, b in zip((q, big), norm.get("norm", zero))]
        found = {"total": total, "coverage": (total[1], total[1] + rest)}
        if self.optimizer is not None and ("norm_adam" in norm or not self.sites) and self.metric_of(
                next(iter(self.exact.parameters))) is not None:
            found["total_adam"] = [a + b for a, b in zip((q_adam, big_adam), norm.get("norm_adam", zero))]
        return found, own_counts if counts is None else counts

    def metric_of(self, p):
        """Adam's p_j = 1 / (sqrt(v_hat_j) + eps), or None: another optimizer, or before its first step. A coordinate that never
        had a gradient has no metric: 1/eps would drown all others."""
        state = {} if self.optimizer is None else self.optimizer.state.get(p, {})
        if "exp_avg_sq" not in state:
            return None
        group = next(g for g in self.optimizer.param_groups if any(p is other for other in g["params"]))
        v = state["exp_avg_sq"]
        v = v.full_tensor() if is_dtensor(v) else v
        correction = 1 - group["betas"][1] ** torch.as_tensor(state["step"], device=v.device).clamp_min(1)
        return (v > 0) / ((v / correction).sqrt() + group["eps"])

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

    def fetch(self):
        """Bring the averages up to date, with one transfer for all steps that wait."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        flat = iter(torch.cat([numbers.double() for numbers, _, _ in waiting]).tolist())
        for _, names, whole in waiting:
            counts = [next(flat) for _ in range(taps.HEAD)]
            self.absorb({name: (next(flat), next(flat)) for name in names}, whole, *counts)

    def absorb(self, numbers, whole, passes, B, total, squares, own, tokens):
        if not all(abs(v) < float("inf") for pair in numbers.values() for v in pair):
            self.skipped += 1  # a gradient that is not finite: GradScaler leaves such a step out, too
            return
        if B <= 1:
            if not self.checked:
                raise WatchError("one example in the whole step: its noise cannot be told from its gradient. Take a batch of "
                                 "at least two, by micro-batch, accumulation or ranks")
            return
        self.checked = True
        h = squares / total**2 if whole else own / passes**2
        self.mean_length = tokens / B if total == B else total / B
        coverage = numbers.pop("coverage", None)
        if coverage:
            self.covered = [old + new for old, new in zip(self.covered, coverage)]
        q, big = numbers["total" if self.mode == "exact" else "norm"]
        self.last = Last(round(B), q / h, big, 1 / h)
        pairs = {name: gns.unequal_pair(*pair, h, B) for name, pair in numbers.items()}
        for name, pair in pairs.items():
            if self.mode == "exact" or name.startswith("norm"):
                self.scale(name).update(*pair, tokens)
        if self.calibration:
            self.calibration.update(self.scales["norm"], tokens, pairs.get("total"), pairs["norm"])

    def scale(self, name):
        return self.scales.setdefault(name, gns.NoiseScale(self.half_life_tokens, EARLY))

    def row(self):
        """The log keys: the noise scale in examples with its 95% interval, |G|^2 and tr(Sigma); None while undetermined."""
        self.fetch()
        row = {}
        for name, scale in self.scales.items():
            low, high = scale.interval() or (None, None)
            row |= {f"gns/{name}": scale.gns, f"gns/{name}_low": low, f"gns/{name}_high": high,
                    f"gns/{name}_sq_norm": scale.sq_norm, f"gns/{name}_tr_sigma": scale.tr_sigma}
        if self.calibration:
            for name, value in (("calibration", self.calibration.factor()),
                                ("calibrated", self.calibration.apply(self.scale("norm")))):
                value, low, high = value or (None, None, None)
                row |= {f"gns/{name}": value, f"gns/{name}_low": low, f"gns/{name}_high": high}
        if self.exact:
            row["gns/coverage_percent"] = self.coverage
        return row

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
        whole = self.calibration and self.calibration.apply(self.scale("norm"))
        if whole:
            words.append("of the whole model {:.3g} [{:.3g}, {:.3g}]".format(*whole))
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
                "steps": self.steps, "calibration": self.calibration and self.calibration.state_dict()}

    def load_state_dict(self, state):
        for name, scale in state["scales"].items():
            self.scale(name).load_state_dict(scale)
        self.steps, self.covered = state["steps"], list(state["covered"])
        if self.calibration and state["calibration"]:
            self.calibration.load_state_dict(state["calibration"])

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
                sites.append(Site(name, module, norm, parameters=own))
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
