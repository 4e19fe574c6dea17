"""The attention kernel for CPUs against float64 autograd and torch's own kernel in the same dtype."""

import contextlib
import ctypes
import json
import os
import platform
import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import bench
import ln_kernel
from benchmarks import attention as bench_attention
from benchmarks.tools import peak_bytes
from model import GPT, GPTConfig
from rightbatch.kernels import attention, build, cpp
from rightbatch.kernels.attention import causal_attention

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DTYPES = [torch.float32, torch.bfloat16]
# B, T, heads, size: borders of tiles and blocks of times on both sides, odd sizes, one of everything
SHAPES = [(1, 1, 1, 16), (2, 2, 1, 17), (3, 7, 2, 24), (2, 31, 3, 16), (1, 32, 1, 128), (2, 33, 2, 48), (1, 63, 1, 33),
          (1, 64, 5, 32), (2, 65, 1, 40), (1, 127, 2, 64), (1, 129, 1, 96), (1, 200, 2, 80), (1, 257, 1, 127), (1, 521, 2, 20),
          (2, 5, 3, 1), (1, 9, 1, 256)]
NAMES = ("output", "dq", "dk", "dv")

pytestmark = pytest.mark.skipif(ln_kernel.choose_impl("cpu")[0] != "cpu", reason="the C++ kernels could not be built")


