"""Sampled rows in watch: the whole model's noise scale against a float64 loop over single examples."""

import importlib.util
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rightbatch import rows, sites, verify, watch
from tests import watching
from tests.watching import TINY, Encoder, Plain, body, hf, ids, loop, loss_of, needs, pair_of, plain, ragged, randomise


def spy(w):
    """What each step that samples comes to: [{"body": (q, big), ...}]."""
    found, collect = [], w._collector.collect

    def collected(layers, direct, *spoiled):
        numbers, counts = collect(layers, direct, *spoiled)
        if "body" in numbers:
            found.append({name: [float(v) for v in pair] for name, pair in numbers.items()})
        return numbers, counts
    w._collector.collect = collected
    return found


# -- a few rows stand for all


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).tanh().square().mean()


def tied():
    first, second = nn.Linear(12, 12), nn.Linear(12, 12)
    second.weight, second.bias = first.weight, first.bias
    return Layers(first, nn.Tanh(), second)


class Lora(nn.Module):
    """The frozen weight, and its adapters."""

    def __init__(self):
        super().__init__()
        self.base, self.A, self.B = nn.Linear(12, 20), nn.Linear(12, 3, bias=False), nn.Linear(3, 20, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


def conv1d():
    from transformers.pytorch_utils import Conv1D
    return Layers(Conv1D(20, 12))


KINDS = {
    "linear": (lambda: Layers(nn.Linear(12, 20)), (5, 12)), "tied": (tied, (5, 12)), "Conv1D": (conv1d, (5, 12)),
    "LoRA": (lambda: Layers(Lora()), (5, 12)), "conv2d": (lambda: Layers(nn.Conv2d(3, 10, 3, 2, 1)), (3, 7, 6)),
    "groups": (lambda: Layers(nn.Conv2d(6, 12, (2, 3), dilation=2, groups=3, bias=False)), (6, 7, 8)),
    "conv1d": (lambda: Layers(nn.Conv1d(4, 10, 3, padding=1, groups=2)), (4, 9))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_over_many_draws_sampled_rows_have_the_numbers_of_all_rows(kind, monkeypatch):
    if kind == "Conv1D" and not importlib.util.find_spec("transformers"):
        pytest.skip("transformers is not installed")
    monkeypatch.setattr(sites, "LOW_RANK", 0)
    monkeypatch.setattr(rows, "ROWS", 3)
    torch.manual_seed(0)
    make, shape = KINDS[kind]
    model, x = make(), torch.randn(4, *shape)
    truth = pair_of(loop(model, {"x": x}), body(model))
    w = watch(model)
    estimates = spy(w)
    for _ in range(1000):
        model(x).backward()
        w.step()
    assert not w.left_out and w.meter.coverage == 100
    for got, want in zip(zip(*(e["body"] for e in estimates)), truth):
        got = torch.tensor(got, dtype=torch.float64)
        assert abs(got.mean() - want) < 4 * got.std() / len(got)**0.5 + 1e-5 * want
        assert got.std() > 1e-3 * want, "rows differ, or this shows nothing"


# -- all rows are the loop itself: weights as low as these are taken whole


def check(model, batch, w, names, shares=None, rtol=1e-6, call=None, parts=None):
    truth = pair_of(loop(model, batch, shares, w._passes.batch_dim), names)
    estimates = spy(w)
    for part in parts or [batch]:
        (loss_of((model if call is None else call)(**part)) / len(parts or [0])).backward()
    w.step()
    assert set(w.left_out.values()) <= {"skipped"}
    assert estimates[0]["body"] == pytest.approx(truth, rel=rtol)


@pytest.mark.parametrize("norms", [True, False])
def test_all_rows_agree_with_accumulation(norms):
    model = plain().double()
    if not norms:
        model.first, model.second = nn.Identity(), nn.Identity()
    check(model, {"idx": ids()}, watch(model), body(model), parts=[{"idx": part} for part in ids().split(2)])


class Checkpointed(Plain):
    reentrant = None

    def block(self, x):
        return x + self.hidden(self.first(x)).tanh()

    def forward(self, idx):
        x = self.embedding(idx)
        for _ in range(2):  # the same layers twice, unless reentrant checkpointing forbids
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
            if self.reentrant:
                break
        return nn.functional.cross_entropy(self.head(self.second(x))[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_all_rows_agree_under_checkpointing_and_where_a_layer_is_used_twice(reentrant):
    torch.manual_seed(0)
    model = randomise(Checkpointed()).double()
    model.reentrant = reentrant
    check(model, {"idx": ids()}, watch(model), body(model))


def test_sequence_first_agrees():
    torch.manual_seed(0)
    model = randomise(Encoder(batch_first=False)).double()
    w = watch(model, batch_dim=1, skip=["*.self_attn"])
    check(model, {"x": torch.randn(6, 4, 16).double()}, w, [n for n in body(model) if "self_attn" not in n])
    assert 0 < w.meter.coverage < 100


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_compiled_steps_with_and_without_samples_agree(backend):
    model = plain().double()
    w = watch(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    check(model, {"idx": ids()}, w, body(model), call=compiled)
    for step in range(1, 4):
        compiled(ids()).backward()
        assert (w._sampler.layers[0].leaf.grad is not None) == (step == 2)
        w.step()


def test_compiled_steps_take_new_rows_each_time_and_nothing_is_compiled_again(monkeypatch):
    from torch._dynamo.utils import counters
    monkeypatch.setattr(sites, "LOW_RANK", 0)
    found, graphs = [], []
    for compiles in (False, True):
        model = plain().double()
        w = watch(model)
        found.append(spy(w))
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        for _ in range(9):
            call(ids()).backward()
            w.step()
            graphs.append(counters["stats"]["unique_graphs"])
    eager, compiled = ([step["body"] for step in steps] for steps in found)
    assert len(eager) == 5 and all(a == pytest.approx(b, rel=1e-6) for a, b in zip(eager, compiled))
    assert len({small for small, _ in eager}) > 1 and graphs[-8] == graphs[-1], "with samples and without, no more"


@needs("transformers")
@pytest.mark.parametrize("name, config, settings", [
    ("LlamaForCausalLM", "LlamaConfig", TINY),
    ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1,
                                           eos_token_id=2))])
def test_ragged_lengths_agree(name, config, settings):
    model, batch = hf(name, config, **settings).double(), ragged()
    n = (batch["labels"][:, 1:] != -100).sum(1).double()
    check(model, batch, watch(model), body(model), shares=n / n.sum())


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_agrees_as_far_as_it_goes(autocast):
    model = plain() if autocast else plain().bfloat16()
    w = watch(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check(model, {"idx": ids()}, w, body(model), rtol=0.05, call=model)


def test_adams_metric_weighs_every_coordinate_and_is_that_of_exact_mode():
    model = plain().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    w, exact = watch(model, optimizer, half_life_tokens=1e9), watch(model, optimizer, mode="exact", half_life_tokens=1e9)
    w._sampler.on, estimates, oracle = True, spy(w), spy(exact)
    for seed in range(3):
        truth = loop(model, {"idx": ids(seed)})
        metrics = {name: v for name, p in model.named_parameters() if optimizer.state[p]
                   for v in [optimizer.state[p]["exp_avg_sq"] / (1 - 0.95**seed)]}
        model(ids(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
        w._sampler.on = True
    weighed = {name: truth[name] * ((v > 0) / (v.sqrt() + 1e-6)).sqrt() for name, v in metrics.items()}
    assert estimates[-1]["body_adam"] == pytest.approx(pair_of(weighed, body(model)), rel=1e-6)
    for name in ("body", "body_adam"):
        assert oracle[-1][name] == pytest.approx(estimates[-1][name], rel=1e-6)


# -- what is left out, with a word


class Routed(Plain):
    """The layer sees what was picked out of the batch, as experts do."""

    def forward(self, idx):
        x = self.first(self.embedding(idx))
        return self.head(self.second(x + self.hidden(x.flatten(0, 1)[:7]).mean())).square().mean()


class Elsewhere(Plain):
    def forward(self, idx):
        return super().forward(idx) + (self.embedding(idx) @ self.hidden.weight).square().mean()


class NotCalled(Plain):
    def forward(self, idx):
        x = self.first(self.embedding(idx))
        return self.head(self.second(nn.functional.linear(x, self.hidden.weight, self.hidden.bias))).square().mean()


class Casting(nn.Linear):
    """As nanochat's, whose weights are kept in another dtype."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_with_a_forward_pass_of_its_own_is_taken_where_it_does_what_a_linear_does():
    torch.manual_seed(0)
    model = randomise(Plain()).double()
    model.hidden.__class__ = Casting
    check(model, {"idx": ids()}, watch(model), body(model))
    model.hidden.__class__ = Doubling
    w = watch(model)
    model(ids()).backward()
    w.step()
    assert w.left_out == {"hidden": "its weight is used elsewhere, too, or the layer is no plain one"}


class Outside(Plain):
    def forward(self, idx):
        return self.second(self.first(self.embedding(idx)))


@pytest.mark.parametrize("kind, words", [
    (Routed, "sees 7 examples in its input (7, 16), the model sees 4"), (Elsewhere, "its weight is used elsewhere, too"),
    (NotCalled, "its weight is used, but not by calling the layer"), (Outside, "outside of the model's own forward pass")])
def test_what_cannot_be_told_apart_is_left_out_with_a_word_and_training_goes_on(kind, words):
    torch.manual_seed(0)
    model = randomise(kind())
    w = watch(model)
    estimates = spy(w)
    for seed in range(3):
        loss = model(ids(seed))
        (model.hidden(loss).square().mean() if kind is Outside else loss).backward()
        w.step()
    assert words in w.left_out["hidden"] and w.row()["gns/norm_tr_sigma"] > 0
    assert w.meter.coverage < 100 and len(estimates) == 2 and not w._sampler.layers[0].parameters[0]._backward_hooks


def test_the_gradients_hooks_are_gone_after_the_first_sampled_step_and_all_others_when_closed():
    model = plain()
    w = watch(model)
    model(ids()).backward()
    w.step()
    assert not any(p._backward_hooks for p in model.parameters()) and w.left_out == {}
    w.close()
    assert not any(m._forward_hooks for m in model.modules())


def test_without_calibration_nothing_is_sampled_and_the_missing_factor_is_named():
    w = watch(plain(), calibrate=False)
    assert not w._sampler.layers and "calibrate=True) measures it" in str(w.whatif())


def test_the_table_of_verify_has_sampled_rows():
    model = plain()
    report = verify(model, lambda m, idx: m(idx), ids(), skip=["first", "second"])
    assert report.error < 1e-4 and [row[0] for row in report.rows] == ["hidden"]


# -- soon


def learn(model, batches, optimizer):
    for parts in batches:
        for part in parts:
            (loss_of(model(part)) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("norms", [True, False])
def test_a_loop_of_ones_own_has_the_right_batch_within_100_steps(norms):
    torch.manual_seed(0)
    model, pool = plain(), ids(batch=64, V=4)
    if not norms:
        model.first, model.second = nn.Identity(), nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    w = watch(model, optimizer)
    learn(model, (pool[torch.randperm(64)[:16]].split(4) for _ in range(100)), optimizer)
    row = w.row()
    assert row["right_batch/time"] and row["gns"] == row["gns/calibrated_adam" if norms else "gns/body_adam"]
    assert str(w).startswith("right batch for time") and "in Adam's metric" in str(w.whatif())


@needs("transformers", "accelerate")
@pytest.mark.parametrize("name, config, settings", [
    ("LlamaForCausalLM", "LlamaConfig", TINY),
    ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=1,
                                           eos_token_id=2))])
@pytest.mark.slow
def test_hugging_faces_trainer_has_the_right_batch_within_100_steps(name, config, settings, tmp_path):
    from rightbatch import WatchCallback
    model = hf(name, config, **settings)
    texts = [{"input_ids": row} for row in (3 + ids(batch=1600, V=4)).tolist()]
    trainer = watching.trainer_of(tmp_path, model, texts, WatchCallback(), max_steps=100, per_device_train_batch_size=4,
                         gradient_accumulation_steps=4, max_grad_norm=1.0, learning_rate=1e-4, logging_steps=20)
    trainer.train()
    row = [line for line in trainer.state.log_history if "loss" in line][-1]
    N, t0, t1 = row["gns"], row["step_time/fixed_ms"], row["step_time/per_sequence_ms"]
    assert abs(row["right_batch/time"] - max(4, math.sqrt(N * t0 / t1))) < 4 and row["right_batch/tokens"] == 4
    assert t0 > 0 and t1 > 0 and N == row["gns/calibrated_adam"] and row["gns/coverage_percent"] == 100
