"""One of two ranks, started by test_watch_frameworks.py: DDP with no_sync, FSDP2, and Trainer where it is installed."""

import importlib.util
import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from rightbatch import WatchError, watch
from tests.watching import TINY, documents, hf, ids, loop, pair_of, plain, trainer_of, truth_of_ragged

NORMS = ["first.weight", "first.bias", "second.weight"]


def last(w):
    w.fetch()
    adam = w.meter.scales.get("norm_adam")
    return dict(vars(w.last), adam=adam and [adam.sq_norm, adam.tr_sigma])


def ddp(rank, data):
    model = plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    w = watch(wrapped, optimizer)
    for _ in range(2):
        first, second = data[rank].split(2)
        with wrapped.no_sync():
            (wrapped(first) / 2).backward()
        (wrapped(second) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return last(w)


def times(rank, data):
    """What DDP waits for is fixed cost: the clock stands still but for the all-reduce, which is over when backward is. And of
    several clocks the slowest rank's counts."""
    from rightbatch.step_time import StepTime
    clock, over = [0.0], threading.Event()
    StepTime.now = lambda self: clock[0]
    model = plain()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def all_reduce(state, bucket):
        gradients, future = bucket.buffer(), torch.futures.Future()
        dist.all_reduce(gradients)

        def arrive():
            if over.wait(60):
                clock[0] += 5.0
                future.set_result(gradients / 2)
            else:
                future.set_exception(RuntimeError("DDP waits for its gradients before watch looks at the clock"))
        threading.Thread(target=arrive).start()
        return future
    wrapped.register_comm_hook(None, all_reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    w = watch(wrapped, optimizer)
    looked = w._ending.backward_over
    w._ending.backward_over = lambda: (looked(), over.set())
    for _ in range(8):
        over.clear()
        loss = wrapped(data[rank])
        clock[0] += 1.0 + rank
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    w.fetch()
    return dict(own=asdict(w._clock.timer.estimate()), slowest=asdict(w._step_cost(all_ranks=True)))


def compiled_before(rank, data):
    model = plain()
    compiled = torch.compile(lambda idx: model(idx), backend="eager")
    compiled(data[rank]).backward()
    w = watch(model)
    compiled(data[rank]).backward()
    try:
        w.step()
    except WatchError as error:
        return str(error)


def exact(rank, data):
    """A layer that only one of two ranks uses."""
    model = plain()
    model.extra = torch.nn.Linear(16, 1)
    forward = type(model).forward
    model.forward = lambda idx: forward(model, idx) + (model.extra(model.embedding(idx)).square().mean() if rank else 0.0)
    w = watch(model, mode="exact")
    model(data[rank]).backward()
    w.step()
    return dict(examples=w.last.examples, coverage=w.meter.coverage)


def fsdp(rank, data):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model, mesh = plain(), init_device_mesh("cpu", (2,))
    fully_shard(model.first, mesh=mesh)  # a norm layer that is a shard group of its own
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    w = watch(model, optimizer)
    for _ in range(2):
        for part in data[rank].split(2):
            (model(part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        optimizer.zero_grad()
    return last(w)


def huggingface(folder):
    from rightbatch import WatchCallback
    model, rows = hf("LlamaForCausalLM", "LlamaConfig", **TINY), documents(8)
    callback = WatchCallback()
    trainer_of(folder, model, rows, callback, max_steps=1).train()
    q, big, shares = truth_of_ragged(model, rows)
    return dict(hf=last(callback.w), hf_truth=[q, big, float(shares.square().sum())])


class Wide(torch.nn.Module):
    """Rows to choose from, and more ranks than some weights divide by."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(67), torch.nn.Linear(67, 75), torch.nn.Linear(75, 67, bias=False)
        self.turned = Conv1D(71, 67)

    def forward(self, x):
        return (self.turned(self.down(self.up(self.norm(x)).tanh())) + 0.1).square().mean()


class Conv1D(torch.nn.Module):
    """As transformers has it: a linear layer whose weight is turned."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.weight, self.bias = nf, torch.nn.Parameter(0.1 * torch.randn(nx, nf)), torch.nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def body(data, kind, mode):
    """What rows come to in a few steps, in one process ("one"), on ranks, and with shards on ranks."""
    torch.manual_seed(0)
    model = wrapped = Wide()
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        for module in (model.up, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    w = watch(wrapped, optimizer, mode=mode, group=dist.new_subgroups(1)[0] if kind == "one" else None)
    collect = w._collector.collect

    def collected(*step):
        found.append(collect(*step))
        return found[-1]
    w._collector.collect = collected
    for step in range(6):
        for part in data[:, step].split(2):
            (wrapped(part) * 2 / len(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
    world = 1 if kind == "one" else 2
    return dict(left_out=w.left_out, body=[float(v) / world**2 for numbers, _ in found for name in ("body", "body_adam")
                                           for v in numbers.get(name, ())])


def in_three_ways(rank):
    data = torch.randn(8, 6, 5, 67, generator=torch.Generator().manual_seed(0))
    return {f"{mode}_{kind}": body(data if kind == "one" else data.split(4)[rank], kind, mode)
            for mode in ("norm", "exact") for kind in ("one", "ddp", "fsdp")}


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)
    data = ids(batch=8).split(4)
    numbers = in_three_ways(rank)
    numbers |= dict(truth=pair_of(loop(plain(), {"idx": torch.cat(data)}), NORMS), ddp=ddp(rank, data), fsdp=fsdp(rank, data),
                   times=times(rank, data), compiled=compiled_before(rank, data), exact=exact(rank, data))
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        numbers |= huggingface(folder)
    if rank == 0:
        (folder / "numbers.json").write_text(json.dumps(numbers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
