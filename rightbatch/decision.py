"""
From the noise scale and the cost of a step to the right batch: pure arithmetic, and its words.

    noise = Noise(31.0, 25.0, 40.0)                                        # sequences: value, and its 95% interval
    cost = Cost((0.050, 0.045, 0.055), (0.002, 0.0019, 0.0021))            # seconds of a step, and of each sequence in it
    right_batch(noise, cost, quantum=8).time                               # Aim(batch=32, low=24, high=32, formula=(27.8, ...))

A step of batch B makes the share B / (B + N) of the progress of one without noise, and takes t0 + t1 B seconds. So the time to
a loss is (1 + N/B)(t0 + t1 B) up to a constant, smallest at sqrt(N t0 / t1). Assumes a learning rate tuned for each batch.
Every quantity with an error is a triple (value, low, high) at 95%; intervals cover errors of the measurement, not of the
theory.

The controller, the terminal, the closing words, whatif.py, wandb and watch all ask right_batch. Where the noise scale moved on
the way, they ask with the mean that stands for all phases of a run (mean_noise): the time to its loss is (S + E/B)(t0 + t1 B),
S and E as in gns.fewest, so the right batch follows from N = E/S in the same way.

Letters: B examples in a step, N noise scale in examples, t0 and t1 seconds of a step and of each example in it.
"""

import dataclasses
import math

from rightbatch import gns
from rightbatch.common import named

Triple = tuple[float, float, float]

OBJECTIVES = "time", "tokens", "balance"  # the fields of RightBatch
TUNED = "Assumes a learning rate tuned for each batch size."
MEASURED = "measured over the run's last tokens"


