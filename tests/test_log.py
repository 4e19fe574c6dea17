import glob
import json
import os
import struct

import pytest

import train
from tests.conftest import run_script
from trainer import log


def read_wandb(path):
    """The history of an offline run, with wandb's own record format: LevelDB log framing behind a 7-byte header."""
    from wandb.proto import wandb_internal_pb2
    data = open(path, "rb").read()
    position, joined, history = 7, b"", []
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack("<IHB", data[position:position + 7])
        joined += data[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(joined)
            joined = b""
            if record.HasField("history"):
                history.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    return history


def test_wandb_without_a_key_goes_offline_says_so_and_holds_the_whole_history(tmp_path, tiny_args):
    out = tmp_path / "run"
    env = {"HOME": str(tmp_path), "WANDB_API_KEY": "", "NETRC": str(tmp_path / "none")}
    result = run_script(*tiny_args(out_dir=out, wandb_log=True, max_tokens=1600), env=env)
    assert result.returncode == 0, result.stderr
    said = [line for line in result.stdout.splitlines() if line.startswith("wandb:")]
    assert len(said) == 1 and "offline" in said[0]
    files = glob.glob(str(out / "wandb" / "offline-run-*" / "run-*.wandb"))
    assert len(files) == 1
    history = [{k: v for k, v in h.items() if not k.startswith("_")} for h in read_wandb(files[0])]
    rows = [{k: v for k, v in r.items() if v is not None} for r in log.read(out)]
    assert len(rows) > 5 and history == rows


def test_wandb_uses_a_key_only_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not log.wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    os.chmod(tmp_path / "netrc", 0o600)
    assert log.wandb_key()
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert log.wandb_key()


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
