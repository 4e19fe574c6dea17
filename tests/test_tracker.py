"""The measurements of a step against a plain loop over examples, and exact mode end to end."""

import copy
import math
import statistics

import numpy as np
import pytest
import torch

import gns
import train
from configurator import Config
from model import GPT, GPTConfig
from rightbatch.tracker import EXACT_EARLY, EXACT_MOST, calibrates
from trainer import batches, checkpoint, log
from trainer.distributed import Ranks
from trainer.optimizer import Optimizer
from trainer.step import TrainingStep, to_host

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
GROUPS = ("norm", "attention", "mlp", "embedding", "total", "block_0", "block_1")


def belongs(name, group):
    if group == "total":
        return True
    if group.startswith("block_"):
        return name.startswith(f"h.{group[6:]}.")
    return group == ("norm" if ".ln_" in f".{name}" else "attention" if ".attn." in name else "mlp" if ".mlp." in name
                     else "embedding")


def example_gradients(model, x, y):
    """[{parameter name: gradient of example b's own loss}] in float64."""
    model = copy.deepcopy(model).double()
    found = []
    for b in range(len(x)):
        model.zero_grad()
        model(x[b:b + 1], y[b:b + 1])[1].backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters()})
    return found


def papers_pair(grads, names, weights=None, measured=None):
    """Gray et al. 2024, eqs. 4 and 5, with B_small = 1: from the gradients themselves, not from our code. measured: how many
    examples' own norms are known."""
    def square(g):
        return sum(float(((1 if weights is None else weights[n].double()) * g[n] ** 2).sum()) for n in names)
    B = len(grads)
    mean = {n: sum(g[n] for g in grads) / B for n in names}
    big, small = square(mean), statistics.fmean(square(g) for g in grads[:measured])
    return (B * big - small) / (B - 1), (small - big) / (1 - 1 / B)


def one_step(config, model, optimizer, x, y, before=0):
    """train.py's step without the update; the step, which has the averages and the log row."""
    step = TrainingStep(model, config, Ranks(), "cpu", torch.float32)
    step.optimizer.parts = [optimizer]
    size = config.micro_batch_size
    step.accumulate(zip(x.split(size), y.split(size)), len(x) // size, before, before + x.numel())
    record = step.measure()
    step.absorb(*to_host([record]), record)
    return step


def metrics_of(model, optimizer):
    seam = Optimizer(model, Config(), "cpu", torch.float32)
    seam.parts = [optimizer]
    return seam.metric(dict(model.named_parameters()))


@pytest.fixture
def setting(tiny_data):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), fused=True)
    x, y = batches.Dataset(tiny_data, 16).train_batch(0, 0, 12, "cpu")
    model(x, y)[1].backward()  # one update, so that Adam has a second moment
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x, y


@pytest.mark.parametrize("mode", ["norm", "exact"])
def test_every_groups_pair_is_the_papers_on_the_same_batch_plain_and_adam(setting, mode):
    model, optimizer, x, y = setting
    config = Config(gns=mode, micro_batch_size=4, batch_size=12, gns_calibrate_tokens=0, gns_adam=True, **SHAPE)
    grads = example_gradients(model, x, y)
    metrics = metrics_of(model, optimizer)
    tracker = one_step(config, model, optimizer, x, y).tracker
    groups = GROUPS if mode == "exact" else ("norm",)
    assert tracker.groups == list(groups)
    for group in groups:
        names = [n for n in grads[0] if belongs(n, group)]
        scale = tracker.scales[group]
        assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(papers_pair(grads, names), rel=2e-4), group
        if not group.startswith("block_"):
            scale = tracker.scales[f"{group}_adam"]
            assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(papers_pair(grads, names, metrics), rel=2e-4), group


