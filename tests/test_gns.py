import json
import math

import numpy as np
import pytest

from gns import Calibration, NoiseScale, ratio_interval, student_t, unbiased_pair, unequal_pair


def gradients(rng, trials, batch, mean, scale):
    """Per-example gradients with mean `mean` and covariance diag(scale^2): |G|^2 and tr(Sigma) are known."""
    return mean + scale * rng.standard_normal((trials, batch, len(mean)))


def pairs_of(g):
    """(sq_norm, tr_sigma) of every trial of g (trials, batch, dim) from batch 1 against the whole."""
    small = (g**2).sum(-1).mean(1)
    big = (g.mean(1) ** 2).sum(-1)
    return np.array([unbiased_pair(s, b, 1, g.shape[1]) for s, b in zip(small, big)])


@pytest.mark.parametrize("batch", [2, 3, 16])
def test_the_pair_is_unbiased_on_gradients_with_known_answers(batch):
    rng = np.random.default_rng(batch)
    mean, scale = np.linspace(-1, 1, 7), np.linspace(0.5, 2, 7)
    estimates = pairs_of(gradients(rng, 20_000, batch, mean, scale))
    truth = np.array([(mean**2).sum(), (scale**2).sum()])
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert (abs(estimates.mean(0) - truth) < 3 * error).all()


