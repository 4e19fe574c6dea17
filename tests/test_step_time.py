"""What a step costs, by a clock that the tests turn."""

import json

import pytest
import torch

import train
from configurator import Config
from rightbatch import gns
from rightbatch.decision import Cost
from rightbatch.step_time import REHEARSALS, REHEARSE_EVERY, WARM_UP, StepTime, row, slowest, split
from tests.helpers import TINY
from trainer import checkpoint, log
from trainer.optimizer import Optimizer
from trainer.step import TrainingStep


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(train.Run, "draw", lambda run: "")


@pytest.fixture
def turned(monkeypatch):
    """A clock on which a micro-step of train.py takes 1 s and an update 3 s."""
    clock = [0.0]

    def after(cls, name, seconds):
        real = getattr(cls, name)

        def slow(self, *args):
            result = real(self, *args)
            clock[0] += seconds
            return result
        monkeypatch.setattr(cls, name, slow)
    after(Optimizer, "backward", 1.0)
    after(Optimizer, "clip_and_step", 3.0)
    monkeypatch.setattr(StepTime, "now", lambda self: clock[0])
    return clock


def steps_of(out):
    return [r for r in log.read(out) if "train/loss" in r]


def test_micro_steps_are_per_sequence_and_the_update_is_fixed(tmp_path, tiny_args, turned):
    assert train.main(tiny_args(out_dir=tmp_path)) == 0
    last, early = steps_of(tmp_path)[-1], steps_of(tmp_path)[WARM_UP - 1]
    for end in ("", "_low", "_high"):
        assert last["step_time/fixed_ms" + end] == pytest.approx(3000)
        assert last["step_time/per_sequence_ms" + end] == pytest.approx(1000 / TINY["micro_batch_size"])
    assert "step_time/fixed_ms" not in early, "a cold start is not counted"


def test_the_cost_in_the_run_folder_is_the_slowest_processes(tmp_path, tiny_args, turned, monkeypatch):
    slow = Cost((7.0, 6.0, 8.0), (2.0, 1.0, 3.0))
    monkeypatch.setattr(TrainingStep, "cost", lambda self: slow)
    assert train.main(tiny_args(out_dir=tmp_path)) == 0
    assert json.loads((tmp_path / "step_time.json").read_text()) == row(slow)


@pytest.mark.parametrize("micro_steps, update, several, tail, expected", [
    ([1.0, 1.2], 0.5, False, None, (1.1, 0.5)),  # one process: nothing communicates
    ([1.0, 1.0, 1.4], 0.5, True, None, (1.0, 0.9)),  # what the last micro-step takes longer
    ([1.4], 0.5, True, 0.3, (1.1, 0.8)),  # one micro-step under DDP: from the last gradient on
    ([1.4], 0.5, True, None, (1.4, 0.5)),  # under FSDP it cannot be told
])
def test_what_communicates_is_fixed_cost(micro_steps, update, several, tail, expected):
    assert split(micro_steps, update, several, tail) == pytest.approx(expected)


def test_an_only_micro_step_is_as_long_as_in_its_rehearsal_and_the_rest_is_fixed():
    """0.2 s prepared, 1.5 s to the last gradient where 1.0 s in a rehearsal, 0.3 s until all have arrived, 0.5 s update."""
    timer = StepTime("cpu", 4, 10**9, world=2)
    real, rehearsal = ([0.0, 0.2, 2.0, 2.5], 1.7), ([5.0, 6.0], None)
    for moments in [real] * (WARM_UP + 8):
        timer.absorb(moments, 100)
    assert timer.estimate().per_sequence[0] == pytest.approx(1.5 / 4), "without one: up to the last gradient"
    timer = StepTime("cpu", 4, 10**9, world=2)
    for moments in [real] * WARM_UP + [rehearsal] * REHEARSALS + [real] * 20:
        timer.absorb(moments, 100)
    assert timer.estimate().per_sequence == pytest.approx((0.25,) * 3) and timer.estimate().fixed[0] == pytest.approx(1.5)


def test_when_an_only_micro_step_is_rehearsed_and_that_its_second_time_counts(monkeypatch):
    timer, clock, passes = StepTime("cpu", 4, 1000, world=2), [0.0], []
    monkeypatch.setattr(StepTime, "now", lambda self: clock[0])
    assert [i for i in range(1100) if timer.wants_rehearsal()] == [
        *range(WARM_UP, WARM_UP + REHEARSALS), REHEARSE_EVERY - 1, 2 * REHEARSE_EVERY - 1]

    def micro_step():
        passes.append(clock[0])
        clock[0] += 5.0 if len(passes) == 1 else 1.0  # cold, then warm
    timer.begin()
    timer.mark()
    timer.rehearse(micro_step)
    timer.mark()
    assert timer.end() == ([5.0, 6.0], None) and len(passes) == 2
    timer.begin()
    timer.mark()
    timer.mark()
    assert timer.end() == ([6.0] * 4, None), "the next step is an ordinary one"


