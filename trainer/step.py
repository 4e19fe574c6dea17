"""
The one training step. train.py, the sweeps' trials, every benchmark and the tests run this one.

    step = TrainingStep(model, config, ranks, device, dtype)
    step.accumulate(micro_batches, accum, before, after)      # gradients of all micro-batches, measured on the way
    record = step.update(lr, beta2, weight_decay)             # |G|, clipping, update
    values = to_host([record, ...])                            # later: the numbers of several steps in one transfer
    step.absorb(values[0], record); step.row()                # averages; the keys of a log line

The loss of a step is the mean over its B examples. A step with fused AdamW never waits for the device; to_host does, once for
all the steps of a log line. B sequences in a step.
"""

import contextlib
import functools
from dataclasses import dataclass

import numpy as np
import torch

from rightbatch import step_time
from rightbatch.common import local
from rightbatch.crosscheck import CrossCheck
from rightbatch.decision import Cost, Noise
from rightbatch.metric import adam_metric
from rightbatch.rows import picked, tables
from rightbatch.tracker import Tracker
from trainer import hardware
from trainer.grad_stats import GradStats
from trainer.optimizer import Optimizer


@dataclass
class Record:
    """The numbers of one step, still on the device."""
    numbers: dict  # {name: tensor}: loss, param_sq, loss_scale, bad, and what tracker, crosscheck and grad_stats added
    batch_size: int
    tokens: int
    times: tuple | None = None  # moments of the clock, see step_time


class TrainingStep:
    def __init__(self, model, config, ranks, device, dtype, like=None):
        """Wrap the model for its processes. like: another TrainingStep, whose model and optimizer this one uses. Benchmarks
        compare steps on the same memory: a copy elsewhere differs by a per cent."""
        self.model, self.config, self.ranks, self.device, self.dtype = model, config, ranks, device, dtype
        self.compiled = config.compile == "True" or (config.compile == "auto" and device == "cuda")
        self.run_model = like.run_model if like else ranks.wrap(model, config, dtype, self.compiled)
        self.optimizer = like.optimizer if like else Optimizer(model, config, device, dtype)
        self.autocast = hardware.autocast(device, dtype)
        self.parameters = dict(model.named_parameters())
        self.measures_adam = config.gns_adam and not (ranks.sharded and config.gns == "exact")  # see metric_of
        # functions, since methods of this object would be a cycle that keeps the model alive after its last user
        metric, row_metric = (functools.partial(f, self.optimizer, ranks) if self.measures_adam else None
                              for f in (metric_of, row_metric_of))
        self.tracker = Tracker(
            self.parameters, {mode: model.probe_sites(mode) for mode in ("norm", "exact", "rows")}, tables(model), config.gns,
            micro_batch_size=config.micro_batch_size, half_life_tokens=config.gns_half_life_tokens,
            calibrate=config.gns_calibrate, metric=metric, row_metric=row_metric, sharded=ranks.sharded, seed=config.seed,
            rank=ranks.rank, world=ranks.world, device=device)
        self.crosscheck = None
        if config.gns_crosscheck:
            groups = {group: self.tracker.members["exact"][group][1] for group in ("norm", "total")}
            self.crosscheck = CrossCheck(list(self.parameters.values()), groups, config.micro_batch_size,
                                         self.tracker.meter, ranks.world, ranks.average)
        self.stats = GradStats(list(self.parameters.values()), self.optimizer, ranks)
        self.measured = None  # self.stats in a step that it measures
        last_ready = None if ranks.sharded else model.wte.weight  # the token embedding's gradient is the last to be ready
        setting = hardware.device_name(device), config.parallel, config.activation_checkpointing, self.compiled
        self.timer = step_time.StepTime(device, config.micro_batch_size * ranks.world, config.gns_half_life_tokens,
                                        ranks.world, last_ready, setting)

    def evaluating(self):
        """A context for evaluation, which is not compiled: its own graphs would take as long to compile as it takes to run."""
        return torch.compiler.set_stance("force_eager") if self.compiled else contextlib.nullcontext()

    # -- gradients: the mean over all B examples, micro-batch by micro-batch

    def accumulate(self, micro_batches, accum, before, after, measure_stats=False):
        """The gradient of a step that goes from `before` to `after` tokens, from `accum` micro-batches (x, y)."""
        self.timer.begin()
        self.tokens, self.batch_size = after - before, accum * self.config.micro_batch_size * self.ranks.world
        self.tracker.begin()
        self.timer.mark()
        self.measured = self.stats if measure_stats else None
        if self.measured:
            self.measured.begin(accum)
        if self.crosscheck:
            self.crosscheck.begin()
        self.loss_scale = self.optimizer.loss_scale()
        self.loss = torch.zeros((), device=self.device)
        for micro, (x, y) in enumerate(micro_batches, 1):
            given = self.tracker.given()
            if accum == 1 and self.ranks.ddp and self.timer.wants_rehearsal():
                self.timer.rehearse(functools.partial(self.rehearse, x, y, given))
            self.ranks.sync(self.run_model, last=micro == accum)
            with self.autocast:
                loss = self.run_model(x, y, **given)[1]  # no name for the logits: they would live through the backward pass
            self.optimizer.backward(loss / accum)
            self.loss += loss.detach() / accum
            self.tracker.take(given)
            if self.crosscheck:
                self.crosscheck.take(accum)
            if self.measured:
                self.measured.take(self.crosscheck.held if self.crosscheck else None, self.loss_scale)
            self.timer.mark()
        if self.crosscheck:
            self.crosscheck.release()

    def rehearse(self, x, y, given):
        """A micro-step without communication, for its time alone. It leaves no trace: the step after it has the same bits."""
        self.ranks.sync(self.run_model, last=False)
        with torch.random.fork_rng([torch.cuda.current_device()] if self.device == "cuda" else []):
            with self.autocast:
                loss = self.run_model(x, y, **given)[1]
            self.optimizer.backward(loss)
        self.optimizer.zero_grad()
        self.tracker.take(given, keep=False)

    # -- update

    def update(self, lr, beta2, weight_decay):
        record = self.measure()
        if self.measured:
            self.measured.before_update()
        self.optimizer.set(lr, beta2, weight_decay)
        self.optimizer.clip_and_step(record.numbers)
        if self.measured:
            record.numbers.update(self.summed(self.measured.after_update()))
        record.times = self.timer.end()
        return record

    def measure(self):
        """The record of the step, before clipping."""
        self.optimizer.unscale()
        grads = [p.grad for p in self.parameters.values()]
        if self.ranks.sharded:
            grads = [local(grad) for grad in grads]
        param_sq = torch.stack(torch._foreach_norm(grads)).float().square()
        numbers = {"loss": self.loss / self.ranks.world, "param_sq": param_sq / self.tracker.copies, **self.tracker.record()}
        if self.crosscheck:
            numbers |= self.crosscheck.record(self.loss_scale)
        numbers = self.summed(numbers)
        finite = torch.isfinite(numbers["param_sq"].sum()) & torch.isfinite(numbers["loss"])
        numbers |= {"loss_scale": self.loss_scale, "bad": torch.logical_not(finite).float()}
        return Record(numbers, self.batch_size, self.tokens)

    def summed(self, numbers):
        """The {name: tensor} summed over processes, in one transfer."""
        if self.ranks.world == 1 or not numbers:
            return numbers
        flat = self.ranks.sum(torch.cat([t.reshape(-1) for t in numbers.values()]))
        pieces = flat.split([t.numel() for t in numbers.values()])
        return {name: piece.view(t.shape) for (name, t), piece in zip(numbers.items(), pieces)}

    # -- on the host, for every step in order

    def absorb(self, values, record):
        """Bring the averages up to date with a step, from its values (see to_host)."""
        self.stats.absorb(values)
        if record.times:
            kind = tuple(name in record.numbers for name in ("param_psq", "rows_sq"))
            self.timer.absorb(record.times, record.tokens, kind)
        if values["bad"][0] == 0:
            self.tracker.absorb(values, record.batch_size, record.tokens)
            if self.crosscheck:
                self.crosscheck.absorb(values, record.batch_size, record.tokens)

    def scales(self):
        """Every noise scale that is averaged, by name."""
        return self.tracker.meter.scales

    def noise(self) -> Noise | None:
        """The noise scale that the run goes by: the whole model's, in metric_of_run; None while it is undetermined."""
        return self.tracker.noise("_adam" if metric_of_run(self.config) == "adam" else "")

    def cost(self) -> Cost | None:
        """What a step costs, by the slowest process. All must ask."""
        return step_time.slowest(self.ranks.everyone(self.timer.estimate()))

    def row(self):
        """The keys of a log line."""
        return self.tracker.row() | self.stats.row()

    def tokens_to_factor(self):
        """Roughly the tokens until the whole model's noise scale is known; None where nothing tells, or where it is known."""
        return self.tracker.tokens_to_factor("_adam" if metric_of_run(self.config) == "adam" else "", self.tokens)

    def state_dict(self):
        return self.tracker.state_dict()

    def load_state_dict(self, state):
        self.tracker.load_state_dict(state)


