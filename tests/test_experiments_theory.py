"""The experiments on estimators, costs and groups: formulas against counts, estimates against known truth."""

import math
import os
import sys

import numpy as np
import pytest
import torch

from tests.helpers import ROOT, exact_rows

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import batch_pairs  # noqa: E402
import costs  # noqa: E402
import estimator_variance  # noqa: E402
import flop_cost  # noqa: E402
import io_cost  # noqa: E402
import kernel_speed  # noqa: E402
import norm_predicts  # noqa: E402
import phase_plot  # noqa: E402

from plots import layers  # noqa: E402

SHAPES = [(1, 1, 1, 1), (3, 5, 7, 11), (2, 33, 8, 4), (5, 2, 64, 96)]


# -- what the norms cost

@pytest.mark.parametrize("shape", SHAPES)
def test_the_three_ways_give_the_same_norms_and_gradients(shape):
    B, T, K, L = shape
    x, g = torch.randn(B, T, K, dtype=torch.float64), torch.randn(B, T, L, dtype=torch.float64)
    each = torch.stack([g[b].T @ x[b] for b in range(B)])
    for method in (costs.simultaneous, costs.gram):
        gradient, norms = method(x, g)
        torch.testing.assert_close(gradient, each.sum(0))
        torch.testing.assert_close(norms, each.flatten(1).norm(dim=1))
    g = torch.randn(B, T, K, dtype=torch.float64)
    weight, bias, weight_norms, bias_norms = costs.norm_only(x, g)
    torch.testing.assert_close((weight, bias), costs.norm_plain(x, g))
    torch.testing.assert_close(weight_norms, (x * g).sum(1).norm(dim=1))
    torch.testing.assert_close(bias_norms, g.sum(1).norm(dim=1))


@pytest.mark.parametrize("shape", SHAPES)
def test_cost_formulas_are_what_torch_counts(shape):
    counted = costs.measured_extra(*shape)
    assert {m: flop_cost.flops(m, *shape) for m in costs.METHODS} == {m: counted[m][0] for m in costs.METHODS}
    assert {m: io_cost.moved(m, *shape) for m in costs.METHODS} == {m: counted[m][1] for m in costs.METHODS}


def test_the_plain_gradient_is_counted_whole_and_a_tensor_used_twice_is_read_once():
    B, T, K, L = 3, 5, 7, 11
    assert costs.measured(costs.plain, B, T, K, L) == (2 * B * T * K * L, 4 * (B * T * (K + L) + K * L))
    assert costs.measured(lambda x, g: torch.bmm(x, x.mT), B, T, K, L) == (2 * B * T * T * K, 4 * (B * T * K + B * T * T))
    assert costs.measured(lambda x, g: x.mT.flatten(0, 1)[:2], B, T, K, L)[0] == 0


def test_model_flops_are_those_of_the_model():
    from model import GPT, GPTConfig
    shape, T = costs.Shape(3, 48), 40
    model = GPT(GPTConfig(n_layer=3, n_head=2, n_embd=48, block_size=T, vocab_size=costs.VOCABULARY))
    assert flop_cost.model_flops(shape, B=2, T=T) == 2 * T * model.flops_per_token()


def test_the_crossover_is_where_costs_are_equal():
    shape = costs.Shape(2, 256)
    for formula in (flop_cost.flops, io_cost.moved):
        T = costs.crossover(formula, shape)
        gram, simultaneous = (costs.model_extra(formula, shape, m, 8, T) for m in ("gram", "simultaneous"))
        assert gram == pytest.approx(simultaneous, rel=1e-6)
    # one square layer without a head: 3 C^2 = 4 C T^2 in FLOPs to leading order
    one = type("One", (), {"width": 4096, "linears": lambda self: [(4096, 4096)], "norms": lambda self: 0})()
    assert costs.crossover(flop_cost.flops, one) == pytest.approx(math.sqrt(0.75 * 4096), rel=1e-3)


def test_cost_experiments_report_models_lengths_and_crossovers(tiny, monkeypatch):
    monkeypatch.setattr(costs, "LENGTHS", [128, 2048, 8192])
    flops, moved = tiny(flop_cost, "--config", os.path.join(ROOT, "config", "wikitext2.py")), tiny(io_cost)
    for result in (flops, moved):
        assert result["largest_error_of_formula"] == 0 and {"70M", "111M", "161M", "1.3B"} < set(result["models"])
        m = result["models"]["111M"]
        assert all(a < b for a, b in zip(m["extra"]["norm only"], m["extra"]["simultaneous"]))
        assert (m["extra"]["gram"][1] < m["extra"]["simultaneous"][1]) == (2048 < m["crossover"])
        assert (m["extra"]["gram"][0] < m["extra"]["simultaneous"][0]) == (128 < m["crossover"])
    assert "wikitext2" in flops["models"] and "wikitext2" not in moved["models"]
    assert all(m["crossover"] < 128 for m in flops["models"].values()) and "every length from 128" in flops["finding"]
    assert "gram moves fewer for 1.3B" in moved["finding"]


