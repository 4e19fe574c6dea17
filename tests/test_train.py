"""The trainer end to end, on a tiny model."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import train
from tests.helpers import ROOT, TINY, assert_same_run, run_script, same_tensors, tree, untimed
from trainer import checkpoint, log


def test_a_run_leaves_log_config_checkpoint_and_picture_and_learns(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out)) == 0
    assert sorted(os.listdir(out)) == ["ckpt.1.pt", "ckpt.best.pt", "ckpt.pt", "config.json", "log.jsonl", "report.png",
                                       "step_time.json"]
    rows = log.read(out)
    steps = [r for r in rows if "train/loss" in r]
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    assert steps[-1]["train/loss"] < steps[0]["train/loss"] - 0.1
    assert steps[0]["batch_size"] == 4 and steps[-1]["batch_size"] == 16
    for a, b in zip(steps, steps[1:]):
        assert b["examples"] - a["examples"] == b["batch_size"] == 4 * b["accum"]
        assert b["tokens"] - a["tokens"] == 16 * b["batch_size"]
    assert all({"gns/norm", "gns/norm_low", "gns/norm_high", "gns/norm_sq_norm", "gns/norm_tr_sigma", "lr", "mfu",
                "grad/norm"} <= r.keys() for r in steps)
    val = [r for r in rows if "val/loss" in r]
    assert [r["step"] for r in val][0] == 0 and val[-1]["tokens"] >= 3200 and val[-1]["val/ppl"] == np.exp(val[-1]["val/loss"])
    config = json.load(open(out / "config.json"))
    assert config["config"]["n_embd"] == 16 and config["torch"] == torch.__version__ and config["parameters"] > 0
    text = capsys.readouterr().out
    assert "Noise scale" in text or "undetermined" in text
    assert "report.png" in text and "tok/s" in text and "left" in text


def test_logged_loss_gradient_and_noise_scale_match_a_plain_recomputation(tmp_path, tiny_args, tiny_data):
    """First step by hand: one big batch, a float64 loop over examples, the formulas of the papers."""
    import copy

    import gns
    from model import GPT, GPTConfig
    from trainer import batches
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=256, warmup_tokens=0, batch_schedule="constant"))
    first = next(r for r in log.read(tmp_path / "run") if r["step"] == 1 and "train/loss" in r)
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64))
    model = copy.deepcopy(model).double()
    x, y = batches.Dataset(tiny_data, 16).train_batch(0, 0, 16, "cpu")
    grads, losses = [], []
    for b in range(16):
        model.zero_grad()
        loss = model(x[b:b + 1], y[b:b + 1])[1]
        loss.backward()
        losses.append(float(loss.detach()))
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    mean = {n: sum(g[n] for g in grads) / 16 for n in grads[0]}
    norms = [n for n in mean if ".ln_" in f".{n}"]
    small = sum(float((g[n]**2).sum()) for g in grads for n in norms) / 16
    big = sum(float((mean[n]**2).sum()) for n in norms)
    sq_norm, tr_sigma = gns.unbiased_pair(small, big, 1, 16)
    assert first["train/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert first["grad/norm"] == pytest.approx(sum(float((g**2).sum()) for g in mean.values()) ** 0.5, rel=1e-4)
    assert first["gns/norm_sq_norm"] == pytest.approx(sq_norm, rel=1e-3)
    assert first["gns/norm_tr_sigma"] == pytest.approx(tr_sigma, rel=1e-3)


def test_the_micro_batch_changes_neither_examples_nor_losses(tmp_path, tiny_args):
    losses, scales = [], []
    for micro in (2, 4, 8):
        out = tmp_path / str(micro)
        train.main(tiny_args(out_dir=out, micro_batch_size=micro, batch_schedule="constant"))
        steps = [r for r in log.read(out) if "train/loss" in r]
        losses.append([r["train/loss"] for r in steps])
        scales.append([r["gns/norm_tr_sigma"] for r in steps])
        assert steps[-1]["accum"] == 16 // micro
    for other in (1, 2):
        np.testing.assert_allclose(losses[other], losses[0], rtol=2e-5)
        np.testing.assert_allclose(scales[other], scales[0], rtol=2e-3)


def test_tracking_does_not_change_training(tmp_path, tiny_args):
    for mode in ("off", "norm"):
        train.main(tiny_args(out_dir=tmp_path / mode, gns=mode, gns_calibrate=False))  # exact steps round differently
    keys = ("step", "train/loss", "grad/norm", "val/loss")
    a, b = ([{k: r.get(k) for k in keys} for r in log.read(tmp_path / m)] for m in ("off", "norm"))
    assert a == b
    assert same_tensors(*(checkpoint.load(str(tmp_path / m))["model"] for m in ("off", "norm")))


def start(args, code=None):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, os.path.join(ROOT, "train.py")] if code is None else [sys.executable, "-c", code]
    return subprocess.Popen([*command, *args], env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_step(out, step, process):
    while process.poll() is None:
        try:
            if any(r["step"] >= step for r in log.read(out)):
                return
        except OSError:
            pass
        time.sleep(0.01)
    raise AssertionError(process.stdout.read())


STOPPED = dict(dropout=0.1, max_tokens=24_000, warmup_tokens=320, checkpoint_tokens=3000, eval_tokens=9000, log_interval=3,
               gns_calibrate=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tiny_data):
    """The run that the stopped ones are compared with, in a process of its own like them."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    args = [f"--{k}={v}" for k, v in {"dataset": tiny_data, **TINY, **STOPPED, "out_dir": out}.items()]
    assert run_script(*args).returncode == 0
    return out


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, tiny_args, uninterrupted, how):
    process = start(tiny_args(out_dir=tmp_path / "stopped", **STOPPED))
    wait_for_step(tmp_path / "stopped", random.Random().randint(5, 100), process)
    process.send_signal(how)
    output = process.communicate(timeout=60)[0]
    if how != signal.SIGKILL and "Trained on" not in output:
        assert process.returncode == 128 + how and "--resume=True" in output
    done = run_script(*tiny_args(out_dir=tmp_path / "stopped", resume=True, **STOPPED))
    assert done.returncode == 0, done.stderr
    assert_same_run(uninterrupted, tmp_path / "stopped")


