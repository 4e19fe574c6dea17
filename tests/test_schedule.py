import math
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

import configurator
import schedule
import train
from configurator import Config, ConfigError
from rightbatch.decision import Cost, Noise
from schedule import Controller, build, learning_rate_at
from system import points
from tests.helpers import ROOT, assert_same_run, untimed
from trainer import checkpoint, log, plan, reader, start
from trainer.step import metric_of_run


@pytest.mark.parametrize("quantum", [1, 4, 8])
def test_linear_batch_is_exact_at_the_ends_monotone_and_whole(quantum):
    c = Config(batch_schedule="linear", batch_size_start=16, batch_size=120, max_tokens=10**6)
    values = [build(c, quantum).at(t) for t in range(0, 10**6 + 1, 1000)]
    assert values[0] == 16 and values[-1] == 120 == build(c, quantum).at(10**7)
    assert values == sorted(values) and set(values) == set(range(16, 121, quantum)), "every multiple on the way"
    assert values[500] == 68 // quantum * quantum or abs(values[500] - 68) <= quantum / 2


@pytest.mark.parametrize("keys, points", [
    (dict(batch_schedule="constant", batch_size=40, batch_size_start=8), {0: 40, 1: 40, 10**6: 40, 10**9: 40}),
    (dict(batch_schedule="late", batch_late=0.75, batch_size_start=8, batch_size=64, max_tokens=1000),
     {0: 8, 749: 8, 750: 64, 1000: 64}),
    (dict(batch_schedule="steps", batch_steps="0:32, 50M:64, 0.2B:128"),
     {0: 32, 49_999_999: 32, 50_000_000: 64, 199_999_999: 64, 200_000_000: 128, 10**12: 128}),
    (dict(batch_schedule="steps", batch_steps="0:8"), {7: 8})], ids=str)
def test_batches_hold_between_and_jump_at_the_token(keys, points):
    batches = build(Config(**keys), 8)
    assert {tokens: batches.at(tokens) for tokens in points} == points


@pytest.mark.parametrize("keys, points", [
    (dict(min_lr=1e-3, warmup_tokens=1000, max_tokens=11_000),
     {0: 0, 500: 5e-3, 1000: 1e-2, 6000: 5.5e-3, 11_000: 1e-3, 20_000: 1e-3}),
    (dict(min_lr=0.0, warmup_tokens=0, max_tokens=1000, lr_decay="cosine"), {0: 1e-2, 10: 0.99975e-2, 500: 5e-3, 1000: 0}),
    (dict(min_lr=1e-3, warmup_tokens=0, max_tokens=1000, decay_tokens=500), {500: 1e-3, 900: 1e-3}),
    (dict(warmup_tokens=10, lr_decay="none"), {900: 1e-2}),
    (dict(min_lr=1e-3, warmup_tokens=1000, max_tokens=1000), {999: 0.999e-2, 1000: 1e-3}),  # all warm-up
    (dict(min_lr=1e-3, warmup_tokens=100, max_tokens=1100, lr_decay="wsd"),
     {100: 1e-2, 500: 1e-2, 900: 1e-2, 1000: 5.5e-3, 1100: 1e-3})], ids=str)
def test_learning_rate_warms_up_peaks_and_ends_where_it_should(keys, points):
    c = Config(learning_rate=1e-2, **keys)
    assert {t: learning_rate_at(t, c) for t in points} == pytest.approx(points, rel=1e-5, abs=1e-12)


# -- names

def test_a_name_without_a_class_raises_and_every_class_answers(monkeypatch):
    assert configurator.FIELDS["batch_schedule"].metadata["choices"] == schedule.KINDS == tuple(schedule.SCHEDULES)
    with pytest.raises(ValueError, match="batch_schedule='gnss'"):
        build(Config(batch_schedule="gnss"), 8)
    with pytest.raises(ConfigError, match="batch_schedule='gnss'"):
        configurator.check(Config(batch_schedule="gnss"))
    with pytest.raises(KeyError):
        learning_rate_at(10**6, Config(lr_decay="stairs"))


