import json
import os
import signal
import subprocess
import sys
import time

import pytest

import schedule
import sweep
import train
from configurator import Config
from sweeps import grid, jobs
from tests.helpers import ROOT, TINY, write_run
from trainer import checkpoint, log

GRID = dict(batch_schedule="constant", max_tokens=512, gns_calibrate=False, eval_tokens=128, eval_iters=2)


@pytest.fixture(autouse=True)
def no_pictures_of_runs(monkeypatch):
    monkeypatch.setattr(train.Run, "draw", lambda run: "")


def saved(out):
    with open(os.path.join(out, "sweep", "runs", "sweep.json")) as f:
        return json.load(f)


def test_every_combination_is_a_run_and_the_learning_rate_follows_the_batch():
    rest = ["--micro_batch_size=4", "--batch_schedule=constant", "--batch_size=16,32,64", "--seed=0,1", "--lr_scaling=sqrt",
            "--cos_attn=(0,1)", "--learning_rate=4e-3"]
    base, wanted, swept = grid.grid(None, rest)
    assert swept == {"batch_size": [16, 32, 64], "seed": [0, 1]} and len(wanted) == 6
    assert list(wanted)[:3] == ["batch_size16-seed0", "batch_size16-seed1", "batch_size32-seed0"]
    rates = {name: grid.rate_at_end(c) for name, c in wanted.items()}
    own = 32  # the quickstart's batch_size, for which its learning rate is meant
    assert all(c.lr_reference_batch == own and c.cos_attn == (0, 1) for c in wanted.values())
    assert rates["batch_size16-seed0"] == pytest.approx(4e-3 * 0.5**0.5)
    assert rates["batch_size64-seed1"] == pytest.approx(4e-3 * 2**0.5) == pytest.approx(
        4e-3 * schedule.coupled(64, wanted["batch_size64-seed1"])[0])
    _, wanted, _ = grid.grid(None, [*rest, "--lr_reference_batch=16"])
    assert grid.rate_at_end(wanted["batch_size64-seed0"]) == pytest.approx(8e-3)
    assert not any(c.wandb_log for c in wanted.values())
    _, wanted, swept = grid.grid(None, [*rest, "--wandb_group=mine", "--wandb_tags=a,b"])
    assert all(c.wandb_log and c.wandb_group == "mine" and c.wandb_tags == "a,b" for c in wanted.values())
    assert set(swept) == {"batch_size", "seed"}


def test_a_grid_runs_skips_what_is_done_goes_on_after_a_stop_and_reports(tmp_path, tiny_args, monkeypatch, capsys):
    arguments = ["runs", "--in_process", *tiny_args(**GRID, out_dir=tmp_path), "--batch_size=4,16", "--seed=0,1"]
    assert sweep.main([*arguments, "--dry_run"]) == 0
    assert "4 to do" in (text := capsys.readouterr().out) and "batch_size16-seed1: 512 tokens" in text
    real, calls = jobs.run_training, []

    def second_is_interrupted(config, *args, **changes):
        calls.append(os.path.basename(config.out_dir))
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(config, *args, **changes)
    monkeypatch.setattr(jobs, "run_training", second_is_interrupted)
    assert sweep.main(arguments) == 130 and "the same command goes on" in capsys.readouterr().out
    assert [r["runs"] for r in saved(tmp_path)["rows"]] == [["batch_size4-seed0"]], "what is done is in sweep.json already"
    assert sweep.main(arguments) == 0
    assert calls == ["batch_size4-seed0", *["batch_size4-seed1"] * 2, "batch_size16-seed0", "batch_size16-seed1"]
    text = capsys.readouterr().out
    assert "1 of 4 runs are done, 3 to do" in text and "4 of 4 done, 100% of the tokens" in text
    assert "Lowest validation loss at the end" in text and "python train.py" in text and "All batches had the same" in text
    four, sixteen = saved(tmp_path)["rows"]
    folder = tmp_path / "sweep" / "runs"
    ends = [[r["val/loss"] for r in log.read(str(folder / name)) if "val/loss" in r][-1] for name in four["runs"]]
    assert four["val_loss"]["mean"] == pytest.approx(sum(ends) / 2) and four["seeds"] == [0, 1]
    assert (four["steps"]["mean"], sixteen["steps"]["mean"]) == (8, 2)
    assert os.path.getsize(folder / "sweep.png") > 10_000
    assert sweep.main(arguments) == 0 and len(calls) == 5
    assert sweep.main([*arguments, "--seed=0,1,2"]) == 0, "a larger grid"
    assert calls[5:] == ["batch_size4-seed2", "batch_size16-seed2"]
    with pytest.raises(SystemExit):
        sweep.main([*arguments, "--beta2=0.99"])
    assert "holds a run with other settings: beta2 is 0.99" in capsys.readouterr().err and len(calls) == 7


def made_up(folder, batch, seed, key="gns/calibrated_adam"):
    """A finished run on a curve with a critical batch of 16, a share off it by its seed."""
    off = 1 + 0.01 * (seed - 1)
    return write_run(folder, [batch] * 30, 16.0, per_row=round(off * 10 * (1 + 16 / batch) * 10), key=key, batch_size=batch,
                     block_size=64, seed=seed)


