"""
Whether the losses of several runs mean the same thing, by the config.json of each.
"""

import configurator
from configurator import ConfigError
from model import GPTConfig

# what may differ: what it is called, its value in config.json, and why that matters
REFUSED = {
    "tokenizer": (lambda data, config: (data.get("tokenizer"), data.get("vocab_size")),
                  "a loss is counted in nats per token, and their tokens are not the same"),
    "validation set": (lambda data, config: data.get("val_sha256", config.get("dataset")),
                       "their losses are of different texts"),
}
WARNED = {
    "training data": (lambda data, config: data.get("train_sha256", config.get("dataset")),
                      "a difference may be the data's"),
    "validation windows": (lambda data, config: {key: config.get(key) for key in ("eval_iters", "block_size")},
                           "their validation losses are of different parts of the text"),
    "model": (lambda data, config: {key: config.get(key) for key in GPTConfig.__dataclass_fields__
                                    if key in config and key not in ("block_size", "activation_checkpointing")},
              "a difference may be the model's"),
}


def check(out_dirs):
    """Lines of warning about runs that differ in more than how they were trained. Where their losses cannot be compared at all:
    ConfigError."""
    known = {d: facts for d in dict.fromkeys(out_dirs) if (facts := read(d))}
    unknown = [d for d in dict.fromkeys(out_dirs) if d not in known]
    for name, (of, why) in REFUSED.items():
        apart = differing(known, of)
        if apart:
            raise ConfigError(f"{apart}: not the same {name}: {why}")
    words = [f"careful: not the same {name}: {apart}: {why}" for name, (of, why) in WARNED.items()
             if (apart := differing(known, of))]
    if unknown:
        words.append(f"careful: no config.json in {', '.join(unknown)}: whether losses can be compared is not known")
    return words


def warnings(out_dirs):
    """The same for a picture of runs over each other, which says nothing about who is better: words, no refusal."""
    try:
        return check(out_dirs) if len(out_dirs) > 1 else []
    except ConfigError as e:
        return [f"careful: {e}"]


def read(out_dir):
    """(data, config) of a run, or None where it has no config.json."""
    try:
        config, facts = configurator.read_facts(out_dir)
    except FileNotFoundError:
        return None
    return facts.get("data") or {}, config


def differing(known, of):
    """The first two runs that differ, with what they have, in words; "" if all are the same."""
    runs = list(known)
    for other in runs[1:]:
        a, b = of(*known[runs[0]]), of(*known[other])
        if a != b and isinstance(a, dict):
            keys = [key for key in a if a[key] != b.get(key)]
            a, b = (", ".join(f"{key}={value.get(key)!r}" for key in keys) for value in (a, b))
        if a != b:
            return f"{runs[0]} has {shown(a)}, {other} has {shown(b)}"
    return ""


def shown(value):
    """A checksum by its beginning."""
    if isinstance(value, tuple):
        return "{} ({} tokens)".format(*value)
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
