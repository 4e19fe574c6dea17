"""Whole training steps on a CUDA device that is not there (fake_cuda.py): what a first run on a GPU would trip over."""

import os
import subprocess
import sys

import pytest
import torch

from configurator import Config
from model import GPT, GPTConfig
from benchmarks import fake_cuda
from tests.conftest import ROOT
from trainer import head_loss
from trainer.distributed import Ranks
from trainer.step import TrainingStep

INSIDE = fake_cuda.here()
SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, cos_attn=(1,))


def inside(test):
    return test if INSIDE else None    # collected in the process that has the device


def test_steps_on_a_fake_cuda_device(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    if INSIDE:
        pytest.skip("already there")
    library, why_not = fake_cuda.build(tmp_path)
    if library is None:
        pytest.skip(why_not)
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", __file__], cwd=ROOT, text=True,
                         capture_output=True, env={**os.environ, "LD_PRELOAD": library})
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:] + run.stderr


def whole_steps(dtype=torch.bfloat16, steps=2, accum=2, **settings):
    """(launches, step) after that many steps: the second has Adam's metric."""
    config = Config(**{**SHAPE, "micro_batch_size": 2, "gns_calibrate_tokens": 0, "compile": "False", **settings})
    with fake_cuda.pretended() as launches:
        with torch.device("cuda"):
            model = GPT(GPTConfig.of(vars(config), 127))
        step = TrainingStep(model, config, Ranks(device="cuda"), "cuda", dtype)
        for i in range(steps):
            batches = [tuple(torch.zeros(2, 16, dtype=torch.int64, device="cuda") for _ in range(2)) for _ in range(accum)]
            step.accumulate(batches, accum, 1 + i * 64, 1 + (i + 1) * 64, measure_stats=config.grad_stats)
            record = step.update(1e-3, 0.95, 0.1)
        assert all(t.is_cuda for name, t in record.numbers.items()), "numbers wait on the device"
        assert all(p.is_cuda and p.dtype == torch.float32 for p in model.parameters())
    return launches, step


@inside
@pytest.mark.parametrize("dtype, settings", [
    (torch.float32, dict(gns="norm")), (torch.float16, dict(gns="exact")), (torch.float16, dict(gns="norm")),
    (torch.bfloat16, dict(gns="off")), (torch.bfloat16, dict(gns="exact")), (torch.bfloat16, dict(gns="norm", norm="rmsnorm")),
    (torch.bfloat16, dict(gns="exact", tie_weights=False)), (torch.bfloat16, dict(spectral_qkv=(0,), bias=False)),
    (torch.bfloat16, dict(activation_checkpointing="block", dropout=0.1)),
    (torch.bfloat16, dict(grad_stats=True, gns_crosscheck=True))], ids=str)
def test_a_step_asks_the_host_for_nothing(dtype, settings):
    launches, _ = whole_steps(dtype, **settings)
    assert {launch.name for launch in launches} == {"forward_kernel", "backward_kernel", "finish_kernel"}


@inside
def test_the_residual_stream_is_added_inside_the_norm_kernels():
    """Five norm layers, of which the first alone has nothing to add; two micro-batches."""
    launches, _ = whole_steps(steps=1)
    forward = [launch.arguments for launch in launches if launch.name == "forward_kernel"]
    assert len(forward) == 10 and sum(bound["branch"] is None for bound in forward) == 2
    backward = [launch.arguments for launch in launches if launch.name == "backward_kernel"]
    added = [bound for bound in backward if bound["dbranch"] is not None]
    assert len(added) == 8 and all(b["dbranch"].dtype == torch.bfloat16 and b["dx"].dtype == torch.float32 for b in added)
    assert sum(bound["dtotal"] is None for bound in backward) == 4, "the first, and the last, whose sum nobody else reads"


@inside
@pytest.mark.parametrize("gns", ["norm", "exact"])
def test_the_head_over_a_large_vocabulary_asks_the_host_for_nothing(gns, monkeypatch):
    monkeypatch.setattr(head_loss, "WORTH_BYTES", 0)
    monkeypatch.setattr(head_loss, "chunk_bytes", lambda device: 4 * 127 * 10)
    launches, step = whole_steps(gns=gns)
    own = [launch.arguments for launch in launches if launch.name == "cross_entropy_kernel"]
    chunks = 4 if gns == "norm" else 1
    assert len(own) == 4 * chunks and all(bound["stride"] % 8 == 0 for bound in own)


@inside
def test_a_copy_to_the_host_is_noticed():
    with fake_cuda.pretended():
        x = torch.ones(3, device="cuda")
        for sync in (lambda: x.cpu(), lambda: x.sum().item(), lambda: bool(x[0]), lambda: float(x[0]), lambda: x.nonzero(),
                     lambda: torch.empty(3).copy_(x)):
            with pytest.raises((AssertionError, RuntimeError)):
                sync()
