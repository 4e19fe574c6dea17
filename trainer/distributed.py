"""
The processes of a run. `torchrun --nproc_per_node=N train.py ...` starts N of them; without torchrun there is one, for which
everything here does nothing.

    ranks = distributed.start(config, device)      # from torchrun's environment; nccl on cuda, gloo on the host
    run_model = ranks.wrap(model, config, dtype)   # DDP, or FSDP2 (parallel='fsdp'): in place, keys unchanged
    ranks.sync(run_model, last)                    # before each forward pass: gradients travel in the last micro-step only
    ranks.sum(flat)                                # the numbers of a step, one flat tensor, SUM over ranks
    ranks.agree(step, numbers)                     # stops the run, naming the rank, where ranks have come apart
    ranks.stop()

Batches: micro-step k of rank r reads examples first + (k * world + r) * micro_batch_size ..., so a step of B examples reads
the same B examples in the same order however many processes share it. Each rank's loss is the mean over its own B / world
examples, DDP and FSDP average gradients over ranks, so the gradient is the mean over all B.

Stopping: a signal reaches ranks at different moments, but they must leave after the same step, since a step is
collective. The ranks vote while the step computes: one integer on the host through gloo, started before the
step and read after it, so it neither waits for the device nor delays it. They leave after the step in which the vote is seen.

Dying: a rank that is killed takes the run with it, within seconds and in words. gloo notices at once (the connection
breaks); NCCL would wait for its timeout. So each rank has a thread (Watch) that counts a number up in the store of the
rendezvous and looks at its neighbour's; one that has stood still for Watch.LIMIT seconds ends the run. It needs no
launcher: ranks started by hand or by srun are watched just as well. torchrun, where it is there, ends the others faster,
and with --max-restarts starts all again; resume='auto' then goes on from the last checkpoint.

Checkpoints are whole: every tensor gathered, one file in the layout of one process. One file is what users copy, sample
from and publish, and any number of ranks in either mode reads it. The limits: rank 0 needs host memory for weights and
both moments (12 bytes per parameter), and writes alone: fine to some ten billion parameters, above which
torch.distributed.checkpoint's folder of shards is the right tool.
"""

import datetime
import json
import os
import re
import sys
import threading
import time
import traceback

import numpy as np
import torch
import torch.distributed as dist

import configurator
from configurator import ConfigError

TIMEOUT = datetime.timedelta(minutes=30)  # of a collective: longer than rank 0 may take to write a checkpoint
COMMUNICATION = re.compile(r"gloo|nccl|connection|broken pipe|socket|store", re.IGNORECASE)