def metric_of_run(config):
    """"adam" or "plain": gns_metric, where the run measures in it. Muon has no second moment, and in exact mode with fsdp no
    process holds all of Adam's. The controller, the terminal, the log's key gns and all predictions go by this metric."""
    unmeasured = not config.gns_adam or config.optimizer != "adamw" or (config.parallel, config.gns) == ("fsdp", "exact")
    return "plain" if unmeasured else config.gns_metric


def to_host(records):
    """[Record] of several steps -> [{name: flat float64 array}], in one transfer."""
    tensors = [t for record in records for t in record.numbers.values()]
    flat = torch.cat([t.reshape(-1) for t in tensors]).cpu().double().numpy()
    ends = np.cumsum([t.numel() for t in tensors]).tolist()
    pieces = iter([flat[begin:end] for begin, end in zip([0, *ends], ends)])
    return [{name: next(pieces) for name in record.numbers} for record in records]


def metric_of(optimizer, ranks, named):
    """The metric that the optimizer steps in, of the `named` parameters: (this process's part of each, each unsharded), or None
    while there is none. Shards are gathered: of norm layers, a few vectors."""
    mine = optimizer.metric(named)
    if mine is None:
        return None
    return mine, ranks.gather_shards(mine, {name: p.shape for name, p in named.items()}) if ranks.sharded else mine


def row_metric_of(optimizer, ranks, pairs):
    """The metric of some rows, flat, of (parameter, row numbers) pairs, or None while there is none. Shards are not gathered:
    each process has some of the rows, and their sum is all of them."""
    moments = [optimizer.moments(p) for p, _ in pairs]
    if not all(moments):
        return None
    v = torch.cat([picked(local(state["exp_avg_sq"]), own, p.shape[0], ranks.rank, ranks.world).flatten()
                   for (p, own), (state, _) in zip(pairs, moments)])
    if ranks.sharded:
        ranks.sum(v)
    state, group = moments[0]
    return adam_metric([v], state["step"], group["betas"][1], group["eps"])[0]
