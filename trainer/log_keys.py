"""
Every key of log.jsonl: its unit and its meaning. docs/log_keys.md is written from here (python results/render.py), and
tests/test_log_keys.py fails when a run writes another key, or none writes one of these.

A key may hold placeholders: {group}, {end} and {part} are the names in GROUPS, ENDS and PARTS, {k} and {i} are numbers.
A value that is undetermined is null in the file.
"""

import re

GROUPS = {
    "norm": "the norm layers",
    "attention": "attention's matrices and biases",
    "mlp": "those of the MLPs",
    "embedding": "token and position embeddings; the head, too, where it is tied to them",
    "head": "the head, where it is not tied",
    "body": "every parameter but the look-up tables: token and position embeddings, the head",
    "total": "every parameter; in Adam's metric the body",
    "block_{i}": "block i: its norm layers, attention and MLP",
}

ENDS = {
    "": "the value",
    "_low": "lower end of its 95% interval",
    "_high": "upper end of its 95% interval",
}

PARTS = ENDS | {
    "_sq_norm": "average of the unbiased estimates of |G|^2",
    "_tr_sigma": "average of the unbiased estimates of tr(Sigma)",
}

SECTIONS = {
    "train": "Written at every logged step, and once at the end.",
    "val": "Written at every evaluation, in rows of their own with step and tokens.",
    "batch": "What a step read.",
    "step time": "The clock stands still during evaluation, checkpoints and pictures.",
    "gns": "In sequences. null while undetermined.",
    "detail": "For whoever wants to look behind the noise scale. Most need a setting, named with the key.",
}

KEYS = [  # key, unit, meaning, section, and its name in wandb, whose part before the first slash is a section there;
    # without one it stands under detail/ with its own name
    ("step", "steps", "optimizer steps so far", "train", "step"),
    ("tokens", "tokens", "tokens read so far; the x-axis of every picture", "train", "tokens"),
    ("examples", "sequences", "sequences read so far", "train", "train/sequences"),
    ("train/loss", "nats per token", "mean over all micro-batches of that step", "train", "train/loss"),
    ("lr", "", "learning rate of that step, schedule and lr_scaling included", "train", "train/lr"),
    ("beta2", "", "Adam's beta2 of that step; only with beta2_scaling", "train", "train/beta2"),
    ("weight_decay", "", "weight decay of that step; only with weight_decay_scaling", "train", "train/weight_decay"),
    ("grad/norm", "", "norm of the step's gradient, before clipping", "train", "train/grad_norm"),
    ("bad_steps", "steps", "steps skipped so far, because loss or gradient was not finite", "train", "train/bad_steps"),
    ("event", "text", "a row of its own with step and tokens: what the batch schedule did and why, or where a branch began",
     "train", "train/event"),
    ("val/loss", "nats per token", "mean over the fixed validation windows", "val", "val/loss"),
    ("val/ppl", "", "exp(val/loss)", "val", "val/perplexity"),
    ("batch_size", "sequences", "sequences in that step, over all micro-batches and processes", "batch", "batch/sequences"),
    ("accum", "micro-batches", "micro-batches in that step, on each process", "batch", "batch/accumulation"),
    ("seconds", "s", "training time so far, over all resumes", "step time", "step_time/seconds"),
    ("dt_ms", "ms", "mean time of a step since the last logged one", "step time", "step_time/step_ms"),
    ("tok_per_sec", "tokens/s", "speed since the last logged step, over all processes",
     "step time", "step_time/tokens_per_second"),
    ("step_time/fixed_ms{end}", "ms", "what a step costs whatever its batch: update, communication",
     "step time", "step_time/fixed_ms"),
    ("step_time/per_sequence_ms{end}", "ms", "what each sequence of a batch adds, over all devices",
     "step time", "step_time/per_sequence_ms"),
    ("mfu", "share", "of the machine's own matrix-product speed, measured at the start", "step time", "step_time/mfu"),
    ("gns{end}", "sequences", "the noise scale that the run goes by: of the whole model, in gns_metric",
     "gns", "gns/noise_scale"),
    ("gns/calibrated{end}", "sequences", "the whole model's noise scale: gns/norm times gns/calibration", "gns"),
    ("gns/calibration{end}", "factor", "from the norm layers' noise scale to the whole model's, by sampled rows", "gns"),
    ("gns/calibrated_adam{end}", "sequences", "the same in Adam's metric: gns/norm_adam times gns/calibration_adam", "gns"),
    ("gns/calibration_adam{end}", "factor", "from gns/norm_adam to the whole model's, by sampled rows", "gns"),
    ("gns/{group}{part}", "sequences", "noise scale of a group, its interval and its two averages; gns=norm has norm alone",
     "gns"),
    ("gns/{group}_adam{part}", "sequences", "the same in the metric that Adam steps in (gns_adam); not for blocks and tables",
     "gns"),
    ("gns/{group}_step_sq_norm", "", "unbiased |G|^2 of that step alone; may be negative", "detail"),
    ("gns/{group}_step_tr_sigma", "", "unbiased tr(Sigma) of that step alone; may be negative", "detail"),
    ("gns/{group}_adam_step_sq_norm", "", "the same in Adam's metric", "detail"),
    ("gns/{group}_adam_step_tr_sigma", "", "the same in Adam's metric", "detail"),
    ("gns/step_tr_sigma_se", "", "standard error of the step's tr(Sigma), by a jackknife over its examples", "detail"),
    ("gns/example_max", "", "largest squared gradient norm of an example in that step", "detail"),
    ("gns/example_median", "", "the median of them", "detail"),
    ("gns/{group}_micro{part}", "sequences", "classical estimate, micro-batches against the step (gns_crosscheck); norm, total",
     "detail"),
    ("gns/{group}_rank{part}", "sequences", "classical estimate, processes against the step (gns_crosscheck); norm and total",
     "detail"),
    ("grad/coherence", "cosine", "mean between successive micro-batches (grad_stats): 0 for pure noise", "detail"),
    ("grad/coherence_total", "cosine", "mean between each micro-batch and the step: 1/sqrt(micro-batches) for pure noise",
     "detail"),
    ("grad/mean", "", "mean over the coordinates of the step's gradient", "detail"),
    ("grad/variance", "", "variance over the coordinates of the step's gradient", "detail"),
    ("grad/norm_after_{k}", "", "norm of the mean gradient of the step's first k = 1, 2, 4, ... micro-batches", "detail"),
    ("grad/mean_after_{k}", "", "its mean over coordinates", "detail"),
    ("grad/variance_after_{k}", "", "its variance over coordinates", "detail"),
    ("adam/snr", "", "mean of |m| / sqrt(v): 1 where gradients repeat themselves, 0.18 for pure noise (beta1 0.9)", "detail"),
    ("update/norm", "", "length of the step that the weights took", "detail"),
    ("update/ratio", "share", "that over the length of the weights", "detail"),
]
# names in wandb by key: step is wandb's own x-axis; the noise scale is the only one whose interval has names, too
WANDB = {row[0].removesuffix("{end}"): row[4] for row in KEYS if len(row) == 5} | {"step": None}
WANDB |= {f"gns{end}": f"{WANDB['gns']}{end}" for end in ("_low", "_high")}


