"""
What a run remembers and does between its steps: counters, clock, log, checkpoint, and the numbers of steps on their way from
the device. train.py has the loop.
"""

import os
import signal
from dataclasses import asdict, dataclass

import numpy as np
import torch

from rightbatch import step_time
from rightbatch.common import crossed, named
from rightbatch.decision import Noise, right_batch
from system import files
from system.errors import ConfigError
from trainer import busy, checkpoint, hardware, log, start, summary
from trainer.step import to_host

MAX_BAD_STEPS = 10  # non-finite steps in a row before the run stops
BLOWN_UP = 1.5  # times the loss of an untrained model: no run that learns is there
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


@dataclass
class Counters:
    """Progress of the run. Saved under the key `state`."""
    step: int = 0
    tokens: int = 0
    examples: int = 0
    best_val_loss: float | None = None
    best_saved_loss: float | None = None  # of the checkpoint that is kept as the best
    first_loss: float | None = None  # before the first step
    bad_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    wandb_id: str | None = None
    noise: Noise | None = None  # the noise scale of the newest log line, which steers until the next

    def __post_init__(self):
        """Of a checkpoint, they may be anything."""
        if self.noise is not None and not isinstance(self.noise, Noise):  # a dict in the file, a tuple in earlier ones
            self.noise = Noise(**self.noise) if isinstance(self.noise, dict) else Noise(*self.noise)
        whole = self.step, self.tokens, self.examples, self.bad_steps, self.bad_in_a_row
        measured = self.seconds, *(self.noise.triple if self.noise else ())
        losses = [v for v in (self.best_val_loss, self.best_saved_loss, self.first_loss) if v is not None]
        if not (all(type(n) is int and 0 <= n < 2**63 for n in whole)
                and all(type(v) in (int, float) for v in (*measured, *losses))
                and isinstance(self.wandb_id, str | None)):
            raise TypeError("counters")


