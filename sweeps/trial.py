"""
One trial of `sweep.py memory` and `sweep.py throughput`: a few optimizer steps with the parts of train.py, timed, and the peak
memory of a process that does nothing else. Here is both the process (main) and who starts it (run), with a timeout:
whatever happens to the process is one row.

    python sweeps/trial.py '{"config": {"micro_batch_size": 8, ...}, "accum": 1, "warmup_accum": 2, "seconds": 2,
                             "memory_limit": null, "timeout": 300}'

prints one line of JSON. The first two steps are the warm-up. For sweep.py memory they also have two micro-batches, of which the
second finds the first one's gradient in memory: so the peak is that of a long run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

SCRIPT = os.path.abspath(__file__)
MIN_STEPS = 3
OUT_OF_MEMORY = ("can't allocate", "cannot allocate memory", "out of memory", "bad_alloc", "not enough memory",
                 "thread creation failed")


# -- who starts it

def run(spec):
    """The row of a trial: {"status": "ok" | "out of memory" | "timeout" | "failed", "why", numbers ...}."""
    process = subprocess.Popen([sys.executable, SCRIPT, json.dumps(spec)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               stdin=subprocess.DEVNULL, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=spec["timeout"])
    except subprocess.TimeoutExpired:
        return {"status": "timeout", "why": f"no result within {spec['timeout']:g} s"}
    finally:
        if process.poll() is None:  # a hang, or Ctrl-C here: end it with all that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    row = row_of(process.returncode, out, err)
    return row | {"why": without_folders(row["why"])} if "why" in row else row


def without_folders(text):
    """/a/b/c.py -> c.py: rows are for others to read."""
    return re.sub(r"(?<![\w.])/\S*/", "", text)


def row_of(code, out, err):
    """What a process that ended has to say, whichever way it ended."""
    last = ([line.strip() for line in err.splitlines() if line.strip()] or ["no message"])[-1][:200]
    if code == 0:
        try:
            return json.loads(out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return {"status": "failed", "why": f"no result: {last}"}
    if code == -signal.SIGKILL:
        return {"status": "out of memory", "why": "killed by the system"}
    if any(words in err.lower() for words in OUT_OF_MEMORY):
        return {"status": "out of memory", "why": last}
    ended = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    return {"status": "failed", "why": f"{ended}: {last}"}


# -- the process

def main(argv=None):
    spec = json.loads((sys.argv[1:] if argv is None else argv)[0])
    if hasattr(signal, "alarm"):
        signal.alarm(int(spec["timeout"]) + 5)  # should the one who started it be gone
    import torch
    try:
        row = {"status": "ok", **measure(spec)}
    except Exception as e:
        words = (str(e).strip().splitlines() or [""])[0]
        words = words[max(0, words.find("tried to allocate")):][:200]
        memory = any(isinstance(c, (MemoryError, torch.OutOfMemoryError)) or any(w in str(c).lower() for w in OUT_OF_MEMORY)
                     for c in causes(e))
        row = {"status": "out of memory" if memory else "failed", "why": f"{type(e).__name__}: {words}"}
    print(json.dumps(row), flush=True)
    return 0


def causes(error):
    """The error and those behind it: torch.compile's say last what went wrong first."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def measure(spec):
    """The numbers of a trial: seconds of a micro-step and of an update, peak memory."""
    import torch

    import configurator
    from system import memory
    from trainer import batches, hardware

    config = configurator.Config(**{k: configurator.coerce(k, v, "trial") for k, v in spec["config"].items()})
    accum = spec["accum"]
    device = hardware.pick_device(config.device)
    dtype = hardware.pick_dtype(config.dtype, device)
    if device == "cpu":
        hardware.prepare_cpu()
    data = batches.Dataset(config.dataset, config.block_size)
    # One thread: its own time, so that what other programs take of the core does not count. Several wait for each other.
    alone = device == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    ceiling = hardware.matmul_ceiling(device, dtype, clock=clock)
    limit_memory(spec["memory_limit"], device)
    before = memory.now()
    step = build_step(config, data, device, dtype)

    def timed(before, accum=accum):
        """(seconds of the micro-steps, of the rest); before: the tokens that the run has seen."""
        return timed_step(step, data, accum, before, clock)

    first = spec.get("warmup_accum", accum)
    for _ in range(2):  # the second has Adam's state, and its metric
        timed(0, first)
    if config.compile == "True":
        timed(1)  # a plain step, which is another graph
    times, end = [], time.perf_counter() + spec["seconds"]
    while len(times) < MIN_STEPS or (time.perf_counter() < end and len(times) < 200):
        times.append(timed(1))
    micro, update = (min(t[i] for t in times) for i in (0, 1))  # the fastest: whatever else the machine does only adds
    tokens = config.micro_batch_size * config.block_size * accum
    flops = step.model.flops_per_token() * tokens
    return {"micro_step_ms": 1e3 * micro / accum, "update_ms": 1e3 * update, "tok_per_sec": tokens / (micro + update),
            "tok_per_sec_micro": tokens / micro, "ceiling": flops / micro / ceiling, "update_share": update / (micro + update),
            "steps": len(times), "clock": "the thread's own time" if alone else "wall",
            "gradient_bytes": sum(p.numel() * p.element_size() for p in step.model.parameters()),
            **peak_memory(device, before, lambda: timed(0, first), step.optimizer)}


