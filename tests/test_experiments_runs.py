"""Each experiment in its tiny setting, its numbers, and its sentence on made-up numbers, whichever way they come out."""

import math
import os
import sys

import numpy as np
import pytest
import torch

from tests.helpers import ROOT

sys.path.insert(0, os.path.join(ROOT, "experiments"))

import accumulation  # noqa: E402
import attention_divergence  # noqa: E402
import attention_quality  # noqa: E402
import bf16_quality  # noqa: E402
import cross_rank  # noqa: E402
import lr_tuning  # noqa: E402
import temperature  # noqa: E402

import configurator  # noqa: E402
from rightbatch.kernels import attention  # noqa: E402
from trainer import log  # noqa: E402


def steps(folder):
    return [r for r in log.read(folder) if "train/loss" in r]


# -- temperature.py

def test_temperature_branches_change_one_thing_each_from_one_checkpoint(tiny, tmp_path):
    result = tiny(temperature, "--seeds", "1")
    assert len(tiny.runs) == 6 and tiny.runs[0] == "base_seed0"
    (entries,) = result["seeds"]
    logs = {e["branch"]: steps(tmp_path / "out" / f"{e['branch'].replace(' ', '').replace('/', 'd')}_seed0") for e in entries}
    assert {name: rows[0]["lr"] / logs["as it was"][0]["lr"] for name, rows in logs.items()} == pytest.approx(
        {"as it was": 1, "learning rate / 4": 0.25, "learning rate x 4": 4, "batch / 4": 1, "batch x 4": 1}, rel=0.05)
    assert {name: rows[0]["batch_size"] for name, rows in logs.items()} == {
        "as it was": 8, "learning rate / 4": 8, "learning rate x 4": 8, "batch / 4": 2, "batch x 4": 32}
    middle = (result["branch_tokens"] + result["end_tokens"]) / 2
    for e in entries:
        first, late = logs[e["branch"]][0], [r for r in logs[e["branch"]] if r["tokens"] > middle]
        assert first["tokens"] - first["batch_size"] * 16 == steps(tmp_path / "out" / "base_seed0")[-1]["tokens"]
        assert e["steps"] == len(late) >= 1
        if e["gns"]:
            pairs = [[r[f"gns/total_step_{part}"] for r in late] for part in ("tr_sigma", "sq_norm")]
            assert e["gns"] == pytest.approx(np.mean(pairs[0]) / np.mean(pairs[1])) and e["low"] < e["gns"] < e["high"]
    assert set(result["exponents"]) == {"learning rate", "batch"}


def test_the_window_starts_late_and_the_exponent_is_that_of_the_numbers():
    rng = np.random.default_rng(0)
    rows = [{"tokens": t, "batch_size": 8, "gns/norm_step_sq_norm": (9.0 if t <= 50 else 2.0) + 0.1 * rng.standard_normal(),
             "gns/norm_step_tr_sigma": 10 + 0.1 * rng.standard_normal()} for t in range(100)]
    late = temperature.window_noise(rows, "norm", 50)
    assert late["gns"] == pytest.approx(5, rel=0.03) and late["low"] < 5 < late["high"] and late["steps"] == 49

    def noise(value):
        return {"gns": value, "low": value / 1.1, "high": value * 1.1}
    one = temperature.exponent([[(0.25, noise(20)), (4, noise(5))]])
    assert one[0] == pytest.approx(-0.5) and one[2] - one[0] == pytest.approx(math.sqrt(2) * math.log(1.1) / math.log(16))
    four = temperature.exponent(4 * [[(0.25, noise(20)), (4, noise(5))]])
    assert four[2] - four[0] == pytest.approx((one[2] - one[0]) / 2), "seeds halve the error"
    assert temperature.exponent([[(0.25, noise(20)), (4, {"gns": None, "low": None, "high": None})]]) is None


