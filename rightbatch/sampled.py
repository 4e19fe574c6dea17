"""
Sampled rows: the noise scale of the whole model without its tables, from a few rows of each weight (rows.py says why).

A sampled layer is one more site of watch. In one step of several its tap hands each example's gradient of k rows of the
weight, and of the bias there, to taps.Gather: so micro-batches, layers used several times, checkpointing, compile and shards
work as they do for norm layers. The squared norms times O/k stand for those of the whole weight. What cannot be told apart by
example is left out with a word, and so is a layer whose own sum over examples is not its weight's gradient.

B examples, T positions, O rows of a weight, C numbers in a row, k rows sampled, S layers.
"""

from dataclasses import dataclass, field

import torch

from rightbatch import moments, rows, taps
from rightbatch.common import is_dtensor
from rightbatch.exact import OWN_FORWARD, body_of, kind_of
from rightbatch.passes import AGAIN, in_backward
from rightbatch.recognise import WatchError

LOW_RANK, SMALL = 64, 2**18  # the shorter side, and numbers, of weights that are taken whole, as LoRA's
TOLERANCE = 0.05  # of the comparison with the weight's gradient: that may be bf16


@dataclass(eq=False)
class Layer:
    """The layer whose weight is sampled."""
    name: str
    kind: str                  # linear, transposed (GPT-2's Conv1D), convolution; OWN_FORWARD: a linear, if the check says so
    module: torch.nn.Module
    leaf: torch.Tensor | None = None
    rows: torch.Tensor | None = None            # which, in this step; None: all
    twins: list = field(default_factory=list)   # layers with the very same parameters
    dropped: bool = False                       # left out since an earlier step: within one all calls are alike
    gradients: dict = field(default_factory=dict)  # name -> those rows of the parameter's gradient, in the first step

    def __post_init__(self):  # sharding changes shapes later
        self.shapes = {name: p.shape for name, p in self.module._parameters.items() if p is not None}
        self.height = self.shapes["weight"][self.dim]
        self.width = self.shapes["weight"].numel() // self.height
        low = min(self.height, self.width) <= LOW_RANK and self.height * self.width <= SMALL
        self.count = self.height if low else min(rows.ROWS, self.height)

    @property
    def dim(self):
        return int(self.kind == "transposed")

    @property
    def trained(self):
        """{name: parameter}, weight first. As they are now: sharding puts others in their place."""
        own = self.module._parameters
        return {name: own[name] for name in ("weight", "bias") if own.get(name) is not None and own[name].requires_grad}

    @property
    def parameters(self):
        return list(self.trained.values())

    @property
    def weight_and_bias(self):
        return [p for p in self.module._parameters.values() if p is not None]

    @property
    def size(self):
        return sum(self.count * (self.width if name == "weight" else 1) for name in self.trained)

    def pick(self, name, whole):
        """The sampled rows of something like a parameter, flat, row after row."""
        dim = self.dim if name == "weight" else 0
        return (whole if self.rows is None else whole.index_select(dim, self.rows)).movedim(dim, 0).flatten()


def got(site):
    """Whether it has numbers since the last step."""
    return site.leaf is not None and site.leaf.grad is not None


