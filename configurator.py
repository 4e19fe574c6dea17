"""
The settings of a run: defaults, then a config file, then --key=value.

    python train.py                                        # config/quickstart.py
    python train.py config/gpt_111m.py --micro_batch_size=4 --max_tokens=1e8
    python train.py --help                                 # every key, its default and the reason for it

A config file is plain Python assignments, run in a namespace of its own that starts with the defaults, so
`batch_size = 5 * 8` and `min_lr = learning_rate / 10` work. A name that is no key fails, from a file as from the
command line, unless it starts with an underscore (those are the file's own variables).
"""

import ast
import dataclasses
import difflib
import math
import os
import sys
import types
from dataclasses import dataclass, field

import schedule

DEFAULT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "quickstart.py")


class ConfigError(Exception):
    """One line for the user: which key, which value, what to do about it."""


def opt(default, why, choices=None):
    return field(default=default, metadata={"why": why, "choices": choices})


@dataclass
class Config:
    # -- run
    out_dir: str = opt("out/quickstart", "run folder: config.json, log.jsonl, ckpt.pt, report.png")
    dataset: str = opt("stdlib", "folder under data/ (or a path) with train.bin, val.bin, meta.json; "
                                 "stdlib is embedded and prepares itself")
    seed: int = opt(0, "weights, dropout and data order all follow from it")
    device: str = opt("auto", "cuda if there is one, then mps, then cpu", ("auto", "cpu", "cuda", "mps"))
    dtype: str = opt("auto", "bfloat16 autocast where the device is fast at it, else float32; "
                             "float16 trains with loss scaling", ("auto", "float32", "bfloat16", "float16"))
    tf32: bool = opt(False, "cuda: float32 matrix products in TF32, faster, with 10 bits of mantissa")
    compile: str = opt("auto", "torch.compile on cuda; on a CPU it brought nothing", ("auto", "True", "False"))
    parallel: str = opt("ddp", "with several processes (torchrun): ddp holds everything on each, fsdp shards weights, "
                               "gradients and optimizer over them (FSDP2), for models that do not fit", ("ddp", "fsdp"))
    # -- model
    n_layer: int = opt(4, "blocks; this size trains to readable code in minutes on a laptop")
    n_head: int = opt(4, "attention heads per block")
    n_embd: int = opt(128, "width; a multiple of n_head")
    block_size: int = opt(128, "context in tokens; one example of a batch is one window of this length")
    bias: bool = opt(True, "biases in linears and norms, as in GPT-2 and the paper")
    dropout: float = opt(0.0, "0 for pretraining; 0.1 and more when a small corpus is seen many times")
    norm: str = opt("layernorm", "rmsnorm has no bias and no mean; both give per-example norms",
                    ("layernorm", "rmsnorm"))
    tie_weights: bool = opt(True, "one matrix for token embedding and head, as in GPT-2")
    cos_attn: tuple = opt((), "blocks with cosine attention, e.g. (1,): bounds the logits where bf16 diverges")
    spectral_qkv: tuple = opt((), "blocks whose QKV matrix is divided by its spectral norm: the other cure")
    activation_checkpointing: str = opt("none", "block recomputes each block in backward: less memory, a third more "
                                                "compute", ("none", "block"))
    # -- batch
    micro_batch_size: int = opt(8, "sequences in one forward pass: what fits into memory and is fast")
    batch_size: int = opt(32, "sequences in one optimizer step (the last, if scheduled); a multiple of micro_batch_size "
                              "x processes")
    batch_schedule: str = opt("linear", "linear: from batch_size_start to batch_size over the run, as in the paper; gns: "
                                        "follows the noise scale between the two", schedule.KINDS)
    batch_size_start: int = opt(8, "first batch of linear, smallest of gns")
    batch_steps: str = opt("", "for steps: tokens:batch, e.g. 0:32, 50M:64, 200M:128 (k, M, B for thousands to billions)")
    batch_file: str = opt("", "for file: a text file with lines of tokens and batch, straight lines between them; edit it "
                              "while the run goes on")
    batch_gns_factor: float = opt(1.0, "for gns: batch over noise scale; 1 balances tokens and steps, less reads fewer tokens "
                                       "in more steps, more the other way round")
    batch_gns_margin: float = opt(0.1, "for gns: the interval must clear the batch by this share before it moves")
    batch_gns_dwell_tokens: int = opt(0, "for gns: at least so many tokens between moves; 0 = gns_half_life_tokens, when half "
                                         "of the average is new")
    batch_shrink: bool = opt(False, "for gns: may the batch also shrink; off because the noise scale grows in most runs")
    # -- optimisation; everything is counted in tokens, since steps change size
    max_tokens: int = opt(2_500_000, "the end of the run: about two minutes on two CPU cores")
    warmup_tokens: int = opt(125_000, "linear from 0; 5% is ample at this size")
    decay_tokens: int = opt(0, "where the learning rate reaches min_lr; 0 = max_tokens")
    learning_rate: float = opt(2e-3, "peak; small models like more than the usual 3e-4")
    min_lr: float = opt(2e-4, "a tenth of the peak, as in the paper; 0 decays to zero")
    lr_decay: str = opt("linear", "shape after the warm-up", ("linear", "cosine", "none"))
    lr_scaling: str = opt("none", "learning rate times sqrt(k) (Adam) or k (SGD) for a batch k times the reference; none is "
                                  "what the paper does", ("none", "sqrt", "linear"))
    lr_reference_batch: int = opt(0, "the batch for which learning_rate, beta2 and weight_decay are meant; 0 = batch_size")
    weight_decay: float = opt(0.1, "on matrices only; vectors (norms, biases) are not decayed")
    beta1: float = opt(0.9, "AdamW's first moment")
    beta2: float = opt(0.95, "AdamW's second moment; shorter than 0.999 because batches are large")
    beta2_scaling: str = opt("none", "tokens holds beta2's half-life in tokens, beta2^k at k times the reference batch",
                             ("none", "tokens"))
    weight_decay_scaling: str = opt("none", "tokens holds the time, in tokens, over which weights decay: weight_decay times k "
                                            "over the learning rate's factor", ("none", "tokens"))
    grad_clip: float = opt(1.0, "largest gradient norm; 0 turns clipping off, the norm is logged either way")
    # -- noise scale
    gns: str = opt("norm", "norm: from the norm layers, nearly free; exact: every parameter, layer by layer, slower",
                   ("off", "norm", "exact"))
    gns_half_life_tokens: int = opt(250_000, "averages forget half in so many tokens (or a fifth of those seen, if less): "
                                             "longer is steadier, later")
    gns_calibrate_tokens: int = opt(25_000, "one exact step in so many tokens measures the factor from the norm layers' "
                                            "noise scale to the whole model's; 0 = never")
    gns_adam: bool = opt(True, "also the noise scale in the metric that Adam steps in (each coordinate over sqrt(v))")
    gns_crosscheck: bool = opt(False, "also the classical estimate, micro-batch gradients against the whole: noisier, "
                                      "and it holds a second copy of the gradient")
    grad_stats: bool = opt(False, "at logged steps also the gradient's coherence, Adam's signal to noise and the size of the "
                                  "update (grad_stats.py); changes no bit of the training, holds two to three more gradients")
    # -- evaluation, log, checkpoint
    eval_tokens: int = opt(250_000, "evaluate every so many tokens; 0 = only at the end")
    eval_iters: int = opt(64, "validation windows per evaluation: a fixed, evenly spaced set, the same for every run")
    log_interval: int = opt(10, "steps between log lines; values wait on the device until then")
    checkpoint_tokens: int = opt(1_000_000, "save every so many tokens (and at the end, on Ctrl-C and on SIGTERM)")
    stop_tokens: int = opt(0, "leave here with a checkpoint, so that --resume=True can go on; 0 = at max_tokens")
    branch_from: str = opt("", "a run folder: start from its checkpoint, with another batch or learning rate")
    resume: str = opt("False", "True continues out_dir from its checkpoint; auto does if there is one",
                      ("False", "True", "auto"))
    wandb_log: bool = opt(False, "also log to wandb; offline, without asking, where there is no key")
    wandb_project: str = opt("rightbatch", "wandb's project")
    wandb_run_name: str = opt("", "wandb's run name; empty = the last part of out_dir")