def in_wandb(key):
    """The name of a key of the log in wandb; None where wandb has it by itself."""
    return WANDB.get(key, f"detail/{key}")


def pattern(key):
    """The regular expression of a key with placeholders; each is a named group."""
    either = {"group": "|".join(GROUPS).replace("{i}", r"\d+"), "end": "|".join(ENDS), "part": "|".join(PARTS), "k": r"\d+"}
    return re.compile(re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{either[m[1]]})", key))


def rows_of(key):
    """The rows of the table that describe a key found in a log: one, if all is well."""
    return [row for row in KEYS if pattern(row[0]).fullmatch(key)]


def page():
    """docs/log_keys.md"""
    text = ["# Log keys", "",
            "`log.jsonl` in the run folder has one JSON object per line. [wandb](wandb.md) gets the same values, under names",
            "that it sorts into sections. This page is written from `trainer/log_keys.py` by `python results/render.py`.", "",
            "`row` in each line is its number, from 0: a file that lacks lines, or has them in another order, is refused.", "",
            "`{group}`, `{end}`, `{part}`, `{i}` and `{k}` stand for the names and numbers in the tables at the end."]
    for section, about in SECTIONS.items():
        text += ["", f"## {section}", "", about, "", "| key | unit | meaning | in wandb |", "|---|---|---|---|"]
        text += [cells(f"`{key}`", unit, meaning, wandb_cell(key)) for key, unit, meaning, of, *_ in KEYS if of == section]
        text += [cells("", "tokens", "batch_size times block_size", "`batch/tokens`")] if section == "batch" else []
    for title, names in (("group", GROUPS), ("end", ENDS), ("part", PARTS)):
        text += ["", f"## {{{title}}}", "", "| name | meaning |", "|---|---|"]
        text += [cells(f"`{name}`" if name else "(nothing)", meaning) for name, meaning in names.items()]
    return "\n".join(text) + "\n"


def wandb_cell(key):
    """The name of a key of the table in wandb, in words where its ends have another section."""
    value, *ends = (in_wandb(key.replace("{end}", end)) for end in ENDS)
    if value is None:
        return "its own x-axis"
    if "{end}" not in key:
        return f"`{value}`"
    return f"`{value}{{end}}`" if ends == [value + end for end in ENDS if end] else f"`{value}`, its interval under `detail/`"


def cells(*texts):
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
