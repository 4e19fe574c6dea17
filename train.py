"""
Train a GPT and watch its gradient noise scale while it trains.

    python train.py                                     # config/quickstart.py: minutes on a laptop
    python train.py config/gpt_111m.py --micro_batch_size=4
    python train.py config/gpt_111m.py --resume=True    # go on from the checkpoint in out_dir
    python train.py config/gpt_1_3b.py --plan --devices=8 --kind=A100     # memory, steps and time, before it is run
    torchrun --nproc_per_node=8 train.py config/gpt_1_3b.py --parallel=fsdp
    python train.py --help                              # every key with its default and the reason for it

Per step: accumulate micro-batches, whose norm layers also yield each example's squared gradient norm; clip; AdamW.
From the norms follow |G|^2, tr(Sigma) and their ratio, the noise scale (gns.py). Everything is counted in tokens.
With several processes every line below runs on each of them, on its own share of a step's examples (distributed.py); rank 0
alone writes. B sequences in a step, T tokens in a sequence.
"""

import dataclasses
import os
import signal
import sys

import numpy as np
import torch

import configurator
import ln_kernel
import schedule
from configurator import ConfigError
from model import GPT, GPTConfig
from rightbatch.tracker import Tracker
from trainer import batches, checkpoint, distributed, hardware, log, noise
from trainer.grad_stats import GradStats

MAX_BAD_STEPS = 10  # non-finite steps in a row before the run stops