def made_up(seed, steps=60, several=False):
    """Steps of 1 to 4 micro-batches of 8, 20 ms a sequence and 50 ms fixed, each with its own error."""
    noise = torch.Generator().manual_seed(seed)
    timer = StepTime("cpu", 8, 10**9)
    for i in range(WARM_UP + steps):
        errors = (0.01 * torch.randn(i % 4 + 2, generator=noise)).tolist()
        marks = [0.0]
        for error in errors[1:]:
            marks.append(marks[-1] + 0.16 + error)
        timer.absorb(([0.0, *marks, marks[-1] + 0.05 + errors[0]], None), 100)
    return timer.estimate()


def test_the_intervals_cover_the_true_cost():
    inside = {"fixed": 0, "per_sequence": 0}
    for seed in range(200):
        for name, truth in (("fixed", 0.05), ("per_sequence", 0.02)):
            _, low, high = getattr(made_up(seed), name)
            inside[name] += low <= truth <= high
    assert all(count >= 180 for count in inside.values()), inside


def test_under_ddp_the_moment_of_the_last_gradient_is_seen_and_one_process_has_no_hook():
    weight = torch.nn.Parameter(torch.ones(2))
    timer = StepTime("cpu", 8, 1000, world=2, last_ready=weight)
    timer.begin()
    timer.mark()
    weight.sum().backward()
    timer.mark()
    marks, ready = timer.end()
    assert len(marks) == 4 and marks[1] <= ready <= marks[2]
    alone = StepTime("cpu", 8, 1000, world=1, last_ready=torch.nn.Parameter(torch.ones(2)))
    alone.begin()
    assert alone.end()[1] is None and StepTime("mps", 8, 1000).end() is None


def test_of_several_processes_the_slowest_ones_estimate_is_taken():
    fast, slow = (Cost((f, f, f), (s, s, s)) for f, s in ((0.9, 0.01), (0.2, 0.02)))
    assert slowest([fast, slow]) is slow and slowest([fast, None]) is None


def test_a_new_kind_of_step_warms_up_by_itself():
    timer = StepTime("cpu", 1, 1000)
    for kind, seconds in [("norm", 1.0)] * 8 + [("exact", 99.0)] * WARM_UP:
        timer.absorb(([0.0, 0.25, seconds, seconds + 0.5], None), 10, kind)
    assert timer.estimate().per_sequence[0] == pytest.approx(0.75) and timer.estimate().fixed[0] == pytest.approx(0.75)


def test_a_state_from_another_setting_is_not_taken_over():
    timer, same, other = StepTime("cpu", 8, 1000), StepTime("cpu", 8, 1000), StepTime("cpu", 16, 1000)
    for _ in range(WARM_UP + 4):
        timer.absorb(([0.0, 0.0, 1.0, 1.5], None), 10)
    for copy in (same, other):
        copy.load_state_dict(timer.state_dict())
    assert same.estimate() == timer.estimate() and other.estimate() is None
    assert row(None) == {} and timer.averages.early == gns.EARLY


TIMED = dict(batch_schedule="gns", gns="exact", batch_objective="time", batch_size_start=4, batch_size=64, max_tokens=9600,
             batch_gns_dwell_tokens=600, gns_half_life_tokens=2000, checkpoint_tokens=0)


def test_a_controller_by_time_saves_each_move_so_that_a_resumed_run_keeps_it(tmp_path, tiny_args, turned, monkeypatch):
    saves, real = [], checkpoint.save

    def save(out, state, *more):
        saves.append(state["state"]["step"])
        real(out, state, *more)
    monkeypatch.setattr(checkpoint, "save", save)
    assert train.main(tiny_args(out_dir=tmp_path, **TIMED)) == 0
    rows = log.read(tmp_path)
    moves = [r for r in rows if " -> " in r.get("event", "")]
    assert moves and "fastest batch" in moves[0]["event"] and "3e+03 ms a step and 250 ms a sequence" in moves[0]["event"]
    assert saves == [0, *(r["step"] for r in moves), rows[-1]["step"]]
    assert Config(**{**TINY, **TIMED}).batch_objective == "time"


def test_a_checkpoint_that_is_refused_at_a_move_is_said_and_the_next_step_is_saved(tmp_path, tiny_args, turned, monkeypatch):
    looks, saves, real = [], [], checkpoint.save

    def save(out, state, *more):
        saves.append(state["state"]["step"])
        real(out, state, *more)
    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr("trainer.run.all_finite", lambda whole: looks.append(whole) or len(looks) != 2)  # the first is step 0
    assert train.main(tiny_args(out_dir=tmp_path, **TIMED)) == 0
    events = [(r["step"], r["event"]) for r in log.read(tmp_path) if "event" in r]
    move = next(step for step, text in events if " -> " in text)
    assert saves[:2] == [0, move + 1]
    assert [(step, text.split(":")[0]) for step, text in events if "no checkpoint" in text] == [
        (move, f"no checkpoint at step {move}")]
