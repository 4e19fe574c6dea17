"""
What a run will need, before it is run: parameters, memory per process, tokens, steps, FLOPs and time.

    python train.py config/gpt_1_3b.py --plan                                # one device
    python train.py config/gpt_1_3b.py --plan --devices=8 --kind=A100        # --mfu=0.35: another guess at the speed

Formulas, no measurement: parameters and bytes are exact for this code (tests/test_plan.py holds them against real models,
real optimizer state and the tensors that autograd really saves); time is FLOPs over an assumed share of the peak.

Letters: P parameters, L layers, C channels, V vocabulary, n = micro-batch x T tokens of one forward pass.
"""

import configurator
import schedule
from configurator import ConfigError
from rightbatch.kernels import head_loss
from system import terminal
from trainer import hardware, start

# dense bf16 FLOP/s (V100: fp16) and bytes of memory, as the vendors' data sheets give them
KINDS = {"V100": (125e12, 32e9), "A100": (312e12, 80e9), "A100-40G": (312e12, 40e9), "A6000": (155e12, 48e9),
         "L4": (121e12, 24e9), "RTX4090": (165e12, 24e9), "L40S": (362e12, 48e9), "H100": (989e12, 80e9),
         "H200": (989e12, 141e9), "B200": (2250e12, 180e9)}
MFU = 0.35  # an assumption, not measured by us: small models and slow networks reach less, tuned code more
GPT2_VOCABULARY = 50257
OPTIONS = {"devices": 1, "kind": "A100", "mfu": MFU}


def kind_of(name):
    """A kind of device by its name in any case."""
    if name.lower() not in (lower := {kind.lower(): kind for kind in KINDS}):
        raise ConfigError(f"command line: --kind={name}: expected one of {', '.join(KINDS)}")
    return lower[name.lower()]


def unit_parameters(c, vocab_size):
    """(parameters of one block, of everything outside the blocks)."""
    C, norm = c.n_embd, c.n_embd * (2 if c.bias and c.norm == "layernorm" else 1)
    matrices = 12 * C * C  # QKV 3, attention out 1, MLP 4 and 4
    biases = 9 * C if c.bias else 0
    outside = vocab_size * C * (1 if c.tie_weights else 2) + c.block_size * C + norm
    return matrices + biases + 2 * norm, outside


def parameters(c, vocab_size):
    block, outside = unit_parameters(c, vocab_size)
    return c.n_layer * block + outside


def block_activations(c, n, half):
    """Bytes that one block keeps for its backward pass; `half` is the size of an activation, 4, or 2 under autocast.

    float32: the residual stream before both norms, mean and rstd of each row, the attention's log-sum-exp.
    half:    both norms' outputs 2, Q K V 3, attention's output 1, GELU's input 4 and output 4."""
    stats = 1 if c.norm == "rmsnorm" else 2
    return n * (4 * 2 * c.n_embd + 4 * 2 * stats + 4 * c.n_head + half * 14 * c.n_embd)


def chunked(c, vocab_size):
    """Whether every step makes logits in chunks (head_loss.py): large ones, and not gns=exact, which holds them whole."""
    return c.gns != "exact" and head_loss.worth_it(c.micro_batch_size * c.block_size, vocab_size, "cpu")


def activations(c, vocab_size, half, checkpointing):
    """{part: bytes kept for the backward pass of one micro-batch}. Cosine attention and dropout keep a little more."""
    n = c.micro_batch_size * c.block_size
    one = block_activations(c, n, half)
    stats = 1 if c.norm == "rmsnorm" else 2
    head = n * (4 * c.n_embd + 4 * stats + half * c.n_embd + 2 * 8)  # final norm, its output or that one's gradient, ids
    # softmax; or, where no logits are kept, the head's weight gradient, which the forward pass makes
    head += 4 * vocab_size * c.n_embd if chunked(c, vocab_size) else 4 * n * vocab_size
    if checkpointing == "block":  # each block keeps its input; one at a time is recomputed, which keeps that block's share
        return {"blocks": c.n_layer * 4 * n * c.n_embd, "recomputed": one - 4 * n * c.n_embd, "head": head}
    return {"blocks": c.n_layer * one, "recomputed": 0, "head": head}


