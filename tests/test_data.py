"""Datasets: contents, splits, checksums, exact BPE, flat memory, atomic files, and errors that say what to do."""

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from configurator import ConfigError
from data import hub, tokenizers, tokens
from data.openwebtext import prepare as openwebtext
from data.python import prepare as python_sources
from data.stdlib import prepare as stdlib
from data.text import prepare as text
from data.wikitext import prepare as wikitext
from trainer import batches

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
BPE_FILE = "0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"  # the name under which tiktoken looks for r50k_base


def shared(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} in ../shared/data")
    return path


@pytest.fixture(scope="session")
def bpe_cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiktoken")
    shutil.copy(shared("r50k_base.tiktoken"), folder / BPE_FILE)
    return folder


@pytest.fixture
def gpt2(bpe_cache, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    return tokenizers.get_tokenizer("gpt2")


def documents(folder, split):
    """The documents of a split, as arrays of ids. Checks size, checksum, and that every document ends."""
    meta = tokens.verify(folder)
    ids = np.fromfile(Path(folder) / f"{split}.bin", {"uint8": "u1", "uint16": "<u2"}[meta["dtype"]])
    assert len(ids) == meta[f"{split}_tokens"] and ids[-1] == meta["separator"]
    ends = np.flatnonzero(ids == meta["separator"])
    assert len(ends) == meta[f"{split}_documents"]
    return np.split(ids, ends + 1)[:-1]


def contents(folder, split, tokenizer=None):
    """The documents of a split as text (or bytes, without a tokenizer), without their separators."""
    ids = [document[:-1] for document in documents(folder, split)]
    return [tokenizer.decode(i) if tokenizer else i.tobytes() for i in ids]


def run_python(*args, env=None, cwd=None):
    env = {**os.environ, **(env or {})}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=env, cwd=cwd, timeout=60)


def run_code(code, *args, **kwargs):
    kwargs.setdefault("env", {})["PYTHONPATH"] = str(ROOT)
    return run_python("-c", code, *args, **kwargs)


def one_error_line(stderr):
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), stderr
    return lines[0]


def words(n, seed=0):
    """n bytes or a little more of text in lines, cheap to make."""
    rng = random.Random(seed)
    base = [
        f"{rng.choice(['Alice', 'the', 'don’t', 'it’s', 'x_1', '3.14'])} {rng.randrange(10**6)} tokens"
        for _ in range(997)
    ]
    line = "\n".join(" ".join(rng.sample(base, 12)) for _ in range(200)) + "\n"
    return line * (n // len(line.encode()) + 1)


# ---------------------------------------------------------------------------------------------- embedded corpus


def test_stdlib_holds_every_library_file_once_and_validation_is_unseen(tmp_path):
    meta = stdlib.prepare(tmp_path, quiet=True)
    train, val = contents(tmp_path, "train"), contents(tmp_path, "val")
    library = Path(os.__file__).parent
    expected = sorted(t for p in stdlib.library_files(library) if (t := p.read_bytes()).strip() and b"\0" not in t)
    assert sorted(train + val) == expected
    assert (library / "argparse.py").read_bytes() in expected
    assert not set(train) & set(val)
    assert 0.05 < meta["val_tokens"] / (meta["train_tokens"] + meta["val_tokens"]) < 0.10
    assert 8e6 < meta["train_tokens"] + meta["val_tokens"] < 20e6
    assert (meta["vocab_size"], meta["dtype"], meta["tokenizer"], meta["format"]) == (256, "uint8", "bytes", 1)
    assert json.loads((tmp_path / "meta.json").read_text()) == meta
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_stdlib_leaves_out_installed_packages_and_tests(tmp_path):
    for name in (
        "os.py",
        "json/decoder.py",
        "site-packages/numpy.py",
        "test/test_os.py",
        "json/tests/a.py",
        "sitecustomize.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [p.relative_to(tmp_path).as_posix() for p in stdlib.library_files(tmp_path)] == ["json/decoder.py", "os.py"]


def test_preparing_the_same_again_leaves_the_files_alone(tmp_path):
    first = stdlib.prepare(tmp_path, quiet=True)
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in tmp_path.iterdir()}
    assert stdlib.prepare(tmp_path, quiet=True) == first
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in tmp_path.iterdir()} == before


def test_python_sources_are_the_library_and_the_pinned_packages_without_their_tests(tmp_path, monkeypatch):
    requirements = tmp_path / "requirements.txt"
    requirements.write_text('-r other.txt\ntiktoken==0.14.0\npytest==1; python_version >= "3"\npytest==2; x < "a"\n')
    assert python_sources.pinned(requirements) == ["pytest", "tiktoken"]
    monkeypatch.setattr(python_sources.stdlib, "library_texts", lambda library: {"os.py": b"import sys\n"})
    texts, package_texts = {"os.py": b"import sys\n"}, python_sources.package_texts
    for name in ("tiktoken", "pytest"):
        texts |= package_texts(name)
    assert "tiktoken/core.py" in texts and b"class Encoding" in texts["tiktoken/core.py"]
    assert all(name.endswith(".py") and ".." not in name for name in texts)
    meta = python_sources.prepare(tmp_path / "out", quiet=True, requirements=requirements)
    assert meta["train_documents"] + meta["val_documents"] == len(texts)
    assert meta["train_tokens"] + meta["val_tokens"] == sum(len(t) + 1 for t in texts.values()), "each ends with a 0"
    assert "tiktoken 0.14.0" in meta["source"]
    assert "numpy/tests/test_matlib.py" not in package_texts("numpy"), "no tests"


