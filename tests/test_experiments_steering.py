"""steering.py: arithmetic on runs that follow the theory, and the experiment on a model of seconds."""

import json
import math
import os
import sys

import pytest

from tests.helpers import ROOT

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import common  # noqa: E402
import hosts  # noqa: E402
import prediction  # noqa: E402
import priced  # noqa: E402
import steering  # noqa: E402

import train  # noqa: E402
from configurator import Config  # noqa: E402
from trainer import log  # noqa: E402
from trainer.step import TrainingStep  # noqa: E402

NOISE, BLOCK = 50.0, 128


def loss_after(examples, batch):
    """Of a run that follows the theory: what counts is examples / (1 + batch / N)."""
    return 4 - 0.3 * math.log(examples / (1 + batch / NOISE))


def ends_of(batch, seeds=3):
    return [(n, [loss_after(n / BLOCK, batch)] * seeds) for n in (1e6, 2e6, 4e6, 8e6, 16e6)]


@pytest.fixture
def ends():
    return {b: ends_of(b) for b in steering.CONSTANTS}


@pytest.mark.parametrize("ratio", [1, 16, 64])
def test_the_best_constant_batch_of_runs_that_follow_the_theory_is_the_formulas(ends, ratio):
    times = {b: 0.001 * (ratio + b) for b in steering.CONSTANTS}
    loss = loss_after(3e6 / BLOCK, 8)
    exact = 3e6 / BLOCK / (1 + 8 / NOISE)  # examples at a batch of nothing
    own = {b: exact * (1 + b / NOISE) / b * times[b] for b in steering.CONSTANTS}
    steered = [dict(loss=loss, seconds=2 * min(own.values()))] * 3
    found = steering.compared(steered, ends, times, Config())
    assert found["best"] == min(steering.CONSTANTS, key=lambda b: abs(math.log(b / math.sqrt(NOISE * ratio))))
    for b in steering.CONSTANTS:
        assert found["seconds"][str(b)] == pytest.approx(own[b], rel=0.01)
    assert found["regret"]["gns"] == pytest.approx(1.0, rel=0.02)
    assert found["regret_of_seeds"] == pytest.approx([1.0] * 3, rel=0.02)


def test_a_loss_that_no_constant_batch_ended_at_is_not_compared(ends):
    found = steering.compared([dict(loss=0.1, seconds=1.0)], ends, dict.fromkeys(steering.CONSTANTS, 1.0), Config())
    assert found["best"] is None and "regret" not in found


def test_a_schedules_seconds_are_those_of_its_own_steps():
    times = {b: 0.1 + 0.01 * b for b in steering.CONSTANTS}
    tokens, config = 2e6, Config(max_tokens=2_000_000)
    ends = [(n, [5 - n / 1e6]) for n in (1e6, 2e6, 3e6)]
    seconds = steering.seconds_to(3.0, "linear", ends, times, config)
    sequences = tokens / BLOCK
    # from 8 to 64 linear in tokens: steps are the integral of 1 / batch
    steps = sequences * math.log(64 / 8) / (64 - 8)
    assert seconds == pytest.approx(0.1 * steps + 0.01 * sequences, rel=0.03)


def test_the_walk_of_a_log_counts_the_steps_of_each_batch():
    rows = [dict(step=10, batch_size=8), dict(step=20, batch_size=8), dict(step=30, batch_size=16)]
    assert steering.walk_of(rows) == [[8, 20], [16, 10]]


def test_a_given_cost_of_a_step_decides_like_a_measured_one(tmp_path, tiny_args, monkeypatch):
    monkeypatch.setattr(TrainingStep, "cost", TrainingStep.cost)  # as it was, afterwards
    monkeypatch.setenv("STEP_COST", "0.4,0.01")
    assert priced.main(tiny_args(out_dir=tmp_path / "run", batch_schedule="gns", batch_size_start=4, batch_size=64, gns="exact",
                                 max_tokens=8000, gns_half_life_tokens=2000, log_interval=2)) == 0
    said = [r["event"] for r in log.read(tmp_path / "run") if "fastest batch" in r.get("event", "")]
    assert said and all("400 ms a step and 10 ms a sequence" in words for words in said)


