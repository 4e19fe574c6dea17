"""
Gradient noise scale from squared gradient norms: pure arithmetic, floats in, floats out.

With per-example gradients g_b, mean gradient G and B examples in a step, the noise scale tr(Sigma) / |G|^2 is the batch
(in examples) at which the noise of the step's gradient is as large as the gradient (McCandlish et al. 2018,
arXiv 1812.06162). Per-example norms give the smallest batch there is, 1, and so the estimate with the least
variance (Gray et al. 2024, arXiv 2411.00999).
"""

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


class NoiseScale:
    """Token-decayed averages of (sq_norm, tr_sigma), their ratio, and its interval.

    Numerator and denominator are averaged apart and then divided. A step weighs 1 - 2^(-tokens / half_life), so that
    weights follow tokens and not steps; dividing by their sum corrects the start. The squared weights beside them give
    the variance of the averages.
    """

    KEYS = ("w", "s", "g", "w2", "s2", "g2", "ss", "sg", "gg")  # sums of w*(1, s, g) and of w^2*(1, s, g, s^2, s*g, g^2)

    def __init__(self, half_life_tokens):
        self.half_life_tokens = half_life_tokens
        self.sums = dict.fromkeys(self.KEYS, 0.0)
        self.updates = 0

    def update(self, sq_norm, tr_sigma, tokens):
        decay = 2.0 ** (-tokens / self.half_life_tokens)
        w, s, g = 1 - decay, tr_sigma, sq_norm
        new = dict(w=w, s=w * s, g=w * g, w2=w * w, s2=w * w * s, g2=w * w * g,
                   ss=(w * s) ** 2, sg=w * s * w * g, gg=(w * g) ** 2)
        for key in self.KEYS:
            kept = decay if key in ("w", "s", "g") else decay * decay
            self.sums[key] = kept * self.sums[key] + new[key]
        self.updates += 1

    @property
    def tr_sigma(self):
        return self.sums["s"] / self.sums["w"] if self.updates else None

    @property
    def sq_norm(self):
        return self.sums["g"] / self.sums["w"] if self.updates else None

    @property
    def gns(self):
        """tr(Sigma) / |G|^2 in examples, or None while it is undetermined: |G|^2 not clearly above zero."""
        return self.tr_sigma / self.sq_norm if self.interval() else None

    @property
    def effective_updates(self):
        """How many equally weighted steps the averages are worth."""
        return self.sums["w"] ** 2 / self.sums["w2"] if self.updates else 0.0

    def variances(self):
        """Variances and covariance (V_ss, V_sg, V_gg) of the two averages, with weights w that sum to 1:
        sum w^2 (x - M)(y - N) / (1 - sum w^2)."""
        a = {k: self.sums[k] / (self.sums["w"] if k in ("w", "s", "g") else self.sums["w"] ** 2) for k in self.KEYS}
        m_s, m_g = a["s"], a["g"]
        v_ss = a["ss"] - 2 * m_s * a["s2"] + m_s * m_s * a["w2"]
        v_gg = a["gg"] - 2 * m_g * a["g2"] + m_g * m_g * a["w2"]
        v_sg = a["sg"] - m_s * a["g2"] - m_g * a["s2"] + m_s * m_g * a["w2"]
        left = 1 - a["w2"]
        return max(v_ss, 0.0) / left, v_sg / left, max(v_gg, 0.0) / left

    def interval(self, level=0.95):
        """(low, high) of the noise scale by Fieller's theorem, or None while undetermined."""
        freedom = self.effective_updates - 1
        if self.updates < 2 or freedom < 0.5:
            return None
        return ratio_interval(self.tr_sigma, self.sq_norm, *self.variances(), student_t(level, freedom))

    def state_dict(self):
        return {"half_life_tokens": self.half_life_tokens, "updates": self.updates, "sums": dict(self.sums)}

    def load_state_dict(self, state):
        self.half_life_tokens, self.updates = state["half_life_tokens"], state["updates"]
        self.sums = dict(state["sums"])


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
