"""
Batch size and learning rate as functions of the tokens seen so far; nothing here counts steps, since steps change size.
Batches are in sequences and come in whole quanta (micro-batch x processes), so that the micro-batch keeps its shape.

    constant   batch_size
    linear     batch_size_start to batch_size over the run (Gray et al. 2024, arXiv 2411.00999)
    steps      batch_steps = "0:32, 50M:64, 200M:128"
    file       batch_file: lines of tokens and batch, straight lines between them, read again when the file changes
    gns        Controller: follows the noise scale

What has a memory (Controller, BatchFile) keeps it in a state_dict; a decision is a function of that and of its
arguments alone, so it comes out the same on every process and after a resume.
"""

import math
import os
from decimal import Decimal, InvalidOperation

KINDS = ("constant", "linear", "steps", "file", "gns")
SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}


def batch_size_at(tokens, config, quantum):
    """The effective batch of the step that starts at `tokens`, a multiple of `quantum`, exact at both ends."""
    if config.batch_schedule == "constant":
        return config.batch_size
    if config.batch_schedule == "steps":
        return [batch for start, batch in parse_steps(config.batch_steps, quantum) if start <= tokens][-1]
    return interpolate([(0, config.batch_size_start), (config.max_tokens, config.batch_size)], tokens, quantum)


def interpolate(points, tokens, quantum):
    """On straight lines through (tokens, batch) points, held before the first and after the last."""
    left = max([p for p in points if p[0] <= tokens], default=points[0])
    right = min([p for p in points if p[0] > tokens], default=left)
    if left[0] >= right[0]:
        return left[1]
    return to_quanta(left[1] + (right[1] - left[1]) * ((tokens - left[0]) / (right[0] - left[0])), quantum)


def to_quanta(batch, quantum):
    return max(1, math.floor(batch / quantum + 0.5)) * quantum


def parse_count(text):
    """'50M' -> 50000000; k, M and B are thousands, millions and billions."""
    text = str(text).strip()
    number, size = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1)
    try:
        value = Decimal(number.replace("_", "")) * size
    except InvalidOperation:
        value = None
    if value is None or not value.is_finite() or value < 0 or value != int(value):
        raise ValueError(f"'{text}' is not a whole number such as 200, 50k, 1.5M or 2B")
    return int(value)


def parse_steps(text, quantum):
    """[(tokens, batch)] of '0:32, 50M:64'; ValueError says what is wrong."""
    pairs = []
    for part in text.split(","):
        start, colon, batch = part.partition(":")
        if not colon:
            raise ValueError(f"'{part.strip()}' is not tokens:batch; expected a list such as 0:32, 50M:64, 200M:128")
        pairs.append((parse_count(start), parse_count(batch)))
    if pairs[0][0] != 0:
        raise ValueError(f"the first batch must start at 0 tokens, not at {pairs[0][0]}")
    return checked(pairs, quantum)


def parse_file(text, quantum):
    """[(tokens, batch)] of a two-column text; ValueError names the line."""
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        columns = line.partition("#")[0].split()
        if not columns:
            continue
        try:
            if len(columns) != 2:
                raise ValueError(f"'{line.strip()}' is not two columns, tokens and batch")
            pairs.append((parse_count(columns[0]), parse_count(columns[1])))
            checked(pairs[-2:], quantum)
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from None
    if not pairs:
        raise ValueError("it has no line with tokens and batch")
    return pairs


def checked(pairs, quantum):
    for (before, _), (after, _) in zip(pairs, pairs[1:]):
        if after <= before:
            raise ValueError(f"tokens must increase, but {after} comes after {before}")
    for _, batch in pairs:
        if batch < quantum or batch % quantum:
            below = batch // quantum * quantum
            near = f"{below} or {below + quantum}" if below else f"{quantum}"
            raise ValueError(f"a batch of {batch} is not whole micro-batches of {quantum} (over all processes): take {near}")
    return pairs


