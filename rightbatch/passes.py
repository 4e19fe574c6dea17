"""
A forward pass, and where in a program we are: in a backward pass, in torch.func, within a call that is still at work.
"""

import sys
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Pass:
    """What a forward pass of the model brings: B examples, tokens, lengths (B,) or None; whether its loss is a part of one mean
    over the whole step."""
    B: int | None = None
    shape: tuple = ()      # of the input that has the examples
    tokens: int = 0
    lengths: torch.Tensor | None = None
    whole: bool = False
    segments: tuple | None = None  # (document of each position (B, T), number of documents): these are the examples
    inside: bool = False   # not over yet
    level: int = 0         # how many calls of the model were at work when it was opened, this one counted
    frame: object = None   # where it was called; None where that cannot be asked
    repeat: bool = False   # a whole forward pass that checkpointing makes in the backward pass
    z: dict = field(default_factory=dict)       # site -> where its calls of this pass meet
    counts: dict = field(default_factory=dict)  # (examples, dtype, device) -> taps.head
    calls: dict = field(default_factory=dict)   # layer -> how often it was called, where that matters
    hidden: dict = field(default_factory=dict)  # layer -> calls that reentrant checkpointing is yet to make again
    picked: dict = field(default_factory=dict)  # what a tied embedding and its head tell each other: see exact.py

    def same(self, other):
        """Whether it makes no difference which of both a layer belongs to."""
        return ((self.B, self.tokens) == (other.B, other.tokens)
                and self.lengths is other.lengths and self.segments is other.segments)


AGAIN = Pass()  # of a call that only repeats another one, whose numbers nobody will ask for


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
