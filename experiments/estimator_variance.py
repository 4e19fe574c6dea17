"""
The standard error of the noise scale by its two batch sizes (Gray et al. 2024, arXiv 2411.00999, Figure 2)

    python experiments/estimator_variance.py           # a formula, and 2048 gradients at the end of phase_plot.py's run
    python experiments/estimator_variance.py --config config/gpt_111m.py --device cuda

A noise scale compares |gradient|^2 of batches of B_small examples with that of B_big. Every estimate here reads the same
examples, cut into steps of B_big and those into batches of B_small; its error is a jackknife over steps. The gradients are a
trained model's, at fixed weights. Beside it stands the formula for Gaussian gradients, which a test compares with a simulation.
"""

import math
import sys

import torch
from common import Experiment
from phase_plot import SHARED, exact_runs

import gns
import sample
from plots import style
from trainer import batches, hardware

PAPER = "The paper: for the same examples a smaller B_small always has the lower standard error, and B_big does not matter."
DIMENSIONS = 64  # of the Gaussian gradients
TRUE_GNS = (1.0, 32.0)  # well below B_big, and about the quickstart's at its end


# -- estimates from squared norms {k: |mean gradient|^2 of each k consecutive examples}

def jackknife(tr_sigma, sq_norm):
    """(ratio of means, its standard error) over n steps; Tukey's jackknife for a ratio estimator."""
    n = len(tr_sigma)
    without = (tr_sigma.sum() - tr_sigma) / (sq_norm.sum() - sq_norm)
    return tr_sigma.mean() / sq_norm.mean(), math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())


def theory(true_gns, d, n_examples, small, big):
    """Relative standard error for Gaussian gradients with Sigma = I tr(Sigma)/d, to first order (delta method).

    sq_norm is the mean inner product of different small batches, tr_sigma a sample variance over big/small of them, so
        N var(sq_norm)  = 4 G.Sigma G + 2 tr(Sigma^2) / (big - small)
        N var(tr_sigma) = 2 tr(Sigma^2) small / (1 - small/big)
        N cov           = -N var(tr_sigma) / big
    With R = tr(Sigma) / |G|^2:  tr(Sigma^2) / |G|^4 = R^2/d,  G.Sigma G / |G|^4 = R/d."""
    signal = 4 * true_gns + 2 * true_gns**2 / (big - small)
    noise = 2 * small / (1 - small / big)
    return math.sqrt((signal + noise + 2 * true_gns * noise / big) / d / n_examples)


def pairs(sq_norms, small, big):
    """(tr_sigma, sq_norm) of each step of `big` examples."""
    of_small = sq_norms[small].reshape(-1, big // small).mean(1)
    sq_norm, tr_sigma = gns.unbiased_pair(of_small, sq_norms[big], small, big)
    return tr_sigma, sq_norm


def halving_tree(gradients, top):
    """The squared norms for k = 1, 2, 4 .. top, of a stream of flat gradients; holds one gradient per k at most."""
    found, waiting = {2**i: [] for i in range(top.bit_length())}, {}
    for gradient in gradients:
        k = 1
        found[k].append(torch.dot(gradient, gradient))
        while k in waiting:  # the other half of 2k examples
            gradient = (waiting.pop(k) + gradient) / 2
            k *= 2
            found[k].append(torch.dot(gradient, gradient))
        if k < top:
            waiting[k] = gradient
    return {k: torch.stack(values).double().cpu().numpy() for k, values in found.items()}


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


# -- errors by batch sizes

def grid(top):
    """(B_small, B_big): every B_small at the largest B_big, and B_small = 1 at every B_big."""
    sizes = [2**i for i in range(top.bit_length())]
    return [(small, top) for small in sizes[:-1]] + [(1, big) for big in sizes[1:-1]]


def gaussian(n_examples, top):
    """Relative errors for Gaussian gradients, by true noise scale."""
    return [{"true_gns": true_gns, "small": small, "big": big, "error": theory(true_gns, DIMENSIONS, n_examples, small, big)}
            for true_gns in TRUE_GNS for small, big in grid(top)]


def on_model(sq_norms, top):
    """Relative jackknife errors; each is itself known to about 1 / sqrt(2 (steps - 1))."""
    rows = []
    for small, big in grid(top):
        tr_sigma, sq_norm = pairs(sq_norms, small, big)
        value, error = jackknife(tr_sigma, sq_norm)
        rows.append({"small": small, "big": big, "gns": value, "error": error / value,
                     "error_uncertainty": error / value / math.sqrt(2 * (len(sq_norm) - 1))})
    return rows


def varied(rows, what):
    """The rows along one of the two sizes, "small" at the largest big, "big" at small = 1."""
    top = max(r["big"] for r in rows)
    return sorted((r for r in rows if (r["big"] == top if what == "small" else r["small"] == 1)), key=lambda r: r[what])


def measure(runs):
    n_examples, top = (64, 8) if runs.args.tiny else (2048, 128)
    run, = exact_runs(runs, 1)
    gradients = model_gradients(run, runs.config, n_examples)
    return {"examples": n_examples, "dimensions": DIMENSIONS, "gaussian": gaussian(n_examples, top),
            "model": on_model(halving_tree(gradients, top), top)}, None


def finding(result):
    data = [*([r for r in result["gaussian"] if r["true_gns"] == true] for true in TRUE_GNS), result["model"]]
    model, largest = result["model"][0], varied(result["model"], "small")[-1]["small"]

    def over_best(what, i):
        """The error at one end of a size over that of B_small = 1 at the largest B_big."""
        return ", ".join(f"{varied(rows, what)[i]['error'] / varied(rows, 'small')[0]['error']:.1f}" for rows in data)
    return (f"Here: by the formula with noise scales of {TRUE_GNS[0]:g} and {TRUE_GNS[1]:g} and on the model (noise scale "
            f"{model['gns']:.3g}), at B_big = {model['big']}, B_small = {largest} has {over_best('small', -1)} times the error "
            f"of B_small = 1; at B_small = 1, B_big = 2 has {over_best('big', 0)} times the error of {model['big']}.")


def draw(result, _, path):
    figure, axes = style.panels(2, 13, 5.3, sharey=True)
    for ax, varies, other in zip(axes, ("small", "big"), ("at the largest B_big", "at B_small = 1")):
        for color, true_gns in zip(style.COLORS, TRUE_GNS):
            rows = varied([r for r in result["gaussian"] if r["true_gns"] == true_gns], varies)
            ax.plot([r[varies] for r in rows], [r["error"] for r in rows], color=color,
                    label=f"Gaussian, noise scale {true_gns:g}: formula")
        rows = varied(result["model"], varies)
        ax.errorbar([r[varies] for r in rows], [r["error"] for r in rows], [r["error_uncertainty"] for r in rows],
                    color=style.COLORS[2], marker="s", capsize=3, label="model: jackknife")
        style.dress(ax, f"Relative standard error by B_{varies}, {other}", f"B_{varies}", "doublings", "log")
    style.save(figure, path)


main = Experiment("estimator_variance", __doc__, PAPER, measure, finding, draw, **SHARED)

if __name__ == "__main__":
    sys.exit(main())
