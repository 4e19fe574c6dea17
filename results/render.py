"""
The pages that are written from data: docs/results.md and docs/figures.md from results/*.json, docs/log_keys.md from
trainer/log_keys.py.

    python results/render.py              # write them
    python results/render.py --check      # exit 1 and say which are stale

A file in results/ has command, date (or a commit in machine), machine and finding; optional are notes (sentences), a picture of
the same name, and, where a published figure was checked, paper and holds. A new file also needs a title here.
"""

import json
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


class Numbers(dict):
    """A JSON object whose numbers as keys may be asked for as numbers, as a format does."""

    def __missing__(self, key):
        if isinstance(key, int):
            return self[str(key)]
        raise KeyError(key)


def load(folder):
    """{name: result} of all files, checked."""
    results = {path.stem: json.loads(path.read_text(), object_hook=Numbers) for path in sorted(folder.glob("*.json"))}
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
    return lines + tables(name, result)


def results_page(results):
    lines = ["# Results", "", BY, "",
             "The machines: Zen 3 has AVX2 and no bf16 instructions, Zen 4 and 5 have AVX-512 and bf16. All were shared with",
             "others, so ratios count and milliseconds do not. What did not work, and how far timings repeat, is in",
             "[LOG.md](../results/LOG.md). The paper's figures are in [figures.md](figures.md). Studies that were made once",
             "are at the git tag studies-2026-11; LOG.md says what each showed."]
    for section, names in RESULTS.items():
        lines += ["", f"## {section}", ""]
        for name, title in names.items():
            lines += entry(name, f"### {title}", results[name])
    return tidy(lines)


def figures_page(results):
    lines = ["# The paper's figures, checked", "", BY, "",
             "The figures of Gray et al. 2024 (arXiv 2411.00999), each by a script in `experiments/`, which prints what the",
             "paper says and what was found here, whichever way it came out. Here means small models on two CPU cores.", "",
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


# {file: [(sentence above the table, path to its rows, {head: cell})]}; * in a path is every key. A cell formats the values
# of the row, {0} and {1} are the keys on the way to it; what is missing or null there is a "-".
WORST = "{KEY[median_error]:.0%} (worst {KEY[worst_error]:.0%})"
PREDICTION = [("", "table/*", {
    "noise scale": "{0}", **{head: WORST.replace("KEY", key) for head, key in (
        ("x2, x1/2", "x2"), ("x4, x1/4", "x4"), ("x8, x1/8", "x8"))},
    "longer half: x2, x4": "{second_half[x2][median_error]:.0%}, {second_half[x4][median_error]:.0%}",
    "best factor": "{best_factor:.2g}", "predictions": "{x2[predictions]}, {x4[predictions]}, {x8[predictions]}"})]
REGRET = {"loss": "{loss:.2f}", "best batch": "{best}", **{
    kind: "{regret[KEY]:+.0%}".replace("KEY", kind.split()[-1]) for kind in (
        "gns", "linear", "seesaw", "constant 8", "constant 16", "constant 64", "constant 128")}}
TABLES = {
    "prediction": PREDICTION, "prediction_quickstart": PREDICTION,
    "ladder": [
        ("", "rungs/*", {"rung": "{rung}", "seeds": "{seeds}", "tokens": "{tokens:,}", "critical batch": "{critical:.3g}",
                         "95%": "{low:.3g} to {high:.3g}",
                         **{name: "{means[KEY]:.3g}".replace("KEY", name) for name in (
                             "all/coord/1", "body/coord/1", "all/coord/0", "body/coord/0", "norm/coord/1")}}),
        ("", "table/*", {"noise scale": "{0}", "critical over mean": "{critical_over_mean:.2g} ({least:.2g} to {most:.2g})",
                         "spread": "{spread:.2g}", "long over short": "{long_over_short:.2g}",
                         "x2, x1/2": WORST.replace("KEY", "errors[x2]"), "x4, x1/4": WORST.replace("KEY", "errors[x4]"),
                         "factor": "{best_factor:.2g}",
                         "with it": "{errors_with_best_factor[x2][median_error]:.0%}, "
                                    "{errors_with_best_factor[x4][median_error]:.0%}"})],
    "steering": [
        ("Seconds to a loss, over those of the best constant batch there. Whole runs, three seeds.", "machines/*/losses/*",
         {"machine": "{0}", **REGRET}),
        ("Priced on machines that we do not have.", "priced/*", {"t0, in sequences": "{0}", **REGRET}),
        ("A whole constant run on each machine: its seconds, and those that steps times the time of a step make.", "machines/*",
         {"machine": "{0}", "batch": "{check[batch]}", "seconds": "{check[seconds]:.0f}", "made": "{check[priced]:.0f}"})],
    "batch_schedule": [
        ("What it took to reach the worst final loss of the fixed runs.", "groups/*",
         {"batch": "{0}", "tokens": "{at_target[tokens][mean]:,.0f} ({at_target[tokens][low]:,.0f} to "
          "{at_target[tokens][high]:,.0f})", "steps": "{at_target[steps][mean]:.0f}",
          "loss at the end": "{final_val_loss[mean]:.3f}"})]}


def rows_at(value, path, keys=()):
    """[(keys on the way, row)] of a path."""
    if not path:
        return [(keys, value)]
    name, *rest = path
    if name != "*":
        return rows_at(value[name], rest, keys)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return [row for key, own in pairs for row in rows_at(own, rest, (*keys, key))]


def cell(text, keys, row):
    try:
        return text.format(*keys, **row)
    except (KeyError, TypeError):  # nothing was measured there
        return "-"


def tables(name, result):
    """Markdown's lines for the tables of a file."""
    lines = []
    for sentence, path, columns in TABLES.get(name, ()):
        lines += [*([sentence, ""] if sentence else []), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(cell(text, keys, row) for text in columns.values())} |"
                  for keys, row in rows_at(result, path.split("/"))]
        lines.append("")
    return lines


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
