"""The measurements of a step against a plain loop over examples, and exact mode end to end."""

import copy
import statistics

import numpy as np
import pytest
import torch

import gns
import train
from configurator import Config
from model import GPT, GPTConfig
from rightbatch import rows, step_time
from rightbatch.per_example import row_sq_norms
from trainer import batches, log
from trainer.distributed import Ranks
from trainer.optimizer import Optimizer
from trainer.step import TrainingStep, to_host

SHAPE = dict(n_layer=2, n_head=2, n_embd=16, block_size=16)
GROUPS = ("norm", "attention", "mlp", "embedding", "body", "total", "block_0", "block_1")
PLAIN_ONLY = ("embedding", "body", "block_0", "block_1")  # in Adam's metric total is the body


def belongs(name, group):
    if group == "total":
        return True
    if group == "body":
        return not name.startswith("w")
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


def papers_pair(grads, names, weights=None):
    """Gray et al. 2024, eqs. 4 and 5, with B_small = 1: from the gradients themselves, not from our code."""
    def square(g):
        return sum(float(((1 if weights is None else weights[n].double()) * g[n] ** 2).sum()) for n in names)
    B = len(grads)
    mean = {n: sum(g[n] for g in grads) / B for n in names}
    big, small = square(mean), statistics.fmean(square(g) for g in grads)
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
    config = Config(gns=mode, micro_batch_size=4, batch_size=12, gns_calibrate=False, gns_adam=True, **SHAPE)
    grads = example_gradients(model, x, y)
    metrics = metrics_of(model, optimizer)
    tracker = one_step(config, model, optimizer, x, y).tracker
    groups = GROUPS if mode == "exact" else ("norm",)
    assert tracker.groups == list(groups)
    for group in groups:
        names = [n for n in grads[0] if belongs(n, group)]
        scale = tracker.meter.scales[group]
        assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(papers_pair(grads, names), rel=2e-4), group
        if group not in PLAIN_ONLY:
            names = [n for n in names if belongs(n, "body")]
            scale = tracker.meter.scales[f"{group}_adam"]
            assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(papers_pair(grads, names, metrics), rel=2e-4), group


@pytest.mark.parametrize("size", [1, 6, 12])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.slow
def test_sampled_rows_are_the_body_and_the_norm_layers_in_the_mean_over_all_draws(setting, monkeypatch, size, bias):
    """A first row of each weight gives all its rows in turn: 192 is a multiple of all heights. Pairs are linear in norms."""
    model, optimizer, x, y = setting if not bias else with_bias(setting)
    pairs = []
    monkeypatch.setattr(gns.Calibration, "update", lambda self, scale, tokens, *both: pairs.append(both))
    monkeypatch.setattr(rows, "samples", lambda step: True)
    config = Config(gns="norm", micro_batch_size=size, batch_size=12, gns_adam=True, bias=bias, **SHAPE)
    grads, metrics = example_gradients(model, x, y), metrics_of(model, optimizer)
    names = {group: [n for n in grads[0] if belongs(n, group)] for group in ("body", "norm")}
    for own in range(192):
        monkeypatch.setattr(rows, "first", lambda seed, step, site, height, own=own: own % height)
        one_step(config, model, optimizer, x, y)
        model.zero_grad()
    for suffix, weights in enumerate((None, metrics)):
        found = np.array(pairs[suffix::2])  # (draw, body or norm, 2)
        assert found[:, 1] == pytest.approx(np.tile(papers_pair(grads, names["norm"], weights), (192, 1)), rel=2e-4)
        assert found[:, 0].std(0).min() > 0, "draws differ"
        assert found[:, 0].mean(0) == pytest.approx(papers_pair(grads, names["body"], weights), rel=5e-4)


def with_bias(setting):
    _, _, x, y = setting
    model = GPT(GPTConfig(vocab_size=64, bias=True, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), fused=True)
    model(x, y)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x, y


