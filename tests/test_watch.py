"""watch in plain torch: what a step says, what it refuses, and every mode of training against a float64 loop."""

import copy
import gc
import inspect
import io
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rightbatch import WatchError, gns, watch
from tests.watching import TABLES, Encoder, Plain, check_step, ids, loop, loop_of, pair_of, plain, randomise, site_errors

NORMS = ["first.weight", "first.bias", "second.weight"]
BODY = [*NORMS, "hidden.weight", "hidden.bias"]


def truth_of(model, idx, **options):
    return loop(model, {"idx": idx}, **options)


def check_last(w, q, big, B, rtol=1e-5, h=None):
    """w.last against the loop's sums, up to the common factor that last allows for."""
    h = h or 1 / B
    assert w.last.examples == B
    assert w.last.small / w.last.big == pytest.approx(q / h / big, rel=rtol)


# -- a step


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_a_step_of_any_number_of_micro_batches_says_what_the_loop_says(micro):
    model, idx = plain(), ids()
    w = watch(model)
    for part in idx.split(4 // micro):
        (model(part) / micro).backward()
    w.step()
    check_step(w, truth_of(model, idx), NORMS)


def test_the_row_is_the_unbiased_pair_of_the_steps_averaged():
    model, w, pairs = plain(), None, []
    w = watch(model, half_life_tokens=1e9, calibrate=False)
    scale = gns.NoiseScale(1e9, 0.2)
    for seed in range(12):
        idx = ids(seed)
        q, big = pair_of(truth_of(model, idx), NORMS)
        scale.update(*gns.unbiased_pair(4 * q, big, 1, 4), idx.numel())
        model(idx).backward()
        w.step()
        pairs.append((q, big))
    row = w.row()
    assert row["gns/norm_sq_norm"] == pytest.approx(scale.sq_norm, rel=1e-4)
    assert row["gns/norm_tr_sigma"] == pytest.approx(scale.tr_sigma, rel=1e-4)
    assert row["gns/norm"] == (scale.gns and pytest.approx(scale.gns, rel=1e-3))
    assert set(row) == {f"gns/norm{end}" for end in ("", "_low", "_high", "_sq_norm", "_tr_sigma")}


def test_last_is_the_newest_step_whenever_it_is_read():
    model = plain()
    w = watch(model)
    for seed, batch in enumerate((4, 3, 6)):
        idx = ids(seed, batch=batch, length=5 + seed)
        model(idx).backward()
        w.step()
        check_last(w, *pair_of(truth_of(model, idx), NORMS), batch)
        assert w.last.mean_length == 5 + seed
    (float("inf") * model(ids())).backward()
    w.step()
    assert w.skipped == 1


def test_help_shows_every_option():
    options = inspect.signature(watch).parameters
    assert list(options)[:3] == ["model", "optimizer", "mode"] and options["half_life_tokens"].default == 250_000
    assert all(f"\n    {name} " in watch.__doc__ for name in options)


def test_print_says_the_noise_scale_with_its_interval():
    torch.manual_seed(0)
    model, idx = plain(), ids(batch=16)
    w = watch(model)
    assert "undetermined yet" in str(w)
    for _ in range(6):
        model(idx[torch.randperm(16)[:12]]).backward()
        w.step()
    row = w.row()
    assert f"noise scale of the norm layers {row['gns/norm']:.3g} [{row['gns/norm_low']:.3g}, " in str(w)


def test_the_state_goes_on_where_it_was():
    model, other = plain(), None
    w = watch(model)
    for seed in range(3):
        model(ids(seed)).backward()
        w.step()
    state = w.state_dict()
    w.close()
    other = watch(model)
    for seed in range(2):  # steps that still wait on the device are none of the state's
        other.model(ids(seed)).backward()
        other.step()
    other.load_state_dict(torch.load(io.BytesIO(saved(state)), weights_only=True))
    assert other.row() == w.row() and other.steps == 3


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_close_leaves_nothing_behind():
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters())
    before = hooks_of(model, optimizer)
    w = watch(model, optimizer)
    assert hooks_of(model, optimizer) != before
    model(ids()).backward()
    optimizer.step()
    w.close()
    assert hooks_of(model, optimizer) == before
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


