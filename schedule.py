"""
Batch size and learning rate as functions of the tokens seen so far; nothing here counts steps, since steps change size.
Batches are in sequences and come in whole quanta (micro-batch x processes), so that the micro-batch keeps its shape.

    constant   batch_size
    linear     batch_size_start to batch_size over the run (Gray et al. 2024, arXiv 2411.00999)
    late       batch_size_start, and batch_size from batch_late of the run on
    seesaw     where lr_decay would halve the learning rate, it falls by sqrt(2) and the batch doubles, up to batch_size
               (Meterez et al. 2025, arXiv 2510.14717)
    steps      batch_steps = "0:32, 50M:64, 200M:128"
    file       batch_file: lines of tokens and batch, straight lines between them, read again when the file changes
    gns        Controller: follows the noise scale, and what a step costs

    batches = schedule.build(config, quantum)     # ValueError says what is wrong, by key, value and remedy
    batches.at(tokens)                            # the batch of the step that starts there

One class each, below; a schedule of your own is one more class, its name in SCHEDULES and its keys in configurator.Config.
Controller and File keep what they remember in a state_dict. A decision is a function of that and of its arguments alone, so it
comes out the same on every process and after a resume.
"""

import math
import os
import time
from collections.abc import Callable

import gns
from rightbatch.decision import right_batch
from system import files
from system.points import parse_file, parse_steps


class Schedule:
    """What the trainer, the planner and the checks ask. Before there is a run, they ask a class: for keys, fixed, measured,
    sizes and check. In a run they ask its schedule for the rest."""

    at: Callable[[int], int]  # tokens -> the effective batch of the step that starts there, a multiple of the quantum
    keys = ("batch_size",)  # config keys that hold a batch, so a multiple of the quantum
    fixed = ()  # keys that a resume may change in general, but not with this schedule
    measured = False  # batches follow from what the run measures: nobody knows them beforehand
    polls = False  # poll() is worth a call before each step
    by_time = False  # decisions depend on the clock and cannot be made again: a move is saved at once

    def __init__(self, config, quantum):
        self.config, self.quantum = config, quantum

    @classmethod
    def sizes(cls, config):
        """Batches that the config gives, the largest among them; empty where they are not in the config."""
        return [getattr(config, key) for key in cls.keys]

    @classmethod
    def check(cls, config, quantum):
        """ValueError where batches cannot be had in this quantum, or the schedule's keys contradict each other."""
        for key in cls.keys:
            check_multiple(key, getattr(config, key), config.micro_batch_size, quantum)

    def learning_rate(self, tokens, after):
        """The learning rate of the step from `tokens` to `after`, for the reference batch."""
        return learning_rate_at(after, self.config)

    def start(self):
        """Called once, at the start of a run that has no saved state."""

    def poll(self):
        """News from outside, or None. With several processes one polls and all accept what it found."""

    def accept(self, news):
        """Take what poll() gave. Returns words for the log, or None."""

    def observe(self, tokens, noise, cost=None):
        """Look at the noise scale (decision.Noise or None) and at what a step costs (decision.Cost or None), after `tokens`.
        Returns words for the log, or None."""

    def walk(self, end, block_size):
        """(steps, tokens, smallest and largest batch) of a run to `end` tokens."""
        tokens, count, sizes = 0, 0, set()
        while tokens < end:
            B = self.at(tokens)
            sizes.add(B)
            tokens += B * block_size
            count += 1
        return count, tokens, (min(sizes), max(sizes))

    def state_dict(self):
        return {}

    def load(self, state):
        """Take over the state_dict of a checkpoint."""


class Constant(Schedule):
    def at(self, tokens):
        return self.config.batch_size

    def walk(self, end, block_size):
        return constant_walk(self.config.batch_size, end, block_size, smallest=self.config.batch_size)


class Between(Schedule):
    """A schedule that moves from batch_size_start to batch_size."""

    keys = ("batch_size", "batch_size_start")

    @classmethod
    def check(cls, config, quantum):
        super().check(config, quantum)
        if config.batch_size_start > config.batch_size:
            raise ValueError(f"batch_size_start={config.batch_size_start}: must not exceed batch_size={config.batch_size}, "
                             "which the schedule ends with")


class Linear(Between):
    def at(self, tokens):
        c = self.config
        return interpolate([(0, c.batch_size_start), (c.batch_tokens or c.max_tokens, c.batch_size)], tokens, self.quantum)


