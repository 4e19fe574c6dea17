"""
What it costs to be sure: saving and loading a checkpoint, and the start of a run up to its first step, in an older checkout and
in this one, in turn. Wall time and CPU time, median and quartiles over rounds.

    git worktree add ../before f1cb7fe
    python tests/attack/cost.py --root=../before --out=results/never_lost_cost.json
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import harness

HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, HERE)

from benchmarks import tools  # noqa: E402
from trainer import hardware, output  # noqa: E402

WHAT = {"save": "a checkpoint is saved", "load": "a checkpoint is loaded", "start": "a run starts, up to its first logged step"}
CLOCKS = ("wall", "cpu")
CODE = """
import json, os, sys, tempfile, time
root, out, folder, floats = sys.argv[1:]
sys.path.insert(0, root)
import torch
from trainer import checkpoint
state = {"model": {f"w{i}": torch.randn(int(floats) // 12) for i in range(12)}}
def clocks(function):
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
checkpoint.save(folder, state)
if hasattr(checkpoint, "summed"):
    checkpoint.summed.cache_clear()
found = {"save": clocks(lambda: checkpoint.save(folder, state)), "load": clocks(lambda: checkpoint.load(folder))}
json.dump(found, open(out, "w"))
"""


def save_and_load(root, work, floats):
    out = os.path.join(work, "found.json")
    with tempfile.TemporaryDirectory(dir=work) as folder:
        subprocess.run([sys.executable, "-c", CODE, os.path.abspath(root), out, folder, str(floats)], check=True)
    with open(out) as f:
        return json.load(f)


def start(root, work, data):
    """Until the first step stands in the log; then it is killed."""
    with tempfile.TemporaryDirectory(dir=work) as out:
        settings = {**harness.TINY, "dataset": data, "out_dir": os.path.join(out, "run")}
        log = os.path.join(settings["out_dir"], "log.jsonl")
        command = [sys.executable, os.path.join(root, "train.py"), *(f"--{k}={v}" for k, v in settings.items())]
        began, errors = time.perf_counter(), os.path.join(out, "errors")
        with open(errors, "w") as stderr:
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        while "train/loss" not in harness.read(log):
            if child.poll() is not None or time.perf_counter() - began > 10 * harness.SECONDS:
                raise SystemExit(f"{root}: no first step: {harness.read(errors)[-500:]}")
            time.sleep(0.002)
        wall = time.perf_counter() - began
        child.send_signal(signal.SIGKILL)
        usage = os.wait4(child.pid, 0)[2]
        child.returncode = -signal.SIGKILL  # it has been waited for
    return {"start": {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime}}


def measure(roots, rounds, warmup, floats):
    """{what: {clock: {name: [seconds]}}}; the checkouts take turns in a random order."""
    found = {what: {clock: {name: [] for name in roots} for clock in CLOCKS} for what in WHAT}
    with tempfile.TemporaryDirectory() as work:
        data = harness.dataset(os.path.join(work, "data"))
        for i in range(warmup + rounds):
            for name in random.Random(i).sample(list(roots), len(roots)):
                now = {**start(roots[name], work, data), **save_and_load(roots[name], work, floats)}
                for what in WHAT if i >= warmup else ():
                    for clock in CLOCKS:
                        found[what][clock][name].append(now[what][clock])
    return found


def summed_up(found):
    """[{what, clock, before, after: median and quartiles in ms, ratio of each round, difference of the medians}]"""
    rows = []
    for what, clocks in found.items():
        for clock, both in clocks.items():
            spread = {name: tools.spread(times) for name, times in both.items()}
            rows.append({"what": WHAT[what], "clock": clock, **spread, **tools.paired(both["after"], both["before"]),
                         "difference_ms": spread["after"]["median_ms"] - spread["before"]["median_ms"]})
    return rows


def words(row):
    before, after = (row[name]["median_ms"] for name in ("before", "after"))
    return (f"{row['what']}, {row['clock']} time: {before:.0f} ms before, {after:.0f} ms after "
            f"({row['difference_ms']:+.0f} ms, x{row['ratio']:.2f})")


def commit_of(root):
    done = subprocess.run(["git", "describe", "--always", "--abbrev=12"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="a checkout of the version before")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that do not count")
    parser.add_argument("--floats", type=int, default=48_000_000, help="numbers in the checkpoint, four bytes each")
    parser.add_argument("--out", default=os.path.join(HERE, "results", "never_lost_cost.json"))
    args = parser.parse_args(argv)
    output.check(args.out)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = summed_up(measure({"before": args.root, "after": HERE}, args.rounds, args.warmup, args.floats))
    print("\n".join(words(row) for row in rows))
    output.write_json(args.out, {
        "command": "python tests/attack/cost.py --root=../before", "date": time.strftime("%Y-%m-%d"),
        "machine": {**hardware.facts("cpu"), "load_average": os.getloadavg()[0]},
        "finding": "; ".join(words(row) for row in rows) + ".", "before": {"commit": commit_of(args.root)},
        "rounds": args.rounds, "checkpoint_bytes": 4 * args.floats, "rows": rows}, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
