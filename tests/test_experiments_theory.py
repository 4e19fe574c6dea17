"""The experiments on estimators, costs and groups: formulas against counts, estimates against known truth."""

import json
import math
import os
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import ROOT, exact_rows

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import costs  # noqa: E402
import estimator_variance  # noqa: E402
import kernel_speed  # noqa: E402
import norm_predicts  # noqa: E402
import phase_plot  # noqa: E402

from plots import layers  # noqa: E402

SHAPES = [(1, 1, 1, 1), (3, 5, 7, 11), (2, 33, 8, 4), (5, 2, 64, 96)]


# -- the operations; inputs x (B, T, K), g (B, T, L); each returns what it must, weight gradient first

def plain(x, g):
    return g.flatten(0, 1).T @ x.flatten(0, 1)


def simultaneous(x, g):
    c = torch.bmm(g.mT, x)  # (B, L, K)
    return c.sum(0), torch.linalg.vector_norm(c, dim=(1, 2))


def gram(x, g):
    x_gram, g_gram = torch.bmm(x, x.mT).flatten(1), torch.bmm(g, g.mT).flatten(1)  # (B, T T)
    return plain(x, g), torch.bmm(x_gram[:, None], g_gram[:, :, None]).flatten().sqrt()


def norm_plain(x_hat, g):
    return (x_hat * g).sum((0, 1)), g.sum((0, 1))


def norm_only(x_hat, g):
    weight, bias = (x_hat * g).sum(1), g.sum(1)  # (B, C)
    return weight.sum(0), bias.sum(0), torch.linalg.vector_norm(weight, dim=1), torch.linalg.vector_norm(bias, dim=1)


# -- counting

class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write: each tensor once per operation, nothing kept in a cache between two."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = {t.untyped_storage()._cdata: t for t in args if isinstance(t, torch.Tensor)}.values()
            self.bytes += sum(t.numel() * t.itemsize for t in (*read, out))
        return out


def flops_of_sum(x, *_, **__):
    return int(np.prod(x))  # a shape, as FlopCounterMode passes it


FLOPS = {torch.ops.aten.sum: flops_of_sum, torch.ops.aten.mul: flops_of_sum,
         torch.ops.aten.linalg_vector_norm: lambda x, *_, **__: 2 * int(np.prod(x))}  # products are torch's own counts


def measured(operation, B, T, K, L):
    """(FLOPs, bytes) of an operation on shapes alone: no memory, no arithmetic."""
    x, g = torch.empty(B, T, K, device="meta"), torch.empty(B, T, L, device="meta")
    with FlopCounterMode(display=False, custom_mapping=FLOPS) as flops, Traffic() as traffic:
        operation(x, g)
    return flops.get_total_flops(), traffic.bytes


def measured_extra(B, T, K, L):
    """{method: (FLOPs, bytes) beyond the plain gradient}; for norm only the width is K."""
    def extra(operation, base, *shape):
        return tuple(np.subtract(measured(operation, B, T, *shape), measured(base, B, T, *shape)).tolist())
    return {"simultaneous": extra(simultaneous, plain, K, L), "gram": extra(gram, plain, K, L),
            "norm only": extra(norm_only, norm_plain, K, K)}



@pytest.mark.parametrize("shape", SHAPES)
def test_the_three_ways_give_the_same_norms_and_gradients(shape):
    B, T, K, L = shape
    x, g = torch.randn(B, T, K, dtype=torch.float64), torch.randn(B, T, L, dtype=torch.float64)
    each = torch.stack([g[b].T @ x[b] for b in range(B)])
    for method in (simultaneous, gram):
        gradient, norms = method(x, g)
        torch.testing.assert_close(gradient, each.sum(0))
        torch.testing.assert_close(norms, each.flatten(1).norm(dim=1))
    g = torch.randn(B, T, K, dtype=torch.float64)
    weight, bias, weight_norms, bias_norms = norm_only(x, g)
    torch.testing.assert_close((weight, bias), norm_plain(x, g))
    torch.testing.assert_close(weight_norms, (x * g).sum(1).norm(dim=1))
    torch.testing.assert_close(bias_norms, g.sum(1).norm(dim=1))


