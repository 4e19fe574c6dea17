"""
What accumulating micro-batches does to the gradient and to the loss (micro-batching; Gray et al. 2024, arXiv 2411.00999)

    python experiments/accumulation.py                     # 12 minutes on two cores
    python experiments/accumulation.py --config config/gpt_111m.py --device cuda --gns=exact

Batches of 1, 2, 4, 8 and 16 micro-batches of m sequences at one learning rate, and again with the learning rate times
sqrt(k) and times k for k micro-batches; all read the same tokens. Over the second half of the runs at the one learning rate,
measured (grad_stats.py): the gradient's norm, the cosine of neighbouring micro-batches, Adam's signal to noise; and predicted
from the noise scale N of the same steps, which is from per-example norms: |G_n|^2 = |G|^2 (1 + N / n) for the mean of n
examples (McCandlish et al. 2018, arXiv 1812.06162), a cosine of 1 / (1 + N / m). Predictions need gns=exact, as set here.
"""

import math
import sys

import numpy as np
from common import Runs, parse, write

import gns
from plots import style

PAPER = ("The paper: the noise scale N tells what a larger batch gains, |G_B|^2 = |G|^2 (1 + N / B): well below N accumulation "
         "halves the noise with each doubling, beyond N it adds little.")
SETTINGS = dict(n_layer=2, n_head=4, n_embd=64, gns="exact", micro_batch_size=4, max_tokens=300_000, warmup_tokens=30_000,
                learning_rate=2e-3, min_lr=2e-4)
TINY = dict(gns="exact", max_tokens=1536, eval_iters=2, micro_batch_size=2)
COUNTS, RULES = (1, 2, 4, 8, 16), ("none", "sqrt", "linear")