def train(config, ranks, device):
    """The whole run; returns the exit code."""
    # -- what could go wrong goes wrong here, before anything is created
    dtype = hardware.pick_dtype(config.dtype, device)
    if device == "cpu":
        hardware.prepare_cpu()
    elif config.tf32:
        torch.set_float32_matmul_precision("high")
    data = ranks.guard(lambda: batches.Dataset(config.dataset, config.block_size), in_turn=True)
    saved = ranks.guard(lambda: load_for_resume(config, data, mmap=ranks.world > 1))
    branched = bool(saved and saved.get("branched"))
    end_tokens = min(config.stop_tokens or config.max_tokens, config.max_tokens)
    if branched and saved["state"]["tokens"] >= end_tokens:
        raise ConfigError(f"branch_from={config.branch_from!r}: its checkpoint is at {saved['state']['tokens']} tokens, "
                          f"this run ends at {end_tokens}")
    quantum = config.micro_batch_size * ranks.world
    plan = ranks.guard(lambda: configurator.batch_schedule(config, quantum, saved and not branched and saved.get("schedule")))

    # -- model and optimizer
    torch.manual_seed(config.seed)
    same_names = {f.name for f in dataclasses.fields(GPTConfig)} & set(configurator.FIELDS)
    model = GPT(GPTConfig(vocab_size=data.vocab_size, **{k: getattr(config, k) for k in same_names}))
    parameters = model.parameter_count()
    if saved:
        model.load_state_dict(saved.pop("model"))
    if config.parallel == "ddp" or ranks.world == 1:
        model = model.to(device)  # FSDP moves shards, block by block
    run_model = ranks.wrap(model, config, dtype, config.compile == "True" or (config.compile == "auto" and device == "cuda"))
    optimizer = torch.optim.AdamW(model.parameter_groups(config.weight_decay), lr=config.learning_rate,
                                  betas=(config.beta1, config.beta2), fused=True)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    autocast = hardware.autocast(device, dtype)

    # -- everything else that a run remembers
    state = {"step": 0, "tokens": 0, "examples": 0, "best_val_loss": None, "bad_steps": 0, "bad_in_a_row": 0,
             "seconds": 0.0, "wandb_id": None}
    tracker = Tracker(model, optimizer, config, device, ranks)
    stats = GradStats(model, optimizer, config, ranks)
    ranks.seed(config.seed, 0)
    streams_go_on = True
    if saved:
        ranks.load_optimizer(optimizer, saved.pop("optimizer"))
        scaler.load_state_dict(saved["scaler"])
        state.update(saved["state"], **({"best_val_loss": None, "wandb_id": None} if branched else {}))
        tracker.load_state_dict(saved["gns"])
        streams_go_on = ranks.restore_rng(saved["rng"], config.seed, state["step"])
    if saved and state["tokens"] >= end_tokens:
        if ranks.first:
            print(f"{config.out_dir} is finished: {log.count(state['tokens'])} tokens in {state['step']} steps")
            print(summary(config))
        return 0

    # -- the run folder
    out = log.NoLog()
    if ranks.first:
        os.makedirs(config.out_dir, exist_ok=True)
        checkpoint.write_json(os.path.join(config.out_dir, "config.json"),
                              {"config": dataclasses.asdict(config), **hardware.facts(device), "processes": ranks.world,
                               "dtype": str(dtype).removeprefix("torch."), "parameters": parameters, "data": data.meta})
        out = log.RunLog(config, resume_step=state["step"] if saved else None, wandb_id=state["wandb_id"])
    state["wandb_id"] = out.wandb.id if out.wandb else state["wandb_id"]
    ceiling = hardware.matmul_ceiling(device, dtype) * ranks.world
    norm_impl, why = ln_kernel.choose_impl(torch.device(device))
    several = f"{ranks.world} processes ({config.parallel}), each " if ranks.world > 1 else ""
    out.say(f"{log.count(parameters)} parameters on {device} in {str(dtype).removeprefix('torch.')}, "
            f"{several}{torch.get_num_threads()} threads; matrix products reach {ceiling / 1e9:.0f} GFLOP/s; "
            f"norm layers: {norm_impl} ({why})")
    out.say(f"{data.meta['tokenizer']} tokens of {config.dataset}: {log.count(data.meta['train_tokens'])} to train on, "
            f"{log.count(data.meta['val_tokens'])} to validate; {'resuming at' if saved else 'until'} "
            f"{log.count(state['tokens'] if saved else end_tokens)} tokens; log and checkpoint in {config.out_dir}")
    if not streams_go_on and config.dropout > 0:
        out.say("the checkpoint is from another number of processes: dropout draws anew from here, by seed, step and rank")
    if config.gns_adam and config.gns != "off" and not tracker.adam:
        out.say("gns_adam is off: with gns='exact' it needs Adam's second moment of every parameter whole on each process, "
                "which parallel='fsdp' exists to avoid; gns='norm' has it")

    if config.grad_stats and ranks.sharded:
        out.say("grad_stats without coherence: parallel='fsdp' never forms the gradient of one micro-batch whole")

    def save():
        flush()
        state["seconds"] = clock.seconds()
        whole = {"model": ranks.whole_model(model), "optimizer": ranks.whole_optimizer(optimizer), "rng": ranks.rng_state()}
        if ranks.first:
            checkpoint.save(config.out_dir, {
                **whole, "scaler": scaler.state_dict(), "state": dict(state), "gns": tracker.state_dict(),
                "schedule": plan.state_dict(), "config": dataclasses.asdict(config), "vocab_size": data.vocab_size,
                "data": data.meta, "data_checksum": data.checksum})

    def evaluate():
        loss = validation_loss(model, data, config, device, autocast, ranks)
        if state["best_val_loss"] is None or not loss >= state["best_val_loss"]:
            state["best_val_loss"] = loss if np.isfinite(loss) else state["best_val_loss"]
        out.write({"step": state["step"], "tokens": state["tokens"], "val/loss": loss, "val/ppl": float(np.exp(loss))})
        out.say(f"step {state['step']:>6} | validation loss {loss:.4f}, best {state['best_val_loss'] or loss:.4f}")

    pending = []  # steps whose numbers are still on the device: (record, mode, B, tokens)
    last = {}  # numbers of the newest step that was fetched

    def flush():
        """Fetch all pending steps in one transfer and bring averages and counters up to date, in order."""
        if not pending:
            return
        for values, (_, mode, B, tokens) in zip(tracker.fetch([record for record, *_ in pending]), pending):
            bad = values["bad"][0] > 0
            last.update(loss=float(values["loss"][0]), grad_norm=float(np.sqrt(values["param_sq"].sum())))
            stats.absorb(values)
            state["bad_steps"] += int(bad)
            state["bad_in_a_row"] = state["bad_in_a_row"] + 1 if bad else 0
            if not bad:
                tracker.absorb(values, mode, B, tokens)
        pending.clear()
        ranks.agree(state["step"], {**{k: state[k] for k in ("step", "tokens", "examples", "bad_steps")}, "lr": lr,
                                    "batch_size": B, **last, **tracker.numbers()})

    stop_signal = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _frame: stop_signal.append(number))

    clock = log.Clock()
    clock.total = state["seconds"]
    start_tokens, start_seconds = logged_tokens, logged_seconds = state["tokens"], clock.seconds()
    logged_step = state["step"]
    with clock:
        if branched:
            out.event(state["step"], state["tokens"], f"branched from {config.branch_from} at {state['tokens']} tokens")
        if not saved or branched:
            evaluate()
            save()  # the run can be resumed from its first step on, and a full disk shows now

    stopping = 0
    while state["tokens"] < end_tokens and not stopping:
        vote = ranks.vote(stop_signal)
        if plan.polls:
            note = plan.accept(ranks.from_first(plan.poll))  # batch_file, if its owner edited it
            if note:
                out.event(state["step"] + 1, state["tokens"], note)
        B = plan.at(state["tokens"])
        accum = B // quantum
        step_tokens = B * config.block_size
        lr_factor, beta2, weight_decay = schedule.coupled(B, config)
        lr = lr_factor * schedule.learning_rate_at(state["tokens"] + step_tokens, config)

        # -- gradients: the mean over all B examples, micro-batch by micro-batch
        measure = tracker.begin(state["tokens"], state["tokens"] + step_tokens)
        stats.begin(accum, config.grad_stats and ((state["step"] + 1) % config.log_interval == 0
                                                  or state["tokens"] + step_tokens >= end_tokens))
        loss_sum = torch.zeros((), device=device)
        loss_scale = scaler.scale(torch.ones((), device=device))  # 1 unless fp16
        for micro in range(accum):
            first = state["examples"] + (micro * ranks.world + ranks.rank) * config.micro_batch_size
            x, y = data.train_batch(config.seed, first, config.micro_batch_size, device)
            ranks.sync(run_model, last=micro == accum - 1)
            with autocast:
                loss = run_model(x, y, **measure)[1]  # no name for the logits: they would live through the backward pass
            scaler.scale(loss / accum).backward()
            loss_sum += loss.detach() / accum
            tracker.take(measure, accum)
            stats.take(tracker.held, loss_scale)
        tracker.release()
        scaler.unscale_(optimizer)
        record = tracker.finish(loss_sum, loss_scale)
        pending.append((record, tracker.mode, B, step_tokens))
        stats.before_update()

        # -- update; AdamW's fused kernel leaves everything as it was where `bad` is 1, without asking the host, and divides
        # gradients by `excess` on its way: clipping without a pass over them
        excess = None
        if config.grad_clip > 0:
            excess = torch.clamp((record["param_sq"].sum().sqrt() + 1e-6) / config.grad_clip, min=1.0)
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = lr, (config.beta1, beta2)
            group["weight_decay"] = weight_decay if group["weight_decay"] else 0.0
        if scaler.is_enabled() or device == "mps":  # fp16's scaler, and Metal's kernel, do not look at these two
            if excess is not None:
                torch._foreach_div_([distributed.local(p.grad) for p in model.parameters()], excess)
            if scaler.is_enabled():
                scaler.step(optimizer)
                scaler.update()
            elif not record["bad"]:
                optimizer.step()
        else:
            optimizer.grad_scale, optimizer.found_inf = excess, record["bad"]
            optimizer.step()
        record.update(tracker.sum_over_ranks(stats.after_update()))
        optimizer.zero_grad(set_to_none=True)

        before = state["tokens"]
        state["step"] += 1
        state["tokens"] += step_tokens
        state["examples"] += B
        done = state["tokens"] >= end_tokens
        stopping = vote()

        # -- what the user sees
        if state["step"] % config.log_interval == 0 or done or stopping or len(pending) >= MAX_BAD_STEPS:
            flush()
            if state["bad_in_a_row"] >= MAX_BAD_STEPS:
                out.close()
                raise ConfigError(
                    f"stopped at step {state['step']}: loss or gradient was not finite {MAX_BAD_STEPS} steps in a row. Try "
                    f"a lower learning_rate (now {config.learning_rate}), a longer warmup_tokens, grad_clip=1.0, "
                    f"dtype=float32 or cos_attn; the last good checkpoint is in {config.out_dir}")
        if state["step"] % config.log_interval == 0 or done:
            seconds = clock.seconds()
            rate = (state["tokens"] - logged_tokens) / (seconds - logged_seconds)
            ceiling = max(ceiling, rate * model.flops_per_token())  # it may have been measured in a bad moment
            left = max(0, end_tokens - state["tokens"]) * (seconds - start_seconds) / (state["tokens"] - start_tokens)
            row = {"step": state["step"], "tokens": state["tokens"], "examples": state["examples"],
                   "train/loss": last["loss"], "lr": lr, "batch_size": B, "accum": accum,
                   "dt_ms": 1e3 * (seconds - logged_seconds) / (state["step"] - logged_step), "tok_per_sec": rate,
                   "mfu": rate * model.flops_per_token() / ceiling, "grad/norm": last["grad_norm"], "seconds": seconds,
                   "bad_steps": state["bad_steps"]}
            row |= {key: value for key, value in (("beta2", beta2), ("weight_decay", weight_decay))
                    if getattr(config, f"{key}_scaling") != "none"}
            row |= tracker.row() | stats.row()
            out.write(row)
            out.say(describe(row, config, left))
            # at these steps alone: an early fetch for a checkpoint or a signal must not add a decision
            if state["step"] % config.log_interval == 0 and state["tokens"] < config.max_tokens:
                note = plan.observe(state["tokens"], noise.noise(row, noise.noise_key(config)))
                if note:
                    out.event(state["step"], state["tokens"], note)
            logged_tokens, logged_seconds, logged_step = state["tokens"], seconds, state["step"]
        if out.bar:
            out.progress(min(1, state["tokens"] / end_tokens), f"step {state['step']}, batch {B}")

        # -- evaluation and checkpoint, outside the clock
        with clock:
            if done or crossed(before, state["tokens"], config.eval_tokens):
                evaluate()
            if done or stopping or crossed(before, state["tokens"], config.checkpoint_tokens):
                save()

    out.close()
    if stopping and ranks.first:
        print(f"stopped by {signal.Signals(stopping).name} at step {state['step']}; "
              f"checkpoint saved in {config.out_dir}, --resume=True goes on from there", flush=True)
    elif ranks.first:
        print(summary(config))
    return 128 + stopping if stopping else 0


