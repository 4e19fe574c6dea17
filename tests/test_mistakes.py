"""What new users type, and what they read: one line that names what is wrong and what to do, exit code 2, nothing changed."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import export
import plot
import sample
import train
import whatif
from data.text import prepare
from tests.helpers import ROOT, TINY, tree, write_dataset
from trainer import batches

MISTAKES = [
    # other programs' names
    ("train --max_iters=5000", "unknown key 'max_iters': did you mean max_tokens (steps x batch_size x block_size)?"),
    ("train --epochs=3", "max_tokens (epochs x the tokens of train.bin)"),
    ("train --gradient_accumulation_steps=8", "batch_size and micro_batch_size"),
    ("train --lr=1e-3", "did you mean learning_rate?"),
    ("train --warmup_iters=100", "did you mean warmup_tokens?"),
    ("train --eval_interval=500", "did you mean eval_tokens?"),
    ("train --eval_only=True", "--eval"),
    ("train --vocab_size=256", "dataset (its meta.json has the vocabulary)"),
    ("train --output_dir=out/x", "did you mean out_dir?"),
    ("train --init_from=resume", "go on with a run by python train.py out/run"),
    ("train --init_from=gpt2", "nothing is fetched"),
    # slips
    ("train --learning_rat=1e-3", "did you mean learning_rate?"),
    ("train -batch_size=16", "options begin with two dashes: --batch_size=16"),
    ("train batch_size=16", "options begin with two dashes: --batch_size=16"),
    ("train --batch_size", "--batch_size needs a value"),
    ("train --batch_size=sixteen", "batch_size='sixteen' must be a whole number such as 200, 50k"),
    ("train --max_tokens=2,500,000", "must be a whole number such as 200, 50k, 1.5M or 2B"),
    ("train --learning_rate=1e-3x", "learning_rate='1e-3x' must be a number"),
    ("train --wandb_log=maybe", "wandb_log='maybe' must be True or False"),
    ("train --dtype=int8", "dtype='int8' must be one of auto, float32"),
    ("train --norm=layernrm", "did you mean layernorm?"),
    ("train config/quikstart.py", "did you mean config/quickstart.py?"),
    ("train quickstart", "did you mean config/quickstart.py?"),
    ("train config/quickstart.py config/wikitext2.py", "one config file or run folder at most"),
    ("train typo.py", "config file typo.py: unknown key 'n_layers': did you mean n_layer?"),
    ("train --max_tokens=320 --plan --kind=A1000", "--kind=A1000: expected one of V100, A100"),
    ("train --plan --devices=two", "--devices=two: expected a number"),
    # values that cannot be
    ("train --batch_size=20", "batch_size=20: is not a multiple of micro_batch_size=8: take 16 or 24"),
    ("train --batch_size=4 --batch_size_start=4", "is smaller than micro_batch_size=8"),
    ("train --batch_size=16 --batch_size_start=24", "must not exceed batch_size=16"),
    ("train --n_embd=130", "must be divisible by n_head=4"),
    ("train --warmup_tokens=3M", "is longer than the run, max_tokens=2500000"),
    ("train --stop_tokens=-1", "stop_tokens=-1: must not be negative"),
    ("train --dataset=small --block_size=5000", "block_size=5000: "),
    # data
    ("train --dataset=book.txt", "is a file: python data/text/prepare.py book.txt"),
    ("train --dataset=shakespear", "dataset='shakespear': no meta.json in "),
    ("train --dataset=wikitext-9", "run python data/wikitext/prepare.py"),
    ("prepare nothing.txt", "nothing.txt: no such file or folder"),
    ("prepare empty --out=new", "expected *.txt or *.md files that are not empty"),
    # runs
    ("train out/rum", "did you mean out/run?"),
    ("train out", "is a folder without config.json, so no run of train.py"),
    ("train --out_dir=out/run", "already holds a run: continue it with --resume=True"),
    ("train --out_dir=out/none --resume=True", "out/none: no ckpt.pt to load there"),
    ("train --resume=True", "there is no run out/quickstart to go on with; the newest is python train.py out/run"),
    ("train --resume=out/run", "the run folder goes alone: python train.py out/run"),
    ("train out/run --n_layer=3", "n_layer is 3, the checkpoint has 2"),
    ("train out/run --batch_size=32", "python train.py --branch_from=out/run --batch_size=32"),
    ("train out/run --max_tokens=320", "max_tokens is 320, the checkpoint has 640"),
    ("train out/run --out_dir=out/other", "leave one out"),
    ("train out/run out/run", "one config file or run folder at most"),
    ("train --branch_from=out/none", "out/none: no ckpt.pt to load there"),
    ("train --branch_from=out/run", "this run ends at 640"),
    ("train --branch_from=out/run --n_layer=3 --max_tokens=1k", "branch: n_layer is 3"),
    ("train --eval", "--eval needs a run: python train.py out/run --eval"),
    ("train out/none --eval", "No such file or directory"),
    ("sample out/none", "no ckpt.pt to load there"),
    ("sample out/run --prompt=\u00e4", "is none of the 64 that the model was trained on"),
    ("sample out/run --temperature=-1", "--temperature and --seed must be at least 0"),
    ("export out/run", "--hf"),
    ("export out/none --hf", "no ckpt.pt to load there"),
    ("export out/run --hf=full", "full is not empty"),
    ("whatif out/none", "out/none: no readable log.jsonl"),
    ("plot out/none", "out/none: no readable log.jsonl"),
]
PROGRAMS = {"train": train.main, "sample": sample.main, "export": export.main, "whatif": whatif.main, "plot": plot.main,
            "prepare": prepare.main}


@pytest.fixture(scope="module", autouse=True)
def corpus():
    """The embedded one is there: preparing it says a line of its own."""
    batches.find("stdlib")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A user's folder: a finished run, a book, some data, a config file with a typo."""
    desk = tmp_path_factory.mktemp("desk")
    write_dataset(desk / "small", np.arange(4000) % 64, np.arange(1000) % 64, vocab_size=64)
    (desk / "book.txt").write_text("Once upon a time.\n" * 50)
    (desk / "typo.py").write_text("n_layers = 3\n")
    (desk / "empty").mkdir()
    (desk / "full").mkdir()
    (desk / "full" / "thing").write_text("")
    (desk / "config").symlink_to(os.path.join(ROOT, "config"))
    here = os.getcwd()
    os.chdir(desk)
    try:
        train.main([f"--{k}={v}" for k, v in {**TINY, "dataset": "small", "out_dir": "out/run", "max_tokens": 640}.items()])
    finally:
        os.chdir(here)
    return desk


