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

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ln_kernel


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
    tie_weights: bool = True
    cos_attn: tuple = ()  # blocks with cosine attention
    spectral_qkv: tuple = ()  # blocks with a spectrally normalised QKV matrix
    activation_checkpointing: str = "none"  # none | block
    norm_impl: str = "auto"  # see ln_kernel


class Norm(nn.Module):
    """LayerNorm or RMSNorm through ln_kernel, so that the backward pass can also yield per-example norms."""

    def __init__(self, config):
        super().__init__()
        self.kind, self.impl = config.norm, config.norm_impl
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias and self.kind == "layernorm" else None

    def forward(self, x, probe=None):
        if self.kind == "rmsnorm":  # no bias: its rows of the probe stay zero
            return ln_kernel.rms_norm(x, self.weight, None if probe is None else probe[0::2], impl=self.impl)
        return ln_kernel.layer_norm(x, self.weight, self.bias, probe, impl=self.impl)


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.cosine, self.spectral = layer in config.cos_attn, layer in config.spectral_qkv
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        B, T, C = x.shape
        weight = self.c_attn.weight
        if self.spectral:
            weight = weight / spectral_norm(weight)
        qkv = F.linear(x, weight, self.c_attn.bias)
        q, k, v = qkv.view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        if self.cosine:  # unit vectors times sqrt(hs) each, so that logits are sqrt(hs) * cosine
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1, self.attn = Norm(config), Attention(config, layer)
        self.ln_2, self.mlp = Norm(config), MLP(config)

    def forward(self, x, probes=None):
        probe_1, probe_2 = (None, None) if probes is None else probes
        x = x + self.attn(self.ln_1(x, probe_1))
        return x + self.mlp(self.ln_2(x, probe_2))


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

    def forward(self, idx, targets=None, probes=None):
        """(logits, loss). Without targets the logits of the last position alone, (B, 1, V), and no loss."""
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}")
        x = self.wte(idx) + self.wpe.weight[:T]  # (B, T, C)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer, block in enumerate(self.h):
            block_probes = None if probes is None else probes[2 * layer:2 * layer + 2]
            if self.config.activation_checkpointing == "block" and self.training:
                x = checkpoint(block, x, block_probes, use_reentrant=False)
            else:
                x = block(x, block_probes)
        x = self.ln_f(x, None if probes is None else probes[2 * len(self.h)])
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)  # (B, T, V)
        loss = F.cross_entropy(logits.view(B * T, -1).float(), targets.reshape(-1))
        return logits, loss

    def probe_sites(self, mode="norm"):
        """One (parameter name, group, layer) per first index of `probes`; the bias beside that weight is its row 1."""
        if mode != "norm":
            raise ValueError(f"mode={mode!r}: only norm is there")
        sites = [(f"h.{i}.{ln}.weight", "norm", i) for i in range(len(self.h)) for ln in ("ln_1", "ln_2")]
        return sites + [("ln_f.weight", "norm", None)]

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


@torch.no_grad()
def spectral_norm(weight, iterations=12):
    """The largest singular value, to a few per cent, by power iteration from a fixed start: stateless, so the same under
    recomputation and resume. No gradient flows through it: it is a scale, not part of the function learnt."""
    weight = weight.float()
    v = weight.new_ones(weight.shape[1]) / math.sqrt(weight.shape[1])
    v = F.normalize(v + F.normalize(weight[0], dim=0), dim=0)  # off the symmetric direction
    for _ in range(iterations):
        u = F.normalize(weight @ v, dim=0)
        v = F.normalize(weight.T @ u, dim=0)
    return torch.dot(u, weight @ v)
