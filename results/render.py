"""
The pages that are written from data: docs/results.md and docs/figures.md from results/*.json, docs/log_keys.md from
trainer/log_keys.py.

    python results/render.py              # write them
    python results/render.py --check      # exit 1 and say which are stale

A file in results/ has command, date (or a commit in machine), machine and finding; optional are notes (sentences), a picture of
the same name, and, where a published figure was checked, paper and holds. A new file also needs a title here.
"""

import json
import math
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer import log_keys  # noqa: E402

RESULTS = {
    "The noise scale": {
        "quickstart": "The quickstart's noise scale",
        "layers": "Norm layers against the whole model",
    },
    "One run instead of a sweep": {
        "prediction": "Tokens and steps of other batches, predicted from one run: 3 layers x 96",
        "prediction_quickstart": "The same for the quickstart's model, 4 layers x 128",
        "ladder": "Which noise scale to go by: a ladder of vocabularies",
        "ladder_runs": "The runs of the ladder",
        "steering": "Steering by the noise scale, in real seconds, on four machines",
        "step_cost": "What a step costs: predicted from one run, against runs at other batches",
    },
    "What tracking costs": {
        "step_quickstart_bfloat16": "Training step, quickstart, bf16",
        "step_quickstart_float32": "Training step, quickstart, float32",
        "step_char_bfloat16": "Training step, 6 layers x 384, bf16",
        "step_char_float32": "Training step, 6 layers x 384, float32",
        "step_111m_bfloat16": "Training step, gpt_111m, bf16",
        "step_111m_float32": "Training step, gpt_111m, float32",
        "step_ranks": "Training step under DDP",
        "step_quickstart_adam": "Adam's metric, and calibration in it",
        "tracking": "Whole runs, tracked and not",
        "watch": "watch in GPT-2 and Llama of Hugging Face",
    },
    "Speed": {
        "kernel": "Norm kernel against torch's LayerNorm",
        "attention": "Attention kernel against torch's",
        "step_attention": "Training step with our attention kernel, and with torch's",
        "triton": "Triton kernels, compiled only",
        "step_against_111m": "Against nanoGPT, gpt_111m",
        "step_against_char": "Against nanoGPT, 6 layers x 384",
        "step_whole": "Against nanoGPT, whole processes",
    },
    "Kept whole": {
        "attack": "An attack on the trainer",
        "never_lost_cost": "What it costs to be sure",
    },
    "Sweeps of wikitext2": {
        "sweep_memory": "sweep.py memory",
        "sweep_throughput": "sweep.py throughput",
        "sweep_quality": "sweep.py quality",
        "sweep_runs": "sweep.py runs",
    },
}

FIGURES = {  # title, time on two quiet cores
    "estimator_variance": ("Estimator variance (Fig. 2)", "2 min and the shared run"),
    "flop_cost": ("FLOPs (Fig. 3, Table 1)", "10 s"),
    "io_cost": ("Bytes moved (Fig. 4)", "10 s"),
    "phase_plot": ("Phase plot (Fig. 5)", "three shared runs"),
    "temperature": ("Temperature (Fig. 6)", "3 min"),
    "norm_predicts": ("Norm layers predict the total (Fig. 7)", "three shared runs"),
    "norm_predicts_wikitext2": ("The same with 12M parameters and GPT-2's vocabulary", "13 min"),
    "kernel_speed": ("Kernel speed (Fig. 8)", "30 s"),
    "batch_schedule": ("Batch schedule (Fig. 9)", "8 min"),
}

BY = "This page is written from `results/*.json` by `python results/render.py`: change those, not it."