def test_a_kill_inside_a_checkpoint_write_loses_nothing(tmp_path, tiny_args):
    args = dict(max_tokens=6400)
    assert run_script(*tiny_args(out_dir=tmp_path / "whole", **args)).returncode == 0
    kill_in_write = """
import os, signal, sys, torch, train
real, count = torch.save, [0]
def save(obj, f):
    count[0] += 1
    if count[0] == 4:
        import io
        buffer = io.BytesIO()
        real(obj, buffer)
        f.write(buffer.getvalue()[:5000])
        f.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    real(obj, f)
torch.save = save
train.main(sys.argv[1:])
"""
    process = start(tiny_args(out_dir=tmp_path / "killed", **args), kill_in_write)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and len(list((tmp_path / "killed").glob("ckpt.pt.*.tmp"))) == 1
    assert run_script(*tiny_args(out_dir=tmp_path / "killed", resume=True, **args)).returncode == 0
    assert not list((tmp_path / "killed").glob("*.tmp"))
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_a_log_line_cut_off_by_a_kill_is_replaced(tmp_path, tiny_args):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        train.main(tiny_args(out_dir=out))
    saved = checkpoint.load(str(cut))
    with open(cut / "log.jsonl", "a") as f:
        f.write('{"step": 99, "tokens": 12')
    saved["state"]["tokens"] = 0  # not finished, so that the resume opens the log
    config = type("C", (), {"out_dir": str(cut), "wandb_log": False})()
    log.RunLog(config, saved["state"]["step"], known=saved["log"]).close()
    assert untimed(cut) == untimed(whole)
    assert all(json.loads(line) for line in open(cut / "log.jsonl"))


