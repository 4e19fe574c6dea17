"""Token files: what all prepare.py scripts share. Text in; train.bin, val.bin and meta.json out.

    python data/tokens.py data/stdlib        # check a prepared dataset against its checksums

train.bin and val.bin are raw little-endian token ids: uint8 (tokenizer "bytes", vocabulary 256) or uint16
("gpt2", vocabulary 50257). Every document ends with a separator: 0 for bytes (a text with a NUL is refused), 50256
(<|endoftext|>) for gpt2. meta.json describes them and is written last, so a folder with meta.json is complete.
"""

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import platform
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.tokenizers import UNIT, pieces
from system import errors, files, terminal
from system.cores import usable_cores
from system.errors import ConfigError

FORMAT = 1
AGAIN = "run its prepare.py again"
HASHED = "hashed.json"  # beside data that have no meta.json: the checksums that were found
SPLITS = ("train", "val")
WINDOW = 4  # units in flight per core: keeps cores busy while the main thread reads and writes, bounds the memory


def run(body) -> int:
    """The exit code of a script whose work is `body()`: 2 and one line on stderr for expected failures."""
    return_large_blocks()
    terminal.steady()
    try:
        body()
        return 0
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was replaced", file=sys.stderr)
        return 130
    except (ConfigError, OSError) as e:
        words = errors.explain(e) or str(e)
        if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            words += "; free some space or write to another disk with --out. Nothing was replaced"
        print(f"error: {' '.join(words.split())}", file=sys.stderr)
        return 2


def walk(folder, **how):
    """os.walk, which would leave out what it may not read without a word."""

    def refuse(e):
        raise ConfigError(f"{e.filename} cannot be read: {e.strerror}. Make it readable, or move it away") from None

    return os.walk(folder, onerror=refuse, **how)


def return_large_blocks():
    """Have glibc give freed blocks of 128 KiB and more back to the system. By default it raises that size with every
    larger block it frees and keeps them in pieces: twice the memory after 100 MB of text that is not all ASCII. For the
    scripts alone: train.py, which may prepare a dataset too, wants the opposite (hardware.prepare_cpu)."""
    if platform.libc_ver()[0] == "glibc":
        M_MMAP_THRESHOLD = -3
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)


def encode_unit(tokenizer, unit):
    """[(text, ends), ...] -> ids in the file's dtype, number of documents that end, bytes of text."""
    separator = np.array([tokenizer.separator], tokenizer.dtype)
    parts, n_bytes = [], 0
    for text, ends in unit:
        if text:
            parts.append(fit(tokenizer.encode(text), tokenizer))
            n_bytes += len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode("utf-8"))
        if ends:
            parts.append(separator)
    return np.concatenate(parts), sum(ends for _, ends in unit), n_bytes


def encode_all(tokenizer, documents):
    """(split, text, ends) items -> (split, ids, documents, bytes) in order, encoded on all cores.

    Threads are enough: tiktoken releases the GIL. A bounded window of units is in flight, so memory does not grow
    with the text. `ends` says that a document is over; text that comes in parts is cut by `pieces` beforehand.
    """
    waiting = deque()
    with ThreadPoolExecutor(usable_cores()) as pool:
        try:
            for split, unit in units(documents):
                waiting.append((split, pool.submit(encode_unit, tokenizer, unit)))
                if len(waiting) >= WINDOW * usable_cores():
                    split, future = waiting.popleft()
                    yield split, *future.result()
            while waiting:
                split, future = waiting.popleft()
                yield split, *future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def units(documents):
    """Group items of one split into units of about UNIT characters, and cut longer texts."""
    unit, size = {split: [] for split in SPLITS}, dict.fromkeys(SPLITS, 0)
    for split, text, ends in documents:
        if not text and not ends:
            continue
        parts = list(pieces([text])) if len(text) > UNIT and isinstance(text, str) else [text]
        for i, part in enumerate(parts):
            unit[split].append((part, ends and i == len(parts) - 1))
            size[split] += len(part)
            if size[split] >= UNIT:
                yield split, unit[split]
                unit[split], size[split] = [], 0
    for split in SPLITS:
        if unit[split]:
            yield split, unit[split]


