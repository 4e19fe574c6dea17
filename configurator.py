"""
The settings of a run: defaults, then a config file, then --key=value. A run that goes on has those of its folder instead.

    python train.py                                        # config/quickstart.py
    python train.py config/gpt_111m.py --micro_batch_size=4 --max_tokens=100M
    python train.py out/gpt_111m                           # go on with that run, with its own settings
    python train.py --branch_from=out/gpt_111m --batch_size=240       # a new run from its checkpoint, with its settings
    python train.py --help                                 # every key, its default and the reason for it

--key value does as well as --key=value; k, M and B are thousands, millions and billions; true, yes and 1 are True.

A config file is plain Python assignments, run in a namespace of its own that starts with the defaults, so
`batch_size = 5 * 8` and `min_lr = learning_rate / 10` work. A name that is no key fails, from a file as from the
command line, unless it starts with an underscore (those are the file's own variables).
"""

import ast
import dataclasses
import difflib
import json
import math
import os
import re
import sys
import types
from dataclasses import dataclass, field

import schedule
from rightbatch.decision import OBJECTIVES
from trainer.optimizer import OPTIMIZERS

DEFAULT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "quickstart.py")


class ConfigError(Exception):
    """One line for the user: which key, which value, what to do about it."""


# whether a key may change in the life of a run. A branch may change the batch, the learning rate and what goes with them
FIXED, BRANCH, FREE = CHANGES = ("fixed", "branch", "free")
CHANGE_WORDS = {FIXED: "", BRANCH: "(may change on a branch)", FREE: "(may change on resume)"}

# (test, what it asks for)
AT_LEAST_1 = (lambda v: v >= 1, "must be at least 1")
UP_TO_A_MILLION = (lambda v: 1 <= v <= 2**20, "must be at least 1 and at most 2^20")
NOT_NEGATIVE = (lambda v: v >= 0, "must not be negative")
ABOVE_0 = (lambda v: v > 0, "must be above 0")
BELOW_1 = (lambda v: 0 <= v < 1, "must be at least 0 and below 1")
NAME_LENGTH = 60  # characters of a run's folder: what is longer says "more", and config.json has it
HERE_ONLY = ("out_dir", "resume", "stop_tokens")  # of one start alone: a run that goes on does not take them from its folder
LIMIT = 2**63  # of whole numbers: what files and torch hold


def opt(default, change, why, choices=None, valid=None):
    """A key: FIXED, BRANCH or FREE; the reason for its default; its values, as a list or as a test."""
    return field(default=default, metadata={"change": change, "why": why, "choices": choices, "valid": valid})


