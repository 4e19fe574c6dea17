"""
Gradient noise scale from squared gradient norms: pure arithmetic, floats in, floats out.

With per-example gradients g_b, mean gradient G and B examples in a step, the noise scale tr(Sigma) / |G|^2 is the batch
(in examples) at which the noise of the step's gradient is as large as the gradient (McCandlish et al. 2018,
arXiv 1812.06162). Per-example norms give the smallest batch there is, 1, and so the estimate with the least
variance (Gray et al. 2024, arXiv 2411.00999).
"""

import copy
import functools
import math


def unbiased_pair(small, big, n_small, n_big):
    """(sq_norm, tr_sigma): unbiased estimates of |G|^2 and tr(Sigma).

    `small` is the mean of |gradient|^2 over batches of n_small examples, `big` the same for n_big. The expectation of
    either is |G|^2 + tr(Sigma)/n, two equations for two unknowns (McCandlish et al. 2018, appendix A.1). Either
    estimate may come out negative in a single step; clipping it would bias the averages.
    """
    if not n_big > n_small >= 1:
        raise ValueError(f"a noise scale needs two batch sizes, got n_small={n_small} and n_big={n_big}: "
                         "a step of one example has no estimate")
    sq_norm = (n_big * big - n_small * small) / (n_big - n_small)
    tr_sigma = (small - big) / (1 / n_small - 1 / n_big)
    return sq_norm, tr_sigma


class Averages:
    """Token-decayed means of a few quantities that are measured together, and the covariance of those means.

    A step weighs 1 - 2^(-tokens / half_life), so that weights follow tokens and not steps; dividing by their sum
    corrects the start.
    """

    def __init__(self, size, half_life_tokens):
        self.half_life_tokens = half_life_tokens
        self.updates = 0
        self.w, self.w2 = 0.0, 0.0  # sums of w and of w^2
        self.x, self.x2 = [0.0] * size, [0.0] * size  # sums of w x and of w^2 x
        self.xx = [[0.0] * size for _ in range(size)]  # sums of w^2 x x^T

    def update(self, values, tokens):
        decay = 2.0 ** (-tokens / self.half_life_tokens)
        w, size = 1 - decay, range(len(self.x))
        self.w = decay * self.w + w
        self.w2 = decay * decay * self.w2 + w * w
        self.x = [decay * self.x[i] + w * values[i] for i in size]
        self.x2 = [decay * decay * self.x2[i] + w * w * values[i] for i in size]
        self.xx = [[decay * decay * self.xx[i][j] + w * values[i] * w * values[j] for j in size] for i in size]
        self.updates += 1

    def means(self):
        return [x / self.w for x in self.x]

    def covariance(self):
        """Of the means, with weights w that sum to 1: sum w^2 (x - mean)(x - mean)^T / (1 - sum w^2)."""
        mean, size, total = self.means(), range(len(self.x)), self.w * self.w
        left = 1 - self.w2 / total
        return [[(self.xx[i][j] - mean[i] * self.x2[j] - mean[j] * self.x2[i] + mean[i] * mean[j] * self.w2) / total / left
                 for j in size] for i in size]

    @property
    def effective_updates(self):
        """How many equally weighted steps the averages are worth."""
        return self.w**2 / self.w2 if self.updates else 0.0

    def quantile(self, level):
        """Student's t for these averages, or None while a spread cannot be told."""
        freedom = self.effective_updates - 1
        return student_t(level, freedom) if self.updates >= 2 and freedom >= 0.5 else None

    def state_dict(self):
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state):
        vars(self).update(copy.deepcopy(state))


class NoiseScale:
    """Averages of (tr_sigma, sq_norm), their ratio, and its interval. Numerator and denominator are averaged apart and
    then divided: the average of ratios would be biased, and undefined where sq_norm comes out near zero."""

    def __init__(self, half_life_tokens):
        self.averages = Averages(2, half_life_tokens)

    def update(self, sq_norm, tr_sigma, tokens):
        self.averages.update((tr_sigma, sq_norm), tokens)

    @property
    def tr_sigma(self):
        return self.averages.means()[0] if self.averages.updates else None

    @property
    def sq_norm(self):
        return self.averages.means()[1] if self.averages.updates else None

    @property
    def gns(self):
        """tr(Sigma) / |G|^2 in examples, or None while it is undetermined: |G|^2 not clearly above zero."""
        return self.tr_sigma / self.sq_norm if self.interval() else None

    def interval(self, level=0.95):
        """(low, high) of the noise scale by Fieller's theorem, or None while undetermined. A noise scale is never
        negative, so the part of the interval below zero is cut off."""
        z = self.averages.quantile(level)
        if z is None:
            return None
        (v_ss, v_sg), (_, v_gg) = self.averages.covariance()
        interval = ratio_interval(self.tr_sigma, self.sq_norm, max(v_ss, 0.0), v_sg, max(v_gg, 0.0), z)
        return interval and (max(interval[0], 0.0), max(interval[1], 0.0))

    def state_dict(self):
        return self.averages.state_dict()

    def load_state_dict(self, state):
        self.averages.load_state_dict(state)


