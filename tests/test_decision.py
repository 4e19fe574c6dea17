"""One decision: the same noise scale and the same cost of a step give the same right batch, whoever asks."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gns
from configurator import Config
from rightbatch.decision import Cost, Decision, Noise, mean_noise, right_batch
from schedule import Controller
from tests.helpers import BLOCK, write_run
from trainer import advice, predict, wandb_log
from trainer.run import Run

NUMBERS = dict(N=st.floats(0.01, 1e5), t0=st.floats(1e-4, 10.0), t1=st.floats(1e-5, 1.0),
               quantum=st.sampled_from([1, 8, 12, 64]))


def known(N, t0, t1):
    """A noise scale and a cost with intervals, as write_run has them."""
    return Noise(N, 0.8 * N, 1.3 * N), Cost((t0, 0.9 * t0, 1.1 * t0), (t1, 0.9 * t1, 1.1 * t1))


def on_the_terminal(noise, cost, batch, quantum):
    """The right batch in the line of a logged step."""
    said = []
    row = {"step": 10, "tokens": 10 * batch * BLOCK, "train/loss": 2.0, "batch_size": batch, "accum": batch // quantum,
           "seconds": 1.0, "tok_per_sec": 1.0, "mfu": 0.5, "bad_steps": 0}
    run = SimpleNamespace(row=lambda *known: row, opened=SimpleNamespace(tokens=0, seconds=0.0), end=10**6, config=Config(),
                          out=SimpleNamespace(write=lambda row: None, say=said.append, columns=None),
                          step=SimpleNamespace(tokens_to_factor=lambda: None), look_for_blow_up=lambda loss: None)
    Run.show(run, noise, cost)
    return int(said[0].split("| right ")[1].split()[0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**NUMBERS)
def test_controller_terminal_closing_words_whatif_wandb_and_watch_give_the_same_batch(tmp_path, N, t0, t1, quantum):
    noise, cost = known(N, t0, t1)
    right = right_batch(noise, cost, quantum)
    folder = write_run(tmp_path, [2 * quantum] * 20, N, t0, t1, cost=True, micro_batch_size=quantum)
    result = predict.of_run(folder)[0]
    controller = Controller(Config(batch_schedule="gns", batch_objective="time"), quantum)
    balanced = Controller(Config(batch_schedule="gns", batch_objective="balance"), quantum)
    watched = Decision(noise, cost, quantum, 2 * quantum, [])
    for batch in (controller.aim(noise, cost).batch, on_the_terminal(noise, cost, 2 * quantum, quantum), watched.right["time"],
                  watched.row()["right_batch/time"], result["right_batch"]["time"], result["best_constant"]["batch"],
                  wandb_log.summary(folder)["right_batch_for_time"]):
        assert batch == right.time.batch
    assert [s["batch"] for s in result["best_schedule"]["stages"]] == [right.time.batch], "one noise scale is one stage"
    assert f"Right batch for time: {right.time.batch}" in " ".join(advice.right_batch(folder))
    assert watched.brief().startswith(f"for time {right.time.batch} ")
    for batch in (balanced.aim(noise, None).batch, watched.right["balance"], result["right_batch"]["balance"]):
        assert batch == right.balance.batch
    json.dumps(result)


@settings(max_examples=300, deadline=None)
@given(**NUMBERS, more=st.lists(st.tuples(st.floats(1, 100), st.integers(1, 500), st.floats(0.01, 1e4)), max_size=4))
def test_no_other_batch_in_whole_quanta_takes_less_time_or_lies_nearer_to_the_balance(N, t0, t1, quantum, more):
    cost = known(N, t0, t1)[1]
    phases = [predict.Phase(steps, batch, Noise(n, 0.8 * n, 1.3 * n), 1.0) for steps, batch, n in [(10.0, 64, N), *more]]
    mean = mean_noise(phases)
    right = right_batch(mean, cost, quantum)

    def seconds(batch):
        return gns.equivalent_steps(predict.at(phases), batch) * cost.step(batch)[0]
    for batch in (right.time.batch - quantum, right.time.batch + quantum, quantum):
        assert batch < quantum or seconds(right.time.batch) <= seconds(batch) * (1 + 1e-8)
    for batch in (right.balance.batch - quantum, right.balance.batch + quantum):
        assert batch < quantum or abs(math.log(right.balance.batch / mean.value)) <= abs(math.log(batch / mean.value)) + 1e-8
    for aim in (right.time, right.balance):
        assert aim.batch % quantum == 0 and quantum <= aim.low <= aim.batch <= aim.high
        assert aim.formula[1] <= aim.formula[0] <= aim.formula[2]
    assert right.tokens.batch == quantum


@given(**NUMBERS)
def test_a_single_noise_scale_is_a_run_of_one_phase(N, t0, t1, quantum):
    noise, cost = known(N, t0, t1)
    mean = mean_noise([predict.Phase(3.0, 40.0, noise, 1.0)])
    assert mean.triple == pytest.approx(noise.triple)
    assert right_batch(mean, cost, quantum).numbers() == pytest.approx(right_batch(noise, cost, quantum).numbers())


@pytest.mark.parametrize("N, batch", [(31, 32), (108, 56), (20, 24), (1, 8), (768 / 25, 24)])
def test_of_two_neighbours_the_one_with_less_predicted_time_is_right_not_the_nearer(N, batch):
    """50 ms a step and 2 ms a sequence: the formula says 27.8 for 31 and 52.0 for 108; at 768/25 both take the same."""
    assert right_batch(Noise(N, N, N), Cost((0.05,) * 3, (0.002,) * 3), 8).time.batch == batch


def test_without_a_cost_tokens_and_balance_are_known():
    right = right_batch(Noise(50.0, 40.0, 60.0), None, 8)
    assert right.time is None and right.numbers()["time"] is None and right.numbers()["tokens"] == 8
    assert (right.balance.batch, right.balance.low, right.balance.high) == (48, 40, 64)
