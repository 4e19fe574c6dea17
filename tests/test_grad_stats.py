"""grad_stats against plain autograd, and that it changes nothing."""

import math

import pytest
import torch

import train
from model import GPT, GPTConfig
from tests.helpers import TINY
from trainer import batches, checkpoint, log

STEP = TINY["batch_size"] * TINY["block_size"]  # tokens
FIXED = dict(batch_schedule="constant", max_tokens=8 * STEP, gns_calibrate=False, grad_clip=0.5, learning_rate=1e-2)
MEASURED = ("grad/coherence", "grad/coherence_total", "grad/mean", "grad/variance", "adam/snr", "update/norm", "update/ratio")


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr(train.Run, "draw", lambda run: "")


def rows_of(out):
    return {r["step"]: r for r in log.read(str(out)) if "train/loss" in r}


def model_of(saved):
    shape = {k: v for k, v in saved["config"].items() if k in ("n_layer", "n_head", "n_embd", "block_size")}
    model = GPT(GPTConfig(vocab_size=saved["vocab_size"], **shape)).double()
    model.load_state_dict(saved["model"])
    return model


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def reference(saved, lr):
    """The step after a checkpoint in float64: plain autograd for each micro-batch by itself, torch's plain AdamW, and every
    measure written down as its definition says."""
    config, model = saved["config"], model_of(saved)
    data = batches.Dataset(config["dataset"], config["block_size"])
    x, y = data.train_batch(config["seed"], saved["state"]["examples"], config["batch_size"], "cpu")
    g = []
    for part in zip(x.split(config["micro_batch_size"]), y.split(config["micro_batch_size"])):
        g.append(flat(torch.autograd.grad(model(*part)[1], list(model.parameters()))))
    K, G = len(g), sum(g) / len(g)

    def cosine(a, b):
        return float(a @ b / (a.norm() * b.norm()))
    found = {"grad/coherence": sum(cosine(g[k], g[k + 1]) for k in range(K - 1)) / (K - 1),
             "grad/coherence_total": sum(cosine(one, G) for one in g) / K,
             "grad/mean": float(G.mean()), "grad/variance": float(G.var(correction=0))}
    for k in (1, 2):
        so_far = sum(g[:k]) / k
        found |= {f"grad/norm_after_{k}": float(so_far.norm()), f"grad/mean_after_{k}": float(so_far.mean()),
                  f"grad/variance_after_{k}": float(so_far.var(correction=0))}

    optimizer = torch.optim.AdamW(model.parameter_groups(config["weight_decay"]), lr=lr, betas=(0.9, 0.95), fused=False)
    optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group.update(lr=lr, fused=False, foreach=False)
    before = flat(model.parameters())
    start = 0
    for p in model.parameters():
        p.grad = G[start:start + p.numel()].view_as(p) * min(1.0, config["grad_clip"] / float(G.norm()))
        start += p.numel()
    optimizer.step()
    update = flat(model.parameters()) - before
    found |= {"update/norm": float(update.norm()), "update/ratio": float(update.norm() / before.norm())}
    ratios = []
    for p in model.parameters():
        state = optimizer.state[p]
        t = float(state["step"])
        m, v = state["exp_avg"].double() / (1 - 0.9**t), state["exp_avg_sq"].double() / (1 - 0.95**t)
        ratios.append((m.abs() / (v.sqrt() + 1e-8))[v > 0])
    return {**found, "adam/snr": float(torch.cat(ratios).mean())}, float(G.norm())


@pytest.mark.parametrize("overrides", [{}, {"gns_crosscheck": True, "activation_checkpointing": "block"}])
def test_every_measure_equals_plain_autograd(tmp_path, tiny_args, overrides):
    common = dict(FIXED, out_dir=tmp_path, grad_stats=True, **overrides)
    assert train.main(tiny_args(**common, stop_tokens=4 * STEP)) == 0
    saved = checkpoint.load(str(tmp_path))
    assert train.main(tiny_args(**common, stop_tokens=5 * STEP, resume=True)) == 0
    row = rows_of(tmp_path)[5]
    expected, norm = reference(saved, row["lr"])
    assert norm > 0.5, "the step is clipped, and the gradient is measured before that"
    assert set(expected) == {k for k in row if k.startswith(("grad/", "adam/", "update/"))} - {"grad/norm"}
    for key, value in expected.items():
        loose = value and abs(value) < 1e-4  # a mean near 0 is a difference of large sums
        assert row[key] == pytest.approx(value, rel=1e-2 if loose else 2e-4, abs=1e-7), key


