"""
What grad_stats=True costs: whole steps with and without it, side by side in one run (bench.py has the rest).

    python bench_stats.py                                # the quickstart, 4 micro-batches a step: results/grad_stats.json
    python bench_stats.py config/wikitext2.py --accum=8 --block_size=64

The ratio is that of a measured step. Steps that are not logged are not measured: log_interval=10 divides the cost by ten.
"""

import argparse
import sys
import time

import torch

import bench
import configurator
from model import GPT, GPTConfig
from trainer import batches, hardware
from trainer.distributed import Ranks
from trainer.step import TrainingStep


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("--accum", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--bench_seconds", type=float, default=30.0)
    parser.add_argument("--out", default="results/grad_stats.json")
    args, rest = parser.parse_known_args(argv)
    try:
        config = configurator.parse([*([args.config] if args.config else []), *rest])
        data = batches.Dataset(config.dataset, config.block_size)
    except configurator.ConfigError as e:
        configurator.die(e)
    hardware.prepare_cpu()
    variants = {name: one_step(config, data, args.accum, on) for name, on in (("off", False), ("grad_stats", True))}
    samples = bench.interleave(variants, args.bench_seconds)
    gradient = 4 * GPT(GPTConfig.of(vars(config), data.vocab_size)).parameter_count()
    rows = {name: {**bench.spread(s["step"]), **bench.paired(s["step"], samples["off"]["step"]),
                   "peak_bytes": bench.peak_bytes(variants[name])} for name, s in samples.items()}
    r = rows["grad_stats"]
    extra = (r["peak_bytes"] - rows["off"]["peak_bytes"]) / gradient
    print(f"measured step over plain one: {r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f}), {r['n']} rounds; "
          f"at the peak {extra:+.2f} gradients of {gradient / 1e6:.1f} MB")
    bench.write_json(args.out, {"accum": args.accum, "micro_batch_size": config.micro_batch_size, "gradient_bytes": gradient,
                                "extra_gradients": extra, "variants": rows})


if __name__ == "__main__":
    sys.exit(main())