def written(folder, **settings):
    """The numbers of prediction.py that both experiments read; learning rate factors as tuned."""
    own = {**common.TINY, **prediction.TINY, **settings}
    ends = {b: [(100 * n, [5 - 0.5 * math.log(n)]) for n in (5, 25, 400)] for b in (8, 16, 32, 64)}
    with open(folder / "prediction.json", "w") as f:
        json.dump({"tokens_and_final_losses": ends, "learning_rate_factors": {"16": 1.0}, "settings": own}, f)


def test_the_steering_experiment_runs_reports_and_is_not_run_twice(tiny, tiny_data, tmp_path, monkeypatch):
    started = []

    def on_this_process(name, settings):
        started.append(settings["out_dir"])
        assert train.main([f"--{k}={v}" for k, v in settings.items()]) == 0
    own = dict(CONSTANTS=(8, 16, 32), LARGEST=32, GNS={**steering.GNS, "batch_size": 32}, STEERED={"one": (1.0,)},
               STEPS=8, EVERY=2, SEQUENCES=80, RATIOS=(4,), PRICED_LENGTHS=(1.0,), LENGTHS=(1.0, 1.5, 2.0),
               LONG=(1.0, 1.5, 2.0), FIXED={"linear": dict(batch_schedule="linear", batch_size_start=8, batch_size=16)})
    for name, value in own.items():
        monkeypatch.setattr(steering, name, value)
    monkeypatch.setattr(hosts, "train", on_this_process)
    monkeypatch.setattr(prediction, "taken", lambda ends, loss: ends[1][0])  # the losses of so few steps tell nothing
    written(tmp_path, dataset=str(tiny_data))
    arguments = ("--seeds", "1", "--machines=one", "--micro_batch_size=8", "--batch_size_start=8", "--log_interval=2")
    result = tiny(steering, *arguments)
    own = result["machines"]["one"]
    assert set(own["step_seconds"]) == {"8", "16", "32"} and all(s > 0 for s in own["step_seconds"].values())
    (compared,) = own["losses"].values()
    assert {"gns", "linear", "8", "16", "32"} <= set(compared["regret"]) and compared["regret"][str(compared["best"])] == 0
    assert own["check"]["seconds"] > 0 and own["check"]["priced"] > 0
    assert sum(steps for _, steps in own["runs"]["1"][0]["walk"]) == own["runs"]["1"][0]["steps"]
    ran = len(started), len(tiny.runs)
    tiny(steering, *arguments)
    assert (len(started), len(tiny.runs)) == ran, "nothing is run again"
    with pytest.raises(SystemExit, match="n_embd=32"):  # other models have other losses
        tiny(steering, *arguments, "--n_embd=32")


def test_a_priced_run_pays_for_tracking():
    assert steering.priced_seconds([[8, 400], [32, 4]], 3) == pytest.approx(3 * 404 + (8 * 400 + 32 * 4) * steering.TRACKED)


def test_one_bad_seed_does_not_make_a_batch_look_bad_and_a_lone_best_is_said(ends):
    times = {b: 0.001 * (16 + b) for b in steering.CONSTANTS}
    loss = loss_after(3e6 / BLOCK, 8)
    steered = [dict(loss=loss, seconds=1.0)] * 3
    before = steering.compared(steered, ends, times, Config())
    ends[32] = [(n, [a, b, c + 1]) for n, (a, b, c) in ends[32]]
    found = steering.compared(steered, ends, times, Config())
    assert found["best"] == before["best"] == 32 and found["seconds"]["32"] == pytest.approx(before["seconds"]["32"])
    assert found["bracketed"]
    ends[64] = [(n, [9.0 - i] * 3) for i, (n, _) in enumerate(ends[64])]  # never came so far
    assert not steering.compared(steered, ends, times, Config())["bracketed"]
