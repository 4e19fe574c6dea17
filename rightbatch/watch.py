"""
watch measures the gradient noise scale of any model, in any training loop.

    from rightbatch import watch
    w = watch(model)                 # before torch.compile; DDP and FSDP before or after
    ...                              # forward and backward, as often as you accumulate
    w.step()                         # after the last backward pass of a step; watch(model, optimizer) does it by itself
    print(w)                         # right batch for time 8 [8, 16], for tokens 8, balance of both 56 [48, 80]: by ...
    log(w.row())                     # {"gns": 58.0, "gns_low": ..., "gns/norm": ..., ...}, the keys of train.py
    print(w.whatif())                # the right batch on this machine; needs the optimizer

The model's code, its results and its state_dict stay as they are. docs/watch.md has the recipes and what is assumed.

B examples, c_b what example b adds to the gradient, q = sum |c_b|^2, big = |sum c_b|^2, h = sum (share of the loss)^2.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rightbatch import gns, inputs, step_time, taps
from rightbatch.clock import Clock
from rightbatch.collect import Collector, Ranks
from rightbatch.decision import Decision
from rightbatch.ending import NO_GRADIENT, Ending, scaler_of
from rightbatch.fuse import fuse, unfuse
from rightbatch.hooks import Hooks
from rightbatch.meter import Meter
from rightbatch.moments import Moments
from rightbatch.passes import Pass, Passes
from rightbatch.recognise import WatchError
from rightbatch.sampled import Sampler
from rightbatch.sites import MIXES, check_model, find_layers, find_norms

FETCH = 512  # closed steps that wait on the device at most, where nobody asks for a report


def watch(model: torch.nn.Module, optimizer=None, *, mode: str = "norm", fused: bool = False, calibrate: bool = True,
          batch_dim: int = 0, skip: str | Sequence[str] = (), scaler=None, half_life_tokens: float = 250_000,
          lengths: str = "auto", token_mean: str = "auto", group=None, close_steps: bool = True) -> "Watch":
    """
    A Watch of the model: print it, or log its row().

    model             finds LayerNorms and RMSNorms by what they do; w.left_out says what it left out, and why
    optimizer         or a list of them: then steps close by themselves, Adam's metric is reported, too, and w.whatif() knows
                      what an update takes
    mode              "norm", or "exact": every step measures all other weights, too, which costs their gradients once more
    fused             let our kernels compute the norm layers that are recognised, and their taps: faster, the same up to
                      rounding. On a CPU they are compiled once, which takes half a minute
    calibrate         with mode="norm": one step in several samples a few rows of every other weight, which tells the factor
                      from the norm layers to the whole model, at one per cent of the time
    batch_dim         the dimension of examples in the layers' inputs: 1 for (T, B, C)
    skip              names or patterns of modules to leave out, "*.q_norm"; a name stands for all below it
    scaler            torch.amp.GradScaler, whose factor changes between steps
    half_life_tokens  averages forget half in so many tokens, or in a fifth of those seen, if less
    lengths           what an example weighs in the loss: "auto" counts its labels that are not ignored, or without labels what
                      a language model's attention mask lets through; "equal". w.weights(n) says it for one forward pass
    token_mean        "micro": each forward pass's loss is a mean over its own tokens (and averaged over accumulation, ranks).
                      "step": all tokens of the step weigh alike. "auto": "step" where the model's loss is divided by
                      num_items_in_batch, as in Hugging Face's Trainer, else "micro"
    group             process group that shares the batch
    close_steps       False: the optimizer gives its metric alone, and you call w.step()
    """
    return Watch(**locals())


@dataclass
class Last:
    """One step's numbers over the watched parameters, norms up to one common factor."""
    examples: int
    small: float        # mean |g_b|^2; where shares of the loss are unequal, weighted by their squares
    big: float          # |mean g_b|^2
    effective: float    # Kish's number of examples, 1/h; with equal shares all of them
    mean_length: float  # tokens of an example that count in the loss


