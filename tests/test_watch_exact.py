"""mode="exact": all layers of a model against the float64 loop, what is covered, and the calibration of norm layers by it."""

import importlib.util

import pytest
import torch
from torch import nn

from rightbatch import WatchError, gns, watch
from rightbatch.exact import body_of
from tests.watching import TABLES, TINY, Plain, hf, ids, loop, loss_of, pair_of, pixels, plain, randomise, tokens


def needs(*names):
    missing = [name for name in names if not importlib.util.find_spec(name)]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def check(model, batch, w, names, coverage=100, rtol=1e-4):
    """One step against the loop over the named parameters."""
    truth = loop(model, batch)
    q, big = pair_of(truth, names)
    model.zero_grad()
    loss_of(model(**batch)).backward()
    w.step()
    assert (w.last.small, w.last.big) == (pytest.approx(4 * q, rel=rtol), pytest.approx(big, rel=rtol))
    sizes = {name: p.numel() for name, p in model.named_parameters() if p in body_of(model)}
    assert w.coverage == pytest.approx(100 * sum(sizes.get(name, 0) for name in names) / sum(sizes.values()))
    assert w.coverage >= coverage - 1e-3


def trained(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_all_parameters_of_a_plain_model_agree():
    model = plain()
    check(model, {"idx": ids()}, watch(model, mode="exact"), trained(model))


class Tied(Plain):
    def __init__(self, functional=False):
        super().__init__()
        self.functional = functional
        self.head.weight = self.embedding.weight

    def forward(self, idx):
        if not self.functional:
            return super().forward(idx)
        x = self.second(self.first(self.embedding(idx)))
        logits = nn.functional.linear(x, self.embedding.weight)
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


def test_a_tied_head_counts_the_sum_of_both_uses():
    torch.manual_seed(0)
    model = randomise(Tied())
    check(model, {"idx": ids()}, watch(model, mode="exact"), trained(model))


def test_a_weight_that_is_used_behind_the_modules_back_is_dropped_with_a_word():
    torch.manual_seed(0)
    model = randomise(Tied(functional=True))
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, ["first.weight", "first.bias", "second.weight"], coverage=0)
    assert w.exact.left_out["embedding"] == "embedding.weight is used elsewhere, too"


class Twice(Plain):
    def forward(self, idx):
        return super().forward(idx) + self.hidden(self.embedding(idx)).square().mean()


def test_a_layer_used_several_times_is_dropped_with_a_word():
    torch.manual_seed(0)
    model = randomise(Twice())
    w = watch(model, mode="exact")
    model(ids()).backward()
    w.step()
    assert w.exact.left_out == {"hidden": "used several times in a forward pass",
                                "embedding": "used several times in a forward pass"}
    assert 0 < w.coverage < 100


class OneWeight(nn.Module):
    """Two layers of a kind, one weight."""

    def __init__(self, kind):
        super().__init__()
        make = {"linear": lambda: nn.Linear(16, 16), "embedding": lambda: nn.Embedding(32, 16)}[kind]
        self.kind, self.a, self.b, self.norm, self.embedding = kind, make(), make(), nn.LayerNorm(16), nn.Embedding(32, 16)
        self.b.weight = self.a.weight

    def forward(self, idx):
        if self.kind == "linear":
            return self.b(self.norm(self.a(self.embedding(idx)).tanh())).square().mean()
        return self.norm(self.a(idx) * self.b(idx.flip(1)).cos() + self.embedding(idx)).tanh().square().mean()


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_layers_with_one_weight_are_left_out_with_a_word(kind):
    torch.manual_seed(0)
    model = randomise(OneWeight(kind))
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, ["norm.weight", "norm.bias", "embedding.weight"], coverage=0)
    assert w.exact.left_out == {"a": "a and b have one weight", "b": "a and b have one weight"}


class Doubling(nn.Embedding):
    def forward(self, idx):
        return 2 * super().forward(idx)


def test_a_layer_with_a_forward_pass_of_its_own_is_left_out_with_a_word():
    torch.manual_seed(0)
    model = Plain()
    model.embedding = Doubling(32, 16)
    model = randomise(model)
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, [n for n in trained(model) if n != "embedding.weight"], coverage=0)
    assert w.exact.left_out == {"embedding": "has a forward pass of its own"}


def test_a_layer_that_cannot_be_measured_is_left_out_and_training_goes_on(monkeypatch):
    from rightbatch import per_example
    torch.manual_seed(0)
    model = plain()
    monkeypatch.setattr(per_example, "embedding_sq_norms", lambda *args: 1 / 0)
    w = watch(model, mode="exact")
    check(model, {"idx": ids()}, w, [n for n in trained(model) if n != "embedding.weight"], coverage=0)
    assert w.exact.left_out == {"embedding": "could not be measured: division by zero"}


