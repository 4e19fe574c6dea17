"""
What a run says: its opening lines, the line of a logged step, and the closing words, from its log.
"""

import signal

import torch

import ln_kernel
import schedule
from trainer import advice, log, noise


def opening(run, parameters):
    """What is about to be done, and what is not."""
    config, ranks, step, data = run.config, run.ranks, run.step, run.data
    impl, why = ln_kernel.choose_impl(torch.device(step.device))
    several = f"{ranks.world} processes ({config.parallel}), each " if ranks.world > 1 else ""
    goes_on = run.resumed or run.branched
    yield (f"{log.count(parameters)} parameters on {step.device} in {str(step.dtype).removeprefix('torch.')}, "
           f"{several}{torch.get_num_threads()} threads; matrix products reach {run.ceiling / 1e9:.0f} GFLOP/s; "
           f"norm layers: {impl} ({why})")
    yield (f"{data.meta['tokenizer']} tokens of {config.dataset}: {log.count(data.meta['train_tokens'])} to train on, "
           f"{log.count(data.meta['val_tokens'])} to validate; {'resuming at' if goes_on else 'until'} "
           f"{log.count(run.count.tokens if goes_on else run.end)} tokens; log and checkpoint in {config.out_dir}")
    if not run.rng_restored and config.dropout > 0:
        yield "the checkpoint is from another number of processes: dropout draws anew from here, by seed, step and rank"
    if noise.noise_key(config) and noise.metric(config) != config.gns_metric:
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
            f"checkpoint of step {run.saved_step} in {run.config.out_dir}, --resume=True goes on from there")


def describe(row, config, seconds_left):
    """The line of a logged step."""
    return (f"step {row['step']:>6} | {log.count(row['tokens']):>6} tok {min(1, row['tokens'] / config.max_tokens):4.0%} | "
            f"loss {row['train/loss']:.4f} | batch {row['batch_size']:>3} | {noise_words(row, config):<22} | "
            f"{log.count(row['tok_per_sec']):>5} tok/s, mfu {row['mfu']:3.0%} | {log.duration(seconds_left)} left"
            + (f" | {row['bad_steps']} steps skipped, not finite" if row["bad_steps"] else ""))


def noise_words(row, config):
    """The noise scale of a row, or why there is none. The norm layers' own is called so: it is not a batch to take."""
    found, own = noise.noise(row), noise.noise(row, "gns/norm")
    if config.gns == "off":
        return "gns off"
    if found:
        return "gns {:.3g} [{:.3g}, {:.3g}]".format(*found)
    if own and not config.gns_calibrate_tokens:
        return "norm layers {:.3g} [{:.3g}, {:.3g}]".format(*own)
    return "gns calibrating" if own else "gns undetermined"


def finished(run):
    done = f"{run.config.out_dir} is finished: {log.count(run.count.tokens)} tokens in {run.count.step} steps"
    return f"{done}\n{closing(run.config)}"


def closing(config):
    """What the run found, in words, from its log; draws report.png."""
    from plots import report  # matplotlib is slow to import
    rows = log.read(config.out_dir)
    steps = [r for r in rows if "train/loss" in r]
    if not steps:
        return f"{config.out_dir}: no step was logged (log_interval={config.log_interval})."
    val = [r["val/loss"] for r in rows if r.get("val/loss") is not None] or [float("nan")]
    loss = "it ended without a finite loss" if log.died(rows) else f"validation loss {val[-1]:.4f}"
    lines = ["", f"Trained on {log.count(steps[-1]['tokens'])} tokens in {steps[-1]['step']} steps, time "
                 f"{log.duration(steps[-1]['seconds'])}; {loss} (best {min(val):.4f})."]
    lines += advice.right_batch(config.out_dir) + noise_summary(steps, config) + [schedule_summary(rows, steps, config)]
    lines.append(f"Picture: {report.draw(config.out_dir)}    Text: python sample.py {config.out_dir}    "
                 f"Other batches: python whatif.py {config.out_dir}")
    return "\n".join(lines)


