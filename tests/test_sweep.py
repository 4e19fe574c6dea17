import json
import os
import shutil

import numpy as np
import pytest

import configurator
import schedule
import sweep
import train
from configurator import Config, ConfigError
from sweeps import branch, jobs
from trainer import checkpoint, log


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_data):
    """A finished run of some 20 steps."""
    from tests.helpers import TINY
    out = tmp_path_factory.mktemp("sweep") / "run"
    keys = {"dataset": tiny_data, **TINY, "out_dir": out, "lr_scaling": "sqrt", "learning_rate": 1e-2}
    assert train.main([f"--{k}={v}" for k, v in keys.items()]) == 0
    return str(out)


def test_a_branch_probe_runs_reports_and_is_not_run_twice(finished, capsys):
    arguments = ["branch", finished, "--at", "1k", "--factors", "1,2", "--window", "2050", "--tolerance", "0.05",
                 "--in_process"]
    assert sweep.main(arguments) == 0
    text = capsys.readouterr().out
    assert "Critical batch by experiment" in text and "Noise scale of the same run" in text
    folder = os.path.join(finished, "branch", "1000")
    assert sorted(os.listdir(folder)) == ["base", "branch.json", "branch.png", "x1", "x2"]
    result = json.load(open(os.path.join(folder, "branch.json")))
    base = [r for r in log.read(os.path.join(folder, "base")) if "train/loss" in r]
    own = {r["step"]: r for r in log.read(finished) if "train/loss" in r}
    assert all(own[r["step"]]["train/loss"] == r["train/loss"] for r in base), "the base is the run itself"
    assert result["at"] == base[-1]["tokens"] >= 1000 and result["batch_size"] == base[-1]["batch_size"]
    assert [e["batch_size"] for e in result["branches"]] == [base[-1]["batch_size"], 2 * base[-1]["batch_size"]]
    one, two = ([r for r in log.read(os.path.join(folder, x)) if "train/loss" in r] for x in ("x1", "x2"))
    at = {r["tokens"]: r["lr"] for r in one}
    same = [(r["lr"], at[r["tokens"]]) for r in two if r["tokens"] in at]
    assert same and all(a == pytest.approx(b * 2**0.5) for a, b in same)
    assert one[0]["examples"] - one[0]["batch_size"] == two[0]["examples"] - two[0]["batch_size"] == base[-1]["examples"]
    config = configurator.read_run(finished)
    expected = schedule.learning_rate_at(one[0]["tokens"], config) * schedule.coupled(one[0]["batch_size"], config)[0]
    assert one[0]["lr"] == pytest.approx(expected), "k = 1 goes on with the run's own learning rate"
    before = {x: os.path.getmtime(os.path.join(folder, x, "ckpt.pt")) for x in ("base", "x1", "x2")}
    assert sweep.main(arguments) == 0
    assert before == {x: os.path.getmtime(os.path.join(folder, x, "ckpt.pt")) for x in ("base", "x1", "x2")}
    assert json.load(open(os.path.join(folder, "branch.json"))) == result


def test_a_dry_run_of_branch_says_what_is_missing_and_touches_nothing(finished, tmp_path, capsys):
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("branch"))
    before = sorted(os.listdir(folder))
    assert sweep.main(["branch", str(folder), "--at", "1k", "--factors", "1,2", "--window", "2050", "--dry_run"]) == 0
    text = capsys.readouterr().out
    batch = next(r["batch_size"] for r in log.read(folder) if r["tokens"] >= 1000 and "batch_size" in r)
    assert "would take the run to 1k tokens" in text and ": 1k to go" in text
    assert f"with batch {2 * batch} for 2.05k tokens, in {folder}/branch/1000/x2: 2.05k to go" in text
    assert "5.1k tokens in all: about 0:" in text and sorted(os.listdir(folder)) == before
    with pytest.raises(SystemExit):
        sweep.main(["branch", str(folder), "--at", "1k", "--factors", "1,2", "--window", "500", "--dry_run"])
    assert "fewer than 8 steps" in capsys.readouterr().err