@dataclasses.dataclass(frozen=True)
class Noise:
    """A noise scale in sequences, with its 95% interval, and what it is the noise scale of, in words."""
    value: float
    low: float
    high: float
    of: str = "the whole model"

    @property
    def triple(self) -> Triple:
        return self.value, self.low, self.high

    def times(self, factor: float) -> "Noise":
        value, low, high = (factor * v for v in self.triple)
        return Noise(value, low, high, self.of)

    def __str__(self):
        return bracketed(self.triple)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of a step: fixed + per_sequence x B, each a triple; and where they come from, in words."""
    fixed: Triple
    per_sequence: Triple
    source: str = MEASURED

    def step(self, batch: float) -> Triple:
        """Seconds of a step. Both errors count as independent; in a fit they partly cancel, so this is rather too wide."""
        value = self.fixed[0] + self.per_sequence[0] * batch
        down, up = (math.hypot(self.fixed[0] - self.fixed[i], batch * (self.per_sequence[0] - self.per_sequence[i]))
                    for i in (1, 2))
        return value, value - down, value + up

    def ratio(self) -> Triple:
        """t0 / t1 in sequences. Its ends take both errors against each other: in a fit one is high where the other is low."""
        (f, f_low, f_high), (s, s_low, s_high) = self.fixed, self.per_sequence
        return f / s, f_low / s_high, f_high / s_low

    def milliseconds(self) -> dict:
        """{"fixed_ms", "per_sequence_ms"}, each with _low and _high."""
        return {key: 1e3 * v for name in ("fixed", "per_sequence")
                for key, v in named(f"{name}_ms", getattr(self, name)).items()}


@dataclasses.dataclass(frozen=True)
class Aim:
    """A batch to take, in whole quanta, with its interval, and what the formula says before it is rounded."""
    batch: int
    low: int
    high: int
    formula: Triple


@dataclasses.dataclass(frozen=True)
class RightBatch:
    """The right batch for time (None without a cost), for tokens, and for the balance of both."""
    time: Aim | None
    tokens: Aim
    balance: Aim

    def numbers(self) -> dict:
        """{"time", "tokens", "balance"}, with _low and _high where there is an interval; None for what is not known."""
        time = self.time and (self.time.batch, self.time.low, self.time.high)
        return {**named("time", time), "time_formula": self.time and self.time.formula[0], "tokens": self.tokens.batch,
                **named("balance", (self.balance.batch, self.balance.low, self.balance.high))}


def right_batch(noise: Noise, cost: Cost | None, quantum: int) -> RightBatch:
    """The right batches in whole quanta. For time sqrt(N t0 / t1); for tokens the quantum, the smallest batch that the hardware
    runs well; for the balance of both N: twice the fewest steps, twice the fewest tokens (McCandlish et al. 2018, arXiv
    1812.06162)."""
    def aim(formula):
        batch, low, high = (whole_quanta(v, quantum) for v in formula)
        return Aim(batch, low, high, formula)
    time = cost and aim(tuple(math.sqrt(v) for v in gns.product(noise.triple, cost.ratio())))
    return RightBatch(time, aim((float(quantum),) * 3), aim(noise.triple))


def whole_quanta(formula: float, quantum: int) -> int:
    """The multiple of the quantum that takes less time, of the two beside `formula`. At batch B the time to a loss is
    formula^2 / B + B, up to a factor and a constant, so the lower one is right up to their geometric mean. It is the nearest in
    ratio, so it is right for the balance, too. Where both take the same, it is the lower one, in spite of rounding."""
    below = max(1, math.floor(formula / quantum)) * quantum
    above = below + quantum
    return below if formula * formula <= below * above * (1 + 1e-9) else above


def mean_noise(phases) -> Noise:
    """The noise scale that stands for all phases of a run (gns.fewest). phases: each has steps, batch and a Noise. The
    errors of neighbouring phases come from the same averages, so all are low together or high together."""
    ends = []
    for end in ("value", "low", "high"):
        steps, examples = gns.fewest([(p.steps, p.batch, getattr(p.noise, end)) for p in phases])
        ends.append(examples / steps)
    return Noise(ends[0], min(ends), max(ends), phases[0].noise.of)


@dataclasses.dataclass
class Decision:
    """What watch knows of the right batch. `noise` and `cost` are None while they are not known; `missing` says why."""
    noise: Noise | None
    cost: Cost | None
    quantum: int         # micro-batch x ranks
    batch: int           # of the newest step
    missing: list        # sentences

    @property
    def right(self) -> dict:
        """{"time", "tokens", "balance"} with _low and _high, in examples; {} without a noise scale."""
        return right_batch(self.noise, self.cost, self.quantum).numbers() if self.noise else {}

    def row(self) -> dict:
        """{log key: value} of what is known by now."""
        known = {f"right_batch/{k}": v for k, v in self.right.items() if v is not None and k != "time_formula"}
        return known | (named("gns", self.noise.triple) if self.noise else {})

    def lost(self) -> dict:
        """{"time", "tokens"}: how much more of each the present batch takes to the same loss than the right one for it, as a
        share. Needs a noise scale."""
        assert self.noise
        N, B, right, more = self.noise.value, self.batch, self.right, {}
        if self.cost:
            here, there = ((1 + N / batch) * self.cost.step(batch)[0] for batch in (B, right["time"]))
            more["time"] = here / there - 1
        return more | {"tokens": (B + N) / (right["tokens"] + N) - 1}

    def brief(self) -> str:
        """The right batches in a few words; needs a noise scale."""
        assert self.noise
        right, words = self.right, []
        if self.cost:
            small = right["time"] == self.quantum
            words.append(f"for time {interval(right, 'time')}" + ", the smallest that the hardware runs well" * small)
        return ", ".join([*words, f"for tokens {right['tokens']}", f"balance of both {interval(right, 'balance')}"]) + (
            f": by the noise scale of {self.noise.of}, {self.noise}")

    def __str__(self):
        parts = list(self.missing)
        if self.cost:
            fixed, each = (bracketed(tuple(1e3 * v for v in t)) for t in (self.cost.fixed, self.cost.per_sequence))
            parts.append(f"A step takes {fixed} ms, and {each} ms for each example.")
        if self.noise:
            parts.append(f"Right batch, in examples: {self.brief()}.")
            parts.append(f"This batch, {self.batch}, takes " + ", ".join(
                f"{share:.0%} more {what}" for what, share in self.lost().items()) + f" than the right one for it. {TUNED}")
        return " ".join(parts)


def bracketed(triple) -> str:
    return "{:.3g} [{:.3g}, {:.3g}]".format(*triple)


def interval(numbers, name) -> str:
    return f"{numbers[name]} [{numbers[name + '_low']}, {numbers[name + '_high']}]"