def load(folder):
    """{name: result} of all files, checked."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    titled = {name for names in RESULTS.values() for name in names} | set(FIGURES)
    for name, result in results.items():
        missing = [key for key in ("command", "machine", "finding") if not result.get(key)]
        if not result.get("date") and not result.get("machine", {}).get("commit"):
            missing.append("date")
        if missing:
            raise SystemExit(f"results/{name}.json has no {', '.join(missing)}")
    lone = titled ^ set(results)
    if lone:
        raise SystemExit(f"results/render.py has no title, or results/ no file, for {', '.join(sorted(lone))}")
    return results


def machine(result):
    m = result["machine"]
    facts = [m["device"] + (f" ({m['cpu']})" if "cpu" in m else ""), f"{m['cores']} cores", f"torch {m['torch']}",
             result.get("date"), m.get("commit") and f"commit {m['commit']}"]
    return ", ".join(fact for fact in facts if fact)


def entry(name, heading, result, takes=None):
    """One measurement: what was found, how to do it again, where the numbers are."""
    lines = [heading, ""]
    if "paper" in result:
        lines += [result["paper"], ""]
    lines += [result["finding"], ""]
    lines += [*(f"- {note}" for note in result["notes"]), ""] if result.get("notes") else []
    lines += ["```", *([f"git checkout {result['tag']}"] if "tag" in result else []), result["command"], "```", ""]
    links = [f"[numbers](../results/{name}.json)"]
    picture = (ROOT / "results" / f"{name}.png").exists()
    if picture:
        links.append(f"[picture](../results/{name}.png)")
    lines += [f"{', '.join(links)}. {machine(result)}." + (f" Takes {takes}." if takes else ""), ""]
    if picture and "paper" in result:
        lines += [f"![{heading.strip('# ')}](../results/{name}.png)", ""]
    return lines + (TABLES[name](result) if name in TABLES else [])


def results_page(results):
    lines = ["# Results", "", BY, "",
             "The machines: Zen 3 has AVX2 and no bf16 instructions, Zen 4 and 5 have AVX-512 and bf16. All were shared with",
             "others, so ratios count and milliseconds do not. What did not work, and how far timings repeat, is in",
             "[LOG.md](../results/LOG.md). The paper's figures are in [figures.md](figures.md). Studies that were made once",
             "are at the git tag studies-2026-11; LOG.md says what each showed."]
    for section, names in RESULTS.items():
        lines += ["", f"## {section}", ""]
        lines += ["### All of it in one table", "", *speed_table(results)] if section == "Speed" else []
        for name, title in names.items():
            lines += entry(name, f"### {title}", results[name])
    return tidy(lines)


def figures_page(results):
    lines = ["# The paper's figures, checked", "", BY, "",
             "One script in `experiments/` for each figure of Gray et al. 2024 (arXiv 2411.00999). Each prints what the paper",
             "says and what was found here, whichever way it came out. Here means small models on two CPU cores.", "",
             "`--tiny` takes seconds. `--config config/gpt_111m.py --device cuda` is for the paper's size: not run yet.",
             "`--seeds` adds seeds. Figures 2, 5 and 7 share one training run per seed, about a minute on one core.",
             "The first of them makes it. Times are for two quiet cores, estimated where runs shared theirs.", "",
             "| figure | does it hold here? |", "|---|---|"]
    lines += [f"| [{title}](#{anchor(title)}) | {results[name].get('holds', 'see below')} |"
              for name, (title, _) in FIGURES.items()]
    lines.append("")
    for name, (title, takes) in FIGURES.items():
        lines += entry(name, f"## {title}", results[name], takes)
    return tidy(lines)


def table(head, rows):
    """Markdown's lines for a table; rows of cells."""
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|",
            *(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows), ""]


def error(own):
    return f"{own['median_error']:.0%} (worst {own['worst_error']:.0%})" if own else "-"


def errors(*those):
    """Median errors in one cell."""
    return ", ".join(f"{own['median_error']:.0%}" for own in those if own)


def schedule_table(result):
    rows = []
    for name, group in result["groups"].items():
        tokens, steps = group["at_target"]["tokens"], group["at_target"]["steps"]
        rows.append((name, f"{tokens['mean'] / 1e3:.0f}k ({tokens['low'] / 1e3:.0f}k to {tokens['high'] / 1e3:.0f}k)",
                     f"{steps['mean']:.0f}", f"{group['final_val_loss']['mean']:.3f}"))
    return [f"What it took to reach {result['target']:.3f}, the worst final loss of the fixed runs:", "",
            *table(("batch", "tokens", "steps", "loss at the end"), rows)]


def prediction_table(result):
    """Errors and the best factor, by candidate."""
    distances = ("x2", "x4", "x8")
    rows = [(key, *(error(own[d]) for d in distances), errors(own["second_half"]["x2"], own["second_half"]["x4"]),
             f"{own['best_factor']:.2g}", sum(own[d]["predictions"] for d in distances if own[d]))
            for key, own in result["table"].items() if "best_factor" in own]
    return table(("noise scale", "x2, x1/2", "x4, x1/4", "x8, x1/8", "longer half: x2, x4", "best factor", "predictions"), rows)


def ladder_table(result):
    """The critical batch of each rung beside one run's means, then what every candidate predicts."""
    shown = ("all/coord/1", "body/coord/1", "all/coord/0", "body/coord/0", "norm/coord/1")
    rungs = []
    for own in result["rungs"]:
        critical = "not fitted"
        if own["critical"]:
            critical = f"{own['critical']:.3g} ({own['low'] or 0:.3g} to {own['high'] or math.inf:.3g})"
        rungs.append((own["rung"].replace("_", " "), own["seeds"], f"{own['tokens'] / 1e3:.0f}k", critical,
                      *(f"{own['means'][name]:.3g}" if own["means"][name] else "-" for name in shown)))
    candidates = [(name, f"{own['critical_over_mean']:.2g} ({own['least']:.2g} to {own['most']:.2g})", f"{own['spread']:.2g}",
                   f"{own['long_over_short']:.2g}" if own["long_over_short"] else "-", error(own["errors"]["x2"]),
                   error(own["errors"]["x4"]), f"{own['best_factor']:.2g}", errors(*own["errors_with_best_factor"].values()))
                  for name, own in result["table"].items()]
    return [*table(("rung", "seeds", "tokens", "critical batch", *shown), rungs),
            *table(("noise scale", "critical over mean", "spread", "long over short", "x2, x1/2", "x4, x1/4", "factor",
                    "with it"), candidates)]