def test_a_schedule_is_one_class_for_trainer_checks_resume_and_plan(tmp_path, tiny_args, monkeypatch):
    """A newcomer in SCHEDULES runs, is checked, is planned and saves its state; no other file knows its name."""
    class Sawtooth(schedule.Schedule):
        def __init__(self, config, quantum):
            super().__init__(config, quantum)
            self.seen = 0

        def at(self, tokens):
            return self.config.batch_size if tokens // 640 % 2 else self.quantum

        def observe(self, tokens, noise, cost=None):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

        def load(self, state):
            self.seen = state["seen"]
    monkeypatch.setitem(schedule.SCHEDULES, "sawtooth", Sawtooth)
    field = configurator.FIELDS["batch_schedule"]
    monkeypatch.setattr(field, "metadata", {**field.metadata, "choices": tuple(schedule.SCHEDULES)})
    args = tiny_args(out_dir=tmp_path / "run", batch_schedule="sawtooth", gns="off")
    assert train.main([*args, "--stop_tokens=1600"]) == 0 and train.main([*args, "--resume=True"]) == 0
    rows = logged(tmp_path / "run")
    assert {r["batch_size"] for r in rows} == {4, 16}
    assert checkpoint.load(str(tmp_path / "run"))["schedule"]["seen"] == sum(r["tokens"] < 3200 for r in rows)
    assert plan.steps(start.parse(args), 1) == (rows[-1]["step"], rows[-1]["tokens"], (4, 16))
    with pytest.raises(ConfigError, match="batch_size=14: is not a multiple of micro_batch_size=4"):
        start.parse([*args, "--batch_size=14"])


# -- steps and file

@pytest.mark.parametrize("text, value", [("0", 0), ("200", 200), ("50k", 50_000), ("1.5M", 1_500_000), ("2B", 2 * 10**9),
                                         ("1e6", 10**6), (" 1_000 ", 1000), ("0.1B", 10**8)])
def test_counts_are_read_exactly(text, value):
    assert points.parse_count(text) == value


@pytest.mark.parametrize("text, words", [
    ("", "tokens:batch"), ("0:8,", "tokens:batch"), ("32", "'32' is not tokens:batch"), ("1k:8", "start at 0"),
    ("0:8, 2M:16, 1M:32", "1000000 comes after 2000000"), ("0:8, 0:16", "must increase"), ("0:12", "take 8 or 16"),
    ("0:4", "take 8"), ("0:0", "take 8"), ("0:8, 1x:16", "'1x' is not a whole number"), ("0:-8", "'-8'"),
    ("0:8, 1.5:16", "'1.5'"), ("0:nan", "'nan'"), ("0:8, k:16", "'k'")])
def test_malformed_steps_are_one_clear_line(text, words):
    with pytest.raises(ConfigError) as e:
        configurator.check(Config(batch_schedule="steps", batch_steps=text))
    assert str(e.value).startswith("batch_steps=") and words in str(e.value) and "\n" not in str(e.value)


def file_schedule(path, saved=None):
    return build(Config(batch_schedule="file", batch_file=str(path)), 8, saved)


def test_a_file_is_interpolated_held_outside_and_exact_at_its_points(tmp_path):
    path = tmp_path / "batch.txt"
    path.write_text("# tokens  batch\n1k 16   # from here\n\n3k 32\n4000 8\n")
    plan = file_schedule(path)
    assert [plan.at(t) for t in (0, 1000, 2000, 3000, 4000, 10**9)] == [16, 16, 24, 32, 8, 8]
    values = [plan.at(t) for t in range(0, 5000, 50)]
    assert all(v % 8 == 0 for v in values) and set(values) == {8, 16, 24, 32}
    assert plan.poll() is None


def look(plan):
    """What a change is taken for: at the second look."""
    assert plan.poll() is None
    return plan.accept(plan.poll())


def test_a_changed_file_counts_once_it_rests_and_a_bad_edit_keeps_the_last_good_one_and_says_so_once(tmp_path):
    path = tmp_path / "batch.txt"
    path.write_text("0 16")
    plan = file_schedule(path)
    path.write_text("0 32\n1M 64\n")
    assert "changed: 0:32, 1000000:64" in look(plan) and plan.at(0) == 32
    path.write_text("0 32\n1M sixty\n")
    words = look(plan)
    assert "line 2: 'sixty'" in words and "last good one stays" in words and plan.at(10**6) == 64
    os.utime(path, (1, 1))  # touched, not edited
    assert look(plan) is None
    path.unlink()
    assert "missing" in look(plan) and look(plan) is None and plan.at(0) == 32
    for text in ("0 8", "0 800", "0 80"):  # written without a pause
        path.write_text(text)
        assert plan.poll() is None
    path.write_text("0 32\n1M 64\n")
    assert "again what is in force" in look(plan)


