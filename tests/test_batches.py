import glob
import os
import time

import numpy as np
import pytest
import torch

from configurator import ConfigError
from tests.helpers import write_dataset
from trainer import batches
from trainer.batches import Dataset, window_starts


def make(tmp_path, n=500, vocab_size=256, **kwargs):
    return write_dataset(tmp_path / "d", np.arange(n) % vocab_size, np.arange(n // 2) % vocab_size, vocab_size, **kwargs)


def test_targets_are_inputs_one_later_and_come_from_the_file(tmp_path):
    data = Dataset(make(tmp_path), 16)
    x, y = data.train_batch(seed=3, first=0, count=5, device="cpu")
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (5, 16)
    starts = window_starts(3, 0, 5, 500 - 16)
    assert x.tolist() == [[(s + t) % 256 for t in range(16)] for s in starts]
    assert torch.equal(x[:, 1:], y[:, :-1])


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_the_same_examples_come_in_the_same_order_whatever_the_micro_batch(tmp_path, micro):
    data = Dataset(make(tmp_path), 16)
    whole = data.train_batch(7, 40, 8, "cpu")[0]
    parts = torch.cat([data.train_batch(7, 40 + i, micro, "cpu")[0] for i in range(0, 8, micro)])
    assert torch.equal(whole, parts)


def test_windows_cover_the_corpus_evenly_and_differ_by_seed():
    starts = window_starts(0, 0, 100_000, 100)
    counts = np.bincount(starts, minlength=100)
    assert len(counts) == 100 and 800 < counts.min() and counts.max() < 1200
    assert not np.array_equal(starts, window_starts(1, 0, 100_000, 100))
    # neighbouring seeds and numbers are unrelated: no shifted copy of the other stream
    a, b = window_starts(0, 0, 1000, 2**40), window_starts(1, 0, 1000, 2**40)
    assert not set(a.tolist()) & set(b.tolist())


def test_example_numbers_past_32_bits_work():
    far = window_starts(0, 2**40, 4, 10**9)
    assert len(set(far.tolist())) == 4 and far.min() >= 0


def test_the_last_window_is_reachable_and_inside(tmp_path):
    data = Dataset(make(tmp_path, n=34), 16)
    seen = {int(x[0]) for x in data.train_batch(0, 0, 500, "cpu")[0]}
    assert seen == set(range(34 - 16))


def test_validation_windows_are_fixed_and_evenly_spaced(tmp_path):
    data = Dataset(make(tmp_path), 16)
    starts = data.val_starts(8)
    assert starts[0] == 0 and starts[-1] == 250 - 16 - 1 and np.ptp(np.diff(starts)) <= 1
    assert len(data.val_starts(10**6)) == 250 - 16


@pytest.mark.parametrize("spoil, words", [
    (lambda d: os.remove(f"{d}/train.bin"), ["train.bin", "missing"]),
    (lambda d: open(f"{d}/val.bin", "w").close(), ["val.bin", "empty"]),
    (lambda d: os.truncate(f"{d}/train.bin", 499), ["train.bin", "499 bytes", "truncated"]),
    (lambda d: open(f"{d}/meta.json", "w").write("{"), ["meta.json is damaged", "run its prepare.py again"]),
    (lambda d: open(f"{d}/meta.json", "w").write("{}"), ["meta.json", "vocab_size"]),
    (lambda d: open(f"{d}/meta.json", "w").write('{"vocab_size": 9, "dtype": "uint8", "train_sha256": ""}'),
     ["meta.json", "train_tokens"]),
])
def test_broken_files_are_named(tmp_path, spoil, words):
    folder = make(tmp_path)
    spoil(folder)
    with pytest.raises(ConfigError) as e:
        Dataset(folder, 16)
    for word in words:
        assert word in str(e.value)


def test_a_context_longer_than_the_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="block_size=300.*val.bin has only 250 tokens"):
        Dataset(make(tmp_path), 300)


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    folder = write_dataset(tmp_path / "d", [1] * 99 + [200], [1] * 50, vocab_size=100)
    with pytest.raises(ConfigError, match="token id 200.*ends at 99"):
        Dataset(folder, 16).train_batch(0, 0, 200, "cpu")


@pytest.mark.parametrize("name, how", [
    ("wikitext-2", "data/wikitext/prepare.py"), ("openwebtext", "data/openwebtext/prepare.py"),
    ("my_own", "data/text/prepare.py")])
def test_a_dataset_not_prepared_yet_says_how(name, how, tmp_path, monkeypatch):
    for script in glob.glob("data/*/prepare.py", root_dir=batches.ROOT):  # the project's scripts, without what they made here
        (tmp_path / script).parent.mkdir(parents=True)
        (tmp_path / script).touch()
    monkeypatch.setattr(batches, "ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=how):
        Dataset(name, 16)


def changed_in_place(folder, how):
    path = os.path.join(folder, "train.bin")
    time.sleep(0.02)  # a tick of the clock that files have
    with open(path, "r+b") as f:
        if how == "cut":
            f.truncate(100)
        else:
            times = os.fstat(f.fileno())
            f.write(bytes([5] * 50))
    if how == "time set back":
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("how", ["cut", "written", "time set back"])
def test_data_that_change_while_they_are_in_use_are_noticed(tmp_path, how):
    folder = write_dataset(tmp_path, np.arange(500) % 64, np.arange(100) % 64)
    data = batches.Dataset(folder, 16)
    data.check()
    changed_in_place(folder, how)
    with pytest.raises(ConfigError, match="train.bin was changed by another program"):
        data.check()


def test_data_that_are_cut_while_they_are_in_use_end_in_words_and_not_in_a_signal(tmp_path):
    folder = write_dataset(tmp_path, np.arange(5000) % 64, np.arange(100) % 64)
    data = batches.Dataset(folder, 16)
    changed_in_place(folder, "cut")
    with pytest.raises(ConfigError, match="train.bin was changed by another program"):
        data.train_batch(0, 0, 50, "cpu")


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_file_that_gets_another_name_or_other_rights_is_read_on_as_it_was(tmp_path, replace, sampled):
    folder = write_dataset(tmp_path, np.arange(500) % 64, np.arange(100) % 64, dtype="uint16")
    if sampled:  # nanoGPT's: no meta.json, and no checksum of all of it
        os.unlink(tmp_path / "meta.json")
    data = batches.Dataset(folder, 16)
    before = data.train_batch(0, 0, 20, "cpu")[0]
    if replace:
        (tmp_path / "new").write_bytes(bytes(1000))
        os.replace(tmp_path / "new", tmp_path / "train.bin")
    else:
        os.chmod(tmp_path / "train.bin", 0o600)
        os.link(tmp_path / "train.bin", tmp_path / "backup")
    data.check()
    assert torch.equal(data.train_batch(0, 0, 20, "cpu")[0], before)


def test_a_dataset_that_is_given_up_closes_its_files(tmp_path):
    folder = write_dataset(tmp_path, np.arange(500) % 64, np.arange(100) % 64)
    open_files = [batches.Dataset(folder, 16).tokens["train"].descriptor for _ in range(20)]
    assert len(set(open_files)) < 3


@pytest.mark.parametrize("how", ["written", "touched", "put back"])
def test_data_of_other_rights_are_still_the_data_and_those_of_another_time_are_not(tmp_path, how):
    folder = write_dataset(tmp_path, np.arange(500) % 64, np.arange(100) % 64)
    data, path = batches.Dataset(folder, 16), tmp_path / "train.bin"
    right, times = path.read_bytes(), path.stat()
    path.chmod(0o600)
    data.check()
    if how == "touched":
        path.touch()
    else:
        path.write_bytes(bytes(500))
    if how == "put back":
        path.write_bytes(right)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ConfigError, match="was changed by another program while it was in use, at 20"):
        data.check()
