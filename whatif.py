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
import dataclasses
import json
import os
import sys

import configurator
import schedule
from configurator import ConfigError
from trainer import checkpoint, exports, log, machines, plan, predict


def numbers(text, name):
    """Whole numbers of at least 1 from 8,16,1k."""
    try:
        found = [schedule.parse_count(part) for part in text.split(",")]
        if min(found) < 1:
            raise ValueError("must be at least 1")
        return found
    except ValueError as e:
        raise ConfigError(f"command line: --{name}={text}: {e}") from None


def check(args):
    """What the command line can be told before any file is read."""
    for name in ("to_loss", "hours", "price", "budget", "mfu", "micro"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"command line: --{name}={value:g}: must be above 0")
    if args.budget and not args.price:
        raise ConfigError(f"command line: --budget={args.budget:g}: needs --price, of one device for one hour")
    kinds = {k.lower(): k for k in plan.KINDS}
    if args.kind and args.kind.lower() not in kinds:
        raise ConfigError(f"command line: --kind={args.kind}: expected one of {', '.join(plan.KINDS)}")
    args.kind = args.kind and kinds[args.kind.lower()]
    if args.link and not args.devices:
        raise ConfigError(f"command line: --link={args.link}: needs --devices, how many of them it joins")
    args.link = args.link or machines.DEFAULT_LINK
    machines.parse_link(args.link)
    args.batch = numbers(args.batch, "batch") if args.batch else None
    args.devices = numbers(args.devices, "devices") if args.devices else None


@dataclasses.dataclass
class Machine:
    """What the table is for: the run's own machine, or the one that the command line asks for."""
    devices: int
    micro: int
    cost: predict.Cost | None
    measured: bool

    @property
    def quantum(self):
        return self.devices * self.micro


def machine_for(args, run, measured):
    """Several numbers of devices get a table of their own; the rest is then for the run's own machine."""
    if not (args.devices or args.kind or args.micro) or len(args.devices or []) > 1:
        return Machine(run.devices, run.micro, measured, True)
    devices = args.devices[0] if args.devices else run.devices
    return Machine(devices, args.micro or run.micro, machines.cost_on(run, measured, devices, args), False)


def predict_all(args):
    """(result, run, phases, machine): every number that the words, the picture and --json show."""
    run = predict.read(args.run)
    key = predict.noise_key(run)
    values, known = predict.noise_values(run.steps, key)
    loss, kind, until = predict.target(run, args.to_loss)
    phases = predict.phases(run, values, until)
    measured = predict.step_cost(run)
    machine = machine_for(args, run, measured)
    cost, quantum, block = machine.cost, machine.quantum, run.block
    noise, rate = predict.mean_noise(phases), args.price and args.price * machine.devices / 3600
    right = predict.right_batch(noise, cost, quantum)
    batches = args.batch or predict.default_batches(phases, noise, right["time"], quantum)
    result = {"run": run.folder, "loss": loss, "loss_kind": kind, "assumes": predict.TUNED,
              "rows": [predict.row_at(phases, b, block, cost, rate) for b in batches],
              "step_time": step_time(cost), "right_batch": right,
              "right_batch_at_the_end": predict.right_batch(phases[-1].noise, cost, quantum),
              "noise": {"key": key, "rows": len(values), "determined": known, "lowest": min(p.noise[0] for p in phases),
                        "highest": max(p.noise[0] for p in phases)},
              "own": predict.own(phases, block, cost), "lost": predict.lost(phases, cost, quantum, block),
              "machine": {"devices": machine.devices, "quantum": quantum, "measured": machine.measured}}
    if cost:
        stages = predict.stages(phases, "time", cost, quantum, block)
        result["best_constant"] = predict.row_at(phases, predict.fastest_constant(phases, cost, quantum), block, cost, rate)
        result["best_schedule"] = {"stages": stages, **predict.price(phases, predict.schedule_at(stages), block, cost)}
    if not machine.measured or len(args.devices or []) > 1:
        result["assumptions"] = machines.assume(run, measured, args)
    if len(args.devices or []) > 1:
        result["devices"] = machines.table(run, phases, measured, args)
    elif args.hours or args.budget:
        result["deadline"] = deadline(args, run, phases, machine, rate)
    if args.export:
        result["export"] = export(args, run, phases, machine)
    return result, run, phases, machine


CANNOT_TELL = ("its batches vary too little to tell what a step costs from what a sequence costs (a batch_schedule that moves "
               "by half or more does, over ten logged rows)")


def deadline(args, run, phases, machine, rate):
    """By the tighter of the deadline and what the budget buys."""
    if machine.cost is None:
        raise ConfigError(f"{run.folder}: {CANNOT_TELL}, so there is no answer for a deadline or a budget")
    limits = [3600 * args.hours] if args.hours else []
    limits += [args.budget / rate] if args.budget else []
    return predict.deadline(phases, min(limits), machine.cost, machine.quantum, run.block, rate)


