"""
sweep.py runs: a grid of full runs of train.py.

    python sweep.py runs config/x.py --batch_size=16,32,64 --learning_rate=1e-3,2e-3 --seed=0,1,2 --jobs=2
    python sweep.py runs config/x.py --batch_size=16,32,64 --lr_scaling=sqrt --wandb_group=batches

Any key may have a list (but batch_steps and the tuples, whose values have commas themselves): every combination is one run, in
a folder of its own under <out_dir>/sweep/runs. Finished runs are not run again, broken ones go on from their checkpoint.
With lr_scaling the learning rate follows the batch by that rule; it is then meant for lr_reference_batch, or, where that is
0, for the batch_size of the config file. Runs that differ in the seed alone are one row of the table.
"""

import dataclasses
import itertools
import os

import numpy as np

import configurator
import plot
import schedule
from configurator import ConfigError
from sweeps import jobs
from sweeps import micro as sweep_micro
from trainer import batches, checkpoint, hardware, log, noise

WHOLE = ("cos_attn", "spectral_qkv", "batch_steps")  # a comma belongs to the value
NO_LIST = ("out_dir", "resume", "branch_from", "device", "wandb_project", "wandb_run_name")


def arguments(parser):
    parser.add_argument("config", nargs="?", help="a config file; --key=value or --key=value,value,... on top of it")
    parser.add_argument("--jobs", default="1", help="runs at a time, each on its share of the cores")
    parser.add_argument("--wandb_group", help="log all runs to wandb, in this group")
    parser.add_argument("--in_process", action="store_true", help="for runs of seconds: no process for each")
    parser.add_argument("--dry_run", action="store_true", help="say what would be run and how long it might take")


def runs(args):
    base, wanted, swept = grid(args.config, args.rest, wandb=bool(args.wandb_group))
    batches.Dataset(base.dataset, base.block_size)  # fails here rather than in every run
    folder = os.path.join(base.out_dir, "sweep", "runs")
    if args.wandb_group and args.in_process:
        raise ConfigError("--wandb_group and --in_process: a group needs a process for each run; leave out --in_process")
    env = {"WANDB_RUN_GROUP": args.wandb_group} if args.wandb_group else None
    group = jobs.Group(wanted, folder, sweep_micro.number(args, "jobs", 1, int), not args.in_process, env)
    if args.dry_run:
        print(dry_run(group, base, swept))
        return 0

    def summarise():
        finished = {name: c for name, c in group.wanted.items() if name not in group.missing()}
        return result_of(finished, swept, base, args) if finished else None

    def write():
        result = summarise()
        if result:
            checkpoint.write_json(os.path.join(folder, jobs.NAME), {
                "command": args.asked, "settings": settings_of(base, swept), "swept": swept,
                "machine": sweep_micro.machine(hardware.pick_device(base.device)), **result})
        return result
    group.do(after_each=write)
    result = write()
    if result:
        picture = os.path.join(folder, "sweep.png")
        draw({name: group.wanted[name] for r in result["rows"] for name in r["runs"]}, result, swept, picture)
        print("\n" + runs_table(result, swept), *result["result"]["says"],
              f"Picture: {picture}    Numbers: {os.path.join(folder, jobs.NAME)}", "", *result["result"]["next"], sep="\n")
    for name, why in group.failed.items():
        print(f"failed: {name}: {why}")
    if group.failed:
        print("the same command tries them again")
    return 1 if group.failed else 0


def grid(config_file, rest, wandb=False):
    """(config of what is not swept, {run name: Config}, {swept key: values}), all checked."""
    choices = {}
    for arg in rest:
        key, eq, text = arg.removeprefix("--").partition("=")
        if not (arg.startswith("--") and eq and key in configurator.FIELDS) or key in WHOLE:
            choices[arg] = [arg]
        elif "," in text and key in NO_LIST:
            raise ConfigError(f"command line: {arg}: {key} is one for the whole sweep, not a list")
        else:
            words = list(dict.fromkeys(word.strip() for word in text.split(",")))
            if "" in words:
                raise ConfigError(f"command line: {arg}: an empty value in the list")
            choices[key] = [f"--{key}={word}" for word in words]
    swept = [key for key, options in choices.items() if len(options) > 1]
    files = [config_file] if config_file else []
    own_batch = configurator.read_file(config_file or configurator.DEFAULT_FILE)["batch_size"]
    wanted, values = {}, {key: [] for key in swept}
    for options in itertools.product(*choices.values()):
        config = configurator.parse([*files, *options])
        if config.lr_scaling != "none" and not config.lr_reference_batch:
            config = dataclasses.replace(config, lr_reference_batch=own_batch)
        config = dataclasses.replace(config, wandb_log=config.wandb_log or wandb)
        for key in swept:
            if getattr(config, key) not in values[key]:
                values[key].append(getattr(config, key))
        wanted["-".join(f"{key}{short(getattr(config, key))}" for key in swept) or "run"] = config
    return config, wanted, values