def working_memory(c, vocab_size, half, room):
    """What comes and goes at the widest place, the logits: themselves (twice under autocast) and their gradients, or one chunk
    of them, which is larger on a device with more room."""
    n = c.micro_batch_size * c.block_size
    if chunked(c, vocab_size):
        rows = head_loss.rows_per_chunk(n, vocab_size, head_loss.cuda_chunk_bytes(room), half)
        return half * rows * head_loss.padded(vocab_size)
    return c.micro_batch_size * c.block_size * vocab_size * (4 if half == 4 else half + 4 + half)


def memory(c, vocab_size, devices, parallel, half):
    """{part: bytes on one process}, activations apart."""
    P = parameters(c, vocab_size)
    block, outside = unit_parameters(c, vocab_size)
    matrices = c.n_layer * 12 * c.n_embd**2 + vocab_size * c.n_embd
    if parallel == "ddp" or devices == 1:
        return {"weights": 4 * P, "gradients": 4 * P, "optimizer": 8 * P, "weights in bf16": 2 * matrices if half == 2 else 0}
    # gradients travel once per step: whole ones until then
    accumulates = max(schedule.kind(c).sizes(c), default=float("inf")) > c.micro_batch_size * devices
    shard = -(-P // devices)
    return {"weights": 4 * shard, "gradients": 4 * shard + (4 * P if accumulates else 0), "optimizer": 8 * shard,
            "gathered units": 4 * outside + 2 * half * block + (2 * vocab_size * c.n_embd if half == 2 else 0)}


def check_memory(c, vocab_size, devices, device):
    """ConfigError where weights, gradients and optimizer alone are more than the machine has: the system would end the process,
    without a word, after a while."""
    need = sum(memory(c, vocab_size, devices, c.parallel, 4).values()) * (devices if device == "cpu" else 1)
    room = hardware.total_memory(device)
    if room and need > room:
        raise ConfigError(f"n_layer={c.n_layer}, n_embd={c.n_embd}: weights, gradients and optimizer take {size(need)}, this "
                          f"machine has {size(room)}: a smaller model, or more devices with parallel=fsdp")


def flops_per_token(c, vocab_size):
    """As GPT.flops_per_token: 6 per weight that multiplies and 6 T C per block for causal attention."""
    return 6 * (c.n_layer * 12 * c.n_embd**2 + vocab_size * c.n_embd) + 6 * c.n_layer * c.block_size * c.n_embd


def recomputed_flops_per_token(c):
    """A checkpointed block runs forward twice: a third of its forward and backward again."""
    if c.activation_checkpointing == "none":
        return 0
    return 2 * c.n_layer * (12 * c.n_embd**2 + c.block_size * c.n_embd)


def steps(c, devices):
    """(steps, tokens, smallest and largest batch) of the whole run, by walking along its batch schedule; where that follows
    what the run measures, the fewest steps there can be."""
    end = c.end_tokens()
    if end / (min(schedule.kind(c).sizes(c), default=1) * c.block_size) > 1e7:
        raise ConfigError(f"max_tokens={c.max_tokens}: more than ten million steps, which is no plan")
    return configurator.batch_schedule(c, c.micro_batch_size * devices).walk(end, c.block_size)


def vocabulary(config):
    """(size, where it is known from). A plan needs no data."""
    from trainer import batches
    if batches.is_prepared(batches.folder_of(config.dataset)):
        return batches.Dataset(config.dataset, config.block_size).vocab_size, "from the dataset"
    if config.dataset == "stdlib":
        return 256, "bytes"
    return GPT2_VOCABULARY, "GPT-2's, assumed: the dataset is not prepared yet"


def size(n):
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def length(seconds):
    days, hours = seconds / 86400, seconds / 3600
    return f"{days:.1f} days" if days >= 2 else f"{hours:.1f} hours" if hours >= 1 else f"{seconds / 60:.1f} minutes"


def text(c, devices, kind, mfu):
    """The plan in words."""
    V, known = vocabulary(c)
    peak, room = KINDS[kind]
    half = 4 if c.dtype == "float32" else 2
    P, (block, outside) = parameters(c, V), unit_parameters(c, V)
    quantum = c.micro_batch_size * devices
    n_steps, tokens, (least, most) = steps(c, devices)
    flops, extra = flops_per_token(c, V) * tokens, recomputed_flops_per_token(c) * tokens
    lines = [f"Parameters   {P:,}: {c.n_layer} blocks of {block:,}, {outside:,} outside; vocabulary {V:,} ({known})",
             f"Tokens       {tokens:,} in {'at least ' if schedule.kind(c).measured else ''}{n_steps:,} steps of {least} to "
             f"{most} sequences of {c.block_size} ({c.batch_schedule}); {quantum} in one pass of {devices} x "
             f"{c.micro_batch_size}, accumulation {least // quantum} to {most // quantum}",
             f"FLOPs        {flops:.3g} ({flops_per_token(c, V):.3g} a token)"
             + (f", and {extra:.3g} to recompute blocks" if extra else ""),
             f"Time         {length((flops + extra) / (devices * peak * mfu))} on {devices} x {kind}, if it reaches {mfu:.0%} "
             f"of its {peak / 1e12:.0f} TFLOP/s (an assumption: --mfu; a short run measures it)",
             "",
             f"Memory of one process, {'float32' if half == 4 else 'bf16 autocast, float32 weights'}, micro-batch "
             f"{c.micro_batch_size}; {kind} has {size(room)}"]
    modes = ["ddp"] if devices == 1 else ["ddp", "fsdp"]
    parts = {mode: memory(c, V, devices, mode, half) for mode in modes}

    def row(name, cells, mark=""):
        lines.append(f"  {name:<28}" + "".join(f"{cell:>14}" for cell in cells) + mark)
    row("", ["one process"] if devices == 1 else modes)
    for name in dict.fromkeys(name for mode in modes for name in parts[mode]):
        row(name, [size(parts[mode].get(name, 0)) for mode in modes])
    work = working_memory(c, V, half, room)
    row("logits and their gradient", [size(work)] * len(modes))
    for checkpointing, name in (("none", "activations"), ("block", "activations, checkpointed")):
        kept = sum(activations(c, V, half, checkpointing).values())
        row(name, [size(kept)] * len(modes))
        totals = [kept + work + sum(parts[mode].values()) for mode in modes]
        row("= in all", [size(total) + ("" if total < 0.95 * room else " !") for total in totals],
            " <- this config" if checkpointing == c.activation_checkpointing else "")
    lines.append("  (! does not fit, with 5% to spare for the allocator, the libraries and the communication buffers)")
    if devices > 1 and most > quantum:
        lines.append("  fsdp: gradients travel once per step, so between micro-steps each process holds whole ones; batches of "
                     f"{quantum} (no accumulation) would not need them")
    return "\n".join(lines)


def main(argv):
    """argv as for train.py, with --plan and its own options."""
    parser = terminal.Parser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--plan", action="store_true")
    for name, default in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options, rest = parser.parse_known_args(argv)
    if options.devices < 1 or not 0 < options.mfu <= 1:
        raise ConfigError("command line: --devices must be at least 1, --mfu above 0 and at most 1")
    kind = kind_of(options.kind)
    from trainer import distributed
    config = start.parse(rest, options.devices)
    distributed.check(config, options.devices, "cuda")
    print(text(config, options.devices, kind, options.mfu))
    return 0