FIELDS = {f.name: f for f in dataclasses.fields(Config)}

# what people coming from other trainers type, and what we call it
ALIASES = {
    "gradient_accumulation_steps": "batch_size and micro_batch_size (accumulation is batch_size / micro_batch_size)",
    "grad_accum_steps": "batch_size and micro_batch_size (accumulation is batch_size / micro_batch_size)",
    "max_iters": "max_tokens", "warmup_iters": "warmup_tokens", "lr_decay_iters": "decay_tokens",
    "eval_interval": "eval_tokens", "init_from": "resume", "decay_lr": "lr_decay", "lr": "learning_rate",
    "vocab_size": "dataset (its meta.json has the vocabulary)", "block_len": "block_size", "total_batch_size": "batch_size",
    "device_batch_size": "micro_batch_size", "always_save_checkpoint": "checkpoint_tokens",
}


def unknown_key(name, where):
    near = ALIASES.get(name) or next(iter(difflib.get_close_matches(name, FIELDS, n=1, cutoff=0.5)), None)
    hint = f"did you mean {near}?" if near else "--help lists all keys"
    return ConfigError(f"{where}: unknown key '{name}': {hint}")


def coerce(name, value, where):
    """The value in its key's type. Integers do for floats, whole floats (1e6) for integers, nothing else is bent."""
    f = FIELDS[name]
    choices = f.metadata["choices"]
    if f.type in (str, "str"):
        if isinstance(value, bool) and choices and str(value) in choices:
            value = str(value)  # resume=True in a file is the boolean
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name}={value!r} must be a string")
        if choices and value not in choices:
            near = difflib.get_close_matches(value, choices, n=1)
            raise ConfigError(f"{where}: {name}={value!r} must be one of {', '.join(choices)}"
                              + (f"; did you mean {near[0]}?" if near else ""))
        return value
    if f.type in (bool, "bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {name}={value!r} must be True or False")
        return value
    if f.type in (tuple, "tuple"):
        value = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(value, (tuple, list)) or not all(type(v) is int for v in value):
            raise ConfigError(f"{where}: {name}={value!r} must be a tuple of block numbers such as (1,) or (0, 2)")
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where}: {name}={value!r} must be a number")
    if f.type in (int, "int"):
        if value != value or value in (math.inf, -math.inf) or value != int(value):
            raise ConfigError(f"{where}: {name}={value!r} must be a whole number")
        return int(value)
    if not math.isfinite(value):
        raise ConfigError(f"{where}: {name}={value!r} must be a finite number")
    return float(value)


