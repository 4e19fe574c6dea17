"""torch.compile: how many graphs a run needs, and when gradients are there to be sent."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import train
from configurator import Config
from model import GPT, GPTConfig
from rightbatch.kernels.backends import BACKENDS
from trainer import distributed
from trainer.step import TrainingStep

SHAPE = dict(n_layer=3, n_head=2, n_embd=16, block_size=16, cos_attn=(1,))


@pytest.fixture(autouse=True)
def compiler(monkeypatch, request):
    """Graphs as on a GPU, without the minutes that Inductor's C++ takes."""
    backend = getattr(request, "param", "eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


@pytest.fixture
def two_processes(monkeypatch):
    """Rank 0 of two, whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    monkeypatch.setattr(distributed, "Watchdog", lambda *_: None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.Ranks(0, 0, 2)
    dist.destroy_process_group()


def compiled_step(ranks, parallel="ddp", **settings):
    config = Config(**{**SHAPE, "micro_batch_size": 2, "batch_size": 4, "batch_size_start": 4, "parallel": parallel,
                       "compile": "True", "gns_calibrate": True, **settings})
    torch.manual_seed(0)
    step = TrainingStep(GPT(GPTConfig.of(vars(config), 64)), config, ranks, "cpu", torch.float32)
    if parallel == "ddp":
        step.run_model.register_comm_hook(None, sent)
    return step


def sent(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Windows:
    """Random tokens, as train.validation_loss reads them."""

    def val_starts(self, n):
        return list(range(n))

    def val_batch(self, starts, device):
        ids = torch.randint(64, (len(starts), 17), generator=torch.Generator().manual_seed(len(starts)))
        return ids[:, :-1], ids[:, 1:]


def run_steps(step, accums):
    tokens = 0
    for accum in accums:
        after = tokens + accum * 32 * step.ranks.world
        step.accumulate([Windows().val_batch([0, 0], "cpu")] * accum, accum, tokens, after)
        step.update(1e-3, 0.95, 0.1)
        tokens = after


def test_a_run_compiles_three_graphs_whatever_it_evaluates_measures_and_schedules(tmp_path, tiny_args):
    """Exact without and with Adam's metric, norm with it. Evaluation has batches of 4 and 3, the schedule goes from 4 to 16."""
    assert train.main(tiny_args(out_dir=tmp_path, compile=True, gns_calibrate=True, eval_iters=7, eval_tokens=320)) == 0
    assert counters["stats"]["unique_graphs"] == 3
    assert not counters["graph_break"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_blocks_of_several_processes_stay_compiled_over_evaluation_exact_and_norm_steps(two_processes, parallel):
    """First, cosine and other blocks, each without the metric, with it, and with sampled rows: nine graphs. Dynamo's own limit
    is eight, after which it goes on uncompiled. None more for evaluation, none for steps after those."""
    step = compiled_step(two_processes, parallel, gns_adam=parallel == "ddp", eval_iters=3)
    run_steps(step, [1] * 9 + [2, 4])
    expected = 9 if parallel == "ddp" else 6
    assert counters["stats"]["unique_graphs"] == expected
    assert train.validation_loss(step, Windows()) > 0
    run_steps(step, [2, 1, 4, 1, 8, 8, 8, 8, 8, 8])
    assert counters["stats"]["unique_graphs"] == expected
    assert not counters["graph_break"]


@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)  # eager would keep autograd's own order
def test_the_last_blocks_gradients_are_ready_before_the_first_block_is_differentiated(two_processes, monkeypatch):
    """So that DDP sends them meanwhile. A model compiled as a whole has all of them when the last of it is done."""
    step, events, real = compiled_step(two_processes, gns="norm", gns_calibrate=False), [], BACKENDS["cpu"].backward
    run_steps(step, [1])
    monkeypatch.setattr(BACKENDS["cpu"], "backward", lambda *a: events.append("norm layer") or real(*a))
    for name, p in step.model.h.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    run_steps(step, [1])
    assert events.count("norm layer") == 6  # of three blocks
    first_block = [i for i, e in enumerate(events) if e == "norm layer"][-2]
    ready = [e for e in events[:first_block] if e != "norm layer"]
    assert {e.split(".")[0] for e in ready} == {"1", "2"}
