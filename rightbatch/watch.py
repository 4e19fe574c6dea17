"""
The gradient noise scale of any model, in any training loop.

    from rightbatch import watch
    w = watch(model)                 # before torch.compile; DDP and FSDP before or after
    ...                              # forward and backward, as often as you accumulate
    w.step()                         # after the last backward pass of a step; with watch(model, optimizer) by itself
    print(w)                         # right batch for time 9.79 [8.48, 11.4], for tokens 8, balance of both 58 [44.9, 75.9]
    log(w.row())                     # {"gns": 58.0, "gns_low": ..., "gns/norm": ..., ...}, the keys of train.py
    print(w.whatif())                # the right batch on this machine; needs the optimizer

The model's code, its results and its state_dict stay as they are. docs/watch.md has the recipes and what is assumed.

Letters: B examples, c_b what example b adds to the gradient, q = sum |c_b|^2, big = |sum c_b|^2, h = sum of squared shares.
"""

import contextlib
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rightbatch import gns, inputs, rows, step_time, taps
from rightbatch.common import is_dtensor, named, whole
from rightbatch.decision import Decision, Noise
from rightbatch.exact import Exact
from rightbatch.fuse import fuse, unfuse
from rightbatch.moments import Moments
from rightbatch.passes import AGAIN, Pass, in_backward, in_function, in_transform, on_stack
from rightbatch.recognise import WatchError
from rightbatch.sampled import Sampled
from rightbatch.sites import MIXES, check_model, find_sites, skips
from rightbatch.tracker import scale_row

FETCH = 512     # steps that may wait on the device when nobody asks for a report
LONGEST = 4096  # moments of a step that are kept: more only where no step is ever closed
NO_GRADIENT = ("no watched layer got a gradient since the last step: was the model compiled before watch(model) (later hooks "
               "are ignored: watch first), is w.step() before loss.backward(), or are the gradients torch.func's?")
ORDERED = torch.nn.MultiheadAttention, torch.nn.RNNBase  # layers that know where the batch is: batch_first


def watch(model, optimizer=None, *, mode="norm", fused=False, calibrate=True, batch_dim=0, skip=(), scaler=None,
          half_life_tokens=250_000, lengths="auto", token_mean="auto", group=None, close_steps=True,
          calibrate_every=None):
    """
    A Watch of the model: print it, or log its row().

    model             finds LayerNorms and RMSNorms by what they do; w.left_out says what it left out, and why
    optimizer         closes steps by itself, reports in Adam's metric, too, and lets w.whatif() time the update; or a list
    mode              "norm", or "exact": all layers that can be had, at the price of their gradients once more
    fused             let our kernels compute the norm layers that are recognised, and their taps: faster, the same up to
                      rounding. On a CPU they are compiled once, which takes half a minute
    calibrate         with mode="norm": one step in several samples a few rows of every other weight, which tells the factor
                      from the norm layers to the whole model, at one per cent of the time
    batch_dim         the dimension of examples in the layers' inputs: 1 for (T, B, C)
    skip              names or patterns of modules to leave out, "*.q_norm"; a name stands for all below it
    scaler            torch.amp.GradScaler, whose factor changes between steps
    half_life_tokens  averages forget half in so many tokens, or in a fifth of those seen, if less
    lengths           what an example weighs in the loss: "auto" counts labels that are not ignored, else the attention mask of
                      a language model; "equal"; w.weights(n) says it for one forward pass
    token_mean        "micro": each forward pass's loss is a mean over its own tokens (and averaged over accumulation, ranks).
                      "step": all tokens of the step weigh alike. "auto": step where the model's loss is divided by
                      num_items_in_batch, as in Hugging Face's Trainer
    group             process group that holds the batch
    calibrate_every   the former name of calibrate, which needs no number
    close_steps       False: the optimizer is for its metric alone, and w.step() is called by you
    """
    return Watch(**locals())


@dataclass
class Last:
    """One step: its examples, mean |g_b|^2 and |mean g_b|^2 over the watched parameters, both up to one common factor. With
    unequal shares of the loss `effective` is Kish's number of examples, and `small` goes with it."""
    examples: int
    small: float
    big: float
    effective: float


class Hook:
    """A bound method as a module hook. A copy of the model (an average of weights, a pickle) gets one that does nothing."""

    def __init__(self, call, *before):
        self.call, self.before = call, before

    def __call__(self, *args):
        return self.call(*self.before, *args)

    def __reduce_ex__(self, protocol):
        return Silent, ()


class Silent:
    def __call__(self, *args):
        return None