# -- the estimator's error

def test_the_jackknife_finds_the_error_of_a_mean_and_scales_with_the_ratio():
    rng = np.random.default_rng(0)
    x, ones = rng.normal(3, 1, 50), np.ones(50)
    value, error = batch_pairs.jackknife(x, ones)
    assert value == pytest.approx(x.mean()) and error == pytest.approx(x.std(ddof=1) / math.sqrt(50))
    assert batch_pairs.jackknife(x, 0.5 * ones)[1] == pytest.approx(2 * error)


def test_the_halving_tree_has_the_norm_of_every_mean():
    g = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = batch_pairs.halving_tree(iter(g), top=4)
    assert list(found) == [1, 2, 4]
    for k, sq_norms in found.items():
        np.testing.assert_allclose(sq_norms, g.view(-1, k, 5).mean(1).square().sum(1).numpy(), rtol=1e-12)


@pytest.mark.parametrize("true_gns", [1.0, 32.0])
def test_simulated_errors_are_those_of_theory_and_of_the_jackknife(true_gns):
    rng, n, top, trials = np.random.default_rng(1), 1024, 16, 400
    draws = [batch_pairs.simulated(true_gns, 64, n, top, rng) for _ in range(trials)]
    for small, big in [(1, 2), (1, 16), (8, 16)]:
        estimates, errors = zip(*(batch_pairs.jackknife(*batch_pairs.pairs(draw, small, big)) for draw in draws))
        spread = np.std(estimates) / true_gns
        expected = batch_pairs.theory(true_gns, 64, n, small, big)
        assert np.mean(estimates) / true_gns == pytest.approx(1, abs=4 * spread / math.sqrt(trials) + 2 * expected**2)
        # a standard deviation of 400 values is known to 3.5%; beyond first order the ratio spreads by some error^2 more
        assert spread == pytest.approx(expected, rel=0.12 + expected)
        assert np.median(errors) / true_gns == pytest.approx(expected, rel=0.12 + expected)


def test_model_gradients_are_those_whose_norms_the_probes_return(tmp_path, tiny_args):
    import sample
    import train
    from sweeps import jobs
    from trainer import batches
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=640))
    config = jobs.read_config(tmp_path / "run")
    norms = batch_pairs.halving_tree(estimator_variance.model_gradients(tmp_path / "run", config, 4), top=4)
    model, _ = sample.load_model(tmp_path / "run", "cpu")
    x, y = batches.Dataset(config.dataset, config.block_size).train_batch(config.seed + 1, 0, 4, "cpu")
    probes = torch.zeros(len(model.probe_sites("exact")), 2, 4, requires_grad=True)
    model(x, y, probes=probes)[1].backward()
    np.testing.assert_allclose(norms[1], 16 * probes.grad.sum((0, 1)).numpy(), rtol=1e-4)
    np.testing.assert_allclose(norms[4], [sum(p.grad.square().sum().item() for p in model.parameters())], rtol=1e-4)


def test_the_finding_about_the_error_says_from_where_sizes_stop_mattering():
    def rows(small, big):
        return [{"small": s, "big": b, "error": e, "error_uncertainty": 0.1, "gns": 5.0} for (s, b), e in
                zip([(1, 8), (2, 8), (4, 8), (1, 4), (1, 2)], small + big)]
    flat, steep = rows([1.0, 1.1, 1.2], [1.0, 1.1]), rows([1.0, 1.2, 3.0], [1.1, 4.0])
    assert [v["small"] for v in estimator_variance.by_small(steep, 8)] == [1, 2, 4]
    assert [v["big"] for v in estimator_variance.by_big(steep)] == [8, 4, 2]
    text = estimator_variance.finding(model=steep, low=flat, high=flat, top=8)
    assert "1.2, 1.2 and 3.0 times the error of B_small = 1; a larger B_small is never clearly better" in text
    assert "up to 4, 4, 2 it costs" in text and "1.1, 1.1 and 4.0 times" in text and "from 2, 2, 4 on" in text
    upside_down = rows([3.0, 1.5, 1.0], [3.0, 3.0])
    assert "clearly better somewhere" in estimator_variance.finding(model=upside_down, low=flat, high=flat, top=8)


