"""
Hooks tell where a forward pass of the model begins and ends, and pass the output of each watched layer through a tap.
"""

import warnings

import torch

from rightbatch import taps
from rightbatch.common import is_dtensor
from rightbatch.passes import REPEATED, in_backward
from rightbatch.recognise import WatchError
from rightbatch.sites import BATCH_NORM, MIXES, OWN_FORWARD

ORDERED = torch.nn.MultiheadAttention, torch.nn.RNNBase  # layers whose batch_first says where the batch is


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


class Hooks:
    def __init__(self, model, norms, sampler, passes, left_out, gradient_came):
        """norms, and the sampler's layers, are tapped. left_out takes {name: why not}. gradient_came: called with a leaf that
        has got its gradient, in the backward pass."""
        self.norms, self.sampler, self.passes, self.left_out = norms, sampler, passes, left_out
        self.gradient_came, self.handles = gradient_came, []
        self.mixing = [m for m in model.modules() if isinstance(m, BATCH_NORM)]
        self.check_mixing()
        self.make_leaves()

    @property
    def sites(self):
        return [*self.norms, *self.sampler.layers]

    def insert(self, model):
        self.handles.append(model.register_forward_pre_hook(Hook(self.passes.begin), with_kwargs=True))
        self.handles += [m.register_forward_pre_hook(Hook(self.passes.check_order, name), with_kwargs=True)
                         for name, m in model.named_modules() if isinstance(m, ORDERED)]
        for site in self.sites:  # ahead of hooks of the user's, which may change what a layer returns
            self.handles += [use.module.register_forward_hook(Hook(self.tap, site, use), with_kwargs=True, prepend=True)
                             for use in (site, *site.twins)]
        self.handles += self.sampler.hook_in(Hook)
        self.handles.append(model.register_forward_hook(Hook(self.passes.end), always_call=True))

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for site in self.sites:  # its hook knows the Watch: a circle through autograd, which Python cannot collect
            site.leaf = None

    def check_mixing(self):
        """Refuse BatchNorm, or warn of it, where it takes its statistics from the batch: in training, or if it keeps none."""
        if not any(m.training or m.running_mean is None for m in self.mixing):
            return
        if not self.norms:
            return self.passes.refuse(
                f"nothing to watch: its {MIXES}. model.eval() on the BatchNorm layers freezes their statistics")
        warnings.warn(f"{MIXES}. What is measured in other layers is off by as much as that matters", stacklevel=5)
        self.mixing = []  # said once

    def make_leaves(self):
        """Make leaves ahead of the layers' calls, which may be compiled: a leaf cannot be made within a graph."""
        for site in self.sites:
            if site.leaf is None and not site.weight_and_bias[0].is_meta:
                self.leaf(site, site.weight_and_bias[0])

    def leaf(self, site, like):
        """The site's leaf, a new one if the model has moved since. like: a tensor on its device, in its dtype."""
        leaf, dtype, n = site.leaf, torch.promote_types(like.dtype, torch.float32), taps.length(site.size)
        if leaf is None or (leaf.device, leaf.dtype) != (like.device, dtype) or len(leaf) != n:
            leaf = site.leaf = taps.new_leaf(site.size, dtype, like.device)
            leaf.register_post_accumulate_grad_hook(self.gradient_came)
        return leaf

    def tap(self, site, use, module, args, kwargs, y):
        """Forward hook of a layer: pass its output y through Tap. use: the site itself or one of its twins."""
        if site.dropped or not site.trained or site.norm is None and not self.sampler.on:
            return None
        now = self.enter(site)
        if now is None or not y.requires_grad:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        if site.rows is not None and site.rows.device != y.device:
            site.rows = site.rows.to(y.device)
        dim = 0 if site.kind == "convolution" or site.norm and use.norm.channels > 0 else self.passes.batch_dim
        alone = in_backward() and not now.repeat  # a second call under checkpointing has a graph of its own
        words = None if now is REPEATED else misfit(site, use, x, y, now, alone, dim)
        if words and site.norm:
            return self.passes.refuse(f"{use.name} {words}. skip=({use.name!r},) leaves it out")
        if words:
            self.left_out[site.name] = words
        z = None
        if site.name not in self.left_out:
            z = self.gather(site, y, now, now.segments[1] if now.segments else x.shape[dim], alone)
        if site.norm and use.norm.copies:
            x = x.detach().clone()
        return taps.Tap.apply(y, x, z, site.rows, site, tuple(site.trained), use.norm, dim, now.segments, self.left_out)

    def enter(self, site):
        """The pass of a call. If it cannot be told, another layer is left out, as long as there are norm layers."""
        if torch.compiler.is_compiling():
            return self.passes.enter(site.name)
        try:
            return self.passes.enter(site.name)
        except WatchError as error:
            if site.norm or not self.norms:
                return self.passes.refuse(str(error))
            self.left_out[site.name] = str(error)
            return None

    def gather(self, site, like, now, B, alone):
        """z, where the calls of a layer meet in one forward pass. like: the output; alone: this call has a z of its own."""
        z = None if alone else now.z.get(site.name)
        if z is None:
            leaf = self.leaf(site, like)
            counts = leaf[-taps.HEAD:].detach() if now is REPEATED else self.passes.counts(now, like, B)
            z = taps.Gather.apply(leaf, counts, B, site, self.left_out)
            if not alone:
                now.z[site.name] = z
        return z


def misfit(site, use, x, y, now, alone, dim):
    """Why the examples of a call cannot be told apart, in words; None where they can."""
    shape = tuple(x.shape)
    channels = site.kind == "convolution" or site.norm and use.norm.channels > 0  # x is (B, C, ...)
    if is_dtensor(x) or is_dtensor(y) or not site.norm and is_dtensor(use.module.weight):
        return "has an example spread over ranks (sequence or tensor parallelism), so that no rank has its gradient"
    if alone and (now.calls[site.name] > 1 or site.name in now.z):
        return ("is used several times in a forward pass under reentrant checkpointing, which runs backward for each alone: "
                "use_reentrant=False")
    least = dim + 1 + max(0, -use.norm.channels) if site.norm else \
        use.module.weight.dim() if site.kind == "convolution" else 2
    if x.dim() < least:
        return f"gets an input {shape} that has no dimension of examples. One example is (1, ...)"
    if now.B is not None and x.shape[dim] != now.B:
        there = x.dim() > 2 and not channels and x.shape[1 - dim] == now.B
        return f"sees {x.shape[dim]} examples in its input {shape}, the model sees {now.B}: " + (
            f"pass batch_dim={1 - dim} if the batch is there" if there else
            "its input is the same for all examples, or they are folded away")
    if not site.norm and site.kind != "convolution" and (*shape[:-1], site.height) != y.shape:
        return OWN_FORWARD
    documents = now.segments and tuple(now.segments[0].shape)
    if documents and (channels or tuple(x.movedim(dim, 0).shape[:2 if site.norm else -1]) != documents):
        return f"has an input {shape} that does not begin with {documents}, the positions of w.segments"
    return None