class Watch:
    """What watch() returns, which documents the options."""

    def __init__(self, model, optimizer, *, mode, fused, calibrate, batch_dim, skip, scaler, half_life_tokens, lengths,
                 token_mean, group, close_steps, calibrate_every):
        check_options(model, mode=mode, lengths=lengths, token_mean=token_mean, batch_dim=batch_dim,
                      half_life_tokens=half_life_tokens, calibrate_every=calibrate_every)
        self.model, self.scaler, self.group = model, scaler or scaler_of(optimizer), group
        self.batch_dim, self.lengths, self.token_mean, self.half_life_tokens = batch_dim, lengths, token_mean, half_life_tokens
        self.calibrate, self.facts = calibrate, inputs.facts_of(model)
        self.sites, self.current, self.given, self.documents = [], Pass(), None, None
        self.opened = False  # since the last step
        self.calls, self.hidden = 0, []  # calls of the model at work; passes with layers to be called again
        self.waiting, self.checked, self.steps = [], False, 0
        self.newest, self.newest_length, self.unmeasured = None, None, 0  # of the steps that were fetched
        self.scales, self.covered = {}, None
        self.calibrations = {}  # "", and "_adam" in Adam's metric
        self.timer, self.saved_times, self.quantum = None, None, 1
        self.asked = False  # to be told when the backward pass at work is over
        self.events, self.closed = [], None  # moments (step_time.from_hooks) of the step at work, of the one in the optimizer
        self.optimizers = []
        self.moments = Moments(self.optimizers)
        self.stepped = []  # optimizers, since the last step was closed
        self.depth = 0  # of optimizer.step: a subclass that calls the one of its base runs the hooks twice
        self.had_gradients = False  # the parameters themselves, behind a backward pass of this step
        self.idle = 0  # times that the optimizer stepped, or gradients were thrown away, before the first step was closed
        self.scaler_states = getattr(self.scaler, "_per_optimizer_states", None)
        self.handles, self.fused, self.close_steps = [], {}, close_steps
        self.exact = self.sampled = self.rest = None  # what measures layers that are no norms
        try:
            self.find(model, mode, [skip] if isinstance(skip, str) else skip)
            self.fused = fuse(self.sites) if fused else {}
            self.hook_in(model)
            self.attach(optimizer)
        except BaseException:
            self.close()  # who is refused has the model as it was
            raise

    def hook_in(self, model):
        self.handles.append(model.register_forward_pre_hook(Hook(self.begin), with_kwargs=True))
        self.handles += [m.register_forward_pre_hook(Hook(self.check_order, name), with_kwargs=True)
                         for name, m in model.named_modules() if isinstance(m, ORDERED)]
        for site in self.sites:  # ahead of hooks of the user's, which may change what a layer returns
            self.handles += [use.module.register_forward_hook(Hook(self.tap, site, use), with_kwargs=True, prepend=True)
                             for use in (site, *site.twins)]
        if self.sampled:
            self.sampled.hook_in()
        self.handles.append(model.register_forward_hook(Hook(self.end), always_call=True))

    def find(self, model, mode, skip):
        check_model(model)
        self.sites, self.left_out = find_sites(model, skip)
        self.mode = mode
        if mode == "exact":
            self.exact = Exact(model, self, lambda name: skips(name, skip))
        elif self.calibrate:
            sampled = Sampled(model, self, lambda name: skips(name, skip))
            self.sampled = sampled if sampled.layers else None
            if not self.sites and "frozen" in self.left_out.values():
                warnings.warn("the norm layers are frozen, and what their noise scale would be misleads: watching the layers "
                              "that are trained instead", stacklevel=4)
        self.rest = self.exact or self.sampled
        if not self.watched:
            raise WatchError("nothing to watch: " + (
                f"its {MIXES}" if MIXES in self.left_out.values() else
                "no layer that is trained is a norm, linear or convolution" if self.exact or self.calibrate else
                "it has no norm layer with a weight: calibrate=True samples other layers, mode='exact' takes all of them"))
        self.mixing = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
        self.check_mixing()
        self.make_leaves()

    def check_mixing(self):
        """BatchNorm takes its statistics from the batch in training, and from what it has seen otherwise."""
        if not any(m.training or m.running_mean is None for m in self.mixing):
            return
        if not self.sites:
            raise WatchError(f"nothing to watch: its {MIXES}. model.eval() on the BatchNorm layers freezes their statistics")
        warnings.warn(f"{MIXES}. What is measured in other layers is off by as much as that matters", stacklevel=5)
        self.mixing = []  # said once

    def make_leaves(self):
        """Ahead of the layers, which may be compiled: a leaf is not made within a graph."""
        for site in self.watched if not self.exact else self.sites:
            if site.leaf is None and not site.weight_and_bias[0].is_meta:
                self.leaf(site, site.weight_and_bias[0])

    # -- in the forward pass

    def begin(self, model, args, kwargs):
        """Forward pre-hook of the model. A call within a call belongs to the pass that is open."""
        self.calls += 1
        self.open_pass(args, kwargs, None if torch.compiler.is_compiling() else sys._getframe(2))

    @contextlib.contextmanager
    def batch(self, *args, **kwargs):
        """One forward pass that is not one call of the model: a method of your own, or several calls with the same examples.
        Takes what the model is called with, or at least a tensor that has the examples:

            with w.batch(x):
                loss = model.loss(x)
        """
        self.calls += 1
        try:
            self.open_pass(args, kwargs)
            yield
        finally:
            self.end()

    def begun(self):
        """Whether a layer has a gradient since the last step."""
        return any(s.leaf is not None and s.leaf.grad is not None for s in self.watched)

    def forget(self):
        """Leave out what came since the last step, of a batch that you throw away. Goes without saying where its gradients are
        set to None, as optimizer.zero_grad() does, and where GradScaler skips a step."""
        if self.begun():
            self.unmeasured += 1
        self.events, self.hidden, self.had_gradients = [], [], False
        for s in self.watched:
            if s.leaf is not None:
                s.leaf.grad = None
        if self.rest:
            self.rest.forget()

    def forget_what_was_thrown_away(self):
        """What a step left that never ended must not go into the next. GradScaler leaves out a step that overflowed, and the
        optimizer's hook does not run; its update() puts a new dict in the place of the old one, which tells without asking the
        device. Others set gradients to None that were there behind the backward pass. Sharded ones may only be elsewhere."""
        if torch.compiler.is_compiling():
            return
        states = getattr(self.scaler, "_per_optimizer_states", None)
        gone = self.had_gradients and not any(p.grad is not None or is_dtensor(p) for s in self.watched for p in s.parameters)
        if self.begun() and (gone or states is not self.scaler_states):
            self.forget()
            self.nothing_to_close("batches were thrown away, their gradients set to None, and no step was closed: call "
                                  "w.step() after the last backward pass of a step, or give watch the optimizer")
        self.scaler_states = states

    def nothing_to_close(self, words):
        self.idle += not self.steps
        if self.idle == 3:
            warnings.warn(words, stacklevel=2)

    def open_pass(self, args, kwargs, frame=None):
        if not torch.is_grad_enabled() or in_transform():
            return
        now, given = self.current, inputs.arguments(self.facts, args, kwargs)
        if now.inside and now.frame is not None and not on_stack(now.frame):
            self.calls, now.inside = 1, False  # that pass was interrupted and never ended
        if now.inside:
            if now.lengths is None and not now.counts and self.lengths == "auto":  # who opened it need not know the labels
                now.lengths = inputs.lengths_of(self.facts, given, now.B, now.segments)
            return
        self.depth = 0  # an optimizer.step that raised did not say that it was over
        self.forget_what_was_thrown_away()
        self.passed("forward")
        self.make_leaves()
        if self.mixing and not torch.compiler.is_compiling():
            self.check_mixing()
        first = inputs.first_input(given)
        B = None if first is None else first.shape[self.batch_dim]
        tokens = 0 if first is None else first.numel() if not first.is_floating_point() else B
        lengths, segments, self.given, self.documents = self.given, self.documents, None, None
        if lengths is None and self.lengths == "auto":
            lengths = inputs.lengths_of(self.facts, given, B, segments)
        whole = self.token_mean == "step" or self.token_mean == "auto" and inputs.one_mean_per_step(self.facts, given)
        self.opened = True
        self.current = Pass(B, () if first is None else first.shape, tokens, lengths, whole, segments, inside=True,
                            level=self.calls, frame=frame, repeat=in_backward())

    def end(self, *_):
        now = self.current
        if now.level == self.calls:
            now.inside, now.frame = False, None
        self.calls -= 1

    def enter(self, name):
        """The Pass that a call of a layer belongs to, or None where there is nothing to measure. Checkpointing calls layers
        again in the backward pass, when other forward passes may have come in between. With reentrant checkpointing gradients
        go through that second call, with the other kind through the first."""
        now = self.current
        if not torch.is_grad_enabled():
            if now.inside and not torch.compiler.is_compiling() and in_function():
                if now not in self.hidden:
                    self.hidden.append(now)
                for counts in (now.hidden, now.calls):
                    counts[name] = counts.get(name, 0) + 1
            return None
        if in_transform():
            return None
        if in_backward():
            return self.pass_of_second_call(name)
        if not now.inside:
            raise WatchError(f"{name} is called outside of the model's own forward pass, so that its batch is not known. Call "
                             "the model itself, model(x), or say what is one pass: with w.batch(x): loss = model.loss(x)")
        return now

    def pass_of_second_call(self, name):
        known = [p for p in self.hidden if name in p.hidden]
        waiting = [p for p in known if p.hidden[name]]
        if known and not waiting:
            raise WatchError(f"{name}: a second backward pass through reentrant checkpointing. Add the losses up, or "
                             "use_reentrant=False")
        if not waiting:
            return self.current if self.current.repeat and self.current.inside else AGAIN
        if not all(p.same(waiting[0]) for p in waiting):
            raise WatchError(f"{name}: several forward passes before a backward pass, and reentrant checkpointing does not "
                             "tell which of them it repeats: use_reentrant=False")
        waiting[-1].hidden[name] -= 1
        return waiting[-1]

    def tap(self, site, use, module, args, kwargs, y):
        """Forward hook of a norm layer: pass its output through Tap. use: the site itself or one of its twins."""
        if not site.parameters:
            return None
        now = self.enter(site.name)
        if now is None or not y.requires_grad:
            return None
        x = args[0] if args else next(iter(kwargs.values()))
        alone = in_backward() and not now.repeat  # a call that is made again has a graph of its own
        B = self.check_call(site, use, x, y, now, alone)
        z = self.gather(site, x, now, B, alone)
        x = x.detach().clone() if use.norm.copies else x
        return taps.Tap.apply(y, x, z, use.norm, self.batch_dim, now.segments, use.name in self.fused)

    def gather(self, site, x, now, B, alone):
        """Where the calls of a layer meet in one forward pass."""
        z = None if alone else now.z.get(site.name)
        if z is None:
            leaf = self.leaf(site, x)
            z = taps.Gather.apply(leaf, leaf[-taps.HEAD:].detach() if now is AGAIN else self.counts(now, x, B), B)
            if not alone:
                now.z[site.name] = z
        return z

    def check_call(self, home, site, x, y, now, alone):
        """Number of examples. What only repeats a call that was looked at already is not looked at."""
        dim = 0 if site.norm.channels > 0 else self.batch_dim
        if now is AGAIN:
            return x.shape[dim]
        if is_dtensor(x) or is_dtensor(y):
            raise WatchError(f"{site.name}: an example is spread over ranks (sequence parallelism), so that no rank has its "
                             f"gradient. Watch a model without it, or skip=({site.name!r},)")
        if alone and (now.calls[home.name] > 1 or home.name in now.z):
            raise WatchError(f"{site.name} is used several times in a forward pass under reentrant checkpointing, which runs "
                             "backward for each alone: use_reentrant=False")
        if dim >= x.dim() - max(0, -site.norm.channels):
            raise WatchError(f"{site.name}: its input {tuple(x.shape)} has no dimension of examples. One example is (1, ...)")
        B, expected = x.shape[dim], now.B
        if expected is not None and B != expected:
            there = site.norm.channels < 0 and x.dim() > 2 and x.shape[1 - dim] == expected
            raise WatchError(f"{site.name} sees {B} examples in its input {tuple(x.shape)}, the model sees {expected}: " + (
                f"pass batch_dim={1 - dim} if the batch is there, or skip=({site.name!r},)" if there else
                f"skip=({site.name!r},) leaves it out, where its input is the same for all examples or they are folded away"))
        documents = now.segments and now.segments[0].shape
        if documents and (site.norm.channels > 0 or x.movedim(dim, 0).shape[:2] != documents):
            raise WatchError(f"{site.name}: its input {tuple(x.shape)} does not begin with {tuple(documents)}, the positions "
                             f"of w.segments. skip=({site.name!r},) leaves it out")
        return now.segments[1] if now.segments else B

    def check_order(self, name, module, args, kwargs):
        """Pre-hook of a layer that says where it has the batch. Where norm layers alone are looked at, (T, B, C) is a batch of
        T. A layer of folded examples has a multiple of B there, and its other dimension may be B by chance."""
        x, now, dim = args[0] if args else next(iter(kwargs.values()), None), self.current, 0 if module.batch_first else 1
        if not (now.inside and now.B and isinstance(x, torch.Tensor) and x.dim() == 3):
            return
        if not torch.is_grad_enabled() or in_backward():
            return
        if x.shape[dim] != now.B == x.shape[1 - dim] and (x.shape[:2] == now.shape[:2] or x.shape[dim] % now.B):
            raise WatchError(
                f"{name or 'the model'} has batch_first={module.batch_first}, so that its input {tuple(x.shape)} is "
                f"{x.shape[dim]} examples to it and {now.B} to watch: pass batch_dim={dim} if the model's batch is there. If "
                f"not, the layer mixes examples, and should have batch_first={not module.batch_first}")

    def leaf(self, site, x):
        """Made for the device that the model is on when it is used; a compiled model's are made before it is traced."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        fits = site.leaf is not None and (site.leaf.device, site.leaf.dtype) == (x.device, dtype)
        if not fits or len(site.leaf) != taps.length(site.size):
            site.leaf = taps.new_leaf(site.size, dtype, x.device)
            site.leaf.register_post_accumulate_grad_hook(self.ask_for_the_end)
        return site.leaf

    def counts(self, now, x, B):
        key = B, torch.promote_types(x.dtype, torch.float32), x.device
        if key not in now.counts:
            lengths = now.lengths
            if lengths is not None and lengths.shape != (B,):
                raise WatchError(f"{lengths.numel()} weights for {B} examples: w.weights takes one for each example"
                                 + (", here document," if now.segments else "") + " of the next forward pass")
            now.counts[key] = taps.head(B, now.tokens or B, lengths, *key[1:])
        return now.counts[key]

    def weights(self, n):
        """What each example of the next forward pass weighs in its loss, (B,): number of its tokens, or any other measure."""
        n = torch.as_tensor(n)
        if n.device.type == "cpu" and not (n.dim() == 1 and bool((n >= 0).all()) and bool(n.sum() > 0)):
            raise WatchError(f"w.weights({n.tolist()}): expected one weight for each example, none negative, not all zero")
        self.given = n

    def segments(self, ids, n=None):
        """Documents packed into the rows of the next forward pass, which are the examples then: the number of each position's
        document, (B, T), from 0 on and different in every row; -1 is padding. n: how many, where ids are on a device that would
        have to be asked. Attention must not cross documents."""
        if self.exact:
            raise WatchError("w.segments works with mode='norm'")
        ids = torch.as_tensor(ids)
        if ids.dim() != 2:
            raise WatchError(f"w.segments: expected the document of each position, (B, T), got {tuple(ids.shape)}")
        n = int(ids.max()) + 1 if n is None else n
        if ids.device.type == "cpu":
            inputs.check_documents(ids, n)
        self.documents = ids, n

    # -- what a step costs

    def attach(self, optimizer):
        """An optimizer, or several, whose metric is reported, and whose step ends a step."""
        for each in single(optimizer):
            if not any(each is other for other in self.optimizers):
                self.optimizers.append(each)
                self.handles += [each.register_step_pre_hook(self.before_optimizer),
                                 each.register_step_post_hook(lambda it, *_: self.updated(it))]
        self.moments.groups = {}

    def clock(self):
        """Made when training begins: before, the model may be on another device, or on none."""
        if self.timer is None:
            device = next(self.model.parameters()).device.type
            self.timer = step_time.StepTime(device, 1, self.half_life_tokens, self.world())
            self.timer.load_state_dict(self.saved_times)
        return self.timer

    def start(self):
        """Before the first forward pass of a step: its time counts from here. Only a compiled model needs it, for w.whatif(),
        with a GradScaler, and where you throw batches away: hooks inside of it cannot look at a clock, nor at gradients."""
        self.forget_what_was_thrown_away()
        self.passed("start")

    def passed(self, what):
        if self.optimizers and not torch.compiler.is_compiling():
            self.events = self.events[-LONGEST:]
            self.events.append((what, self.clock().now()))

    def ask_for_the_end(self, leaf):
        """Some layer has its gradient: look at the clock, and at the parameters, when all have theirs."""
        if not self.asked:
            self.asked = True
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_over)

    def backward_over(self):
        self.asked = False
        self.passed("backward")
        self.had_gradients = self.had_gradients or any(p.grad is not None for s in self.watched for p in s.parameters)

    def updated(self, optimizer):
        """An optimizer has stepped, perhaps not the last. If the next forward pass began before, nothing can be told."""
        self.depth = max(0, self.depth - 1)
        if self.depth or self.closed is None or self.events or any(optimizer is other for other in self.stepped):
            return
        self.stepped.append(optimizer)
        self.closed[:] = [event for event in self.closed if event[0] != "update"] + [("update", self.clock().now())]

    # -- after the backward passes of a step

    def before_optimizer(self, optimizer, args, kwargs):
        """A closure computes the gradients inside of optimizer.step: then the step ends behind it."""
        self.depth += 1
        if self.depth > 1 or not self.close_steps:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return self.step_if_begun()

        def closure_and_step():
            loss = closure()
            self.step_if_begun()
            return loss
        return (optimizer, closure_and_step), {}

    def step(self):
        """Close a step: after its last backward pass, before the optimizer moves. Nothing waits for the device."""
        if not self.handles:
            raise WatchError("w.step() behind w.close(): nothing is watched any more. watch(model) begins anew")
        if not self.distributed() and not self.begun():
            raise WatchError(NO_GRADIENT)
        self.close_step(asked=True)

    def step_if_begun(self):
        """The same for whoever does not know whether there is anything to close. Optimizers step without gradients: when
        torch.distributed.checkpoint makes their state, or the second one of two that follow one backward pass."""
        if self.begun() or self.distributed() and self.opened:
            self.close_step(asked=False)
        else:
            self.nothing_to_close(NO_GRADIENT)

    @torch.no_grad()
    def close_step(self, asked):
        numbers, counts = self.norm_numbers() if self.sites else ({}, None)
        if self.rest and self.rest.on:
            more, own = self.rest.collect(numbers)
            numbers, counts = numbers | more, own if counts is None else counts
        if self.sampled:
            self.sampled.begin(self.sampled.step + 1)
        scale = getattr(self.scaler, "_scale", None)
        scale = 1.0 if scale is None else scale.to(counts.device)  # .get_scale() would wait for the device
        pairs = torch.stack([number for pair in numbers.values() for number in pair]) / (scale * self.world()) ** 2
        self.events, self.closed, self.asked, self.hidden, self.stepped = [], self.events, False, [], []
        self.had_gradients = self.opened = False
        self.waiting.append((torch.cat([counts, pairs]), list(numbers), self.current.whole, self.closed, asked))
        self.steps += 1
        if not self.checked or len(self.waiting) >= FETCH:
            self.fetch()

    @property
    def watched(self):
        return [*self.sites, *(self.rest.layers if self.rest else ())]

    def norm_numbers(self):
        """({"norm": (q, big)}, counts), and "norm_adam" in Adam's metric; over all ranks. The leaves are emptied."""
        device = next((s.leaf.device for s in self.sites if s.leaf is not None), "cpu")
        parts = []
        for s in self.sites:
            grad = None if s.leaf is None else s.leaf.grad
            grad = torch.zeros(2 * s.size + taps.HEAD, device=device) if grad is None else grad
            parts.append(grad.split([s.size, s.size, taps.HEAD]))
            if s.leaf is not None:
                s.leaf.grad = None
        of_trained = [[v for s, part in zip(self.sites, parts) for v in s.trained(part[i])] for i in (0, 1)]
        flat = torch.cat([*of_trained[0], *of_trained[1],
                          torch.stack([part[2] for part in parts]).amax(0)])  # a layer is left out of some passes, never of all
        self.sum_over_ranks(flat)
        n = (len(flat) - taps.HEAD) // 2
        sums, squares, counts = flat.split([n, n, taps.HEAD])
        numbers = {"norm": (squares.sum(), sums.square().sum())}
        metric = self.moments.of_all([p for s in self.sites for p in s.parameters],
                                     lambda seconds: [whole(v).reshape(-1) for v in seconds])
        if metric is not None and len(metric) == n:  # FSDP's older kind has shards in their places
            numbers["norm_adam"] = (metric * squares).sum(), (metric * sums.square()).sum()
        return numbers, counts

    def distributed(self):
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1

    def world(self):
        return dist.get_world_size(self.group) if self.distributed() else 1

    def sum_over_ranks(self, tensor):
        if self.distributed():
            dist.all_reduce(tensor, group=self.group)

    def hook(self, call, *before):
        return Hook(call, *before)

    # -- on the host, when somebody asks

    @property
    def last(self):
        """The newest step alone, a Last; None before the first."""
        self.fetch()
        return self.newest

    @property
    def mean_length(self):
        """Tokens that count in an example of the newest step."""
        self.fetch()
        return self.newest_length

    @property
    def skipped(self):
        """Steps that were not measured: their gradient was not finite, GradScaler left them out, or the loss was all one
        example's."""
        self.fetch()
        return self.unmeasured

    def fetch(self):
        """Bring the averages up to date, with one transfer for all steps that wait."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        flat = iter(torch.cat([numbers.double() for numbers, *_ in waiting]).tolist())
        for _, names, *about in waiting:
            counts = [next(flat) for _ in range(taps.HEAD)]
            self.absorb({name: (next(flat), next(flat)) for name in names}, *about, *counts)

    def absorb(self, numbers, whole, events, asked, passes, B, total, squares, own, tokens):
        coverage = numbers.pop("coverage", None)
        reported = [name for name in numbers if self.exact or not self.sites or name.startswith("norm")]
        scales = {name: self.scale(name) for name in reported}  # in the log from the first step on
        if passes == 0:  # on no rank: alone, it was noticed before
            self.steps -= 1
            if asked and not self.checked:
                raise WatchError(NO_GRADIENT)
            return self.nothing_to_close(NO_GRADIENT)
        if not all(abs(v) < float("inf") for pair in (*numbers.values(), coverage or ()) for v in pair):
            self.unmeasured += 1  # a gradient that is not finite: GradScaler leaves such a step out, too
            return
        if B == 1 and not self.checked:
            raise WatchError("one example in the whole step: its noise cannot be told from its gradient. Take a batch of at "
                             "least two, by micro-batch, accumulation or ranks")
        h = (squares / total**2 if total else 0) if whole else own / passes**2
        if B == 1 or not 0 < h < 1:
            self.unmeasured += 1  # all weight is on one example, or on none
            return
        self.checked = True
        self.newest_length = tokens / B if total == B else total / B
        self.covered = coverage or self.covered
        q, big = numbers[self.main]
        self.newest = Last(round(B), q / h, big, 1 / h)
        pairs = {name: gns.unequal_pair(*pair, h, B) for name, pair in numbers.items()}
        for name, scale in scales.items():
            scale.update(*pairs[name], tokens)
        for metric in ("", "_adam") if self.sampled and self.sites else ():
            if f"body{metric}" in pairs or metric in self.calibrations and f"norm{metric}" in pairs:
                self.calibrated(metric).update(self.scales[f"norm{metric}"], tokens, pairs.get(f"body{metric}"),
                                               pairs[f"norm{metric}"])
        self.quantum = max(1, round(B * self.world() / passes))
        if events:
            self.timer.absorb_hooks(events, passes / self.world(), B, tokens)

    def scale(self, name):
        return self.scales.setdefault(name, gns.NoiseScale(self.half_life_tokens, gns.EARLY))

    def calibrated(self, metric):
        return self.calibrations.setdefault(metric, gns.Calibration(self.half_life_tokens, gns.EARLY))

    def row(self, all_ranks=False):
        """The log keys: the noise scale in examples with its 95% interval, |G|^2 and tr(Sigma); None while undetermined. The
        cost of a step and the right batch once they are known; all_ranks as in whatif."""
        self.fetch()
        row = scale_row(self.scales)
        for metric, calibration in self.calibrations.items():
            row |= named(f"gns/calibration{metric}", calibration.factor())
            row |= named(f"gns/calibrated{metric}", calibration.apply(self.scale(f"norm{metric}")))
        if self.rest:
            row["gns/coverage_percent"] = self.coverage
        estimate = self.step_cost(all_ranks)
        return row | step_time.row(estimate) | self.decide(estimate).row()

    def whatif(self, all_ranks=False):
        """The right batch on this machine, a Decision: print it, or read .right. Each rank has its own clock; with all_ranks,
        which all have to call then, the slowest one's counts, as it should."""
        self.fetch()
        return self.decide(self.step_cost(all_ranks))

    def step_cost(self, all_ranks):
        """The Cost of a step, or None while it is not known."""
        own = self.timer and self.timer.estimate()
        if not (all_ranks and self.distributed()):
            return own
        everyone = [None] * self.world()
        dist.all_gather_object(everyone, own, group=self.group)
        return step_time.slowest(everyone)

    def decide(self, cost):
        noise, missing = self.whole_noise()
        if cost is None:
            missing.append("What a step costs is not known: " + (
                "give watch the optimizer, whose step ends it." if not self.optimizers else
                "Apple's MPS does not tell the time without waiting." if self.timer and self.timer.device == "mps" else
                f"too few steps were timed, {step_time.WARM_UP} to warm up not counted. In a compiled model, call w.start() "
                "before a step's first forward pass."))
        return Decision(noise, cost, self.quantum, self.newest.examples if self.newest else 0, missing)

    def whole_noise(self):
        """(Noise of the whole model or None, [why not]). In Adam's metric where Adam steps."""
        calibrates = self.sites and self.sampled
        known = self.calibrations if calibrates else [key.removeprefix(self.main) for key in self.scales]
        metric = "_adam" if "_adam" in known else ""
        of_what = "the whole model" + (" in Adam's metric" if metric else "")
        if not self.rest:
            return None, ["Which batch is right follows from the whole model's noise scale. The norm layers' is "
                          "proportional to it, and the factor is missing: " + (
                              "no other layer is a linear or a convolution, whose rows could be sampled."
                              if self.calibrate else "watch(..., calibrate=True) measures it.")]
        scale = self.scale(f"norm{metric}" if calibrates else "total_adam" if self.exact and metric else f"body{metric}")
        interval, more = scale.interval(), max(0, 3 - scale.averages.updates)
        noise = interval and (scale.gns, *interval)
        if noise and calibrates:
            calibration = self.calibrated(metric)
            noise, more = calibration.apply(scale), calibration.steps_to_go()
            more = more and rows.steps_until(self.sampled.step, more)
        if not noise or not noise[0] > 0:
            return None, [f"The noise scale of {of_what} is " + (
                f"still being measured, for some {more} steps." if more else
                "undetermined yet: the gradient is lost in its noise.")]
        if self.coverage < 99:
            of_what += f", {self.coverage:.0f}% of its weights"
        missing = [] if self.coverage >= 50 else [
            f"Only {self.coverage:.0f}% of the weights are measured, which may not speak for all: w.left_out and parameters "
            "without a layer are not among them."]
        return Noise(*noise, of_what), missing

    @property
    def main(self):
        """What the newest step is told of."""
        return "total" if self.exact else "norm" if self.sites else "body"

    @property
    def coverage(self):
        """Per cent of the weights, but for the tables, that are measured. None before that is known."""
        return 100 * self.covered[0] / self.covered[1] if self.covered and self.covered[1] else None

    def __str__(self):
        decision = self.whatif()
        words = [f"right batch {decision.brief()}"] if decision.noise else []
        if self.sites or not decision.noise:
            name = "norm" if self.sites else self.main
            words.append(f"noise scale {'of the norm layers ' if self.sites else ''}{self.say(name)}")
            if f"{name}_adam" in self.scales:
                words.append(f"in Adam's metric {self.say(name + '_adam')}")
        if not self.steps and self.begun():
            words.append("no step was closed yet: call w.step() after its last backward pass, or give watch the optimizer")
        elif self.rest and self.steps and not decision.noise:
            words.append(decision.missing[0].rstrip("."))
        return "; ".join(words)

    def say(self, name):
        scale = self.scale(name)
        interval = scale.interval()
        return f"{scale.gns:.3g} [{interval[0]:.3g}, {interval[1]:.3g}] sequences" if interval else "undetermined yet"

    def state_dict(self):
        self.fetch()
        return {"scales": {name: scale.state_dict() for name, scale in self.scales.items()}, "covered": self.covered,
                "steps": self.steps, "calibrations": {metric: c.state_dict() for metric, c in self.calibrations.items()},
                "step_time": self.timer.state_dict() if self.timer else self.saved_times}

    def load_state_dict(self, state):
        for name, scale in state["scales"].items():
            self.scale(name).load_state_dict(scale)
        self.steps, self.covered = state["steps"], state["covered"]
        for metric, calibration in state["calibrations"].items():
            self.calibrated(metric).load_state_dict(calibration)
        self.saved_times, self.timer = state["step_time"], None
        if self.sampled:
            self.sampled.begin(self.steps)

    def close(self):
        """Take everything out of the model and the optimizer again."""
        for handle in [*self.handles, *(self.rest.handles if self.rest else ())]:
            handle.remove()
        unfuse(self.fused)
        self.handles, self.fused, self.current = [], {}, Pass()
        for site in self.watched:  # its hook knows the Watch: a circle through autograd, which Python cannot collect
            site.leaf = None