def test_a_step_of_one_micro_batch_has_no_coherence_and_all_the_rest(tmp_path, tiny_args):
    args = tiny_args(**{**FIXED, "micro_batch_size": 16, "out_dir": tmp_path, "grad_stats": True, "stop_tokens": 2 * STEP})
    assert train.main(args) == 0
    row = rows_of(tmp_path)[2]
    assert row["grad/coherence"] is None and row["grad/coherence_total"] is None
    assert all(math.isfinite(row[k]) for k in MEASURED[2:]) and not any("_after_" in k for k in row)


@pytest.mark.parametrize("overrides", [{"dropout": 0.1, "max_tokens": 1280}, {"gns_crosscheck": True, "max_tokens": 1280}])
def test_measuring_changes_no_bit_of_the_training(tmp_path, tiny_args, overrides):
    """The linear schedule goes from one micro-batch to four."""
    rows = {}
    for on in (True, False):
        assert train.main(tiny_args(out_dir=tmp_path / str(on), grad_stats=on, **overrides)) == 0
        rows[on] = rows_of(tmp_path / str(on))
    clock = {"dt_ms", "tok_per_sec", "mfu", "seconds"}
    for step, row in rows[False].items():
        row = {k: v for k, v in row.items() if k not in clock and not k.startswith("step_time/")}
        assert {k: rows[True][step][k] for k in row} == row
        assert not set(MEASURED) & set(row) and set(MEASURED) <= set(rows[True][step])
    a, b = (checkpoint.load(str(tmp_path / str(on))) for on in (True, False))
    assert all(torch.equal(a["model"][k], b["model"][k]) for k in b["model"])
    assert all(torch.equal(a["optimizer"]["state"][i][k], v) for i, s in b["optimizer"]["state"].items() for k, v in s.items())


def test_it_may_be_turned_on_by_a_resume_and_is_measured_at_logged_steps(tmp_path, tiny_args):
    common = dict(FIXED, log_interval=3)
    assert train.main(tiny_args(**common, out_dir=tmp_path / "whole", grad_stats=True)) == 0
    assert train.main(tiny_args(**common, out_dir=tmp_path / "two", stop_tokens=2 * STEP)) == 0
    assert train.main(tiny_args(**common, out_dir=tmp_path / "two", grad_stats=True, resume=True)) == 0
    whole, two = rows_of(tmp_path / "whole"), rows_of(tmp_path / "two")
    assert sorted(whole) == [3, 6, 8]
    for step, row in whole.items():
        assert {k: two[step][k] for k in MEASURED} == {k: row[k] for k in MEASURED}


@pytest.mark.slow
def test_float16_loss_scaling_is_undone(tmp_path, tiny_args):
    common = dict(FIXED, stop_tokens=STEP, eval_iters=1, n_layer=1)
    for name, dtype, on in (("off", "float16", False), ("half", "float16", True), ("full", "float32", True)):
        assert train.main(tiny_args(**common, out_dir=tmp_path / name, dtype=dtype, grad_stats=on)) == 0
    off, half, full = (rows_of(tmp_path / name)[1] for name in ("off", "half", "full"))
    assert off["train/loss"] == half["train/loss"] and off["grad/norm"] == half["grad/norm"]
    assert off["bad_steps"] == half["bad_steps"] == 0
    for key in ("grad/coherence", "grad/coherence_total", "grad/variance", "grad/norm_after_1", "grad/norm_after_2",
                "update/norm"):
        assert half[key] == pytest.approx(full[key], rel=0.02), key


def test_a_step_that_is_not_finite_is_null_and_moves_nothing(tmp_path, tiny_args, monkeypatch):
    real, calls = batches.Dataset.train_batch, []
    forward = GPT.forward

    def poisoned(self, idx, *args, **kwargs):
        logits, loss = forward(self, idx, *args, **kwargs)
        return logits, loss * float("nan") if len(calls) in range(9, 13) and self.training else loss

    def counted(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs)
    monkeypatch.setattr(batches.Dataset, "train_batch", counted)
    monkeypatch.setattr(GPT, "forward", poisoned)
    assert train.main(tiny_args(**FIXED, out_dir=tmp_path, grad_stats=True)) == 0
    rows = rows_of(tmp_path)
    assert rows[3]["bad_steps"] == 1 and rows[3]["grad/coherence"] is None and rows[3]["update/norm"] == 0
    assert all(rows[4][k] is not None for k in MEASURED)
