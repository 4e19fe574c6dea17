"""
Why attention in low precision lets the QKV bias run away, and what stops it (Gray et al. 2024, arXiv 2411.00999, Appendix C)

    python experiments/attention_divergence.py             # 2 minutes on one core
    python experiments/attention_divergence.py --config config/gpt_111m.py --device cuda --max_tokens=100M

No language model: one attention layer (model.Attention, block 1), the student, learns the outputs of a teacher with the
same weights from normalised random inputs, after noise was added to its QKV bias. The teacher is float32; the student
computes in float32, or under autocast in bf16 or fp16, by torch's fused attention or the plain one; its weights and Adam are
always float32.

The bias of the keys is the place to look at. It adds the same number to all logits of a query, so softmax does not see it
and its gradient is zero but for rounding; Adam divides that rounding by its own size and walks with it at full speed. Cosine
attention does see it (keys are normalised after the bias), so there it has a gradient. Widths and steps follow from the
config: max_tokens, micro_batch_size, block_size, n_embd, n_head, learning_rate.
"""

import json
import os
import sys

import numpy as np
import torch
from common import parse, write
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import Attention, GPTConfig
from plots import style
from trainer import checkpoint, hardware

PAPER = ("The paper: with fused attention in bf16 the QKV bias of block 1 ran away and training diverged; cosine attention or "
         "a spectrally normalised QKV matrix in that block cured it.")
SETTINGS = dict(n_embd=64, n_head=4, block_size=64, micro_batch_size=4, max_tokens=800 * 4 * 64, learning_rate=1e-3)
BLOCK, NOISE, POINTS = 1, 0.3, 40
PLAIN, FUSED = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
ARMS = {"float32": (torch.float32, PLAIN, {}), "fp16 fused": (torch.float16, FUSED, {}),
        "bf16 plain": (torch.bfloat16, PLAIN, {}), "bf16 fused": (torch.bfloat16, FUSED, {}),
        "bf16 fused, cosine": (torch.bfloat16, FUSED, {"cos_attn": (BLOCK,)}),
        "bf16 fused, spectral": (torch.bfloat16, FUSED, {"spectral_qkv": (BLOCK,)})}


def pair(config, changes, seed, device):
    """(teacher, student): queries, keys and values of unit variance, the student's QKV bias noisy."""
    torch.manual_seed(seed)
    shape = GPTConfig(n_layer=BLOCK + 1, n_head=config.n_head, n_embd=config.n_embd, block_size=config.block_size,
                      attention_impl="torch", **changes)
    teacher, student = Attention(shape, BLOCK), Attention(shape, BLOCK)
    with torch.no_grad():
        for p in teacher.parameters():
            p.normal_(std=config.n_embd**-0.5) if p.dim() == 2 else p.zero_()
        student.load_state_dict(teacher.state_dict())
        student.c_attn.bias += NOISE * torch.randn_like(student.c_attn.bias)
    return teacher.to(device), student.to(device)


def measure(teacher, student, start, x, target):
    """Of the biases of queries, keys and values: norm, distance to the teacher, way from the start; and the output's error."""
    with torch.no_grad():
        bias, origin, first = (b.view(3, -1) for b in (student.c_attn.bias, teacher.c_attn.bias, start))
        error = (student(x, {}) - target).square().mean() / target.square().mean()
        return {"norm": bias.norm(dim=1).tolist(), "distance": (bias - origin).norm(dim=1).tolist(),
                "moved": (bias - first).norm(dim=1).tolist(), "error": error.item()}