def check_options(model, *, half_life_tokens, calibrate_every, **options):
    choices = {"mode": ("norm", "exact"), "lengths": ("auto", "equal"), "token_mean": ("auto", "micro", "step"),
               "batch_dim": (0, 1)}
    if not isinstance(model, torch.nn.Module):
        raise WatchError(f"watch(model): expected a torch.nn.Module, got {type(model).__name__}")
    for name, value in options.items():
        if value not in choices[name]:
            raise WatchError(f"{name}={value!r}: expected one of {', '.join(map(str, choices[name]))}")
    if not half_life_tokens > 0:
        raise WatchError(f"half_life_tokens={half_life_tokens!r}: expected a number of tokens above 0")
    if calibrate_every is not None:
        raise WatchError(f"calibrate_every={calibrate_every!r}: its place has calibrate=True, the default, which samples a few "
                         "rows of every weight instead of making exact steps")


def single(optimizer):
    """[optimizer] without what may be around it: a list, torchtitan's container, accelerate's wrapper."""
    if optimizer is None:
        return []
    if isinstance(optimizer, (list, tuple)):
        return [one for each in optimizer for one in single(each)]
    inner = getattr(optimizer, "optimizers", None) or getattr(optimizer, "optimizer", None)
    if inner is not None:
        return single(inner)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise WatchError(f"optimizer: expected a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}")
    return [optimizer]


def scaler_of(optimizer):
    """accelerate's wrapper has the GradScaler."""
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        while each is not None:
            if getattr(each, "scaler", None) is not None:
                return each.scaler
            each = getattr(each, "optimizer", None)
    return None
