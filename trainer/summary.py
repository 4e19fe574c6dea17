"""
What a run says: its opening lines, the line of a logged step, and the closing words, from its log.
"""

import shlex
import signal

import torch

import ln_kernel
import schedule
from system import terminal
from system.errors import ConfigError, explain
from trainer import advice, log, reader
from trainer.step import metric_of_run


def opening(run, parameters):
    """What is about to be done, and what is not."""
    config, ranks, step, data = run.config, run.ranks, run.step, run.data
    impl, why = ln_kernel.choose_impl(torch.device(step.device))
    several = f"{ranks.world} processes ({config.parallel}), " if ranks.world > 1 else ""
    threads = f", {log.plural(torch.get_num_threads(), 'thread')}" if step.device == "cpu" else ""
    sizes = sorted(set(schedule.kind(config).sizes(config)))
    batch = f"batch {sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"batch {sizes[0]}" if sizes else "batch from batch_file"
    start = f"resuming at {log.count(run.count.tokens)}, " if run.resumed or run.branched else ""
    yield (f"model  {config.n_layer} layers of {config.n_embd}, {log.count(parameters)} parameters; "
           f"{several}{step.device}, {str(step.dtype).removeprefix('torch.')}{threads}")
    yield (f"data   {config.dataset}, {log.count(data.meta['train_tokens'])} tokens ({data.meta['tokenizer']}) to train on, "
           f"{log.count(data.meta['val_tokens'])} to validate")
    yield (f"run    {start}until {log.count(run.end)} tokens, {batch} ({config.batch_schedule}) x {config.block_size} tokens; "
           f"in {config.out_dir}")
    if config.verbose:
        yield (f"norm layers: {impl} ({why}); matrix products reach {run.ceiling / 1e9:.0f} GFLOP/s (100% mfu); lr "
               f"{config.learning_rate:g}, {config.lr_decay} to {config.min_lr:g}; all settings: {config.out_dir}/config.json")
    if data.assumed:
        yield data.assumed
    if not run.rng_restored and config.dropout > 0:
        yield "the checkpoint is from another number of processes: dropout draws anew from here, by seed, step and rank"
    measured = config.gns == "exact" or (config.gns == "norm" and config.gns_calibrate)
    if measured and metric_of_run(config) != config.gns_metric:
        yield ("The run goes by the plain noise scale: Adam's metric of the whole model needs gns_adam, optimizer='adamw' and "
               "parallel='ddp'.")
    if config.gns_adam and config.gns != "off" and not step.measures_adam:
        yield ("gns_adam is off: with gns='exact' it needs Adam's second moment of every parameter whole on each process, "
               "which parallel='fsdp' exists to avoid; gns='norm' has it")
    largest = max(schedule.kind(config).sizes(config), default=config.batch_size)
    k = largest / schedule.reference_batch(config)
    if config.beta2_scaling != "none" and config.beta2**k < schedule.coupled(largest, config)[1]:
        yield (f"beta2_scaling would bring beta2 to {config.beta2**k:.3g} at batch {largest}; it is held at "
               f"{schedule.coupled(largest, config)[1]:.3g} (beta2_floor)")
    if config.optimizer != "adamw" and (config.beta2_scaling != "none" or config.lr_scaling != "none"):
        yield f"lr_scaling and beta2_scaling are rules for Adam; with optimizer={config.optimizer} nobody has tested them"
    if config.grad_stats and ranks.sharded:
        yield "grad_stats without coherence: parallel='fsdp' never forms the gradient of one micro-batch whole"


def diverged(run, steps):
    config = run.config
    return (f"stopped at step {run.count.step}: loss or gradient was not finite {steps} steps in a row. Try "
            f"a lower learning_rate (now {config.learning_rate}), a longer warmup_tokens, grad_clip=1.0, "
            f"dtype=float32 or cos_attn; the last good checkpoint, of step {run.saved_step}, is in {config.out_dir}")


def stopped(run, number):
    return (f"stopped by {signal.Signals(number).name} at step {run.count.step}; "
            f"checkpoint of step {run.saved_step}; go on with --resume=True, or python train.py "
            f"{shlex.quote(run.config.out_dir)}")