@pytest.mark.parametrize("size, exact", [(4, 8), (1, 8), (6, 12), (12, 12)])
def test_a_calibration_step_measures_some_examples_in_all_layers_and_all_in_the_norm_layers(setting, monkeypatch, size, exact):
    model, optimizer, x, y = setting
    pairs = []
    monkeypatch.setattr(gns.Calibration, "update", lambda self, scale, tokens, *both: pairs.append(both))
    config = Config(gns="norm", micro_batch_size=size, batch_size=12, gns_adam=True, **SHAPE)
    grads, metrics = example_gradients(model, x, y), metrics_of(model, optimizer)
    step = one_step(config, model, optimizer, x, y, before=3 * x.numel())
    names = {"total": list(grads[0]), "norm": [n for n in grads[0] if belongs(n, "norm")]}
    for suffix, weights, (total, norm) in zip(("", "_adam"), (None, metrics), pairs, strict=True):
        scale = step.tracker.scales["norm" + suffix]
        assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(papers_pair(grads, names["norm"], weights), rel=2e-4)
        assert total == pytest.approx(papers_pair(grads, names["total"], weights, exact), rel=2e-4)
        assert norm == pytest.approx(papers_pair(grads, names["norm"], weights, exact), rel=2e-4)
    own = [sum(float((g[n] ** 2).sum()) for n in names["norm"]) for g in grads]
    assert step.row()["gns/example_max"] == pytest.approx(max(own), rel=2e-4)
    assert step.row()["gns/example_median"] == pytest.approx(statistics.median(own), rel=2e-4)
    pairs.clear()
    model.zero_grad()
    one_step(config, model, torch.optim.AdamW(model.parameters(), fused=True), x, y)
    assert pairs[0][0] == pytest.approx(papers_pair(grads, names["total"]), rel=2e-4), "the first step measures all"


def test_adams_metric_is_the_reciprocal_of_its_denominator(setting):
    """Adam's own step tells its denominator: with lr 1, no decay and no bias correction left it moves by -m * p."""
    model, optimizer, _, _ = setting
    named = list(model.named_parameters())
    for _, p in named:  # many steps with the gradient held: m -> gradient, v -> gradient^2, corrections -> 1
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0, betas=(0.0, 0.9))
    for _ in range(300):
        optimizer.step()
    metrics, before = metrics_of(model, optimizer), {n: p.detach().clone() for n, p in named}
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    optimizer.step()
    for name, p in named:
        torch.testing.assert_close(before[name] - p.detach(), p.grad * metrics[name], rtol=1e-4, atol=1e-5)
    assert metrics_of(model, torch.optim.AdamW(model.parameters())) is None


def test_example_statistics_are_those_of_the_examples(setting):
    model, optimizer, x, y = setting
    grads = example_gradients(model, x, y)
    totals = np.array([sum(float((g**2).sum()) for g in e.values()) for e in grads])
    config = Config(gns="exact", micro_batch_size=4, batch_size=12, **SHAPE)
    last = one_step(config, model, optimizer, x, y).row()
    assert last["gns/example_max"] == pytest.approx(totals.max(), rel=1e-4)
    assert last["gns/example_median"] == pytest.approx(np.median(totals), rel=1e-4)
    # the jackknife by hand: leave each example out of `small`, with `big` held
    B = len(totals)
    left_out = np.array([np.delete(totals, b).mean() for b in range(B)]) / (1 - 1 / B)
    jackknife = np.sqrt((B - 1) / B * ((left_out - left_out.mean()) ** 2).sum())
    assert last["gns/step_tr_sigma_se"] == pytest.approx(jackknife, rel=1e-4)


def test_a_calibration_step_logs_the_same_statistics_as_its_neighbours(setting):
    model, optimizer, x, y = setting
    found = []
    for every in (0, 1):
        config = Config(gns="norm", micro_batch_size=4, batch_size=12, gns_calibrate_tokens=every, gns_adam=False, **SHAPE)
        found.append(one_step(config, model, optimizer, x, y).row())
        optimizer.zero_grad()
    assert {k for k in found[1] if not k.startswith("gns/calibrat")} == found[0].keys()
    numbers = {k: v for k, v in found[0].items() if v is not None}
    assert {"gns/example_max", "gns/example_median", "gns/norm_step_tr_sigma", "gns/step_tr_sigma_se"} <= numbers.keys()
    assert all(found[1][k] == pytest.approx(v, rel=1e-3) for k, v in numbers.items())


