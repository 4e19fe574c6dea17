"""
What a step would cost on machines one does not have: formulas, no measurement, every assumption in words (whatif.py --devices).

    t1 = FLOPs of a sequence / (devices x peak x MFU), or, on the run's own kind, as measured, shared by all devices
    t0 = what a device does once per step (update, host) + a ring all-reduce of float32 gradients, none of it hidden:
         2 (n - 1)/n x 4 bytes x parameters / bandwidth + 2 (n - 1) x latency
    On a kind, a micro-batch and the update take at least LAUNCHES_MS each: a host launches kernels no faster.
"""

import math
import re
from types import SimpleNamespace

from configurator import ConfigError
from rightbatch.decision import Cost
from trainer import log, plan, predict

# (bytes per second in one direction, seconds per message): bandwidths as data sheets give them, latencies assumed
LINKS = {"nvlink4": (450e9, 2e-6), "ndr": (50e9, 5e-6), "hdr": (25e9, 5e-6), "100gbit": (12.5e9, 30e-6),
         "10gbit": (1.25e9, 30e-6), "1gbit": (125e6, 50e-6)}
DEFAULT_LINK = "ndr"
LAUNCHES_MS = 2  # hundreds of kernels of some microseconds each
LATENCY = 30e-6  # of a link given by its bandwidth alone


def parse_link(text):
    """(bytes per second, seconds per message) of a name in LINKS, or of 25GB/s, 200Mbit or 200Mbit:500us."""
    if text.lower() in LINKS:
        return LINKS[text.lower()]
    try:
        number, size, unit, latency, scale = re.fullmatch(
            r"([\d.]+) ?([kMGT])(bit|b|B)(?:/s|ps)?(?::([\d.]+) ?(us|ms))?", text).groups()
        rate = float(number) * 1000.0 ** (" kMGT".index(size)) / (1 if unit == "B" else 8)
        if rate <= 0:
            raise ValueError
        return rate, float(latency) * {"us": 1e-6, "ms": 1e-3}[scale] if latency else LATENCY
    except (AttributeError, ValueError):
        raise ConfigError(f"command line: --link={text}: expected {', '.join(LINKS)}, or a bandwidth such as 25GB/s, 200Mbit "
                          "or 200Mbit:500us (with its latency)") from None


def all_reduce(parameters, devices, link):
    """Seconds of a ring all-reduce of float32 gradients."""
    bandwidth, latency = link
    return 2 * (devices - 1) / devices * 4 * parameters / bandwidth + 2 * (devices - 1) * latency


def flops_per_sequence(run):
    return run.block * plan.flops_per_token(SimpleNamespace(**run.config), run.facts["data"]["vocab_size"])


def assume(run, measured, args):
    """The assumptions in words, in the order of the formulas."""
    kind, mfu, link, micro = args.kind, args.mfu, args.link, args.micro or run.micro
    bandwidth, latency = parse_link(link)
    lines = [f"each of them takes micro-batches of {micro} at full speed: the smallest batch is {micro} x devices"]
    if kind:
        peak = plan.KINDS[kind][0]
        pass_ms = 1e3 * micro * flops_per_sequence(run) / (peak * mfu)
        if pass_ms < LAUNCHES_MS:
            lines.insert(0, f"this model is too small for the {kind} with micro-batches of {micro}: one would take "
                            f"{pass_ms:.2g} ms, and a host needs about {LAUNCHES_MS} ms to launch its kernels; take a larger "
                            "--micro")
        lines.append(f"each {kind} reaches {mfu:.0%} of its {peak / 1e12:.0f} TFLOP/s (--mfu), whatever this run reached")
        lines.append("what a device does once per step takes as many sequences' time there as measured here" if measured else
                     "this run does not tell what a device does once per step: it takes as long as launching its kernels")
        lines.append(f"a micro-batch, and what a device does once per step, take at least {LAUNCHES_MS} ms each: a host "
                     "launches kernels no faster")
    else:
        lines.append("devices like this run's: time per sequence as measured, shared evenly")
    lines.append(f"gradients travel as float32 in a ring over {link}: {bandwidth / 1e9:g} GB/s, {1e6 * latency:g} us per "
                 "message, for all pairs alike; nothing of it is hidden behind the backward pass")
    if run.devices > 1 and measured:
        lines.append(f"the measured fixed cost of {run.devices} processes, less such an all-reduce, is what one does alone")
    return lines