@pytest.mark.parametrize("shape", [*SHAPES, (8, 2048, 768, 3072)])
def test_cost_formulas_are_what_torch_counts(shape):
    counted = measured_extra(*shape)
    assert {m: costs.flops(m, *shape) for m in costs.METHODS} == {m: counted[m][0] for m in costs.METHODS}
    assert {m: costs.moved(m, *shape) for m in costs.METHODS} == {m: counted[m][1] for m in costs.METHODS}


def test_the_plain_gradient_is_counted_whole_and_a_tensor_used_twice_is_read_once():
    B, T, K, L = 3, 5, 7, 11
    assert measured(plain, B, T, K, L) == (2 * B * T * K * L, 4 * (B * T * (K + L) + K * L))
    assert measured(lambda x, g: torch.bmm(x, x.mT), B, T, K, L) == (2 * B * T * T * K, 4 * (B * T * K + B * T * T))


def test_model_flops_are_those_of_the_model():
    from model import GPT, GPTConfig
    shape, T = costs.Shape(3, 48), 40
    model = GPT(GPTConfig(n_layer=3, n_head=2, n_embd=48, block_size=T, vocab_size=costs.VOCABULARY))
    assert costs.model_flops(shape, B=2, T=T) == 2 * T * model.flops_per_token()


def test_the_crossover_is_where_costs_are_equal():
    shape = costs.Shape(2, 256)
    for formula in (costs.flops, costs.moved):
        T = costs.crossover(formula, shape)
        gram, simultaneous = (costs.model_extra(formula, shape, m, 8, T) for m in ("gram", "simultaneous"))
        assert gram == pytest.approx(simultaneous, rel=1e-6)
    # one square layer without a head: 3 C^2 = 4 C T^2 in FLOPs to leading order
    one = type("One", (), {"width": 4096, "linears": lambda self: [(4096, 4096)], "norms": lambda self: 0})()
    assert costs.crossover(costs.flops, one) == pytest.approx(math.sqrt(0.75 * 4096), rel=1e-3)


def test_cost_experiments_report_models_lengths_and_crossovers(tmp_path, monkeypatch):
    monkeypatch.setattr(costs, "LENGTHS", [128, 2048, 8192])
    assert costs.main(["--results", str(tmp_path), "--config", os.path.join(ROOT, "config", "wikitext2.py")]) == 0
    flops, moved = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("flop_cost", "io_cost"))
    for result in (flops, moved):
        assert result["command"].startswith("python experiments/costs.py")
        assert {"70M", "111M", "161M", "1.3B", "wikitext2"} < set(result["models"])
        m = result["models"]["111M"]
        assert all(a < b for a, b in zip(m["extra"]["norm only"], m["extra"]["simultaneous"]))
        assert (m["extra"]["gram"][1] < m["extra"]["simultaneous"][1]) == (2048 < m["crossover"])
        assert (m["extra"]["gram"][0] < m["extra"]["simultaneous"][0]) == (128 < m["crossover"])
    assert all(m["crossover"] < 128 for m in flops["models"].values()) and "gram costs less for none" in flops["finding"]
    assert "gram costs less for 1.3B" in moved["finding"] and (tmp_path / "io_cost.png").stat().st_size > 10_000


# -- the estimator's error

def test_the_jackknife_finds_the_error_of_a_mean_and_scales_with_the_ratio():
    rng = np.random.default_rng(0)
    x, ones = rng.normal(3, 1, 50), np.ones(50)
    value, error = estimator_variance.jackknife(x, ones)
    assert value == pytest.approx(x.mean()) and error == pytest.approx(x.std(ddof=1) / math.sqrt(50))
    assert estimator_variance.jackknife(x, 0.5 * ones)[1] == pytest.approx(2 * error)


