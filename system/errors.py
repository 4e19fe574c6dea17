"""
Failures that are no bug: each is one line for the user, and exit code 2.

    raise ConfigError(f"batch_size={value}: must be at least 1")      # which key, which value, what to do about it
    with errors.one_line(): ...                                       # the work of a command
"""

import contextlib
import os
import sys

OUT_OF_MEMORY = ("can't allocate", "cannot allocate memory", "out of memory", "not enough memory", "bad_alloc",
                 "storage size calculation overflowed", "invalid shape dimension", "could not create a primitive")


class ConfigError(Exception):
    """One line for the user: which key or file, which value, what to do about it."""


def explain(error: BaseException) -> str | None:
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


def die(error: object) -> None:
    """Print the one line that a user sees for an expected failure, and end with exit code 2."""
    launched = [os.environ.get(name, "") for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")]
    local, rank, world = (int(text) if text.isdecimal() and len(text) < 10 else 0 for text in launched)
    if not 0 < local <= rank < world:  # of several processes, the first of each machine says it
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def one_line():
    """An expected failure inside ends the command with its one line."""
    try:
        yield
    except Exception as e:
        words = explain(e)
        if not words:
            raise
        die(words)


def short(value: object) -> str:
    """repr, with its middle left out where it is long."""
    try:
        text = repr(value)
    except Exception as e:  # a number of more digits than Python prints; an object of a config file
        return f"<{type(value).__name__}: {type(e).__name__}>"
    return text if len(text) <= 100 else f"{text[:60]} ... {text[-20:]}"
