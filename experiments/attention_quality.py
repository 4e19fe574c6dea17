"""
Does training with our attention kernel end where training with torch's does?

    python experiments/attention_quality.py                # three seeds each, ten minutes on two cores

Runs of the quickstart that differ in the attention kernel and the seed only, in the dtype that train.py picks on this CPU.
"""

import contextlib
import os
import sys

import numpy as np
from common import Runs, parse, write

from plots import style
from rightbatch.kernels import attention
from sweeps import jobs
from trainer import hardware

PAPER = "The paper trains with fused attention: is the final loss with our own kernel within the spread of seeds?"
ARMS = {"ours": "ours", "torch's": "torch"}  # and the name of their folders
TINY = dict(dtype="auto", max_tokens=512, eval_iters=2)


@contextlib.contextmanager
def torchs_attention():
    """Inside, the model attends by torch's kernel."""
    kept, attention._built = attention._built, lambda: False
    try:
        yield
    finally:
        attention._built = kept


class Group(jobs.Group):
    """Runs of train.py through main() below."""

    def start(self, command, **options):
        return super().start([command[0], os.path.abspath(__file__), "train", *command[2:]], **options)


def finding(losses, dtype):
    """losses {arm: [final loss per seed]}."""
    mean = {arm: float(np.mean(values)) for arm, values in losses.items()}
    low, high = min(losses["torch's"]), max(losses["torch's"])
    difference, inside = mean["ours"] - mean["torch's"], low <= mean["ours"] <= high
    each = "; ".join(f"{arm} " + ", ".join(f"{v:.4f}" for v in values) for arm, values in losses.items())
    return (f"Here, in {dtype}: final validation losses {each}: the mean with our kernel is {difference:+.4f} "
            f"from that with torch's, {'inside' if inside else 'outside'} the spread of its seeds ({low:.4f} to {high:.4f}).")


def draw(path, curves):
    figure, axes = style.pyplot().subplots(figsize=(8, 5), layout="constrained")
    for color, arm in zip(style.COLORS, ARMS):
        for seed, rows in enumerate(curves[arm]):
            axes.plot(*style.series(rows, "val/loss"), "o-", ms=3, lw=1, color=color, label=None if seed else arm)
    last = [style.series(rows, "val/loss")[1] for runs in curves.values() for rows in runs]
    axes.set_ylim(0.98 * min(map(min, last)), max(v[len(v) // 4] for v in last))
    axes.set_xlabel("tokens")
    axes.set_ylabel("validation loss")
    axes.legend(title="attention kernel, one line a seed")
    style.save(figure, path)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["train"]:
        import train
        with torchs_attention():
            return train.main(argv[1:])
    args, config = parse(argv, "attention_quality", __doc__, seeds=3, tiny=TINY)
    names = {arm: [f"{folder}_seed{seed}" for seed in range(args.seeds)] for arm, folder in ARMS.items()}
    runs = Runs(config, args)
    runs.do({name: dict(seed=seed) for seed, name in enumerate(names["ours"])})
    runs.group = Group
    with torchs_attention():
        runs.do({name: dict(seed=seed) for seed, name in enumerate(names["torch's"])})
    losses = {arm: [runs.final_loss(name) for name in names[arm]] for arm in ARMS}
    dtype = str(hardware.pick_dtype(config.dtype, "cpu")).removeprefix("torch.")
    path = write(args, config, PAPER, finding(losses, dtype), {"final_losses": losses, "dtype": dtype})
    draw(path, {arm: [runs.rows(name) for name in names[arm]] for arm in ARMS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