@pytest.mark.parametrize("n_small, n_big", [(1, 8), (2, 8), (4, 8)])
def test_the_general_form_is_unbiased_for_any_two_batches(n_small, n_big):
    rng = np.random.default_rng(n_small)
    mean, scale = np.array([0.3, -0.7]), np.array([1.0, 2.0])
    g = gradients(rng, 20_000, n_big, mean, scale)
    small = (g.reshape(len(g), n_big // n_small, n_small, 2).mean(2) ** 2).sum(-1).mean(1)
    big = (g.mean(1) ** 2).sum(-1)
    sq_norm, tr_sigma = unbiased_pair(small, big, n_small, n_big)
    for values, truth in ((sq_norm, 0.58), (tr_sigma, 5.0)):
        assert abs(values.mean() - truth) < 3 * values.std() / math.sqrt(len(values))


def test_one_example_has_no_estimate_and_says_so():
    with pytest.raises(ValueError, match="one example has no estimate"):
        unbiased_pair(1.0, 1.0, 1, 1)


def ragged(rng, batch, mean, scale, rho=0.3):
    """One batch of a token mean: lengths n (batch,), c (batch, dim) = share times the example's own mean gradient. Tokens of an
    example correlate by rho, so an example's covariance is diag(scale^2) (rho + (1 - rho) / n)."""
    n = np.ceil(rng.exponential(30, batch))
    own = mean + scale * np.sqrt(rho + (1 - rho) / n)[:, None] * rng.standard_normal((batch, len(mean)))
    return n, n[:, None] / n.sum() * own


@pytest.mark.parametrize("batch", [8, 64])
def test_the_pair_for_unequal_lengths_is_unbiased_where_the_plain_pair_is_not(batch):
    rng = np.random.default_rng(batch)
    mean, scale = np.array([0.3, -0.7, 0.2]), np.array([0.3, 0.6, 0.2])
    estimates, plain, truth = [], [], []
    for _ in range(20_000):
        n, c = ragged(rng, batch, mean, scale)
        w = n / n.sum()
        q, big = (c**2).sum(), (c.sum(0) ** 2).sum()
        estimates.append(unequal_pair(q, big, (w**2).sum(), batch))
        plain.append(unbiased_pair(batch * q, big, 1, batch))
        truth.append(batch * (w**2 * (scale**2).sum() * (0.3 + 0.7 / n)).sum())
    estimates, plain = np.array(estimates), np.array(plain)
    error = estimates.std(0) / math.sqrt(len(estimates))
    assert (abs(estimates.mean(0) - [(mean**2).sum(), np.mean(truth)]) < 3 * error).all()
    assert abs(plain[:, 0].mean() - (mean**2).sum()) > 6 * plain[:, 0].std() / math.sqrt(len(plain))


def test_equal_shares_give_the_plain_pair():
    small, big, B = 7.0, 2.0, 5
    assert unequal_pair(small / B, big, 1 / B, B) == pytest.approx(unbiased_pair(small, big, 1, B))


def test_one_share_has_no_estimate_and_says_so():
    with pytest.raises(ValueError, match="several examples"):
        unequal_pair(1.0, 1.0, 1.0, 1)


def run(pairs, half_life=1e9, tokens=100):
    scale = NoiseScale(half_life)
    for sq_norm, tr_sigma in pairs:
        scale.update(sq_norm, tr_sigma, tokens)
    return scale


def test_averages_are_exact_for_constant_input_from_the_first_step():
    scale = run([(2.0, 6.0)])
    assert (scale.sq_norm, scale.tr_sigma) == pytest.approx((2.0, 6.0))
    assert run([(2.0, 6.0)] * 9, half_life=50).tr_sigma == pytest.approx(6.0)


def test_the_half_life_is_in_tokens():
    """After one half-life of new values, old and new weigh the same, whatever the size of the steps."""
    for size in (10, 50, 100):
        scale = NoiseScale(1000)
        for _ in range(20_000 // size):
            scale.update(1.0, 0.0, size)
        for _ in range(1000 // size):
            scale.update(0.0, 1.0, size)
        assert scale.sq_norm == pytest.approx(0.5, abs=1e-5) and scale.tr_sigma == pytest.approx(0.5, abs=1e-5)


def test_weights_of_the_averages_match_a_plain_weighted_computation():
    rng = np.random.default_rng(0)
    g, s, tokens = rng.normal(3, 1, 40), rng.normal(9, 2, 40), rng.integers(50, 500, 40)
    scale = NoiseScale(2000)
    for row in zip(g, s, tokens):
        scale.update(*row)
    later = np.concatenate([np.cumsum(tokens[::-1])[::-1][1:], [0]])
    w = (1 - 2.0 ** (-tokens / 2000)) * 2.0 ** (-later / 2000)
    w /= w.sum()
    m_s, m_g = (w * s).sum(), (w * g).sum()
    left = 1 - (w**2).sum()
    expected = [(w**2 * (s - m_s) ** 2).sum() / left, (w**2 * (s - m_s) * (g - m_g)).sum() / left,
                (w**2 * (g - m_g) ** 2).sum() / left]
    assert (scale.tr_sigma, scale.sq_norm) == pytest.approx((m_s, m_g))
    (v_ss, v_sg), (v_gs, v_gg) = scale.averages.covariance()
    assert [v_ss, v_sg, v_gg] == pytest.approx(expected) and v_gs == v_sg
    assert scale.averages.effective_updates == pytest.approx(1 / (w**2).sum())
    low, high = scale.interval()
    assert low < scale.gns < high


@pytest.mark.parametrize("half_life, steps", [(1e9, 16), (1e9, 100), (2000, 200)])
@pytest.mark.slow
def test_the_95_percent_interval_covers_the_truth_in_92_to_98_percent_of_trials(half_life, steps):
    rng = np.random.default_rng(steps)
    mean, scale_ = np.full(6, 0.5), np.linspace(0.5, 2, 6)
    truth = (scale_**2).sum() / (mean**2).sum()
    inside = 0
    for _ in range(1000):
        interval = run(pairs_of(gradients(rng, steps, 16, mean, scale_)), half_life).interval()
        inside += interval is not None and interval[0] <= truth <= interval[1]
    assert 920 <= inside <= 980


def test_pure_noise_is_undetermined_and_never_a_number():
    """With no gradient at all the ratio does not exist; a 95% rule may be fooled in one trial of forty, not more."""
    rng = np.random.default_rng(1)
    fooled = sum(run(pairs_of(gradients(rng, 30, 8, np.zeros(5), np.ones(5)))).gns is not None for _ in range(400))
    assert fooled <= 20
    scale = run([(-1.0, 5.0), (0.5, 4.0), (-0.2, 6.0)])
    assert scale.gns is None and scale.interval() is None
    assert scale.sq_norm < 0, "a negative average is kept, not clipped"


def test_nothing_is_claimed_from_no_or_one_step():
    assert run([]).gns is None and run([]).interval() is None and run([]).sq_norm is None
    assert run([(1.0, 1.0)]).gns is None


def test_ratio_interval_solves_its_own_inequality():
    args = (6.0, 2.0, 0.3, 0.05, 0.1)
    low, high = ratio_interval(*args, 2.0)
    m_s, m_g, v_ss, v_sg, v_gg = args
    for r in (low, high):
        assert (m_s - r * m_g) ** 2 == pytest.approx(4 * (v_ss - 2 * r * v_sg + r * r * v_gg))
    assert low < 3 < high
    assert ratio_interval(6.0, 0.1, 0.3, 0.0, 0.1, 2.0) is None


@pytest.mark.parametrize("level, freedom, quantile", [
    (0.95, 1, 12.7062047), (0.95, 2, 4.3026527), (0.95, 10, 2.2281389), (0.9, 5, 2.0150484), (0.99, 30, 2.7499957),
    (0.95, 1e7, 1.9599640)])  # printed tables
def test_student_t_matches_the_tables(level, freedom, quantile):
    assert student_t(level, freedom) == pytest.approx(quantile, abs=2e-6)


def test_state_survives_json_bit_for_bit():
    rng = np.random.default_rng(2)
    values = rng.normal(2, 1, (30, 2))
    whole = run(values)
    first = run(values[:11])
    second = NoiseScale(1.0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for v in values[11:]:
        second.update(*v, 100)
    assert second.state_dict() == whole.state_dict() and second.interval() == whole.interval()


def test_early_averages_follow_a_fall_that_a_fixed_window_would_remember():
    """|G|^2 falls a thousandfold in the first tenth of the tokens; soon after, the noise scale should be the new one."""
    fixed, adaptive = NoiseScale(50_000), NoiseScale(50_000, early=0.2)
    for step in range(300):
        sq_norm = 1000.0 if step < 10 else 1.0
        for scale in (fixed, adaptive):
            scale.update(sq_norm * (1 + 0.01 * (-1) ** step), 10.0, 1000)
    assert adaptive.tr_sigma / adaptive.sq_norm == pytest.approx(10.0, rel=0.05)
    assert fixed.tr_sigma / fixed.sq_norm < 5.0
    late = NoiseScale(1000, early=0.2)
    for _ in range(5000):
        late.update(1.0, 0.0, 100)
    for _ in range(10):  # far from the start the half-life is the one asked for
        late.update(0.0, 1.0, 100)
    assert late.sq_norm == pytest.approx(0.5, abs=1e-3)


def calibration_trial(rng, steps, every, drift=1.0, B=16):
    """A whole of 5 coordinates and a part of 2, measured together in one step of `every`; `drift` is the factor by which all
    gradients shrink over the trial. Returns the calibration, the part's noise scale, the true values of whole and factor."""
    mean, scale = np.full(5, 0.5), np.array([1.0, 1.0, 1.5, 1.5, 1.5])
    calibration, part = Calibration(1e9), NoiseScale(1e9 if drift == 1 else 1000)
    for i in range(steps):
        g = drift ** (i / steps) * (mean + scale * rng.standard_normal((1, B, 5)))
        total, norm = pairs_of(g)[0], pairs_of(g[..., :2])[0]
        part.update(*norm, 100)
        calibration.update(part, 100, *((total, norm) if i % every == 0 else ()))
    truth = (scale**2).sum() / (mean**2).sum()
    return calibration, part, truth, truth / ((scale[:2] ** 2).sum() / (mean[:2] ** 2).sum())


@pytest.mark.slow
def test_the_calibration_interval_covers_the_true_factor():
    rng = np.random.default_rng(3)
    inside = np.zeros(2)
    for _ in range(400):
        calibration, part, truth, true_factor = calibration_trial(rng, 200, every=5)
        for i, (found, expected) in enumerate(((calibration.factor(), true_factor), (calibration.apply(part), truth))):
            value, low, high = found
            assert low < value < high
            inside[i] += low <= expected <= high
    assert 364 <= inside[0] <= 395 and inside[1] >= 364


def test_calibration_is_not_misled_when_gradients_shrink_a_thousandfold():
    rng = np.random.default_rng(5)
    trials = [calibration_trial(rng, 400, every=4, drift=0.03) for _ in range(60)]
    found = [np.log(c.factor()[0] / true_factor) for c, _, _, true_factor in trials if c.factor()]
    assert len(found) >= 55 and abs(np.mean(found)) < 0.1


def test_the_calibrated_value_is_factor_times_scale_with_a_wider_interval_than_either():
    calibration, part, _, _ = calibration_trial(np.random.default_rng(4), 200, 5)
    value, low, high = calibration.apply(part)
    factor, f_low, f_high = calibration.factor()
    assert value == pytest.approx(factor * part.gns) and low < value < high
    assert high / value > f_high / factor and high / value > part.interval()[1] / part.gns


def test_calibration_claims_nothing_from_too_little():
    calibration, part = Calibration(1e9), NoiseScale(1e9)
    assert calibration.factor() is None and calibration.apply(part) is None
    for i in range(20):  # |G|^2 of the whole is lost in noise
        part.update(1.0 + 0.01 * (-1) ** i, 1.0, 10)
        calibration.update(part, 10, (0.01 * (-1) ** i, 2.0), (1.0, 1.0))
    assert part.gns and calibration.factor() is None and calibration.apply(part) is None


def test_calibration_state_survives_json_bit_for_bit():
    calibration, part, _, _ = calibration_trial(np.random.default_rng(7), 33, 5)
    copy = Calibration(1.0)
    copy.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
    for c in (calibration, copy):
        c.update(part, 100, (1.0, 2.0), (1.0, 1.5))
    assert copy.state_dict() == calibration.state_dict() and copy.factor() == calibration.factor()


def test_a_factor_once_determined_is_held_with_a_growing_interval():
    calibration, part = Calibration(1000), NoiseScale(1000)
    rng = np.random.default_rng(0)
    for _ in range(50):
        part.update(1.0 + 0.01 * rng.standard_normal(), 5.0, 10)
        calibration.update(part, 10, (1.0 + 0.01 * rng.standard_normal(), 10.0), (1.0 + 0.01 * rng.standard_normal(), 5.0))
    value, low, high = calibration.factor()
    assert value == pytest.approx(2.0, rel=0.05) and high / low < 1.1
    widths = [high / low]
    for i in range(60):  # exact steps that tell nothing: |G|^2 of the whole model swings about zero
        part.update(1.0, 5.0, 100)
        calibration.update(part, 100, (100.0 * (-1) ** i, 10.0), (1.0, 5.0))
        held, low, high = calibration.factor()
        widths.append(high / low)
    assert calibration.measured() is None and abs(held - 2.0) < 0.5
    assert widths[-1] > widths[10] > widths[0] and widths[-1] > 1.5
    assert calibration.apply(part)[0] == pytest.approx(held * part.gns)
    copy = Calibration(1000)
    copy.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
    assert copy.factor() == calibration.factor()


@pytest.mark.parametrize("harm", [lambda s: s.pop("w"), lambda s: s.update(w2="x"), lambda s: s.update(x=[1.0]),
                                  lambda s: s.update(xx=[[0.0, None], [0.0, 0.0]]), lambda s: s.update(more=1),
                                  lambda s: s.update(w=1e300),
                                  lambda s: s.clear()])
def test_a_state_that_is_none_is_refused_and_changes_nothing(harm):
    scale = NoiseScale(100)
    scale.update(1.0, 2.0, 10)
    before, state = scale.state_dict(), scale.state_dict()
    harm(state)
    with pytest.raises(ValueError, match="not a state of averages of 2 quantities"):
        scale.load_state_dict(state)
    assert scale.state_dict() == before