class Moody(nn.Module):
    """Draws from every generator, counts its calls, and moves its children."""

    def __init__(self):
        super().__init__()
        self.weight, self.inner, self.calls = nn.Parameter(torch.ones(16)), nn.BatchNorm1d(16, affine=False), []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        self.calls.append(torch.rand(()) + random.random() + np.random.rand())
        self.inner.train()(x.flatten(0, -2).float())
        self.inner.eval()
        return nn.functional.rms_norm(x, (16,), self.weight)


def test_watch_leaves_no_trace(monkeypatch):
    """No generator, buffer, mode, gradient or hook's own record changes."""
    model, heard = nn.Sequential(plain(), nn.BatchNorm1d(16), Moody()), []
    model[2].inner.train().register_forward_hook(lambda *_: heard.append(1))
    model[1].eval()
    for p in model[0].parameters():
        p.grad = torch.ones_like(p)
    model[0].hidden.weight.requires_grad_(False)

    def trace():
        python = random.getstate(), [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
        tensors = [torch.get_rng_state(), *model.buffers(), *model.parameters(), *(p.grad for p in model[0].parameters())]
        return repr((python, np.random.get_state(), [t.tolist() for t in tensors], heard, model[2].calls))
    for place, name in ((torch, "manual_seed"), (torch.cuda, "manual_seed_all"), (torch.cuda, "manual_seed")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("a global generator is seeded"))
    before = trace()
    w = watch(model)
    assert trace() == before and {site.name for site in w._hooks.norms} == {"0.first", "0.second", "2"}


@pytest.mark.parametrize("options", [dict(optimizer=3), dict(mode="exact", skip="*"), dict(mode="exact", optimizer=3)], ids=str)
def test_a_watch_that_is_refused_leaves_nothing_behind(options):
    model = plain()
    with pytest.raises(WatchError):
        watch(model, **options)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def hooks_of(model, optimizer):
    return [len(getattr(m, name)) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks",
            "_backward_hooks", "_forward_hooks_with_kwargs")] + [len(optimizer._optimizer_step_pre_hooks)]


def evaluate(model):
    with torch.no_grad():
        model(ids(5, batch=7))


def average(model):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged(ids(3)).backward()


def forward_alone(model):
    model(ids(3))


@pytest.mark.parametrize("between", [evaluate, average, forward_alone])
def test_what_else_is_done_with_the_model_changes_nothing(between):
    model, idx = plain(), ids()
    w = watch(model)
    between(model)
    loss = model(idx)
    between(model)
    loss.backward()
    w.step()
    check_last(w, *pair_of(truth_of(model, idx), NORMS), 4)


def test_no_step_waits_for_the_device_after_the_first():
    model = plain()
    w = watch(model)
    for seed in range(5):
        model(ids(seed)).backward()
        w.step()
    assert len(w._waiting) == 4
    w.row()
    assert not w._waiting and w.meter.scales["norm"].averages.updates == 5


# -- refusals


def test_batch_norm_alone_is_refused():
    with pytest.raises(WatchError, match="mixes examples: no example has a gradient of its own"):
        watch(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def test_batch_norm_is_refused_in_exact_mode_until_its_statistics_are_frozen():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    with pytest.raises(WatchError, match="mixes examples: no example has a gradient of its own"):
        watch(model, mode="exact")
    model.eval()
    w = watch(model, mode="exact")
    x = torch.randn(4, 3, 8, 8)
    model(x).square().mean().backward()
    w.step()
    truth = loop_of(model, [lambda m, b=b: m(x[b:b + 1].double()).square().mean() for b in range(4)])
    check_step(w, truth, [name for name in truth if not name.startswith("1.")], rtol=1e-4)
    model.train()
    model(x).square().mean().backward()
    with pytest.warns(UserWarning, match="mixes examples"):
        w.step()
    assert w.skipped == 1


def test_batch_norm_beside_other_norms_is_said_once():
    with pytest.warns(UserWarning, match="mixes examples") as said:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4))
        w = watch(model)
        model(torch.randn(8, 4)).sum().backward()
    assert w.left_out == {"0": "BatchNorm mixes examples: no example has a gradient of its own"} and len(said) == 1


@pytest.mark.parametrize("options, words", [
    (dict(half_life_tokens=0), "half_life_tokens=0: expected"),
    (dict(batch_dim=2), "batch_dim=2: expected one of 0, 1"), (dict(mode="exat"), "mode='exat': expected one of norm, exact"),
    (dict(optimizer=3), "expected a torch.optim.Optimizer or a list of them, got int")], ids=str)
