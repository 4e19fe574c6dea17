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
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

if not __package__:  # run as a script, from anywhere
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from system import files, terminal
from system.cores import usable_cores

FORMAT = 1
AGAIN = "run its prepare.py again"
HASHED = "hashed.json"  # beside data that have no meta.json: the checksums that were found
SPLITS = ("train", "val")
UNIT = 1 << 18  # characters per unit of work: about 30 ms of BPE, so that all cores finish together
WINDOW = 4  # units in flight per core: keeps cores busy while the main thread reads and writes, bounds the memory
BPE_SECONDS = 20  # for the one 0.8 MB download of GPT-2's BPE; tiktoken itself sets no limit
BPE_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"


class PrepareError(Exception):
    """An expected failure: one line that says what is wrong and what to do."""


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
    except PrepareError as e:
        message = str(e)
    except OSError as e:
        message = f"{e.strerror or e}{f': {e.filename}' if e.filename else ''}"
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            message += "; free some space or write to another disk with --out. Nothing was replaced"
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def walk(folder, **how):
    """os.walk, which would leave out what it may not read without a word."""

    def refuse(e):
        raise PrepareError(f"{e.filename} cannot be read: {e.strerror}. Make it readable, or move it away") from None

    return os.walk(folder, onerror=refuse, **how)


def bounded(function, seconds):
    """function(), or TimeoutError after `seconds`. For calls that cannot be given a timeout, such as name lookups."""
    outcome = {}

    def call():
        try:
            outcome["result"] = function()
        except Exception as e:  # noqa: BLE001 - raised again below
            outcome["error"] = e

    thread = threading.Thread(target=call, daemon=True)  # daemon: a hung call does not hold up the exit
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer in {seconds:g} s")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


# ---------------------------------------------------------------------------------------------- tokenizers


class ByteTokenizer:
    name, vocab_size, dtype, separator = "bytes", 256, np.dtype("u1"), 0

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(text if isinstance(text, bytes) else text.encode("utf-8"), np.uint8)

    def decode(self, ids) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode("utf-8", errors="replace")


class GPT2Tokenizer:
    name, vocab_size, dtype, separator = "gpt2", 50257, np.dtype("<u2"), 50256

    def __init__(self):
        self.bpe = load_bpe()

    def encode(self, text: str) -> np.ndarray:
        return self.bpe.encode_to_numpy(text, disallowed_special=())  # "<|endoftext|>" in a text is just text

    def decode(self, ids) -> str:
        return self.bpe.decode(np.asarray(ids).tolist())


class CharacterTokenizer:
    """One id for each character of a list, as nanoGPT's meta.pkl has it."""

    name = "characters"

    def __init__(self, characters):
        self.characters, self.vocab_size = characters, len(characters)
        self.ids = {character: i for i, character in enumerate(characters)}

    def encode(self, text: str) -> np.ndarray:
        unknown = [c for c in text if c not in self.ids]
        if unknown:
            known = f"{self.vocab_size} that the model was trained on"
            raise PrepareError(f"character {unknown[0]!r} is none of the {known}")
        return np.array([self.ids[c] for c in text], np.int64)

    def decode(self, ids) -> str:
        return "".join(self.characters[i] for i in ids)


TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}


def tokenizer_of(meta):
    """The tokenizer of a dataset, from its meta.json or from what a checkpoint holds of that."""
    return CharacterTokenizer(meta["characters"]) if meta.get("characters") else get_tokenizer(meta["tokenizer"])