def load_for_resume(config, data, mmap=False):
    """The checkpoint to go on from, or None for a fresh run; never a run written over another one. That of another run,
    with branch_from, is marked as "branched"."""
    there = os.path.isfile(os.path.join(config.out_dir, checkpoint.NAME))
    if config.resume == "True" or (config.resume == "auto" and there):
        saved = checkpoint.load(config.out_dir, mmap=mmap)
        checkpoint.check_same_run(saved, config, data.checksum)
        return saved
    logged = os.path.isfile(os.path.join(config.out_dir, log.NAME))
    if there or (logged and any("train/loss" in row for row in log.read(config.out_dir))):  # else it ended before its start
        raise ConfigError(f"out_dir={config.out_dir!r} already holds a run: continue it with --resume=True, "
                          "give another --out_dir, or remove it first")
    if config.branch_from:
        saved = checkpoint.load(config.branch_from, mmap=mmap)
        checkpoint.check_same_run(saved, config, data.checksum, branch=True)
        return {**saved, "branched": True}
    return None


def crossed(before, after, every):
    return every > 0 and after // every > before // every


@torch.no_grad()
def validation_loss(model, data, config, device, autocast, ranks=None):
    """Mean loss over the fixed validation windows. Ranks take turns; all make as many forward passes, as FSDP needs."""
    ranks = ranks or distributed.Ranks()
    model.eval()
    starts, size = data.val_starts(config.eval_iters), config.micro_batch_size
    total = 0.0
    for i in range(0, len(starts), size * ranks.world):
        mine = starts[i + ranks.rank * size:i + (ranks.rank + 1) * size]
        x, y = data.val_batch(mine if len(mine) else starts[:1], device)
        with autocast:
            _, loss = model(x, y)
        total += loss.double().cpu() * len(mine) if device != "mps" else loss.cpu().double() * len(mine)
    ranks.after_evaluation(model)
    model.train()
    return float(ranks.host_sum(total) / len(starts))