def test_a_file_schedule_resumes_with_what_was_in_force_and_looks_again(tmp_path):
    path = tmp_path / "batch.txt"
    path.write_text("0 16")
    plan = file_schedule(path)
    path.write_text("0 bad")
    look(plan)
    resumed = file_schedule(path, plan.state_dict())
    assert resumed.at(0) == 16 and look(resumed) is None, "the bad edit was reported already"
    path.write_text("0 24")
    assert "changed" in look(resumed) and resumed.at(0) == 24
    path.unlink()
    assert file_schedule(path, plan.state_dict()).at(0) == 16


@pytest.mark.parametrize("content, words", [
    (None, "missing"), ("", "missing, empty"), ("# nothing\n", "no line"), ("0 16 3", "line 1: '0 16 3' is not two columns"),
    ("0 16\n\n5 20", "line 3: a batch of 20"), ("0 8\n5 8\n5 16", "line 3: tokens must increase"),
    (b"\xff\xfe\x00", "readable")])
def test_a_malformed_file_stops_the_run_before_anything_is_created(tmp_path, tiny_args, capsys, content, words):
    path = tmp_path / "batch.txt"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit) as e:
        train.main(tiny_args(out_dir=tmp_path / "run", batch_schedule="file", batch_file=path, micro_batch_size=8))
    message = capsys.readouterr().err
    assert e.value.code == 2 and "batch_file=" in message and words in message and message.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("overrides, words", [
    (dict(batch_schedule="file"), "batch_file="), (dict(batch_schedule="gns", gns="off"), "needs a noise scale"),
    (dict(batch_schedule="gns", batch_size_start=1, micro_batch_size=1), "at least 2"), (dict(batch_gns_factor=0), "above 0"),
    (dict(batch_schedule="gns", batch_size_start=72), "must not exceed"), (dict(batch_gns_margin=-0.1), "negative"),
    (dict(batch_gns_dwell_tokens=-1), "negative"), (dict(lr_reference_batch=-8), "negative")])
def test_impossible_schedule_keys_are_one_clear_line(overrides, words):
    with pytest.raises(ConfigError, match=words) as e:
        configurator.check(Config(**overrides))
    assert "\n" not in str(e.value)


# -- the controller

def controller(**keys):
    keys = {"batch_schedule": "gns", "batch_size_start": 8, "batch_size": 256, "batch_gns_dwell_tokens": 1000,
            "batch_objective": "balance", **keys}
    return Controller(Config(**keys), 8)


def test_the_controller_grows_only_if_the_lower_end_clears_the_margin_by_at_most_double_after_its_dwell():
    c = controller()
    assert "held at 8: no move before 1,000" in c.observe(10, Noise(100, 90, 110)) and c.batch == 8
    assert c.observe(20, Noise(100, 90, 110)) is None, "the same refusal is said once"
    assert "undetermined" in c.observe(1000, None)
    assert "not clear" in c.observe(1001, Noise(30, 8.7, 90)) and c.batch == 8
    assert c.observe(1002, Noise(30, 8.9, 90)).startswith("batch 8 -> 16: noise scale 30 [8.9, 90]")
    assert c.observe(2001, Noise(30, 29, 31)) is None and c.batch == 16, "dwelling after a move goes without saying"
    assert "16 -> 32" in c.observe(2002, Noise(33, 29, 31))
    assert "asks for less" in c.observe(4000, Noise(5, 4, 6)) and c.batch == 32, "never shrinks unless allowed"
    for t, batch in ((5000, 64), (6000, 128), (7000, 256)):
        c.observe(t, Noise(10**6, 10**5, 10**7))
        assert c.batch == batch
    assert "reached batch_size=256" in c.observe(9000, Noise(10**6, 10**5, 10**7)) and c.batch == 256


def test_the_controller_goes_to_the_target_where_that_is_less_than_double_and_follows_its_factor():
    c = controller(batch_size_start=64, batch_gns_factor=0.5)
    assert c.observe(10**6, Noise(170, 150, 190)).startswith("batch 64 -> 88: noise scale 170 [150, 190] x 0.5")
    c = controller(batch_size_start=64)
    assert "smallest step" not in (c.observe(10**6, Noise(80, 71, 90)) or "") and c.batch == 80
    c = controller(batch_size_start=64, batch_gns_margin=0)
    assert "less than 8 more" in c.observe(10**6, Noise(66, 64.5, 70)) and c.batch == 64


