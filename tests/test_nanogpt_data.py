"""nanoGPT's own datasets, as its scripts write them."""

import os
import pickle
import pickletools

import numpy as np
import pytest

import sample
import train
from data import nanogpt, tokens
from system.errors import ConfigError
from tests.helpers import TINY
from trainer import batches, log, plan

TEXT = "the right batch size is the one that you need. " * 120


def write(folder, vocabulary=None, text=TEXT, extra=None):
    """As nanoGPT's prepare.py scripts do: uint16 files, and for characters a meta.pkl."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = sorted(set(text)) if vocabulary is None else vocabulary
    stoi = {c: i for i, c in enumerate(characters)}
    ids = np.array([stoi[c] for c in text], dtype=np.uint16)
    ids[:-500].tofile(folder / "train.bin")
    ids[-500:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(characters), "itos": dict(enumerate(characters)), "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(extra or meta))
    return str(folder)


def arguments(folder, out, **changes):
    return [f"--{k}={v}" for k, v in {**TINY, "dataset": folder, "out_dir": out, "max_tokens": 640, **changes}.items()]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    from plots import report
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")


def test_characters_train_resume_and_sample_after_one_line_of_assumptions(tmp_path, capsys):
    folder = write(tmp_path / "shakespeare_char")
    before = {name: os.stat(os.path.join(folder, name)) for name in os.listdir(folder)}
    train.main(arguments(folder, tmp_path / "run", stop_tokens=320))
    said = [line for line in capsys.readouterr().out.splitlines() if "no meta.json" in line]
    assert said == [f"{folder} has no meta.json, so it is read as nanoGPT's: token ids in uint16, {len(set(TEXT))} characters, "
                    "as meta.pkl says"]
    assert train.main([str(tmp_path / "run")]) == 0 and log.read(tmp_path / "run")[-1]["tokens"] >= 640
    left = {name: os.stat(os.path.join(folder, name)) for name in os.listdir(folder)}
    assert left.pop("hashed.json") and left == before, "nothing else is written there"
    capsys.readouterr()
    assert sample.main([str(tmp_path / "run"), "--prompt=the ", "--tokens=20", "--device=cpu"]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text.startswith("the ") and len(text) == 24 and set(text) <= set(TEXT)
    with pytest.raises(SystemExit):
        sample.main([str(tmp_path / "run"), "--prompt=XYZ"])
    assert "character 'X' is none of the" in capsys.readouterr().err


def test_without_meta_pkl_the_ids_are_gpt2s(tmp_path):
    folder = write(tmp_path / "openwebtext")
    os.unlink(os.path.join(folder, "meta.pkl"))
    data = batches.Dataset(folder, 16)
    assert (data.vocab_size, data.tokenizer, data.dtype) == (50257, "gpt2", np.uint16) and "GPT-2's vocabulary" in data.assumed
    x, y = data.train_batch(0, 0, 4, "cpu")
    stoi = {c: i for i, c in enumerate(sorted(set(TEXT)))}
    assert x.shape == (4, 16) and set(x.flatten().tolist()) <= set(stoi.values())
    assert plan.vocabulary(type("C", (), {"dataset": folder, "block_size": 16}))[0] == 50257


@pytest.mark.parametrize("change", [lambda ids: ids[::-1], lambda ids: np.where(np.arange(len(ids)) == 2345, 0, ids)])
def test_another_file_of_the_same_length_is_another_dataset(tmp_path, monkeypatch, capsys, change):
    folder = write(tmp_path / "d", text=TEXT * 60)  # long enough that a sample of it would miss one id
    path = os.path.join(folder, "train.bin")
    first = batches.Dataset(folder, 16).meta["train_sha256"]
    with monkeypatch.context() as patch:
        patch.setattr(tokens, "sha256_of", lambda *_: pytest.fail("read again"))
        assert batches.Dataset(folder, 16).meta["train_sha256"] == first
    train.main(arguments(folder, tmp_path / "run", stop_tokens=320))
    times = os.stat(path)
    change(np.fromfile(path, np.uint16)).tofile(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(SystemExit):
        train.main([str(tmp_path / "run")])
    assert "has other contents than the checkpoint's" in capsys.readouterr().err


def test_other_characters_behind_the_same_ids_are_another_dataset(tmp_path, capsys):
    folder = write(tmp_path / "d")
    train.main(arguments(folder, tmp_path / "run", stop_tokens=320))
    write(tmp_path / "d", vocabulary=sorted(set(TEXT))[::-1], text=TEXT[::-1])
    for name in ("train.bin", "val.bin"):
        os.unlink(os.path.join(folder, name))
    write(tmp_path / "e")
    for name in ("train.bin", "val.bin"):
        os.rename(tmp_path / "e" / name, tmp_path / "d" / name)
    with pytest.raises(SystemExit):
        train.main([str(tmp_path / "run")])
    assert "(it was prepared anew; characters in meta.json)" in capsys.readouterr().err


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


EVIL = pickle.dumps({"vocab_size": 3, "itos": Evil(), "stoi": {}})


def test_no_code_of_a_pickle_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("it ran"))
    folder = write(tmp_path / "d")
    for data in (EVIL, b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(len), pickle.dumps(pickletools.OpcodeInfo)):
        (tmp_path / "d" / "meta.pkl").write_bytes(data)
        with pytest.raises(ConfigError, match="more than plain values"):
            nanogpt.describe(folder)
    with pytest.raises(SystemExit) as e:
        train.main(arguments(folder, tmp_path / "run"))
    assert e.value.code == 2 and not (tmp_path / "run").exists() and "perhaps code" in capsys.readouterr().err


@pytest.mark.parametrize("data, words", [
    (b"", "not a readable pickle"), (b"\x80\x04N", "not a readable pickle"), (b"garbage", "not a readable pickle"),
    (pickle.dumps([1]), "does not list the vocabulary"), (pickle.dumps({"vocab_size": 3, "itos": {0: "a"}}), "does not list"),
    (pickle.dumps({"vocab_size": 10**9, "itos": {0: "a"}}), "does not list"),
    (b"\x80\x04N\x72\xff\xff\xff\xff.", "plain values"),
    (pickle.dumps({"vocab_size": 2, "itos": {0: "a", 1: 7}}), "does not list")])
def test_a_meta_pkl_that_is_none_is_one_line(tmp_path, data, words):
    folder = write(tmp_path / "d")
    (tmp_path / "d" / "meta.pkl").write_bytes(data)
    with pytest.raises(ConfigError, match=words) as e:
        nanogpt.describe(folder)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_pickle_is_read(tmp_path, protocol):
    meta = {"vocab_size": 2, "itos": {0: "a", 1: "\u00e4"}, "stoi": {"a": 0, "\u00e4": 1}}
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(meta, protocol))
    assert nanogpt.read_pickle(str(tmp_path / "meta.pkl")) == meta


def test_odd_files_and_ids_beyond_the_vocabulary_are_named(tmp_path, capsys):
    folder = write(tmp_path / "d")
    with open(os.path.join(folder, "val.bin"), "ab") as f:
        f.write(b"x")
    with pytest.raises(SystemExit):
        train.main(arguments(folder, tmp_path / "run"))
    assert "val.bin holds 1001 bytes: whole uint16 numbers" in capsys.readouterr().err
    folder = write(tmp_path / "e", extra={"vocab_size": 2, "itos": {0: "a", 1: "b"}, "stoi": {}})
    with pytest.raises(SystemExit):
        train.main(arguments(folder, tmp_path / "run"))
    assert "as assumed without a meta.json, ends at 1" in capsys.readouterr().err


def test_a_preparation_of_ours_that_was_killed_is_not_taken_for_nanogpts(tmp_path):
    folder = write(tmp_path / "d")
    assert nanogpt.is_there(folder)
    (tmp_path / "d" / "meta.json.12ab.tmp").write_text("{}")
    assert not nanogpt.is_there(folder) and not nanogpt.is_there(str(tmp_path / "none"))


def test_one_file_is_one_document_in_the_report(tmp_path, capsys):
    from data.text import prepare
    (tmp_path / "book.txt").write_text("A line of text.\n" * 200)
    assert prepare.main([str(tmp_path / "book.txt"), f"--out={tmp_path}/out"]) == 0
    assert "from 1 document, 0.0 MB" in capsys.readouterr().err
