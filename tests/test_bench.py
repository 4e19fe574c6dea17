"""The benchmarks run, compare what they say they compare, and write what they print."""

import json
import multiprocessing.dummy

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


# ---- step --against: a stand-in for a nanoGPT checkout, with its interface and names

STAND_IN = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 11
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

def part(**modules):
    return nn.ModuleDict(modules)

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("speaks while it is made")
        C, self.heads = c.n_embd, c.n_head
        self.transformer = part(
            wte=nn.Embedding(c.vocab_size, C), wpe=nn.Embedding(c.block_size, C), ln_f=nn.LayerNorm(C),
            h=nn.ModuleList(part(ln_1=nn.LayerNorm(C), attn=part(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)),
                                 ln_2=nn.LayerNorm(C), mlp=part(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)))
                            for _ in range(c.n_layer)))
        self.lm_head = nn.Linear(C, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx, targets):
        t, (B, T) = self.transformer, idx.shape
        x = t["wte"](idx) + t["wpe"](torch.arange(T))
        for b in t["h"]:
            q, k, v = (u.view(B, T, self.heads, -1).transpose(1, 2) for u in b["attn"]["c_attn"](b["ln_1"](x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + b["attn"]["c_proj"](y.transpose(1, 2).reshape(B, T, -1))
            x = x + b["mlp"]["c_proj"](F.gelu(SCALE * b["mlp"]["c_fc"](b["ln_2"](x))))
        logits = self.lm_head(t["ln_f"](x))
        return logits, F.cross_entropy(logits.view(B * T, -1), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        named = list(self.named_parameters())
        groups = [{"params": [p for _, p in named if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
'''


def run_against(path, out, monkeypatch):
    monkeypatch.setattr(bench.sys, "argv", ["bench.py", "step", f"--against={path}", "--models=tiny", "--seconds=0",
                                            "--rounds=2", f"--out={out}"])
    return bench.main()


@pytest.fixture
def tiny_bench(monkeypatch):
    import bench_tools
    shape = dict(n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=11)
    monkeypatch.setitem(bench_tools.MODELS, "tiny", (shape, 3))


@pytest.mark.parametrize("scale, code", [("1", 0), ("3", 1)])
def test_against_times_both_in_turns_and_tells_whether_the_losses_agree(tiny_bench, tmp_path, monkeypatch, capfd, scale, code):
    if code:  # threads in place of processes, which once is enough to start
        monkeypatch.setattr("multiprocessing.get_context", lambda _: multiprocessing.dummy)
    (tmp_path / "model.py").write_text(STAND_IN.replace("SCALE", scale))
    assert run_against(tmp_path, tmp_path / "a.json", monkeypatch) == code
    report = json.load(open(tmp_path / "a.json"))
    row = report["models"]["tiny"]
    assert row["ours"]["n"] == row["theirs"]["n"] == 2 and len(row["losses"]["ours"]) == 5
    assert row["ratio"][0] <= row["ratio"][1] <= row["ratio"][2] and row["losses_agree"] == (code == 0)
    assert row["losses"]["ours"][0] != row["losses"]["ours"][1]
    assert str(tmp_path) not in json.dumps(report)
    out = capfd.readouterr().out
    assert ("DISAGREE" in out) == (code == 1) and "speaks" not in out


@pytest.mark.parametrize("text, words", [
    (None, "there is no model.py"), ("import nowhere_to_be_found", "does not import"), ("class GPT: pass", "has no GPTConfig")])
def test_what_is_no_checkout_is_one_clear_line(tiny_bench, tmp_path, monkeypatch, capsys, text, words):
    if text is not None:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(SystemExit) as e:
        run_against(tmp_path, tmp_path / "a.json", monkeypatch)
    message = capsys.readouterr().err
    assert e.value.code == 2 and words in message and message.startswith("error: --against=") and message.count("\n") == 1