@pytest.mark.parametrize("rate, batch, words", [
    ((-0.5, -0.6, -0.4), (0.02, -0.1, 0.14), "only the learning rate moves it, as in the paper"),
    ((-0.1, -0.3, 0.1), (0.5, 0.4, 0.6), "only the batch moves it, unlike the paper"),
    ((-0.5, -0.6, -0.4), (0.7, 0.5, 0.9), "both move it, the batch more, unlike the paper"),
    ((-0.1, -0.3, 0.1), (0.02, -0.1, 0.14), "neither moves it, unlike the paper"),
    (None, (0.02, -0.1, 0.14), "undetermined")])
def test_temperature_says_what_moved(rate, batch, words):
    assert words in temperature.finding({"learning rate": rate, "batch": batch})


# -- lr_tuning.py

def test_learning_rates_are_tuned_at_the_same_flops(tiny, tmp_path):
    result = tiny(lr_tuning, "--seeds", "1")
    assert len(tiny.runs) == 15 and [s["n_embd"] for s in result["sizes"]] == [12, 16, 20]
    assert [s["flops"] for s in result["sizes"]] == pytest.approx(3 * [result["sizes"][1]["flops"]], rel=2e-3)
    assert result["sizes"][0]["tokens"] > result["sizes"][1]["tokens"] == 640 > result["sizes"][2]["tokens"]
    for size in result["sizes"]:
        for rate, loss in zip(result["learning_rates"], size["losses"]):
            rows = log.read(tmp_path / "out" / f"width{size['n_embd']}_lr{rate:.3g}_seed0")
            assert loss == rows[-1]["val/loss"] and max(r.get("lr", 0) for r in rows) <= rate
        assert size["best"]["loss"] <= min(size["losses"])


def test_the_siblings_of_the_111m_config_are_the_papers():
    config = configurator.parse([os.path.join(ROOT, "config", "gpt_111m.py")])
    assert [(s["n_head"], s["n_embd"]) for s in lr_tuning.siblings(config, 50257)] == [(9, 576), (12, 768), (15, 960)]


def test_the_optimum_is_the_parabolas_or_the_end_of_the_range():
    rates = [0.001, 0.002, 0.004, 0.008]
    best = lr_tuning.optimum(rates, [2 + math.log(r / 0.003)**2 for r in rates])
    assert best["learning_rate"] == pytest.approx(0.003) and best["loss"] == pytest.approx(2) and best["inside"]
    assert lr_tuning.optimum(rates, [4, 3, 2, 1]) == {"learning_rate": 0.008, "loss": 1, "inside": False}
    diverged = lr_tuning.optimum(rates, [4, 3, 2, float("nan")])
    assert diverged == {"learning_rate": 0.004, "loss": 2, "inside": True}, "a run that diverged is no neighbour for a parabola"


def test_lr_tuning_says_which_size_and_which_way():
    def sizes(losses, rates, inside=True, spread=None):
        return [{"parameters": p, "tokens": 1e6, "spread": spread, "best": {"loss": v, "learning_rate": r, "inside": inside}}
                for p, v, r in zip((70, 111, 161), losses, rates)]
    assert "the middle is best, and the best learning rate falls with size, by x 4.00" in lr_tuning.finding(
        sizes((2.1, 2.0, 2.2), (0.004, 0.002, 0.001)))
    text = lr_tuning.finding(sizes((2.1, 2.0, 1.9), (0.001, 0.002, 0.004), spread=0.02))
    assert "the largest is best" in text and "rises with size" in text and "seeds by up to 0.020" in text
    assert "no order" in lr_tuning.finding(sizes((1.9, 2.0, 2.1), (0.001, 0.004, 0.002)))
    assert "a wider one is needed" in lr_tuning.finding(sizes((1.9, 2.0, 2.1), (1, 1, 1), inside=False))


# -- attention_divergence.py

