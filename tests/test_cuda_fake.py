"""Whole training steps on a CUDA device that is not there (fake_cuda.py): what a first run on a GPU would trip over."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import fake_cuda, gpu, tools, triton_compile
from configurator import Config
from model import GPT, GPTConfig
from rightbatch.kernels import head_loss
from tests.helpers import ROOT
from trainer.distributed import Ranks
from trainer.step import TrainingStep

INSIDE = fake_cuda.here()
SHAPE = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, cos_attn=(1,))


def inside(test):
    return test if INSIDE else None    # collected in the process that has the device


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    if INSIDE:
        pytest.skip("already there")
    path, why_not = fake_cuda.build(tmp_path_factory.mktemp("fake"))
    return path or pytest.skip(why_not)


@pytest.mark.parametrize("which", ["compile", "not compile"])   # two processes, of equal length
def test_steps_on_a_fake_cuda_device(which, library):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--show-capture=no", __file__, "-k", which]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={**os.environ, "LD_PRELOAD": library})
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout[-3000:] + run.stderr


def whole_steps(dtype=torch.bfloat16, steps=2, accum=2, **settings):
    """(launches, step) after that many steps: the second has Adam's metric."""
    config = Config(**{**SHAPE, "micro_batch_size": 2, "gns_calibrate": False, "compile": "False", **settings})
    with fake_cuda.pretended(compiling=config.compile == "True") as launches:
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
    monkeypatch.setattr(head_loss, "chunk_bytes", lambda device: 2 * 127 * 10)
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


# ---- torch.compile

@inside
@pytest.mark.parametrize("settings", [
    dict(gns="norm"), dict(gns="exact"), dict(gns="norm", norm="rmsnorm", bias=False),
    dict(activation_checkpointing="block", dropout=0.1)], ids=str)
def test_steps_with_probes_compile_as_one_graph_each(settings, monkeypatch):
    """Both kinds of step, without and with Adam's metric, over a vocabulary that is large."""
    from torch._dynamo.utils import counters
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, fullgraph=True, backend="aot_eager"))
    monkeypatch.setattr(head_loss, "WORTH_BYTES", 0)
    torch._dynamo.reset()
    counters.clear()
    whole_steps(compile="True", **settings)
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


# ---- Triton's binder and compiler, with the arguments of real launches

def distinct(launches):
    """One of each kind of launch: kernel, dtypes, what is there, options."""
    def kind(launch):
        seen = {name: str(value.dtype) if isinstance(value, torch.Tensor) else value is None
                for name, value in launch.arguments.items()}
        return launch.name, str(seen), str(launch.named)
    return list({kind(launch): launch for launch in launches}.values())


@inside
def test_every_kernel_of_a_step_compiles_without_spills(monkeypatch):
    """As autocast really calls them: a float32 residual stream, bf16 linears, and the metric of the second step."""
    monkeypatch.setattr(head_loss, "WORTH_BYTES", 0)
    launches = distinct(whole_steps(gns="norm", n_embd=768, n_head=12, accum=1)[0])
    names = {"forward_kernel", "backward_kernel", "finish_kernel", "cross_entropy_kernel"}
    assert {launch.name for launch in launches} == names
    backward = [launch.arguments for launch in launches if launch.name == "backward_kernel"]
    assert {(a["x"].dtype, a["dy"].dtype) for a in backward} == {(torch.float32, torch.bfloat16)}
    for launch in launches:
        assert triton_compile.resources(fake_cuda.compiled(launch, 80))[1] == 0, launch.name


@inside
@pytest.mark.parametrize("arch, C, x, dy, bytes_moved", [
    (80, 768, "bf16", "bf16", 6 + 2), (80, 4096, "fp32", "bf16", 10 + 6), (90, 768, "fp32", "bf16", 10 + 6),
    (100, 4096, "fp32", "bf16", 10 + 6), (90, 16384, "fp32", "bf16", 10 + 6), (100, 16384, "fp32", "fp32", 12 + 4)])
def test_the_backward_kernel_spills_nothing_moves_every_byte_once_and_needs_the_registers_it_was_planned_with(
        C, arch, x, dy, bytes_moved):
    from rightbatch.kernels import ln_triton
    report = triton_compile.inspect("backward", x, dy, arch, C)
    assert report["spill_bytes"] == 0 and report["barriers_per_row"] <= 5 and report["registers"] <= ln_triton.REGISTERS
    # x, dy and the sum's gradient in; dx out, and the branch's gradient where it has another dtype. And w, from the cache.
    assert report["bytes_per_channel_and_row"] == bytes_moved + 4


