"""
What the runs of ladder.py say: a rung's critical batch beside the mean of every candidate noise scale; predictions; a picture.
"""

import math
import statistics

import numpy as np
import prediction
from candidates import NAMES, short

import gns
from plots import style
from trainer import log, tradeoff

BEFORE, AFTER, PLAIN = "all/coord/1", "body/coord/1", "all/coord/0"
HALF_LIFE = 250_000  # tokens, of train.py's averages
LAGGING = f"{AFTER}/averaged"
ALL = [*NAMES, LAGGING]
PIECES = 64  # that a run is cut into
NEAR = 1  # neighbours on each side over which 1/N is averaged: |G|^2 swings from moment to moment
LAST = PIECES // 3


def phases(run, name, batch, block):
    """A measured run as [(steps, batch, N)] of even pieces, with the candidate's N on straight lines between the moments; None
    where it was never determined. averaged: with the lag of train.py's average."""
    tokens, seen = run["steps"] * batch * block, run["seen"]
    at = (np.arange(PIECES) + 0.5) / PIECES * tokens
    if name == LAGGING:
        both = (np.interp(at, seen["tokens"], seen[AFTER][key]) for key in ("sq_norm", "tr_sigma"))
        sq, tr = averaged(*both, tokens / PIECES)
        inverse = sq / tr
    else:
        values = np.array(seen[name]["inverse"])
        near = [values[max(0, i - NEAR):i + NEAR + 1].mean() for i in range(len(values))]
        inverse = np.interp(at, seen["tokens"], near)
    known = inverse > 0
    if not known.any():
        return None
    return [(run["steps"] / PIECES, batch, float(n)) for n in np.interp(at, at[known], 1 / inverse[known])]


def averaged(sq, tr, tokens):
    """train.py's averages after each of pieces of so many tokens: they look back, and lag behind what changes."""
    scale, found = gns.NoiseScale(HALF_LIFE, gns.EARLY), []
    for pair in zip(sq, tr):
        scale.update(*map(float, pair), tokens)
        found.append((scale.sq_norm, scale.tr_sigma))
    return np.array(found).T


def lasting(run):
    """The share of |G|^2 in Adam's metric, without the tables, that lasts: the gradient's product with Adam's first moment (of
    clipped gradients) over |G|^2, by their median over the run."""
    own = run["seen"][AFTER]
    return short(float(np.median(np.array(own["momentum"]) / run["seen"]["shrink"] / own["sq_norm"])))


def mean_noise(those):
    """The one noise scale that stands for a run, weighted by progress."""
    steps, examples = gns.fewest(those)
    return examples / steps


def geometric(values):
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def errors(those, factor=1.0):
    """Of predictions, as prediction.errors tells, to twice or half and to four times or a quarter of the batch."""
    return {f"x{2**d}": prediction.errors([p for p in those if prediction.far(p) == d], factor) for d in (1, 2)}


def collect(seeds):
    """The numbers of a report, from {(rung, length): [Complete or None of each seed]}."""
    rungs, predicted = [], {name: [] for name in ALL}
    for (rung, length), those in seeds.items():
        those = [one for one in those if one]
        if those:
            own = {name: predictions(those, name) for name in ALL}
            rungs.append(row(rung, length, those, own))
            for name in ALL:
                predicted[name] += own[name]
    return {"table": table(rungs, predicted), "rungs": rungs}


def predictions(those, name):
    """[{source, batch, phases, taken}]: from each measured run, by one candidate, the steps of every other batch."""
    found = []
    for one in those:
        pieces = phases(one.measured, name, one.source, one.block)
        found += [dict(source=one.source, batch=b, phases=pieces, taken=steps) for b, steps in one.taken.items()
                  if pieces and b != one.source]
    return found


