"""
The processes of a run. `torchrun --nproc_per_node=N train.py ...` starts N of them; without torchrun there is one, for which
everything here does nothing.

    ranks = distributed.start(config, device)      # from torchrun's environment; nccl on cuda, gloo on the host
    run_model = ranks.wrap(model, config, dtype)   # DDP, or FSDP2 (parallel='fsdp'): in place, keys unchanged
    ranks.sync(run_model, last)                    # before each forward pass: gradients travel in the last micro-step only
    ranks.sum(flat)                                # the numbers of a step, one flat tensor, SUM over ranks
    ranks.agree(step, numbers)                     # stops the run, naming the rank, where ranks have come apart
    ranks.stop()                                   # all together; how a run ends otherwise: watchdog.py

Batches: micro-step k of rank r reads examples first + (k * world + r) * micro_batch_size ..., so a step of B examples reads
the same B examples in the same order however many processes share it. Each rank's loss is the mean over its own B / world
examples, DDP and FSDP average gradients over ranks, so the gradient is the mean over all B.

Stopping: a signal reaches ranks at different moments, but they must leave after the same step, since a step is collective. The
ranks vote while the step computes: one integer on the host through gloo, started before the step and read after it.

Checkpoints are whole: every tensor gathered, one file in the layout of one process, which any number of ranks in either mode
reads. Rank 0 needs host memory for weights and both moments (12 bytes per parameter), and writes alone: fine to some ten
billion parameters, above which torch.distributed.checkpoint's folder of shards is the right tool.
"""

import gc
import os

import numpy as np
import torch
import torch.distributed as dist

import configurator
from system.errors import ConfigError, explain
from trainer.optimizer import NEEDS_UNSHARDED, for_each_tensor
from trainer.watchdog import TIMEOUT, Watchdog, connect, environment, world_size

# All blocks share one code object, and with it Dynamo's limit of 8 graphs; beyond it they run uncompiled. A block has one for
# each of: first or not, cosine attention or not, measured by norm, exact, with a metric.
GRAPHS = 64


def start(config, device):
    """The processes of this run, connected. What cannot work is said before they are."""
    env, world = os.environ, world_size()
    check(config, world, device)
    if world == 1:
        return Ranks(device=device)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(f"WORLD_SIZE={world} is set, but {', '.join(missing)} is not: start with torchrun")
    rank = environment("RANK")
    local_rank = environment("LOCAL_RANK", rank)
    if rank >= world or environment("MASTER_PORT") > 65535:
        raise ConfigError(f"RANK={rank}, WORLD_SIZE={world}, MASTER_PORT={env['MASTER_PORT']} cannot be: start with torchrun")
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise ConfigError(f"process {local_rank} of this machine has no device: there are {torch.cuda.device_count()}; "
                          "lower --nproc_per_node")
    if device == "cuda":
        torch.cuda.set_device(local_rank)  # "cuda" is this one from here on
    keeps_store = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=connect(keeps_store), rank=rank,
                            world_size=world, timeout=TIMEOUT)
    return Ranks(rank, local_rank, world, device)


def check(config, world, device):
    """What the number of processes makes impossible."""
    if world == 1:
        return
    if device == "mps":
        raise ConfigError(f"device='mps' has no communication between processes: start one, not {world}")
    if config.parallel == "fsdp" and config.optimizer in NEEDS_UNSHARDED:
        raise ConfigError(f"optimizer={config.optimizer!r} updates whole matrices, which parallel='fsdp' never holds: "
                          "take parallel='ddp' or optimizer='adamw'")
    if config.parallel == "fsdp" and config.gns_crosscheck:
        raise ConfigError("gns_crosscheck=True needs every rank's whole gradient, which parallel='fsdp' never forms: "
                          "take parallel='ddp' or gns_crosscheck=False")
    configurator.check_batches(config, world)