# ---------------------------------------------------------------------------------------------- splitting


def hash_fraction(key: str) -> float:
    """A fixed pseudo-random number in [0, 1) for a string: the same on every machine."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def choose_validation(sizes: list[tuple[str, int]], fraction: float) -> set[int]:
    """Numbers of the files that form the validation split: in the order of their names' hashes, as they fit."""
    room, chosen = fraction * sum(size for _, size in sizes), set()
    for i in sorted(range(len(sizes)), key=lambda i: (hash_fraction(sizes[i][0]), i)):
        if sizes[i][1] <= room:
            chosen.add(i)
            room -= sizes[i][1]
    return chosen


# ---------------------------------------------------------------------------------------------- files


def fit(ids: np.ndarray, tokenizer) -> np.ndarray:
    """ids in the file's dtype; refuses ids that the dtype or the vocabulary cannot hold instead of wrapping them."""
    limit = min(np.iinfo(tokenizer.dtype).max, tokenizer.vocab_size - 1)
    if ids.size and (int(ids.max()) > limit or int(ids.min()) < 0):
        worst = int(ids.max()) if int(ids.max()) > limit else int(ids.min())
        held = f"{tokenizer.dtype.name} with vocabulary {tokenizer.vocab_size} holds 0 to {limit}"
        raise ConfigError(f"token id {worst} does not fit: {held}")
    return ids.astype(tokenizer.dtype, copy=False)


