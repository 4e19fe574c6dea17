"""Whatever a user types, whatever lies in the files and the environment: it begins to train, or it is one line and exit code 2,
and then nothing has changed on the disk. Found by a generator, not from a list."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import configurator
import export
import plot
import plots.compare
import plots.style
import sample
import sweep
import train
import whatif
from data.text import prepare
from system import files
from tests.helpers import TINY, as_args, tree
from trainer import checkpoint, log

quick = settings(max_examples=int(os.environ.get("ATTACK_EXAMPLES", 100)), deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture])


class BeganError(Exception):
    """All input was accepted: the model would be made."""


@pytest.fixture
def start(tmp_path, tiny_data, monkeypatch, capsys):
    """start(arguments): whether it began. Raises where the one rule is broken."""
    def began(*_):
        raise BeganError

    monkeypatch.setattr(train, "GPT", began)
    monkeypatch.chdir(tmp_path)

    def call(*arguments, **keys):
        capsys.readouterr()
        before = tree(tmp_path)
        typed = as_args({"dataset": tiny_data, "out_dir": tmp_path / "new" / "run", **TINY, **keys})
        try:
            train.main([*arguments, *typed])
        except BeganError:
            return True
        except SystemExit as e:
            said = capsys.readouterr().err
            assert e.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
            assert len(said) < 5000
            assert tree(tmp_path) == before and not (tmp_path / "new").exists()
            return False
        raise AssertionError("it neither began nor said why not")
    return call


FILES = ("out_dir", "wandb_log", "dataset", "batch_file", "branch_from", "resume")
KEYS = st.sampled_from([k for k in configurator.FIELDS if k not in FILES])
NUMBERS = st.one_of(st.integers(), st.integers(-10, 1000), st.floats(), st.integers(10**18, 10**500)).map(repr)
VALUES = st.one_of(NUMBERS, st.text(max_size=30), st.lists(st.integers(-2, 5), max_size=3).map(str),
                   st.sampled_from(["True", "False", "None", "auto", "(" * 250, "9" * 5000, "1e400", "-0.0", "1_000", "0x10"]))
TEXT = st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))


@quick
@given(values=st.dictionaries(KEYS, VALUES, min_size=1, max_size=3))
def test_any_values_of_any_keys(start, values):
    start(**values)


@quick
@given(key=KEYS, value=st.one_of(NUMBERS, st.text(max_size=20).map(repr), st.sampled_from(
    ["print", "object()", "[[]]", "10**400", "None", "1j", "b'x'", "{}", "lambda: 1", "float('nan')", "type('X', (), {})()"])),
    more=TEXT)
def test_any_config_file(start, tmp_path, key, value, more):
    path = tmp_path / "config.py"
    path.write_bytes(f"{key} = {value}\n".encode("utf-8", "surrogatepass") + more)
    start(str(path))


@quick
@given(values=st.dictionaries(st.sampled_from(["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS"]),
                              st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8).filter(
                                  lambda t: not t.strip().isdigit() or int(t) < 2), min_size=1))
def test_any_environment(start, monkeypatch, values):
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        assert not start() or values.get("WORLD_SIZE", "1").strip() == "1"


JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2))


@quick
@given(key=st.sampled_from(["vocab_size", "dtype", "tokenizer", "train_tokens", "val_tokens", "train_sha256", "val_sha256"]),
       value=JSON)
def test_any_meta_json(start, tmp_path, tiny_data, key, value):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    meta = json.load(open(os.path.join(tiny_data, "meta.json")))
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(open(os.path.join(tiny_data, name), "rb").read())
    (folder / "meta.json").write_text(json.dumps({**meta, key: value}))
    (folder / "verified.json").unlink(missing_ok=True)
    assert not start(dataset=folder) or key == "tokenizer" or value == meta[key] or key == "vocab_size"
    (folder / "meta.json").write_text(json.dumps(value))
    assert not start(dataset=folder)


@quick
@given(lines=st.lists(st.one_of(TEXT, JSON.map(lambda v: json.dumps(v).encode())), min_size=1, max_size=3))
def test_any_log_is_read_or_refused_in_words(start, tmp_path, lines):
    out = tmp_path / "logged"
    out.mkdir(exist_ok=True)
    (out / "log.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    start(out_dir=out)
    try:
        rows = log.read(out)
    except configurator.ConfigError as e:
        assert "line" in str(e)
    else:
        assert all(isinstance(row["step"], (int, float)) for row in rows)


@quick
@given(content=TEXT, marked=st.booleans())
def test_any_checkpoint_that_train_did_not_write(start, tmp_path, content, marked):
    out = tmp_path / "saved"
    out.mkdir(exist_ok=True)
    (out / "ckpt.pt").unlink(missing_ok=True)
    (out / "ckpt.pt").write_bytes(content)
    if marked:  # even with a checksum that fits
        files.write_atomically(str(out / "ckpt.pt"), lambda f: (f.write(content), f.write(
            checkpoint.MARK + b"%08x" % f.crc)))
    assert not start(out_dir=out, resume="auto")


@quick
@given(text=st.one_of(st.text(max_size=40), st.tuples(NUMBERS, NUMBERS).map(" ".join)))
def test_any_batch_file(start, tmp_path, text):
    path = tmp_path / "schedule.txt"
    path.write_text(text, encoding="utf-8", errors="replace")
    start(batch_schedule="file", batch_file=path)


# -- the other commands

OPTIONS = {
    sample: ("--prompt", "--tokens", "--temperature", "--top_k", "--seed", "--device"),
    whatif: ("--batch", "--to_loss", "--hours", "--price", "--budget", "--devices", "--kind", "--mfu", "--link", "--micro",
             "--objective", "--export"),
    sweep: ("--batch_size", "--learning_rate", "--seed", "--jobs", "--wandb_group", "--lr_scaling", "--batch_steps",
            "--nonsense"),
    plot: ("--loss", "--compare"),
    export: ("--hf", "--newest", "--nonsense"),
    prepare: ("--val_fraction", "--tokenizer", "--nonsense")}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory, tiny_data):
    out = tmp_path_factory.mktemp("run")
    train.main(as_args({"dataset": tiny_data, "out_dir": out, **TINY, "gns_calibrate": True}))
    return out


@quick
@given(command=st.sampled_from(list(OPTIONS)), data=st.data())
def test_any_options_of_any_other_command(a_run, tmp_path, tiny_data, monkeypatch, capsys, command, data):
    monkeypatch.setattr(plots.style, "save", lambda figure, path: None)
    monkeypatch.setattr(plots.compare, "draw", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    values = st.one_of(VALUES, st.sampled_from(["1", "8,16", "H100", "ndr", "time", "steps", "0.5", "val", "8,,16", "-1,8"]))
    typed = [f"{key}={data.draw(values)}" for key in data.draw(st.lists(st.sampled_from(OPTIONS[command]), max_size=3))]
    fixed = {sample: [str(a_run), "--tokens=2"], whatif: [str(a_run), "--json=-"], plot: ["--compare", f"a={a_run}"],
             export: [str(a_run), "--hf=exported"],
             sweep: ["runs", "--dry_run", *as_args(TINY), f"--dataset={tiny_data}",
                     f"--out_dir={tmp_path / 'sweep'}"],
             prepare: [os.path.join(tiny_data, "train.bin"), f"--out={tmp_path / 'prepared'}"]}[command]
    if command is export:
        typed = [arg.replace("/", "_") for arg in typed]  # folders, none of them elsewhere
    if command is sample:
        typed = [arg for arg in typed if not arg.startswith("--tokens") or len(arg) < 11]  # not a million of them
    capsys.readouterr()
    try:
        code = command.main([*fixed[:1], *typed, *fixed[1:]] if command is not plot else [*fixed, *typed])
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr().err
    assert code == 0 or code == 2 and said.count("error: ") == 1 and said.splitlines()[-1].startswith("error: "), (typed, said)
