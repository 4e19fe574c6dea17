"""
A GPT in plain modules. Norm layers (and, in exact mode, linears and embeddings) take a probe: a float32 zero tensor whose
gradient, after backward, holds the squared norm of each example's contribution to the parameter's gradient.

    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=256))
    probes = torch.zeros(len(model.probe_sites("norm")), 2, B, requires_grad=True)    # weight row, bias row
    logits, loss = model(idx, targets, probes=probes)
    loss.backward()
    probes.grad[site, 0, b]      # |contribution of example b to that site's weight.grad|^2

B batch, T time, C channels (width), nh heads, hs head size, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ln_kernel
from rightbatch import per_example
from rightbatch.kernels import head_loss
from rightbatch.kernels.attention import causal_attention


@dataclass
class GPTConfig:
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50257
    bias: bool = True
    dropout: float = 0.0
    norm: str = "layernorm"  # layernorm | rmsnorm
    gelu: str = "exact"  # exact | tanh
    tie_weights: bool = True
    cos_attn: tuple = ()  # blocks with cosine attention
    spectral_qkv: tuple = ()  # blocks with a spectrally normalised QKV matrix
    activation_checkpointing: str = "none"  # none | block
    norm_impl: str = "auto"  # see ln_kernel
    attention_impl: str = "auto"  # see rightbatch/kernels/attention.py

    @classmethod
    def of(cls, settings, vocab_size):
        """From a run's settings {key: value}, also as a checkpoint or config.json has them."""
        own = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k in cls.__dataclass_fields__}
        return cls(**own | {"vocab_size": vocab_size})


class Tap(NamedTuple):
    """What one site gets to measure with: its rows of the probes and, for an Adam-aware norm, weights per coordinate."""
    probe: torch.Tensor  # (2, B): weight row, bias row; with metrics (4, B), plain rows first
    weight_metric: torch.Tensor | None = None  # of a norm layer that of the bias, too: (2, C), RMSNorm (1, C)
    bias_metric: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # of a linear's weight; None for all


def linear(module, x, tap=None, weight=None, link=None):
    """nn.Linear through per_example.linear, which is F.linear where there is no tap."""
    probe, metric = (None, None) if tap is None else (tap.probe, tap.weight_metric)
    if metric is not None:
        metric = (metric, tap.bias_metric)
    return per_example.linear(x, module.weight if weight is None else weight, module.bias, probe, metric, link=link,
                              rows=tap and tap.rows)