def test_resuming_a_finished_run_changes_nothing_and_reports_again(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    train.main(tiny_args(out_dir=out))
    before = {k: v for k, v in tree(out).items() if not k.endswith(".png")}
    assert train.main(tiny_args(out_dir=out, resume="auto")) == 0
    assert "is finished" in capsys.readouterr().out
    assert {k: v for k, v in tree(out).items() if not k.endswith(".png")} == before


@pytest.mark.parametrize("overrides, words", [
    ({}, ["already holds a run", "--resume=True"]),
    ({"resume": True, "n_layer": 3}, ["n_layer is 3", "2"]),
    ({"resume": True, "batch_size": 32}, ["batch_size is 32", "16"]),
    ({"resume": True, "dataset": "nowhere"}, ["dataset='nowhere'", "prepare"]),
    ({"block_size": 5000}, ["block_size=5000", "train.bin"]),
    ({"n_embd": 15}, ["n_embd=15", "n_head"]),
    ({"batch_size": 6}, ["batch_size=6", "4 or 8"]),
    ({"device": "mps" if not torch.backends.mps.is_available() else "cuda"}, ["device=", "this machine has"]),
])
def test_bad_input_exits_with_2_and_one_line_and_touches_nothing(tmp_path, tiny_args, overrides, words, capsys):
    out = tmp_path / "run"
    train.main(tiny_args(out_dir=out, max_tokens=320))
    before = tree(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(**{"out_dir": out, "max_tokens": 320, **overrides}))
    message = capsys.readouterr().err
    assert e.value.code == 2 and message.startswith("error: ") and message.count("\n") == 1
    for word in words:
        assert word in message
    assert tree(tmp_path) == before


def test_bad_input_creates_no_run_folder(tmp_path, tiny_args):
    result = run_script(*tiny_args(out_dir=tmp_path / "new", gns="nrm"))
    assert result.returncode == 2 and "did you mean norm" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()
    assert run_script(*tiny_args(out_dir=tmp_path / "new", resume=True)).returncode == 2
    assert not (tmp_path / "new").exists()


def poison(monkeypatch, when):
    """Make the loss of chosen calls NaN, as a diverging model would."""
    calls = [0]
    real = train.GPT.forward

    def forward(self, *args, **kwargs):
        logits, loss = real(self, *args, **kwargs)
        if self.training:
            calls[0] += 1
            if when(calls[0]):
                loss = loss * float("nan")
        return logits, loss
    monkeypatch.setattr(train.GPT, "forward", forward)


def test_a_step_that_is_not_finite_is_skipped_counted_and_reported(tmp_path, tiny_args, monkeypatch, capsys):
    poison(monkeypatch, lambda call: call in (5, 6))
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out, batch_schedule="constant", batch_size=4, max_tokens=1280)) == 0
    steps = [r for r in log.read(out) if "train/loss" in r]
    assert [r["bad_steps"] for r in steps][3:7] == [0, 1, 2, 2] and steps[4]["train/loss"] is None
    assert "2 steps skipped" in capsys.readouterr().out
    saved = checkpoint.load(str(out))
    assert all(torch.isfinite(v).all() for v in saved["model"].values())
    moments = saved["optimizer"]["state"][0]
    assert float(moments["step"]) == len(steps) - 2 and torch.isfinite(moments["exp_avg"]).all()
    assert saved["gns"]["scales"]["norm"]["updates"] == len(steps) - 2


def test_ten_bad_steps_in_a_row_stop_the_run_with_advice_and_a_good_checkpoint(tmp_path, tiny_args, monkeypatch, capsys):
    poison(monkeypatch, lambda call: call > 6)
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=out, batch_schedule="constant", batch_size=4, log_interval=7, max_tokens=6400))
    message = capsys.readouterr().err
    assert e.value.code == 2 and "10 steps in a row" in message and "learning_rate" in message
    assert all(torch.isfinite(v).all() for v in checkpoint.load(str(out))["model"].values())


def test_a_batch_of_one_trains_and_says_that_it_has_no_noise_scale(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out, micro_batch_size=1, batch_size=1, batch_size_start=1, max_tokens=320)) == 0
    assert "one example has no noise scale" in capsys.readouterr().out
    assert all(r["gns/norm"] is None for r in log.read(out) if "train/loss" in r)


def test_gns_off_says_so_and_still_draws(tmp_path, tiny_args, capsys):
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out, gns="off", max_tokens=640)) == 0
    assert "not measured" in capsys.readouterr().out and (out / "report.png").exists()


def test_best_validation_loss_is_never_replaced_by_a_worse_one(tmp_path, tiny_args, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 4.0, 2.2, 9.0, 9.0])
    monkeypatch.setattr(train, "validation_loss", lambda *_: next(losses))
    train.main(tiny_args(out_dir=tmp_path / "run", eval_tokens=800))
    assert checkpoint.load(str(tmp_path / "run"))["state"]["best_val_loss"] == 2.0


