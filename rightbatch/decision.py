"""
From the noise scale and the cost of a step to the right batch: pure arithmetic, and its words.

A step of batch B makes the share B / (B + N) of the progress of one without noise, and takes t0 + t1 B seconds. So the time to
a loss is (1 + N/B)(t0 + t1 B) up to a constant, smallest at sqrt(N t0 / t1) (gns.fastest_batch). Assumes a learning rate tuned
for each batch. Every quantity with an error is a triple (value, low, high) at 95%; intervals cover errors of the measurement,
not of the theory.

Letters: B examples in a step, N noise scale in examples, t0 and t1 seconds of a step and of each example in it.
"""

import dataclasses
import math

from rightbatch import gns
from rightbatch.common import named

TUNED = "Assumes a learning rate tuned for each batch size."


@dataclasses.dataclass(frozen=True)
class Noise:
    """A noise scale in sequences, with its 95% interval, and what it is the noise scale of, in words."""
    value: float
    low: float
    high: float
    of: str = "the whole model"


@dataclasses.dataclass
class Cost:
    """Seconds of a step: fixed + per_sequence x B, each a triple."""
    fixed: tuple
    per_sequence: tuple
    source: str

    def step(self, batch):
        """(seconds, low, high). Both errors as if independent: those of a fit partly cancel, so this is rather too wide."""
        value = self.fixed[0] + self.per_sequence[0] * batch
        off = [math.hypot(self.fixed[0] - self.fixed[i], batch * (self.per_sequence[0] - self.per_sequence[i])) for i in (1, 2)]
        return value, value - off[0], value + off[1]

    def ratio(self):
        """t0 / t1 in sequences. Its ends take both errors against each other: in a fit one is high where the other is low."""
        (f, f_low, f_high), (s, s_low, s_high) = self.fixed, self.per_sequence
        return f / s, f_low / s_high, f_high / s_low


def right_batch(noise, cost, quantum):
    """{"time", "tokens", "balance"}: sqrt(N t0/t1), but not below the quantum, the smallest batch that the hardware runs well;
    the quantum; N."""
    time = tuple(math.sqrt(v) for v in gns.product(noise, cost.ratio())) if cost else (None, None, None)
    return {**named("time", tuple(v if v is None else max(v, quantum) for v in time)), "time_formula": time[0],
            "tokens": quantum, **named("balance", noise)}


@dataclasses.dataclass
class Decision:
    """What watch knows of the right batch. `noise` and `cost` are None while they are not known; `missing` says why."""
    noise: tuple | None  # of the whole model
    of_what: str         # in which metric, how much of it
    cost: Cost | None
    quantum: int         # micro-batch x ranks
    batch: int           # of the newest step
    missing: list        # sentences

    @property
    def right(self):
        """{"time", "tokens", "balance"} with _low and _high, in examples; {} without a noise scale."""
        return right_batch(self.noise, self.cost, self.quantum) if self.noise else {}

    def row(self):
        """The log keys: what is known by now."""
        known = {f"right_batch/{k}": v for k, v in self.right.items() if v is not None and k != "time_formula"}
        return known | (named("gns", self.noise) if self.noise else {})

    def lost(self):
        """What the present batch takes more of than the right ones, to the same loss: {"time", "tokens"} as shares."""
        N, B, right = self.noise[0], self.batch, self.right
        def seconds(batch):
            return (1 + N / batch) * self.cost.step(batch)[0]
        time = {"time": seconds(B) / seconds(right["time"]) - 1} if self.cost else {}
        return time | {"tokens": (B + N) / (right["tokens"] + N) - 1}

    def brief(self):
        """The right batches in a few words; needs a noise scale."""
        right, quantum = self.right, self.quantum
        span = {k: f"{right[k]:.3g} [{right[k + '_low']:.3g}, {right[k + '_high']:.3g}]" for k in ("time", "balance")
                if right[k] is not None}
        small = right["time"] is not None and right["time"] <= quantum
        names = [f"for time {span['time']}" + (", the smallest that the hardware runs well" if small else "")
                 if "time" in span else "", f"for tokens {quantum}", f"balance of both {span['balance']}"]
        return ", ".join(filter(None, names))

    def __str__(self):
        parts = list(self.missing)
        if self.cost:
            fixed, each = ("{:.3g} [{:.3g}, {:.3g}] ms".format(*(1e3 * v for v in t))
                           for t in (self.cost.fixed, self.cost.per_sequence))
            parts.append(f"A step takes {fixed}, and {each} for each example.")
        if self.noise:
            lost = self.lost()
            parts.append(f"Right batch, in examples: {self.brief()}: the noise scale of {self.of_what}.")
            parts.append(f"This batch, {self.batch}, takes " + ", ".join(
                f"{share:.0%} more {what}" for what, share in lost.items()) + f" than the right one for it. {TUNED}")
        return " ".join(parts)