def test_a_shrinking_controller_mirrors_the_growing_one():
    c = controller(batch_shrink=True, batch_size_start=16)
    c.batch = 128
    assert "waits until 2,000" in c.observe(1000, Noise(20, 15, 30))
    assert "128 -> 64" in c.observe(2000, Noise(20, 15, 30)) and c.observe(2500, Noise(20, 15, 30)) is None
    assert "64 -> 32" in c.observe(3000, Noise(5, 4, 6))
    assert "not clear" in c.observe(4000, Noise(28, 20, 30)), "30 is not below 32 by 10%"
    assert "32 -> 16" in c.observe(4001, Noise(5, 4, 6))
    assert "less than batch_size_start=16" in c.observe(6000, Noise(5, 4, 6)) and c.batch == 16
    assert "waits until 8,001" in c.observe(7000, Noise(90, 80, 99)) and "16 -> 32" in c.observe(8001, Noise(90, 80, 99))


def noisy(rng, truth, spread=0.3):
    """A noise scale with its interval, as an estimator of that relative error would give; sometimes none."""
    if rng.random() < 0.1:
        return None
    value = truth * math.exp(rng.gauss(0, spread))
    return Noise(value, value * math.exp(-1.96 * spread), value * math.exp(1.96 * spread))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_it_sees_the_controller_stays_in_bounds_in_quanta_and_within_its_rules(seed):
    rng = random.Random(seed)
    shrink = seed % 2 == 1
    quantum = rng.choice([1, 4, 8, 12])
    smallest = quantum * rng.randint(1, 4)
    c = Controller(Config(batch_size_start=smallest, batch_size=smallest + quantum * rng.randint(0, 60), batch_shrink=shrink,
                          batch_objective="balance",
                          batch_gns_dwell_tokens=rng.choice([1, 500]), batch_gns_factor=rng.choice([0.3, 1, 4]),
                          batch_gns_margin=rng.choice([0, 0.1, 1])), quantum)
    moved, tokens = 0, 0
    for _ in range(500):
        tokens += rng.randint(1, 200)
        noise = noisy(rng, 10 ** rng.uniform(-2, 5), rng.choice([0.01, 0.3, 2]))
        before, was = c.batch, c.reason
        text = c.observe(tokens, noise)
        assert c.smallest <= c.batch <= c.largest and c.batch % quantum == 0
        assert shrink or c.batch >= before
        if c.batch != before:
            assert noise and tokens - moved >= c.dwell() and text.startswith(f"batch {before} -> {c.batch}: ")
            assert before / 2 - quantum < c.batch <= 2 * before
            assert (c.factor * noise.low > before * (1 + c.margin)) == (c.batch > before)
            moved = tokens
        else:
            assert (text is None) == (c.reason == was)


def test_noise_about_a_steady_truth_does_not_make_the_batch_swing():
    turns = []
    for seed in range(50):
        rng = random.Random(seed)
        c = controller(batch_shrink=True, batch_size=512, batch_gns_dwell_tokens=100)
        path = []
        for t in range(1000):
            c.observe(10 * t, noisy(rng, 100, 0.2))
            if not path or path[-1] != c.batch:
                path.append(c.batch)
        signs = [b > a for a, b in zip(path, path[1:])]
        turns.append(sum(a != b for a, b in zip(signs, signs[1:])))
        assert 40 <= c.batch <= 250, path
    # 10,000 tokens are 100 dwells; a change of direction takes 2, 4, 8, ... of them, so 5 are the most there can be
    assert max(turns) <= 5, turns


def test_the_controller_is_a_function_of_its_inputs_and_resumes_from_its_state():
    looks = [(100 * t, noisy(random.Random(t), 4 + t)) for t in range(300)]
    one, two = controller(batch_shrink=True), controller(batch_shrink=True)
    said = []
    for i, look in enumerate(looks):
        if i % 37 == 0:  # killed and resumed: a new object with the old state
            state = two.state_dict()
            two = controller(batch_shrink=True)
            two.load(state)
        said.append(one.observe(*look))
        assert two.observe(*look) == said[-1] and two.batch == one.batch
    assert sum(" -> " in (s or "") for s in said) >= 3


