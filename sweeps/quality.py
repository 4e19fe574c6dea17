"""
sweep.py quality: where more accumulation stops improving the gradient.

    python sweep.py quality config/x.py --steps=200

Runs train.py at effective batches m, 2m, ... 16m (m the micro-batch) for --steps steps each, all with the same fixed
learning rate, with grad_stats=True and gns=exact, and averages what they log over the second half of the steps.

The rule. The mean of k micro-batches has E|A_k|^2 = |G|^2 + tr(Sigma) / (k m): signal, and noise that falls with k. Of a step
along A_k the share |G|^2 / E|A_k|^2 is progress (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.7), so doubling k gains

    gain = E|A_k|^2 / E|A_2k|^2 - 1        1 for pure noise, 0 where the gradient is exact already

per step, for twice the tokens. It is measured, not derived: both norms come from the same steps and the same weights (|A_k| is
grad/norm_after_k). A batch is meaningful while every doubling that led to it gained at least --gain (0.2), by the steps of all
runs that made that doubling together; each run's own stand beside it in sweep.json and the picture. By the noise scale
the gain of the doubling to B is GNS / (B + GNS), so 0.2 is B = 4 GNS: that stands beside it. Norms are plain, so that is
the plain noise scale; the one in Adam's metric has a column of its own.
"""

import dataclasses
import os

import numpy as np

import configurator
import schedule
from configurator import ConfigError
from plots import style
from sweeps import common, jobs
from system import files
from trainer import batches, hardware, log, reader

KEYS = ("grad/coherence", "grad/coherence_total", "grad/norm", "grad/mean", "grad/variance", "adam/snr", "update/norm",
        "update/ratio", "train/loss")
NOISE = {"noise_scale": "gns/total", "noise_scale_adam": "gns/total_adam"}  # in a row: log key
MOST = 0.5  # share of a run's tokens from which on steps speak for the whole run


def arguments(parser):
    common.arguments(parser)
    jobs.arguments(parser)
    parser.add_argument("--steps", default="200", help="steps at each effective batch; the second half is averaged")
    parser.add_argument("--gain", default="0.2", help="what a doubling must gain to be worth its tokens")
    parser.add_argument("--accumulations", default="1,2,4,8,16", help="micro-batches in a step")


def quality(args):
    config = common.parse(args)
    device = hardware.pick_device(config.device)
    vocab_size = batches.Dataset(config.dataset, config.block_size).vocab_size
    steps, gain = common.number(args, "steps", 4, int), common.number(args, "gain")
    accumulations = sorted(set(common.integers(args, "accumulations")))
    if accumulations[-1] < 2:
        raise ConfigError(f"--accumulations={args.accumulations}: nothing to compare without a 2 or more in it")
    keys, source = common.found_micro_batch(config, args.rest, common.settings_of(config, device, vocab_size))
    config = dataclasses.replace(config, **keys)
    micro = config.micro_batch_size
    folder = os.path.join(config.out_dir, "sweep", "quality")
    wanted = {f"batch{micro * a}": run_config(config, micro * a, steps) for a in accumulations}
    group = jobs.Group(wanted, folder, common.number(args, "jobs", 1, int), not args.in_process)
    print(f"micro-batch {micro}, {source}; {steps} steps at each of {', '.join(str(micro * a) for a in accumulations)} "
          f"sequences, learning rate {config.learning_rate:g}", flush=True)
    if args.dry_run:
        left = group.left()
        tokens = sum(left.values())
        print(f"{len(left)} of {len(wanted)} runs to do, {log.count(tokens)} tokens: about "
              f"{log.duration(tokens / common.speed(config, vocab_size))}, a guess")
        return 0
    group.do_all()
    logs = [log.read(c.out_dir) for c in group.wanted.values()]
    rows = [average(own, micro, config.beta1) for own in logs]
    result = result_of(rows, gains([growth(second_half(own)) for own in logs], micro), config, steps, gain, args)
    kept = vars(config).keys() - configurator.free_keys() - set(CHANGED)
    settings = {k: common.as_json(v) for k, v in vars(config).items() if k in kept} | keys
    files.write_json(os.path.join(folder, common.NAME), {
        "command": args.asked, "settings": {**settings, "steps": steps}, "machine": common.machine(device), "rows": rows,
        "result": result})
    common.finish(folder, result, table(rows, result["gains"]), lambda path: draw(rows, result, path))
    return 0


