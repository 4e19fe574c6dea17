"""Each experiment in its tiny setting, its numbers, and its sentence on made-up numbers, whichever way they come out."""

import math
import os
import sys

import numpy as np
import pytest

from tests.helpers import ROOT

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import temperature  # noqa: E402

from trainer import log  # noqa: E402


def steps(folder):
    return [r for r in log.read(folder) if "train/loss" in r]


# -- temperature.py

def test_temperature_branches_change_one_thing_each_from_one_checkpoint(tiny, tmp_path):
    result = tiny(temperature, "--seeds", "1")
    assert len(tiny.runs) == 6 and tiny.runs[0] == "base_seed0"
    (entries,) = result["seeds"]
    logs = {e["branch"]: steps(tmp_path / "out" / f"{e['branch'].replace(' ', '').replace('/', 'd')}_seed0") for e in entries}
    assert {name: rows[0]["lr"] / logs["as it was"][0]["lr"] for name, rows in logs.items()} == pytest.approx(
        {"as it was": 1, "learning rate / 4": 0.25, "learning rate x 4": 4, "batch / 4": 1, "batch x 4": 1}, rel=0.05)
    assert {name: rows[0]["batch_size"] for name, rows in logs.items()} == {
        "as it was": 8, "learning rate / 4": 8, "learning rate x 4": 8, "batch / 4": 2, "batch x 4": 32}
    middle = (result["branch_tokens"] + result["end_tokens"]) / 2
    for e in entries:
        first, late = logs[e["branch"]][0], [r for r in logs[e["branch"]] if r["tokens"] > middle]
        assert first["tokens"] - first["batch_size"] * 16 == steps(tmp_path / "out" / "base_seed0")[-1]["tokens"]
        assert e["steps"] == len(late) >= 1
        if e["gns"]:
            pairs = [[r[f"gns/total_step_{part}"] for r in late] for part in ("tr_sigma", "sq_norm")]
            assert e["gns"] == pytest.approx(np.mean(pairs[0]) / np.mean(pairs[1])) and e["low"] < e["gns"] < e["high"]
    assert set(result["exponents"]) == {"learning rate", "batch"}


def test_the_window_starts_late_and_the_exponent_is_that_of_the_numbers():
    rng = np.random.default_rng(0)
    rows = [{"tokens": t, "batch_size": 8, "gns/norm_step_sq_norm": (9.0 if t <= 50 else 2.0) + 0.1 * rng.standard_normal(),
             "gns/norm_step_tr_sigma": 10 + 0.1 * rng.standard_normal()} for t in range(100)]
    late = temperature.window_noise(rows, "norm", 50)
    assert late["gns"] == pytest.approx(5, rel=0.03) and late["low"] < 5 < late["high"] and late["steps"] == 49

    def noise(value):
        return {"gns": value, "low": value / 1.1, "high": value * 1.1}
    one = temperature.exponent([[(0.25, noise(20)), (4, noise(5))]])
    assert one[0] == pytest.approx(-0.5) and one[2] - one[0] == pytest.approx(math.sqrt(2) * math.log(1.1) / math.log(16))
    four = temperature.exponent(4 * [[(0.25, noise(20)), (4, noise(5))]])
    assert four[2] - four[0] == pytest.approx((one[2] - one[0]) / 2), "seeds halve the error"
    assert temperature.exponent([[(0.25, noise(20)), (4, {"gns": None, "low": None, "high": None})]]) is None