def test_an_option_that_makes_no_sense_is_refused_by_name(options, words):
    with pytest.raises(WatchError, match=words):
        watch(plain(), **options)


@pytest.mark.parametrize("model", [None, plain().parameters()], ids=["None", "parameters"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(WatchError, match="expected a torch.nn.Module, got"):
        watch(model)


def test_a_step_behind_close_is_refused():
    model = plain()
    w = watch(model)
    model(ids()).backward()
    w.close()
    with pytest.raises(WatchError, match="behind w.close()"):
        w.step()
    assert "noise scale" in str(w)


def test_flat_parameters_are_refused_and_watch_before_them_agrees():
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(WatchError, match="take fully_shard, or watch"):
            watch(FullyShardedDataParallel(plain(), device_id=torch.device("cpu")))
        model, idx = plain(), ids()
        truth = truth_of(model, idx)
        w = watch(model)
        FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))(idx).backward()
        w.step()
        check_step(w, truth, NORMS)
    finally:
        dist.destroy_process_group()


def test_a_gradient_of_gradients_is_said_to_be_left_out():
    model, idx = plain(), ids()
    watch(model)
    with pytest.warns(UserWarning, match="create_graph=True"):
        torch.autograd.grad(model(idx), model.embedding.weight, create_graph=True)


def test_a_model_without_weighted_norms_is_refused_with_the_way_out():
    with pytest.raises(WatchError, match="no norm layer with a weight: calibrate=True samples other layers, mode='exact'"):
        watch(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, elementwise_affine=False)), calibrate=False)


def test_data_parallel_is_refused():
    with pytest.raises(WatchError, match="start with torchrun"):
        watch(nn.DataParallel(plain()))


def test_a_model_that_is_compiled_already_is_refused():
    with pytest.raises(WatchError, match="before torch.compile"):
        watch(torch.compile(plain()))
    model = plain()
    model.hidden.compile()
    with pytest.raises(WatchError, match="hidden is compiled already"):
        watch(model)


def test_a_step_without_gradients_is_refused_in_words():
    w = watch(plain())
    with pytest.raises(WatchError, match="was the model compiled before"):
        w.step()


def test_one_example_in_all_is_left_out_and_said_once():
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = watch(model, optimizer)
    with pytest.warns(UserWarning, match="one example in the whole step") as said:
        for _ in range(2):
            model(ids(batch=1)).backward()
            optimizer.step()
    model(ids()).backward()
    optimizer.step()
    assert len(said) == 1 and w.skipped == 2 and w.last.examples == 4


def test_sequence_first_is_refused_until_batch_dim_says_so():
    model, x = randomise(Encoder(batch_first=False)), torch.randn(6, 4, 16)
    w = watch(TokensFirst(model))
    with pytest.raises(WatchError, match=r"sees 6 examples in its input \(6, 4, 16\), the model sees 4: pass batch_dim=1"):
        w.model(x.movedim(0, 1))


class TokensFirst(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):  # (B, T, C)
        return self.inner(x.movedim(1, 0))


class Folded(Plain):
    def forward(self, idx):
        return super().forward(idx) + self.first(self.embedding(idx).flatten(0, 1)).mean()


def test_a_batch_folded_into_positions_is_refused():
    model = Folded()
    w = watch(model)
    with pytest.raises(WatchError, match=r"first sees 48 examples .* skip=\('first',\)"):
        model(ids())
    w.close()
    w = watch(model, skip=("first",))
    model(ids()).backward()
    w.step()
    assert w.left_out == {"first": "skipped"} and w.last.examples == 4


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x, gate=None):
        return nn.functional.rms_norm(x * nn.functional.silu(x if gate is None else gate), (16,), self.weight)


class GatedNorm(Gated):
    pass


def test_gated_norms_are_left_out_by_name():
    model = Plain()
    model.gate = GatedNorm()
    assert watch(model).left_out == {"gate": "takes a second input (gate)"}


def test_inputs_that_are_spread_over_ranks_are_refused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = distribute_module(nn.LayerNorm(16), mesh)
        watch(model)
        with pytest.raises(WatchError, match="an example spread over ranks"):
            model(distribute_tensor(torch.randn(2, 4, 16), mesh, [Shard(1)]))
    finally:
        dist.destroy_process_group()


# -- traps


class Shared(Plain):
    """One norm used twice in a pass: its squares do not add."""

    def forward(self, idx):
        self.hidden_twice = self.first(self.second(self.embedding(idx)).sin())
        return super().forward(idx) + 0.3 * self.hidden_twice.square().mean()


