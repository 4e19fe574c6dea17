import json

import pytest

import train
from trainer import log


def test_every_line_is_json_also_for_values_that_are_not_finite(tmp_path, tiny_args):
    config = train.configurator.parse(tiny_args(out_dir=tmp_path))
    run_log = log.RunLog(config)
    run_log.write({"step": 1, "tokens": 2, "a": float("nan"), "b": float("inf"), "c": 1.5})
    run_log.close()
    line = open(tmp_path / "log.jsonl").read()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "tokens": 2, "a": None, "b": None, "c": 1.5}


def test_lines_after_the_checkpoint_are_dropped_on_resume_and_others_kept(tmp_path, tiny_args):
    config = train.configurator.parse(tiny_args(out_dir=tmp_path))
    first = log.RunLog(config)
    for step in range(5):
        first.write({"step": step, "tokens": step})
        if step == 2:
            known = first.state()
    first.close()
    second = log.RunLog(config, resume_step=2, known=known)
    assert second.news is None
    second.write({"step": 3, "tokens": 33})
    second.close()
    assert [(r["step"], r["tokens"]) for r in log.read(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 33)]


@pytest.mark.parametrize("n, text", [(0, "0"), (999, "999"), (1234, "1.23k"), (3_000_000, "3M"), (2_219_950_080, "2.22B"),
                                     (0.5, "0.5")])
def test_counts_are_short(n, text):
    assert log.count(n) == text


def test_durations_are_readable():
    assert [log.duration(s) for s in (0, 61, 3600, 7325)] == ["0:00", "1:01", "1h00", "2h02"]


def test_the_clock_stands_still_in_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(log.time, "perf_counter", lambda: now[0])
    clock = log.Clock()
    now[0] += 5
    with clock.paused():
        now[0] += 1000
        assert clock.seconds() == 5
    now[0] += 2
    assert clock.seconds() == 7
