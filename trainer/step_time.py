"""
What a step costs on this machine: t(B) = t0 + t1 B seconds for a batch of B sequences, measured from the steps that a run makes
anyway.

    t1   seconds per sequence, over all devices: the micro-steps
    t0   what does not depend on the batch: clipping and update, and communication that is not hidden behind the backward pass

The right batch for time is sqrt(N t0 / t1), N the noise scale (gns.fastest_batch). Moments are taken inside the step: on a CPU
by the clock, on CUDA by events, which the stream passes without the host waiting. They are read when the step's numbers are
fetched. Nothing that training reads is touched.

Communication that is not hidden, in a step of several micro-steps: what the last one, which communicates, takes longer than the
others. In a step of one: the time from the last gradient to the end of the backward pass (DDP); under FSDP it cannot be told
from the backward pass and counts into t1.
"""

import statistics
import time

import torch

import gns
from rightbatch.tracker import EARLY, named

WARM_UP = 3  # steps of a process that are not counted: memory, threads and compilers are cold


class StepTime:
    def __init__(self, device, sequences, half_life_tokens, world=1, last_ready=None):
        """sequences: of one micro-step over all processes. last_ready: the parameter whose gradient comes last, under DDP."""
        self.cuda, self.sequences, self.world = device == "cuda", sequences, world
        self.averages = gns.Averages(2, half_life_tokens, EARLY)  # seconds of a micro-step, t0
        self.steps, self.marks = 0, []
        self.setting = [device, sequences, world, torch.get_num_threads()]  # elsewhere a step costs something else
        if last_ready is not None and world > 1:
            last_ready.register_hook(self.gradient_ready)

    # -- during a step

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self):
        self.marks, self.ready = [self.now()], None

    def gradient_ready(self, grad):
        self.ready = self.now()

    def micro_step(self):
        self.marks.append(self.now())

    def end(self):
        """The moments of the step: its begin, the end of each micro-step, its end; and when the last gradient was there."""
        return [*self.marks, self.now()], self.ready

    # -- on the host

    def between(self, a, b):
        return a.elapsed_time(b) / 1e3 if self.cuda else b - a

    def absorb(self, moments, tokens):
        """Take a step into the averages; the device must have passed its moments."""
        marks, ready = moments
        self.steps += 1
        if self.steps <= WARM_UP:
            return
        *micro_steps, update = (self.between(a, b) for a, b in zip(marks, marks[1:]))
        self.averages.update(split(micro_steps, update, self.world > 1, ready and self.between(ready, marks[-2])), tokens)

    def estimate(self, level=0.95):
        """{"fixed": (value, low, high), "per_sequence": the same} in seconds, or None while there are too few steps."""
        z = self.averages.quantile(level)
        if z is None:
            return None
        (micro, fixed), cov = self.averages.means(), self.averages.covariance()
        spreads = [z * max(cov[i][i], 0.0) ** 0.5 for i in (0, 1)]
        return {"fixed": tuple(max(v, 0.0) for v in (fixed, fixed - spreads[1], fixed + spreads[1])),
                "per_sequence": tuple(max(v, 1e-12) / self.sequences for v in (micro, micro - spreads[0], micro + spreads[0]))}

    def state_dict(self):
        return {"setting": self.setting, "averages": self.averages.state_dict()}

    def load_state_dict(self, state):
        if state and state["setting"] == self.setting:
            self.averages.load_state_dict(state["averages"])


def split(micro_steps, update, several, tail):
    """(seconds of a micro-step, seconds that do not depend on the batch) of one step."""
    *others, last = micro_steps
    if not several:
        return statistics.fmean(micro_steps), update
    if others:
        usual = statistics.fmean(others)
        return usual, last - usual + update
    return last - (tail or 0.0), (tail or 0.0) + update


def row(estimate):
    """The log keys of StepTime.estimate, in milliseconds."""
    if estimate is None:
        return {}
    return {k: v for name in ("fixed", "per_sequence")
            for k, v in named(f"step_time/{name}_ms", tuple(1e3 * v for v in estimate[name])).items()}