def describe(row, config, noise, right, seconds_left, calibrating=None, columns=None):
    """The line of a logged step. noise: the Noise that the run goes by; right: the right batch for time; None while not known.
    calibrating: seconds until the noise scale is known, roughly. In a narrow terminal what ranks highest is left out first."""
    fields = [(3, f"step {row['step']:>6}"),
              (0, f"{log.count(row['tokens']):>6} tok {min(1, row['tokens'] / config.max_tokens):4.0%}"),
              (0, f"loss {row['train/loss']:.4f}"), (0, f"batch {row['batch_size']:>3}"),
              (0, f"{noise_words(row, config, noise, calibrating):<22}"), *([(1, f"right {right:<3}")] if right else []),
              (2, f"{log.count(row['tok_per_sec']):>5} tok/s"), (4, f"mfu {row['mfu']:3.0%}"),
              (0, f"{log.duration(seconds_left)} left")]
    if row["bad_steps"]:
        fields.append((0, f"{row['bad_steps']} steps skipped, not finite"))
    return terminal.fitted(fields, columns)


def noise_words(row, config, noise, calibrating=None):
    """The noise scale, or why there is none. The norm layers' own is called so: it is not a batch to take."""
    if config.gns == "off":
        return "gns off"
    if noise:
        return f"gns {noise}"
    norm = reader.noise_of(row, "gns/norm")
    if norm and not config.gns_calibrate:
        return f"norm layers {norm}"
    if config.gns == "norm" and not has_factor(row):
        return "gns calibrating" + (f", ~{log.duration(calibrating)}" if calibrating is not None else "")
    return "gns undetermined"


def has_factor(row):
    """Whether calibration has come to the factor from the norm layers' noise scale to the whole model's."""
    return any(row.get(f"gns/calibration{metric}") is not None for metric in ("", "_adam"))


def saturation(B, config, before, noise):
    """Words where the noise scale, `before` and now, stops the learning rate's rule."""
    if schedule.saturated(B, config, noise) and not schedule.saturated(B, config, before):
        return (f"learning rate: batch {B} is above the noise scale's interval; lr_scaling stays at its upper end, "
                f"{noise.high:.4g}")


def evaluation(config, saved, data, loss):
    """The line of --eval."""
    state, windows = saved["state"], len(data.val_starts(config.eval_iters))
    return (f"{saved['path']}: step {state['step']}, {log.count(state['tokens'])} tokens: validation loss {loss:.4f} over "
            f"{windows} windows of {config.block_size} tokens (eval_iters={config.eval_iters})")


def stopped_early(run):
    """A sentence: where stop_tokens ended the run, and the command that goes on."""
    config = run.config
    return (f"stopped early at {log.count(run.count.tokens)} of {log.count(config.max_tokens)} tokens "
            f"(stop_tokens={config.stop_tokens}); resume with: python train.py {shlex.quote(config.out_dir)}")


def last_words(run, signal_number, picture):
    if not run.over:
        return stopped(run, signal_number)
    early = run.count.tokens < run.config.max_tokens
    return closing(run.config, picture) + (f"\n{stopped_early(run)}" if early else "")


def finished(run, picture):
    """The words of a run that has nothing left to do."""
    if run.count.tokens < run.config.max_tokens:
        return stopped_early(run)
    done = f"{run.config.out_dir} is finished: {log.count(run.count.tokens)} tokens in {run.count.step} steps"
    return f"{done}\n{closing(run.config, picture)}"


def closing(config, picture):
    """The last words of a run. picture: its path, or why there is none."""
    try:
        rows = log.read(config.out_dir)
    except (ConfigError, OSError) as e:  # the run itself is whole
        return f"No closing words: {explain(e)}"
    steps = log.steps(rows)
    if not steps:
        return f"{config.out_dir}: no step was logged (log_interval={config.log_interval})."
    right = advice.right_batch(config.out_dir)
    timed = any(line.startswith("Right batch for time") for line in right)
    return "\n".join(["", result_summary(rows, steps), *right, *noise_summary(steps, config, timed),
                      schedule_summary(rows, steps, config), f"Picture: {picture}", f"Text: python sample.py {config.out_dir}",
                      f"Other batches: python whatif.py {config.out_dir}"])


def result_summary(rows, steps):
    val = [r["val/loss"] for r in rows if r.get("val/loss") is not None] or [float("nan")]
    loss = "it ended without a finite loss" if log.died(rows) else f"validation loss {val[-1]:.4f}"
    return (f"Trained on {log.count(steps[-1]['tokens'])} tokens in {steps[-1]['step']} steps, time "
            f"{log.duration(steps[-1]['seconds'])}; {loss} (best {min(val):.4f}).")


