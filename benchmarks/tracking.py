"""
bench.py tracking: what tracking costs in a whole run, all of it: norms, averages, sampled rows, log lines.

    python bench.py tracking                                   # the quickstart, eight times each: a quarter of an hour
    python bench.py tracking --rounds=3 -- config/wikitext2.py --max_tokens=200k

Whole processes in turn, in a new order each round. The seconds are the run's own: of its steps and log lines, without start,
evaluation and checkpoints.
"""

import functools
import sys
import tempfile

from benchmarks.tools import TRAIN, interleave, paired, process, spread, told, write_json
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
        process([sys.executable, TRAIN, *train_arguments, f"--out_dir={folder}/run"], " ".join(["train.py", *train_arguments]))
        return log.steps(log.read(f"{folder}/run"))[-1]["seconds"]


def run(args):
    def whole(name):
        seconds = seconds_of([*args.arguments, *VARIANTS[name]])
        print(f"{name}: {seconds:.1f} s", flush=True)
        return {"run": seconds}
    samples = interleave({name: functools.partial(whole, name) for name in VARIANTS}, 0, args.rounds, warm_up=0)
    seconds = {name: phases["run"] for name, phases in samples.items()}
    report = {name: {**spread(own), **paired(own, seconds[OFF]), "seconds": own} for name, own in seconds.items()}
    metric = paired(seconds[TRACKED], seconds[WITHOUT])
    for name, r in report.items():
        print(f"{name:32}{r['median_ms'] / 1e3:7.1f} s, over {OFF}: {told(r)}")
    print(f"Adam's metric, over tracked without it: {told(metric)}")
    write_json(args.out, {"runs": report, "adams_metric": metric})
