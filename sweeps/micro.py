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

import schedule
from configurator import ConfigError
from plots import style
from sweeps import common, trial
from system import files
from trainer import batches, hardware, log, plan

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
        found = schedule.parse_count(text.strip().upper().removesuffix("B").replace("K", "k").replace("G", "B"))
    except ValueError:
        found = 0
    if not found:
        raise ConfigError(f"--memory_limit={text}: expected a number of bytes such as 4G or 500M")
    return found


def free_memory():
    """Bytes that this machine could give to a new process; None where that is not known."""
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


class Rows:
    """The rows of a sweep of trials, in <folder>/sweep.json, written after every row."""

    def __init__(self, folder, command, settings, machine, retry=False):
        self.path = os.path.join(folder, common.NAME)
        self.saved = {"command": command, "settings": settings, "machine": machine, "rows": []}
        old = common.read_json(self.path)
        if old:
            differ = [k for k in settings if common.as_json(settings[k]) != common.as_json(old["settings"].get(k))]
            if differ:
                listed = ", ".join(f"{k} is {settings[k]!r}, there it is {old['settings'].get(k)!r}" for k in differ)
                raise ConfigError(f"{self.path} is of other settings: {listed}; give another --out_dir, or remove it")
            self.saved["rows"] = [r for r in old["rows"] if r["status"] == "ok" or not retry]

    def find(self, what):
        """The row of a trial {key: value}, or None."""
        return next((row for row in self.saved["rows"] if all(row[k] == v for k, v in what.items())), None)

    def add(self, row):
        self.saved["rows"].append(row)
        self.write()
        return row

    def write(self, **more):
        self.saved |= more
        files.write_json(self.path, self.saved)


class Trials:
    """Trials of one command: from sweep.json, or run now and added to it."""

    def __init__(self, args, name, speed, warmup=None):
        """speed: the key of a row that the command goes by, and shows."""
        self.args, self.speed, self.warmup = args, speed, warmup
        self.config = common.parse(args)
        self.device = hardware.pick_device(self.config.device)
        self.dtype = hardware.pick_dtype(self.config.dtype, self.device)
        self.vocab_size = batches.Dataset(self.config.dataset, self.config.block_size).vocab_size  # fails early, and here
        self.timeout, self.seconds = common.number(args, "timeout", 1), common.number(args, "seconds")
        self.within = common.number(args, "within")
        asked = parse_bytes(args.memory_limit) if args.memory_limit else None
        self.limit = asked or (int(0.8 * free_memory()) if self.device == "cpu" and free_memory() else None)
        self.folder = os.path.join(self.config.out_dir, "sweep", name)
        self.settings = {**common.settings_of(self.config, self.device, self.vocab_size), "memory_limit": asked}
        if not args.dry_run:
            args.held.enter_context(files.only_writer(self.folder, ConfigError))
        self.rows = Rows(self.folder, args.asked, self.settings, common.machine(self.device), args.retry)

    def __call__(self, micro, accum=1, checkpointing="none", compile=False):
        what = {"micro_batch_size": micro, "accum": accum, "activation_checkpointing": checkpointing, "compile": compile}
        row = self.rows.find(what)
        if row:
            return row
        os.makedirs(self.folder, exist_ok=True)
        config = dataclasses.replace(self.config, micro_batch_size=micro, batch_size=micro * accum, compile=str(compile),
                                     batch_schedule="constant", activation_checkpointing=checkpointing)
        start = time.monotonic()
        found = trial.run({"config": vars(config), "accum": accum, "warmup_accum": self.warmup or accum,
                           "seconds": self.seconds, "timeout": self.timeout, "memory_limit": self.limit})
        row = self.rows.add({**what, **found, "seconds": round(time.monotonic() - start, 1)})
        print("  " + in_words(row, self.speed), flush=True)
        return row

    def estimate(self, sequences, trials):
        """Seconds that trials of so many sequences, all steps together, might take."""
        ceiling = hardware.matmul_ceiling(self.device, self.dtype)
        flops = plan.flops_per_token(self.config, self.vocab_size) * self.config.block_size * sequences
        return trials * (START_UP + self.seconds) + flops / (common.GUESS * ceiling)

    def finish(self, result, picture):
        self.rows.write(result=result)
        path, line = common.where(self.folder)
        picture(self.rows.saved["rows"], result, path)
        return line