@dataclass
class Config:
    # -- run
    out_dir: str = opt("", FREE, "run folder: config.json, log.jsonl, ckpt.pt, report.png; empty = in out/, called after the "
                                 "config file and what was typed, with a number where that is taken")
    dataset: str = opt("stdlib", FIXED, "folder under data/ (or a path) with train.bin, val.bin, meta.json; stdlib is "
                                        "embedded and prepares itself")
    init_from: str = opt("", FIXED, "start from a GPT-2 of Hugging Face's: a folder with config.json and model.safetensors, or "
                                    "a name in its cache on this disk, such as gpt2. The model's shape is then its own; a "
                                    "smaller block_size cuts its positions off")
    seed: int = opt(0, BRANCH, "weights, dropout and data order all follow from it", valid=NOT_NEGATIVE)
    device: str = opt("auto", FREE, "cuda if there is one, then mps, then cpu", ("auto", "cpu", "cuda", "mps"))
    dtype: str = opt("auto", FIXED, "bfloat16 autocast where the device is fast at it, else float32; float16 trains with loss "
                                    "scaling", ("auto", "float32", "bfloat16", "float16"))
    tf32: bool = opt(False, FIXED, "cuda: float32 matrix products in TF32, faster, with 10 bits of mantissa")
    deterministic: bool = opt(False, FREE, "cuda: the same bits in every run and after a resume; slower, and in float32 "
                                           "attention holds all T x T numbers. A CPU always gives the same bits")
    compile: str = opt("auto", FREE, "torch.compile on cuda; on a CPU it brought nothing", ("auto", "True", "False"))
    parallel: str = opt("ddp", FREE, "with several processes (torchrun): ddp holds everything on each, fsdp shards weights, "
                                     "gradients and optimizer over them (FSDP2), for models that do not fit", ("ddp", "fsdp"))
    # -- model
    n_layer: int = opt(4, FIXED, "blocks; this size trains to readable code in minutes on a laptop", valid=UP_TO_A_MILLION)
    n_head: int = opt(4, FIXED, "attention heads per block", valid=AT_LEAST_1)
    n_embd: int = opt(128, FIXED, "width; a multiple of n_head", valid=AT_LEAST_1)
    block_size: int = opt(128, FIXED, "context in tokens; one example of a batch is one window of this length",
                          valid=AT_LEAST_1)
    bias: bool = opt(True, FIXED, "biases in linears and norms, as in GPT-2 and the paper")
    dropout: float = opt(0.0, FIXED, "0 for pretraining; 0.1 and more when a small corpus is seen many times", valid=BELOW_1)
    norm: str = opt("layernorm", FIXED, "rmsnorm has no bias and no mean; both give per-example norms",
                    ("layernorm", "rmsnorm"))
    gelu: str = opt("exact", FIXED, "tanh is what GPT-2 was trained with, and slower on a CPU; init_from sets it",
                    ("exact", "tanh"))
    tie_weights: bool = opt(True, FIXED, "one matrix for token embedding and head, as in GPT-2")
    cos_attn: tuple = opt((), FIXED, "blocks with cosine attention, e.g. (1,): bounds the logits where bf16 diverges")
    spectral_qkv: tuple = opt((), FIXED, "blocks whose QKV matrix is divided by its spectral norm: the other cure")
    activation_checkpointing: str = opt("none", FREE, "block recomputes each block in backward: less memory, a third more "
                                                      "compute", ("none", "block"))
    # -- batch
    micro_batch_size: int = opt(8, FREE, "sequences in one forward pass: what fits into memory and is fast; less, and said so, "
                                         "where batches would not be whole on several devices", valid=UP_TO_A_MILLION)
    batch_size: int = opt(32, BRANCH, "sequences in one optimizer step (the last, if scheduled); a multiple of "
                                      "micro_batch_size x processes", valid=AT_LEAST_1)
    batch_schedule: str = opt("linear", BRANCH, "linear: from batch_size_start to batch_size over the run, as in the paper; "
                                                "gns: follows the noise scale between the two", schedule.KINDS)
    batch_size_start: int = opt(8, BRANCH, "first batch of linear, late and seesaw, smallest of gns", valid=AT_LEAST_1)
    batch_late: float = opt(0.8, BRANCH, "for late: the share of the run after which the batch is batch_size", valid=BELOW_1)
    batch_tokens: int = opt(0, BRANCH, "for linear and late: where the batch is batch_size; 0 = max_tokens", valid=NOT_NEGATIVE)
    batch_steps: str = opt("", BRANCH, "for steps: tokens:batch, e.g. 0:32, 50M:64, 200M:128 (k, M, B for thousands to "
                                       "billions)")
    batch_file: str = opt("", BRANCH, "for file: a text file with lines of tokens and batch, straight lines between them; "
                                      "edit it while the run goes on")
    batch_objective: str = opt("time", BRANCH, "for gns: time takes the batch that is fastest on this machine, from the noise "
                                               "scale and what a step costs; tokens the smallest; balance batch_gns_factor x "
                                               "the noise scale", OBJECTIVES)
    batch_gns_factor: float = opt(1.0, BRANCH, "for balance: batch over noise scale; 1 balances tokens and steps, less reads "
                                               "fewer tokens in more steps, more the other way round", valid=ABOVE_0)
    batch_gns_margin: float = opt(0.1, BRANCH, "for gns: the interval must clear the batch by this share before it moves",
                                  valid=NOT_NEGATIVE)
    batch_gns_dwell_tokens: int = opt(0, BRANCH, "for gns: at least so many tokens between moves; 0 = until half of the "
                                                 "average is new", valid=NOT_NEGATIVE)
    batch_shrink: bool = opt(False, BRANCH, "for gns: may the batch also shrink; off because the noise scale grows in most "
                                            "runs")
    # -- optimisation; everything is counted in tokens, since steps change size
    optimizer: str = opt("adamw", FIXED, "muon: Muon for the blocks' matrices, AdamW for the rest", tuple(OPTIMIZERS))
    max_tokens: int = opt(2_500_000, BRANCH, "the end of the run: about two minutes on two CPU cores", valid=AT_LEAST_1)
    warmup_tokens: int = opt(125_000, BRANCH, "linear from 0; 5% is ample at this size", valid=NOT_NEGATIVE)
    decay_tokens: int = opt(0, BRANCH, "where the learning rate reaches min_lr; 0 = max_tokens", valid=NOT_NEGATIVE)
    learning_rate: float = opt(2e-3, BRANCH, "peak; small models like more than the usual 3e-4", valid=NOT_NEGATIVE)
    min_lr: float = opt(2e-4, BRANCH, "a tenth of the peak, as in the paper; 0 decays to zero", valid=NOT_NEGATIVE)
    lr_decay: str = opt("linear", BRANCH, "shape after the warm-up", tuple(schedule.DECAYS))
    lr_scaling: str = opt("none", BRANCH, "learning rate times sqrt(k) (Adam) or k (SGD) for a batch k times the reference; "
                                          "none is what the paper does", tuple(schedule.LR_FACTORS))
    lr_saturates: bool = opt(True, BRANCH, "above the noise scale's interval lr_scaling stays where it is: the rules presume "
                                           "noisy gradients")
    lr_reference_batch: int = opt(0, BRANCH, "the batch for which learning_rate, beta2 and weight_decay are meant; 0 = "
                                             "batch_size", valid=NOT_NEGATIVE)
    weight_decay: float = opt(0.1, BRANCH, "on matrices only; vectors (norms, biases) are not decayed", valid=NOT_NEGATIVE)
    beta1: float = opt(0.9, FIXED, "AdamW's first moment", valid=BELOW_1)
    beta2: float = opt(0.95, BRANCH, "AdamW's second moment; shorter than 0.999 because batches are large", valid=BELOW_1)
    beta2_scaling: str = opt("none", BRANCH, "tokens holds beta2's half-life in tokens, beta2^k at k times the reference batch",
                             ("none", "tokens"))
    beta2_floor: float = opt(0.9, BRANCH, "beta2_scaling does not go below it: a shorter second moment was seen to spike",
                             valid=BELOW_1)
    weight_decay_scaling: str = opt("none", BRANCH, "tokens holds the time, in tokens, over which weights decay: weight_decay "
                                                    "times k over the learning rate's factor", ("none", "tokens"))
    grad_clip: float = opt(1.0, FIXED, "largest gradient norm; 0 turns clipping off, the norm is logged either way",
                           valid=NOT_NEGATIVE)
    # -- noise scale
    gns: str = opt("norm", FIXED, "norm: from the norm layers, nearly free; exact: every parameter, layer by layer, slower",
                   ("off", "norm", "exact"))
    gns_half_life_tokens: int = opt(250_000, FIXED, "averages forget half in so many tokens (or a fifth of those seen, if "
                                                    "less): longer is steadier, later", valid=AT_LEAST_1)
    gns_calibrate: bool = opt(True, FIXED, "one step in 8 also samples a few rows of all other weights but the look-up "
                                           "tables, for the factor from the norm layers' noise scale to the whole model's")
    gns_metric: str = opt("adam", BRANCH, "by which noise scale the run is shown and steered: in the metric that Adam steps "
                                          "in, which predicts steps better, or plain", ("adam", "plain"))
    gns_adam: bool = opt(True, FIXED, "also the noise scale in the metric that Adam steps in (each coordinate over sqrt(v))")
    gns_crosscheck: bool = opt(False, FIXED, "also the classical estimate, micro-batch gradients against the whole: noisier, "
                                             "and it holds a second copy of the gradient")
    grad_stats: bool = opt(False, FREE, "at logged steps also the gradient's coherence, Adam's signal to noise and the size "
                                        "of the update (trainer/grad_stats.py); changes no bit of the training, holds two to "
                                        "three more gradients")
    # -- evaluation, log, checkpoint
    eval_tokens: int = opt(250_000, FREE, "evaluate every so many tokens; 0 = only at the end", valid=NOT_NEGATIVE)
    eval_iters: int = opt(64, FREE, "validation windows per evaluation: a fixed, evenly spaced set, the same for every run",
                          valid=AT_LEAST_1)
    verbose: bool = opt(False, FREE, "say more at the start: kernels, and how fast this machine multiplies")
    log_interval: int = opt(10, FREE, "steps between log lines; values wait on the device until then", valid=AT_LEAST_1)
    checkpoint_tokens: int = opt(1_000_000, FREE, "save every so many tokens (and at the end, on Ctrl-C and on SIGTERM)",
                                 valid=NOT_NEGATIVE)
    keep_checkpoints: int = opt(2, FREE, "the newest ones: should one be damaged, the run goes on from the one before. The one "
                                         "with the lowest validation loss stays in any case, as ckpt.best.pt", valid=AT_LEAST_1)
    stop_tokens: int = opt(0, FREE, "leave here with a checkpoint, so that --resume=True can go on; 0 = at max_tokens",
                           valid=NOT_NEGATIVE)
    branch_from: str = opt("", FREE, "a run folder: start from its checkpoint and settings, with another batch or learning "
                                      "rate")
    resume: str = opt("False", FREE, "True goes on with the run in out_dir, or the newest of this name; auto does if there is "
                                     "one",
                      ("False", "True", "auto"))
    wandb_log: bool = opt(False, FREE, "also log to wandb; offline, without asking, where there is no key")
    wandb_project: str = opt("", FREE, "wandb's project; empty = WANDB_PROJECT, or rightbatch")
    wandb_run_name: str = opt("", FREE, "wandb's run name; empty = WANDB_NAME, or the last part of out_dir")
    wandb_entity: str = opt("", FREE, "wandb's user or team; empty = your default")
    wandb_group: str = opt("", FREE, "runs of one group are shown together; sweep.py runs turns wandb_log on with it")
    wandb_tags: str = opt("", FREE, "labels to find a run by, e.g. baseline,long")
    wandb_notes: str = opt("", FREE, "a sentence about the run")
    wandb_job_type: str = opt("", FREE, "what kind of run it is within its group, e.g. train or ablation")

    def end_tokens(self):
        """Where this process leaves."""
        return min(self.stop_tokens or self.max_tokens, self.max_tokens)


