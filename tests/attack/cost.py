"""
What it costs to be sure: CPU seconds of saving and loading a checkpoint and of a short run, in two checkouts, interleaved.

    python tests/attack/cost.py --before=another_checkout
"""

import argparse
import json
import os
import statistics
import sys
import tempfile

import harness

HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CODE = """
import json, sys, tempfile, time
sys.path.insert(0, sys.argv[1])
import torch
from trainer import checkpoint
state = {"model": {f"w{i}": torch.randn(4_000_000) for i in range(12)}}
with tempfile.TemporaryDirectory() as folder:
    checkpoint.save(folder, state)
    if hasattr(checkpoint, "summed"):
        checkpoint.summed.cache_clear()
    times = [time.process_time()]
    checkpoint.save(folder, state)
    times.append(time.process_time())
    checkpoint.load(folder)
    times.append(time.process_time())
open(sys.argv[2], "w").write(json.dumps([b - a for a, b in zip(times, times[1:])]))
"""


def child(*command):
    """CPU seconds of a process and of those that it waited for."""
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, *command])
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, command
    return usage.ru_utime + usage.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--times", type=int, default=7)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {what: {"before": [], "after": []} for what in ("save", "load", "run")}
    with tempfile.TemporaryDirectory() as work:
        data = harness.dataset(os.path.join(work, "data"))
        for i in range(args.times + 1):
            for name, root in (("before", args.before), ("after", HERE)):
                out = os.path.join(work, f"{name}{i}")
                settings = {**harness.TINY, "max_tokens": 64, "warmup_tokens": 0, "dataset": data, "out_dir": out}
                seconds = child(os.path.join(root, "train.py"), *(f"--{k}={v}" for k, v in settings.items()))
                child("-c", CODE, root, out + ".json")
                if i:  # the first one warms up
                    save, load = json.load(open(out + ".json"))
                    for what, value in (("save", save), ("load", load), ("run", seconds)):
                        found[what][name].append(value)
    for what, both in found.items():
        before, after = (statistics.median(both[name]) for name in ("before", "after"))
        print(f"{what:<6} before {before:.3f} s, after {after:.3f} s: ratio {after / before:.2f}, {after - before:+.3f} s")


if __name__ == "__main__":
    main()
