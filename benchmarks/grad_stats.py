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
from rightbatch.tracker import Tracker
from trainer import batches, hardware
from trainer.grad_stats import GradStats


def one_step(config, data, accum, measured):
    """A step of train.py, as a variant for bench.interleave."""
    torch.manual_seed(config.seed)
    shared = {k: v for k, v in vars(config).items() if k in GPTConfig.__dataclass_fields__}
    model = GPT(GPTConfig(vocab_size=data.vocab_size, **shared))
    optimizer = torch.optim.AdamW(model.parameter_groups(config.weight_decay), lr=1e-4, fused=True)
    tracker, stats = Tracker(model, optimizer, config, "cpu"), GradStats(model, optimizer, config)
    one, size, parameters = torch.ones(()), config.micro_batch_size, list(model.parameters())

    def run():
        start = time.perf_counter()
        probes = tracker.begin(1, 2)
        stats.begin(accum, measured)
        total = torch.zeros(())
        for micro in range(accum):
            _, loss = model(*data.train_batch(0, micro * size, size, "cpu"), **probes)
            (loss / accum).backward()
            total += loss.detach() / accum
            tracker.take(probes, accum)
            stats.take(None, one)
        record = tracker.finish(total, one)
        stats.before_update()
        torch._foreach_mul_([p.grad for p in parameters], torch.clamp(1 / (record["param_sq"].sum().sqrt() + 1e-6), max=1.0))
        optimizer.step()
        stats.after_update()
        optimizer.zero_grad(set_to_none=True)
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
    gradient = sum(p.numel() * 4 for p in GPT(GPTConfig(vocab_size=data.vocab_size, **{
        k: v for k, v in vars(config).items() if k in GPTConfig.__dataclass_fields__})).parameters())
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