def test_adams_metric_survives_a_skipped_first_step_and_ignores_what_never_had_a_gradient():
    model = torch.nn.Module()
    model.weight = weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], betas=(0.9, 0.95), fused=True)
    model.parameter_groups = lambda decay: [{"params": [weight]}]
    weight.grad = torch.full((3,), float("nan"))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(metrics_of(model, optimizer)["weight"], torch.zeros(3))
    weight.grad, optimizer.found_inf = torch.tensor([1.0, 2.0, 0.0]), torch.zeros(())
    optimizer.step()
    torch.testing.assert_close(metrics_of(model, optimizer)["weight"], torch.tensor([1.0, 0.5, 0.0]))


def test_the_cross_check_is_the_classical_estimate_from_micro_batches(setting):
    model, optimizer, x, y = setting
    config = Config(gns="norm", gns_crosscheck=True, micro_batch_size=4, batch_size=12, gns_calibrate_tokens=0, **SHAPE)
    grads = example_gradients(model, x, y)
    tracker = one_step(config, model, optimizer, x, y)
    for group in ("norm", "total"):
        names = [n for n in grads[0] if belongs(n, group)]
        means = [{n: sum(g[n] for g in grads[i:i + 4]) / 4 for n in names} for i in (0, 4, 8)]
        whole = {n: sum(m[n] for m in means) / 3 for n in names}
        small = np.mean([sum(float((m[n]**2).sum()) for n in names) for m in means])
        big = sum(float((whole[n]**2).sum()) for n in names)
        scale = tracker.crosscheck.scales[f"{group}_micro"]
        assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(gns.unbiased_pair(small, big, 4, 12), rel=2e-4)


def test_the_cross_check_does_not_change_training(tmp_path, tiny_args):
    for on in (False, True):
        train.main(tiny_args(out_dir=tmp_path / str(on), gns_crosscheck=on))
    a, b = ([r["train/loss"] for r in log.read(tmp_path / str(on)) if "train/loss" in r] for on in (False, True))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert {"gns/norm_micro", "gns/total_micro"} <= log.read(tmp_path / "True")[-2].keys()


def test_exact_mode_trains_as_norm_mode_does_and_logs_every_group(tmp_path, tiny_args):
    for mode in ("norm", "exact"):
        train.main(tiny_args(out_dir=tmp_path / mode, gns=mode, gns_calibrate_tokens=0))
    norm, exact = ([r for r in log.read(tmp_path / m) if "train/loss" in r] for m in ("norm", "exact"))
    np.testing.assert_allclose([r["train/loss"] for r in norm], [r["train/loss"] for r in exact], rtol=1e-5)
    np.testing.assert_allclose([r["gns/norm_tr_sigma"] for r in norm], [r["gns/norm_tr_sigma"] for r in exact], rtol=1e-3)
    for group in GROUPS:
        assert {f"gns/{group}{end}" for end in ("", "_low", "_high", "_sq_norm", "_tr_sigma")} <= exact[-1].keys()
    parts = sum(exact[0][f"gns/{g}_tr_sigma"] for g in ("norm", "attention", "mlp", "embedding"))
    assert exact[0]["gns/total_tr_sigma"] == pytest.approx(parts, rel=1e-5)


def test_exact_steps_come_often_at_first_then_one_in_so_many_tokens_and_never_too_many():
    def exact(step, end, every):
        return [after for after in range(step, end + 1, step) if calibrates(after - step, after, every)]
    found = exact(100, 400_000, 5000)
    for early in (2000, 8000, 32_000):  # a half-life of the averages, a fifth of the tokens, holds the same number of them
        assert sum(0.8 * early < t <= early for t in found) == pytest.approx(-EXACT_EARLY * math.log(0.8), abs=1)
    assert [t for t in found if t > 300_000] == list(range(305_000, 400_001, 5000))
    assert found[0] == 100, "the first step"
    assert all(b - a > 100 for a, b in zip(found, found[1:])), "never two in a row"
    large = exact(4000, 400_000, 5000)
    assert sum(t > 200_000 for t in large) == pytest.approx(50 / EXACT_MOST, abs=1), "at most one in so many steps"