class Late(Between):
    def at(self, tokens):
        c = self.config
        return c.batch_size if tokens >= c.batch_late * (c.batch_tokens or c.max_tokens) else c.batch_size_start


class Seesaw(Between):
    """The learning rate falls in steps: by sqrt(2) where the batch doubles, by 2 once it cannot double any more."""

    def halvings(self, tokens):
        """How often lr_decay has halved the learning rate, and how many of these double the batch."""
        c = self.config
        base = learning_rate_at(max(tokens, c.warmup_tokens), c)
        count = math.floor(math.log2(c.learning_rate / base) + 1e-9) if base > 0 else 64
        return count, min(count, int(math.log2(c.batch_size / c.batch_size_start)))

    def at(self, tokens):
        c = self.config
        return c.batch_size_start * 2 ** self.halvings(tokens)[1]

    def learning_rate(self, tokens, after):
        c = self.config
        if after < c.warmup_tokens or not c.learning_rate:
            return learning_rate_at(after, c)
        count, doubled = self.halvings(tokens)
        return max(c.learning_rate * 2.0 ** (doubled / 2 - count), c.min_lr)


class Steps(Schedule):
    keys = ()

    def __init__(self, config, quantum):
        super().__init__(config, quantum)
        self.points = self.parse(config, quantum)

    @classmethod
    def sizes(cls, config):
        return [batch for _, batch in cls.parse(config, 1)]

    @classmethod
    def check(cls, config, quantum):
        cls.parse(config, quantum)

    @staticmethod
    def parse(config, quantum):
        """[(tokens, batch)] of batch_steps"""
        try:
            return parse_steps(config.batch_steps, quantum)
        except ValueError as e:
            raise ValueError(f"batch_steps={config.batch_steps!r}: {e}") from None

    def at(self, tokens):
        return [batch for start, batch in self.points if start <= tokens][-1]


class File(Schedule):
    """The schedule in a text file that its owner may edit while the run goes on. It is never written by us. The text in
    force is part of the state: a resumed run starts from it and then looks at the file again."""

    keys = ()
    polls = True

    def __init__(self, config, quantum):
        super().__init__(config, quantum)
        self.path = config.batch_file
        self.text = self.points = None  # in force
        self.seen, self.signature = None, ""  # text that was read last, perhaps a bad one; signature_of its file then
        self.glimpsed = ""  # signature_of the file at the last look

    @classmethod
    def check(cls, config, quantum):
        """The batches are checked when the file is read."""
        if not config.batch_file:
            raise ValueError("batch_file='': batch_schedule=file needs the path of one")

    def start(self):
        news = None
        for _ in range(30):  # somebody may be writing it now
            time.sleep(0.01)
            latest = self.poll()
            news = news if latest is None else latest
            if news:
                break
        try:
            if news is None:
                raise ValueError("it is written to without a pause, start when it rests")
            self.accept(news)
        except ValueError as e:
            raise ValueError(f"batch_file={self.path!r}: {e}") from None

    def at(self, tokens):
        return interpolate(self.points, tokens, self.quantum)

    def poll(self):
        """The file's new text; None while it is the old one, or while the file changes from look to look: half of it may be
        written. '' stands for no readable file. One stat call where nothing changed."""
        signature, before = signature_of(self.path), self.glimpsed
        self.glimpsed = signature
        if signature == self.signature or signature != before:
            return None
        try:
            text = files.read_text(self.path)
        except (OSError, ValueError):
            text = ""
        if signature_of(self.path) != signature:
            return None
        self.signature = signature
        return text if text != self.seen else None

    def accept(self, news):
        """A bad text leaves the last good one in force; ValueError where there is no good one yet."""
        if news is None:
            return None
        self.seen = news
        if news == self.text:
            return f"batch_file {self.path} is again what is in force"
        try:
            if not news:
                raise ValueError("it is missing, empty or not readable as text")
            points = parse_file(news, self.quantum)
            largest, room = max(batch for _, batch in points), self.config.max_tokens // self.config.block_size
            if self.text is not None and largest > max(room, self.quantum):
                raise ValueError(f"a batch of {largest} is more than the {room} sequences of the whole run")
        except ValueError as e:
            if self.text is None:
                raise
            return f"batch_file {self.path}: {e}; the last good one stays in force"
        first = self.text is None
        self.text, self.points = news, points
        return f"batch_file {self.path} {'read' if first else 'changed'}: " + ", ".join(f"{t}:{b}" for t, b in points)

    def state_dict(self):
        return {"text": self.text, "seen": self.seen}

    def load(self, state):
        self.text, self.seen = state["text"], state["seen"]
        try:
            self.points = parse_file(self.text, self.quantum)
        except ValueError as e:
            raise ValueError(f"batch_file={self.path!r}, as the checkpoint has it: {e}") from None