FIELDS = {f.name: f for f in dataclasses.fields(Config)}

# what people coming from other trainers type, and what we call it
ALIASES = {
    "gns_calibrate_tokens": "gns_calibrate=True or False (sampled rows replaced the exact steps)",
    "gradient_accumulation_steps": "batch_size and micro_batch_size (accumulation is batch_size / micro_batch_size)",
    "grad_accum_steps": "batch_size and micro_batch_size (accumulation is batch_size / micro_batch_size)",
    **dict.fromkeys(("max_iters", "max_steps", "num_steps", "iterations"), "max_tokens (steps x batch_size x block_size)"),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), "max_tokens (epochs x the tokens of train.bin)"),
    **dict.fromkeys(("warmup_iters", "warmup_steps"), "warmup_tokens"), "lr_decay_iters": "decay_tokens",
    "eval_interval": "eval_tokens", "eval_only": "--eval (python train.py out/run --eval)", "decay_lr": "lr_decay",
    "lr": "learning_rate", "vocab_size": "dataset (its meta.json has the vocabulary)", "block_len": "block_size",
    **dict.fromkeys(("seq_len", "context_length"), "block_size"), "total_batch_size": "batch_size",
    **dict.fromkeys(("device_batch_size", "per_device_train_batch_size"), "micro_batch_size"),
    "always_save_checkpoint": "checkpoint_tokens", "save_steps": "checkpoint_tokens", "data_dir": "dataset",
    "output_dir": "out_dir", "wandb": "wandb_log", "bf16": "dtype=bfloat16", "fp16": "dtype=float16", "fp32": "dtype=float32",
    "num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd", "d_model": "n_embd",
}
OTHER_WORDS = {"dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
               "device": {"gpu": "cuda"}}
TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def unknown_key(name, where):
    near = ALIASES.get(name.lower()) or next(iter(difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=0.5)), None)
    hint = f"did you mean {near}?" if near else "--help lists all keys"
    return ConfigError(f"{where}: unknown key '{name}': {hint}")


def coerce(name, value, where):
    """The value in its key's type. Integers do for floats, whole floats (1e6) for integers, nothing else is bent."""
    f = FIELDS[name]
    choices = f.metadata["choices"]
    shown = short(value)
    if f.type in (str, "str"):
        if isinstance(value, bool) and choices and str(value) in choices:
            value = str(value)  # resume=True in a file is the boolean
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name}={shown} must be a string")
        if "\0" in value:
            raise ConfigError(f"{where}: {name}={shown} must not hold a NUL character")
        if choices and value not in choices:
            if name == "resume" and os.path.isdir(value):
                raise ConfigError(f"{where}: resume={shown}: the run folder goes alone: python train.py {value}")
            near = difflib.get_close_matches(value, choices, n=1)
            raise ConfigError(f"{where}: {name}={shown} must be one of {', '.join(choices)}"
                              + (f"; did you mean {near[0]}?" if near else ""))
        return value
    if f.type in (bool, "bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {name}={shown} must be True or False")
        return value
    if f.type in (tuple, "tuple"):
        value = (value,) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(value, (tuple, list)) or not all(type(v) is int for v in value):
            raise ConfigError(f"{where}: {name}={shown} must be a tuple of block numbers such as (1,) or (0, 2)")
        return tuple(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        whole = "a whole number such as 200, 50k, 1.5M or 2B" if f.type in (int, "int") else "a number"
        raise ConfigError(f"{where}: {name}={shown} must be {whole}")
    finite = abs(value) < (LIMIT if isinstance(value, int) else math.inf)  # NaN is not
    if f.type in (int, "int"):
        if not finite or value != int(value) or abs(value) >= LIMIT:
            raise ConfigError(f"{where}: {name}={shown} must be a whole number below 2^63")
        return int(value)
    if not finite:
        raise ConfigError(f"{where}: {name}={shown} must be a finite number")
    return float(value)


def short(value):
    """repr, with its middle left out where it is long."""
    try:
        text = repr(value)
    except Exception as e:  # a number of more digits than Python prints; an object of a config file
        return f"<{type(value).__name__}: {type(e).__name__}>"
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-20:]}"


