"""
The optimizer as the rest of the trainer sees it. This file alone knows what sets one of torch's optimizers apart.

    optimizer = Optimizer(model, config, device, dtype)
    optimizer.backward(loss)                      # with fp16's loss scale
    optimizer.unscale()                           # before gradients are measured
    optimizer.set(lr, beta2, weight_decay)
    optimizer.clip_and_step(record)               # reads param_sq and bad of the step's record
    optimizer.metric({name: parameter})           # the metric it steps in, or None

A step whose record says `bad` changes nothing. Fused AdamW knows how to do that, and to clip, without asking the host. Every
other optimizer is clipped by a pass over its gradients and asks the host once per step.

To add one: a function that returns torch optimizers, in OPTIMIZERS.
"""

import torch

from rightbatch.common import local
from rightbatch.metric import adam_metric


def adamw(model, config):
    return [fused_adamw(model.parameter_groups(config.weight_decay), config)]


def muon(model, config):
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for embeddings, head, norm layers and biases. Updates are
    scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so learning_rate and weight_decay mean the same."""
    inside = {id(p) for p in model.h.parameters() if p.dim() == 2}
    matrices = [p for p in model.h.parameters() if id(p) in inside]
    rest = [{**group, "params": [p for p in group["params"] if id(p) not in inside]}
            for group in model.parameter_groups(config.weight_decay)]
    return [torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay,
                             adjust_lr_fn="match_rms_adamw"),
            fused_adamw(rest, config)]


OPTIMIZERS = {"adamw": adamw, "muon": muon}
NEEDS_UNSHARDED = {"muon"}  # their update is a product of whole matrices, which fsdp never holds


def fused_adamw(groups, config):
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


class Optimizer:
    def __init__(self, model, config, device, dtype):
        self.parts = OPTIMIZERS[config.optimizer](model, config)
        self.decays = [[group["params"][0].dim() >= 2 for group in part.param_groups] for part in self.parts]  # matrices do
        self.grad_clip, self.beta1, self.device = config.grad_clip, config.beta1, device
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    # -- a step

    def loss_scale(self):
        """What every gradient is multiplied by: 1 unless fp16."""
        return self.scaler.scale(torch.ones((), device=self.device))

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def unscale(self):
        for part in self.parts:
            self.scaler.unscale_(part)

    def set(self, lr, beta2, weight_decay):
        for part, decays in zip(self.parts, self.decays):
            for group, decayed in zip(part.param_groups, decays):
                group["lr"], group["weight_decay"] = lr, weight_decay if decayed else 0.0
                if "betas" in group:
                    group["betas"] = self.beta1, beta2

    def clip_and_step(self, record):
        """Clip the gradient to grad_clip and update, unless the step was bad."""
        shrink_by = None  # how much too long the gradient is
        if self.grad_clip > 0:
            shrink_by = torch.clamp((record["param_sq"].sum().sqrt() + 1e-6) / self.grad_clip, min=1.0)
        for part in self.parts:
            # The fused kernel divides by grad_scale and skips the step if found_inf: they are the GradScaler's, and do for
            # clipping and for bad steps. Metal's kernel does not look at them
            if part.defaults.get("fused") and self.device != "mps":
                part.grad_scale, part.found_inf = shrink_by, record["bad"]
                part.step()
            else:
                self.plain_step(part, shrink_by, record["bad"])
        if self.scaler.is_enabled():
            self.scaler.update()
        self.zero_grad()

    @staticmethod
    def plain_step(part, shrink_by, bad):
        if bad:
            return
        if shrink_by is not None:
            torch._foreach_div_([local(p.grad) for group in part.param_groups for p in group["params"]], shrink_by)
        part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    # -- what it knows about the gradients so far

    def moments(self, p):
        """Adam's state of a parameter and its group: exp_avg, exp_avg_sq, step; None where there is none (yet)."""
        for part in self.parts:
            state = part.state.get(p)
            if state and "exp_avg_sq" in state:
                return state, part.param_groups[0]
        return None

    def metric(self, named):
        """{name: weight per coordinate} of these parameters, this rank's part of each; None where one has no second moment."""
        moments = [self.moments(p) for p in named.values()]
        if not moments or not all(moments):
            return None
        group, step = moments[0][1], moments[0][0]["step"]
        weights = adam_metric([local(state["exp_avg_sq"]) for state, _ in moments], step, group["betas"][1], group["eps"])
        return dict(zip(named, weights))

    # -- checkpoints: one part is saved as torch saves it

    def state_dict(self):
        parts = [part.state_dict() for part in self.parts]
        return parts[0] if len(parts) == 1 else {"parts": parts}

    def load_state_dict(self, state):
        """The moments; groups are the settings' own."""
        for part, saved in zip(self.parts, state.get("parts", [state]), strict=True):
            groups = part.state_dict()["param_groups"]
            if [group["params"] for group in groups] != [group["params"] for group in saved["param_groups"]]:
                raise ValueError("parameters in other groups")
            part.load_state_dict({"state": saved["state"], "param_groups": groups})
            check_state(part)


def check_state(part):
    """ValueError unless all parameters, or none, have what this optimizer keeps, in their own shape and one number behind
    another in memory: the fused kernel does not look."""
    parameters = [p for group in part.param_groups for p in group["params"]]
    example = torch.zeros(2, 2, device=local(parameters[0]).device, requires_grad=True)
    example.grad = torch.zeros_like(example)
    other = type(part)([{"params": [example], **part.defaults}])
    other.step()
    single = {name: value.dim() == 0 for name, value in other.state[example].items()}  # "step" is one number
    if part.state and (len(part.state) != len(parameters) or any(part.state[p].keys() != single.keys() for p in parameters)):
        raise ValueError(f"not every parameter has {', '.join(single)}")
    for p in parameters if part.state else ():
        for name, value in part.state[p].items():
            if value.shape != (() if single[name] else p.shape) or not value.is_contiguous():
                raise ValueError(f"{name} of shape {tuple(value.shape)} for a parameter of shape {tuple(p.shape)}")
            if single[name] and not 0 <= value < 2**53:
                raise ValueError(f"{name} is {float(value)}")


def for_each_tensor(saved, function):
    """Optimizer.state_dict() with function(part, parameter number, tensor) in place of each tensor."""
    def changed(part, one):
        return {**one, "state": {i: {k: function(part, i, v) for k, v in s.items()} for i, s in one["state"].items()}}
    if "parts" in saved:
        return {"parts": [changed(part, one) for part, one in enumerate(saved["parts"])]}
    return changed(0, saved)
