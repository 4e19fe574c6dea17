"""
This file computes the gradient noise scale from squared gradient norms, and what it says about other batches. All are floats.

With per-example gradients g_b of mean G and covariance Sigma, the noise scale tr(Sigma) / |G|^2 is the batch (in examples)
whose gradient has as much noise as signal (McCandlish et al. 2018, arXiv 1812.06162). Estimating it takes gradients of two
batch sizes. Per-example norms give the smallest there is, 1, and so the estimate with the least variance (Gray et al. 2024,
arXiv 2411.00999).
"""

import copy
import functools
import math


def unbiased_pair(small, big, n_small, n_big):
    """(sq_norm, tr_sigma): unbiased estimates of |G|^2 and tr(Sigma).

    `small` is the mean of |gradient|^2 over batches of n_small examples, `big` the same for n_big. Both have the expectation
    |G|^2 + tr(Sigma)/n: two equations for two unknowns (McCandlish et al. 2018, appendix A.1). Either estimate may come out
    negative in a single step; clipping it would bias the averages.
    """
    if not n_big > n_small >= 1:
        raise ValueError(f"a noise scale needs two batch sizes, got n_small={n_small} and n_big={n_big}: "
                         "a step of one example has no estimate")
    sq_norm = (n_big * big - n_small * small) / (n_big - n_small)
    tr_sigma = (small - big) / (1 / n_small - 1 / n_big)
    return sq_norm, tr_sigma


def unequal_pair(q, big, h, examples):
    """(sq_norm, tr_sigma) where examples have unequal shares of the loss, as their lengths differ; unbiased, given the shares.

    Example b has the share w_b of the loss (sum w = 1) and adds c_b to the step's gradient: w_b times its own mean gradient.
    q = sum |c_b|^2, big = |sum c_b|^2, h = sum w_b^2 (1/h is Kish's effective batch). Then E q = h |G|^2 + noise and
    E big = |G|^2 + noise, where `noise` is the variance of the step's gradient. tr_sigma is examples * noise, so that
    tr_sigma / sq_norm counts examples like these; with equal shares this is unbiased_pair.
    """
    if not (0 < h < 1 and examples > 1):
        raise ValueError(f"a noise scale needs several examples, got shares with sum w^2 = {h} and {examples} example(s)")
    return (big - q) / (1 - h), examples * (q - h * big) / (1 - h)


EARLY = 0.2  # averages never look back further than about this share of the tokens seen so far


class Averages:
    """Token-decayed means of a few quantities that are measured together, and the covariance of those means.

    A step weighs 1 - 2^(-tokens / half_life), so that weights follow tokens and not steps; dividing by their sum
    corrects the start. With `early` the half-life is at most that share of the tokens seen so far: at the start of training
    |G|^2 falls by orders of magnitude within a few steps, and a fixed window would remember them for many half-lives.
    """

    def __init__(self, size, half_life_tokens, early=None):
        self.half_life_tokens, self.early, self.tokens = half_life_tokens, early, 0
        self.updates = 0
        self.w, self.w2 = 0.0, 0.0  # sums of w and of w^2
        self.x, self.x2 = [0.0] * size, [0.0] * size  # sums of w x and of w^2 x
        self.xx = [[0.0] * size for _ in range(size)]  # sums of w^2 x x^T

    def update(self, values, tokens):
        self.tokens += tokens
        half_life = min(self.half_life_tokens, self.early * self.tokens) if self.early else self.half_life_tokens
        decay = 2.0 ** (-tokens / half_life)
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
        """The covariance of the means. With weights w that sum to 1: sum w^2 (x - mean)(x - mean)^T / (1 - sum w^2)."""
        mean, size, square = self.means(), range(len(self.x)), self.w * self.w
        rest = 1 - self.w2 / square
        return [[(self.xx[i][j] - mean[i] * self.x2[j] - mean[j] * self.x2[i] + mean[i] * mean[j] * self.w2) / square / rest
                 for j in size] for i in size]

    @property
    def effective_updates(self):
        """How many equally weighted steps the averages are worth."""
        return self.w**2 / self.w2 if self.updates else 0.0

    def quantile(self, level):
        """Student's t for an interval of these averages, or None while there are too few steps to tell a spread."""
        freedom = self.effective_updates - 1
        return student_t(level, freedom) if self.updates >= 2 and freedom >= 0.5 else None

    def state_dict(self):
        return copy.deepcopy(vars(self))

    def load_state_dict(self, state):
        if not (alike(vars(self), state) and state["half_life_tokens"] > 0 and state["tokens"] >= 0
                and (not state["updates"] or min(state["w"], state["w2"]) > 0)):
            raise ValueError(f"not a state of averages of {len(self.x)} quantities")
        vars(self).update(copy.deepcopy(state))