class Ranks:
    def __init__(self, rank=0, local_rank=0, world=1, device="cpu"):
        self.rank, self.local_rank, self.world, self.device = rank, local_rank, world, device
        self.first = rank == 0  # the one that logs, saves and speaks
        self.sharded = False  # parameters are DTensors, of which each rank holds a part
        self.by_hand = False  # gradients are averaged by average(), not by DDP
        self.watchdog = Watchdog(rank, world) if world > 1 else None

    # -- the model

    def wrap(self, model, config, dtype, compile=False):
        """What to call in training. DDP, or FSDP2 with one unit per block and one for the rest: a tied matrix and what the
        forward pass reads directly (embeddings, final norm, head) are then gathered together.

        FSDP's mixed precision: blocks are gathered in the autocast dtype (half the traffic), the rest in float32, so that the
        residual stream stays float32 as without FSDP; gradients are summed and kept in float32. Inputs are not
        cast: the probes among them are float32. A block's norm weights are used rounded, unlike under DDP.

        Each block is compiled by itself, inside the hooks with which FSDP gathers and frees its parameters. A model compiled as
        a whole has its gradients when the backward pass is over, and nothing is left to hide their transfer behind."""
        if compile:
            torch._dynamo.config.recompile_limit = GRAPHS
        if self.world == 1:
            return torch.compile(model) if compile else model
        for block in model.h if compile else ():
            block.forward = torch.compile(block.forward)
        self.by_hand = config.gns_crosscheck
        if config.parallel == "ddp":
            if self.by_hand:  # the cross-check looks at this rank's own gradient first
                return model
            return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        mesh = init_device_mesh(self.device, (self.world,))
        half = None if dtype == torch.float32 else dtype
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
        for block in model.h:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        self.sharded = True
        return model

    @property
    def ddp(self):
        """Whether DDP averages the gradients, during the backward pass."""
        return self.world > 1 and not (self.sharded or self.by_hand)

    def sync(self, run_model, last):
        """Before the forward pass of a micro-step: whether its backward pass communicates."""
        if self.sharded:
            run_model.set_requires_gradient_sync(last)
        elif self.ddp:
            run_model.require_backward_grad_sync = last  # what DDP.no_sync() sets, for forward and backward alike

    def average(self, tensors):
        """Mean over ranks, in place: gradients that were kept back from DDP."""
        if self.world > 1:
            for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
                work.wait()
            torch._foreach_div_(tensors, self.world)

    def after_evaluation(self, model):
        if self.sharded:
            model.reshard()  # a forward pass without a backward pass leaves the root's parameters gathered

    # -- numbers

    def sum(self, tensor):
        """SUM over ranks, in place, on the tensor's device."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def host_sum(self, number):
        return float(self.sum(torch.tensor(float(number), dtype=torch.float64)))

    def vote(self, signals):
        """Start the vote on stopping; the function returned ends it: the signal to stop for, or 0, on every rank."""
        if self.world == 1:
            return lambda: max(signals, default=0)
        ballot = torch.tensor(max(signals, default=0))
        work = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True)

        def result():
            work.wait()
            return int(ballot)
        return result

    def from_first(self, function):
        """function() on rank 0, its result everywhere."""
        result = [function() if self.first else None]
        if self.world > 1:
            dist.broadcast_object_list(result, device=torch.device("cpu"))
        return result[0]

    def everyone(self, value):
        """[value of each rank], everywhere."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def agree(self, step, numbers):
        """Every rank must have the same {name: number}, bit for bit; all ranks raise the same error where not."""
        if self.world == 1:
            return
        mine = torch.tensor([float("nan") if v is None else float(v) for v in numbers.values()], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        for rank, row in enumerate(rows):
            differs = ((row != rows[0]) & ~(row.isnan() & rows[0].isnan())).nonzero()
            if len(differs):
                i = int(differs[0])
                raise ConfigError(f"step {step}: the processes have come apart: {list(numbers)[i]} is {float(row[i])!r} on "
                                  f"rank {rank} and {float(rows[0][i])!r} on rank 0. Go on from the last checkpoint; if it "
                                  "happens again, look for a faulty device or another version of the code on that machine")

    def guard(self, function, in_turn=False):
        """function() on every rank; an error on any is raised on all. In turn: rank 0, then the first rank of each
        other machine, then the rest, so that what one prepares the others find."""
        if self.world == 1:
            return function()
        result = error = None
        turn = 0 if self.first else 1 if self.local_rank == 0 else 2
        for now in range(3) if in_turn else [turn]:
            if now == turn:
                try:
                    result = function()
                except Exception as e:
                    error = explain(e)
                    if error is None:
                        raise
            if in_turn:
                self.host_sum(0)  # all have come here; dist.barrier would use the device
        failed = [(rank, words) for rank, words in enumerate(self.everyone(error)) if words is not None]
        if failed:
            rank, words = failed[0]
            raise ConfigError(words if len(failed) == self.world else f"rank {rank}: {words}")
        return result

    # -- checkpoints

    def whole_model(self, model):
        """model.state_dict() as one process has it; sharded parameters gathered one by one, kept on rank 0 only. A tied matrix
        stays one tensor; torch.distributed.checkpoint.state_dict would make two of it."""
        if not self.sharded:
            return model.state_dict()
        gathered = {id(p): self.whole(p.detach()) for p in model.parameters()}
        return {name: gathered[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}

    def whole_optimizer(self, optimizer):
        """optimizer.state_dict() as one process has it. torch.distributed.checkpoint.state_dict would take a step to make the
        state of an optimizer that has none yet, and so change the bits of the run."""
        saved = optimizer.state_dict()
        return for_each_tensor(saved, lambda part, i, value: self.whole(value)) if self.sharded else saved

    def whole(self, tensor):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.cpu() if self.first else None

    def load_optimizer(self, optimizer, saved):
        """A whole optimizer state into this rank's optimizer."""
        params = [[p for group in part.param_groups for p in group["params"]] for part in optimizer.parts]

        def mine(part, i, value):
            p = params[part][i]
            if self.sharded and value.dim() and value.shape == p.shape:
                from torch.distributed.tensor import distribute_tensor
                value = distribute_tensor(value.to(self.device), p.device_mesh, p.placements, src_data_rank=None)
            return value.clone()  # no view of the file, which is memory-mapped, see checkpoint.load
        optimizer.load_state_dict(for_each_tensor(saved, mine) if self.world > 1 else saved)

    def gather_shards(self, parts, shapes):
        """{name: whole tensor} from this rank's {name: part}, in one collective; for small ones. FSDP cuts the first
        dimension into pieces of ceil(rows / world). Each rank writes its rows into zeros, and the sum is the whole."""
        counts = [shape.numel() for shape in shapes.values()]
        flat = torch.zeros(sum(counts), device=self.device)
        whole = {name: piece.view(shapes[name]) for name, piece in zip(shapes, flat.split(counts))}
        for name, part in parts.items():
            rows = -(-shapes[name][0] // self.world)
            whole[name][self.rank * rows:self.rank * rows + len(part)] = part
        self.sum(flat)
        return whole

    # -- random numbers: dropout draws from a stream of its own on every rank

    def seed(self, seed, step):
        """Streams that depend on (seed, step, rank). One process keeps the one it has."""
        if self.world > 1:
            torch.manual_seed(mixed(seed, step, self.rank))

    def rng_state(self):
        state = {"cpu": torch.get_rng_state(), "cuda": [torch.cuda.get_rng_state()] if self.device == "cuda" else []}
        return state if self.world == 1 else {"ranks": self.everyone(state)}

    def restore_rng(self, saved, seed, step):
        """Whether the streams go on where they were: not with another number of ranks, where new ones start."""
        states = saved.get("ranks", [saved])
        if len(states) != self.world:
            torch.manual_seed(mixed(seed, step, self.rank))
            return False
        state = states[self.rank]
        torch.set_rng_state(state["cpu"].cpu())
        if state["cuda"] and self.device == "cuda":
            torch.cuda.set_rng_state(state["cuda"][0].cpu())
        return True

    # -- the end

    def stop(self):
        """The good end: all together."""
        if self.world > 1:
            gc.collect()  # what still refers to the process group (a DDP model in a cycle) must go before it
            self.host_sum(0)  # all have come here
            self.watchdog.close()
            dist.destroy_process_group()


def mixed(*numbers):
    """A seed from several numbers, none of which repeats another's stream."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
