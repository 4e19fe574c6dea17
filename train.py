"""
Train a GPT and watch its gradient noise scale while it trains.

    python train.py                                     # config/quickstart.py: minutes on a laptop
    python train.py config/gpt_111m.py --micro_batch_size=4
    python train.py config/gpt_111m.py --resume=True    # go on from the checkpoint in out_dir
    python train.py config/gpt_1_3b.py --plan --devices=8 --kind=A100     # memory, steps and time, before it is run
    torchrun --nproc_per_node=8 train.py config/gpt_1_3b.py --parallel=fsdp
    python train.py --help                              # every key with its default and the reason for it

Per step: accumulate micro-batches, whose norm layers also yield each example's squared gradient norm; clip; update. From the
norms follow |G|^2, tr(Sigma) and their ratio, the noise scale (gns.py). Everything is counted in tokens.
With several processes every line below runs on each of them, on its own share of a step's examples; rank 0 alone writes.

Behind it: trainer/step.py (gradients, clipping, update), trainer/run.py (counters, log, checkpoint), schedule.py (batch size,
learning rate), model.py. B sequences in a step.
"""

import sys

import torch

import configurator
import schedule
from configurator import ConfigError
from model import GPT, GPTConfig
from trainer import batches, distributed, hardware, resume, summary
from trainer.run import MAX_BAD_STEPS, Run
from trainer.step import TrainingStep


def train(config, ranks, device):
    """The whole run; returns the exit code."""
    # -- what could go wrong goes wrong here, before anything is created
    dtype = hardware.prepare(config, device)
    data = ranks.guard(lambda: batches.Dataset(config.dataset, config.block_size), in_turn=True)
    saved = ranks.guard(lambda: resume.starting_point(config, data, mmap=ranks.world > 1))
    quantum = config.micro_batch_size * ranks.world  # a step's batch is a multiple of it
    known = saved and not saved.get("branched") and saved.get("schedule")
    batch_schedule = ranks.guard(lambda: configurator.batch_schedule(config, quantum, known))

    # -- model, optimizer, and what is measured in a step
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig.of(vars(config), data.vocab_size))
    parameters = model.parameter_count()  # before it is sharded
    if saved:
        model.load_state_dict(saved.pop("model"))
    if config.parallel == "ddp" or ranks.world == 1:
        model = model.to(device)  # FSDP moves shards, block by block
    step = TrainingStep(model, config, ranks, device, dtype)

    # -- the run: counters, log, checkpoint
    run = Run(config, ranks, data, step, batch_schedule, saved)
    if run.over:
        if ranks.first:
            print(summary.finished(run))
        return 0
    run.open(parameters)
    if not run.resumed:
        with run.clock.paused():
            run.evaluated(validation_loss(step, data))
            run.save()  # the run can be resumed from its first step on, and a full disk shows now

    stopping = 0
    while not (run.over or stopping):
        vote = ranks.vote(run.signals)

        # -- batch size, and what goes with it
        if batch_schedule.polls:
            run.event(batch_schedule.accept(ranks.from_first(batch_schedule.poll)), ahead=1)  # if its owner edited it
        B = batch_schedule.at(run.count.tokens)
        accum, after = B // quantum, run.count.tokens + B * config.block_size
        lr_factor, beta2, weight_decay = schedule.coupled(B, config)
        lr = lr_factor * schedule.learning_rate_at(after, config)

        # -- gradients: the mean over all B examples, micro-batch by micro-batch
        first = run.count.examples + ranks.rank * config.micro_batch_size
        micro_batches = (data.train_batch(config.seed, first + micro * quantum, config.micro_batch_size, device)
                         for micro in range(accum))
        stats = config.grad_stats and (run.at_log_line(ahead=1) or after >= run.end)
        step.accumulate(micro_batches, accum, run.count.tokens, after, measure_stats=stats)

        # -- update
        record = step.update(lr, beta2, weight_decay)
        run.advance(record, lr, accum)
        stopping = vote()

        # -- what the user sees
        if run.at_log_line() or run.over or stopping or len(run.pending) >= MAX_BAD_STEPS:
            run.fetch()
        if run.at_log_line() or run.over:
            run.log_step(beta2, weight_decay)
        run.out.progress(min(1, run.count.tokens / run.end), f"step {run.count.step}, batch {B}")

        # -- evaluation and checkpoint, outside the clock
        with run.clock.paused():
            if run.passed(config.eval_tokens):
                run.evaluated(validation_loss(step, data))
            if stopping or run.moved or run.passed(config.checkpoint_tokens):
                run.save()

    run.out.close()
    if ranks.first:
        print(summary.stopped(run, stopping) if stopping else summary.closing(config), flush=True)
    return 128 + stopping if stopping else 0


@torch.no_grad()
def validation_loss(step, data):
    """Mean loss over the fixed validation windows. Ranks take turns; all make as many forward passes, as FSDP needs."""
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
    if any(a in ("-h", "--help") for a in argv):
        print(configurator.help_text())
        return 0
    ranks = None
    try:
        if "--plan" in argv:
            from trainer import plan
            return plan.main(argv)
        config = configurator.parse(argv, distributed.world_size())
        device = hardware.pick_device(config.device)
        ranks = distributed.start(config, device)
        idle = hardware.idle_gpus(device, ranks.world, argv)
        if idle:
            print(idle, flush=True)
        code = train(config, ranks, device)
        ranks.stop()
        return code
    except ConfigError as e:
        distributed.report(e, ranks)
    except Exception as e:
        if ranks and ranks.world > 1:
            ranks.fail(e)
        if isinstance(e, OSError) and e.strerror:  # a full disk, a folder that cannot be written
            configurator.die(f"{e.strerror}: {e.filename or ''}".rstrip(": "))
        raise


if __name__ == "__main__":
    sys.exit(main())