def alike(mine, theirs):
    """Whether a loaded state has the same keys and lengths as ours, and numbers where we have numbers."""
    if isinstance(mine, dict):
        return isinstance(theirs, dict) and mine.keys() == theirs.keys() and all(alike(v, theirs[k]) for k, v in mine.items())
    if isinstance(mine, list):
        return isinstance(theirs, (list, tuple)) and len(mine) == len(theirs) and all(map(alike, mine, theirs))
    fits = type(theirs) in (int, float) and not 1e150 <= abs(theirs) < math.inf  # the square of a larger one overflows
    return fits or theirs is None and mine is None


class NoiseScale:
    """Averages of tr_sigma and of sq_norm, their ratio, and its interval. The two are averaged apart and then divided: an
    average of ratios would be biased, and undefined where a step's sq_norm comes out near zero."""

    def __init__(self, half_life_tokens, early=None):
        self.averages = Averages(2, half_life_tokens, early)

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
        if self.interval() is None:
            return None
        tr_sigma, sq_norm = self.averages.means()
        return max(tr_sigma, 0.0) / sq_norm

    def interval(self, level=0.95):
        """(low, high) of the noise scale by Fieller's theorem, or None while undetermined. A noise scale is never
        negative, so the part of the interval below zero is cut off."""
        z = self.averages.quantile(level)
        if z is None:
            return None
        (v_ss, v_sg), (_, v_gg) = self.averages.covariance()
        interval = ratio_interval(self.tr_sigma, self.sq_norm, max(v_ss, 0.0), v_sg, max(v_gg, 0.0), z)
        return interval and (max(interval[0], 0.0), max(interval[1], 0.0))

    def triple(self) -> tuple[float, float, float] | None:
        """(noise scale, low, high), or None while undetermined."""
        value, interval = self.gns, self.interval()
        return None if value is None or interval is None else (value, *interval)

    def state_dict(self):
        return self.averages.state_dict()

    def load_state_dict(self, state):
        self.averages.load_state_dict(state)


class Calibration:
    """The factor from the norm layers' noise scale to the whole model's, from steps that sample rows and so measure both.

    factor = (S_b / G_b) / (S_n / G_n) of averages: S tr_sigma, G sq_norm, b body, n norm layers. Each step's pairs are first
    divided by the norm layers' present averages: gradients change by orders of magnitude, and early and late steps count alike.
    Body and norm layers see the same examples, so their errors largely cancel: the interval is by the delta method on
    log(factor), with all covariances. If the averages become undetermined again, the last factor is held; its interval grows.
    """

    DRIFT = 0.1  # how far log(factor) walks in a half-life: it was seen to spread by 0.03 to 0.14 over whole runs

    def __init__(self, half_life_tokens, early=None):
        self.averages = Averages(4, half_life_tokens, early)
        self.waiting = 0  # tokens since the last step that sampled: the next one stands for all of them
        self.held, self.age = None, 0  # the last determined factor as (value, spread of its logarithm), and tokens since then

    def update(self, scale, tokens, body_pair=None, norm_pair=None):
        """Called after every step. scale: the norm layers' NoiseScale; the pairs (sq_norm, tr_sigma) of a step that sampled."""
        self.waiting += tokens
        self.age += tokens
        if body_pair is None or norm_pair is None or not scale.gns:
            return
        s, g = scale.tr_sigma, scale.sq_norm
        self.averages.update((body_pair[1] / s, body_pair[0] / g, norm_pair[1] / s, norm_pair[0] / g), self.waiting)
        self.waiting = 0
        measured = self.measured()
        if measured:
            self.held, self.age = measured, 0

    def measured(self, level=0.95):
        """(factor, half the interval of its logarithm), or None unless all four averages are clearly above zero."""
        z = self.averages.quantile(level)
        if z is None:
            return None
        mean, cov = self.averages.means(), self.averages.covariance()
        if any(m <= z * math.sqrt(max(cov[i][i], 0.0)) for i, m in enumerate(mean)):
            return None
        slope = [sign / m for sign, m in zip((1, -1, -1, 1), mean)]  # d log(factor) / d mean
        spread = z * math.sqrt(max(sum(slope[i] * cov[i][j] * slope[j] for i in range(4) for j in range(4)), 0.0))
        return mean[0] / mean[1] / (mean[2] / mean[3]), spread

    def steps_to_go(self, level=0.95, most=1000):
        """How many more steps have to sample until there is a factor, a guess from the spread of those that did: 0 where there
        is one, None where they do not tell."""
        if self.held:
            return 0
        n = self.averages.effective_updates
        if self.averages.quantile(level) is None:
            return max(1, 3 - self.averages.updates)
        mean, cov = self.averages.means(), self.averages.covariance()
        if min(mean) <= 0:
            return None
        spread = max(math.sqrt(max(cov[i][i], 0.0) * n) / m for i, m in enumerate(mean))  # of one step, relative to the mean
        return next((max(1, math.ceil(k - n)) for k in range(2, most) if student_t(level, k - 1) * spread < math.sqrt(k)), None)

    def factor(self):
        """(factor, low, high), or None while it has never been determined."""
        if self.held is None:
            return None
        value, spread = self.held
        spread = math.hypot(spread, 2 * self.DRIFT * math.sqrt(self.age / self.averages.half_life_tokens))
        return value, value * math.exp(-spread), value * math.exp(spread)

    def apply(self, scale):
        """The whole model's noise scale (value, low, high) from the norm layers', or None. Relative errors of factor and scale
        are added in quadrature, as if independent: few of the steps behind `scale` sampled."""
        factor, interval = self.factor(), scale.interval()
        if factor is None or interval is None or interval[0] <= 0 or not scale.gns:
            return None
        value = factor[0] * scale.gns
        down = math.hypot(math.log(factor[0] / factor[1]), math.log(scale.gns / interval[0]))
        up = math.hypot(math.log(factor[2] / factor[0]), math.log(interval[1] / scale.gns))
        return value, value * math.exp(-down), value * math.exp(up)

    def state_dict(self):
        return {"waiting": self.waiting, "held": self.held, "age": self.age, "averages": self.averages.state_dict()}

    def load_state_dict(self, state):
        held = state["held"]
        if not alike([0, 0], [state["waiting"], state["age"]]) or not (held is None or alike([0.0, 0.0], held)):
            raise ValueError("not a state of a calibration")
        self.averages.load_state_dict(state["averages"])
        self.waiting, self.held, self.age = state["waiting"], held, state["age"]


