"""What a run says while it runs: lines that fit the terminal, how long calibration takes, busy neighbours."""

import threading
import time

import numpy as np
import pytest
import torch

import gns
import train
from configurator import Config
from system import terminal
from trainer import busy, hardware, summary
from trainer.reader import noise_of

ROW = {"step": 1188, "tokens": 2_500_000, "train/loss": 1.4018, "batch_size": 32, "gns": 98.5, "gns_low": 87.8,
       "gns_high": 111.0, "gns/norm": 44.0, "gns/norm_low": 40.0, "gns/norm_high": 50.0, "gns/calibration": 2.2,
       "tok_per_sec": 38_300.0, "mfu": 0.48, "bad_steps": 0}
CALIBRATING = {**ROW, "gns": None, "gns_low": None, "gns_high": None, "gns/calibration": None}


@pytest.mark.parametrize("row", [ROW, CALIBRATING], ids=["known", "calibrating"])
@pytest.mark.parametrize("columns, kept, gone", [
    (None, ["step   1188", "38.3k tok/s", "mfu 48%", "left"], []), (120, ["step   1188", "38.3k tok/s", "mfu 48%", "left"], []),
    (110, ["step   1188", "38.3k tok/s"], ["mfu"]), (100, ["38.3k tok/s"], ["mfu", "step"]),
    (80, [], ["mfu", "step", "tok/s"])])
def test_the_line_of_a_step_fits_the_terminal(row, columns, kept, gone):
    line = summary.describe(row, Config(), noise_of(row), None, 45_000, 95, columns)
    assert columns is None or len(line) <= columns
    assert all(word in line for word in [*kept, "2.5M tok 100%", "loss 1.4018", "batch  32", "gns ", "12h30 left"])
    assert not any(word in line for word in gone)


@pytest.mark.parametrize("columns, kept, gone", [
    (None, ["step   1188", "38.3k tok/s", "mfu 48%"], []), (120, ["step   1188", "38.3k tok/s"], ["mfu"]),
    (110, ["38.3k tok/s"], ["mfu", "step"]), (100, [], ["mfu", "step", "tok/s"])])
def test_the_line_of_a_step_names_the_right_batch_for_time_once_noise_scale_and_cost_are_known(columns, kept, gone):
    line = summary.describe(ROW, Config(), noise_of(ROW), 40, 45_000, 95, columns)
    assert "| right 40  |" in line and (columns is None or len(line) <= columns)
    assert all(word in line for word in kept) and not any(word in line for word in gone)
    assert len(summary.describe(ROW, Config(), noise_of(ROW), 40, 45_000, 95, 80)) <= 80
    assert "right" not in summary.describe(ROW, Config(), noise_of(ROW), None, 1.0), "no cost or no noise scale yet"


def test_calibrating_says_so_and_how_long():
    assert summary.noise_words(CALIBRATING, Config(), None, 95) == "gns calibrating, ~1:35"
    assert summary.noise_words(CALIBRATING, Config(), None) == "gns calibrating"
    assert summary.noise_words({**CALIBRATING, "gns/calibration": 2.0}, Config(), None, 95) == "gns undetermined"
    assert summary.noise_words(ROW, Config(), noise_of(ROW), 95) == "gns 98.5 [87.8, 111]"
    assert "44" not in summary.describe(CALIBRATING, Config(), None, None, 1.0), "no number of the norm layers"


def test_text_breaks_between_words_and_a_command_stays_whole_words():
    text = "word " * 40 + "\nout/a-very-long-name=" + "x" * 90
    lines = terminal.wrapped(text, 80).split("\n")
    assert all(len(line) <= 80 for line in lines[:-2]) and "x" * 90 in lines[-1]
    assert terminal.wrapped(text, None) == text and terminal.width() is None


def test_the_guess_at_the_exact_steps_to_go_is_about_right():
    """Simulated exact steps: the guess after 4 of them against how many it really took."""
    rng, ratios = np.random.default_rng(0), []
    for _ in range(200):
        calibration, scale, guess = gns.Calibration(10**9), gns.NoiseScale(10**9), None
        for _ in range(3):
            scale.update(1.0, 10.0, 100)
        for step in range(1, 400):
            signal = rng.normal(1.0, 1.2)
            calibration.update(scale, 100, (signal + rng.normal(0, 0.2), 20.0), (signal, 10.0))
            if calibration.factor():
                assert calibration.steps_to_go() == 0
                break
            guess = guess or (step == 4 and calibration.steps_to_go() and step + calibration.steps_to_go())
        if guess:
            ratios.append(guess / step)
    assert len(ratios) > 50 and 0.4 < np.median(ratios) < 2.5


def test_without_two_exact_steps_the_guess_is_at_least_what_is_missing():
    assert gns.Calibration(1000).steps_to_go() == 3


def test_the_opening_says_what_matters_in_three_lines_and_more_if_asked(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "a", max_tokens=320))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model  2 layers of 16, 7.87k parameters; cpu, float32, 1 thread"
    assert lines[1].startswith("data   /") and lines[1].endswith(", 4k tokens (bytes) to train on, 1k to validate")
    assert lines[2] == f"run    until 320 tokens, batch 4 to 16 (linear) x 16 tokens; in {tmp_path}/a"
    assert lines[3].startswith("step      0 | validation loss")
    train.main(tiny_args(out_dir=tmp_path / "b", max_tokens=320, verbose=True))
    assert "norm layers: " in capsys.readouterr().out.splitlines()[3]


