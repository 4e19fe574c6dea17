"""
What the experiments share: arguments, cached runs of train.py, and the numbers file.

Every experiment is `python experiments/<name>.py [--tiny] [--seeds N] [--config FILE] [--device D] [--key=value ...]`. It
leaves its runs in out/<name> (finished ones are not run again, broken ones go on), results/<name>.json and results/<name>.png,
and prints what the paper says and what was found here.
"""

import argparse
import dataclasses
import os
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import configurator  # noqa: E402
from sweeps import jobs  # noqa: E402
from trainer import hardware, log, output  # noqa: E402

# a model of seconds, to see that everything works
TINY = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, micro_batch_size=4, batch_size=8, batch_size_start=4,
            max_tokens=1280, warmup_tokens=128, gns_half_life_tokens=300, eval_iters=8,
            log_interval=2, checkpoint_tokens=0, device="cpu", dtype="float32", compile="False")


def parse(argv, name, doc, seeds=1, settings=None, tiny=None, folder=None, options=None):
    """(args, Config) of an experiment's command line. `settings` are its own on top of the quickstart; a --config given by
    the user replaces both, --key=value comes last. Experiments on the same runs name the same `folder`.
    options: {option of this experiment alone: what argparse wants to know of it}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a config file; default: the quickstart with this experiment's settings")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on its share of the cores")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--out", default=f"out/{folder or name}", help="where the runs go")
    parser.add_argument("--results", default=os.path.join(ROOT, "results"), help="where numbers and picture go")
    parser.add_argument("--name", default=name, help="of the numbers file and the picture")
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that everything works")
    for option, about in (options or {}).items():
        parser.add_argument(option, **about)
    args, overrides = parser.parse_known_args(argv)
    own = {} if args.config else dict(settings or {})
    if args.tiny:
        own.update({**TINY, **(tiny or {})})
    own.setdefault("device", args.device)
    try:
        config = configurator.parse([args.config or configurator.DEFAULT_FILE, *(f"--{k}={v}" for k, v in own.items()),
                                     *overrides])
    except configurator.ConfigError as e:
        configurator.die(e)
    args.started = time.time()
    known = ["config", "seeds", "device", "name", *([] if os.path.isabs(args.out) else ["out"])]  # else of this machine alone
    given = [f"--{k}={getattr(args, k)}" for k in known if getattr(args, k) != parser.get_default(k)]
    args.command = " ".join([f"python experiments/{name}.py", *given, *(["--tiny"] if args.tiny else []), *overrides])
    return args, config


class Runs:
    """Runs of one experiment by name, with their changes to the config."""
    group = jobs.Group

    def __init__(self, config, args):
        self.config, self.args = config, args

    def path(self, name):
        return os.path.join(self.args.out, name)

    def rows(self, name):
        return log.read(self.path(name))

    def final_loss(self, name):
        """inf for a run that died."""
        rows = self.rows(name)
        return float("inf") if log.died(rows) else [r["val/loss"] for r in rows if "val/loss" in r][-1]

    def do(self, wanted, may_die=False):
        """wanted {name: changes to the config}: run those that are not finished yet, as sweep.py runs does. may_die: a loss
        that is not finite is a result, as in a search for the learning rate."""
        configs = {name: dataclasses.replace(self.config, wandb_log=False, **changes) for name, changes in wanted.items()}
        group = self.group(configs, self.args.out, self.args.jobs, alone=not self.args.tiny)
        try:
            group.do()
        except configurator.ConfigError as e:
            configurator.die(e)
        for name, message in group.failed.items():
            if not (may_die and log.died(self.rows(name))):
                configurator.die(f"{name}: {message}")


def write(args, config, paper, finding, numbers):
    """results/<name>.json with the sentence, the command and the machine; returns the path of the picture to draw."""
    os.makedirs(args.results, exist_ok=True)
    path = os.path.join(args.results, args.name)
    settings = {k: v for k, v in vars(config).items() if v != configurator.FIELDS[k].default and k not in ("out_dir", "device")}
    output.write_json(path + ".json", {"command": args.command, "date": time.strftime("%Y-%m-%d"),
                                       "machine": hardware.facts(hardware.pick_device(config.device)), "paper": paper,
                                       "finding": finding, **numbers, "settings": settings,
                                       "last_command_seconds": round(time.time() - args.started)})
    print(f"\n{paper}\n{finding}\n{path}.json {path}.png", flush=True)
    return path + ".png"
