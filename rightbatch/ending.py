"""
Ending notices where a step ends: an optimizer steps, w.step() is called, or the batch is thrown away.
"""

import warnings

import torch

from rightbatch.common import is_dtensor
from rightbatch.passes import in_backward
from rightbatch.recognise import WatchError

NO_GRADIENT = ("no watched layer got a gradient since the last step: was the model compiled before watch(model) (later hooks "
               "are ignored: watch first), is w.step() before loss.backward(), or are the gradients torch.func's?")
THROWN_AWAY = ("batches were thrown away, their gradients set to None, and no step was closed: call w.step() after the last "
               "backward pass of a step, or give watch the optimizer")


class Ending:
    def __init__(self, optimizers, scaler, clock, close, forget):
        """optimizers: a list that attach extends. close: called where an optimizer steps; forget: where a batch is thrown away.
        close is None where that does not end a step."""
        self.optimizers, self.scaler, self.clock, self.close, self.forget = optimizers, scaler, clock, close, forget
        self.scaler_states = getattr(scaler, "_per_optimizer_states", None)
        self.sites, self.handles = [], []
        self.steps = 0         # closed so far
        self.idle = 0          # times that there was nothing to close, before the first step was closed
        self.depth = 0         # calls of optimizer.step within each other: a subclass that calls its base's runs hooks twice
        self.stepped = []      # optimizers that have stepped since the last step was closed
        self.asked = False     # autograd will call backward_over
        self.had_gradients = False  # parameters had a .grad when a backward pass of this step was over

    def attach(self, optimizer):
        for each in single(optimizer):
            if not any(each is other for other in self.optimizers):
                self.optimizers.append(each)
                self.handles += [each.register_step_pre_hook(self.before_optimizer),
                                 each.register_step_post_hook(lambda it, *_: self.after_optimizer(it))]
        self.clock.on = bool(self.optimizers)

    def remove(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def begun(self):
        """Whether a watched layer has got a gradient since the last step."""
        return any(site.open for site in self.sites)

    def closed(self):
        """A step was closed."""
        self.steps += 1
        self.asked, self.stepped, self.had_gradients = False, [], False

    # -- the backward pass

    def gradient_came(self, leaf):
        """A layer has its gradient. Ask autograd for a call when all have theirs."""
        if not self.asked:
            self.asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_over)

    def backward_over(self):
        self.asked = False
        self.clock.passed("backward")
        self.had_gradients = self.had_gradients or any(p.grad is not None for s in self.sites for p in s.parameters)

    # -- the optimizer

    def before_optimizer(self, optimizer, args, kwargs):
        """Close the step; behind the closure if there is one, which computes the gradients inside of optimizer.step."""
        self.depth += 1
        if self.depth > 1 or self.close is None:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self.close()

        def closure_and_step():
            loss = closure()
            self.close()
            return loss
        if len(args) > 1:
            return (optimizer, closure_and_step, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_step}

    def after_optimizer(self, optimizer):
        self.depth = max(0, self.depth - 1)
        if not self.depth and not any(optimizer is other for other in self.stepped) and self.clock.updated():
            self.stepped.append(optimizer)

    # -- a step that never ended

    def begin(self):
        """A forward pass begins: forget what belongs to a batch that was thrown away. Two things tell, without asking the
        device. GradScaler leaves out a step that overflowed, so that no hook of the optimizer runs, but its update() replaces
        its dict of states. And gradients that the backward pass left are None now; sharded ones may only be elsewhere."""
        self.depth = 0  # an optimizer.step that raised did not say that it was over
        states = getattr(self.scaler, "_per_optimizer_states", None)
        raised = self.asked and not in_backward()  # in the middle of a backward pass
        gone = (self.had_gradients or raised) and not any(
            p.grad is not None or is_dtensor(p) for s in self.sites for p in s.parameters)
        if self.begun() and (gone or states is not self.scaler_states):
            self.forget()
            self.nothing_to_close(THROWN_AWAY)
        self.asked, self.scaler_states = self.asked and not raised, states

    def nothing_to_close(self, words):
        """Warn at the third time, unless steps do get closed."""
        self.idle += not self.steps
        if self.idle == 3 and not self.steps:
            warnings.warn(words, stacklevel=2)


def single(optimizer):
    """The optimizers in a list, in torchtitan's container, in accelerate's wrapper, or [optimizer]."""
    if optimizer is None:
        return []
    if isinstance(optimizer, (list, tuple)):
        return [one for each in optimizer for one in single(each)]
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if inner is not None:
        return single(inner)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise WatchError(f"optimizer: expected a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}")
    return [optimizer]


def scaler_of(optimizer):
    """The GradScaler that accelerate's wrapper holds, or None."""
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        while each is not None:
            if getattr(each, "scaler", None) is not None:
                return each.scaler
            each = getattr(each, "optimizer", None)
    return None