# -- neighbours

STAT = "cpu  9 9 9 9 9 9 9 9\ncpu0 100 10 20 5000 7 1 2 3 0 0\ncpu1 200 0 0 4000 0 0 0 0 0 0\ncpu2 999 0 0 0 0 0 0 0\nintr 5\n"


def test_cores_in_use_are_read_from_proc_stat():
    assert busy.cpu_seconds(STAT, {0}) == pytest.approx(136 / busy.TICK)
    assert busy.cpu_seconds(STAT, {0, 1}) == pytest.approx(336 / busy.TICK)
    now = busy.usage()
    assert now is None or (now.everybody > 0 and now.own > 0)
    assert busy.usage("/nowhere") is None


def test_what_this_process_does_itself_is_not_taken_by_others():
    before = busy.Usage(10.0, 100.0, 50.0)
    assert busy.taken_by_others(before, busy.Usage(12.0, 104.0, 54.0)) == 0
    assert busy.taken_by_others(before, busy.Usage(12.0, 104.0, 52.0)) == 1.0


class Team:
    held = 0

    def __init__(self):
        Team.held += 1

    def release(self):
        Team.held -= 1


def test_threads_sleep_while_others_use_the_cores_and_it_is_said_once(monkeypatch):
    clock, others, own = [0.0], [0.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    cores = busy.Cores(2, lambda: busy.Usage(clock[0], own[0] + others[0], own[0]), Team)

    def look(taken, seconds=2.0):
        clock[0], others[0], own[0] = clock[0] + seconds, others[0] + taken * seconds, own[0] + 2 * seconds
        return cores.look()
    assert look(0.1) is None and Team.held == 0
    assert look(1.2, 0.5) is None and Team.held == 0, "not so soon"
    words = look(1.2)
    assert "other processes use 1.2 of the cores" in words and "the same bits" in words and Team.held == 1
    assert look(0.2) is None and Team.held == 1
    assert look(0.0) is None and Team.held == 0
    assert look(1.0) is None and Team.held == 1, "not said again"
    cores.close()
    assert Team.held == 0


def test_one_thread_waits_for_nobody():
    assert busy.Cores(1).look() is None and busy.Cores(1).before is None


def test_an_idle_team_changes_no_bit_and_leaves():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(64, 3000)
        before, plain = threading.active_count(), torch.cat([(x @ x.T).flatten(), x.sum(1), x.softmax(1).flatten()])
        team = busy.IdleTeam()
        assert threading.active_count() == before + 1
        beside = torch.cat([(x @ x.T).flatten(), x.sum(1), x.softmax(1).flatten()])
        team.release()
        assert torch.equal(plain, beside) and threading.active_count() == before
    finally:
        torch.set_num_threads(threads)


def test_a_run_beside_others_says_so_and_computes_the_same(tmp_path, tiny_args, monkeypatch, capsys):
    from tests.helpers import assert_same_run
    train.main(tiny_args(out_dir=tmp_path / "alone", max_tokens=1280))
    capsys.readouterr()
    moments = iter(range(10**6))
    monkeypatch.setattr(busy, "SECONDS", 0.0)
    monkeypatch.setattr(busy.Cores, "__init__", lambda self, threads, init=busy.Cores.__init__: init(
        self, 2, lambda: busy.Usage(time.monotonic(), float(next(moments) * 100), 0.0)))
    train.main(tiny_args(out_dir=tmp_path / "beside", max_tokens=1280))
    assert capsys.readouterr().out.count("instead of spinning") == 1
    assert_same_run(tmp_path / "alone", tmp_path / "beside")
    assert not any(thread.name == "idle team" for thread in threading.enumerate())


def test_the_ceiling_counts_cpu_time_not_the_clock(monkeypatch):
    """Another process that takes half of the clock changes nothing: thread_time is what is measured."""
    ticks = {}

    def thread_time():
        ticks[threading.get_ident()] = ticks.get(threading.get_ident(), 0.0) + 0.01
        return ticks[threading.get_ident()]
    monkeypatch.setattr(time, "thread_time", thread_time)
    threads = torch.get_num_threads()
    assert hardware.matmul_ceiling("cpu", torch.float32, seconds=0) == pytest.approx(threads * 2 * 1024**3 / 0.01)
    assert torch.get_num_threads() == threads


def test_the_ceiling_leaves_the_random_numbers_alone():
    state = torch.get_rng_state()
    assert hardware.matmul_ceiling("cpu", torch.float32, seconds=0) > 0
    assert torch.equal(state, torch.get_rng_state())


def test_a_run_too_short_for_a_noise_scale_says_why():
    assert "was still being measured, by one step in eight" in summary.noise_summary([CALIBRATING], Config())[0]
    nothing = {**CALIBRATING, "gns/calibration": 2.0}
    assert "the gradient is too small" in summary.noise_summary([nothing], Config())[0]
    alone, steps = {**CALIBRATING, "batch_size": 1}, {"batch_schedule": "steps", "batch_size": 1}  # which does not count there
    assert "A step of one example" in summary.noise_summary([alone], Config(**steps, batch_steps="0:1"))[0]
    assert "by one step in eight" in summary.noise_summary([CALIBRATING], Config(**steps, batch_steps="0:32"))[0]
