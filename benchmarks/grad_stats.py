"""
bench.py grad_stats: what grad_stats=True costs, steps with and without it side by side in one run.

    python bench.py grad_stats                           # the quickstart, 4 micro-batches a step: results/grad_stats.json
    python bench.py grad_stats config/wikitext2.py --accum=8 --block_size=64

The ratio is that of a measured step. Steps that are not logged are not measured: log_interval=10 divides the cost by ten.
"""

import time

import torch

import configurator
from benchmarks.tools import interleave, paired, peak_bytes, spread, write_json
from model import GPT, GPTConfig
from trainer import batches, hardware
from trainer.distributed import Ranks
from trainer.step import TrainingStep


def arguments(parser):
    parser.add_argument("config", nargs="?", help="a config file; --key=value on top of it")
    parser.add_argument("--accum", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--seconds", type=float, default=30.0, help="at least")
    parser.add_argument("--out", default="results/grad_stats.json")


def one_step(config, data, accum, measured):
    """A step of train.py, as a variant for interleave."""
    torch.manual_seed(config.seed)
    step = TrainingStep(GPT(GPTConfig.of(vars(config), data.vocab_size)), config, Ranks(), "cpu", torch.float32)
    size = config.micro_batch_size

    def run():
        start = time.perf_counter()
        micro_batches = (data.train_batch(0, micro * size, size, "cpu") for micro in range(accum))
        step.accumulate(micro_batches, accum, 1, 2, measured)
        step.update(1e-4, config.beta2, config.weight_decay)
        return {"step": time.perf_counter() - start}
    return run


def run(args):
    config = configurator.parse([*([args.config] if args.config else []), *args.rest])
    data = batches.Dataset(config.dataset, config.block_size)
    hardware.prepare_cpu()
    variants = {name: one_step(config, data, args.accum, on) for name, on in (("off", False), ("grad_stats", True))}
    samples = interleave(variants, args.seconds)
    gradient = 4 * GPT(GPTConfig.of(vars(config), data.vocab_size)).parameter_count()
    rows = {name: {**spread(s["step"]), **paired(s["step"], samples["off"]["step"]), "peak_bytes": peak_bytes(variants[name])}
            for name, s in samples.items()}
    r = rows["grad_stats"]
    extra = (r["peak_bytes"] - rows["off"]["peak_bytes"]) / gradient
    print(f"measured step over plain one: {r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f}), {r['n']} rounds; "
          f"at the peak {extra:+.2f} gradients of {gradient / 1e6:.1f} MB")
    write_json(args.out, {"accum": args.accum, "micro_batch_size": config.micro_batch_size, "gradient_bytes": gradient,
                          "extra_gradients": extra, "variants": rows})
