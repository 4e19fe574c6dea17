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
        "critical_batch": "Three answers: what is the critical batch size?",
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
        "step_others": "Exact mode against per-sample gradients of others",
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
    "lr_tuning": ("Learning rate at constant FLOPs (Fig. 14)", "3 min"),
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
    lines += ["```", result["command"], "```", ""]
    links = [f"[numbers](../results/{name}.json)"]
    picture = (ROOT / "results" / f"{name}.png").exists()
    if picture:
        links.append(f"[picture](../results/{name}.png)")
    lines += [f"{', '.join(links)}. {machine(result)}." + (f" Takes {takes}." if takes else ""), ""]
    if picture and "paper" in result:
        lines += [f"![{heading.strip('# ')}](../results/{name}.png)", ""]
    return lines


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
            if name not in results:
                continue
            lines += entry(name, f"### {title}", results[name])
            lines += TABLES[name](results[name]) if name in TABLES else []
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
        if name == "batch_schedule":
            lines += schedule_table(results[name])
    return tidy(lines)


def schedule_table(result):
    lines = [f"What it took to reach {result['target']:.3f}, the worst final loss of the fixed runs:", "",
             "| batch | tokens | steps | loss at the end |", "|---|---|---|---|"]
    for name, group in result["groups"].items():
        tokens, steps = group["at_target"]["tokens"], group["at_target"]["steps"]
        lines.append(f"| {name} | {tokens['mean'] / 1e3:.0f}k ({tokens['low'] / 1e3:.0f}k to {tokens['high'] / 1e3:.0f}k) | "
                     f"{steps['mean']:.0f} | {group['final_val_loss']['mean']:.3f} |")
    return [*lines, ""]


def triton_tables(result):
    """The norm's backward kernel: what it needs by channels, and its grid by examples and channels."""
    before = result["before"]
    needed = {(r["x"], r["dy"], r["C"], r["sm"]): r for r in before["kernels"] if r["kernel"] == "backward"}
    lines = [f"Backward kernel, T = 2048. Each cell: before (commit {before['commit']}), now; the largest of sm_80, sm_90 and",
             "sm_100.", "", "| x, dy | C | registers | spilled bytes | barriers a row |",
             "|---|---|---|---|---|"]
    now = {}
    for r in result["kernels"]:
        if r["kernel"] == "backward":
            now.setdefault((r["x"], r["dy"], r["C"]), []).append((needed[r["x"], r["dy"], r["C"], r["sm"]], r))
    for (x, dy, C), pairs in now.items():
        cells = [", ".join(str(max(pair[i][key] for pair in pairs)) for i in (0, 1))
                 for key in ("registers", "spill_bytes", "barriers_per_row")]
        lines.append(f"| {x}, {dy} | {C} | {' | '.join(cells)} |")
    lines += ["", f"Its grid on {result['multiprocessors']} multiprocessors:", "",
              "| B | C | programs | programs of the second kernel | launches |", "|---|---|---|---|---|"]
    for old, new in zip(before["backward"], result["backward"], strict=True):
        cells = [f"{old[key]}, {new[key]}" for key in ("programs", "finish_programs", "launches")]
        lines.append(f"| {new['B']} | {new['C']} | {' | '.join(cells)} |")
    return [*lines, ""]


def attention_table(result):
    """Time, speed, error and memory by shape."""
    lines = ["Forward and backward. The ceiling is the speed of torch's own matrix product, which a CPU can pass.", "",
             "| dtype | B x T, heads x size | over torch's time | GFLOP/s, ceiling | error over torch's | peak memory |",
             "|---|---|---|---|---|---|"]
    for r in result["shapes"]:
        ratio, memory = r["ratios"]["torch"]["both"], r["peak_bytes"]["ours"] / r["peak_bytes"]["torch"]
        lines.append(f"| {r['dtype']} | {r['B']} x {r['T']}, {r['heads']} x {r['size']} | {ratio['ratio']:.2f} "
                     f"({ratio['ratio_q1']:.2f} to {ratio['ratio_q3']:.2f}) | {r['flops_per_s']['both'] / 1e9:.0f}, "
                     f"{r['ceiling_flops_per_s'] / 1e9:.0f} | {max(r['error_over_torch'].values()):.2f} | {memory:.2f} |")
    return [*lines, ""]


