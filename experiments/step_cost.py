"""
Is what a run says of a step's cost true? t0 + t1 B from one run, against steps of other batches, on machines that differ.

    python experiments/step_cost.py                    # one process, two, two hosts at 200 and 50 Mbit/s: 10 minutes
    python experiments/step_cost.py --machines=one,two

The run that predicts takes one micro-batch a step, so timers inside the step must tell t0 from t1; the others accumulate.
Of one process, `sweep.py throughput` measures the same batches with clocks of its own: that stands beside it.
The machines are those of hosts.py: two hosts with a slow link need root.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

import hosts

sys.path.insert(0, hosts.ROOT)

from plots import style  # noqa: E402
from trainer import hardware, log, output  # noqa: E402

ACCUMULATIONS = (1, 2, 4, 8)
STEPS, EVERY = 60, 10  # log lines as often as in any run: they cost, too
SECONDS = 2  # that sweep.py throughput measures each batch


def run_settings(out, name, accum, settings):
    """Of a run of STEPS steps."""
    processes = hosts.MACHINES[name][0]
    micro = 8 // processes
    batch = accum * micro * processes
    return {"out_dir": out, "batch_schedule": "constant", "batch_size": batch, "micro_batch_size": micro,
            "max_tokens": STEPS * batch * 128, "warmup_tokens": 0, "eval_tokens": 0, "eval_iters": 8, "checkpoint_tokens": 0,
            "log_interval": EVERY, "gns_calibrate": False, "gns_half_life_tokens": 10**9, **settings}


def train(out, name, accum, settings):
    """One run; its log."""
    hosts.train(name, run_settings(out, name, accum, settings))
    return [r for r in log.read(out) if "train/loss" in r]


def throughput(out, settings):
    """{batch: ms of a step} of one process, by sweep.py throughput."""
    shutil.rmtree(out, ignore_errors=True)
    given = [f"--{k}={v}" for k, v in run_settings(out, "one", 1, settings).items()]
    command = [sys.executable, os.path.join(hosts.ROOT, "sweep.py"), "throughput", *given, f"--seconds={SECONDS}",
               f"--accumulations={','.join(map(str, ACCUMULATIONS))}"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: sweep.py throughput ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    with open(os.path.join(out, "sweep", "throughput", "sweep.json")) as f:
        rows = [row for row in json.load(f)["rows"] if row["status"] == "ok"]
    return {row["micro_batch_size"] * row["accum"]: row["micro_step_ms"] * row["accum"] + row["update_ms"] for row in rows}


def measure(name, folder, settings):
    """{batch: predicted and taken ms of a step} on one machine, and its t0 and t1."""
    rows = []
    with hosts.machine(name):
        for accum in ACCUMULATIONS:
            out = os.path.join(folder, f"{name}-{accum}")
            shutil.rmtree(out, ignore_errors=True)
            found = train(out, name, accum, settings)
            if accum == 1:
                cost = {k: v for k, v in found[-1].items() if k.startswith("step_time/")}
            batch = found[-1]["batch_size"]
            predicted = cost["step_time/fixed_ms"] + batch * cost["step_time/per_sequence_ms"]
            taken = statistics.median(r["dt_ms"] for r in found[2:])  # the first rows warm up
            rows.append({"batch": batch, "predicted_ms": predicted, "taken_ms": taken, "ratio": predicted / taken})
            print(f"{name}: batch {batch}: {predicted:.1f} ms predicted, {taken:.1f} ms taken", flush=True)
    swept = throughput(os.path.join(folder, f"{name}-throughput"), settings) if name == "one" else {}
    for row in rows:
        if ms := swept.get(row["batch"]):
            row |= {"throughput_ms": ms, "ratio_throughput": row["predicted_ms"] / ms}
    return {"cost": cost, "ratio_t0_t1": cost["step_time/fixed_ms"] / cost["step_time/per_sequence_ms"], "rows": rows}


def finding(result):
    def furthest(ratios):
        return max(ratios, key=lambda r: abs(r - 1))
    worst = {name: furthest([r["ratio"] for r in own["rows"][1:]]) for name, own in result.items()}
    swept = [r["ratio_throughput"] for own in result.values() for r in own["rows"] if "ratio_throughput" in r]
    beside = f" Against what sweep.py throughput measures (one) it is at worst {furthest(swept):.2f}." if swept else ""
    ratios = ", ".join(f"{name} {own['ratio_t0_t1']:.2g}" for name, own in result.items())
    return ("From a run of one micro-batch a step, the time of larger steps is predicted with a ratio to the time taken of at "
            "worst " + ", ".join(f"{v:.2f} ({name})" for name, v in worst.items())
            + f".{beside} A step's fixed cost, in sequences: {ratios}.")


def table(result):
    """Predicted over taken, and, where it was measured, over what sweep.py throughput says."""
    cells = [("machine", "t0 ms", "t1 ms", "t0/t1", *(f"x{a}" for a in ACCUMULATIONS))]
    for name, own in result.items():
        cells.append((name, f"{own['cost']['step_time/fixed_ms']:.1f}", f"{own['cost']['step_time/per_sequence_ms']:.2f}",
                      f"{own['ratio_t0_t1']:.2f}", *(f"{r['ratio']:.3f}" for r in own["rows"])))
        if any("ratio_throughput" in r for r in own["rows"]):
            cells.append((f"{name}, sweep.py throughput", "", "", "", *(
                f"{r['ratio_throughput']:.3f}" if "ratio_throughput" in r else "-" for r in own["rows"])))
    return style.table(cells)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default=",".join(hosts.MACHINES))
    parser.add_argument("--out", default="out/step_cost")
    parser.add_argument("--results", default=os.path.join(hosts.ROOT, "results", "step_cost.json"))
    args, settings = parser.parse_known_args(argv)
    settings = dict(setting.removeprefix("--").split("=", 1) for setting in settings)
    result = {name: measure(name, args.out, settings) for name in hosts.names(args.machines)}
    print(table(result))
    output.write_json(args.results, {
        "command": " ".join(["python experiments/step_cost.py", *(argv or sys.argv[1:])]), "date": time.strftime("%Y-%m-%d"),
        "machine": {**hardware.facts("cpu"), "load_average": os.getloadavg()[0]}, "finding": finding(result),
        "machines": result})
    print(finding(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