def steering_table(result):
    """Seconds to a loss over those of the best constant batch, by machine and loss; then priced."""
    kinds = ("gns", "linear", "seesaw", "8", "16", "64", "128")
    losses = [(name, own) for name, machine in result["machines"].items() for own in machine["losses"].values()]
    losses += [(f"t0 of {ratio} sequences, priced", own) for ratio, own in result["priced"].items()]
    rows = [(name, f"{own['loss']:.2f}", own["best"],
             *(f"{1 + own['regret'][k]:.2f}" if k in own["regret"] else "-" for k in kinds))
            for name, own in losses if own["best"]]
    checks = "; ".join(f"{name} batch {m['check']['batch']}, {m['check']['seconds']:.0f} and {m['check']['priced']:.0f}"
                       for name, m in result["machines"].items())
    return ["Seconds to a loss, over those of the best constant batch there. Whole runs, three seeds.", "",
            *table(("machine", "loss", "best batch", *kinds[:3], *(f"constant {k}" for k in kinds[3:])), rows),
            "A whole constant run on each machine, its seconds and those that steps times the time of a step make: "
            f"{checks}.", ""]


def speed_rows(name, result):
    """[(what, ratio, its quartiles)] of a benchmark's file."""
    def row(what, own):
        return what, f"{own['ratio']:.3f}", f"{own['ratio_q1']:.3f} to {own['ratio_q3']:.3f}"
    if name == "kernel":
        by_dtype = {}
        for shape in result["shapes"]:
            by_dtype.setdefault(shape["dtype"], []).append(shape["ratios"]["ours / torch"]["both"])
        return [(f"norm kernel with norms over torch's without, {dtype}, {len(both)} shapes",
                 f"{statistics.geometric_mean(both):.3f}", f"shapes {min(both):.3f} to {max(both):.3f}")
                for dtype, both in by_dtype.items()]
    if name == "attention":
        return [row(f"attention over torch's, {r['dtype']}, {r['B']} x {r['T']}, {r['heads']} x {r['size']}",
                    r["ratios"]["torch"]["both"]) for r in result["shapes"]]
    if name == "tracking":
        return [*(row(f"quickstart, whole runs: {variant}, over off", own) for variant, own in result["runs"].items()
                  if variant != "off"),
                row("quickstart, whole runs: tracked, over tracked without Adam's metric", result["adams_metric"])]
    if name.startswith(("step_against", "step_whole")):
        how = f"ours {result['dtypes']['ours']}, theirs {result['dtypes']['theirs']}"
        how += ", whole processes" if name == "step_whole" else ""
        return [(f"tokens/s over nanoGPT's, {model}, {how}", f"{own['ratio'][1]:.2f}",
                 f"{own['ratio'][0]:.2f} to {own['ratio'][2]:.2f}") for model, own in result["models"].items()]
    rows, parts = [], result.get("processes", [result])
    for model, variants in parts[0]["models"].items():
        how = ", ".join(filter(None, (model, parts[0].get("dtype"), parts[0]["ranks"] > 1 and f"{parts[0]['ranks']} ranks")))
        for variant in (v for v in variants if v != "off, torch's norm"):
            each = sorted((part["models"][model][variant] for part in parts), key=lambda own: own["ratio"])
            what, median, quartiles = row(f"step, {how}: {variant}", each[len(each) // 2])
            if len(each) > 1:
                quartiles += f" ({len(each)} processes: medians {each[0]['ratio']:.3f} to {each[-1]['ratio']:.3f})"
            rows.append((what, median, quartiles))
    return rows


SPEED = ("kernel", "attention", *(f"step_{model}_{dtype}" for model in ("quickstart", "char", "111m")
                                  for dtype in ("bfloat16", "float32")),
         "step_quickstart_adam", "tracking", "step_attention", "step_ranks", "step_against_char",
         "step_against_111m", "step_whole")


def speed_table(results):
    """Everything about speed that is claimed anywhere, once."""
    rows = []
    for name in SPEED:
        m, date = results[name]["machine"], results[name]["date"]
        rows += [(f"[{what}](../results/{name}.json)", median, quartiles, f"{m.get('cpu', m['device'])}, {date}")
                 for what, median, quartiles in speed_rows(name, results[name])]
    return ["A step is over one without tracking and with torch's LayerNorm, a whole run over one without tracking, with our",
            "kernels.", "", *table(("what", "median", "quartiles", "machine, date"), rows)]


TABLES = {"steering": steering_table, "prediction": prediction_table, "prediction_quickstart": prediction_table,
          "ladder": ladder_table, "batch_schedule": schedule_table}


def anchor(title):
    """The name that GitHub gives a heading."""
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def tidy(lines):
    return "\n".join(lines).rstrip().replace("\n\n\n", "\n\n") + "\n"


def pages():
    results = load(ROOT / "results")
    return {"results.md": results_page(results), "figures.md": figures_page(results), "log_keys.md": log_keys.page()}


def main(argv=None):
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    stale = []
    for name, text in pages().items():
        path = ROOT / "docs" / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(f"docs/{name}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"{'stale' if check else 'written'}: {', '.join(stale)}" if stale else "docs are up to date")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
