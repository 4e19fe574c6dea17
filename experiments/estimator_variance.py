"""
The standard error of the noise scale by its two batch sizes (Gray et al. 2024, arXiv 2411.00999, Figure 2)

    python experiments/estimator_variance.py           # simulation, and 2048 gradients at the end of phase_plot.py's run
    python experiments/estimator_variance.py --config config/gpt_111m.py --device cuda

A noise scale compares |gradient|^2 of batches of B_small examples with that of B_big. Every estimate here reads the same
examples, cut into steps of B_big and those into batches of B_small; its error is a jackknife over steps. First with Gaussian
gradients, where truth and error are known, then with a trained model's, at fixed weights.
"""

import itertools
import math
import sys

import numpy as np
import torch
from batch_pairs import halving_tree, jackknife, pairs, simulated, theory
from common import parse, write
from phase_plot import FOLDER, SETTINGS, TINY, exact_runs

import sample
from plots import style
from trainer import batches, hardware

PAPER = "The paper: for the same examples a smaller B_small always has the lower standard error, and B_big does not matter."
DIMENSIONS, TRIALS = 64, 400
TRUE_GNS = (1.0, 32.0)  # well below B_big, and about the quickstart's at its end


def model_gradients(run, config, n_examples):
    """One flat gradient per example at the weights of a run's end, on examples that it has not read."""
    device = hardware.pick_device(config.device)
    model, _ = sample.load_model(run, device)  # no dropout
    data, autocast = batches.Dataset(config.dataset, config.block_size), hardware.autocast(
        device, hardware.pick_dtype(config.dtype, device))
    for n in range(n_examples):
        x, y = data.train_batch(config.seed + 1, n, 1, device)
        with autocast:
            _, loss = model(x, y)
        yield torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(model.parameters()))])


def grid(top):
    """(B_small, B_big): every B_small at the largest B_big, and B_small = 1 at every B_big."""
    sizes = [2**i for i in range(top.bit_length())]
    return [(small, top) for small in sizes[:-1]] + [(1, big) for big in sizes[1:-1]]


def simulation(n_examples, top, trials):
    """Relative errors by true noise scale: the spread over trials (half of the range of the middle 68%, since a ratio
    has tails), the jackknife's median, and the formula's."""
    rng, rows = np.random.default_rng(0), []
    for true_gns in TRUE_GNS:
        draws = [simulated(true_gns, DIMENSIONS, n_examples, top, rng) for _ in range(trials)]
        for small, big in grid(top):
            estimates, errors = zip(*(jackknife(*pairs(draw, small, big)) for draw in draws))
            rows.append({"true_gns": true_gns, "small": small, "big": big, "mean": float(np.mean(estimates)) / true_gns,
                         "error": float(np.subtract(*np.quantile(estimates, (0.84, 0.16)))) / 2 / true_gns,
                         "jackknife": float(np.median(errors)) / true_gns,
                         "theory": theory(true_gns, DIMENSIONS, n_examples, small, big)})
    return rows


def on_model(sq_norms, top):
    """Relative jackknife errors; each is itself known to about 1 / sqrt(2 (steps - 1))."""
    rows = []
    for small, big in grid(top):
        tr_sigma, sq_norm = pairs(sq_norms, small, big)
        value, error = jackknife(tr_sigma, sq_norm)
        rows.append({"small": small, "big": big, "gns": value, "error": error / value,
                     "error_uncertainty": error / value / math.sqrt(2 * (len(sq_norm) - 1))})
    return rows


def at(rows, small, big, key="error"):
    return next(row[key] for row in rows if (row["small"], row["big"]) == (small, big))


def unharmed(rows, size, within=1.25):
    """Going away from the first of the rows: the last `size` ("small" or "big") up to which errors stay within that factor."""
    return list(itertools.takewhile(lambda row: row["error"] <= within * rows[0]["error"], rows))[-1][size]


def by_small(rows, top):
    return sorted((r for r in rows if r["big"] == top), key=lambda r: r["small"])


def by_big(rows):
    return sorted((r for r in rows if r["small"] == 1), key=lambda r: -r["big"])