def step_time(cost):
    if cost is None:
        return {"fixed_ms": None, "per_sequence_ms": None}
    parts = (("fixed_ms", cost.fixed), ("per_sequence_ms", cost.per_sequence))
    return {k: v for name, values in parts for k, v in predict.spell(name, tuple(1e3 * v for v in values)).items()} | {
        "source": cost.source}


def export(args, run, phases, machine):
    if args.objective == "time" and machine.cost is None:
        raise ConfigError(f"{run.folder}: {CANNOT_TELL}; --objective=balance exports batches at the noise scale")
    stages = predict.stages(phases, args.objective, machine.cost, machine.quantum, run.block)
    return exports.text(args.export, stages, run, machine, phases, args.objective)


# -- words


def interval(row, name, show):
    return f"{show(row[name])} ({show(row[name + '_low'])} to {show(row[name + '_high'])})"


def table(rows, first):
    """Columns: the key `first`, then steps, tokens, time and money with their intervals."""
    columns = [(first, lambda r: str(r[first]))]
    columns += [("batch", lambda r: str(r["batch"]))] if first != "batch" else []
    columns += [("steps", lambda r: interval(r, "steps", log.count)), ("tokens", lambda r: interval(r, "tokens", log.count))]
    if rows[0]["seconds"] is not None:
        columns.append(("time", lambda r: interval(r, "seconds", machines.span)))
    if "money" in rows[0]:
        columns.append(("money", lambda r: interval(r, "money", lambda v: f"{v:.3g}")))
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  " + "  ".join(text.rjust(width) if i == 0 else text.ljust(width)
                             for i, (text, width) in enumerate(zip(line, widths))).rstrip() for line in cells]


def words(result, run, cost, args):
    lines = about_run(result, run) + [about_noise(result, run), about_cost(result, run, cost), ""]
    lines += ["To the same loss, at a constant batch (in brackets: 95% of the measurement's errors):"]
    lines += table(result["rows"], "batch") + [f"{predict.TUNED} {predict.ONE_SIDED}"]
    if cost and min(row["batch"] for row in result["rows"]) < result["machine"]["quantum"]:
        lines.append(f"Below {result['machine']['quantum']}, micro-batch x devices, a sequence costs more than this says.")
    lines += [""] + about_right(result, cost) + about_lost(result, cost)
    if "deadline" in result:
        lines += about_deadline(result["deadline"])
    if "devices" in result:
        lines += ["", "On other machines, each number of devices at its right batch:"] + table(result["devices"], "devices")
        lines += machines.worth(result["devices"], args.hours or args.budget)
    if "assumptions" in result:
        lines += ["", "Assumed of those machines, not measured:"] + [f"  - {line}" for line in result["assumptions"]]
    return "\n".join(lines)


def about_run(result, run):
    own, whole = result["own"], result["own"]["steps"] == run.steps[-1]["step"]
    batches = f"{own['batch_low']:.0f}" + (f" to {own['batch_high']:.0f}" if own["batch_high"] > own["batch_low"] else "")
    return [f"{result['run']}: {log.count(own['tokens'])} tokens in {own['steps']:.0f} steps of {batches} sequences, "
            f"{machines.span(own['seconds_taken'])}, to a {result['loss_kind']} loss of {result['loss']:.4f}"
            + (", its end." if whole else ".")]


def about_noise(result, run):
    n, right = result["noise"], result["right_batch"]
    text = (f"Noise scale: {n['lowest']:.3g} to {n['highest']:.3g} sequences on the way; one number for all of it is "
            f"{interval(right, 'balance', '{:.3g}'.format)}, weighted by progress. It is {predict.NOISE[n['key']]} "
            f"({n['key']}).")
    wanted = "_adam" if run.config.get("gns_metric", "adam") == "adam" else ""
    if n["key"].endswith("_adam") != bool(wanted):
        text += (" The log has none in Adam's metric, in which AdamW steps and which predicts better." if wanted else
                 " The log has none in the plain metric that gns_metric asks for.")
    if n["determined"] < n["rows"]:
        text += f" Determined in {n['determined']} of {n['rows']} logged rows; the others are filled in, with wider intervals."
    return text


def about_cost(result, run, cost):
    if cost is None:
        return f"Time cannot be predicted: {CANNOT_TELL}. Steps and tokens can."
    t, own = result["step_time"], result["own"]
    fixed, each = (interval(t, name, "{:.3g}".format) for name in ("fixed_ms", "per_sequence_ms"))
    text = f"A step takes {fixed} ms, and {each} ms for each sequence, {cost.source}"
    return text + (f"; for this run's steps that makes {machines.span(own['seconds'])}." if result["machine"]["measured"] else
                   f" for {result['machine']['devices']} devices.")


