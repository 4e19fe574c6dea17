"""
bench.py startup: seconds from the command `python train.py` to the first lines that a user sees.

    python bench.py startup
    python bench.py startup --starts=3 -- config/wikitext2.py --n_layer=2
"""

import subprocess
import sys
import tempfile
import time

from benchmarks.tools import TRAIN, spread, write_json
from configurator import ConfigError


def arguments(parser):
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--out", default="results/startup.json")
    parser.add_argument("arguments", nargs="*", help="for train.py, after --")


def first_lines(train_arguments):
    """Seconds from the start of `python train.py` to its first line, its first evaluation and its first logged step."""
    marks = {"first line": "", "evaluation": "validation loss", "first logged step": " tok/s"}
    with tempfile.TemporaryDirectory() as folder:
        start, found = time.perf_counter(), {}
        process = subprocess.Popen([sys.executable, TRAIN, *train_arguments, f"--out_dir={folder}/run"], text=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        try:
            for line in process.stdout:
                seconds = time.perf_counter() - start
                found = {name: seconds for name, words in marks.items() if words in line} | found
                if len(found) == len(marks):
                    return {name: found[name] for name in marks}
        finally:
            process.kill()
            process.communicate()
    raise ConfigError(f"train.py ended with exit code {process.returncode} before its first logged step")


def run(args):
    first_lines(args.arguments)  # compiles the norm kernel and prepares the data, if they are not there
    starts = [first_lines(args.arguments) for _ in range(args.starts)]
    report = {name: spread([start[name] for start in starts]) for name in starts[0]}
    print(f"python train.py {' '.join(args.arguments)}: seconds from the command, {args.starts} starts: median (quartiles)")
    for name, r in report.items():
        print(f"  {name:20}{r['median_ms'] / 1e3:6.2f} ({r['q1_ms'] / 1e3:.2f} to {r['q3_ms'] / 1e3:.2f})")
    write_json(args.out, {"starts": report})
