"""make gpu, rehearsed: every part of it runs here in Triton's interpreter, with small numbers and stand-ins for torch.cuda."""

import dataclasses
import functools
import os
import subprocess
import sys
import types

import pytest
import torch

import bench
import train
from benchmarks import gpu, gpu_runs
from tests.helpers import ROOT
from trainer import hardware

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def test_without_a_gpu_it_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(hardware, "cuda_available", lambda: (False, None))
    monkeypatch.setattr(sys, "argv", ["bench.py", "gpu"])
    assert bench.main() == 2
    assert capsys.readouterr().out == "no GPU here: torch finds none; run this on a machine that has one\n"


def test_failures_are_listed_written_and_exit_code_1(monkeypatch, capsys, tmp_path):
    def broken(s):
        yield gpu.check("first", True, error=0.5)
        raise ValueError("no such thing")
    monkeypatch.setattr(gpu, "PARTS", {"fine": lambda s: [gpu.check("well", True)], "broken": broken})
    monkeypatch.setattr(hardware, "cuda_available", lambda: (True, None))
    monkeypatch.setattr(hardware, "facts", lambda device: {})
    args = types.SimpleNamespace(only=None, out=str(tmp_path / "gpu.json"))
    assert gpu.run(args) == 1
    out = capsys.readouterr().out
    assert "pass  first: error 0.5" in out and "FAIL  broken ran to its end: error ValueError: no such thing" in out
    assert "1 of 3 checks failed" in out and "broken ran" in (tmp_path / "gpu.json").read_text()
    monkeypatch.setattr(gpu, "PARTS", {"fine": lambda s: [gpu.check("well", True)]})
    assert gpu.run(args) == 0


def test_every_part_runs_in_a_rehearsal():
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    if INTERPRETING:
        pytest.skip("already in the interpreter")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", __file__, "-k", "rehearsed"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr


if INTERPRETING:
    SMALL = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64)
    HERE = gpu.Setting(
        device="cpu", shapes=((1, 1, 33), (2, 5, 40)), dtypes=("float32", "mixed"), speeds=((2, 3, 32),), seconds=0,
        model=SMALL, micro=2, rounds=2, compile=("False", "True"), parallel=("fsdp",), checkpointing=("block",),
        stop=1024, training=dict(max_tokens=2048, n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=32,
                      micro_batch_size=16))

    @pytest.fixture(autouse=True)
    def stand_in(monkeypatch):
        for name, value in dict(reset_peak_memory_stats=lambda: None, max_memory_allocated=lambda: 1,
                                set_sync_debug_mode=lambda mode: None).items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))   # Inductor takes minutes here
        torch._dynamo.reset()
        monkeypatch.setattr(gpu.ln_kernel, "choose_impl", lambda device: ("triton", "in the interpreter"))
        monkeypatch.setattr(train.Run, "draw", lambda run: "")
        real = subprocess.run

        def here(command, **options):   # one process is this one: half a minute less
            if gpu.tools.TRAIN not in command or "torch.distributed.run" in command:
                return real(command, **options)
            return types.SimpleNamespace(returncode=train.main(command[2:]), stdout="", stderr="")
        monkeypatch.setattr(subprocess, "run", here)

    def failed(name):
        rows = gpu.run_part(name, HERE)
        assert rows
        return [row for row in rows if row["ok"] is False]

    @pytest.mark.parametrize("name", ["environment", "kernels", "autograd", "step", "resume"])
    def test_rehearsed(name, monkeypatch):
        if name == "kernels":   # by name: "auto" is the C++ kernel here. The interpreter cuts off to bf16 instead of rounding
            real = gpu.results_of
            monkeypatch.setattr(gpu, "results_of", lambda impl, *a, **k: real("triton" if impl == "auto" else impl, *a, **k))
        assert failed(name) == []

    def test_rehearsed_bandwidth_has_a_number_for_each(monkeypatch):
        """Also for another package, where it is installed."""
        class Liger:
            @staticmethod
            def apply(x, weight, bias, eps):
                return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)
        for name in ("liger_kernel", "liger_kernel.ops", "liger_kernel.ops.layer_norm"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        sys.modules["liger_kernel.ops.layer_norm"].LigerLayerNormFunction = Liger
        rows = gpu.run_part("bandwidth", HERE)
        timed = {f"{name}_ms" for name in ("ours", "torch", "copy", "inductor", "liger")}
        assert len(rows) == 1 and timed <= rows[0].keys() and rows[0]["share_of_copy"] > 0

    def test_rehearsed_several_processes_their_overlap_and_a_killed_one():
        rows = list(gpu_runs.several(dataclasses.replace(HERE, compile=("False",)), processes=2))
        assert len(rows) == 3 and all(row["ok"] for row in rows), rows
        assert 0 < rows[1]["first_ready"] < rows[1]["half_ready"] <= 1 and rows[1]["transfer_ms"] > 0
