"""Run folders: their names, going on with them, making them longer, evaluating them."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

import configurator
import train
from configurator import Config, ConfigError
from system import files
from tests.helpers import ROOT, TINY, as_args, assert_same_run, same_tensors, tree, untimed
from trainer import checkpoint, log, start


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    from plots import report
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def config_file(tmp_path, tiny_data):
    """A config file of a tiny run, without an out_dir."""
    def write(name="mine.py", **changes):
        values = {**TINY, "dataset": tiny_data, "max_tokens": 640, **changes}
        (tmp_path / name).write_text("".join(f"{k} = {v!r}\n" for k, v in values.items()))
        return str(tmp_path / name)
    return write


def config_of(folder):
    return json.load(open(os.path.join(folder, "config.json")))["config"]


# -- going on with a run

@pytest.fixture(scope="module")
def whole_and_stopped(tmp_path_factory, tiny_data):
    """A run, and the same stopped half-way."""
    folder = tmp_path_factory.mktemp("runs")
    settings = dict(TINY, dataset=tiny_data, seed=5, dropout=0.1, n_embd=24, learning_rate=1e-3)
    train.main(as_args({**settings, "out_dir": folder / "whole"}))
    train.main(as_args({**settings, "out_dir": folder / "stopped", "stop_tokens": 1500}))
    return folder


@pytest.mark.parametrize("command", [lambda out: [f"--out_dir={out}", "--resume=True"], lambda out: [str(out)],
                                     lambda out: [f"--out_dir={out}", "--resume"], lambda out: [f"{out}/"],
                                     lambda out: [f"--out_dir={out}", "--resume=auto"]])
def test_a_run_knows_its_settings_and_goes_on_bit_for_bit(whole_and_stopped, tmp_path, command):
    stopped = shutil.copytree(whole_and_stopped / "stopped", tmp_path / "stopped")
    assert train.main(command(stopped)) == 0
    assert_same_run(whole_and_stopped / "whole", stopped)


def test_what_was_typed_is_checked_against_what_may_change(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    train.main(tiny_args(out_dir=out, stop_tokens=640))
    before = tree(tmp_path)
    for typed, words in ((["--n_layer=3"], ["n_layer is 3, the checkpoint has 2", "new out_dir"]),
                         (["--batch_size=32"], ["batch_size is 32", f"--branch_from={out} --batch_size=32"]),
                         (["--max_tokens=1000"], ["max_tokens is 1000, the checkpoint has 3200"]),
                         (["--max_tokens=6400", "--decay_tokens=6400"], ["decay_tokens is 6400"]),
                         (["--out_dir=other"], ["contradicts"]), (["--resume=False"], ["contradicts"])):
        capsys.readouterr()
        with pytest.raises(SystemExit) as e:
            train.main([str(out), *typed])
        said = capsys.readouterr().err
        assert e.value.code == 2 and said.count("\n") == 1 and all(word in said for word in words), said
    assert tree(tmp_path) == before
    assert train.main([str(out), "--log_interval=4", "--eval_iters=2"]) == 0
    assert (config_of(out)["log_interval"], config_of(out)["eval_iters"]) == (4, 2)


def test_a_config_file_beside_resume_counts_as_before(here, config_file, capsys):
    file = config_file(out_dir=str(here / "run"))
    train.main([file, "--stop_tokens=320"])
    config_file(out_dir=str(here / "run"), n_layer=3)
    with pytest.raises(SystemExit):
        train.main([file, "--resume=True"])
    assert "n_layer is 3, the checkpoint has 2" in capsys.readouterr().err


def test_an_early_stop_says_so_with_the_command_that_goes_on(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "run", stop_tokens=1500))
    said = capsys.readouterr().out
    at = log.count(checkpoint.load(str(tmp_path / "run"))["state"]["tokens"])
    assert f"stopped early at {at} of 3.2k tokens (stop_tokens=1500); resume with: python train.py {tmp_path}/run" in said
    assert train.main([str(tmp_path / "run")]) == 0 and "stopped early" not in capsys.readouterr().out


def test_a_longer_run_is_the_shorter_one_going_on_at_the_low_end(tmp_path, tiny_args, capsys):
    """Oracle: a run that was planned so from the start, with its schedules ending where the shorter one's did."""
    ends = dict(max_tokens=6400, decay_tokens=3200, batch_tokens=3200, dropout=0.1, log_interval=100, eval_tokens=0)
    train.main(tiny_args(out_dir=tmp_path / "planned", **ends))
    train.main(tiny_args(out_dir=tmp_path / "run", dropout=0.1, log_interval=100, eval_tokens=0))
    capsys.readouterr()
    assert train.main([str(tmp_path / "run"), "--max_tokens=6400"]) == 0
    said = capsys.readouterr().out
    for words in ("6.4k tokens instead of 3.2k", "stays at min_lr=0.0002", f"--branch_from={tmp_path}/run --max_tokens=6400"):
        assert words in said
    a, b = (checkpoint.load(str(tmp_path / name)) for name in ("planned", "run"))
    assert all(same_tensors(a[key], b[key]) for key in ("model", "optimizer", "rng"))
    assert log.read(tmp_path / "run")[-2]["lr"] == 2e-4 and log.read(tmp_path / "run")[-2]["batch_size"] == 16
    assert train.main([str(tmp_path / "run"), "--max_tokens=7k"]) == 0  # and longer again
    assert config_of(tmp_path / "run")["decay_tokens"] == 3200


