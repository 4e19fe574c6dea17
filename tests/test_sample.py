import os

import pytest
import torch

import sample
import train


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_data):
    from tests.helpers import TINY
    out = tmp_path_factory.mktemp("sample") / "run"
    train.main([f"--{k}={v}" for k, v in {**TINY, "dataset": tiny_data, "out_dir": out, "max_tokens": 640}.items()])
    return str(out)


def test_a_checkpoint_writes_text_the_same_for_the_same_seed(run, capsys):
    texts = []
    for seed in (1, 1, 2):
        assert sample.main([run, "--tokens=30", f"--seed={seed}", "--prompt=\x01\x02", "--device=cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("\x01\x02") and len(texts[0]) == 33


def test_the_loaded_model_is_the_trained_one(run):
    from trainer import checkpoint
    model, tokenizer = sample.load_model(run, "cpu")
    saved = checkpoint.load(run)["model"]
    assert tokenizer == "bytes" and not model.training
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())


def test_temperature_zero_takes_the_likeliest_and_the_context_slides(run):
    model, _ = sample.load_model(run, "cpu")
    ids = sample.generate(model, torch.tensor([[1, 2]]), 40, 0, 200, None)
    assert ids.shape == (1, 42)
    for t in (2, 20, 41):
        logits, _ = model(ids[:, max(0, t - 16):t])
        assert int(ids[0, t]) == int(logits[0, -1].argmax())


def test_a_folder_without_a_checkpoint_is_one_clear_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        sample.main([os.path.join(tmp_path, "nothing")])
    assert e.value.code == 2 and "no ckpt.pt" in capsys.readouterr().err