def test_validation_does_not_depend_on_the_micro_batch_or_the_training_seed(tiny_data):
    from configurator import Config
    from model import GPT, GPTConfig
    from trainer import batches
    from trainer.distributed import Ranks
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=64, dropout=0.5))
    data = batches.Dataset(tiny_data, 16)
    configs = [Config(eval_iters=7, micro_batch_size=m, seed=m) for m in (1, 2, 5)]
    losses = [train.validation_loss(train.TrainingStep(model, c, Ranks(), "cpu", torch.float32), data) for c in configs]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6) and model.training


@pytest.mark.parametrize("overrides", [
    dict(norm="rmsnorm", bias=False, tie_weights=False), dict(cos_attn="(0,1)", spectral_qkv="1", dropout=0.1),
    dict(activation_checkpointing="block", lr_decay="cosine", grad_clip=0), dict(dtype="bfloat16"),
    pytest.param(dict(dtype="float16"), marks=pytest.mark.slow),
    dict(min_lr=0, decay_tokens=320)], ids=str)
def test_every_option_trains(tmp_path, tiny_args, overrides):
    out = tmp_path / "run"
    assert train.main(tiny_args(out_dir=out, **{"max_tokens": 640, **overrides})) == 0
    steps = [r for r in log.read(out) if "train/loss" in r]
    assert steps[-1]["train/loss"] < 4.4 and steps[-1]["gns/norm_tr_sigma"] > 0


@pytest.mark.slow
def test_float16_measures_the_same_noise_as_float32(tmp_path, tiny_args):
    """Loss scaling multiplies every gradient by up to 65536; the log must not see it."""
    rows = []
    for dtype in ("float32", "float16"):
        train.main(tiny_args(out_dir=tmp_path / dtype, dtype=dtype, max_tokens=256, batch_schedule="constant", warmup_tokens=0))
        rows.append([r for r in log.read(tmp_path / dtype) if "train/loss" in r][0])
    for key in ("grad/norm", "gns/norm_sq_norm", "gns/norm_tr_sigma"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=0.02), key


def test_gradient_norm_is_logged_before_clipping_and_with_clipping_off(tmp_path, tiny_args):
    norms = []
    for clip in (0, 1e-3):
        train.main(tiny_args(out_dir=tmp_path / str(clip), grad_clip=clip, max_tokens=64, warmup_tokens=0))
        norms.append([r["grad/norm"] for r in log.read(tmp_path / str(clip)) if "grad/norm" in r][0])
    assert norms[0] == norms[1] > 1e-2


def test_importing_touches_nothing_and_loads_nothing_heavy():
    code = ("import sys; sys.argv = ['x', '--nonsense']; import train, sample, plot, sweep, bench; "
            "print([m for m in ('wandb', 'datasets', 'tiktoken', 'matplotlib') if m in sys.modules])")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_a_run_that_ended_before_its_first_step_can_be_started_again(tmp_path, tiny_args):
    """Ctrl-C while wandb connects or the kernel compiles leaves a folder without a checkpoint: nothing to lose there."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "log.jsonl").write_text('{"step": 0, "tokens": 0, "val/loss": 4.0}\n')
    assert train.main(tiny_args(out_dir=out, max_tokens=320)) == 0
    rows = log.read(out)
    assert sum(r["step"] == 0 for r in rows) == 1 and rows[0]["val/loss"] != 4.0


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path, tiny_args, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path / "file" / "run"))
    assert e.value.code == 2 and "file" in capsys.readouterr().err


def test_a_validation_loss_that_is_not_finite_neither_becomes_the_best_nor_breaks_the_summary(tmp_path, tiny_args, monkeypatch,
                                                                                                         capsys):
    losses = iter([float("nan"), 3.0, float("nan")])
    monkeypatch.setattr(train, "validation_loss", lambda *_: next(losses))
    assert train.main(tiny_args(out_dir=tmp_path / "run")) == 1
    assert "it ended without a finite loss (best 3.0000)" in capsys.readouterr().out
    assert train.main(tiny_args(out_dir=tmp_path / "run", resume=True)) == 1, "a look at it afterwards says the same"
    assert checkpoint.load(str(tmp_path / "run"))["state"]["best_val_loss"] == 3.0
