"""
sweep.py memory and sweep.py throughput: trials of a few steps (trial.py), each in a process of its own.

    python sweep.py memory config/x.py                            # up to what the machine has free
    python sweep.py memory config/x.py --memory_limit=4G --timeout=120
    python sweep.py throughput config/x.py                        # with the micro-batch that memory found
    python sweep.py throughput config/x.py --accumulations=1,4    # only these

memory: micro-batches 1, 2, 4, ... until one does not fit, then between the last that does and the first that does not, and
around the fastest; without and with activation checkpointing. torch.compile is tried once, at the fastest, or half of it if
that does not fit, and swept like the others if that beats it. --activation_checkpointing=none and --compile=False leave these
out. Of all that are within 3% of the best speed it takes the smallest micro-batch: the batch then moves in the smallest steps,
and memory is left for other things.

throughput: with that micro-batch m, effective batches m, 2m, ... 16m, or those of --accumulations. The update costs the same
whatever the batch, so its share falls with accumulation; memory must not grow beyond the one gradient that a second
micro-batch finds in its way.
"""

import dataclasses
import os
import time

from configurator import ConfigError
from plots import style
from sweeps import common, trial
from system import files, memory, points
from trainer import batches, hardware, log

OPTIONS = {"none": "", "block": ", checkpointed"}
GROWTH = 0.02  # share of the peak that memory may differ by between accumulations: the allocator is not exact
START_UP = 6.0  # seconds of a process before its first step, for estimates
OTHER_STEPS = 2  # of a trial, beside the measured ones: the warm-up, and one that counts bytes


def throughput_arguments(parser):
    trial_arguments(parser)
    parser.add_argument("--accumulations", default="1,2,4,8,16", help="micro-batches in a step")


def trial_arguments(parser):
    common.arguments(parser)
    parser.add_argument("--memory_limit", help="bytes that a trial may take, e.g. 4G; default: on a CPU 80%% of what is free, "
                                               "on CUDA all")
    parser.add_argument("--timeout", default="300", help="seconds after which a trial counts as hanging")
    parser.add_argument("--seconds", default="2", help="measure for at least so long (and at least 3 steps)")
    parser.add_argument("--within", default="0.03", help="speeds closer than this share count as equal")
    parser.add_argument("--retry", action="store_true", help="try again what did not fit, hung or failed")


def memory_arguments(parser):
    trial_arguments(parser)
    parser.add_argument("--max_micro_batch", default="512", help="do not go beyond")
    parser.add_argument("--micro_batches", help="try exactly these, e.g. 1,4,6, without a search")


# -- what a trial is

def parse_bytes(text):
    """4G, 500M, 2.5GB, 1000000 -> bytes."""
    try:
        found = points.parse_count(text.strip().upper().removesuffix("B").replace("K", "k").replace("G", "B"))
    except ValueError:
        found = 0
    if not found:
        raise ConfigError(f"--memory_limit={text}: expected a number of bytes such as 4G or 500M")
    return found


class Trials:
    """Trials of one command: from its sweep.json, or run now and added to it. `rows` holds all of them."""

    def __init__(self, args, name, speed, warmup=None):
        """speed: the key of a row that the command goes by, and shows."""
        self.args, self.speed, self.warmup = args, speed, warmup
        self.config = common.parse(args)
        self.device = hardware.pick_device(self.config.device)
        self.timeout, self.seconds = common.number(args, "timeout", 1), common.number(args, "seconds")
        self.within = common.number(args, "within")
        asked = parse_bytes(args.memory_limit) if args.memory_limit else None
        self.vocab_size = batches.Dataset(self.config.dataset, self.config.block_size).vocab_size  # fails early, and here
        self.limit = asked or (int(0.8 * memory.available()) if self.device == "cpu" and memory.available() else None)
        self.folder = os.path.join(self.config.out_dir, "sweep", name)
        self.path = os.path.join(self.folder, common.NAME)
        if not args.dry_run:
            args.held.enter_context(files.only_writer(self.folder, ConfigError))
        self.settings = {**common.settings_of(self.config, self.device, self.vocab_size), "memory_limit": asked}
        self.rows = earlier_rows(self.path, self.settings, args.retry)

    def __call__(self, micro, accum=1, checkpointing="none", compile=False):
        what = {"micro_batch_size": micro, "accum": accum, "activation_checkpointing": checkpointing, "compile": compile}
        known = next((row for row in self.rows if all(row[k] == v for k, v in what.items())), None)
        if known:
            return known
        config = dataclasses.replace(self.config, micro_batch_size=micro, batch_size=micro * accum, compile=str(compile),
                                     batch_schedule="constant", activation_checkpointing=checkpointing)
        start = time.monotonic()
        found = trial.run({"config": vars(config), "accum": accum, "warmup_accum": self.warmup or accum,
                           "seconds": self.seconds, "timeout": self.timeout, "memory_limit": self.limit})
        self.rows.append({**what, **found, "seconds": round(time.monotonic() - start, 1)})
        self.write()
        print("  " + in_words(self.rows[-1], self.speed), flush=True)
        return self.rows[-1]

    def write(self, **more):
        os.makedirs(self.folder, exist_ok=True)
        files.write_json(self.path, {"command": self.args.asked, "settings": self.settings,
                                     "machine": common.machine(self.device), "rows": self.rows, **more})

    def estimate(self, sequences, trials):
        """What trials of so many sequences, all steps together, might take."""
        tokens = self.config.block_size * sequences
        return log.duration(trials * (START_UP + self.seconds) + tokens / common.speed(self.config, self.vocab_size))

    def finish(self, result, table, draw):
        self.write(result=result)
        common.finish(self.folder, result, table, draw)
        return 0 if result["take"] else 1