def about_right(result, cost):
    right, machine = result["right_batch"], result["machine"]
    lines = []
    if cost:
        best = result["best_constant"]
        text = f"Right batch for time: {right['time']:.3g}"
        if right["time_high"] > right["time_low"]:
            text += f" ({right['time_low']:.3g} to {right['time_high']:.3g})"
        if right["time"] <= machine["quantum"]:
            text += (f", the smallest that {where(machine)} well: a step's fixed cost is that of "
                     f"{cost.ratio()[0]:.2g} sequences, too little for a larger batch to pay")
        lines.append(f"{text}. A constant {best['batch']} takes {machines.span(best['seconds'])} and "
                     f"{log.count(best['tokens'])} tokens.")
        stages = result["best_schedule"]["stages"]
        if len(stages) > 1:
            steps = ", ".join(f"{log.count(s['tokens'])}:{s['batch']}" for s in stages)
            lines.append(f"Best schedule for time, tokens:batch: {steps}. It takes "
                         f"{machines.span(result['best_schedule']['seconds'])}; --export writes it for a trainer.")
    lines.append(f"Right batch for tokens: {right['tokens']}, the smallest that {where(machine)} well. Balance of both, the "
                 f"noise scale: {right['balance']:.3g} over all, {result['right_batch_at_the_end']['balance']:.3g} at the end.")
    return lines


def where(machine):
    return "one device runs" if machine["devices"] == 1 else f"{machine['devices']} devices run"


def about_lost(result, cost):
    """What the run's own schedule cost or gained against the best."""
    def against(part, what, other):
        share, low, high = part["share"], part["low"], part["high"]
        spread = "" if high - low < 0.005 else f" ({low:+.0%} to {high:+.0%})"
        if abs(share) < 0.005:
            return f"as {'much' if what == 'time' else 'many'} {what} as {other}{spread}"
        return f"{abs(share):.0%} {'more' if share >= 0 else 'less' if what == 'time' else 'fewer'} {what} than {other}{spread}"
    lost, parts = result["lost"], []
    if cost:
        parts.append(against(lost["time"], "time", f"a constant {result['best_constant']['batch']}"))
        if len(result["best_schedule"]["stages"]) > 1:
            parts.append(against(lost["time_schedule"], "time", "the best schedule"))
    parts.append(against(lost["tokens"], "tokens", f"a constant {result['right_batch']['tokens']}"))
    took = "This run's own batches took " if result["machine"]["measured"] else "There, this run's own batches would take "
    return [f"{took}{', '.join(parts)}."]


def about_deadline(found):
    took = interval(found, "seconds", machines.span)
    if not found["possible"]:
        return [f"Within {machines.span(found['within'])} this loss cannot be reached: the fastest batch, {found['batch']}, "
                f"takes {took}."]
    safe = "" if found["seconds_high"] <= found["within"] else "; its interval reaches beyond"
    return [f"Within {machines.span(found['within'])}: batch {found['batch']} is the one with the fewest tokens, "
            f"{log.count(found['tokens'])}, in {took}{safe}."]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="out/run", help="the folder of a run of train.py")
    parser.add_argument("--batch", help="batches in sequences, e.g. 8,16,32; default: from the smallest to far above, doubling")
    parser.add_argument("--to_loss", type=float, help="validation loss, or smoothed training loss where there are fewer than "
                                                      f"{predict.EVALUATIONS} evaluations; default: the run's end")
    parser.add_argument("--hours", type=float, help="a deadline")
    parser.add_argument("--price", type=float, help="of one device for one hour, in any currency")
    parser.add_argument("--budget", type=float, help="in the same currency; needs --price")
    parser.add_argument("--devices", help="numbers of devices, e.g. 1,8,64: one gives all for that machine, several a table")
    parser.add_argument("--kind", help=f"of the devices: {', '.join(plan.KINDS)}; default: like the run's")
    parser.add_argument("--mfu", type=float, default=plan.MFU, help="share of its peak that a kind reaches (%(default)s)")
    parser.add_argument("--link", help=f"between devices: {', '.join(machines.LINKS)}, or 25GB/s, 200Mbit, 200Mbit:500us; "
                                       f"default {machines.DEFAULT_LINK}")
    parser.add_argument("--micro", type=int, help="micro-batch of one of those devices; default: the run's")
    parser.add_argument("--objective", choices=("time", "tokens", "balance"), default="time", help="what --export is best for")
    parser.add_argument("--export", choices=tuple(exports.FORMATS), help="print the schedule in that trainer's terms, alone")
    parser.add_argument("--json", help="a file for all numbers; - prints them, alone")
    parser.add_argument("--out", help="the PNG to write; default: whatif.png in the run's folder")
    args = parser.parse_args(argv)
    try:
        check(args)
        show(args, *predict_all(args))
    except ConfigError as e:
        configurator.die(e)
    except OSError as e:
        configurator.die(f"{e.filename or 'output'}: {e.strerror}: --out and --json say where to write")
    return 0


def show(args, result, run, phases, machine):
    """Numbers, export, words and picture, each where it was asked for."""
    alone = args.export or args.json == "-"
    if args.json == "-":
        print(json.dumps(result, indent=2))
    elif args.json:
        checkpoint.write_json(args.json, result)
    if args.export and args.json != "-":
        print(result["export"])
    if not alone:
        print(words(result, run, machine.cost, args))
    if args.out or not alone:
        from plots import whatif as picture
        path = picture.draw(result, phases, run.block, machine.cost, args.out or os.path.join(run.folder, "whatif.png"))
        print(f"Picture: {path}", file=sys.stderr if alone else sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