def test_rounding_moves_the_key_bias_and_cosine_attention_gives_it_a_gradient(tiny):
    arms = tiny(attention_divergence, "--seeds", "1")["arms"]
    assert set(arms) == set(attention_divergence.ARMS)
    assert len({s["distance_start"] for s in arms.values()}) == 1, "the same noise for all"
    assert all(s["error_end"] < s["error_start"] for s in arms.values())
    assert arms["bf16 fused"]["moved"] > 5 * arms["float32"]["moved"] < arms["bf16 plain"]["moved"]
    assert arms["bf16 fused, cosine"]["distance_end"] < arms["bf16 fused, cosine"]["distance_start"] - 0.01


@pytest.mark.parametrize("changes, sees", [({}, False), ({"spectral_qkv": (1,)}, False), ({"cos_attn": (1,)}, True)])
def test_softmax_does_not_see_the_key_bias_unless_keys_are_normalised(changes, sees):
    config = configurator.parse(["--n_embd=16", "--n_head=2", "--block_size=8"])
    teacher, student = (module.double() for module in attention_divergence.pair(config, changes, 0, "cpu"))
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    (student(x, {}) - teacher(x, {})).square().mean().backward()
    query, key, value = student.c_attn.bias.grad.view(3, 16).norm(dim=1)
    assert (key > 1e-4) == sees and (sees or key < 1e-12) and min(query, value) > 1e-5


def test_attention_divergence_says_what_diverged_and_what_cured():
    def arms(fused=0.1, error=0.1, **ends):
        return {name: {"moved": {"float32": 0.001, "bf16 fused": fused}.get(name, 0.05), "distance_start": 2.0,
                       "distance_end": ends.get(name.split(", ")[-1], 2.1), "error_start": 0.5,
                       "error_end": error if name == "bf16 fused" else 0.1}
                for name in attention_divergence.ARMS}
    text = attention_divergence.finding(arms(cosine=1.0))
    assert "nothing diverged" in text and "start is there (+0.100" in text
    assert "cosine cures it (distance 2.00 to 1.00); spectral does not cure it" in text
    text = attention_divergence.finding(arms(fused=0.001, error=float("nan"), spectral=1.5))
    assert "bf16 fused diverged" in text and "no runaway is seen" in text
    assert "cosine does not cure it" in text and "spectral cures it" in text


# -- cross_rank.py

def test_two_ranks_tell_the_noise_scale_less_well_than_their_examples_do(tiny, tmp_path):
    result = tiny(cross_rank, "--seeds", "1")
    assert result["ranks"] == 2 and result["b_small"] == {"per example": 1, "micro-batches": 2, "ranks": 8}
    (seed,) = result["seeds"]
    assert seed["per example"]["determined"] == 1 and seed["per example"]["ratio"] == 1
    assert seed["ranks"]["width"] is None or seed["ranks"]["width"] > 1.3 * seed["per example"]["width"]
    last = steps(tmp_path / "out" / "seed0")[-1]
    assert seed["ranks"]["gns"] == last["gns/total_rank"] and seed["per example"]["gns"] == last["gns/total"]


def test_cross_rank_says_how_much_wider_and_whether_they_agree():
    def seed(width, gns, low, high):
        mine = {"gns": 10.0, "low": 9.0, "high": 11.0, "width": 0.2}
        return {"per example": mine, "micro-batches": mine, "ranks": {"gns": gns, "low": low, "high": high, "width": width}}

    def say(*results):
        return cross_rank.finding(list(results), {"per example": 1, "micro-batches": 4, "ranks": 8}, 2)
    assert "3.0 times as wide" in say(seed(0.6, 12.0, 8.0, 16.0)) and "agree within" in say(seed(0.6, 12.0, 8.0, 16.0))
    assert "disagree beyond their intervals in 1 of 2 runs" in say(seed(0.6, 12.0, 8.0, 16.0), seed(0.6, 20.0, 15.0, 30.0))
    assert "no wider (0.50 times), unlike the paper" in say(seed(0.1, 10.0, 9.5, 10.5))
    assert "beyond comparison" in say(seed(None, None, None, None))
    assert "undetermined at the end" in say(seed(0.6, None, None, None))


