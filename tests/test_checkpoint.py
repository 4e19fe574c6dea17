import os

import pytest
import torch

from configurator import Config, ConfigError
from system import files
from trainer import checkpoint, start

DATA = {"train_sha256": "abc", "val_sha256": "def", "vocab_size": 256, "dtype": "uint8", "tokenizer": "bytes"}


def save_some(tmp_path, **config):
    checkpoint.save(str(tmp_path), {"config": vars(Config(**config)), "data": DATA, "x": torch.arange(3)})


def test_what_is_saved_comes_back(tmp_path):
    save_some(tmp_path)
    assert torch.equal(checkpoint.load(str(tmp_path))["x"], torch.arange(3))
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path):
    save_some(tmp_path)
    before = (tmp_path / "ckpt.pt").read_bytes()

    def half_then_fail(f):
        f.write(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError):
        files.write_atomically(str(tmp_path / "ckpt.pt"), half_then_fail)
    assert (tmp_path / "ckpt.pt").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_an_unreadable_checkpoint_is_one_clear_line(tmp_path, content):
    save_some(tmp_path)
    path = tmp_path / "ckpt.pt"
    path.write_bytes(path.read_bytes()[:-200] if content is None else content)
    with pytest.raises(ConfigError, match="not a readable checkpoint") as e:
        checkpoint.load(str(tmp_path))
    assert "\n" not in str(e.value)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoint.save(str(tmp_path), {"x": Evil()})
    with pytest.raises(ConfigError):
        checkpoint.load(str(tmp_path))
    assert not (tmp_path / "evil").exists()


def test_another_format_and_a_missing_file_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no ckpt.pt"):
        checkpoint.load(str(tmp_path))
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    save_some(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 99"):
        checkpoint.load(str(tmp_path))


@pytest.mark.parametrize("key, value", [("n_layer", 9), ("dataset", "other"), ("batch_size", 128), ("learning_rate", 1.0),
                                        ("max_tokens", 10**7), ("seed", 5), ("batch_schedule", "constant")])
def test_a_resume_that_would_compute_something_else_names_the_key(tmp_path, key, value):
    save_some(tmp_path)
    saved = checkpoint.load(str(tmp_path))
    with pytest.raises(ConfigError, match=f"{key} is"):
        start.check_same_run(saved, Config(**{key: value}), DATA)


def test_keys_that_do_not_change_the_run_may_differ_and_contents_may_not(tmp_path):
    save_some(tmp_path)
    saved = checkpoint.load(str(tmp_path))
    start.check_same_run(saved, Config(log_interval=3, wandb_log=True, resume="True", out_dir="elsewhere"), DATA)
    for key in DATA:
        with pytest.raises(ConfigError, match=f"dataset='stdlib' has other contents.*{key} in meta.json"):
            start.check_same_run(saved, Config(), {**DATA, key: "other"})