def describe(row, config, seconds_left):
    """The line of a logged step."""
    says = "gns off" if config.gns == "off" else "gns undetermined"
    key = noise.shown([row])
    if noise.noise(row, key):
        says = "{} {:.3g} [{:.3g}, {:.3g}]".format("norm gns" if key == "gns/norm" else "gns", *noise.noise(row, key))
    return (f"step {row['step']:>6} | {log.count(row['tokens']):>6} tok {min(1, row['tokens'] / config.max_tokens):4.0%} | "
            f"loss {row['train/loss']:.4f} | batch {row['batch_size']:>3} | {says:<22} | "
            f"{log.count(row['tok_per_sec']):>5} tok/s, mfu {row['mfu']:3.0%} | {log.duration(seconds_left)} left"
            + (f" | {row['bad_steps']} steps skipped, not finite" if row["bad_steps"] else ""))


def summary(config):
    """What the run found, in words, from its log; draws report.png."""
    import plot  # matplotlib is slow to import
    rows = log.read(config.out_dir)
    steps = [r for r in rows if "train/loss" in r]
    val = [r["val/loss"] for r in rows if r.get("val/loss") is not None] or [float("nan")]
    lines = ["", f"Trained on {log.count(steps[-1]['tokens'])} tokens in {steps[-1]['step']} steps, time "
                 f"{log.duration(steps[-1]['seconds'])}; validation loss {val[-1]:.4f} (best {min(val):.4f})."]
    lines += noise_summary(steps, config) + [schedule_summary(rows, steps, config)]
    lines.append(f"Picture: {plot.report(config.out_dir)}    Text: python sample.py {config.out_dir}")
    return "\n".join(lines)