def test_a_run_goes_by_the_whole_models_noise_scale_in_its_metric_and_never_by_the_norm_layers():
    for metric, keys in (("adam", dict(gns="exact")), ("adam", dict(gns="norm")), ("plain", dict(gns_metric="plain")),
                         ("plain", dict(optimizer="muon")), ("plain", dict(gns_adam=False)),
                         ("plain", dict(gns="exact", parallel="fsdp"))):
        assert metric_of_run(Config(**keys)) == metric
    row = {"gns/norm": 90.0, "gns/norm_low": 80.0, "gns/norm_high": 99.0, "gns/calibrated": None, "gns": None}
    assert reader.noise_of(row) is None
    row |= {"gns/calibrated": 60.0, "gns/calibrated_adam": 61.0, "gns": 61.0, "gns_low": 51.0, "gns_high": 99.0}
    assert reader.noise_of(row) == Noise(61.0, 51.0, 99.0, "the whole model in Adam's metric")
    with pytest.raises(ConfigError, match="gns_calibrate=False: .*gns=exact"):
        start.parse(["--batch_schedule=gns", "--gns_calibrate=False"])


@pytest.mark.parametrize("keys, of", [(dict(gns="exact"), "the whole model in Adam's metric"),
                                      (dict(gns="exact", gns_metric="plain"), "the whole model"),
                                      (dict(gns_calibrate=False), None)])
def test_the_step_gives_the_noise_scale_that_the_log_then_has(tmp_path, tiny_args, monkeypatch, keys, of):
    seen = []
    monkeypatch.setattr(schedule.Linear, "observe", lambda self, tokens, noise, cost: seen.append((tokens, noise)))
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=1600, **keys))
    rows = {row["tokens"]: reader.noise_of(row) for row in logged(tmp_path / "run")}
    assert seen and all(noise == rows[tokens] for tokens, noise in seen if noise is None or noise.value > 0)
    assert {noise.of for _, noise in seen if noise} == ({of} if of else set())


COST = Cost((0.4, 0.39, 0.41), (0.01, 0.0099, 0.0101))  # t0 / t1 is 40 sequences


def test_by_time_the_controller_goes_to_sqrt_of_noise_scale_times_fixed_over_per_sequence_cost():
    c = controller(batch_objective="time", batch_size_start=32, batch_gns_factor=7)
    assert "not known yet" in c.observe(1000, Noise(90, 80, 100), None) and c.batch == 32
    text = c.observe(1001, Noise(90, 80, 100), COST)  # sqrt(90 x 40) = 60
    assert text.startswith("batch 32 -> 64: fastest batch 60 [")
    assert "from noise scale 90 [80, 100], 400 ms a step and 10 ms a sequence" in text
    assert "not clear" in c.observe(3000, Noise(90, 80, 100), COST) and c.batch == 64
    assert c.observe(4000, Noise(1e4, 9e3, 1.1e4), COST).startswith("batch 64 -> 128"), "at most double"
    free = Cost((0.0, 0.0, 0.0), COST.per_sequence)
    c = controller(batch_objective="time")
    assert "asks for less than batch_size_start=8" in c.observe(1000, Noise(90, 80, 100), free) and c.batch == 8


def test_the_controller_waits_until_half_of_the_average_is_new_which_is_sooner_early_in_a_run():
    c = controller(batch_gns_dwell_tokens=0, gns_half_life_tokens=100_000)
    asks = Noise(10**6, 10**5, 10**7)
    assert "8 -> 16" in c.observe(20_000, asks), "no average is older than the run: nothing to wait for"
    assert c.observe(24_999, asks) is None and "16 -> 32" in c.observe(25_000, asks), "a fifth of the tokens are new"
    for t, batch in ((800_000, 64), (899_999, 64), (900_000, 128)):  # a half-life at most
        c.observe(t, asks)
        assert c.batch == batch


def test_by_tokens_the_controller_stays_at_the_smallest_batch():
    c = controller(batch_objective="tokens")
    assert "fewest tokens" in c.observe(1000, Noise(90, 80, 100), COST) and c.batch == 8


# -- coupling

def test_coupling_holds_what_it_says_it_holds():
    assert schedule.coupled(16, Config()) == (1.0, 0.95, 0.1)
    base = dict(batch_size=64, learning_rate=1e-2, weight_decay=0.1, beta2=0.95)
    for scaling, factor in (("none", 1.0), ("sqrt", 0.5), ("linear", 0.25)):
        c = Config(lr_scaling=scaling, beta2_scaling="tokens", weight_decay_scaling="tokens", **base)
        lr, beta2, decay = schedule.coupled(16, c)
        assert lr == pytest.approx(factor)
        assert beta2**4 == pytest.approx(0.95), "four small steps forget as much as one large one"
        assert lr * decay / 16 == pytest.approx(0.1 / 64), "the same share of the weights per sequence"
        assert schedule.coupled(64, c) == pytest.approx((1.0, 0.95, 0.1))
    assert schedule.coupled(64, Config(lr_scaling="sqrt", lr_reference_batch=16))[0] == 2.0


