"""The embedded corpus: the source text of Python's own standard library, bytes as tokens. No network, a few seconds.

    python data/stdlib/prepare.py

About 12 MB for Python 3.11, without the test suites; the same bytes wherever that Python release is installed.
Whole files go to validation, chosen by a hash of their names, so that it is unseen text. Every file ends with a 0.
"""

import os
import platform
import sys
from pathlib import Path

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import tokenizers, tokens
from system import terminal
from system.errors import ConfigError

VAL_FRACTION = 0.08  # of the bytes: 1 MB, enough for a steady validation loss
TEST_FOLDERS = {"test", "tests", "idle_test", "__pycache__"}  # tests would be two thirds of the text, and dull


def library_files(library: Path) -> list[Path]:
    """All *.py of the standard library, sorted. Only its own modules: no site-packages, no sitecustomize."""
    paths = []
    for folder, subfolders, names in tokens.walk(library) if library.is_dir() else ():
        top = Path(folder).relative_to(library).parts[:1]
        subfolders[:] = [s for s in subfolders if s not in TEST_FOLDERS and (top or s in sys.stdlib_module_names)]
        paths += [Path(folder, n) for n in names if n.endswith(".py") and (top or n[:-3] in sys.stdlib_module_names)]
    return sorted(paths, key=lambda path: path.relative_to(library).as_posix())


def readable(texts) -> dict:
    """{name: text} without empty files and those with a 0, which ends a document here."""
    return {name: text for name, text in texts.items() if text.strip() and b"\0" not in text}


def library_texts(library: Path) -> dict:
    """{name: text} of the standard library."""
    return readable({path.relative_to(library).as_posix(): path.read_bytes() for path in library_files(library)})


def write(texts, out_dir, val_fraction, source, quiet=False, tokenizer=None) -> dict:
    """The dataset of {name: text}, split by whole files; returns its meta. tokenizer: for other tokens than bytes,
    whose texts are str."""
    sizes = [(name, len(text)) for name, text in texts.items()]
    chosen = tokens.choose_validation(sizes, val_fraction)
    documents = (("val" if i in chosen else "train", text, True) for i, text in enumerate(texts.values()))
    return tokens.build(
        out_dir,
        tokenizer or tokenizers.get_tokenizer("bytes"),
        documents,
        total_bytes=sum(size for _, size in sizes),
        quiet=quiet,
        source=source,
        split=f"by file: {len(chosen)} of {len(sizes)} files, chosen by hash of their names",
    )


def prepare(out_dir=None, quiet=False, library=None) -> dict:
    """Write the dataset (by default beside this file) and return its meta."""
    library = Path(library or os.path.dirname(getattr(os, "__file__", "")))
    texts = library_texts(library)
    total = sum(map(len, texts.values()))
    if total < 1_000_000:
        raise ConfigError(
            f"only {total:,} bytes of standard library source in {library} (zipped or stripped Python?): "
            "use a regular Python, or your own text with data/text/prepare.py"
        )
    source = f"standard library of Python {platform.python_version()}"
    return write(texts, out_dir or Path(__file__).resolve().parent, VAL_FRACTION, source, quiet)


def main(argv=None):
    parser = terminal.Parser(description="Prepare the embedded corpus: the Python standard library's source.")
    parser.add_argument("--out", help="folder to write (default: data/stdlib)")
    args = parser.parse_args(argv)
    return tokens.run(lambda: prepare(args.out))


if __name__ == "__main__":
    sys.exit(main())
