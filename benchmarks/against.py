"""
bench.py step --against PATH: our training step beside that of a nanoGPT checkout, which the user supplies.

Each side lives in a process of its own for the whole benchmark, since how memory is kept between steps (hardware.prepare_cpu)
is a setting of the process: ours is set as train.py sets it, theirs is left alone. The two take turns, the other one waiting.
Both start from the same weights and read the same batches with the same number of threads. Their step is the body of their
training loop on a CPU: forward, backward, clip_grad_norm_, optimizer.step, zero_grad, with the optimizer that their
configure_optimizers makes, in float32, which is what its loop does on a CPU. Ours has the noise scale of the norm layers
on top, and the dtype that is asked for; the losses that are compared are of steps in float32 on both sides.
"""

import contextlib
import importlib.util
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from benchmarks.tools import MODELS, Step, batch_of, interleave, plain, quartiles, spread, write_json
from configurator import ConfigError
from model import GPT, GPTConfig
from system import cores
from trainer import hardware

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0  # as ours
TURN_SECONDS = 1.0  # of a side, before the other one's turn
LOSS_STEPS = 5  # the losses of so many steps from the same weights are compared
LOSS_TOLERANCE = 1e-4  # nats: rounding gives 1e-6; a wrong weight, mask or scale 1e-2 and more
NAMES = {"wte": "transformer.wte", "wpe": "transformer.wpe", "h": "transformer.h", "ln_f": "transformer.ln_f",
         "lm_head": "lm_head"}


