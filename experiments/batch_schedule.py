"""
Does a batch that follows the noise scale pay? (Gray et al. 2024, arXiv 2411.00999, Figure 9)

    python experiments/batch_schedule.py                   # about two hours on two cores, two runs at a time
    python experiments/batch_schedule.py --seeds 1         # a first look
    python experiments/batch_schedule.py --config config/wikitext2.py

Groups, each over all seeds:
    fixed      constant at the config's batch_size and learning rate
    constant N each of four batch sizes with the best of three learning rates (by final validation loss, first seed)
    linear     the paper's schedule, batch_size_start to batch_size
    gns        the controller, between the same two
All read the same number of tokens and decay their learning rate over them. linear and gns keep the config's learning rate:
only the constant batches are tuned. Finished runs are not run again, broken ones go on. Runs are in out/batch_schedule,
numbers and picture in results/batch_schedule.json and .png.
"""

import argparse
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import checkpoint  # noqa: E402
import configurator  # noqa: E402
import hardware  # noqa: E402
import log  # noqa: E402
import plot  # noqa: E402
import sweep  # noqa: E402

PAPER = "The paper: a linear batch schedule, guided by the noise scale, reached the fixed run's loss in 18% less training time."
TINY = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, micro_batch_size=4, batch_size=8, batch_size_start=4,
            max_tokens=1280, warmup_tokens=128, gns_half_life_tokens=300, gns_calibrate_tokens=0, eval_iters=8, log_interval=2,
            checkpoint_tokens=0, device="cpu", dtype="float32", compile="False")


def settings(config):
    """(four batch sizes, three factors on the learning rate) of the constant runs: batch_size, double, half, a quarter; more
    doublings where a micro-batch does not allow the small ones."""
    micro = config.micro_batch_size
    sizes = {max(config.batch_size // d // micro, 1) * micro for d in (1, 2, 4)}
    while len(sizes) < 4:
        sizes.add(2 * max(sizes))
    return sorted(sizes), [0.5, 1.0, 2.0]


class Runs:
    """Runs of one experiment by name, with their changes to the config."""

    def __init__(self, config, folder, at_once):
        self.config, self.folder, self.at_once = config, folder, at_once

    def path(self, name, seed):
        return os.path.join(self.folder, f"{name}_seed{seed}")

    def do(self, wanted):
        """wanted [(name, seed, changes)]: run those that are not finished yet."""
        jobs = []
        for name, seed, changes in wanted:
            out = self.path(name, seed)
            if sweep.tokens_done(out) < self.config.max_tokens:
                jobs.append(lambda out=out, seed=seed, changes=changes: self.one(out, seed, changes))
        print(f"{len(jobs)} of {len(wanted)} runs to do, {self.at_once} at a time", flush=True)
        sweep.run_all(jobs, self.at_once)

    def one(self, out, seed, changes):
        sweep.run_training(self.config, out_dir=out, seed=seed, resume="auto", **changes)
        val = [r["val/loss"] for r in log.read(out) if "val/loss" in r]
        print(f"{out}: validation loss {val[-1]:.4f}", flush=True)

    def final_loss(self, name, seed):
        return [r["val/loss"] for r in log.read(self.path(name, seed)) if "val/loss" in r][-1]


def constant(config, batch, factor):
    return dict(batch_schedule="constant", batch_size=batch, learning_rate=config.learning_rate * factor,
                min_lr=config.min_lr * factor)


def experiment(config, seeds, folder, at_once):
    """{group: [run folder per seed]} after all runs; the first group is fixed."""
    runs = Runs(config, folder, at_once)
    sizes, factors = settings(config)
    name = "constant{}_lr{:g}".format
    runs.do([(name(b, f), seeds[0], constant(config, b, f)) for b in sizes for f in factors])
    best = {b: min(factors, key=lambda f: runs.final_loss(name(b, f), seeds[0])) for b in sizes}
    schedules = {"linear": dict(batch_schedule="linear"), "gns": dict(batch_schedule="gns")}
    runs.do([(kind, seed, changes) for kind, changes in schedules.items() for seed in seeds]
            + [(name(b, f), seed, constant(config, b, f))
               for seed in seeds for b, f in {(config.batch_size, 1.0), *best.items()}])
    groups = {"fixed": name(config.batch_size, 1.0), "linear": "linear", "gns": "gns"}
    groups |= {f"constant {b}": name(b, f) for b, f in best.items() if (b, f) != (config.batch_size, 1.0)}
    return {group: [runs.path(run, seed) for seed in seeds] for group, run in groups.items()}


def finding(result):
    """What came out, in one sentence, whichever way it came out."""
    groups = result["groups"]
    gns = groups["gns"]["at_target"]
    if not gns["tokens"]:
        return f"Here: the gns schedule did not reach the fixed run's loss in {groups['gns']['runs'] - gns['reached']} runs."
    constants = {n: g["at_target"] for n, g in groups.items() if n.startswith("constant") and g["at_target"]["tokens"]}
    beaten = [n for n, at in constants.items() if all(at[m]["mean"] < gns[m]["mean"] for m in ("tokens", "steps"))]
    best = min(constants, key=lambda n: constants[n]["tokens"]["mean"], default=None)
    text = f"Here: {plot.verdict('the gns schedule', groups['gns'], groups['fixed'])}, against the fixed batch"
    if groups["linear"]["at_target"]["tokens"]:
        text += f"; {plot.verdict('linear', groups['linear'], groups['fixed'])}"
    if best:
        tokens = plot.less(constants[best]["tokens"], gns["tokens"])["mean"]
        steps = plot.less(constants[best]["steps"], gns["steps"])["mean"]
        text += (f"; against the best tuned constant batch in tokens ({best}), gns takes {plot.percent(tokens, 'tokens')} and "
                 f"{plot.percent(steps, 'steps')}")
    return text + (f"; {', '.join(beaten)} beat{'s' if len(beaten) == 1 else ''} it in both." if beaten else
                   "; no constant batch beats it in both.")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=configurator.DEFAULT_FILE, help="a config file; default: the quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", default="out/batch_schedule", help="where the runs go")
    parser.add_argument("--results", default=os.path.join(ROOT, "results"))
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that everything works")
    args, overrides = parser.parse_known_args(argv)
    try:
        config = configurator.parse([args.config, *(f"--{k}={v}" for k, v in (TINY if args.tiny else {}).items()), *overrides])
        config.eval_tokens = max(1, config.max_tokens // 40)  # losses are interpolated between evaluations
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        groups = experiment(config, list(range(args.seeds)), args.out, args.jobs)
    except configurator.ConfigError as e:
        configurator.die(e)
    loaded = {name: [plot.load(d) for d in dirs] for name, dirs in groups.items()}
    result = plot.comparison(loaded, "val")
    sentence = finding(result)
    path = os.path.join(args.results, "batch_schedule")
    os.makedirs(args.results, exist_ok=True)
    checkpoint.write_json(path + ".json", {"paper": PAPER, "finding": sentence, **result, "runs": groups,
                                           "config": vars(config), **hardware.facts("cpu")})
    curves = {name: [plot.curve(rows, "val") for rows in runs] for name, runs in loaded.items()}
    plot.draw_compare(result, curves, path + ".png")
    print(f"\n{plot.compare_table(result)}\n\n{PAPER}\n{sentence}\nA new batch size needs a new learning rate: the constant "
          f"batches have the best of three, the others the config's.\n{path}.json {path}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