def test_a_module_used_several_times_in_a_pass_counts_once():
    torch.manual_seed(0)
    model, idx = randomise(Shared()), ids()
    truth = truth_of(model, idx)
    w = watch(model)
    model(idx).backward()
    assert max(site_errors(model, w, truth).values()) < 1e-5


class InPlace(Plain):
    def forward(self, idx):
        y = self.first(self.embedding(idx))
        y += 1
        y.mul_(2)
        return self.second(y).tanh_().square().mean() + 0 * self.head.weight.sum()


def test_what_follows_may_write_into_the_norms_output():
    torch.manual_seed(0)
    model, idx = randomise(InPlace()), ids()
    truth = truth_of(model, idx)
    w = watch(model)
    model(idx).backward()
    assert max(site_errors(model, w, truth).values()) < 1e-5


def test_a_copy_of_the_model_is_not_watched_and_does_not_disturb():
    model, idx = plain(), ids()
    w = watch(model)
    ema = copy.deepcopy(model)
    again = torch.load(io.BytesIO(saved(model)), weights_only=False)
    for other in (ema, again):
        hooks = [h for m in other.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
        assert hooks and all(type(h).__name__ == "Silent" for h in hooks)
        other(ids(3)).backward()
    model(idx).backward()
    w.step()
    check_last(w, *pair_of(truth_of(model, idx), NORMS), 4)
    assert w.last.examples == 4


class Checkpointed(Plain):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, idx):
        x = checkpoint(lambda v: v + self.hidden(self.first(v)).tanh(), self.embedding(idx), use_reentrant=self.reentrant)
        logits = self.head(self.second(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())


class CheckpointedTwice(Checkpointed):
    def forward(self, idx):
        def twice(v):
            return self.first(self.first(v).sin())
        return self.second(checkpoint(twice, self.embedding(idx), use_reentrant=self.reentrant)).square().mean()


def test_a_shared_norm_under_reentrant_checkpointing_agrees_or_is_refused():
    torch.manual_seed(0)
    model, idx = randomise(CheckpointedTwice(False)), ids()
    truth = truth_of(model, idx)
    w = watch(model)
    model(idx).backward()
    assert max(site_errors(model, w, truth).values()) < 1e-5
    w.step()
    model.reentrant = True
    model(idx).backward()
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        w.step()
    assert w.skipped == 1


def test_checkpointing_keeps_no_input_alive():
    torch.manual_seed(0)
    model, kept = Checkpointed(False), []
    model.first.register_forward_pre_hook(lambda m, args: kept.append(weakref.ref(args[0].untyped_storage())))

    def inside(v):
        v = v * 2  # lives inside of the checkpoint alone
        return self_first(v)
    self_first = model.first
    w = watch(model)
    x = torch.randn(4, 6, 16, requires_grad=True)
    with w.batch(x):
        y = checkpoint(inside, x, use_reentrant=False)
    gc.collect()
    alive = [ref() is not None for ref in kept]
    y.sum().backward()
    assert w._hooks.norms[0].leaf.grad is not None and alive == [False]


class OneParameter(Plain):
    """Two norm layers, one Parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.RMSNorm(16)
        self.second.weight = self.first.weight


def test_norm_layers_with_one_parameter_have_one_gradient():
    torch.manual_seed(0)
    model, idx = randomise(OneParameter()), ids()
    truth = truth_of(model, idx)
    w = watch(model)
    for part in idx.split(2):
        (model(part) / 2).backward()
    w.step()
    check_step(w, truth, ["first.weight"])
    assert [site.name for site in w._hooks.norms] == ["first"] and not w.left_out


def test_norm_layers_that_share_a_weight_but_no_bias_are_left_out_with_a_word():
    model = Plain()
    model.third = nn.LayerNorm(16)
    model.third.weight = model.first.weight
    assert watch(model).left_out == {"first": "shares a part of its parameters with third",
                                     "third": "shares a part of its parameters with first"}


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_only_trained_parameters_count(trained):
    """Biases alone are trained in BitFit."""
    model, idx = plain(), ids()
    for name, p in model.named_parameters():
        p.requires_grad = name.endswith(trained)
    names = [name for name in NORMS if name.endswith(trained)]
    truth = truth_of(model, idx)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    w = watch(model, optimizer)
    for _ in range(2):
        model(idx).backward()
        optimizer.step()
        check_step(w, truth, names)
        optimizer.zero_grad()
    assert "gns/norm_adam" in w.row()


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_that_changes_a_norms_output_changes_nothing_in_its_gradients(before):
    model, idx = plain(), ids()
    w = None if before else watch(model)
    model.first.register_forward_hook(lambda module, args, y: 3 * y)
    truth = truth_of(model, idx)
    w = w or watch(model)
    model(idx).backward()
    w.step()
    check_step(w, truth, NORMS)


class Upcast(nn.Module):
    """As Llama's: computes in float32, so that its bf16 input is not needed for the backward pass."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return self.weight * nn.functional.rms_norm(x.float(), (16,), None, 1e-6).to(x.dtype)


class InPlaceResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.hidden = nn.Embedding(32, 16), Upcast(), nn.Linear(16, 16)

    def forward(self, idx):
        x = self.embedding(idx) * 1
        x += self.hidden(self.norm(x))
        return x.float().square().mean()


def test_an_input_that_is_changed_in_place_is_copied_from_the_second_step_on():
    torch.manual_seed(0)
    model, idx = randomise(InPlaceResidual()).bfloat16(), ids()
    w = watch(model)
    with pytest.warns(UserWarning, match="norm: its input is changed in place after it"):
        model(idx).backward()
    w.step()
    assert w.last is None and w.skipped == 1
    model(idx).backward()
    w.step()
    check_last(w, *pair_of(truth_of(model, idx), ["norm.weight"]), 4, rtol=0.05)  # bf16 keeps 8 bits


@pytest.mark.parametrize("skip", [("nothing",), "frist", ["first", "block.*.norm"]], ids=str)
def test_a_name_to_skip_that_matches_nothing_is_refused(skip):
    with pytest.raises(WatchError, match="matches no module" + (": did you mean 'first'" if skip == "frist" else "")):
        watch(plain(), skip=skip)


def test_names_to_skip_may_be_patterns():
    assert [site.name for site in watch(plain(), skip="f*t")._hooks.norms] == ["second"]
    model = nn.Sequential(Plain(), Plain())
    assert [site.name for site in watch(model, skip="*.first")._hooks.norms] == ["0.second", "1.second"]
    assert [site.name for site in watch(model, skip="1")._hooks.norms] == ["0.first", "0.second"]


# -- modes of training


def test_autocast_agrees_with_the_loop_within_its_rounding():
    model, idx = plain(), ids()
    q, big = pair_of(truth_of(model, idx), NORMS)
    w = watch(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx)
    loss.backward()
    w.step()
    check_last(w, q, big, 4, rtol=0.05)  # bf16 keeps 8 bits


def test_pure_bf16_agrees_with_its_own_loop_and_sums_in_float32():
    model, idx = plain().bfloat16(), ids()
    rows = {}
    for b in range(4):  # each example alone, in bf16, as the model computes
        model.zero_grad()
        (model(idx[b:b + 1]) / 4).backward()
        for name, p in model.named_parameters():
            rows.setdefault(name, []).append(p.grad.double())
    q, big = pair_of({name: torch.stack(r) for name, r in rows.items()}, NORMS)
    w = watch(model)
    model(idx).backward()
    assert all(site.leaf.grad.dtype == torch.float32 for site in w._hooks.norms)
    w.step()
    check_last(w, q, big, 4, rtol=0.05)


class Scaler:
    """What watch needs of torch.amp.GradScaler, which does nothing on a CPU."""

    def __init__(self, scale):
        self._scale = torch.tensor(scale)


def test_the_factor_of_a_grad_scaler_is_divided_out():
    model, idx = plain(), ids()
    q, big = pair_of(truth_of(model, idx), NORMS)
    scaler = Scaler(1.0)
    w = watch(model, scaler=scaler)
    for scale in (1024.0, 65536.0):
        scaler._scale = torch.tensor(scale)
        (scale * model(idx)).backward()
        w.step()
        w.fetch()
        assert (w.last.small, w.last.big) == (pytest.approx(4 * q, rel=1e-5), pytest.approx(big, rel=1e-5))


def test_a_step_that_is_not_finite_is_left_out():
    model = plain()
    w = watch(model)
    for factor in (1.0, float("inf"), 1.0):
        (factor * model(ids())).backward()
        w.step()
    w.row()
    assert w.skipped == 1 and w.meter.scales["norm"].averages.updates == 2


def test_the_real_grad_scaler_has_the_attribute_that_is_read():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    assert float(scaler._scale) == 8.0


@pytest.mark.parametrize("options", [{}, dict(mode="exact")], ids=str)
def test_a_step_that_grad_scaler_skips_leaves_nothing_for_the_next(options):
    """The overflow is in the head alone; the norm layers' numbers of that step are finite, with another factor."""
    model, idx = plain(), ids()
    names = BODY if options else NORMS
    q, big = pair_of(truth_of(model, idx), names)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    w = watch(model, optimizer, scaler=scaler, **options)
    overflow = [False]
    model.head.bias.register_hook(lambda grad: grad + float("inf") if overflow[0] else None)
    for overflow[0] in (False, True, False):
        for part in (ids(3) if overflow[0] else idx).split(2):
            scaler.scale(model(part) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    w.row()
    assert scaler.get_scale() == 512 and w.skipped == 1 and w.steps == 2
    assert (w.last.small, w.last.big) == (pytest.approx(4 * q, rel=1e-4), pytest.approx(big, rel=1e-4))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", [{}, dict(mode="exact")], ids=str)
def test_a_batch_that_is_thrown_away_does_not_go_into_the_next_step(options, set_to_none):
    model, idx = plain(), ids()
    truth = truth_of(model, idx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = watch(model, optimizer, **options)
    for thrown in (True, False, True, False):
        for part in (ids(5) if thrown else idx).split(2):
            (model(part) / 2).backward()
        if not thrown:
            optimizer.step()
            check_step(w, truth, BODY if options else NORMS, rtol=1e-4)
        elif not set_to_none:
            w.forget()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert w.skipped == 2 and w.steps == 2


def test_gradients_that_are_nowhere_to_be_seen_are_not_taken_for_thrown_away():
    """Some trainers keep them elsewhere while they accumulate."""
    model, idx = plain(), ids()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    w = watch(model)
    for part in idx.split(2):
        (model(part) / 2).backward()
    w.step()
    check_step(w, truth_of(plain(), idx), NORMS)


def test_a_backward_pass_that_raises_is_left_out():
    """As a loop does that runs out of memory and tries again."""
    model, idx = plain(), ids()
    w = watch(model)
    handle = model.embedding.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids(7)).backward()
    handle.remove()
    model.zero_grad()
    model(idx).backward()
    w.step()
    check_step(w, truth_of(model, idx), NORMS)


def test_steps_that_nobody_closes_are_noticed():
    model = plain()
    w = watch(model)
    model(ids()).backward()
    assert "no step was closed yet: call w.step()" in str(w)
    with pytest.warns(UserWarning, match="no step was closed: call w.step()"):
        for seed in range(4):
            model.zero_grad()
            model(ids(seed)).backward()
    w.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # steps are closed now: one batch that is thrown away is no mistake
        for seed in range(2):
            model(ids(seed)).backward()
            model.zero_grad()
        model(ids()).backward()


def test_an_optimizer_that_steps_without_gradients_closes_nothing():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    model, idx = plain(), ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    w = watch(model, optimizer)
    optimizer.step()
    get_optimizer_state_dict(model, optimizer)  # makes the state by a step of its own
    assert w.steps == 0
    model(idx).backward()
    optimizer.step()
    optimizer.step()
    assert w.steps == 1
    check_step(w, truth_of(model, idx), NORMS)


def test_compiled_before_watch_is_said_where_the_optimizer_closes_steps():
    model, idx = plain(), ids()
    compiled = torch.compile(lambda i: model(i), backend="eager")
    compiled(idx).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = watch(model, optimizer)
    with pytest.warns(UserWarning, match="was the model compiled before"):
        for _ in range(3):
            compiled(idx).backward()
            optimizer.step()
    assert w.steps == 0 and w.last is None


def two_optimizers(model):
    return [torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.0, betas=(0.9, 0.5), eps=1e-6),
            torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1], lr=0.0, betas=(0.9, 0.95), eps=1e-3)]


