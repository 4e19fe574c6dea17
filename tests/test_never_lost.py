"""What keeps a run whole, mechanism by mechanism. tests/attack/ has the same from outside."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import configurator
import plot
import sample
import schedule
import train
import whatif
from configurator import Config, ConfigError
from plots import compare
from sweeps import common, grid, jobs
from system import files
from tests.helpers import ROOT, assert_same_run, run_script, tree, write_dataset
from trainer import batches, checkpoint, log, start
from trainer.run import Run, all_finite


def step_of(out):
    return checkpoint.load(str(out))["state"]["step"]


# -- one writer

def test_a_lock_names_its_holder_ends_with_it_and_leaves_nothing(tmp_path):
    folder = tmp_path / "a" / "b"
    with files.only_writer(folder, ConfigError):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
            with files.only_writer(folder, ConfigError):
                pass
        assert os.listdir(folder) == ["lock"]
    assert not (tmp_path / "a").exists()


def test_a_lock_outlives_neither_a_kill_nor_a_left_over_file(tmp_path):
    code = ("import os, signal, sys; sys.path.insert(0, sys.argv[1]); from system import files\n"
            "with files.only_writer(sys.argv[2], OSError): os.kill(os.getpid(), signal.SIGKILL)")
    assert subprocess.run([sys.executable, "-c", code, ROOT, str(tmp_path)]).returncode == -signal.SIGKILL
    assert (tmp_path / "lock").exists()
    with files.only_writer(tmp_path, ConfigError):
        pass


def test_a_run_beside_a_living_one_is_refused_also_with_resume_auto(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=640))
    capsys.readouterr()
    with files.only_writer(tmp_path / "run", ConfigError), pytest.raises(SystemExit):
        train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=640, resume="auto"))
    assert "in use by process" in capsys.readouterr().err


# -- checkpoints

def save_three(folder, keep):
    for step in (1, 2, 3):
        checkpoint.save(str(folder), {"state": {"step": step}}, keep, best=step == 1)


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.mark.parametrize("keep, kept", [(1, []), (2, ["ckpt.1.pt"]), (3, ["ckpt.1.pt", "ckpt.2.pt"])])
def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path, keep, kept):
    save_three(tmp_path, 3)
    save_three(tmp_path, keep)
    assert sorted(os.listdir(tmp_path)) == sorted([*kept, "ckpt.best.pt", "ckpt.pt"])
    found = [checkpoint.read(tmp_path / name, "cpu", False)["state"]["step"] for name in ("ckpt.pt", *kept, "ckpt.best.pt")]
    assert found == [*range(3, 3 - keep, -1), 1]


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_says_so(tmp_path, capsys):
    save_three(tmp_path, 2)
    damage(tmp_path / "ckpt.pt")
    state = checkpoint.load(str(tmp_path), mmap=True)
    assert state["state"]["step"] == 2 and "its checksum does not match" in capsys.readouterr().err
    checkpoint.promote(str(tmp_path), state["path"])
    assert step_of(tmp_path) == 2 and capsys.readouterr().err == "" and (tmp_path / "ckpt.pt.damaged").exists()
    damage(tmp_path / "ckpt.pt")
    (tmp_path / "ckpt.1.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match="ckpt.best.pt has the weights"):
        checkpoint.load(str(tmp_path))


def test_every_flipped_bit_is_found(tmp_path):
    save_three(tmp_path, 1)
    path = tmp_path / "ckpt.pt"
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        path.unlink()
        path.write_bytes(data)
        checkpoint.summed.cache_clear()
        with pytest.raises(ConfigError):
            checkpoint.load(str(tmp_path))


def test_a_full_disk_names_the_file_and_leaves_no_part_of_it(tmp_path, monkeypatch):
    save_three(tmp_path, 1)

    def full(self, data):
        self.error = OSError(28, "No space left on device")
        raise self.error
    monkeypatch.setattr(files.Output, "write", full)
    with pytest.raises(OSError, match="No space left on device.*ckpt.pt'"):
        save_three(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["ckpt.best.pt", "ckpt.pt"]


def test_the_best_checkpoint_is_of_the_lowest_validation_loss(tmp_path, tiny_args, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 4.0, 2.2, 9.0, 9.0])
    monkeypatch.setattr(train, "validation_loss", lambda *_: next(losses))
    train.main(tiny_args(out_dir=tmp_path, eval_tokens=800, checkpoint_tokens=800))
    best = checkpoint.read(tmp_path / "ckpt.best.pt", "cpu", False)
    row = next(r for r in log.read(tmp_path) if r.get("val/loss") == 2.0)
    assert best["state"]["step"] == row["step"] < step_of(tmp_path) and best["state"]["best_saved_loss"] == 2.0


# -- divergence

def test_what_is_not_finite_is_seen_in_weights_and_moments():
    state = {"exp_avg": torch.zeros(3), "step": torch.tensor(1.0)}
    whole = {"model": {"w": torch.ones(3)}, "optimizer": {"parts": [{"state": {0: state}}]}}
    assert all_finite(whole)
    for tensor in (whole["model"]["w"], state["exp_avg"]):
        for bad in (float("nan"), float("inf"), -float("inf")):
            tensor[1] = bad
            assert not all_finite(whole)
            tensor[1] = 1.0


def test_a_run_whose_weights_are_lost_keeps_its_last_good_checkpoint_and_ends_badly(tmp_path, tiny_args, capsys):
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path, learning_rate=1e38, min_lr=1, warmup_tokens=0, grad_clip=0,
                             checkpoint_tokens=64))
    assert e.value.code == 2
    saved = checkpoint.load(str(tmp_path))
    assert all(torch.isfinite(v).all() for v in saved["model"].values())
    assert f"last good checkpoint, of step {saved['state']['step']}," in capsys.readouterr().err
    assert any("no checkpoint at step" in r.get("event", "") for r in log.read(tmp_path)) and log.died(log.read(tmp_path))


def test_a_loss_far_above_where_it_began_is_said_once(tmp_path, tiny_args):
    train.main(tiny_args(out_dir=tmp_path, learning_rate=3.0, min_lr=3.0, warmup_tokens=0, grad_clip=0))
    assert sum("far above the 4." in r.get("event", "") for r in log.read(tmp_path)) >= 1


def dead_rows():
    steps = [{"step": i, "tokens": 100 * i, "train/loss": 3.0 - 0.1 * i, "val/loss": 3.0 - 0.1 * i, "seconds": float(i)}
             for i in range(1, 8)]
    return steps, [*steps, {"step": 8, "tokens": 800, "train/loss": None, "val/loss": None, "seconds": 8.0}]


def test_a_dead_run_reaches_nothing_and_wins_nothing():
    alive, dead = dead_rows()
    assert log.died(dead) and not log.died(alive) and not log.died([*dead, alive[0]])
    result = compare.comparison({"good": [alive], "bad": [dead, alive]})
    group = result["groups"]["bad"]
    assert group["died"] == 1 and group["at_target"]["reached"] == 1 and group["final_val_loss"] is None
    assert "2, 1 died" in compare.table(result) and "1 ended without a finite loss" in compare.verdict(result)
    with pytest.raises(ConfigError, match="all runs of bad ended without"):
        compare.comparison({"bad": [dead], "good": [alive]})
    assert grid.final_values(dead)["val_loss"] is None and grid.final_values(alive)["val_loss"] == pytest.approx(2.3)


# -- the log

def started_log(tmp_path):
    run_log = log.RunLog(Config(out_dir=str(tmp_path)))
    for step in range(4):
        run_log.write({"step": step, "tokens": step, "train/loss": 1.0})
    known = run_log.state()
    run_log.close()
    return known, tmp_path / "log.jsonl"


@pytest.mark.parametrize("harm", [lambda text: text[:-20], lambda text: "\0" * 40 + text[40:], lambda text: "garbage\n" + text,
                                  lambda text: text.replace("1.0", "2.0", 1)])
def test_a_log_that_changed_is_refused_and_stays_as_it_is(tmp_path, harm):
    known, path = started_log(tmp_path)
    log.check(tmp_path, known)
    path.write_text(harm(path.read_text()))
    with pytest.raises(ConfigError, match="restore the file from a copy, or move it away: the log then begins anew$"):
        log.check(tmp_path, known)


@pytest.mark.parametrize("rest", ["move", "empty"])
def test_a_resume_whose_log_changed_is_one_line_and_without_a_log_it_begins_one(tmp_path, tiny_args, capsys, rest):
    train.main(tiny_args(out_dir=tmp_path, stop_tokens=640))
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text().replace("4.1", "3.1"))
    before = tree(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path, resume="auto"))
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.count("\n") == 1 and "or move it away: the log then begins anew" in said
    assert tree(tmp_path) == before and train.main([str(tmp_path), "--eval"]) == 0
    path.rename(tmp_path / "moved") if rest == "move" else path.write_text("")
    assert train.main(tiny_args(out_dir=tmp_path, resume="auto", stop_tokens=1280)) == 0
    rows = log.read(tmp_path)
    assert rows[0] == {"step": 10, "tokens": 704, "event": f"{path} is gone: the log begins anew at step 10"}
    assert train.main(tiny_args(out_dir=tmp_path, resume="auto")) == 0 and log.read(tmp_path)[:len(rows)] == rows


def test_a_bad_line_in_the_middle_is_an_error_and_a_torn_last_one_is_not(tmp_path):
    _, path = started_log(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 9, "tok')
    assert len(log.read(tmp_path)) == 4
    path.write_bytes(b"\0\0\n" + whole)
    with pytest.raises(ConfigError, match="line 1 is not a row"):
        log.read(tmp_path)


# -- signals and terminals

def test_a_closed_pipe_ends_the_talking_not_the_run(tmp_path, tiny_args):
    command = f'"{sys.executable}" "{ROOT}/train.py" "$@" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command, "bash", *tiny_args(out_dir=tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0 and done.stderr == "" and log.read(tmp_path)[-1]["tokens"] >= 3200


def test_a_run_gives_the_signals_back(tmp_path, tiny_args):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = [signal.getsignal(n) for n in numbers]
    train.main(tiny_args(out_dir=tmp_path, max_tokens=320))
    assert [signal.getsignal(n) for n in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_after_the_step_at_work_and_stops(tmp_path, tiny_args, monkeypatch, capsys, number):
    show, sent = Run.show, []

    def shown(run, *numbers):
        show(run, *numbers)
        if not sent:
            sent.append(run.logged.step)
            os.kill(os.getpid(), number)
    monkeypatch.setattr(Run, "show", shown)
    assert train.main(tiny_args(out_dir=tmp_path, checkpoint_tokens=10**6)) == 128 + number
    assert step_of(tmp_path) in (sent[0], sent[0] + 1) and f"stopped by {number.name}" in capsys.readouterr().out


# -- data, schedules, resume, names

def test_a_flipped_bit_in_the_data_is_found_once_and_a_good_file_is_read_once(tmp_path, monkeypatch):
    folder = write_dataset(tmp_path / "data", np.arange(500) % 64, np.arange(100) % 64)
    batches.Dataset(folder, 16)
    with monkeypatch.context() as patch:
        patch.setattr("data.tokens.sha256_of", lambda *_: pytest.fail("read again"))
        batches.Dataset(folder, 16)
    path = tmp_path / "data" / "train.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    with pytest.raises(ConfigError, match="train.bin does not match its checksum"):
        batches.Dataset(folder, 16)


@pytest.mark.parametrize("text", ["0 1e9999999", "1e9999999 8", "0 9e99999999999999999999", "0 4000000000000"])
def test_a_bad_edit_of_batch_file_leaves_the_last_good_one(tmp_path, text):
    path = tmp_path / "schedule.txt"
    path.write_text("0 8")
    batch_schedule = schedule.build(Config(batch_schedule="file", batch_file=str(path)), 8)
    path.write_text(text)
    assert batch_schedule.poll() is None and "the last good one stays" in batch_schedule.accept(batch_schedule.poll())
    path.unlink()
    os.mkfifo(path)
    assert batch_schedule.poll() is None and "the last good one stays" in batch_schedule.accept(batch_schedule.poll())
    assert batch_schedule.at(0) == 8


def test_settings_of_another_schedule_are_said(capsys):
    start.parse(["--batch_schedule=constant", "--batch_shrink=True", "--batch_size=16"])
    assert capsys.readouterr().out == "batch_shrink: without effect under batch_schedule=constant\n"
    start.parse(["--batch_schedule=late", "--batch_size_start=8"])
    assert capsys.readouterr().out == "", "late begins with it"


def test_a_controller_that_could_not_see_communication_is_said(capsys):
    keys = ["--batch_schedule=gns", "--parallel=fsdp", "--micro_batch_size=4", "--batch_size=64"]
    start.parse([*keys, "--batch_size_start=8"], 2)
    assert "--batch_size_start=16 shows it" in capsys.readouterr().out
    for more, processes in ((["--batch_size_start=16"], 2), (["--batch_size_start=8", "--batch_objective=balance"], 2),
                            (["--batch_size_start=4"], 1)):
        start.parse([*keys, *more], processes)
        assert capsys.readouterr().out == ""


def test_a_resume_says_what_will_differ():
    old = {"dtype": "float32", "threads": 2, "micro_batch_size": 8, "processes": 1}
    assert start.differences(old, old) is None and start.differences(None, old) is None
    assert "threads 4 (was 2): " in start.differences(old, {**old, "threads": 4})
    words = start.differences(old, {**old, "dtype": "bfloat16", "micro_batch_size": 4})
    assert "dtype bfloat16 (was float32)" in words and "multiples of micro_batch_size" in words and "another dtype" in words


def test_names_differ_where_values_differ():
    values = [0.0012345671, 0.0012345674, 0.001, 1e-3 + 1e-18, "a/b", "a_b", "a%2Fb", 1.0, 2.0]
    assert len({common.short(v) for v in values}) == len(set(values)) and common.short(0.002) == "0.002"


def test_a_prompt_that_the_model_does_not_know_is_one_line(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path, max_tokens=320))
    with pytest.raises(SystemExit) as e:
        sample.main([str(tmp_path), "--prompt=\u00e4"])
    assert e.value.code == 2 and "is none of the 64" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[1]", "", "{", '{"config": 1}', '{"config": {}, "processes": "two"}',
                                  '{"config": {}, "data": []}', '{"config": {"block_size": "long"}}',
                                  '{"config": {"block_size": 0}}', "[" * 100_000])
def test_config_json_that_train_did_not_write_is_refused_in_words(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json") as e:
        configurator.read_run(str(tmp_path))
    assert "\n" not in str(e.value)


# -- what is around a run changes while it goes on, or before it goes on

@pytest.mark.parametrize("how", ["remove", "move", "cut", "empty", "write"])
def test_a_log_that_is_changed_during_a_run_stays_and_the_run_goes_on_in_another_file(tmp_path, tiny_args, monkeypatch, capsys,
                                                                                     how):
    path, show, rows, changed = tmp_path / "log.jsonl", Run.show, [], []

    def shown(run, *numbers):
        if run.count.step == 5:
            rows.append(path.read_bytes())
            if how in ("cut", "empty"):
                os.truncate(path, 100 if how == "cut" else 0)
            elif how == "write":
                path.open("ab").write(b"mine")
            else:
                path.unlink() if how == "remove" else path.rename(tmp_path / "moved")
            changed.append(path.read_bytes() if path.exists() else None)
        show(run, *numbers)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "show", shown)
        assert train.main(tiny_args(out_dir=tmp_path, stop_tokens=640)) == 0
    assert "No closing words: " in capsys.readouterr().out
    assert (path.read_bytes() if path.exists() else None) == changed[0], "nobody repairs it"
    more = (tmp_path / "log.1.jsonl").read_text().splitlines()
    assert f"{path} was changed by another program" in json.loads(more[0])["event"] and json.loads(more[1])["step"] == 5
    assert sum("was changed" in line for line in more) == 1
    for command in (whatif, plot):
        with pytest.raises(SystemExit):
            command.main([str(tmp_path)])
        assert capsys.readouterr().err.count("\n") == 1
    path.write_bytes(rows[0] + (tmp_path / "log.1.jsonl").read_bytes())  # as its words say
    assert log.read(tmp_path)[-1]["tokens"] == 704 and train.main(tiny_args(out_dir=tmp_path, resume="True")) == 0
    assert log.read(tmp_path)[-1]["tokens"] >= 3200


def test_files_that_were_damaged_before_stay_beside_those_of_today(tmp_path):
    path = tmp_path / "ckpt.pt"
    for text in "abc":
        path.write_text(text)
        checkpoint.keep_aside(str(path))
    assert sorted(p.read_text() for p in tmp_path.glob("ckpt.pt.damaged*")) == ["a", "b", "c"]


def test_a_gap_between_checkpoints_hides_none(tmp_path):
    save_three(tmp_path, 3)
    (tmp_path / "ckpt.pt").unlink()
    (tmp_path / "ckpt.1.pt").unlink()
    assert step_of(tmp_path) == 1
    save_three(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.glob("ckpt*")) == ["ckpt.1.pt", "ckpt.best.pt", "ckpt.pt"]


def test_a_thousand_million_checkpoints_may_be_kept(tmp_path):
    save_three(tmp_path, 10**9)
    assert [checkpoint.read(path, "cpu", False)["state"]["step"] for path in checkpoint.saved_in(str(tmp_path))] == [3, 2, 1]


def test_a_lock_that_became_somebody_elses_is_left_to_him(tmp_path):
    with files.only_writer(tmp_path, ConfigError):
        os.unlink(tmp_path / "lock")
        with files.only_writer(tmp_path, ConfigError):
            other = os.stat(tmp_path / "lock").st_ino
            (tmp_path / "lock").rename(tmp_path / "moved")
            (tmp_path / "moved").rename(tmp_path / "lock")
            assert os.stat(tmp_path / "lock").st_ino == other
        (tmp_path / "lock").write_text("of a third")
    assert (tmp_path / "lock").read_text() == "of a third"


def test_a_lock_that_is_a_link_is_refused_in_words(tmp_path):
    (tmp_path / "lock").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match="is a link"), files.only_writer(tmp_path, ConfigError):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("harm", [lambda s: s.pop("gns"), lambda s: s["state"].update(step="x"), lambda s: s.update(log=None),
                                  lambda s: s["model"].popitem(), lambda s: s["state"].update(new=1),
                                  lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq"), lambda s: s["rng"].clear(),
                                  lambda s: s["arithmetic"].update(processes=None), lambda s: s["state"].update(seconds=[]),
                                  lambda s: s["state"].update(bad_steps="x"), lambda s: s["state"].update(noise=[1.0]),
                                  lambda s: s["config"].update(seed=torch.zeros(2)), lambda s: s.update(arithmetic=5),
                                  lambda s: s["arithmetic"].update(dtype=torch.zeros(2)),
                                  lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(2))])
def test_a_checkpoint_of_another_making_is_one_line_and_stays(tmp_path, tiny_args, capsys, harm):
    train.main(tiny_args(out_dir=tmp_path, max_tokens=640, stop_tokens=320))
    state = checkpoint.load(str(tmp_path))
    del state["path"], state["format"]
    harm(state)
    checkpoint.save(str(tmp_path), state)
    rows = (tmp_path / "log.jsonl").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path, max_tokens=640, resume="auto"))
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.count("\n") == 1 and "ckpt.pt does not hold what this version" in said
    assert (tmp_path / "log.jsonl").read_bytes() == rows


@pytest.mark.parametrize("branches", [False, True])
def test_a_run_of_an_older_version_goes_on_and_measures_anew(tmp_path, tiny_args, branches):
    train.main(tiny_args(out_dir=tmp_path / "a", max_tokens=640, stop_tokens=320))
    state = checkpoint.load(str(tmp_path / "a"))
    del state["path"]
    state |= {"format": 2, "gns": {"scales": {}, "calibrations": {"": {"waiting": 3}}}}
    checkpoint.save(str(tmp_path / "a"), state)
    branch, resume = dict(out_dir=tmp_path / "b", branch_from=tmp_path / "a"), dict(out_dir=tmp_path / "a", resume=True)
    where = branch if branches else resume
    assert train.main(tiny_args(max_tokens=640, **where)) == 0
    rows = log.read(str(where["out_dir"]))
    assert [r["step"] for r in rows if "measured anew" in r.get("event", "")] == [state["state"]["step"]]
    assert rows[-1]["tokens"] >= 640


def test_data_of_which_the_time_was_set_back_are_read_again(tmp_path):
    folder = write_dataset(tmp_path / "data", np.arange(500) % 64, np.arange(100) % 64)
    batches.Dataset(folder, 16)
    path = tmp_path / "data" / "train.bin"
    times, data = path.stat(), bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match="train.bin does not match its checksum"):
        batches.Dataset(folder, 16)


def test_token_ids_below_zero_are_refused(tmp_path):
    folder = write_dataset(tmp_path / "data", np.full(500, -1), np.arange(100) % 64, dtype="int8")
    with pytest.raises(ConfigError, match="holds token id -1"):
        batches.Dataset(folder, 16).train_batch(0, 0, 2, "cpu")


@pytest.mark.parametrize("how", ["<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
def test_who_cannot_be_heard_still_trains(tmp_path, tiny_args, how):
    command = f'exec "{sys.executable}" "{ROOT}/train.py" "$@" {how}'
    idle = dict(batch_gns_factor=2)  # one word from the settings: it has no effect
    done = subprocess.run(["bash", "-c", command, "bash", *tiny_args(out_dir=tmp_path, max_tokens=640, **idle)],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert done.returncode == 0 and log.read(tmp_path)[-1]["tokens"] >= 640 and checkpoint.load(str(tmp_path))
    assert "Traceback" not in done.stderr + done.stdout


def test_a_run_whose_end_cannot_be_saved_does_not_end_with_0(tmp_path, tiny_args, monkeypatch):
    monkeypatch.setattr("trainer.run.all_finite", lambda whole: not any(
        int(state["step"]) >= 10 for state in whole["optimizer"]["state"].values()))
    assert train.main(tiny_args(out_dir=tmp_path, batch_size=4, max_tokens=640)) == 1
    assert log.read(tmp_path)[-1]["step"] == 10 and step_of(tmp_path) < 10


@pytest.mark.parametrize("text", ["[1]", "{}", "{", '{"settings": 1, "rows": []}', '{"settings": {}, "rows": [1]}',
                                  '{"settings": {}, "rows": [], "result": 5}', "[" * 100_000])
def test_numbers_of_a_sweep_that_it_did_not_write_are_refused_in_words(tmp_path, text):
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ConfigError, match="sweep.json is not readable.*remove it"):
        common.read_json(str(tmp_path / "sweep.json"))


@pytest.mark.parametrize("kind", ["own", "nanogpt"])
@pytest.mark.parametrize("how", ["cut", "written", "put back", "put back with its times"])
@pytest.mark.slow
def test_a_run_whose_data_change_ends_in_one_line_and_goes_on_with_the_right_ones_bit_for_bit(
        tmp_path, tiny_args, tiny_data, monkeypatch, capsys, kind, how):
    data = tmp_path / "data"
    if kind == "own":
        shutil.copytree(tiny_data, data)
    else:
        data.mkdir()
        for name in ("train.bin", "val.bin"):
            np.fromfile(os.path.join(tiny_data, name), np.uint8).astype(np.uint16).tofile(data / name)
    train.main(tiny_args(out_dir=tmp_path / "whole", dataset=data))
    path, measure, calls = data / "train.bin", train.validation_loss, []
    right, times = path.read_bytes(), path.stat()

    def meddle(*args):
        calls.append(1)
        if len(calls) == 2:  # in the middle of the run
            path.write_bytes(right[:10] if how == "cut" else bytes(len(right)))
            if "back" in how:
                path.write_bytes(right)
            if "times" in how:
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return measure(*args)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as e:
        patch.setattr(train, "validation_loss", meddle)
        capsys.readouterr()
        train.main(tiny_args(out_dir=tmp_path / "run", dataset=data))
    said = capsys.readouterr().err
    assert e.value.code == 2 and said.count("\n") == 1 and "train.bin was changed by another program" in said
    if "back" not in how:
        with pytest.raises(SystemExit):
            train.main(tiny_args(out_dir=tmp_path / "run", dataset=data, resume="True"))
    path.write_bytes(right)
    assert train.main(tiny_args(out_dir=tmp_path / "run", dataset=data, resume="True")) == 0
    saved = [checkpoint.load(str(tmp_path / name))["model"] for name in ("whole", "run")]
    assert all(torch.equal(saved[0][k], saved[1][k]) for k in saved[0])


@pytest.mark.parametrize("how", ["chmod", "link", "unlink", "replace"])
def test_rights_and_names_of_data_may_change_under_a_run(tmp_path, tiny_args, tiny_data, monkeypatch, how):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    path, measure = data / "train.bin", train.validation_loss

    def meddle(*args):
        if how == "chmod" and path.stat().st_mode & 0o77:
            path.chmod(0o600)
        elif how == "link" and not (data / "second").exists():
            (data / "second").hardlink_to(path)
        elif how == "unlink":
            path.unlink(missing_ok=True)
        elif how == "replace":
            (data / "new").write_bytes(b"x")
            os.replace(data / "new", path)
        return measure(*args)
    monkeypatch.setattr(train, "validation_loss", meddle)
    assert train.main(tiny_args(out_dir=tmp_path / "run", dataset=data)) == 0


def test_the_validation_loss_of_data_that_change_is_not_told(tmp_path, tiny_args, tiny_data, monkeypatch, capsys):
    data = shutil.copytree(tiny_data, tmp_path / "data")
    train.main(tiny_args(out_dir=tmp_path / "run", dataset=data, max_tokens=320))
    measure = train.validation_loss

    def meddle(*args):
        (data / "val.bin").write_bytes(bytes(1000))
        return measure(*args)
    monkeypatch.setattr(train, "validation_loss", meddle)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        train.main([str(tmp_path / "run"), "--eval"])
    said = capsys.readouterr()
    assert "val.bin was changed" in said.err and "validation loss" not in said.out


# -- what is not a run's own, and what stands in its place

def test_a_backup_of_hard_links_stays_as_it_was_and_can_be_gone_on_with(tmp_path, tiny_args):
    train.main(tiny_args(out_dir=tmp_path / "run", stop_tokens=1280, checkpoint_tokens=640))
    (tmp_path / "run" / "log.jsonl").open("a").write('{"step": 99, "tokens": 9999, "event": "newer than the checkpoint"}\n')
    shutil.copytree(tmp_path / "run", tmp_path / "backup", copy_function=os.link)
    before = {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()}
    train.main(tiny_args(out_dir=tmp_path / "run", resume="True"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "backup").iterdir()} == before
    train.main(tiny_args(out_dir=tmp_path / "backup", resume="True"))
    assert_same_run(tmp_path / "run", tmp_path / "backup")


@pytest.mark.parametrize("name", ["ckpt.1.pt", "ckpt.best.pt"])
def test_a_folder_in_the_place_of_a_checkpoint_is_named(tmp_path, tiny_args, capsys, name):
    train.main(tiny_args(out_dir=tmp_path, stop_tokens=640))
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path, resume="True"))
    assert e.value.code == 2 and f"Is a directory: {tmp_path / name}\n" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp")) and step_of(tmp_path) > 0


def test_a_step_time_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, tiny_args):
    train.main(tiny_args(out_dir=tmp_path, stop_tokens=1280))
    (tmp_path / "step_time.json").unlink()
    (tmp_path / "step_time.json").mkdir()
    assert train.main(tiny_args(out_dir=tmp_path, resume="True")) == 0
    said = [row["event"] for row in log.read(tmp_path) if "step_time.json cannot be written" in row.get("event", "")]
    assert len(said) == 1 and checkpoint.load(str(tmp_path))["state"]["tokens"] >= 3200


def test_a_picture_that_cannot_be_written_is_one_line_of_the_last_words(tmp_path, tiny_args, capsys):
    (tmp_path / "report.png").mkdir()
    assert train.main(tiny_args(out_dir=tmp_path, max_tokens=640)) == 0
    said = capsys.readouterr()
    assert f"Picture: none, it could not be drawn: Is a directory: {tmp_path}/report.png\n" in said.out and not said.err
    assert "Text: python sample.py" in said.out


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "module://nowhere", "nonsense", "TkAgg"])
def test_a_run_draws_its_picture_whatever_the_environment_draws_with(tmp_path, tiny_args, backend):
    done = run_script(*tiny_args(out_dir=tmp_path, max_tokens=320), env={"MPLBACKEND": backend})
    assert done.returncode == 0 and f"Picture: {tmp_path}/report.png" in done.stdout and done.stderr == ""


def test_a_resume_with_other_instructions_says_so(tmp_path, tiny_args):
    """They round otherwise: on one machine by the environment, on another by themselves."""
    train.main(tiny_args(out_dir=tmp_path, stop_tokens=640))
    saved = checkpoint.load(str(tmp_path))["arithmetic"]
    assert saved["instructions"] == torch.backends.cpu.get_cpu_capability() and len(saved["kernels"]) == 12
    other = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    done = run_script(*tiny_args(out_dir=tmp_path, resume=True), env=other)
    events = [row["event"] for row in log.read(str(tmp_path)) if "event" in row]
    assert done.returncode == 0, done.stderr
    assert f"instructions DEFAULT (was {saved['instructions']})" in events[0] and "environment MKL_CBWR=COMPATIBLE" in events[0]


def test_a_clock_that_jumps_changes_nothing(tmp_path, tiny_args, monkeypatch):
    jumps = random.Random(0)
    monkeypatch.setattr(time, "time", lambda: 1e9 * jumps.random())
    train.main(tiny_args(out_dir=tmp_path / "a"))
    monkeypatch.undo()
    train.main(tiny_args(out_dir=tmp_path / "b"))
    assert_same_run(tmp_path / "a", tmp_path / "b")
    seconds = [row["seconds"] for row in log.read(str(tmp_path / "a")) if "seconds" in row]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 1e5


# -- what is no file

@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_a_lock_that_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    make(tmp_path / "lock")
    with pytest.raises(ConfigError, match="lock is a link, a pipe, a folder or a device.*remove it"), files.only_writer(
            tmp_path, ConfigError):
        pass
    assert os.listdir(tmp_path) == ["lock"]


@pytest.mark.parametrize("target, inner", [("nowhere", ""), ("link", ""), ("nowhere", "a/b")])
def test_an_out_dir_that_is_a_link_to_nowhere_is_named(tmp_path, tiny_args, capsys, target, inner):
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(SystemExit):
        train.main(tiny_args(out_dir=tmp_path / "link" / inner))
    assert f"A link to {target}, which is not there; take another folder" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["link"]


def test_a_pipe_where_a_sweep_keeps_its_numbers_or_words_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "sweep.json")
    os.mkfifo(tmp_path / "train.out")
    with pytest.raises(ConfigError, match="sweep.json is not readable .*remove it"):
        common.read_json(str(tmp_path / "sweep.json"))
    with pytest.raises(ConfigError, match="train.out is no file: remove it"):
        jobs.run_training(Config(out_dir=str(tmp_path)))