def cost_on(run, measured, devices, args):
    """Cost of a step on so many devices of args.kind, or, without one, like the run's. Errors are the measured ones; those of
    the assumptions are not known."""
    parameters = run.facts.get("parameters")
    if not parameters or "n_layer" not in run.config or "vocab_size" not in run.facts.get("data", {}):
        raise ConfigError(f"--devices: {run.folder}/config.json is missing or lacks the model, which the formulas need")
    if measured is None and not args.kind:
        raise ConfigError("--devices: the run does not tell what a sequence costs here, so give --kind=... to take it from a "
                          "data sheet")
    launches = 1e-3 * LAUNCHES_MS if args.kind else 0.0
    if args.kind:
        computed = flops_per_sequence(run) / (plan.KINDS[args.kind][0] * args.mfu)
        alone = (max(computed, launches / (args.micro or run.micro)),) * 3
    else:
        alone = tuple(v * run.devices for v in measured.per_sequence)
    wire = parse_link(args.link)
    local = (launches,) * 3
    if measured:
        here = all_reduce(parameters, run.devices, wire)
        scale = alone[0] / (measured.per_sequence[0] * run.devices)
        local = tuple(max((v - here) * scale, launches) for v in measured.fixed)
    wired = all_reduce(parameters, devices, wire)
    return Cost(tuple(v + wired for v in local), tuple(v / devices for v in alone), "by formula")


def table(run, phases, measured, args):
    """What each number of devices takes at its right batch."""
    rows = []
    for n in args.devices:
        cost = cost_on(run, measured, n, args)
        batch = predict.fastest_constant(phases, cost, n * (args.micro or run.micro))
        row = predict.row_at(phases, batch, run.block, cost, args.price * n / 3600 if args.price else None)
        limit = min(3600 * args.hours if args.hours else math.inf,
                    3600 * args.budget / (args.price * n) if args.budget else math.inf)
        rows.append({"devices": n, **row, "device_hours": n * row["seconds"] / 3600, "in_time": row["seconds"] <= limit,
                      "fixed_ms": 1e3 * cost.fixed[0], "per_sequence_ms": 1e3 * cost.per_sequence[0]})
    return rows


def worth(rows, limited):
    """Sentences: how many devices are worth having: more of them should save a tenth of the time with each doubling."""
    rows = sorted(rows, key=lambda r: r["devices"])
    cheapest, fastest = (min(rows, key=lambda r: r[key]) for key in ("device_hours", "seconds"))
    lines = [f"Fewest device-hours: {cheapest['devices']} ({log.count(cheapest['device_hours'])} in "
             f"{span(cheapest['seconds'])}). Fastest: {fastest['devices']} ({log.count(fastest['device_hours'])} in "
             f"{span(fastest['seconds'])})."]
    if limited:
        able = [str(r["devices"]) for r in rows if r["in_time"]]
        lines.append(f"Within the deadline or budget, at that batch: {', '.join(able) or 'none of them'}.")
    for before, row in zip(rows, rows[1:]):
        saved, more = 1 - row["seconds"] / before["seconds"], row["device_hours"] / before["device_hours"] - 1
        enough = 1 - 0.9 ** math.log2(row["devices"] / before["devices"])
        step = f"{before['devices']} to {row['devices']} devices"
        lines.append(f"  {step}: {saved:.0%} less time for {more:.0%} more device-hours" if saved >= enough else
                     f"  {step}: only burns money, {saved:.0%} less time for {more:.0%} more device-hours" if saved > 0 else
                     f"  {step}: slower, {1 - saved:.3g} times as long for {1 + more:.3g} times the device-hours")
    return lines


def span(seconds):
    """A time in words that fit its size."""
    return f"{seconds:.3g} s" if seconds < 60 else log.duration(seconds) if seconds < 360000 else plan.length(seconds)