class Sampled:
    """The sampled layers of a Watch. `on`: whether the present step samples."""

    def __init__(self, model, owner, skipped):
        self.owner, self.handles, self.hooks = owner, [], {}
        self.body = sum(p.numel() for p in body_of(model))
        self.layers = self.find(model, rows.tables(model), skipped)
        self.begin(0)

    def find(self, model, tables, skipped):
        found = {}
        for name, module in model.named_modules():
            kind = kind_of(module)
            if kind in (None, "embedding") or module._parameters["weight"] in tables or skipped(name):
                continue
            if kind == OWN_FORWARD and not isinstance(module, torch.nn.Linear):
                self.owner.left_out[name] = OWN_FORWARD
                continue
            site = Layer(name, kind, module)
            first = found.setdefault(tuple(map(id, site.weight_and_bias)), site)
            if first is not site:
                first.twins.append(site)
        return list(found.values())

    def hook_in(self):
        hook = self.owner.hook
        for site in self.layers:
            self.handles += [use.module.register_forward_hook(hook(self.tap, site, use), with_kwargs=True, prepend=True)
                             for use in (site, *site.twins)]
            self.hooks[site] = [p.register_hook(hook(self.compare_later, site, name)) for name, p in site.trained.items()]
            self.handles += self.hooks[site]

    def begin(self, step):
        """Which rows a step takes, numbered from 0: the same on all ranks."""
        self.step, self.on = step, rows.samples(step) or not self.owner.sites
        cut = [site for site in self.layers if site.count < site.height]
        if self.on and cut:
            device = next((site.leaf.device for site in cut if site.leaf is not None), "cpu")
            drawn = torch.tensor(rows.draw(0, step, [site.height for site in cut], rows.ROWS)).to(device, non_blocking=True)
            for site, own in zip(cut, drawn.unbind()):
                site.rows = own

    # -- in the forward and backward passes

    def tap(self, site, use, module, args, kwargs, y):
        """Forward hook of a layer: pass its output through Tap. use: the site itself or one of its twins."""
        if not self.on or site.dropped or not site.trained:
            return None
        now = self.enter(site)
        if now is None or not y.requires_grad:
            return None
        x, dim = args[0] if args else next(iter(kwargs.values())), 0 if site.kind == "convolution" else self.owner.batch_dim
        alone = in_backward() and not now.repeat
        why = None if now is AGAIN else self.why_not(site, module, x, y, now, alone, dim)
        if why:
            self.owner.left_out[site.name] = why
        z = None
        if site.name not in self.owner.left_out:
            z = self.owner.gather(site, y, now, now.segments[1] if now.segments else x.shape[dim], alone)
        if site.rows is not None and site.rows.device != y.device:
            site.rows = site.rows.to(y.device)
        return Tap.apply(y, x, z, site.rows, site, dim, now.segments, self.owner.left_out)

    def enter(self, site):
        if torch.compiler.is_compiling() or not self.owner.sites:
            return self.owner.enter(site.name)
        try:
            return self.owner.enter(site.name)
        except WatchError as error:  # norm layers go on without it
            self.owner.left_out[site.name] = str(error)
            return None

    def why_not(self, site, module, x, y, now, alone, dim):
        if is_dtensor(x) or is_dtensor(y) or is_dtensor(module.weight):
            return "is spread over ranks: sequence or tensor parallelism"
        if alone and (now.calls[site.name] > 1 or site.name in now.z):
            return "is used several times in a forward pass under reentrant checkpointing: use_reentrant=False"
        if x.dim() < (module.weight.dim() if site.kind == "convolution" else 2) or now.B is not None and x.shape[dim] != now.B:
            return f"its input {tuple(x.shape)} has no dimension of {now.B} examples"
        if site.kind != "convolution" and (*x.shape[:-1], site.height) != y.shape:
            return OWN_FORWARD
        if now.segments and (site.kind == "convolution" or x.movedim(dim, 0).shape[:-1] != now.segments[0].shape):
            return f"its input {tuple(x.shape)} has not the {tuple(now.segments[0].shape)} positions of w.segments"
        return None

    def compare_later(self, site, name, grad):
        if self.on:
            part = site.pick(name, grad.detach()).to(torch.promote_types(grad.dtype, torch.float32))
            site.gradients[name] = site.gradients[name] + part if name in site.gradients else part

    # -- at the end of a step

    def collect(self, norm):
        """({"body": (q, big)}, and "body_adam", with the norm layers' numbers; "coverage": weights that are measured, and all
        of the body; counts), over all ranks. The leaves are emptied."""
        self.drop_what_is_used_elsewhere()
        sizes, left_out = [site.size for site in self.layers], self.owner.left_out
        parts = [self.taken(site).split([n, n, taps.HEAD]) for site, n in zip(self.layers, sizes)]
        sums, squares = (torch.cat([part[i] for part in parts]) for i in (0, 1))
        metric = self.metric() if "norm_adam" in norm or not self.owner.sites else None

        def by_site(numbers):  # (plain and Adam's metric, S); zeros without Adam, as other ranks may have it
            weighted = numbers, numbers * (0.0 if metric is None else metric)
            return torch.stack([part.sum() for v in weighted for part in v.split(sizes)]).view(2, -1)
        flags = torch.tensor([[float(site.name in left_out) for site in self.layers],
                              [site.count / site.height for site in self.layers],
                              [float(sum(site.shapes[name].numel() for name in site.trained)) for site in self.layers]])
        bad, share, weights = flags.to(sums, non_blocking=True)
        q = by_site(squares)
        counts = torch.stack([part[2] for part in parts])
        flat = torch.cat([sums, q.flatten(), counts[:, 0], bad, counts.amax(0)])
        self.owner.sum_over_ranks(flat)
        sums, q, passes, bad, counts = flat.split([len(sums), q.numel(), len(bad), len(bad), taps.HEAD])
        good = (passes > 0) & (bad == 0)
        pairs = torch.stack([q.view(2, -1), by_site(sums.square())]) / share
        pairs = torch.where(good, pairs, 0.0).sum(2)  # (q and big, metric)
        norm_weights = sum(site.norm.shape.numel() * len(site.parameters) for site in self.owner.sites)
        found = {"coverage": (norm_weights + (weights * good).sum(), weights.new_full((), self.body))}
        for i, name in enumerate(("",) if metric is None else ("", "_adam")):
            found["body" + name] = tuple(a + b for a, b in zip(pairs[:, i], norm.get("norm" + name, (0, 0))))
        return found, counts

    def taken(self, site):
        grad = None if site.leaf is None else site.leaf.grad
        if site.leaf is not None:
            site.leaf.grad = None
        site.dropped = site.name in self.owner.left_out
        n = 2 * site.size + taps.HEAD
        if grad is None or len(grad) != n:
            return torch.zeros(n, device=next((s.leaf.device for s in self.owner.watched if s.leaf is not None), "cpu"))
        return grad

    def metric(self):
        """Adam's metric of the sampled rows of all layers in one vector, or None."""
        own = [(site, name, p) for site in self.layers for name, p in site.trained.items()]

        def pick(seconds):
            return moments.rows_of([(v, site.rows, site.dim if name == "weight" else 0)
                                    for v, (site, name, _) in zip(seconds, own)])
        adam = self.owner.moments
        as_built = all(adam.group(p) is None or adam.second(p).shape == site.shapes[name] for site, name, p in own)
        return adam.of_all([p for *_, p in own], pick) if as_built else None  # FSDP's older kind has shards in their places

    def drop_what_is_used_elsewhere(self):
        """In its first step a layer's own sum over examples is compared with the gradient that autograd has."""
        for site in [site for site in self.hooks if not site.gradients and site.kind == OWN_FORWARD and got(site)]:
            self.owner.left_out.setdefault(site.name, OWN_FORWARD)  # shards: there is nothing to compare with
        for site in [site for site in self.hooks if site.gradients]:
            seen, site.gradients = torch.cat([site.gradients[name] for name in site.trained]), {}
            size, why = float(seen.norm()), None
            if not got(site):
                why = "its weight is used, but not by calling the layer"
            elif not size < float("inf"):
                continue  # the next step tells
            elif float((site.leaf.grad[:len(seen)] - seen).norm()) > TOLERANCE * size:
                why = "its weight is used elsewhere, too, or the layer is no plain one"
            if why:
                self.owner.left_out.setdefault(site.name, why)
            for handle in self.hooks.pop(site):
                handle.remove()

    def forget(self):
        for site in self.layers:
            site.gradients = {}


