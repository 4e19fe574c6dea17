"""What whatif.py and a run at its end say in words, and what the report's panel of time against batch shows."""

import json
import os
import re

import pytest

import train
import whatif
from configurator import Config
from plots import report, style
from plots import whatif as picture
from rightbatch.decision import Noise
from tests.helpers import BLOCK, RAMP, rewrite, write_run
from trainer import advice, predict, summary


def says(capsys, *args):
    assert whatif.main([*map(str, args)]) == 0
    return capsys.readouterr().out


def finished(tmp_path, noise=20.0, batches=RAMP, adam=True, **how):
    """The Config of a run as train.py leaves it."""
    key = "gns/total" + ("_adam" if adam else "")
    folder = write_run(tmp_path / "run", batches, noise, key=key, gns="exact", **how)
    return Config(out_dir=folder, gns="exact", gns_metric="adam" if adam else "plain", block_size=BLOCK, batch_size=32)


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr(report, "draw", lambda folder: f"{folder}/report.png")


# -- a batch beside the noise scale


def test_a_batch_inside_above_or_below_the_interval_is_called_so_with_what_twice_of_it_would_take():
    noise = Noise(20.0, 16.0, 26.0)
    assert all(summary.verdict(B, noise) == "inside its interval: tokens and steps are balanced" for B in (16, 20, 26))
    assert summary.verdict(27, noise).startswith("above its interval, 1.4 times the noise scale")
    assert summary.verdict(15, noise).startswith("below its interval")
    # 10 of noise scale 40: steps go as (B + N) / B, from 5 to 3; tokens as B + N, from 50 to 60
    words = summary.verdict(10, Noise(40.0, 30.0, 50.0))
    assert words == "below its interval: twice the batch would take 0.60 times the steps and 1.20 times the tokens"
    assert summary.verdict(10, Noise(40.0, 30.0, 50.0), timed=True) == words + "; which is faster here is said above"


# -- the end of a run


def test_closing_words_say_the_right_batch_for_time_before_the_noise_scale(tmp_path):
    text = summary.closing(finished(tmp_path, noise=200.0, cost=True), "a.png")
    assert 0 < text.index("Right batch for time") < text.index("Right batch for tokens") < text.index("Noise scale of")
    assert text.index("This run's own batches took") < text.index("Noise scale of")
    assert "The batch of 32 there is below its interval" in text and "which is faster here is said above" in text


def test_closing_words_without_a_cost_promise_no_answer_for_time(tmp_path):
    text = summary.closing(finished(tmp_path, noise=200.0, batches=[32] * 40), "a.png")
    assert "Time cannot be predicted" in text and "Right batch for time" not in text
    assert "below its interval" in text and "said above" not in text


def test_closing_words_of_an_undetermined_run_name_no_right_batch(tmp_path):
    config = finished(tmp_path, noise=None, cost=True)
    plain = {"gns/total": 5.0, "gns/total_low": 4.0, "gns/total_high": 6.0}
    rewrite(config.out_dir, lambda row: row | plain)
    assert advice.right_batch(config.out_dir) == []
    text = summary.closing(config, "a.png")
    assert "The noise scale is undetermined" in text
    assert "Right batch" not in text and "own batches" not in text and "Noise scale of" not in text


@pytest.mark.parametrize("adam, words", [(True, "norm layers' 48.7 in that metric times 1.97"),
                                         (False, "norm layers' 48.7 times 1.97")])
def test_the_norm_layers_value_is_named_in_the_metric_of_the_run(adam, words):
    suffix = "_adam" if adam else ""
    row = {"step": 10, "tokens": 100, "batch_size": 8, f"gns/norm{suffix}": 48.7}
    for key, value in (("gns", 96.0), (f"gns/calibrated{suffix}", 96.0), (f"gns/calibration{suffix}", 1.97)):
        row |= {key: value, f"{key}_low": 0.9 * value, f"{key}_high": 1.1 * value}
    lines = summary.noise_summary([row], Config(gns_metric="adam" if adam else "plain"))
    assert words in lines[1]


# -- warnings


