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
from rightbatch.tracker import Tracker
from trainer import batches, hardware
from trainer.grad_stats import GradStats


def arguments(parser):
    parser.add_argument("config", nargs="?", help="a config file; --key=value on top of it")
    parser.add_argument("--accum", type=int, default=4, help="micro-batches in a step")
    parser.add_argument("--seconds", type=float, default=30.0, help="at least")
    parser.add_argument("--out", default="results/grad_stats.json")


def one_step(config, data, accum, measured):
    """A step of train.py, as a variant for interleave."""
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


def run(args):
    config = configurator.parse([*([args.config] if args.config else []), *args.rest])
    data = batches.Dataset(config.dataset, config.block_size)
    hardware.prepare_cpu()
    variants = {name: one_step(config, data, args.accum, on) for name, on in (("off", False), ("grad_stats", True))}
    samples = interleave(variants, args.seconds)
    gradient = sum(p.numel() * 4 for p in GPT(GPTConfig(vocab_size=data.vocab_size, **{
        k: v for k, v in vars(config).items() if k in GPTConfig.__dataclass_fields__})).parameters())
    rows = {name: {**spread(s["step"]), **paired(s["step"], samples["off"]["step"]), "peak_bytes": peak_bytes(variants[name])}
            for name, s in samples.items()}
    r = rows["grad_stats"]
    extra = (r["peak_bytes"] - rows["off"]["peak_bytes"]) / gradient
    print(f"measured step over plain one: {r['ratio']:.3f} ({r['ratio_q1']:.3f} to {r['ratio_q3']:.3f}), {r['n']} rounds; "
          f"at the peak {extra:+.2f} gradients of {gradient / 1e6:.1f} MB")
    write_json(args.out, {"accum": args.accum, "micro_batch_size": config.micro_batch_size, "gradient_bytes": gradient,
                          "extra_gradients": extra, "variants": rows})
