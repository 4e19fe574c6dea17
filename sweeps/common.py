"""
What the commands of sweep.py share: their options, what their numbers depend on, and the lines that they end with.
"""

import json
import os
import shlex

from configurator import ConfigError
from model import GPTConfig
from system import cores, files
from trainer import hardware, plan, reader, start

NAME = "sweep.json"
GUESS = 0.4  # share of the matrix-product ceiling that an estimate presumes


# -- options

def arguments(parser):
    parser.add_argument("config", nargs="?", help="a config file; --key=value on top of it")
    parser.add_argument("--dry_run", action="store_true", help="say what would be run and how long it might take")


def parse(args):
    """The Config of the command line."""
    return start.parse([*([args.config] if args.config else []), *args.rest])


def number(args, name, least=0.0, kind=float):
    text = getattr(args, name)
    try:
        value = kind(text)
    except (ValueError, OverflowError):
        value = None
    if value is None or not value >= least or value == float("inf"):
        raise ConfigError(f"--{name}={text}: expected a {'whole ' if kind is int else ''}number of at least {least:g}")
    return value


def integers(args, name):
    text = getattr(args, name)
    try:
        values = [int(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ConfigError(f"--{name}={text}: expected whole numbers above 0, such as 1,2,4")
    return values


# -- what numbers depend on

def settings_of(config, device, vocab_size):
    """What the numbers of a trial depend on, beside what is swept."""
    names = [k for k in vars(config) if k in GPTConfig.__dataclass_fields__ and k != "activation_checkpointing"]
    names += ["dtype", "gns", "gns_calibrate", "gns_adam", "gns_crosscheck", "grad_stats"]
    return {**{k: as_json(getattr(config, k)) for k in names}, "device": device, "vocab_size": vocab_size, "threads": threads()}


def as_json(value):
    """What becomes of a value on its way through a JSON file."""
    return list(value) if isinstance(value, tuple) else value


def threads():
    return os.environ.get("OMP_NUM_THREADS") or str(cores.usable_cores())


def machine(device):
    return {**hardware.facts(device), "threads": int(threads())}


def speed(config, vocab_size):
    """Tokens/s to expect, a guess, for estimates of what a sweep takes."""
    device = hardware.pick_device(config.device)
    ceiling = hardware.matmul_ceiling(device, hardware.pick_dtype(config.dtype, device))
    return GUESS * ceiling / plan.flops_per_token(config, vocab_size)


# -- what earlier sweeps found

def read_json(path):
    """What a sweep of trials has written there, or None."""
    try:
        found = json.loads(files.read_text(path, most=10**7))
        if not (isinstance(found["settings"], dict) and all("status" in row.keys() for row in found["rows"])
                and isinstance(found.get("result"), dict | None)):
            raise ValueError("other contents than a sweep's")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{path} is not readable ({e}): remove it to start anew") from None


def found_micro_batch(config, rest, settings):
    """(what to set, where it is from): the command line, the memory sweep beside, the config."""
    compiles = config.compile == "True" or (config.compile == "auto" and settings["device"] == "cuda")
    own = {"micro_batch_size": config.micro_batch_size, "activation_checkpointing": config.activation_checkpointing,
           "compile": str(compiles)}
    path = os.path.join(config.out_dir, "sweep", "memory", NAME)
    saved = read_json(path)
    if any(a.startswith("--micro_batch_size=") for a in rest):
        return own, "as given"
    if not saved or not (saved.get("result") or {}).get("take"):
        return own, "from the config: there is no finished sweep.py memory"
    differ = [k for k, v in settings.items() if k != "memory_limit" and saved["settings"].get(k) != v]
    if differ:
        return own, f"from the config: {path} is of other settings ({', '.join(differ)})"
    return saved["result"]["take"], f"from {path}"


# -- words

def short(value):
    """A value as part of a name: other values, other names."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value).replace("%", "%25").replace("/", "%2F")


def noise_columns(keys):
    """(heads, lines below the table) for a table with a noise scale in its rows: one column for each kind, named by its log
    key, since two kinds are not to be held against each other."""
    kinds = list(dict.fromkeys(key for key in keys if key))
    heads = {key: f"noise scale: {key}" for key in kinds} or {None: "noise scale"}
    return heads, [f"{key} is the noise scale of {reader.named_noise(key)}, in sequences." for key in kinds]


def size(number):
    return "-" if number is None else f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def what_next(take, script, args, *more, without=()):
    """The lines at the end: what to write in the config, and the line to type next. That has the config and the options of this
    one, but for the keys `without`."""
    kept = [a for a in args.rest if a.removeprefix("--").partition("=")[0] not in without]
    line = shlex.join(["python", *script.split(), *([args.config] if args.config else []), *kept, *more])
    return [*(["In the config:", *(f"    {k} = {v!r}" for k, v in take.items())] if take else []), "Next:", "    " + line]


def finish(folder, result, table, draw):
    """The end of a sweep: its picture, and on the screen table, verdict, where everything is and what to type next."""
    picture = os.path.join(folder, "sweep.png")
    draw(picture)
    print("\n" + table, *result["says"], f"Picture: {picture}    Numbers: {os.path.join(folder, NAME)}", "", *result["next"],
          sep="\n")