def read_file(path):
    """{key: value} of every key after a config file has run over the defaults."""
    if os.path.exists(path) and not os.path.isfile(path):  # a folder, or a pipe that nobody writes to
        raise ConfigError(f"config file {path}: is not a file")
    try:
        with open(path, encoding="utf-8") as f:
            source = f.read()
    except UnicodeError as e:
        raise ConfigError(f"config file {path}: is not UTF-8 text ({e.reason})") from None
    except OSError as e:
        near = [f"config/{f}" for f in difflib.get_close_matches(os.path.basename(path), _config_files(), n=1, cutoff=0.4)]
        folder = os.path.dirname(path)
        if not path.endswith(".py") and folder and os.path.isdir(folder):  # a run folder, misspelt
            near = [os.path.join(folder, f) for f in difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=1)]
        kind = "config file" if path.endswith(".py") else "config file or run folder"
        raise ConfigError(f"{kind} {path}: {e.strerror}" + (f"; did you mean {near[0]}?" if near else "")) from None
    namespace = {name: f.default for name, f in FIELDS.items()}
    try:
        exec(compile(source, path, "exec"), namespace)
    except (Exception, SystemExit) as e:
        raise ConfigError(f"config file {path}: {type(e).__name__}: {e}") from None
    values = {}
    for name, value in namespace.items():
        if name in FIELDS:
            values[name] = coerce(name, value, f"config file {path}")
        elif not name.startswith("_") and not isinstance(value, types.ModuleType):
            raise unknown_key(name, f"config file {path}")
    return values


def read_facts(folder):
    """(settings, facts) of a run folder: the keys of its config.json that are ours, checked, and the rest of it."""
    path = os.path.join(folder, "config.json")
    if os.path.exists(path) and not os.path.isfile(path):
        raise ConfigError(f"{path} is no file")
    try:
        with open(path, encoding="utf-8") as f:
            facts = json.load(f)
        settings, data = facts.pop("config"), facts.get("data", {})
        numbers = [*(facts.get(key, 1) for key in ("processes", "parameters")), data.get("vocab_size", 1)]
        items = settings.items()
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is not what train.py writes ({type(e).__name__}): it is damaged or from elsewhere") from None
    if any(type(n) is not int or not 0 < n < LIMIT for n in numbers):
        raise ConfigError(f"{path} is damaged: processes, parameters and vocab_size must be whole numbers above 0")
    return checked(items, path), facts


def checked(items, path):
    """{key: value} of the settings that a file holds, those of ours, each of its key's type and in its range."""
    settings = {key: coerce(key, value, path) for key, value in items if key in FIELDS}
    check_ranges({**{key: f.default for key, f in FIELDS.items()}, **settings}, path + ": ")
    return settings


def _config_files():
    folder = os.path.dirname(DEFAULT_FILE)
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


# -- the command line

def parse(argv, processes=1):
    """The checked Config of a command line, for a run of so many processes."""
    return parse_named(argv, processes)[0]


def parse_named(argv, processes=1):
    """(Config, name) of [config file or run folder] [--key=value ...]. The name is for the run's folder; None where one is
    given."""
    given, typed = read_arguments(argv)
    if len(given) > 1:
        raise ConfigError(f"one config file or run folder at most, got {' '.join(given)} (options are --key=value)")
    run = known_run(given, typed)
    if run:
        branches = run == typed.get("branch_from")
        values, name = of_run(run, typed, branches), None
        if branches and "out_dir" not in typed:
            name = os.path.basename(os.path.normpath(run))
    else:
        file = given[0] if given else DEFAULT_FILE
        values, name = read_file(file), os.path.splitext(os.path.basename(file))[0]
        if typed.get("out_dir", values["out_dir"]):
            name = None
        else:
            values["out_dir"] = os.path.join("out", name)
    if name:
        name = run_name(name, {k: v for k, v in typed.items() if v != values[k]})
    if not run:
        values |= of_pretrained(values, typed)
    config, short_note = shorten(Config(**values | typed), typed)
    check_values(config)
    config, note = fit(config, processes, typed)
    check_batches(config, processes)
    if os.environ.get("RANK", "0") == "0":
        for words in filter(None, (short_note, note, without_effect(config, typed), cost_unseen(config, processes))):
            print(words, flush=True)
    return config, name