def test_the_halving_tree_has_the_norm_of_every_mean():
    g = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = estimator_variance.halving_tree(iter(g), top=4)
    assert list(found) == [1, 2, 4]
    for k, sq_norms in found.items():
        np.testing.assert_allclose(sq_norms, g.view(-1, k, 5).mean(1).square().sum(1).numpy(), rtol=1e-12)


def simulated(true_gns, d, n_examples, top, rng):
    """Squared norms of means of Gaussian gradients with |G|^2 = 1 and Sigma = I true_gns/d."""
    g = rng.normal(0, math.sqrt(true_gns / d), (n_examples, d))
    g[:, 0] += 1
    return {2**i: (g.reshape(-1, 2**i, d).mean(1) ** 2).sum(1) for i in range(top.bit_length())}


@pytest.mark.parametrize("true_gns", [1.0, 32.0])
def test_simulated_errors_are_those_of_theory_and_of_the_jackknife(true_gns):
    rng, n, top, trials = np.random.default_rng(1), 1024, 16, 400
    draws = [simulated(true_gns, 64, n, top, rng) for _ in range(trials)]
    for small, big in [(1, 2), (1, 16), (8, 16)]:
        estimates, errors = zip(*(estimator_variance.jackknife(*estimator_variance.pairs(draw, small, big)) for draw in draws))
        spread = np.std(estimates) / true_gns
        expected = estimator_variance.theory(true_gns, 64, n, small, big)
        assert np.mean(estimates) / true_gns == pytest.approx(1, abs=4 * spread / math.sqrt(trials) + 2 * expected**2)
        # a standard deviation of 400 values is known to 3.5%; beyond first order the ratio spreads by some error^2 more
        assert spread == pytest.approx(expected, rel=0.12 + expected)
        assert np.median(errors) / true_gns == pytest.approx(expected, rel=0.12 + expected)


def test_model_gradients_are_those_whose_norms_the_probes_return(tmp_path, tiny_args):
    import configurator
    import sample
    import train
    from trainer import batches
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=640))
    config = configurator.read_run(tmp_path / "run")
    norms = estimator_variance.halving_tree(estimator_variance.model_gradients(tmp_path / "run", config, 4), top=4)
    model, _ = sample.load_model(tmp_path / "run", "cpu")
    x, y = batches.Dataset(config.dataset, config.block_size).train_batch(config.seed + 1, 0, 4, "cpu")
    probes = torch.zeros(len(model.probe_sites("exact")), 2, 4, requires_grad=True)
    model(x, y, probes=probes)[1].backward()
    np.testing.assert_allclose(norms[1], 16 * probes.grad.sum((0, 1)).numpy(), rtol=1e-4)
    np.testing.assert_allclose(norms[4], [sum(p.grad.square().sum().item() for p in model.parameters())], rtol=1e-4)


def test_the_finding_about_the_error_says_what_either_size_costs():
    def rows(errors, **more):
        return [{"small": s, "big": b, "error": e, "gns": 5.0, **more} for (s, b), e in zip(estimator_variance.grid(8), errors)]
    flat, steep = [1.0, 1.1, 1.2, 1.1, 1.0], rows([1.0, 1.2, 3.0, 4.0, 1.1])
    assert [v["small"] for v in estimator_variance.varied(steep, "small")] == [1, 2, 4]
    assert [v["big"] for v in estimator_variance.varied(steep, "big")] == [2, 4, 8]
    gaussian = [*rows(flat, true_gns=1.0), *rows(flat, true_gns=32.0)]
    text = estimator_variance.finding({"gaussian": gaussian, "model": steep})
    assert "at B_big = 8, B_small = 4 has 1.2, 1.2, 3.0 times the error of B_small = 1" in text
    assert "B_big = 2 has 1.1, 1.1, 4.0 times the error of 8" in text


# -- groups of one exact run

