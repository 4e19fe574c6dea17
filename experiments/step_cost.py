"""
Is what a run says of a step's cost true? t0 + t1 B from one run, against steps of other batches, on machines that differ.

    python experiments/step_cost.py                    # one process, two, two hosts at 200 and 50 Mbit/s: 10 minutes
    python experiments/step_cost.py --machines=one,two

The run that predicts takes one micro-batch a step, so timers inside the step must tell t0 from t1; the others accumulate.
Two hosts are two network namespaces on this machine with a limited link between them (ip, tc; needs root).
"""

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

from plots import style  # noqa: E402
from trainer import checkpoint, hardware, log  # noqa: E402

MACHINES = {"one": (1, None), "two": (2, None), "200mbit": (2, "200mbit"), "50mbit": (2, "50mbit")}  # processes, link
ACCUMULATIONS = (1, 2, 4, 8)
STEPS, EVERY = 60, 10  # log lines as often as in any run: they cost, too
HOSTS = ("rightbatch0", "rightbatch1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")


@contextlib.contextmanager
def hosts(rate):
    """Two network namespaces and a link of that rate between them."""
    def do(*words):
        subprocess.run(words, check=True, capture_output=True)
    try:
        for host in HOSTS:
            do("ip", "netns", "add", host)
        do("ip", "link", "add", "rbv0", "netns", HOSTS[0], "type", "veth", "peer", "name", "rbv1", "netns", HOSTS[1])
        for i, host in enumerate(HOSTS):
            inside = ("ip", "netns", "exec", host)
            do(*inside, "ip", "addr", "add", f"{ADDRESSES[i]}/24", "dev", f"rbv{i}")
            do(*inside, "ip", "link", "set", f"rbv{i}", "up")
            do(*inside, "ip", "link", "set", "lo", "up")
            do(*inside, *f"tc qdisc add dev rbv{i} root tbf rate {rate} burst 256kbit latency 400ms".split())
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def train(out, processes, link, accum, settings):
    """One run of STEPS steps; its log."""
    micro = 8 // processes
    tokens = STEPS * accum * micro * processes * 128
    arguments = [f"--{k}={v}" for k, v in {
        "out_dir": out, "batch_schedule": "constant", "batch_size": accum * micro * processes, "micro_batch_size": micro,
        "max_tokens": tokens, "warmup_tokens": 0, "eval_tokens": 0, "eval_iters": 8, "checkpoint_tokens": 0,
        "log_interval": EVERY, "gns_calibrate_tokens": 0, "gns_half_life_tokens": 10**9}.items()] + settings
    script = os.path.join(ROOT, "train.py")
    run = [sys.executable, script, *arguments]
    if processes > 1:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        run = [sys.executable, "-m", "torch.distributed.run", f"--master_port={port}", script, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if link is None:
        commands = [(run if processes == 1 else [*run[:3], f"--nproc_per_node={processes}", *run[3:]], environment)]
    else:
        commands = [(["ip", "netns", "exec", host, *run[:3], "--nnodes=2", f"--node_rank={i}", "--nproc_per_node=1",
                      f"--master_addr={ADDRESSES[0]}", *run[3:]], {**environment, "GLOO_SOCKET_IFNAME": f"rbv{i}"})
                    for i, host in enumerate(HOSTS)]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
               for command, env in commands]
    for process in started:
        error = process.communicate()[1]
        if process.returncode:
            sys.exit(f"error: {out}: a run ended with {process.returncode}: {error.strip().splitlines()[-1:]}")
    return [r for r in log.read(out) if "train/loss" in r]


def measure(name, folder, settings):
    """{batch: predicted and taken ms of a step} on one machine, and its t0 and t1."""
    processes, link = MACHINES[name]
    rows = []
    with hosts(link) if link else contextlib.nullcontext():
        for accum in ACCUMULATIONS:
            out = os.path.join(folder, f"{name}-{accum}")
            shutil.rmtree(out, ignore_errors=True)
            found = train(out, processes, link, accum, settings)
            if accum == 1:
                cost = {k: v for k, v in found[-1].items() if k.startswith("step_time/")}
            batch = found[-1]["batch_size"]
            predicted = cost["step_time/fixed_ms"] + batch * cost["step_time/per_sequence_ms"]
            taken = statistics.median(r["dt_ms"] for r in found[2:])  # the first rows warm up
            rows.append({"batch": batch, "predicted_ms": predicted, "taken_ms": taken, "ratio": predicted / taken})
            print(f"{name}: batch {batch}: {predicted:.1f} ms predicted, {taken:.1f} ms taken", flush=True)
    return {"cost": cost, "ratio_t0_t1": cost["step_time/fixed_ms"] / cost["step_time/per_sequence_ms"], "rows": rows}


def finding(result):
    worst = {name: max(own["rows"][1:], key=lambda r: abs(r["ratio"] - 1))["ratio"] for name, own in result.items()}
    ratios = ", ".join(f"{name} {own['ratio_t0_t1']:.2g}" for name, own in result.items())
    return ("From a run of one micro-batch a step, the time of larger steps is predicted with a ratio to the time taken of at "
            "worst " + ", ".join(f"{v:.2f} ({name})" for name, v in worst.items())
            + f". A step's fixed cost, in sequences: {ratios}.")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--out", default="out/step_cost")
    parser.add_argument("--results", default=os.path.join(ROOT, "results", "step_cost.json"))
    args, settings = parser.parse_known_args(argv)
    names = args.machines.split(",")
    if set(names) - set(MACHINES):
        sys.exit(f"error: --machines={args.machines}: expected some of {', '.join(MACHINES)}")
    if any(MACHINES[name][1] for name in names) and os.geteuid():
        sys.exit("error: two hosts are network namespaces, which need root: --machines=one,two works without")
    result = {name: measure(name, args.out, settings) for name in names}
    print(style.table([("machine", "t0 ms", "t1 ms", "t0/t1", *(f"x{a}" for a in ACCUMULATIONS)), *(
        (name, f"{own['cost']['step_time/fixed_ms']:.1f}", f"{own['cost']['step_time/per_sequence_ms']:.2f}",
         f"{own['ratio_t0_t1']:.2f}", *(f"{r['ratio']:.3f}" for r in own["rows"])) for name, own in result.items())]))
    checkpoint.write_json(args.results, {
        "command": " ".join(["python experiments/step_cost.py", *(argv or sys.argv[1:])]), "date": time.strftime("%Y-%m-%d"),
        "machine": {**hardware.facts("cpu"), "load_average": os.getloadavg()[0]}, "finding": finding(result),
        "machines": result})
    print(finding(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
