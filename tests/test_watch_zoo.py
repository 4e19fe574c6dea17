"""watch on models as people have them, built from configs: every site against a float64 loop, and the same bits."""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from rightbatch import watch
from rightbatch.recognise import Norm, recognise
from tests.watching import TINY, Encoder, hf, loop, loss_of, needs, pixels, randomise, site_errors, tokens

ZOO = {
    "gpt2": lambda: (hf("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2,
                        bos_token_id=1, eos_token_id=2), tokens()),
    "llama": lambda: (hf("LlamaForCausalLM", "LlamaConfig", **TINY), tokens()),
    "qwen3": lambda: (hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=16, num_key_value_heads=2, **TINY), tokens()),
    "gemma3": lambda: (hf("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=16, num_key_value_heads=2, **TINY), tokens()),
    "olmo2": lambda: (hf("Olmo2ForCausalLM", "Olmo2Config", **TINY), tokens()),
    "bert": lambda: (hf("BertForMaskedLM", "BertConfig", **TINY), tokens()),
    "modernbert": lambda: (hf("ModernBertForMaskedLM", "ModernBertConfig", cls_token_id=1, sep_token_id=2, **TINY), tokens()),
    "albert": lambda: (hf("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **TINY), tokens()),
    "t5": lambda: (hf("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2,
                      num_heads=2, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0), tokens()),
    "vit": lambda: (hf("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, hidden_size=32,
                       num_hidden_layers=2, num_attention_heads=2, intermediate_size=48), pixels()),
    "convnext": lambda: (hf("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16, 16, 32],
                            depths=[1, 1, 1, 1]), pixels(64)),
    "swin": lambda: (hf("SwinForImageClassification", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[1, 1],
                        num_heads=[2, 2], window_size=4), pixels()),
    "mamba": lambda: (hf("MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8,
                         pad_token_id=0, bos_token_id=1, eos_token_id=2), tokens()),
}


def features(batch_dim):
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(3))
    return {"x": x if batch_dim == 0 else x.movedim(0, 1).contiguous()}


def run(model, batch):
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def check_errors(w, errors):
    """Queries and keys of a model that has not learnt get little but float32's rounding."""
    assert max(errors[site.name] for site in w._hooks.norms) < 1e-5 and max(errors.values()) < 1e-3, errors


def check(model, batch, batch_dim=0):
    state, before = copy.deepcopy(model.state_dict()), run(model, batch)
    truth = loop(model, batch, batch_dim=batch_dim)
    w = watch(model, batch_dim=batch_dim, lengths="equal")
    after = run(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and len(before) == len(after)
    assert list(model.state_dict()) == list(state) and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    errors = site_errors(model, w, truth)
    check_errors(w, errors)
    w.step()
    assert w.last.examples == 4
    return w


@needs("transformers")
@pytest.mark.parametrize("name", ZOO)
def test_every_site_agrees_with_a_float64_loop_and_no_bit_of_the_model_changes(name):
    model, batch = ZOO[name]()
    w = check(model, batch)
    weighted = [n for n, m in model.named_modules() if "Norm" in type(m).__name__ and list(m.parameters(recurse=False))]
    assert [s.name for s in w._hooks.norms] == weighted and not set(w.left_out) & set(weighted)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_torchs_own_encoder_agrees_in_both_layouts(batch_dim):
    torch.manual_seed(0)
    check(randomise(Encoder(batch_first=batch_dim == 0)), features(batch_dim), batch_dim)


@pytest.mark.parametrize("norm", [torch.nn.GroupNorm(2, 6), torch.nn.GroupNorm(1, 6), torch.nn.InstanceNorm2d(6, affine=True),
                                  torch.nn.LayerNorm((6, 5, 4)), torch.nn.LayerNorm(4, bias=False), torch.nn.RMSNorm(4)])
def test_other_norms_of_torch_are_recognised_and_agree(norm):
    torch.manual_seed(0)
    model = randomise(torch.nn.Sequential(norm, torch.nn.Tanh()))
    batch = {"input": torch.randn(4, 6, 5, 4)}
    truth = {k: v for k, v in loop(Mean(model), batch).items()}
    w = watch(model)
    model(batch["input"]).mean().backward()
    grad, want = w._hooks.norms[0].leaf.grad, torch.cat([v.flatten(1) for v in truth.values()], 1)
    assert torch.allclose(grad[:want.shape[1]].double(), want.sum(0), rtol=1e-4, atol=1e-7)
    assert torch.allclose(grad[want.shape[1]:2 * want.shape[1]].double(), want.square().sum(0), rtol=1e-4, atol=1e-9)


class Mean(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input):
        return self.inner(input).mean()


@pytest.mark.parametrize("module", [torch.nn.Linear(4, 4), torch.nn.Embedding(4, 4), torch.nn.PReLU(4), torch.nn.Tanh(),
                                    torch.nn.Conv1d(4, 4, 1), torch.nn.BatchNorm1d(4),
                                    torch.nn.LayerNorm(4, elementwise_affine=False)])
def test_what_is_no_norm_layer_is_not_taken_for_one(module):
    assert recognise(module) is None


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(64, 1024, 4096, device="meta"))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize("module", [torch.nn.Embedding(200_000, 4096, device="meta"), Experts(),
                                    torch.nn.Linear(4096, 16384, bias=False, device="meta")], ids=lambda m: type(m).__name__)
def test_large_matrices_are_not_tried_out(module, monkeypatch):
    """Trying them would take gigabytes."""
    monkeypatch.setattr(torch, "randn", lambda *sizes, **kwargs: pytest.fail(f"tried with an input of {sizes}"))
    assert recognise(module) is None


# Classes whose source stands alone, compiled without importing the hundreds of modules that they are in.
CLASS = re.compile(r"^class (\w*Norm\w*)\((?:nn\.Module|nn\.LayerNorm)\):\n(?:[ \t]+.*\n|\s*\n)+", re.M)


@needs("transformers")
def test_at_least_229_norm_classes_of_transformers_are_recognised():
    """A ratchet. What is not recognised takes a second input (a gate, a condition) or holds several norms."""
    from torch import nn
    found, missed = set(), {}
    folder = Path(importlib.util.find_spec("transformers").submodule_search_locations[0]) / "models"
    tried = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        for match in CLASS.finditer(path.read_text()):
            names = dict(torch=torch, nn=nn, F=nn.functional, Tensor=torch.Tensor)
            body = match.group(0).replace(match.group(1), "Some")
            if body not in tried:
                try:
                    exec("from __future__ import annotations\n" + match.group(0), names)
                    module = names[match.group(1)](16)
                except (TypeError, AttributeError, NameError):
                    module = None  # built from a whole config: no single layer
                tried[body] = recognise(module) if module and list(module.parameters()) else "no weight"
            if isinstance(tried[body], Norm):
                found.add(match.group(1))
            elif tried[body] != "no weight":
                missed[match.group(1)] = tried[body]
    assert len(found) >= 229, missed
    assert all("Norm" in name for name in missed) and len(missed) <= 21, missed


@needs("transformers")
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "albert"])
def test_fused_norm_layers_compute_the_same_and_agree_with_the_loop(name):
    model, batch = ZOO[name]()
    before, truth = run(model, batch), loop(model, batch)
    w = watch(model, fused=True, lengths="equal")
    assert all(site.norm.fused for site in w._hooks.norms)
    after = run(model, batch)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(before, after))
    check_errors(w, site_errors(model, w, truth))
    ema = copy.deepcopy(model)
    assert ema.get_submodule(w._hooks.norms[0].name).forward.module is ema.get_submodule(w._hooks.norms[0].name)
    w.close()
    assert all(torch.equal(a, b) for a, b in zip(before, run(model, batch)))