def learn(config, arm, seed, device):
    """{"step": [...], "norm": [[q, k, v], ...], "distance", "moved", "error"} of one student."""
    dtype, backend, changes = ARMS[arm]
    teacher, student = pair(config, changes, seed, device)
    start = student.c_attn.bias.detach().clone()
    steps = max(1, config.max_tokens // (config.micro_batch_size * config.block_size))
    optimizer = torch.optim.AdamW(student.parameters(), lr=config.learning_rate, betas=(config.beta1, config.beta2),
                                  weight_decay=0.0)
    data, found = torch.Generator().manual_seed(seed), []
    for step in range(steps + 1):
        x = torch.randn(config.micro_batch_size, config.block_size, config.n_embd, generator=data).to(device)
        x = F.layer_norm(x, x.shape[-1:])
        with torch.no_grad():
            target = teacher(x, {})
        if step % max(1, steps // POINTS) == 0 or step == steps:
            found.append({"step": step, **measure(teacher, student, start, x, target)})
        with hardware.autocast(device, dtype), sdpa_kernel(backend):
            y = student(x, {})
        F.mse_loss(y.float(), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: [f[key] for f in found] for key in found[0]}


def cached(folder, config, arm, seed, device):
    """learn(), or what it found the last time with the same settings."""
    path = os.path.join(folder, f"{arm.replace(', ', '_').replace(' ', '_')}_seed{seed}.json")
    keys = ("n_embd", "n_head", "block_size", "micro_batch_size", "max_tokens", "learning_rate", "beta1", "beta2")
    settings = {**{k: getattr(config, k) for k in keys}, "device": device}
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
        if found["settings"] == settings:
            return found["curves"]
    curves = learn(config, arm, seed, device)
    os.makedirs(folder, exist_ok=True)
    checkpoint.write_json(path, {"settings": settings, "curves": curves})
    return curves


def summary(curves):
    """Means over seeds: the key bias's distance at start and end, the way it went, the output's error at start and end."""
    def mean(key, point, part=None):
        return float(np.mean([c[key][point] if part is None else c[key][point][part] for c in curves]))
    return {"distance_start": mean("distance", 0, 1), "distance_end": mean("distance", -1, 1), "moved": mean("moved", -1, 1),
            "norm_end": mean("norm", -1, 1), "error_start": mean("error", 0), "error_end": mean("error", -1)}


def finding(arms):
    """What came out, in one sentence; arms {name: summary}."""
    diverged = [a for a, s in arms.items() if not s["error_end"] < s["error_start"]]
    exact, fused, plain = (arms[a]["moved"] for a in ("float32", "bf16 fused", "bf16 plain"))
    text = "Here: " + (f"{', '.join(diverged)} diverged" if diverged else "nothing diverged in this many steps at this size")
    text += (f"; the key bias, whose gradient is rounding alone, moved {fused:.3f} in fused bf16, {plain:.3f} in plain bf16 "
             f"and {exact:.4f} in float32")
    if fused > 2 * exact:
        away = arms["bf16 fused"]["distance_end"] - arms["bf16 fused"]["distance_start"]
        text += f", so the runaway's start is there ({away:+.3f} of distance to the teacher)"
    else:
        text += ", so no runaway is seen"
    for name in ("cosine", "spectral"):
        s = arms[f"bf16 fused, {name}"]
        cured = s["distance_end"] < s["distance_start"] and s["error_end"] < s["error_start"]
        text += (f"; {name} {'cures' if cured else 'does not cure'} it (distance {s['distance_start']:.2f} to "
                 f"{s['distance_end']:.2f})")
    return text + "."


def draw(path, curves):
    figure, axes = style.pyplot().subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    for color, (arm, seeds) in zip(style.COLORS, curves.items()):
        steps = seeds[0]["step"]
        moved, distance = (np.array([c[key] for c in seeds])[:, :, 1] for key in ("moved", "distance"))  # (seeds, points)
        for ax, values in zip(axes, (moved, distance / distance[:, :1], np.array([c["error"] for c in seeds]))):
            ax.plot(steps, values.mean(0), color=color, label=arm)
            ax.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
    axes[0].set_title("Key bias: way from its start")
    axes[0].set_yscale("log")
    axes[1].set_title("Key bias: distance to the teacher (start = 1)")
    axes[2].set_title("Squared error of the output, relative")
    axes[2].set_yscale("log")
    axes[2].yaxis.set_minor_formatter(lambda *_: "")
    for ax in axes:
        ax.set_xlabel("step")
    axes[1].legend()
    style.save(figure, path)


def main(argv=None):
    args, config = parse(argv, "attention_divergence", __doc__, seeds=2, settings=SETTINGS)
    device, curves = hardware.pick_device(config.device), {}
    for arm in ARMS:
        curves[arm] = [cached(args.out, config, arm, seed, device) for seed in range(args.seeds)]
        print(f"{arm}: " + ", ".join(f"{k} {v:.4g}" for k, v in summary(curves[arm]).items()), flush=True)
    arms = {arm: summary(seeds) for arm, seeds in curves.items()}
    norms = {arm: dict(zip("qkv", seeds[0]["norm"][-1])) for arm, seeds in curves.items()}
    path = write(args, config, PAPER, finding(arms), {"noise": NOISE, "arms": arms, "bias_norms_first_seed": norms})
    draw(path, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
