"""
Token files -> batches. A batch is a pure function of (seed, example number): example n of a run reads
the window at hash(seed, n) mod (len - block_size). The same examples come in the same order whatever the
micro-batch, the accumulation or the number of processes, and resuming needs one integer.
"""

import os
import time
import weakref

import numpy as np
import torch

from data import nanogpt, tokens
from system import files
from system.errors import ConfigError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def find(dataset):
    """The prepared folder of a dataset."""
    folder = folder_of(dataset)
    if is_prepared(folder):
        return folder
    if dataset == "stdlib":
        from data.stdlib import prepare  # embedded: made on the spot, no network
        with files.only_writer(os.path.join(folder, "first"), ConfigError, wait=True):  # of several first runs one makes it
            if not os.path.isfile(os.path.join(folder, "meta.json")):
                prepare.prepare()
        return folder
    if os.path.isfile(dataset) and not dataset.endswith(".bin"):
        raise ConfigError(f"dataset={dataset!r} is a file: python data/text/prepare.py {dataset} --out=data/mytext, and then "
                          "--dataset=mytext")
    script = os.path.join("data", dataset.split("-")[0], "prepare.py")
    how = f"run python {script}" if os.path.isfile(os.path.join(ROOT, script)) else \
        "prepare your own files with python data/text/prepare.py, or take dataset=stdlib"
    raise ConfigError(f"dataset={dataset!r}: no meta.json in {folder}: {how}")


def folder_of(dataset):
    """A path, or a name in data/, beside this program or where the user is."""
    here = os.path.join("data", dataset)
    return dataset if os.path.isdir(dataset) else here if is_prepared(here) else os.path.join(ROOT, "data", dataset)


def is_prepared(folder):
    return os.path.isfile(os.path.join(folder, "meta.json")) or nanogpt.is_there(folder)


class Dataset:
    """Both splits of a prepared dataset, checked against its meta.json and the context length."""

    def __init__(self, dataset, block_size):
        self.folder = find(dataset)
        self.block_size = block_size
        self.assumed = None  # in words, where there is no meta.json
        if os.path.isfile(os.path.join(self.folder, "meta.json")):
            self.meta = tokens.read_meta(self.folder)
        else:
            self.meta, self.assumed = nanogpt.describe(self.folder)
        self.vocab_size, self.dtype = self.meta["vocab_size"], np.dtype(self.meta["dtype"])
        self.tokenizer = self.meta["tokenizer"]
        self.tokens = {split: self._open(split) for split in tokens.SPLITS}
        checksums = tokens.checksums(self.folder, {split: ids.descriptor for split, ids in self.tokens.items()},
                                     None if self.assumed else self.meta)
        for split, ids in self.tokens.items():
            ids.checksum = self.meta[f"{split}_sha256"] = checksums[split]

    def _open(self, split):
        path, count = os.path.join(self.folder, f"{split}.bin"), self.meta[f"{split}_tokens"]
        if count <= self.block_size:
            raise ConfigError(f"block_size={self.block_size}: {path} has only {count} tokens; take block_size below {count}")
        return OpenTokens(path, self.dtype)

    def check(self):
        """Refuse data that somebody changed while they were in use."""
        for ids in self.tokens.values():
            ids.check()

    def train_batch(self, seed, first, count, device):
        """Examples first .. first + count - 1 of the run: inputs and targets, (count, block_size) int64."""
        starts = window_starts(seed, first, count, len(self.tokens["train"]) - self.block_size)
        return self._windows("train", starts, device)

    def val_starts(self, windows):
        """A fixed, evenly spaced set of validation windows, so that losses compare across runs."""
        last = len(self.tokens["val"]) - self.block_size - 1
        return np.unique(np.linspace(0, last, min(windows, last + 1)).astype(np.int64))

    def val_batch(self, starts, device):
        return self._windows("val", starts, device)

    def _windows(self, split, starts, device):
        ids = self.tokens[split].windows(starts, self.block_size + 1)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            known = "as assumed without a meta.json, " if self.assumed else "of meta.json "
            wrong, end = (low, "begins at 0") if low < 0 else (high, f"ends at {self.vocab_size - 1}")
            raise ConfigError(f"{self.folder}/{split}.bin holds token id {wrong}, the vocabulary {known}{end}: prepare the "
                              "dataset again")
        ids = torch.from_numpy(ids.astype(np.int64))
        if torch.device(device).type == "cuda":  # pinned, so that the host goes on while the copy waits its turn on the stream
            ids = ids.pin_memory().to(device, non_blocking=True)
        else:
            ids = ids.to(device)
        return ids[:, :-1], ids[:, 1:]


class OpenTokens:
    """The ids in a file that stays open: what takes its name later is not read. A file that is mapped and cut would end the
    process; of this one a read comes out short."""

    checksum = None  # of the whole file, once it is known

    def __init__(self, path, dtype):
        self.path, self.dtype = path, dtype
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.descriptor)
        self.status = os.fstat(self.descriptor)

    def __len__(self):
        return self.status.st_size // self.dtype.itemsize

    def windows(self, starts, length):
        """(len(starts), length) ids, from those places on."""
        size, file = self.dtype.itemsize, self.descriptor
        try:
            data = b"".join([pread(file, size * length, size * start) for start in starts.tolist()])
        except OSError as e:
            raise OSError(e.errno, e.strerror, self.path) from None
        if len(data) != size * length * len(starts):
            raise self.changed()
        return np.frombuffer(data, self.dtype).reshape(len(starts), length)

    def check(self):
        """A file that was written to was changed, even if all was put back since. chmod, a link or a removal change nothing."""
        old, now = self.status, os.fstat(self.descriptor)
        if (now.st_size, now.st_mtime_ns) != (old.st_size, old.st_mtime_ns):
            raise self.changed()
        if now.st_ctime_ns != old.st_ctime_ns and (
                rights(now) == rights(old) or tokens.sha256_of(self.descriptor) != self.checksum):
            raise self.changed()
        self.status = now

    def changed(self):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(os.fstat(self.descriptor).st_ctime))
        return ConfigError(f"{self.path} was changed by another program while it was in use, at {when}: what was computed "
                           "since may be wrong and is not saved. Restore it, or prepare it again")


def rights(status):
    """What else a new st_ctime may be from."""
    return status.st_mode, status.st_nlink, status.st_uid, status.st_gid


def seek_and_read(file, size, at):
    os.lseek(file, at, os.SEEK_SET)
    return os.read(file, size)


pread = getattr(os, "pread", seek_and_read)  # Windows has none


def window_starts(seed, first, count, n_windows):
    """hash(seed, n) mod n_windows for n = first .. first + count - 1."""
    n = np.arange(first, first + count, dtype=np.uint64)
    key = splitmix64(np.array([seed], dtype=np.uint64))
    return (splitmix64(n ^ key) % np.uint64(n_windows)).astype(np.int64)


def splitmix64(x):
    """Steele, Lea & Flood 2014: a bijection of 64-bit integers whose outputs pass for random. Wraps around by design."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