def test_the_base_starts_from_the_runs_checkpoint_where_that_is_early_enough(finished, tmp_path):
    tokens = checkpoint.load(finished)["state"]["tokens"]
    branch.prepare_base(finished, str(tmp_path / "late"), tokens - 1)
    assert not (tmp_path / "late").exists()
    branch.prepare_base(finished, str(tmp_path / "early"), tokens)
    assert sorted(os.listdir(tmp_path / "early")) == ["ckpt.pt", "config.json", "log.jsonl"]


def test_window_losses_weigh_steps_by_the_tokens_inside():
    """Loss falls by 1 a token, so a part's mean is that of its middle, whatever the steps' size, if they end at its edges."""
    rows = [{"tokens": 1000 + t, "train/loss": -(t - 5.0)} for t in range(10, 3210, 10)]
    found = branch.window_losses(rows, 1000, 3200)
    assert found == pytest.approx(-(2400 + 50 + 100 * np.arange(8)))
    coarse = [{"tokens": 1000 + t, "train/loss": -(t - 160.0)} for t in range(320, 3840, 320)]
    assert branch.window_losses(coarse, 1000, 3200).mean() == pytest.approx(-2800, abs=20)


def branch_rows(loss, batch):
    return [{"tokens": 1000 + t, "train/loss": loss} for t in range(batch, 3201, batch)] + [{"tokens": 4200, "val/loss": loss}]


def test_the_critical_batch_is_the_largest_of_an_unbroken_row_within_the_tolerance():
    rows = {1.0: branch_rows(3.0, 10), 2.0: branch_rows(3.004, 20), 4.0: branch_rows(3.02, 40), 8.0: branch_rows(3.001, 80)}
    steps = [{"tokens": 900, "gns": 20.0, "gns_low": 15.0, "gns_high": 30.0}, {"tokens": 1000, "gns": None}]
    result = branch.result_of(rows, steps, 1000, 3200, 16, 0.01)
    assert (result["largest_within"], result["first_beyond"]) == (32, 64)
    assert result["noise_scale"]["value"] == 20.0 and [e["within"] for e in result["branches"]] == [True, True, False, True]
    text = branch.verdict(result)
    assert "between 32 and 64 sequences" in text and "20 sequences (95% interval 15 to 30)" in text
    del rows[4.0], rows[8.0]
    text = branch.verdict(branch.result_of(rows, steps[1:], 1000, 3200, 16, 0.01))
    assert "32 or more" in text and "undetermined" in text


def test_a_branch_goes_on_with_the_runs_own_coupling():
    c = Config(batch_size=64, lr_scaling="linear", beta2_scaling="tokens", weight_decay_scaling="tokens", learning_rate=1e-2,
               min_lr=1e-3)
    for k in (1, 4):
        changed = Config(**{**vars(c), **branch.branch_changes(c, 16, k)})
        lr, beta2, decay = schedule.coupled(16 * k, changed)
        assert lr * changed.learning_rate == pytest.approx(1e-2 / 4 * k**0.5)
        assert beta2 == pytest.approx(0.95 ** (k / 4))
        assert lr * changed.learning_rate * decay / (16 * k) == pytest.approx(1e-2 * 0.1 / 64)


@pytest.mark.parametrize("arguments, words", [
    (["--at", "1k", "--factors", "2,4"], "--factors=2,4: a list with 1"), (["--at", "1k", "--factors", "1,x"], "--factors=1,x"),
    (["--at", "soon"], "--at: 'soon'"), (["--at", "5k"], "--at=5k: the run goes from 0 to 3200"),
    (["--at", "1k", "--window", "5k", "--factors", "1,2"], "--window=5000: the run has only"),
    (["--at", "1k", "--window", "500", "--factors", "1,2"], "fewer than 8 steps"),
    (["--at", "1k", "--factors", "1,1.3"], "not whole micro-batches")])
def test_wrong_arguments_are_one_clear_line(finished, arguments, words, capsys):
    with pytest.raises(SystemExit) as e:
        sweep.main(["branch", finished, *arguments])
    message = capsys.readouterr().err
    assert e.value.code == 2 and words in message and message.count("\n") == 1


def test_a_folder_that_is_no_run_and_a_failing_run_are_one_clear_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sweep.main(["branch", str(tmp_path), "--at", "1k"])
    assert "no readable config.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="ended with 2: error: .*nowhere"):
        jobs.run_training(Config(dataset="nowhere"), out_dir=str(tmp_path / "new"))
