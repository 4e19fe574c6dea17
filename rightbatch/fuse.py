"""fused=True: the model's LayerNorms and RMSNorms computed by our kernels (ln_kernel.py), which are often faster than its own.
What they compute is the same up to rounding; parameters and state_dict stay."""

import torch

from rightbatch import ln_kernel


class Fused:
    """A norm layer's forward. A copy of the model has a copy of this, with the copy's parameters."""

    def __init__(self, module, norm):
        self.module, self.norm = module, norm

    def __call__(self, x):
        weight, *bias = (p for p in self.module._parameters.values() if p is not None)
        weight = weight + 1 if self.norm.offset else weight
        if isinstance(self.module, torch.nn.LayerNorm) and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.promote_types(x.dtype, torch.float32))  # as autocast does for F.layer_norm
        with torch.autocast(x.device.type, enabled=False):  # the kernels would return its dtype; the model's own layers do not
            if self.norm.centred:
                return ln_kernel.layer_norm(x, weight, bias[0] if bias else None, eps=self.norm.eps)
            y = ln_kernel.rms_norm(x, weight, eps=self.norm.eps)
            return y + bias[0] if bias else y


def fuse(sites):
    """Let a kernel compute each norm layer that it can; `unfuse` undoes it."""
    for site in sites:
        if site.norm.eps is not None and "forward" not in vars(site.module):
            site.norm.fused, site.module.forward = True, Fused(site.module, site.norm)


def unfuse(sites):
    for site in sites:
        if site.norm.fused:
            site.norm.fused = False
            del site.module.forward