def test_the_width_is_the_median_of_the_determined_steps_after_the_burn_in():
    rows = []
    for t in range(1, 9):
        row = {"tokens": 10 * t}
        for suffix, factor in (("", 1.1), ("_micro", 1.5), ("_rank", 2.0)):
            known = suffix != "_rank" or t > 4
            row |= {f"gns/norm{suffix}": 10.0 if known else None, f"gns/norm{suffix}_low": 10 / factor if known else None,
                    f"gns/norm{suffix}_high": 10 * factor if known else None}
        rows.append(row)
    found = cross_rank.compare(rows, "norm")
    assert found["per example"]["width"] == pytest.approx(2 * math.log(1.1)) and found["per example"]["determined"] == 1
    assert found["ranks"]["width"] == pytest.approx(2 * math.log(2)) and found["ranks"]["determined"] == pytest.approx(4 / 6)


# -- accumulation.py

def test_accumulation_measures_every_batch_and_scales_the_learning_rate(tiny, tmp_path):
    result = tiny(accumulation, "--seeds", "1")
    assert len(tiny.runs) == 13 and [t["batch_size"] for t in result["quality"]] == [2, 4, 8, 16, 32]
    assert [t["coherence"] is None for t in result["quality"]] == [True, False, False, False, False]
    assert all(0 < t["snr"] < 1 and 0 < t["ratio"] < 1 for t in result["quality"])
    assert [g["examples"] for g in result["norm_growth"]] == [2, 4, 8, 16, 32]
    assert result["norm_growth"][0]["norm"] > result["norm_growth"][-1]["norm"], "noise averages out"
    assert result["norm_growth"][-1]["predicted"] == pytest.approx(result["norm_growth"][-1]["norm"], rel=1e-3)
    losses = result["final_losses"]
    assert losses["none"][0] == losses["sqrt"][0] == losses["linear"][0] and len(set(losses["linear"])) == 5
    rates = {rule: steps(tmp_path / "out" / f"{rule}_16m_seed0")[-1]["lr"] for rule in losses}
    assert (rates["sqrt"] / rates["none"], rates["linear"] / rates["none"]) == pytest.approx((4, 16))


def test_the_predictions_hold_for_gradients_of_known_noise():
    """Examples' gradients are G plus white noise in many dimensions: the mean of n has |G|^2 + tr(Sigma) / n."""
    rng, G, m, K = np.random.default_rng(1), np.zeros(4000), 2, 4
    G[0] = 1.0
    rows = []
    for step in range(40):
        examples = G + rng.standard_normal((m * K, 4000)) * math.sqrt(6 / 4000)  # tr(Sigma) = 6
        small, big = (examples**2).sum(1).mean(), (examples.mean(0)**2).sum()
        B, micro = m * K, examples.reshape(K, m, -1).mean(1)
        cosine = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(micro, micro[1:])])
        rows.append({"tokens": step, "train/loss": 1.0, "batch_size": B, "grad/norm": math.sqrt(big), "adam/snr": 0.5,
                     "update/ratio": 0.1, "grad/coherence": cosine, "gns/total_step_sq_norm": (B * big - small) / (B - 1),
                     "gns/total_step_tr_sigma": (small - big) / (1 - 1 / B),
                     **{f"grad/norm_after_{k}": np.linalg.norm(examples[:k * m].mean(0)) for k in (1, 2)}})
    for point in accumulation.growth(rows, m):
        assert point["norm"] == pytest.approx(math.sqrt(1 + 6 / point["examples"]), rel=0.02)
        assert point["predicted"] == pytest.approx(point["norm"], rel=0.02)
    found = accumulation.quality(rows, m)
    assert found["noise_scale"] == pytest.approx(6, rel=0.05)
    assert found["coherence"] == pytest.approx(1 / (1 + 6 / m), rel=0.05) == found["coherence_predicted"]


