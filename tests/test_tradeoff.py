"""The curve of tokens against steps over batch sizes."""

import json
import math

import numpy as np
import pytest

import plot
from tests.helpers import BLOCK, write_run
from trainer import tradeoff


def runs(critical, fewest, batches, seeds, spread=0.0, rng=None):
    """(steps, examples) of runs that lie on the curve, but for a factor of their own."""
    found = []
    for b in batches:
        for _ in range(seeds):
            off = math.exp(spread * rng.standard_normal()) if rng else 1.0
            found.append((off * fewest * (1 + critical / b), off * fewest * (b + critical)))
    return found


@pytest.mark.parametrize("critical", [3.0, 40.0, 700.0])
def test_a_curve_that_was_put_in_comes_out(critical):
    points = runs(critical, 500.0, (8, 16, 32, 64), 1)
    found = tradeoff.fit(points)
    assert found["critical"] == pytest.approx(critical, rel=1e-6) and found["steps"] == pytest.approx(500)
    assert found["examples"] == pytest.approx(500 * critical) and found["low"] <= found["critical"] <= found["high"]
    for steps, examples in points:
        assert (steps / found["steps"] - 1) * (examples / found["examples"] - 1) == pytest.approx(1), "McCandlish's form"
        assert tradeoff.steps_at(found, examples / steps) == pytest.approx(steps)


def test_the_interval_covers_the_critical_batch_that_was_put_in():
    rng = np.random.default_rng(0)
    found = [tradeoff.fit(runs(40.0, 500.0, (8, 16, 32, 64), 3, 0.03, rng)) for _ in range(300)]
    inside = sum(f["low"] <= 40.0 <= (f["high"] or math.inf) for f in found if "refused" not in f)
    assert 0.91 <= inside / len(found) <= 0.985
    assert np.median([f["spread"] for f in found]) == pytest.approx(0.03, rel=0.1)


def test_too_few_or_too_wild_runs_get_words_and_no_number():
    assert "three batch sizes or more, here 2" in tradeoff.fit(runs(40.0, 500.0, (8, 16), 5))["refused"]
    assert "here 0" in tradeoff.fit([])["refused"]
    wild = [(1000, 8000), (300, 4800), (900, 28800)]
    assert "differ too much" in tradeoff.fit(wild)["refused"]
    lines = tradeoff.words({**tradeoff.fit(wild), "predictions": []}, "the loss")
    assert len(lines) == 1 and lines[0].startswith("Critical batch: not fitted")


def test_a_bound_on_one_side_is_said_as_one():
    rng = np.random.default_rng(1)
    small = tradeoff.fit(runs(1.0, 500.0, (64, 128, 256), 3, 0.03, rng))
    assert small["low"] == 0 and small["high"] < 64 and f"({small['high']:.3g} or less)" in tradeoff.words(
        {**small, "block": 16, "predictions": []}, "the loss")[0]
    large = tradeoff.fit(runs(5000.0, 500.0, (4, 8, 16), 3, 0.03, rng))
    assert large["high"] is None and large["low"] > 16 and "or more)" in tradeoff.words(
        {**large, "block": 16, "predictions": []}, "the loss")[0]


def on_the_curve(tmp_path, batches=(8, 16, 32), fewest=300, noise=16):
    """Runs of constant batches whose steps follow from one noise scale."""
    return {b: write_run(tmp_path / f"b{b}", [b] * 30, float(noise), per_row=round(fewest * (1 + noise / b) / 30))
            for b in batches}


def test_compare_fits_the_curve_and_shows_the_prediction_of_one_run_beside_it(tmp_path, capsys):
    folders = on_the_curve(tmp_path)
    assert plot.main(["--compare", *(f"batch{b}={d}" for b, d in folders.items())]) == 0
    text = capsys.readouterr().out
    assert "3 runs at 3 batch sizes" in text and "16 sequences (95% interval 16 to 16)" in text
    assert "One run alone predicts" in text and "16 (12.8 to 20.8) from batch 8" in text and "Adam's metric" in text
    with open(tmp_path / "b8" / "compare.json") as f:
        found = json.load(f)["tradeoff"]
    assert found["critical"] == pytest.approx(16) and found["examples"] == pytest.approx(300 * 16)
    assert [p["batch"] for p in found["predictions"]] == [8, 16, 32] and found["block"] == BLOCK
    for own in found["predictions"]:
        assert [own["steps"][f"{b:.1f}"] for b in folders] == pytest.approx([900, 600, 450])


def test_runs_whose_batch_moves_or_that_are_too_few_are_left_out_of_the_curve_in_words(tmp_path, capsys):
    folders = on_the_curve(tmp_path, (8, 16))
    ramp = write_run(tmp_path / "ramp", [8] * 15 + [16] * 15, 16.0)
    assert plot.main(["--compare", f"a={folders[8]}", f"b={folders[16]}", f"ramp={ramp}"]) == 0
    assert "not fitted, it takes runs at three batch sizes or more, here 2" in capsys.readouterr().out
