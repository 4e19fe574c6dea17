"""
A few random rows of each weight stand for all of it.

The squared norm of an example's gradient costs as much as the gradient. The squared norm of k random rows of it, times O / k,
estimates the same number without bias. The rows are evenly spaced, and the first one is a hash of (seed, step, site): every
row is as likely as any other, and neighbours, which are alike (of one head, say), are seldom together. The same rows of the
step's gradient give |G|^2, so that both errors largely cancel in the noise scale. All examples of such a step are measured:
with only some the difference between |G|^2 + tr(Sigma)/B and tr(Sigma)/B would drown in the choice of examples.

Left out are the tables: weights that are looked up by token or position, and a head that is tied to one or as large. A token
that is rare has a tiny second moment, so Adam's metric weighs its noise most, while the loss hardly depends on it.

O rows of a weight, k of them sampled.
"""

import hashlib

import torch

ROWS = 8  # of each weight, in a step that samples


def samples(step):
    """Whether a step samples: every second one at first, so that a factor is known within a hundred, then every eighth."""
    return step % (2 if step <= 100 else 8) == 0


def steps_until(step, count):
    """How many steps after `step` until `count` more have sampled."""
    end = step
    while count > 0:
        end += 1
        count -= samples(end)
    return end - step


def tables(model):
    """The parameters that are tables: weights of Embedding modules, and of heads. Heads are linears with as many rows as the
    tallest Embedding. Others may be as tall by chance: the heads are the last of these, with no other linear between."""
    found = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    vocabulary = max((weight.shape[0] for weight in found), default=None)
    linears = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    while linears and linears[-1].shape[0] != vocabulary:
        linears.pop()
    while linears and linears[-1].shape[0] == vocabulary:
        found.add(linears.pop())
    return found


def first(seed, step, site, height):
    """The number of the first row, the same in every process."""
    digest = hashlib.blake2b(f"{seed} {step} {site}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % height


def draw(seed, step, heights, count=ROWS):
    """[[row numbers] for each weight], `count` of its `heights` rows, or all if it has fewer. step: each step has its own."""
    starts = [first(seed, step, site, height) for site, height in enumerate(heights)]
    return [[(start + i * height // k) % height for i in range(k)]
            for start, height in zip(starts, heights) for k in [min(count, height)]]


def picked(tensor, rows, height, rank=0, world=1):
    """Some rows of a tensor of `height` rows. If FSDP has cut it over `world` processes, rows of other processes are zero."""
    if len(tensor) == height:
        return tensor.index_select(0, rows)
    if not len(tensor):
        return tensor.new_zeros(len(rows), *tensor.shape[1:])
    own = rows - rank * -(-height // world)
    inside = (own >= 0) & (own < len(tensor))
    part = tensor.index_select(0, own.clamp(0, len(tensor) - 1))
    return part * inside.view(-1, *[1] * (tensor.dim() - 1))