def wanted(config, seeds):
    """{name: (micro-batches, rule, seed, changes to the config)}; with one micro-batch all rules are the same run."""
    m = config.micro_batch_size
    return {f"{rule}_{k}m_seed{seed}": (k, rule, seed, dict(
        batch_schedule="constant", batch_size=k * m, lr_scaling=rule, lr_reference_batch=m, seed=seed,
        log_interval=max(COUNTS) // k))  # as many logged steps, in which it is measured, in each
        for seed in range(seeds) for k in COUNTS for rule in (RULES if k > 1 else RULES[:1])}


def late_steps(rows):
    return [r for r in rows if "train/loss" in r and r["tokens"] > rows[-1]["tokens"] / 2]


def noise(steps, group="total"):
    """(noise scale, |G|) of these steps, or None: of the whole model, since that is what the gradient's norm is of."""
    scale = gns.NoiseScale(1e15)
    for r in steps:
        if f"gns/{group}_step_sq_norm" not in r:
            return None
        scale.update(r[f"gns/{group}_step_sq_norm"], r[f"gns/{group}_step_tr_sigma"], 1)
    known = scale.sq_norm > 0 and scale.tr_sigma > 0
    return (scale.tr_sigma / scale.sq_norm, math.sqrt(scale.sq_norm)) if known else None


def quality(rows, m):
    """Means over the logged steps of the second half, and the coherence that the noise scale of the same steps predicts."""
    steps = late_steps(rows)
    result = {"batch_size": steps[-1]["batch_size"], "norm": rms([r["grad/norm"] for r in steps])}
    for key in ("grad/coherence", "adam/snr", "update/ratio"):
        values = [r[key] for r in steps if r[key] is not None]
        result[key.split("/")[1]] = float(np.mean(values)) if values else None
    found = noise(steps)
    return {**result, "noise_scale": found and found[0], "coherence_predicted": found and 1 / (1 + found[0] / m)}


def rms(values):
    return math.sqrt(np.mean(np.square(values)))


def growth(rows, m):
    """[{"examples", "norm", "predicted"}]: the norm of the mean of the first k micro-batches of the same steps, at the same
    weights, and |G| sqrt(1 + N / (k m)). At the whole batch the two are equal by construction: N is from it."""
    steps, found = late_steps(rows), noise(late_steps(rows))
    norms = {m * int(key.rsplit("_", 1)[1]): rms([r[key] for r in steps]) for key in steps[-1] if "norm_after_" in key}
    norms[steps[-1]["batch_size"]] = rms([r["grad/norm"] for r in steps])
    return [{"examples": n, "norm": value, "predicted": found and found[1] * math.sqrt(1 + found[0] / n)}
            for n, value in sorted(norms.items())]


def finding(measured, grown, losses):
    """What came out, in one sentence; measured [quality() per count], losses {rule: [final loss per count]}."""
    first, last, one = measured[0], measured[-1], grown[0]
    seen = [t for t in measured if t["coherence"] is not None]
    text = (f"Here: at the same weights the mean gradient's norm falls from {one['norm']:.3g} for {one['examples']} sequences "
            f"to {grown[-1]['norm']:.3g} for {grown[-1]['examples']}")
    if one["predicted"]:
        text += f" (the noise scale says {one['predicted']:.3g} for {one['examples']})"
    text += f", micro-batches agree by a cosine of {seen[0]['coherence']:.2f} to {seen[-1]['coherence']:.2f}"
    if all(t["coherence_predicted"] for t in seen):
        text += f" (it says {seen[0]['coherence_predicted']:.2f} to {seen[-1]['coherence_predicted']:.2f})"
    end = {rule: values[-1] for rule, values in losses.items()}
    best, base = min(end, key=end.get), losses["none"][0]
    others = ", ".join(f"{r} {end[r] - base:+.3f}" for r in end if r != best)
    return (f"{text}, and Adam's signal to noise goes from {first['snr']:.2f} to {last['snr']:.2f}; after the same tokens "
            f"batch x {last['batch_size'] // first['batch_size']} is best with learning-rate scaling {best}, "
            f"{end[best] - base:+.3f} nats from batch x 1 ({others}).")


def draw(path, measured, grown, losses, curves):
    figure, ((norm, coherence), (final, over)) = style.pyplot().subplots(2, 2, figsize=(12, 9), layout="constrained")
    batches, blue, red, green = [t["batch_size"] for t in measured], *style.COLORS[:3]
    n = [g["examples"] for g in grown]
    norm.plot(n, [g["norm"] for g in grown], "o-", color=blue, label="measured, in the largest batch")
    norm.plot(n, [g["predicted"] or np.nan for g in grown], "s--", color=red, mfc="none", ms=9,
              label="by the noise scale: |G| sqrt(1 + N / n)")
    norm.plot(batches, [t["norm"] for t in measured], "^:", color=green, label="whole batches of that size, runs of their own")
    for color, key, label in ((blue, "coherence", "cosine of neighbouring micro-batches"),
                              (green, "snr", "Adam's signal to noise")):
        have = [t for t in measured if t[key] is not None]
        coherence.plot([t["batch_size"] for t in have], [t[key] for t in have], "o-", color=color, label=label)
    coherence.plot(batches, [t["coherence_predicted"] or np.nan for t in measured], "s--", color=red, mfc="none", ms=9,
                   label="cosine by the noise scale: 1 / (1 + N / m)")
    over.plot(*style.series(curves["first"], "val/loss"), "o-", ms=4, color=style.COLORS[6], label=f"batch {batches[0]}")
    for color, (rule, values) in zip(style.COLORS, losses.items()):
        final.plot(batches, values, "o-", color=color, label=f"learning rate scaled: {rule}")
        over.plot(*style.series(curves[rule], "val/loss"), "o-", ms=4, color=color, label=f"batch {batches[-1]}, {rule}")
    tail = [r["val/loss"] for rows in curves.values() for r in rows
            if "val/loss" in r and r["tokens"] > 0.15 * rows[-1]["tokens"]]
    over.set_ylim(min(tail) - 0.1, max(tail) + 0.1)
    for ax, title, x in ((norm, "Norm of the mean of n examples' gradients", "n, sequences"),
                         (coherence, "Quality at one learning rate", "batch (sequences)"),
                         (final, "Final validation loss, same tokens", "batch (sequences)"),
                         (over, "Validation loss over tokens", "tokens")):
        ax.set_title(title)
        ax.set_xlabel(x)
        ax.legend()
        if ax is not over:
            ax.set_xscale("log", base=2)
            ax.set_xticks(batches, [str(b) for b in batches])
    norm.set_ylim(bottom=0)
    coherence.set_ylim(0, 1)
    style.counts(over.xaxis)
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "accumulation", __doc__, seeds=3, settings=SETTINGS, tiny=TINY)
    config.grad_stats, config.gns_adam, config.gns_calibrate = True, False, False
    config.eval_tokens = max(1, config.max_tokens // 10)
    runs, m = Runs(config, args), config.micro_batch_size
    runs.do({name: changes for name, (*_, changes) in wanted(config, args.seeds).items()})

    def loss(k, rule):
        return float(np.mean([runs.final_loss(f"{rule if k > 1 else 'none'}_{k}m_seed{seed}") for seed in range(args.seeds)]))

    measured = [quality(runs.rows(f"none_{k}m_seed0"), m) for k in COUNTS]
    grown = growth(runs.rows(f"none_{COUNTS[-1]}m_seed0"), m)
    losses = {rule: [loss(k, rule) for k in COUNTS] for rule in RULES}
    path = write(args, config, PAPER, finding(measured, grown, losses),
                 {"quality": measured, "norm_growth": grown, "final_losses": losses})
    curves = {rule: runs.rows(f"{rule}_{COUNTS[-1]}m_seed0") for rule in RULES} | {"first": runs.rows("none_1m_seed0")}
    draw(path, measured, grown, losses, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