# -- what-if: from one run to other batches. A phase is (steps, batch, noise): a stretch of a run with batch B, noise scale N.


def progress(batch, noise):
    """What a step achieves, in steps without noise: B / (B + N) (McCandlish et al. 2018, section 2 and appendix D)."""
    return batch / (batch + noise)


def equivalent_steps(phases, batch):
    """The steps at another batch B' that achieve what the phases did: sum of steps B/(B+N) (B'+N)/B'. It is computed as one
    quotient of two products, which are equal at a phase's own batch: its steps come back to the last bit."""
    return sum(steps * ((b * (batch + noise)) / (batch * (b + noise))) for steps, b, noise in phases)


def fewest(phases):
    """(S, E): the steps and the examples that no batch goes below. S counts steps without noise, and E is the sum of N over
    them. What the phases achieved takes S + E/B steps and S B + E examples at batch B (McCandlish et al. 2018, section 2), so
    E/S is the one noise scale that stands for all phases."""
    steps = [s * progress(b, noise) for s, b, noise in phases]
    return sum(steps), sum(s * noise for s, (_, _, noise) in zip(steps, phases))


def product(*triples):
    """The product of independent triples (value, low, high). Relative errors are added in quadrature."""
    value = math.prod(t[0] for t in triples)
    if value <= 0:
        return 0.0, 0.0, math.prod(t[2] for t in triples)
    down = math.hypot(*(math.log(t[0] / t[1]) if t[1] > 0 else math.inf for t in triples))
    up = math.hypot(*(math.log(t[2] / t[0]) for t in triples))
    return value, value * math.exp(-down), value * math.exp(up)


def batches_within(seconds, steps, examples, fixed, per_example):
    """(smallest, largest) batch B that takes no more than `seconds`: (S + E/B)(t0 + t1 B) with (S, E) = (steps, examples) from
    `fewest`, t0 = fixed and t1 = per_example. None if no batch is that fast."""
    a, b, c = steps * per_example, steps * fixed + examples * per_example - seconds, examples * fixed
    under = b * b - 4 * a * c
    if b >= 0 or under < 0:
        return None
    root = math.sqrt(under)
    return 2 * c / (root - b), (root - b) / (2 * a)  # not (-b - root) / 2a: a difference of numbers that are close


def ratio_interval(m_s, m_g, v_ss, v_sg, v_gg, z):
    """(low, high) of the ratio of two means (Fieller 1954): all r with (m_s - r m_g)^2 <= z^2 (v_ss - 2 r v_sg + r^2 v_gg).
    None where that set is unbounded or m_g is not above zero: then the data do not determine a ratio."""
    a = m_g * m_g - z * z * v_gg
    if not (a > 0 and m_g > 0):
        return None
    b = m_s * m_g - z * z * v_sg
    c = m_s * m_s - z * z * v_ss
    root = math.sqrt(max(b * b - a * c, 0.0))
    return (b - root) / a, (b + root) / a


@functools.lru_cache(maxsize=4096)
def student_t(level, freedom):
    """The two-sided quantile of Student's t, for any real number of degrees of freedom: the q with P(|T| <= q) = level."""
    peak = 2 * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    t = 0.0
    for _ in range(500):  # Newton from below: P is concave, so no step goes too far
        step = (level - _t_inside(t, freedom)) / peak * (1 + t * t / freedom) ** ((freedom + 1) / 2)
        t += step
        if step <= 1e-13 * t:
            break
    return t


def _t_inside(t, freedom):
    """P(|T| <= t) = 1 - I_x(freedom/2, 1/2) with x = freedom / (freedom + t^2)."""
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