class BatchFile:
    """The schedule in a text file that its owner may edit while the run goes on. It is never written by us. The text in
    force is part of the state: a resumed run starts from it and then looks at the file again."""

    def __init__(self, path, quantum):
        self.path, self.quantum = path, quantum
        self.text = self.points = None  # in force
        self.seen = None  # the newest text looked at, good or bad
        self.signature = None  # of the file when it was last read

    def poll(self):
        """The file's text if it changed since the last look, else None; one stat call. '' stands for no readable file."""
        try:
            info = os.stat(self.path)
            signature = (info.st_mtime_ns, info.st_size)
            if signature == self.signature:
                return None
            with open(self.path, encoding="utf-8") as f:
                text = f.read()
        except (OSError, UnicodeDecodeError):
            signature, text = None, ""
        self.signature = signature
        return text if text != self.seen else None

    def accept(self, text):
        """Take `text` (from poll) as the schedule; a bad one leaves the last good one in force. Returns the words for the
        log, or raises ValueError where there is no good one yet."""
        self.seen = text
        if text == self.text:
            return f"batch_file {self.path} is again what is in force"
        try:
            if not text:
                raise ValueError("it is missing, empty or not readable as text")
            points = parse_file(text, self.quantum)
        except ValueError as e:
            if self.text is None:
                raise
            return f"batch_file {self.path}: {e}; the last good one stays in force"
        first = self.text is None
        self.text, self.points = text, points
        return f"batch_file {self.path} {'read' if first else 'changed'}: " + ", ".join(f"{t}:{b}" for t, b in points)

    def state_dict(self):
        return {"text": self.text, "seen": self.seen}

    def load_state_dict(self, state):
        self.text, self.seen, self.signature = state["text"], state["seen"], None
        self.points = parse_file(self.text, self.quantum)


class Controller:
    """The batch that the noise scale asks for, with a safe hand.

    target = batch_gns_factor x noise scale, within [batch_size_start, batch_size]. At factor 1 the batch is the noise
    scale: twice the fewest possible tokens, in twice the fewest possible steps (McCandlish et al. 2018). It grows
    only if factor x the lower end of the 95% interval is above the batch by the margin, to at most twice the batch, and
    not before the dwell is over; it shrinks only if allowed, by the same rule mirrored, and each change of direction
    doubles the dwell before the next one: errors of the estimate cannot keep it swinging. Undetermined means hold.
    """

    def __init__(self, config, quantum):
        self.smallest, self.largest, self.quantum = config.batch_size_start, config.batch_size, quantum
        self.factor, self.margin, self.shrink = config.batch_gns_factor, config.batch_gns_margin, config.batch_shrink
        self.dwell = config.batch_gns_dwell_tokens or config.gns_half_life_tokens
        self.batch, self.moved_tokens, self.reason = self.smallest, 0, ""
        self.direction, self.turns = 1, 0  # of the last move; how often it changed

    def decide(self, tokens, noise):
        """Look at `noise`, (value, low, high) or None, after `tokens`. Returns the words for the log: of every move, and
        of a refusal when its reason is another than the last time; else None."""
        batch, reason, words = self.judge(tokens, noise)
        if batch != self.batch:
            text = f"batch {self.batch} -> {batch}: {words}"
            direction = 1 if batch > self.batch else -1
            self.turns += direction != self.direction
            self.direction = direction
            self.batch, self.moved_tokens, self.reason = batch, tokens, "dwell"
            return text
        if reason == self.reason:
            return None
        self.reason = reason
        return f"batch held at {batch}: {words}"

    def judge(self, tokens, noise):
        """(batch, kind of refusal or '', words)"""
        batch = self.batch
        if batch == self.largest and not self.shrink:
            return batch, "limit", f"it has reached batch_size={self.largest}"
        if tokens - self.moved_tokens < self.dwell:
            return batch, "dwell", f"no move before {self.moved_tokens + self.dwell:,} tokens (batch_gns_dwell_tokens)"
        if noise is None or not all(map(math.isfinite, noise)):
            return batch, "undetermined", "the noise scale is undetermined"
        value, low, high = (self.factor * v for v in noise)
        says = "noise scale {:.4g} [{:.4g}, {:.4g}]".format(*noise) + (f" x {self.factor:g}" if self.factor != 1 else "")
        wanted = 1 if low > batch * (1 + self.margin) else -1 if high < batch / (1 + self.margin) else 0
        turned = self.moved_tokens + self.dwell * 2 ** (self.turns + 1)
        if self.shrink and wanted == -self.direction and tokens < turned:
            return batch, "turn", f"{says} asks for the other direction, which waits until {turned:,} tokens"
        if wanted > 0:
            new = min(to_quanta(value, self.quantum), 2 * batch, self.largest)
            if batch == self.largest:
                return batch, "limit", f"{says} asks for more than batch_size={self.largest}"
            if new > batch:
                return new, "", f"{says}, its lower end is above the batch by more than {self.margin:.0%}"
            return batch, "quantum", f"{says} asks for less than {self.quantum} more, the smallest step there is"
        if wanted < 0:
            if not self.shrink:
                return batch, "no shrink", f"{says} asks for less, which batch_shrink=False rules out"
            new = max(to_quanta(value, self.quantum), to_quanta(batch / 2, self.quantum), self.smallest)
            if batch == self.smallest:
                return batch, "limit", f"{says} asks for less than batch_size_start={self.smallest}"
            if new < batch:
                return new, "", f"{says}, its upper end is below the batch by more than {self.margin:.0%}"
            return batch, "quantum", f"{says} asks for less than {self.quantum} fewer, the smallest step there is"
        return batch, "margin", f"{says}, not clear of the batch by {self.margin:.0%}"

    def state_dict(self):
        return {key: getattr(self, key) for key in ("batch", "moved_tokens", "reason", "direction", "turns")}

    def load_state_dict(self, state):
        vars(self).update(state)
        self.batch = min(max(to_quanta(self.batch, self.quantum), self.smallest), self.largest)