def name_of(row):
    return (f"micro-batch {row['micro_batch_size']}" + (f" x {row['accum']}" if row["accum"] > 1 else "")
            + OPTIONS[row["activation_checkpointing"]] + (", compiled" if row["compile"] else ""))


def in_words(row, speed):
    if row["status"] != "ok":
        return f"{name_of(row)}: {row['status']} ({row['why']})"
    return (f"{name_of(row)}: {row['micro_step_ms']:.0f} ms a micro-step, {log.count(row[speed])} tok/s, "
            f"{common.size(row['peak'])}")


# -- memory

def memory(args):
    trials = Trials(args, "memory", "tok_per_sec_micro", warmup=2)
    largest = common.number(args, "max_micro_batch", 1, int)
    exactly = common.integers(args, "micro_batches") if args.micro_batches else None
    if args.dry_run:
        sizes = exactly or [m for m in (2**i for i in range(20)) if m <= largest]
        seconds = trials.estimate(sum(sizes) * 2 * (OTHER_STEPS + trial.MIN_STEPS), 2 * len(sizes) + 1)
        until = "" if exactly else " until one does not fit, and between"
        print(f"would try micro-batches {', '.join(map(str, sizes))}{until}, "
              f"without and with activation checkpointing, and torch.compile once; limit {common.size(trials.limit)}\n"
              f"{len(trials.rows.saved['rows'])} are done; at most about {log.duration(seconds)} if all fit, "
              f"{args.timeout} s each at most")
        return 0
    print(f"limit {common.size(trials.limit)}; rows are kept in {trials.rows.path}", flush=True)
    given = any(a.startswith("--activation_checkpointing=") for a in args.rest)
    for checkpointing in [trials.config.activation_checkpointing] if given else ["none", "block"]:
        search(lambda m: trials(m, checkpointing=checkpointing), largest, exactly)
    best = fastest(trials.rows.saved["rows"])
    if best and trials.config.compile != "False":
        once = trials(best["micro_batch_size"], checkpointing=best["activation_checkpointing"], compile=True)
        if once["status"] != "ok" and best["micro_batch_size"] > 1:  # the fastest may be the largest; compiling takes memory
            once = trials(best["micro_batch_size"] // 2, checkpointing=best["activation_checkpointing"], compile=True)
        if once["status"] == "ok" and once["tok_per_sec_micro"] > best["tok_per_sec_micro"] * (1 + trials.within):
            search(lambda m: trials(m, checkpointing=best["activation_checkpointing"], compile=True), largest, exactly)
    result = memory_result(trials.rows.saved["rows"], trials.within, args)
    where = trials.finish(result, draw_memory)
    print(memory_table(trials.rows.saved["rows"], result), *result["says"], where, "", *result["next"], sep="\n")
    return 0 if result["take"] else 1


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
    return max((r for r in rows if r["status"] == "ok"), key=lambda r: r["tok_per_sec_micro"], default=None)


def frontier(rows):
    """Rows that no other beats in both speed and memory, by memory."""
    found = []
    for row in sorted((r for r in rows if r["status"] == "ok"), key=lambda r: (r["peak"], -r["tok_per_sec_micro"])):
        if not found or row["tok_per_sec_micro"] > found[-1]["tok_per_sec_micro"]:
            found.append(row)
    return found


def memory_result(rows, within, args):
    best = fastest(rows)
    if not best:
        return {"take": None, "says": ["Nothing fits: take a smaller model or block_size, or a larger --memory_limit."],
                "next": []}
    good = [r for r in rows if r["status"] == "ok" and r["tok_per_sec_micro"] >= (1 - within) * best["tok_per_sec_micro"]]
    take = min(good, key=lambda r: (r["micro_batch_size"], r["activation_checkpointing"] != "none", r["compile"]))
    fits = {option: [r["micro_batch_size"] for r in rows if r["activation_checkpointing"] == option and r["status"] == "ok"]
            for option in OPTIONS}
    largest = {option: max(sizes) for option, sizes in fits.items() if sizes}
    keys = {**what_of(take), "compile": str(take["compile"])}
    return {"take": keys, "largest": largest, "within": within, "frontier": [what_of(r) for r in frontier(rows)],
            "says": memory_verdict(rows, largest, best, take, within),
            "next": common.what_next(keys, "sweep.py throughput", args)}


def what_of(row):
    return {k: row[k] for k in ("micro_batch_size", "activation_checkpointing", "compile")}


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
    failed = next((r for r in rows if r["compile"] and r["status"] != "ok"), None)
    if compiled and eager:
        share = compiled["tok_per_sec_micro"] / eager["tok_per_sec_micro"]
        says.append(f"torch.compile at its best (micro-batch {compiled['micro_batch_size']}): {share:.2f} times the best speed "
                    "without.")
    elif failed and not compiled:
        says.append(f"torch.compile: {failed['status']} ({failed['why']}).")
    return says


def memory_table(rows, result):
    marked = result.get("frontier", [])
    cells = [("micro-batch", "checkpointing", "compile", "peak", "allocated", "ms a micro-step", "tok/s", "of ceiling", "")]
    for r in sorted(rows, key=lambda r: (r["compile"], r["activation_checkpointing"] != "none", r["micro_batch_size"])):
        what = (str(r["micro_batch_size"]), r["activation_checkpointing"], "on" if r["compile"] else "off")
        if r["status"] != "ok":
            cells.append((*what, "-", "-", "-", "-", "-", r["status"]))
            continue
        cells.append((*what, common.size(r["peak"]), common.size(r["peak_allocated"]), f"{r['micro_step_ms']:.1f}",
                      log.count(r["tok_per_sec_micro"]), f"{r['ceiling']:.0%}", "frontier" if what_of(r) in marked else ""))
    return style.table(cells) + "\n"


def draw_memory(rows, result, path):
    figure, (left, right) = style.pyplot().subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    groups = {}
    for r in sorted(rows, key=lambda r: r["micro_batch_size"]):
        groups.setdefault((r["compile"], r["activation_checkpointing"]), []).append(r)
    base = min((r["before"] for r in rows if r.get("before")), default=None)
    order = sorted(groups, key=lambda g: (g[0], g[1] != "none"))
    for color, (compiled, option), own in zip(style.COLORS, order, (groups[g] for g in order)):
        name = ("no checkpointing" if option == "none" else "every block checkpointed") + (", compiled" if compiled else "")
        ok = [r for r in own if r["status"] == "ok"]
        micro = [r["micro_batch_size"] for r in ok]
        left.plot(micro, [r["peak"] / 1e9 for r in ok], "o-", color=color, ms=5, label=name)
        right.plot(micro, [r["tok_per_sec_micro"] for r in ok], "o-", color=color, ms=5, label=name)
        for r in own:
            if r["status"] != "ok":
                left.axvline(r["micro_batch_size"], color=color, ls=":", lw=1)
                left.annotate(r["status"], (r["micro_batch_size"], 0.03), rotation=90, fontsize=9, color=color, ha="right",
                              xycoords=left.get_xaxis_transform())
    if base:
        left.axhline(base / 1e9, color="#888888", ls="--", lw=1, label="libraries, before there is a model")
    if result["take"]:
        right.axvline(result["take"]["micro_batch_size"], color="#444444", ls="--", lw=1, label="taken")
    left.set_title("Peak memory (GB)")
    right.set_title("Tokens per second")
    style.counts(right.yaxis)
    for ax in (left, right):
        style.doublings(ax)
        ax.set_ylim(bottom=0)
        ax.set_xlabel("micro-batch (sequences)")
        ax.legend()
    style.save(figure, path)


# -- throughput

def throughput(args):
    trials = Trials(args, "throughput", "tok_per_sec")
    keys, source = common.found_micro_batch(trials.config, args.rest, trials.settings)
    micro, accumulations = keys["micro_batch_size"], common.integers(args, "accumulations")
    print(f"micro-batch {micro}, {source}", flush=True)
    if args.dry_run:
        seconds = trials.estimate(micro * sum(accumulations) * (OTHER_STEPS + trial.MIN_STEPS), len(accumulations))
        print(f"would try effective batches {', '.join(str(micro * a) for a in accumulations)}; about {log.duration(seconds)}")
        return 0
    rows = [trials(micro, a, keys["activation_checkpointing"], keys["compile"] == "True") for a in accumulations]
    result = throughput_result(rows, keys, trials.within, args)
    where = trials.finish(result, lambda _, *rest: draw_throughput(rows, *rest))
    print(throughput_table(rows), *result["says"], where, "", *result["next"], sep="\n")
    return 0 if result["take"] else 1


def throughput_result(rows, keys, within, args):
    ok = [r for r in rows if r["status"] == "ok"]
    if not ok:
        return {"take": None, "says": [f"No trial worked: {rows[0]['status']} ({rows[0]['why']})."], "next": []}
    best = max(r["tok_per_sec"] for r in ok)
    take = next(r for r in ok if r["tok_per_sec"] >= (1 - within) * best)
    batch = take["micro_batch_size"] * take["accum"]
    says = [f"Speed: from batch {batch} on ({take['accum']} micro-batches) within {within:.0%} of the best, "
            f"{log.count(best)} tok/s; the update is {take['update_share']:.1%} of that step, {ok[0]['update_share']:.1%} at "
            f"accumulation {ok[0]['accum']}."]
    grows = memory_grows(ok)
    says.append(grows["says"])
    return {"take": {**keys, "batch_size": batch}, "memory_grows": grows["grows"], "says": says,
            "next": common.what_next(keys, "sweep.py quality", args)}


def memory_grows(rows):
    """Whether peak memory grows with accumulation; the first step from one micro-batch to two may cost one gradient."""
    if sum(bool(r["peak_allocated"]) for r in rows if r["accum"] > 1) >= 2:  # under a limit some may not be known
        key, rows = "peak_allocated", [r for r in rows if r["peak_allocated"]]
    else:
        key = "peak"
    several = [r[key] for r in rows if r["accum"] > 1]
    if len(several) < 2:
        return {"grows": None, "says": "Memory: too few accumulations worked to tell whether it grows."}
    one = next((r for r in rows if r["accum"] == 1), None)
    extra = max(several) - one[key] if one else 0
    grows = max(several) > (1 + GROWTH) * min(several) or (one and extra > one["gradient_bytes"] + GROWTH * one[key])
    words = (f"Memory {'of tensors ' if key == 'peak_allocated' else ''}does {'' if grows else 'not '}grow with accumulation: "
             f"{common.size(min(several))} to {common.size(max(several))} with 2 micro-batches and more")
    if one:
        words += (f", {common.size(one[key])} with one; a second finds the first one's gradient "
                  f"({common.size(one['gradient_bytes'])}) in memory")
    process = [r["peak"] for r in rows]
    if key == "peak_allocated" and not grows and max(process) > (1 + GROWTH) * min(process):
        words += (f". The process itself went from {common.size(min(process))} to {common.size(max(process))}: pieces that the "
                  "allocator keeps and cannot use, so leave it room")
    return {"grows": bool(grows), "says": words + "."}


def throughput_table(rows):
    cells = [("batch", "micro-batches", "ms a step", "tok/s", "update", "peak", "allocated", "")]
    for r in rows:
        what = (str(r["micro_batch_size"] * r["accum"]), str(r["accum"]))
        if r["status"] != "ok":
            cells.append((*what, "-", "-", "-", "-", "-", r["status"]))
            continue
        cells.append((*what, f"{r['micro_step_ms'] * r['accum'] + r['update_ms']:.0f}", log.count(r["tok_per_sec"]),
                      f"{r['update_share']:.1%}", common.size(r["peak"]), common.size(r["peak_allocated"]), ""))
    return style.table(cells) + "\n"


def draw_throughput(rows, result, path):
    figure, axes = style.pyplot().subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    ok = [r for r in rows if r["status"] == "ok"]
    batch = [r["micro_batch_size"] * r["accum"] for r in ok]
    parts = (("Tokens per second", [r["tok_per_sec"] for r in ok], log.count),
             ("Update, share of the step", [r["update_share"] for r in ok], "{:.1%}".format),
             ("Peak memory (GB)", [r["peak"] / 1e9 for r in ok], "{:.3g}".format))
    for ax, color, (title, values, show) in zip(axes, style.COLORS, parts):
        ax.plot(batch, values, "o-", color=color)
        ax.set_title(title)
        style.doublings(ax, batch)
        ax.yaxis.set_major_formatter(lambda v, _, show=show: show(v))
        ax.set_ylim(0, 1.15 * max(values, default=1))
        ax.set_xlabel("effective batch (sequences)")
    if ok and all(r["peak_allocated"] for r in ok):
        axes[2].plot(batch, [r["peak_allocated"] / 1e9 for r in ok], "s--", color=style.COLORS[4], label="of tensors alone")
        axes[2].legend()
    style.save(figure, path)
