import itertools
import json
import math
import os
import sys

import pytest

from tests.helpers import ROOT, as_args

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import batch_schedule  # noqa: E402
import common  # noqa: E402
import prediction  # noqa: E402
import step_cost  # noqa: E402

import sweep  # noqa: E402
import train  # noqa: E402
from sweeps import trial  # noqa: E402

# -- common.py

def test_the_recorded_command_has_the_folder_of_the_runs_where_it_is_another(tmp_path):
    assert common.parse(["--tiny"], "x", "")[0].command == "python experiments/x.py --tiny"
    assert common.parse(["--tiny", "--out=out/y"], "x", "")[0].command == "python experiments/x.py --out=out/y --tiny"
    assert "--out" not in common.parse(["--out=out/y"], "x", "", folder="y")[0].command
    assert common.parse(["--seeds=1"], "x", "", seeds=3)[0].command == "python experiments/x.py --seeds=1"
    assert "--out" not in common.parse([f"--out={tmp_path}"], "x", "")[0].command, "a folder of this machine alone"


def test_settings_give_way_to_a_config_file_and_both_to_the_command_line(tmp_path):
    file = tmp_path / "c.py"
    file.write_text("batch_size = 24\n")
    settings = dict(batch_size=64, n_layer=3)
    assert common.parse([], "x", "", settings=settings)[1].batch_size == 64
    given = common.parse(["--config", str(file)], "x", "", settings=settings)[1]
    assert given.batch_size == 24 and given.n_layer != 3
    assert common.parse(["--batch_size=48"], "x", "", settings=settings)[1].batch_size == 48
    with pytest.raises(SystemExit):
        common.parse(["--batch_sise=48"], "x", "", settings=settings)


# -- batch_schedule.py

def test_the_batch_schedule_experiment_runs_reports_and_is_not_run_twice(tiny, monkeypatch, capsys):
    monkeypatch.setattr(batch_schedule, "FACTORS", (1.0, 2.0))
    monkeypatch.setattr(batch_schedule, "batch_sizes", lambda config: [4, config.batch_size])
    arguments = ("--seeds", "1", "--max_tokens=640")
    result = tiny(batch_schedule, *arguments)
    text = capsys.readouterr().out
    assert "The paper:" in text and "18%" in text and "Against fixed: constant 4: " in text
    assert 4 * 2 + 4 <= len(tiny.runs) == len(set(tiny.runs)) <= 4 * 2 + 5, "a search on seed 0, then seed 1 of each"
    assert list(result["groups"])[0] == "fixed" and {"linear", "gns", "constant 4"} <= set(result["groups"])
    ran = len(tiny.runs)
    tiny(batch_schedule, *arguments)
    assert len(tiny.runs) == ran, "nothing is run again"
    with pytest.raises(SystemExit):
        tiny(batch_schedule, *arguments, "--n_embd=32")
    assert "holds a run with other settings: n_embd is 32, there it is 16" in capsys.readouterr().err


# -- prediction.py

def test_the_prediction_experiment_runs_and_tells_every_candidate_and_distance(tiny, monkeypatch):
    for name, value in (("BATCHES", (4, 8)), ("SOURCES", (8,)), ("LENGTHS", (1.0, 1.2, 1.5)), ("COARSE", (1.0, 1.5)),
                        ("taken", lambda ends, loss: ends[1][0])):  # the losses of so few steps tell nothing
        monkeypatch.setattr(prediction, name, value)
    result = tiny(prediction, "--seeds", "1")
    reported = 3 + 2 + 1  # the source's lengths, those of the other batches, and one with gns=exact
    assert len(tiny.runs) == len(set(tiny.runs)) == sum(map(len, result["tuning"].values())) + reported
    for batch, tried in result["tuning"].items():
        at, factors = float(result["learning_rate_factors"][batch]), sorted(map(float, tried))
        assert factors[0] < at < factors[-1], "the best learning rate is not at an end of what was tried"
    assert set(result["table"]) == set(prediction.CANDIDATES)
    own = result["table"]["gns/total_adam"]
    assert own["x2"]["predictions"] == sum(rows["x2"]["predictions"] for rows in own["by_length"].values() if rows["x2"]) > 0


def test_the_tokens_to_a_final_loss_are_read_between_runs_and_never_beyond():
    ends = [(1e6, [2.0, 2.0]), (2e6, [1.7, 1.9]), (4e6, [1.6, 1.6])]
    assert prediction.taken(ends, 1.8) == pytest.approx(2e6)
    assert prediction.taken(ends, 1.9) == pytest.approx(math.sqrt(2) * 1e6, rel=1e-4)
    assert prediction.taken(ends, 2.01) is None and prediction.taken(ends, 1.59) is None
    higher = [(1e6, [2.0]), (2e6, [2.1]), (4e6, [2.2])]
    assert prediction.taken(higher, 2.05) is None, "longer runs that ended higher"