# -- groups of one exact run

def test_phase_estimator_and_regression_share_one_run(tiny):
    phase = tiny(phase_plot, "--seeds", "1")
    assert {"total", "norm", "attention", "mlp", "embedding"} == set(phase["groups"])
    assert phase["groups"]["total"]["r_log_sq_norm"] == pytest.approx(1) and phase["groups"]["norm"]["r_log_sq_norm"] < 1
    for group in phase["groups"].values():
        rise = group["tr_sigma_factor"] / group["sq_norm_factor"]
        assert group["gns_last"] / group["gns_first"] == pytest.approx(rise) and len(group["path"]) == 25
    found = tiny(norm_predicts, "--seeds", "1")
    for fit in (found["half_life_tokens"], found["half_life_tokens_adam"]):
        assert len(fit) == 6 and all(-1 <= f["norm"]["r"] <= 1 and f["norm"]["slope_low"] < f["norm"]["slope_high"]
                                     for f in fit.values())
    assert fit != found["half_life_tokens"], "another metric, other numbers"
    variance = tiny(estimator_variance)
    assert tiny.runs == ["seed0"], "one run for all three"
    assert {(r["small"], r["big"]) for r in variance["model"]} == {(1, 2), (1, 4), (1, 8), (2, 8), (4, 8)}
    easy = [r for r in variance["simulation"] if r["true_gns"] == 1]
    assert all(r["mean"] == pytest.approx(1, abs=0.2) and r["theory"] / 2 < r["error"] < 2 * r["theory"] for r in easy)


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
    assert "Here, 2 seeds" in phase_plot.finding([groups] * 2) and "rose in 6 of 6" in phase_plot.finding([groups] * 2)
    assert phase_plot.finding([groups]).endswith(": alike.")
    for i, row in enumerate(rows):
        row["gns/norm_sq_norm"] = math.exp(i / 10)
    assert phase_plot.finding([groups, phase_plot.numbers(rows)]).endswith("not alike in all.")


def test_slope_and_r_over_seeds_are_those_put_in():
    numbers = norm_predicts.over_seeds([layers.regressions(exact_rows(factor=f, seed=s)) for s, f in enumerate((1.8, 2.2))])
    most = numbers[max(numbers)]["norm"]
    assert most["slope"] == pytest.approx(2.0, rel=0.05) and most["slope_low"] < 1.85 < 2.15 < most["slope_high"]
    assert most["r_low"] <= most["r"] <= most["r_high"] and most["r"] > 0.98
    other = {h: {"norm": {**g["norm"], "slope": 3.0}} for h, g in numbers.items()}
    text = norm_predicts.finding(numbers, other)
    assert "so they predict it, and smoothing more helps" in text and "slope 2.0" in text and "slope 3.00 (" in text
    poor = {"r": 0.3, "r_low": 0.2, "r_high": 0.4}
    worse = {h: {"norm": {**g["norm"], **poor}, "mlp": g["norm"]} for h, g in numbers.items()}
    text = norm_predicts.finding(worse, other)
    assert "so they do not predict it, and smoothing more does not help" in text
    assert f"longest: mlp {most['r']:.3f}; in Adam's" in text


# -- the kernel's speed

def test_kernel_times_are_over_torchs_of_the_same_round(tiny, monkeypatch):
    result = tiny(kernel_speed)
    assert set(result["widths"]) == {"16", "32"} and set(result["widths"]["16"]) == set(kernel_speed.VARIANTS)
    for times in result["widths"].values():
        assert times["torch"]["ratio"] == 1 and times["ours"]["q1_ms"] <= times["ours"]["median_ms"] <= times["ours"]["q3_ms"]
    samples = {name: {"both": [t, 2 * t, 4 * t]} for name, t in (("torch", 1.0), ("ours", 0.5), ("copy", 0.25))}
    monkeypatch.setattr(kernel_speed.tools, "interleave", lambda variants, seconds: samples)
    found = kernel_speed.measure(1, 2, 4, torch.float32, "cpu", 0)
    assert found["ours"]["ratio"] == 0.5 and found["ours"]["median_ms"] == 1000
    assert "takes 0.50 of the time" in kernel_speed.finding({4: found}, "a CPU", "cpu")
    assert kernel_speed.finding({4: {"ours": {"ratio": 1.5}}, 8: {"ours": {"ratio": 0.5}}}, "x", "cpu").endswith("on average.")
