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
import schedule
from configurator import ConfigError
from plots import compare, style
from plots.compare import cell
from sweeps import common, jobs
from system import files
from trainer import batches, hardware, log, reader, start, tradeoff

UNSPLIT = ("cos_attn", "spectral_qkv", "batch_steps", "wandb_tags", "wandb_notes")  # a comma belongs to the value
NO_LIST = ("out_dir", "resume", "branch_from", "device", "wandb_project", "wandb_run_name", "wandb_entity", "wandb_group",
           "wandb_job_type")


def arguments(parser):
    common.arguments(parser)
    jobs.arguments(parser)


def runs(args):
    base, wanted, swept = grid(args.config, args.rest)
    vocab_size = batches.Dataset(base.dataset, base.block_size).vocab_size  # fails here rather than in every run
    folder = os.path.join(base.out_dir, "sweep", "runs")
    group = jobs.Group(wanted, folder, common.number(args, "jobs", 1, int), not args.in_process)
    if args.dry_run:
        print(dry_run(group, common.speed(base, vocab_size)))
        return 0

    def write():
        left = group.left()
        finished = {name: c for name, c in group.wanted.items() if name not in left}
        result = result_of(finished, swept, base, args) if finished else None
        if result:
            files.write_json(os.path.join(folder, common.NAME), {
                "command": args.asked, "settings": settings_of(base, swept), "swept": swept,
                "machine": common.machine(hardware.pick_device(base.device)), **result})
        return result
    group.do(after_each=write)
    if result := write():
        finished = {name: group.wanted[name] for r in result["rows"] for name in r["runs"]}
        words = "\n".join([table(result, swept), *words_of(result["tradeoff"])])
        common.finish(folder, result["result"], words, lambda path: draw(finished, result, swept, path))
    for name, why in group.failed.items():
        print(f"failed: {name}: {why}")
    if group.failed:
        print("the same command tries them again")
    return 1 if group.failed else 0


def grid(config_file, rest):
    """(config of what is not swept, {run name: Config}, {swept key: values}), all checked."""
    choices = {}
    for arg in rest:
        key, eq, text = arg.removeprefix("--").partition("=")
        if not (arg.startswith("--") and eq and key in configurator.FIELDS) or key in UNSPLIT:
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
        config = start.parse([*files, *options])
        if config.lr_scaling != "none" and not config.lr_reference_batch:
            config = dataclasses.replace(config, lr_reference_batch=own_batch)
        config = dataclasses.replace(config, wandb_log=config.wandb_log or bool(config.wandb_group))
        for key in swept:
            if getattr(config, key) not in values[key]:
                values[key].append(getattr(config, key))
        wanted["-".join(f"{key}{common.short(getattr(config, key))}" for key in swept) or "run"] = config
    return config, wanted, values


def settings_of(base, swept):
    free = (configurator.free_keys() - {"micro_batch_size"}) | set(swept)
    return {k: common.as_json(v) for k, v in vars(base).items() if k not in free}


def dry_run(group, rate):
    left = group.left()
    lines = [f"{len(group.wanted)} runs in {group.folder}, {len(left)} to do:"]
    lines += [f"  {name}: {log.count(left[name]) + ' tokens' if name in left else 'done'}, learning rate "
              f"{rate_at_end(config):.3g} at batch {config.batch_size}" for name, config in group.wanted.items()]
    total = sum(left.values())
    return "\n".join([*lines, f"about {log.duration(total / rate)} for {log.count(total)} tokens, a guess; --jobs=N shares the "
                              "cores, which helps little where one run keeps them busy"])


def result_of(finished, swept, base, args):
    """Rows over seeds, the best of them, and what that says."""
    groups = {}
    for name, config in finished.items():
        key = tuple((k, getattr(config, k)) for k in swept if k != "seed")
        groups.setdefault(key, []).append((name, config))
    rows = []
    for key, members in groups.items():
        found = [final_values(log.read(config.out_dir)) for _, config in members]
        config = members[0][1]
        rows.append({**dict(key), "runs": [name for name, _ in members], "seeds": [c.seed for _, c in members],
                     "batch_size": config.batch_size, "lr": rate_at_end(config),
                     **{k: compare.spread([f[k] for f in found]) for k in found[0] if k != "noise_scale_key"},
                     "noise_scale_key": one_of([f["noise_scale_key"] for f in found])})
    rows.sort(key=lambda r: tuple((str(type(r[k])), r[k]) for k in swept if k != "seed"))
    known = [r for r in rows if r["val_loss"]]
    if not known:
        return {"rows": rows, "tradeoff": None,
                "result": {"take": None, "says": ["No run has a finite validation loss."], "next": []}}
    best = min(known, key=lambda r: r["val_loss"]["mean"])
    take = {k: best[k] for k in swept if k != "seed"}
    if base.lr_scaling != "none":
        take["lr_reference_batch"] = base.lr_reference_batch
    lines = common.what_next({}, "train.py", args, *(f"--{k}={v}" for k, v in take.items()), without=(*take, "seed"))
    return {"rows": rows, "tradeoff": tradeoff_of(known, finished, swept, base),
            "result": {"take": take, "says": verdict(known, best, swept, base), "next": lines}}