def test_there_are_thirty_and_more():
    assert len(MISTAKES) >= 60 and len({command for command, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("command, words", MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_said_and_costs_nothing(desk, monkeypatch, capsys, command, words):
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HF_HOME", str(desk / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    before = tree(desk)
    program, *arguments = command.split()
    try:
        code = PROGRAMS[program](arguments)
    except SystemExit as e:
        code = e.code
    captured = capsys.readouterr()
    message = captured.err.splitlines()[-1] if captured.err else ""
    assert code == 2 and words in message and "error: " in message, (code, captured)
    assert program != "train" or captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert tree(desk) == before and not (desk / "out" / "quickstart").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_gpu_that_is_not_there(desk, monkeypatch, capsys):
    monkeypatch.chdir(desk)
    with pytest.raises(SystemExit):
        train.main(["--device=gpu"])
    assert "device='cuda' is not there; this machine has" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train", "sample", "whatif", "plot", "sweep", "export"])
def test_python_without_its_search_path_and_without_docstrings_runs_every_command(tmp_path, script):
    done = subprocess.run([sys.executable, "-I", "-OO", os.path.join(ROOT, f"{script}.py"), "--help"], cwd=tmp_path,
                          text=True, capture_output=True)
    assert done.returncode == 0 and "--" in done.stdout, done.stderr