def world_size():
    """The number of processes of this run, from torchrun's environment."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(config, device):
    """The processes of this run, connected. What cannot work is said before they are."""
    env, world = os.environ, world_size()
    check(config, world, device)
    if world == 1:
        return Ranks()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ConfigError(f"WORLD_SIZE={world} is set, but {', '.join(missing)} is not: start with torchrun")
    local_rank = int(env.get("LOCAL_RANK", env["RANK"]))
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"process {local_rank} of this machine has no device: there are {torch.cuda.device_count()}; "
                              "lower --nproc_per_node")
        torch.cuda.set_device(local_rank)  # "cuda" is this one from here on
    rank = int(env["RANK"])
    keeps_store = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=connect(keeps_store), rank=rank,
                            world_size=world, timeout=TIMEOUT)
    return Ranks(rank, local_rank, world, device)


def connect(keeps_store=False, timeout=TIMEOUT):
    """The store where ranks meet: torchrun keeps it, or else rank 0. torchrun may keep it over a restart, with the addresses of
    dead ranks in it (its static rendezvous, torch 2.13), so every attempt has keys of its own."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=keeps_store, timeout=timeout,
                          wait_for_workers=False)
    return dist.PrefixStore(f"rightbatch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def check(config, world, device):
    """What the number of processes makes impossible."""
    if world == 1:
        return
    if device == "mps":
        raise ConfigError(f"device='mps' has no communication between processes: start one, not {world}")
    if config.parallel == "fsdp" and config.gns_crosscheck:
        raise ConfigError("gns_crosscheck=True needs every rank's whole gradient, which parallel='fsdp' never forms: "
                          "take parallel='ddp' or gns_crosscheck=False")
    configurator.check_batches(config, world)


def local(tensor):
    """This rank's part of a sharded tensor, the tensor itself if it is none."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Ranks:
    def __init__(self, rank=0, local_rank=0, world=1, device="cpu"):
        self.rank, self.local_rank, self.world, self.device = rank, local_rank, world, device
        self.first = rank == 0  # the one that logs, saves and speaks
        self.sharded = False  # parameters are DTensors, of which each rank holds a part
        self.by_hand = False  # gradients are averaged by average(), not by DDP
        self.watch = Watch(rank, world) if world > 1 else None

    # -- the model

    def wrap(self, model, config, dtype, compile=False):
        """What to call in training. DDP, or FSDP2 with one unit per block and one for the rest: a tied matrix and what the
        forward pass reads directly (embeddings, final norm, head) are then gathered together.

        FSDP's mixed precision: blocks are gathered in the autocast dtype (half the traffic), the rest in float32, so that the
        residual stream stays float32 as without FSDP; gradients are summed and kept in float32. Inputs are not
        cast: the probes among them are float32. A block's norm weights are used rounded, unlike under DDP."""
        if self.world == 1:
            return torch.compile(model) if compile else model
        self.by_hand = config.gns_crosscheck
        if config.parallel == "ddp":
            run_model = torch.compile(model) if compile else model
            if self.by_hand:  # the cross-check looks at this rank's own gradient first
                return run_model
            return torch.nn.parallel.DistributedDataParallel(run_model, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        mesh = init_device_mesh(self.device, (self.world,))
        half = None if dtype == torch.float32 else dtype
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half and torch.float32, cast_forward_inputs=False)
        for block in model.h:
            if compile:
                block.forward = torch.compile(block.forward)  # inside the hooks that gather and free the parameters
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        self.sharded = True
        return model

    def sync(self, run_model, last):
        """Before the forward pass of a micro-step: whether its backward pass communicates."""
        if self.world == 1 or self.by_hand:
            return
        if self.sharded:
            run_model.set_requires_gradient_sync(last)
        else:
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
        return float(self.sum(torch.tensor(float(number), dtype=torch.float64))) if self.world > 1 else number

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
        if self.world == 1:
            return function()
        result = [function() if self.first else None]
        dist.broadcast_object_list(result, device=torch.device("cpu"))
        return result[0]

    def wait(self):
        """All ranks have come here. On the host: dist.barrier would use the device."""
        self.host_sum(0.0)

    def agree(self, step, numbers):
        """Every rank must have the same {name: number}, bit for bit; all ranks raise the same error where not."""
        if self.world == 1:
            return
        mine = torch.tensor([float("nan") if v is None else float(v) for v in numbers.values()], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(rows, mine)
        for rank, row in enumerate(rows):
            differs = (row != rows[0]) & ~(row.isnan() & rows[0].isnan())
            if differs.any():
                i = int(differs.nonzero()[0])
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
                except ConfigError as e:
                    error = str(e)
            if in_turn:
                self.wait()
        errors = [None] * self.world
        dist.all_gather_object(errors, error)
        failed = [rank for rank, e in enumerate(errors) if e is not None]
        if failed:
            where = "" if len(failed) == self.world else f"rank {failed[0]}: "
            raise ConfigError(where + errors[failed[0]])
        return result

    # -- checkpoints

    def whole_model(self, model):
        """model.state_dict() as one process has it; sharded parameters gathered one by one, kept on rank 0 only."""
        if not self.sharded:
            return model.state_dict()
        gathered = {}
        for _, p in model.named_parameters():
            gathered[id(p)] = self._whole(p.detach())
        return {name: gathered[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}

    def whole_optimizer(self, optimizer):
        saved = optimizer.state_dict()
        if not self.sharded:
            return saved
        return {**saved, "state": {i: {k: self._whole(v) for k, v in s.items()} for i, s in saved["state"].items()}}

    def _whole(self, tensor):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.cpu() if self.first else None

    def load_optimizer(self, optimizer, saved):
        """A whole optimizer state into this rank's optimizer."""
        if self.sharded:
            from torch.distributed.tensor import distribute_tensor
            params = [p for group in optimizer.param_groups for p in group["params"]]

            def part(i, value):
                p = params[i]
                if value.shape != p.shape or value.dim() == 0:
                    return value
                mine = distribute_tensor(value.to(self.device), p.device_mesh, p.placements, src_data_rank=None)
                return mine.clone()  # no view of the file
            saved = {**saved, "state": {i: {k: part(i, v) for k, v in s.items()} for i, s in saved["state"].items()}}
        elif self.world > 1:  # the file is memory-mapped, see checkpoint.load
            saved = {**saved, "state": {i: {k: v.clone() for k, v in s.items()} for i, s in saved["state"].items()}}
        optimizer.load_state_dict(saved)

    def gather_shards(self, parts, shapes):
        """{name: whole tensor} from this rank's {name: part}, in one collective; for small ones. FSDP cuts the first
        dimension into pieces of ceil(rows / world). Each rank writes its rows into zeros, and the sum is the whole."""
        flat = torch.zeros(sum(shape.numel() for shape in shapes.values()), device=self.device)
        whole = {name: piece.view(shapes[name]) for name, piece in
                 zip(shapes, flat.split([shape.numel() for shape in shapes.values()]))}
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
        if self.world == 1:
            return state
        states = [None] * self.world
        dist.all_gather_object(states, state)
        return {"ranks": states}

    def restore_rng(self, saved, seed, step):
        """Whether the streams go on where they were: not with another number of ranks, where new ones start."""
        states = saved.get("ranks", [saved])
        if len(states) != self.world:
            if self.world == 1:
                torch.manual_seed(mixed(seed, step, 0))
            self.seed(seed, step)
            return False
        torch.set_rng_state(states[self.rank]["cpu"].cpu())
        if states[self.rank]["cuda"] and self.device == "cuda":
            torch.cuda.set_rng_state(states[self.rank]["cuda"][0].cpu())
        return True

    # -- the end

    def stop(self):
        """The good end: all together."""
        if self.world > 1:
            self.wait()
            self.watch.close()
            dist.destroy_process_group()

    def fail(self, error):
        """Any other exception: say on every rank what happened to which one, and end now."""
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and COMMUNICATION.search(str(error))):
            self.watch.end(self.watch.who_died() or f"communication failed ({first_line(error)})")
        traceback.print_exception(error)
        self.watch.tell(f"rank {self.rank} failed: {type(error).__name__}: {first_line(error)}")
        leave(1)


def leave(code):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: taking down a process group whose members are gone can wait for ever


def report(error, ranks=None):
    """An error that the user can mend, and the end of this process: one line, from rank 0, unless it is this rank's alone.

    torchrun writes half a screen about each process that fails. So the others, with the same error as rank 0, leave first
    and quietly; what torchrun then says is about rank 0 and ends with the error itself (its error file)."""
    watch = ranks and ranks.watch
    if not watch and not (world_size() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"):
        configurator.die(error)  # one process, or no place yet where they could meet
    rank, mine, error_file = int(os.environ["RANK"]), str(error), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if rank == 0:
        print(f"error: {mine}", file=sys.stderr, flush=True)
    same = exchange(watch, rank, mine).get(0) == mine
    if rank > 0 and not same:
        print(f"error: rank {rank}: {mine}", file=sys.stderr, flush=True)
    if rank == 0:
        time.sleep(0.5)  # it may keep the store that the others are reading
    elif error_file and same and os.environ.get("LOCAL_RANK") != "0":  # one process of each machine fails
        leave(0)
    if error_file:
        with open(error_file, "w", encoding="utf-8") as f:
            json.dump({"message": {"message": f"error: {mine}", "extraInfo": {"timestamp": str(int(time.time()))}}}, f)
    leave(2)


def exchange(watch, rank, mine, seconds=10):
    """What the ranks leave with, as far as known within some seconds: {rank: message}."""
    found = {}
    try:
        store = watch.store if watch else connect(timeout=datetime.timedelta(seconds=seconds))
        store.set(f"error/{rank}", mine)
        deadline = time.monotonic() + seconds
        while len(found) < world_size() and time.monotonic() < deadline:
            for r in range(world_size()):
                if r not in found and store.check([f"error/{r}"]):
                    found[r] = store.get(f"error/{r}").decode()
            time.sleep(0.05)
        if watch:
            watch.tell(f"rank {rank} left: {mine}")
    except RuntimeError:
        pass
    return found


def mixed(*numbers):
    """A seed from several numbers, none of which repeats another's stream."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


def first_line(error):
    return (str(error).strip().splitlines() or [""])[0]


class Watch(threading.Thread):
    """Ends this process, in words, when another one of the run is gone. Keys in the store: beat/<rank>, a number that a living
    rank counts up; dead, what happened, once somebody knows; error/<rank>, what a rank is about to leave with."""

    BEAT = 1.0  # seconds
    LIMIT = 30.0  # standing still for so long is death; a busy machine may stall a thread for some seconds

    def __init__(self, rank, world):
        super().__init__(daemon=True, name="watch")
        self.rank, self.world, self.closing, self.lock = rank, world, threading.Event(), threading.Lock()
        self.store = connect()  # of its own: the group's is busy while the main thread waits for something in it
        self.store.set(f"beat/{rank}", "0")
        for other in range(world):
            self.store.wait([f"beat/{other}"], datetime.timedelta(seconds=60))
        self.start()

    def run(self):
        """Each rank looks at the next one only; what it finds goes to all through `dead`."""
        neighbour = (self.rank + 1) % self.world
        beat, seen, since = 0, None, time.monotonic()
        while not self.closing.wait(self.BEAT):
            beat += 1
            try:
                self.store.set(f"beat/{self.rank}", str(beat))
                now = self.store.get(f"beat/{neighbour}")
                dead = self.store.get("dead").decode() if self.store.check(["dead"]) else None
            except RuntimeError:
                if self.closing.is_set():
                    return
                self.end("rank 0 (or the launcher), which keeps the rendezvous, is gone")
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > self.LIMIT:
                dead = dead or f"rank {neighbour} has not answered for {self.LIMIT:.0f} seconds"
                self.tell(dead)
            if dead:
                time.sleep(2 * self.BEAT)  # the main thread may be about to say it better, or be the one that failed
                self.end(dead)

    def tell(self, what):
        try:
            if not self.store.check(["dead"]):
                self.store.set("dead", what)
        except RuntimeError:
            pass

    def who_died(self):
        """After a broken connection: who stands still. Takes some beats."""
        def beats():
            return [self.store.get(f"beat/{r}") for r in range(self.world)]
        try:
            before = beats()
            for _ in range(5):
                time.sleep(self.BEAT)
                if self.store.check(["dead"]):
                    return self.store.get("dead").decode()
            still = [str(r) for r, (a, b) in enumerate(zip(before, beats())) if a == b]
        except RuntimeError:
            return "rank 0 (or the launcher), which keeps the rendezvous, is gone"
        if not still:
            return None
        self.tell(f"rank {' and rank '.join(still)} died (killed, or failed: its own output says why)")
        return self.store.get("dead").decode()

    def end(self, what):
        with self.lock:  # one thread speaks, and does not come back
            print(f"rank {self.rank} of {self.world}: {what}; this process ends, too. The same command with --resume=auto goes "
                  "on from the last checkpoint", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def close(self):
        self.closing.set()
        self.join()
