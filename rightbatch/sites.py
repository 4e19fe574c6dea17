"""
Sites are the layers that are watched: norm layers, found by what they do (recognise.py), and other layers with a weight, whose
rows are sampled (rows.py) or, with mode="exact", taken whole. A layer is no site if it is skipped, frozen or a table, or shares
some of its parameters but not all.
"""

import difflib
import fnmatch
from dataclasses import dataclass, field

import torch

from rightbatch import rows
from rightbatch.recognise import Norm, WatchError, recognise

MIXES = "BatchNorm mixes examples: no example has a gradient of its own"
OWN_FORWARD = "has a forward pass of its own"
LOW_RANK, SMALL = 64, 2**18  # weights with no longer a shorter side, and no more numbers, are taken whole: LoRA's
CONVOLUTIONS = torch.nn.Conv1d, torch.nn.Conv2d
BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm


@dataclass(eq=False)
class Site:
    """One watched layer."""
    name: str
    kind: str                                   # norm, linear, transposed (GPT-2's Conv1D), convolution; OWN_FORWARD: taken for
    module: torch.nn.Module                     # a linear, until its gradient disproves it
    norm: Norm | None = None
    whole: bool = False                         # all rows in every step
    leaf: torch.Tensor | None = None            # its gradient has the step's sums (taps.py)
    rows: torch.Tensor | None = None            # the row numbers of this step; None: all
    twins: list = field(default_factory=list)   # sites with the very same parameters: what they add belongs to one gradient
    dropped: bool = False                       # left out from here on; set between steps, so that calls of one step are alike
    gradients: dict = field(default_factory=dict)  # name -> these rows of the parameter's own gradient, to be compared once

    def __post_init__(self):  # shapes are read now, as sharding changes them later
        own = {name: p.shape for name, p in self.module._parameters.items() if p is not None}
        self.shapes = own if self.norm else {name: own[name] for name in ("weight", "bias") if name in own}
        shape = next(iter(self.shapes.values()))
        self.height = shape[self.dim]
        width = shape.numel() // self.height
        low = min(self.height, width) <= LOW_RANK and self.height * width <= SMALL
        self.count = self.height if self.norm or self.whole or low else min(rows.ROWS, self.height)

    @property
    def dim(self):
        """The dimension of the weight that counts its rows."""
        return int(self.kind == "transposed")

    @property
    def weight_and_bias(self):
        """The module's parameters now: sharding and to_empty replace them."""
        return [p for p in self.module._parameters.values() if p is not None]

    @property
    def trained(self):
        """{name: parameter}, weight first."""
        own = [(name, self.module._parameters.get(name)) for name in self.shapes]
        return {name: p for name, p in own if p is not None and p.requires_grad}

    @property
    def parameters(self):
        return list(self.trained.values())

    @property
    def size(self):
        """How many numbers each example's gradient has here."""
        return sum(self.shapes[name].numel() // self.height * self.count for name in self.trained)

    def pick(self, name, whole):
        """The sampled rows of a tensor that has a parameter's shape, flat, row after row. name: weight or bias."""
        dim = self.dim if name == "weight" else 0
        return (whole if self.rows is None else whole.index_select(dim, self.rows)).movedim(dim, 0).flatten()

    def of_names(self, numbers, names):
        """The columns of some parameters, out of a norm layer's (B, weight and bias)."""
        if len(names) == len(self.shapes):
            return numbers
        parts = zip(self.shapes, numbers.split([shape.numel() for shape in self.shapes.values()], 1))
        return torch.cat([part for name, part in parts if name in names], 1)

    @property
    def open(self):
        """Whether it has got numbers since the last step."""
        return self.leaf is not None and self.leaf.grad is not None


def check_model(model):
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.DataParallel):
            raise WatchError("DataParallel copies the model in every forward pass: start with torchrun, under DDP")
        if type(module).__name__ == "FullyShardedDataParallel":
            raise WatchError("FullyShardedDataParallel has flat parameters in place of the layers' own: take fully_shard, or "
                             "watch(model) before FullyShardedDataParallel(model, use_orig_params=True)")
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise WatchError(f"{name or 'the model'} is compiled already, and torch.compile ignores later hooks: call "
                             "watch(model) before torch.compile(model)")


def find_norms(model, skip, left_out):
    """The norm layers. left_out takes {name: why not}."""
    sites = {}
    check_skip(model, skip)
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and skips(name, skip):
            left_out[name] = "skipped"
        elif own and isinstance(module, BATCH_NORM):
            left_out[name] = MIXES
        elif own:
            norm = recognise(module)
            if isinstance(norm, Norm) and any(p.requires_grad for p in own):
                norm.name = name
                add(sites, Site(name, "norm", module, norm))
            elif norm:
                left_out[name] = "frozen" if isinstance(norm, Norm) else norm
    return drop_half_shared(list(sites.values()), left_out)


def add(sites, site):
    first = sites.setdefault(tuple(map(id, site.weight_and_bias)), site)
    if first is not site:
        first.twins.append(site)


def drop_half_shared(sites, left_out):
    """Leave out norm layers that share one parameter and not the other: its gradient sums over several layers."""
    holders = {}
    for site in sites:
        for p in site.weight_and_bias:
            holders.setdefault(p, []).append(site)
    for site in sites:
        others = [o.name for p in site.weight_and_bias for o in holders[p] if o is not site]
        if others:
            left_out |= {use.name: f"shares a part of its parameters with {others[0]}" for use in (site, *site.twins)}
    return [site for site in sites if site.name not in left_out]


def find_layers(model, skip, left_out, whole):
    """Linear layers and convolutions that are trained, but the tables. whole: all rows of each, in every step."""
    sites, tables = {}, rows.tables(model)
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None or module._parameters["weight"] in tables or skips(name, skip):
            continue
        if kind == OWN_FORWARD and not isinstance(module, torch.nn.Linear):
            left_out[name] = OWN_FORWARD
        else:
            add(sites, Site(name, kind, module, whole=whole))
    return list(sites.values())


def kind_of(module):
    """A Site's kind for a module that is trained, None where it is no such layer; OWN_FORWARD for a subclass with a forward."""
    weight = module._parameters.get("weight")
    if weight is None or not any(p is not None and p.requires_grad for p in module._parameters.values()):
        return None
    for plain in (torch.nn.Linear, *CONVOLUTIONS):
        if isinstance(module, plain) and type(module).forward is not plain.forward:
            return OWN_FORWARD
    if isinstance(module, torch.nn.Linear):
        return "linear"
    if isinstance(module, CONVOLUTIONS):
        return "convolution" if module.padding_mode == "zeros" and not isinstance(module.padding, str) else None
    same = type(module).__name__ == "Conv1D" and weight.dim() == 2 and hasattr(module, "nf")
    return "transposed" if same else None


def body_of(model):
    """The parameters that are trained and none of the tables, nor of the biases beside them."""
    tables = rows.tables(model)
    beside = {m._parameters.get("bias") for m in model.modules() if m._parameters.get("weight") in tables}
    return {p for p in model.parameters() if p.requires_grad} - tables - beside


def skips(name, skip):
    """skip: names or patterns of modules; each stands for all below it."""
    return any(fnmatch.fnmatchcase(name, s) or fnmatch.fnmatchcase(name, f"{s}.*") for s in skip)


def check_skip(model, skip):
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if not any(skips(name, [pattern]) for name in names):
            near = difflib.get_close_matches(pattern, names, 1)
            raise WatchError(f"skip={pattern!r} matches no module" + (f": did you mean {near[0]!r}?" if near else ""))
