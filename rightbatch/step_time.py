"""
What a step costs on this machine: t(B) = t0 + t1 B seconds for a batch of B sequences, measured from the steps that a run makes
anyway.

    t1   seconds per sequence, over all devices: the micro-steps
    t0   what does not depend on the batch: clipping and update, and communication that is not hidden behind the backward pass

The right batch for time is sqrt(N t0 / t1), N the noise scale (decision.py). Moments are taken inside the step: on a CPU
by the clock, on CUDA by events, which the stream passes without the host waiting. They are read when the step's numbers are
fetched. Nothing that training reads is touched.

Communication that is not hidden is told from computation in three ways:
- several micro-steps in a step: only the last one communicates, so what it takes longer is communication;
- one micro-step under DDP: now and then it is rehearsed, made ahead of the step without communication; what the real one takes
  longer is communication. (The time up to its last gradient would not do: copies and transfers slow it down.)
- one micro-step under DDP without a rehearsal so far: the time after its last gradient is communication. Where that moment is
  not known, under FSDP or in somebody else's loop, communication cannot be told and counts into t1.

A process that is faster than the others waits for them, which looks like communication: the slowest one's estimate is taken.
On Apple's MPS nothing is measured: its clock cannot be read without waiting.

train.py takes the moments itself (begin, mark, end). watch has hooks instead (`from_hooks`): a micro-step is from where the
forward pass begins to where the backward pass ends, the rest from there to the end of the update. Under DDP the backward pass
ends, for hooks, before the wait for other processes, so the wait is fixed cost.
"""

import statistics
import time

import torch

from rightbatch import gns
from rightbatch.decision import Cost, Triple

WARM_UP = 3  # steps of each kind that a process does not count: memory, threads and compilers are cold
REHEARSALS, REHEARSE_EVERY = 3, 500  # so many after the warm-up, then one in so many steps: half a per cent of the time
RECENT = 100  # steps that a rehearsal is compared with


class StepTime:
    def __init__(self, device, sequences, half_life_tokens, world=1, last_ready=None, setting=()):
        """sequences: of one micro-step over all processes. last_ready: the parameter whose gradient comes last, under DDP.
        setting: what else a step's cost depends on; averages of another setting are not taken over."""
        self.device, self.sequences, self.world = device, sequences, world
        self.averages = gns.Averages(2, half_life_tokens, gns.EARLY)  # seconds of a micro-step, t0
        self.seen = {}  # {kind: steps that were absorbed}
        self.marks, self.ready = [], None  # moments of the step at work; the one of its last gradient
        self.asked, self.rehearsal = -1, None  # number of the last step that could be rehearsed; moments of its rehearsal
        self.alone, self.beside = {}, {}  # {kind: [seconds]} of micro-steps that were rehearsed, of those that communicate
        self.setting = [device, sequences, world, torch.get_num_threads(), *setting]
        if last_ready is not None and world > 1:
            last_ready.register_hook(self.gradient_ready)

    # -- during a step

    def now(self):
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self):
        self.marks, self.ready = [self.now()], None

    def gradient_ready(self, grad):
        self.ready = self.now()

    def mark(self):
        """The end of what is prepared for a step, and of each micro-step."""
        self.marks.append(self.now())

    def end(self):
        """([begin, prepared, the end of each micro-step, end], the moment of the last gradient) of the step. Where it was
        rehearsed, ([begin, end], None) of the rehearsal, which lengthened the step itself."""
        if self.device == "mps":
            return None
        rehearsal, self.rehearsal = self.rehearsal, None
        return rehearsal or ([*self.marks, self.now()], self.ready)

    def wants_rehearsal(self):
        """Whether to rehearse the only micro-step of this step. All processes come to the same answer."""
        self.asked += 1
        return WARM_UP <= self.asked < WARM_UP + REHEARSALS or self.asked % REHEARSE_EVERY == REHEARSE_EVERY - 1

    def rehearse(self, micro_step):
        """Twice: the first brings the caches back from the update, the second is timed."""
        micro_step()
        begun = self.now()
        micro_step()
        self.rehearsal = ([begun, self.now()], None)

    # -- on the host

    def between(self, a, b):
        return a.elapsed_time(b) / 1e3 if self.device == "cuda" else b - a

    def absorb(self, moments, tokens, kind=None):
        """Take a step into the averages; the device must have passed its moments. kind: the first steps of a kind compile."""
        self.seen[kind] = self.seen.get(kind, 0) + 1
        if self.seen[kind] <= WARM_UP:
            return
        marks, ready = moments
        if len(marks) == 2:  # a rehearsal
            self.alone.setdefault(kind, []).append(self.between(*marks))
            return
        prepared, *micro_steps, update = (self.between(a, b) for a, b in zip(marks, marks[1:]))
        tail = None if ready is None else self.between(ready, marks[-2])
        slower = self.slowed_by(micro_steps[0] - tail, kind) if len(micro_steps) == 1 and tail is not None else 1.0
        micro, fixed = split(micro_steps, update, self.world > 1, tail, slower)
        self.averages.update((micro, prepared + fixed), tokens)

    def slowed_by(self, seconds, kind):
        """How many times as long as a rehearsal a micro-step that communicates takes up to its last gradient; 1 before there
        was a rehearsal. seconds: what this step's took."""
        beside = self.beside.setdefault(kind, [])
        beside.append(seconds)
        del beside[:-RECENT]
        alone = self.alone.get(kind)
        return max(1.0, statistics.median(beside) / statistics.median(alone)) if alone else 1.0

    def absorb_hooks(self, events, passes, examples, tokens, kind=None):
        """Take a step into the averages from what hooks saw. examples: of the step, over all processes. self.sequences is 1
        then: micro-batches may differ."""
        stretches = from_hooks(events, passes)
        self.seen[kind] = self.seen.get(kind, 0) + bool(stretches)
        if not stretches or self.seen[kind] <= WARM_UP:
            return
        *micro_steps, update = (self.between(a, b) for a, b in stretches)
        micro, fixed = split(micro_steps, update, self.world > 1, None)
        self.averages.update((micro * len(micro_steps) / examples, fixed), tokens)

    def estimate(self, level=0.95) -> Cost | None:
        """The cost of a step, or None while there are too few steps."""
        z = self.averages.quantile(level)
        if z is None:
            return None
        (micro, fixed), cov = self.averages.means(), self.averages.covariance()
        spreads = [z * max(cov[i][i], 0.0) ** 0.5 for i in (0, 1)]

        def triple(value, spread, least, parts) -> Triple:
            value, low, high = (max(v, least) / parts for v in (value, value - spread, value + spread))
            return value, low, high
        return Cost(triple(fixed, spreads[1], 0.0, 1), triple(micro, spreads[0], 1e-12, self.sequences))

    def state_dict(self):
        return {"setting": self.setting, "averages": self.averages.state_dict()}

    def load_state_dict(self, state):
        if state and state["setting"] == self.setting:
            self.averages.load_state_dict(state["averages"])