def read_file(path):
    """{key: value} of every key after a config file has run over the defaults."""
    try:
        with open(path, encoding="utf-8") as f:
            source = f.read()
    except OSError as e:
        near = difflib.get_close_matches(os.path.basename(path), _config_files(), n=1, cutoff=0.4)
        raise ConfigError(f"config file {path}: {e.strerror}" + (f"; did you mean config/{near[0]}?" if near else "")) from None
    namespace = {name: f.default for name, f in FIELDS.items()}
    try:
        exec(compile(source, path, "exec"), namespace)
    except Exception as e:
        raise ConfigError(f"config file {path}: {type(e).__name__}: {e}") from None
    values = {}
    for name, value in namespace.items():
        if name in FIELDS:
            values[name] = coerce(name, value, f"config file {path}")
        elif not name.startswith("_") and not isinstance(value, types.ModuleType):
            raise unknown_key(name, f"config file {path}")
    return values


def _config_files():
    folder = os.path.dirname(DEFAULT_FILE)
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def parse(argv):
    """The checked Config of a command line: [config_file] [--key=value ...]."""
    files = [a for a in argv if not a.startswith("--")]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, got {' '.join(files)} (options are --key=value)")
    values = read_file(files[0] if files else DEFAULT_FILE)
    for arg in argv:
        if not arg.startswith("--"):
            continue
        name, eq, text = arg[2:].partition("=")
        if name not in FIELDS:
            raise unknown_key(name, "command line")
        if not eq:
            raise ConfigError(f"command line: {arg} needs a value: --{name}=...")
        value = text
        if FIELDS[name].type not in (str, "str"):
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                value = text  # coerce says what was expected
        values[name] = coerce(name, value, "command line")
    config = Config(**values)
    check(config)
    return config


