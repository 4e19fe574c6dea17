"""
sweep.py branch: the critical batch size by experiment (Merrill et al. 2025, arXiv 2505.23971).

    python sweep.py branch out/run --at 20M --factors 1,2,4,8

Takes the run to --at tokens, then goes on from there several times, with k times its batch and sqrt(k) times its learning
rate, for a window of tokens. The largest k whose loss stays within a tolerance of k = 1 is the critical batch size, found
without theory. The noise scale of the same run stands beside it. All branches read the same examples in the same order, so
their losses are compared example for example. Everything is kept in out/run/branch/<at>: asking again runs what is missing.
"""

import dataclasses
import os
import shutil

import numpy as np

import configurator
import schedule
from configurator import ConfigError
from plots import style
from sweeps import jobs
from sweeps.common import number, short
from system import files, points
from trainer import checkpoint, log, reader


def arguments(parser):
    parser.add_argument("run", help="a run folder of train.py")
    parser.add_argument("--at", required=True, help="tokens at which to branch, e.g. 20M")
    parser.add_argument("--factors", default="1,2,4,8", help="multiples of the run's batch at that point")
    parser.add_argument("--window", help="tokens to train each branch for; default: a tenth of the run, and at least 32 "
                                         "steps of the largest batch")
    parser.add_argument("--tolerance", type=float, default=0.01, help="nats per token that a loss may be above that of k = 1")
    parser.add_argument("--dry_run", action="store_true", help="say what would be run and how long it might take")
    jobs.arguments(parser)


def branch(args):
    config = dataclasses.replace(configurator.read_run(args.run), wandb_log=False)
    at, factors, at_once = tokens_of("--at", args.at), parse_factors(args.factors), number(args, "jobs", 1, int)
    folder = os.path.join(args.run, "branch", str(at))
    if not 0 < at < config.max_tokens:
        raise ConfigError(f"--at={args.at}: the run goes from 0 to {config.max_tokens} tokens")
    base = jobs.Group({"base": dataclasses.replace(config, stop_tokens=at)}, folder, 1, not args.in_process)
    base_folder = base.wanted["base"].out_dir
    if args.dry_run:
        print(dry_run(args, config, factors, at, base_folder))
        return 0
    if base.left():
        print(f"taking the run to {log.count(at)} tokens in {base_folder}", flush=True)
        base.do_all(before=lambda: prepare_base(args.run, base_folder, at))

    steps = steps_of(base_folder)
    start, batch = steps[-1]["tokens"], steps[-1]["batch_size"]
    window = window_of(args, config, factors, start, batch)
    group = jobs.Group({f"x{short(k)}": dataclasses.replace(config, branch_from=base_folder, stop_tokens=start + window,
                                                            **branch_changes(config, batch, k)) for k in factors},
                       folder, at_once, not args.in_process)
    group.do_all()
    rows = {k: log.read(os.path.join(folder, f"x{short(k)}")) for k in factors}
    result = result_of(rows, steps, start, window, batch, args.tolerance)
    files.write_json(os.path.join(folder, "branch.json"), result)
    draw(result, rows, os.path.join(folder, "branch.png"))
    print("", table(result), "", verdict(result), sep="\n")
    print(f"\nPicture: {os.path.join(folder, 'branch.png')}    Numbers: {os.path.join(folder, 'branch.json')}")
    return 0


def dry_run(args, config, factors, at, base):
    """What is missing, and how long it might take at the speed that the run had. The batch at --at is known where the run, or
    its base, has been there."""
    reached = [r for d in (base, args.run) for r in steps_of(d) if r["tokens"] >= at]
    batch = reached[0]["batch_size"] if reached else schedule.build(config, config.micro_batch_size).at(at)
    window = window_of(args, config, factors, at, batch)
    begun = jobs.tokens_done(args.run)
    left = {base: max(0, at - max(0, jobs.tokens_done(base), begun if begun <= at else 0))}
    lines = [f"would take the run to {log.count(at)} tokens in {base}: {log.count(left[base])} to go"]
    for k in factors:
        out = os.path.join(os.path.dirname(base), f"x{short(k)}")
        left[out] = max(0, window - max(0, jobs.tokens_done(out) - at))
        lines.append(f"would go on from there with batch {int(k * batch)} for {log.count(window)} tokens, in {out}: "
                     f"{log.count(left[out])} to go")
    if not reached and schedule.kind(config).measured:
        lines.append(f"the batch there depends on what the run measures; {batch} is a guess")
    speeds, total = [r["tok_per_sec"] for r in steps_of(args.run) if r.get("tok_per_sec")], sum(left.values())
    took = f": about {log.duration(total / np.median(speeds))} at the run's own speed" if speeds else ""
    return "\n".join([*lines, f"{log.count(total)} tokens in all{took}, {args.jobs} at a time"])