class DatasetWriter:
    """train.bin, val.bin and meta.json as one unit. An existing dataset stays until the new one is on the disk."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer = Path(folder), tokenizer
        self.files, self.counts = {}, dict.fromkeys(SPLITS, 0)
        self.sums = {split: hashlib.sha256() for split in SPLITS}

    def __enter__(self):
        with contextlib.ExitStack() as held:
            held.enter_context(files.only_writer(self.folder, ConfigError))
            files.remove_leftovers(self.folder, r"(train|val)\.bin|(meta|verified|hashed)\.json")
            for split in SPLITS:
                self.files[split] = files.Output(self.folder / f"{split}.bin")
                held.callback(self.files[split].discard)
            self.held = held.pop_all()
        return self

    def __exit__(self, *error):
        self.held.close()

    def write(self, split, ids):
        data = memoryview(np.ascontiguousarray(fit(ids, self.tokenizer))).cast("B")
        with files.about(self.files[split].path):
            self.files[split].write(data)
        self.sums[split].update(data)
        self.counts[split] += len(ids)

    def commit(self, **about) -> dict:
        for split, file in self.files.items():
            if not self.counts[split]:
                raise ConfigError(f"no text for the {split} split: give more text, or another validation fraction")
            with files.about(file.path):
                file.finish()
        meta = {
            "format": FORMAT,
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.tokenizer.dtype.name,
            "tokenizer": self.tokenizer.name,
            "separator": self.tokenizer.separator,
            **{f"{split}_tokens": count for split, count in self.counts.items()},
            **{f"{split}_sha256": sha256.hexdigest() for split, sha256 in self.sums.items()},
            **about,
        }
        if not self.unchanged(meta):
            self.replace(meta)
        return meta

    def unchanged(self, meta):
        """The folder already holds exactly this. Then leave it alone: someone may be reading it."""
        try:
            return read_meta(self.folder) == meta
        except ConfigError:
            return False

    def replace(self, meta):
        """Between the removal and the return of meta.json the folder counts as incomplete, never as a mix."""
        def publish():
            (self.folder / "meta.json").unlink(missing_ok=True)
            for file in self.files.values():
                file.publish()
        files.write_json(str(self.folder / "meta.json"), meta, ready=publish)


def build(folder, tokenizer, documents, total_bytes=None, total_documents=None, quiet=False, files=None, **about):
    """Tokenise (split, text, ends) items into the dataset `folder` and return its meta. `about` goes into meta.json.
    files: how many were read, where a file may give a document to each split."""
    progress = Progress(os.path.relpath(folder), total_bytes, total_documents, quiet)
    counts = dict.fromkeys((f"{split}_documents" for split in SPLITS), 0)
    with DatasetWriter(folder, tokenizer) as dataset:
        for split, ids, n_documents, n_bytes in encode_all(tokenizer, documents):
            dataset.write(split, ids)
            counts[f"{split}_documents"] += n_documents
            progress.update(n_documents, n_bytes, len(ids))
        meta = dataset.commit(**counts, **about)
    tokens = f"{meta['train_tokens']:,} train and {meta['val_tokens']:,} validation tokens ({meta['tokenizer']})"
    progress.close(tokens, files)
    return meta


def counted(n, thing):
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def read_meta(folder) -> dict:
    """meta.json of a complete dataset; an error says what is missing or does not match. Sizes only: see `verify`."""
    folder = Path(folder)
    try:
        meta = read_json(folder / "meta.json")
        check_meta(meta)
        item = np.dtype(meta["dtype"]).itemsize
        expected = {folder / f"{split}.bin": meta[f"{split}_tokens"] * item for split in SPLITS}
        for path, size in expected.items():
            if (there := path.stat().st_size) != size:
                state = "truncated, or from another preparation" if there else "empty"
                raise ConfigError(f"{path} is {state}: it has {there} bytes, meta.json says {size}: {AGAIN}")
    except FileNotFoundError as e:
        raise ConfigError(f"{folder} is not a complete dataset, {Path(e.filename).name} is missing: {AGAIN}") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(f"{folder / 'meta.json'} is damaged ({type(e).__name__}: {e}): {AGAIN}") from e
    return meta


def read_json(path, most=1 << 24):
    """What a small file holds. ValueError for a large one, which would fill the memory."""
    if os.path.getsize(path) > most:
        raise ValueError(f"it has more than {most >> 20} MB")
    return json.loads(Path(path).read_text(encoding="utf-8"))


def check_meta(meta):
    """ValueError, KeyError or TypeError where a number, a type or a checksum is none."""
    for key in ("vocab_size", *(f"{split}_tokens" for split in SPLITS)):
        if type(meta[key]) is not int or not 0 < meta[key] < 2**48:
            raise ValueError(f"{key} is {str(meta[key])[:40]!r}, not a whole number above 0")
    if not isinstance(meta["dtype"], str) or np.dtype(meta["dtype"]).kind not in "ui":
        raise ValueError(f"dtype is {str(meta['dtype'])[:40]!r}, not one of whole numbers")
    for key in ("tokenizer", *(f"{split}_sha256" for split in SPLITS)):
        if not isinstance(meta[key], str):
            raise ValueError(f"{key} is {str(meta[key])[:40]!r}, not a text")


def verify(folder) -> dict:
    """read_meta, and the checksums of all tokens."""
    meta = read_meta(folder)
    for split in SPLITS:
        with open(Path(folder) / f"{split}.bin", "rb") as f:
            compare(f.name, sha256_of(f.fileno()), meta[f"{split}_sha256"])
    return meta


def compare(path, checksum, expected):
    if checksum != expected:
        raise ConfigError(f"{path} does not match its checksum in meta.json: {AGAIN}")


def sha256_of(descriptor, seconds=10):
    """The checksum of an open file. What takes long says how far it is, every so many seconds."""
    with open(os.dup(descriptor), "rb") as f:
        f.seek(0)
        sha256, done, shown, size = hashlib.sha256(), 0, time.monotonic(), os.fstat(descriptor).st_size
        while block := f.read(1 << 20):
            sha256.update(block)
            done += len(block)
            if time.monotonic() - shown > seconds:
                shown = time.monotonic()
                print(f"checksum: {done / 1e9:.1f} of {size / 1e9:.1f} GB read", file=sys.stderr, flush=True)
    return sha256.hexdigest()


def stamp(status):
    """What changes with a file's contents. Nobody sets the last one back."""
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def checksums(folder, descriptors, meta=None):
    """{split: SHA-256} of open files, compared with any of meta.json. A file is read once: a record
    beside it remembers the checksum for as long as its size and times stay."""
    record = Path(folder) / ("verified.json" if meta else HASHED)
    ours = record.is_file() or not os.path.lexists(record)  # a pipe would keep us waiting
    try:
        known = read_json(record) if ours else None
    except (OSError, ValueError, RecursionError):
        known = None
    good = {}
    for split, descriptor in descriptors.items():
        path, now = f"{folder}/{split}.bin", stamp(os.fstat(descriptor))
        entry = known.get(split) if isinstance(known, dict) else None
        *then, checksum = entry if entry and isinstance(entry, list) else [None]
        if then != now or not isinstance(checksum, str):
            if now[0] > 1e9:
                print(f"reading all of {path} for its checksum, once", file=sys.stderr, flush=True)
            checksum = sha256_of(descriptor)
            if stamp(os.fstat(descriptor)) != now:
                raise ConfigError(f"{path} was changed by another program while it was read: start again later")
        if meta:
            compare(path, checksum, meta[f"{split}_sha256"])
        good[split] = [*now, checksum]
    if known != good and ours:
        with contextlib.suppress(OSError):  # a folder that is not ours to write to: checked at each start
            files.write_json(str(record), good)
    return {split: checksum for split, (*_, checksum) in good.items()}


