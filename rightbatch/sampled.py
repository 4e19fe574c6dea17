"""
A Sampler says which rows of which layers a step takes; rows.py says why a few are enough. In a layer's first such step it
compares the sum over examples with the weight's gradient. Where they differ, the weight is used elsewhere, too, or the layer
does more than a linear one, and is left out.
"""

import torch

from rightbatch import rows
from rightbatch.sites import OWN_FORWARD

TOLERANCE = 0.05  # relative error that the comparison lets pass: the weight's gradient may be bf16


class Sampler:
    """The layers whose rows are sampled. `on`: whether the present step samples."""

    def __init__(self, layers, always, left_out):
        """always: every step samples. left_out takes {name: why not}."""
        self.layers, self.always, self.left_out = layers, always, left_out
        self.checks = {}  # layer not compared yet -> the handles of hooks on its parameters
        self.begin(0)

    def begin(self, step):
        """Choose the rows of a step, the same on all ranks. Steps are numbered from 0."""
        self.step, self.on = step, self.always or rows.samples(step)
        cut = [site for site in self.layers if site.count < site.height]
        if self.on and cut:
            device = next((site.leaf.device for site in cut if site.leaf is not None), "cpu")
            drawn = torch.tensor(rows.draw(0, step, [site.height for site in cut], rows.ROWS)).to(device, non_blocking=True)
            for site, own in zip(cut, drawn.unbind()):
                site.rows = own

    def hook_in(self, hook):
        """Put hooks on the parameters, which keep the gradients to compare with. Returns their handles."""
        for site in self.layers:
            self.checks[site] = [p.register_hook(hook(self.keep_gradient, site, name)) for name, p in site.trained.items()]
        return [handle for handles in self.checks.values() for handle in handles]

    def keep_gradient(self, site, name, grad):
        if self.on:  # a copy: others write into the gradient, as DDP does
            part = site.pick(name, grad.detach()).to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            site.gradients[name] = site.gradients[name] + part if name in site.gradients else part

    def check(self):
        """At the end of a step that samples: leave out the layers whose sum is not their weight's gradient."""
        for site in [site for site in self.checks if not site.gradients and site.kind == OWN_FORWARD and site.open]:
            self.left_out.setdefault(site.name, OWN_FORWARD)  # shards: there is nothing to compare with
        for site in [site for site in self.checks if site.gradients]:
            true, site.gradients = torch.cat([site.gradients[name] for name in site.trained]), {}
            size, why = float(true.norm()), None
            if not site.open:
                why = "its weight is used, but not by calling the layer"
            elif not size < float("inf"):
                continue  # a gradient that is not finite: the next step tells
            elif float((site.leaf.grad[:len(true)] - true).norm()) > TOLERANCE * size:
                why = "its weight is used elsewhere, too, or the layer is no plain one"
            if why:
                self.left_out.setdefault(site.name, why)
            for handle in self.checks.pop(site):
                handle.remove()
        for site in self.layers:
            site.dropped = site.name in self.left_out

    def forget(self):
        for site in self.layers:
            site.gradients = {}
