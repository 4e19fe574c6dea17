"""
The learning rate of three model sizes at constant FLOPs (Gray et al. 2024, arXiv 2411.00999, Figure 14)

    python experiments/lr_tuning.py                        # 12 minutes on two cores
    python experiments/lr_tuning.py --config config/gpt_111m.py --device cuda     # the paper's 70M, 111M, 161M

The sizes are the config's with 3/4, 1 and 5/4 of its heads (so of its width) at the same depth, as the paper's are; each
reads as many tokens as take the same FLOPs. Each is trained at five learning rates, and the optimum is that of the parabola
through the best of them and its neighbours, in the logarithm of the learning rate.
"""

import copy
import math
import sys

import numpy as np
from common import Runs, parse, write

from plots import style
from trainer import log, plan

PAPER = ("The paper: three sizes (70M, 111M, 161M) are to be compared at constant FLOPs, each at the best of several learning "
         "rates.")
# small siblings of two blocks; the middle one reads 4 tokens per parameter, the paper's 111M reads 20
SETTINGS = dict(n_layer=2, n_head=4, n_embd=64, batch_schedule="constant", batch_size=16, max_tokens=500_000,
                warmup_tokens=25_000, learning_rate=4e-3, min_lr=4e-4)
TINY = dict(n_head=4, batch_schedule="constant", max_tokens=640)
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # on the learning rate
HEADS = (0.75, 1.0, 1.25)


def siblings(config, vocab_size):
    """[changes to the config] of the three sizes, all with the FLOPs of the config itself."""
    found, head = [], config.n_embd // config.n_head
    for share in HEADS:
        size = copy.copy(config)
        size.n_head = max(1, round(share * config.n_head))
        size.n_embd = head * size.n_head
        tokens = config.max_tokens * plan.flops_per_token(config, vocab_size) / plan.flops_per_token(size, vocab_size)
        found.append(dict(n_head=size.n_head, n_embd=size.n_embd, max_tokens=round(tokens),
                          warmup_tokens=round(config.warmup_tokens * tokens / config.max_tokens)))
    return found


def optimum(rates, losses):
    """{"learning_rate", "loss", "inside"}: of the parabola through the best and its neighbours in log(rate). At the end of the
    range there is none: the best rate itself, and inside is False."""
    losses = [v if math.isfinite(v) else math.inf for v in losses]
    i = int(np.argmin(losses))
    if not 0 < i < len(rates) - 1 or not np.isfinite(losses[i - 1:i + 2]).all():
        return {"learning_rate": rates[i], "loss": losses[i], "inside": 0 < i < len(rates) - 1}
    a, b, c = np.polyfit(np.log(rates[i - 1:i + 2]), losses[i - 1:i + 2], 2)
    if a <= 0:  # three equal losses
        return {"learning_rate": rates[i], "loss": losses[i], "inside": True}
    return {"learning_rate": float(np.exp(-b / (2 * a))), "loss": float(c - b * b / (4 * a)), "inside": True}


def finding(sizes):
    """What came out, in one sentence; sizes from small to large."""
    told = "; ".join(f"{log.count(s['parameters'])} parameters on {log.count(s['tokens'])} tokens: loss "
                     f"{s['best']['loss']:.3f} at {s['best']['learning_rate']:.2g}"
                     + ("" if s["best"]["inside"] else ", the end of the range") for s in sizes)
    best = min(sizes, key=lambda s: s["best"]["loss"])
    rates = [s["best"]["learning_rate"] for s in sizes]
    text = f"Here: at constant FLOPs, {told}; the {('smallest', 'middle', 'largest')[sizes.index(best)]} is best"
    if not all(s["best"]["inside"] for s in sizes):
        return text + ", and where an optimum is at the end of the range, a wider one is needed."
    way = ("falls with size" if rates[0] > rates[1] > rates[2] else "rises with size" if rates[0] < rates[1] < rates[2] else
           "has no order by size")
    spread = max(s["spread"] or 0 for s in sizes)
    text += f", and the best learning rate {way}, by x {max(rates) / min(rates):.2f} in all"
    apart = max(s["best"]["loss"] for s in sizes) - best["best"]["loss"]
    return text + (f" (sizes differ by {apart:.3f} nats, seeds by up to {spread:.3f})." if spread else
                   f" (one seed; sizes differ by {apart:.3f} nats).")


def draw(path, rates, sizes):
    figure, ax = style.pyplot().subplots(figsize=(8, 5.2), layout="constrained")
    for color, s in zip(style.COLORS, sizes):
        ax.plot(rates, s["losses"], "o-", color=color,
                label=f"{log.count(s['parameters'])} parameters, {log.count(s['tokens'])} tokens")
        for seed in s["seeds"]:
            ax.plot(rates, seed, ".", color=color, alpha=0.4)
        ax.plot(s["best"]["learning_rate"], s["best"]["loss"], "*", ms=17, color=color, mec="white",
                label=f"optimum {s['best']['learning_rate']:.2g}" + ("" if s["best"]["inside"] else ", at the end"))
    ax.set_xscale("log", base=2)
    ax.set_xticks(rates, [f"{r:.2g}" for r in rates])
    ax.set_title("Validation loss at constant FLOPs (nats per token)")
    ax.set_xlabel("peak learning rate")
    ax.legend(ncols=1)
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "lr_tuning", __doc__, seeds=3, settings=SETTINGS, tiny=TINY)
    config.gns, config.gns_calibrate, config.eval_tokens = "off", False, 0  # only the final loss is asked for
    runs, vocab_size = Runs(config, args), plan.vocabulary(config)[0]
    shapes, rates = siblings(config, vocab_size), [config.learning_rate * f for f in FACTORS]

    def name(shape, rate, seed):
        return f"width{shape['n_embd']}_lr{rate:.3g}_seed{seed}"

    runs.do({name(shape, rate, seed): dict(shape, learning_rate=rate, min_lr=config.min_lr * factor, seed=seed)
             for seed in range(args.seeds) for shape in shapes for rate, factor in zip(rates, FACTORS)})
    sizes = []
    for shape in shapes:
        size = copy.copy(config)
        vars(size).update(shape)
        seeds = [[runs.final_loss(name(shape, rate, seed)) for rate in rates] for seed in range(args.seeds)]
        losses = np.mean(seeds, 0).tolist()
        sizes.append({**shape, "parameters": plan.parameters(size, vocab_size), "tokens": shape["max_tokens"],
                      "flops": plan.flops_per_token(size, vocab_size) * shape["max_tokens"], "losses": losses, "seeds": seeds,
                      "spread": float(np.ptp(seeds, axis=0).max()) if args.seeds > 1 else None, "best": optimum(rates, losses)})
    path = write(args, config, PAPER, finding(sizes), {"learning_rates": rates, "sizes": sizes})
    draw(path, rates, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
