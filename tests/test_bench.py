"""The benchmarks run, compare what they say they compare, and write what they print."""

import functools
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import bench
import ln_kernel
import train
from benchmarks import against, kernel, step, tools, tracking, whole
from model import GPT, GPTConfig


@pytest.fixture
def tiny_models(monkeypatch):
    shape = dict(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=11)
    monkeypatch.setitem(tools.MODELS, "tiny", (shape, 3))
    return shape


def benchmark(folder, monkeypatch, name, *arguments, code=None):
    """What `bench.py name ...` writes."""
    monkeypatch.setattr(bench.sys, "argv", ["bench.py", name, f"--out={folder}/{name}.json", *arguments])
    assert bench.main() == code
    return json.loads((folder / f"{name}.json").read_text())


def test_every_variant_takes_its_turn_in_every_round():
    calls = []
    variants = {n: (lambda n=n: calls.append(n) or {"t": 1.0}) for n in "abc"}
    samples = tools.interleave(variants, seconds=0, min_rounds=4)
    assert all(len(s["t"]) == 4 for s in samples.values())
    rounds = calls[6:]  # after two warm-up calls each
    assert [sorted(rounds[i:i + 3]) for i in range(0, 12, 3)] == [list("abc")] * 4


def test_step_reports_every_variant_and_its_ratio(tiny_models, tmp_path, monkeypatch, capsys):
    report = benchmark(tmp_path, monkeypatch, "step", "--models=tiny", "--seconds=0", "--rounds=3")
    rows = report["models"]["tiny"]
    assert {"off, torch's norm", "off", "norm", "exact"} <= rows.keys() and "bench.py step" in report["command"]
    assert rows["off, torch's norm"]["ratio"] == 1.0 and all(r["n"] == 3 and r["peak_bytes"] > 0 for r in rows.values())
    assert rows["norm"]["peak_bytes"] <= 1.001 * rows["off, torch's norm"]["peak_bytes"] + 4096
    assert "norm" in capsys.readouterr().out


def test_peak_bytes_sees_what_a_step_allocates_and_gives_back():
    big = 1 << 20
    assert tools.peak_bytes(lambda: torch.zeros(big)) == 4 * big
    assert tools.peak_bytes(lambda: [torch.zeros(big) for _ in range(3)]) == 12 * big


# ---- step --against: a stand-in for a nanoGPT checkout, with its interface and names

STAND_IN = '''
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 8
    vocab_size: int = 11
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 8
    dropout: float = 0.0
    bias: bool = True

def part(**modules):
    return nn.ModuleDict(modules)

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        print("speaks while it is made")
        C, self.heads = c.n_embd, c.n_head
        self.transformer = part(
            wte=nn.Embedding(c.vocab_size, C), wpe=nn.Embedding(c.block_size, C), ln_f=nn.LayerNorm(C),
            h=nn.ModuleList(part(ln_1=nn.LayerNorm(C), attn=part(c_attn=nn.Linear(C, 3 * C), c_proj=nn.Linear(C, C)),
                                 ln_2=nn.LayerNorm(C), mlp=part(c_fc=nn.Linear(C, 4 * C), c_proj=nn.Linear(4 * C, C)))
                            for _ in range(c.n_layer)))
        self.lm_head = nn.Linear(C, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, idx, targets):
        t, (B, T) = self.transformer, idx.shape
        x = t["wte"](idx) + t["wpe"](torch.arange(T))
        for b in t["h"]:
            q, k, v = (u.view(B, T, self.heads, -1).transpose(1, 2) for u in b["attn"]["c_attn"](b["ln_1"](x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + b["attn"]["c_proj"](y.transpose(1, 2).reshape(B, T, -1))
            x = x + b["mlp"]["c_proj"](F.gelu(SCALE * b["mlp"]["c_fc"](b["ln_2"](x))))
        logits = self.lm_head(t["ln_f"](x))
        return logits, F.cross_entropy(logits.view(B * T, -1), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        named = list(self.named_parameters())
        groups = [{"params": [p for _, p in named if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
'''