class Calibration:
    """The whole model's noise scale from the norm layers' per-example norms, with a few exact steps in between.

    |G|^2 of the whole model is known in every step; what is missing is `small`, the mean squared norm of the whole
    per-example gradient. Exact steps measure its ratio to the norm layers' `small`, kappa. Both are means over the same
    examples, so kappa is known to a few per cent from a handful of exact steps, and kappa * small_norm stands in for
    small_total in all the others. Hence the pair of the whole model in every step, its noise scale, and the factor to the
    norm layers' noise scale.
    """

    MEMORY = 8  # kappa is measured rarely and changes slowly: its half-life is so many times that of the pairs

    def __init__(self, half_life_tokens):
        self.reference = Averages(1, half_life_tokens)  # small_norm of all steps: takes the drift of scale out of kappa
        self.smalls = Averages(2, self.MEMORY * half_life_tokens)  # (small_total, small_norm) / reference, exact steps
        self.pairs = Averages(4, half_life_tokens)  # (S_total, G_total, S_norm, G_norm), all steps once kappa is known
        self.n_big = 0  # of the newest step

    def update(self, small_norm, big_norm, big_total, n_big, tokens, small_total=None):
        """One step of n_big examples; small_total where it was exact."""
        if small_total is not None:
            reference = self.reference.means()[0] if self.reference.updates else small_norm
            if reference > 0:
                self.smalls.update((small_total / reference, small_norm / reference), tokens)
        self.reference.update((small_norm,), tokens)
        kappa = self.kappa()
        if kappa is None:
            return
        total = unbiased_pair(kappa[0] * small_norm if small_total is None else small_total, big_total, 1, n_big)
        norm = unbiased_pair(small_norm, big_norm, 1, n_big)
        self.pairs.update((total[1], total[0], norm[1], norm[0]), tokens)
        self.n_big = n_big

    def kappa(self, level=0.95):
        """(small_total / small_norm, half-width of the interval of its logarithm), or None before two exact steps."""
        z = self.smalls.quantile(level)
        if z is None:
            return None
        (total, norm), cov = self.smalls.means(), self.smalls.covariance()
        variance = cov[0][0] / total**2 - 2 * cov[0][1] / (total * norm) + cov[1][1] / norm**2
        return total / norm, z * math.sqrt(max(variance, 0.0))

    def total(self, level=0.95):
        """(noise scale of the whole model, low, high), or None while undetermined."""
        z = self.pairs.quantile(level)
        if z is None:
            return None
        (s, g, _, _), cov = self.pairs.means(), self.pairs.covariance()
        interval = ratio_interval(s, g, max(cov[0][0], 0.0), cov[0][1], max(cov[1][1], 0.0), z)
        if interval is None or s <= 0:
            return None
        wider = self._kappa_error(s, g, level)
        low = 0.0 if interval[0] <= 0 else s / g * math.exp(-math.hypot(math.log(s / g / interval[0]), wider))
        return s / g, low, s / g * math.exp(math.hypot(math.log(interval[1] * g / s), wider))

    def factor(self, level=0.95):
        """(whole model's noise scale / norm layers', low, high), or None: some average not clearly above zero. Both come
        from the same examples, so their errors largely cancel: the delta method on the logarithm, with all covariances."""
        z = self.pairs.quantile(level)
        if z is None:
            return None
        mean, cov = self.pairs.means(), self.pairs.covariance()
        if any(m <= z * math.sqrt(max(cov[i][i], 0.0)) for i, m in enumerate(mean)):
            return None
        slope = [sign / m for sign, m in zip((1, -1, -1, 1), mean)]  # d log(factor) / d mean
        spread = z * math.sqrt(max(sum(slope[i] * cov[i][j] * slope[j] for i in range(4) for j in range(4)), 0.0))
        spread = math.hypot(spread, self._kappa_error(mean[0], mean[1], level))
        value = mean[0] / mean[1] / (mean[2] / mean[3])
        return value, value * math.exp(-spread), value * math.exp(spread)

    def _kappa_error(self, s, g, level):
        """How far an error of kappa moves log(S / G): small = S + G enters S with B/(B-1) and G with -1/(B-1)."""
        return self.kappa(level)[1] * (s + g) * (self.n_big / s + 1 / g) / (self.n_big - 1)

    def state_dict(self):
        return {"n_big": self.n_big, **{k: getattr(self, k).state_dict() for k in ("reference", "smalls", "pairs")}}

    def load_state_dict(self, state):
        self.n_big = state["n_big"]
        for k in ("reference", "smalls", "pairs"):
            getattr(self, k).load_state_dict(state[k])


def ratio_interval(m_s, m_g, v_ss, v_sg, v_gg, z):
    """Fieller 1954: the r with (m_s - r m_g)^2 <= z^2 (v_ss - 2 r v_sg + r^2 v_gg). None where that set is unbounded,
    or the denominator is not above zero: then the data do not determine a ratio."""
    a = m_g * m_g - z * z * v_gg
    if not (a > 0 and m_g > 0):
        return None
    b = m_s * m_g - z * z * v_sg
    c = m_s * m_s - z * z * v_ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (b - root) / a, (b + root) / a


@functools.lru_cache(maxsize=4096)
def student_t(level, freedom):
    """The two-sided quantile of Student's t, for any real number of degrees of freedom: P(|t| <= q) = level."""
    low, high = 0.0, 1.0
    while _t_inside(high, freedom) < level and high < 1e12:
        high *= 2
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_inside(middle, freedom) < level else (low, middle)
    return 0.5 * (low + high)


def _t_inside(t, freedom):
    """P(|t| <= t) = 1 - I_x(freedom/2, 1/2) with x = freedom / (freedom + t^2)."""
    return 1 - _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def _incomplete_beta(x, a, b):
    """The regularised incomplete beta function, by its continued fraction (modified Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - _incomplete_beta(1 - x, b, a)
    tiny = 1e-300
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 500):
        for numerator in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                          -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * value