def short(value):
    return f"{value:g}" if isinstance(value, float) else str(value).replace("/", "_")


def settings_of(base, swept):
    free = (configurator.free_keys() - {"micro_batch_size"}) | set(swept)
    return {k: jobs.plain(v) for k, v in vars(base).items() if k not in free}


def dry_run(group, base, swept):
    device = hardware.pick_device(base.device)
    vocab_size = batches.Dataset(base.dataset, base.block_size).vocab_size
    rate, known = sweep_micro.speed(base, device, hardware.pick_dtype(base.dtype, device), vocab_size)
    missing = group.missing()
    lines = [f"{len(group.wanted)} runs in {group.folder}, {len(missing)} to do:"]
    left = 0
    for name, config in group.wanted.items():
        tokens = config.max_tokens - max(0, jobs.tokens_done(config.out_dir)) if name in missing else 0
        left += tokens
        lines.append(f"  {name}: {log.count(tokens) + ' tokens' if name in missing else 'done'}, learning rate "
                     f"{rate_at_end(config):.3g} at batch {config.batch_size}")
    return "\n".join([*lines, f"about {log.duration(left / rate)} for {log.count(left)} tokens, {known}; --jobs=N shares the "
                              "cores, which helps little where one run keeps them busy"])


def result_of(finished, swept, base, args):
    """Rows over seeds, the best of them, and what that says."""
    groups = {}
    for name, config in finished.items():
        key = tuple((k, getattr(config, k)) for k in swept if k != "seed")
        groups.setdefault(key, []).append((name, config))
    rows = []
    for key, members in groups.items():
        found = [end_of(log.read(config.out_dir)) for _, config in members]
        config = members[0][1]
        rows.append({**dict(key), "runs": [name for name, _ in members], "seeds": [c.seed for _, c in members],
                     "batch_size": config.batch_size, "lr": rate_at_end(config),
                     **{k: plot.spread([f[k] for f in found]) for k in found[0]}})
    rows.sort(key=lambda r: tuple((str(type(r[k])), r[k]) for k in swept if k != "seed"))
    known = [r for r in rows if r["val_loss"]]
    if not known:
        return {"rows": rows, "result": {"take": None, "says": ["No run has a finite validation loss."], "next": []}}
    best = min(known, key=lambda r: r["val_loss"]["mean"])
    says = [f"Lowest validation loss at the end: {best['val_loss']['mean']:.4f}, {label(best, swept)}."]
    near = [r for r in known if r is not best and r["val_loss"]["low"] <= best["val_loss"]["high"]]
    if best["val_loss"]["runs"] < 2:
        says.append("One seed each: differences as small as those between seeds mean nothing; --seed=0,1,2 tells how small.")
    elif near:
        says.append(f"Not to be told from it by these seeds: {'; '.join(label(r, swept) for r in near)}.")
    else:
        says.append("It lies below all others in every seed.")
    if "batch_size" in swept and "learning_rate" not in swept and base.lr_scaling == "none":
        says.append("All batches had the same learning rate; a batch size wants its own: --learning_rate=... or --lr_scaling.")
    take = {k: best[k] for k in swept if k != "seed"}
    if base.lr_scaling != "none":
        take["lr_reference_batch"] = base.lr_reference_batch
    return {"rows": rows, "result": {"take": take, "says": says, "next": [
        "Next:", jobs.command("train.py", args, *(f"--{k}={v}" for k, v in take.items()), without=(*take, "seed"))]}}


def rate_at_end(config):
    """The peak learning rate at the last batch."""
    return config.learning_rate * schedule.coupled(config.batch_size, config)[0]


