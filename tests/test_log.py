import json
import re
import shutil

import pytest
import torch

import plot
import train
import whatif
from configurator import ConfigError
from tests.helpers import TINY
from trainer import log, start


def test_every_line_is_json_also_for_values_that_are_not_finite(tmp_path, tiny_args):
    config = start.parse(tiny_args(out_dir=tmp_path))
    run_log = log.RunLog(config)
    run_log.write({"step": 1, "tokens": 2, "a": float("nan"), "b": float("inf"), "c": 1.5})
    run_log.close()
    line = open(tmp_path / "log.jsonl").read()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1, "tokens": 2, "a": None, "b": None, "c": 1.5, "row": 0}


def test_lines_after_the_checkpoint_are_dropped_on_resume_and_others_kept(tmp_path, tiny_args):
    config = start.parse(tiny_args(out_dir=tmp_path))
    first = log.RunLog(config)
    for step in range(5):
        first.write({"step": step, "tokens": step})
        if step == 2:
            known = first.state()
    first.close()
    second = log.RunLog(config, 2, known)
    assert second.news is None
    second.write({"step": 3, "tokens": 33})
    second.close()
    assert [(r["step"], r["tokens"]) for r in log.read(tmp_path)] == [(0, 0), (1, 1), (2, 2), (3, 33)]


def test_rows_that_go_to_another_file_right_after_a_resume_follow_from_those_before(tmp_path, tiny_args):
    config, path = start.parse(tiny_args(out_dir=tmp_path)), tmp_path / "log.jsonl"
    first = log.RunLog(config)
    for step in range(5):
        first.write({"step": step, "tokens": 10 * step})
    known = first.state()
    first.close()
    rows = path.read_bytes()
    resumed = log.RunLog(config, 4, known)
    path.unlink()
    resumed.write({"step": 5, "tokens": 50})
    resumed.close()
    path.write_bytes(rows + (tmp_path / "log.1.jsonl").read_bytes())  # as its words say
    assert [row["tokens"] for row in log.read(tmp_path)] == [0, 10, 20, 30, 40, 40, 50]


@pytest.fixture(scope="module")
def a_run(tmp_path_factory, tiny_data):
    out = tmp_path_factory.mktemp("run")
    train.main([f"--{k}={v}" for k, v in {**TINY, "dataset": tiny_data, "out_dir": out}.items()])
    return out


CHANGES = {
    "missing": lambda lines: lines[:7] + lines[12:], "order": lambda lines: lines[:7] + lines[7:12][::-1] + lines[12:],
    "first": lambda lines: lines[1:], "twice": lambda lines: lines[:9] + lines[8:], "end": lambda lines: lines[:-3],
    "value": lambda lines: [re.sub(r'"train/loss": \d', '"train/loss": 9', line) for line in lines]}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("numbered", [True, False])
def test_a_log_that_lacks_rows_or_has_others_is_refused(a_run, tmp_path, capsys, how, checkpoint, numbered):
    out = shutil.copytree(a_run, tmp_path / "run", ignore=shutil.ignore_patterns(*[] if checkpoint else ["ckpt*"]))
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    if not numbered:  # as older versions wrote it
        lines = [re.sub(r', "row": \d+', "", line) for line in lines]
    (out / "log.jsonl").write_text("".join(CHANGES[how](lines)))
    if checkpoint or how == "order" or numbered and how in ("missing", "first", "twice"):
        for command in (whatif, plot):
            with pytest.raises(SystemExit) as e:
                command.main([str(out)])
            said = capsys.readouterr().err
            assert e.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1 and str(out / "log.jsonl") in said
            assert "does not follow from the line before" in said or "is not the log that" in said
    else:  # nobody can know
        log.read(out)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_log_with_values_that_are_no_numbers_is_refused(a_run, tmp_path, value):
    text = (a_run / "log.jsonl").read_text()
    (tmp_path / "log.jsonl").write_text(re.sub(r'"gns/norm": [\d.]+', f'"gns/norm": {value}', text))
    with pytest.raises(ConfigError, match=r"line \d+ is not a row of a run's log"):
        log.read(tmp_path)


def test_a_log_that_a_damaged_checkpoint_does_not_know_is_read(a_run, tmp_path):
    out = shutil.copytree(a_run, tmp_path / "run")
    state = torch.load(out / "ckpt.pt", weights_only=True)
    state["log"]["crc"] += 1
    torch.save(state, out / "ckpt.pt")  # its own checksum is not there
    assert log.read(out) == log.read(a_run)


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
