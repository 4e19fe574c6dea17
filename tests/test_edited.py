"""Checkpoints whose checksum fits and whose parts do not: every command that reads one says so in one line."""

import os

import pytest
import torch

import export
import sample
import train
from tests.helpers import TINY
from trainer import checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_data):
    out = tmp_path_factory.mktemp("edited") / "run"
    train.main([f"--{k}={v}" for k, v in {**TINY, "dataset": tiny_data, "out_dir": out, "max_tokens": 320}.items()])
    return str(out)


def put(**values):
    """An edit that sets part__key=value, or, with ..., takes it away."""
    def edit(state):
        for path, value in values.items():
            *parts, key = path.split("__")
            where = state
            for part in parts:
                where = where[part]
            where.pop(key) if value is ... else where.__setitem__(key, value)
    return edit


EDITS = {"no data": put(data=...), "no state": put(state=...), "empty state": put(state={}), "no settings": put(config={}),
         "n_layer is a text": put(config__n_layer="x"), "no heads": put(config__n_head=0), "seven heads": put(config__n_head=7),
         "a million layers": put(config__n_layer=10**6), "no layers": put(config__n_layer=...),
         "vocabulary is a text": put(vocab_size="a"), "vocabulary below zero": put(vocab_size=-1),
         "other vocabulary": put(vocab_size=65), "tokenizer is a number": put(data__tokenizer=5),
         "unknown tokenizer": put(data__tokenizer="mine"), "characters are a number": put(data__characters=5),
         "few characters": put(data__characters=["a"]), "separator is a dictionary": put(data__separator={}),
         "no weights": put(model={}), "weights are a list": put(model=[1]), "weights are numbers": put(model={"wte.weight": 1}),
         "cosine attention is a number": put(config__cos_attn=7), "empty data": put(data={}),
         "biases are None": put(config__bias=None), "very wide": put(config__n_embd=10**9),
         "unknown norm": put(config__norm="zz"),
         "no context": put(config__block_size=0), "settings are a list": put(config=[1]), "state is a list": put(state=[]),
         "weights that are no numbers": lambda s: [w.fill_(torch.nan) for w in s["model"].values()],
         "one weight too few": lambda s: s["model"].popitem()}
HARMLESS = {export: {"unknown tokenizer", "characters are a number", "few characters", "weights that are no numbers"},
            sample: {"separator is a dictionary"}}  # what the command does not look at


@pytest.mark.parametrize("command", [sample, export], ids=lambda module: module.__name__)
@pytest.mark.parametrize("edit", EDITS)
def test_a_checkpoint_that_was_edited_is_one_line_and_nothing_is_written(run, tmp_path, capsys, command, edit):
    state = checkpoint.load(run)
    del state["path"], state["format"]
    EDITS[edit](state)
    checkpoint.save(str(tmp_path), state)
    capsys.readouterr()
    options = {sample: ["--tokens=3", "--prompt=\x01", "--device=cpu"], export: [f"--hf={tmp_path}/hf"]}[command]
    try:
        code = command.main([str(tmp_path), *options])
    except SystemExit as e:
        code = e.code
    said = capsys.readouterr()
    if edit in HARMLESS[command]:
        assert code == 0
        return
    lines = said.err.splitlines()
    assert code == 2 and lines[-1].startswith("error: ") and said.out == "" and "Traceback" not in said.err, said.err
    assert len(lines) == 1 or len(lines) == 2 and lines[0].startswith(f"{tmp_path}/ckpt.pt: step "), said.err
    assert os.listdir(tmp_path) == ["ckpt.pt"]