def end_of(rows):
    steps = [r for r in rows if "train/loss" in r]
    val = [r["val/loss"] for r in rows if r.get("val/loss") is not None]
    late = [r["train/loss"] for r in steps[-max(1, len(steps) // 10):] if r["train/loss"] is not None]
    found = noise.noise(steps[-1], noise.shown(steps))
    return {"val_loss": val[-1] if val else None, "train_loss": float(np.mean(late)) if late else None,
            "tokens": steps[-1]["tokens"], "steps": steps[-1]["step"], "seconds": steps[-1]["seconds"],
            "noise_scale": found and found[0]}


def label(row, swept):
    return ", ".join(f"{k} {short(row[k])}" for k in swept if k != "seed") or "the run"


def runs_table(result, swept):
    def cell(value, show):
        if value is None:
            return "-"
        return show(value["mean"]) + (f" ({show(value['low'])}-{show(value['high'])})" if value["low"] != value["high"] else "")
    keys = [k for k in swept if k != "seed"]
    rate = ["learning rate"] if "learning_rate" not in keys else []
    cells = [(*keys, *rate, "runs", "validation loss", "train, last tenth", "tokens", "steps", "seconds", "noise scale")]
    for r in result["rows"]:
        cells.append((*(short(r[k]) for k in keys), *(f"{r['lr']:.3g}" for _ in rate),
                      str(len(r["runs"])), cell(r["val_loss"], "{:.4f}".format), cell(r["train_loss"], "{:.4f}".format),
                      cell(r["tokens"], log.count), cell(r["steps"], log.count), cell(r["seconds"], "{:.0f}".format),
                      cell(r["noise_scale"], "{:.3g}".format)))
    return jobs.table(cells) + "\n"


def draw(finished, result, swept, path):
    """Loss over tokens, steps and seconds, one colour for each row; final loss against the batch, or the first key swept."""
    plt = plot.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.2), layout="constrained")
    logs = {name: log.read(config.out_dir) for name, config in finished.items()}
    source = "val" if min(sum(r.get("val/loss") is not None for r in rows) for rows in logs.values()) >= 4 else "train"
    shades = plt.get_cmap("viridis")
    rows = result["rows"]
    tops, lows = [], []
    for i, row in enumerate(rows):
        color = plot.COLORS[i] if len(rows) <= len(plot.COLORS) else shades(0.95 * i / len(rows))
        for j, name in enumerate(row["runs"]):
            curve = plot.curve(logs[name], source)
            tops.append(curve["loss"][max(1, len(curve["loss"]) // 10):].max(initial=0))
            lows.append(curve["loss"].min())
            for ax, measure in zip(axes.flat, plot.MEASURES):
                ax.plot(curve[measure], curve["loss"], color=color, lw=1.4, alpha=0.85, label=None if j else label(row, swept))
    what = "Validation loss" if source == "val" else "Training loss, smoothed"
    for ax, measure in zip(axes.flat, plot.MEASURES):
        ax.set_title(f"{what} over {measure}")
        ax.set_xlabel(measure)
        ax.set_ylim(min(lows) - 0.05 * (max(tops) - min(lows)), max(tops) + 0.05 * (max(tops) - min(lows)))
        ax.xaxis.set_major_formatter(lambda v, _: log.count(v))
    axes.flat[0].legend(fontsize=9)
    end = axes.flat[3]
    keys = [k for k in swept if k != "seed"]
    x = "batch_size" if "batch_size" in keys or not keys else keys[0]
    others = [k for k in keys if k != x]
    lines = {}
    for row in rows:
        if row["val_loss"]:
            lines.setdefault(tuple(row[k] for k in others), []).append(row)
    for i, (key, members) in enumerate(lines.items()):
        mean, low, high = (np.array([r["val_loss"][part] for r in members]) for part in ("mean", "low", "high"))
        where = [r[x] if isinstance(r[x], (int, float)) and not isinstance(r[x], bool) else str(r[x]) for r in members]
        end.errorbar(where, mean, [mean - low, high - mean], fmt="o-", capsize=3, color=plot.COLORS[i % len(plot.COLORS)],
                     label=", ".join(f"{k} {short(v)}" for k, v in zip(others, key)) or None)
        if all(isinstance(v, (int, float)) and v > 0 for v in where):
            end.set_xscale("log", base=2)
            end.set_xticks(sorted(set(where) | set(end.get_xticks() if i else [])))
            end.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
            end.xaxis.set_minor_locator(plt.NullLocator())
    end.set_title("Validation loss at the end (range of seeds)")
    end.set_xlabel({"batch_size": "batch size (sequences)"}.get(x, x))
    if others:
        end.legend(fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