def test_phase_estimator_and_regression_share_one_run(tiny):
    phase = tiny(phase_plot, "--seeds", "1")
    assert {"total", "norm", "attention", "mlp", "embedding"} == set(phase["groups"])
    assert phase["groups"]["total"]["r_log_sq_norm"] == pytest.approx(1) and phase["groups"]["norm"]["r_log_sq_norm"] < 1
    for group in phase["groups"].values():
        rise = group["tr_sigma_factor"] / group["sq_norm_factor"]
        assert group["gns_last"] / group["gns_first"] == pytest.approx(rise)
    found = tiny(norm_predicts, "--seeds", "1")
    for fit in (found["half_life_tokens"], found["half_life_tokens_adam"]):
        assert len(fit) == 6 and all(-1 <= f["norm"]["r"] <= 1 and f["norm"]["slope_low"] < f["norm"]["slope_high"]
                                     for f in fit.values())
    assert fit != found["half_life_tokens"], "another metric, other numbers"
    variance = tiny(estimator_variance)
    assert tiny.runs == ["seed0"], "one run for all three"
    assert {(r["small"], r["big"]) for r in variance["model"]} == {(1, 2), (1, 4), (1, 8), (2, 8), (4, 8)}


def test_paths_that_rise_alike_are_called_alike_and_others_not():
    rows = exact_rows(n=100)
    for i, row in enumerate(rows):
        for group, times in (("total", 1.0), ("norm", 0.1), ("mlp", 2.0)):
            row |= {f"gns/{group}_sq_norm": times * math.exp(-i / 50), f"gns/{group}_tr_sigma": times * math.exp(-i / 100),
                    f"gns/{group}_step_tr_sigma": 1.0}
    groups = phase_plot.numbers(rows)
    factor = math.exp(-(99 - 10) / 50)
    assert groups["norm"]["sq_norm_factor"] == pytest.approx(factor)
    assert groups["norm"]["gns_last"] / groups["norm"]["gns_first"] == pytest.approx(factor**-0.5)
    two = phase_plot.finding({"groups": groups, "other_seeds": [groups]})
    assert "Here, 2 seeds" in two and "rose in 6 of 6" in two and "r 1.00 to 1.00 (|G|^2)" in two


def test_slope_and_r_over_seeds_are_those_put_in():
    numbers = norm_predicts.over_seeds([layers.regressions(exact_rows(factor=f, seed=s)) for s, f in enumerate((1.8, 2.2))])
    most = numbers[max(numbers)]["norm"]
    assert most["slope"] == pytest.approx(2.0, rel=0.05) and most["slope_low"] < 1.85 < 2.15 < most["slope_high"]
    assert most["r_low"] <= most["r"] <= most["r_high"] and most["r"] > 0.98
    other = {h: {"norm": {**g["norm"], "slope": 3.0}} for h, g in numbers.items()}
    text = norm_predicts.finding({"half_life_tokens": numbers, "half_life_tokens_adam": other})
    assert "slope 2.0" in text and "slope 3.00 (" in text and f"r {most['r']:.3f} (" in text


# -- the kernel's speed

def test_kernel_times_are_over_torchs_of_the_same_round(tiny, monkeypatch):
    result = tiny(kernel_speed)
    assert set(result["widths"]) == {"16", "32"} and set(result["widths"]["16"]) == set(kernel_speed.VARIANTS)
    for times in result["widths"].values():
        assert times["torch"]["ratio"] == 1 and times["ours"]["q1_ms"] <= times["ours"]["median_ms"] <= times["ours"]["q3_ms"]
    samples = {name: {"both": [t, 2 * t, 4 * t]} for name, t in (("torch", 1.0), ("ours", 0.5), ("copy", 0.25))}
    monkeypatch.setattr(kernel_speed.tools, "interleave", lambda variants, seconds: samples)
    found = kernel_speed.times_of(1, 2, 4, torch.float32, "cpu", 0)
    assert found["ours"]["ratio"] == 0.5 and found["ours"]["median_ms"] == 1000
    assert "takes 0.50 of the time" in kernel_speed.finding({"impl": "cpu", "widths": {4: found}})