def test_a_branch_knows_the_settings_of_its_run(here, tiny_args):
    train.main(tiny_args(out_dir="out/a", stop_tokens=640, seed=3))
    assert train.main(["--branch_from=out/a", "--batch_size=32", "--batch_size_start=32"]) == 0
    folder = "out/a-batch_size=32-batch_size_start=32"
    config = config_of(folder)
    assert (config["seed"], config["n_embd"], config["batch_size"], config["stop_tokens"]) == (3, 16, 32, 0)
    assert "branched from out/a at 704 tokens" in [row.get("event") for row in log.read(folder)]


# -- names

def test_a_run_without_a_folder_gets_one_of_its_own_and_latest_points_to_it(here, config_file):
    file = config_file()
    for arguments, folder in (([], "out/mine"), ([], "out/mine-2"), (["--batch_size=8"], "out/mine-batch_size=8"),
                              (["--eval_iters=2"], "out/mine-3"), (["--batch_size=8"], "out/mine-batch_size=8-2")):
        assert train.main([file, *arguments]) == 0
        assert log.read(folder)[-1]["tokens"] >= 640 and config_of(folder)["out_dir"] == folder
        assert os.readlink("out/latest") == os.path.basename(folder)
    config_file(batch_size=32)  # an edit of the file needs no edit of a folder's name
    assert train.main([file]) == 0 and config_of("out/mine-4")["batch_size"] == 32
    assert sorted(os.listdir("out")) == ["latest", "mine", "mine-2", "mine-3", "mine-4", "mine-batch_size=8",
                                         "mine-batch_size=8-2"]


def test_latest_is_the_run_itself_and_stays_away_where_it_cannot_be(here, config_file, monkeypatch):
    file = config_file()
    train.main([file, "--stop_tokens=320"])
    assert train.main(["out/latest"]) == 0 and config_of("out/mine")["out_dir"] == "out/mine"
    os.unlink("out/latest")
    os.mkdir("out/latest")
    start.point_to("out/mine")
    assert not os.path.islink("out/latest")
    os.rmdir("out/latest")
    monkeypatch.setattr(os, "symlink", lambda *_: (_ for _ in ()).throw(OSError(1, "not permitted")))
    start.point_to("out/mine")
    assert not os.path.lexists("out/latest") and os.listdir("out") == ["mine"]
    start.point_to("elsewhere/mine")
    assert not os.path.lexists("elsewhere")


def test_bad_input_takes_no_name(here, config_file, capsys):
    with pytest.raises(SystemExit):
        train.main([config_file(), "--block_size=5000"])
    assert not os.path.exists("out")