def test_calibration_takes_exact_steps_at_the_asked_distance_and_finds_the_exact_factor(tmp_path, tiny_args):
    """A model that stands still, so that exact mode's own ratio is the truth."""
    common = dict(max_tokens=24_000, gns_half_life_tokens=10**9, learning_rate=0, min_lr=0, batch_schedule="constant", seed=1,
                  eval_tokens=0, log_interval=10)
    train.main(tiny_args(out_dir=tmp_path / "some", gns_calibrate_tokens=1000, **common))
    train.main(tiny_args(out_dir=tmp_path / "exact", gns="exact", **common))
    some, exact = ([r for r in log.read(tmp_path / m) if "train/loss" in r][-1] for m in ("some", "exact"))
    for metric in ("", "_adam"):
        truth = exact[f"gns/total{metric}"] / exact[f"gns/norm{metric}"]
        assert some[f"gns/calibration{metric}_low"] < truth < some[f"gns/calibration{metric}_high"]
        assert some[f"gns/calibration{metric}"] == pytest.approx(truth, rel=0.5)
        assert some[f"gns/calibrated{metric}"] == pytest.approx(some[f"gns/calibration{metric}"] * some[f"gns/norm{metric}"])
    assert some["gns"] == some["gns/calibrated_adam"] and exact["gns"] == exact["gns/total_adam"]
    exact_steps = checkpoint.load(str(tmp_path / "some"))["gns"]["calibrations"][""]["averages"]["updates"]
    ends = range(some["tokens"] // some["step"], some["tokens"] + 1, some["tokens"] // some["step"])
    wanted = sum(calibrates(before, after, 1000) for before, after in zip([0, *ends], ends))
    assert wanted - 8 <= exact_steps <= wanted  # less those before the norm layers' own scale is determined


def test_exact_steps_of_a_calibration_are_not_timed(setting):
    model, _, x, y = setting
    step = TrainingStep(model, Config(gns="norm", micro_batch_size=12, batch_size=12, **SHAPE), Ranks(), "cpu", torch.float32)
    for i, usual in enumerate((False, True, True, False, True)):
        step.accumulate([(x, y)], 1, i * x.numel(), (i + 1) * x.numel())
        record = step.update(1e-3, 0.95, 0.1)
        assert record.usual == usual
        step.absorb(*to_host([record]), record)
    assert sum(step.timer.seen.values()) == 3


def test_calibration_does_not_change_training(tmp_path, tiny_args):
    for every in (0, 640):
        train.main(tiny_args(out_dir=tmp_path / str(every), gns_calibrate_tokens=every))
    a, b = ([r["train/loss"] for r in log.read(tmp_path / str(e)) if "train/loss" in r] for e in (0, 640))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_interval_from_64_steps_covers_the_long_run_value_of_a_fixed_model(tiny_data):
    """50 trials of 64 steps against 4,096 steps, all on one model without updates: at least 90% inside."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=64))
    data = batches.Dataset(tiny_data, 16)
    B, site_params = 8, [p for n, p in model.named_parameters() if "ln_" in n]

    def pairs(first, steps):
        found = []
        for i in range(steps):
            x, y = data.train_batch(1, first + i * B, B, "cpu")
            probes = torch.zeros(3, 2, B, requires_grad=True)
            loss = model(x, y, probes=probes)[1]
            grads = torch.autograd.grad(loss, [probes, *site_params])
            small = float(grads[0].sum()) * B**2 / B
            found.append(gns.unbiased_pair(small, sum(float((g**2).sum()) for g in grads[1:]), 1, B))
        return found

    def scale_of(values):
        scale = gns.NoiseScale(1e12)
        for v in values:
            scale.update(*v, B)
        return scale

    truth = scale_of(pairs(0, 4096)).gns
    inside = 0
    for trial in range(50):
        interval = scale_of(pairs((5000 + 64 * trial) * B, 64)).interval()
        inside += interval is not None and interval[0] <= truth <= interval[1]
    assert inside >= 45