def row(rung, length, those, predicted):
    """One length of a rung, all its seeds together."""
    points = [(steps, steps * b) for one in those for b, steps in one.taken.items()]
    fit = tradeoff.fit(points)
    means, late = {}, {}
    for name in ALL:
        all_phases = [phases(one.measured, name, one.source, one.block) for one in those]
        means[name] = short(geometric([mean_noise(own) for own in all_phases if own]))
        constant = [one.constant and phases(one.constant, name, one.source, one.block) for one in those]
        late[name] = short(geometric([mean_noise(own[-LAST:]) / mean_noise(other[-LAST:])
                                      for own, other in zip(all_phases, constant) if own and other]))
    return {"rung": str(rung), "words": rung.words, "length": length, "seeds": len(those),
            "tokens": those[0].measured["tokens"], "losses": [short(one.measured["loss"]) for one in those],
            **{key: short(fit.get(key)) for key in ("critical", "low", "high", "spread")}, "refused": fit.get("refused"),
            "steps": [{b: round(steps, 1) for b, steps in one.taken.items()} for one in those],
            "means": means, "last_third_decayed_over_constant": {name: late[name] for name in (BEFORE, AFTER)},
            "lasting_share": [lasting(one.measured) for one in those],
            "errors": {name: errors(predicted[name]) for name in (BEFORE, AFTER, PLAIN)}}


def table(rungs, predicted):
    """{candidate: the critical batch over its mean (geometric mean over rungs, spread as a factor, least, most, that of long
    over that of short runs), and errors of predictions, as they are and with the best common factor on the noise scale}"""
    result = {}
    for name in ALL:
        ratios = {(own["rung"], own["length"]): own["critical"] / own["means"][name] for own in rungs
                  if own["critical"] and own["means"][name]}
        if not ratios or not predicted[name]:
            continue
        growth = [ratio / ratios[rung, "short"] for (rung, length), ratio in ratios.items()
                  if length == "long" and (rung, "short") in ratios]
        factor = best_factor(predicted[name])
        values = list(ratios.values())
        result[name] = {"critical_over_mean": short(geometric(values), 3), "spread": short(math.exp(np.std(np.log(values))), 3),
                        "least": short(min(values), 3), "most": short(max(values), 3),
                        "long_over_short": short(geometric(growth), 3), "errors": errors(predicted[name]),
                        "best_factor": short(factor, 3), "errors_with_best_factor": errors(predicted[name], factor)}
    return result


def best_factor(those):
    """The factor on every noise scale with which the median error of predictions is least."""
    steps, sources, noise = np.array([p["phases"] for p in those]).transpose(2, 1, 0)
    batch, taken = (np.array([p[key] for p in those]) for key in ("batch", "taken"))

    def error(factor):
        return np.median(np.abs(np.log(gns.equivalent_steps(zip(steps, sources, noise * factor), batch) / taken)))
    return float(min(np.geomspace(0.02, 20, 151), key=error))


def finding(numbers):
    result, rungs = numbers["table"], numbers["rungs"]
    if not {BEFORE, AFTER} <= set(result):
        return "Here: nothing yet: no rung has a critical batch."

    def said(name):
        own = result[name]
        told = ", ".join(f"{e['median_error']:.0%} (worst {e['worst_error']:.0%}) for {words}" for e, words in (
            (own["errors"]["x2"], "twice or half the batch"), (own["errors"]["x4"], "four times or a quarter")) if e)
        return (f"`{name}`: the critical batch by the sweep is {own['least']:.2g} to {own['most']:.2g} times one run's mean, "
                f"and the median error of predicted steps {told}")
    count = log.plural(len({own["rung"] for own in rungs}), "rung")
    return (f"Here, on {count}, {log.plural(len(rungs), 'length')} of them in all. Adam's metric over all weights, "
            f"{said(BEFORE)}. Over all but the tables, {said(AFTER)}.")


def draw(numbers, _, path):
    """The critical batch by the sweep against one run's noise scale, before and after; small marks are short runs."""
    figure, axes = style.panels(2, 9, 4.6, sharex=True, sharey=True)
    for ax, name, title in zip(axes, (BEFORE, AFTER), ("Adam's metric, all weights", "The same without the tables")):
        for own in numbers["rungs"]:
            N, critical = own["means"][name], own["critical"]
            if N and critical:
                ends = [[critical - (own["low"] or critical / 10)], [(own["high"] or critical * 10) - critical]]
                ax.errorbar(N, critical, ends, fmt="o", ms=8 if own["length"] == "long" else 4.5, lw=1, alpha=0.85,
                            label=own["rung"].replace("_", " ") if own["length"] == "short" else None)
        ax.axline((10, 10), (100, 100), color="#888888", lw=1)
        style.dress(ax, title, "noise scale of one run at batch 16, in sequences", "log", "log")
    axes[0].set_ylabel("critical batch by the sweep")
    style.save(figure, path)
