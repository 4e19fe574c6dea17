"""
watch as a callback of Hugging Face's Trainer and of Lightning:

    Trainer(..., callbacks=[WatchCallback()])

The keys of w.row() go where the trainer's own log goes: log_history, wandb, the logger. Neither framework is imported here;
the callback is one of whatever the program has imported.
"""

import contextlib
import importlib
import sys

from rightbatch.watch import Watch, watch


def WatchCallback(**options):
    """A callback with the options of watch. Its `w` is the Watch, once training has begun."""
    bases = [getattr(importlib.import_module(module), name) for package, module, names in (
        ("transformers", "transformers.trainer_callback", ("TrainerCallback", "ExportableState")),
        ("pytorch_lightning", "pytorch_lightning.callbacks", ("Callback",)),
        ("lightning", "lightning.pytorch.callbacks", ("Callback",))) if package in sys.modules for name in names]
    if not bases:
        raise ImportError("WatchCallback is for Hugging Face's Trainer or Lightning, and neither is imported. In a loop of "
                          "your own, watch(model, optimizer) is enough")
    return type("WatchCallback", (HuggingFace, Lightning, *bases), {})(**options)


class Callback:
    """What both frameworks have in common: a Watch while training goes on, and its state before and behind."""

    def __init__(self, **options):
        self.options, self.saved = options, None
        self.w: Watch | None = None

    @property
    def watching(self) -> Watch:
        """The Watch of a training that has begun."""
        if self.w is None:
            raise RuntimeError("WatchCallback watches nothing before training begins")
        return self.w

    def start(self, model, optimizer=None, scaler=None):
        self.stop()
        self.w = watch(model, optimizer, **{"scaler": scaler, "close_steps": False, **self.options})
        if self.saved:
            self.w.load_state_dict(self.saved)

    def stop(self):
        if self.w:
            self.saved = self.newest()
            self.w.close()

    def newest(self):
        """The saved state as it is now."""
        return self.w.state_dict() if self.w else self.saved

    def numbers(self):
        """What is determined by now: loggers take no None."""
        return {key: value for key, value in self.watching.row(all_ranks=True).items() if value is not None}

    def on_train_end(self, *args, **kwargs):
        self.stop()


class HuggingFace(Callback):
    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        first(self, sys._getframe(1).f_locals.get("self"))
        self.start(model, optimizer, getattr(optimizer, "scaler", None))

    def on_step_begin(self, args, state, control, **kwargs):
        self.watching.start()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.watching.step()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.w and logs and "loss" in logs:  # of training, not of an evaluation
            logs.update(self.numbers())
            state.log_history[-1].update(logs)

    def state(self):
        return {"args": {k: v for k, v in self.options.items() if isinstance(v, (str, int, float, tuple, list))},
                "attributes": {"saved": self.newest()}}


class Lightning(Callback):
    opened: contextlib.ExitStack | None = None  # w.batch of the batch at work

    def on_train_start(self, trainer, module):
        self.start(module, None, getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_start(self, trainer, module, batch, index):
        """A LightningModule's training_step is called, not the module: what its input is, the batch says."""
        self.close_batch()  # of one that another callback skipped
        self.watching.start()
        self.opened = contextlib.ExitStack()
        self.opened.enter_context(self.watching.batch(batch))

    def on_before_optimizer_step(self, trainer, module, optimizer):
        """Not by the optimizer's own hook: Lightning runs backward inside of optimizer.step."""
        self.watching.attach(optimizer)
        self.watching.step_if_begun()

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.close_batch()
        if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
            module.log_dict(self.numbers())

    def close_batch(self):
        if self.opened:
            self.opened.close()

    def state_dict(self):
        return {"saved": self.newest()}

    def load_state_dict(self, state):
        self.saved = state["saved"]


def first(callback, handler):
    """Ahead of the loggers: Trainer puts its user's callbacks behind them, and what they add would come too late."""
    callbacks = getattr(handler, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