def test_a_thousand_draws_take_every_row_as_often():
    for height, k in ((48, 8), (100, 8), (5, 5)):
        drawn = np.array([rows.draw(1, step, [7, height], k)[1] for step in range(1000)])
        assert all(len(set(own)) == k for own in drawn), "no row twice"
        counts = np.bincount(drawn.ravel(), minlength=height)
        expected = 1000 * k / height
        assert ((counts - expected) ** 2).sum() <= (height + 5 * (2 * height) ** 0.5) * max(expected, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_thousand_draws_of_a_linears_rows_estimate_its_norms_without_bias(dtype):
    torch.manual_seed(0)
    B, T, C, O = 3, 7, 12, 40
    g, x, p = torch.randn(B, T, O).to(dtype), torch.randn(B, T, C).to(dtype), torch.rand(O, C)
    c = torch.einsum("bto,btc->boc", g.double(), x.double())  # an example's gradient of the weight
    bias = g.double().sum(1)
    truth = torch.stack([(c**2).sum((1, 2)), (bias**2).sum(1), (p * c**2).sum((1, 2)), (p[:, 0] * bias**2).sum(1)])
    found = []
    for step in range(1000):
        own = torch.tensor(rows.draw(0, step, [O], 8)[0])
        found.append(row_sq_norms(g, x, own, p[own], p[own, 0]).double() * O / 8)
    found = torch.stack(found)
    error = (found.mean(0) - truth) / (found.std(0) / 1000**0.5)
    assert error.abs().max() < 3.7  # of twelve
    every = row_sq_norms(g, x, torch.arange(O), p, p[:, 0]).double()
    torch.testing.assert_close(every, truth, rtol=1e-6 if dtype == torch.float32 else 2e-2, atol=0)


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


def test_a_sampled_step_logs_the_same_statistics_as_its_neighbours(setting, monkeypatch):
    model, optimizer, x, y = setting
    monkeypatch.setattr(rows, "samples", lambda step: True)
    found = []
    for on in (False, True):
        config = Config(gns="norm", micro_batch_size=4, batch_size=12, gns_calibrate=on, gns_adam=False, **SHAPE)
        found.append(one_step(config, model, optimizer, x, y).row())
        optimizer.zero_grad()
    assert {k for k in found[1] if not k.startswith("gns/calibrat")} == found[0].keys()
    assert {"gns/example_max", "gns/example_median", "gns/norm_step_tr_sigma", "gns/step_tr_sigma_se"} <= found[0].keys()
    assert {k: v for k, v in found[1].items() if k in found[0]} == found[0]


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
    config = Config(gns="norm", gns_crosscheck=True, micro_batch_size=4, batch_size=12, gns_calibrate=False, **SHAPE)
    grads = example_gradients(model, x, y)
    tracker = one_step(config, model, optimizer, x, y)
    for group in ("norm", "total"):
        names = [n for n in grads[0] if belongs(n, group)]
        means = [{n: sum(g[n] for g in grads[i:i + 4]) / 4 for n in names} for i in (0, 4, 8)]
        whole = {n: sum(m[n] for m in means) / 3 for n in names}
        small = np.mean([sum(float((m[n]**2).sum()) for n in names) for m in means])
        big = sum(float((whole[n]**2).sum()) for n in names)
        scale = tracker.tracker.meter.scales[f"{group}_micro"]
        assert (scale.sq_norm, scale.tr_sigma) == pytest.approx(gns.unbiased_pair(small, big, 4, 12), rel=2e-4)


def test_the_cross_check_does_not_change_training(tmp_path, tiny_args):
    for on in (False, True):
        train.main(tiny_args(out_dir=tmp_path / str(on), gns_crosscheck=on))
    a, b = ([r["train/loss"] for r in log.read(tmp_path / str(on)) if "train/loss" in r] for on in (False, True))
    np.testing.assert_allclose(a, b, rtol=1e-5)
    assert {"gns/norm_micro", "gns/total_micro"} <= log.read(tmp_path / "True")[-2].keys()


def test_exact_mode_trains_as_norm_mode_does_and_logs_every_group(tmp_path, tiny_args):
    for mode in ("norm", "exact"):
        train.main(tiny_args(out_dir=tmp_path / mode, gns=mode, gns_calibrate=False))
    norm, exact = ([r for r in log.read(tmp_path / m) if "train/loss" in r] for m in ("norm", "exact"))
    np.testing.assert_allclose([r["train/loss"] for r in norm], [r["train/loss"] for r in exact], rtol=1e-5)
    np.testing.assert_allclose([r["gns/norm_tr_sigma"] for r in norm], [r["gns/norm_tr_sigma"] for r in exact], rtol=1e-3)
    for group in GROUPS:
        assert {f"gns/{group}{end}" for end in ("", "_low", "_high", "_sq_norm", "_tr_sigma")} <= exact[-1].keys()
    parts = sum(exact[0][f"gns/{g}_tr_sigma"] for g in ("norm", "attention", "mlp", "embedding"))
    assert exact[0]["gns/total_tr_sigma"] == pytest.approx(parts, rel=1e-5)


def test_calibration_finds_the_exact_factor_within_a_hundred_steps(tmp_path, tiny_args):
    """A model that stands still, so that exact mode's own ratio is the truth."""
    common = dict(max_tokens=25_600, gns_half_life_tokens=10**9, learning_rate=0, min_lr=0, batch_schedule="constant", seed=1,
                  eval_tokens=0, log_interval=10)
    train.main(tiny_args(out_dir=tmp_path / "some", **common))
    train.main(tiny_args(out_dir=tmp_path / "exact", gns="exact", **common))
    some, exact = ([r for r in log.read(tmp_path / m) if "train/loss" in r] for m in ("some", "exact"))
    early = [r for r in some if r["step"] <= 100]
    assert early[-1]["gns"] is not None
    some, exact = some[-1], exact[-1]
    for metric, body in (("", "body"), ("_adam", "total_adam")):
        truth = exact[f"gns/{body}"] / exact[f"gns/norm{metric}"]
        assert some[f"gns/calibration{metric}_low"] < truth < some[f"gns/calibration{metric}_high"]
        assert some[f"gns/calibration{metric}"] == pytest.approx(truth, rel=0.3)
        assert some[f"gns/calibrated{metric}"] == pytest.approx(some[f"gns/calibration{metric}"] * some[f"gns/norm{metric}"])
    assert some["gns"] == some["gns/calibrated_adam"] and exact["gns"] == exact["gns/total_adam"]


def test_sampled_steps_come_often_at_first_and_their_number_is_foretold():
    sampled = [step for step in range(1, 300) if rows.samples(step)]
    assert sum(step <= 100 for step in sampled) == 50 and 100 < len([s for s in sampled if s > 100]) * 8 <= 200
    for step, count in ((0, 3), (95, 7), (200, 2)):
        assert sum(map(rows.samples, range(step + 1, step + 1 + rows.steps_until(step, count)))) == count


def test_sampled_steps_are_timed_as_others_are(setting, monkeypatch):
    model, _, x, y = setting
    monkeypatch.setattr(step_time, "WARM_UP", 0)
    step = TrainingStep(model, Config(gns="norm", micro_batch_size=12, batch_size=12, **SHAPE), Ranks(), "cpu", torch.float32)
    for i in range(5):
        step.accumulate([(x, y)], 1, i * x.numel(), (i + 1) * x.numel())
        record = step.update(1e-3, 0.95, 0.1)
        step.absorb(*to_host([record]), record)
    assert step.timer.averages.updates == 5


def test_sampling_does_not_change_a_bit_of_training(tmp_path, tiny_args):
    for on in (False, True):
        train.main(tiny_args(out_dir=tmp_path / str(on), gns_calibrate=on))
    a, b = ([r["train/loss"] for r in log.read(tmp_path / str(on)) if "train/loss" in r] for on in (False, True))
    assert a == b


@pytest.mark.slow
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
