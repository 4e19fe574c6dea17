"""
bench.py watch: what watching costs. Training steps of GPT-2 and Llama as transformers has them, watched and not,
interleaved in one process.

    python bench.py watch [--steps=20] [--fused]      # one JSON line per model and width

Times are of the CPU that the process used, on one thread, so that other work on the machine matters less.
Needs transformers. "percent": the median over pairs of neighbouring steps of watched / plain - 1, and the middle half of them.
"taps_percent": the taps' arithmetic alone, run by itself, as a share of the fastest plain step: less noisy.
"""

import copy
import json
import statistics
import time

import torch

from rightbatch import taps, watch

B, T, LAYERS = 8, 256, 4


def models(width):
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    gpt2 = transformers.GPT2Config(vocab_size=4096, n_positions=T, n_embd=width, n_layer=LAYERS, n_head=width // 64)
    llama = transformers.LlamaConfig(vocab_size=4096, hidden_size=width, intermediate_size=8 * width // 3,
                                     num_hidden_layers=LAYERS, num_attention_heads=width // 64, max_position_embeddings=T)
    yield "gpt2", transformers.GPT2LMHeadModel(gpt2)
    yield "llama", transformers.LlamaForCausalLM(llama)


def step(model, optimizer, idx):
    start = time.process_time()
    model(input_ids=idx, labels=idx).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - start


def measure(model, steps, **options):
    pair = [model, copy.deepcopy(model)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-4, fused=True) for m in pair]
    w = watch(pair[1], optimizers[1], **options)
    idx, ratios, plain = torch.randint(0, 4096, (B, T)), [], []
    for i in range(steps + 3):
        order = (0, 1) if i % 2 else (1, 0)
        seconds = dict((k, step(pair[k], optimizers[k], idx)) for k in order)
        if i >= 3:
            ratios.append(100 * (seconds[1] / seconds[0] - 1))
            plain.append(seconds[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"percent": round(middle, 2), "from": round(low, 2), "to": round(high, 2), "sites": len(w.sites),
            "taps_percent": round(100 * sum(tap_seconds(site.norm) for site in w.sites) / min(plain), 2)}


def tap_seconds(norm, times=30):
    x, dy, seconds = torch.randn(B, T, *norm.shape), torch.randn(B, T, *norm.shape), []
    for _ in range(times):
        start = time.process_time()
        taps.norm_rows(norm, dy, x, 0, None)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def arguments(parser):
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--fused", action="store_true", help="norm layers computed by our kernels")


def run(args):
    torch.set_num_threads(1)
    for width in (256, 512):
        for name, model in models(width):
            options = {"fused": True} if args.fused else {}
            print(json.dumps({"model": name, "width": width, "layers": LAYERS, "batch": B, "tokens": T, **options,
                              **measure(model, args.steps, **options)}), flush=True)
