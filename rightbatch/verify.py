"""
Is it true for my model? verify(model, loss_fn, batch) runs a few examples of yours through watch and through a plain loop over
single examples, and prints both, layer by layer.

    from rightbatch import verify
    print(verify(model, lambda m, batch: m(**batch).loss, batch))

The loop needs no trick: the gradient of one example is what backward gives for a batch that holds it alone. With a loss that is
a mean over tokens, examples of different length have different shares of it; the loop takes the shares that watch uses.
The model computes as it is (dropout off, its own dtype), so that bf16 shows bf16's error. Nothing is left behind in it.
"""

from dataclasses import dataclass

import torch

from rightbatch.watch import tensors, watch


@dataclass
class Report:
    rows: list  # (site, sum |c_b|^2 by watch, by the loop, |sum c_b|^2 by watch, by the loop)
    left_out: dict
    examples: int

    @property
    def error(self):
        """The largest relative error of any number in the table."""
        return max(abs(off(got, want)) for _, *four in self.rows for got, want in (four[:2], four[2:]))

    def __str__(self):
        width = max(len(row[0]) for row in self.rows)
        heads = "".join(f"  {head:>12} {'loop':>12} {'error':>8}" for head in ("sum |c_b|^2", "|sum c_b|^2"))
        lines = [f"{'site':{width}}{heads}"]
        for name, *four in self.rows:
            lines.append(f"{name:{width}}" + "".join(
                f"  {got:12.5e} {want:12.5e} {off(got, want):+8.0e}" for got, want in (four[:2], four[2:])))
        lines += [f"left out: {name} ({why})" for name, why in self.left_out.items()]
        return "\n".join([*lines, f"largest error {self.error:.1e} over {self.examples} examples"])


def off(got, want):
    return got / want - 1 if want else float(got > 0) and float("inf")


def verify(model, loss_fn, batch, examples=8, **options):
    """A Report on the norm layers. loss_fn(model, batch) -> a mean loss over the batch; batch: a tensor, or tensors in a dict,
    list or tuple, with the examples in dimension `batch_dim`; the first few are used. `options` go to watch."""
    dim = options.get("batch_dim", 0)
    n = min(examples, next(t for t in tensors(batch) if t.dim() >= 2).shape[dim])
    mode, state = model.training, [p.grad for p in model.parameters()]
    model.eval()
    w = watch(model, **options)
    try:
        loss_fn(model, cut(batch, dim, 0, n)).backward()
        measured = {s.name: s.leaf.grad.double() for s in w.sites if s.leaf.grad is not None}
        sites = {s.name: s.parameters for s in w.sites if s.name in measured}
        lengths = w.current.lengths
    finally:
        w.close()
    shares = torch.full((n,), 1 / n) if lengths is None else (lengths / lengths.sum()).cpu()
    c = {name: [] for name in sites}
    for b in range(n):
        model.zero_grad(set_to_none=True)
        (loss_fn(model, cut(batch, dim, b, 1)) * float(shares[b])).backward()
        for name, parameters in sites.items():
            c[name].append(torch.cat([p.grad.detach().double().flatten() for p in parameters]))
    for p, grad in zip(model.parameters(), state):
        p.grad = grad
    model.train(mode)
    rows = []
    for name, parts in c.items():
        parts, size = torch.stack(parts), parts[0].numel()
        got = measured[name]
        rows.append((name, float(got[size:2 * size].sum()), float(parts.square().sum()), float(got[:size].square().sum()),
                     float(parts.sum(0).square().sum())))
    return Report(rows, w.left_out, n)


def cut(batch, dim, start, n):
    """Examples start to start + n of a nested batch; what has no dimension of examples stays."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() == 0 else batch.narrow(dim if batch.dim() > dim else 0, start, n)
    if isinstance(batch, (list, tuple)):
        return type(batch)(cut(v, dim, start, n) for v in batch)
    return {k: cut(v, dim, start, n) for k, v in batch.items()} if hasattr(batch, "items") else batch
