"""
One run instead of a sweep: what other batches, and other machines, would have taken to the same loss.

    python whatif.py out/quickstart                                 # a table, words, and out/quickstart/whatif.png
    python whatif.py out/run --batch=8,16,32 --to_loss=2.2          # these batches, to that loss; default: the run's end
    python whatif.py out/run --hours=24                             # within a deadline: the batch with the fewest tokens
    python whatif.py out/run --price=2.5 --budget=100               # within a budget; price of one device for one hour
    python whatif.py out/run --devices=1,8,64,512 --kind=H100 --link=ndr    # on machines one does not have
    python whatif.py out/run --export=steps                         # the best schedule for steps, megatron, olmo or torchtitan
    python whatif.py out/run --json=-                               # the numbers alone; --json=file beside the words

Reads log.jsonl and config.json of a run, finished or still going. Where the log does not tell the noise scale: the reason and
what to change on one line, no number, exit code 2. docs/whatif.md has the formulas and where they can be wrong.
"""

import argparse
import json
import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))  # python -I leaves it out

from configurator import ConfigError
from rightbatch.decision import OBJECTIVES
from system import errors, output, points, terminal
from trainer import advice, exports, machines, plan, predict, reader

# {option: (the option that it needs, why)}
NEEDS = {"budget": ("price", "of one device for one hour"), "mfu": ("kind", "whose peak it is a share of"),
         "objective": ("export", "which it is for"), "link": ("devices", "how many of them it joins")}


def numbers(text, name):
    """Whole numbers of at least 1 from 8,16,1k."""
    try:
        counts = [points.parse_count(part) for part in text.split(",")]
        if min(counts) < 1:
            raise ValueError("must be at least 1")
        return counts
    except ValueError as e:
        raise ConfigError(f"command line: --{name}={text}: {e}") from None


