"""
Is what a run says of a step's cost true? t0 + t1 B from one run, against steps of other batches, on machines that differ.

    python experiments/step_cost.py                    # one process, two, two hosts at 200 and 50 Mbit/s: 10 minutes
    python experiments/step_cost.py --machines=one,two

The run that predicts takes one micro-batch a step, so timers inside the step must tell t0 from t1; the others accumulate.
Of one process, `sweep.py throughput` measures the same batches with clocks of its own: that stands beside it.
The machines are those of hosts.py: two hosts with a slow link need root.
"""

import json
import os
import shutil
import statistics
import sys

import hosts
from common import ROOT, Experiment

from benchmarks import tools
from trainer import log

ACCUMULATIONS = (1, 2, 4, 8)
STEPS, EVERY = 60, 10  # log lines as often as in any run: they cost, too
SECONDS = 2  # that sweep.py throughput measures each batch


def run_settings(config, out, name, accum):
    """Of a run of STEPS steps."""
    processes = hosts.MACHINES[name][0]
    batch = 8 * accum
    return {**vars(config), "out_dir": out, "batch_schedule": "constant", "batch_size": batch, "batch_size_start": batch,
            "micro_batch_size": 8 // processes, "max_tokens": STEPS * batch * config.block_size, "warmup_tokens": 0,
            "eval_tokens": 0, "eval_iters": 8, "checkpoint_tokens": 0, "log_interval": EVERY, "gns_calibrate": False,
            "gns_half_life_tokens": 10**9}


def train(config, out, name, accum):
    """One run; its log."""
    hosts.train(name, run_settings(config, out, name, accum))
    return log.steps(log.read(out))


def throughput(config, out):
    """{batch: ms of a step} of one process, by sweep.py throughput."""
    shutil.rmtree(out, ignore_errors=True)
    given = {**run_settings(config, out, "one", 1), "seconds": SECONDS, "accumulations": ",".join(map(str, ACCUMULATIONS))}
    tools.process([sys.executable, os.path.join(ROOT, "sweep.py"), "throughput", *(f"--{k}={v}" for k, v in given.items())],
                  "sweep.py throughput", env={**os.environ, "OMP_NUM_THREADS": "1"})
    with open(os.path.join(out, "sweep", "throughput", "sweep.json")) as f:
        rows = [row for row in json.load(f)["rows"] if row["status"] == "ok"]
    return {row["micro_batch_size"] * row["accum"]: row["micro_step_ms"] * row["accum"] + row["update_ms"] for row in rows}


def on_machine(name, folder, config):
    """{batch: predicted and taken ms of a step} on one machine, and its t0 and t1."""
    rows = []
    with hosts.machine(name):
        for accum in ACCUMULATIONS:
            out = os.path.join(folder, f"{name}-{accum}")
            shutil.rmtree(out, ignore_errors=True)
            steps = train(config, out, name, accum)
            if accum == 1:
                cost = {k: v for k, v in steps[-1].items() if k.startswith("step_time/")}
            batch = steps[-1]["batch_size"]
            predicted = cost["step_time/fixed_ms"] + batch * cost["step_time/per_sequence_ms"]
            taken = statistics.median(r["dt_ms"] for r in steps[2:])  # the first rows warm up
            rows.append({"batch": batch, "predicted_ms": predicted, "taken_ms": taken, "ratio": predicted / taken})
            print(f"{name}: batch {batch}: {predicted:.1f} ms predicted, {taken:.1f} ms taken", flush=True)
    swept = throughput(config, os.path.join(folder, f"{name}-throughput")) if name == "one" else {}
    for row in rows:
        if ms := swept.get(row["batch"]):
            row |= {"throughput_ms": ms, "ratio_throughput": row["predicted_ms"] / ms}
    return {"cost": cost, "ratio_t0_t1": cost["step_time/fixed_ms"] / cost["step_time/per_sequence_ms"], "rows": rows}


def finding(result):
    def furthest(ratios):
        return f"{max(ratios, key=lambda r: abs(r - 1)):.2f}"
    machines = result["machines"]
    worst = ", ".join(f"{furthest([r['ratio'] for r in own['rows'][1:]])} ({name})" for name, own in machines.items())
    swept = [r["ratio_throughput"] for own in machines.values() for r in own["rows"] if "ratio_throughput" in r]
    beside = f" Against what sweep.py throughput measures (one) it is at worst {furthest(swept)}." if swept else ""
    ratios = ", ".join(f"{name} {own['ratio_t0_t1']:.2g}" for name, own in machines.items())
    return ("From a run of one micro-batch a step, the time of larger steps is predicted with a ratio to the time taken of at "
            f"worst {worst}.{beside} A step's fixed cost, in sequences: {ratios}.")


def measure(runs):
    return {"machines": {name: on_machine(name, runs.args.out, runs.config) for name in hosts.names(runs.args.machines)}}, None


main = Experiment("step_cost", __doc__, "", measure, finding, options={"--machines": dict(default=",".join(hosts.MACHINES))})

if __name__ == "__main__":
    sys.exit(main())
