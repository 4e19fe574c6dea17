"""
Passes tells which forward pass a call of a layer belongs to, how many examples that has, and what each weighs in the loss.
The functions below it tell where in a program we are: in a backward pass, in torch.func, within a call that is still at work.
"""

import sys
from dataclasses import dataclass, field

import torch

from rightbatch import inputs, taps
from rightbatch.recognise import WatchError


@dataclass(eq=False)
class Pass:
    """One forward pass of the model."""
    B: int | None = None   # examples
    shape: tuple = ()      # of the input that has the examples
    tokens: int = 0
    lengths: torch.Tensor | None = None  # (B,) what each example weighs in the loss; None where they weigh alike
    whole: bool = False    # its loss is a part of one mean over all tokens of the step
    segments: tuple | None = None  # (document of each position (B, T), number of documents): documents are the examples
    inside: bool = False   # not over yet
    level: int = 0         # calls of the model at work when this pass was opened, its own counted
    frame: object = None   # of the call that opened it; None if w.batch did, or the model is compiled
    repeat: bool = False   # opened in a backward pass: the model as a whole is in a checkpoint
    z: dict = field(default_factory=dict)       # name of a site -> taps.Gather's result, where its calls meet
    counts: dict = field(default_factory=dict)  # (examples, dtype, device) -> taps.head
    calls: dict = field(default_factory=dict)   # name of a layer -> its calls under reentrant checkpointing
    hidden: dict = field(default_factory=dict)  # of these, the calls that the backward pass has not made again yet

    def same(self, other):
        """Whether a layer measures the same in either pass."""
        return ((self.B, self.tokens) == (other.B, other.tokens)
                and self.lengths is other.lengths and self.segments is other.segments)


# The pass of a second call that non-reentrant checkpointing makes in the backward pass. Gradients go through the first call, so
# that what the second one measures goes nowhere.
REPEATED = Pass()