def test_python_sources_of_a_package_that_is_not_there_are_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "requirements.txt").write_text("no_such_package==1\n")
    monkeypatch.setattr(python_sources.stdlib, "library_texts", lambda library: {})
    with pytest.raises(ConfigError, match="no_such_package is not installed: pip install -r requirements.txt"):
        python_sources.prepare(tmp_path / "out", quiet=True, requirements=tmp_path / "requirements.txt")


def test_stdlib_script_runs_from_any_folder(tmp_path):
    done = run_python(ROOT / "data/stdlib/prepare.py", "--out=here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "validation tokens (bytes)" in done.stderr and "\r" not in done.stderr
    checked = run_python(ROOT / "data/tokens.py", "here", cwd=tmp_path)
    assert checked.returncode == 0 and checked.stdout.startswith("here: ok, ")


def test_a_zipped_standard_library_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "__file__", str(tmp_path / "python311.zip" / "os.pyc"))
    assert stdlib.main([f"--out={tmp_path / 'out'}"]) == 2
    line = one_error_line(capsys.readouterr().err)
    assert "only 0 bytes of standard library source" in line and "data/text/prepare.py" in line
    assert not (tmp_path / "out").exists()


def test_imports_stay_light():
    code = """if True:
        import sys
        from data import hub, tokens
        from data.stdlib import prepare
        from data.openwebtext import prepare
        from data.wikitext import prepare
        from data.text import prepare
        print([m for m in ("tiktoken", "datasets", "torch", "requests", "pyarrow") if m in sys.modules])"""
    assert run_code(code).stdout.strip() == "[]"


# ---------------------------------------------------------------------------------------------- own text