def test_the_learning_rates_rule_saturates_above_the_noise_scales_interval():
    c = Config(lr_scaling="sqrt", lr_reference_batch=16)
    assert schedule.coupled(64, c, Noise(40, 30, 50))[0] == pytest.approx((50 / 16) ** 0.5)
    assert schedule.coupled(48, c, Noise(40, 30, 50))[0] == pytest.approx(3**0.5), "inside the interval the rule holds"
    assert schedule.coupled(64, c, None)[0] == 2.0 and not schedule.saturated(64, c, None)
    off = Config(lr_scaling="sqrt", lr_reference_batch=16, lr_saturates=False)
    assert schedule.coupled(64, off, Noise(40, 30, 50))[0] == 2.0
    assert schedule.coupled(64, Config(), Noise(4, 3, 5))[0] == 1.0


def test_beta2_does_not_fall_below_its_floor_nor_is_it_raised_to_it():
    c = Config(beta2_scaling="tokens", lr_reference_batch=8, beta2_floor=0.9)
    assert schedule.coupled(16, c)[1] == pytest.approx(0.95**2) and schedule.coupled(64, c)[1] == 0.9
    assert schedule.coupled(4, Config(beta2_scaling="tokens", lr_reference_batch=8, beta2=0.5))[1] == pytest.approx(0.5**0.5)
    assert schedule.coupled(64, Config(beta2_scaling="tokens", lr_reference_batch=8, beta2=0.5))[1] == 0.5


def test_seesaw_doubles_the_batch_where_the_learning_rate_would_halve_and_keeps_what_both_do_together():
    c = Config(batch_schedule="seesaw", batch_size_start=8, batch_size=32, max_tokens=10_000, warmup_tokens=1000,
               learning_rate=1e-2, min_lr=0.0, lr_decay="cosine")
    s = build(c, 8)
    assert s.at(0) == 8 and s.learning_rate(490, 500) == pytest.approx(5e-3), "the warm-up is as ever"
    seen = []
    for t in range(1000, 9990, 10):
        halved = math.floor(math.log2(1e-2 / learning_rate_at(t, c)) + 1e-9)
        doubled = min(halved, 2)
        assert s.at(t) == 8 * 2**doubled
        assert s.learning_rate(t, t + 5) == pytest.approx(1e-2 * 2**-halved * 2 ** (doubled / 2))
        # lr / sqrt(batch), what Adam's noise follows, is what it is with lr_decay alone at the first batch
        assert s.learning_rate(t, t + 5) / s.at(t) ** 0.5 == pytest.approx(1e-2 * 2**-halved / 8**0.5)
        seen.append(s.at(t))
    assert sorted(set(seen)) == [8, 16, 32] and seen == sorted(seen)
    assert s.learning_rate(10_000, 10_005) == pytest.approx(0, abs=1e-12) and s.at(20_000) == 32


# -- in runs

@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """Drawing report.png takes longer than these runs."""
    from plots import report
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")


def logged(out, key="train/loss"):
    return [r for r in log.read(out) if key in r]


def test_scaled_values_reach_the_optimizer_and_the_log(tmp_path, tiny_args):
    out = tmp_path / "run"
    train.main(tiny_args(out_dir=out, lr_scaling="sqrt", beta2_scaling="tokens", weight_decay_scaling="tokens",
                         lr_saturates=False,
                         learning_rate=1e-2, min_lr=1e-2, warmup_tokens=0))
    rows = logged(out)
    assert {r["batch_size"] for r in rows} == {4, 8, 12, 16}
    for r in rows:
        k = r["batch_size"] / 16
        assert (r["lr"], r["beta2"], r["weight_decay"]) == pytest.approx((1e-2 * k**0.5, 0.95**k, 0.1 * k**0.5))
    groups = checkpoint.load(str(out))["optimizer"]["param_groups"]
    assert [g["weight_decay"] for g in groups] == [rows[-1]["weight_decay"], 0.0]
    assert all(g["betas"] == (0.9, rows[-1]["beta2"]) and g["lr"] == rows[-1]["lr"] for g in groups)


@pytest.fixture(scope="module")
def schedule_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("schedule") / "batch.txt"
    path.write_text("0 4\n2k 16\n")
    return path


RAMP = dict(batch_size_start=4, batch_size=64, lr_reference_batch=4, max_tokens=6400)


