"""
Train a GPT and watch its gradient noise scale while it trains.

    python train.py                                     # config/quickstart.py: minutes on a laptop
    python train.py config/gpt_111m.py --micro_batch_size=4
    python train.py out/gpt_111m                        # go on with that run; its settings are in its folder
    python train.py out/gpt_111m --eval                 # its validation loss
    python train.py config/gpt_1_3b.py --plan --devices=8 --kind=A100     # memory, steps and time, before it is run
    torchrun --nproc_per_node=8 train.py config/gpt_1_3b.py --parallel=fsdp
    python train.py --help                              # every key with its default and the reason for it

Per step: accumulate micro-batches, whose norm layers also yield each example's squared gradient norm; clip; update. From the
norms follow |G|^2, tr(Sigma) and their ratio, the noise scale (gns.py). Everything is counted in tokens.
With several processes every line below runs on each of them, on its own share of a step's examples; rank 0 alone writes.

Behind it: trainer/step.py (gradients, clipping, update), trainer/run.py (counters, log, checkpoint), schedule.py (batch size,
learning rate), model.py. B sequences in a step.
"""

import contextlib
import dataclasses
import os
import signal
import sys

if __name__ == "__main__":  # until there is something to save, Ctrl-C just ends it
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

import configurator
import schedule
from model import GPT, GPTConfig
from system import terminal
from system.errors import ConfigError
from trainer import batches, distributed, hardware, huggingface, log, plan, start, summary, watchdog
from trainer.run import MAX_BAD_STEPS, Run
from trainer.step import TrainingStep


def train(config, ranks, device, name=None):
    """Train a whole run, alone in its folder, and return the exit code. `name`: of the folder, where out_dir gives none."""
    with contextlib.ExitStack() as held:
        folder = ranks.guard(lambda: held.enter_context(start.held(config, name)) if ranks.first else None)
        config = dataclasses.replace(config, out_dir=ranks.from_first(lambda: folder))
        return train_locked(config, ranks, device)


def train_locked(config, ranks, device):
    # -- what could go wrong goes wrong here, before anything is created; ranks.guard: an error on one process is one on all
    dtype = hardware.prepare(config, device)
    data = ranks.guard(lambda: batches.Dataset(config.dataset, config.block_size), in_turn=True)
    plan.check_memory(config, data.vocab_size, ranks.world, device)
    saved = ranks.guard(lambda: start.starting_point(config, data, mmap=ranks.world > 1))
    quantum = config.micro_batch_size * ranks.world  # sequences of one micro-step over all processes; batches are multiples
    saved_schedule = saved and saved["schedule"]
    batch_schedule = ranks.guard(lambda: configurator.batch_schedule(config, quantum, saved_schedule))

    # -- model, optimizer, and what is measured in a step
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig.of(vars(config), data.vocab_size))
    parameters = model.parameter_count()  # before it is sharded
    if saved:
        with start.restoring(saved["path"]):
            model.load_state_dict(saved.pop("model"))
    elif config.init_from:
        ranks.guard(lambda: huggingface.load_into(model, config.init_from))
    if config.parallel == "ddp" or ranks.world == 1:
        model = model.to(device)  # FSDP moves shards, block by block
    step = TrainingStep(model, config, ranks, device, dtype)

    # -- the run: counters, log, checkpoint
    run = Run(config, ranks, data, step, batch_schedule, saved)
    del saved  # it may be mapped into memory, and holds its file
    if run.over:
        if ranks.first:
            log.say(terminal.wrapped(summary.finished(run, run.draw()), terminal.width()))
        return int(ranks.first and log.died(log.read(config.out_dir)))
    run.open(parameters)
    if ranks.first:
        start.point_to(config.out_dir)
    if not run.resumed:
        with run.clock.paused():
            run.evaluated(validation_loss(step, data))
            run.save()  # the run can be resumed from its first step on, and a full disk shows now

    stopping = 0  # the signal to stop for
    while not (run.over or stopping):
        vote = ranks.vote(run.signals)  # processes must stop after the same step; the outcome travels while they compute

        # -- batch size, and what goes with it
        if batch_schedule.polls:  # the user may edit batch_file while the run goes on; rank 0 looks
            news = ranks.from_first(batch_schedule.poll)
            run.event(batch_schedule.accept(news), ahead=1)
        before = run.count.tokens
        B = batch_schedule.at(before)
        accum, after = B // quantum, before + B * config.block_size
        lr_factor, beta2, weight_decay = schedule.coupled(B, config, run.count.noise)
        lr = lr_factor * batch_schedule.learning_rate(before, after)
        at_log_line = (run.count.step + 1) % config.log_interval == 0
        logged = at_log_line or after >= run.end

        # -- gradients: the mean over all B examples, micro-batch by micro-batch
        first = run.count.examples + ranks.rank * config.micro_batch_size
        micro_batches = (data.train_batch(config.seed, first + micro * quantum, config.micro_batch_size, device)
                         for micro in range(accum))
        step.accumulate(micro_batches, accum, before, after, measure_stats=config.grad_stats and logged)

        # -- update
        record = step.update(lr, beta2, weight_decay)
        run.advance(record, lr, beta2, weight_decay)
        stopping = vote()

        # -- its numbers: left on the device until somebody looks, or until they could show that the run diverges
        if logged or stopping or len(run.pending) >= MAX_BAD_STEPS:
            run.fetch()

        # -- what the user sees
        if logged:
            noise, cost = step.noise(), step.cost()
            run.show(noise, cost)

        # -- what the noise scale decides for the steps to come: at log lines only, the same ones after a resume
        if at_log_line and after < config.max_tokens:
            run.event(batch_schedule.observe(after, noise, cost))
            run.event(summary.saturation(B, config, run.count.noise, noise))
            run.count.noise = noise or run.count.noise
        if run.out.bar:
            run.out.progress(min(1, after / run.end), f"step {run.count.step}, batch {B}")

        # -- evaluation and checkpoint, outside the clock
        moved = batch_schedule.by_time and batch_schedule.at(after) != B  # by the clock: a resume could not decide it again
        evaluate_now = run.due(config.eval_tokens)
        save_now = stopping or moved or run.must_save or run.due(config.checkpoint_tokens)
        if evaluate_now or save_now:
            with run.clock.paused():
                if evaluate_now:
                    run.evaluated(validation_loss(step, data))
                if save_now:
                    run.save()

    run.close()
    if ranks.first:
        words = summary.last_words(run, stopping, run.draw() if run.over else None)
        log.say(terminal.wrapped(words, terminal.width()))
        run.out.publish(words if run.over else "")
    if not run.over:
        return 128 + stopping
    return int(run.died or run.must_save)  # must_save: the checkpoint of its last step was refused, weights were not finite


