"""
Predictions in words: what whatif.py prints, and what a run says at its end.
"""

from configurator import ConfigError
from rightbatch.decision import MEASURED, TUNED
from trainer import log, machines, predict
from trainer.reader import named_noise

CANNOT_TELL = "it made too few steps to tell what a step costs from what a sequence costs"
ON_THE_WAY = ("At this loss the learning rate had not yet come down to its end. For such losses predictions were off by a "
              "factor of 1.30 to 1.45 from batch 8 to 32 (docs/evidence.md).")


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
    several = "devices" in result  # numbers of devices, whose table comes last, below what is assumed of them
    assumptions = assumed(result)
    lines = [about_run(result, run), about_noise(result, run), about_cost(result, run, cost), ""]
    lines += [] if several else assumptions
    lines += ["To the same loss, at a constant batch (in brackets: 95% intervals of what was measured):"]
    lines += table(result["rows"], "batch") + [f"{TUNED} {predict.CHECKED}"] + about_loss(result)
    if cost and min(row["batch"] for row in result["rows"]) < result["machine"]["quantum"]:
        lines.append(f"Below {result['machine']['quantum']}, micro-batch x devices, a sequence costs more than this says.")
    lines += [""] + about_right(result, cost) + about_lost(result, cost)
    if "deadline" in result:
        lines += about_deadline(result["deadline"])
    if several:
        lines += ["", *assumptions, "On other machines, each number of devices at its right batch:"]
        lines += table(result["devices"], "devices") + machines.worth(result["devices"], args.hours or args.budget)
    return "\n".join(lines)


def assumed(result):
    lines = [f"  - {line}" for line in result.get("assumptions", [])]
    return ["Assumed of machines that were not measured:", *lines, ""] if lines else []


def about_run(result, run):
    taken = result["own"]
    whole = taken["steps"] == run.steps[-1]["step"] - predict.beginning(run)["step"]
    low, high = (f"{taken[end]:.0f}" for end in ("batch_low", "batch_high"))
    return (f"{result['run']}: {log.count(taken['tokens'])} tokens in {taken['steps']:.0f} steps of "
            f"{low if low == high else f'{low} to {high}'} sequences, {machines.span(taken['seconds_taken'])}, to a "
            f"{result['loss_kind']} loss of {result['loss']:.4f}{', its end' if whole else ''}.")


def about_noise(result, run):
    n = result["noise"]
    text = (f"Noise scale: {n['lowest']:.3g} to {n['highest']:.3g} sequences on the way, "
            f"{interval(n, 'mean', '{:.3g}'.format)} on average. The average counts each step by its progress. "
            f"This is the noise scale of {named_noise(n['key'])} ({n['key']}).")
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
    fixed, each = (interval(result["step_time"], name, "{:.3g}".format) for name in ("fixed_ms", "per_sequence_ms"))
    text = f"A step takes {fixed} ms, and {each} ms for each sequence, {cost.source}"
    if not result["machine"]["measured"]:
        return f"{text} for {log.plural(result['machine']['devices'], 'device')}."
    at_that_speed, taken = (machines.span(result["own"][key]) for key in ("seconds", "seconds_taken"))
    text += f". At that speed this run's steps take {at_that_speed}; they took {taken}."
    alone = run.config.get("parallel") == "fsdp" and run.devices > 1 and run.steps[-1].get("accum") == 1
    if alone and cost.source == MEASURED:
        text += (" Communication counts as time of the sequences: with FSDP and one micro-step a step it cannot be told apart. "
                 "So the right batch for time is larger than said here.")
    return text


def about_loss(result):
    return [] if result["at_the_end"] else [ON_THE_WAY]


def about_right(result, cost):
    right, machine, noise = result["right_batch"], result["machine"], result["noise"]
    lines = []
    if cost:
        best = result["best_constant"]
        text = f"Right batch for time: {right['time']}"
        if right["time_high"] > right["time_low"]:
            text += f" ({right['time_low']} to {right['time_high']})"
        if right["time"] == machine["quantum"]:
            text += (f", the smallest that {where(machine)} well: the fixed part of a step takes as long as "
                     f"{cost.ratio()[0]:.2g} sequences, too little for a larger batch to pay")
        lines.append(f"{text}. A constant {best['batch']} takes {machines.span(best['seconds'])} and "
                     f"{log.count(best['tokens'])} tokens.")
        stages = result["best_schedule"]["stages"]
        if len(stages) > 1:
            steps = ", ".join(f"{log.count(s['tokens'])}:{s['batch']}" for s in stages)
            lines.append(f"Best schedule for time, tokens:batch: {steps}. It takes "
                         f"{machines.span(result['best_schedule']['seconds'])}; --export writes it for a trainer.")
    lines.append(f"Right batch for tokens: {right['tokens']}, the smallest that {where(machine)} well. Balance of both: "
                 f"{right['balance']}; the noise scale is {noise['mean']:.3g} over all, {noise['at_the_end']:.3g} at the end.")
    return lines


def where(machine):
    return "one device runs" if machine["devices"] == 1 else f"{machine['devices']} devices run"


def about_lost(result, cost):
    """What the run's own schedule cost or gained against the best."""
    lost, parts = result["lost"], []
    if lost is None:
        return []
    if cost:
        parts.append(against(lost["time"], "time", f"a constant {result['best_constant']['batch']}"))
        if len(result["best_schedule"]["stages"]) > 1:
            parts.append(against(lost["time_schedule"], "time", "the best schedule"))
    parts.append(against(lost["tokens"], "tokens", f"a constant {result['right_batch']['tokens']}"))
    took = "This run's own batches took " if result["machine"]["measured"] else "There, this run's own batches would take "
    return [f"{took}{', '.join(parts)}."]


def against(part, what, other):
    """A share of predict.lost in words: 11% more time than a constant 8 (8% to 15%)."""
    def more(v):
        return f"{abs(v):.0%} {'more' if v >= 0 else 'less' if what == 'time' else 'fewer'}"
    share, low, high = part["share"], part["low"], part["high"]
    spread = f" (from {more(low)} to {more(high)})"
    if high - low < 0.005:
        spread = ""
    elif low * share > 0 and high * share > 0:  # all more, or all less: said once
        spread = " ({:.0%} to {:.0%})".format(*sorted((abs(low), abs(high))))
    if abs(share) < 0.005:
        return f"as {'much' if what == 'time' else 'many'} {what} as {other}{spread}"
    return f"{more(share)} {what} than {other}{spread}"


def about_deadline(answer):
    within, took = machines.span(answer["within"]), interval(answer, "seconds", machines.span)
    if answer["budget"]:
        within = f"{answer['budget']:g} ({within})"
    if "money" in answer:
        took += f" for {interval(answer, 'money', '{:.3g}'.format)}"
    if not answer["possible"]:
        return [f"Within {within} this loss cannot be reached: the fastest batch, {answer['batch']}, takes {took}."]
    safe = "" if answer["seconds_high"] <= answer["within"] else "; its interval reaches beyond"
    return [f"Within {within}: batch {answer['batch']} is the one with the fewest tokens, {log.count(answer['tokens'])}, in "
            f"{took}{safe}."]


def right_batch(folder):
    """What a run says at its end: the right batch on its machine, and what its own batches cost or gained. Nothing where its
    log does not tell."""
    try:
        result, run, _ = predict.of_run(folder)
    except ConfigError:
        return []
    cost = predict.step_cost(run)
    return [about_cost(result, run, cost), *about_right(result, cost), *about_lost(result, cost), TUNED,
            *about_loss(result)]
