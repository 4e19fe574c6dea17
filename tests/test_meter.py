"""The meter: what it says of the whole model, from every step or by a factor, and what it takes over from a saved state."""

import json

import numpy as np
import pytest

from rightbatch.meter import Meter


def filled(whole, steps=60):
    """The whole model's noise scale is 12, the norm layers' 4: measured in every step, or in every second one."""
    meter, rng = Meter(1e9, whole), np.random.default_rng(0)
    for step in range(steps):
        norm, body = ((1 + 0.05 * rng.standard_normal(), noise + 0.1 * rng.standard_normal()) for noise in (4, 12))
        pairs = {"norm": norm} | ({"body": body} if whole else {})
        meter.add(pairs, 100, {"": (body, norm)} if not whole and step % 2 else {})
    return meter


@pytest.mark.parametrize("whole", [{"": "body"}, {}], ids=["measured", "calibrated"])
def test_the_whole_models_noise_scale_is_measured_or_the_norm_layers_times_a_factor(whole):
    meter = filled(whole)
    noise, row = meter.noise(""), meter.row()
    assert noise.low < noise.value < noise.high and noise.value == pytest.approx(12, rel=0.05) and noise.of == "the whole model"
    assert row["gns/norm"] == pytest.approx(4, rel=0.05) and meter.missing("", 60) == []
    assert noise.triple == tuple(row[f"gns/{'body' if whole else 'calibrated'}{end}"] for end in ("", "_low", "_high"))
    if not whole:
        assert row["gns/calibration"] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("whole", [{"": "body"}, {}], ids=["measured", "calibrated"])
def test_what_is_missing_is_said_and_nothing_enters_the_log_by_asking(whole):
    meter = Meter(1e9, whole)
    assert meter.noise("") is None and "still being measured, for some" in meter.missing("", 0)[0] and meter.row() == {}
    meter = filled(whole)
    meter.covered = 40, 100
    assert meter.noise("").of == "the whole model, 40% of its weights" and "Only 40%" in meter.missing("", 60)[0]
    for _ in range(200):  # |G|^2 is lost in its noise
        for sign in (1, -1):
            meter.add(dict.fromkeys(meter.scales, (5.0 * sign, 4.0)), 1e9)
    assert meter.noise("") is None and "lost in its noise" in meter.missing("", 60)[0]


def test_a_state_brings_all_averages_or_those_that_the_meter_has():
    meter = filled({})
    state = json.loads(json.dumps(meter.state_dict()))
    everything, norm = Meter(1e9, {}), Meter(1e9, {})
    everything.load_state_dict(state)
    assert everything.row() == meter.row() and everything.noise("") == meter.noise("")
    norm.scale("norm"), norm.scale("body")
    norm.load_state_dict(state, new=False)
    assert norm.scales.keys() == {"norm", "body"} and not norm.calibrations
    assert norm.scales["norm"].triple() == meter.scales["norm"].triple() and norm.scales["body"].triple() is None
