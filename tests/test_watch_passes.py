"""Which examples a layer's call belongs to: methods of the user's own, calls within calls, several backward passes, and
checkpointing that comes back to an earlier pass. Each against a float64 loop, or refused in words."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rightbatch import WatchError, taps, watch
from tests.watching import Encoder, Plain, check_step, ids, loop, loop_of, plain, randomise

NORMS = ["first.weight", "first.bias", "second.weight"]
BODY = [*NORMS, "hidden.weight", "hidden.bias"]


def rows(idx):
    return [idx[b:b + 1] for b in range(len(idx))]


# -- a pass that is not one call of the model


class Method(Plain):
    def loss(self, idx):
        return Plain.forward(self, idx)


def own_method():
    torch.manual_seed(0)
    return randomise(Method())


def test_a_layer_outside_of_the_models_own_forward_pass_is_refused_with_the_way_out():
    model = own_method()
    w = watch(model)
    with pytest.raises(WatchError, match=r"first is called outside .* with w.batch\(x\): loss = model.loss\(x\)"):
        model.loss(ids())
    model(ids()).backward()
    w.step()
    model.loss(ids()).backward()
    with pytest.warns(UserWarning, match="called outside"):  # nor does an earlier pass stand in for it
        w.step()
    assert w.skipped == 1
    with torch.no_grad():
        model.loss(ids())


def test_a_method_of_ones_own_agrees_within_w_batch_whatever_the_batch():
    model = own_method()
    w = watch(model)
    for n in (4, 6, 3):
        idx = ids(n, batch=n)
        with w.batch(idx):
            loss = model.loss(idx)
        loss.backward()
        w.step()
        check_step(w, loop(model, {"idx": idx}), NORMS)


def test_several_calls_with_the_same_examples_are_one_pass_within_w_batch():
    model, idx = plain(), ids()
    truth = loop_of(model, [lambda m, i=i: m(i) + 0.5 * m(i.flip(1)) for i in rows(idx)])
    w = watch(model)
    with w.batch(idx):
        loss = model(idx) + 0.5 * model(idx.flip(1))
    loss.backward()
    w.step()
    check_step(w, truth, NORMS)


class Calls(Plain):
    """A forward pass that calls itself."""

    def forward(self, idx, depth=2):
        return super().forward(idx) + (0.5 * self(idx.flip(1), depth - 1) if depth > 1 else 0)


def test_a_forward_pass_that_calls_itself_is_one_pass():
    torch.manual_seed(0)
    model, idx = randomise(Calls()), ids()
    w = watch(model)
    for _ in range(2):
        model(idx).backward()
        w.step()
        check_step(w, loop(model, {"idx": idx}), NORMS)


class Interrupted(Plain):
    stop = False

    def forward(self, idx):
        loss = super().forward(idx)
        if self.stop:
            raise KeyboardInterrupt
        return loss


def test_a_pass_that_is_interrupted_does_not_go_on_in_the_next():
    torch.manual_seed(0)
    model, idx = randomise(Interrupted()), ids()
    w = watch(model)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(ids(3, batch=6))
    model.stop = False
    for part in idx.split(2):
        (model(part) / 2).backward()
    w.step()
    check_step(w, loop(model, {"idx": idx}), NORMS)


# -- several backward passes


class Logits(Plain):
    def forward(self, idx):
        x = self.embedding(idx)
        return self.head(self.second(x + self.hidden(self.first(x)).tanh()))


def two_losses(logits, idx):
    return logits.square().mean(), F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


def test_two_backward_passes_through_one_forward_pass_are_the_same_examples():
    torch.manual_seed(0)
    model, idx = randomise(Logits()), ids()
    truth = loop_of(model, [lambda m, i=i: sum(two_losses(m(i), i)) for i in rows(idx)])
    w = watch(model)
    for _ in range(2):
        first, second = two_losses(model(idx), idx)
        first.backward(retain_graph=True)
        second.backward()
        w.step()
        check_step(w, truth, NORMS)


def test_a_second_backward_pass_in_the_next_step_counts_there():
    torch.manual_seed(0)
    model, idx = randomise(Logits()), ids()
    w = watch(model)
    losses = two_losses(model(idx), idx)
    for which, loss in enumerate(losses):
        loss.backward(retain_graph=True)
        w.step()
        check_step(w, loop_of(model, [lambda m, i=i: two_losses(m(i), i)[which] for i in rows(idx)]), NORMS)


@pytest.mark.parametrize("kept", [2**20, 0])
def test_exact_layers_under_two_backward_passes_agree_or_are_left_out_where_they_are_too_large_to_keep(monkeypatch, kept):
    monkeypatch.setattr(taps, "KEPT", kept)
    torch.manual_seed(0)
    model, idx = randomise(Logits()), ids()
    truth = loop_of(model, [lambda m, i=i: sum(two_losses(m(i), i)) for i in rows(idx)])
    w = watch(model, mode="exact")
    first, second = two_losses(model(idx), idx)
    first.backward(retain_graph=True)
    second.backward()
    w.step()
    check_step(w, truth, BODY if kept else NORMS)
    assert bool(w.left_out) == (not kept) and all("two backward passes" in why for why in w.left_out.values())


# -- checkpointing, and forward passes that wait for one backward pass


class Checkpointed(Logits):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, idx):
        x = checkpoint(lambda v: v + self.hidden(self.first(v)).tanh(), self.embedding(idx), use_reentrant=self.reentrant)
        return self.head(self.second(x))


def mean_loss(model, idx, shares=None):
    logits, shares = model(idx), [1 / len(idx)] * len(idx) if shares is None else shares
    return sum(float(s) * F.cross_entropy(logits[b, :-1], idx[b, 1:]) for b, s in enumerate(shares))


def checkpointed(reentrant):
    torch.manual_seed(0)
    return randomise(Checkpointed(reentrant))


@pytest.mark.parametrize("options, names", [({}, NORMS), (dict(mode="exact"), BODY)], ids=["norm", "exact"])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)], ids=str)
def test_passes_of_any_size_wait_for_one_backward_pass_under_checkpointing(sizes, options, names):
    model, batches = checkpointed(False), [ids(seed, batch=n) for seed, n in enumerate(sizes)]
    shares = [0.5 / n for n in sizes for _ in range(n)]
    truth = loop_of(model, [lambda m, i=i: mean_loss(m, i) for batch in batches for i in rows(batch)], shares)
    w = watch(model, **options)
    sum(mean_loss(model, batch) / 2 for batch in batches).backward()
    w.step()
    check_step(w, truth, names, shares, rtol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_shares_of_passes_that_wait_are_kept_apart_or_refused_where_checkpointing_does_not_tell(reentrant):
    model, batches = checkpointed(reentrant), [ids(0), ids(1)]
    shares = [torch.tensor([1.0, 2, 3, 4]) / 10, torch.tensor([9.0, 1, 1, 1]) / 12]
    truth = loop_of(model, [lambda m, i=i: mean_loss(m, i) for batch in batches for i in rows(batch)], torch.cat(shares) / 2)
    w, losses = watch(model), []
    for batch, s in zip(batches, shares):
        w.weights(s)
        losses.append(mean_loss(model, batch, s) / 2)
    if reentrant:
        sum(losses).backward()
        with pytest.warns(UserWarning, match="first: several forward passes .* use_reentrant=False"):
            w.step()
        assert w.skipped == 1
        return
    sum(losses).backward()
    w.step()
    check_step(w, truth, NORMS, torch.cat(shares) / 2)


def test_equal_passes_may_wait_under_reentrant_checkpointing():
    model, idx = checkpointed(True), ids(batch=8)
    w = watch(model)
    for _ in range(2):
        sum(mean_loss(model, part) / 2 for part in idx.split(4)).backward()
        w.step()
        check_step(w, loop_of(model, [lambda m, i=i: mean_loss(m, i) for i in rows(idx)]), NORMS)


class Whole(Plain):
    """Its first norm is used twice."""

    def forward(self, idx):
        return super().forward(idx) + 0.3 * self.first(self.embedding(idx).sin()).square().mean()


@pytest.mark.parametrize("options, names", [({}, NORMS), (dict(mode="exact"), BODY)], ids=["norm", "exact"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_is_checkpointed_whole_agrees(reentrant, options, names):
    torch.manual_seed(0)
    model, idx = randomise(Whole()), ids()
    truth = loop(model, {"idx": idx})
    w = watch(model, **options)
    for part in idx.split(2):
        anchor = torch.ones((), requires_grad=True)  # reentrant checkpointing wants an input with a gradient
        (checkpoint(lambda i, one: model(i) * one, part, anchor, use_reentrant=reentrant) / 2).backward()
    w.step()
    check_step(w, truth, names, rtol=1e-4)


class Half(Checkpointed):
    """One use of the first norm is in a checkpoint, the other is not."""

    def forward(self, idx):
        x = checkpoint(lambda v: v + self.hidden(self.first(v)).tanh(), self.embedding(idx), use_reentrant=self.reentrant)
        return self.head(self.second(self.first(x)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_norm_that_is_used_in_a_checkpoint_and_outside_agrees_or_is_refused(reentrant):
    torch.manual_seed(0)
    model, idx = randomise(Half(reentrant)), ids()
    truth = loop_of(model, [lambda m, i=i: mean_loss(m, i) for i in rows(idx)])
    w = watch(model)
    if reentrant:
        mean_loss(model, idx).backward()
        with pytest.warns(UserWarning, match="first is used several times .* use_reentrant=False"):
            w.step()
        assert w.skipped == 1
        return
    mean_loss(model, idx).backward()
    w.step()
    check_step(w, truth, NORMS)


class Teacher(Checkpointed):
    """Looks at its own output without gradients, ahead of two checkpoints."""

    def forward(self, idx):
        with torch.no_grad():
            super().forward(idx)
        return super().forward(idx) + 0.1 * super().forward(idx.flip(1))


def test_calls_without_gradients_are_not_taken_for_checkpointing():
    torch.manual_seed(0)
    model, idx = randomise(Teacher(False)), ids()
    w = watch(model)
    mean_loss(model, idx).backward()
    w.step()
    check_step(w, loop_of(model, [lambda m, i=i: mean_loss(m, i) for i in rows(idx)]), NORMS)


class TwiceCheckpointed(Checkpointed):
    def forward(self, idx):
        x = checkpoint(lambda v: self.hidden(self.hidden(v).tanh()), self.embedding(idx), use_reentrant=self.reentrant)
        return self.head(self.second(self.first(x)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_exact_layer_used_twice_in_a_checkpoint_agrees_or_is_left_out(reentrant):
    torch.manual_seed(0)
    model, idx = randomise(TwiceCheckpointed(reentrant)), ids()
    w = watch(model, mode="exact")
    mean_loss(model, idx).backward()
    w.step()
    truth = loop_of(model, [lambda m, i=i: mean_loss(m, i) for i in rows(idx)])
    check_step(w, truth, NORMS if reentrant else BODY, rtol=1e-4)
    assert all("used several times" in why for why in w.left_out.values()) and bool(w.left_out) == reentrant


# -- where the batch is


def test_a_sequence_first_model_is_refused_until_batch_dim_says_so():
    torch.manual_seed(0)
    model, x = randomise(Encoder(batch_first=False)), torch.randn(7, 4, 16)
    w = watch(model)
    with pytest.raises(WatchError, match=r"batch_first=False, so that its input \(7, 4, 16\) is 4 examples .* batch_dim=1"):
        model(x)
    w.close()
    w = watch(model, batch_dim=1)
    model(x).backward()
    w.step()
    check_step(w, loop(model, {"x": x}, batch_dim=1), [n for n, _ in model.named_parameters() if "norm" in n])


class Recurrent(nn.Module):
    def __init__(self, batch_first, turn):
        super().__init__()
        self.norm, self.rnn, self.turn = nn.LayerNorm(8), nn.GRU(8, 8, batch_first=batch_first), turn

    def forward(self, x):
        x = self.norm(x)
        return self.rnn(x.movedim(0, 1) if self.turn else x)[0].square().mean()


@pytest.mark.parametrize("batch_first, batch_dim", [(False, 0), (True, 1)])
def test_a_recurrent_layer_that_takes_another_dimension_for_the_batch_is_refused(batch_first, batch_dim):
    model = Recurrent(batch_first, turn=False)
    watch(model, batch_dim=batch_dim)
    with pytest.raises(WatchError, match=f"batch_dim={1 - batch_dim}"):
        model(torch.randn(7, 4, 8))


def test_a_sequence_first_layer_in_a_batch_first_model_is_no_reason_to_refuse():
    model, x = randomise(Recurrent(False, turn=True)), torch.randn(4, 7, 8)
    w = watch(model)
    model(x).backward()
    w.step()
    check_step(w, loop(model, {"x": x}), ["norm.weight", "norm.bias"])


class Unbatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x).square().mean()


def test_an_input_without_a_batch_is_refused():
    model = Unbatched()
    watch(model)
    with pytest.raises(WatchError, match=r"\(8,\) that has no dimension of examples"):
        model(torch.randn(8))


class Queries(nn.Module):
    """A norm layer of learned queries, the same for all examples, and a mask that comes first."""

    def __init__(self):
        super().__init__()
        self.queries, self.of_queries, self.norm = nn.Parameter(torch.randn(1, 3, 8)), nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, mask, x):
        x = torch.matmul(mask, self.norm(x))
        return (self.of_queries(self.queries).expand(len(x), -1, -1) @ x.mT).square().mean()


def test_learned_queries_are_refused_with_the_right_advice_and_a_mask_is_not_taken_for_the_batch():
    torch.manual_seed(0)
    model, mask, x = randomise(Queries()), torch.rand(6, 6), torch.randn(4, 6, 8)
    w = watch(model)
    with pytest.raises(WatchError, match=r"of_queries sees 1 .* the model sees 4: .* skip=\('of_queries',\)"):
        model(mask, x)
    w.close()
    w = watch(model, skip="of_*")
    model(mask, x).backward()
    w.step()
    truth = loop_of(model, [lambda m, b=b: m(mask.double(), x[b:b + 1].double()) for b in range(4)])
    check_step(w, truth, ["norm.weight", "norm.bias"])


def test_torch_func_sees_the_model_as_if_it_were_not_watched():
    model, idx = plain(), ids()
    parameters = dict(model.named_parameters())
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (idx,)))
    want = grads(parameters)
    w = watch(model)
    got = grads(parameters)
    assert all(torch.equal(got[name], want[name]) for name in want)
    with pytest.raises(WatchError, match="torch.func"):
        w.step()
