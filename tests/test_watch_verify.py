"""verify: a loop over the user's own examples, as a table."""


import pytest
import torch

from rightbatch import verify
from tests.watching import TINY, Encoder, Plain, hf, ids, needs, plain, ragged, randomise


def test_the_table_says_that_both_agree_and_leaves_the_model_as_it_was():
    model = plain().train()
    model(ids(9)).backward()
    before = [p.grad for p in model.parameters()]
    report = verify(model, lambda m, idx: m(idx), ids(batch=12))
    assert report.error < 1e-4 and report.examples == 8 and model.training
    assert [row[0] for row in report.rows] == ["first", "second", "hidden"]
    assert all(a is b for a, b in zip(before, (p.grad for p in model.parameters())))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert str(report).splitlines()[1].startswith("first ") and "largest error" in str(report)


class Mixing(Plain):
    """A loss that ties examples together, as contrastive losses do."""

    def forward(self, idx):
        x = self.second(self.first(self.embedding(idx)).mean(1))
        return -(x @ x.T).log_softmax(1).diagonal().mean()


def test_a_loss_that_ties_examples_shows_as_an_error():
    torch.manual_seed(0)
    assert verify(randomise(Mixing()), lambda m, idx: m(idx), ids()).error > 0.05


def test_sequence_first_is_cut_along_its_batch():
    torch.manual_seed(0)
    model = randomise(Encoder(batch_first=False))
    report = verify(model, lambda m, b: m(b[0]), (torch.randn(6, 4, 16),), batch_dim=1)
    assert report.error < 1e-4 and report.examples == 4


@needs("transformers")
def test_ragged_batches_agree_with_their_shares():
    model = hf("LlamaForCausalLM", "LlamaConfig", **TINY)
    assert verify(model, lambda m, batch: m(**batch).loss, ragged()).error < 1e-4


@needs("transformers")
@pytest.mark.parametrize("name, config, settings", [
    ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1,
                                           eos_token_id=2)),
    ("LlamaForCausalLM", "LlamaConfig", TINY)])
def test_all_layers_are_in_the_table_with_mode_exact(name, config, settings):
    model = hf(name, config, **settings)
    report = verify(model, lambda m, batch: m(**batch).loss, ragged(), mode="exact")
    assert report.error < 1e-4 and not report.left_out
    tables = {"lm_head", "model.embed_tokens", "transformer.wte", "transformer.wpe"}
    assert {row[0] for row in report.rows} == {name for name, m in model.named_modules() if m._parameters} - tables


class WeightlessNorms(Plain):
    """As nanochat's: norms are functions without a weight."""

    def __init__(self):
        super().__init__()
        self.first = self.second = torch.nn.RMSNorm(16, elementwise_affine=False)


def test_a_model_whose_norms_have_no_weight_agrees_in_sampled_rows_and_in_exact_mode():
    torch.manual_seed(0)
    model = WeightlessNorms()
    report = verify(model, lambda m, idx: m(idx), ids())
    assert report.error < 1e-4 and [row[0] for row in report.rows] == ["hidden"]
    report = verify(model, lambda m, idx: m(idx), ids(), mode="exact")
    assert report.error < 1e-4 and [row[0] for row in report.rows] == ["hidden"]


@pytest.mark.parametrize("fails", [lambda model, idx: 1 / 0, lambda model, idx: model(idx) if len(idx) > 1 else 1 / 0])
def test_a_loss_that_fails_leaves_the_model_as_it_was(fails):
    model = plain().train()
    model.hidden.eval()
    model(ids(9)).backward()
    before = [p.grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        verify(model, fails, ids())
    assert model.training and not model.hidden.training and model.head.training
    assert all(a is b for a, b in zip(before, (p.grad for p in model.parameters())))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_frozen_weights_beside_trained_biases_are_not_in_the_table():
    model = plain()
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith("bias")
    report = verify(model, lambda m, idx: m(idx), ids())
    assert report.error < 1e-4 and [row[0] for row in report.rows] == ["first", "hidden"]


class Method(Plain):
    def loss(self, idx):
        return Plain.forward(self, idx)


def own_loss(model, idx, w):
    with w.batch(idx):
        return model.loss(idx)


def test_a_method_of_ones_own_is_verified_within_w_batch():
    torch.manual_seed(0)
    assert verify(randomise(Method()), own_loss, ids()).error < 1e-4