def read_arguments(argv):
    """([config file or folder], {key: value typed})."""
    given, typed = [], {}
    for arg in joined(argv):
        if not arg.startswith("--"):
            word = arg.lstrip("-").partition("=")[0].replace("-", "_")
            if word in FIELDS and (arg.startswith("-") or "=" in arg):
                raise ConfigError(f"command line: {arg}: options begin with two dashes: --{arg.lstrip('-')}")
            given.append(arg)
            continue
        name, eq, text = arg[2:].partition("=")
        if name not in FIELDS:
            raise unknown_key(name, "command line")
        if not eq:
            raise ConfigError(f"command line: {arg} needs a value: --{name}=...")
        typed[name] = coerce(name, from_text(name, text), "command line")
    return given, typed


def joined(argv, others=()):
    """The arguments with --key=value for each --key value, and --key=True for a switch that stands alone. others: keys that are
    not in Config."""
    out, rest = [], list(argv)
    while rest:
        arg = rest.pop(0)
        name, eq, _ = arg[2:].partition("=")
        name = name.replace("-", "_")
        if not arg.startswith("--") or name not in FIELDS and name not in others:
            out.append(arg)
            continue
        if not eq:
            follows = rest[0] if rest and not rest[0].startswith("--") else None
            if name in FIELDS and is_switch(name):
                choices = [*TRUE, *FALSE, *(c.lower() for c in FIELDS[name].metadata["choices"] or ())]
                value = rest.pop(0) if follows and follows.lower() in choices else "True"
            elif follows is None:
                out.append(f"--{name}")  # which is said where it is read
                continue
            else:
                value = rest.pop(0)
            out.append(f"--{name}={value}")
        else:
            out.append(f"--{name}={arg.partition('=')[2]}")
    return out


def is_switch(name):
    """Whether --key alone means True."""
    return FIELDS[name].type in (bool, "bool") or "True" in (FIELDS[name].metadata["choices"] or ())


def from_text(name, text):
    """What was typed, as coerce() takes it. What is no such thing stays text: coerce says what was expected."""
    kind, choices, word = FIELDS[name].type, FIELDS[name].metadata["choices"], text.strip().lower()
    if kind in (bool, "bool") or choices and "True" in choices:
        if word in TRUE + FALSE:
            return word in TRUE
    if kind in (str, "str"):
        word = OTHER_WORDS.get(name, {}).get(word, word)
        return next((c for c in choices or () if c.lower() == word), text)
    if kind in (int, "int") and word[-1:] in ("k", "m", "b"):
        try:
            return schedule.parse_count(word[:-1] + {"k": "k", "m": "M", "b": "B"}[word[-1]])
        except ValueError:
            return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


# -- a run that goes on

def known_run(given, typed):
    """The run folder whose settings this command starts from, or None: the one that is named, the one that is resumed, or the
    one that is branched from."""
    if typed.get("out_dir") == "":
        del typed["out_dir"]
    if given and os.path.isdir(given[0]):
        wrong = [f"--{key}={typed[key]}" for key in ("out_dir", "branch_from") if key in typed]
        wrong += ["--resume=False"] if typed.get("resume") == "False" else []
        if wrong:
            raise ConfigError(f"{given[0]} is a run to go on with, which {wrong[0]} contradicts: leave one out; a new run from "
                              f"its checkpoint is python train.py --branch_from={given[0]}")
        if not os.path.isfile(os.path.join(given[0], "config.json")):
            raise ConfigError(f"{given[0]} is a folder without config.json, so no run of train.py: give a config file or a run "
                              "folder")
        typed |= {"out_dir": itself(given[0]), "resume": "True"}
        return typed["out_dir"]
    if given:
        return None
    out_dir, resume = typed.get("out_dir"), typed.get("resume", "False")
    if out_dir and resume != "False" and holds_settings(out_dir):
        return out_dir
    source = typed.get("branch_from")
    return source if source and holds_settings(source) else None


def itself(folder):
    """The folder behind a link such as out/latest."""
    folder = folder.rstrip("/") or folder
    return os.path.normpath(os.path.join(os.path.dirname(folder), os.readlink(folder))) if os.path.islink(folder) else folder


def holds_settings(folder):
    """Whether a run has begun there: settings and a checkpoint."""
    return os.path.isfile(os.path.join(folder, "config.json")) and any(
        re.fullmatch(r"ckpt(\.\d+)?\.pt", name) for name in os.listdir(folder))


def of_pretrained(values, typed):
    """What init_from says about the model. Typed keys must agree with it."""
    source = typed.get("init_from", values["init_from"])
    if source == "scratch":
        typed["init_from"] = source = ""
    if not source:
        return {}
    if source == "resume":
        raise ConfigError("init_from='resume': go on with a run by python train.py out/run, or --resume=True")
    from trainer import huggingface  # it needs this module
    shape, positions = huggingface.settings(source)
    wrong = [key for key in shape if key in typed and typed[key] != shape[key]]
    if wrong:
        raise ConfigError(f"{wrong[0]}={typed[wrong[0]]!r}: init_from={source!r} has {shape[wrong[0]]!r}: leave it out")
    if typed.get("block_size", values["block_size"]) > positions:
        raise ConfigError(f"block_size={typed.get('block_size', values['block_size'])}: init_from={source!r} knows {positions} "
                          f"positions: take at most {positions}")
    return shape