class Norm(nn.Module):
    """LayerNorm or RMSNorm through ln_kernel, so that the backward pass can also yield per-example norms."""

    def __init__(self, config):
        super().__init__()
        self.rms, self.impl = config.norm == "rmsnorm", config.norm_impl
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias and not self.rms else None

    def forward(self, x, branch=None, tap=None):
        """x + branch, and its norm: one pass over memory where there were two."""
        probe, metric = (None, None) if tap is None else (tap.probe, tap.weight_metric)
        if self.rms and probe is not None:
            probe = probe[0::2]  # no bias: its rows stay zero
        return ln_kernel.norm(x, self.weight, self.bias, probe, metric, branch, self.rms, impl=self.impl)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.cosine, self.spectral = layer in config.cos_attn, layer in config.spectral_qkv
        self.impl = config.attention_impl
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, taps):
        weight, tap = self.c_attn.weight, taps.get("attn.c_attn")
        if self.spectral:
            sigma = spectral_norm(weight)
            weight, tap = weight / sigma, scaled_tap(tap, sigma)
        qkv = linear(self.c_attn, x, tap, weight)
        y = causal_attention(qkv, self.n_head, self.cosine, self.dropout if self.training else 0.0, self.impl)
        y = linear(self.c_proj, y, taps.get("attn.c_proj"))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout, self.gelu = config.dropout, {"exact": "none", "tanh": "tanh"}[config.gelu]
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, taps):
        # exact by default, as nanoGPT: torch's tanh form takes 2.5 times as long on a CPU, some 4% of a step of 6 x 384
        x = F.gelu(linear(self.c_fc, x, taps.get("mlp.c_fc")), approximate=self.gelu)
        return F.dropout(linear(self.c_proj, x, taps.get("mlp.c_proj")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1, self.attn = Norm(config), Attention(config, layer)
        self.ln_2, self.mlp = Norm(config), MLP(config)

    def forward(self, x, branch, taps):
        """x is the residual stream, branch what the next norm layer has still to add to it."""
        x, y = self.ln_1(x, branch, taps.get("ln_1"))
        x, y = self.ln_2(x, self.attn(y, taps), taps.get("ln_2"))
        return x, self.mlp(y, taps)

    def whole(self, x, taps):
        """One tensor in, one out: all that activation checkpointing has to keep."""
        x, branch = self(x, None, taps)
        return x + branch


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = Norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.apply(init_weights)
        for name, p in self.named_parameters():  # residual branches add up over 2 * n_layer additions (GPT-2)
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.site_names = {}  # by mode: (layer, name within it, whole name) of each site's module
        for mode in ("norm", "exact", "rows"):
            whole = [(layer, name.removesuffix(".weight")) for name, _, layer in self.probe_sites(mode)]
            self.site_names[mode] = [(layer, name.removeprefix(f"h.{layer}."), name) for layer, name in whole]

    def forward(self, idx, targets=None, probes=None, metrics=None, sample=None):
        """(logits, loss). Without targets the logits of the last position alone, (B, 1, V), and no loss. In training, logits
        too large to be worth keeping (head_loss.WORTH_BYTES) are not kept, and None stands for them.

        probes (sites, 2, B) for the sites of either mode; with metrics, {parameter name: weight per coordinate}, it is
        (sites, 4, B), and the last two rows get the weighted squared norms. sample, beside the probes of mode norm: (probes
        of the sites of mode rows, (sites, k) which rows of each weight, metrics of these rows alone or None)."""
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        taps, inside = self.taps(probes, metrics, sample)
        x, link = self.embed(idx, taps)  # (B, T, C)
        x, branch = F.dropout(x, self.config.dropout, self.training), None
        for block, own in zip(self.h, inside):
            if self.config.activation_checkpointing == "block" and self.training:
                x = checkpoint(block.whole, x, own, use_reentrant=False)
            else:
                x, branch = block(x, branch, own)
        x = self.ln_f(x, branch, taps.get("ln_f"))[1]
        del branch  # or it would live through the head
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        tap = taps.get("wte" if self.config.tie_weights else "lm_head")
        large = head_loss.worth_it(B * T, self.config.vocab_size, x.device.type)
        learning = self.training and torch.is_grad_enabled()
        if large and learning and tap is None:
            return None, head_loss.linear_cross_entropy(x, self.lm_head.weight, targets)
        if large and learning and self.lm_head.weight.requires_grad:
            return None, head_loss.probed_linear_cross_entropy(x, self.lm_head.weight, targets, tap.probe, link)
        logits = linear(self.lm_head, x, tap, link=link)  # (B, T, V)
        flat, targets = logits.view(B * T, -1), targets.reshape(-1)
        if large and not torch.is_grad_enabled():
            return logits, head_loss.cross_entropy_in_pieces(flat, targets)
        return logits, F.cross_entropy(flat.float() if flat.dtype != torch.float64 else flat, targets)

    def embed(self, idx, taps):
        """Token plus position embedding, and the link to a tied head: one matrix, used twice, is one site, whose
        per-example gradient is the sum of both uses."""
        tap, position = taps.get("wte"), taps.get("wpe")
        if tap is None:
            return self.wte(idx) + self.wpe.weight[:idx.shape[1]], None
        x, link = per_example.embedding(idx, self.wte.weight, tap.probe[:1], tied=True)
        x = per_example.add_positions(x, self.wpe.weight, position.probe[:1])
        return x, link if self.config.tie_weights else None

    def taps(self, probes, metrics, sample):
        """Which site gets which rows of the probes: {module name: Tap} of those outside the blocks, and one such for each."""
        outside, inside = {}, [{} for _ in self.h]
        if probes is None:
            return outside, inside
        counts = {mode: len(self.site_names[mode]) for mode in ("norm", "exact")}
        mode = next((mode for mode, count in counts.items() if count == probes.shape[0]), None)
        if mode is None:
            raise ValueError(f"probes has {probes.shape[0]} sites, expected " + " or ".join(
                f"{count} ({mode})" for mode, count in counts.items()))
        p = metrics or {}
        norms = self.norm_metrics(p)
        # unbind: one operation in the backward pass, where indexing would have one per site
        for (layer, local, name), probe in zip(self.site_names[mode], probes.unbind()):
            if name in norms:
                tap = Tap(probe, norms[name])
            elif name + ".weight" in p:
                tap = Tap(probe, p[name + ".weight"], p.get(name + ".bias"))
            else:
                tap = Tap(probe[:2])  # a table has no metric
            (outside if layer is None else inside[layer])[local] = tap
        if sample is not None:
            probes, rows_of, p = sample[0], sample[1], sample[2] or {}
            for (layer, local, name), probe, rows in zip(self.site_names["rows"], probes.unbind(), rows_of.unbind()):
                inside[layer][local] = Tap(probe, p.get(name + ".weight"), p.get(name + ".bias"), rows)
        return outside, inside

    def norm_metrics(self, metrics):
        """{norm layer: its metric, (2, C) or, for RMSNorm, (1, C)}, from one stack of all."""
        if not metrics:
            return {}
        names, rows = [name for _, _, name in self.site_names["norm"]], []
        for name in names:
            rows.append(metrics[name + ".weight"])
            if self.config.norm != "rmsnorm":
                rows.append(metrics[name + ".bias"] if self.config.bias else torch.zeros_like(rows[-1]))
        return dict(zip(names, torch.stack(rows).view(len(names), -1, self.config.n_embd).unbind()))

    def probe_sites(self, mode="norm"):
        """One (parameter name, group, layer) per first index of `probes`; the bias beside that weight is its row 1.
        norm: the norm layers. exact: every parameter; a tied head is part of the embedding. rows: the linears of the blocks,
        which with the norm layers are the model without its tables."""
        if mode not in ("norm", "exact", "rows"):
            raise ValueError(f"mode={mode!r}: expected norm, exact or rows")
        inside = {"ln_1": "norm", "attn.c_attn": "attention", "attn.c_proj": "attention", "ln_2": "norm", "mlp.c_fc": "mlp",
                  "mlp.c_proj": "mlp"}
        sites = [("wte.weight", "embedding", None), ("wpe.weight", "embedding", None)]
        sites += [(f"h.{i}.{name}.weight", group, i) for i in range(len(self.h)) for name, group in inside.items()]
        sites += [("ln_f.weight", "norm", None)]
        sites += [] if self.config.tie_weights else [("lm_head.weight", "head", None)]
        return [s for s in sites if mode == "exact" or s[1] in {"norm": ("norm",), "rows": ("attention", "mlp")}[mode]]

    def parameter_groups(self, weight_decay):
        """Matrices decay, vectors (norm weights, biases) do not."""
        params = [p for p in self.parameters() if p.requires_grad]  # tied parameters come once
        return [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
                {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]

    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Forward and backward, matrix products only: 6 per weight that multiplies (head included, look-ups not) and
        6 * T * C per block for causal attention, half of the full T x T."""
        c = self.config
        matrices = sum(p.numel() for name, p in self.h.named_parameters() if p.dim() == 2) + c.vocab_size * c.n_embd
        return 6 * matrices + 6 * c.n_layer * c.block_size * c.n_embd


def init_weights(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def scaled_tap(tap, sigma):
    """The tap of a weight that is used divided by sigma: its contributions are those of the quotient, over sigma."""
    if tap is None:
        return None
    rows = torch.stack([sigma**-2, torch.ones_like(sigma)]).repeat(tap.probe.shape[0] // 2)
    return tap._replace(probe=tap.probe * rows[:, None].to(tap.probe.dtype))  # the gradient goes through the product


@torch.no_grad()
def spectral_norm(weight, iterations=12):
    """The largest singular value, to a few per cent, by power iteration from a fixed start: stateless, so the same under
    recomputation and resume. No gradient flows through it: it is a scale, not part of the function learnt."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    v = weight.new_ones(weight.shape[1]) / math.sqrt(weight.shape[1])
    v = F.normalize(v + F.normalize(weight[0], dim=0), dim=0)  # off the symmetric direction
    for _ in range(iterations):
        u = F.normalize(weight @ v, dim=0)
        v = F.normalize(weight.T @ u, dim=0)
    return torch.dot(u, weight @ v)
