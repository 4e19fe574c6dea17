import pytest

from configurator import Config
from schedule import batch_size_at, learning_rate_at


def test_constant_batch_is_the_batch():
    c = Config(batch_schedule="constant", batch_size=40, batch_size_start=8)
    assert {batch_size_at(t, c, 8) for t in (0, 1, 10**6, 10**9)} == {40}


@pytest.mark.parametrize("quantum", [1, 4, 8])
def test_linear_batch_is_exact_at_the_ends_monotone_and_whole(quantum):
    c = Config(batch_schedule="linear", batch_size_start=16, batch_size=120, max_tokens=10**6)
    values = [batch_size_at(t, c, quantum) for t in range(0, 10**6 + 1, 1000)]
    assert values[0] == 16 and values[-1] == 120 == batch_size_at(10**7, c, quantum)
    assert values == sorted(values) and all(v % quantum == 0 for v in values)
    assert values[500] == 68 // quantum * quantum or abs(values[500] - 68) <= quantum / 2


def test_linear_batch_uses_every_multiple_on_the_way():
    c = Config(batch_schedule="linear", batch_size_start=16, batch_size=120, max_tokens=10**6)
    assert sorted({batch_size_at(t, c, 8) for t in range(0, 10**6, 1000)}) == list(range(16, 121, 8))


def test_learning_rate_warms_up_peaks_and_ends_where_it_should():
    c = Config(learning_rate=1e-2, min_lr=1e-3, warmup_tokens=1000, max_tokens=11_000)
    assert learning_rate_at(0, c) == 0
    assert learning_rate_at(500, c) == pytest.approx(5e-3)
    assert learning_rate_at(1000, c) == pytest.approx(1e-2)
    assert learning_rate_at(6000, c) == pytest.approx(5.5e-3)
    assert learning_rate_at(11_000, c) == learning_rate_at(20_000, c) == pytest.approx(1e-3)


def test_cosine_passes_the_middle_at_half_time_and_starts_flat():
    c = Config(learning_rate=1e-2, min_lr=0.0, warmup_tokens=0, max_tokens=1000, lr_decay="cosine")
    assert learning_rate_at(0, c) == pytest.approx(1e-2)
    assert learning_rate_at(500, c) == pytest.approx(5e-3)
    assert learning_rate_at(10, c) > 0.999e-2
    assert learning_rate_at(1000, c) == pytest.approx(0.0, abs=1e-12)


def test_decay_may_end_before_the_run_and_none_stays_at_the_peak():
    c = Config(learning_rate=1e-2, min_lr=1e-3, warmup_tokens=0, max_tokens=1000, decay_tokens=500)
    assert learning_rate_at(500, c) == learning_rate_at(900, c) == 1e-3
    assert learning_rate_at(900, Config(learning_rate=1e-2, lr_decay="none", warmup_tokens=10)) == 1e-2


def test_a_run_that_is_all_warm_up_does_not_divide_by_zero():
    c = Config(learning_rate=1e-2, warmup_tokens=1000, max_tokens=1000)
    assert learning_rate_at(999, c) < 1e-2 and learning_rate_at(1000, c) == c.min_lr