def of_run(folder, typed, branches):
    """The settings with which a run goes on or branches. A longer run ends its schedules where they ended, so that all before
    is as it was."""
    old = read_run(folder)
    values = vars(old) | {key: FIELDS[key].default for key in HERE_ONLY}
    if branches:
        return values | {"branch_from": ""}
    if typed.get("max_tokens", 0) > old.max_tokens:
        values |= {key: getattr(old, key) or old.max_tokens for key in ("decay_tokens", "batch_tokens")}
    return values


def read_run(folder):
    """The Config of a run folder."""
    try:
        return Config(**read_facts(folder)[0])
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no readable config.json there: is it a run of train.py?") from None


def run_name(base, changed):
    """A folder's name from that of the config and {key: value} on top of it. What only says where or how to run is left out."""
    name, parts = base, [f"-{key}={name_part(value)}" for key, value in changed.items()
                         if FIELDS[key].metadata["change"] != FREE]
    for part in parts:
        if len(name + part) > NAME_LENGTH:
            return name + "-more"
        name += part
    return name


def name_part(value):
    if isinstance(value, str):
        value = os.path.basename(value.rstrip("/"))
    elif isinstance(value, float):
        value = f"{value:g}"
    elif isinstance(value, tuple):
        value = ",".join(map(str, value))
    elif isinstance(value, int) and not isinstance(value, bool):
        value = next((f"{value // size}{letter}" for letter, size in reversed(schedule.SUFFIXES.items())
                      if value and value % size == 0), value)
    return re.sub(r"[^A-Za-z0-9._+,-]", "_", str(value))


def shorten(c, typed):
    """(config, words or None): a run that was made shorter than its warm-up gets a warm-up of a twentieth."""
    if "max_tokens" not in typed or "warmup_tokens" in typed or c.warmup_tokens < c.max_tokens:
        return c, None
    fits = c.max_tokens // 20
    words = f"warmup_tokens={c.warmup_tokens} is taken as {fits}: a twentieth of a run of {c.max_tokens} tokens"
    return dataclasses.replace(c, warmup_tokens=fits), words


def without_effect(c, typed):
    """Words about what was typed for another batch schedule than the one that is chosen; None if there is no such thing."""
    meant = {"batch_steps": ("steps",), "batch_file": ("file",),
             "batch_size_start": [name for name, kind in schedule.SCHEDULES.items() if "batch_size_start" in kind.keys]}
    meant |= {key: ("gns",) for key in FIELDS if key.startswith(("batch_gns_", "batch_objective", "batch_shrink"))}
    idle = [key for key in meant if key in typed and c.batch_schedule not in meant[key]]
    return f"{', '.join(idle)}: without effect under batch_schedule={c.batch_schedule}" if idle else None


def cost_unseen(c, processes):
    """Words where the controller cannot see what communication costs, so that it would hold its batch for ever; else None."""
    quantum = c.micro_batch_size * processes
    if (c.batch_schedule, c.batch_objective, c.parallel) != ("gns", "time", "fsdp") or processes == 1:
        return None
    if c.batch_size_start > quantum:
        return None
    return (f"batch_size_start={c.batch_size_start}: one micro-batch a step. Under parallel=fsdp its communication cannot be "
            f"told from its computation, so the batch will stay too small: --batch_size_start={2 * quantum} shows it")