def test_a_layer_may_be_called_by_the_name_of_its_input():
    model = plain()
    model.hidden, model.embedding = ByName(model.hidden), ByName(model.embedding)
    check(model, {"idx": ids()}, watch(model, mode="exact"), trained(model))


class ByName(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(input=x)


PAIRS = {
    "T5": ("T5ForConditionalGeneration", "T5Config", dict(
        vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=0, tie_word_embeddings=True)),
    "BART": ("BartForConditionalGeneration", "BartConfig", dict(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=None))}


@needs("transformers")
@pytest.mark.parametrize("kind", PAIRS)
def test_what_is_covered_of_an_encoder_and_decoder_of_different_lengths_agrees(kind):
    name, config, settings = PAIRS[kind]
    model, generator = hf(name, config, **settings), torch.Generator().manual_seed(0)
    batch = {"input_ids": torch.randint(3, 64, (4, 12), generator=generator),
             "labels": torch.randint(3, 64, (4, 9), generator=generator)}
    w = watch(model, mode="exact")
    shared = {"shared", "lm_head", "embed_tokens", "embed_positions", "relative_attention_bias"}
    covered = [n for n in trained(model) if not shared & set(n.split("."))]
    check(model, batch, w, covered, coverage=0)
    assert any("have one weight" in why for why in w.exact.left_out.values())


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 6, 3, 2, 1), nn.Conv2d(4, 6, (2, 3), dilation=2, groups=2, bias=False),
                                   nn.Conv1d(4, 6, 3, 2, 1, groups=2)])
def test_convolutions_agree(layer):
    torch.manual_seed(0)
    model = Squares(layer)
    x = torch.randn(4, 4, 9) if isinstance(layer, nn.Conv1d) else torch.randn(4, 4, 9, 8)
    check(model, {"x": x}, watch(model, mode="exact"), trained(model))


class Squares(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x).tanh().sum(1).square().mean()


@needs("transformers")
def test_gpt2_is_covered_whole_with_its_conv1d_tied_head_and_broadcast_positions():
    model = hf("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
               eos_token_id=2)
    check(model, tokens(), watch(model, mode="exact"), trained(model))


@needs("transformers")
def test_vit_says_how_much_of_it_is_covered():
    batch = pixels()
    model = hf("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2,
               num_attention_heads=2, intermediate_size=48)
    bare = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}  # parameters without a module
    check(model, batch, watch(model, mode="exact"), [n for n in trained(model) if n not in bare], coverage=50)


@needs("transformers", "peft")
def test_frozen_norm_layers_lead_to_loras_adapters_with_the_reason():
    import peft
    model = hf("LlamaForCausalLM", "LlamaConfig", **TINY)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"],
                                                      init_lora_weights=False)).eval()
    with pytest.warns(UserWarning, match="norm layers are frozen"):
        w = watch(model)
    check(model, tokens(), w, trained(model))
    assert set(w.left_out.values()) == {"frozen"} and len(trained(model)) == 12
    assert "gns/body" in w.row() and "gns/norm" not in w.row()


def test_adams_metric_weighs_every_coordinate_of_all_but_the_tables():
    torch.manual_seed(0)
    model = randomise(Tied())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    w = watch(model, optimizer, mode="exact", half_life_tokens=1e9)
    model(ids(7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    truth, q, big = loop(model, {"idx": ids()}), 0.0, 0.0
    for name, p in model.named_parameters():
        if name in TABLES:
            continue
        v = optimizer.state[p]["exp_avg_sq"].double() / (1 - 0.95)
        metric = (v > 0) / (v.sqrt() + 1e-6)
        q += float((metric * truth[name].square()).sum())
        big += float((metric * truth[name].sum(0).square()).sum())
    model(ids()).backward()
    optimizer.step()
    sq_norm, tr_sigma = gns.unbiased_pair(4 * q, big, 1, 4)
    row = w.row()
    assert row["gns/total_adam_sq_norm"] == pytest.approx(sq_norm, rel=1e-3)
    assert row["gns/total_adam_tr_sigma"] == pytest.approx(tr_sigma, rel=1e-3)


def test_in_a_compiled_model_exact_layers_run_between_its_graphs_and_agree():
    model = plain()
    q, big = pair_of(loop(model, {"idx": ids()}), trained(model))
    w = watch(model, mode="exact")
    torch.compile(model, backend="eager")(ids()).backward()
    w.step()
    assert (w.last.small, w.last.big) == (pytest.approx(4 * q, rel=1e-4), pytest.approx(big, rel=1e-4))


def test_closing_takes_the_parameters_hooks_away_too():
    model = plain()
    w = watch(model, mode="exact")
    w.close()
    model(ids()).backward()
    assert not w.exact.sums and all(not p._backward_hooks for p in model.parameters())


def test_nothing_to_watch_in_exact_mode_is_refused():
    with pytest.raises(WatchError, match="no layer that is trained"):
        watch(nn.Sequential(nn.PReLU(4)), mode="exact")