@pytest.mark.parametrize("mode", ["norm", "exact"])
def test_several_optimizers_close_one_step_and_each_parameter_has_the_metric_of_its_own(mode):
    model, idx = plain(), ids()
    optimizers = two_optimizers(model)
    w = watch(model, optimizers, mode=mode, half_life_tokens=1e9)
    model(ids(7)).backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()
    truth, q, big = truth_of(model, idx), 0.0, 0.0
    for name, p in model.named_parameters():
        optimizer = optimizers[p.dim() > 1]
        (group,) = optimizer.param_groups
        v = optimizer.state[p]["exp_avg_sq"].double() / (1 - group["betas"][1])
        metric = (v > 0) / (v.sqrt() + group["eps"])
        if name in NORMS or mode == "exact" and name not in TABLES:
            q += float((metric * truth[name].square()).sum())
            big += float((metric * truth[name].sum(0).square()).sum())
    model(idx).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert w.steps == 2
    sq_norm, tr_sigma = gns.unbiased_pair(4 * q, big, 1, 4)
    key = "gns/norm_adam" if mode == "norm" else "gns/body_adam"
    row = w.row()
    assert row[f"{key}_sq_norm"] == pytest.approx(sq_norm, rel=1e-3)
    assert row[f"{key}_tr_sigma"] == pytest.approx(tr_sigma, rel=1e-3)