def their_module(path):
    """model.py of the checkout, under a name of its own; one line that says what is wrong if it is none."""
    spec = importlib.util.spec_from_file_location("against_model", os.path.join(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["against_model"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        _ = module.GPTConfig, module.GPT.configure_optimizers
    except Exception as e:
        raise ConfigError(f"--against={path}: expected the folder of a nanoGPT checkout, whose model.py has GPT and GPTConfig "
                          f"({type(e).__name__}: {e})") from None
    return module


def their_names(state):
    """Our state_dict under nanoGPT's names."""
    return {".".join([NAMES[name.split(".")[0]], *name.split(".")[1:]]): value for name, value in state.items()}


def our_side(shape, micro, state, _path, dtype):
    hardware.prepare_cpu()
    checked = Step(shape, micro, "norm")
    checked.model.load_state_dict(state)
    timed, taken = Step(shape, micro, "norm", dtype=dtype, like=checked), 0

    def run(x, y):
        nonlocal taken
        taken += 1
        return (checked if taken <= LOSS_STEPS else timed).step(x, y)
    return run


def their_side(shape, micro, state, path, _dtype):
    with contextlib.redirect_stdout(io.StringIO()):  # it reports while it is made
        module = their_module(path)
        model = module.GPT(module.GPTConfig(**shape, dropout=0.0, bias=True))
        missing, unexpected = model.load_state_dict(their_names(state), strict=False)
        wrong = [*unexpected, *(name for name in missing if not name.endswith(".attn.bias"))]  # old ones: the causal mask
        if wrong:
            raise ConfigError(f"--against={path}: its GPT does not have nanoGPT's parameters: {wrong[0]}")
        optimizer = model.configure_optimizers(WEIGHT_DECAY, LEARNING_RATE, BETAS, "cpu")

    def step(x, y):
        _, loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()
    return step


SIDES = {"ours": our_side, "theirs": their_side}
STEPS = {}  # {side: its step}, each in the process of its side


def start(side, shape, micro, weights, path, dtype, threads):
    """A side's process makes its model and optimizer."""
    torch.set_num_threads(threads)
    try:
        STEPS[side] = SIDES[side](shape, micro, torch.load(weights), path, dtype)
    except ConfigError:
        raise
    except Exception as e:
        raise ConfigError(f"{'ours' if side == 'ours' else path} failed: {type(e).__name__}: {e}") from None


def take(side, shape, micro, first, steps):
    """(seconds, losses) of so many steps from batch `first` on."""
    batches = [[ids.contiguous() for ids in batch_of(shape, micro, number)] for number in range(first, first + steps)]
    begin = time.perf_counter()
    losses = [STEPS[side](x, y) for x, y in batches]
    seconds = time.perf_counter() - begin
    return seconds, [float(loss) for loss in losses]


def worker():
    """A process that stays, with nothing of this one's settings."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def compare(name, path, dtype, threads, seconds, rounds):
    """Tokens/s of both sides over rounds of one turn each, and the losses of the first steps."""
    shape, micro = MODELS[name]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        weights = os.path.join(folder, "weights.pt")
        torch.manual_seed(0)
        torch.save(GPT(GPTConfig(**shape)).state_dict(), weights)
        workers = {side: stack.enter_context(worker()) for side in SIDES}

        def run(side, first, steps):
            return workers[side].submit(take, side, shape, micro, first, steps).result()

        def turns(side):
            """A variant for interleave: its turns read the batches in order."""
            first = itertools.count(LOSS_STEPS + 1, steps)
            return lambda: {"step": run(side, next(first), steps)[0] / steps}
        try:
            for side, own in workers.items():
                own.submit(start, side, shape, micro, weights, path, dtype, threads).result()
            losses = {side: run(side, 0, LOSS_STEPS)[1] for side in SIDES}
            steps = max(1, round(TURN_SECONDS / max(run(side, LOSS_STEPS, 1)[0] for side in SIDES)))
            samples = interleave({side: turns(side) for side in SIDES}, seconds, rounds, warm_up=0)  # they have run
        except BrokenProcessPool:
            raise ConfigError("a benchmark process was killed: probably for want of memory") from None
    apart = max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"]))
    tokens, times = micro * shape["block_size"], {side: phases["step"] for side, phases in samples.items()}
    return {**{side: {**spread(own), "tokens_per_second": [tokens / t for t in reversed(quartiles(own))]}
               for side, own in times.items()},
            "ratio": quartiles([t / o for o, t in zip(times["ours"], times["theirs"])]), "steps_per_turn": steps,
            "micro_batch": micro, "shape": shape, "losses": losses, "largest_loss_difference": apart,
            "losses_agree": apart <= LOSS_TOLERANCE}


def table(name, row):
    lines = [f"{name}: {row['ours']['n']} rounds of {row['steps_per_turn']} step(s) each side; "
             "tokens/s and ratio: median (quartiles)"]
    for side in SIDES:
        low, median, high = row[side]["tokens_per_second"]
        lines.append(f"  {side:8}{median:10.1f} ({low:.1f} to {high:.1f})   {row[side]['median_ms']:9.1f} ms a step")
    agree = "agree" if row["losses_agree"] else "DISAGREE"
    return "\n".join([*lines, "  ours / theirs, each round's: {1:.3f} ({0:.3f} to {2:.3f})".format(*row["ratio"]),
                      f"  losses of the first {LOSS_STEPS} steps, both in float32, {agree}: largest difference "
                      f"{row['largest_loss_difference']:.1e}, allowed {LOSS_TOLERANCE:.0e}"])


def run(args):
    """Exit code 1 where losses in float32 disagree: then the times are of two different models."""
    torch.set_num_threads(min(torch.get_num_threads(), cores.usable_cores()))
    threads, report, dtype = torch.get_num_threads(), {}, hardware.pick_dtype(args.dtype, "cpu")
    their_module(args.against)
    for name in args.models.split(","):
        report[name] = compare(name, args.against, dtype, threads, args.seconds, args.rounds)
        print(f"{threads} threads, load {os.getloadavg()[0]:.1f}; ours in {plain(dtype)} with gns=norm, theirs in float32\n"
              + table(name, report[name]), flush=True)
        write_json(args.out, {"threads": threads, "dtypes": {"ours": plain(dtype), "theirs": "float32"}, "models": report})
    return 0 if all(row["losses_agree"] for row in report.values()) else 1