class Run:
    def __init__(self, config, ranks, data, step, batch_schedule, saved=None):
        """`saved` is the checkpoint to go on from, without its model."""
        self.config, self.ranks, self.data, self.step, self.batch_schedule = config, ranks, data, step, batch_schedule
        self.count, self.end = Counters(), config.end_tokens()
        self.branched, self.resumed = bool(saved and saved.get("branched")), bool(saved and not saved.get("branched"))
        self.pending, self.last = [], {}  # records on the device; numbers of the newest step that was fetched
        self.out, self.signals, self.handlers = log.NoLog(), [], {}
        self.must_save, self.saved_step = False, None  # a checkpoint was refused: after the next step; step of the newest one
        self.cost_refused = False  # step_time.json could not be written, which has been said
        self.val_loss = None  # of the weights as they are
        self.died = self.blown_up = False  # the newest evaluation was not finite; the loss is far too high, which has been said
        self.saved_facts = {key: saved.get(key) for key in ("log", "path", "arithmetic", "config")} if self.resumed else {}
        ranks.seed(config.seed, 0)
        self.rng_restored, self.measures_anew = True, False
        if saved:
            with start.restoring(saved["path"]):
                self.restore(saved)
        if self.branched:
            self.count.best_val_loss = self.count.best_saved_loss = self.count.wandb_id = None

    def restore(self, saved):
        ranks, step = self.ranks, self.step
        ranks.load_optimizer(step.optimizer, saved.pop("optimizer"))
        step.optimizer.scaler.load_state_dict(saved["scaler"])
        self.count = Counters(**saved["state"])
        self.measures_anew = saved["format"] < checkpoint.FORMAT
        if not self.measures_anew:
            step.load_state_dict(saved["gns"])
        times = saved.get("step_time")
        if isinstance(times, list):  # of each rank: another may be slower
            times = times[ranks.rank] if len(times) == ranks.world else None
        step.timer.load_state_dict(times)
        self.rng_restored = ranks.restore_rng(saved["rng"], self.config.seed, self.count.step)

    @property
    def over(self):
        return self.count.tokens >= self.end

    # -- the run folder

    def open(self, parameters):
        """Create the folder, or go on with its log; say what will be done. From here on signals wait for the end of a step."""
        config, ranks, step = self.config, self.ranks, self.step
        if ranks.first:
            files.remove_leftovers(config.out_dir, f"{files.OF_A_RUN}|{files.PICTURES}")
            if self.resumed:
                checkpoint.promote(config.out_dir, self.saved_facts["path"])
                self.saved_step = self.count.step
            files.write_json(os.path.join(config.out_dir, "config.json"),
                                  {"config": asdict(config), **hardware.facts(step.device), "processes": ranks.world,
                                   "dtype": str(step.dtype).removeprefix("torch."), "parameters": parameters,
                                   "norm_layers": self.arithmetic()["norm layers"],
                                   "data": self.data.meta})
            self.out = log.RunLog(config, self.count.step, self.saved_facts.get("log"))
            if config.wandb_log:
                from trainer import wandb_log  # slow to import
                self.out.wandb = wandb_log.WandbLog(config, self.count.wandb_id, log.read(config.out_dir, compare=False))
                self.count.wandb_id = self.out.wandb.id
        self.cores = busy.Cores(torch.get_num_threads() if step.device == "cpu" and ranks.world == 1 else 1)
        self.ceiling = hardware.matmul_ceiling(step.device, step.dtype) * ranks.world
        for line in summary.opening(self, parameters):
            self.out.say(line)
        for number in SIGNALS:
            if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self.handlers[number] = signal.signal(number, lambda number, _frame: self.signals.append(number))
        self.clock = log.Clock(self.count.seconds)
        self.opened = self.logged = Mark(self.count.step, self.count.tokens, self.clock.seconds())
        if self.branched:
            self.event(f"branched from {config.branch_from} at {self.count.tokens} tokens")
        if self.resumed and ranks.from_first(lambda: self.out.news):
            self.save()  # a checkpoint that knows the new log
        self.event(self.out.news)
        self.event("the noise scale is measured anew: the checkpoint is of an older version" if self.measures_anew else None)
        self.event(start.extension(self.saved_facts.get("config"), config))
        self.event(start.differences(self.saved_facts.get("arithmetic"), self.arithmetic()))

    def arithmetic(self):
        return start.arithmetic(self.config, self.ranks, self.step)

    def close(self):
        self.out.close()
        self.cores.close()
        for number, handler in self.handlers.items():  # a late signal must not end one rank before the others are done
            signal.signal(number, handler if self.ranks.world == 1 else signal.SIG_IGN)

    def event(self, text, ahead=0):
        """A line in log and terminal; `ahead`: it is about the step that comes next."""
        if text:
            self.out.event(self.count.step + ahead, self.count.tokens, text)

    def save(self):
        """Fetch pending numbers, then write the checkpoint. Every rank must call it. Weights of a run that is going wrong never
        replace good ones: the checkpoint is refused, and the next good step is saved (must_save)."""
        self.fetch()
        self.check_data()
        self.count.seconds = self.clock.seconds()
        ranks, step, count = self.ranks, self.step, self.count
        whole = {"model": ranks.whole_model(step.model), "optimizer": ranks.whole_optimizer(step.optimizer),
                 "rng": ranks.rng_state()}
        skips = 2 if step.dtype == torch.float16 else 0  # its loss scale is found by steps that overflow
        sound = count.bad_in_a_row <= skips and ranks.from_first(lambda: all_finite(whole))
        if not sound and not self.must_save:
            self.event(f"no checkpoint at step {count.step}: the newest steps or the weights are not finite; the one of step "
                       f"{self.saved_step} stays")
        self.must_save = not sound
        if not sound:
            return
        best = self.val_loss is not None and (count.best_saved_loss is None or self.val_loss < count.best_saved_loss)
        count.best_saved_loss = self.val_loss if best else count.best_saved_loss
        self.saved_step = count.step
        cost, times = step_time.row(step.cost()), ranks.everyone(step.timer.state_dict())  # all ranks must ask
        if not ranks.first:
            return
        self.write_cost(cost)
        checkpoint.save(self.config.out_dir, {
            **whole, "scaler": step.optimizer.scaler.state_dict(), "state": asdict(count), "gns": step.state_dict(),
            "step_time": times, "schedule": self.batch_schedule.state_dict(), "config": asdict(self.config),
            "vocab_size": self.data.vocab_size, "data": self.data.meta,
            "log": self.out.state(), "arithmetic": self.arithmetic()}, self.config.keep_checkpoints, best)

    def write_cost(self, cost):
        """What a step costs, for whoever reads the folder. The checkpoint holds it, too, and does not wait for this file."""
        if not cost or self.cost_refused:
            return
        try:
            files.write_json(os.path.join(self.config.out_dir, "step_time.json"), cost)
        except OSError as e:
            self.cost_refused = True
            self.event(f"{e.filename} cannot be written: {e.strerror}. The run goes on without it")

    def check_data(self):
        """What was computed from data that changed on the way is not saved."""
        try:
            self.ranks.guard(self.data.check)
        except ConfigError as e:
            self.close()
            raise ConfigError(f"{e}; --resume=True then goes on from the checkpoint of step {self.saved_step}"
                              if self.saved_step is not None else e) from None

    # -- after a step

    def advance(self, record, lr, beta2, weight_decay):
        """Count the step; its numbers stay on the device until fetch."""
        self.pending.append(record)
        self.val_loss = None
        self.tokens_before, self.batch_size = self.count.tokens, record.batch_size
        self.lr, self.beta2, self.weight_decay = lr, beta2, weight_decay
        self.count.step += 1
        self.count.tokens += record.tokens
        self.count.examples += record.batch_size

    def due(self, every):
        """Whether the newest step ended the run or crossed a multiple of `every` tokens."""
        return self.over or crossed(self.tokens_before, self.count.tokens, every)

    def fetch(self):
        """All pending steps in one transfer; bring averages and counters up to date, in order."""
        if not self.pending:
            return
        count = self.count
        if crowded := self.cores.look():
            self.out.say(crowded)
        for values, record in zip(to_host(self.pending), self.pending):
            bad = values["bad"][0] > 0
            self.last = {"loss": float(values["loss"][0]), "grad_norm": float(np.sqrt(values["param_sq"].sum()))}
            count.bad_steps += int(bad)
            count.bad_in_a_row = count.bad_in_a_row + 1 if bad else 0
            self.step.absorb(values, record)
        self.pending.clear()
        averages = {f"gns/{name}_{part}": getattr(scale, part) for name, scale in self.step.scales().items()
                    for part in ("sq_norm", "tr_sigma")}
        self.ranks.agree(count.step, {"step": count.step, "tokens": count.tokens, "examples": count.examples,
                                      "bad_steps": count.bad_steps, "lr": self.lr, "batch_size": self.batch_size, **self.last,
                                      **averages})
        if count.bad_in_a_row >= MAX_BAD_STEPS:
            self.close()
            raise ConfigError(summary.diverged(self, MAX_BAD_STEPS))

    def row(self, noise, cost):
        """What the log holds of the newest step: for readers of the log, nothing in the run decides by it."""
        count, config, seconds = self.count, self.config, self.clock.seconds()
        rate = (count.tokens - self.logged.tokens) / (seconds - self.logged.seconds)
        flops = rate * self.step.model.flops_per_token()
        self.ceiling = max(self.ceiling, flops)  # it may have been measured in a bad moment
        row = {"step": count.step, "tokens": count.tokens, "examples": count.examples, "train/loss": self.last["loss"],
               "lr": self.lr, "batch_size": self.batch_size,
               "accum": self.batch_size // (config.micro_batch_size * self.ranks.world),
               "dt_ms": 1e3 * (seconds - self.logged.seconds) / (count.step - self.logged.step), "tok_per_sec": rate,
               "mfu": flops / self.ceiling, "grad/norm": self.last["grad_norm"], "seconds": seconds,
               "bad_steps": count.bad_steps}
        row |= {key: getattr(self, key) for key in ("beta2", "weight_decay") if getattr(config, f"{key}_scaling") != "none"}
        row |= self.step.row() | step_time.row(cost)
        return row | named("gns", noise and noise.triple)

    def show(self, noise, cost):
        """The newest step in log and terminal, with the noise scale and the cost of a step (None while not known)."""
        row = self.row(noise, cost)
        self.logged = Mark(row["step"], row["tokens"], row["seconds"])
        seconds_per_token = (row["seconds"] - self.opened.seconds) / (row["tokens"] - self.opened.tokens)
        self.out.write(row)
        to_go = self.step.tokens_to_factor()
        right = right_batch(noise, cost, row["batch_size"] // row["accum"]).time.batch if noise and cost else None
        self.out.say(summary.describe(row, self.config, noise, right, max(0, self.end - row["tokens"]) * seconds_per_token,
                                      to_go and to_go * seconds_per_token, self.out.columns))
        self.look_for_blow_up(row["train/loss"])

    def draw(self):
        """The path of the run's picture, or why there is none."""
        from plots import report, style  # matplotlib is slow to import
        return style.attempt(report.draw, self.config.out_dir)

    def look_for_blow_up(self, loss):
        """Weights may blow up without a value that is not finite: said once, and again after a recovery."""
        first = self.count.first_loss
        blown_up = first is not None and loss > BLOWN_UP * first
        if blown_up and not self.blown_up:
            self.event(f"the loss, {loss:.4g}, is far above the {first:.4g} that it began with: the weights have blown up. Try "
                       f"a lower learning_rate or a longer warmup_tokens; {checkpoint.BEST} holds the best weights so far")
        self.blown_up = blown_up

    def evaluated(self, loss):
        """Take in the validation loss of the weights as they are."""
        self.check_data()
        count = self.count
        self.val_loss = loss if np.isfinite(loss) else None
        if count.step == 0:
            count.first_loss = self.val_loss
        self.died = self.val_loss is None
        if not self.died and (count.best_val_loss is None or loss < count.best_val_loss):
            count.best_val_loss = loss
        with np.errstate(over="ignore"):  # of a loss above 700
            perplexity = float(np.exp(loss))
        self.out.write({"step": count.step, "tokens": count.tokens, "val/loss": loss, "val/ppl": perplexity})
        self.out.say(f"step {count.step:>6} | validation loss {loss:.4f}, best {count.best_val_loss or loss:.4f}")


def all_finite(whole):
    """Whether weights and optimizer state are numbers."""
    parts = whole["optimizer"].get("parts", [whole["optimizer"]])
    tensors = [*whole["model"].values(), *(t for part in parts for state in part["state"].values() for t in state.values())]
    ends = [end.float() for t in tensors if torch.is_tensor(t) and t.is_floating_point() for end in torch.aminmax(t.detach())]
    return bool(torch.isfinite(torch.stack([end.to(ends[0].device) for end in ends])).all())


@dataclass
class Mark:
    """A moment of the run, to measure from."""
    step: int
    tokens: int
    seconds: float