def build_step(config, data, device, dtype):
    """Model and step as train.py makes them for one process."""
    import torch

    from model import GPT, GPTConfig
    from trainer.distributed import Ranks
    from trainer.step import TrainingStep
    torch.manual_seed(config.seed)
    model = GPT(GPTConfig.of(vars(config), data.vocab_size)).to(device)
    return TrainingStep(model, config, Ranks(device=device), device, dtype)


def timed_step(step, data, accum, before, clock):
    """One step of train.py from the first examples on; (seconds of its micro-steps, of the rest)."""
    from trainer import hardware
    from trainer.step import to_host
    config, size, device = step.config, step.config.micro_batch_size, step.device
    hardware.synchronize(device)
    start = clock()
    micro_batches = (data.train_batch(config.seed, micro * size, size, device) for micro in range(accum))
    step.accumulate(micro_batches, accum, before, before + accum * size * config.block_size, config.grad_stats)
    hardware.synchronize(device)
    middle = clock()
    record = step.update(config.learning_rate, config.beta2, config.weight_decay)
    step.absorb(*to_host([record]), record)  # train.py does this for all steps of a log line at once
    return middle - start, clock() - middle


def limit_memory(limit, device):
    """An upper bound for this process: of the device on CUDA; of all that it may write to on a CPU, libraries included."""
    if limit is not None and device == "cuda":
        import torch
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.mem_get_info()[1]))
    elif limit is not None:
        import resource
        # not RLIMIT_AS: libraries map several times what they ever touch
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def peak_memory(device, before, step, optimizer):
    """peak: of the process (CUDA: what torch reserved), allocated: of tensors alone, which does not depend on how the
    allocator cuts its memory up. before: what the process held before there was a model, libraries mostly."""
    if device == "cuda":
        import torch
        return {"peak": torch.cuda.max_memory_reserved(), "peak_allocated": torch.cuda.max_memory_allocated(), "before": None}
    from system import memory
    found = {"peak": memory.peak(), "before": before}
    try:
        state = [t for part in optimizer.parts for group in part.param_groups for p in group["params"]
                 for t in (p, *part.state[p].values())]
        allocated = sum(t.numel() * t.element_size() for t in state) + memory.peak_bytes(step, warm_up=False)
    except (MemoryError, RuntimeError):  # the profiler found no room under the limit
        allocated = None
    return {**found, "peak_allocated": allocated}


if __name__ == "__main__":
    sys.path[0] = os.path.dirname(os.path.dirname(SCRIPT))
    sys.exit(main())
