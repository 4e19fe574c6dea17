"""What fits into the terminal: the line of a logged step, in as much detail as its width allows, and text that breaks between
words."""

import shutil
import sys
import textwrap


def width():
    """Columns of the terminal; None where there is none, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def fitted(fields, columns):
    """The fields of a line in their order. Where they do not fit, some go, those with the highest rank first: (rank, text)."""
    ranks = sorted({rank for rank, _ in fields}, reverse=True)
    for most in ranks:
        line = " | ".join(text for rank, text in fields if rank <= most)
        if columns is None or len(line) <= columns:
            break
    return line


def wrapped(text, columns):
    """Lines of at most so many columns, broken between words."""
    if columns is None:
        return text
    return "\n".join(textwrap.fill(line, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
                     for line in text.split("\n"))
