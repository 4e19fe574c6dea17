"""
Questions that take several trials or runs to answer, before a long run and during it.

    python sweep.py memory config/x.py                 # which micro-batch: peak memory and speed, each trial a process
    python sweep.py throughput config/x.py             # which accumulation: speed, share of the update, memory
    python sweep.py quality config/x.py --steps=200    # which effective batch: where more accumulation stops paying
    python sweep.py runs config/x.py --batch_size=16,32,64 --learning_rate=1e-3,2e-3 --seed=0,1,2 --jobs=2
    python sweep.py branch out/run --at 20M --factors 1,2,4,8    # the critical batch size by experiment, at 20M tokens

--key=value as for train.py. --dry_run says what would be run and how long it might take. Each leaves sweep.json and sweep.png
in <out_dir>/sweep/<command>, prints a table, what it says, and what to run next. Ctrl-C or a kill loses the trial at work (a
run goes on from its checkpoint): the same command does what is missing. memory and throughput are in sweep_micro.py, quality
in sweep_quality.py, runs in sweep_grid.py; one trial is trial.py.

branch (Merrill et al. 2025, arXiv 2505.23971): take the run to --at tokens, then go on from there several times, with k
times its batch and sqrt(k) times its learning rate, for a window of tokens. The largest k whose loss stays within a
tolerance of k = 1 is the critical batch size, found without theory; the noise scale's prediction from the same run stands
beside it. All branches read the same examples in the same order, so their losses are compared example for example.
Everything is kept in out/run/branch/<at>: asking again only runs what is missing.
"""

import argparse
import os
import shlex
import shutil
import signal
import sys

import numpy as np

import configurator
import plot
import schedule
from configurator import ConfigError
from sweeps import grid as sweep_grid
from sweeps import micro as sweep_micro
from sweeps import quality as sweep_quality
from sweeps.jobs import read_config, run_all, run_training, table, tokens_done
from trainer import checkpoint, log, noise

# -- branch

def branch_arguments(parser):
    parser.add_argument("run", help="a run folder of train.py")
    parser.add_argument("--at", required=True, help="tokens at which to branch, e.g. 20M")
    parser.add_argument("--factors", default="1,2,4,8", help="multiples of the run's batch at that point")
    parser.add_argument("--window", help="tokens to train each branch for; default: a tenth of the run, and at least 32 "
                                         "steps of the largest batch")
    parser.add_argument("--tolerance", type=float, default=0.01, help="nats per token that a loss may be above that of k = 1")
    parser.add_argument("--jobs", type=int, default=1, help="branches at a time")


