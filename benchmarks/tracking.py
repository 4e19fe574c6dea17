"""
bench.py tracking: what tracking costs in a whole run, all of it: norms, averages, sampled rows, log lines.

    python bench.py tracking                                   # the quickstart, eight times each: a quarter of an hour
    python bench.py tracking --rounds=3 -- config/wikitext2.py --max_tokens=200k

Whole processes in turn, in a new order each round. The seconds are the run's own: of its steps and log lines, without start,
evaluation and checkpoints.
"""

import random
import statistics
import subprocess
import sys
import tempfile

from benchmarks.tools import TRAIN, paired, spread, write_json
from configurator import ConfigError
from trainer import log

OFF, WITHOUT, TRACKED = "off", "tracked, without Adam's metric", "tracked"
VARIANTS = {OFF: ["--gns=off", "--gns_calibrate=False"],
            WITHOUT: ["--gns_adam=False", "--gns_metric=plain"],
            TRACKED: [],
            "gns=exact": ["--gns=exact"]}


def arguments(parser):
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", default="results/tracking.json")
    parser.add_argument("arguments", nargs="*", help="for train.py, after --")


def seconds_of(train_arguments):
    """Seconds of a whole run, as its log has them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, TRAIN, *train_arguments, f"--out_dir={folder}/run"]
        done = subprocess.run(command, text=True, stdin=subprocess.DEVNULL, capture_output=True)
        if done.returncode:
            raise ConfigError(f"{' '.join(command[1:])} ended with exit code {done.returncode}: {done.stderr[-1000:]}")
        return [row for row in log.read(f"{folder}/run") if "train/loss" in row][-1]["seconds"]


def run(args):
    found = {name: [] for name in VARIANTS}
    for i in range(args.rounds):
        for name in random.Random(i).sample(list(VARIANTS), len(VARIANTS)):
            found[name].append(seconds_of([*args.arguments, *VARIANTS[name]]))
            print(f"round {i + 1} of {args.rounds}: {name}: {found[name][-1]:.1f} s", flush=True)
    report = {name: {**spread(own), **paired(own, found[OFF]), "seconds": own} for name, own in found.items()}
    without, tracked = found[WITHOUT], found[TRACKED]
    metric = paired(tracked, without)
    for name, r in report.items():
        print(f"{name:32}{r['median_ms'] / 1e3:7.1f} s  {r['ratio']:.3f} of {OFF} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f})")
    print("Adam's metric, over tracked without it: {ratio:.3f} ({ratio_q1:.3f} to {ratio_q3:.3f})".format(**metric))
    medians = statistics.median(tracked) / statistics.median(without)
    write_json(args.out, {"runs": report, "adams_metric": {**metric, "of_medians": medians}})