CHANGED = dict(batch_schedule="constant", lr_decay="none", lr_scaling="none", warmup_tokens=0, decay_tokens=0, gns="exact",
               grad_stats=True, log_interval=1, eval_tokens=0, stop_tokens=0)


def run_config(config, batch, steps):
    tokens = steps * batch * config.block_size
    config = dataclasses.replace(config, batch_size=batch, max_tokens=tokens, checkpoint_tokens=max(1, tokens // 4), **CHANGED)
    configurator.check(config)
    return config


def average(rows, micro, beta1=0.9):
    """Means over the second half of a run's steps, and the gain of each doubling within its steps, with standard errors."""
    steps = [r for r in rows if "train/loss" in r]
    late = second_half(rows)
    accum, batch = late[-1]["accum"], late[-1]["batch_size"]
    row = {"batch_size": batch, "accum": accum, "steps": len(steps), "averaged": len(late),
           "coherence_total_noise": accum**-0.5, "snr_noise": float((2 / np.pi * (1 - beta1) / (1 + beta1)) ** 0.5)}
    for key in KEYS:
        values = [r[key] for r in late if r.get(key) is not None]
        row[key] = float(np.mean(values)) if values else None
        row[key + "_se"] = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    row["gains"] = gains([growth(late)], micro)
    for name, key in NOISE.items():
        noise = reader.noise_of(steps[-1], key)
        row[name] = noise and dict(zip(("value", "low", "high"), noise.triple))
    return row


def second_half(rows):
    steps = [r for r in rows if "train/loss" in r]
    return [r for r in steps[len(steps) // 2:] if r["grad/norm"] is not None]


def growth(steps):
    """{k: |A_k|^2 in each step} for k = 1, 2, 4, ... and K."""
    accum = steps[-1]["accum"]
    grown = {k: np.array([r[f"grad/norm_after_{k}"] for r in steps]) ** 2 for k in (2**i for i in range(20)) if k < accum}
    return grown | {accum: np.array([r["grad/norm"] for r in steps]) ** 2}


def gains(grown, micro):
    """{batch: {"gain", "se"} of the doubling to it}, from the steps of all runs that made it."""
    found = {}
    for k in sorted({k for one in grown for k in one}):
        both = [(one[k], one[2 * k]) for one in grown if k in one and 2 * k in one]
        if both:
            found[2 * k * micro] = dict(zip(("gain", "se"), ratio(*(np.concatenate(part) for part in zip(*both)))))
    return found


def ratio(a, b):
    """mean(a) / mean(b) - 1 and its standard error, from pairs."""
    r = a.mean() / b.mean()
    return float(r - 1), float(np.std(a - r * b, ddof=1) / len(a) ** 0.5 / b.mean()) if len(a) > 1 else float("nan")


def result_of(rows, pooled, config, steps, least, args):
    """The largest batch all of whose doublings gained at least `least`, by the steps of all runs together."""
    micro = config.micro_batch_size
    beyond = next((batch for batch, own in pooled.items() if own["gain"] < least), None)
    meaningful = max((batch for batch in pooled if beyond is None or batch < beyond), default=micro)
    share = steps * meaningful * config.block_size / config.max_tokens
    take = {"micro_batch_size": micro, **batch_to_take(config, meaningful, share)}
    sizes = ",".join(str(b) for b in (meaningful // 2, meaningful, 2 * meaningful) if b >= micro)
    options = {"batch_schedule": "constant", "micro_batch_size": micro, "batch_size": sizes, "lr_scaling": "sqrt",
               "seed": "0,1,2"}
    lines = common.what_next(take, "sweep.py runs", args, *(f"--{k}={v}" for k, v in options.items()), without=options)
    return {"take": take, "beyond": beyond, "gain": least, "gains": pooled,
            "says": verdict(rows, pooled, meaningful, beyond, least) + [about_share(take, share)], "next": lines}


def batch_to_take(config, meaningful, share):
    """The settings that these steps can speak for: the batch to start with, unless they are most of a run."""
    if share >= MOST:
        return {"batch_size": meaningful}
    start = {"batch_size_start": min(meaningful, config.batch_size)}
    return start if "batch_size_start" in schedule.kind(config).keys else {"batch_schedule": "gns", **start}


def about_share(take, share):
    text = (f"These steps are the first of a run, {share:.2%} of its tokens, at one learning rate: the noise scale rises "
            "during training, and the batch that pays with it.")
    return text if "batch_size" in take else (
        text + " So it is a batch to start with; batch_schedule='gns' goes on by what it measures.")


def verdict(rows, pooled, meaningful, beyond, least):
    says = [f"Largest effective batch with meaningful updates: {meaningful} sequences"]
    if beyond:
        own = pooled[beyond]
        says[0] += (f". The doubling to {beyond} gained {own['gain']:.0%} +- {own['se']:.0%} progress per step for 100% more "
                    f"tokens, below {least:.0%}.")
    else:
        says[0] += f" or more; every doubling that was tried gained at least {least:.0%} per step."
    have = [r["noise_scale"] for r in rows if r["noise_scale"] and r["accum"] > 1] or [
        r["noise_scale"] for r in rows if r["noise_scale"]]
    if have:
        known = [n["value"] for n in have]
        limit = (1 / least - 1) if least else float("inf")
        says.append(f"By the plain noise scale of the whole model ({NOISE['noise_scale']}), {min(known):.3g} to "
                    f"{max(known):.3g} sequences in these runs, a doubling falls below {least:.0%} "
                    f"beyond a batch of {limit * min(known):.3g} to {limit * max(known):.3g}.")
    else:
        says.append("The noise scale is undetermined in these runs: more --steps.")
    return says


def table(rows, pooled):
    names = [name for name in NOISE if name == "noise_scale" or any(r[name] for r in rows)]
    heads, about = common.noise_columns(NOISE[name] for name in names)
    cells = [("batch", "gain of doubling", *(key.replace("train/", "") for key in KEYS), *heads.values())]
    for r in rows:
        own = pooled.get(r["batch_size"])
        cells.append((
            str(r["batch_size"]), "-" if own is None else f"{own['gain']:.0%} +- {own['se']:.0%}",
            *("-" if r[key] is None else f"{r[key]:.3g}" for key in KEYS),
            *("{value:.3g} [{low:.3g}, {high:.3g}]".format(**r[name]) if r[name] else "undetermined" for name in names)))
    return "\n".join([style.table(cells), *about, ""])


def draw(rows, result, path):
    figure, (gain, coherence, snr) = style.panels(3, 13, 4.2)
    batch, pooled, noise = [r["batch_size"] for r in rows], result["gains"], rows[-1]["noise_scale"]
    for color, r in zip(style.COLORS[2:] * 9, rows):
        gain.plot(list(r["gains"]), [g["gain"] for g in r["gains"].values()], "o-", ms=4, color=color, lw=1.4,
                  label=f"run of batch {r['batch_size']}")
    gain.errorbar(list(pooled), [g["gain"] for g in pooled.values()], [2 * g["se"] for g in pooled.values()], fmt="s-",
                  capsize=3, color="black", label="all runs together")
    gain.axhline(result["gain"], color="#888888", ls=":", label="worth its tokens")
    if noise:
        x = np.geomspace(min(batch), max(batch), 50)
        gain.plot(x, noise["value"] / (x + noise["value"]), color=style.COLORS[1], ls="--", label="by the plain noise scale")
    # title, then key, label and what pure noise would give
    for ax, title, *lines in ((coherence, "Coherence (cosine)", ("grad/coherence", "successive micro-batches", None),
                               ("grad/coherence_total", "each with the whole step", "coherence_total_noise")),
                              (snr, "Adam's signal to noise", ("adam/snr", "|m| / sqrt(v)", "snr_noise"))):
        for color, (key, label, of_noise) in zip(style.COLORS, lines):
            have = [(r["batch_size"], r[key], 2 * (r[key + "_se"] or 0)) for r in rows if r[key] is not None]
            ax.errorbar(*zip(*have), fmt="o-", capsize=3, color=color, label=label)
            ax.plot(batch, [r[of_noise] if of_noise else 0 for r in rows], ls=":", color=color, label="the same, pure noise")
        style.dress(ax, title, "effective batch (sequences)", "doublings")
    style.dress(gain, "Gain of the doubling to this batch", "effective batch (sequences)", "doublings")
    style.save(figure, path)