def test_amsgrads_metric_is_of_the_largest_second_moment():
    model = plain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0, amsgrad=True, betas=(0.9, 0.5))
    for factor in (100.0, 1.0, 1.0):
        optimizer.zero_grad()
        (factor * model(ids())).backward()
        optimizer.step()
    w, p = watch(model, optimizer), model.first.weight
    state = optimizer.state[p]
    assert float(state["max_exp_avg_sq"].sum()) > 1.5 * float(state["exp_avg_sq"].sum())
    assert torch.allclose(w._moments.of_all([p], list), 1 / ((state["max_exp_avg_sq"] / (1 - 0.5**3)).sqrt() + 1e-8))


class Counts(torch.optim.AdamW):
    """Adam that keeps its count of steps where other optimizers have it. place: a key of the group, or None."""

    def __init__(self, parameters, place, **options):
        super().__init__(parameters, lr=0.0, **options)
        self.place, self.made = place, 0

    @torch.no_grad()
    def step(self):
        for state in self.state.values():
            state["step"] = torch.tensor(float(self.made))
        super().step()
        self.made += 1
        for state in self.state.values():
            del state["step"]
        for group in self.param_groups:
            group |= {self.place: self.made} if self.place else {}


def rows_with(model, optimizer):
    w = watch(model, optimizer)
    for seed in range(3):
        model.zero_grad()
        model(ids(seed)).backward()
        optimizer.step()
    assert w.steps == 3 and w.last.examples == 4
    return w.row()