def test_a_batch_above_the_noise_scale_says_that_the_learning_rate_stops_there_and_says_it_once():
    config = Config(lr_scaling="sqrt", lr_reference_batch=8)
    words = summary.saturation(64, config, None, Noise(20.0, 16.0, 26.0))
    assert words == "learning rate: batch 64 is above the noise scale's interval; lr_scaling stays at its upper end, 26"
    assert summary.saturation(64, config, Noise(20.0, 16.0, 26.0), Noise(21.0, 17.0, 27.0)) is None, "it has been said"
    assert summary.saturation(16, config, None, Noise(20.0, 16.0, 26.0)) is None
    assert summary.saturation(64, Config(), None, Noise(20.0, 16.0, 26.0)) is None, "without a rule there is none to stop"


def test_a_beta2_that_the_rule_would_bring_below_its_floor_is_said_at_the_start(tmp_path, tiny_args, capsys, no_picture):
    small = dict(max_tokens=320, beta2_scaling="tokens", lr_reference_batch=4, beta2=0.95)
    assert train.main(tiny_args(out_dir=tmp_path / "a", beta2_floor=0.9, **small)) == 0
    said = capsys.readouterr().out
    assert f"beta2_scaling would bring beta2 to {0.95**4:.3g} at batch 16; it is held at 0.9 (beta2_floor)" in said
    assert train.main(tiny_args(out_dir=tmp_path / "b", beta2_floor=0.5, **small)) == 0
    assert "beta2_floor" not in capsys.readouterr().out


# -- the cost of a step


def test_the_cost_is_said_to_be_of_the_last_tokens_with_what_the_steps_really_took(tmp_path, capsys):
    run = write_run(tmp_path, [16] * 30, 20.0, t0=0.05, t1=0.002, cost=True, slow=[2.0] * 30)
    text = says(capsys, run)
    assert "measured over the run's last tokens. At that speed this run's steps take 24.6 s; they took 49.2 s." in text


@pytest.mark.parametrize("parallel, processes, batch, told", [
    ("fsdp", 2, 16, False), ("fsdp", 2, 32, True), ("ddp", 2, 16, True), ("fsdp", 1, 8, True)])
def test_fsdp_with_one_micro_step_says_that_the_right_batch_is_larger(tmp_path, capsys, parallel, processes, batch, told):
    run = write_run(tmp_path, [batch] * 20, cost=True, parallel=parallel, processes=processes)
    assert ("the right batch for time is larger than said here" in says(capsys, run)) != told


# -- right batch, deadline, what was lost


def test_a_right_batch_is_said_in_whole_micro_batches_and_the_noise_scale_beside_it(tmp_path, capsys):
    text = says(capsys, write_run(tmp_path, RAMP, 20.0, t0=0.05, t1=0.002, cost=True))  # sqrt(20 x 25) = 22.4
    assert "Right batch for time: 24 (16 to 24). A constant 24 takes" in text
    assert "Balance of both: 24; the noise scale is 20 over all, 20 at the end." in text


def test_what_the_run_lost_is_said_without_signs():
    def words(share, low, high):
        lost = {"tokens": {"share": share, "low": low, "high": high}}
        return advice.about_lost({"lost": lost, "right_batch": {"tokens": 8}, "machine": {"measured": True}}, None)[0]
    assert words(0.12, 0.09, 0.16) == "This run's own batches took 12% more tokens than a constant 8 (9% to 16%)."
    assert "12% fewer tokens than a constant 8 (9% to 16%)" in words(-0.12, -0.16, -0.09)
    assert "2% more tokens than a constant 8 (from 3% fewer to 5% more)" in words(0.02, -0.03, 0.05)
    assert "as many tokens as a constant 8 (from 3% fewer to 5% more)" in words(0.001, -0.03, 0.05)
    assert "as many tokens as a constant 8." in words(0.0, 0.0, 0.0)


def test_a_budget_is_answered_in_money_and_in_time(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20.0, cost=True)
    text = says(capsys, run, "--price=3.6", "--budget=0.05")
    assert "Within 0.05 (50 s): batch " in text and re.search(r"in [\d.]+ s \(.*\) for 0\.0\d+ \(", text)
    assert "Within 0.001 (1 s) this loss cannot be reached" in says(capsys, run, "--price=3.6", "--budget=0.001")
    assert "Within 36 s: batch " in says(capsys, run, "--price=3.6", "--budget=0.05", "--hours=0.01"), "the tighter one"


# -- losses on the way


@pytest.mark.parametrize("config, args, warned", [
    (dict(max_tokens=1000), [], False), (dict(max_tokens=1000), ["--to_loss=3.5"], True), (dict(max_tokens=10**9), [], True),
    (dict(max_tokens=1000, lr_decay="none"), [], True), (dict(max_tokens=1000, decay_tokens=10**9), [], True), ({}, [], False)])
