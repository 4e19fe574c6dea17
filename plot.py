"""
Pictures of runs, from their log.jsonl alone. Each is a file of plots/.

    python plot.py out/quickstart                   # out/quickstart/report.png
    python plot.py out/run_a out/run_b              # both over each other, in out/run_a/compare.png
    python plot.py out/run_a out/run_b --out=a.png
    python plot.py --compare fixed=out/a,out/b linear=out/c,out/d    # what it took to reach each loss, over seeds:
                                                                     # a table, and compare.json and .png in out/a
    python plot.py --layers out/exact               # a run with gns=exact: phase plot, groups, blocks, regression
"""

import argparse
import os
import signal
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing to save

from plots import comparable, compare, layers, report
from system import output, terminal
from system.errors import ConfigError, die, explain


def main(argv=None):
    terminal.steady()
    parser = terminal.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dirs", nargs="*", metavar="out_dir")
    parser.add_argument("--out", help="the PNG to write")
    parser.add_argument("--compare", nargs="+", metavar="name=out_dir,out_dir", help="groups of runs; the first is the base")
    parser.add_argument("--loss", choices=("auto", "val", "train"), default="auto",
                        help="what --compare goes by: validation loss, or training loss, smoothed")
    parser.add_argument("--layers", action="store_true", help="the inside of one run with gns=exact")
    args = parser.parse_args(argv)
    if bool(args.compare) == bool(args.out_dirs):
        parser.error("give run folders, or --compare with groups of them")
    try:
        if args.out and not args.compare:
            output.check(args.out)
        if args.compare:
            print(compare.compare(compare.parse_groups(args.compare), args.out, args.loss))
        elif args.layers:
            for out_dir in args.out_dirs:
                path, numbers = layers.draw(out_dir, args.out)
                print(layers.table(numbers), path, sep="\n")
        else:
            print(*comparable.warnings(args.out_dirs), report.draw(*args.out_dirs, path=args.out), sep="\n")
    except (ConfigError, OSError, UnicodeEncodeError) as e:
        die(explain(e) or e)
    return terminal.heard()


if __name__ == "__main__":
    sys.exit(main())
