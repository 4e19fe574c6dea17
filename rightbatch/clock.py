"""The moments of a step that hooks see (step_time.from_hooks says what is made of them)."""

import torch

from rightbatch.step_time import StepTime

LONGEST = 4096  # moments of a step that are kept: more only where no step is ever closed


class Clock:
    def __init__(self, model, half_life_tokens, ranks):
        self.model, self.half_life_tokens, self.ranks = model, half_life_tokens, ranks
        self.on = False  # there is an optimizer, whose step ends a step
        self.timer, self.saved = None, None
        self.events, self.closed = [], None  # of the step at work; of the one that is in the optimizer

    def running(self):
        """The StepTime, made when training begins: before, the model may be on another device, or on none."""
        if self.timer is None:
            device = next(self.model.parameters()).device.type
            self.timer = StepTime(device, 1, self.half_life_tokens, self.ranks.world())
            self.timer.load_state_dict(self.saved)
        return self.timer

    def passed(self, what):
        """A "start", a "forward" that begins, or a "backward" that is over."""
        if self.on and not torch.compiler.is_compiling():
            self.events = self.events[-LONGEST:]
            self.events.append((what, self.running().now()))

    def close(self):
        """The step at work is closed: its moments, to which the update is added later."""
        self.events, self.closed = [], self.events
        return self.closed

    def updated(self):
        """An optimizer has stepped, perhaps not the last. If the next forward pass began before, nothing can be told."""
        if self.closed is None or self.events:
            return False
        self.closed[:] = [event for event in self.closed if event[0] != "update"] + [("update", self.running().now())]
        return True

    def state_dict(self):
        return self.timer.state_dict() if self.timer else self.saved

    def load_state_dict(self, state):
        self.saved, self.timer = state, None
