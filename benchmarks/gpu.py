"""
bench.py gpu: the acceptance run of somebody who has a GPU. Nothing here has run on one before.

    make gpu                        # or: python bench.py gpu
    python bench.py gpu --only=environment,kernels

Ten minutes on one GPU, more on several. Each line is a check with its number; the last says how many failed. All goes to
gpu.json, to be sent to us. Exit code 0: all passed, 1: something failed, 2: no GPU. docs/gpu.md says how to read it.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import math
import shutil
import statistics
import subprocess
import traceback
from unittest import mock

import torch
import torch.nn.functional as F

import ln_kernel
from benchmarks import gpu_runs, tools
from benchmarks.tools import check
from model import GPT, GPTConfig
from rightbatch.kernels import head_loss
from system import output
from trainer import hardware


@dataclasses.dataclass
class Setting:
    """What is run where. The tests rehearse every part with small numbers on a CPU."""
    device: str = "cuda"
    shapes: tuple = ((1, 1, 33), (3, 7, 1023), (2, 4097, 768), (8, 2048, 768), (32, 512, 2048), (2, 300, 4096), (4, 64, 8192),
                     (2, 33, 16384))
    dtypes: tuple = ("float32", "bfloat16", "float16", "mixed")
    speeds: tuple = ((8, 2048, 768), (1, 2048, 768), (8, 2048, 2048), (8, 2048, 4096), (2, 2048, 8192))
    seconds: float = 1.5   # per comparison
    model: dict = dataclasses.field(default_factory=lambda: dict(
        n_layer=10, n_head=12, n_embd=768, block_size=2048, vocab_size=50257, cos_attn=(1,)))
    micro: int = 8
    rounds: int = 10
    training: dict = dataclasses.field(default_factory=lambda: dict(
        max_tokens=400_000, n_layer=4, n_embd=128, block_size=128, batch_size=32, micro_batch_size=4))
    stop: int = 150_000   # tokens
    compile: tuple = ("False", "True")
    parallel: tuple = ("ddp", "fsdp")
    checkpointing: tuple = ("none", "block")


def arguments(parser):
    parser.add_argument("--only", help=f"parts, by comma: {', '.join(PARTS)}; default: all")
    parser.add_argument("--out", default="gpu.json")


# ---- environment

def environment(s):
    """What is installed. The tiny launch is the first thing that fails on a machine without a compiler or Python.h."""
    smi = "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader"
    found = subprocess.run(smi.split(), capture_output=True, text=True).stdout.strip() if shutil.which("nvidia-smi") else ""
    yield check("driver", None, found=found or "no nvidia-smi")
    yield check("versions", None, torch=torch.__version__, cuda=torch.version.cuda, gpus=torch.cuda.device_count(),
                compiler=shutil.which("gcc") or shutil.which("cc") or "none",
                triton=importlib.util.find_spec("triton") and __import__("triton").__version__)
    impl, reason = ln_kernel.choose_impl(s.device)
    yield check("a tiny launch: norm layers are Triton's", impl == "triton", impl=impl, reason=reason)


# ---- kernels against ref in float64

def results_of(impl, rms, x, branch, w, b, p, dtotal, dy, tracked=True):
    """{name: x + branch, its norm, and the gradients of x, branch, w(, b)(, probe)}"""
    leaves = {"dx": x, "dbranch": branch, "dw": w} | ({} if rms else {"db": b})
    leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
    wide = torch.promote_types(x.dtype, torch.float32)
    if tracked:
        leaves["sq"] = torch.zeros(2 if rms else 4, len(x), device=x.device, dtype=wide, requires_grad=True)
    with torch.autocast(x.device.type, dy.dtype, enabled=x.dtype == torch.float32 and dy.dtype != x.dtype):
        total, y = ln_kernel.norm(leaves["dx"], leaves["dw"], leaves.get("db"), leaves.get("sq"), p[:1 if rms else 2],
                                  leaves["dbranch"], rms, impl=impl)
    grads = torch.autograd.grad([total, y], [*leaves.values()], [dtotal, dy])
    return {"sum": total.detach(), "y": y.detach()} | dict(zip(leaves, grads))


def inputs(s, shape, dtype):
    generator = torch.Generator().manual_seed(0)

    def random(*size, to=torch.float32):
        return torch.randn(*size, generator=generator).to(s.device, to)
    stream = torch.float32 if dtype == "mixed" else getattr(torch, dtype)
    half = torch.bfloat16 if dtype == "mixed" else stream
    w, b, p = random(shape[-1]), random(shape[-1]), random(2, shape[-1]).square()
    return (random(*shape, to=stream), random(*shape, to=half), w, b, p, random(*shape, to=stream), random(*shape, to=half))


LIMITS = {"sum": 1, "y": 8, "dx": 16, "dbranch": 16, "dw": 64, "db": 64, "sq": 128}   # sums over thousands of rows lose digits


def error_of(found, truth):
    """Over the largest number, in units of the last place of its dtype."""
    rounding = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
    error = (found.double() - truth).abs().max().item() / (truth.abs().max().item() or 1.0) / rounding
    return error if error == error else float("inf")


def kernels(s):
    for rms, dtype in itertools.product((False, True), s.dtypes):
        worst = {}
        for shape in s.shapes:
            given = inputs(s, shape, dtype)
            found, exact = results_of("auto", rms, *given), results_of("ref", rms, *(t.double() for t in given))
            worst = {name: max(worst.get(name, 0.0), error_of(found[name], exact[name])) for name in exact}
        yield check(f"{'rms_norm' if rms else 'layer_norm'}, {dtype}: errors", all(e <= LIMITS[n] for n, e in worst.items()),
                    **{n: round(e, 2) for n, e in worst.items()})
    given = inputs(s, (3, 33, 77), "mixed" if "mixed" in s.dtypes else s.dtypes[0])
    one, two, off = (results_of("auto", False, *given, tracked=t) for t in (True, True, False))
    yield check("the same bits twice", all(torch.equal(one[name], two[name]) for name in one))
    yield check("tracked = untracked", all(torch.equal(one[name], off[name]) for name in off))
    given[0][1, 3, 5] = float("nan")
    found, bad = results_of("auto", False, *given), torch.zeros(3, 33, dtype=torch.bool)
    bad[1, 3] = True
    rows = [torch.equal(found["y"].isnan().all(-1).cpu(), bad), torch.equal(found["y"].isfinite().all(-1).cpu(), ~bad),
            bool((found["dx"].isfinite().all(-1).cpu() | bad).all())]
    sq = found["sq"]
    yield check("NaN stays in its row and in its example's norms",
                all(rows) and sq[:, 0].isfinite().all() and sq[:, 2].isfinite().all() and sq[0, 1].isnan())


# ---- exact mode and the head against autograd

def autograd(s):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=211)).to(s.device)
    x, y = (torch.randint(211, (3, 32), generator=torch.Generator().manual_seed(i)).to(s.device) for i in (1, 2))
    parameters, truth = dict(model.named_parameters()), []
    for b in range(3):
        model.zero_grad()
        (model(x[b:b + 1], y[b:b + 1])[1] / 3).backward()
        truth.append({name: p.grad.double().square().sum().item() for name, p in parameters.items()})
    for mode, large in (("norm", False), ("exact", False), ("exact", True)):   # large: as if the vocabulary were
        sites = model.probe_sites(mode)
        probes = torch.zeros(len(sites), 2, 3, device=s.device, requires_grad=True)
        with mock.patch.object(head_loss, "WORTH_BYTES", 0 if large else math.inf):
            model(x, y, probes=probes)[1].backward()
        worst = max(abs(probes.grad[i, 0, b].item() / truth[b][name] - 1) for b in range(3)
                    for i, (name, *_) in enumerate(sites))
        which = f"{mode} mode" + (", head of a large vocabulary" if large else "")
        yield check(f"per-example norms, {which}: largest relative error", worst < 1e-3, error=worst)
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(2, 300, 64, device=s.device, requires_grad=True)
        w = torch.randn(1003, 64, device=s.device, requires_grad=True)
        t = torch.randint(1003, (2, 300), device=s.device)
        with torch.autocast(s.device, dtype, enabled=dtype != torch.float32):
            with mock.patch.object(head_loss, "chunk_bytes", lambda device: 4 * 1003 * 256):   # three chunks
                own = head_loss.linear_cross_entropy(a, w, t)
            plain = F.cross_entropy(F.linear(a, w).flatten(0, 1).float(), t.flatten())
        truth = F.cross_entropy(F.linear(a.double(), w.double()).flatten(0, 1), t.flatten())
        own, plain, truth = ([loss, *torch.autograd.grad(loss, (a, w))] for loss in (own, plain, truth))
        ours, theirs = ([((u - v).abs().max() / v.abs().max()).item() for u, v in zip(found, truth)] for found in (own, plain))
        yield check(f"the head's loss, {tools.plain(dtype)}: at most twice plain torch's error of loss, dx, dW",
                    all(a <= 2 * b + 1e-5 for a, b in zip(ours, theirs)), ours=ours, torchs=theirs)


# ---- speed

def bandwidth(s):
    """Backward pass of x + branch and its norm; copy moves as many bytes as it must: x, dy, the sum's gradient in; dx and the
    branch's gradient out. Above 0.8 of it there is little left to gain."""
    for B, T, C in s.speeds:
        *leaves, _, dtotal, dy = inputs(s, (B, T, C), "mixed")
        leaves = [t.requires_grad_() for t in leaves]
        probe = torch.zeros(2, B, device=s.device, requires_grad=True)
        half = torch.empty(dy.numel() * 16 // 2, dtype=torch.int8, device=s.device)

        def plain(x, branch, w, b):
            total = x + branch
            return total, F.layer_norm(total, (C,), w, b).bfloat16()

        def ours(x, branch, w, b=None, probe=None, rms=False):
            with torch.autocast(s.device, torch.bfloat16):
                return ln_kernel.norm(x, w, b, probe, branch=branch, rms=rms)

        def backward(function, *leaves):
            return functools.partial(torch.autograd.grad, function(*leaves), leaves, [dtotal, dy], retain_graph=True)
        variants = {"ours": backward(ours, *leaves, probe), "torch": backward(plain, *leaves), "copy": half.clone}
        if "True" in s.compile:
            variants["inductor"] = backward(torch.compile(plain), *leaves)
        with contextlib.suppress(ImportError):  # it has a backward pass for RMSNorm alone, so ours stands beside
            from quack.rmsnorm import rmsnorm
            variants["ours_rms"] = backward(functools.partial(ours, rms=True), *leaves[:3])
            variants["quack_rms"] = backward(lambda x, branch, w: rmsnorm(branch, w, residual=x, prenorm=True)[::-1],
                                             *leaves[:3])
        with contextlib.suppress(ImportError):
            from liger_kernel.ops.layer_norm import LigerLayerNormFunction
            variants["liger"] = backward(lambda x, branch, w, b: (x + branch, LigerLayerNormFunction.apply(
                x + branch, w, b, 1e-5).bfloat16()), *leaves)
        samples = tools.interleave({name: tools.in_turn([run], s.device) for name, run in variants.items()}, s.seconds)
        times = {name: 1e3 * statistics.median(phases["backward"]) for name, phases in samples.items()}
        yield check(f"backward of the norm, {B} x {T} x {C}: no slower than torch's", times["ours"] <= times["torch"],
                    share_of_copy=round(times["copy"] / times["ours"], 3), **{f"{k}_ms": round(v, 4) for k, v in times.items()})


def training_step(s):
    """Compiled, in turns; without a host sync, with at most three graphs each and none after the first steps."""
    from torch._dynamo.utils import counters
    settings = {"torch's norm": dict(mode="off", norm_impl="torch"), "off": dict(mode="off"), "norm": dict(mode="norm"),
                "norm + adam": dict(mode="norm", adam=True), "exact": dict(mode="exact")}
    dtype, steps = hardware.pick_dtype("auto", s.device), {}
    tokens = s.micro * s.model["block_size"]
    for name, options in settings.items():
        counters.clear()
        step = steps[name] = tools.Step(s.model, s.micro, dtype=dtype, device=s.device, compile=s.compile[-1], **options)
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        memory, graphs = torch.cuda.max_memory_allocated(), counters["stats"]["unique_graphs"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            step.measured(*step.batch)
            synced = None
        except RuntimeError as e:
            synced = str(e).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield check(f"step, {name}: no host sync, at most 3 graphs", synced is None and graphs <= 3, graphs=graphs, sync=synced,
                    peak_bytes=memory)
    counters.clear()
    samples = tools.interleave(steps, 0, min_rounds=s.rounds)
    base = statistics.median(samples["torch's norm"]["step"])
    for name, phases in samples.items():
        middle = statistics.median(phases["step"])
        yield check(f"step, {name}", None, ms=round(middle * 1e3, 2), ratio=round(middle / base, 3),
                    tokens_per_second=round(tokens / middle))
    late = counters["stats"]["unique_graphs"]
    yield check("no graph is compiled after the first steps", late == 0, graphs=late)


PARTS = {"environment": environment, "kernels": kernels, "autograd": autograd, "bandwidth": bandwidth, "step": training_step,
         "resume": gpu_runs.resume, "several": gpu_runs.several}


def run_part(name, s):
    """Its checks, printed as they come; one that dies is a check that failed, and the next part follows."""
    rows = []
    try:
        for row in PARTS[name](s):
            rows.append(row)
            show(row)
    except Exception as e:
        traceback.print_exc()
        rows.append(check(f"{name} ran to its end", False, error=f"{type(e).__name__}: {e}"[:500]))
        show(rows[-1])
    return rows


def show(row):
    word = {True: "pass", False: "FAIL", None: "    "}[row["ok"]]
    rest = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items() if k not in ("check", "ok")}
    numbers = ", ".join(f"{k} {v}" for k, v in rest.items())
    print(f"{word}  {row['check']}" + (f": {numbers}" if numbers else ""), flush=True)


def run(args):
    wanted = tools.chosen("only", args.only, PARTS, "part")
    available, why_not = hardware.cuda_available()
    if not available:
        print(f"no GPU here: {why_not or 'torch finds none'}; run this on a machine that has one")
        return 2
    report = {name: run_part(name, Setting()) for name in wanted}
    rows = list(itertools.chain(*report.values()))
    failed = [row["check"] for row in rows if row["ok"] is False]
    output.write_json(args.out, {"machine": hardware.facts("cuda"), "failed": failed, "parts": report}, indent=1)
    print(f"{len(failed)} of {sum(row['ok'] is not None for row in rows)} checks failed; please send us {args.out}")
    return 1 if failed else 0