class Controller(Between):
    """The controller moves the batch towards the right one for batch_objective, within [batch_size_start, batch_size].

    The batch grows only if the lower end of the right batch's 95% interval is above it by the margin, to at most twice the
    batch, and not before the dwell is over. It shrinks only if allowed, by the same rule mirrored. Each change of direction
    doubles the dwell before the next one, so errors of the estimate cannot keep it swinging. Undetermined means hold.
    """

    fixed = ("log_interval",)  # it decides at logged steps
    measured = True

    def __init__(self, config, quantum):
        super().__init__(config, quantum)
        self.smallest, self.largest = config.batch_size_start, config.batch_size
        self.objective, self.by_time = config.batch_objective, config.batch_objective == "time"
        self.factor, self.margin, self.shrink = config.batch_gns_factor, config.batch_gns_margin, config.batch_shrink
        self.batch, self.moved_tokens, self.reason = self.smallest, 0, ""
        self.direction, self.turns = 1, 0  # of the last move; how often it changed

    @classmethod
    def check(cls, config, quantum):
        super().check(config, quantum)
        if config.gns == "off":
            raise ValueError("gns='off': batch_schedule=gns needs a noise scale: norm or exact")
        if config.gns == "norm" and not config.gns_calibrate:
            raise ValueError("gns_calibrate=False: batch_schedule=gns follows the whole model's noise scale, which the norm "
                             "layers' tells only with a measured factor: use gns_calibrate=True or gns=exact")
        if config.batch_size_start < 2:
            raise ValueError(f"batch_size_start={config.batch_size_start}: batch_schedule=gns needs at least 2: a step of one "
                             "example has no noise scale")

    def at(self, tokens):
        return self.batch

    def walk(self, end, block_size):
        """The fewest steps there can be, all of the largest batch."""
        return constant_walk(self.largest, end, block_size, smallest=self.smallest)

    def observe(self, tokens, noise, cost=None):
        """Words of every move, and of a refusal when its reason is another than the last time; else None."""
        batch, reason, words = self.decide(tokens, noise, cost)
        if reason == self.reason:
            return None
        if reason != "move":
            self.reason = reason
            return f"batch held at {batch}: {words}"
        said = f"batch {self.batch} -> {batch}: {words}"
        direction = 1 if batch > self.batch else -1
        self.turns += direction != self.direction
        self.batch, self.moved_tokens, self.direction, self.reason = batch, tokens, direction, "dwell"
        return said

    def decide(self, tokens, noise, cost):
        """(batch, reason, the reason in words): the batch from here on, and why. Changes nothing."""
        batch, rested, may_turn = self.batch, self.moved_tokens + self.dwell(), self.turn_at()
        if batch == self.largest and not self.shrink:
            return batch, "largest", f"it has reached batch_size={self.largest}"
        if self.objective == "tokens" and batch == self.smallest:
            return batch, "smallest", "fewest tokens: the smallest batch, batch_size_start"
        if tokens < rested:
            return batch, "dwell", f"no move before {rested:,} tokens (batch_gns_dwell_tokens)"
        if noise is None:
            return batch, "undetermined", "the noise scale is undetermined"
        if self.by_time and cost is None:
            return batch, "no cost", "what a step costs is not known yet"
        aim = self.aim(noise, cost)
        why = self.aim_in_words(noise, cost, aim)
        up = aim.formula[1] > batch * (1 + self.margin)
        if not up and not aim.formula[2] < batch / (1 + self.margin):
            return batch, "margin", f"{why}, not clear of the batch by {self.margin:.0%}"
        if batch == (self.largest if up else self.smallest):
            limit = f"more than batch_size={batch}" if up else f"less than batch_size_start={batch}"
            return batch, "limit", f"{why} asks for {limit}"
        if not up and not self.shrink:
            return batch, "no shrink", f"{why} asks for less, which batch_shrink=False rules out"
        if self.shrink and up != (self.direction > 0) and tokens < may_turn:
            return batch, "turn", f"{why} asks for the other direction, which waits until {may_turn:,} tokens"
        new = (min(aim.batch, 2 * batch, self.largest) if up else
               max(aim.batch, to_quanta(batch / 2, self.quantum), self.smallest))
        if new == batch or (new > batch) != up:
            step = f"less than {self.quantum} {'more' if up else 'fewer'}"
            return batch, "quantum", f"{why} asks for {step}, the smallest step there is"
        end = "lower end is above" if up else "upper end is below"
        return new, "move", f"{why}, its {end} the batch by more than {self.margin:.0%}"

    def dwell(self):
        """Tokens to wait after the last move: until half of the noise scale's average is new."""
        early = self.moved_tokens * gns.EARLY / (1 - gns.EARLY)  # the average looks back over a share of all tokens at most
        return self.config.batch_gns_dwell_tokens or round(min(self.config.gns_half_life_tokens, early))

    def turn_at(self):
        """The tokens from which on the batch may change its direction."""
        return self.moved_tokens + self.dwell() * 2 ** (self.turns + 1)

    def aim(self, noise, cost):
        """The right batch for the objective. batch_gns_factor is for the balance: factor x N."""
        noise = noise.times(self.factor) if self.objective == "balance" else noise
        return getattr(right_batch(noise, cost, self.quantum), self.objective)

    def aim_in_words(self, noise, cost, aim):
        if self.objective == "tokens":
            return "fewest tokens: the smallest batch"
        scale = "noise scale {:.4g} [{:.4g}, {:.4g}]".format(*noise.triple)
        if self.objective == "balance":
            return scale + (f" x {self.factor:g}" if self.factor != 1 else "")
        target = "fastest batch {:.4g} [{:.4g}, {:.4g}]".format(*aim.formula)
        return f"{target}, from {scale}, {1e3 * cost.fixed[0]:.3g} ms a step and {1e3 * cost.per_sequence[0]:.3g} ms a sequence"

    def state_dict(self):
        return {key: getattr(self, key) for key in ("batch", "moved_tokens", "reason", "direction", "turns")}

    def load(self, state):
        vars(self).update(state)
        self.batch = min(max(to_quanta(self.batch, self.quantum), self.smallest), self.largest)


