"""
What the experiments share: their frame, arguments, cached runs of train.py, and the numbers file.

Every experiment is `python experiments/<name>.py [--tiny] [--seeds N] [--config FILE] [--device D] [--key=value ...]`. It
leaves its runs in out/<name> (finished ones are not run again, broken ones go on), results/<name>.json and results/<name>.png,
and prints what the paper says and what was found here.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import configurator  # noqa: E402
from sweeps import jobs  # noqa: E402
from system import errors, output  # noqa: E402
from trainer import hardware, log, start  # noqa: E402

# a model of seconds, to see that everything works
TINY = dict(n_layer=1, n_head=1, n_embd=16, block_size=16, micro_batch_size=4, batch_size=8, batch_size_start=4,
            max_tokens=1280, warmup_tokens=128, gns_half_life_tokens=300, eval_iters=8,
            log_interval=2, checkpoint_tokens=0, device="cpu", dtype="float32", compile="False")


class Experiment(NamedTuple):
    """A question: how it is measured, what came out in one sentence, and the picture. Its main is the experiment itself."""
    name: str
    doc: str
    paper: str  # what the paper says; nothing where it does not ask
    measure: Callable  # Runs -> (numbers for the file, what the picture needs beside them)
    finding: Callable  # numbers -> a sentence, whichever way it came out
    draw: Callable | None = None  # (numbers, what the picture needs, path)
    settings: dict = {}
    tiny: dict = {}
    seeds: int = 1
    folder: str | None = None
    options: dict = {}
    script: str | None = None  # where it is not called after the experiment

    def __call__(self, argv: list[str] | None = None) -> int:
        args, config = parse(argv, self.name, self.doc, self.seeds, self.settings, self.tiny, self.folder, self.options,
                             self.script)
        numbers, more = self.measure(Runs(config, args))
        path = write(args, config, self.paper, self.finding(numbers), numbers)
        if self.draw:
            self.draw(numbers, more, path)
        return 0


def parse(argv, name, doc, seeds=1, settings=None, tiny=None, folder=None, options=None, script=None):
    """(args, Config) of an experiment's command line. `settings` are its own on top of the quickstart; a --config given by
    the user replaces both, --key=value comes last. Experiments on the same runs name the same `folder`.
    options: {option of this experiment alone: what argparse wants to know of it}."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a config file; default: the quickstart with this experiment's settings")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on its share of the cores")
    parser.add_argument("--out", default=f"out/{folder or name}", help="where the runs go")
    parser.add_argument("--results", default=os.path.join(ROOT, "results"), help="where numbers and picture go")
    parser.add_argument("--name", default=name, help="of the numbers file and the picture")
    parser.add_argument("--tiny", action="store_true", help="a model of seconds, to see that everything works")
    for option, about in (options or {}).items():
        parser.add_argument(option, **about)
    args, overrides = parser.parse_known_args(argv)
    changed = {} if args.config else dict(settings or {})
    if args.tiny:
        changed.update({**TINY, **(tiny or {})})
    try:
        config = start.parse([args.config or configurator.DEFAULT_FILE, *(f"--{k}={v}" for k, v in changed.items()),
                                     *overrides])
    except configurator.ConfigError as e:
        errors.die(e)
    args.started = time.time()
    known = ["config", "seeds", "name", "out", *(option.removeprefix("--") for option in options or {})]
    given = [f"--{k}={v}" for k, v in ((k, getattr(args, k)) for k in known) if v != parser.get_default(k) and v is not True
             and not os.path.isabs(str(v))]  # a path of this machine alone
    args.command = " ".join([f"python experiments/{script or name}.py", *given, *(["--tiny"] if args.tiny else []), *overrides])
    return args, config


class Runs:
    """Runs of one experiment by name, with their changes to the config."""
    group = jobs.Group

    def __init__(self, config, args):
        self.config, self.args = config, args

    def path(self, name: str) -> str:
        return os.path.join(self.args.out, name)

    def rows(self, name: str) -> list[dict]:
        return log.read(self.path(name))

    def final_loss(self, name: str) -> float:
        """inf for a run that died."""
        rows = self.rows(name)
        return float("inf") if log.died(rows) else [r["val/loss"] for r in rows if "val/loss" in r][-1]

    def do(self, wanted: dict, may_die: bool = False):
        """wanted {name: changes to the config}: run those that are not finished yet, as sweep.py runs does. may_die: a loss
        that is not finite is a result, as in a search for the learning rate."""
        configs = {name: dataclasses.replace(self.config, wandb_log=False, **changes) for name, changes in wanted.items()}
        group = self.group(configs, self.args.out, self.args.jobs, alone=not self.args.tiny)
        try:
            group.do()
        except configurator.ConfigError as e:
            errors.die(e)
        for name, message in group.failed.items():
            if not (may_die and log.died(self.rows(name))):
                errors.die(f"{name}: {message}")


def write(args, config, paper, finding, numbers):
    """results/<name>.json with the sentence, the command and the machine; returns the path of the picture to draw."""
    os.makedirs(args.results, exist_ok=True)
    path = os.path.join(args.results, args.name)
    settings = {k: v for k, v in vars(config).items() if v != configurator.FIELDS[k].default and k not in ("out_dir", "device")}
    output.write_json(path + ".json", {"command": args.command, "date": time.strftime("%Y-%m-%d"),
                                       "machine": hardware.facts(hardware.pick_device(config.device)),
                                       **({"paper": paper} if paper else {}), "finding": finding, **numbers,
                                       "settings": settings,
                                       "last_command_seconds": round(time.time() - args.started)})
    print(*filter(None, (paper, finding, f"{path}.json")), sep="\n", flush=True)
    return path + ".png"