def steps_of(folder):
    """The logged steps of a run; none where there is no log."""
    try:
        return log.steps(log.read(folder))
    except OSError:
        return []


def window_of(args, config, factors, start, batch):
    """Tokens to train each branch for, all checked."""
    for k in factors:
        if (k * batch) % config.micro_batch_size:
            raise ConfigError(f"--factors: {k:g} x {batch} is not whole micro-batches of {config.micro_batch_size}")
    largest = int(max(factors) * batch) * config.block_size
    window = tokens_of("--window", args.window) if args.window else max(config.max_tokens // 10, 32 * largest)
    if start + window > config.max_tokens:
        raise ConfigError(f"--window={window}: the run has only {config.max_tokens - start} tokens left after --at={args.at}; "
                          "give a smaller one, or smaller --factors")
    if window < 8 * largest:
        raise ConfigError(f"--window={window}: gives fewer than 8 steps of {largest} tokens, the largest batch: nothing to see")
    return window


def tokens_of(option, text):
    try:
        return points.parse_count(text)
    except ValueError as e:
        raise ConfigError(f"{option}: {e}") from None


def parse_factors(text):
    try:
        factors = sorted({float(word) for word in text.split(",")})
    except ValueError:
        factors = []
    if 1.0 not in factors or len(factors) < 2 or factors[0] <= 0:
        raise ConfigError(f"--factors={text}: a list with 1 and other numbers above 0, such as 1,2,4,8")
    return factors


def prepare_base(run, base, at):
    """Start the base from the run's own checkpoint, if that is not past the point already."""
    if jobs.tokens_done(base) < 0 <= jobs.tokens_done(run) <= at:
        os.makedirs(base, exist_ok=True)
        begun = os.path.join(base, checkpoint.NAME)
        partial = files.beside(begun)
        shutil.copyfile(checkpoint.load(run, mmap=True)["path"], partial)  # before the log, which may grow meanwhile
        for name in (log.NAME, "config.json"):
            shutil.copyfile(os.path.join(run, name), os.path.join(base, name))
        os.replace(partial, begun)  # with it, the base counts as begun


def branch_changes(config, batch, k):
    """What a branch at k x batch sets: sqrt(k) on the learning rate in force at `batch`; beta2 and weight decay as they are
    at `batch`, and on from there by the run's own rules."""
    lr_factor, beta2, weight_decay = schedule.coupled(batch, config)
    return dict(batch_schedule="constant", batch_size=int(k * batch), lr_scaling="sqrt", lr_saturates=False,
                lr_reference_batch=batch,
                learning_rate=config.learning_rate * lr_factor, min_lr=config.min_lr * lr_factor, beta2=beta2,
                weight_decay=weight_decay, log_interval=1, eval_tokens=0, checkpoint_tokens=0)


BINS = 8  # of the last quarter of the window: their spread tells how sure a difference of losses is


def window_losses(rows, start, window):
    """Mean training loss in each of BINS equal parts of the last quarter of the window; a step counts by the share of its
    tokens that falls into the part."""
    steps = [r for r in rows if r.get("train/loss") is not None and r["tokens"] > start]
    ends = np.array([r["tokens"] for r in steps], dtype=float)
    begins, loss = np.concatenate([[start], ends[:-1]]), np.array([r["train/loss"] for r in steps])
    edges = start + window * np.linspace(0.75, 1, BINS + 1)
    weights = np.clip(np.minimum(ends, edges[1:, None]) - np.maximum(begins, edges[:-1, None]), 0, None)  # (BINS, steps)
    return (weights * loss).sum(1) / weights.sum(1)


def result_of(rows, base_steps, start, window, batch, tolerance):
    """All numbers of the probe; rows {k: log of the branch}."""
    losses = {k: window_losses(r, start, window) for k, r in rows.items()}
    branches, largest = [], None
    for k in sorted(losses):
        apart = losses[k] - losses[1.0]
        entry = {"factor": k, "batch_size": int(k * batch), "loss": float(losses[k].mean()), "above": float(apart.mean()),
                 "above_se": float(apart.std(ddof=1) / BINS**0.5),
                 "val_loss": [r["val/loss"] for r in rows[k] if "val/loss" in r][-1],
                 "steps": sum("train/loss" in r for r in rows[k]), "within": bool(apart.mean() <= tolerance)}
        branches.append(entry)
    for entry in branches:  # the largest of an unbroken row from k = 1 on
        if entry["factor"] >= 1:
            if not entry["within"]:
                break
            largest = entry
    noise, row = reader.newest_noise(base_steps)
    found = noise and {**dataclasses.asdict(noise), "tokens": row["tokens"]}
    return {"at": start, "window": window, "tolerance": tolerance, "batch_size": batch, "branches": branches,
            "largest_within": largest["batch_size"], "first_beyond": next(
                (e["batch_size"] for e in branches if e["factor"] > largest["factor"]), None), "noise_scale": found}


def table(result):
    rows = [("k", "batch", "steps", "loss", "above k=1", "validation", "")]
    for e in result["branches"]:
        rows.append((f"{e['factor']:g}", str(e["batch_size"]), str(e["steps"]), f"{e['loss']:.4f}",
                     f"{e['above']:+.4f} +- {e['above_se']:.4f}", f"{e['val_loss']:.4f}",
                     "within" if e["within"] else f"beyond {result['tolerance']:g}"))
    return (f"Training loss over the last quarter of the window, {log.count(result['window'])} tokens from "
            f"{log.count(result['at'])} on:\n{style.table(rows)}")


def verdict(result):
    low, high, noise = result["largest_within"], result["first_beyond"], result["noise_scale"]
    lines = [f"Critical batch by experiment: {f'between {low} and {high}' if high else f'{low} or more'} sequences, "
             f"{low / result['batch_size']:g} times the run's batch is within {result['tolerance']:g} nats."]
    lines.append("Noise scale of the same run: undetermined." if noise is None else
                 "Noise scale of the same run ({of}): {value:.3g} sequences (95% interval {low:.3g} to {high:.3g})."
                 .format(**noise))
    if any(e["above_se"] > result["tolerance"] / 2 for e in result["branches"]):
        lines.append("Some differences are as uncertain as the tolerance: a longer --window would be surer.")
    return "\n".join(lines)


def draw(result, rows, path):
    figure, (loss_ax, batch_ax) = style.panels(2, 11, 4.6)
    for color, (k, branch_rows) in zip(style.COLORS * 9, rows.items()):
        tokens, loss = (np.array(v, dtype=float) for v in reader.series(branch_rows, "train/loss"))
        smooth = reader.smoothed_loss(tokens - result["at"], loss, result["window"] / 10)
        style.line(loss_ax, tokens, smooth, color=color, label=f"k = {k:g}")
    style.dress(loss_ax, "Training loss of the branches, smoothed", "tokens", "counts")
    sizes, above, errors = ([e[key] for e in result["branches"]] for key in ("batch_size", "above", "above_se"))
    batch_ax.errorbar(sizes, above, 2 * np.array(errors), fmt="o-", color=style.COLORS[0], capsize=3, label="loss above k = 1")
    batch_ax.axhline(result["tolerance"], color="#888888", ls=":", label="tolerance")
    if noise := result["noise_scale"]:
        batch_ax.axvspan(noise["low"], noise["high"], color=style.COLORS[1], alpha=0.2, lw=0)
        batch_ax.axvline(noise["value"], color=style.COLORS[1], ls="--", label="noise scale, 95% interval")
    style.dress(batch_ax, "Loss above k = 1 (nats per token)", "batch size (sequences)", "doublings")
    style.save(figure, path)
