"""What is said and set for a GPU, without one: torch is asked through functions that stand in for a machine's."""

import os
import threading
import types
import warnings

import pytest
import torch

import train
from configurator import Config, ConfigError
from sweeps import jobs
from trainer import distributed, hardware

OLD_DRIVER = ("CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your\n"
              "GPU driver (Triggered internally at CUDAFunctions.cpp:109.)")


def old_driver():
    warnings.warn(OLD_DRIVER, stacklevel=1)
    return False


def test_an_old_driver_is_one_line_and_the_cpu(monkeypatch, capfd, recwarn):
    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    assert hardware.pick_device("auto") == "cpu"
    line = ("the GPU is not used, cpu is: CUDA initialization: The NVIDIA driver on your system is too old (found version "
            "11040). Please update your GPU driver\n")
    assert capfd.readouterr().err == line and not recwarn.list
    with pytest.raises(ConfigError, match="device='cuda' is not there.*too old"):
        hardware.pick_device("cuda")


def test_without_a_gpu_nothing_is_said(monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    assert hardware.pick_device("auto") == "cpu" and capfd.readouterr().err == ""


@pytest.mark.parametrize("world, gpus, said", [(1, 8, True), (1, 1, False), (8, 8, False)])
def test_one_process_beside_idle_gpus_says_the_torchrun_line(monkeypatch, capsys, world, gpus, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(hardware, "pick_device", lambda name: "cuda")
    monkeypatch.setattr(distributed, "start", lambda *_: types.SimpleNamespace(world=world, stop=lambda: None))
    monkeypatch.setattr(train, "train", lambda *_: 0)
    assert train.main(["config/gpt_111m.py", "--seed=1"]) == 0
    line = "one of 8 GPUs is used; all: torchrun --nproc_per_node=8 train.py config/gpt_111m.py --seed=1\n"
    assert capsys.readouterr().out == (line if said else "")


@pytest.mark.parametrize("visible, expected", [(None, {"0", "1"}), ("3,5", {"3", "5"})])
def test_runs_of_a_sweep_have_a_gpu_each_and_wait_for_it(monkeypatch, tmp_path, capsys, visible, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible) if visible else monkeypatch.delenv("CUDA_VISIBLE_DEVICES", False)
    seen, busy, both = [], set(), threading.Barrier(2)

    def run_training(config, alone, start, **changes):
        mine = start.keywords["env"]["CUDA_VISIBLE_DEVICES"]
        assert mine not in busy
        busy.add(mine)
        both.wait(timeout=60)
        seen.append(mine)
        busy.remove(mine)
        both.wait(timeout=60)
    monkeypatch.setattr(jobs, "run_training", run_training)
    group = jobs.Group({name: Config() for name in "abcd"}, str(tmp_path), at_once=4)
    group.do()
    assert not group.failed and set(seen) == expected and all(seen.count(name) == 2 for name in expected)
    assert "4 to do, 2 at a time" in capsys.readouterr().out, "one per GPU"


def test_runs_on_a_cpu_share_it_whatever_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wanted = {name: Config(device="cpu") for name in "abcd"}
    assert [jobs.Group(wanted, "out", at_once).at_once for at_once in (3, 10**9)] == [3, 4]
    assert jobs.Group(wanted, "out", 3).free.get() is None
    with pytest.raises(ConfigError, match="--jobs=0"):
        jobs.Group(wanted, "out", 0)


def test_one_process_on_cuda_saves_and_restores_the_gpus_random_numbers(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state = torch.arange(16, dtype=torch.uint8)
    restored = []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    ranks = distributed.start(Config(), "cuda")
    saved = ranks.rng_state()
    assert torch.equal(saved["cuda"][0], state)
    assert ranks.restore_rng(saved, seed=0, step=3) and torch.equal(restored[0], state)


def test_deterministic_turns_off_what_varies_on_cuda_and_leaves_a_cpu_alone(monkeypatch):
    from torch._inductor import config as inductor
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(hardware, "prepare_cpu", lambda: None)
    monkeypatch.setattr(hardware, "pick_dtype", lambda *_: torch.float32)
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        hardware.prepare(Config(deterministic=True), "cpu")
        hardware.prepare(Config(), "cuda")
        assert not torch.are_deterministic_algorithms_enabled()
        hardware.prepare(Config(deterministic=True), "cuda")
        assert torch.are_deterministic_algorithms_enabled() and inductor.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled() and not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.backends.cuda.enable_mem_efficient_sdp(True)
        torch.backends.cuda.enable_cudnn_sdp(True)
        inductor.deterministic = False