SCHEDULES = {"constant": Constant, "linear": Linear, "late": Late, "seesaw": Seesaw, "steps": Steps, "file": File,
             "gns": Controller}
KINDS = tuple(SCHEDULES)


def kind(config):
    """The class of a config's schedule."""
    if config.batch_schedule not in SCHEDULES:
        raise ValueError(f"batch_schedule={config.batch_schedule!r}: has no class; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[config.batch_schedule]


def build(config, quantum, saved=None):
    """The schedule of a run; `saved` is its state in a checkpoint."""
    batches = kind(config)(config, quantum)
    if saved:
        try:
            batches.load(saved)
        except (AttributeError, KeyError, TypeError) as e:
            raise ValueError(f"batch_schedule={config.batch_schedule!r}: the checkpoint's memory of it does not fit "
                             f"({type(e).__name__})") from None
    else:
        batches.start()
    return batches


def constant_walk(batch, end, block_size, smallest):
    """walk() where every step has the same batch."""
    count = -(-end // (batch * block_size))
    return count, count * batch * block_size, (smallest, batch)


def check_multiple(key, batch, micro, quantum):
    """ValueError unless a batch is whole quanta."""
    if batch % quantum == 0:
        return
    below, above, processes = batch // quantum * quantum, (batch // quantum + 1) * quantum, quantum // micro
    if processes == 1 and not below:
        raise ValueError(f"{key}={batch}: is smaller than micro_batch_size={micro}: raise it or lower micro_batch_size")
    near = f"take {below} or {above}" if below else f"take {above}"
    if processes == 1:
        raise ValueError(f"{key}={batch}: is not a multiple of micro_batch_size={micro}: {near}")
    other = ", or another micro_batch_size" if batch % processes == 0 else ""
    raise ValueError(f"{key}={batch}: is not a multiple of micro_batch_size={micro} x {processes} processes = {quantum}: "
                     f"{near}{other}")


def interpolate(points, tokens, quantum):
    """On straight lines through (tokens, batch) points, held before the first and after the last."""
    left = max([p for p in points if p[0] <= tokens], default=points[0])
    right = min([p for p in points if p[0] > tokens], default=left)
    if left[0] >= right[0]:
        return left[1]
    return to_quanta(left[1] + (right[1] - left[1]) * ((tokens - left[0]) / (right[0] - left[0])), quantum)


def to_quanta(batch, quantum):
    return max(1, math.floor(batch / quantum + 0.5)) * quantum


def signature_of(path):
    """What changes with a file; None where there is none."""
    try:
        info = os.stat(path)
        return info.st_mtime_ns, info.st_size, info.st_ino
    except OSError:
        return None


WSD_DECAY = 0.2  # warm-up, stable, decay: the last fifth decays (Hu et al. 2024, arXiv 2404.06395, take a tenth to a fifth)
# the shape after the warm-up: the learning rate at a share of the way from the peak to the low end
DECAYS = {"linear": lambda peak, low, share: low + (peak - low) * (1 - share),
          "cosine": lambda peak, low, share: low + (peak - low) * (0.5 * (1 + math.cos(math.pi * share))),
          "wsd": lambda peak, low, share: low + (peak - low) * min(1.0, (1 - share) / WSD_DECAY),
          "none": lambda peak, low, share: peak}
# factor on the learning rate for k times the reference batch
LR_FACTORS = {"none": lambda k: 1.0, "sqrt": math.sqrt, "linear": lambda k: k}


def learning_rate_at(tokens, config):
    """Linear warm-up from 0, then lr_decay's way to min_lr at decay_tokens, then min_lr."""
    if tokens < config.warmup_tokens:
        return config.learning_rate * tokens / config.warmup_tokens
    end = config.decay_tokens or config.max_tokens
    share = 1.0 if tokens >= end else (tokens - config.warmup_tokens) / (end - config.warmup_tokens)
    return DECAYS[config.lr_decay](config.learning_rate, config.min_lr, share)


def reference_batch(config):
    """The batch at which learning_rate, beta2 and weight_decay hold as given."""
    return config.lr_reference_batch or config.batch_size


def coupled(B, config, noise=None):
    """(factor on the learning rate, beta2, weight_decay) for a step of B sequences; k = B / reference batch.

    lr_scaling            sqrt: sqrt(k) for Adam (Malladi et al. 2022, arXiv 2205.10287); linear: k for SGD
                          (Goyal et al. 2017, arXiv 1706.02677). Both presume noisy gradients: where the batch is above the
                          noise scale's interval (`noise`, if given), they stay at its upper end.
    beta2_scaling         tokens: a step of B sequences forgets as much as k steps of the reference batch, beta2^k, so the
                          half-life of the second moment stays the same in tokens (Marek et al. 2025, arXiv 2507.07101); not
                          below beta2_floor. AdamW's bias correction takes today's beta2 for all steps so far: slightly off
                          after a change, and only while few half-lives have passed.
    weight_decay_scaling  tokens: AdamW takes the share lr x weight_decay off the weights in a step, so it forgets them
                          over B / (lr x weight_decay) sequences. With the learning rate's factor f
                          they are as many as at the reference batch if weight_decay grows by k / f: k without lr_scaling
                          (Bergsma et al. 2025, arXiv 2505.13738: the best is linear in B), sqrt(k) with sqrt, 1 with linear.
    """
    k = B / reference_batch(config)
    lr_factor = LR_FACTORS[config.lr_scaling](k * noise.high / B if noise and saturated(B, config, noise) else k)
    beta2 = max(config.beta2**k, min(config.beta2_floor, config.beta2)) if config.beta2_scaling == "tokens" else config.beta2
    decay = config.weight_decay * k / lr_factor if config.weight_decay_scaling == "tokens" else config.weight_decay
    return lr_factor, beta2, decay


def fixed_on_resume(config):
    """Keys that a resume may change in general, but not in this run: log_interval, where log lines decide what is next."""
    looks = config.lr_scaling != "none" and config.lr_saturates and config.gns != "off"
    return {*kind(config).fixed, *(("log_interval",) if looks else ())}


def saturated(B, config, noise):
    """Whether the learning rate's rule has come to its end: the batch is above the noise scale's interval."""
    return bool(config.lr_scaling != "none" and config.lr_saturates and noise and 0 < noise.high < B)