@pytest.mark.parametrize("place", ["step", "k"])
def test_adams_metric_takes_the_count_of_steps_from_the_group(place):
    model = plain()
    row = rows_with(model, Counts(model.parameters(), place))
    want = rows_with(other := plain(), torch.optim.AdamW(other.parameters(), lr=0.0))
    assert want["gns/norm_adam_sq_norm"] and all(row.get(key) == want[key] for key in want if key.startswith("gns/norm"))


class SecondMomentAlone(torch.optim.SGD):
    """No step, no betas, no eps."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg_sq"] = torch.ones_like(p)


def without_count(model):
    return Counts(model.parameters(), None)


class ThreeBetas(Counts):
    def step(self):
        (group,) = self.param_groups
        group["betas"] = 0.9, 0.95
        super().step()
        group["betas"] = 0.9, 0.95, 0.99


def three_betas(model):
    return ThreeBetas(model.parameters(), "step")


def no_betas(model):
    return SecondMomentAlone(model.parameters(), lr=0.0)


@pytest.mark.parametrize("optimizer", [without_count, three_betas, no_betas])
def test_an_optimizer_of_another_shape_has_no_metric_of_adam_and_goes_on(optimizer):
    model = plain()
    assert not any("adam" in key for key in rows_with(model, optimizer(model)))


def test_a_parameter_that_has_left_its_group_has_no_metric_of_adam():
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(ids()).backward()
    optimizer.step()
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if p is not model.first.weight]
    assert not any("adam" in key for key in rows_with(model, optimizer))


class Scaled(torch.optim.SGD):
    def step(self, closure=None, *, scale=1.0):
        self.scale = scale
        return super().step(closure)


@pytest.mark.parametrize("by_name", [False, True])
def test_an_optimizer_keeps_the_arguments_beside_its_closure(by_name):
    model = plain()
    optimizer = Scaled(model.parameters(), lr=0.0)
    w = watch(model, optimizer)

    def closure():
        model(ids()).backward()
    optimizer.step(**{"closure": closure, "scale": 2.0}) if by_name else optimizer.step(closure, scale=2.0)
    assert w.steps == 1 and optimizer.scale == 2.0


class TwoSteps(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_an_optimizer_that_calls_the_step_of_its_base_closes_one_step():
    model = plain()
    optimizer = TwoSteps(model.parameters())
    w = watch(model, optimizer)
    for seed in range(2):
        model(ids(seed)).backward()
        optimizer.step()
    assert w.steps == 2


class Blocks(nn.Module):
    """A model as torchtitan has them: blocks that are compiled and sharded one by one, weights that come last."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh())
                                     for _ in range(2)])

    def forward(self, idx):
        x = self.embedding(idx)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_watched_on_the_meta_device_then_compiled_sharded_and_initialised():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    whole, idx = randomise(Blocks()), ids()
    truth = loop(whole, {"idx": idx})
    with torch.device("meta"):
        model = Blocks()
    w = watch(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for block in model.blocks:
            block.compile(backend="aot_eager")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        w.attach(optimizer)
        with torch.no_grad():
            for p, value in zip(model.parameters(), whole.parameters()):
                p.to_local().copy_(value)
        for _ in range(2):
            for part in idx.split(2):
                (model(part) / 2).backward()
            optimizer.step()
        assert "gns/norm_adam" in w.row()
    finally:
        dist.destroy_process_group()
    names = [n for n, _ in whole.named_parameters() if n.startswith("blocks") and ".1." not in n[8:]]
    q, big = pair_of(truth, names)
    assert w.last.small / w.last.big == pytest.approx(4 * q / big, rel=1e-4)


def test_with_an_optimizer_steps_close_themselves_and_clipping_does_not_matter():
    model, idx = plain(), ids()
    q, big = pair_of(truth_of(model, idx), NORMS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = watch(model, optimizer)
    for part in idx.split(2):
        (model(part) / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    check_last(w, q, big, 4)
    assert "gns/norm_adam" not in w.row()


def test_a_closure_closes_the_step_behind_its_gradients():
    model, idx = plain(), ids()
    q, big = pair_of(truth_of(model, idx), NORMS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    w = watch(model, optimizer)

    def closure():
        loss = model(idx)
        loss.backward()
        return loss
    assert float(optimizer.step(closure)) == pytest.approx(float(model(idx)))
    check_last(w, q, big, 4)


def test_adams_metric_weighs_every_coordinate_by_its_second_moment():
    model, idx = plain(), ids()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    w = watch(model, optimizer, half_life_tokens=1e9)
    model(ids(7)).backward()
    optimizer.step()
    assert "gns/norm_adam" not in w.row()  # there is no second moment before the first step
    optimizer.zero_grad()
    truth, q, big = truth_of(model, idx), 0.0, 0.0
    for name, p in model.named_parameters():
        if name in NORMS:
            metric = 1 / ((optimizer.state[p]["exp_avg_sq"].double() / (1 - 0.95)).sqrt() + 1e-6)
            q += float((metric * truth[name].square()).sum())
            big += float((metric * truth[name].sum(0).square()).sum())
    model(idx).backward()
    optimizer.step()
    sq_norm, tr_sigma = gns.unbiased_pair(4 * q, big, 1, 4)
    row = w.row()
    assert row["gns/norm_adam_sq_norm"] == pytest.approx(sq_norm, rel=1e-4)
    assert row["gns/norm_adam_tr_sigma"] == pytest.approx(tr_sigma, rel=1e-4)
    assert "; in Adam's metric " in str(w)


def test_compiled_after_watch_agrees():
    torch.manual_seed(0)
    model, idx = randomise(Shared()), ids()
    truth = truth_of(model, idx)
    w = watch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for part in idx.split(2):
            (compiled(part) / 2).backward()
        assert max(site_errors(model, w, truth).values()) < 1e-5
        w.step()
    w.fetch()
    check_last(w, *pair_of(truth, NORMS), 4)


def test_compiled_before_watch_is_noticed_at_the_first_step():
    model, idx = plain(), ids()
    compiled = torch.compile(lambda i: model(i), backend="eager")
    compiled(idx).backward()
    w = watch(model)
    compiled(idx).backward()
    with pytest.raises(WatchError, match="was the model compiled before"):
        w.step()
