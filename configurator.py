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
NOT_EMPTY = (bool, "must name a folder")
LIMIT = 2**63  # of whole numbers: what files and torch hold


def opt(default, change, why, choices=None, valid=None):
    """A key: FIXED, BRANCH or FREE; the reason for its default; its values, as a list or as a test."""
    return field(default=default, metadata={"change": change, "why": why, "choices": choices, "valid": valid})


@dataclass
class Config:
    # -- run
    out_dir: str = opt("out/quickstart", FREE, "run folder: config.json, log.jsonl, ckpt.pt, report.png", valid=NOT_EMPTY)
    dataset: str = opt("stdlib", FIXED, "folder under data/ (or a path) with train.bin, val.bin, meta.json; stdlib is "
                                        "embedded and prepares itself")
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
    batch_size_start: int = opt(8, BRANCH, "first batch of linear, smallest of gns", valid=AT_LEAST_1)
    batch_late: float = opt(0.8, BRANCH, "for late: the share of the run after which the batch is batch_size", valid=BELOW_1)
    batch_steps: str = opt("", BRANCH, "for steps: tokens:batch, e.g. 0:32, 50M:64, 200M:128 (k, M, B for thousands to "
                                       "billions)")
    batch_file: str = opt("", BRANCH, "for file: a text file with lines of tokens and batch, straight lines between them; "
                                      "edit it while the run goes on")
    batch_objective: str = opt("time", BRANCH, "for gns: time takes the batch that is fastest on this machine, from the noise "
                                               "scale and what a step costs; tokens the smallest; balance batch_gns_factor x "
                                               "the noise scale", tuple(schedule.OBJECTIVES))
    batch_gns_factor: float = opt(1.0, BRANCH, "for balance: batch over noise scale; 1 balances tokens and steps, less reads "
                                               "fewer tokens in more steps, more the other way round", valid=ABOVE_0)
    batch_gns_margin: float = opt(0.1, BRANCH, "for gns: the interval must clear the batch by this share before it moves",
                                  valid=NOT_NEGATIVE)
    batch_gns_dwell_tokens: int = opt(0, BRANCH, "for gns: at least so many tokens between moves; 0 = gns_half_life_tokens, "
                                                 "when half of the average is new", valid=NOT_NEGATIVE)
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
    gns_calibrate_tokens: int = opt(25_000, FIXED, "one exact step in so many tokens measures the factor from the norm "
                                                   "layers' noise scale to the whole model's; 0 = never", valid=NOT_NEGATIVE)
    gns_metric: str = opt("adam", BRANCH, "by which noise scale the run is shown and steered: in the metric that Adam steps "
                                          "in, which predicts steps better, or plain", ("adam", "plain"))
    gns_adam: bool = opt(True, FIXED, "also the noise scale in the metric that Adam steps in (each coordinate over sqrt(v))")
    gns_crosscheck: bool = opt(False, FIXED, "also the classical estimate, micro-batch gradients against the whole: noisier, "
                                             "and it holds a second copy of the gradient")
    grad_stats: bool = opt(False, FREE, "at logged steps also the gradient's coherence, Adam's signal to noise and the size "
                                        "of the update (grad_stats.py); changes no bit of the training, holds two to three "
                                        "more gradients")
    # -- evaluation, log, checkpoint
    eval_tokens: int = opt(250_000, FREE, "evaluate every so many tokens; 0 = only at the end", valid=NOT_NEGATIVE)
    eval_iters: int = opt(64, FREE, "validation windows per evaluation: a fixed, evenly spaced set, the same for every run",
                          valid=AT_LEAST_1)
    log_interval: int = opt(10, FREE, "steps between log lines; values wait on the device until then", valid=AT_LEAST_1)
    checkpoint_tokens: int = opt(1_000_000, FREE, "save every so many tokens (and at the end, on Ctrl-C and on SIGTERM)",
                                 valid=NOT_NEGATIVE)
    keep_checkpoints: int = opt(2, FREE, "the newest ones: should one be damaged, the run goes on from the one before. The one "
                                         "with the lowest validation loss stays in any case, as ckpt.best.pt", valid=AT_LEAST_1)
    stop_tokens: int = opt(0, FREE, "leave here with a checkpoint, so that --resume=True can go on; 0 = at max_tokens",
                           valid=NOT_NEGATIVE)
    branch_from: str = opt("", FREE, "a run folder: start from its checkpoint, with another batch or learning rate")
    resume: str = opt("False", FREE, "True continues out_dir from its checkpoint; auto does if there is one",
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
    shown = short(value)
    if f.type in (str, "str"):
        if isinstance(value, bool) and choices and str(value) in choices:
            value = str(value)  # resume=True in a file is the boolean
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {name}={shown} must be a string")
        if "\0" in value:
            raise ConfigError(f"{where}: {name}={shown} must not hold a NUL character")
        if choices and value not in choices:
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
        raise ConfigError(f"{where}: {name}={shown} must be a number")
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
        near = difflib.get_close_matches(os.path.basename(path), _config_files(), n=1, cutoff=0.4)
        raise ConfigError(f"config file {path}: {e.strerror}" + (f"; did you mean config/{near[0]}?" if near else "")) from None
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


def _config_files():
    folder = os.path.dirname(DEFAULT_FILE)
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def parse(argv, processes=1):
    """The checked Config of a command line: [config_file] [--key=value ...], for a run of so many processes."""
    files = [a for a in argv if not a.startswith("--")]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, got {' '.join(files)} (options are --key=value)")
    values, typed = read_file(files[0] if files else DEFAULT_FILE), set()
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
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                value = text  # coerce says what was expected
        values[name] = coerce(name, value, "command line")
        typed.add(name)
    config = Config(**values)
    check_values(config)
    config, note = fit(config, processes, typed)
    check_batches(config, processes)
    if os.environ.get("RANK", "0") == "0":
        for words in filter(None, (note, without_effect(config, typed))):
            print(words, flush=True)
    return config


def without_effect(c, typed):
    """Words about what was typed for another batch schedule than the one that is chosen; None if there is no such thing."""
    meant = {"batch_size_start": ("linear", "gns"), "batch_steps": ("steps",), "batch_file": ("file",)}
    meant |= {key: ("gns",) for key in FIELDS if key.startswith(("batch_gns_", "batch_objective", "batch_shrink"))}
    idle = [key for key in meant if key in typed and c.batch_schedule not in meant[key]]
    return f"{', '.join(idle)}: without effect under batch_schedule={c.batch_schedule}" if idle else None


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


def check_values(c):
    def need(ok, name, expected):
        if not ok:
            raise ConfigError(f"{name}={getattr(c, name)!r}: {expected}")

    for name, f in FIELDS.items():
        if f.metadata["valid"]:
            test, expected = f.metadata["valid"]
            need(test(getattr(c, name)), name, expected)
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


def help_text():
    lines = [__doc__.strip(), "", "Keys. A run keeps each value for good, unless it says otherwise:"]
    for name, f in FIELDS.items():
        default = f"{f.default!r}"
        choices = f" [{' | '.join(f.metadata['choices'])}]" if f.metadata["choices"] else ""
        change = CHANGE_WORDS[f.metadata["change"]]
        lines.append(f"  --{name}={default}{choices} {change}".rstrip() + f"\n        {f.metadata['why']}")
    return "\n".join(lines)


OUT_OF_MEMORY = ("can't allocate", "cannot allocate memory", "out of memory", "not enough memory", "bad_alloc",
                 "storage size calculation overflowed", "invalid shape dimension")


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


def speak_ascii():
    """A terminal that cannot show a character gets its number, not an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def die(error):
    """The one line that a user sees for an expected failure; exit code 2."""
    local, world = (os.environ.get(name, "") for name in ("LOCAL_RANK", "WORLD_SIZE"))
    several = local.isdecimal() and world.isdecimal() and int(world) > 1
    if not (several and int(local) > 0):  # with several processes one of each machine says it
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)