def run_against(path, monkeypatch, code=None):
    return benchmark(path, monkeypatch, "step", f"--against={path}", "--models=tiny", "--seconds=0", "--rounds=2", code=code)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_checks_our_losses_in_float32_and_times_the_dtype_that_is_asked_for(tiny_models, dtype, monkeypatch):
    monkeypatch.setattr(against.hardware, "prepare_cpu", lambda: None)
    seen = []

    class Seen(tools.Step):
        def __init__(self, *args, like=None, **kwargs):
            super().__init__(*args, like=like, **kwargs)
            if not like:
                self.model.h[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))

    monkeypatch.setattr(against, "Step", Seen)
    run = against.our_side(tiny_models, 2, GPT(GPTConfig(**tiny_models)).state_dict(), "", dtype)
    for number in range(against.LOSS_STEPS + 2):
        run(*tools.batch_of(tiny_models, 2, number))
    assert seen == [torch.float32] * against.LOSS_STEPS + [dtype] * 2


THEIR_TRAIN = '''
import sys
given = dict(word[2:].split("=", 1) for word in sys.argv[1:])
assert len(open(given["dataset"] + "/train.bin", "rb").read()) > 10**6
assert (given["batch_size"], given["dtype"], given["log_interval"]) == ("3", "float32", "1") and "vocab_size" not in given
for step in range(int(given["max_iters"]) + 1):
    print(f"iter {step}: loss 1.0, time {100 if step > 5 else 9000}.00ms, mfu 1.00%")
'''