def get_tokenizer(name):
    if name not in TOKENIZERS:
        raise PrepareError(f"tokenizer '{name}': expected one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def load_bpe():
    """GPT-2's BPE. tiktoken's "r50k_base" has the same ids as its "gpt2" and needs one file instead of two."""
    try:
        import tiktoken

        return bounded(lambda: tiktoken.get_encoding("r50k_base"), BPE_SECONDS)
    except ImportError as e:
        raise PrepareError("GPT-2's BPE needs the package tiktoken: pip install tiktoken") from e
    except (OSError, ValueError) as e:  # requests' errors and TimeoutError are OSErrors; ValueError: a corrupt file
        raise PrepareError(
            f"cannot get GPT-2's BPE from {BPE_URL} ({type(e).__name__}): check the network or HTTPS_PROXY, or fetch "
            f"that file elsewhere, save it as {hashlib.sha1(BPE_URL.encode()).hexdigest()} in a folder, and set "
            "TIKTOKEN_CACHE_DIR to that folder; --tokenizer=bytes (data/text) and data/stdlib need no download"
        ) from e


# GPT-2's pre-tokeniser never joins a non-space with a space after it, or a letter or digit with punctuation
# after it, and neither its look-ahead nor its `$` sees across such a place. So BPE of the two sides gives the same
# ids as BPE of the whole. Python's \s and \w decide only where both agree with the tokeniser's Unicode classes.
SAFE_CUT = re.compile(r"\S(?=[ \n\r\t])|[^\W_](?=[!-/:-@\[-^`{-~、。，！？；：])")


def cut(text: str, low: int, high: int) -> int:
    """The last safe place to cut text in (low, high]; `high` itself where there is none (one 'word' all along)."""
    for reach in (256, 8192, high - low):
        ends = [match.end() for match in SAFE_CUT.finditer(text, max(low, high - reach), high + 1)]
        if ends:
            return ends[-1]
    return high


def pieces(blocks, size=UNIT):
    """A stream of text blocks, cut anew into pieces of at most `size` characters that are safe to encode apart."""
    rest = ""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > size:
            end = cut(rest, start, start + size)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


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
        raise PrepareError(f"token id {worst} does not fit: {held}")
    return ids.astype(tokenizer.dtype, copy=False)


class TokenFile:
    """Writes `path` under a temporary name; `close` makes it durable, `publish` gives it its name."""

    def __init__(self, path: Path, tokenizer):
        self.path, self.tokenizer, self.tokens, self.sha256 = path, tokenizer, 0, hashlib.sha256()
        self.temporary = Path(files.beside(path))
        self.file = open(self.temporary, "wb")  # noqa: SIM115 - closed by publish or discard

    def write(self, ids: np.ndarray):
        data = memoryview(np.ascontiguousarray(fit(ids, self.tokenizer))).cast("B")
        with files.about(str(self.path)):
            self.file.write(data)
        self.sha256.update(data)
        self.tokens += len(ids)

    def close(self):
        with files.about(str(self.path)):
            self.file.flush()
            os.fsync(self.file.fileno())

    def publish(self):
        os.replace(self.temporary, self.path)
        self.file.close()

    def discard(self):
        with contextlib.suppress(OSError):  # a full disk: what it still holds is not wanted
            self.file.close()
        self.temporary.unlink(missing_ok=True)


class DatasetWriter:
    """train.bin, val.bin and meta.json as one unit. An existing dataset stays until the new one is on the disk."""

    def __init__(self, folder, tokenizer):
        self.folder, self.tokenizer, self.files = Path(folder), tokenizer, {}
        self.lock = files.only_writer(self.folder, PrepareError)

    def __enter__(self):
        self.lock.__enter__()
        try:
            files.remove_leftovers(self.folder, r"(train|val)\.bin|(meta|verified|hashed)\.json")
            self.files = {split: TokenFile(self.folder / f"{split}.bin", self.tokenizer) for split in SPLITS}
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error):
        for file in self.files.values():
            file.discard()
        self.lock.__exit__(*error)

    def write(self, split, ids):
        self.files[split].write(ids)

    def commit(self, **about) -> dict:
        for split, file in self.files.items():
            if not file.tokens:
                raise PrepareError(f"no text for the {split} split: give more text, or another validation fraction")
            file.close()
        meta = {
            "format": FORMAT,
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.tokenizer.dtype.name,
            "tokenizer": self.tokenizer.name,
            "separator": self.tokenizer.separator,
            **{f"{split}_tokens": file.tokens for split, file in self.files.items()},
            **{f"{split}_sha256": file.sha256.hexdigest() for split, file in self.files.items()},
            **about,
        }
        if not self.unchanged(meta):
            self.replace(meta)
        return meta

    def unchanged(self, meta):
        """The folder already holds exactly this. Then leave it alone: someone may be reading it."""
        try:
            return read_meta(self.folder) == meta
        except PrepareError:
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
            if (found := path.stat().st_size) != size:
                raise PrepareError(f"{path} has {found:,} bytes, meta.json says {size:,}: {AGAIN}")
    except FileNotFoundError as e:
        raise PrepareError(f"{folder} is not a complete dataset, {Path(e.filename).name} is missing: {AGAIN}") from e
    except (ValueError, KeyError, TypeError) as e:
        raise PrepareError(f"{folder / 'meta.json'} is damaged ({type(e).__name__}: {e}): {AGAIN}") from e
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


def compare(path, found, expected):
    if found != expected:
        raise PrepareError(f"{path} does not match its checksum in meta.json: {AGAIN}")


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
                raise PrepareError(f"{path} was changed by another program while it was read: start again later")
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
        start, rest = ("\r", "\x1b[K") if self.terminal else ("", "")
        print(f"{start}{self.label}: {text}{rest}", end=end, file=sys.stderr, flush=True)


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