def prediction_table(result):
    """Median error, the bias at larger batches, and the factor, by candidate."""
    lines = ["| noise scale | x2, x1/2 | x4, x1/4 | x8, x1/8 | longer half: x2, x4 | best factor | predictions |",
             "|---|---|---|---|---|---|---|"]

    def error(own):
        return f"{own['median_error']:.0%} (worst {own['worst_error']:.0%})" if own else "-"
    for key, own in result["table"].items():
        if "best_factor" in own:
            late = ", ".join(f"{own['second_half'][d]['median_error']:.0%}" for d in ("x2", "x4") if own["second_half"][d])
            count = sum(own[d]["predictions"] for d in ("x2", "x4", "x8") if own[d])
            lines.append(f"| {key} | {error(own['x2'])} | {error(own['x4'])} | {error(own['x8'])} | {late} | "
                         f"{own['best_factor']:.2g} | {count} |")
    return lines


def ladder_table(result):
    """The critical batch of each rung beside one run's means, then what every candidate predicts."""
    shown = ("all/coord/1", "body/coord/1", "all/coord/0", "body/coord/0", "norm/coord/1")
    lines = [f"| rung | seeds | tokens | critical batch | {' | '.join(shown)} |", "|---" * (4 + len(shown)) + "|"]
    for own in result["rungs"]:
        critical = "not fitted"
        if own["critical"]:
            critical = f"{own['critical']:.3g} ({own['low'] or 0:.3g} to {own['high'] or math.inf:.3g})"
        means = " | ".join(f"{own['means'][name]:.3g}" if own["means"][name] else "-" for name in shown)
        rung, tokens = own["rung"].replace("_", " "), f"{own['tokens'] / 1e3:.0f}k"
        lines.append(f"| {rung} | {own['seeds']} | {tokens} | {critical} | {means} |")
    lines += ["", "| noise scale | critical over mean | spread | long over short | x2, x1/2 | x4, x1/4 | factor | with it |",
              "|---|---|---|---|---|---|---|---|"]

    def error(own):
        return f"{own['median_error']:.0%} (worst {own['worst_error']:.0%})" if own else "-"
    for name, own in result["table"].items():
        both = ", ".join(f"{e['median_error']:.0%}" for e in own["errors_with_best_factor"].values() if e)
        growth = f"{own['long_over_short']:.2g}" if own["long_over_short"] else "-"
        ratio = f"{own['critical_over_mean']:.2g} ({own['least']:.2g} to {own['most']:.2g})"
        lines.append(f"| {name} | {ratio} | {own['spread']:.2g} | {growth} | {error(own['errors']['x2'])} | "
                     f"{error(own['errors']['x4'])} | {own['best_factor']:.2g} | {both} |")
    return lines


def steering_table(result):
    """Seconds to a loss over those of the best constant batch, by machine and loss; then priced."""
    kinds = ("gns", "linear", "seesaw", "8", "16", "64", "128")
    lines = ["Seconds to a loss, over those of the best constant batch there. Whole runs, three seeds.", "",
             f"| machine | loss | best batch | {' | '.join(kinds[:3])} | constant {' | constant '.join(kinds[3:])} |",
             "|---" * (3 + len(kinds)) + "|"]

    def row(name, own):
        cells = [f"{1 + own['regret'][k]:.2f}" if k in own["regret"] else "-" for k in kinds]
        return f"| {name} | {own['loss']:.2f} | {own['best']} | {' | '.join(cells)} |"
    for name, machine in result["machines"].items():
        lines += [row(name, own) for own in machine["losses"].values() if own["best"]]
    lines += [row(f"t0 of {ratio} sequences, priced", own) for ratio, own in result["priced"].items() if own["best"]]
    lines += ["", "A whole constant run on each machine, its seconds and those that steps times the time of a step make: "
              + "; ".join(f"{name} batch {m['check']['batch']}, {m['check']['seconds']:.0f} and {m['check']['priced']:.0f}"
                          for name, m in result["machines"].items()) + "."]
    return [*lines, ""]


def attack_table(result):
    lines = [f"Each cell: before (commit {result['before']['commit']}), now.", "",
             "| kind | tried | survived | refused | failed |", "|---|---|---|---|---|"]
    columns = ("tried", "survived", "refused", "failed")
    in_all = {name: {key: sum(both[name][key] for both in result["kinds"].values() if both[name]) for key in columns}
              for name in ("before", "after")}
    for kind, both in {**result["kinds"], "in all": in_all}.items():
        cells = [", ".join(str(both[name][key]) if both[name] else "-" for name in ("before", "after")) for key in columns]
        lines.append(f"| {kind.replace('_', ' ')} | {' | '.join(cells)} |")
    return [*lines, ""]


