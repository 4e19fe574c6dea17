"""
The terminal. What is said never decides what is done: a closed pipe, a full disk behind stdout, a letter that the terminal
cannot show.

    terminal.steady()               # first thing in the main() of a command
    parser = terminal.Parser(...)   # argparse's; what is typed wrong is one line
    return terminal.heard()         # last thing, where the words are what the command is for
"""

import argparse
import contextlib
import errno
import os
import re
import shutil
import sys
import textwrap

CLEAR = "\r\033[K"  # what is written next takes the place of the line that is there


class Stream:
    """stdout or stderr. Where nobody can hear it any more, the talking ends, not the program."""

    def __init__(self, stream):
        self.stream, self.lost = stream, None  # why words did not arrive, unless it is that nobody listens

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def flush(self):
        self.attempt(self.stream.flush)

    def attempt(self, function):
        try:
            function()
        except (OSError, ValueError) as e:  # ValueError: closed by somebody
            self.lost = self.lost or (e if isinstance(e, OSError) and e.errno != errno.EPIPE else None)
            with contextlib.suppress(OSError, ValueError):
                silence = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silence, self.stream.fileno())  # also for what the stream still holds, and for torch's own words
                os.close(silence)


def steady():
    """Make stdout and stderr safe to print to, whatever becomes of them. A letter that they cannot show becomes its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed: else the next file gets its number, and torch's warnings go into a checkpoint
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            stream = open(os.devnull, "w")  # noqa: SIM115 - it lives as long as the process
        if not isinstance(stream, Stream):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, Stream(stream))


def heard(code=0):
    """The exit code of a command whose words are its work: it fails where a full disk swallowed them."""
    sys.stdout.flush()
    lost = getattr(sys.stdout, "lost", None)
    if lost and not code:
        print(f"error: output is lost: {lost.strerror}", file=sys.stderr)
    return code or (2 if lost else 0)


class Parser(argparse.ArgumentParser):
    """argparse, whose errors are one line that names the option, the value and what was expected."""

    def error(self, message):
        plain = r"argument (\S+): invalid (?:int|float) value: '(.*)'"
        words = re.sub(plain, r"\1=\2: expected a number", " ".join(message.split()))
        print(f"error: {words if len(words) < 500 else words[:400] + ' ...'} ({self.prog} --help lists the options)",
              file=sys.stderr)
        sys.exit(2)


# -- what fits

def width():
    """Columns of the terminal; None where there is none, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(fields, columns):
    """A line of (rank, text) fields in their order. Where it is too long, the fields with the highest rank go first."""
    ranks = sorted({rank for rank, _ in fields}, reverse=True)
    for most in ranks:
        line = " | ".join(text for rank, text in fields if rank <= most)
        if columns is None or len(line) <= columns:
            break
    return line


def wrapped(text, columns):
    """The text in lines of at most so many columns, broken between words; None: as it is."""
    if columns is None:
        return text
    return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                     for line in text.split("\n"))
