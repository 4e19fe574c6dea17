"""
Every layer that can be had, not norm layers alone: linear, embedding, a head tied to it, convolution, LoRA's adapters.

A layer's tap turns its x and dy into |c_b|^2 at once (per_example.py), since c_b itself is as large as the weight. The sum over
examples is the gradient that autograd has anyway: a hook on each parameter adds it up before anything else is done to it, which
takes as much memory as the gradients do.
A layer is dropped, with a word, where its own sum over examples is not the parameter's gradient: its weight is used elsewhere.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rightbatch import per_example, rows, taps
from rightbatch.common import is_dtensor
from rightbatch.passes import AGAIN, in_backward
from rightbatch.recognise import WatchError

CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d)
OWN_FORWARD = "has a forward pass of its own"


@dataclass(eq=False)
class Layer:
    name: str
    kind: str  # linear, transposed (GPT-2's Conv1D), embedding, convolution
    module: torch.nn.Module
    leaf: torch.Tensor | None = None
    sums: dict | None = None             # parameter -> sum_b c_b, in the first step, for comparison
    checked: bool = False

    @property
    def parameters(self):
        return [p for p in self.module._parameters.values() if p is not None and p.requires_grad]


def kind_of(module):
    """What a module computes, or None; OWN_FORWARD where it does more than its name says."""
    weight = module._parameters.get("weight")
    if weight is None or not any(p is not None and p.requires_grad for p in module._parameters.values()):
        return None
    for plain in (torch.nn.Linear, torch.nn.Embedding, *CONVOLUTIONS):
        if isinstance(module, plain) and type(module).forward is not plain.forward:
            return OWN_FORWARD
    if isinstance(module, torch.nn.Linear):
        return "linear"
    if isinstance(module, torch.nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return "embedding" if plain else None
    if isinstance(module, CONVOLUTIONS):
        return "convolution" if module.padding_mode == "zeros" and not isinstance(module.padding, str) else None
    same = type(module).__name__ == "Conv1D" and weight.dim() == 2 and hasattr(module, "nf")
    return "transposed" if same else None


def body_of(model):
    """The parameters that are trained and none of the tables, nor of the biases beside them."""
    tables = rows.tables(model)
    beside = {m._parameters.get("bias") for m in model.modules() if m._parameters.get("weight") in tables}
    return {p for p in model.parameters() if p.requires_grad} - tables - beside


class Exact:
    """The taps of mode="exact"."""
    on = True  # every step is measured

    def __init__(self, model, owner, skipped):
        self.owner, self.handles, self.body = owner, [], body_of(model)
        layers = [Layer(name, kind, module) for name, module in model.named_modules()
                  if (kind := kind_of(module)) and not skipped(name)]
        trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        if any(map(is_dtensor, trained)):
            raise WatchError("mode='exact' needs whole gradients, and these are sharded: mode='norm' works under FSDP")
        self.left_out, self.sums = unmeasurable(model, layers), {}
        self.layers = [layer for layer in layers if layer.name not in self.left_out]
        own = {p for layer in self.layers for p in layer.parameters}
        self.parameters = {p: name for p, name in trained.items() if p in own}
        self.silent = set()  # left out since an earlier step. Within a step all calls are alike: checkpointing compares them
        for layer in self.layers:
            if layer.kind == "embedding":
                self.handles.append(layer.module.register_forward_pre_hook(owner.hook(self.expand)))
            self.handles.append(layer.module.register_forward_hook(owner.hook(self.tap, layer), with_kwargs=True, prepend=True))
        self.handles += [p.register_hook(owner.hook(self.add, p)) for p in self.parameters]

    # -- in the forward and backward passes

    def add(self, parameter, grad):
        acc = torch.promote_types(grad.dtype, torch.float32)
        self.sums[parameter] = self.sums[parameter] + grad if parameter in self.sums else grad.detach().to(acc, copy=True)

    def expand(self, module, args):
        """Positions come as (1, T) and are broadcast behind the embedding; an example's own gradient needs (B, T)."""
        B = self.owner.current.B
        if torch.is_grad_enabled() and args and args[0].dim() == 2 and args[0].shape[0] == 1 and B:
            return (args[0].expand(B, -1), *args[1:])
        return None

    def tap(self, layer, module, args, kwargs, y):
        if layer.name in self.silent:
            return None
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # its loops are not for a compiler
        now = self.owner.enter(layer.name)
        if now is None or not y.requires_grad:
            return None
        x, dim = args[0] if args else next(iter(kwargs.values())), self.owner.batch_dim
        if now.repeat or not in_backward():
            now.calls[layer.name] = now.calls.get(layer.name, 0) + 1
        if now.calls.get(layer.name, 0) > 1:
            self.left_out[layer.name] = "used several times in a forward pass"
        elif now is not AGAIN and (x.dim() < 2 or now.B is not None and x.shape[dim] != now.B):
            self.left_out[layer.name] = f"its input {tuple(x.shape)} has no dimension of {now.B} examples"
        measured = now is not AGAIN and layer.name not in self.left_out
        counts = self.owner.counts(now, y, x.shape[dim]) if measured else y.new_zeros(taps.HEAD)
        return Use.apply(y, x, self.leaf(layer, y), layer, self, now.picked if measured else {}, counts)

    def leaf(self, layer, y):
        dtype = torch.promote_types(y.dtype, torch.float32)
        if layer.leaf is None or layer.leaf.device != y.device or layer.leaf.dtype != dtype:
            layer.leaf = torch.zeros(2 + taps.HEAD, dtype=dtype, device=y.device, requires_grad=True)
            if not self.owner.sites:
                layer.leaf.register_post_accumulate_grad_hook(self.owner.ask_for_the_end)
        return layer.leaf

    def measure(self, layer, rows, x, dy):
        """(2,): sum_b |c_b|^2 over the layer's parameters, plain and in Adam's metric."""
        acc, dim = torch.promote_types(dy.dtype, torch.float32), self.owner.batch_dim
        dy = dy.detach().to(acc).movedim(dim, 0)
        x = (x if layer.kind == "embedding" else x.detach().to(acc)).movedim(dim, 0)
        weight, bias = layer.module.weight, layer.module._parameters.get("bias")
        total, sums = dy.new_zeros(2), {}
        if weight.requires_grad:
            p = self.owner.moments.of(weight) if weight in self.body else None
            sq, dW = (self.embedding if layer.kind == "embedding" else self.weight)(layer, x, dy, p, rows)
            total = total + F.pad(sq.sum(1), (0, 2 - len(sq)))
            sums[weight] = dW
        if bias is not None and bias.requires_grad:
            p = self.owner.moments.of(bias)
            c = dy.flatten(2).sum(2) if layer.kind == "convolution" else dy.reshape(dy.shape[0], -1, dy.shape[-1]).sum(1)
            total = total + torch.stack([c.square().sum(), c.new_zeros(()) if p is None else (p * c.square()).sum()])
            sums[bias] = c.sum(0)
        if not layer.checked:
            layer.sums = {p: s + (layer.sums or {}).get(p, 0) for p, s in sums.items()}
        return total

    def weight(self, layer, x, dy, p, rows):
        """Linear layers, and convolutions as linear layers on patches."""
        weight, B = layer.module.weight, dy.shape[0]
        if layer.kind == "convolution":
            return self.convolution(layer.module, x, dy, p)
        x, dy = x.reshape(B, -1, x.shape[-1]), dy.reshape(B, -1, dy.shape[-1])
        turned = layer.kind == "transposed"
        idx = rows.get(weight)  # of an embedding with the same weight
        dW, sq, picked = weight_grad(dy, x, p.t() if turned and p is not None else p, idx)
        if idx is not None:
            rows[weight] = (idx, picked)
        return sq, dW.t() if turned else dW

    def convolution(self, module, x, dy, p):
        one = isinstance(module, torch.nn.Conv1d)
        if one:  # as an image of height 1
            x, dy = x.unsqueeze(2), dy.unsqueeze(2)
        kernel, padding, stride, dilation = ((first, *value) if one else value for first, value in zip(
            (1, 0, 1, 1), (module.kernel_size, module.padding, module.stride, module.dilation)))
        patches = F.unfold(x, kernel, dilation, padding, stride).mT  # (B, L, C * kernel)
        dy, groups = dy.flatten(2).mT, module.groups
        pieces = [weight_grad(g.contiguous(), v.contiguous(), None if p is None else q.flatten(1), None) for g, v, q in zip(
            dy.chunk(groups, 2), patches.chunk(groups, 2), (None,) * groups if p is None else p.chunk(groups, 0))]
        return sum(sq for _, sq, _ in pieces), torch.cat([dW for dW, _, _ in pieces]).view(module.weight.shape)

    def embedding(self, layer, idx, dy, p, rows):
        """A table: there is no metric."""
        weight, padding = layer.module.weight, layer.module.padding_idx
        B, C = idx.shape[0], weight.shape[1]
        idx, dy = idx.reshape(B, -1), dy.reshape(B, -1, C)
        if padding is not None:
            dy = dy * (idx != padding)[..., None]
        known = rows.get(weight)
        head = known[1] if isinstance(known, tuple) else None
        if head is not None and padding is not None:
            head = head * (idx != padding)[..., None]
        sq = per_example.embedding_sq_norms(dy, idx, head)
        if layer.checked:
            return sq, None
        return sq, torch.zeros_like(weight, dtype=dy.dtype).index_add_(0, idx.reshape(-1), dy.reshape(-1, C))

    # -- at the end of a step

    def drop_what_is_used_elsewhere(self):
        """In the first step each layer's own sum is compared with the gradient that autograd has."""
        own = {}
        for layer in self.layers:
            for p, s in (layer.sums or {}).items():
                own[p] = s + own.get(p, 0)
        for layer in self.layers:
            if layer.checked or layer.sums is None:
                continue
            off = {p: (own[p] - self.sums[p]).norm() for p in layer.sums}  # together: keys' bias may have nothing but rounding
            if torch.stack([*off.values()]).norm() > 0.05 * torch.stack([self.sums[p].norm() for p in off]).norm():
                self.left_out.setdefault(layer.name, f"{self.parameters[max(off, key=off.get)]} is used elsewhere, too")
            layer.sums, layer.checked = None, True

    def used_layers(self):
        """Those of this step that are covered."""
        self.drop_what_is_used_elsewhere()
        used = [la for la in self.layers if la.leaf is not None and la.leaf.grad is not None and la.name not in self.left_out]
        lost = {p for la in self.layers if la.name in self.left_out for p in la.parameters}  # tied: all of it or nothing
        return [la for la in used if not lost & set(la.parameters)]

    def rows(self):
        """[(name, parameters, q, big)] of an open step, layers that share a weight as one."""
        found = {}  # a layer's first parameter -> layers
        for layer in self.used_layers():
            found.setdefault(layer.parameters[0], []).append(layer)
        rows = []
        for layers in found.values():
            parameters = list(dict.fromkeys(p for layer in layers for p in layer.parameters))
            rows.append((" + ".join(layer.name for layer in layers), parameters,
                         float(sum(layer.leaf.grad[0] for layer in layers)),
                         float(sum(self.sums[p].square().sum() for p in parameters))))
        return rows

    def collect(self, norm):
        """({"total": (q, big)} of all weights; "body", all but the tables; "total_adam", the body in Adam's metric where Adam
        steps all of it; "coverage": weights of the body that are measured, and all; counts), over all ranks, norm layers
        included."""
        used, owner = self.used_layers(), self.owner
        covered = {p: p in self.body for layer in used for p in layer.parameters}
        sums = self.sums_everywhere()
        empty = next(iter(sums.values()), next(iter(self.owner.model.parameters()))).new_zeros(2 + taps.HEAD)
        grads = {layer: layer.leaf.grad for layer in used}
        q_body, q_tables = (torch.stack([empty, *(g for layer, g in grads.items() if covered[layer.parameters[0]] == inside)]
                                        ).sum(0)[:2] for inside in (True, False))
        own_counts = torch.stack([empty, *grads.values()]).amax(0)[2:]
        parts = torch.cat([q_body, q_tables, own_counts])
        owner.sum_over_ranks(parts)
        (q, q_adam, q_tables, _), own_counts = parts[:4], parts[4:]
        big, big_adam, big_tables = (empty.new_zeros(()) for _ in range(3))
        for p, s in sums.items():
            owner.sum_over_ranks(s)
            if not covered.get(p, True):
                big_tables = big_tables + s.square().sum()
            elif p in covered:
                metric = owner.moments.of(p)
                big = big + s.square().sum()
                big_adam = None if metric is None or big_adam is None else big_adam + (metric * s.square()).sum()
        self.forget()
        body = [a + b for a, b in zip((q, big), norm.get("norm", (0, 0)))]
        measured = {p for p, inside in covered.items() if inside} | {p for site in owner.sites for p in site.parameters}
        found = {"total": [body[0] + q_tables, body[1] + big_tables], "body": body,
                 "coverage": [big.new_full((), sum(p.numel() for p in some)) for some in (measured, self.body)]}
        if big_adam is not None and ("norm_adam" in norm or not owner.sites):
            found["total_adam"] = [a + b for a, b in zip((q_adam, big_adam), norm.get("norm_adam", (0, 0)))]
        return found, own_counts

    def sums_everywhere(self):
        """Several ranks add up the same parameters in the same order, also those that got no gradient on some of them."""
        if not self.owner.distributed():
            return self.sums
        return {p: self.sums[p] if p in self.sums else torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
                for p in self.parameters}

    def forget(self):
        self.sums, self.silent = {}, set(self.left_out)
        for layer in self.layers:
            layer.sums = None
            if layer.leaf is not None:
                layer.leaf.grad = None


class Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, x, leaf, layer, exact, picked, counts):
        ctx.save_for_backward(x)
        ctx.layer, ctx.exact, ctx.counts, ctx.picked, ctx.leaf, ctx.seen = layer, exact, counts, picked, leaf, False
        if layer.kind == "embedding":
            picked[layer.module.weight] = x  # for a head that has the same weight
        return y.data

    @staticmethod
    def backward(ctx, dy):
        layer, left_out, numbers = ctx.layer, ctx.exact.left_out, ctx.leaf.new_zeros(2)
        if ctx.seen and ctx.leaf.grad is not None:
            left_out[layer.name] = "two backward passes go through one forward pass"
        ctx.seen, x = True, ctx.saved_tensors
        if layer.name not in left_out:
            try:  # whatever a layer does to its input, training goes on
                with torch.no_grad():
                    numbers = ctx.exact.measure(layer, ctx.picked, *x, dy)
            except Exception as error:
                left_out[layer.name] = f"could not be measured: {str(error).splitlines()[0] if str(error) else repr(error)}"
        return dy, None, torch.cat([numbers, ctx.counts]), None, None, None, None


def unmeasurable(model, layers):
    """{layer: why not}, as far as it can be told before the first step. A weight that several layers hold has one gradient, of
    all of them together: known for an embedding and a head."""
    left_out = {layer.name: OWN_FORWARD for layer in layers if layer.kind == OWN_FORWARD}
    holders = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None and p.requires_grad:
                holders.setdefault(p, []).append(name)
    kinds = {layer.name: layer.kind for layer in layers}
    for names in holders.values():
        tied = sorted(kinds.get(name, "") for name in names) == ["embedding", "linear"]
        if len(names) > 1 and not tied:
            left_out = {name: f"{' and '.join(names)} have one weight" for name in names if name in kinds} | left_out
    return left_out


def weight_grad(g, x, p, idx):
    method = "gram" if p is None and per_example.cheaper_method(*x.shape[1:], g.shape[2]) == "gram" else "simultaneous"
    return per_example.weight_grad(g, x, p, idx, method)