def check(args):
    """Refuse what is wrong with the command line itself, before any file is read. Fill in defaults."""
    for name in ("to_loss", "hours", "price", "budget", "mfu", "micro"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 10**18:
            raise ConfigError(f"command line: --{name}={errors.short(value)}: must be above 0 and below 1e18")
    for option, (other, why) in NEEDS.items():
        value = getattr(args, option)
        if value and not getattr(args, other):
            shown = value if isinstance(value, str) else f"{value:g}"
            raise ConfigError(f"command line: --{option}={shown}: needs --{other}, {why}")
    args.kind = args.kind and plan.kind_of(args.kind)
    if args.mfu and args.mfu > 1:
        raise ConfigError(f"command line: --mfu={args.mfu:g}: must be at most 1, the peak")
    args.mfu, args.objective, args.link = args.mfu or plan.MFU, args.objective or "time", args.link or machines.DEFAULT_LINK
    machines.parse_link(args.link)
    for path in {args.json, args.out} - {None, "", "-"}:
        output.check(path)
    args.batch = numbers(args.batch, "batch") if args.batch else None
    args.devices = numbers(args.devices, "devices") if args.devices else None


def machine_for(args, run, measured):
    """The machine that is asked for, else the run's own. Several numbers of devices get a table apart, all else is then for the
    run's own machine."""
    if not (args.devices or args.kind or args.micro) or len(args.devices or []) > 1:
        return predict.Machine(run.devices, run.micro, measured, True)
    devices = args.devices[0] if args.devices else run.devices
    return predict.Machine(devices, args.micro or run.micro, machines.cost_on(run, measured, devices, args), False)


def predict_all(args):
    """(result, run, phases, machine): every number that the words, the picture and --json show."""
    run = reader.read(args.run)
    measured = predict.step_cost(run)
    machine = machine_for(args, run, measured)
    several = len(args.devices or []) > 1
    price = None if several and args.kind else args.price  # of a device of that kind, while `machine` is the run's own
    rate = price and price * machine.devices / 3600
    result, phases = predict.predict(run, machine, args.to_loss, args.batch, rate)
    if not machine.measured or several:
        result["assumptions"] = machines.assume(run, measured, args)
    if several:
        result["devices"] = machines.table(run, phases, measured, args)
    elif args.hours or args.budget:
        result["deadline"] = deadline(args, run, phases, machine, rate)
    if args.export:
        result["export"] = export(args, run, phases, machine)
    return result, run, phases, machine


def deadline(args, run, phases, machine, rate):
    """By the tighter of the deadline and what the budget buys."""
    if machine.cost is None:
        raise ConfigError(f"{run.folder}: {advice.CANNOT_TELL}, so there is no answer for a deadline or a budget")
    limits = [(3600 * args.hours, None)] if args.hours else []
    limits += [(args.budget / rate, args.budget)] if args.budget else []
    seconds, budget = min(limits, key=lambda limit: limit[0])
    return {"budget": budget, **predict.deadline(phases, seconds, machine.cost, machine.quantum, run.block, rate)}


def export(args, run, phases, machine):
    if args.objective == "time" and machine.cost is None:
        raise ConfigError(f"{run.folder}: {advice.CANNOT_TELL}; --objective=balance exports batches at the noise scale")
    stages = predict.stages_of(phases, args.objective, machine.cost, machine.quantum, run.block)
    return exports.text(args.export, stages, run, machine, phases, args.objective)


def main(argv=None):
    terminal.steady()
    parser = terminal.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="out/run", help="the folder of a run of train.py")
    parser.add_argument("--batch", help="batches in sequences, e.g. 8,16,32; default: from the smallest to far above, doubling")
    parser.add_argument("--to_loss", type=float, help="validation loss, or smoothed training loss where there are fewer than "
                                                      f"{predict.EVALUATIONS} evaluations; default: the run's end")
    parser.add_argument("--hours", type=float, help="a deadline")
    parser.add_argument("--price", type=float, help="of one device for one hour, in any currency")
    parser.add_argument("--budget", type=float, help="in the same currency; needs --price")
    parser.add_argument("--devices", help="numbers of devices, e.g. 1,8,64: one gives all for that machine, several a table")
    parser.add_argument("--kind", help=f"of the devices: {', '.join(plan.KINDS)}; default: like the run's")
    parser.add_argument("--mfu", type=float, help=f"share of its peak that a kind reaches ({plan.MFU})")
    parser.add_argument("--link", help=f"between devices: {', '.join(machines.LINKS)}, or 25GB/s, 200Mbit, 200Mbit:500us; "
                                       f"default {machines.DEFAULT_LINK}")
    parser.add_argument("--micro", type=int, help="micro-batch of one of those devices; default: the run's")
    parser.add_argument("--objective", choices=OBJECTIVES, help="what --export is best for (time)")
    parser.add_argument("--export", choices=tuple(exports.FORMATS), help="print the schedule in that trainer's terms, alone")
    parser.add_argument("--json", help="a file for all numbers; - prints them, alone")
    parser.add_argument("--out", help="the PNG to write; default: whatif.png in the run's folder")
    args = parser.parse_args(argv)
    try:
        check(args)
        show(args, *predict_all(args))
    except ConfigError as e:
        errors.die(e)
    except OSError as e:
        errors.die(f"{e.filename or 'output'}: {e.strerror}: --out and --json say where to write")
    return terminal.heard()


def show(args, result, run, phases, machine):
    """Numbers, export, words and picture, each where it was asked for."""
    alone = args.export or args.json == "-"
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        output.write_json(args.json, result)
    if args.export and args.json != "-":
        print(result["export"])
    if not alone:
        print(advice.words(result, run, machine.cost, args))
    if args.out or not alone:
        from plots import whatif as picture
        path = picture.draw(result, phases, run.block, machine.cost, args.out or os.path.join(run.folder, "whatif.png"))
        print(f"Picture: {path}", file=sys.stderr if alone else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
