"""
Is it true for my model? verify(model, loss_fn, batch) runs a few examples of yours through watch and through a plain loop over
single examples, and prints both, layer by layer.

    from rightbatch import verify
    print(verify(model, lambda m, batch: m(**batch).loss, batch))

The loop needs no trick: the gradient of one example is what backward gives for a batch that holds it alone. With a loss that is
a mean over tokens, examples of different length have different shares of it; the loop takes the shares that watch uses.
The model computes as it is (dropout off, its own dtype), so that bf16 shows bf16's error. Nothing is left behind in it.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rightbatch import inputs
from rightbatch.recognise import WatchError
from rightbatch.watch import watch


@dataclass
class Report:
    rows: list  # (layer, sum |c_b|^2 by watch, by the loop, |sum c_b|^2 by watch, by the loop)
    left_out: dict
    examples: int

    @property
    def error(self):
        """The largest relative error of any number in the table."""
        return max(abs(off(got, want)) for _, *four in self.rows for got, want in (four[:2], four[2:]))

    def __str__(self):
        width = max(5, *(len(row[0]) for row in self.rows))
        heads = "".join(f"  {head:>12} {'loop':>12} {'error':>8}" for head in ("sum |c_b|^2", "|sum c_b|^2"))
        lines = [f"{'layer':{width}}{heads}"]
        for name, *four in self.rows:
            lines.append(f"{name:{width}}" + "".join(
                f"  {got:12.5e} {want:12.5e} {off(got, want):+8.0e}" for got, want in (four[:2], four[2:])))
        lines += [f"left out: {name} ({why})" for name, why in self.left_out.items()]
        return "\n".join([*lines, f"largest error {self.error:.1e} over {self.examples} examples"])


def off(got, want):
    return got / want - 1 if want else float(got > 0) and float("inf")


def verify(model: torch.nn.Module, loss_fn: Callable, batch, examples: int = 8, **options) -> Report:
    """Compare what watch measures with a plain loop, in a Report: norm layers, sampled rows of others, with mode="exact" all.
    loss_fn(model, batch) -> a mean loss over the batch; loss_fn(model, batch, w) where it needs w.batch. batch: a tensor, or
    tensors in a dict, list or tuple, with the examples in dimension `batch_dim`; the first few are used. `options` go to
    watch."""
    dim = options.get("batch_dim", 0)
    first = inputs.first_input(inputs.leaves(batch))
    if first is None:
        raise WatchError("verify: the batch has no tensor with examples")
    n = min(examples, first.shape[dim])
    modes, state = {m: m.training for m in model.modules()}, [p.grad for p in model.parameters()]
    model.eval()
    try:
        return compare(model, loss_fn, batch, dim, n, options)
    finally:
        for p, grad in zip(model.parameters(), state):
            p.grad = grad
        for module, training in modes.items():
            module.training = training


def compare(model, loss_fn, batch, dim, n, options):
    w = watch(model, **options)
    more = (w,) if len(inspect.signature(loss_fn).parameters) > 2 else ()
    try:
        loss_fn(model, cut(batch, dim, 0, n), *more).backward()
        measured = [(site.name, [(p, functools.partial(site.pick, name)) for name, p in site.trained.items()], *row(site))
                    for site in w._hooks.sites if site.open]
        lengths = w._passes.current.lengths
    finally:
        w.close()
    shares = torch.full((n,), 1 / n) if lengths is None else (lengths / lengths.sum()).cpu()
    squares, sums = [0.0] * len(measured), [torch.zeros((), dtype=torch.float64)] * len(measured)
    for b in range(n):
        model.zero_grad(set_to_none=True)
        (loss_fn(model, cut(batch, dim, b, 1), *more) * float(shares[b])).backward()
        for i, (_, own, *_) in enumerate(measured):
            c = torch.cat([pick((torch.zeros_like(p) if p.grad is None else p.grad).detach().double()) for p, pick in own])
            squares[i], sums[i] = squares[i] + float(c.square().sum()), sums[i] + c
    rows = [(name, q, squares[i], big, float(sums[i].square().sum())) for i, (name, _, q, big) in enumerate(measured)]
    return Report(rows, w.left_out, n)


def row(site):
    """(q, big) of an open step."""
    sums, squares = site.leaf.grad.double()[:2 * site.size].split(site.size)
    return float(squares.sum()), float(sums.square().sum())


def cut(batch, dim, start, n):
    """Examples start to start + n of a nested batch; what has no dimension of examples stays."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() == 0 else batch.narrow(dim if batch.dim() > dim else 0, start, n)
    if isinstance(batch, (list, tuple)):
        return type(batch)(cut(v, dim, start, n) for v in batch)
    return {k: cut(v, dim, start, n) for k, v in batch.items()} if hasattr(batch, "items") else batch