class Tap(torch.autograd.Function):
    """An identity that sends each example's gradient of the sampled rows to z, as taps.Tap does for a norm layer."""

    @staticmethod
    def forward(ctx, y, x, z, own, site, batch_dim, segments, left_out):
        ctx.save_for_backward(x)
        ctx.rows, ctx.site, ctx.args, ctx.left_out = own, site, (batch_dim, segments), left_out
        return y.view_as(y) if torch.compiler.is_compiling() else y.data

    @staticmethod
    def backward(ctx, dy):
        c = None
        if ctx.needs_input_grad[2]:
            if torch.compiler.is_compiling():
                c = row_gradients(ctx.site, ctx.rows, dy, *ctx.saved_tensors, *ctx.args)
            else:
                try:  # whatever a layer does to its input, training goes on
                    with torch.no_grad(), torch.autocast(dy.device.type, enabled=False):
                        c = row_gradients(ctx.site, ctx.rows, dy, *ctx.saved_tensors, *ctx.args)
                except Exception as error:
                    words = str(error).splitlines()[0] if str(error) else repr(error)
                    ctx.left_out[ctx.site.name] = f"could not be measured: {words}"
        return dy, None, c, None, None, None, None, None


def row_gradients(site, own, dy, x, batch_dim, segments):
    """(B, n): each example's gradient of the sampled rows of the weight, row after row, and of the bias there."""
    acc, k = torch.promote_types(dy.dtype, torch.float32), site.count
    if site.kind == "convolution":
        g = (dy if own is None else dy.index_select(1, own)).to(acc)
        parts = {"weight": lambda: convolution_rows(site.module, own, g, x.to(acc)), "bias": lambda: g.flatten(2).sum(2)}
    else:
        dy, x = dy.movedim(batch_dim, 0), x.movedim(batch_dim, 0)
        B, C = x.shape[0], x.shape[-1]
        g = (dy if own is None else dy.index_select(-1, own)).to(acc)
        if segments is None:
            g, x = g.reshape(B, -1, k), x.reshape(B, -1, C)
            parts = {"weight": lambda: torch.bmm(g.mT, x.to(acc)).flatten(1), "bias": lambda: g.sum(1)}
        else:
            g, x = g.reshape(-1, k), x.reshape(-1, C).to(acc)
            parts = {"weight": lambda: torch.cat([by_document(v[:, None] * x, segments) for v in g.unbind(1)], 1),
                     "bias": lambda: by_document(g, segments)}
    found = [parts[name]() for name in site.trained]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def by_document(v, segments):
    """(positions, n) -> (documents, n). Padding, -1, is the last, and goes."""
    document, n = segments
    return v.new_zeros(n + 1, v.shape[1]).index_add_(0, document.reshape(-1) % (n + 1), v)[:n]


def convolution_rows(module, own, g, x):
    """A row is an output channel. All examples at once: each is a group of one convolution, whose weight's gradient this is."""
    B, k, groups = len(x), g.shape[1], module.groups
    folds = B
    if groups > 1:  # each row with the input channels of its own group
        own = torch.arange(k, device=g.device) if own is None else own
        x = x.unflatten(1, (groups, -1)).index_select(1, own // (module.out_channels // groups)).flatten(1, 2)
        folds = B * k
    shape = (B * k, *module.weight.shape[1:])
    weight_grad = torch.nn.grad.conv1d_weight if x.dim() == 3 else torch.nn.grad.conv2d_weight
    found = weight_grad(x.reshape(1, -1, *x.shape[2:]), shape, g.reshape(1, -1, *g.shape[2:]), module.stride, module.padding,
                        module.dilation, folds)
    return found.view(B, -1)