def evaluate(config, ranks, device):
    """The validation loss of a run's newest checkpoint, printed. Nothing is written."""
    dtype = hardware.prepare(config, device)
    data = ranks.guard(lambda: batches.Dataset(config.dataset, config.block_size), in_turn=True)
    saved = ranks.guard(lambda: start.own_checkpoint(config, data, mmap=ranks.world > 1))
    model = GPT(GPTConfig.of(vars(config), data.vocab_size))
    with start.restoring(saved["path"]):
        model.load_state_dict(saved["model"])
    model = model if config.parallel == "fsdp" and ranks.world > 1 else model.to(device)
    loss = validation_loss(TrainingStep(model, config, ranks, device, dtype), data)
    ranks.guard(data.check)
    if ranks.first:
        log.say(summary.evaluation(config, saved, data, loss))
    return 0


@torch.no_grad()
def validation_loss(step, data):
    """Mean loss over the fixed validation windows. Each rank takes every world-th batch. All make equally many forward passes,
    as FSDP needs: one with nothing left makes a dummy pass that counts for nothing."""
    model, ranks, config, device = step.model, step.ranks, step.config, step.device
    model.eval()
    starts, size = data.val_starts(config.eval_iters), config.micro_batch_size
    total = 0.0
    for i in range(0, len(starts), size * ranks.world):
        mine = starts[i + ranks.rank * size:i + (ranks.rank + 1) * size]
        x, y = data.val_batch(mine if len(mine) else starts[:1], device)
        with step.autocast, step.evaluating():
            _, loss = model(x, y)
        total += loss.cpu().double() * len(mine)
    ranks.after_evaluation(model)
    model.train()
    return float(ranks.host_sum(total) / len(starts))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    terminal.steady()
    if any(a in ("-h", "--help") for a in argv):
        log.say(configurator.help_text())
        return terminal.heard()
    ranks = None
    try:
        if "--plan" in argv:
            return terminal.heard(plan.main(argv))
        only_eval = "--eval" in argv
        argv = [a for a in argv if a != "--eval"]
        config, name = start.parse_named([*argv, "--resume=True"] if only_eval else argv, watchdog.world_size())
        if only_eval and name:
            raise ConfigError("--eval needs a run: python train.py out/run --eval")
        device = hardware.pick_device(config.device)
        ranks = distributed.start(config, device)
        idle = hardware.idle_gpus(device, ranks.world, argv)
        if idle:
            print(idle, flush=True)
        code = terminal.heard(evaluate(config, ranks, device)) if only_eval else train(config, ranks, device, name)
        ranks.stop()
        return code
    except Exception as e:
        watchdog.end(e, ranks and ranks.watchdog)
        raise


if __name__ == "__main__":
    sys.exit(main())
