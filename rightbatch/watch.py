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

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rightbatch import gns, taps
from rightbatch.recognise import Norm, WatchError, recognise

EARLY = 0.2     # averages never look back further than about this share of the tokens seen so far
FETCH = 512     # steps that may wait on the device when nobody asks for a report
IGNORED = -100  # the label that losses leave out, by torch's convention


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
    batch_dim         the dimension of examples in the norm layers' inputs: 1 for (T, B, C)
    skip              names of modules to leave out; a name stands for all below it
    scaler            torch.amp.GradScaler, whose factor changes between steps
    half_life_tokens  averages forget half in so many tokens, or in a fifth of those seen, if less
    lengths           what an example weighs in the loss: "auto" counts labels that are not ignored, else the attention mask;
                      "equal"; w.weights(n) says it for one forward pass
    token_mean        "micro": each forward pass's loss is a mean over its own tokens (and averaged over accumulation, ranks).
                      "step": all tokens of the step weigh alike. "auto": step where the model is given num_items_in_batch, as
                      Hugging Face's Trainer does
    group             process group that holds the batch
    """

    def __init__(self, model, optimizer=None, *, batch_dim=0, skip=(), scaler=None, half_life_tokens=250_000, lengths="auto",
                 token_mean="auto", group=None, close_steps=True):
        check_choice("lengths", lengths, ("auto", "equal"))
        check_choice("token_mean", token_mean, ("auto", "micro", "step"))
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
            scaler, optimizer = scaler or getattr(optimizer, "scaler", None), optimizer.optimizer
        self.model, self.optimizer, self.scaler, self.group = model, optimizer, scaler, group
        self.batch_dim, self.lengths, self.token_mean, self.half_life_tokens = batch_dim, lengths, token_mean, half_life_tokens
        check_model(model)
        self.sites, self.left_out = find_sites(model, skip)
        self.current, self.given, self.waiting, self.checked = Pass(), None, [], False
        self.scales = {"norm": self.new_scale()}
        self.last, self.mean_length, self.skipped = None, None, 0
        for site in self.sites:
            if not site.parameters[0].is_meta:
                self.leaf(site, site.parameters[0])
        self.handles = [model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True),
                        model.register_forward_hook(Hook(self.end), always_call=True)]
        self.handles += [s.module.register_forward_hook(Hook(self.tap, s), with_kwargs=True) for s in self.sites]
        if optimizer is not None and close_steps:
            self.handles.append(optimizer.register_step_pre_hook(self.before_optimizer))

    def new_scale(self):
        return gns.NoiseScale(self.half_life_tokens, EARLY)

    # -- in the forward pass

    def begin(self, model, args, kwargs):
        if not torch.is_grad_enabled():
            return
        first = next((t for t in tensors((args, kwargs)) if t.dim() >= 2), None)
        B = None if first is None else first.shape[min(self.batch_dim, 1)]
        tokens = 0 if first is None else first.numel() if not first.is_floating_point() else B
        given, self.given = self.given, None
        lengths = given if given is not None or self.lengths == "equal" else lengths_of(model, kwargs, B)
        whole = self.token_mean == "step" or self.token_mean == "auto" and kwargs.get("num_items_in_batch") is not None
        self.current = Pass(B, tokens, lengths, whole, inside=True)
        for site in self.sites:
            site.hidden_calls = 0

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
        z = now.z.get(site.name)
        if z is None:
            z = taps.Gather.apply(self.leaf(site, x), self.counts(x, B), B)
            if now.inside:
                now.z[site.name] = z
        return taps.Tap.apply(y, x, z, site.norm, self.batch_dim)

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
        got = [s for s in self.sites if s.leaf is not None and s.leaf.grad is not None]
        if not got and not self.distributed():
            raise WatchError("no watched norm layer got a gradient since the last step: was the model compiled before "
                             "watch(model) (later hooks are ignored: watch first), or is w.step() before loss.backward()?")
        sums, squares, counts = self.collect()
        record = [squares.sum(), sums.square().sum()]
        metric = adam_metric(self.optimizer, self.sites)
        if metric is not None:
            record += [(metric * squares).sum(), (metric * sums.square()).sum()]
        scale = getattr(self.scaler, "_scale", None)
        scale = 1.0 if scale is None else scale.to(sums.device)  # .get_scale() would wait for the device
        numbers = torch.cat([torch.stack(record) / (scale * self.world()) ** 2, counts])
        self.waiting.append((numbers, self.current.whole))
        if not self.checked or len(self.waiting) >= FETCH:
            self.fetch()

    def collect(self):
        """sum_b c_b and sum_b c_b^2 of all sites end to end, and the step's counts, over all ranks; leaves are emptied."""
        device = next((s.leaf.device for s in self.sites if s.leaf is not None), "cpu")
        parts = []
        for s in self.sites:
            grad = None if s.leaf is None else s.leaf.grad
            parts.append((s.size, torch.zeros(2 * s.size + taps.HEAD, device=device) if grad is None else grad))
            if s.leaf is not None:
                s.leaf.grad = None
        sums, squares = torch.cat([g[:n] for n, g in parts]), torch.cat([g[n:2 * n] for n, g in parts])
        counts = torch.stack([g[2 * n:] for n, g in parts]).amax(0)  # a layer may be left out of some passes, never of all
        if self.distributed():
            flat = torch.cat([sums, squares, counts])
            dist.all_reduce(flat, group=self.group)
            sums, squares, counts = flat.split([len(sums), len(squares), len(counts)])
        return sums, squares, counts

    def distributed(self):
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def world(self):
        return dist.get_world_size(self.group) if self.distributed() else 1

    # -- on the host, when somebody asks

    def fetch(self):
        """Bring the averages up to date, with one transfer for all steps that wait."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        flat = iter(torch.cat([numbers.double() for numbers, _ in waiting]).tolist())
        for numbers, whole in waiting:
            record = [next(flat) for _ in range(len(numbers))]
            self.absorb(whole, record[:-taps.HEAD], *record[-taps.HEAD:])

    def absorb(self, whole, record, passes, B, total, squares, own, tokens):
        if not all(abs(v) < float("inf") for v in record):
            self.skipped += 1  # a gradient that is not finite: GradScaler leaves such a step out, too
            return
        h = squares / total**2 if whole else own / passes**2
        if B <= 1:
            if not self.checked:
                raise WatchError("one example in the whole step: its noise cannot be told from its gradient. Take a batch of "
                                 "at least two, by micro-batch, accumulation or ranks")
            return
        self.checked = True
        self.last = Last(round(B), record[0] / h, record[1], 1 / h)
        self.mean_length = tokens / B if total == B else total / B
        for name, q, big in zip(("norm", "norm_adam"), record[::2], record[1::2]):
            self.scales.setdefault(name, self.new_scale()).update(*gns.unequal_pair(q, big, h, B), tokens)

    def row(self):
        """The log keys: the noise scale in examples with its 95% interval, |G|^2 and tr(Sigma); None while undetermined."""
        self.fetch()
        row = {}
        for name, scale in self.scales.items():
            low, high = scale.interval() or (None, None)
            row |= {f"gns/{name}": scale.gns, f"gns/{name}_low": low, f"gns/{name}_high": high,
                    f"gns/{name}_sq_norm": scale.sq_norm, f"gns/{name}_tr_sigma": scale.tr_sigma}
        return row

    def __str__(self):
        self.fetch()
        plain, *others = [f"{words}{self.say(name)}" for name, words in (("norm", ""), ("norm_adam", "in Adam's metric "))
                          if name in self.scales]
        return "; ".join([f"noise scale {plain} sequences", *others])

    def say(self, name):
        interval = self.scales[name].interval()
        return f"{self.scales[name].gns:.3g} [{interval[0]:.3g}, {interval[1]:.3g}]" if interval else "undetermined yet"

    def state_dict(self):
        self.fetch()
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()}}

    def load_state_dict(self, state):
        for name, scale in state["scales"].items():
            self.scales.setdefault(name, self.new_scale()).load_state_dict(scale)

    def close(self):
        """Take everything out of the model and the optimizer again."""
        for handle in self.handles:
            handle.remove()
        self.handles = []


# ---------------------------------------------------------------------------------------------------------------------
# What can be watched


def check_choice(name, value, choices):
    if value not in choices:
        raise WatchError(f"{name}={value!r}: expected one of {', '.join(choices)}")


def check_model(model):
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.DataParallel):
            raise WatchError("DataParallel copies the model in every forward pass: start with torchrun, under DDP")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise WatchError(f"{name or 'the model'} is compiled already, and torch.compile ignores later hooks: call "
                             "watch(model) before torch.compile(model)")


def find_sites(model, skip):
    """(sites, {name: why not})."""
    sites, left_out, batch_norm = [], {}, False
    for name, module in model.named_modules():
        if any(name == s or name.startswith(f"{s}.") for s in ([skip] if isinstance(skip, str) else skip)):
            if next(module.parameters(recurse=False), None) is not None:
                left_out[name] = "skipped"
            continue
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.affine:
            left_out[name], batch_norm = "BatchNorm mixes examples: no example has a gradient of its own", True
            continue
        norm = recognise(module)
        if isinstance(norm, str):
            left_out[name] = norm
        elif norm and not any(p.requires_grad for p in module.parameters()):
            left_out[name] = "frozen"
        elif norm:
            sites.append(Site(name, module, norm, parameters=[p for p in module._parameters.values() if p is not None]))
    if not sites:
        raise WatchError("nothing to watch: " + (
            "its norm layers are frozen; mode='exact' watches what is trained" if "frozen" in left_out.values() else
            "its BatchNorm mixes examples: no example has a gradient of its own" if batch_norm else
            "it has no norm layer with a weight: mode='exact' watches the other layers"))
    return sites, left_out


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


def lengths_of(model, kwargs, B):
    """(B,) tokens of each example that count in the loss, or None where there is nothing to tell them from."""
    labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
    if isinstance(labels, torch.Tensor):
        if labels.dim() != 2 or labels.is_floating_point() or labels.shape[0] != B:
            return None
        return (labels[:, shift_of(model):] != IGNORED).sum(1)
    return mask.sum(1) if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == B else None


def shift_of(model):
    """1 where the model shifts labels to the left itself, as causal language models of Hugging Face do."""
    inner = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
    causal = inner is not None and inner.loss_type in (None, "ForCausalLM", "ForConditionalGeneration")
    return int(causal and not inner.config.is_encoder_decoder)


def is_dtensor(t):
    return hasattr(t, "placements")


# ---------------------------------------------------------------------------------------------------------------------
# Adam's metric


def adam_metric(optimizer, sites):
    """p_j = 1 / (sqrt(v_hat_j) + eps) of all sites' parameters end to end, or None before Adam's first step. A coordinate that
    never had a gradient has no metric: 1/eps would drown all others."""
    if optimizer is None:
        return None
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    pieces = []
    for p in (p for site in sites for p in site.parameters):
        state, group = optimizer.state.get(p, {}), groups.get(p, {})
        if "exp_avg_sq" not in state or "betas" not in group:
            return None
        v, beta2 = state["exp_avg_sq"], group["betas"][1]
        v = v.full_tensor() if is_dtensor(v) else v
        correction = 1 - beta2 ** torch.as_tensor(state["step"], device=v.device).clamp_min(1)
        pieces.append(((v > 0) / ((v / correction).sqrt() + group["eps"])).reshape(-1))
    return torch.cat(pieces)