def branch(args):
    config = read_config(args.run)
    at, factors = whole("--at", args.at), parse_factors(args.factors)
    folder = os.path.join(args.run, "branch", str(at))
    base = os.path.join(folder, "base")
    if not 0 < at < config.max_tokens:
        raise ConfigError(f"--at={args.at}: the run goes from 0 to {config.max_tokens} tokens")
    if tokens_done(base) < at:
        print(f"taking the run to {log.count(at)} tokens in {base}", flush=True)
        prepare_base(args.run, base, at)
        run_training(config, out_dir=base, stop_tokens=at, resume="auto")

    steps = [r for r in log.read(base) if "train/loss" in r]
    start, batch = steps[-1]["tokens"], steps[-1]["batch_size"]
    for k in factors:
        if (k * batch) % config.micro_batch_size:
            raise ConfigError(f"--factors: {k:g} x {batch} is not whole micro-batches of {config.micro_batch_size}")
    largest = int(max(factors) * batch) * config.block_size
    window = whole("--window", args.window) if args.window else max(config.max_tokens // 10, 32 * largest)
    if start + window > config.max_tokens:
        raise ConfigError(f"--window={window}: the run has only {config.max_tokens - start} tokens left after --at={args.at}; "
                          "give a smaller one, or smaller --factors")
    if window < 8 * largest:
        raise ConfigError(f"--window={window}: gives fewer than 8 steps of {largest} tokens, the largest batch: nothing to see")

    jobs = []
    for k in factors:
        out, changes = os.path.join(folder, f"x{k:g}"), branch_changes(config, batch, k)
        if tokens_done(out) < start + window:
            print(f"branch x{k:g}: batch {changes['batch_size']}, learning rate x {k**0.5:.3g}, {log.count(window)} tokens",
                  flush=True)
            jobs.append(lambda out=out, changes=changes: run_training(
                config, out_dir=out, branch_from=base, stop_tokens=start + window, resume="auto", **changes))
    run_all(jobs, args.jobs)

    rows = {k: log.read(os.path.join(folder, f"x{k:g}")) for k in factors}
    result = branch_result(rows, steps, start, window, batch, args.tolerance)
    checkpoint.write_json(os.path.join(folder, "branch.json"), result)
    draw_branch(result, rows, os.path.join(folder, "branch.png"))
    print(branch_table(result))
    print(f"\nPicture: {os.path.join(folder, 'branch.png')}    Numbers: {os.path.join(folder, 'branch.json')}")
    return 0


def whole(option, text):
    try:
        return schedule.parse_count(text)
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
    if tokens_done(base) < 0 <= tokens_done(run) <= at:
        os.makedirs(base, exist_ok=True)
        for name in (log.NAME, checkpoint.NAME):  # the checkpoint last: with it, the base counts as begun
            shutil.copyfile(os.path.join(run, name), os.path.join(base, name))


def branch_changes(config, batch, k):
    """What a branch at k x batch sets: sqrt(k) on the learning rate in force at `batch`; beta2 and weight decay as they are
    at `batch`, and on from there by the run's own rules."""
    lr_factor, beta2, weight_decay = schedule.coupled(batch, config)
    return dict(batch_schedule="constant", batch_size=int(k * batch), lr_scaling="sqrt", lr_reference_batch=batch,
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


def branch_result(rows, base_steps, start, window, batch, tolerance):
    """The verdict as plain values; rows {k: log of the branch}."""
    losses = {k: window_losses(r, start, window) for k, r in rows.items()}
    table, largest = [], None
    for k in sorted(losses):
        apart = losses[k] - losses[1.0]
        entry = {"factor": k, "batch_size": int(k * batch), "loss": float(losses[k].mean()), "above": float(apart.mean()),
                 "above_se": float(apart.std(ddof=1) / BINS**0.5),
                 "val_loss": [r["val/loss"] for r in rows[k] if "val/loss" in r][-1],
                 "steps": sum("train/loss" in r for r in rows[k]), "within": bool(apart.mean() <= tolerance)}
        table.append(entry)
    for entry in table:  # the largest of an unbroken row from k = 1 on
        if entry["factor"] >= 1:
            if not entry["within"]:
                break
            largest = entry
    key = noise.shown(base_steps)
    known = next((r for r in reversed(base_steps) if noise.noise(r, key)), None)
    found = known and dict(zip(("value", "low", "high"), noise.noise(known, key)), of=noise.NOISE[key], tokens=known["tokens"])
    return {"at": start, "window": window, "tolerance": tolerance, "batch_size": batch, "branches": table,
            "largest_within": largest["batch_size"], "first_beyond": next(
                (e["batch_size"] for e in table if e["factor"] > largest["factor"]), None), "noise_scale": found}


def branch_table(result):
    rows = [("k", "batch", "steps", "loss", "above k=1", "validation", "")]
    for e in result["branches"]:
        rows.append((f"{e['factor']:g}", str(e["batch_size"]), str(e["steps"]), f"{e['loss']:.4f}",
                     f"{e['above']:+.4f} +- {e['above_se']:.4f}", f"{e['val_loss']:.4f}",
                     "within" if e["within"] else f"beyond {result['tolerance']:g}"))
    lines = ["", f"Training loss over the last quarter of the window, {log.count(result['window'])} tokens from "
                 f"{log.count(result['at'])} on:"]
    lines.append(table(rows))
    low, high = result["largest_within"], result["first_beyond"]
    lines += ["", f"Critical batch by experiment: {f'between {low} and {high}' if high else f'{low} or more'} sequences, "
                  f"{low / result['batch_size']:g} times the run's batch is within {result['tolerance']:g} nats."]
    found = result["noise_scale"]
    lines.append("Noise scale of the same run: undetermined." if found is None else
                 "Noise scale of the same run ({of}): {value:.3g} sequences (95% interval {low:.3g} to {high:.3g})."
                 .format(**found))
    if any(e["above_se"] > result["tolerance"] / 2 for e in result["branches"]):
        lines.append("Some differences are as uncertain as the tolerance: a longer --window would be surer.")
    return "\n".join(lines)


def draw_branch(result, rows, path):
    plt = plot.pyplot()
    figure, (loss_ax, batch_ax) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for color, (k, branch_rows) in zip(plot.COLORS * 9, rows.items()):
        tokens, loss = (np.array(v, dtype=float) for v in plot.series(branch_rows, "train/loss"))
        smooth = plot.smoothed_loss(tokens - result["at"], loss, result["window"] / 10)
        loss_ax.plot(tokens, smooth, color=color, label=f"k = {k:g}")
    loss_ax.set_title("Training loss of the branches, smoothed")
    loss_ax.set_xlabel("tokens")
    loss_ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    loss_ax.legend()
    table = result["branches"]
    batch_ax.errorbar([e["batch_size"] for e in table], [e["above"] for e in table], [2 * e["above_se"] for e in table],
                      fmt="o-", color=plot.COLORS[0], capsize=3, label="loss above k = 1")
    batch_ax.axhline(result["tolerance"], color="#888888", ls=":", label="tolerance")
    found = result["noise_scale"]
    if found:
        batch_ax.axvspan(found["low"], found["high"], color=plot.COLORS[1], alpha=0.2, lw=0)
        batch_ax.axvline(found["value"], color=plot.COLORS[1], ls="--", label="noise scale, 95% interval")
    batch_ax.set_xscale("log", base=2)
    batch_ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    batch_ax.set_title("Loss above k = 1 (nats per token)")
    batch_ax.set_xlabel("batch size (sequences)")
    batch_ax.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- one entry per question: what it does, its arguments, the function that answers it
COMMANDS = {
    "memory": ("the largest and the best micro-batch", sweep_micro.memory_arguments, sweep_micro.memory),
    "throughput": ("the best accumulation", sweep_micro.throughput_arguments, sweep_micro.throughput),
    "quality": ("the largest batch whose gradient still gains", sweep_quality.arguments, sweep_quality.quality),
    "runs": ("a grid of full runs", sweep_grid.arguments, sweep_grid.runs),
    "branch": ("the critical batch size by experiment", branch_arguments, branch)}


class Parser(argparse.ArgumentParser):
    def error(self, message):
        configurator.die(f"{message} (sweep.py {self.prog.split()[-1]} --help lists the options)")


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    parser = Parser(prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, arguments, _) in COMMANDS.items():
        arguments(commands.add_parser(name, help=what, allow_abbrev=False))
    args, rest = parser.parse_known_args(argv)
    args.rest, args.asked = rest, shlex.join(["python", "sweep.py", *argv])

    def stop(*_):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGTERM, stop)
    try:
        if args.command == "branch" and rest:
            raise ConfigError(f"command line: {rest[0]}: unknown option of branch")
        return COMMANDS[args.command][2](args)
    except ConfigError as e:
        configurator.die(e)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", flush=True)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