@pytest.mark.parametrize("batches", [(8, 16, 32), (8, 16)])
def test_a_sweep_of_batches_ends_with_the_curve_and_one_runs_prediction(tmp_path, batches):
    finished = {}
    for batch in batches:
        for seed in (0, 1, 2):
            folder = made_up(tmp_path / f"b{batch}s{seed}", batch, seed)
            finished[f"b{batch}s{seed}"] = Config(out_dir=folder, batch_size=batch, batch_schedule="constant", block_size=64)
    args = sweep.argparse.Namespace(config=None, rest=[])
    base, swept = next(iter(finished.values())), {"batch_size": list(batches), "seed": [0, 1, 2]}
    for name, config in finished.items():
        config.seed = int(name[-1])
    result = grid.result_of(finished, swept, base, args)
    text, found = "\n".join(grid.words_of(result["tradeoff"])), result["tradeoff"]
    assert "16 (12.8 to 20.8) from batch 8" in text and "a validation loss of 2.0000" in text or len(batches) < 3
    if len(batches) == 3:
        assert found["low"] < 16 < found["high"] < 25 and found["critical"] == pytest.approx(16, rel=0.05)
        assert "9 runs at 3 batch sizes" in text
    else:
        assert "not fitted, it takes runs at three batch sizes or more, here 2" in text
    grid.draw(finished, result, swept, str(tmp_path / "sweep.png"))
    assert os.path.getsize(tmp_path / "sweep.png") > 20_000
    assert "noise scale: gns/calibrated_adam" in grid.table(result, swept)
    linear = grid.tradeoff_of(result["rows"], finished, swept, Config())
    assert "constant batches" in linear["refused"]
    other = grid.tradeoff_of(result["rows"], finished, swept | {"n_layer": [2, 3]}, base)
    assert "(n_layer)" in other["refused"] and grid.tradeoff_of(result["rows"], finished, {"seed": [0]}, base) is None


def test_runs_that_go_by_different_noise_scales_have_a_column_each(tmp_path):
    finished = {}
    for metric, key in (("adam", "gns/calibrated_adam"), ("plain", "gns/calibrated")):
        finished[metric] = Config(out_dir=made_up(tmp_path / metric, 8, 0, key), gns_metric=metric)
    swept = {"gns_metric": ["adam", "plain"]}
    result = grid.result_of(finished, swept, finished["adam"], sweep.argparse.Namespace(config=None, rest=[]))
    head, adam, plain, *about = grid.table(result, swept).splitlines()
    assert head.endswith("noise scale: gns/calibrated_adam  noise scale: gns/calibrated")
    assert adam.split()[-2:] == ["16", "-"] and plain.split()[-2:] == ["-", "16"] and len([a for a in about if a]) == 2


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, tiny_args, monkeypatch, capsys):
    real = jobs.run_training

    def one_fails(config, *args, **changes):
        if config.seed == 1:
            raise jobs.ConfigError("no luck")
        real(config, *args, **changes)
    arguments = ["runs", "--in_process", *tiny_args(**GRID, out_dir=tmp_path), "--seed=0,1,2"]
    monkeypatch.setattr(jobs, "run_training", one_fails)
    assert sweep.main(arguments) == 1
    assert "failed: seed1: no luck" in capsys.readouterr().out and saved(tmp_path)["rows"][0]["seeds"] == [0, 2]
    monkeypatch.setattr(jobs, "run_training", real)
    assert sweep.main(arguments) == 0 and saved(tmp_path)["rows"][0]["seeds"] == [0, 1, 2]


def test_a_terminated_sweep_of_processes_saves_and_goes_on_bit_for_bit(tmp_path, tiny_data, tiny_args):
    """SIGTERM to sweep.py alone: its run saves a checkpoint; the same command then ends as if nothing had happened."""
    keys = {"dataset": tiny_data, **TINY, **GRID, "max_tokens": 16_000, "eval_tokens": 0, "checkpoint_tokens": 0,
            "eval_iters": 1, "gns": "off", "out_dir": tmp_path}
    arguments = ["runs", *(f"--{k}={v}" for k, v in keys.items())]
    process = subprocess.Popen([sys.executable, os.path.join(ROOT, "sweep.py"), *arguments], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True)
    run = tmp_path / "sweep" / "runs" / "run"
    while process.poll() is None and not (os.path.exists(run / "log.jsonl") and jobs.newest(str(run), "train/loss")):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out = process.communicate()[0]
    assert process.returncode == 130 and "the same command goes on" in out, out
    assert 0 < checkpoint.load(str(run))["state"]["tokens"] < 16_000
    assert sweep.main([*arguments, "--in_process"]) == 0
    assert train.main(tiny_args(**{**keys, "out_dir": tmp_path / "whole"})) == 0
    whole, resumed = ([r["train/loss"] for r in log.read(str(d)) if "train/loss" in r] for d in (tmp_path / "whole", run))
    assert whole == resumed and len(whole) * 256 >= 16_000