def noise_summary(steps, config):
    """Sentences about the noise scale: what it was, and where the run's batch lay beside it."""
    known = [row for row in steps if noise.noise(row) and noise.noise(row)[0] > 0]
    own = noise.noise(steps[-1], "gns/norm")
    if config.gns == "off":
        return ["The noise scale was not measured (gns=off)."]
    if config.batch_size == 1:
        return ["A step of one example has no noise scale: give batch_size=2 or more to measure it."]
    if noise.noise_key(config) is None:
        return ["The norm layers' noise scale is " + ("{:.3g} [{:.3g}, {:.3g}]".format(*own) if own else "undetermined")
                + ". The whole model's is proportional to it, not equal: gns_calibrate_tokens measures the factor."]
    if not known:
        return ["The noise scale is undetermined: the gradient is too small against its noise for this many tokens. "
                "Try a longer gns_half_life_tokens or a larger batch_size."]
    end, share = known[-1], lambda row: row["tokens"] / steps[-1]["tokens"]
    g, low, high = noise.noise(end)
    nearest = [min(known, key=lambda row: abs(share(row) - at)) for at in (0.25, 0.5, 0.75)]
    path = {row["step"]: row for row in nearest if row is not end}.values()
    over = "".join(f"{noise.noise(row)[0]:.3g} at {share(row):.0%} (batch {row['batch_size']}), " for row in path)
    B, when = end["batch_size"], "the end" if end is steps[-1] else f"{share(end):.0%}, undetermined since"
    verdict = ("inside its interval: tokens and steps are balanced" if low <= B <= high else
               f"above its interval, {B / g:.1f} times the noise scale: a smaller batch would learn more per token" if B > high
               else f"below its interval, {g / B:.1f} times less: a larger batch would save steps for few tokens")
    lines = [f"Noise scale of {noise.words(end)}, in sequences: {over}{g:.3g} at {when} "
             f"(95% interval {low:.3g} to {high:.3g}), {log.count(g * config.block_size)} tokens. The batch of {B} there is "
             f"{verdict}."]
    if config.gns == "norm":
        suffix = "_adam" if noise.metric(config) == "adam" else ""
        factor, low, high = (end[f"gns/calibration{suffix}{part}"] for part in ("", "_low", "_high"))
        lines.append(f"It is the norm layers' {end[f'gns/norm{suffix}']:.3g} times {factor:.2f} (95% interval {low:.2f} to "
                     f"{high:.2f}), measured by exact steps on the way.")
    return lines


def schedule_summary(rows, steps, config):
    """A sentence about the batches of the run, beside the noise scale on the way."""
    first, last = steps[0]["batch_size"], steps[-1]["batch_size"]
    text = f"The schedule ({config.batch_schedule}) " + (
        f"kept the batch at {last}" if all(r["batch_size"] == last for r in steps) else
        f"took the batch from {first} to {last}")
    read = [(row["tokens"] - before["tokens"], row["batch_size"], noise.noise(row))
            for before, row in zip([{"tokens": 0} if rows[0] is steps[0] else rows[0], *steps], steps)]
    known = [(tokens, B, found) for tokens, B, found in read if found]
    if known:
        total, every = (sum(tokens for tokens, _, _ in those) for those in (known, read))
        above, below = (sum(t for t, B, (_, low, high) in known if test(B, low, high)) / total
                        for test in (lambda B, low, high: B > high, lambda B, low, high: B < low))
        text += (f"; the noise scale was known for {total / every:.0%} of its tokens, of which {above:.0%} were read in "
                 f"batches above its interval and {below:.0%} below")
    moves = [(r["event"].split(":")[0].removeprefix("batch "), r["tokens"]) for r in rows
             if r.get("event", "").startswith("batch ") and " -> " in r["event"]]
    if schedule.kind(config).measured:
        text += (f". The controller moved it {len(moves)} time{'s' if len(moves) != 1 else ''}"
                 + (": " + ", ".join(f"{move} at {log.count(tokens)}" for move, tokens in moves) if moves else ""))
    return text + "."
