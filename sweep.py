"""
Questions that take several trials or runs to answer, before a long run and during it. Each is a file of sweeps/.

    python sweep.py memory config/x.py                 # which micro-batch: peak memory and speed, each trial a process
    python sweep.py throughput config/x.py             # which accumulation: speed, share of the update, memory
    python sweep.py quality config/x.py --steps=200    # which effective batch: where more accumulation stops paying
    python sweep.py runs config/x.py --batch_size=16,32,64 --learning_rate=1e-3,2e-3 --seed=0,1,2 --jobs=2
    python sweep.py branch out/run --at 20M --factors 1,2,4,8    # the critical batch size by experiment, at 20M tokens

--key=value as for train.py. --dry_run says what would be run and how long it might take. Each prints a table, its verdict, and
what to run next. Numbers and picture go to <out_dir>/sweep/<command> (branch: to out/run/branch/<tokens>). Ctrl-C or a kill
loses the trial at work (a run goes on from its checkpoint): the same command does what is missing.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys

if __name__ == "__main__":  # until there is something to stop
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from sweeps import branch, grid, micro, quality
from system import terminal
from system.errors import ConfigError, die, explain

# command: what it finds, its options, the function that answers
COMMANDS = {
    "memory": ("the largest and the best micro-batch", micro.memory_arguments, micro.memory_sweep),
    "throughput": ("the best accumulation", micro.throughput_arguments, micro.throughput),
    "quality": ("the largest batch whose gradient still gains", quality.arguments, quality.quality),
    "runs": ("a grid of full runs", grid.arguments, grid.runs),
    "branch": ("the critical batch size by experiment", branch.arguments, branch.branch)}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    terminal.steady()
    parser = terminal.Parser(prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (what, arguments, _) in COMMANDS.items():
        arguments(commands.add_parser(name, help=what, allow_abbrev=False))
    args, rest = parser.parse_known_args(argv)
    args.rest, args.asked = rest, shlex.join(["python", "sweep.py", *argv])

    def stop(*_):
        raise KeyboardInterrupt
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if args.command == "branch" and rest:
            raise ConfigError(f"command line: {rest[0]}: unknown option of branch")
        with contextlib.ExitStack() as args.held:  # folders that it writes to
            return COMMANDS[args.command][2](args)
    except (ConfigError, OSError, UnicodeEncodeError) as e:
        die(explain(e) or e)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from here", flush=True)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
