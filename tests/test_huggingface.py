"""GPT-2 in Hugging Face's form, in and out. transformers is the oracle."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import export
import sample
import train
from configurator import ConfigError
from model import GPT, GPTConfig
from tests.helpers import TINY, write_dataset
from trainer import checkpoint, huggingface, log, start

transformers = pytest.importorskip("transformers")
SHAPE = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=64)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    from plots import report
    monkeypatch.setattr(report, "draw", lambda out_dir: f"{out_dir}/report.png")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A GPT-2 made on the spot by transformers, with random biases and norm weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SHAPE, n_positions=32, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    folder = tmp_path_factory.mktemp("gpt2") / "theirs"
    model.save_pretrained(folder)
    return model, str(folder)


def ours(**changes):
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=16, **{**SHAPE, **changes})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model


def logits(model, idx):
    """(B, T, V) of one of our models."""
    with torch.no_grad():
        return model(idx, idx)[0]


def from_gpt2(folder, **changes):
    """The command line of a tiny run that starts there."""
    own = {k: v for k, v in TINY.items() if k not in ("n_layer", "n_head", "n_embd")}
    return [f"--{k}={v}" for k, v in {**own, "init_from": folder, **changes}.items()]


IDX = torch.arange(32).view(2, 16) * 2 % 64


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"tie_weights": False}, {"gelu": "tanh", "dropout": 0.1}], ids=str)
def test_transformers_computes_the_same_from_what_is_written(tmp_path, changes):
    model = ours(**changes)
    huggingface.write(model, str(tmp_path / "hf"), separator=0)
    loaded, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDX).logits, logits(model, IDX), rtol=0, atol=1e-5)
        assert loaded(IDX).logits.std() > 0.1


@pytest.mark.parametrize("block_size", [32, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_init_from_computes_what_transformers_does(tmp_path, theirs, block_size, dtype):
    model, folder = theirs
    if dtype != torch.float32:
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).to(dtype)
        model.save_pretrained(tmp_path / "half")
        model, folder = model.float().eval(), str(tmp_path / "half")
    config = start.parse([f"--init_from={folder}", f"--block_size={block_size}"])
    assert (config.n_layer, config.n_head, config.n_embd, config.gelu, config.bias) == (2, 2, 16, "tanh", True)
    gpt = GPT(GPTConfig.of(vars(config), 64)).eval()
    huggingface.load_into(gpt, folder)
    with torch.no_grad():
        torch.testing.assert_close(logits(gpt, IDX), model(IDX).logits, rtol=0, atol=1e-5)


def test_a_name_is_looked_for_in_hugging_faces_cache_alone(tmp_path, theirs, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="init_from='gpt2': .* nothing is fetched"):
        start.parse(["--init_from=gpt2"])
    place = tmp_path / "hub" / "models--openai-community--gpt2" / "snapshots" / "abc"
    place.parent.mkdir(parents=True)
    place.symlink_to(theirs[1])
    assert start.parse(["--init_from=gpt2", "--block_size=16"]).n_layer == 2


def test_weights_in_several_files_and_of_the_hubs_first_gpt2_are_read(tmp_path, theirs):
    """Without the prefix, with masks among them, in two files."""
    tensors = load_file(os.path.join(theirs[1], "model.safetensors"))
    tensors = {key.removeprefix("transformer."): t for key, t in tensors.items()} | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for part, inside in parts.items():
        save_file({name: tensors[name] for name in inside}, tmp_path / part)
    index = {"weight_map": {name: part for part, inside in parts.items() for name in inside}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(open(os.path.join(theirs[1], "config.json")).read())
    a, b = ours(gelu="tanh"), ours(gelu="tanh")
    huggingface.load_into(a, str(tmp_path))
    huggingface.load_into(b, theirs[1])
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))


def a_header_that_lies(data):
    """It says that the first tensor is longer than the file."""
    return data.replace(b'"shape":[2,2]', b'"shape":[9,9]', 1)


@pytest.mark.parametrize("change, words", [
    (lambda b: b[:40], "not a readable safetensors file"), (lambda b: b"\xff" * 8 + b[8:], "not a readable safetensors file"),
    (lambda b: b[:-8], "not a readable safetensors file"), (lambda b: b"", "not a readable safetensors file"),
    (a_header_that_lies, "not a readable safetensors file"),
    ({"wte.weight": torch.zeros(64, 16, dtype=torch.int64)}, "wte.weight' is torch.int64"),
    ({"wte.weight": torch.zeros(64, 16, 1)}, r"wte.weight is \(64, 16, 1\), expected \(64, 16\)"),
    ({"wte.weight": torch.zeros(())}, r"wte.weight is \(\), expected"), ({}, "weights have no wte.weight")])
def test_weights_that_are_damaged_or_another_models_are_one_line(tmp_path, theirs, change, words):
    save_file(change if isinstance(change, dict) else {"a": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    if not isinstance(change, dict):
        path = tmp_path / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))
    (tmp_path / "config.json").write_text(open(os.path.join(theirs[1], "config.json")).read())
    with pytest.raises(ConfigError, match=words) as e:
        huggingface.load_into(ours(), str(tmp_path))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("args, words", [
    (["--n_layer=3"], "n_layer=3: init_from=.* has 2"), (["--block_size=64"], "block_size=64: .* 32 positions"),
    (["--norm=rmsnorm"], "norm='rmsnorm': init_from")])
def test_what_contradicts_the_checkpoint_is_refused(theirs, args, words):
    with pytest.raises(ConfigError, match=words):
        start.parse([f"--init_from={theirs[1]}", "--block_size=16", *args])


@pytest.mark.parametrize("about, words", [
    ({"model_type": "llama"}, "model_type='llama'"), ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06"),
    ({"activation_function": "relu"}, "activation_function='relu'"), ({"n_inner": 5}, "n_inner=5"),
    ({"n_layer": "x"}, "no GPT-2")])
def test_what_is_no_gpt2_is_refused_by_name(tmp_path, theirs, about, words):
    config = json.load(open(os.path.join(theirs[1], "config.json"))) | about
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        start.parse([f"--init_from={tmp_path}"])


def test_another_vocabulary_is_refused_before_anything_is_made(tmp_path, theirs, capsys):
    data = write_dataset(tmp_path / "data", np.arange(500) % 100, np.arange(100) % 100, vocab_size=100)
    with pytest.raises(SystemExit):
        train.main(from_gpt2(theirs[1], dataset=data, out_dir=tmp_path / "run"))
    assert "its vocabulary has 64 tokens, the dataset's has 100" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes, words", [({"norm": "rmsnorm"}, "norm='rmsnorm'"), ({"cos_attn": (1,)}, "cosine attention"),
                                            ({"spectral_qkv": (0,)}, "spectral_qkv=(0,)")])
def test_what_gpt2_has_no_place_for_is_refused_and_nothing_written(tmp_path, changes, words):
    with pytest.raises(ConfigError) as e:
        huggingface.write(ours(**changes), str(tmp_path / "hf"))
    assert words in str(e.value) and not (tmp_path / "hf").exists()


def test_out_and_in_again_gives_the_same_text(tmp_path, tiny_args, tiny_data, capsys):
    """A run, exported, started from again with a learning rate of zero; and transformers' own greedy text."""
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=1280))
    assert export.main([str(tmp_path / "run"), f"--hf={tmp_path}/hf"]) == 0
    said = capsys.readouterr().out
    assert f"from {tmp_path}/run/ckpt.best.pt, step" in said and "a token is a byte" in said
    train.main(from_gpt2(tmp_path / "hf", dataset=tiny_data, out_dir=tmp_path / "again", learning_rate=0, min_lr=0,
                         max_tokens=320))
    rows = {name: [r["val/loss"] for r in log.read(tmp_path / name) if "val/loss" in r] for name in ("run", "again")}
    assert rows["again"][0] == pytest.approx(min(rows["run"]), abs=1e-6)
    texts = []
    for name in ("run", "again"):
        capsys.readouterr()
        sample.main([str(tmp_path / name), "--tokens=60", "--prompt=\x01\x02", "--device=cpu"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    sample.main([str(tmp_path / "run"), "--tokens=12", "--prompt=\x01\x02", "--temperature=0", "--device=cpu"])
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor([[1, 2]])
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert capsys.readouterr().out.rstrip("\n") == bytes(ids[0].tolist()).decode().rstrip("\n")
    assert train.main([str(tmp_path / "again")]) == 0  # its folder knows all; hf/ may be gone


def test_export_refuses_in_one_line_and_says_where_to(tmp_path, tiny_args, capsys):
    train.main(tiny_args(out_dir=tmp_path / "run", max_tokens=320, cos_attn="(1,)"))
    for arguments, words in (([str(tmp_path / "run"), "--hf"], "cos_attn"), ([str(tmp_path / "none"), "--hf"], "no ckpt.pt")):
        with pytest.raises(SystemExit) as e:
            export.main(arguments)
        message = capsys.readouterr().err
        assert e.value.code == 2 and words in message and message.count("\n") == 1
    assert not (tmp_path / "run" / "hf").exists()
    with pytest.raises(SystemExit) as e:
        export.main([str(tmp_path / "run")])
    assert e.value.code == 2
    train.main(tiny_args(out_dir=tmp_path / "plain", max_tokens=320))
    assert export.main([str(tmp_path / "plain"), "--hf", "--newest"]) == 0
    assert sorted(os.listdir(tmp_path / "plain" / "hf")) == ["config.json", "model.safetensors"]
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / "plain"), "--hf"])
    assert "is not empty" in capsys.readouterr().err


def test_a_run_from_gpt2_resumes_without_the_folder_it_came_from(tmp_path, theirs, tiny_data):
    import shutil
    shutil.copytree(theirs[1], tmp_path / "hf")
    train.main(from_gpt2(tmp_path / "hf", dataset=tiny_data, out_dir=tmp_path / "run", max_tokens=640, stop_tokens=320))
    shutil.rmtree(tmp_path / "hf")
    assert train.main([str(tmp_path / "run")]) == 0
    assert checkpoint.load(str(tmp_path / "run"))["state"]["tokens"] >= 640