def inputs(B, T, H, D, dtype, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    qkv, dy = (torch.randn(B, T, n * H * D, generator=generator).to(dtype) for n in (3, 1))
    return qkv * size, dy


def results(qkv, dy, H, impl="cpu", cosine=False):
    """[output, dq, dk, dv]"""
    x = qkv.detach().clone().requires_grad_()
    y = causal_attention(x, H, cosine, impl=impl)
    dx, = torch.autograd.grad(y, x, dy.to(y.dtype))
    return [y.detach(), *dx.split(dx.shape[-1] // 3, dim=-1)]


def textbook(qkv, dy, H, cosine=False):
    """float64, by the formula."""
    x = qkv.double().requires_grad_()
    B, T, C = *x.shape[:2], x.shape[2] // 3
    q, k, v = (t.view(B, T, H, C // H).transpose(1, 2) for t in x.split(C, dim=2))
    if cosine:
        q, k = (t / (t.square().mean(-1, keepdim=True) + 2**-23).sqrt() for t in (q, k))
    scores = (q @ k.transpose(-1, -2) / (C // H)**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C)
    dx, = torch.autograd.grad(y, x, dy.double())
    return [y.detach(), *dx.split(C, dim=-1)]


def assert_as_accurate_as_torch(shape, dtype, cosine=False, size=1.0, ours=results):
    """Over some draws, the root mean square of the error is at most twice torch's. The largest error is one draw from a long
    tail, and a matter of luck: four times. Plus a tenth of an ulp of the largest value, for with one key torch's error is 0."""
    H, errors = shape[2], ([], [])
    for seed in range(3 if shape[1] > 30 else 40):
        draw = inputs(*shape, dtype, seed, size)
        expected = textbook(*draw, H, cosine)
        for errors_of, found in zip(errors, (ours(*draw, H, cosine=cosine), results(*draw, H, "torch", cosine))):
            errors_of.append([a.double() - b for a, b in zip(found, expected)])
    for name, value, *both in zip(NAMES, expected, *(zip(*e) for e in errors)):
        a, b = (torch.stack(e) for e in both)
        slack = torch.finfo(dtype).eps / 20 * float(value.abs().max())
        assert a.isfinite().all(), name
        assert float(a.square().mean().sqrt()) <= 2 * float(b.square().mean().sqrt()) + slack, name
        assert float(a.abs().max()) <= 4 * float(b.abs().max()) + slack, name


# ---- numbers

@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_at_most_twice_that_of_torch(shape, dtype):
    assert_as_accurate_as_torch(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharp_weights_are_as_accurate_as_torchs(dtype):
    assert_as_accurate_as_torch((1, 150, 2, 32), dtype, size=5.0)   # scores up to some hundred: one key takes it all


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 33, 2, 16), (1, 130, 3, 24), (1, 3, 1, 17)], ids=str)
def test_cosine_attention_inside_the_kernel_is_as_accurate_as_torchs(shape, dtype):
    assert_as_accurate_as_torch(shape, dtype, cosine=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B, H", [(2, 3), (1, 1), (1, 2), (1, 5)], ids=str)
def test_threads_change_nothing_but_the_order_in_which_dq_of_a_cut_head_is_added(B, H, dtype):
    """Two threads for an even number of heads: no head is cut, the same bits. One head on two or three threads is cut."""
    qkv, dy = inputs(B, 300, H, 32, dtype)
    one, found = results(qkv, dy, H), {}
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            found[threads] = results(qkv, dy, H)
            assert all(torch.equal(a, b) for a, b in zip(found[threads], results(qkv, dy, H))), "the same bits each time"
    finally:
        torch.set_num_threads(1)
    for threads, several in found.items():
        for name, a, b in zip(NAMES, one, several):
            if name != "dq" or B * H % threads == 0:
                assert torch.equal(a, b), (name, threads)
            else:   # another order of float32 sums: an ulp of what is added or, of bf16, a rounding that falls the other way
                tolerance = 1e-5 if dtype == torch.float32 else 1e-2
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(a.abs().max()) / 10)
    if B * H == 1 and dtype == torch.float32:
        assert not torch.equal(one[1], found[3][1]), "three threads should have cut the head: dq is added in another order"


def test_no_query_sees_a_later_key():
    qkv, dy = inputs(1, 100, 2, 16, torch.float32)
    later = qkv.clone()
    later[:, 70:] = 1e4
    a, b = (causal_attention(x, 2, impl="cpu") for x in (qkv, later))
    assert torch.equal(a[:, :70], b[:, :70]) and not torch.equal(a[:, 70:], b[:, 70:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_what_is_not_finite_shows_where_the_formula_shows_it(which, value, dtype):
    """An overflow must reach the loss and the gradients. The oracle is the formula: torch's fused kernel in bf16 loses an inf.
    There a weight of 0 times inf is NaN for every query before that key; here for those of its tile alone."""
    T, H, D, at = 160, 2, 16, 100
    qkv, dy = inputs(1, T, H, D, dtype)
    qkv[0, at, which * H * D + 3] = value   # in the first head
    bad, expected = ([~t.isfinite().view(T, H, D) for t in f(qkv, dy, H)] for f in (results, textbook))
    for name, a, b in zip(NAMES, bad, expected):
        assert not a[:, 1].any(), (name, "the other head")
        assert not (a & ~b).any(), (name, "finite by the formula")
        assert a.any() == b.any(), (name, "lost")
    assert torch.equal(bad[0][at:], expected[0][at:]), "queries from there on"
    assert not bad[0][:at // 32 * 32].any(), "earlier tiles of queries"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_reaches_its_query_and_the_keys_that_it_sees_and_no_other_by_the_formula(value, dtype):
    """dv of a later key is a weight of 0 times NaN by the formula; here that shows within the tile alone. torch's own marks dk
    of all later keys, too."""
    T, H, D, at = 160, 2, 16, 100
    qkv, dy = inputs(1, T, H, D, dtype)
    dy[0, at, 3] = value   # in the first head
    bad, expected = ([~t.isfinite().view(T, H, D) for t in f(qkv, dy, H)] for f in (results, textbook))
    for name, a, b in zip(NAMES, bad, expected):
        assert not a[:, 1].any(), (name, "the other head")
        assert not (a & ~b).any(), (name, "finite by the formula")
        assert torch.equal(a[:at + 1], b[:at + 1]), (name, "the query and the keys that it sees")
    assert not bad[0].any() and bad[1][:, 0].any(-1).nonzero().flatten().tolist() == [at], "output and dq"
    assert not bad[2][at + 1:].any() and not bad[3][at // 32 * 32 + 32:].any(), "keys that it does not see"


# ---- as part of torch

def test_second_derivatives_are_refused_in_words():
    x = torch.randn(1, 4, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again.*attention_impl='torch'"):
        torch.autograd.grad(causal_attention(x, 1, impl="cpu").sum(), x, create_graph=True)


def test_what_the_kernel_does_not_do_goes_to_torch():
    qkv, dy = inputs(1, 20, 2, 16, torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(results(qkv, dy, 2), results(qkv, dy, 2, "torch"))), "float64"
    half = qkv.half()
    assert torch.equal(causal_attention(half, 2), causal_attention(half, 2, impl="torch")), "fp16"
    for seed in range(2):
        torch.manual_seed(seed)
        ours = causal_attention(qkv.float(), 2, dropout=0.5)
        torch.manual_seed(seed)
        assert torch.equal(ours, causal_attention(qkv.float(), 2, dropout=0.5, impl="torch")), "dropout"
    with pytest.raises(ValueError, match="unknown impl 'gpu'.*auto, cpu, torch"):
        causal_attention(qkv, 2, impl="gpu")


def test_the_layout_may_be_any_and_the_gradients_too():
    qkv, dy = inputs(2, 20, 2, 16, torch.float32)
    strided = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    assert all(torch.equal(a, b) for a, b in zip(results(qkv, dy, 2), results(strided, dy, 2)))
    expanded = torch.ones(1, 1, 1).expand_as(dy)
    assert all(torch.equal(a, b) for a, b in zip(results(qkv, expanded, 2), results(qkv, torch.ones_like(dy), 2)))


def test_autocast_casts_as_for_torchs_own():
    qkv, dy = inputs(1, 20, 2, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(qkv, dy, 2, impl) for impl in ("cpu", "torch"))
    assert ours[0].dtype == theirs[0].dtype == torch.bfloat16 and ours[1].dtype == torch.float32
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(ours, results(qkv.bfloat16(), dy, 2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_backward_pass_keeps_the_input_the_output_and_a_float_for_each_head_and_time(dtype):
    B, T, H, D = 2, 50, 3, 16
    x, kept = inputs(B, T, H, D, dtype)[0].requires_grad_(), {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = causal_attention(x, H, impl="cpu")
    assert {t.data_ptr() for t in kept.values()} >= {x.data_ptr(), y.data_ptr()}
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == x.nbytes + y.nbytes + 4 * B * H * T
    with torch.no_grad():
        assert causal_attention(x, H, impl="cpu").grad_fn is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 128, 4, 32), (2, 256, 6, 64), (1, 512, 12, 64)], ids=str)
def test_memory_at_the_peak_is_below_torchs(shape, dtype):
    """Scratch included: it comes from torch's allocator, too."""
    qkv, dy = inputs(*shape, dtype)
    ours, theirs = (peak_bytes(lambda impl=impl: results(qkv, dy, shape[2], impl)) for impl in ("cpu", "torch"))
    assert qkv.nbytes < ours < theirs


def test_checkpointing_gives_the_same_bits():
    qkv, dy = inputs(2, 40, 2, 16, torch.float32)
    x = qkv.requires_grad_()
    y = checkpoint(lambda x: causal_attention(x, 2, impl="cpu"), x, use_reentrant=False)
    dx, = torch.autograd.grad(y, x, dy)
    expected = results(qkv, dy, 2)
    assert torch.equal(y, expected[0]) and torch.equal(dx, torch.cat(expected[1:], -1))


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_without_a_graph_break_it_gives_the_same_bits(dtype, cosine):
    qkv, dy = inputs(2, 40, 2, 16, dtype)
    x = qkv.requires_grad_()
    compiled = torch.compile(lambda x: causal_attention(x, 2, cosine), fullgraph=True, backend="aot_eager")
    dx, = torch.autograd.grad(compiled(x), x, dy)
    expected = results(qkv, dy, 2, cosine=cosine)
    assert torch.equal(compiled(x), expected[0]) and torch.equal(dx, torch.cat(expected[1:], -1))
    torch.library.opcheck(attention.attention_forward_op, (qkv.detach(), 2, -1.0))


# ---- in the model

def losses(impl, dtype, steps=8, **more):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=40, vocab_size=50, attention_impl=impl, **more))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    ids, found = torch.randint(50, (4, 41), generator=torch.Generator().manual_seed(1)), []
    for _ in range(steps):
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext():
            loss = model(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("more", [{}, {"cos_attn": (1,)}, {"activation_checkpointing": "block"}], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_model_learns_the_same_with_and_without_the_kernel(dtype, tolerance, more):
    """float32: sums in another order, some 1e-7 of each, grow a little from step to step. bf16: weights round the other way,
    by 2^-8 of each of them, which keys and positions average."""
    ours, theirs = (losses(impl, dtype, **more) for impl in ("auto", "torch"))
    assert ours == pytest.approx(theirs, rel=tolerance) and ours != theirs
    assert ours[-1] < ours[0] - 0.3


# ---- building

FLAGS = {"avx512": "-mno-avx512bf16", "avx2": "-mno-avx512f", "sse": "-march=x86-64"}
MACROS = {"avx512": "__AVX512F__", "avx2": "__AVX2__", "sse": "__SSE2__"}   # what the compiler says that the CPU then has


def macros(flags):
    """What the compiler defines under such flags."""
    command = [*build.find_compiler(), *flags, "-dM", "-E", "-x", "c++", "-"]
    return subprocess.run(command, input="", capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("kind", FLAGS)
def test_older_instruction_sets_are_as_accurate(kind, tmp_path):
    """The same source without the newer instructions of this CPU, called without torch's operators around it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("flags of x86")
    path, flags = str(tmp_path / "attention.so"), ["-std=gnu++17", "-O2", "-fPIC", "-shared", "-march=native", FLAGS[kind]]
    if MACROS[kind] not in macros(flags):
        pytest.skip(f"this CPU, or this compiler, has no {kind}")
    subprocess.run([*build.find_compiler(), *flags, f"{ROOT}/rightbatch/kernels/attention.cpp", "-o", path], check=True)
    library = ctypes.CDLL(path)

    library.attention_scratch.restype = ctypes.c_int64

    def ours(qkv, dy, H, cosine):
        B, T, C = dy.shape
        y, lse, dqkv = torch.empty_like(dy), torch.empty(B, H, T), torch.empty_like(qkv)
        sizes = *map(ctypes.c_int64, (B, T, H, C // H)), ctypes.c_float(2**-23 if cosine else -1), dy.dtype == torch.bfloat16, 1
        scratch = torch.empty(max(library.attention_scratch(backward, *sizes) for backward in (0, 1)), dtype=torch.uint8)
        for function, tensors in ((library.attention_forward, (qkv, y, lse, scratch)),
                                  (library.attention_backward, (dy, qkv, y, lse, dqkv, scratch))):
            function(*(ctypes.c_void_p(t.data_ptr()) for t in tensors), *sizes)
        return [y, *dqkv.split(C, dim=-1)]
    for dtype in DTYPES:
        for shape in [(1, 1, 1, 16), (2, 33, 2, 17), (1, 130, 2, 48), (1, 70, 1, 128), (1, 200, 3, 64)]:
            assert_as_accurate_as_torch(shape, dtype, ours=ours)
        assert_as_accurate_as_torch((1, 40, 2, 24), dtype, cosine=True, ours=ours)


def test_without_a_working_compiler_it_warns_once_and_uses_torchs(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setenv("RIGHTBATCH_CACHE", str(tmp_path))
    qkv, dy = inputs(1, 20, 2, 16, torch.float32)
    caches = [cpp._library, attention._library]
    try:
        [c.cache_clear() for c in caches]
        with pytest.warns(UserWarning, match="attention uses torch's own.*no C\\+\\+ kernel") as caught:
            found = [results(qkv, dy, 2, impl) for impl in ("auto", "cpu", "auto")]
        assert len(caught) == 1
        for r in found:
            assert all(torch.equal(a, b) for a, b in zip(r, results(qkv, dy, 2, "torch")))
    finally:
        [c.cache_clear() for c in caches]


def test_an_empty_batch_goes_to_torch():
    assert causal_attention(torch.zeros(0, 5, 48), 1).shape == F.scaled_dot_product_attention(
        *torch.zeros(3, 0, 1, 5, 16), is_causal=True).transpose(1, 2).reshape(0, 5, 16).shape


def test_bench_attention_reports_time_rate_error_and_memory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_attention, "SHAPES", [(2, 40, 2, 16)])
    monkeypatch.setattr("sys.argv", ["bench.py", "attention", "--threads=1", "--seconds=0", f"--out={tmp_path}/a.json"])
    bench.main()
    rows = json.loads((tmp_path / "a.json").read_text())["shapes"]
    assert [r["dtype"] for r in rows] == ["bfloat16", "float32"] and "bfloat16    2 x 40" in capsys.readouterr().out
    for r in rows:
        both = r["times"]["ours"]["both"]["median_ms"] / 1e3
        assert r["flops_per_s"]["both"] == pytest.approx(7 * 2 * 2 * 2 * 16 * 40 * 40 / 2 / both), "7 halves of T x T"
        assert set(r["error_over_torch"]) == set(NAMES) and 0 < r["error_over_torch"]["dv"] < 3
        assert 0 < r["peak_bytes"]["ours"]
    assert "torch, float32" in rows[0]["ratios"] and "torch, float32" not in rows[1]["ratios"]
