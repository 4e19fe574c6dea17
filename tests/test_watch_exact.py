"""mode="exact": all rows of all layers but the tables against the float64 loop, and what of a model is covered."""


import pytest
import torch
from torch import nn

from rightbatch import WatchError, collect, rows, sites, taps, watch
from rightbatch.sites import body_of
from tests.watching import TINY, body, hf, ids, loop, loss_of, needs, pair_of, pixels, plain, randomise, tokens


def check(model, batch, w, names, coverage=100, rtol=1e-4):
    """One step against the loop over the named parameters."""
    truth = loop(model, batch)
    q, big = pair_of(truth, names)
    model.zero_grad()
    loss_of(model(**batch)).backward()
    w.step()
    assert (w.last.small, w.last.big) == (pytest.approx(4 * q, rel=rtol), pytest.approx(big, rel=rtol))
    sizes = {name: p.numel() for name, p in model.named_parameters() if p in body_of(model)}
    assert w.meter.coverage == pytest.approx(100 * sum(sizes.get(name, 0) for name in names) / sum(sizes.values()))
    assert w.meter.coverage >= coverage - 1e-3


@pytest.mark.parametrize("at_once", [1, 300, 2**24])
def test_all_weights_of_a_plain_model_but_its_tables_agree_however_many_are_worked_on_at_once(monkeypatch, at_once):
    monkeypatch.setattr(collect, "AT_ONCE", at_once)
    monkeypatch.setattr(sites, "LOW_RANK", 0)
    model = plain()
    check(model, {"idx": ids()}, watch(model, mode="exact"), body(model))


class OneWeight(nn.Module):
    """Two layers, one weight, two biases."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm, self.embedding = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Embedding(32, 16)
        self.b.weight = self.a.weight

    def forward(self, idx):
        return self.b(self.norm(self.a(self.embedding(idx)).tanh())).square().mean()


def test_layers_with_one_weight_and_two_biases_are_left_out_with_a_word():
    torch.manual_seed(0)
    model = randomise(OneWeight())
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, ["norm.weight", "norm.bias"], coverage=0)
    assert w.left_out == dict.fromkeys("ab", "its weight is used elsewhere, too, or the layer is no plain one")


def test_a_layer_that_cannot_be_measured_is_left_out_and_training_goes_on(monkeypatch):
    model = plain()
    monkeypatch.setattr(taps, "row_gradients", lambda *args: 1 / 0)
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, ["first.weight", "first.bias", "second.weight"], coverage=0)
    assert w.left_out == {"hidden": "could not be measured: division by zero"}


def test_a_layer_may_be_called_by_the_name_of_its_input():
    model = plain()
    model.hidden = ByName(model.hidden)
    check(model, {"idx": ids()}, watch(model, mode="exact"), body(model))


class ByName(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(input=x)


@needs("transformers")
def test_the_body_of_an_encoder_and_decoder_of_different_lengths_agrees():
    generator = torch.Generator().manual_seed(0)
    model = hf("BartForConditionalGeneration", "BartConfig", vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1,
               encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
               max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
               forced_eos_token_id=None)
    batch = {"input_ids": torch.randint(3, 64, (4, 12), generator=generator),
             "labels": torch.randint(3, 64, (4, 9), generator=generator)}
    check(model, batch, watch(model, mode="exact"), body(model))


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(4, 6, (2, 3), dilation=2, groups=2, bias=False),
                                   nn.Conv1d(4, 6, 3, 2, 1, groups=2)])
def test_convolutions_agree(layer, monkeypatch):
    monkeypatch.setattr(sites, "LOW_RANK", 0)
    monkeypatch.setattr(rows, "ROWS", 3)
    torch.manual_seed(0)
    model = Squares(layer)
    x = torch.randn(4, 4, 9) if isinstance(layer, nn.Conv1d) else torch.randn(4, 4, 9, 8)
    check(model, {"x": x}, watch(model, mode="exact"), body(model))


class Squares(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh().sum(1).square().mean()


@needs("transformers")
def test_vit_says_how_much_of_it_is_covered():
    batch = pixels()
    model = hf("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2,
               num_attention_heads=2, intermediate_size=48)
    bare = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}  # parameters without a module
    check(model, batch, watch(model, mode="exact"), [n for n in body(model) if n not in bare], coverage=50)


@needs("transformers", "peft")
def test_frozen_norm_layers_lead_to_loras_adapters_with_the_reason():
    import peft
    model = hf("LlamaForCausalLM", "LlamaConfig", **TINY)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"],
                                                      init_lora_weights=False)).eval()
    with pytest.warns(UserWarning, match="norm layers are frozen"):
        w = watch(model)
    check(model, tokens(), w, body(model))
    assert set(w.left_out.values()) == {"frozen"} and len(body(model)) == 12
    assert "gns/body" in w.row() and "gns/norm" not in w.row()


def test_nothing_to_watch_in_exact_mode_is_refused():
    with pytest.raises(WatchError, match="no layer that is trained"):
        watch(nn.Sequential(nn.PReLU(4)), mode="exact")
