"""Examples of unequal length: their shares of the loss, and the pair that is unbiased for them."""

import contextlib
import types

import pytest
import torch
from torch import nn

from rightbatch import WatchError, gns, watch
from tests.watching import LENGTHS, TINY, B, Plain, T, check_step, hf, ids, loop, loop_of, needs, pair_of, plain, ragged

NORMS = ["first.weight", "first.bias", "second.weight"]


def norm_names(model, w):
    inside = {id(p) for site in w._hooks.norms for p in site.parameters}
    return [name for name, p in model.named_parameters() if id(p) in inside]


def check(w, q, big, shares, rtol=2e-5):
    h = float(shares.square().sum())
    w.fetch()
    assert w.last.effective == pytest.approx(1 / h, rel=1e-5) and w.last.examples == len(shares)
    assert (w.last.small, w.last.big) == (pytest.approx(q / h, rel=rtol), pytest.approx(big, rel=rtol))
    sq_norm, tr_sigma = gns.unequal_pair(q, big, h, len(shares))
    scale = w.meter.scales["body" if w.mode == "exact" else "norm"]
    assert (scale.sq_norm, scale.tr_sigma) == (pytest.approx(sq_norm, rel=1e-3), pytest.approx(tr_sigma, rel=1e-3))


CASES = {"causal": ("LlamaForCausalLM", "LlamaConfig", 1), "masked": ("BertForMaskedLM", "BertConfig", 0)}


@needs("transformers")
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
    assert w.last.mean_length == pytest.approx(float(n.mean()))


@needs("transformers")
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


@needs("transformers")
def test_without_labels_shares_come_from_the_attention_mask():
    model, batch = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged()
    del batch["labels"]
    w = watch(model)
    model(**batch).logits.square().mean().backward()
    w.step()
    n = LENGTHS.double()
    assert w.last.effective == pytest.approx(float(n.sum() ** 2 / n.square().sum()), rel=1e-5)


@needs("transformers")
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
    check(w, *pair_of(truth, NORMS), shares)


@pytest.mark.parametrize("mode, names", [("norm", NORMS), ("exact", [*NORMS, "hidden.weight", "hidden.bias"])])
def test_documents_packed_into_rows_are_the_examples(mode, names):
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
    w = watch(model, mode=mode)
    w.segments(documents)
    real = documents >= 0
    nn.functional.cross_entropy(model(idx)[real], idx[real]).backward()
    w.step()
    check(w, *pair_of(truth, names), n / n.sum())


@needs("transformers")
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


class Labelled(Plain):
    """Its own loss, of labels that come however the caller likes."""

    def forward(self, input_ids, labels=None):
        if labels is None:
            input_ids, labels = input_ids["input_ids"], input_ids["labels"]
        x = self.embedding(input_ids)
        logits = self.head(self.second(x + self.hidden(self.first(x)).tanh()))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda model: model, Wrapper], ids=["model", "wrapper"])
@pytest.mark.parametrize("how", ["by name", "by position", "in a dict"])
def test_labels_count_however_they_are_given(how, wrap):
    torch.manual_seed(0)
    model, idx = Labelled(), ids()
    batch = dict(input_ids=idx, labels=idx.masked_fill(torch.arange(T) >= LENGTHS[:, None], -100))
    shares = LENGTHS.double() / LENGTHS.sum()
    q, big = pair_of(loop(model, batch, shares=shares), NORMS)
    watched = wrap(model)
    w = watch(watched)
    args, kwargs = {"by name": ((), batch), "by position": (tuple(batch.values()), {}), "in a dict": ((batch,), {})}[how]
    watched(*args, **kwargs).backward()
    w.step()
    check(w, q, big, shares)


@needs("transformers")
def test_num_items_in_batch_counts_only_where_the_loss_uses_it():
    """Trainer passes it to every model that takes **kwargs. BERT's loss for token classification leaves it lying."""
    n = LENGTHS.double()
    cuts = [slice(0, 2), slice(2, 4)]
    of_pass = torch.cat([n[c] / n[c].sum() / 2 for c in cuts])
    model, batch = hf("BertForTokenClassification", "BertConfig", num_labels=3, **TINY), ragged()
    batch["labels"] = (batch["labels"] % 3).masked_fill(batch["labels"] < 0, -100)
    w = watch(model)
    for c in cuts:
        (model(**{k: v[c] for k, v in batch.items()}, num_items_in_batch=LENGTHS.sum()).loss / 2).backward()
    w.step()
    check(w, *pair_of(loop(model, batch, shares=of_pass), norm_names(model, w)), of_pass)
    model, batch, n = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged(), n - 1
    w = watch(model)
    for within in (lambda _: contextlib.nullcontext(), w.batch):
        for c in cuts:
            part = {k: v[c] for k, v in batch.items()}
            with within(part["input_ids"]):
                loss = model(**part, num_items_in_batch=int(n.sum())).loss
            loss.backward()
        w.step()
        check(w, *pair_of(loop(model, batch, shares=n / n.sum()), norm_names(model, w)), n / n.sum())


