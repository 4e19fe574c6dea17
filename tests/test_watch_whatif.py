"""w.whatif(): what a step costs, by a clock that the tests turn, and the right batch that follows."""

import math

import pytest
import torch

from rightbatch import watch
from rightbatch.decision import Cost, Decision, Noise, right_batch
from rightbatch.step_time import WARM_UP, StepTime, from_hooks
from tests.watching import Plain, ids, needs, plain


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(StepTime, "now", lambda self: now[0])
    return now


class Slow(Plain):
    """Forward takes 1 s an example, backward 2 s, with the embedding's gradient, which comes last."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock
        self.embedding.weight.register_hook(lambda grad: clock.__setitem__(0, clock[0] + 2.0 * self.examples))

    def forward(self, idx):
        if not torch.compiler.is_compiling():
            self.examples = len(idx)
            self.clock[0] += 1.0 * len(idx)
        return super().forward(idx)


class Adam(torch.optim.AdamW):
    """An update takes 7 s."""
    clock = None

    def step(self, closure=None):
        self.clock[0] += 7.0
        return super().step(closure)


def slow(clock, **options):
    torch.manual_seed(0)
    model = Slow(clock)
    optimizer = Adam(model.parameters(), lr=1e-4)
    optimizer.clock = clock
    return model, optimizer, watch(model, optimizer, **options)


POOL = ids(batch=64, V=4)  # few of the tokens: something to learn


def draw(n=8):
    return POOL[torch.randperm(len(POOL))[:n]]


def train(model, optimizer, clock, steps, call=None, start=None):
    """Two micro-batches, clipping of 0.5 s, and 100 s of something else between steps."""
    for _ in range(steps):
        clock[0] += 100
        if start:
            start()
        for part in draw().split(4):
            ((model if call is None else call)(part) / 2).backward()
        clock[0] += 0.5
        optimizer.step()
        optimizer.zero_grad()


def test_micro_steps_are_per_example_and_clipping_and_update_are_fixed(clock):
    model, optimizer, w = slow(clock)
    train(model, optimizer, clock, WARM_UP)
    assert w.row().get("step_time/fixed_ms") is None, "a cold start is not counted"
    train(model, optimizer, clock, 5)
    row = w.row()
    for end in ("", "_low", "_high"):
        assert row[f"step_time/fixed_ms{end}"] == pytest.approx(7500)
        assert row[f"step_time/per_sequence_ms{end}"] == pytest.approx(3000)
    with torch.no_grad():
        model(ids())  # an evaluation
    train(model, optimizer, clock, 1)
    model(ids())  # a pass that no backward pass follows
    train(model, optimizer, clock, 3)
    assert w.row()["step_time/fixed_ms"] == pytest.approx(7500)
    assert w._clock.timer.averages.updates == 7  # of 12: one is asked about before its update, one holds the stray pass


def test_of_several_optimizers_the_last_ends_the_step(clock):
    torch.manual_seed(0)
    model = Slow(clock)
    optimizers = [Adam(parameters) for parameters in ([model.embedding.weight], list(model.parameters())[1:])]
    for optimizer in optimizers:
        optimizer.clock = clock
    w = watch(model, optimizers)
    for _ in range(WARM_UP + 4):
        clock[0] += 100
        model(draw()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert (w.row()["step_time/per_sequence_ms"], w.row()["step_time/fixed_ms"]) == pytest.approx((3000, 14000))


def test_layers_without_norms_are_timed_too(clock):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 4))
    optimizer = Adam(model.parameters())
    optimizer.clock = clock
    w = watch(model, optimizer, mode="exact")
    for _ in range(WARM_UP + 4):
        loss = model(ids()).square().mean()
        clock[0] += 4.0
        loss.backward()
        optimizer.step()
    assert (w.row()["step_time/per_sequence_ms"], w.row()["step_time/fixed_ms"]) == pytest.approx((1000, 7000))


def test_a_compiled_model_is_timed_from_start_on_and_says_so_without(clock):
    model, optimizer, w = slow(clock)
    compiled = torch.compile(model, backend="aot_eager")
    model.examples = 4  # compiled: no forward of ours counts
    train(model, optimizer, clock, WARM_UP + 3, compiled)
    assert w._clock.timer.estimate() is None and "call w.start()" in str(w.whatif())
    train(model, optimizer, clock, WARM_UP + 3, compiled, start=w.start)
    assert (w.row()["step_time/per_sequence_ms"], w.row()["step_time/fixed_ms"]) == pytest.approx((2000, 7500))


@pytest.mark.parametrize("events, passes, expected", [
    ("f1 b3 u4", 1, [(1, 3), (3, 4)]),
    ("s0 f1 b3 f4 b6 u8", 2, [(0, 3), (4, 6), (6, 8)]),
    ("f1 f2 b5 u6", 2, [(1, 5), (5, 6)]),  # two forward passes, one backward
    ("f1 b3 b4 u6", 1, [(1, 4), (4, 6)]),  # and the other way round
    ("f1 f2 b5 u6", 1, None),              # one of them was an evaluation
    ("s0 b3 b6 u8", 2, [(0, 3), (3, 6), (6, 8)]),  # compiled
    ("b3 b6 u8", 2, None),
    ("f1 b3", 1, None),                    # the update was skipped
])
def test_what_hooks_see_becomes_micro_steps(events, passes, expected):
    names = {"s": "start", "f": "forward", "b": "backward", "u": "update"}
    assert from_hooks([(names[e[0]], int(e[1:])) for e in events.split()], passes) == expected


@pytest.mark.parametrize("options", [dict(mode="exact"), {}], ids=str)
def test_the_right_batch_is_the_root_of_N_t0_over_t1(clock, options):
    model, optimizer, w = slow(clock, half_life_tokens=1e9, **options)
    train(model, optimizer, clock, 40)
    row, decision = w.row(), w.whatif()
    key = "gns/body_adam" if w.mode == "exact" else "gns/calibrated_adam"
    N, ends = row[key], ("", "_low", "_high")
    assert N > 0 and [row[f"gns{end}"] for end in ends] == [row[f"{key}{end}"] for end in ends]
    assert decision.right["time_formula"] == pytest.approx(math.sqrt(N * 7.5 / 3))
    right = right_batch(decision.noise, decision.cost, 4)
    assert row["right_batch/time"] == right.time.batch and row["right_batch/tokens"] == 4
    assert row["right_batch/balance"] == right.balance.batch and right.balance.formula == decision.noise.triple
    assert row["right_batch/time_low"] <= row["right_batch/time"] <= row["right_batch/time_high"]
    words = str(decision)
    assert "A step takes 7.5e+03 [7.5e+03, 7.5e+03] ms" in words and "for tokens 4" in words and "This batch, 8, takes" in words
    assert "the whole model in Adam's metric" in words and "learning rate tuned" in words


def test_calibration_in_adams_metric_is_the_factor_of_exact_steps():
    """Two watches of one run: the calibrated value agrees with what all rows are."""
    torch.manual_seed(0)
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(ids(7)).backward()
    optimizer.step()
    w = watch(model, optimizer, half_life_tokens=1e9)
    exact = watch(model, optimizer, mode="exact", half_life_tokens=1e9)
    for _ in range(20):
        model(draw()).backward()
        optimizer.step()
        optimizer.zero_grad()
    factor = w.row()["gns/calibration_adam"]
    truth = exact.row()["gns/body_adam"] / exact.row()["gns/norm_adam"]
    assert factor == pytest.approx(truth, rel=0.1)


# -- what is missing, in words


def test_the_norm_layers_alone_decide_nothing_and_the_missing_factor_is_named(clock):
    model, optimizer, w = slow(clock, calibrate=False)
    train(model, optimizer, clock, 10)
    decision, row = w.whatif(), w.row()
    assert "the factor is missing: watch(..., calibrate=True)" in str(decision) and decision.right == {}
    assert row["gns/norm"] and not any(key.startswith(("right_batch", "gns_")) or key == "gns" for key in row)
    assert "step_time/fixed_ms" in row


def test_without_an_optimizer_tokens_and_balance_are_known_and_time_is_not():
    torch.manual_seed(0)
    model = plain()
    w = watch(model, mode="exact")
    for _ in range(10):
        model(draw()).backward()
        w.step()
    assert "give watch the optimizer" in str(w.whatif())
    row = w.row()
    assert row["right_batch/tokens"] == 8 and row["right_batch/balance"] % 8 == 0 and "right_batch/time" not in row


def test_while_undetermined_there_is_no_number():
    w = watch(plain(), mode="exact")
    assert "is still being measured" in str(w.whatif()) and w.whatif().row() == {}


def test_part_of_the_gradient_is_said_to_be_a_part():
    torch.manual_seed(0)
    model = plain()
    model.bare = torch.nn.Parameter(torch.ones(16))
    forward = type(model).forward
    model.forward = lambda idx: forward(model, idx) + 0.1 * (model.bare * model.second(model.embedding(idx))).square().mean()
    w = watch(model, mode="exact")
    for _ in range(10):
        model(draw()).backward()
        w.step()
    words = str(w.whatif())
    assert f"{w.meter.coverage:.0f}% of its weights" in words and w.meter.coverage < 99


# -- arithmetic


def test_what_the_present_batch_loses():
    cost = Cost((2.0, 2.0, 2.0), (0.5, 0.5, 0.5), "")
    decision = Decision(Noise(64.0, 32.0, 128.0), cost, 4, 64, [])
    best = math.sqrt(64 * 2.0 / 0.5)
    assert decision.right["time"] == pytest.approx(best) == 16
    assert decision.lost() == pytest.approx({"time": 2 * 34 / (5 * 10) - 1, "tokens": 128 / 68 - 1})
    assert "36% more time, 88% more tokens" in str(decision)
    assert "the smallest that the hardware runs well" in str(Decision(Noise(1.0, 1.0, 1.0), cost, 4, 4, []))


def test_times_go_on_where_they_were(clock):
    model, optimizer, w = slow(clock)
    train(model, optimizer, clock, 8)
    w.row()
    state, before = w.state_dict(), w._clock.timer.estimate()
    w.close()
    other = watch(model, optimizer)
    other.load_state_dict(state)
    assert other.row() == w.row() or other._clock.timer is None  # there is no clock before training begins
    train(model, optimizer, clock, 1)
    other.fetch()
    assert other._clock.timer.estimate() == before  # warming up


# -- optimizers that are not Adam, or not all of it


@needs("transformers")
def test_adafactor_has_no_metric_of_adam():
    import transformers
    model = plain()
    optimizer = transformers.Adafactor(model.parameters())
    w = watch(model, optimizer, mode="exact")
    for seed in range(2):
        model(ids(seed)).backward()
        optimizer.step()
    assert not any("adam" in key for key in w.row())


class Half(torch.optim.AdamW):
    """Adam for vectors, something without a second moment for matrices, as Muon is."""

    def step(self, closure=None):
        super().step(closure)
        for p in self.state:
            if p.dim() > 1:
                self.state[p] = {"momentum": torch.zeros_like(p)}


def test_a_model_that_adam_steps_in_part_has_no_whole_in_adams_metric():
    model = plain()
    optimizer = Half(model.parameters())
    w = watch(model, optimizer, mode="exact")
    model(ids()).backward()
    optimizer.step()
    model(ids()).backward()
    w.step()
    assert "gns/norm_adam" in w.row() and "gns/body_adam" not in w.row()
    assert "noise scale of the whole model is" in str(w.whatif())
