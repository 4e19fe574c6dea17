"""
What in a model can be watched: its norm layers, found by what they do (recognise.py), but for those that are skipped, frozen,
or share half of their parameters.
"""

import difflib
import fnmatch
from dataclasses import dataclass, field

import torch

from rightbatch.recognise import Norm, WatchError, recognise

MIXES = "BatchNorm mixes examples: no example has a gradient of its own"


@dataclass
class Site:
    """One watched norm layer."""
    name: str
    module: torch.nn.Module
    norm: Norm
    leaf: torch.Tensor | None = None
    twins: list = field(default_factory=list)  # sites with the very same parameters: what they add belongs to one gradient

    @property
    def weight_and_bias(self):
        """As they are now: sharding and to_empty put others in their place."""
        return [p for p in self.module._parameters.values() if p is not None]

    @property
    def parameters(self):
        """Those that are trained."""
        return [p for p in self.weight_and_bias if p.requires_grad]

    @property
    def size(self):
        return self.norm.shape.numel() * (1 + self.norm.bias)

    def trained(self, numbers):
        """Of numbers for each coordinate of weight(, bias), those of parameters that are trained."""
        return [part for part, p in zip(numbers.split(self.norm.shape.numel()), self.weight_and_bias) if p.requires_grad]


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


def find_sites(model, skip):
    """(sites, {name: why not})."""
    sites, left_out = {}, {}
    check_skip(model, skip)
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if own and skips(name, skip):
            left_out[name] = "skipped"
        elif isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and own:
            left_out[name] = MIXES
        elif own:
            norm = recognise(module)
            if isinstance(norm, Norm) and any(p.requires_grad for p in own):
                norm.name = name
                site = Site(name, module, norm)
                first = sites.setdefault(tuple(map(id, own)), site)
                if first is not site:
                    first.twins.append(site)
            elif norm:
                left_out[name] = "frozen" if isinstance(norm, Norm) else norm
    return drop_half_shared(list(sites.values()), left_out), left_out


def drop_half_shared(sites, left_out):
    """Norm layers that share their weight but not their bias have no sum of their own."""
    holders = {}
    for site in sites:
        for p in site.weight_and_bias:
            holders.setdefault(p, []).append(site)
    for site in sites:
        others = [o.name for p in site.weight_and_bias for o in holders[p] if o is not site]
        if others:
            left_out |= {use.name: f"shares a part of its parameters with {others[0]}" for use in (site, *site.twins)}
    return [site for site in sites if site.name not in left_out]


def skips(name, skip):
    """skip: names or patterns of modules; each stands for all below it."""
    return any(fnmatch.fnmatchcase(name, s) or fnmatch.fnmatchcase(name, f"{s}.*") for s in skip)


def check_skip(model, skip):
    names = [name for name, _ in model.named_modules() if name]
    for pattern in skip:
        if not any(skips(name, [pattern]) for name in names):
            near = difflib.get_close_matches(pattern, names, 1)
            raise WatchError(f"skip={pattern!r} matches no module" + (f": did you mean {near[0]!r}?" if near else ""))
