"""Examples of unequal length: their shares of the loss, and the pair that is unbiased for them."""

import importlib.util

import pytest
import torch
from torch import nn

from rightbatch import WatchError, gns, watch
from tests.watching import TINY, B, Plain, T, hf, ids, loop, pair_of, plain

needs_transformers = pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
LENGTHS = torch.tensor([12, 3, 7, 5])


def ragged(seed=1):
    """Right-padded tokens, as a collator makes them; labels of the padding are ignored."""
    idx = torch.randint(3, 64, (B, T), generator=torch.Generator().manual_seed(seed))
    real = torch.arange(T) < LENGTHS[:, None]
    return dict(input_ids=idx * real, attention_mask=real.long(), labels=idx.masked_fill(~real, -100))


def norm_names(model, w):
    inside = {id(p) for site in w.sites for p in site.parameters}
    return [name for name, p in model.named_parameters() if id(p) in inside]


def check(w, q, big, shares, rtol=2e-5):
    h = float(shares.square().sum())
    w.fetch()
    assert w.last.effective == pytest.approx(1 / h, rel=1e-5) and w.last.examples == len(shares)
    assert (w.last.small, w.last.big) == (pytest.approx(q / h, rel=rtol), pytest.approx(big, rel=rtol))
    sq_norm, tr_sigma = gns.unequal_pair(q, big, h, len(shares))
    scale = w.scales["norm"]
    assert (scale.sq_norm, scale.tr_sigma) == (pytest.approx(sq_norm, rel=1e-3), pytest.approx(tr_sigma, rel=1e-3))


CASES = {"causal": ("LlamaForCausalLM", "LlamaConfig", 1), "masked": ("BertForMaskedLM", "BertConfig", 0)}


@needs_transformers
@pytest.mark.parametrize("kind", CASES)
def test_shares_come_from_the_labels_that_count(kind):
    name, config, shift = CASES[kind]
    model, batch = hf(name, config, **TINY), ragged()
    n = (LENGTHS - shift).double()
    shares = n / n.sum()
    truth = loop(model, batch, shares=shares)
    w = watch(model)
    model(**batch).loss.backward()
    w.step()
    check(w, *pair_of(truth, norm_names(model, w)), shares)
    assert w.mean_length == pytest.approx(float(n.mean()))


@needs_transformers
def test_a_compiled_model_with_ragged_lengths_and_checkpointing_agrees():
    model, batch = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged()
    n = (LENGTHS - 1).double()
    truth = loop(model, batch, shares=n / n.sum())
    w = watch(model)
    model.train()  # Hugging Face checkpoints in training alone
    model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(**batch).loss.backward()
        w.step()
    check(w, *pair_of(truth, norm_names(model, w)), n / n.sum())


@needs_transformers
def test_without_labels_shares_come_from_the_attention_mask():
    model, batch = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged()
    del batch["labels"]
    w = watch(model)
    model(**batch).logits.square().mean().backward()
    w.step()
    n = LENGTHS.double()
    assert w.last.effective == pytest.approx(float(n.sum() ** 2 / n.square().sum()), rel=1e-5)


@needs_transformers
def test_labels_of_whole_sequences_weigh_alike_whatever_the_mask():
    model, batch = hf("BertForSequenceClassification", "BertConfig", num_labels=3, **TINY), ragged()
    batch["labels"] = torch.tensor([0, 2, 1, 1])
    w = watch(model)
    model(**batch).loss.backward()
    w.step()
    assert w.last.effective == pytest.approx(B, rel=1e-5)


class Weighted(Plain):
    """A loss that the caller takes himself, over tokens that a mask picks."""

    def forward(self, idx):
        x = self.embedding(idx)
        return self.head(self.second(x + self.hidden(self.first(x)).tanh()))


def masked_loss(logits, idx, lengths):
    real = (torch.arange(T) < lengths[:, None])
    return nn.functional.cross_entropy(logits[real], idx[real])


@pytest.mark.parametrize("token_mean", ["micro", "step"])
def test_weights_are_said_for_a_forward_pass_and_micro_batches_follow_the_loss(token_mean):
    torch.manual_seed(0)
    model, idx, n = Weighted(), ids(), LENGTHS.double()
    cuts = [slice(0, 2), slice(2, 4)]
    of_pass = torch.cat([n[c] / n[c].sum() / 2 for c in cuts])
    shares = n / n.sum() if token_mean == "step" else of_pass
    rows = {}
    for b in range(B):
        model.double().zero_grad()
        (shares[b] * masked_loss(model(idx[b:b + 1]), idx[b:b + 1], LENGTHS[b:b + 1])).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, []).append(p.grad.clone())
    truth = {name: torch.stack(r) for name, r in rows.items()}
    model.float().zero_grad()
    w = watch(model, token_mean=token_mean)
    for c in cuts:
        w.weights(LENGTHS[c])
        share = float(n[c].sum() / n.sum()) if token_mean == "step" else 0.5
        (share * masked_loss(model(idx[c]), idx[c], LENGTHS[c])).backward()
    w.step()
    check(w, *pair_of(truth, ["first.weight", "first.bias", "second.weight"]), shares)


def test_documents_packed_into_rows_are_the_examples():
    torch.manual_seed(0)
    model, idx = Weighted(), ids(batch=2)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 3 + [3] * 6 + [-1] * 3])
    n = torch.tensor([5.0, 7.0, 3.0, 6.0], dtype=torch.float64)
    rows = {}
    for d in range(4):
        alone = idx[documents == d][None]
        model.double().zero_grad()
        (n[d] / n.sum() * nn.functional.cross_entropy(model(alone)[0], alone[0])).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, []).append(p.grad.clone())
    truth = {name: torch.stack(r) for name, r in rows.items()}
    model.float().zero_grad()
    w = watch(model)
    w.segments(documents)
    real = documents >= 0
    nn.functional.cross_entropy(model(idx)[real], idx[real]).backward()
    w.step()
    check(w, *pair_of(truth, ["first.weight", "first.bias", "second.weight"]), n / n.sum())


@needs_transformers
def test_packed_documents_take_their_shares_from_the_labels():
    model = hf("LlamaForCausalLM", "LlamaConfig", **TINY)
    documents = torch.tensor([[0] * 5 + [1] * 7, [2] * 3 + [3] * 9])
    idx = torch.randint(3, 64, (2, T), generator=torch.Generator().manual_seed(0))
    labels = idx.masked_fill(torch.tensor([[t in (0, 5) for t in range(T)], [t in (0, 3) for t in range(T)]]), -100)
    w = watch(model)
    w.segments(documents)
    model(input_ids=idx, labels=labels).loss.backward()
    w.step()
    n = torch.tensor([4.0, 6.0, 2.0, 8.0])
    assert w.last.examples == 4 and w.last.effective == pytest.approx(float(n.sum() ** 2 / n.square().sum()))


def test_documents_in_exact_mode_are_refused():
    with pytest.raises(WatchError, match="mode='norm'"):
        watch(plain(), mode="exact").segments(torch.zeros(4, 12, dtype=torch.long))


def test_weights_hold_for_one_pass_alone():
    model = plain()
    w = watch(model)
    w.weights([1, 2, 3, 4])
    model(ids()).backward()
    w.step()
    assert w.last.effective == pytest.approx(100 / 30)
    model(ids()).backward()
    w.step()
    w.fetch()
    assert w.last.effective == pytest.approx(4)