class Passes:
    """The forward passes of a model. `current` is the newest one."""

    def __init__(self, model, batch_dim, lengths, token_mean, opening):
        """opening: called where a pass begins, but not in a compiled model. The other options are those of watch."""
        self.facts, self.batch_dim, self.opening = inputs.facts_of(model), batch_dim, opening
        self.lengths, self.token_mean = lengths, token_mean
        self.current = Pass()
        self.next_lengths: torch.Tensor | None = None
        self.next_segments: tuple | None = None
        self.opened = False  # any pass since the last step
        self.seen = False  # a forward pass went through: from then on nothing raises
        self.spoiled = ""  # why the step at work cannot be measured
        self.calls, self.hidden = 0, []  # calls of the model at work; passes with calls under reentrant checkpointing

    def begin(self, model, args, kwargs):
        """Forward pre-hook of the model."""
        self.calls += 1
        self.open(args, kwargs, None if torch.compiler.is_compiling() else sys._getframe(2))

    def open(self, args, kwargs, frame=None):
        """Open a pass. A call within a call belongs to the pass that is open."""
        if not torch.is_grad_enabled() or in_transform():
            return
        now, given = self.current, inputs.arguments(self.facts, args, kwargs)
        if now.inside and now.frame is not None and not on_stack(now.frame):
            self.calls, now.inside = 1, False  # that call was interrupted, and no hook saw its end
        whole = self.token_mean == "step" or self.token_mean == "auto" and inputs.one_mean_per_step(self.facts, given)
        if now.inside:  # w.batch(x) may have opened it, which knows neither labels nor num_items_in_batch
            if now.lengths is None and not now.counts and self.lengths == "auto":
                now.lengths = inputs.lengths_of(self.facts, given, now.B, now.segments)
            now.whole = now.whole or whole
            return
        if not torch.compiler.is_compiling():
            self.opening()
        first = inputs.first_input(given)
        B, tokens = None, 0
        if first is not None:
            B = first.shape[self.batch_dim]
            tokens = B if first.is_floating_point() else first.numel()
        lengths, segments, self.next_lengths, self.next_segments = self.next_lengths, self.next_segments, None, None
        if lengths is None and self.lengths == "auto":
            lengths = inputs.lengths_of(self.facts, given, B, segments)
        self.opened = True
        self.current = Pass(B, () if first is None else first.shape, tokens, lengths, whole, segments, inside=True,
                            level=self.calls, frame=frame, repeat=in_backward())

    def refuse(self, words):
        """Raise in the first forward pass. Later the step is left out, and a training that runs goes on."""
        if not self.seen and not in_backward():
            raise WatchError(words)
        self.spoiled = words

    def end(self, model=None, args=(), output=None):
        """Forward hook of the model. output: None where the call raised, too."""
        now = self.current
        if now.level == self.calls:
            if now.inside and output is not None:
                self.seen = True
            now.inside, now.frame = False, None
        self.calls -= 1

    def enter(self, name):
        """The Pass that a call of a layer belongs to, or None where there is nothing to measure. Checkpointing calls layers a
        second time, in the backward pass, and other forward passes may have come in between. Gradients go through the second
        call if the checkpointing is reentrant, else through the first."""
        now = self.current
        if not torch.is_grad_enabled():
            if now.inside and not torch.compiler.is_compiling() and in_function():
                if now not in self.hidden:
                    self.hidden.append(now)
                for counts in (now.hidden, now.calls):
                    counts[name] = counts.get(name, 0) + 1
            return None
        if in_transform():
            return None
        if in_backward():
            return self.pass_of_second_call(name)
        if not now.inside:
            raise WatchError(f"{name} is called outside of the model's own forward pass, so that its batch is not known. Call "
                             "the model itself, model(x), or say what is one pass: with w.batch(x): loss = model.loss(x)")
        return now

    def pass_of_second_call(self, name):
        known = [p for p in self.hidden if name in p.hidden]
        waiting = [p for p in known if p.hidden[name]]
        if known and not waiting:
            raise WatchError(f"{name}: a second backward pass through reentrant checkpointing. Add the losses up, or "
                             "use_reentrant=False")
        if not waiting:
            return self.current if self.current.repeat and self.current.inside else REPEATED
        if not all(p.same(waiting[0]) for p in waiting):
            raise WatchError(f"{name}: several forward passes before a backward pass, and reentrant checkpointing does not "
                             "tell which of them it repeats: use_reentrant=False")
        waiting[-1].hidden[name] -= 1
        return waiting[-1]

    def counts(self, now, like, B):
        """The taps.Counts of a pass, for a layer whose numbers are as `like`."""
        key = B, torch.promote_types(like.dtype, torch.float32), like.device
        if key not in now.counts:
            lengths = now.lengths
            if lengths is not None and lengths.shape != (B,):
                self.refuse(f"{lengths.numel()} weights for {B} examples: w.weights takes one for each example"
                            + (", here document," if now.segments else "") + " of the next forward pass")
                lengths = None
            now.counts[key] = taps.head(B, now.tokens or B, lengths, *key[1:])
        return now.counts[key]

    def check_order(self, name, module, args, kwargs):
        """Pre-hook of a layer that has batch_first: refuse the model if its batch is not where watch looks for it. Norm layers
        alone cannot tell: to them (T, B, C) is a batch of T. Not refused is a layer of folded examples, which has a multiple of
        B in its own batch dimension; the other dimension may be B by chance."""
        x, now, dim = args[0] if args else next(iter(kwargs.values()), None), self.current, 0 if module.batch_first else 1
        if not (now.inside and now.B and isinstance(x, torch.Tensor) and x.dim() == 3):
            return
        if not torch.is_grad_enabled() or in_backward():
            return
        if x.shape[dim] != now.B == x.shape[1 - dim] and (x.shape[:2] == now.shape[:2] or x.shape[dim] % now.B):
            self.refuse(
                f"{name or 'the model'} has batch_first={module.batch_first}, so that its input {tuple(x.shape)} is "
                f"{x.shape[dim]} examples to it and {now.B} to watch: pass batch_dim={dim} if the model's batch is there. If "
                f"not, the layer mixes examples, and should have batch_first={not module.batch_first}")


def in_backward():
    """Whether a backward pass is at work: checkpointing calls layers again there."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_function():
    """Whether an autograd function computes: reentrant checkpointing is one, and calls layers without gradients there. (Other
    calls without gradients are not made again.)"""
    at = sys._getframe(1)
    while at is not None and not ("ctx" in at.f_code.co_varnames
                                  and isinstance(at.f_locals.get("ctx"), torch.autograd.function.FunctionCtx)):
        at = at.f_back
    return at is not None


def in_transform():
    """Whether torch.func is at work, which takes no hooks like these: the model is as if it were not watched."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def on_stack(frame):
    """Whether a call is still at work."""
    at = sys._getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is not None