def check(c):
    """What can be known to be impossible before any file is touched."""
    def need(ok, name, expected):
        if not ok:
            raise ConfigError(f"{name}={getattr(c, name)!r}: {expected}")

    for name in ("n_layer", "n_head", "n_embd", "block_size", "micro_batch_size", "batch_size", "batch_size_start",
                 "max_tokens", "gns_half_life_tokens", "log_interval", "eval_iters"):
        need(getattr(c, name) >= 1, name, "must be at least 1")
    for name in ("warmup_tokens", "decay_tokens", "gns_calibrate_tokens", "eval_tokens", "checkpoint_tokens",
                 "learning_rate", "min_lr", "weight_decay", "grad_clip", "seed", "batch_gns_margin",
                 "batch_gns_dwell_tokens", "lr_reference_batch", "stop_tokens"):
        need(getattr(c, name) >= 0, name, "must not be negative")
    need(bool(c.out_dir), "out_dir", "must name a folder")
    need(c.n_embd % c.n_head == 0, "n_embd", f"must be divisible by n_head={c.n_head}: heads share the width evenly")
    need(0 <= c.dropout < 1, "dropout", "must be at least 0 and below 1")
    for name in ("beta1", "beta2"):
        need(0 <= getattr(c, name) < 1, name, "must be at least 0 and below 1")
    need(c.min_lr <= c.learning_rate, "min_lr", f"must not exceed learning_rate={c.learning_rate}")
    need(c.warmup_tokens <= c.max_tokens, "warmup_tokens", f"is longer than the run, max_tokens={c.max_tokens}")
    need(c.decay_tokens == 0 or c.decay_tokens >= c.warmup_tokens, "decay_tokens",
         f"must not end before warmup_tokens={c.warmup_tokens} (0 = max_tokens)")
    for name in ("cos_attn", "spectral_qkv"):
        need(all(0 <= i < c.n_layer for i in getattr(c, name)), name, f"blocks are numbered 0 to {c.n_layer - 1}")
    sizes = {"constant": ["batch_size"], "steps": [], "file": []}.get(c.batch_schedule, ["batch_size", "batch_size_start"])
    for name in sizes:
        value, micro = getattr(c, name), c.micro_batch_size
        need(value >= micro, name, f"is smaller than micro_batch_size={micro}: raise it or lower micro_batch_size")
        need(value % micro == 0, name, f"is not a multiple of micro_batch_size={micro}: "
                                       f"take {value // micro * micro} or {(value // micro + 1) * micro}")
    need(c.batch_schedule not in ("linear", "gns") or c.batch_size_start <= c.batch_size, "batch_size_start",
         f"must not exceed batch_size={c.batch_size}, which the schedule ends with")
    if c.batch_schedule == "steps":
        try:
            schedule.parse_steps(c.batch_steps, c.micro_batch_size)
        except ValueError as e:
            need(False, "batch_steps", str(e))
    need(c.batch_schedule != "file" or c.batch_file, "batch_file", "batch_schedule=file needs the path of one")
    need(c.batch_gns_factor > 0, "batch_gns_factor", "must be above 0")
    need(c.batch_schedule != "gns" or c.gns != "off", "gns", "batch_schedule=gns needs a noise scale: norm or exact")
    need(c.batch_schedule != "gns" or c.batch_size_start >= 2, "batch_size_start",
         "batch_schedule=gns needs at least 2: a step of one example has no noise scale")


def help_text():
    lines = [__doc__.strip(), "", "Keys:"]
    for name, f in FIELDS.items():
        default = f"{f.default!r}"
        choices = f" [{' | '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        lines.append(f"  --{name}={default}{choices}\n        {f.metadata['why']}")
    return "\n".join(lines)


def die(error):
    """The one line that a user sees for an expected failure; exit code 2."""
    if os.environ.get("LOCAL_RANK", "0") == "0":  # with several processes one of each machine says it
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