# ---------------------------------------------------------------------------------------------- progress


class Progress:
    """One line on stderr: rewritten in a terminal, a plain line every 10 s elsewhere."""

    def __init__(self, label, total_bytes=None, total_documents=None, quiet=False):
        self.label, self.total_bytes, self.total_documents, self.quiet = label, total_bytes, total_documents, quiet
        self.documents = self.bytes = self.tokens = 0
        self.start = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def update(self, documents, n_bytes, tokens):
        self.documents, self.bytes, self.tokens = self.documents + documents, self.bytes + n_bytes, self.tokens + tokens
        now = time.monotonic()
        if not self.quiet and now - self.shown >= (0.1 if self.terminal else 10):
            self.shown = now
            self.print(self.line(now - self.start), end="" if self.terminal else "\n")

    def line(self, seconds):
        megabytes, total = self.bytes / 1e6, self.total_bytes or self.total_documents
        documents, speed = counted(self.documents, "document"), megabytes / seconds
        text = f"{documents}  {megabytes:,.1f} MB  {self.tokens:,} tokens  {speed:.1f} MB/s"
        done = (self.bytes if self.total_bytes else self.documents) / total if total else 0
        if 0 < done < 1:
            left = round(seconds / done - seconds)
            text += f"  {done:.0%}  {left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        return text

    def close(self, summary, documents=None):
        read = counted(documents or self.documents, "document")
        seconds = max(time.monotonic() - self.start, 1e-9)
        if not self.quiet:
            self.print(f"{summary} from {read}, {self.bytes / 1e6:,.1f} MB, in {seconds:.1f} s")

    def print(self, text, end="\n"):
        print(f"{terminal.CLEAR if self.terminal else ''}{self.label}: {text}", end=end, file=sys.stderr, flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Check prepared datasets against their checksums.")
    parser.add_argument("folder", nargs="+", help="a folder with train.bin, val.bin and meta.json")
    args = parser.parse_args(argv)

    def check():
        for folder in args.folder:
            meta = verify(folder)
            print(f"{folder}: ok, {meta['train_tokens']:,} train and {meta['val_tokens']:,} validation tokens")

    return run(check)


if __name__ == "__main__":
    sys.exit(main())