@pytest.mark.parametrize("keys, batches", [
    (dict(batch_schedule="steps", batch_steps="0:4, 640:8, 1.6k:16"), [4, 8, 16]),
    (dict(batch_schedule="file"), [4, 8, 12, 16]), (dict(batch_schedule="linear"), [4, 8, 12, 16]),
    (dict(RAMP, batch_schedule="seesaw", lr_decay="cosine"), None),
    (dict(RAMP, batch_schedule="late", lr_decay="wsd"), [4, 64]),
    (dict(RAMP, lr_scaling="sqrt", gns="exact", gns_metric="plain", gns_half_life_tokens=400), None)],
    ids=lambda v: str(v)[-40:])
@pytest.mark.slow
def test_every_schedule_goes_over_a_stop_and_a_resume_bit_for_bit(tmp_path, tiny_args, schedule_file, keys, batches):
    args = {**keys, **({"batch_file": schedule_file} if keys.get("batch_schedule") == "file" else {})}
    train.main(tiny_args(out_dir=tmp_path / "whole", **args))
    train.main(tiny_args(out_dir=tmp_path / "parts", stop_tokens=args.get("max_tokens", 1800) // 2, **args))
    assert logged(tmp_path / "parts")[-1]["tokens"] < logged(tmp_path / "whole")[-1]["tokens"]
    assert train.main(tiny_args(out_dir=tmp_path / "parts", resume=True, **args)) == 0
    whole, parts = ([r for r in untimed(tmp_path / name) if "train/loss" in r] for name in ("whole", "parts"))
    assert whole == parts and (batches is None or sorted({r["batch_size"] for r in whole}) == batches)
    one, two = (checkpoint.load(str(tmp_path / name))["model"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not {"beta2", "weight_decay"} & whole[0].keys(), "they do not vary"
    if "lr_scaling" in keys:
        assert any("is above the noise scale's interval" in r.get("event", "") for r in log.read(tmp_path / "whole"))


GNS = dict(batch_schedule="gns", batch_size_start=4, batch_size=64, batch_gns_factor=40, batch_gns_dwell_tokens=600,
           gns="exact", gns_metric="plain", batch_objective="balance", gns_half_life_tokens=2000,
           max_tokens=12_000, warmup_tokens=320, log_interval=3, dropout=0.1)


def test_a_gns_run_killed_and_resumed_makes_the_same_decisions(tmp_path, tiny_args):
    args = {**GNS, "checkpoint_tokens": 1000, "eval_tokens": 4000}
    assert train.main(tiny_args(out_dir=tmp_path / "whole", **args)) == 0
    moves = [r["event"] for r in logged(tmp_path / "whole", "event") if " -> " in r["event"]]
    assert len(moves) >= 2 and moves[0].startswith("batch 4 -> 8: noise scale")
    kill = ("import os, signal, sys, schedule, train\n"
            "real, calls = schedule.Controller.at, [0]\n"
            "def at(self, tokens):\n"
            "    calls[0] += 1\n"
            "    if calls[0] == int(sys.argv[1]): os.kill(os.getpid(), getattr(signal, sys.argv[2]))\n"
            "    return real(self, tokens)\n"
            "schedule.Controller.at = at\n"
            "sys.exit(train.main(sys.argv[3:]))")
    for resume, step, how in ((False, 19, "SIGKILL"), (True, 13, "SIGTERM")):
        command = tiny_args(out_dir=tmp_path / "killed", resume=resume, **args)
        process = subprocess.run([sys.executable, "-c", kill, str(step), how, *command], cwd=ROOT, capture_output=True,
                                 env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
        assert process.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM), process.stderr
    assert train.main(tiny_args(out_dir=tmp_path / "killed", resume=True, **args)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    a, b = (checkpoint.load(str(tmp_path / name))["schedule"] for name in ("whole", "killed"))
    assert a == b and a["batch"] >= 16


def test_the_summary_tells_what_the_controller_did_and_log_interval_is_part_of_a_gns_run(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "run", **GNS))
    text = capsys.readouterr().out
    assert "The schedule (gns) took the batch from 4 to" in text and "The controller moved it" in text and "4 -> 8 at" in text
    with pytest.raises(SystemExit):
        train.main(tiny_args(out_dir=tmp_path / "run", resume=True, **{**GNS, "log_interval": 1}))
    assert "log_interval is 1, the checkpoint has 3" in capsys.readouterr().err


def test_a_file_edited_during_a_run_changes_the_batch_and_is_left_alone(tmp_path, tiny_args, monkeypatch):
    path = tmp_path / "batch.txt"
    path.write_text("0 4\n")
    edits = {4: "0 8\n", 7: "0 oops\n"}  # the first look is before the first step
    real, calls = schedule.File.poll, [0]

    def poll(self):
        calls[0] += 1
        if calls[0] in edits:
            path.write_text(edits[calls[0]])
        return real(self)
    monkeypatch.setattr(schedule.File, "poll", poll)
    train.main(tiny_args(out_dir=tmp_path / "run", batch_schedule="file", batch_file=path, max_tokens=1280))
    assert [r["batch_size"] for r in logged(tmp_path / "run")][:8] == [4, 4, 8, 8, 8, 8, 8, 8]
    events = [(r["step"], r["event"]) for r in logged(tmp_path / "run", "event")]
    assert [step for step, _ in events] == [3, 6] and "0:8" in events[0][1] and "'oops'" in events[1][1]
    assert path.read_text() == "0 oops\n"


def test_a_ramp_compiles_nothing_anew(tmp_path, tiny_args, monkeypatch):
    """The micro-batch keeps its shape, so every graph is compiled at its first use and never again."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(state["batch"])
        return graph
    state = {"batch": None}
    real_at, real_compile = schedule.Linear.at, torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: real_compile(model, backend=backend))

    def at(self, tokens):
        state["batch"] = real_at(self, tokens)
        return state["batch"]
    monkeypatch.setattr(schedule.Linear, "at", at)
    torch._dynamo.reset()
    train.main(tiny_args(out_dir=tmp_path / "run", compile=True, gns_adam=False, gns_calibrate=False))
    torch._dynamo.reset()
    assert {r["batch_size"] for r in logged(tmp_path / "run")} == {4, 8, 12, 16}
    assert graphs and set(graphs) == {4}, graphs


# -- branches

def test_a_branch_with_nothing_changed_is_the_run_itself(tmp_path, tiny_args):
    train.main(tiny_args(out_dir=tmp_path / "whole", dropout=0.1))
    train.main(tiny_args(out_dir=tmp_path / "base", dropout=0.1, stop_tokens=900))
    before = (tmp_path / "base" / "ckpt.pt").read_bytes()
    train.main(tiny_args(out_dir=tmp_path / "branch", dropout=0.1, branch_from=tmp_path / "base"))
    assert (tmp_path / "base" / "ckpt.pt").read_bytes() == before
    branch = logged(tmp_path / "branch")
    assert "branched from" in logged(tmp_path / "branch", "event")[0]["event"] and 900 <= branch[0]["tokens"] < 1200
    losses = {r["step"]: r["train/loss"] for r in logged(tmp_path / "whole")}
    assert all(losses[r["step"]] == r["train/loss"] for r in branch) and branch[-1]["step"] == max(losses)
    assert train.main(tiny_args(out_dir=tmp_path / "branch", dropout=0.1, resume=True)) == 0


def test_a_branch_of_a_gns_run_goes_on_from_the_batch_that_was_found(tmp_path, tiny_args):
    train.main(tiny_args(out_dir=tmp_path / "base", stop_tokens=8000, **GNS))
    found = checkpoint.load(str(tmp_path / "base"))["schedule"]["batch"]
    assert found >= 16
    longer = {**GNS, "max_tokens": 16_000, "branch_from": tmp_path / "base"}
    train.main(tiny_args(out_dir=tmp_path / "longer", **longer))
    assert logged(tmp_path / "longer")[0]["batch_size"] == found
    train.main(tiny_args(out_dir=tmp_path / "other", **{**longer, "batch_size_start": 8}))
    assert logged(tmp_path / "other")[0]["batch_size"] == 8, "its own settings, its own batches"


def test_a_branch_may_change_batch_and_learning_rate_and_nothing_of_the_model(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "base", stop_tokens=900))
    keys = dict(out_dir=tmp_path / "b", branch_from=tmp_path / "base", batch_schedule="constant")
    for wrong, words in ((dict(n_layer=3), "branch: n_layer is 3"), (dict(stop_tokens=800), "this run ends at 800"),
                         (dict(branch_from=tmp_path / "none"), "no ckpt.pt")):
        with pytest.raises(SystemExit):
            train.main(tiny_args(**{**keys, **wrong}))
        assert words in capsys.readouterr().err and not (tmp_path / "b").exists()
    train.main(tiny_args(**keys, batch_size=32, learning_rate=1e-3))
    assert {r["batch_size"] for r in logged(tmp_path / "b")} == {32}