def noise_summary(steps, config, timed=False):
    """Sentences about the noise scale: what it was, and where the run's batch lay beside it. timed: the right batch for time
    stands above."""
    if config.gns == "off":
        return ["The noise scale was not measured (gns=off)."]
    if max(row["batch_size"] for row in steps) == 1:
        return ["A step of one example has no noise scale: batches of 2 or more measure it."]
    if config.gns == "norm" and not config.gns_calibrate:
        norm = reader.noise_of(steps[-1], "gns/norm")
        return [f"The norm layers' noise scale is {norm or 'undetermined'}. The whole model's is proportional to it, not "
                "equal: gns_calibrate=True measures the factor."]
    known = [(row, noise) for row in steps if (noise := reader.noise_of(row))]
    if not known and config.gns == "norm" and not has_factor(steps[-1]):
        return ["The noise scale is undetermined: the factor from the norm layers to the whole model was still being measured, "
                "by one step in eight. A longer run has it."]
    if not known:
        return ["The noise scale is undetermined: the gradient is too small against its noise for this many tokens. "
                "Try a longer gns_half_life_tokens or a larger batch_size."]

    def share(row):
        return row["tokens"] / steps[-1]["tokens"]
    end, noise = known[-1]
    nearest = [min(known, key=lambda pair: abs(share(pair[0]) - at)) for at in (0.25, 0.5, 0.75)]
    on_the_way = {row["step"]: f"{there.value:.3g} at {share(row):.0%} (batch {row['batch_size']}), "
                  for row, there in nearest if row is not end}.values()  # each row once
    when = "the end" if end is steps[-1] else f"{share(end):.0%}, undetermined since"
    lines = [f"Noise scale of {noise.of}, in sequences: {''.join(on_the_way)}{noise.value:.3g} at {when} (95% interval "
             f"{noise.low:.3g} to {noise.high:.3g}), {log.count(noise.value * config.block_size)} tokens. The batch of "
             f"{end['batch_size']} there is {verdict(end['batch_size'], noise, timed)}."]
    if config.gns == "norm":
        suffix = "_adam" if metric_of_run(config) == "adam" else ""
        factor = reader.noise_of(end, f"gns/calibration{suffix}")
        lines.append(f"It is the norm layers' {end[f'gns/norm{suffix}']:.3g}{' in that metric' if suffix else ''} times "
                     f"{factor.value:.2f} (95% interval {factor.low:.2f} to {factor.high:.2f}), measured by sampled rows on "
                     "the way.")
    return lines


def verdict(B, noise, timed=False):
    """Where a batch lies beside the noise scale, and what that means (steps go as (B + N)/B, tokens as B + N). timed: which
    batch is faster stands above."""
    if B > noise.high:
        return f"above its interval, {B / noise.value:.1f} times the noise scale: a smaller batch would learn more per token"
    if B < noise.low:
        tokens = (2 * B + noise.value) / (B + noise.value)
        return (f"below its interval: twice the batch would take {tokens / 2:.2f} times the steps and {tokens:.2f} times the "
                f"tokens{'; which is faster here is said above' if timed else ''}")
    return "inside its interval: tokens and steps are balanced"


def schedule_summary(rows, steps, config):
    """A sentence about the batches of the run, beside the noise scale on the way."""
    first, last = steps[0]["batch_size"], steps[-1]["batch_size"]
    text = f"The schedule ({config.batch_schedule}) " + (
        f"kept the batch at {last}" if all(r["batch_size"] == last for r in steps) else
        f"took the batch from {first} to {last}")
    start = 0 if rows[0] is steps[0] else rows[0]["tokens"]
    known = [(row["tokens"] - before, row["batch_size"], noise) for before, row in
             zip([start, *(r["tokens"] for r in steps)], steps) if (noise := reader.noise_of(row))]
    if known:
        tokens = sum(read for read, *_ in known)
        above = sum(read for read, B, noise in known if B > noise.high) / tokens
        below = sum(read for read, B, noise in known if B < noise.low) / tokens
        text += (f"; the noise scale was known for {tokens / (steps[-1]['tokens'] - start):.0%} of its tokens, of which "
                 f"{above:.0%} were read in batches above its interval and {below:.0%} below")
    if schedule.kind(config).measured:
        moves = [f"{r['event'].split(':')[0].removeprefix('batch ')} at {log.count(r['tokens'])}" for r in rows
                 if r.get("event", "").startswith("batch ") and " -> " in r["event"]]
        text += f". The controller moved it {log.plural(len(moves), 'time')}{': ' * bool(moves)}{', '.join(moves)}"
    return text + "."