def earlier_rows(path, settings, retry=False):
    """The rows of a sweep that was made before with these settings; with `retry` only those that worked."""
    old = common.read_json(path)
    if not old:
        return []
    differ = [k for k in settings if common.as_json(settings[k]) != common.as_json(old["settings"].get(k))]
    if differ:
        listed = ", ".join(f"{k} is {settings[k]!r}, there it is {old['settings'].get(k)!r}" for k in differ)
        raise ConfigError(f"{path} is of other settings: {listed}; give another --out_dir, or remove it")
    return [r for r in old["rows"] if r["status"] == "ok" or not retry]


def name_of(row):
    return (f"micro-batch {row['micro_batch_size']}" + (f" x {row['accum']}" if row["accum"] > 1 else "")
            + OPTIONS[row["activation_checkpointing"]] + (", compiled" if row["compile"] else ""))


def in_words(row, speed):
    if row["status"] != "ok":
        return f"{name_of(row)}: {row['status']} ({row['why']})"
    return (f"{name_of(row)}: {row['micro_step_ms']:.0f} ms a micro-step, {log.count(row[speed])} tok/s, "
            f"{common.size(row['peak'])}")


def worked(rows):
    return [r for r in rows if r["status"] == "ok"]


def table(rows, columns):
    """Text of trials; columns {head: its cell of a row}. A trial that did not work shows what it was (WHAT), and its status."""
    cells = [(*columns, "")]
    for r in rows:
        ok = r["status"] == "ok"
        cells.append((*(show(r) if ok or head in WHAT else "-" for head, show in columns.items()),
                      "" if ok else r["status"]))
    return style.table(cells) + "\n"


WHAT = {"micro-batch": lambda r: str(r["micro_batch_size"]), "checkpointing": lambda r: r["activation_checkpointing"],
        "compile": lambda r: "on" if r["compile"] else "off",
        "batch": lambda r: str(r["micro_batch_size"] * r["accum"]), "micro-batches": lambda r: str(r["accum"])}
PEAK = {"peak": lambda r: common.size(r["peak"]), "allocated": lambda r: common.size(r["peak_allocated"])}


# -- memory

