"""
Machines that differ, on this one: one process, two, and two hosts with a slow link between them. For step_cost.py, steering.py.

Two hosts are two network namespaces with a limited link (ip, tc; needs root). Each process has one thread.
"""

import contextlib
import os
import socket
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(ROOT, "train.py")
MACHINES = {"one": (1, None), "two": (2, None), "200mbit": (2, "200mbit"), "50mbit": (2, "50mbit")}  # processes, link
WORDS = {"one": "one process", "two": "two processes", "200mbit": "two hosts, 200 Mbit/s", "50mbit": "two hosts, 50 Mbit/s"}
HOSTS = ("rightbatch0", "rightbatch1")
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def names(text):
    """The machines of a command line; one line and out where there is no such machine, or no right to make one."""
    found = text.split(",")
    if set(found) - set(MACHINES):
        sys.exit(f"error: --machines={text}: expected some of {', '.join(MACHINES)}")
    if any(MACHINES[name][1] for name in found) and os.geteuid():
        sys.exit("error: two hosts are network namespaces, which need root: --machines=one,two works without")
    return found


@contextlib.contextmanager
def machine(name):
    """For as long as it is needed: the hosts and their link, if it has any."""
    rate = MACHINES[name][1]
    if rate is None:
        yield
        return

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


def train(name, settings):
    """train.py with {key: value} on that machine, to its end."""
    processes, link = MACHINES[name]
    arguments = [f"--{k}={v}" for k, v in settings.items()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if processes == 1:
        commands = [([sys.executable, TRAIN, *arguments], environment)]
    else:
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        run = [sys.executable, "-m", "torch.distributed.run", f"--master_port={port}"]
        commands = [([*run, f"--nproc_per_node={processes}", TRAIN, *arguments], environment)]
        if link:
            commands = [(["ip", "netns", "exec", host, *run, "--nnodes=2", f"--node_rank={i}", "--nproc_per_node=1",
                          f"--master_addr={ADDRESSES[0]}", TRAIN, *arguments], {**environment, "GLOO_SOCKET_IFNAME": f"rbv{i}"})
                        for i, host in enumerate(HOSTS)]
    started = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
               for command, env in commands]
    for process in started:
        error = process.communicate()[1]
        if process.returncode:
            sys.exit(f"error: {settings['out_dir']}: a run ended with {process.returncode}: {error.strip().splitlines()[-1:]}")