@inside
@pytest.mark.parametrize("name, arch", [("forward", 90), ("means", 90), ("finish", 100)])
def test_the_other_norm_kernels_spill_nothing_on_long_rows(name, arch):
    assert triton_compile.inspect(name, "fp32", "bf16", arch, 16384)["spill_bytes"] == 0


@inside
def test_a_backward_pass_is_three_launches():
    """The kernel, the sums of its parts, the sum of its tiles' norms. Nothing is filled with zeros before."""
    assert triton_compile.programs(1, 768) == {"B": 1, "T": 2048, "C": 768, "programs": 256, "rows_per_program": 8,
                                               "finish_programs": 48, "launches": 3}
    assert triton_compile.programs(8, 8192)["launches"] == 4   # rows that are cut: their means before


# ---- make gpu, on this device: the parts that run in its own process. The others are processes of their own: test_gpu_run.py

class MadeUpNumbers(TorchDispatchMode):
    """A tensor without memory has no numbers. What asks for one gets 1, or True."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


@inside
@pytest.mark.parametrize("part", ["environment", "kernels", "autograd", "bandwidth", "step"])
def test_make_gpu_runs_to_the_end_of_each_part(part, monkeypatch):
    setting = gpu.Setting(shapes=((1, 1, 33), (2, 64, 16384)), speeds=((2, 64, 768),), seconds=0, micro=2, rounds=1,
                          model={**SHAPE, "vocab_size": 50257}, compile=("False",))
    for name in ("reset_peak_memory_stats", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)
    monkeypatch.setattr(tools, "to_host", lambda records: [{name: np.ones(t.numel()) for name, t in r.numbers.items()}
                                                           for r in records])
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)   # which tensors without memory do not support

    def on_device(config):
        with torch.device("cuda"):
            return GPT(config)
    for module in (gpu, tools):
        monkeypatch.setattr(module, "GPT", on_device)
    with fake_cuda.pretended(compiling=True), MadeUpNumbers():
        rows = gpu.run_part(part, setting)
    assert rows and not any("ran to its end" in row["check"] for row in rows), rows[-1]


# ---- watch

@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, dict(fused=True), dict(mode="exact")], ids=str)
def test_watched_steps_launch_taps_and_never_wait_for_the_device(options, dtype, monkeypatch):
    from rightbatch import watch
    from rightbatch.recognise import recognise
    from tests.watching import Plain
    known = {kind: recognise(kind(16)) for kind in (torch.nn.LayerNorm, torch.nn.RMSNorm)}  # inside there are no numbers
    monkeypatch.setattr(sys.modules["rightbatch.sites"], "recognise", lambda module: known.get(type(module)))
    with fake_cuda.pretended() as launches:
        with torch.device("cuda"):
            model = Plain()
            for module in model.modules():
                for name, p in module.named_parameters(recurse=False):
                    setattr(module, name, torch.nn.Parameter(p.to(dtype)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        w = watch(model, optimizer, **options)
        w._checked = True  # the first step of all is looked at at once, and its layers are compared with their gradients
        w._sampler.checks.clear()
        for _ in range(3):
            for _ in range(2):
                (model(torch.zeros(4, 12, dtype=torch.int64, device="cuda")) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(w._waiting) == 3 and all(step.numbers.is_cuda for step in w._waiting)
        assert [name for name, _ in w._waiting[-1].events] == ["forward", "backward"] * 2 + ["update"]
    assert sum(launch.name == "tap_kernel" for launch in launches) == 3 * 2 * len(w._hooks.norms)


@inside
@pytest.mark.parametrize("arch, C, x, dy", [(80, 768, "bf16", "bf16"), (90, 4096, "fp32", "bf16"), (100, 4096, "fp32", "fp32")])
def test_the_tap_kernel_spills_nothing_and_reads_every_byte_once(arch, C, x, dy):
    report = triton_compile.inspect("tap", x, dy, arch, C)
    assert report["spill_bytes"] == 0 and report["bytes_per_channel_and_row"] == sum({"bf16": 2, "fp32": 4}[t] for t in (x, dy))