def cost_table(result):
    """Seconds, by both clocks: what waits for the disk shows in the first alone."""
    def cell(times):
        return f"{times['median_ms'] / 1e3:.2f} ({times['q1_ms'] / 1e3:.2f} to {times['q3_ms'] / 1e3:.2f})"
    lines = [f"Seconds, median and quartiles of {result['rounds']} rounds; before is commit {result['before']['commit']}; a "
             f"checkpoint of {result['checkpoint_bytes'] / 1e6:.0f} MB.", "",
             "| | wall, before | wall, now | CPU, before | CPU, now |", "|---|---|---|---|---|"]
    for what in dict.fromkeys(row["what"] for row in result["rows"]):
        rows = {row["clock"]: row for row in result["rows"] if row["what"] == what}
        lines.append(f"| {what} | " + " | ".join(cell(rows[clock][name]) for clock in ("wall", "cpu")
                                                for name in ("before", "after")) + " |")
    return [*lines, ""]


def speed_rows(name, result):
    """[(what, ratio or seconds, its quartiles)] of a benchmark's file."""
    def row(what, found):
        return what, f"{found['ratio']:.3f}", f"{found['ratio_q1']:.3f} to {found['ratio_q3']:.3f}"

    def three(what, low, middle, high, unit=""):
        return what, f"{middle:.2f}{unit}", f"{low:.2f} to {high:.2f}{unit}"
    if name == "kernel":
        rows = []
        for dtype in dict.fromkeys(shape["dtype"] for shape in result["shapes"]):
            both = [shape["ratios"]["ours / torch"]["both"] for shape in result["shapes"] if shape["dtype"] == dtype]
            mean = math.exp(statistics.fmean(map(math.log, both)))
            rows.append((f"norm kernel with norms over torch's without, {dtype}, {len(both)} shapes", f"{mean:.3f}",
                         f"shapes {min(both):.3f} to {max(both):.3f}"))
        return rows
    if name == "attention":
        return [row(f"attention over torch's, {r['dtype']}, {r['B']} x {r['T']}, {r['heads']} x {r['size']}",
                    r["ratios"]["torch"]["both"]) for r in result["shapes"]]
    if name == "tracking":
        found = [row(f"quickstart, whole runs: {variant}, over off", own) for variant, own in result["runs"].items()
                 if variant != "off"]
        return [*found, row("quickstart, whole runs: tracked, over tracked without Adam's metric", result["adams_metric"])]
    if name.startswith(("step_against", "step_whole")):
        whole = ", whole processes" if name == "step_whole" else ""
        return [three(f"tokens/s over nanoGPT's, {model}, ours {result['dtypes']['ours']}, theirs {result['dtypes']['theirs']}"
                      f"{whole}", *own["ratio"]) for model, own in result["models"].items()]
    rows, parts = [], result.get("processes", [result])
    for model, variants in parts[0]["models"].items():
        how = ", ".join(filter(None, (model, parts[0].get("dtype"), parts[0]["ranks"] > 1 and f"{parts[0]['ranks']} ranks")))
        for variant in (v for v in variants if v != "off, torch's norm"):
            found = sorted((part["models"][model][variant] for part in parts), key=lambda own: own["ratio"])
            what, median, quartiles = row(f"step, {how}: {variant}", found[len(found) // 2])
            if len(found) > 1:
                quartiles += f" ({len(found)} processes: medians {found[0]['ratio']:.3f} to {found[-1]['ratio']:.3f})"
            rows.append((what, median, quartiles))
    return rows


SPEED = ("kernel", "attention", *(f"step_{model}_{dtype}" for model in ("quickstart", "char", "111m")
                                  for dtype in ("bfloat16", "float32")),
         "step_quickstart_adam", "tracking", "step_attention", "step_ranks", "step_others", "step_against_char",
         "step_against_111m", "step_whole")


def speed_table(results):
    """Everything about speed that is claimed anywhere, once."""
    lines = ["A step is over one without tracking and with torch's LayerNorm, a whole run over one without tracking, with our",
             "kernels.", "",
             "| what | median | quartiles | machine, date |", "|---|---|---|---|"]
    for name in SPEED:
        if name in results:
            result = results[name]
            where = f"{result['machine'].get('cpu', result['machine']['device'])}, {result['date']}"
            lines += [f"| [{what}](../results/{name}.json) | {median} | {quartiles} | {where} |"
                      for what, median, quartiles in speed_rows(name, result)]
    return [*lines, ""]


TABLES = {"attack": attack_table, "steering": steering_table, "attention": attention_table, "never_lost_cost": cost_table,
          "triton": triton_tables, "prediction": prediction_table,
          "prediction_quickstart": prediction_table, "ladder": ladder_table}


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