def test_a_loss_before_the_learning_rate_came_down_is_said_to_predict_worse(tmp_path, capsys, config, args, warned):
    run = write_run(tmp_path, RAMP, cost=True, **config)
    text = says(capsys, run, *args)
    assert (advice.ON_THE_WAY in text) == warned and "1.30 to 1.45" in advice.ON_THE_WAY
    if not args:
        assert (advice.ON_THE_WAY in "\n".join(advice.right_batch(run))) == warned
    with open(os.path.join(os.path.dirname(train.__file__), "docs", "evidence.md")) as f:
        assert "1.30 to 1.45" in f.read()


# -- the picture


def panels(monkeypatch, folder):
    plt, kept = style.pyplot(), []
    monkeypatch.setattr(plt, "close", kept.append)
    report.draw(folder)
    return {ax.get_title(loc="left") or ax.get_title(): ax for ax in kept[0].axes}


def test_the_report_has_time_against_batch_with_the_run_and_the_right_batch(tmp_path, monkeypatch):
    folder = write_run(tmp_path, RAMP, 20.0, cost=True, slow=[2.0] * len(RAMP))
    ax = panels(monkeypatch, folder)["Predicted time against batch"]
    result, run, phases = predict.of_run(folder)
    lines = {line.get_label(): line for line in ax.lines}
    curve = lines["predicted, constant batch"]
    first, last = predict.row_at(phases, 8, BLOCK, predict.step_cost(run)), result["rows"][-1]
    assert (curve.get_xdata()[0], curve.get_xdata()[-1]) == pytest.approx((8, last["batch"]))
    assert (curve.get_ydata()[0], curve.get_ydata()[-1]) == pytest.approx((first["seconds"], last["seconds"]))
    own = lines["this run, batch 8 to 32, at its last speed"]
    assert list(own.get_xdata()) == [8, 32] and list(own.get_ydata()) == [result["own"]["seconds"]] * 2
    right = result["right_batch"]["time"]
    assert list(lines[f"fastest: {right:.3g}"].get_xdata()) == [right] * 2
    assert ax.get_ylabel() == "seconds" and all(re.fullmatch(r"[\d.]+", t.get_text()) for t in ax.get_yticklabels())
    assert len(ax.collections) + len(ax.patches) >= 2, "the bands of the curve and of the right batch"


def test_long_times_are_drawn_in_minutes_or_hours():
    assert [picture.unit_of(seconds)[1] for seconds in (599, 601, 36_001)] == ["seconds", "minutes", "hours"]


def test_without_a_cost_the_report_has_steps_and_without_a_noise_scale_neither(tmp_path, monkeypatch):
    assert "Predicted steps against batch" in panels(monkeypatch, write_run(tmp_path / "a", [16] * 30, 20.0))
    assert not [t for t in panels(monkeypatch, write_run(tmp_path / "b", RAMP, None, cost=True)) if "against" in t]


@pytest.mark.parametrize("adam", [True, False])
def test_the_norm_layers_line_and_parts_are_in_the_metric_of_the_run(tmp_path, monkeypatch, adam):
    config = finished(tmp_path, adam=adam)
    values = {"gns/norm": 3.0, "gns/norm_adam": 6.0, "gns/norm_sq_norm": 0.1, "gns/norm_adam_sq_norm": 0.2,
              "gns/norm_tr_sigma": 0.3, "gns/norm_adam_tr_sigma": 1.2}
    rewrite(config.out_dir, lambda row: row | values)
    axes = panels(monkeypatch, config.out_dir)
    lines = {line.get_label(): line for line in axes["Noise scale and batch (sequences)"].lines}
    label = "noise scale, the norm layers" + (" in that metric" if adam else "")
    assert set(lines[label].get_ydata()) == {6.0 if adam else 3.0}
    parts = {line.get_label(): set(line.get_ydata()) for line in axes["Its parts, norm layers"].lines}
    assert parts == {"noise, tr Σ": {1.2 if adam else 0.3}, "signal, |G|²": {0.2 if adam else 0.1}}


def test_the_json_says_whether_the_loss_is_that_of_a_finished_run(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, cost=True)
    for args, ended in (([], True), (["--to_loss=3"], False)):
        assert json.loads(says(capsys, run, "--json=-", *args))["at_the_end"] is ended