def split(micro_steps, update, communicates, tail, slower=1.0):
    """(seconds of a micro-step, seconds that do not depend on the batch) of one step. tail: seconds after the last gradient of
    an only micro-step; slower: how many times as long as a rehearsal it takes up to there."""
    *others, last = micro_steps
    if not communicates:
        return statistics.fmean(micro_steps), update
    if others:
        usual = statistics.fmean(others)
        return usual, last - usual + update
    usual = (last - (tail or 0.0)) / slower
    return usual, last - usual + update


def from_hooks(events, passes):
    """[(begin, end)] of each micro-step and of the update, or None where hooks do not tell. events: [(what, moment)] of a step:
    "start" before its first forward pass, "forward" begins, "backward" is over, "update" is over.

    A compiled model's forward pass has no moment of its own: a micro-step begins at its "start" or where the last one ended.
    passes: the forward passes that a backward pass followed. A step with another forward pass is not counted."""
    names = [what for what, _ in events]
    compiled = "forward" not in names
    if "backward" not in names or names[-1] != "update" or names.count("backward" if compiled else "forward") != passes:
        return None
    begun, over, stretches = None, None, []
    for what, moment in events[:-1]:
        if what != "backward":
            begun = moment if begun is None else begun
            continue
        if begun is None and not compiled:  # a second backward pass of the same forward pass
            stretches[-1:] = [(stretches[-1][0], moment)] if stretches else []
        elif begun is None and over is None:
            return None
        else:
            stretches.append((over if begun is None else begun, moment))
        begun, over = None, moment
    return [*stretches, (over, events[-1][1])]


def slowest(costs: list[Cost | None]) -> Cost | None:
    """The cost on the slowest of several processes, which waits least; None while one of the costs is not known."""
    known = [cost for cost in costs if cost]
    return max(known, key=lambda cost: cost.per_sequence[0]) if len(known) == len(costs) else None


def row(cost: Cost | None) -> dict:
    """{log key: value} of a cost."""
    return {f"step_time/{key}": v for key, v in cost.milliseconds().items()} if cost else {}