@dataclass
class Closed:
    """A step that is closed. Its numbers stay on the device until somebody asks."""
    numbers: torch.Tensor  # taps.Counts, then (q, big) of each name
    names: list
    whole: bool            # its loss is one mean over all its tokens
    events: list           # [(what, moment)] of the clock, which adds the update's later
    asked: bool            # w.step() closed it, and no optimizer did


class Watch:
    """What watch() returns; the options are documented there. `left_out` says which layers are not watched, and why; `meter`
    has the averages; `steps` counts closed steps."""

    def __init__(self, model, optimizer, *, mode, fused, calibrate, batch_dim, skip, scaler, half_life_tokens, lengths,
                 token_mean, group, close_steps):
        check_options(model, half_life_tokens, mode=mode, lengths=lengths, token_mean=token_mean, batch_dim=batch_dim)
        check_model(model)
        self.model, self.mode, self.left_out = model, mode, {}
        skip = [skip] if isinstance(skip, str) else skip
        norms = find_norms(model, skip, self.left_out)
        samples = calibrate or mode == "exact"
        layers = find_layers(model, skip, self.left_out, mode == "exact") if samples else []
        self._direct = mode == "exact" or not norms  # every step measures the whole model: no factor is needed
        self.meter = Meter(half_life_tokens, whole={"": "body", "_adam": "body_adam"} if self._direct else {})
        check_sites(norms, layers, self.left_out, samples)
        self._without_layers = ("no other layer is a linear or a convolution, whose rows could be sampled." if samples else
                                "watch(..., calibrate=True) measures it.")
        self._ranks, self._moments = Ranks(group), Moments([])
        self._sampler = Sampler(layers, self._direct, self.left_out)
        self._collector = Collector(model, norms, self._ranks, self._moments, self.left_out)
        self._clock = Clock(model, half_life_tokens, self._ranks)
        self._ending = Ending(self._moments.optimizers, scaler or scaler_of(optimizer), self._clock,
                              self.step_if_begun if close_steps else None, self.forget)
        self._passes = Passes(model, batch_dim, lengths, token_mean, self._opening)
        self._waiting, self._checked = [], False  # Closed steps, not fetched yet; whether any step could be measured so far
        self._said: set[str] = set()  # why steps were left out
        self._newest, self._unmeasured, self._quantum, self._open = None, 0, 1, True
        self._hooks = Hooks(model, norms, self._sampler, self._passes, self.left_out, self._ending.gradient_came)
        self._ending.sites = self._hooks.sites
        try:
            if fused:
                fuse(norms)
            self._hooks.insert(model)
            self.attach(optimizer)
        except BaseException:
            self.close()  # a model that is refused stays as it was
            raise

    # -- what a loop says

    @contextlib.contextmanager
    def batch(self, *args, **kwargs) -> Iterator[None]:
        """Make one forward pass of what is not one call of the model: a method of your own, or several calls with the same
        examples. The arguments are those of the model, or at least a tensor that has the examples:

            with w.batch(x):
                loss = model.loss(x)
        """
        self._passes.calls += 1
        try:
            self._passes.open(args, kwargs)
            yield
        finally:
            self._passes.end()

    def weights(self, n: torch.Tensor | Sequence[float]) -> None:
        """Say what each example of the next forward pass weighs in its loss, (B,): number of its tokens, or another measure."""
        n = torch.as_tensor(n)
        if n.device.type == "cpu" and not (n.dim() == 1 and bool((n >= 0).all()) and bool(n.sum() > 0)):
            raise WatchError(f"w.weights({n.tolist()}): expected one weight for each example, none negative, not all zero")
        self._passes.next_lengths = n

    def segments(self, ids: torch.Tensor, n: int | None = None) -> None:
        """Say which documents are packed into the rows of the next forward pass. They are the examples then. ids (B, T): the
        document of each position, numbered from 0 over all rows; -1 is padding. n: how many documents there are, else a device
        that holds ids has to be asked. Attention must not cross documents."""
        ids = torch.as_tensor(ids)
        if ids.dim() != 2:
            raise WatchError(f"w.segments: expected the document of each position, (B, T), got {tuple(ids.shape)}")
        n = int(ids.max()) + 1 if n is None else n
        if ids.device.type == "cpu":
            inputs.check_documents(ids, n)
        self._passes.next_segments = ids, n

    def attach(self, optimizer) -> None:
        """Report in the metric of an optimizer, or of several, whose step() closes a step from now on."""
        self._ending.attach(optimizer)
        self._moments.groups = {}

    def start(self) -> None:
        """Begin a step, before its first forward pass: its time counts from here. Only a compiled model needs it, whose hooks
        can look neither at a clock nor at gradients: for w.whatif(), with a GradScaler, and where you throw batches away."""
        self._ending.begin()
        self._clock.passed("start")

    def step(self) -> None:
        """Close a step: after its last backward pass, before the optimizer moves. Nothing waits for the device."""
        if not self._open:
            raise WatchError("w.step() behind w.close(): nothing is watched any more. watch(model) begins anew")
        if not self._ranks.several() and not self._ending.begun() and not self._passes.spoiled:
            if not self.steps:
                raise WatchError(NO_GRADIENT)
            return self._skip(NO_GRADIENT)
        self._close_step(asked=True)

    def step_if_begun(self) -> None:
        """Close a step if there is one. Optimizers step without it, too: when torch.distributed.checkpoint makes their state,
        and the second of two optimizers after the first has closed it."""
        if self._ending.begun() or self._passes.spoiled or self._ranks.several() and self._passes.opened:
            self._close_step(asked=False)
        else:
            self._ending.nothing_to_close(NO_GRADIENT)

    def forget(self) -> None:
        """Leave out what came since the last step: you throw that batch away. It is noticed without a call where its gradients
        are set to None, as optimizer.zero_grad() does, and where GradScaler skips a step."""
        if self._ending.begun():
            self._unmeasured += 1
        self._clock.events, self._passes.hidden, self._ending.had_gradients = [], [], False
        for site in self._hooks.sites:
            if site.leaf is not None:
                site.leaf.grad = None
        self._passes.spoiled = ""
        self._sampler.forget()

    def close(self) -> None:
        """Take everything out of the model and the optimizer again."""
        self._open = False
        self._hooks.remove()
        self._ending.remove()
        unfuse(self._hooks.norms)
        self._passes.current = Pass()

    # -- inside of a step

    def _opening(self):
        """A forward pass begins."""
        self._ending.begin()
        self._clock.passed("forward")
        self._hooks.make_leaves()
        if self._hooks.mixing:
            self._hooks.check_mixing()

    @torch.no_grad()
    def _close_step(self, asked):
        sampler = self._sampler
        if self._passes.spoiled:
            sampler.forget()  # nothing to compare with
        elif sampler.on:
            sampler.check()
        numbers, counts = self._collector.collect(sampler.layers if sampler.on else [], self._direct,
                                                  bool(self._passes.spoiled))
        if self._passes.spoiled:
            self._warn(self._passes.spoiled)
        self._passes.seen, self._passes.spoiled = True, ""
        sampler.begin(sampler.step + 1)
        scale = getattr(self._ending.scaler, "_scale", None)
        scale = 1.0 if scale is None else scale.to(counts.device)  # .get_scale() would wait for the device
        pairs = torch.stack([number for pair in numbers.values() for number in pair]) / (scale * self._ranks.world()) ** 2
        self._waiting.append(Closed(torch.cat([counts, pairs]), list(numbers), self._passes.current.whole, self._clock.close(),
                                    asked))
        self._passes.hidden, self._passes.opened = [], False
        self._ending.closed()
        if not self._checked or len(self._waiting) >= FETCH:
            self.fetch()

    # -- on the host, when somebody asks

    def fetch(self) -> None:
        """Add the steps that wait to the averages, with one transfer for all of them."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        flat = iter(torch.cat([step.numbers.double() for step in waiting]).tolist())
        for step in waiting:
            counts = taps.Counts(*(next(flat) for _ in range(taps.HEAD)))
            self._absorb(step, counts, {name: (next(flat), next(flat)) for name in step.names})

    def _absorb(self, step: Closed, counts: taps.Counts, numbers: dict[str, tuple[float, float]]) -> None:
        """Add one step to the averages, unless it cannot be measured. numbers: {name: (q, big)}."""
        coverage, B = numbers.pop("coverage", None), counts.examples
        reported = [name for name in numbers if self._direct or name.startswith("norm")]
        for name in reported:
            self.meter.scale(name)  # in the log from the first step on
        if counts.passes == 0:  # no rank has a gradient. A single process did not come here: begun() told it
            self._ending.steps -= 1
            if step.asked and not self._checked:
                raise WatchError(NO_GRADIENT)
            return self._ending.nothing_to_close(NO_GRADIENT)
        if not all(abs(v) < float("inf") for pair in (*numbers.values(), counts[:1]) for v in pair):
            self._unmeasured += 1  # a gradient that is not finite: GradScaler leaves such a step out, too
            return
        if B == 1 and not self._checked:
            self._warn("one example in the whole step: its noise cannot be told from its gradient. Take a batch of at "
                       "least two, by micro-batch, accumulation or ranks")
        h = counts.squared_shares(step.whole)
        if B == 1 or not 0 < h < 1:
            self._unmeasured += 1  # all weight is on one example, or on none
            return
        self._checked = True
        self.meter.covered = coverage or self.meter.covered
        q, big = numbers["body" if self._direct else "norm"]
        self._newest = Last(round(B), q / h, big, 1 / h, (counts.tokens if counts.lengths == B else counts.lengths) / B)
        pairs = {name: gns.unequal_pair(*pair, h, B) for name, pair in numbers.items()}
        sampled = {metric: (pairs[f"body{metric}"], pairs[f"norm{metric}"]) for metric in ("", "_adam")
                   if not self._direct and f"body{metric}" in pairs}
        self.meter.add({name: pairs[name] for name in reported}, counts.tokens, sampled)
        self._quantum = max(1, round(B * self._ranks.world() / counts.passes))
        if step.events:
            self._clock.running().absorb_hooks(step.events, counts.passes / self._ranks.world(), B, counts.tokens)

    def _skip(self, words):
        """Leave out the step at work."""
        self._unmeasured += 1
        self._warn(words)

    def _warn(self, words):
        """Say once why steps are left out."""
        if words not in self._said:
            self._said.add(words)
            warnings.warn(f"a step was left out (w.skipped counts them): {words}", stacklevel=4)

    @property
    def last(self) -> Last | None:
        """The newest measured step; None before the first."""
        self.fetch()
        return self._newest

    @property
    def skipped(self) -> int:
        """How many steps were not measured: their gradient was not finite, their loss was all one example's, or they were
        thrown away, by GradScaler or by you."""
        self.fetch()
        return self._unmeasured

    @property
    def steps(self) -> int:
        return self._ending.steps

    def row(self, all_ranks: bool = False) -> dict:
        """The log keys: the noise scale in examples with its 95% interval, |G|^2 and tr(Sigma), None while undetermined; the
        cost of a step and the right batch, once they are known. all_ranks as in whatif."""
        self.fetch()
        row = self.meter.row()
        if self._direct or self._sampler.layers:
            row["gns/coverage_percent"] = self.meter.coverage
        cost = self._step_cost(all_ranks)
        return row | step_time.row(cost) | self._decide(cost).row()

    def whatif(self, all_ranks: bool = False) -> Decision:
        """The right batch on this machine, a Decision: print it, or read .right. Each rank answers by its own clock. With
        all_ranks all of them have to call, and all answer by the slowest one's, which is the right one."""
        self.fetch()
        return self._decide(self._step_cost(all_ranks))

    def _step_cost(self, all_ranks):
        own = self._clock.timer and self._clock.timer.estimate()
        return step_time.slowest(self._ranks.everyone(own)) if all_ranks else own

    def _decide(self, cost):
        noise, timer = self.meter.noise(self.meter.metric), self._clock.timer
        if self._direct or self._sampler.layers:
            missing = self.meter.missing(self.meter.metric, self._sampler.step)
        else:
            missing = [
                "Which batch is right follows from the whole model's noise scale. The norm layers' is proportional to it, and "
                "the factor is missing: " + self._without_layers]
        if cost is None:
            missing.append("What a step costs is not known: " + (
                "give watch the optimizer, whose step ends it." if not self._clock.on else
                "Apple's MPS does not tell the time without waiting." if timer and timer.device == "mps" else
                f"too few steps were timed, {step_time.WARM_UP} to warm up not counted. In a compiled model, call w.start() "
                "before a step's first forward pass."))
        return Decision(noise if noise and noise.value > 0 else None, cost, self._quantum,
                        self._newest.examples if self._newest else 0, missing)

    def __repr__(self) -> str:
        layers = f"{len(self._hooks.norms)} norm and {len(self._sampler.layers)} other layers, {len(self.left_out)} left out"
        return f"<Watch of {type(self.model).__name__}: {layers}, {self.steps} steps{'' if self._open else ', closed'}>"

    def __str__(self) -> str:
        decision = self.whatif()
        words = [f"right batch {decision.brief()}"] if decision.noise else []
        norms, main = self._hooks.norms, "norm" if self._hooks.norms else "body"
        if norms or not decision.noise:
            words.append(f"noise scale {'of the norm layers ' if norms else ''}{self._say(main)}")
            if f"{main}_adam" in self.meter.scales:
                words.append(f"in Adam's metric {self._say(main + '_adam')}")
        if not self.steps and self._ending.begun():
            words.append("no step was closed yet: call w.step() after its last backward pass, or give watch the optimizer")
        elif self.steps and not decision.noise and (self._direct or self._sampler.layers):
            words.append(decision.missing[0].rstrip("."))
        return "; ".join(words)

    def _say(self, name):
        triple = self.meter.scale(name).triple()
        return "{:.3g} [{:.3g}, {:.3g}] sequences".format(*triple) if triple else "undetermined yet"

    def state_dict(self) -> dict:
        self.fetch()
        return {**self.meter.state_dict(), "steps": self.steps, "step_time": self._clock.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self._waiting = []  # steps of before, which the state knows nothing of
        self.meter.load_state_dict(state)
        self._ending.steps = state["steps"]
        self._clock.load_state_dict(state["step_time"])
        self._sampler.begin(self.steps)


def check_options(model, half_life_tokens, **options):
    choices = {"mode": ("norm", "exact"), "lengths": ("auto", "equal"), "token_mean": ("auto", "micro", "step"),
               "batch_dim": (0, 1)}
    if not isinstance(model, torch.nn.Module):
        raise WatchError(f"watch(model): expected a torch.nn.Module, got {type(model).__name__}")
    for name, value in options.items():
        if value not in choices[name]:
            raise WatchError(f"{name}={value!r}: expected one of {', '.join(map(str, choices[name]))}")
    if not half_life_tokens > 0:
        raise WatchError(f"half_life_tokens={half_life_tokens!r}: expected a number of tokens above 0")


def check_sites(norms, layers, left_out, samples):
    if layers and not norms and "frozen" in left_out.values():
        warnings.warn("the norm layers are frozen, and their noise scale would mislead: watching the layers that are trained "
                      "instead", stacklevel=4)
    if not norms and not layers:
        raise WatchError("nothing to watch: " + (
            f"its {MIXES}" if MIXES in left_out.values() else
            "no layer that is trained is a norm, linear or convolution" if samples else
            "it has no norm layer with a weight: calibrate=True samples other layers, mode='exact' takes all of them"))