def test_many_files_are_split_by_file(tmp_path, capsys):
    source = tmp_path / "notes"
    files = {f"{i % 3}/n{i}.{'md' if i % 2 else 'TXT'}": f"note {i}\n".encode() * (50 + i % 7) for i in range(60)}
    skipped = {".git/a.txt": b"hidden", "code.py": b"other", "empty.txt": b""}
    for name, data in {**files, **skipped}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    assert text.main([str(source), f"--out={tmp_path / 'out'}", "--val_fraction=0.1"]) == 0
    train, val = contents(tmp_path / "out", "train"), contents(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(files.values()) and not set(train) & set(val)
    assert train == [data for _, data in sorted(files.items()) if data in train]
    meta = tokens.read_meta(tmp_path / "out")
    assert meta["split"].startswith("by file: ") and "of 60 files" in meta["split"]
    assert 0.05 < meta["val_tokens"] / (meta["train_tokens"] + meta["val_tokens"]) <= 0.101


def test_the_split_does_not_depend_on_where_the_folder_is(tmp_path):
    for place in ("a", "b/c"):
        for i in range(30):
            path = tmp_path / place / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text {i} " * 20)
    one = text.prepare([tmp_path / "a"], tmp_path / "out1", val_fraction=0.2, quiet=True)
    two = text.prepare([tmp_path / "b/c"], tmp_path / "out2", val_fraction=0.2, quiet=True)
    assert one["train_sha256"] == two["train_sha256"] and one["val_sha256"] == two["val_sha256"]


def test_one_file_is_split_at_a_line_end_and_nothing_is_lost(tmp_path):
    data = words(300_000).encode()
    (tmp_path / "book.csv").write_bytes(data)  # given by name: any suffix
    meta = text.prepare([tmp_path / "book.csv"], tmp_path / "out", quiet=True)
    (train,), (val,) = contents(tmp_path / "out", "train"), contents(tmp_path / "out", "val")
    assert train + val == data and train.endswith(b"\n")
    assert abs(len(val) / len(data) - 0.05) < 0.005
    assert meta["split"].startswith("by position: the last 0.05")


@pytest.mark.parametrize("data", ["no line end " * 1000, "wordwithoutend" * 1000, "日本語" * 1000, "ab"])
def test_text_without_line_ends_is_split_between_words_or_characters(tmp_path, data):
    (tmp_path / "a.txt").write_text(data, encoding="utf-8")
    text.prepare([tmp_path / "a.txt"], tmp_path / "out", val_fraction=0.3, quiet=True)
    (train,), (val,) = contents(tmp_path / "out", "train"), contents(tmp_path / "out", "val")
    assert train.decode() + val.decode() == data


def prepared(tmp_path, *options):
    return text.main([str(tmp_path / "in"), f"--out={tmp_path / 'out'}", *options])


@pytest.fixture
def sources(tmp_path):
    """A folder of texts, and a text outside of it."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("in/a.txt", "in/sub/b.txt", "outside.txt"):
        (tmp_path / name).write_text(f"text of {name}\n" * 1000)
    return tmp_path


def test_a_folder_that_may_not_be_read_is_refused(sources, monkeypatch, capsys):
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert prepared(sources) == 2 and not (sources / "out").exists()
    assert "sub cannot be read: Permission denied. Make it" in one_error_line(capsys.readouterr().err)
    for call in (lambda: stdlib.library_files(sources / "in"), lambda: hub.find(str(sources / "in"), (".txt",))):
        (sources / "in" / "json").mkdir(exist_ok=True)
        monkeypatch.setattr(os, "scandir", lambda path: refuse(str(path).replace("json", "sub")))
        with pytest.raises(ConfigError, match="Permission denied"):
            call()


@pytest.mark.parametrize("change", [lambda f: f.truncate(9), lambda f: f.seek(0, 2) and f.write(b"more"), lambda f: 0])
@pytest.mark.parametrize("many", [False, True])
def test_a_source_that_changes_while_it_is_read_is_refused(sources, monkeypatch, capsys, change, many):
    for i in range(30 if many else 0):
        (sources / "in" / f"{i}.txt").write_text("more text\n" * 500)
    find, choose = text.find_files, tokens.choose_validation

    def chosen(*about):
        with open(sources / "in" / "sub" / "b.txt", "r+b") as f:
            change(f)
        return choose(*about)

    assert find([sources / "in"])
    monkeypatch.setattr(tokens, "choose_validation", chosen)
    code, said = prepared(sources), capsys.readouterr().err
    if os.path.getsize(sources / "in" / "sub" / "b.txt") == 21_000:
        assert code == 0
    else:
        assert code == 2 and "b.txt was changed while it was read (21,000 bytes, then" in one_error_line(said)
        assert not (sources / "out").exists()


def test_links_out_of_the_folder_are_left_out_and_said(sources, capsys):
    (sources / "in" / "z.txt").symlink_to("../outside.txt")
    (sources / "in" / "more").symlink_to("..")
    (sources / "in" / "again.txt").symlink_to("a.txt")
    assert prepared(sources) == 0
    said = capsys.readouterr().err
    assert "left out 2 links that lead out of the given folders: " in said and "in/more -> ..; name a target" in said
    held = (sources / "out" / "train.bin").read_bytes() + (sources / "out" / "val.bin").read_bytes()
    assert b"outside" not in held and held.count(b"text of in/a.txt") == 1000
    both = [str(sources / "in"), str(sources / "in" / "z.txt"), f"--out={sources / 'out'}"]
    assert text.main(both) == 0 and b"outside" in (sources / "out" / "train.bin").read_bytes()
    assert "left out 1 link that" in capsys.readouterr().err, "a link that is named is taken"


@pytest.mark.parametrize("data", [b"x" * 300_000 + b"\0" + b"x", "some text\n".encode("utf-16") * 100])
def test_a_nul_in_a_text_is_refused(sources, capsys, data):
    (sources / "in" / "c.txt").write_bytes(data)
    assert prepared(sources) == 2 and not (sources / "out").exists()
    where = data.index(b"\0")
    assert f"c.txt holds a NUL at byte {where:,}, so it is UTF-16 or no text" in one_error_line(capsys.readouterr().err)


def test_a_huge_file_among_many_small_ones_is_split_by_position(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.txt").write_text(f"small {i}\n")
    (tmp_path / "huge.txt").write_text(words(100_000))
    meta = text.prepare([tmp_path], tmp_path / "out", quiet=True)
    assert meta["split"].startswith("by position") and meta["val_tokens"] > 4_000


def test_gpt2_text_decodes_to_the_original(tmp_path, gpt2):
    original = shared("tinyshakespeare.txt").read_text(encoding="utf-8")
    meta = text.prepare([shared("tinyshakespeare.txt")], tmp_path / "out", tokenizer="gpt2", quiet=True)
    assert contents(tmp_path / "out", "train", gpt2)[0] + contents(tmp_path / "out", "val", gpt2)[0] == original
    assert (meta["vocab_size"], meta["dtype"], meta["separator"]) == (50257, "uint16", 50256)


def test_bytes_are_kept_and_gpt2_replaces_what_is_not_utf8(tmp_path, gpt2, capsys):
    data = b"\xef\xbb\xbfgood caf\xc3\xa9\n" + b"bad \xff\xfe here\n" * 3 + b"tail line\n" * 40
    (tmp_path / "a.txt").write_bytes(data)
    text.prepare([tmp_path / "a.txt"], tmp_path / "raw")
    assert b"".join(contents(tmp_path / "raw", "train") + contents(tmp_path / "raw", "val")) == data
    assert "U+FFFD" not in capsys.readouterr().err
    text.prepare([tmp_path / "a.txt"], tmp_path / "bpe", tokenizer="gpt2")
    read = "".join(contents(tmp_path / "bpe", "train", gpt2) + contents(tmp_path / "bpe", "val", gpt2))
    assert read == data.decode("utf-8-sig", errors="replace") and read.startswith("good café\nbad \ufffd\ufffd here")
    assert "warning: 6 places were not UTF-8" in capsys.readouterr().err


def test_endoftext_written_in_a_text_is_text(tmp_path, gpt2):
    (tmp_path / "a.txt").write_text("before <|endoftext|> after\n" * 50)
    text.prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="gpt2", quiet=True)
    assert "".join(contents(tmp_path / "out", "train", gpt2)).startswith("before <|endoftext|> after\n")


# ---------------------------------------------------------------------------------------------- exact, parallel BPE


@pytest.mark.parametrize("name", ["tinyshakespeare.txt", "wikitext-2/valid.txt"])
@pytest.mark.parametrize("size", [97, 1009, 65536])
def test_bpe_of_pieces_equals_bpe_of_the_whole(gpt2, name, size):
    whole = shared(name).read_text(encoding="utf-8")
    parts = list(tokenizers.pieces((whole[i : i + 7919] for i in range(0, len(whole), 7919)), size))
    assert "".join(parts) == whole and max(map(len, parts)) <= size
    assert np.array_equal(np.concatenate([gpt2.encode(p) for p in parts]), gpt2.encode(whole))


def test_every_safe_cut_is_exact_in_difficult_text(gpt2):
    """Each place that SAFE_CUT allows, in random strings of spaces, quotes, digits and letters of many scripts."""
    rng = random.Random(0)
    alphabet = [
        "a",
        "Z",
        "é",
        "ß",
        "日",
        "ा",
        "٣",
        "½",
        "一",
        "7",
        "'",
        "'s",
        "'ll",
        "_",
        "-",
        "!",
        "。",
        "，",
        "\U0001f600",
        "\u200d",
    ]
    alphabet += [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\u3000", "\x1c", "\x85", "\u0301", "^", "`"]
    checked = 0
    for _ in range(1500):
        whole = "".join(rng.choices(alphabet, k=24))
        ids = gpt2.encode(whole).tolist()
        for match in tokenizers.SAFE_CUT.finditer(whole):
            at = match.end()
            assert gpt2.encode(whole[:at]).tolist() + gpt2.encode(whole[at:]).tolist() == ids, (whole, at)
            checked += 1
    assert checked > 5000


@pytest.mark.parametrize("run", [" ", "\n", "a", "!", "字"])
def test_millions_of_equal_characters_do_not_break_the_tokeniser(tmp_path, gpt2, run):
    """tiktoken alone panics on a million spaces."""
    whole = "start" + run * 1_100_000 + "end.\n" + "more text\n" * 1000
    (tmp_path / "a.txt").write_text(whole, encoding="utf-8")
    text.prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer="gpt2", val_fraction=0.001, quiet=True)
    assert "".join(contents(tmp_path / "out", "train", gpt2) + contents(tmp_path / "out", "val", gpt2)) == whole


class SlowTokenizer(tokenizers.ByteTokenizer):
    """Units finish out of order."""

    def encode(self, text):
        time.sleep(text[0] % 7 / 1000)
        return super().encode(text)


def test_order_is_kept_and_the_work_in_flight_is_bounded(monkeypatch):
    monkeypatch.setattr(tokens, "UNIT", 100)
    produced = []

    def source():
        for i in range(300):
            produced.append(i)
            yield "train" if i % 3 else "val", bytes([i % 250 + 1]) * 100, True

    found = {"train": [], "val": []}
    encoded = tokens.encode_all(SlowTokenizer(), source())
    for consumed, (split, ids, n_documents, n_bytes) in enumerate(encoded):
        assert len(produced) - consumed <= tokens.WINDOW * tokens.usable_cores()
        assert (n_documents, n_bytes, len(ids)) == (1, 100, 101)
        found[split].append(int(ids[0]) - 1)
    assert found["train"] == [i % 250 for i in range(300) if i % 3]
    assert found["val"] == [i % 250 for i in range(300) if not i % 3]


def test_the_script_alone_tells_the_allocator_to_give_memory_back(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(tokens, "return_large_blocks", lambda: called.append(True))
    (tmp_path / "a.txt").write_text("some text\n" * 500)
    text.prepare([tmp_path / "a.txt"], tmp_path / "out", "bytes", quiet=True)
    assert not called, "train.py, which prepares its corpus so, keeps freed memory"
    assert text.main([str(tmp_path / "a.txt"), f"--out={tmp_path / 'out'}"]) == 0 and called


def mixed(n):
    """About n characters in stretches of many lengths whose strings take one, two or four bytes a character."""
    rng, stretches = random.Random(0), []
    plain = words(400_000).replace("’", "")
    while sum(map(len, stretches)) < n:
        part = plain[:rng.randrange(1_000, 400_000)]
        stretches.append(rng.choice([part, part.replace("3.14", "π"), part + "é", part + "𝛼"]))
    return "".join(stretches)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads VmHWM from /proc")
@pytest.mark.parametrize("tokenizer, size", [("bytes", 4_000_000), ("gpt2", 4_000_000)])
def test_peak_memory_is_flat_as_the_text_grows_tenfold(tmp_path, request, tokenizer, size):
    env = {"TIKTOKEN_CACHE_DIR": str(request.getfixturevalue("bpe_cache"))} if tokenizer == "gpt2" else {}
    code = """if True:
        import os, re, sys
        from data.text import prepare
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # the window of work grows with the cores
        assert prepare.main(sys.argv[1:]) == 0
        print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])"""
    peak = []
    for n in (size, 10 * size):
        (tmp_path / "a.txt").write_text(mixed(n), encoding="utf-8")
        done = run_code(code, tmp_path / "a.txt", f"--out={tmp_path / 'out'}", f"--tokenizer={tokenizer}", env=env)
        assert done.returncode == 0, done.stderr
        peak.append(int(done.stdout))
        assert tokens.read_meta(tmp_path / "out")["train_tokens"] > n / 5
    assert peak[1] < 1.15 * peak[0], peak


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "kind, ids, said",
    [
        (tokenizers.ByteTokenizer, [0, 256], "token id 256 does not fit: uint8 with vocabulary 256 holds 0 to 255"),
        (
            tokenizers.GPT2Tokenizer,
            [50257],
            "token id 50257 does not fit: uint16 with vocabulary 50257 holds 0 to 50256",
        ),
        (tokenizers.GPT2Tokenizer, [65536 + 5], "token id 65541 does not fit"),
        (tokenizers.GPT2Tokenizer, [-1, 3], "token id -1 does not fit"),
    ],
)
def test_ids_that_do_not_fit_are_refused(tmp_path, kind, ids, said):
    with pytest.raises(ConfigError, match=said), tokens.DatasetWriter(tmp_path, kind) as dataset:
        dataset.write("train", np.array(ids))
    assert list(tmp_path.iterdir()) == []


def small_dataset(folder, text=b"hello"):
    items = [("train", text * 10, True), ("val", text, True)]
    return tokens.build(folder, tokenizers.ByteTokenizer(), items, quiet=True, source="test")


KILLED = """if True:
    import os, signal, sys
    from data import tokenizers, tokens
    folder, at = sys.argv[1], int(sys.argv[2])
    def die(): os.kill(os.getpid(), signal.SIGKILL)
    def items():
        yield "train", b"world" * 10, True
        yield "train", b"w" * (3 << 20), True
        if at == 0: die()
        yield "val", b"world", True
    calls, replace = [0], os.replace
    def counted(*args):
        calls[0] += 1
        if calls[0] == at: die()
        replace(*args)
        if -calls[0] == at: die()
    os.replace = counted
    tokens.build(folder, tokenizers.ByteTokenizer(), items(), quiet=True, source="test")
