"""
A Meter turns the unbiased pairs of steps into averages, factors, intervals, log keys and saved state.

    meter = Meter(half_life_tokens, whole={"": "body", "_adam": "body_adam"})
    meter.add({"norm": (sq_norm, tr_sigma), "norm_adam": ...}, tokens, {"_adam": (pair of the body, pair of the norm layers)})
    meter.row()                  # the keys of a log line
    meter.noise("_adam")         # the whole model's noise scale
    meter.missing("_adam", step) # what is missing in it, in words

It does not know where norms come from: train.py's step has them from probes (tracker.py), watch from hooks.

An average has the name of a group of weights, followed by its metric: "" for plain norms, "_adam" for norms in the metric that
Adam steps in. Where every step measures the whole model, its noise scale is one of these averages. Where only some steps do,
by sampled rows (rows.py), it is the norm layers' times a factor.
"""

import math

from rightbatch import gns, rows
from rightbatch.common import named
from rightbatch.decision import Noise

OF = {"": "the whole model", "_adam": "the whole model in Adam's metric"}


class Meter:
    def __init__(self, half_life_tokens: float, whole: dict[str, str]):
        """whole: {metric: name of the whole model's average}; empty where the whole model takes a factor."""
        self.half_life_tokens, self.whole = half_life_tokens, whole
        self.scales: dict[str, gns.NoiseScale] = {}
        self.calibrations: dict[str, gns.Calibration] = {}
        self.covered: tuple | None = None  # (how many weights of the body are measured, how many it has)

    def scale(self, name: str) -> gns.NoiseScale:
        """The averages of a name, which is in the log from the first call on."""
        return self.scales.setdefault(name, gns.NoiseScale(self.half_life_tokens, gns.EARLY))

    def calibration(self, metric: str) -> gns.Calibration:
        """The factor from the norm layers to the whole model, in the log from the first call on."""
        return self.calibrations.setdefault(metric, gns.Calibration(self.half_life_tokens, gns.EARLY))

    def add(self, pairs: dict, tokens: float, sampled: dict | None = None) -> None:
        """Add a step to the averages. pairs: {name: (sq_norm, tr_sigma)}; sampled: {metric: (pair of the body, pair of the
        norm layers)} of a step that sampled rows."""
        sampled = sampled or {}
        for name, (sq_norm, tr_sigma) in pairs.items():
            self.scale(name).update(sq_norm, tr_sigma, tokens)
        for metric in {**self.calibrations, **sampled}:
            if f"norm{metric}" in pairs:
                self.calibration(metric).update(self.scales[f"norm{metric}"], tokens, *sampled.get(metric, ()))

    @property
    def coverage(self) -> float | None:
        """Per cent of the body's weights that are measured; None before that is known."""
        return 100 * self.covered[0] / self.covered[1] if self.covered and self.covered[1] else None

    @property
    def metric(self) -> str:
        """Adam's metric where it is measured, else the plain one."""
        known = [metric for metric, name in self.whole.items() if name in self.scales] if self.whole else self.calibrations
        return "_adam" if "_adam" in known else ""

    def noise(self, metric: str) -> Noise | None:
        """The whole model's noise scale; None while it is undetermined, and where it is not measured."""
        scale = self.scales.get(self.whole.get(metric, f"norm{metric}"))
        if self.whole:
            triple = scale and scale.triple()
        else:
            triple = self.calibrations[metric].apply(scale) if metric in self.calibrations else None
        if not triple or not all(map(math.isfinite, triple)):
            return None
        part = self.coverage is not None and self.coverage < 99
        return Noise(*triple, OF[metric] + (f", {self.coverage:.0f}% of its weights" if part else ""))

    def steps_to_go(self, metric: str, step: int) -> int | None:
        """Roughly in how many steps after `step` the whole model's noise scale will be known; 0 if it is, None if the steps so
        far do not tell."""
        if self.whole:
            scale = self.scales.get(self.whole[metric])
            return max(0, 3 - scale.averages.updates) if scale else 3
        samples = self.calibrations[metric].steps_to_go() if metric in self.calibrations else 3
        return samples and rows.steps_until(step, samples)

    def missing(self, metric: str, step: int) -> list[str]:
        """Sentences that say what is missing in the noise scale, and why. step: the newest step's number."""
        noise = self.noise(metric)
        if not noise or noise.value <= 0:
            more = self.steps_to_go(metric, step)
            return [f"The noise scale of {OF[metric]} is " + (f"still being measured, for some {more} steps." if more else
                                                              "undetermined yet: the gradient is lost in its noise.")]
        if self.coverage is None or self.coverage >= 50:
            return []
        return [f"Only {self.coverage:.0f}% of the weights are measured, which may not speak for all: w.left_out and "
                "parameters without a layer are not among them."]

    def row(self) -> dict:
        """The log keys of all averages and factors, None while undetermined."""
        row = {}
        for name, scale in self.scales.items():
            row |= named(f"gns/{name}", scale.triple())
            row |= {f"gns/{name}_sq_norm": scale.sq_norm, f"gns/{name}_tr_sigma": scale.tr_sigma}
        for metric, calibration in self.calibrations.items():
            row |= named(f"gns/calibration{metric}", calibration.factor())
            row |= named(f"gns/calibrated{metric}", calibration.apply(self.scale(f"norm{metric}")))
        return row

    def state_dict(self) -> dict:
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()}, "covered": self.covered,
                "calibrations": {metric: calibration.state_dict() for metric, calibration in self.calibrations.items()}}

    def load_state_dict(self, state: dict, new: bool = True) -> None:
        """new: also load averages that this meter has not begun. A run whose settings choose its averages leaves them out."""
        for mine, kind, get in ((self.scales, "scales", self.scale), (self.calibrations, "calibrations", self.calibration)):
            for name, averages in state[kind].items():
                if new or name in mine:
                    get(name).load_state_dict(averages)
        self.covered = state.get("covered")
