"""
bench.py watch: what watching costs. Training steps of GPT-2 and Llama as transformers has them (4 layers, 8 x 256 tokens):
plain, with a tap on each norm layer (tap), with rows of all other weights sampled as well (sampled: one step in eight, in the
first hundred one in two), and with our norm kernels (fused), taking turns on the same model and optimizer.

    python bench.py watch [--seconds=60] [--widths=256,512]        # needs transformers

Times are of the CPU that the process used, on one thread, so that other work on the machine matters less. Each step is compared
with the plain one of its round: the median and the quartiles of that ratio, as per cent more. "peak": the most memory that a
step held. "taps": the arithmetic of the norm layers' taps alone, as a share of a plain step. "noise": plain against plain, what
the machine adds by itself. "watch": a step of watch(model, optimizer) on average, tap and an eighth of what sampling adds.
"""

import contextlib
import dataclasses
import statistics
import time

import torch

from benchmarks import tools
from rightbatch import gradients, watch

B, T, LAYERS, VOCABULARY = 8, 256, 4, 4096
VARIANTS = {"plain": None, "noise": None, "tap": {"calibrate": False}, "sampled": {},
            "fused": {"calibrate": False, "fused": True}}
SAMPLED = 8  # one step in so many


def models(width):
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    heads = max(1, width // 64)
    gpt2 = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=T, n_embd=width, n_layer=LAYERS, n_head=heads)
    llama = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=8 * width // 3,
                                     num_hidden_layers=LAYERS, num_attention_heads=heads, max_position_embeddings=T)
    yield "gpt2", transformers.GPT2LMHeadModel(gpt2)
    yield "llama", transformers.LlamaForCausalLM(llama)


def steps_of(model, idx):
    """{variant: a function that makes one step and returns its seconds}."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def one(options):
        w = None if options is None else watch(model, optimizer, **options)
        if w:
            w._checked = True  # the first step of a Watch looks at its numbers at once, and compares them with gradients
            for handle in [handle for handles in w._sampler.checks.values() for handle in handles]:
                handle.remove()
        start = time.process_time()
        model(input_ids=idx, labels=idx).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.process_time() - start
        if w:
            w.close()
        return {"step": seconds}
    return {name: (lambda options=options: one(options)) for name, options in VARIANTS.items()}


def measure(model, seconds, rounds):
    idx = torch.randint(0, VOCABULARY, (B, T), generator=torch.Generator().manual_seed(0))
    variants = steps_of(model, idx)
    samples = {name: s["step"] for name, s in tools.interleave(variants, seconds, rounds).items()}
    samples["watch"] = [tap + (sampled - tap) / SAMPLED for tap, sampled in zip(samples["tap"], samples["sampled"])]
    report = {"plain": tools.spread(samples["plain"])}
    for name in ("noise", "tap", "sampled", "watch", "fused"):
        ratio = tools.paired(samples[name], samples["plain"])
        report[name] = dict(zip(("percent", "percent_q1", "percent_q3"), (100 * (r - 1) for r in ratio.values())))
    for name in ("plain", "tap", "sampled", "fused"):
        report[name]["peak_mb"] = tools.peak_bytes(variants[name]) / 2**20
    with contextlib.closing(watch(model)) as w:
        for name in ("tap", "fused"):
            alone = sum(tap_seconds(site.norm, name == "fused") for site in w._hooks.norms)
            report[name]["taps_percent"] = 100e3 * alone / report["plain"]["median_ms"]
    return report


def tap_seconds(norm, fused, times=20):
    x, dy, seconds = torch.randn(B, T, *norm.shape), torch.randn(B, T, *norm.shape), []
    for _ in range(times):
        start = time.process_time()
        gradients.norm_rows(dataclasses.replace(norm, fused=fused), dy, x, 0, None)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def cell(row):
    return f"{row['percent']:.1f}% ({row['percent_q1']:.1f} to {row['percent_q3']:.1f})"


def columns(r):
    """{head: cell} of a row of the table, as docs/watch.md shows it."""
    base = r["plain"]["peak_mb"]
    grown = ", ".join(f"{100 * (r[n]['peak_mb'] / base - 1):+.1f}%" for n in ("tap", "sampled", "fused"))
    return {"": r["model"], "width": str(r["width"]), "step": f"{r['plain']['median_ms']:.0f} ms",
            "plain again": cell(r["noise"]), **{name: cell(r[name]) for name in ("tap", "sampled", "watch", "fused")},
            "taps' arithmetic: tap, fused": ", ".join(f"{r[n]['taps_percent']:.2f}%" for n in ("tap", "fused")),
            "peak memory: plain, tap, sampled, fused": f"{base:.0f} MB, {grown}"}


def arguments(parser):
    parser.add_argument("--seconds", type=float, default=60, help="of each model and width")
    parser.add_argument("--rounds", type=int, default=12, help="at least so many")
    parser.add_argument("--widths", default="256,512")
    parser.add_argument("--out", default="results/watch.json")


def run(args):
    torch.set_num_threads(1)
    report = []
    for width in map(int, args.widths.split(",")):
        for name, model in models(width):
            report.append({"model": name, "width": width, "layers": LAYERS, "batch": B, "tokens": T,
                           **measure(model, args.seconds, args.rounds)})
            cells = columns(report[-1])
            head = [] if len(report) > 1 else [" | ".join(["", *cells, ""]).strip(), "|---" * len(cells) + "|"]
            print(*head, " | ".join(["", *cells.values(), ""]).strip(), sep="\n", flush=True)
    what = {"watch": "watch on average", "sampled": "watch where it samples", "tap": "a tap on each norm layer alone"}
    largest = {name: max(report, key=lambda r: r[name]["percent"]) for name in what}
    finding = "A step takes at most " + ", ".join(
        f"{cell(r[name])} more with {what[name]} ({r['model']}, width {r['width']})" for name, r in largest.items()
    ) + ": median and quartiles."
    tools.write_json(args.out, {"finding": finding, "models": report})