def tradeoff_of(rows, finished, swept, base):
    """The curve through tokens and steps over batch sizes, each at the best of its other settings, to the lowest loss that all
    of these reached. None where the batch was not swept."""
    if "batch_size" not in swept:
        return None
    others = [k for k in swept if k not in ("batch_size", "seed") and configurator.FIELDS[k].metadata["change"] == "fixed"]
    if base.batch_schedule != "constant" or "batch_schedule" in swept:
        return {"refused": "a curve takes runs of constant batches, --batch_schedule=constant", "predictions": []}
    if others:
        return {"refused": f"the runs differ in more than how they were trained ({', '.join(others)})", "predictions": []}
    best = {}
    for row in sorted(rows, key=lambda r: r["val_loss"]["mean"], reverse=True):
        best[row["batch_size"]] = row
    names = [name for row in best.values() for name in row["runs"]]
    logs = {name: log.read(finished[name].out_dir) for name in names}
    source = loss_source(logs.values())
    ways = {name: reader.curve(own, source) for name, own in logs.items()}
    loss = float(max(way["loss"].min() for way in ways.values()))
    reached = [(finished[name].out_dir, reader.reach(way, loss)) for name, way in ways.items()]
    found = tradeoff.of_runs([(folder, at["steps"], at["tokens"]) for folder, at in reached if at], base.block_size)
    return {**found, "loss": loss, "source": source}


def loss_source(logs):
    """"val" where each log has evaluations enough for a curve, else "train"."""
    return "val" if min(sum(r.get("val/loss") is not None for r in own) for own in logs) >= 4 else "train"


def words_of(found):
    if found is None:
        return []
    kind = {"val": "validation", "train": "smoothed training", None: ""}[found.get("source")]
    return tradeoff.words(found, f"a {kind} loss of {found.get('loss', 0):.4f}")


def verdict(known, best, swept, base):
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
    return says


def one_of(keys):
    """What all have, or None."""
    return keys[0] if len(set(keys)) == 1 else None


def rate_at_end(config):
    """The peak learning rate at the last batch."""
    return config.learning_rate * schedule.coupled(config.batch_size, config)[0]


def final_values(rows):
    steps = [r for r in rows if "train/loss" in r]
    val = [] if log.died(rows) else [r["val/loss"] for r in rows if r.get("val/loss") is not None]
    late = [r["train/loss"] for r in steps[-max(1, len(steps) // 10):] if r["train/loss"] is not None]
    noise = reader.noise_of(steps[-1])
    return {"val_loss": val[-1] if val else None, "train_loss": float(np.mean(late)) if late and val else None,
            "tokens": steps[-1]["tokens"], "steps": steps[-1]["step"], "seconds": steps[-1]["seconds"],
            "noise_scale": noise and noise.value, "noise_scale_key": noise and reader.source(steps[-1])}


def label(row, swept):
    return ", ".join(f"{k} {common.short(row[k])}" for k in swept if k != "seed") or "the run"


def table(result, swept):
    keys = [k for k in swept if k != "seed"]
    rate = ["learning rate"] if "learning_rate" not in keys else []
    heads, about = common.noise_columns(r["noise_scale_key"] for r in result["rows"])
    cells = [(*keys, *rate, "runs", "validation loss", "train, last tenth", "tokens", "steps", "seconds", *heads.values())]
    for r in result["rows"]:
        cells.append((*(common.short(r[k]) for k in keys), *(f"{r['lr']:.3g}" for _ in rate),
                      str(len(r["runs"])), cell(r["val_loss"], "{:.4f}".format, "not finite"),
                      cell(r["train_loss"], "{:.4f}".format), cell(r["tokens"], log.count), cell(r["steps"], log.count),
                      cell(r["seconds"], "{:.0f}".format),
                      *(cell(r["noise_scale"] if r["noise_scale_key"] == key else None, "{:.3g}".format) for key in heads)))
    return "\n".join([style.table(cells), *about, ""])


def draw(finished, result, swept, path):
    """The picture of plot.py --compare: each row of the table with a finite loss is a group of runs over seeds."""
    loaded = {label(row, swept): [log.read(finished[name].out_dir) for name in row["runs"]] for row in result["rows"]
              if row["val_loss"]}
    if not loaded:
        return
    source = loss_source([rows for runs in loaded.values() for rows in runs])
    compare.draw({**compare.comparison(loaded, source), "tradeoff": result["tradeoff"]}, loaded, path)