def fit(c, processes, typed):
    """(config, words for the user or None): settings whose batches come out whole on so many processes. The batches are what
    is computed, the micro-batch only how, so it is the micro-batch that gives way: a run is the same on one device and on
    eight. Only a first batch too small to be shared is rounded up. What was typed is taken as it is."""
    kind, new = schedule.kind(c), {}
    quantum, chosen = c.micro_batch_size * processes, "micro_batch_size" in typed
    if processes == 1:
        return c, None
    if "batch_size_start" in kind.keys and "batch_size_start" not in typed:
        unit = quantum if chosen else processes
        new["batch_size_start"] = -(-c.batch_size_start // unit) * unit
    sizes = said(lambda: kind.sizes(dataclasses.replace(c, **new)))
    share = math.gcd(*(-(-size // processes) for size in sizes))  # a batch that cannot be shared is the check's to name
    if share and not chosen:
        new["micro_batch_size"] = max(m for m in range(1, c.micro_batch_size + 1) if share % m == 0)
    new = {key: value for key, value in new.items() if value != getattr(c, key)}
    if not new:
        return c, None
    taken = " and ".join(f"{key}={getattr(c, key)} is taken as {value}" for key, value in new.items())
    words = f"{taken}: batches of {', '.join(map(str, sorted(set(sizes))))} are then whole on {processes} processes"
    if "micro_batch_size" in new and kind.keys:
        larger = " ".join(f"--{key}={schedule.to_quanta(getattr(c, key), quantum)}" for key in kind.keys)
        words += f"; {larger} would keep micro_batch_size={c.micro_batch_size}"
    return dataclasses.replace(c, **new), words


def check(c, processes=1):
    """What can be known to be impossible before any file is touched."""
    check_values(c)
    check_batches(c, processes)


def check_ranges(values, where=""):
    for name, f in FIELDS.items():
        if f.metadata["valid"]:
            test, expected = f.metadata["valid"]
            if not test(values[name]):
                raise ConfigError(f"{where}{name}={values[name]!r}: {expected}")


def check_values(c):
    def need(ok, name, expected):
        if not ok:
            raise ConfigError(f"{name}={getattr(c, name)!r}: {expected}")

    check_ranges(vars(c))
    need(c.n_embd % c.n_head == 0, "n_embd", f"must be divisible by n_head={c.n_head}: heads share the width evenly")
    need(c.min_lr <= c.learning_rate, "min_lr", f"must not exceed learning_rate={c.learning_rate}")
    need(c.warmup_tokens <= c.max_tokens, "warmup_tokens", f"is longer than the run, max_tokens={c.max_tokens}")
    need(c.decay_tokens == 0 or c.decay_tokens >= c.warmup_tokens, "decay_tokens",
         f"must not end before warmup_tokens={c.warmup_tokens} (0 = max_tokens)")
    for name in ("cos_attn", "spectral_qkv"):
        need(all(0 <= i < c.n_layer for i in getattr(c, name)), name, f"blocks are numbered 0 to {c.n_layer - 1}")


def check_batches(c, processes):
    said(lambda: schedule.kind(c).check(c, c.micro_batch_size * processes))


def batch_schedule(c, quantum, saved=None):
    """The schedule of a run."""
    return said(lambda: schedule.build(c, quantum, saved))


def said(function):
    """function(); what it finds wrong is the user's one line."""
    try:
        return function()
    except ValueError as e:
        raise ConfigError(str(e)) from None


def free_keys(branch=False):
    """Keys that a resume may change, or a branch: where and how a run is computed and watched, not what is computed."""
    return {name for name, f in FIELDS.items() if f.metadata["change"] == FREE or branch and f.metadata["change"] == BRANCH}


COMMANDS = {
    "--eval": "the validation loss of a run's newest checkpoint: python train.py out/run --eval. Changes nothing",
    "--plan": "parameters, memory, steps and time before a run",
    "--plan --devices=1": "with --plan: on so many devices",
    "--plan --kind='A100'": "with --plan: of this kind (V100, A100, A100-40G, A6000, L4, RTX4090, L40S, H100, H200, B200)",
    "--plan --mfu=0.35": "with --plan: the share of the device's peak that the run is presumed to reach",
}


def help_text():
    lines = [(__doc__ or "").strip(), "", "Keys. A run keeps each value for good, unless it says otherwise:"]
    for name, f in FIELDS.items():
        default = f"{f.default!r}"
        choices = f" [{' | '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        change = CHANGE_WORDS[f.metadata["change"]]
        lines.append(f"  --{name}={default}{choices} {change}".rstrip() + f"\n        {f.metadata['why']}")
    lines += ["", "Instead of training:"]
    for option, why in COMMANDS.items():
        lines.append(f"  {option}\n        {why}")
    return "\n".join(lines)


OUT_OF_MEMORY = ("can't allocate", "cannot allocate memory", "out of memory", "not enough memory", "bad_alloc",
                 "storage size calculation overflowed", "invalid shape dimension", "could not create a primitive")


def explain(error):
    """The one line for a failure that is not a bug: wrong input, a disk that is full or not writable, too little memory. None
    for a bug."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or ''}".rstrip(": ")
    if isinstance(error, UnicodeEncodeError):  # a path, in a terminal of another encoding
        return f"{short(error.object)} cannot be written in {error.encoding}: set PYTHONUTF8=1, or take a plain name"
    if isinstance(error, MemoryError) or isinstance(error, RuntimeError) and any(
            words in str(error).lower() for words in OUT_OF_MEMORY):
        return (f"not enough memory: {short(str(error) or 'MemoryError')}; try a smaller micro_batch_size or model, or "
                "activation_checkpointing=block")
    return None


def die(error):
    """The one line that a user sees for an expected failure; exit code 2."""
    launched = [os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")]
    local, rank, world = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in launched)
    if not 0 < local <= rank < world:  # with several processes one of each machine says it
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)
