"""
Noise scales from any two batch sizes, and their standard errors. For estimator_variance.py.

N examples are cut into steps of `big`, and those into batches of `small`.
"""

import math

import torch
from common import ROOT  # noqa: F401, for the path to gns

import gns


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
    """(tr_sigma, sq_norm) of each step of `big` examples; sq_norms[k]: |mean gradient|^2 of consecutive batches of k."""
    of_small = sq_norms[small].reshape(-1, big // small).mean(1)
    sq_norm, tr_sigma = gns.unbiased_pair(of_small, sq_norms[big], small, big)
    return tr_sigma, sq_norm


def halving_tree(gradients, top):
    """{k: |mean gradient|^2 of each k consecutive examples} for k = 1, 2, 4 .. top, of a stream of flat gradients; holds one
    gradient per k at most."""
    found, waiting = {2**i: [] for i in range(top.bit_length())}, {}
    for gradient in gradients:
        k = 1
        while True:
            found[k].append(torch.dot(gradient, gradient))
            if k == top:
                break
            if k not in waiting:
                waiting[k] = gradient
                break
            gradient = (waiting.pop(k) + gradient) / 2
            k *= 2
    return {k: torch.stack(values).double().cpu().numpy() for k, values in found.items()}


def simulated(true_gns, d, n_examples, top, rng):
    """The same from Gaussian gradients with |G|^2 = 1 and Sigma = I true_gns/d."""
    g = rng.normal(0, math.sqrt(true_gns / d), (n_examples, d))
    g[:, 0] += 1
    return {2**i: (g.reshape(-1, 2**i, d).mean(1) ** 2).sum(1) for i in range(top.bit_length())}