def noise_summary(steps, config):
    """Sentences about the noise scale: what it was, what batch it asks for, what the schedule did."""
    if config.gns == "off":
        return ["The noise scale was not measured (gns=off)."]
    if config.batch_size == 1:
        return ["A step of one example has no noise scale: give batch_size=2 or more to measure it."]
    end, key = steps[-1], noise.shown(steps)
    known = [row for row in steps if noise.noise(row, key)]
    if not noise.noise(end, key):
        return ["The noise scale is undetermined: the gradient is too small against its noise for this many tokens. "
                "Try a longer gns_half_life_tokens or a larger batch_size."]
    g, low, high = noise.noise(end, key)
    nearest = [min(known, key=lambda row: abs(row["tokens"] - share * end["tokens"])) for share in (0.25, 0.5, 0.75)]
    path = {row["step"]: row for row in nearest if row is not end}.values()
    over = "".join(f"{row[key]:.3g} at {row['tokens'] / end['tokens']:.0%} (batch {row['batch_size']}), " for row in path)
    B = end["batch_size"]
    verdict = (f"{B / g:.1f} times that: steps are cleaner than they need to be, a smaller batch would learn more per token"
               if B > 1.5 * g > 0 else
               f"{g / B:.1f} times less: steps are noisy, a larger batch would cost few extra tokens and save steps"
               if g > 1.5 * B else "about that: tokens and steps are well balanced")
    lines = [f"Noise scale of {noise.NOISE[key]}, in sequences: {over}{g:.3g} at the end "
             f"(95% interval {low:.3g} to {high:.3g}), which is {log.count(g * config.block_size)} tokens.",
             f"It suggests a batch of about {max(2, round(g))} sequences. This run ended at {B}, {verdict}."]
    if key == "gns/calibrated":
        factor, low, high = (end[f"gns/calibration{suffix}"] for suffix in ("", "_low", "_high"))
        lines.append(f"It is the norm layers' {end['gns/norm']:.3g} times {factor:.2f} (95% interval {low:.2f} to {high:.2f}), "
                     "measured by exact steps on the way.")
    elif config.gns == "norm":
        lines.append("The whole model's noise scale is proportional to the norm layers', not equal to it: "
                     "gns_calibrate_tokens measures the factor.")
    return lines


def schedule_summary(rows, steps, config):
    """A sentence about the batches of the run, beside those that the noise scale asked for."""
    first, last = steps[0]["batch_size"], steps[-1]["batch_size"]
    text = f"The schedule ({config.batch_schedule}) " + (
        f"kept the batch at {last}" if all(r["batch_size"] == last for r in steps) else
        f"took the batch from {first} to {last}")
    key = noise.shown(steps)
    known = [(row["tokens"] - before["tokens"], row["batch_size"] / row[key])
             for before, row in zip([{"tokens": 0}, *steps], steps) if row.get(key)]
    if known:
        total = sum(tokens for tokens, _ in known)
        above, below = (sum(t for t, r in known if test(r)) / total for test in (lambda r: r > 2, lambda r: r < 0.5))
        text += (f"; of the tokens with a known noise scale, {above:.0%} were read in batches above twice it and "
                 f"{below:.0%} in batches below half of it")
    moves = [(r["event"].split(":")[0].removeprefix("batch "), r["tokens"]) for r in rows
             if r.get("event", "").startswith("batch ") and " -> " in r["event"]]
    if schedule.kind(config).measured:
        text += (f". The controller moved it {len(moves)} time{'s' if len(moves) != 1 else ''}"
                 + (": " + ", ".join(f"{move} at {log.count(tokens)}" for move, tokens in moves) if moves else ""))
    return text + "."


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