def memory_sweep(args):
    trials = Trials(args, "memory", "tok_per_sec_micro", warmup=2)
    largest = common.number(args, "max_micro_batch", 1, int)
    exactly = common.integers(args, "micro_batches") if args.micro_batches else None
    if args.dry_run:
        sizes = exactly or [m for m in (2**i for i in range(20)) if m <= largest]
        takes = trials.estimate(sum(sizes) * 2 * (OTHER_STEPS + trial.MIN_STEPS), 2 * len(sizes) + 1)
        until = "" if exactly else " until one does not fit, and between"
        print(f"would try micro-batches {', '.join(map(str, sizes))}{until}, "
              f"without and with activation checkpointing, and torch.compile once; limit {common.size(trials.limit)}\n"
              f"{len(trials.rows)} are done; at most about {takes} if all fit, {args.timeout} s each at most")
        return 0
    print(f"limit {common.size(trials.limit)}; rows are kept in {trials.path}", flush=True)
    given = any(a.startswith("--activation_checkpointing=") for a in args.rest)
    for checkpointing in [trials.config.activation_checkpointing] if given else ["none", "block"]:
        search(lambda m: trials(m, checkpointing=checkpointing), largest, exactly)
    best = fastest(trials.rows)
    if best and trials.config.compile != "False":
        def compiled(m):
            return trials(m, checkpointing=best["activation_checkpointing"], compile=True)
        once = compiled(best["micro_batch_size"])
        if once["status"] != "ok" and best["micro_batch_size"] > 1:  # the fastest may be the largest; compiling takes memory
            once = compiled(best["micro_batch_size"] // 2)
        if once["status"] == "ok" and once["tok_per_sec_micro"] > best["tok_per_sec_micro"] * (1 + trials.within):
            search(compiled, largest, exactly)
    result = memory_result(trials.rows, trials.within, args)
    return trials.finish(result, memory_table(trials.rows), lambda path: draw_memory(trials.rows, result, path))


def search(measure, largest, exactly=None):
    """Doubling until one does not fit (or hangs, or fails), then the frontier to an eighth, then around the fastest."""
    if exactly:
        for m in exactly:
            measure(m)
        return
    rows, m = {}, 1
    while m <= largest:
        rows[m] = measure(m)
        if rows[m]["status"] != "ok":
            break
        m *= 2
    fits = [m for m, row in rows.items() if row["status"] == "ok"]
    if not fits:
        return
    low, high = max(fits), next((m for m, row in rows.items() if row["status"] != "ok"), None)
    if high and rows[high]["status"] == "out of memory":
        while high - low > max(1, low // 8):
            middle = (low + high) // 2
            rows[middle] = measure(middle)
            low, high = (middle, high) if rows[middle]["status"] == "ok" else (low, middle)
    best = fastest(rows.values())["micro_batch_size"]
    for m in (best * 3 // 4, best * 3 // 2):
        if m not in rows and 0 < m < (high or largest + 1):
            measure(m)


def fastest(rows):
    return max(worked(rows), key=lambda r: r["tok_per_sec_micro"], default=None)


def memory_result(rows, within, args):
    best = fastest(rows)
    if not best:
        return {"take": None, "says": ["Nothing fits: take a smaller model or block_size, or a larger --memory_limit."],
                "next": []}
    good = [r for r in worked(rows) if r["tok_per_sec_micro"] >= (1 - within) * best["tok_per_sec_micro"]]
    take = min(good, key=lambda r: (r["micro_batch_size"], r["activation_checkpointing"] != "none", r["compile"]))
    largest = {}
    for r in worked(rows):
        option = r["activation_checkpointing"]
        largest[option] = max(largest.get(option, 0), r["micro_batch_size"])
    keys = {"micro_batch_size": take["micro_batch_size"], "activation_checkpointing": take["activation_checkpointing"],
            "compile": str(take["compile"])}
    return {"take": keys, "largest": largest, "within": within, "says": memory_verdict(rows, largest, best, take, within),
            "next": common.what_next(keys, "sweep.py throughput", args)}


def memory_verdict(rows, largest, best, take, within):
    says = []
    for option, most in largest.items():
        beyond = min((r for r in rows if r["activation_checkpointing"] == option and r["status"] != "ok"
                      and r["micro_batch_size"] > most), key=lambda r: r["micro_batch_size"], default=None)
        says.append(f"Largest micro-batch{OPTIONS[option]}: {most}" + (
            f"; {beyond['micro_batch_size']}: {beyond['status']}." if beyond else ", and none that was tried did not fit."))
    says.append(f"Take {name_of(take)}: the smallest within {within:.0%} of the best speed, "
                f"{log.count(best['tok_per_sec_micro'])} tok/s ({name_of(best)}), in {common.size(take['peak'])}. A larger one "
                "would only coarsen the steps in which the batch moves.")
    compiled, eager = (fastest([r for r in rows if r["compile"] is on]) for on in (True, False))
    if compiled and eager:
        says.append(f"torch.compile at its best (micro-batch {compiled['micro_batch_size']}): "
                    f"{compiled['tok_per_sec_micro'] / eager['tok_per_sec_micro']:.2f} times the best speed without.")
    return says


def memory_table(rows):
    rows = sorted(rows, key=lambda r: (r["compile"], r["activation_checkpointing"] != "none", r["micro_batch_size"]))
    return table(rows, {**{head: WHAT[head] for head in ("micro-batch", "checkpointing", "compile")}, **PEAK,
                        "ms a micro-step": lambda r: f"{r['micro_step_ms']:.1f}",
                        "tok/s": lambda r: log.count(r["tok_per_sec_micro"]), "of ceiling": lambda r: f"{r['ceiling']:.0%}"})


def draw_memory(rows, result, path):
    figure, (left, right) = style.panels(2, 11, 4.6)
    groups = {}
    for r in sorted(rows, key=lambda r: (r["compile"], r["activation_checkpointing"] != "none", r["micro_batch_size"])):
        groups.setdefault((r["compile"], r["activation_checkpointing"]), []).append(r)
    for color, ((compiled, option), own) in zip(style.COLORS, groups.items()):
        name = ("no checkpointing" if option == "none" else "every block checkpointed") + (", compiled" if compiled else "")
        micro = [r["micro_batch_size"] for r in worked(own)]
        left.plot(micro, [r["peak"] / 1e9 for r in worked(own)], "o-", color=color, ms=5, label=name)
        right.plot(micro, [r["tok_per_sec_micro"] for r in worked(own)], "o-", color=color, ms=5, label=name)
        for r in (r for r in own if r["status"] != "ok"):
            left.axvline(r["micro_batch_size"], color=color, ls=":", lw=1)
    if result["take"]:
        right.axvline(result["take"]["micro_batch_size"], color="#444444", ls="--", lw=1, label="taken")
    style.dress(left, "Peak memory (GB; dotted: did not work)", "micro-batch (sequences)", "doublings", "zero")
    style.dress(right, "Tokens per second", "micro-batch (sequences)", "doublings", "zero")
    style.save(figure, path)


# -- throughput

def throughput(args):
    trials = Trials(args, "throughput", "tok_per_sec")
    keys, source = common.found_micro_batch(trials.config, args.rest, trials.settings)
    micro, accumulations = keys["micro_batch_size"], common.integers(args, "accumulations")
    print(f"micro-batch {micro}, {source}", flush=True)
    if args.dry_run:
        takes = trials.estimate(micro * sum(accumulations) * (OTHER_STEPS + trial.MIN_STEPS), len(accumulations))
        print(f"would try effective batches {', '.join(str(micro * a) for a in accumulations)}; about {takes}")
        return 0
    rows = [trials(micro, a, keys["activation_checkpointing"], keys["compile"] == "True") for a in accumulations]
    result = throughput_result(rows, keys, trials.within, args)
    return trials.finish(result, throughput_table(rows), lambda path: draw_throughput(worked(rows), path))


def throughput_result(rows, keys, within, args):
    ok = worked(rows)
    if not ok:
        return {"take": None, "says": [f"No trial worked: {rows[0]['status']} ({rows[0]['why']})."], "next": []}
    best = max(r["tok_per_sec"] for r in ok)
    take = next(r for r in ok if r["tok_per_sec"] >= (1 - within) * best)
    batch = take["micro_batch_size"] * take["accum"]
    says = [f"Speed: from batch {batch} on ({take['accum']} micro-batches) within {within:.0%} of the best, "
            f"{log.count(best)} tok/s; the update is {take['update_share']:.1%} of that step, {ok[0]['update_share']:.1%} at "
            f"accumulation {ok[0]['accum']}."]
    grows = memory_grows(ok)
    return {"take": {**keys, "batch_size": batch}, "memory_grows": grows["grows"], "says": [*says, grows["says"]],
            "next": common.what_next(keys, "sweep.py quality", args)}


def memory_grows(rows):
    """Whether peak memory grows with accumulation; the first step from one micro-batch to two may cost one gradient."""
    key = "peak_allocated" if all(r["peak_allocated"] for r in rows) else "peak"  # under a limit some may not be known
    several = [r[key] for r in rows if r["accum"] > 1]
    if len(several) < 2:
        return {"grows": None, "says": "Memory: too few accumulations worked to tell whether it grows."}
    one = next((r for r in rows if r["accum"] == 1), None)
    allowed = min([*several, *([one[key] + one["gradient_bytes"]] if one else [])])
    grows = max(several) > (1 + GROWTH) * allowed
    beside = f", {common.size(one[key])} with one, which has no gradient in its way" if one else ""
    return {"grows": grows, "says": f"Memory {'of tensors ' if key == 'peak_allocated' else ''}does {'' if grows else 'not '}"
            f"grow with accumulation: {common.size(min(several))} to {common.size(max(several))} with 2 micro-batches and more"
            f"{beside}."}


def throughput_table(rows):
    return table(rows, {"batch": WHAT["batch"], "micro-batches": WHAT["micro-batches"],
                        "ms a step": lambda r: f"{r['micro_step_ms'] * r['accum'] + r['update_ms']:.0f}",
                        "tok/s": lambda r: log.count(r["tok_per_sec"]), "update": lambda r: f"{r['update_share']:.1%}", **PEAK})


def draw_throughput(rows, path):
    figure, axes = style.panels(3, 12, 4.2)
    batch = [r["micro_batch_size"] * r["accum"] for r in rows]
    for ax, key, title in zip(axes, ("tok_per_sec", "update_share", "peak"), (
            "Tokens per second", "Update, share of the step", "Peak memory (bytes)")):
        ax.plot(batch, [r[key] for r in rows], "o-")
        style.dress(ax, title, "effective batch (sequences)", "doublings", "zero")
    style.save(figure, path)