"""


@pytest.mark.skipif(os.name != "posix", reason="kills with SIGKILL")
def test_a_kill_at_any_moment_leaves_the_old_dataset_the_new_one_or_an_incomplete_one(tmp_path):
    states = {}
    for at in (0, 1, -1, 2, -2, 3, -3):  # while tokenising; before and after each of the three renames
        folder = tmp_path / str(at)
        old = small_dataset(folder)
        assert run_code(KILLED, folder, at).returncode == -9
        try:
            states[at] = "old" if tokens.verify(folder) == old else "new"
        except ConfigError as e:
            assert "meta.json is missing: run its prepare.py again" in str(e)
            states[at] = "incomplete"
        new = small_dataset(folder, b"again")
        assert tokens.verify(folder) == new and len(list(folder.iterdir())) == 3  # no leftovers either
    assert states == {
        0: "old",
        1: "incomplete",
        -1: "incomplete",
        2: "incomplete",
        -2: "incomplete",
        3: "incomplete",
        -3: "new",
    }


def test_a_failure_while_reading_keeps_the_old_dataset(tmp_path):
    old = small_dataset(tmp_path)

    def items():
        yield "train", b"x" * 1_000_000, True
        raise ConfigError("connection lost")

    with pytest.raises(ConfigError, match="connection lost"):
        tokens.build(tmp_path, tokenizers.ByteTokenizer(), items(), quiet=True)
    assert tokens.verify(tmp_path) == old and len(list(tmp_path.iterdir())) == 3


def test_a_second_writer_is_refused_and_leaves_the_living_one_alone(tmp_path):
    with tokens.DatasetWriter(tmp_path, tokenizers.ByteTokenizer()) as slow:
        slow.write("train", np.zeros(5, np.uint8))
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
            small_dataset(tmp_path)
        slow.write("val", np.ones(5, np.uint8))
        meta = slow.commit(source="slow")
    assert tokens.verify(tmp_path) == meta and meta["source"] == "slow"
    assert sorted(os.listdir(tmp_path)) == ["meta.json", "train.bin", "val.bin"]


@pytest.mark.parametrize("content", ["5", '{"train": 5}', '{"train": []}', '{"train": [1]}', "[null]", "[" * 9999])
def test_a_record_of_checksums_that_is_none_is_written_again(tmp_path, content):
    meta = small_dataset(tmp_path)
    checksums(tmp_path, meta)
    right = (tmp_path / "verified.json").read_text()
    (tmp_path / "verified.json").write_text(content)
    assert checksums(tmp_path, meta)["train"] == meta["train_sha256"]
    assert (tmp_path / "verified.json").read_text() == right


def test_a_meta_json_that_would_fill_the_memory_is_refused(tmp_path):
    small_dataset(tmp_path)
    os.truncate(tmp_path / "meta.json", 5 << 30)
    with pytest.raises(ConfigError, match="meta.json is damaged .ValueError: it has more than 16 MB"):
        tokens.verify(tmp_path)
    with pytest.raises(ConfigError, match="meta.json is damaged .ValueError: it has more than 16 MB"):
        batches.Dataset(str(tmp_path), 1)


def test_a_checksum_that_takes_long_says_how_far_it_is(tmp_path, capsys):
    with open(tmp_path / "large", "w+b") as f:
        f.truncate(3 << 20)
        tokens.sha256_of(f.fileno(), seconds=0)
    assert "checksum: 0.0 of 0.0 GB read" in capsys.readouterr().err


def checksums(folder, meta):
    with open(folder / "train.bin") as train, open(folder / "val.bin") as val:
        return tokens.checksums(folder, {"train": train.fileno(), "val": val.fileno()}, meta)


def test_a_file_that_is_written_to_while_it_is_summed_up_is_refused(tmp_path, monkeypatch):
    meta, sha256_of = small_dataset(tmp_path), tokens.sha256_of

    def summed_up(descriptor):
        os.utime(tmp_path / "train.bin", ns=(1, 1))
        return sha256_of(descriptor)

    monkeypatch.setattr(tokens, "sha256_of", summed_up)
    with pytest.raises(ConfigError, match="train.bin was changed by another program while it was read"):
        checksums(tmp_path, meta)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes a pipe")
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("nowhere", path)])
def test_something_else_in_the_place_of_verified_json_is_left_alone_and_not_waited_for(tmp_path, make):
    meta = small_dataset(tmp_path)
    make(tmp_path / "verified.json")
    before = os.lstat(tmp_path / "verified.json")
    checksums(tmp_path, meta)
    assert os.path.samestat(before, os.lstat(tmp_path / "verified.json"))
    assert sorted(os.listdir(tmp_path)) == ["meta.json", "train.bin", "val.bin", "verified.json"]


@pytest.mark.skipif(os.name != "posix", reason="limits the file size")
def test_a_full_disk_is_one_clear_line_and_keeps_the_old_dataset(tmp_path):
    old = small_dataset(tmp_path / "out")
    (tmp_path / "a.txt").write_text(words(3_000_000))
    code = """if True:
        import resource, sys
        from data.text import prepare
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        sys.exit(prepare.main(sys.argv[1:]))"""
    done = run_code(code, tmp_path / "a.txt", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2
    assert "free some space or write to another disk with --out. Nothing was replaced" in one_error_line(done.stderr)
    assert tokens.verify(tmp_path / "out") == old and len(list((tmp_path / "out").iterdir())) == 3


def test_checksums_and_sizes_detect_a_mixed_dataset(tmp_path, capsys):
    small_dataset(tmp_path / "a")
    small_dataset(tmp_path / "b", b"HELLO")
    shutil.copy(tmp_path / "b/val.bin", tmp_path / "a/val.bin")
    assert tokens.main([str(tmp_path / "a")]) == 2
    assert "val.bin does not match its checksum in meta.json" in one_error_line(capsys.readouterr().err)
    (tmp_path / "a/val.bin").write_bytes(b"123")
    assert tokens.main([str(tmp_path / "a")]) == 2
    assert "it has 3 bytes, meta.json says 6" in one_error_line(capsys.readouterr().err)
    (tmp_path / "a/meta.json").write_text("{")
    assert tokens.main([str(tmp_path / "a")]) == 2
    assert "meta.json is damaged" in one_error_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "args, said",
    [
        (["{tmp}/nowhere"], "nowhere: no such file or folder"),
        (["{tmp}/empty"], "no text in"),
        (["{tmp}/a.txt", "--val_fraction=0"], "val_fraction=0.0: expected more than 0 and at most 0.5"),
        (["{tmp}/a.txt", "--out={tmp}/a.txt"], "File exists"),
        (["{tmp}/one.txt"], "no text for the train split"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys, args, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("some text\n" * 10)
    (tmp_path / "one.txt").write_text("x")
    args = [a.format(tmp=tmp_path) for a in args]
    assert text.main([f"--out={tmp_path / 'out'}", *args]) == 2
    assert said in one_error_line(capsys.readouterr().err)
    assert not (tmp_path / "out" / "meta.json").exists() and not list(tmp_path.glob("**/*.tmp"))


# ---------------------------------------------------------------------------------------------- progress


class Terminal:
    def __init__(self, tty):
        self.tty, self.text = tty, ""

    def isatty(self):
        return self.tty

    def write(self, s):
        self.text += s

    def flush(self):
        pass


@pytest.mark.parametrize("tty", [True, False])
def test_progress_rewrites_a_terminal_line_and_is_sparse_elsewhere(monkeypatch, tty):
    out, clock = Terminal(tty), [0.0]
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = tokens.Progress("data/x", total_bytes=100_000_000)
    for _ in range(20):
        clock[0] += 1.0
        progress.update(10, 1_000_000, 250_000)
    assert out.text.count("\r") == (20 if tty else 0) and out.text.count("\n") == (0 if tty else 2)
    assert "data/x: 200 documents  20.0 MB  5,000,000 tokens  1.0 MB/s  20%  0:01:20 left" in out.text
    progress.close("done")
    assert "data/x: done from 200 documents, 20.0 MB, in 20.0 s" in out.text and out.text.endswith("\n")


# ---------------------------------------------------------------------------------------------- hub datasets

ROWS = [
    "",
    " = First = \n",
    "",
    " Some text about a @-@ thing . \n",
    "",
    " = = Part = = \n",
    "",
    " x = \n",
    " = 3 = \n",
]
ROWS += [" more \n", "", " = Second one = \n", "", " Other text . \n", ""]


def write_parquet(path, rows, **kwargs):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": rows}), path, **kwargs)


def test_wikitext_rows_become_articles():
    first, second = wikitext.articles(ROWS)
    assert first.startswith(" \n = First = \n \n Some text") and " = = Part = = \n \n x = \n = 3 = \n more \n" in first
    assert second == " = Second one = \n \n Other text . \n \n"


def test_wikitext_articles_join_to_the_original_file():
    with open(shared("wikitext-2/valid.txt"), encoding="utf-8", newline="\n") as f:
        lines = f.readlines()
    found = list(wikitext.articles(lines))
    assert len(found) == 60  # the number of articles that the dataset's authors give
    assert "".join(found).rstrip("\n ") == "".join(lines).rstrip("\n ")
    blank_as_on_the_hub = ["" if not line.strip() else line for line in lines]
    assert list(wikitext.articles(blank_as_on_the_hub)) == found


def test_wikitext_reads_local_copies_of_the_hub_files(tmp_path, gpt2):
    for size, extra in ((2, []), (103, [" = Third = \n", "", " Only in the large one . \n"])):
        for split in ("train", "validation", "test"):
            folder = tmp_path / "repo" / f"wikitext-{size}-raw-v1"
            write_parquet(folder / f"{split}-00000-of-00001.parquet", [r.replace("text", split) for r in ROWS + extra])
    meta = wikitext.prepare(2, tmp_path / "out", local=str(tmp_path / "repo"), quiet=True)
    assert contents(tmp_path / "out", "train", gpt2) == [a.replace("text", "train") for a in wikitext.articles(ROWS)]
    assert contents(tmp_path / "out", "val", gpt2) == [a.replace("text", "validation") for a in wikitext.articles(ROWS)]
    assert meta["split"] == "by file name: train and validation"
    wikitext.prepare(103, tmp_path / "out", local=str(tmp_path / "repo"), quiet=True)
    assert contents(tmp_path / "out", "train", gpt2)[-1] == " = Third = \n \n Only in the large one . \n"


def test_wikitext_from_a_single_text_file_is_split_by_position_and_says_so(tmp_path, gpt2, capsys):
    pytest.importorskip("datasets")
    path = shared("wikitext-2/valid.txt")
    assert wikitext.main([f"--local={path}", f"--out={tmp_path}"]) == 0
    assert "split by position: the last 4 of 60 articles" in capsys.readouterr().err
    train, val = contents(tmp_path, "train", gpt2), contents(tmp_path, "val", gpt2)
    assert (len(train), len(val)) == (56, 4)
    assert "".join(train + val).rstrip() == path.read_text(encoding="utf-8").rstrip()


def test_wikitext_asks_the_hub_for_the_official_raw_splits(tmp_path, gpt2, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": [r.replace("text", kwargs["split"]) for r in ROWS]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "reachable", lambda url: True)
    meta = wikitext.prepare(103, tmp_path, quiet=True)
    assert asked == [
        (("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "train"}),
        (("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "validation"}),
    ]
    assert "Some validation about" in contents(tmp_path, "val", gpt2)[0]
    assert (meta["source"], meta["train_documents"]) == ("Salesforce/wikitext wikitext-103-raw-v1", 2)


def test_openwebtext_splits_by_document_the_same_in_any_order(tmp_path, gpt2):
    docs = [f"Document {i} says:\n\n{'word ' * (i % 40)}it’s over." for i in range(400)] + ["", "Document 1 again"]
    write_parquet(tmp_path / "a/0000.parquet", docs[:250], row_group_size=100)
    write_parquet(tmp_path / "a/0001.parquet", docs[250:], row_group_size=100)
    write_parquet(tmp_path / "b/x.parquet", docs[::-1], row_group_size=100)
    one = openwebtext.prepare(tmp_path / "out1", local=str(tmp_path / "a/*.parquet"), val_fraction=0.1, quiet=True)
    openwebtext.prepare(tmp_path / "out2", local=str(tmp_path / "b"), val_fraction=0.1, quiet=True)
    train, val = contents(tmp_path / "out1", "train", gpt2), contents(tmp_path / "out1", "val", gpt2)
    assert sorted(train + val) == sorted(d for d in docs if d) and not set(train) & set(val)
    assert train == [d for d in docs if d in set(train)]  # in the order of the files
    assert 20 < len(val) < 60
    assert contents(tmp_path / "out2", "val", gpt2) == val[::-1]
    assert (one["train_documents"], one["dtype"]) == (len(train), "uint16")


def test_openwebtext_asks_the_hub_for_the_parquet_revision_as_a_stream(tmp_path, gpt2, monkeypatch, capsys):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(9000)]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub, "reachable", lambda url: True)
    meta = openwebtext.prepare(tmp_path, quiet=True)
    expected = {"revision": "refs/convert/parquet", "split": "train", "streaming": True}
    assert asked == [(("Skylion007/openwebtext",), expected)]
    assert 0 < meta["val_documents"] < 20 and meta["train_documents"] + meta["val_documents"] == 9000
    assert "warning: 9,000 of 8,013,769 documents" in capsys.readouterr().err
    assert openwebtext.main([f"--out={tmp_path}", "--revision=main"]) == 0 and asked[1][1]["revision"] == "main"


def test_local_files_of_the_wrong_shape_are_clear_errors(tmp_path, gpt2, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "column.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"not a parquet file at all")
    for name, said in (("column", "no column 'text' in the dataset: it has content"), ("broken", "broken.parquet")):
        assert openwebtext.main([f"--local={tmp_path / name}.parquet", f"--out={tmp_path / 'out'}"]) == 2
        assert said in one_error_line(capsys.readouterr().err.splitlines()[-1])
    assert openwebtext.main([f"--local={tmp_path}/none-*.parquet", f"--out={tmp_path / 'out'}"]) == 2
    assert "no *.parquet file there" in one_error_line(capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*"))


# ---------------------------------------------------------------------------------------------- no network


@pytest.mark.parametrize("script", ["wikitext", "openwebtext"])
def test_without_the_hub_it_fails_in_seconds_and_says_what_to_do(tmp_path, bpe_cache, script):
    pytest.importorskip("datasets")
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "TIKTOKEN_CACHE_DIR": str(bpe_cache)}
    start = time.monotonic()
    done = run_python(ROOT / "data" / script / "prepare.py", f"--out={tmp_path / 'out'}", env=env)
    assert done.returncode == 2 and time.monotonic() - start < 15
    line = one_error_line(done.stderr)
    assert "cannot reach http://127.0.0.1:9 to load" in line
    assert "--local" in line and "data/text/prepare.py" in line and "data/stdlib/prepare.py" in line
    assert not (tmp_path / "out").exists()


def test_without_the_bpe_file_it_says_where_to_put_it(tmp_path):
    pytest.importorskip("tiktoken")
    (tmp_path / "a.txt").write_text("text\n" * 100)
    env = {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "c"),
    }
    args = (tmp_path / "a.txt", f"--out={tmp_path / 'out'}", "--tokenizer=gpt2")
    done = run_python(ROOT / "data/text/prepare.py", *args, env=env)
    assert done.returncode == 2
    line = one_error_line(done.stderr)
    assert BPE_FILE in line and "TIKTOKEN_CACHE_DIR" in line and "--tokenizer=bytes" in line
    assert not (tmp_path / "out").exists()


def test_a_network_that_swallows_everything_does_not_hang():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        start = time.monotonic()
        assert not hub.reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", seconds=0.3)
        assert time.monotonic() - start < 2
    with pytest.raises(TimeoutError, match="no answer in 0.1 s"):
        tokenizers.bounded(threading.Event().wait, 0.1)


def test_the_code_is_lint_free():
    ruff = shutil.which("ruff", path=os.path.dirname(sys.executable)) or shutil.which("ruff")
    if not ruff:
        pytest.skip("ruff is not installed")
    command = [ruff, "check", "--line-length=120", ROOT / "data", __file__]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