def test_auto_goes_on_with_the_newest_run_of_this_name_and_these_settings(here, config_file, capsys):
    file = config_file(checkpoint_tokens=128)
    train.main([file, "--stop_tokens=320"])
    assert train.main([file, "--resume=auto"]) == 0  # as make train does after a Ctrl-C
    assert os.listdir("out") and "is finished" not in capsys.readouterr().out
    assert train.main([file, "--resume=auto"]) == 0
    assert "out/mine is finished" in capsys.readouterr().out
    config_file(checkpoint_tokens=128, batch_size=32)
    assert train.main([file, "--resume=auto"]) == 0  # other settings: another run
    assert sorted(os.listdir("out")) == ["latest", "mine", "mine-2"] and config_of("out/mine-2")["batch_size"] == 32
    config_file(checkpoint_tokens=128)
    assert train.main([file, "--resume=True"]) == 0 and "out/mine is finished" in capsys.readouterr().out


def test_resume_without_a_run_of_this_name_says_what_there_is(here, config_file, capsys):
    file = config_file()
    for words in ("no run out/mine to go on with; without --resume=True a new one starts",
                  "no run out/mine to go on with; the newest is python train.py out/mine-batch_size=8"):
        with pytest.raises(SystemExit) as e:
            train.main([file, "--resume=True"])
        assert e.value.code == 2 and words in capsys.readouterr().err
        assert os.path.exists("out") == ("newest" in words)
        train.main([file, "--batch_size=8"])
        capsys.readouterr()


def test_two_that_start_at_once_take_two_folders(here, monkeypatch):
    """One looks while the other has the folder, but nothing in it yet."""
    monkeypatch.setattr(start, "holds_a_run", lambda folder: False)
    config, folders, both = Config(), [], threading.Barrier(8)

    def begin():
        both.wait()
        with start.held(config, "mine") as folder:
            folders.append(folder)
            both.wait()
    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(folders) == sorted(["out/mine", *(f"out/mine-{i}" for i in range(2, 9))])


def test_a_given_folder_that_is_in_use_is_refused(here):
    with files.only_writer("out/x", ConfigError), pytest.raises(ConfigError, match="in use by process"):
        with start.held(Config(out_dir="out/x"), None):
            pass


def test_two_processes_agree_on_the_name(here, config_file):
    file = config_file(batch_size_start=8)
    os.makedirs("out/mine")
    (here / "out/mine/ckpt.pt").write_text("taken")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29611",
                           os.path.join(ROOT, "train.py"), file], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir("out")) == ["latest", "mine", "mine-2"] and config_of("out/mine-2")["out_dir"] == "out/mine-2"


# -- evaluation only

def test_eval_prints_the_validation_loss_and_changes_nothing(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    train.main(tiny_args(out_dir=out))
    last = [row for row in log.read(out) if "val/loss" in row][-1]
    before = tree(tmp_path)
    for arguments in ([str(out), "--eval"], ["--eval", str(out)], [f"--out_dir={out}", "--eval"]):
        capsys.readouterr()
        assert train.main(arguments) == 0
        assert f"step {last['step']}, 3.26k tokens: validation loss {last['val/loss']:.4f}" in capsys.readouterr().out
    assert tree(tmp_path) == before
    with files.only_writer(out, ConfigError):  # also of a run that is under way
        assert train.main([str(out), "--eval", "--eval_iters=2"]) == 0
    with pytest.raises(SystemExit) as e:
        train.main([str(tmp_path / "none"), "--eval"])
    assert e.value.code == 2
    with pytest.raises(SystemExit):
        train.main(["--eval"])
    assert "--eval needs a run" in capsys.readouterr().err


def test_settings_of_an_old_run_miss_keys_and_have_others(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"n_layer": 3, "gone": 1, "cos_attn": [1]}}))
    config = configurator.read_run(tmp_path)
    assert (config.n_layer, config.cos_attn, config.n_head) == (3, (1,), 4)


def test_untimed_rows_are_the_same_through_a_folder(tmp_path, tiny_args):
    """The row of an early stop is logged once."""
    train.main(tiny_args(out_dir=tmp_path / "a", log_interval=7, stop_tokens=1500))
    train.main([str(tmp_path / "a")])
    train.main(tiny_args(out_dir=tmp_path / "b", log_interval=7))
    a, b = untimed(tmp_path / "a"), untimed(tmp_path / "b")
    assert [row for row in b if row not in a] == [] and len(a) <= len(b) + 2