def finding(model, low, high, top):
    """low, high: simulated rows of the two noise scales. On the model an error may go down by its own uncertainty."""
    data, steps = (low, high, model), by_small(model, top)
    better = [b["small"] for a, b in zip(steps, steps[1:]) if b["error"] < a["error"] - a["error_uncertainty"]]
    cost, big_cost = ([at(rows, *pair) / at(rows, 1, top) for rows in data] for pair in ((top // 2, top), (1, 2)))
    small_free = ", ".join(str(unharmed(by_small(rows, top), "small")) for rows in data)
    big_free = ", ".join(str(unharmed(by_big(rows), "big")) for rows in data)
    claim = "a larger B_small is clearly better somewhere" if better else "a larger B_small is never clearly better"
    agrees = ("as the formula for Gaussian gradients has it" if cost[1] < cost[0] and big_cost[1] > big_cost[0] else
              "says the formula for Gaussian gradients, but not this simulation")
    return (f"Here: in simulation with noise scales of {TRUE_GNS[0]:g} and {TRUE_GNS[1]:g} and on the model (noise scale "
            f"{at(model, 1, top, 'gns'):.3g}), at B_big = {top}, B_small = {top // 2} has {cost[0]:.1f}, {cost[1]:.1f} and "
            f"{cost[2]:.1f} times the error of B_small = 1; {claim} on the model, but up to {small_free} it costs at most a "
            f"quarter; at B_small = 1, B_big = 2 has {big_cost[0]:.1f}, {big_cost[1]:.1f} and {big_cost[2]:.1f} times the "
            f"error of {top}, and from {big_free} on B_big costs at most a quarter: the larger the noise scale, the less "
            f"B_small matters and the more B_big, {agrees}.")


def draw(simulated_rows, model, top, path):
    figure, axes = style.pyplot().subplots(1, 2, figsize=(13, 5.3), layout="constrained", sharey=True)
    for ax, varies, cut in ((axes[0], "small", lambda rows: by_small(rows, top)), (axes[1], "big", by_big)):
        for color, true_gns in zip(style.COLORS, TRUE_GNS):
            rows = cut([r for r in simulated_rows if r["true_gns"] == true_gns])
            x = [r[varies] for r in rows]
            ax.plot(x, [r["theory"] for r in rows], color=color, label=f"Gaussian, noise scale {true_gns:g}: formula")
            ax.plot(x, [r["error"] for r in rows], "o", color=color, mfc="white", label="spread over trials")
            ax.plot(x, [r["jackknife"] for r in rows], "x", color=color, label="jackknife, median")
        rows = cut(model)
        ax.errorbar([r[varies] for r in rows], [r["error"] for r in rows], [r["error_uncertainty"] for r in rows],
                    color=style.COLORS[2], marker="s", capsize=3,
                    label=f"model, noise scale {at(model, 1, top, 'gns'):.3g}: jackknife")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        style.plain(ax.xaxis)
        ax.yaxis.set_major_formatter(lambda v, _: f"{100 * v:g}%")
        ax.yaxis.set_minor_formatter(lambda v, _: f"{100 * v:g}%" if f"{v:.0e}"[0] in "25" else "")
        ax.set_xlabel(f"B_{varies}")
    axes[0].set_title(f"Relative standard error by B_small (B_big = {top})")
    axes[1].set_title("and by B_big (B_small = 1)")
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "estimator_variance", __doc__, settings=SETTINGS, tiny=TINY, folder=FOLDER)
    n_examples, top, trials = (64, 8, 20) if args.tiny else (2048, 128, TRIALS)
    run, = exact_runs(config, args, seeds=[0])
    simulated_rows = simulation(n_examples, top, trials)
    model = on_model(halving_tree(model_gradients(run, config, n_examples), top), top)
    low, high = ([r for r in simulated_rows if r["true_gns"] == g] for g in TRUE_GNS)
    path = write(args, config, PAPER, finding(model, low, high, top),
                 {"examples": n_examples, "dimensions": DIMENSIONS, "trials": trials, "simulation": simulated_rows,
                  "model": model})
    draw(simulated_rows, model, top, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
