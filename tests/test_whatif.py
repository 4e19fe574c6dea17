"""One run instead of a sweep: predictions against synthetic logs whose answers are known."""

import argparse
import ast
import json
import math
import os
import shlex

import numpy as np
import pytest

import gns
import train
import whatif
from configurator import ConfigError
from rightbatch.decision import TUNED, Cost, Noise
from system import points
from tests.helpers import BLOCK, KEY, MICRO, RAMP, rewrite, write_run
from trainer import exports, log, machines, predict, reader


def ask(capsys, *args):
    """The numbers of --json=-."""
    assert whatif.main([*map(str, args), "--json=-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *args):
    """The one line of a refusal, with exit code 2 and nothing on stdout."""
    with pytest.raises(SystemExit) as e:
        whatif.main([*map(str, args)])
    said = capsys.readouterr()
    assert e.value.code == 2 and not said.out and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


# -- properties


@pytest.mark.parametrize("batch", [8, 24, 56])
@pytest.mark.parametrize("noise", [0.3, 7.7, lambda i: 1.1 + 3 * i, lambda i: None if i < 5 else 11.3])
def test_at_its_own_constant_batch_the_prediction_is_the_run_itself_to_the_last_bit(tmp_path, capsys, batch, noise):
    found = ask(capsys, write_run(tmp_path, [batch] * 30, noise, cost=True), f"--batch={batch}")
    row = found["rows"][0]
    assert row["steps"] == row["steps_low"] == row["steps_high"] == 300
    assert row["tokens"] == row["tokens_low"] == row["tokens_high"] == 300 * batch * BLOCK
    assert row["seconds"] == pytest.approx(300 * (0.05 + 0.002 * batch), rel=1e-12)
    assert found["own"]["seconds_taken"] == pytest.approx(row["seconds"], rel=1e-9)
    assert found["loss"] == 2.0 and found["loss_kind"] == "validation"


def test_steps_fall_and_tokens_rise_with_the_batch_and_values_lie_in_their_intervals():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = np.sort(rng.lognormal(2, 1, (12, 3)), axis=1)[:, [1, 0, 2]]
        phases = [predict.Phase(rng.integers(1, 50), 8.0 * rng.integers(1, 9), Noise(*v), 1.0) for v in values]
        cost = Cost((0.1, 0.05, 0.2), (0.01, 0.009, 0.012), "")
        rows = [predict.row_at(phases, b, BLOCK, cost) for b in (1, 2, 3, 8, 20, 64, 500, 10_000)]
        for less, more in zip(rows, rows[1:]):
            assert less["steps"] > more["steps"] and less["tokens"] < more["tokens"]
        for row in rows:
            for name in ("steps", "tokens", "seconds"):
                assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"]


def test_a_prediction_there_and_back_is_where_it_began():
    there = gns.equivalent_steps([(100, 8, 13.0)], 40)
    assert gns.equivalent_steps([(there, 40, 13.0)], 8) == pytest.approx(100, rel=1e-12)
    split = [(60, 8, 13.0), (40, 8, 13.0)]
    assert gns.equivalent_steps(split, 40) == pytest.approx(there, rel=1e-12)


def test_steps_and_examples_lie_on_the_hyperbola_of_the_fewest():
    phases = [(50, 8, 3.0), (70, 16, 9.0), (10, 64, 40.0)]
    steps, examples = gns.fewest(phases)
    for batch in (1, 7, 100):
        S = gns.equivalent_steps(phases, batch)
        assert (S / steps - 1) * (S * batch / examples - 1) == pytest.approx(1, rel=1e-9)
    assert gns.equivalent_steps(phases, 1e12) == pytest.approx(steps) and gns.progress(30, 10) == 0.75


@pytest.mark.parametrize("N,t0,t1", [(20, 0.05, 0.002), (60, 0.5, 0.001), (300, 0.02, 0.001), (9, 0.5, 0.004)])
@pytest.mark.parametrize("logged", [True, False])
def test_the_right_batch_for_time_is_the_root_of_N_t0_over_t1(tmp_path, capsys, N, t0, t1, logged):
    found = ask(capsys, write_run(tmp_path, RAMP, N, t0, t1, cost=logged))
    best = math.sqrt(N * t0 / t1)
    right = found["right_batch"]
    assert right["time_formula"] == pytest.approx(best, rel=1e-6) and abs(right["time"] - best) < MICRO
    assert right["time_low"] <= right["time"] <= right["time_high"] and right["tokens"] == MICRO
    assert found["noise"]["mean"] == pytest.approx(N) and abs(right["balance"] - N) < MICRO
    assert found["step_time"]["fixed_ms"] == pytest.approx(1e3 * t0, rel=1e-6)
    assert found["step_time"]["per_sequence_ms"] == pytest.approx(1e3 * t1, rel=1e-6)
    run = reader.read(str(tmp_path))
    phases = predict.phases_of(run, KEY, 1e9)
    seconds = {b: predict.row_at(phases, b, BLOCK, predict.step_cost(run))["seconds"] for b in (0.9 * best, best, 1.1 * best)}
    assert min(seconds, key=seconds.get) == best, "and no batch beside it is faster"


def test_below_the_micro_batch_the_right_batch_is_the_micro_batch(tmp_path, capsys):
    found = ask(capsys, write_run(tmp_path, RAMP, 20, t0=0.0002, t1=0.002, cost=True))
    assert found["right_batch"]["time"] == MICRO and found["right_batch"]["time_formula"] == pytest.approx(math.sqrt(2))
    assert found["best_constant"]["batch"] == MICRO and len(found["best_schedule"]["stages"]) == 1


def test_the_best_schedule_beats_every_constant_batch_and_loses_nothing_against_itself(tmp_path, capsys):
    rising = write_run(tmp_path / "a", [16] * 80, lambda i: 2.0 + 2 * i, 0.2, 0.002, cost=True)
    found = ask(capsys, rising, "--batch=" + ",".join(str(8 * k) for k in range(1, 40)))
    best = found["best_schedule"]
    assert len(best["stages"]) == predict.STAGES and [s["batch"] for s in best["stages"]] == sorted(
        s["batch"] for s in best["stages"])
    assert best["seconds"] < min(row["seconds"] for row in found["rows"]) == found["best_constant"]["seconds"]
    assert found["lost"]["time_schedule"]["share"] > found["lost"]["time"]["share"] > 0.2
    assert found["lost"]["time"]["share"] == pytest.approx(found["own"]["seconds"] / found["best_constant"]["seconds"] - 1)
    right = ask(capsys, write_run(tmp_path / "b", [48] * 30, 23.04, 0.2, 0.002, cost=True))  # 48 = sqrt(23.04 x 100)
    assert right["lost"]["time"]["share"] == pytest.approx(0, abs=1e-12)
    assert right["lost"]["time_schedule"]["share"] == pytest.approx(0, abs=1e-12)


def test_a_deadline_gets_the_smallest_batch_that_meets_it(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20, 0.2, 0.002, cost=True)
    rows = ask(capsys, run, "--batch=" + ",".join(str(8 * k) for k in range(1, 30)))["rows"]
    fastest = min(row["seconds"] for row in rows)
    for limit in (1.01 * fastest, 1.2 * fastest, 3 * fastest):
        found = ask(capsys, run, f"--hours={limit / 3600}")["deadline"]
        assert found["possible"] and found["batch"] == min(r["batch"] for r in rows if r["seconds"] <= limit)
        paid = ask(capsys, run, "--price=3", f"--budget={3 * limit / 3600}")["deadline"]
        assert paid["batch"] == found["batch"] and paid["money"] == pytest.approx(3 * paid["seconds"] / 3600)
    late = ask(capsys, run, f"--hours={0.99 * fastest / 3600}")["deadline"]
    assert not late["possible"] and late["seconds"] == pytest.approx(fastest)


def test_batches_within_a_time_are_exactly_those_that_take_no_longer():
    S, E, t0, t1 = 100.0, 3000.0, 0.3, 0.01
    low, high = gns.batches_within(150, S, E, t0, t1)  # the fastest takes 120
    assert [(S + E / b) * (t0 + t1 * b) for b in (low, high)] == pytest.approx([150, 150])
    assert low < math.sqrt(E / S * t0 / t1) < high
    assert gns.batches_within(119, S, E, t0, t1) is None
    assert gns.batches_within(150, S, E, 0.0, t1)[0] == 0, "without a fixed cost no batch is too small"


# -- intervals


@pytest.mark.parametrize("batches,other", [([8] * 10, 64), ([8] * 10, 2),
                                           ([8] * 5 + [32] * 5, 16), ([8] * 5 + [32] * 5, 20)])
def test_intervals_of_steps_cover_the_truth(batches, other):
    """Rows from a NoiseScale that sees noisy pairs, as in a run; the truth is the noise scale that they were drawn from. A
    batch between the run's own is the hard case: errors of early and late rows pull apart, and must not be taken to cancel."""
    rng, N, covered, trials = np.random.default_rng(1), 25.0, 0, 200
    for _ in range(trials):
        scale, rows = gns.NoiseScale(40 * 8, 0.2), []
        for step in range(1, 101):
            scale.update(rng.normal(1.0, 1.2), rng.normal(N, 8.0), 8)
            if step % 10 == 0:
                low, high = scale.interval() or (None, None)
                rows.append({"gns/total": scale.gns, "gns/total_low": low, "gns/total_high": high})
        if not any(reader.noise_of(row, "gns/total") for row in rows):
            covered += 1  # undetermined: no number, so none that is wrong
            continue
        values = predict.noise_values(rows, "gns/total")
        found = predict.row_at([predict.Phase(10, b, noise, 1.0) for b, noise in zip(batches, values)], other, BLOCK, None)
        truth = gns.equivalent_steps([(10, b, N) for b in batches], other)
        covered += found["steps_low"] <= truth <= found["steps_high"]
    assert 0.93 * trials <= covered, covered


@pytest.mark.parametrize("correlation,least", [(0.0, 0.92), (0.9, 0.7)])
@pytest.mark.slow
def test_intervals_of_the_fitted_cost_cover_the_truth_and_single_slow_rows_do_no_harm(correlation, least):
    """Where neighbouring rows are slow together the batch's ramp and the machine's drift look alike: covered less often."""
    rng, trials = np.random.default_rng(2), 200
    covered = {"fixed": 0, "per_sequence": 0, "step": 0}
    for _ in range(trials):
        batch, off = np.array(RAMP, float), [rng.normal()]
        for _ in RAMP[1:]:
            off.append(correlation * off[-1] + math.sqrt(1 - correlation**2) * rng.normal())
        slow = np.exp(0.03 * np.array(off)) * np.where(rng.random(len(batch)) < 0.05, 3.0, 1.0)
        cost = predict.fit_cost(batch, (0.05 + 0.002 * batch) * slow)
        covered["fixed"] += cost.fixed[1] <= 0.05 <= cost.fixed[2]
        covered["per_sequence"] += cost.per_sequence[1] <= 0.002 <= cost.per_sequence[2]
        low, high = cost.step(20)[1:]
        covered["step"] += low <= 0.05 + 0.002 * 20 <= high
        assert abs(cost.step(20)[0] / 0.09 - 1) < 0.1, "a slow row in twenty moves the fit by less than the noise"
    assert all(n >= least * trials for n in covered.values()), covered


def test_a_product_of_triples_adds_relative_errors_in_quadrature():
    value, low, high = gns.product((2.0, 1.0, 4.0), (3.0, 3.0, 3.0))
    assert (value, low, high) == pytest.approx((6, 3, 12))
    both = gns.product((2.0, 1.0, 4.0), (3.0, 1.5, 6.0))
    assert both[1] == pytest.approx(6 * 2 ** -math.sqrt(2)) and both[2] == pytest.approx(6 * 2 ** math.sqrt(2))
    assert gns.product((2.0, 0.0, 4.0), (3.0, 3.0, 3.0))[1] == 0


# -- which noise scale, and where it is missing


def test_the_noise_scale_is_the_one_that_the_run_went_by_and_the_words_say_which(tmp_path, capsys):
    plain = {"gns/body": 9.0, "gns/body_low": 8.0, "gns/body_high": 10.0}
    run = write_run(tmp_path, RAMP, key="gns/total_adam")
    rewrite(run, lambda row: row | plain)
    assert ask(capsys, run)["noise"]["key"] == "gns/total_adam"
    rewrite(run, lambda row: row | {"gns": 9.0, "gns_low": 8.0, "gns_high": 10.0})
    found = ask(capsys, run)["noise"]
    assert found["key"] == "gns/body" and found["mean"] == pytest.approx(9.0)
    only_plain = write_run(tmp_path / "plain", RAMP, key="gns/calibrated")
    assert whatif.main([only_plain]) == 0
    said = capsys.readouterr().out
    assert "gns/calibrated)" in said and "none in Adam's metric" in said


@pytest.mark.parametrize("calibration, reason", [(1.3, "too small against its noise"), (None, "still being measured")])
def test_an_undetermined_noise_scale_is_not_replaced_by_one_in_another_metric(tmp_path, capsys, calibration, reason):
    run = write_run(tmp_path, RAMP, key="gns/calibrated", cost=True)
    rewrite(run, lambda row: row | {"gns": None, "gns_low": None, "gns_high": None, "gns/calibration_adam": calibration})
    said = refused(capsys, run)
    assert "undetermined in all 40 logged rows" in said and reason in said and "train for more tokens" in said
    rewrite(run, lambda row: row | ({f"gns{end}": v for end, v in (("", 7.0), ("_low", 6.0), ("_high", 8.0))} | {
        f"{KEY}{end}": v for end, v in (("", 7.0), ("_low", 6.0), ("_high", 8.0))} if row["step"] > 300 else {}))
    found = ask(capsys, run)["noise"]
    assert found["key"] == KEY and found["determined"] == 10 and found["rows"] == 40


def test_the_norm_layers_own_noise_scale_predicts_nothing(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, drop=(KEY, KEY + "_low", KEY + "_high"), gns_calibrate=False)
    assert "gns_calibrate=False" in (said := refused(capsys, run)) and "--gns=exact" in said


@pytest.mark.parametrize("how,words", [
    (dict(gns="off", drop=(KEY, KEY + "_low", KEY + "_high", "gns/norm", "gns/norm_low", "gns/norm_high")), "--gns=norm"),
    (dict(noise=None), "undetermined in all 40 logged rows"),
    (dict(batches=[1] * 20, noise=None), "batch_size=1"),
])
def test_a_run_without_a_noise_scale_gets_the_reason_and_what_to_change(tmp_path, capsys, how, words):
    assert words in refused(capsys, write_run(tmp_path, how.pop("batches", RAMP), **how))


def test_no_run_and_no_step_yet_are_said(tmp_path, capsys):
    assert "no readable log.jsonl" in refused(capsys, tmp_path)
    (tmp_path / log.NAME).write_text(json.dumps({"step": 0, "tokens": 0, "val/loss": 5.0}) + "\n")
    assert "no logged step yet" in refused(capsys, tmp_path)


@pytest.mark.parametrize("args,words", [
    (["--batch=8,x"], "--batch=8,x"), (["--batch=0"], "at least 1"), (["--kind=H1000"], "expected one of V100"),
    (["--link=fast", "--devices=2"], "expected nvlink4"), (["--link=ndr"], "needs --devices"),
    (["--json=/nowhere/a.json"], "--out and --json"), (["--budget=3"], "needs --price"), (["--hours=0"], "--hours=0"),
    (["--mfu=0.5"], "--mfu=0.5: needs --kind"), (["--mfu=1.5", "--kind=H100"], "--mfu=1.5: must be at most 1"),
    (["--objective=tokens"], "--objective=tokens: needs --export"),
    (["--to_loss=1.5"], "went from 5.0000 to 2.0000 (validation loss)"), (["--to_loss=6"], "--to_loss=6"),
])
def test_what_cannot_be_asked_is_said_with_key_and_value(tmp_path, capsys, args, words):
    assert words in refused(capsys, write_run(tmp_path, RAMP), *args)


def test_rows_before_the_first_factor_take_it_back_onto_the_norm_layers_with_a_wider_interval():
    def norm(v):
        return {"gns/norm_adam": v, "gns/norm_adam_low": 0.9 * v, "gns/norm_adam_high": 1.1 * v}
    known = {KEY: 20.0, KEY + "_low": 16.0, KEY + "_high": 25.0}
    none = {KEY: None, KEY + "_low": None, KEY + "_high": None}
    gone = {"gns/norm_adam": None}
    rows = [none | gone, none | norm(1.0), known | norm(10.0), none | norm(12.0), none | gone]
    values = [noise.triple for noise in predict.noise_values(rows, KEY)]
    assert values[2] == (20.0, 16.0, 25.0)
    assert [v[0] for v in values] == pytest.approx([20, 2, 20, 24, 20])
    assert values[0][1] == 0 and values[0][2] == 25, "before anything is known: from nothing to the first"
    for i in (1, 3, 4):
        value, low, high = values[i]
        assert value / low > 20 / 16 and high / value > 25 / 20


# -- logs as they come


def test_a_torn_or_growing_log_gives_what_its_whole_lines_give_at_every_cut(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, cost=True)
    path = os.path.join(run, log.NAME)
    with open(path, "rb") as f:
        text = f.read()
    for cut in range(len(text) // 3, len(text), len(text) // 9):
        with open(path, "wb") as f:
            f.write(text[:cut])
        torn = ask(capsys, run)
        with open(path, "wb") as f:
            f.write(text[:text.rindex(b"\n", 0, cut) + 1])
        assert torn == ask(capsys, run) and torn["own"]["steps"] > 0


def test_a_log_that_repeats_rows_is_refused(tmp_path, capsys):
    path = os.path.join(write_run(tmp_path, RAMP, lambda i: 5.0 + i), log.NAME)
    with open(path) as f:
        lines = f.readlines()
    with open(path, "w") as f:
        f.writelines(lines[:41] + lines[31:])
    assert "log.jsonl: line 42 does not follow from the line before" in refused(capsys, tmp_path)


def test_a_branch_counts_from_where_it_began(tmp_path, capsys):
    run = write_run(tmp_path, [16] * 20, cost=True)
    path = os.path.join(run, log.NAME)
    with open(path) as f:
        rows = [json.loads(line) for line in f]
    event = {"step": 100, "tokens": 100 * 16 * BLOCK, "event": "branched"}
    with open(path, "w") as f:
        f.writelines(json.dumps(r) + "\n" for r in [
            event, *(r for r in rows if r["step"] >= (100 if "val/loss" in r else 101))])
    own = ask(capsys, run)["own"]
    assert (own["steps"], own["batch_low"], own["batch_high"]) == (100, 16, 16)
    assert own["seconds_taken"] == pytest.approx(100 * (0.05 + 0.002 * 16))
    assert whatif.main([run]) == 0 and "validation loss of 2.0000, its end." in capsys.readouterr().out
    assert "--to_loss=4: " in refused(capsys, run, "--to_loss=4"), "it began at 3.5"


def test_a_long_log_is_cut_into_fewer_phases_and_says_the_same(tmp_path, capsys, monkeypatch):
    run = write_run(tmp_path, [8 * (1 + i // 300) for i in range(1200)], lambda i: 2 + 0.05 * i)
    long = ask(capsys, run)
    monkeypatch.setattr(predict, "PHASES", 10_000)
    whole = ask(capsys, run)
    assert long["own"]["steps"] == whole["own"]["steps"] == 12_000 and long["own"]["tokens"] == whole["own"]["tokens"]
    for thin, row in zip(long["rows"], whole["rows"]):
        assert thin["steps"] == pytest.approx(row["steps"], rel=2e-3) and thin["steps"] != row["steps"]


def test_several_processes_make_the_smallest_batch_larger(tmp_path, capsys):
    found = ask(capsys, write_run(tmp_path, [32] * 15 + [64] * 15, processes=4), "--price=1")
    assert found["right_batch"]["tokens"] == 32 and found["machine"] == {"devices": 4, "quantum": 32, "measured": True}
    row = found["rows"][0]
    assert row["batch"] == 32 and row["money"] == pytest.approx(4 * row["seconds"] / 3600)


def test_without_config_json_the_log_alone_is_enough(tmp_path, capsys):
    run = write_run(tmp_path, RAMP)
    whole = ask(capsys, run)
    os.remove(os.path.join(run, "config.json"))
    assert ask(capsys, run)["rows"] == whole["rows"]


def test_a_constant_batch_tells_steps_and_tokens_but_no_time(tmp_path, capsys):
    run = write_run(tmp_path, [16] * 30)
    found = ask(capsys, run)
    assert found["step_time"] == {"fixed_ms": None, "per_sequence_ms": None} and found["right_batch"]["time"] is None
    assert all(row["seconds"] is None and row["steps"] > 0 for row in found["rows"])
    assert whatif.main([run]) == 0
    assert "Time cannot be predicted" in capsys.readouterr().out
    assert "too few steps to tell" in refused(capsys, run, "--hours=1")
    assert "--objective=balance" in refused(capsys, run, "--export=steps")
    assert whatif.main([run, "--export=steps", "--objective=balance"]) == 0


@pytest.mark.parametrize("evaluate,kind", [(1, "validation"), (20, "smoothed training")])
def test_to_loss_ends_the_prediction_where_the_run_reached_it(tmp_path, capsys, evaluate, kind):
    run = write_run(tmp_path, [16] * 40, evaluate=evaluate)
    found = ask(capsys, run, "--to_loss=3.5", "--batch=16")
    assert found["loss"] == 3.5 and found["loss_kind"] == kind
    late = 0 if evaluate == 1 else 25  # a smoothed loss comes later
    assert 200 <= found["rows"][0]["steps"] <= 200 + late + 1e-6
    assert found["noise"]["rows"] == math.ceil(found["own"]["steps"] / 10), "of the rows up to there"


# -- what users see


def test_the_json_has_the_promised_shape(tmp_path, capsys):
    found = ask(capsys, write_run(tmp_path, RAMP), "--batch=8,16,32", "--to_loss=2.2")
    assert found["loss"] == 2.2 and [row["batch"] for row in found["rows"]] == [8, 16, 32]
    assert all(isinstance(row[k], float) for row in found["rows"] for k in ("steps", "steps_low", "steps_high", "tokens",
                                                                          "seconds"))
    assert {"fixed_ms", "per_sequence_ms"} <= set(found["step_time"])
    assert {"time", "tokens", "balance"} <= set(found["right_batch"])
    whatif.main([str(tmp_path), f"--json={tmp_path / 'a.json'}", "--batch=8,16,32", "--to_loss=2.2"])
    with open(tmp_path / "a.json") as f:
        assert json.load(f) == found


def test_words_and_picture_say_what_is_assumed(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, lambda i: 2.0 + i, t0=0.3)
    assert whatif.main([run, "--devices=1,8,64", "--kind=H100", "--price=2", "--hours=1"]) == 0
    said = capsys.readouterr().out
    for words in (TUNED, "not measured", "35% of its 989 TFLOP/s", "50 GB/s", "too small for the H100", "Fastest:",
                  "Best schedule for time", "This run's own batches took", "Within the deadline or budget"):
        assert words in said, words
    assert os.path.getsize(tmp_path / "whatif.png") > 20_000
    for name in exports.FORMATS:
        assert whatif.main([run, f"--export={name}"]) == 0
        assert TUNED in capsys.readouterr().out


# -- exports: read back as the other trainer would


RISING = dict(noise=lambda i: 2.0 + 2 * i, t0=0.4, t1=0.002, cost=True)


def exported(tmp_path, capsys, name, **how):
    run = write_run(tmp_path, [16] * 80, **{**RISING, **how})
    stages = ask(capsys, run)["best_schedule"]["stages"]
    assert whatif.main([run, f"--export={name}"]) == 0
    text = capsys.readouterr().out
    return [(int(s["tokens"]), s["batch"]) for s in stages], stages, text, [x for x in text.splitlines() if x[:1] != "#"]


def flags(line):
    parser = argparse.ArgumentParser()
    for name in ("seq-length", "micro-batch-size", "train-samples", "global-batch-size", "step-batch-size-schedule",
                 "training.seq_len", "training.local_batch_size", "training.global_batch_size", "training.steps",
                 "lr_scheduler.total_steps"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--rampup-batch-size", nargs=3, type=int)
    return vars(parser.parse_args(shlex.split(line)))


def test_exported_steps_are_a_batch_schedule_of_ours(tmp_path, capsys):
    pairs, stages, _, lines = exported(tmp_path, capsys, "steps")
    keys = dict(part.removeprefix("--").split("=", 1) for part in shlex.split(lines[0]))
    assert points.parse_steps(keys["batch_steps"], MICRO) == pairs and len(pairs) > 3
    assert keys["batch_schedule"] == "steps" and int(keys["micro_batch_size"]) == MICRO
    assert int(keys["max_tokens"]) == pytest.approx(sum(s["steps"] * s["batch"] for s in stages) * BLOCK, rel=1e-6)


def test_exported_megatron_flags_say_the_schedule_and_the_nearest_ramp(tmp_path, capsys):
    pairs, _, text, lines = exported(tmp_path, capsys, "megatron")
    got = flags(lines[0])
    assert [tuple(map(int, p.split(":"))) for p in got["step_batch_size_schedule"].split()] == pairs
    assert got["seq_length"] == str(BLOCK) and got["global_batch_size"] is None
    ramp = flags(next(x for x in text.splitlines() if "--rampup" in x).removeprefix("# "))
    start, increment, samples = ramp["rampup_batch_size"]
    top = int(ramp["global_batch_size"])
    assert start == pairs[0][1] and top == pairs[-1][1] and (top - start) % increment == 0 and increment % MICRO == 0
    assert 0 < samples <= 1.5 * int(ramp["train_samples"]) and "to the same loss, predicted" in text
    assert exports.ramp_at((8, 8, 100, 40), 0) == 8 and exports.ramp_at((8, 8, 100, 40), 25) == 16
    assert exports.ramp_at((8, 8, 100, 40), 100) == 40
    one = flags(exported(tmp_path / "one", capsys, "megatron", noise=20.0)[3][0])
    assert one["step_batch_size_schedule"] is None and int(one["global_batch_size"]) % MICRO == 0
    falling = exported(tmp_path / "down", capsys, "megatron", noise=lambda i: 200.0 - 2 * i)[2]
    assert "not expressible" in falling and "--rampup" not in falling


def test_exported_olmo_stages_change_by_whole_factors_in_tokens(tmp_path, capsys):
    pairs, _, text, lines = exported(tmp_path, capsys, "olmo")
    call = ast.parse(lines[0]).body[0].value
    got = {k.arg: k.value for k in call.keywords}
    sizes = ast.literal_eval(got["batch_sizes"])
    starts = [ast.literal_eval(c.args[0]) for c in got["schedule"].elts]
    assert call.func.id == "BatchSizeSchedulerCallback" and {c.func.attr for c in got["schedule"].elts} == {"tokens"}
    assert starts[0] == 0 and starts == sorted(set(starts)) and set(starts) <= {t for t, _ in pairs}
    assert all(b % a == 0 and b > a for a, b in zip(sizes, sizes[1:])) and all(s % (BLOCK * MICRO) == 0 for s in sizes)
    wanted = dict(pairs)
    assert all(0.7 < size / BLOCK / wanted[start] < 1.42 for start, size in zip(starts, sizes))
    assert "square root" in text and "whole factors" in text


def test_exported_torchtitan_runs_end_where_the_next_begins(tmp_path, capsys):
    pairs, stages, text, lines = exported(tmp_path, capsys, "torchtitan")
    got = [flags(line) for line in lines]
    assert [int(g["training.global_batch_size"]) for g in got] == [batch for _, batch in pairs]
    ends = np.cumsum([s["steps"] for s in stages])
    assert all(0 <= int(g["training.steps"]) - end <= len(ends) for g, end in zip(got, ends))
    assert "no schedule" in text and "the learning rate falls over" in text
    assert {g["lr_scheduler.total_steps"] for g in got} == {got[-1]["training.steps"]}, "one decay over all stages"


# -- machines one does not have


def options(**more):
    return argparse.Namespace(**{**dict(kind=None, mfu=0.35, link="10gbit", micro=None, price=None, hours=None, budget=None,
                                        devices=None), **more})


def test_one_device_like_the_runs_costs_what_was_measured_and_more_share_its_work(tmp_path):
    run = reader.read(write_run(tmp_path, RAMP, cost=True))
    measured = predict.step_cost(run)
    alone, eight = (machines.cost_on(run, measured, n, options()) for n in (1, 8))
    assert (alone.fixed, alone.per_sequence) == (measured.fixed, measured.per_sequence)
    assert eight.per_sequence[0] == pytest.approx(measured.per_sequence[0] / 8)
    ring = 2 * 7 / 8 * 4 * 50_000 / 1.25e9 + 14 * 30e-6
    assert eight.fixed[0] == pytest.approx(measured.fixed[0] + ring)


def test_a_kind_is_priced_by_its_data_sheet(tmp_path):
    run = reader.read(write_run(tmp_path, [16] * 10, n_layer=48, n_embd=4096))
    cost = machines.cost_on(run, None, 4, options(kind="A100", mfu=0.5))
    flops = 6 * (48 * 12 * 4096**2 + 64 * 4096) + 6 * 48 * BLOCK * 4096
    assert cost.per_sequence[0] == pytest.approx(BLOCK * flops / (4 * 312e12 * 0.5))
    with pytest.raises(ConfigError, match="--kind"):
        machines.cost_on(run, None, 4, options())
    assert "too small" not in " ".join(machines.assume(run, None, options(kind="A100")))


@pytest.mark.parametrize("cost, t0", [(True, 0.05), (True, 0.0005), (False, 0.05)])
def test_a_tiny_model_on_a_fast_kind_takes_as_long_as_launching_its_kernels(tmp_path, cost, t0):
    run = reader.read(write_run(tmp_path, [16] * 10, t0=t0, cost=cost))
    found = machines.cost_on(run, predict.step_cost(run), 4, options(kind="H100"))
    ring = machines.all_reduce(50_000, 4, (1.25e9, 30e-6))
    assert found.per_sequence == pytest.approx((2e-3 / MICRO / 4,) * 3)
    scaled = t0 * 2e-3 / MICRO / 0.002 if cost else 0  # as many sequences' time as here
    assert found.fixed[0] == pytest.approx(max(2e-3, scaled) + ring)
    said = machines.assume(run, predict.step_cost(run), options(kind="H100"))
    assert said[0].startswith("this model is too small for the H100") and any("at least 2 ms each" in line for line in said)


def test_what_is_assumed_of_a_machine_stands_before_what_follows_from_it(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20.0, cost=True)
    for devices, conclusion in (("2", "Right batch for time"), ("1,8", "Fewest device-hours")):
        assert whatif.main([run, f"--devices={devices}", "--kind=H100"]) == 0
        said = capsys.readouterr().out
        assert 0 < said.index("too small for the H100") < said.index(conclusion)


def test_the_price_of_a_kind_is_not_put_on_the_machine_of_the_run(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20.0, cost=True)
    several = ask(capsys, run, "--devices=1,8", "--kind=H100", "--price=2")
    assert "money" not in several["rows"][0] and "money" not in several["best_constant"]
    assert all(row["money"] == pytest.approx(2 * row["device_hours"]) for row in several["devices"])
    assert "money" in ask(capsys, run, "--devices=8", "--kind=H100", "--price=2")["rows"][0]
    assert "money" in ask(capsys, run, "--devices=1,8", "--price=2")["rows"][0], "devices like the run's"


def test_batches_of_the_run_that_another_machine_cannot_run_well_are_not_priced_there(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20.0, cost=True)
    small = ask(capsys, run, "--devices=4")
    assert small["machine"]["quantum"] == 32 > small["own"]["batch_low"]
    assert small["lost"] is None and small["own"]["seconds"] is None
    assert whatif.main([run, "--devices=4"]) == 0
    assert "own batches" not in capsys.readouterr().out
    fits = write_run(tmp_path / "b", [64] * 30, 20.0, cost=True)
    assert whatif.main([fits, "--devices=4"]) == 0
    assert "There, this run's own batches would take" in capsys.readouterr().out


def test_many_devices_end_at_the_fewest_steps_and_burn_money(tmp_path):
    run = reader.read(write_run(tmp_path, RAMP, 20.0, cost=True))
    phases = predict.phases_of(run, KEY, 1e9)
    rows = machines.table(run, phases, predict.step_cost(run), options(devices=[1, 2, 1024, 4096], price=1.0, link="nvlink4"))
    fewest = gns.fewest(predict.at(phases))[0]
    assert rows[-1]["steps"] == pytest.approx(fewest, rel=0.01) and rows[-1]["batch"] == 4096 * MICRO
    assert rows[0]["seconds"] > rows[1]["seconds"] and rows[-1]["device_hours"] > 100 * rows[0]["device_hours"]
    assert rows[-1]["money"] == pytest.approx(rows[-1]["device_hours"])
    assert "4096" in machines.worth(rows, None)[-1] and "less time for" not in machines.worth(rows, None)[-1].split("only")[0]


@pytest.mark.parametrize("text,rate,latency", [("ndr", 50e9, 5e-6), ("25GB/s", 25e9, 30e-6), ("200Mbit", 25e6, 30e-6),
                                               ("200Mbit:500us", 25e6, 500e-6), ("1.6Tb/s:2us", 200e9, 2e-6)])
def test_a_link_is_a_name_or_a_bandwidth(text, rate, latency):
    assert machines.parse_link(text) == pytest.approx((rate, latency))


def test_a_table_for_one_other_machine_is_in_that_machines_time(tmp_path, capsys):
    run = write_run(tmp_path, RAMP, 20.0, cost=True)
    here, there = ask(capsys, run, "--batch=64"), ask(capsys, run, "--batch=64", "--devices=2", "--link=1Mbit", "--micro=4")
    assert there["rows"][0]["steps"] == here["rows"][0]["steps"] and there["machine"]["quantum"] == 8
    assert there["rows"][0]["seconds"] > 5 * here["rows"][0]["seconds"] and there["right_batch"]["time"] > 64
    assert len(there["assumptions"]) >= 3 and not there["machine"]["measured"]


# -- real runs


@pytest.mark.parametrize("mode", ["exact", "off"])
def test_a_real_run_is_read_as_train_wrote_it(tmp_path, capsys, tiny_args, mode):
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out, gns=mode, eval_tokens=400)) == 0
    capsys.readouterr()
    if mode == "off":
        assert "gns='off'" in refused(capsys, out)
        return
    found = ask(capsys, out)
    last = reader.read(str(out)).steps[-1]
    assert found["noise"]["key"] == "gns/total_adam" and found["own"]["steps"] == last["step"]
    assert found["own"]["tokens"] == last["tokens"] and found["own"]["seconds_taken"] == pytest.approx(last["seconds"])
    assert [row["batch"] for row in found["rows"]][:2] == [4, 8]
