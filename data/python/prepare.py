"""A larger corpus without a network: the standard library and the Python sources of the packages in requirements.txt.

    python data/python/prepare.py

About 70 MB, bytes as tokens; the same bytes wherever the same Python and the same pins are installed. Whole files go to
validation, chosen by a hash of their names.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import tokens
from data.stdlib import prepare as stdlib
from system import terminal
from system.errors import ConfigError

VAL_FRACTION = 0.02  # of the bytes: more than 1 MB
REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements.txt"


def pinned(requirements: Path) -> list[str]:
    """The packages of a requirements file, each once."""
    names = re.findall(r"^([\w.-]+)==", requirements.read_text(encoding="utf-8"), re.MULTILINE)
    return sorted(set(names))


def package_texts(package: str) -> dict:
    """{name: text} of an installed package's own *.py, without its tests."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{package} is not installed: pip install -r requirements.txt") from None
    outside = stdlib.TEST_FOLDERS | {".."}
    own = sorted(f for f in files if f.suffix == ".py" and not outside & set(f.parts))
    if lost := [str(f) for f in own if not f.locate().is_file()]:
        raise ConfigError(f"{lost[0]} is missing: pip install --force-reinstall {package}")
    return stdlib.readable({f.as_posix(): f.locate().read_bytes() for f in own})


def prepare(out_dir=None, quiet=False, requirements=REQUIREMENTS) -> dict:
    """Write the dataset (by default beside this file) and return its meta."""
    texts, packages = stdlib.library_texts(Path(os.path.dirname(os.__file__))), pinned(requirements)
    for package in packages:
        texts |= package_texts(package)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    source = f"standard library of Python {platform.python_version()}; {versions}"
    return stdlib.write(texts, out_dir or Path(__file__).resolve().parent, VAL_FRACTION, source, quiet)


def main(argv=None):
    parser = terminal.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder to write (default: data/python)")
    args = parser.parse_args(argv)
    return tokens.run(lambda: prepare(args.out))


if __name__ == "__main__":
    sys.exit(main())
