"""
Does training in bf16 end where training in fp32 does?

    python experiments/bf16_quality.py                     # three seeds each, 25 minutes on two cores

Runs of the quickstart that differ in dtype and seed only. bf16 is torch.autocast: matrix products, attention and what
follows them in bf16, residual stream, loss, norms and the parameters in fp32.

A CPU without bf16 instructions takes a hundred times as long for a bf16 product as for one in fp32. There, such products are
made as bf16 units make them, bf16 inputs, fp32 sums, one rounding of the result, by the fp32 units: float32_products below.
Everything else is the bf16 run as it is.
"""

import os
import sys

import numpy as np
from common import Runs, parse, write

from plots import style
from sweeps import jobs
from trainer import hardware

PAPER = "The paper's method is of use on GPUs if bf16 trains as fp32 does: is the final loss within the spread of seeds?"
DTYPES = ("float32", "bfloat16")
TINY = dict(dtype="auto", max_tokens=512, eval_iters=2)


def float32_products():
    """A context in which bf16 products, attention included, are computed in fp32 from the same inputs and then rounded."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    aten = torch.ops.aten
    rounded = {  # operation: which of its results are bf16
        aten.mm.default: None, aten.addmm.default: None, aten.bmm.default: None, aten.baddbmm.default: None,
        aten._scaled_dot_product_flash_attention_for_cpu.default: (0,),  # the other is the logarithm of the softmax's sums
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (0, 1, 2)}

    class Float32Products(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            def is_half(t):
                return isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16
            if func not in rounded or not any(map(is_half, args)):
                return func(*args, **(kwargs or {}))
            self.calls += 1
            out = func(*(t.float() if is_half(t) else t for t in args), **(kwargs or {}))
            if rounded[func] is None:
                return out.bfloat16()
            return tuple(t.bfloat16() if i in rounded[func] else t for i, t in enumerate(out))
    return Float32Products()


class Group(jobs.Group):
    """Runs of train.py through main() below, which computes bf16 products in fp32."""

    def start(self, command, **options):
        return super().start([command[0], os.path.abspath(__file__), "train", *command[2:]], **options)


def finding(losses, emulated):
    """losses {dtype: [final loss per seed]}."""
    mean = {dtype: float(np.mean(values)) for dtype, values in losses.items()}
    low, high = min(losses["float32"]), max(losses["float32"])
    difference, inside = mean["bfloat16"] - mean["float32"], low <= mean["bfloat16"] <= high
    each = "; ".join(f"{dtype} " + ", ".join(f"{v:.4f}" for v in values) for dtype, values in losses.items())
    return (f"Here: final validation losses {each}: the mean in bf16 is {difference:+.4f} from that in fp32, "
            f"{'inside' if inside else 'outside'} the spread of its seeds ({low:.4f} to {high:.4f})"
            + (". bf16 products were computed by fp32 units and rounded: this CPU has no others." if emulated else "."))


def draw(path, curves):
    figure, axes = style.pyplot().subplots(figsize=(8, 5), layout="constrained")
    for color, dtype in zip(style.COLORS, DTYPES):
        for seed, rows in enumerate(curves[dtype]):
            axes.plot(*style.series(rows, "val/loss"), "o-", ms=3, lw=1, color=color, label=None if seed else dtype)
    last = [style.series(rows, "val/loss")[1] for runs in curves.values() for rows in runs]
    axes.set_ylim(0.98 * min(map(min, last)), max(v[len(v) // 4] for v in last))
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss")
    axes.legend(title="one line a seed")
    style.save(figure, path)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:
        import train
        with float32_products():
            return train.main(argv[1:])
    args, config = parse(argv, "bf16_quality", __doc__, seeds=3, tiny=TINY)
    device = hardware.pick_device(config.device)
    emulated = device == "cpu" and not hardware.fast_bfloat16(device) and not args.tiny
    runs = Runs(config, args)
    if emulated:
        runs.group = Group
    runs.do({f"{dtype}_seed{seed}": dict(dtype=dtype, seed=seed)
             for seed in range(args.seeds) for dtype in DTYPES})
    names = {dtype: [f"{dtype}_seed{seed}" for seed in range(args.seeds)] for dtype in DTYPES}
    losses = {dtype: [runs.final_loss(name) for name in names[dtype]] for dtype in DTYPES}
    path = write(args, config, PAPER, finding(losses, emulated), {"final_losses": losses, "bf16_products_in_fp32": emulated})
    draw(path, {dtype: [runs.rows(name) for name in names[dtype]] for dtype in DTYPES})
    return 0


if __name__ == "__main__":
    sys.exit(main())