def test_the_best_learning_rate_is_the_top_of_a_parabola_through_the_best_three():
    def loss(factor, best):
        return 1 + 0.1 * math.log2(factor / best) ** 2
    assert prediction.top({f: loss(f, 2.5) for f in (0.5, 1, 2, 4, 8)}) == pytest.approx(2.5, rel=1e-3)
    assert prediction.top({1: 2.0, 2: 1.5, 4: math.inf}) == 2, "a neighbour that died"
    assert prediction.top({2: 1.5, 4: 1.6}) == 2, "the end of what was tried"


def test_the_search_for_a_learning_rate_goes_on_until_the_best_is_inside_and_tries_nothing_twice():
    optimum, asked = {4: 0.25, 8: 0.5, 16: 1, 32: 8, 64: 2, 128: 4}, []

    def try_out(those):
        asked.extend(those)
        return {(b, f): abs(math.log2(f / optimum[b])) for b, f in those}
    tried = prediction.tune(try_out)
    assert {b: min(own, key=own.get) for b, own in tried.items()} == optimum and len(asked) == len(set(asked))
    assert all(min(own) < optimum[b] < max(own) for b, own in tried.items())
    assert max(map(max, prediction.tune(lambda those: {(b, f): -f for b, f in those}).values())) == prediction.FARTHEST


def test_predictions_are_exact_where_runs_follow_the_theory():
    """Runs that need S + E/B steps to each loss: by the true noise scale E/S all predictions are right, by half of it none."""
    def steps(batch, done):
        return done * (1 + 40 / batch)
    found = []
    for source, batch, share in itertools.product((8, 16), (4, 8, 16, 32, 64), (0.3, 0.8)):
        if batch != source:
            found.append(dict(length=1.0, loss=2.0, source=source, batch=batch, seed=0, key="gns/total_adam",
                              phases=[(steps(source, 100 * share), source, 40.0)], taken=steps(batch, 100 * share)))
    result = prediction.table(found)["gns/total_adam"]
    assert result["x4"]["worst_error"] == pytest.approx(0, abs=1e-12)
    assert result["best_factor"] == pytest.approx(1, rel=0.02)
    halved = [dict(p, phases=[(s, b, n / 2) for s, b, n in p["phases"]]) for p in found]
    result = prediction.table(halved)["gns/total_adam"]
    assert result["x2"]["median_error"] > 0.05 and result["best_factor"] == pytest.approx(2, rel=0.02)
    assert result["with_best_factor"]["x2"]["worst_error"] < 0.02


# -- step_cost.py

@pytest.mark.slow
def test_the_step_cost_experiment_compares_predicted_and_taken_times(tmp_path, monkeypatch, tiny_data, capsys):
    for name, value in dict(ACCUMULATIONS=(1, 2), STEPS=16, EVERY=4, SECONDS=0).items():
        monkeypatch.setattr(step_cost, name, value)
    # all in this process
    monkeypatch.setattr(step_cost.hosts, "train", lambda name, settings: train.main(as_args(settings)))
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    monkeypatch.setattr(step_cost.tools, "process", lambda command, name, env: sweep.main(command[2:]))
    monkeypatch.setattr(trial, "run", lambda spec: {"status": "ok", **trial.measure(spec)})
    shape = ["--n_layer=1", "--n_embd=16", "--n_head=1", f"--dataset={tiny_data}", "--dtype=float32"]
    assert step_cost.main(["--machines=one", f"--out={tmp_path}", f"--results={tmp_path}", *shape]) == 0
    found = json.loads((tmp_path / "step_cost.json").read_text())
    own = found["machines"]["one"]
    assert "--machines=one" in found["command"] and str(tmp_path) not in found["command"]
    assert [row["batch"] for row in own["rows"]] == [8, 16] and own["ratio_t0_t1"] > 0
    swept = json.loads((tmp_path / "one-throughput" / "sweep" / "throughput" / "sweep.json").read_text())
    for row, trial_row in zip(own["rows"], swept["rows"]):
        expected = own["cost"]["step_time/fixed_ms"] + row["batch"] * own["cost"]["step_time/per_sequence_ms"]
        assert row["predicted_ms"] == pytest.approx(expected) and row["ratio"] == pytest.approx(expected / row["taken_ms"])
        assert row["throughput_ms"] == trial_row["micro_step_ms"] * trial_row["accum"] + trial_row["update_ms"] > 0
        assert row["ratio_throughput"] == pytest.approx(row["predicted_ms"] / row["throughput_ms"])
    assert [row["accum"] for row in swept["rows"]] == [1, 2] and swept["settings"]["n_embd"] == 16
    said = capsys.readouterr().out
    assert "A step's fixed cost" in said and "Against what sweep.py throughput measures" in said
    with pytest.raises(SystemExit, match="expected some of one, two"):
        step_cost.main(["--machines=three", f"--results={tmp_path}"])