def test_accumulation_says_which_scaling_was_best():
    table = [{"batch_size": b, "coherence": c, "coherence_predicted": p, "snr": s} for b, c, p, s in
             ((4, None, 0.2, 0.3), (64, 0.25, 0.21, 0.6))]
    grown = [{"examples": 4, "norm": 2.0, "predicted": 1.9}, {"examples": 64, "norm": 1.0, "predicted": 1.0}]
    text = accumulation.finding(table, grown, {"none": [2.0, 2.5], "sqrt": [2.0, 2.1], "linear": [2.0, 3.0]})
    assert "falls from 2 for 4 sequences to 1 for 64 (the noise scale says 1.9 for 4)" in text and "0.30 to 0.60" in text
    assert "batch x 16 is best with learning-rate scaling sqrt, +0.100 nats" in text and "(none +0.500, linear +1.000)" in text
    grown[0]["predicted"] = table[1]["coherence_predicted"] = None
    text = accumulation.finding(table, grown, {"none": [2.0, 1.9], "sqrt": [2.0, 2.1], "linear": [2.0, 3.0]})
    assert "says" not in text and "scaling none, -0.100 nats" in text


# -- bf16_quality.py

def test_bf16_products_in_fp32_are_those_of_bf16():
    """The C++ of torch, slow but right, against the fp32 units with a rounding; in the backward pass too."""
    import torch
    import torch.nn.functional as F

    def step():
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((2, 3, 8, 16), (16, 16)))
        with torch.autocast("cpu", torch.bfloat16):
            q = F.linear(x, w)
            y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
        return [y.detach(), x.grad, w.grad]

    expected, mode = step(), bf16_quality.float32_products()
    with mode:
        found = step()
    assert mode.calls == 5, "two products and attention forward; attention and the products of x and w backward"
    for got, truth in zip(found, expected, strict=True):
        error = (got - truth).float().abs().max() / truth.float().abs().max()
        assert 0 <= error < 2 * torch.finfo(torch.bfloat16).eps, error


def test_bf16_quality_runs_every_seed_in_both_and_compares_with_the_spread(tiny):
    result = tiny(bf16_quality, "--seeds=2")
    assert sorted(tiny.runs) == [f"{dtype}_seed{seed}" for dtype in ("bfloat16", "float32") for seed in (0, 1)]
    assert all(len(v) == 2 for v in result["final_losses"].values())
    assert result["final_losses"]["float32"] != result["final_losses"]["bfloat16"]
    inside = bf16_quality.finding({"float32": [1.0, 1.2], "bfloat16": [1.1, 1.14]}, True)
    outside = bf16_quality.finding({"float32": [1.0, 1.2], "bfloat16": [1.3, 1.3]}, False)
    assert "+0.0200" in inside and "inside the spread" in inside and "fp32 units" in inside
    assert "outside the spread" in outside and "fp32 units" not in outside


# -- attention_quality.py

def test_attention_quality_runs_every_seed_with_both_kernels(tiny, monkeypatch):
    calls, torchs = [], attention.torch_attention
    monkeypatch.setattr(attention, "torch_attention", lambda *given: calls.append(1) or torchs(*given))
    result = tiny(attention_quality, "--seeds=2", "--dtype=float32")
    assert tiny.runs == ["ours_seed0", "ours_seed1", "torch_seed0", "torch_seed1"]
    ours, others = result["final_losses"]["ours"], result["final_losses"]["torch's"]
    assert ours == pytest.approx(others, rel=1e-4) and calls, "another kernel, the same training"
    with monkeypatch.context() as patched:
        patched.setattr(attention_quality.attention, "_built", lambda: True)
        with attention_quality.torchs_attention():
            assert not attention._built()
        assert attention._built()
    assert "inside" in attention_quality.finding({"ours": [1.1, 1.1], "torch's": [1.0, 1.2]}, "bfloat16")
    assert "outside" in attention_quality.finding({"ours": [1.3, 1.3], "torch's": [1.0, 1.2]}, "bfloat16")