class BatchSchedule:
    """What train.py asks: at(tokens) before a step, poll() and accept(text) around it, observe() at logged steps."""

    def __init__(self, config, quantum, saved=None):
        """`saved` is the state of a checkpoint. ValueError if a batch_file has never been good."""
        self.config, self.quantum = config, quantum
        self.file = BatchFile(config.batch_file, quantum) if config.batch_schedule == "file" else None
        self.controller = Controller(config, quantum) if config.batch_schedule == "gns" else None
        self.memory = self.file or self.controller
        if saved and self.memory:
            self.memory.load_state_dict(saved)
        elif self.file:
            self.accept(self.file.poll())

    def at(self, tokens):
        if self.controller:
            return self.controller.batch
        if self.file:
            return interpolate(self.file.points, tokens, self.quantum)
        return batch_size_at(tokens, self.config, self.quantum)

    def poll(self):
        """A changed text, or None. With several processes one polls and all accept what it found."""
        return self.file.poll() if self.file else None

    def accept(self, text):
        return None if text is None else self.file.accept(text)

    def observe(self, tokens, noise):
        """What the controller makes of a noise scale: words for the log, or None."""
        return self.controller.decide(tokens, noise) if self.controller else None

    def state_dict(self):
        return self.memory.state_dict() if self.memory else {}


def noise_source(config):
    """The log key that the controller follows: the whole model's noise scale; the norm layers' only if nothing relates
    them to the whole model."""
    if config.gns == "exact":
        return "gns/total"
    return "gns/calibrated" if config.gns_calibrate_tokens else "gns/norm"


def learning_rate_at(tokens, config):
    """Linear warm-up from 0, then linear or cosine decay to min_lr at decay_tokens, then min_lr."""
    if tokens < config.warmup_tokens:
        return config.learning_rate * tokens / config.warmup_tokens
    if config.lr_decay == "none":
        return config.learning_rate
    end = config.decay_tokens or config.max_tokens
    share = 1.0 if tokens >= end else (tokens - config.warmup_tokens) / (end - config.warmup_tokens)
    left = 1 - share if config.lr_decay == "linear" else 0.5 * (1 + math.cos(math.pi * share))
    return config.min_lr + (config.learning_rate - config.min_lr) * left


def reference_batch(config):
    """The batch at which learning_rate, beta2 and weight_decay hold as given."""
    return config.lr_reference_batch or config.batch_size


def coupled(B, config):
    """(factor on the learning rate, beta2, weight_decay) for a step of B sequences; k = B / reference batch.

    lr_scaling            sqrt: sqrt(k) for Adam (Malladi et al. 2022, arXiv 2205.10287); linear: k for SGD
                          (Goyal et al. 2017, arXiv 1706.02677)
    beta2_scaling         tokens: a step of B sequences forgets as much as k steps of the reference batch, beta2^k, so the
                          half-life of the second moment stays the same in tokens (Marek et al. 2025, arXiv 2507.07101).
                          AdamW's bias correction takes today's beta2 for all steps so far: slightly off after a change,
                          and only while few half-lives have passed.
    weight_decay_scaling  tokens: AdamW takes the share lr x weight_decay off the weights in a step, so it forgets them
                          over B / (lr x weight_decay) sequences. With lr = f lr_reference that stays
                          what it is at the reference batch if weight_decay grows by k / f: k without lr_scaling (Bergsma et
                          al. 2025, arXiv 2505.13738: the best one is linear in B), sqrt(k) with sqrt, 1 with linear.
    """
    k = B / reference_batch(config)
    lr_factor = {"none": 1.0, "sqrt": math.sqrt(k), "linear": k}[config.lr_scaling]
    beta2 = config.beta2**k if config.beta2_scaling == "tokens" else config.beta2
    decay = config.weight_decay * k / lr_factor if config.weight_decay_scaling == "tokens" else config.weight_decay
    return lr_factor, beta2, decay
