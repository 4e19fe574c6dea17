"""Your own text: files, or folders with *.txt and *.md files at any depth. Hidden folders are left out, and
links that lead out of the folder: name their targets to take them.

    python data/text/prepare.py notes/ book.txt --out=data/mytext
    python data/text/prepare.py notes/ book.txt --out=data/mytext --tokenizer=gpt2 --val_fraction=0.05
    python train.py --dataset=mytext

Bytes are taken as they are. For gpt2, text is read as UTF-8 (a leading byte order mark is dropped); bytes that are not
UTF-8 become U+FFFD, and their number is reported. With 20 files or more, whole files go to validation, chosen by a
hash of their names; with fewer, or a few very large ones, the last part of each file does. Files of any size: they
are streamed.
"""

import codecs
import os
import sys
from pathlib import Path

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data import tokenizers, tokens
from system import terminal
from system.errors import ConfigError

SUFFIXES = {".txt", ".md"}
MIN_FILES = 20  # below this, whole files would make a poor sample for validation
BLOCK = tokens.UNIT  # bytes read at a time


def find_files(paths) -> list[tuple[str, Path, os.stat_result]]:
    """(name, path, status) of all files: as given, or sorted within a folder and named relative to it."""
    files, seen, roots, outside = [], set(), [os.path.realpath(path) for path in paths], []

    def leads_out(path):
        target = Path(os.path.realpath(path))
        return os.path.islink(path) and not any(target.is_relative_to(root) for root in roots)

    for given in map(Path, paths):
        if given.is_dir():
            inside = []
            for folder, subfolders, names in tokens.walk(given):
                subfolders[:] = [s for s in subfolders if not s.startswith(".")]
                texts = [Path(folder, n) for n in names if Path(n).suffix.lower() in SUFFIXES]
                outside += [path for path in [*texts, *(Path(folder, s) for s in subfolders)] if leads_out(path)]
                inside += [path for path in texts if not leads_out(path)]
            named = sorted((path.relative_to(given).as_posix(), path) for path in inside)
        elif given.exists():
            named = [(given.name, given)]
        else:
            raise ConfigError(f"{given}: no such file or folder")
        for name, path in named:
            status = path.stat()
            if status.st_size and (real := path.resolve()) not in seen:
                seen.add(real)
                files.append((name, path, status))
    if outside:
        first, number = min(outside), tokens.counted(len(outside), "link")
        example = f"{first} -> {os.readlink(first)}; name a target to take it"
        print(f"warning: left out {number} that lead out of the given folders: {example}", file=sys.stderr)
    if not files:
        where = ", ".join(map(str, paths))
        raise ConfigError(f"no text in {where}: expected *.txt or *.md files that are not empty")
    return files


def tail_start(path, size, fraction) -> int:
    """Where the last `fraction` of a file begins: after the next line end, else the next space, else right there."""
    start = int(size * (1 - fraction))
    with open(path, "rb") as f:
        f.seek(start)
        ahead = f.read(min(BLOCK, (size - start) // 2 + 1))  # stay in the first half: validation must not run dry
    for mark in (b"\n", b" "):
        if (at := ahead.find(mark)) >= 0 and start + at + 1 < size:
            return start + at + 1
    while ahead and 0x80 <= ahead[0] < 0xC0 and start + 1 < size:  # not inside a UTF-8 character
        start, ahead = start + 1, ahead[1:]
    return start


def read_blocks(path, start, end, status):
    """The bytes from start to end of a file that is as it was when it was found."""
    with open(path, "rb") as f:
        f.seek(start)
        while start < end and (block := f.read(min(BLOCK, end - start))):
            if (at := block.find(b"\0")) >= 0:
                what = f"{path} holds a NUL at byte {start + at:,}, so it is UTF-16 or no text"
                raise ConfigError(f"{what}: convert it to UTF-8, or move it away")
            start += len(block)
            yield block
        now = os.fstat(f.fileno())
        if tokens.stamp(now)[:2] != tokens.stamp(status)[:2]:
            sizes = f"{status.st_size:,} bytes, then {now.st_size:,}"
            raise ConfigError(f"{path} was changed while it was read ({sizes}): prepare a copy of it")


def decode(blocks, replaced):
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    for block in blocks:
        text = decoder.decode(block)
        replaced[0] += text.count("\ufffd")
        yield text
    text = decoder.decode(b"", final=True)
    replaced[0] += text.count("\ufffd")
    yield text


def prepare(paths, out_dir, tokenizer="bytes", val_fraction=0.05, quiet=False) -> dict:
    if not 0 < val_fraction <= 0.5:
        raise ConfigError(f"val_fraction={val_fraction}: expected more than 0 and at most 0.5")
    files = find_files(paths)
    sizes = [(name, status.st_size) for name, _, status in files]
    total = sum(size for _, size in sizes)
    chosen = tokens.choose_validation(sizes, val_fraction)
    by_file = len(files) >= MIN_FILES and sum(sizes[i][1] for i in chosen) >= val_fraction * total / 2
    if by_file:
        parts = [("val" if i in chosen else "train", *file[1:], 0, file[2].st_size) for i, file in enumerate(files)]
        split = f"by file: {len(chosen)} of {len(files)} files, chosen by hash of their names"
    else:
        middles = [tail_start(path, status.st_size, val_fraction) for _, path, status in files]
        both = list(zip(files, middles, strict=True))
        parts = [("train", path, status, 0, middle) for (_, path, status), middle in both]
        parts += [("val", path, status, middle, status.st_size) for (_, path, status), middle in both]
        split = f"by position: the last {val_fraction:.3g} of each file, from a line end on"
    tokenizer = tokenizers.get_tokenizer(tokenizer)
    replaced = [0]

    def documents():
        for where, path, status, start, end in parts:
            blocks = read_blocks(path, start, end, status)
            for block in blocks if tokenizer.name == "bytes" else tokenizers.pieces(decode(blocks, replaced)):
                yield where, block, False
            if end > start:
                yield where, "", True

    meta = tokens.build(
        out_dir,
        tokenizer,
        documents(),
        total_bytes=total,
        quiet=quiet,
        files=len(files),
        source=f"text: {', '.join(Path(path).name or str(path) for path in paths)}",
        split=split,
    )
    if replaced[0] and not quiet:
        print(f"warning: {replaced[0]:,} places were not UTF-8 (or U+FFFD already) and are U+FFFD now", file=sys.stderr)
    return meta


def main(argv=None):
    default_out = Path(__file__).resolve().parents[1] / "mytext"
    parser = terminal.Parser(description="Prepare your own text files.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders with *.txt and *.md files")
    parser.add_argument("--out", default=default_out, help="folder to write (default: data/mytext)")
    parser.add_argument("--tokenizer", default="bytes", choices=sorted(tokenizers.TOKENIZERS))
    parser.add_argument("--val_fraction", type=float, default=0.05, help="share of the text for validation (0.05)")
    args = parser.parse_args(argv)
    return tokens.run(lambda: prepare(args.paths, args.out, args.tokenizer, args.val_fraction))


if __name__ == "__main__":
    sys.exit(main())
