"""The benchmarks run, compare what they say they compare, and write what they print."""

import json

import pytest
import torch

import bench


@pytest.fixture
def tiny_models(monkeypatch):
    shape = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=11)
    monkeypatch.setattr(bench, "MODELS", {"tiny": (shape, 3)})
    return shape


def test_every_variant_takes_its_turn_in_every_round():
    calls = []
    variants = {n: (lambda n=n: calls.append(n) or {"t": 1.0}) for n in "abc"}
    samples = bench.interleave(variants, seconds=0, min_rounds=4)
    assert all(len(s["t"]) == 4 for s in samples.values())
    rounds = calls[6:]  # after two warm-up calls each
    assert [sorted(rounds[i:i + 3]) for i in range(0, 12, 3)] == [list("abc")] * 4


def test_step_reports_every_variant_and_its_ratio(tiny_models, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.sys, "argv", ["bench.py", "step", "--models=tiny", "--seconds=0", "--rounds=3",
                                            f"--out={tmp_path}/step.json"])
    bench.main()
    report = json.load(open(tmp_path / "step.json"))
    rows = report["models"]["tiny"]
    assert {"off, torch's norm", "off", "norm", "exact"} <= rows.keys() and "bench.py step" in report["command"]
    assert rows["off, torch's norm"]["ratio"] == 1.0 and all(r["n"] == 3 and r["peak_bytes"] > 0 for r in rows.values())
    assert rows["norm"]["peak_bytes"] <= 1.001 * rows["off, torch's norm"]["peak_bytes"] + 4096
    assert "norm" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_the_models_compared_compute_the_same_thing(tiny_models):
    """Plain modules with the weights of ours give the same loss, and torch.func's norms are the exact mode's."""
    from model import GPT, GPTConfig
    torch.manual_seed(0)
    ours, plain = GPT(GPTConfig(tie_weights=False, **tiny_models)), bench.PlainGPT(**tiny_models)
    names = {"ln_1": "ln_1", "c_attn": "attn.c_attn", "proj": "attn.c_proj", "ln_2": "ln_2", "c_fc": "mlp.c_fc",
             "out": "mlp.c_proj"}
    state = ours.state_dict()
    renamed = {"wte.weight": state["wte.weight"], "wpe.weight": state["wpe.weight"], "head.weight": state["lm_head.weight"]}
    renamed |= {f"ln_f.{k}": state[f"ln_f.{k}"] for k in ("weight", "bias")}
    renamed |= {f"blocks.0.{a}.{k}": state[f"h.0.{b}.{k}"] for a, b in names.items() for k in ("weight", "bias")}
    plain.load_state_dict(renamed)
    x, y = bench.batch_of(tiny_models, 3)
    probes = torch.zeros(len(ours.probe_sites("exact")), 2, 3, requires_grad=True)
    loss = ours(x, y, probes=probes)[1]
    loss.backward()

    def one(values, idx, target):
        logits = torch.func.functional_call(plain, values, (idx[None],))
        return torch.nn.functional.cross_entropy(logits[0], target)

    values = {n: p.detach() for n, p in plain.named_parameters()}
    per_sample = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(values, x, y)
    torch.testing.assert_close(plain(x).flatten(0, 1), ours(x, y)[0].flatten(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(probes.grad.sum((0, 1)) * 9, bench.sample_norms(per_sample.values()), rtol=1e-4, atol=0)


def test_peak_bytes_sees_what_a_step_allocates_and_gives_back():
    big = 1 << 20
    assert bench.peak_bytes(lambda: torch.zeros(big)) == 4 * big
    assert bench.peak_bytes(lambda: [torch.zeros(big) for _ in range(3)]) == 12 * big
