"""
The settings of a run: defaults, then a config file, then --key=value. A run that goes on has the settings of its folder.

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
import types
from dataclasses import dataclass, field

import schedule
from rightbatch.decision import OBJECTIVES
from system import points
from system.errors import ConfigError, short

DEFAULT_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "config", "quickstart.py")

# whether a key may change in the life of a run. A branch may change the batch, the learning rate and what goes with them
FIXED, BRANCH, FREE = CHANGES = ("fixed", "branch", "free")
CHANGE_WORDS = {FIXED: "", BRANCH: "(may change on a branch)", FREE: "(may change on resume)"}

# (test, what it asks for)
AT_LEAST_1 = (lambda v: v >= 1, "must be at least 1")
UP_TO_A_MILLION = (lambda v: 1 <= v <= 2**20, "must be at least 1 and at most 2^20")
NOT_NEGATIVE = (lambda v: v >= 0, "must not be negative")
ABOVE_0 = (lambda v: v > 0, "must be above 0")
BELOW_1 = (lambda v: 0 <= v < 1, "must be at least 0 and below 1")
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
    spectral_qkv: tuple = opt((), FIXED, "blocks whose QKV matrix is divided by its spectral norm: bounds the logits, too")
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
    optimizer: str = opt("adamw", FIXED, "muon: Muon for the blocks' matrices, AdamW for the rest", ("adamw", "muon"))
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
    resume: str = opt("False", FREE, "True goes on with the run in out_dir, or the newest of this name; auto does so if there "
                                     "is one", ("False", "True", "auto"))
    wandb_log: bool = opt(False, FREE, "also log to wandb; offline, without asking, where there is no key")
    wandb_project: str = opt("", FREE, "wandb's project; empty = WANDB_PROJECT, or rightbatch")
    wandb_run_name: str = opt("", FREE, "wandb's run name; empty = WANDB_NAME, or the last part of out_dir")
    wandb_entity: str = opt("", FREE, "wandb's user or team; empty = your default")
    wandb_group: str = opt("", FREE, "runs of one group are shown together; sweep.py runs turns wandb_log on with it")
    wandb_tags: str = opt("", FREE, "labels to find a run by, e.g. baseline,long")
    wandb_notes: str = opt("", FREE, "a sentence about the run")
    wandb_job_type: str = opt("", FREE, "what kind of run it is within its group, e.g. train or ablation")

    def end_tokens(self):
        """The tokens at which this process leaves."""
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
    kind, choices, given = FIELDS[name].type, FIELDS[name].metadata["choices"], value

    def need(ok, expected):
        if not ok:
            raise ConfigError(f"{where}: {name}={short(given)} must {expected}")

    if kind is str:
        value = str(value) if isinstance(value, bool) and choices else value  # resume=True in a file is the boolean
        need(isinstance(value, str), "be a string")
        need("\0" not in value, "not hold a NUL character")
        if name == "resume" and os.path.isdir(value) and value not in choices:
            raise ConfigError(f"{where}: resume={short(value)}: the run folder goes alone: python train.py {value}")
        near = "".join(f"; did you mean {choice}?" for choice in difflib.get_close_matches(value, choices or (), n=1))
        need(not choices or value in choices, f"be one of {', '.join(choices or ())}{near}")
        return value
    if kind is bool:
        need(isinstance(value, bool), "be True or False")
        return value
    if kind is tuple:
        value = (value,) if type(value) is int else value
        need(isinstance(value, (tuple, list)) and all(type(v) is int for v in value),
             "be a tuple of block numbers such as (1,) or (0, 2)")
        return tuple(value)
    need(type(value) in (int, float), "be a whole number such as 200, 50k, 1.5M or 2B" if kind is int else "be a number")
    if kind is int:
        need(abs(value) < LIMIT and value == int(value), "be a whole number below 2^63")  # false for NaN
    need(abs(value) < (LIMIT if type(value) is int else math.inf), "be a finite number")
    return kind(value)


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
        is_file, parent = path.endswith(".py"), os.path.dirname(path)
        folder, shown = (parent, parent) if not is_file and os.path.isdir(parent) else (os.path.dirname(DEFAULT_FILE), "config")
        near = difflib.get_close_matches(os.path.basename(path), os.listdir(folder), n=1, cutoff=0.4)
        raise ConfigError(f"config file{'' if is_file else ' or run folder'} {path}: {e.strerror}"
                          + "".join(f"; did you mean {os.path.join(shown, name)}?" for name in near)) from None
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


def read_run(folder):
    """The Config of a run folder."""
    try:
        return Config(**read_facts(folder)[0])
    except FileNotFoundError:
        raise ConfigError(f"{folder}: no readable config.json there: is it a run of train.py?") from None


def checked(items, path):
    """{key: value} of our keys among a file's items, each in its key's type; ConfigError for one out of its range."""
    settings = {key: coerce(key, value, path) for key, value in items if key in FIELDS}
    check_ranges({**{key: f.default for key, f in FIELDS.items()}, **settings}, path + ": ")
    return settings


# -- the command line

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


def joined(argv):
    """The arguments with --key=value for each --key value, and --key=True for a switch that stands alone."""
    out, rest = [], list(argv)
    while rest:
        arg = rest.pop(0)
        name, eq, value = arg[2:].partition("=")
        name = name.replace("-", "_")
        if not arg.startswith("--") or name not in FIELDS:
            out.append(arg)
            continue
        follows = not eq and rest and not rest[0].startswith("--")
        if not eq and is_switch(name):
            words = [*TRUE, *FALSE, *(choice.lower() for choice in FIELDS[name].metadata["choices"] or ())]
            eq, value = "=", rest.pop(0) if follows and rest[0].lower() in words else "True"
        elif follows:
            eq, value = "=", rest.pop(0)
        out.append(f"--{name}{eq}{value}")  # without a value: read_arguments says so
    return out


def is_switch(name):
    """Whether --key alone means True."""
    return name in FIELDS and (FIELDS[name].type is bool or "True" in (FIELDS[name].metadata["choices"] or ()))


def from_text(name, text):
    """A typed value as coerce() takes it. Text that does not fit the key's type stays text: coerce says what was expected."""
    kind, choices, word = FIELDS[name].type, FIELDS[name].metadata["choices"], text.strip().lower()
    if is_switch(name) and word in TRUE + FALSE:
        return word in TRUE
    if kind is str:
        word = OTHER_WORDS.get(name, {}).get(word, word)
        return next((c for c in choices or () if c.lower() == word), text)
    if kind is int and word[-1:] in ("k", "m", "b"):
        try:
            return points.parse_count(word[:-1] + {"k": "k", "m": "M", "b": "B"}[word[-1]])
        except ValueError:
            return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def check(c, processes=1):
    """Refuse settings that are impossible, whatever the files hold."""
    check_values(c)
    check_batches(c, processes)


def check_ranges(values, where=""):
    for name, f in FIELDS.items():
        test, expected = f.metadata["valid"] or (lambda value: True, "")
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
    """The result of function(). What schedule.py finds wrong becomes the user's one line."""
    try:
        return function()
    except ValueError as e:
        raise ConfigError(str(e)) from None


def free_keys(branch=False):
    """Keys that a resume may change: where and how a run is computed and watched, not what. A branch may change more."""
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
        choices = f" [{' | '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        change = CHANGE_WORDS[f.metadata["change"]]
        lines.append(f"  --{name}={f.default!r}{choices} {change}".rstrip() + f"\n        {f.metadata['why']}")
    lines += ["", "Instead of training:", *(f"  {option}\n        {why}" for option, why in COMMANDS.items())]
    return "\n".join(lines)
