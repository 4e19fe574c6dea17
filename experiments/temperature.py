"""
What moves the noise scale: the learning rate or the batch? (Gray et al. 2024, arXiv 2411.00999, Figure 6)

    python experiments/temperature.py                      # 15 minutes on two cores
    python experiments/temperature.py --seeds 1            # a first look
    python experiments/temperature.py --config config/gpt_111m.py --device cuda

One run to BRANCH of its tokens, then five that go on from there for WINDOW of them: as it was, learning rate x and / 4,
batch x and / 4. By the temperature of McCandlish et al. 2018 (arXiv 1812.06162), learning rate / batch, the noise scale
should go with its inverse: with (learning rate)^-1 and batch^+1. The exponents are measured over the second half of the
window, when the change has settled.
"""

import math
import sys

from common import Experiment

import gns
from plots import style
from trainer import reader

PAPER = ("The paper: the temperature, learning rate / batch, should move the noise scale by either, but from one checkpoint "
         "only a change of the learning rate moved it.")
# the learning rate does not decay, so that nothing but the change moves; a quarter and four times of it still train
SETTINGS = dict(gns="exact", batch_schedule="constant", micro_batch_size=4, batch_size=16, max_tokens=1_000_000,
                learning_rate=1e-3, min_lr=1e-4, lr_decay="none", warmup_tokens=50_000, gns_half_life_tokens=50_000)
TINY = dict(max_tokens=6000, micro_batch_size=2, gns="exact", warmup_tokens=1000, learning_rate=1e-2)
BRANCH, WINDOW = 0.4, 0.3  # of max_tokens
KINDS = {"learning rate": -1, "batch": 1}  # and the exponents of the temperature


def branches(config):
    """{name: (kind, factor, changes to the config)}; batches come in whole micro-batches, which may move their factors."""
    found = {"as it was": (None, 1.0, {})}
    for word, factor in (("/ 4", 0.25), ("x 4", 4.0)):
        found[f"learning rate {word}"] = ("learning rate", factor, dict(learning_rate=config.learning_rate * factor,
                                                                        min_lr=config.min_lr * factor))
        batch = max(1, round(config.batch_size * factor / config.micro_batch_size)) * config.micro_batch_size
        found[f"batch {word}"] = ("batch", batch / config.batch_size, dict(batch_size=batch))
    return found


def window_noise(rows, group, start):
    """{"gns", "low", "high", "steps"} of the steps after `start` tokens, all counted alike; None where undetermined."""
    scale = gns.NoiseScale(1e15)
    late = [r for r in rows if r["tokens"] > start and r.get(f"gns/{group}_step_sq_norm") is not None]
    for r in late:
        scale.update(r[f"gns/{group}_step_sq_norm"], r[f"gns/{group}_step_tr_sigma"], r["batch_size"])
    low, high = scale.interval() or (None, None)
    return {"gns": scale.gns, "low": low, "high": high, "steps": len(late)}


def log_error(noise):
    return (math.log(noise["high"]) - math.log(noise["low"])) / 2  # half the 95% interval


def known(noise):
    return bool(noise["gns"] and noise["low"])


def exponent(points):
    """points [(factor, noise) low and high, of each seed] -> (p, low, high) of noise scale ~ factor^p, or None."""
    if not all(known(n) for pair in points for _, n in pair):
        return None
    values, errors = [], []
    for (f1, n1), (f2, n2) in points:
        span = math.log(f2 / f1)
        values.append((math.log(n2["gns"]) - math.log(n1["gns"])) / span)
        errors.append(math.hypot(log_error(n1), log_error(n2)) / span)
    mean, error = sum(values) / len(values), math.hypot(*errors) / len(values)
    return mean, mean - error, mean + error


def finding(result):
    told = [f"with {kind}^{own[0]:+.2f} (95% interval {own[1]:+.2f} to {own[2]:+.2f}; temperature {KINDS[kind]:+d})" if own else
            f"undetermined with {kind}: a longer window (max_tokens) would tell" for kind, own in result["exponents"].items()]
    return f"Here: the noise scale goes {', '.join(told)}."


def draw(result, drawn, path):
    """drawn: the rows of the base, and {branch: its rows}, of the first seed."""
    (base_rows, rows), seeds, start = drawn, result["seeds"], result["branch_tokens"]
    key, (figure, (over, end)) = f"gns/{result['group']}", style.panels(2, 12, 5)
    colors = dict(zip(KINDS, style.COLORS))
    over.plot(*reader.series([r for r in base_rows if r["tokens"] > start / 4], key), color="#888888")
    for entry in seeds[0]:
        over.plot(*reader.series(rows[entry["branch"]], key), color=colors.get(entry["kind"], "#888888"), label=entry["branch"],
                  ls="--" if entry["factor"] < 1 else "-")
    for side, kind in zip((-1, 1), KINDS):
        for seed, entries in enumerate(seeds):
            points = sorted((e for e in entries if e["kind"] in (kind, None) and known(e)), key=lambda e: e["factor"])
            error = [[e["gns"] - e["low"] for e in points], [e["high"] - e["gns"] for e in points]]
            apart = 1.03 ** (side * (1 + seed))  # side by side, not over each other
            end.errorbar([e["factor"] * apart for e in points], [e["gns"] for e in points], error, fmt="o-", capsize=3, ms=5,
                         color=colors[kind], lw=1.4, label=None if seed else f"{kind}, each seed")
        middle = next(e for e in seeds[0] if e["kind"] is None)
        if known(middle):
            end.plot([0.25, 4], [middle["gns"] * f ** KINDS[kind] for f in (0.25, 4)], color=colors[kind], ls=":",
                     label=f"{kind}, if by temperature")
    style.dress(over, "Noise scale over the run, first seed (sequences)", "tokens", "counts", "log")
    style.dress(end, "Noise scale at the end, 95% interval", "factor on the learning rate or the batch", "doublings", "log")
    style.save(figure, path)


def measure(runs):
    config, kinds, seeds = runs.config, branches(runs.config), range(runs.args.seeds)
    group = "total" if config.gns == "exact" else "norm"
    start, end = int(BRANCH * config.max_tokens), int((BRANCH + WINDOW) * config.max_tokens)
    common = dict(batch_schedule="constant", eval_tokens=0, checkpoint_tokens=0, log_interval=1)

    def name(kind, seed):
        return f"{kind.replace(' ', '').replace('/', 'd')}_seed{seed}"
    runs.do({f"base_seed{seed}": dict(common, seed=seed, stop_tokens=start) for seed in seeds})
    runs.do({name(kind, seed): dict(common, seed=seed, stop_tokens=end, branch_from=runs.path(f"base_seed{seed}"), **changes)
             for seed in seeds for kind, (_, _, changes) in kinds.items()})
    found = [[{"branch": word, "kind": kind, "factor": factor,
               **window_noise(runs.rows(name(word, seed)), group, (start + end) / 2)}
              for word, (kind, factor, _) in kinds.items()] for seed in seeds]
    pairs = {kind: [sorted(((e["factor"], e) for e in entries if e["kind"] == kind), key=lambda p: p[0]) for entries in found]
             for kind in KINDS}
    numbers = {"exponents": {kind: exponent(points) for kind, points in pairs.items()}, "temperature_exponents": KINDS,
               "group": group, "branch_tokens": start, "end_tokens": end, "seeds": found}
    return numbers, (runs.rows("base_seed0"), {kind: runs.rows(name(kind, 0)) for kind in kinds})


main = Experiment("temperature", __doc__, PAPER, measure, finding, draw, SETTINGS, TINY, seeds=3)

if __name__ == "__main__":
    sys.exit(main())