class OtherLoss:
    """Forward passes as kernels put them in the place of a model's own, with a loss function of their own."""

    def takes(self, input_ids=None, labels=None, **kwargs):
        return TheirCausalLMLoss(input_ids, labels=labels, **kwargs)  # noqa: F821

    def leaves(self, input_ids=None, labels=None, **kwargs):
        return TheirCausalLMLoss(self.model(input_ids, **kwargs), labels=labels)  # noqa: F821


@needs("transformers")
@pytest.mark.parametrize("forward, uses", [(OtherLoss.takes, True), (OtherLoss.leaves, False)])
def test_a_loss_in_the_place_of_the_models_own_counts_if_it_is_given_the_number(forward, uses):
    from rightbatch.inputs import facts_of
    model = hf("LlamaForCausalLM", "LlamaConfig", **TINY)
    assert facts_of(model).uses_items
    model.forward = types.MethodType(forward, model)
    assert facts_of(model).uses_items == uses


@needs("transformers")
def test_a_mask_says_nothing_about_a_loss_of_whole_examples():
    """BERT without a head: what the caller makes of its output, here of each [CLS], has no tokens."""
    model, batch, y = hf("BertModel", "BertConfig", **TINY), ragged(), torch.randn(B, 32, dtype=torch.float64)
    del batch["labels"]

    def loss(m, rows):
        got = m(**{k: v[rows] for k, v in batch.items()}).last_hidden_state[:, 0]
        return nn.functional.mse_loss(got, y[rows].to(got.dtype))
    w = watch(model)
    loss(model, slice(None)).backward()
    w.step()
    truth = loop_of(model, [lambda m, b=b: loss(m, slice(b, b + 1)) for b in range(B)])
    check_step(w, truth, norm_names(model, w), rtol=2e-5)


@pytest.mark.parametrize("sizes", [(3, 5), (1, 7)], ids=str)
def test_unequal_micro_batches_weighted_by_their_size_are_one_mean_over_the_step(sizes):
    model, idx = plain(), ids(batch=8)
    w = watch(model, token_mean="step")
    for part in idx.split(sizes):
        (model(part) * len(part) / 8).backward()
    w.step()
    check_step(w, loop(model, {"idx": idx}), NORMS)


@needs("transformers")
def test_a_step_whose_weight_is_all_on_one_example_says_nothing_and_stops_nothing():
    """Fine-tuning meets such batches: all labels of the other row are ignored."""
    model, batch = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged()
    w = watch(model)
    labels = batch["labels"].clone()
    labels[1:] = -100
    for step in range(3):
        model(**(batch if step == 1 else batch | dict(labels=labels))).loss.backward()
        w.step()
        assert "gns/norm" in w.row()
    assert w.meter.scales["norm"].averages.updates == 1 and w.skipped == 2


@needs("transformers")
def test_a_micro_batch_without_labels_weighs_nothing_in_a_mean_over_the_step():
    model, batch = hf("LlamaForCausalLM", "LlamaConfig", **TINY), ragged()
    n = (LENGTHS - 1).double()
    w = watch(model)
    for labels in (batch["labels"], torch.full_like(batch["labels"], -100)):
        model(**batch | dict(labels=labels), num_items_in_batch=int(n.sum())).loss.backward()
    w.step()
    assert w.last.examples == 2 * B and w.last.effective == pytest.approx(float(n.sum() ** 2 / n.square().sum()), rel=1e-5)


@pytest.mark.parametrize("say, words", [
    (lambda w: w.weights([1, 2]), "2 weights for 4 examples"),
    (lambda w: w.weights([0, 0, 0, 0]), "not all zero"),
    (lambda w: w.weights([1, -1, 1, 1]), "none negative"),
    (lambda w: w.segments(torch.zeros(4, 12, dtype=torch.long) + torch.arange(4)[:, None], 2), "from 0 to 1.* got 0 to 3"),
    (lambda w: w.segments(torch.arange(4)[:, None].expand(4, 11)), r"\(4, 12, 16\) that does not begin with \(4, 11\)"),
    (lambda w: w.segments(torch.arange(12)[None].expand(4, -1) // 6), "a document is in several rows"),
])
def test_weights_and_documents_that_do_not_fit_the_batch_are_refused(say, words):
    model = plain()
    w = watch(model)
    with pytest.raises(WatchError, match=words):
        say(w)
        model(ids()).backward()