@pytest.mark.slow
def test_whole_processes_are_timed_by_their_own_words_without_the_first_steps(tiny_models, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.py").write_text(STAND_IN.replace("SCALE", "1"))
    (tmp_path / "train.py").write_text(THEIR_TRAIN)
    monkeypatch.setattr(whole, "STEPS", 8)
    arguments = (tmp_path, monkeypatch, "step", f"--against={tmp_path}", "--whole", "--models=tiny", "--rounds=1",
                 "--dtype=float32")
    row = benchmark(*arguments, code=0)["models"]["tiny"]
    (ours,), (theirs,) = row["mean_ms_of_each_process"]["ours"], row["mean_ms_of_each_process"]["theirs"]
    assert theirs == 100 and ours > 0 and row["ratio"][1] == pytest.approx(100 / ours) and row["steps_of_a_process"] == 3
    assert "whole processes in turn, 1 of each" in capsys.readouterr().out
    (tmp_path / "train.py").write_text("raise SystemExit('no data')")
    with pytest.raises(SystemExit):
        benchmark(*arguments)
    assert "train.py ended with 1: no data" in capsys.readouterr().err


@pytest.mark.parametrize("scale, code", [("1", 0), ("3", 1)])
@pytest.mark.slow
def test_against_times_both_in_turns_and_tells_whether_the_losses_agree(tiny_models, tmp_path, monkeypatch, capfd, scale, code):
    if code:  # threads in place of processes, which once is enough to start
        monkeypatch.setattr(against, "worker", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr(against, "TURN_SECONDS", 0)  # one step a turn
    (tmp_path / "model.py").write_text(STAND_IN.replace("SCALE", scale))
    report = run_against(tmp_path, monkeypatch, code)
    row = report["models"]["tiny"]
    assert row["ours"]["n"] == row["theirs"]["n"] == 2 and len(row["losses"]["ours"]) == 5
    assert row["ratio"][0] <= row["ratio"][1] <= row["ratio"][2] and row["losses_agree"] == (code == 0)
    assert row["losses"]["ours"][0] != row["losses"]["ours"][1]
    assert str(tmp_path) not in json.dumps(report)
    out = capfd.readouterr().out
    assert ("DISAGREE" in out) == (code == 1) and "speaks" not in out


@pytest.mark.parametrize("text, words", [
    (None, "No such file"), ("import nowhere_to_be_found", "No module named 'nowhere"), ("class GPT: pass", "'GPTConfig'")])
def test_what_is_no_checkout_is_one_clear_line(tiny_models, tmp_path, monkeypatch, capsys, text, words):
    if text is not None:
        (tmp_path / "model.py").write_text(text)
    with pytest.raises(SystemExit) as e:
        run_against(tmp_path, monkeypatch)
    message = capsys.readouterr().err
    assert e.value.code == 2 and words in message and message.startswith("error: --against=") and message.count("\n") == 1


# ---- kernel, processes, dtypes

def test_kernel_compares_with_torch_and_with_copies_warm_and_from_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernel, "SHAPES", [(2, 3, 64), (1, 4, 2048), (2, 700, 2048)])
    monkeypatch.setattr(kernel, "CACHES", 1 << 20)  # the second shape fits, the third does not, in either dtype
    report = benchmark(tmp_path, monkeypatch, "kernel", "--seconds=0")
    assert [s["dtype"] for s in report["shapes"]] == 3 * ["float32"] + 3 * ["bfloat16"]
    for s in report["shapes"]:
        times, ratios = s["times"], s["ratios"]
        assert ratios["ours / torch"]["both"] == times["ours"]["both"]["median_ms"] / times["torch"]["both"]["median_ms"]
        assert ("ours alone / copy, from memory" in ratios) == (s["C"] == 2048)
    out = capsys.readouterr().out
    worst = max(s["ratios"]["ours alone / copy, from memory"]["backward"] for s in report["shapes"][4:])
    assert f"bfloat16: backward / copy of the same bytes at C >= 2048, from memory to memory: worst {worst:.2f} for" in out


def test_what_is_measured_from_memory_finds_nothing_of_earlier_calls(monkeypatch):
    """Of all that is timed in turns, an input comes again only after four times the caches of other inputs of its variant."""
    monkeypatch.setattr(kernel, "CACHES", 1 << 20)
    made, original = [], kernel.inputs_of

    def inputs(*args):
        made.append(original(*args))
        return made[-1]
    monkeypatch.setattr(kernel, "inputs_of", inputs)
    used = []
    monkeypatch.setattr(kernel, "in_turn", lambda calls, device: used.append(calls))
    assert list(kernel.backward_from_memory(2, 64, 256, torch.float32)) == ["ours alone", "ours", "copy"]
    addresses = [both.data_ptr() for both, *_ in made]
    assert len(set(addresses)) == len(addresses) == sum(map(len, used)), "each call its own inputs"
    bytes_of_one = made[0][0].nbytes
    assert [len(calls) * bytes_of_one for calls in used] == 3 * [4 << 20]
    x, w = made[0][1:3]
    alone, through, copied = (calls[0]() for calls in used)
    stats = ln_kernel.ref_forward(x, None, w, w, 1e-5, False, x.dtype)[2]
    truth = ln_kernel.ref_backward(None, made[0][4], x, w, stats, None, False, True, True, None)
    assert alone[1] is truth[1] is None, "no branch"
    for got, expected in zip((alone[0], *alone[2:]), (truth[0], *truth[2:])):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert [g.shape for g in through] == [x.shape, w.shape, w.shape, (2, 2)] and copied.nbytes == 3 * bytes_of_one // 4


def test_turns_hold_what_they_made_until_they_come_again():
    calls = [lambda i=i: torch.full((3,), i) for i in range(3)]
    alive = []

    def call(i):
        out = calls[i]()
        alive.append(weakref.ref(out))
        return out
    run = kernel.in_turn([functools.partial(call, i) for i in range(3)], "cpu")
    assert len(alive) == 3, "each was called once, so that its memory is there"
    for turn in range(4):
        assert run()["backward"] >= 0
        assert [ref() is not None for ref in alive[-3:]] == 3 * [True]
        assert [ref() is not None for ref in alive[:-3]] == (turn + 1) * [False]


@pytest.mark.parametrize("first, second", [("torch", "auto"), ("auto", "torch")])
def test_steps_share_a_model_but_not_their_norm_layers_implementation(monkeypatch, first, second):
    shape = dict(n_layer=1, n_head=1, n_embd=8, block_size=4, vocab_size=5)
    a = tools.Step(shape, 2, "off", norm_impl=first)
    b = tools.Step(shape, 2, "off", norm_impl=second, like=a)
    assert a.model is b.model and a.inner.optimizer is b.inner.optimizer
    seen = []
    original = ln_kernel.norm
    monkeypatch.setattr(ln_kernel, "norm", lambda *args, impl: (seen.append(impl), original(*args, impl=impl))[1])
    a(), b()
    assert seen == 3 * [first] + 3 * [second]


def test_processes_are_pooled_by_their_medians(tmp_path, monkeypatch, capsys):
    ratios = iter([0.9, 1.2, 1.0])

    class Done:
        returncode = 0

    def run(command):
        assert command[-2] == "--processes=1"
        report = {"models": {"tiny": {"off": {"ratio": 1.0}, "norm": {"ratio": next(ratios)}}}}
        with open(command[-1].removeprefix("--out="), "w") as f:
            json.dump(report, f)
        return Done
    monkeypatch.setattr(step.subprocess, "run", run)
    monkeypatch.setattr(step, "write_json", lambda path, report: json.dump(report, open(path, "w")))
    monkeypatch.setitem(tools.MODELS, "tiny", None)
    report = benchmark(tmp_path, monkeypatch, "step", "--models=tiny", "--processes=3")
    assert "tiny, norm: median 1.000 of 3 processes' medians, 0.900 to 1.200" in capsys.readouterr().out
    assert report["ratios"]["tiny"]["norm"] == [0.9, 1.2, 1.0]


def test_a_benchmarked_step_is_charged_for_the_averages(tiny_models):
    step = tools.Step(tiny_models, 3, "norm")
    step()
    step()
    scale = step.inner.tracker.meter.scales["norm"]
    assert scale.averages.updates == 2 and scale.tr_sigma > 0


def test_help_lists_every_command_and_a_wrong_option_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(bench.sys, "argv", ["bench.py", "--help"])
    with pytest.raises(SystemExit):
        bench.main()
    text = capsys.readouterr().out
    assert all(f" bench.py {name}" in text for name in bench.COMMANDS)
    monkeypatch.setattr(bench.sys, "argv", ["bench.py", "kernel", "--second=2"])
    with pytest.raises(SystemExit) as e:
        bench.main()
    assert e.value.code == 2 and "unrecognized arguments: --second=2" in capsys.readouterr().err


def test_watch_reports_every_variant_against_plain_with_memory(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from benchmarks import watch
    for name, value in dict(B=2, T=8, LAYERS=1, VOCABULARY=16).items():
        monkeypatch.setattr(watch, name, value)
    report = benchmark(tmp_path, monkeypatch, "watch", "--seconds=0", "--rounds=3", "--widths=8")
    assert [row["model"] for row in report["models"]] == ["gpt2", "llama"] and "more with watch on average" in report["finding"]
    for row in report["models"]:
        assert row["plain"]["n"] == 3 and all(row[name]["peak_mb"] > 0 for name in ("plain", "tap", "sampled", "fused"))
        assert row["tap"]["percent_q1"] <= row["tap"]["percent"] <= row["tap"]["percent_q3"]
    assert "| gpt2 | 8 | " in capsys.readouterr().out


def test_tracking_times_whole_runs_in_turn(tmp_path, monkeypatch, capsys, tiny_args):
    def here(command, name):
        assert train.main(command[2:]) == 0
    monkeypatch.setattr(tracking, "process", here)
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    report = benchmark(tmp_path, monkeypatch, "tracking", "--rounds=2", "--", *(
        a for a in tiny_args() if not a.startswith("--out_dir")))
    assert list(report["runs"]) == list(tracking.VARIANTS)
    assert all(len(own["seconds"]) == 2 and min(own["seconds"]) > 0 for own in report["runs"].values())
    off, without, tracked, _ = (own["seconds"] for own in report["runs"].values())
    assert report["runs"]["tracked"]["ratio"] == pytest.approx(np.median(np.divide(tracked, off)))
    assert report["adams_metric"]["ratio"] == pytest.approx(np.median(np.divide(tracked, without)))
    assert "Adam's metric, over tracked without it" in capsys.readouterr().out
