"""ln_kernel against a float64 autograd loop over examples, and against torch's own kernels for accuracy."""

import contextlib
import dataclasses
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import types
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import ln_kernel
from rightbatch.kernels import backends, build, cpp

ROOT = Path(__file__).parent.parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
IMPLS = [pytest.param("triton", id="interpreted")] if INTERPRETING else ["ref", "cpu"]
KINDS = ["layer_norm", "layer_norm without bias", "rms_norm"]
DTYPES = {"float32": (torch.float32, torch.float32), "bfloat16": (torch.bfloat16, torch.bfloat16),
          "autocast": (torch.float32, torch.bfloat16), "float16": (torch.float16, torch.float16)}   # x, y
SHAPES = [(2, 5, 1), (3, 4, 3), (2, 7, 1023), (1, 3, 4097), (1, 1, 8), (5, 1, 64), (6, 32), (2, 3, 4, 40), (3, 230, 96),
          (2, 9, 2050)]   # the last: long rows, which go by four, and one is left over

INTERPRETED_CASES = [("float32", (2, 3, 1)), ("float32", (3, 2, 3)), ("float32", (1, 70, 33)), ("float32", (2, 2, 1023)),
                     ("float32", (4, 32)), ("float32", (1, 3, 2, 16)), ("bfloat16", (2, 3, 33)), ("float16", (2, 3, 33)),
                     ("autocast", (2, 3, 33))]   # the interpreter is slow


@pytest.fixture(autouse=True)
def keep_thread_count():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ---- the case under test, the oracle, and torch's own kernel

class Case:
    """Random inputs of one call, and the three ways to answer it. Weight and bias are random, so nothing hides."""

    def __init__(self, shape, kind="layer_norm", dtype="float32", metric=False, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.B, self.C, self.rms = shape[0], shape[-1], kind == "rms_norm"
        self.x_dtype, self.y_dtype = DTYPES[dtype]
        self.x = (torch.randn(shape, generator=g) * 2 + 0.5).to(self.x_dtype)
        self.dy = torch.randn(shape, generator=g).to(self.y_dtype)
        self.w = torch.randn(self.C, generator=g)
        self.b = torch.randn(self.C, generator=g) if kind == "layer_norm" else None
        self.kinds = 1 if self.rms else 2
        self.p = torch.rand(self.kinds, self.C, generator=g) if metric else None

    def probe(self):
        return torch.zeros(self.kinds * (1 if self.p is None else 2), self.B, requires_grad=True)

    def leaves(self, dtype=None):
        tensors = (self.x, self.w) if self.b is None else (self.x, self.w, self.b)
        return [t.detach().clone().to(dtype or t.dtype).requires_grad_() for t in tensors]

    def ours(self, impl, track=True, x=None, dy=None):
        """y, dx, dw(, db)(, sq)."""
        leaves, probe = self.leaves(), self.probe() if track else None
        x = leaves[0] if x is None else x
        with torch.autocast("cpu", torch.bfloat16, enabled=self.x_dtype != self.y_dtype):
            if self.rms:
                y = ln_kernel.rms_norm(x, leaves[1], probe, impl=impl, metric=self.p)
            else:
                y = ln_kernel.layer_norm(x, leaves[1], self.b if self.b is None else leaves[2], probe, impl=impl,
                                         metric=self.p)
        grads = torch.autograd.grad(y, [x, *leaves[1:], *([probe] if track else [])], self.dy if dy is None else dy)
        assert y.dtype == self.y_dtype and grads[0].dtype == self.x_dtype and grads[1].dtype == torch.float32
        return [y.detach(), *grads]

    def torch(self, dtype=None):
        """The same from F.layer_norm / F.rms_norm in one dtype, squared norms by a loop over examples."""
        leaves, dy = self.leaves(dtype), self.dy.to(dtype or self.y_dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")   # F.rms_norm: mixed dtypes are not fused
            y = self._torch_norm(*leaves).to(dy.dtype)
            grads = torch.autograd.grad(y, leaves, dy, retain_graph=True)
            sq = []
            for b in range(self.B):
                only = torch.zeros_like(dy)
                only[b] = dy[b]
                c = [v.double() for v in torch.autograd.grad(y, leaves[1:], only, retain_graph=True)]
                c += [torch.zeros_like(c[0])] * (self.kinds - len(c))
                sq.append([v.square().sum() for v in c])
                if self.p is not None:
                    sq[-1] += [(v.square() * p).sum() for v, p in zip(c, self.p)]
        return [y.detach(), *grads, torch.tensor(sq, dtype=torch.float64).T]

    def _torch_norm(self, x, w, b=None):
        return F.rms_norm(x, w.shape, w, 1e-5) if self.rms else F.layer_norm(x, w.shape, w, b)

    def scales(self, oracle):
        """The largest number that each result is a sum of, or itself: rounding errors are relative to these."""
        x, dy, w = self.x.double(), self.dy.double(), self.w.double()
        centred = x if self.rms else x - x.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        terms = [x[:0], rstd * w * dy, dy * centred * rstd, dy][:len(oracle) - 1] + [x[:0]]
        return [torch.cat([v.flatten(), t.flatten()]).abs().max().item() for v, t in zip(oracle, terms, strict=True)]


def assert_as_accurate_as_torch(case, results, slack=2):
    oracle, same_dtype = case.torch(torch.float64), case.torch()
    names = ["y", "dx", "dw", "db"][:len(oracle) - 1] + ["sq"]
    for name, ours, theirs, truth, scale in zip(names, results, same_dtype, oracle, case.scales(oracle), strict=True):
        # Floor: a few roundings of the result's own dtype, for results that torch happens to get exactly.
        floor = scale * torch.finfo(ours.dtype).eps * 2
        error, bound = (ours.double() - truth).abs().max().item(), (theirs.double() - truth).abs().max().item()
        assert error <= slack * bound + floor, f"{name}: error {error:.3g}, torch's {bound:.3g}, scale {scale:.3g}"


# ---- accuracy

@pytest.mark.parametrize("dtype, shape", INTERPRETED_CASES if INTERPRETING else list(
    itertools.product(["float32", "bfloat16", "autocast"], SHAPES)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", IMPLS)
def test_error_is_at_most_twice_that_of_torch(impl, kind, dtype, shape):
    case = Case(shape, kind, dtype, metric=shape[-1] in (3, 33, 40, 96, 2050))
    cut = INTERPRETING and case.y_dtype == torch.bfloat16     # the interpreter cuts off to bf16 where a GPU rounds
    assert_as_accurate_as_torch(case, case.ours(impl), slack=4 if cut else 2)


@pytest.mark.parametrize("impl", ["ref", "cpu", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_float64_matches_the_oracle_to_float64_precision(impl, kind):
    case = Case((3, 4, 17), kind, metric=True)
    case.x, case.dy, case.w = case.x.double(), case.dy.double(), case.w.double()
    case.b = None if case.b is None else case.b.double()
    leaves, probe = case.leaves(), case.probe()
    norm = ln_kernel.rms_norm if case.rms else ln_kernel.layer_norm
    y = norm(*leaves, probe=probe, impl=impl, metric=case.p)
    results = [y, *torch.autograd.grad(y, [*leaves, probe], case.dy)]
    for ours, truth in zip(results[:-1], case.torch(torch.float64)):
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results[-1].double(), case.torch(torch.float64)[-1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("shape", [(1, 700, 50), (2, 343, 50), (3, 231, 50), (7, 99, 50), (700, 1, 50), (2, 2, 8200),
                                   (2, 11, 2100)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])   # whose channels are kept in two orders
def test_every_split_of_examples_over_threads_is_right(dtype, shape, threads):
    torch.set_num_threads(threads)
    case = Case(shape, dtype=dtype, metric=True)
    oracle, results = Case.torch(case, torch.float64) if shape[0] < 100 else case.ours("ref"), case.ours("cpu")
    for ours, truth in zip(results, oracle, strict=True):
        close = 2e-5 if ours.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(ours.double(), truth.double(), rtol=close, atol=close * truth.abs().max().item())


def test_large_offset_loses_no_more_digits_than_torch():
    case = Case((2, 6, 300))
    case.x += 1000
    assert_as_accurate_as_torch(case, case.ours("cpu"))


@pytest.mark.parametrize("value", [1e9, -123456789.0, 7e12])
def test_a_row_of_one_large_number_has_no_variance(value):
    x = torch.full((2, 3, 300), value)
    y = ln_kernel.layer_norm(x, torch.ones(300), torch.full((300,), 0.5), impl="cpu")
    assert torch.isfinite(y).all() and torch.equal(y, y[:1, :1, :1].expand_as(y))
    assert (y - 0.5).abs().max() <= 0.5 * abs(value) * torch.finfo(torch.float32).eps / 1e-5**0.5   # half a unit of the mean


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_bfloat16_rounds_to_nearest_even(impl):
    ties = torch.arange(0x3F808000, 0x3F808000 + 37 * 0x10000, 0x10000, dtype=torch.int32).view(torch.float32)
    bias = torch.cat([ties, -ties, ties * (1 + 1e-6), torch.tensor([float("inf"), 0.0, -0.0, 3.4e38])])
    with torch.autocast("cpu", torch.bfloat16):      # weight 0: the output is the bias, rounded
        y = ln_kernel.layer_norm(torch.randn(2, len(bias)), torch.zeros_like(bias), bias, impl=impl)
    assert torch.equal(y, bias.bfloat16().expand_as(y))


# ---- the same bits

@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_tracking_does_not_change_a_bit(kind, dtype, impl):
    case = Case((4, 130, 75), kind, dtype)
    for tracked, untracked in zip(case.ours(impl), case.ours(impl, track=False)):
        assert torch.equal(tracked, untracked)


def test_runs_repeat_bit_for_bit():
    case = Case((3, 301, 75), metric=True)
    first = case.ours("cpu")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, case.ours("cpu"), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_streaming_stores_write_what_plain_stores_write(dtype):
    torch.set_num_threads(1)
    case = Case((2, 1024, 1024 if dtype == "float32" else 2048), dtype=dtype)    # 8 MB of output: streamed
    w, b, x = case.w, case.b, case.x.requires_grad_()
    y = ln_kernel.layer_norm(x, w, b, impl="cpu")
    dx, = torch.autograd.grad(y, x, case.dy)
    for i in range(2):
        xi = case.x[i:i + 1].detach().requires_grad_()
        yi = ln_kernel.layer_norm(xi, w, b, impl="cpu")
        dxi, = torch.autograd.grad(yi, xi, case.dy[i:i + 1])
        assert torch.equal(y[i:i + 1], yi) and torch.equal(dx[i:i + 1], dxi)


# ---- inputs as they come

@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("layout", ["transposed", "misaligned", "every other channel"])
def test_memory_layout_of_x_and_dy_does_not_matter(layout, impl):
    case = Case((3, 20, 50))

    def relayout(t):
        if layout == "transposed":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if layout == "misaligned":
            return torch.cat([torch.zeros(1), t.flatten()])[1:].view(t.shape)
        return torch.stack([t, t], -1).flatten(-2)[..., ::2]
    results = case.ours(impl, x=relayout(case.x).requires_grad_(), dy=relayout(case.dy))
    for got, expected in zip(results, case.ours(impl), strict=True):
        torch.testing.assert_close(got, expected)                       # torch's own sums follow the layout
        assert impl == "ref" or torch.equal(got, expected)


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_expanded_output_gradient(impl):
    case = Case((3, 4, 10))
    case.dy = torch.ones(3, 4, 10)
    leaves, probe = case.leaves(), case.probe()
    ln_kernel.layer_norm(*leaves, probe, impl=impl).sum().backward()     # sum() sends an expanded scalar
    for got, expected in zip([*leaves, probe], case.ours(impl)[1:], strict=True):
        assert torch.equal(got.grad, expected)


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "probe"])
def test_each_input_alone_may_need_a_gradient(wanted, impl):
    case = Case((3, 4, 10))
    everything = dict(zip(["x", "weight", "bias", "probe"], case.ours(impl)[1:], strict=True))
    inputs = {"x": case.x, "weight": case.w, "bias": case.b, "probe": torch.zeros(2, 3)}
    inputs[wanted].requires_grad_()
    ln_kernel.layer_norm(**inputs, impl=impl).backward(case.dy)
    assert torch.equal(inputs[wanted].grad, everything[wanted])


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_weight_and_probe_used_twice_add_up(impl):
    case, other = Case((3, 4, 10)), Case((3, 4, 10), seed=1)
    w, probe = case.w.clone().requires_grad_(), torch.zeros(2, 3, requires_grad=True)
    for c in (case, other):
        c.w, c.b = case.w, case.b
        ln_kernel.layer_norm(c.x, w, case.b, probe, impl=impl).backward(c.dy)
    torch.testing.assert_close(w.grad, case.ours(impl)[2] + other.ours(impl)[2])
    torch.testing.assert_close(probe.grad, case.ours(impl)[4] + other.ours(impl)[4])


def test_half_precision_weights_get_half_precision_gradients():
    case = Case((3, 50, 40), dtype="bfloat16")
    w, b = case.w.bfloat16().requires_grad_(), case.b.bfloat16().requires_grad_()
    case.w, case.b = w.detach().float(), b.detach().float()
    ln_kernel.layer_norm(case.x, w, b, impl="cpu").backward(case.dy)
    assert torch.equal(w.grad, case.ours("cpu")[2].bfloat16()) and torch.equal(b.grad, case.ours("cpu")[3].bfloat16())


@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_no_grad_and_inference_give_the_same_output(impl):
    case = Case((3, 4, 10))
    expected = case.ours(impl)[0]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(ln_kernel.layer_norm(case.x, case.w, case.b, impl=impl), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("bad", ["nan", "nan with all bits set", "inf"])
@pytest.mark.parametrize("C", [37, 2050])
def test_nan_and_inf_reach_output_and_norms_of_their_example_only(C, bad, impl, dtype):
    case = Case((3, 5, C), dtype=dtype)
    if bad == "inf":
        case.x[1, 2, 3] = float("inf")
    elif bad == "nan":
        case.x[1, 2, 3] = float("nan")
    else:   # rounding this one to bf16 must not carry into the sign
        bits = torch.int32 if case.x_dtype == torch.float32 else torch.int16
        case.x.view(bits)[1, 2, 3] = torch.iinfo(bits).max
    y, dx, dw, db, sq = case.ours(impl)
    assert y[1, 2].isnan().all() and dx[1, 2].isnan().all() and dw.isnan().all()
    assert sq[0].isnan().tolist() == [False, True, False]
    assert y[1, :2].isfinite().all() and y[0].isfinite().all() and db.isfinite().all()
    assert dx[1, 3:].isfinite().all() and dx[1, :2].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "autocast", "bfloat16"])
def test_a_weight_that_is_not_a_number_reaches_every_input_gradient(dtype):
    case = Case((3, 5, 37), dtype=dtype)
    case.w.view(torch.int32)[3] = torch.iinfo(torch.int32).max   # all bits set: rounding must not carry into the sign
    y, dx, dw, db, sq = case.ours("cpu")
    assert dx.isnan().all() and y[..., 3].isnan().all() and y[..., 4].isfinite().all()
    assert dw.isfinite().all() and sq.isfinite().all(), "weight.grad does not depend on the weight"


# ---- a branch added on the way

def add_norm_grads(case, impl, fused, layout=lambda t: t):
    """sum, y, and the gradients of x, branch, parameters and probe, where both results are used."""
    leaves, probe = case.leaves(), case.probe()
    x = layout(leaves[0].detach()).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    branch = layout(torch.randn(case.x.shape, generator=generator).to(case.y_dtype)).requires_grad_()
    ds = torch.randn(case.x.shape, generator=generator).to(case.x_dtype)
    bias = None if case.b is None else leaves[2]
    with torch.autocast("cpu", torch.bfloat16, enabled=case.x_dtype != case.y_dtype):
        before, after = (x, branch) if fused else (x + branch, None)
        total, y = ln_kernel.norm(before, leaves[1], bias, probe, case.p, after, case.rms, impl=impl)
    grads = torch.autograd.grad([total, y], [x, branch, *leaves[1:], probe], [ds, case.dy])
    return [total.detach(), y.detach(), *grads]


@pytest.mark.parametrize("impl", ["ref", "cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("shape", [(3, 70, 1), (2, 7, 1023), (6, 32), (3, 230, 96), (2, 3, 4, 40), (2, 9, 2050),
                                   (3, 700, 1024), (2, 1100, 256), (2, 1100, 250)], ids=str)   # the last three: megabytes
@pytest.mark.parametrize("kind", KINDS)
def test_adding_a_branch_on_the_way_is_adding_it_before(kind, shape, dtype, impl):
    case = Case(shape, kind, dtype, metric=shape[-1] == 96)
    separate, fused = (add_norm_grads(case, impl, fused) for fused in (False, True))
    total, y, dx, dbranch, *rest = fused
    assert torch.equal(total, separate[0])
    # past the caches, in a loop of its own, where a compiler may round otherwise
    streamed = impl == "cpu" and shape in ((3, 700, 1024), (2, 1100, 256))
    torch.testing.assert_close(y, separate[1], rtol=torch.finfo(y.dtype).eps * streamed, atol=1e-6 * streamed)
    # the sum of two gradients is rounded once in place of twice: at most one rounding of the larger away
    torch.testing.assert_close(dx, separate[2], rtol=0, atol=2 * torch.finfo(dx.dtype).eps * dx.abs().max().item())
    assert dbranch.dtype == case.y_dtype and torch.equal(dbranch, dx.to(case.y_dtype))
    for got, expected in zip(rest, separate[4:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5 * streamed, atol=1e-4 * streamed)


def test_memory_layout_does_not_matter_after_a_branch():
    case = Case((3, 20, 50))
    plain, strided = (add_norm_grads(case, "cpu", True, layout) for layout in (
        lambda t: t, lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2]))
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("used", ["sum", "norm"])
def test_either_result_alone_may_be_used(used, impl):
    case = Case((3, 4, 10))
    x, w, b = case.leaves()
    branch, probe = torch.randn(3, 4, 10, requires_grad=True), case.probe()
    total, y = ln_kernel.norm(x, w, b, probe, branch=branch, impl=impl)
    if used == "sum":
        total.backward(case.dy)
        assert torch.equal(x.grad, case.dy) and torch.equal(branch.grad, case.dy) and w.grad is None and probe.grad is None
    else:
        y.backward(case.dy)
        case.x = (case.x + branch).detach()
        for got, expected in zip([x, w, b, probe], case.ours(impl)[1:], strict=True):
            assert torch.equal(got.grad, expected)
        assert torch.equal(branch.grad, x.grad)


def test_a_branch_of_another_dtype_or_shape_is_added_as_torch_does():
    case = Case((3, 4, 10))
    for branch in (torch.randn(3, 4, 10).bfloat16(), torch.randn(10), torch.randn(3, 4, 10).double()):
        total, y = ln_kernel.norm(case.x, case.w.to(total_dtype := (case.x + branch).dtype), branch=branch)
        assert total.dtype == total_dtype and torch.equal(total, case.x + branch)
        assert torch.equal(y, ln_kernel.layer_norm(total, case.w.to(total_dtype)))


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_and_compiling_change_nothing_after_a_branch(compiled):
    case, branch = Case((3, 130, 90)), torch.randn(3, 130, 90)

    def block(x, w, b, probe):
        total, y = ln_kernel.norm(x, w, b, probe, branch=branch, impl="cpu")
        return total.cos() + ln_kernel.norm(total, w, b, branch=y.sin(), impl="cpu")[1]

    def grads(f):
        leaves, probe = case.leaves(), case.probe()
        return torch.autograd.grad(f(*leaves, probe), [*leaves, probe], case.dy)

    expected = grads(block)
    for f in (block, lambda *args: checkpoint(block, *args, use_reentrant=False)):
        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        for got, truth in zip(grads(f), expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())
    torch.compiler.reset()


# ---- errors

def test_a_second_derivative_is_refused_and_not_wrong():
    x = torch.randn(2, 3, 5, requires_grad=True)
    y = ln_kernel.layer_norm(x, torch.ones(5))
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_a_second_backward_pass_is_refused_like_torchs_own():
    x, branch = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    total, y = ln_kernel.norm(x, torch.ones(5), branch=branch, impl="cpu")
    loss = (total * y).sum()
    first = torch.autograd.grad(loss, [x, branch], retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, [x, branch])))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_change_of_what_backward_needs_is_refused_and_not_wrong():
    x, branch = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    total, y = ln_kernel.norm(x, torch.ones(5), branch=branch, impl="cpu")
    total.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_forward_derivative_is_refused_and_not_left_out():
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(2, 3, 5), torch.ones(2, 3, 5))
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            ln_kernel.layer_norm(x, torch.ones(5), impl="cpu")


def test_functorch_is_refused_in_words():
    x = torch.randn(2, 3, 5)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: ln_kernel.layer_norm(x, torch.ones(5), impl="cpu").sum())(x)


@pytest.mark.parametrize("backward", [False, True])
def test_a_graph_that_is_dropped_is_freed(backward):
    """What backward needs of its own output must not hold the output's graph."""
    x, branch = torch.randn(2, 3, 5, requires_grad=True), torch.randn(2, 3, 5)
    total, y = ln_kernel.norm(x, torch.ones(5), branch=branch, impl="cpu")
    if backward:
        (total + y).sum().backward()
    alive = weakref.ref(x)
    del x, total, y
    assert alive() is None


@pytest.mark.parametrize("call, message", [
    (lambda x, w, p: ln_kernel.layer_norm(x, w, probe=p, impl="torch"), "impl='torch' has no per-example norms"),
    (lambda x, w, p: ln_kernel.layer_norm(x, w, impl="cuda"), "unknown impl 'cuda': expected one of auto, ref, cpu"),
    (lambda x, w, p: ln_kernel.layer_norm(x, w[1:]), r"expected x \(B, ..., C\) and weight \(C,\)"),
    (lambda x, w, p: ln_kernel.rms_norm(x, w, probe=p), r"expected probe \(1, 2\)"),
    (lambda x, w, p: ln_kernel.layer_norm(x, w, probe=p, metric=torch.ones(2, 5)), r"expected probe \(4, 2\)"),
    (lambda x, w, p: ln_kernel.layer_norm(x, w, metric=torch.ones(1, 5)), r"expected metric \(2, 5\)"),
])
def test_wrong_arguments_say_what_was_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 3, 5), torch.ones(5), torch.zeros(2, 2, requires_grad=True))


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5)])
def test_an_empty_batch_is_an_error_and_not_a_crash(shape):
    with pytest.raises(RuntimeError, match=r"empty tensor of shape \[[02], [03], 5\]"):
        ln_kernel.layer_norm(torch.zeros(shape), torch.ones(5), impl="cpu")


def test_impl_torch_is_torch():
    case = Case((2, 3, 5))
    x, w, b = case.leaves()
    assert torch.equal(ln_kernel.layer_norm(x, w, b, impl="torch"), F.layer_norm(x, (5,), w, b))
    assert torch.equal(ln_kernel.rms_norm(x, w, impl="torch"), F.rms_norm(x, (5,), w, 1e-5))


# ---- checkpointing and torch.compile

@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("impl", ["ref", "cpu"])
def test_checkpointing_and_compiling_change_nothing(impl, compiled):
    case = Case((3, 130, 90), metric=True)

    def two_norms(x, w, b, probe, metric):
        h = ln_kernel.layer_norm(x, w, b, probe, impl=impl, metric=metric)
        return ln_kernel.rms_norm(h.sin(), w, probe[:1], impl=impl)

    def checkpointed(*args):
        return checkpoint(two_norms, *args, use_reentrant=False)

    def grads(f):
        leaves, probe = case.leaves(), case.probe()
        return torch.autograd.grad(f(*leaves, probe, case.p), [*leaves, probe], case.dy)

    expected = grads(two_norms)
    for f in (two_norms, checkpointed):
        f = torch.compile(f, fullgraph=True, backend="aot_eager") if compiled else f
        for got, truth in zip(grads(f), expected, strict=True):
            torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-5 * truth.abs().max().item())
    torch.compiler.reset()


def test_compiled_autocast_keeps_the_output_dtype():
    case = Case((2, 3, 16), dtype="autocast")
    f = torch.compile(lambda x, w, b: ln_kernel.layer_norm(x, w, b, impl="cpu"), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(f(case.x, case.w, case.b), case.ours("cpu")[0])
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_custom_op_passes_opcheck(dtype, kind):
    case = Case((2, 3, 16), kind, dtype, metric=kind == "layer_norm")
    x, w, *b = case.leaves()
    probe = case.probe() if dtype == "float32" else None
    branch = torch.randn(2, 3, 16).to(case.y_dtype).requires_grad_() if kind == "rms_norm" else None
    args = (x, branch, w, *(b or [None]), probe, case.p, 1e-5, case.rms, case.y_dtype, "cpu")
    torch.library.opcheck(ln_kernel.norm_forward_op, args)
    total, _, stats = ln_kernel.norm_forward_op(*args)
    saved = (x if branch is None else total).detach(), w.detach(), stats.detach(), case.p
    dtotal, branch_dtype = (None, None) if branch is None else (torch.randn(2, 3, 16).to(case.x_dtype), branch.dtype)
    torch.library.opcheck(ln_kernel.norm_backward_op, (dtotal, case.dy, *saved, case.rms, case.b is not None, probe is not None,
                                                       branch_dtype, "cpu"))


# ---- building the C++ kernel

SCRIPT = """
import sys, torch, ln_kernel
x, w, probe = torch.randn(2, 3, 8), torch.ones(8), torch.zeros(1, 2, requires_grad=True)
ln_kernel.rms_norm(x, w, probe, impl="cpu").sum().backward()
files = {line.split()[-1] for line in open("/proc/self/maps")}
loaded = "rightbatch.kernels.ln_triton" in sys.modules
print(ln_kernel.choose_impl("cpu")[0], loaded, *(f for f in files if "omp" in f.split("/")[-1]))
"""


@contextlib.contextmanager
def untried_backends(monkeypatch):
    """As if no norm layer had run yet in this process; afterwards as before."""
    caches = [cpp._library, backends.choose, ln_kernel._resolve, ln_kernel._backend]
    [c.cache_clear() for c in caches]
    fields = [f.name for f in dataclasses.fields(backends.Backend)]
    monkeypatch.setattr(backends, "BACKENDS", {
        name: backends.Backend(*(getattr(b, field) for field in fields)) for name, b in backends.BACKENDS.items()})
    try:
        yield
    finally:
        [c.cache_clear() for c in caches]


def test_auto_uses_the_compiled_kernel_on_a_cpu_and_says_why():
    impl, reason = ln_kernel.choose_impl("cpu")
    assert impl == "cpu" and "compiled" in reason
    assert ln_kernel.choose_impl(torch.device("mps"))[0] == "ref"
    case = Case((2, 3, 40))
    assert all(torch.equal(a, b) for a, b in zip(case.ours("auto"), case.ours("cpu"), strict=True))


def test_two_processes_with_an_empty_cache_both_succeed(prebuilt_compiler, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | prebuilt_compiler
    processes = [subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    outputs = [p.communicate(timeout=120) for p in processes]
    for out, err in outputs:
        impl, triton_loaded, *runtimes = out.split()
        assert impl == "cpu" and triton_loaded == "False", err
        assert len(runtimes) == 1, f"we and torch should share one OpenMP runtime: {runtimes}"
        assert "Warning" not in err
    assert sum(err.count("compiling") for _, err in outputs) == 1, "one compiles, the other waits for it"
    assert sorted(f.suffix for f in (tmp_path / "cache").iterdir()) == ["", ".sha256", ".so"], "lock, library, digest, no rest"


@pytest.mark.parametrize("broken, outcome", [("-shared.*-fopenmp", "no OpenMP"), ("-c.*ln_autograd", "error at once")])
def test_flags_that_do_not_link_are_given_up_and_a_missing_header_is_not_tried_again(broken, outcome, tmp_path):
    compiler = tmp_path / "cxx"   # writes its command lines to a file and empty outputs
    compiler.write_text(f"""#!/bin/bash
echo "$*" >> {tmp_path}/log
[[ "$*" =~ {broken} ]] && exit 1
while [ "$1" != -o ]; do shift; done; touch "$2"
""")
    compiler.chmod(0o755)
    error_at_once = pytest.raises(RuntimeError, match="ln_autograd.cpp.* failed")
    with error_at_once if outcome == "error at once" else contextlib.nullcontext():
        build.compile_library([str(compiler)], [Path("ln_kernel.cpp")], [Path("ln_autograd.cpp")], build.flag_attempts(),
                              tmp_path / "done.so")
    commands = (tmp_path / "log").read_text().splitlines()
    assert sum("-c ln_autograd.cpp" in c for c in commands) == 1
    assert (tmp_path / "done.so").exists() == (outcome != "error at once")
    if outcome == "error at once":
        assert sum("-c ln_kernel.cpp" in c for c in commands) == 1
    else:
        links = [c for c in commands if "-shared" in c]
        assert all("-fopenmp" in c for c in links[:-1]) and "-fopenmp" not in links[-1] and "-march=native" in links[-1]


@pytest.mark.parametrize("compiler", [None, ["false"]], ids=["none there", "broken"])
def test_without_a_working_compiler_it_warns_once_and_uses_plain_torch(compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    monkeypatch.setenv("RIGHTBATCH_CACHE", str(tmp_path))
    with untried_backends(monkeypatch):
        case = Case((2, 3, 40))
        with pytest.warns(UserWarning, match="no C\\+\\+ kernel") as caught:
            results = [case.ours(impl) for impl in ("auto", "cpu", "auto")]
        assert len(caught) == 1 and ln_kernel.choose_impl("cpu")[0] == "ref"
        assert "C++" in ln_kernel.choose_impl("cpu")[1]
        for r in results:
            assert all(torch.equal(a, b) for a, b in zip(r, case.ours("ref"), strict=True))


# ---- Triton: in its interpreter, which must be chosen before triton is imported, so in a process of its own

def test_triton_passes_its_tests_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    if INTERPRETING:
        pytest.skip("already in the interpreter")
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", __file__, "tests/test_head_loss.py", "-k",
                          "interpreted"], cwd=ROOT,
                         env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "passed" in run.stdout and "skipped" not in run.stdout, run.stdout + run.stderr


def interpreted(test):
    return test if INTERPRETING else None    # collected in the interpreter's process only


@interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_triton_cuts_rows_that_are_too_long_into_tiles(kind, monkeypatch):
    from rightbatch.kernels import ln_triton
    monkeypatch.setattr(ln_triton, "WHOLE_ROW", 32)
    monkeypatch.setattr(ln_triton, "TILE", 16)
    case = Case((2, 19, 77), kind, metric=True)
    assert_as_accurate_as_torch(case, case.ours("triton"))


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_triton_adds_a_branch_as_ref_does(kind, dtype):
    """ref's gradients of x + branch and its norm; the interpreter cuts off to bf16 where torch rounds."""
    case = Case((3, 20, 41), kind, dtype, metric=True)
    half = torch.bfloat16 in (case.x_dtype, case.y_dtype)
    for got, expected in zip(add_norm_grads(case, "triton", True), add_norm_grads(case, "ref", False), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=scale * (2**-6 if half else 1e-5))


def test_the_fused_addition_traces_as_one_operation_each_way():
    """What a GPU's compile sees, too: no addition of its own, forward or backward, and one gradient for x and branch."""
    from torch._dynamo.testing import AotEagerAndRecordGraphs
    record, case = AotEagerAndRecordGraphs(), Case((3, 5, 16), metric=True)
    x, w, b = case.leaves()
    branch, probe = torch.randn(3, 5, 16, requires_grad=True), case.probe()

    def f(x, branch, w, b, probe):
        total, y = ln_kernel.norm(x, w, b, probe, branch=branch, impl="cpu", metric=case.p)
        return total.cos() + y.sin()
    torch.compile(f, fullgraph=True, backend=record)(x, branch, w, b, probe).sum().backward()
    expected = [v.clone().detach().requires_grad_() for v in (x, branch, w, b, probe)]
    total = expected[0] + expected[1]
    y = ln_kernel.layer_norm(total, *expected[2:4], expected[4], impl="ref", metric=case.p)
    (total.cos() + y.sin()).sum().backward()
    for got, truth in zip((x, branch, w, b, probe), expected):
        torch.testing.assert_close(got.grad, truth.grad, rtol=1e-5, atol=1e-5)
    forward, backward = ([str(n.target) for n in g.graph.nodes if n.op == "call_function"] for g in
                         (record.fw_graphs[0], record.bw_graphs[0]))
    assert [n for n in forward if "norm" in n] == ["rightbatch.norm_forward.default"]
    assert [n for n in backward if "norm" in n] == ["rightbatch.norm_backward.default"]
    assert sum("aten.add." in n for n in forward) == 1 and not any("aten.add." in n for n in backward)   # cos + sin


@interpreted
def test_interpreted_triton_tracking_does_not_change_a_bit():
    case = Case((1, 70, 33))
    for tracked, untracked in zip(case.ours("triton"), case.ours("triton", track=False)):
        assert torch.equal(tracked, untracked)


@interpreted
def test_interpreted_triton_nan_reaches_output_and_norms_of_its_example_only():
    case = Case((3, 2, 37))
    case.x[1, 1, 3] = float("nan")
    y, dx, dw, db, sq = case.ours("triton")
    assert y[1, 1].isnan().all() and sq[0].isnan().tolist() == [False, True, False] and db.isfinite().all()


TAPS = [(shape, dtypes, rms, bias) for shape, dtypes in [
    ((3, 5, 7), "float32"), ((1, 70, 33), "float32"), ((2, 2, 1023), "float32"), ((4, 32), "float32"),
    ((2, 3, 2, 16), "float32"), ((3, 5, 67), "autocast"), ((2, 9, 67), "bfloat16")]
    for rms, bias in ((False, True), (False, False), (True, False))]


@pytest.mark.parametrize("impl, threads", [pytest.param("triton", 1, id="interpreted")] if INTERPRETING else [
    ("cpu", 1), ("cpu", 5)])
@pytest.mark.parametrize("shape, dtype, rms, bias", TAPS, ids=str)
def test_a_tap_gives_each_examples_gradient(shape, dtype, rms, bias, impl, threads):
    """c_b of every example against the same sums in float64, of what the kernel read."""
    torch.set_num_threads(threads)
    shape = shape if threads == 1 else (2, 40_000 // (2 * shape[-1]), shape[-1])   # small ones stay on one thread
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    x = (3 * x + 1).to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    dy = dy.to(torch.float32 if dtype == "float32" else torch.bfloat16)
    xhat = x.double() if rms else x.double() - x.double().mean(-1, keepdim=True)
    xhat = xhat * (xhat.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = [v.reshape(shape[0], -1, shape[-1]).sum(1) for v in (dy.double() * xhat, dy.double())[:1 + bias]]
    got = backends.resolve(impl, "cpu", x.dtype, dy.dtype).tap(dy, x, 1e-5, rms, bias)
    assert got.dtype == torch.float32 and torch.allclose(got.double(), torch.cat(expected, 1), rtol=1e-4, atol=3e-5)


@interpreted
def test_interpreted_triton_tap_leaves_rows_that_are_too_long_to_torch(monkeypatch):
    from rightbatch.kernels import ln_triton
    monkeypatch.setattr(ln_triton, "WHOLE_ROW", 32)
    monkeypatch.setattr(ln_triton, "TILE", 16)
    assert ln_triton.tap(torch.ones(2, 3, 33), torch.ones(2, 3, 33), 1e-5, True, False) is None


def test_one_wave_of_programs_keeps_every_multiprocessor_busy():
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    from rightbatch.kernels import ln_triton
    for B, C in itertools.product((1, 2, 4, 8, 32), (768, 1024, 2048, 4096, 8192, 16384)):
        parts, tiles, options = ln_triton.plan(B, 2048, C, 108)
        resident = 108 * (65536 // (80 * 32 * options["num_warps"]))   # registers; that none needs more: test_cuda_fake.py
        assert 0.85 * min(108, 2048 * B // ln_triton.MIN_ROWS) <= B * parts * tiles <= max(resident, B * tiles)
        assert 2048 // parts >= ln_triton.MIN_ROWS


@pytest.mark.parametrize("broken", ["no compiler", "not installed"])
def test_auto_on_cuda_is_plain_torch_where_triton_cannot_launch_and_says_what_to_install(broken, monkeypatch):
    if broken == "not installed":
        find_spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name))
        expected = "triton is not installed"
    else:
        pytest.importorskip("triton", reason="triton is not installed (Linux only)")
        from rightbatch.kernels import ln_triton
        launches = []

        def ones(*shape, **on):
            assert on == {"device": "cuda"}
            return torch.full(shape, 1.0)

        def fail(*args):
            launches.append(args)
            raise OSError("Failed to find C compiler.\nPlease specify via CC")
        monkeypatch.setattr(ln_triton, "torch", types.SimpleNamespace(ones=ones))
        monkeypatch.setattr(ln_triton, "forward", fail)
        expected = r"C compiler \(gcc\), Python's headers.*Failed to find C compiler. Please"
    with untried_backends(monkeypatch):
        with pytest.warns(UserWarning, match=expected) as caught:
            name, reason = ln_kernel.choose_impl("cuda:1")
            assert (name, reason) == ln_kernel.choose_impl("cuda") and name == "ref" and re.search(expected, reason)
            resolved = backends.resolve("auto", "cuda", torch.float32, torch.bfloat16)
        assert resolved is backends.BACKENDS["ref"] and resolved.norm is None
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        assert broken == "not installed" or len(launches) == 1, "tried once"
        if broken == "no compiler":
            assert backends.resolve("triton", "cuda", torch.float32, torch.float32).name == "triton", "by name: its own error"


def test_auto_on_cuda_is_triton_where_a_launch_works(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed (Linux only)")
    from rightbatch.kernels import ln_triton
    monkeypatch.setattr(ln_triton, "try_launch", lambda: None)
    with untried_backends(monkeypatch):
        assert ln_kernel.choose_impl("cuda")[0] == "triton"
        assert backends.resolve("auto", "cuda", torch.float16, torch.float16).name == "triton"
        assert backends.resolve("auto", "cuda", torch.float64, torch.float64).name == "ref"


@interpreted
def test_interpreted_triton_tries_a_launch_with_its_real_kernel(monkeypatch):
    from rightbatch.kernels import ln_triton
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert ln_triton.try_launch() is None  # it raises where a launch fails


def test_a_backend_is_tried_with_real_tensors_while_torch_compile_traces(monkeypatch):
    tried = []
    ref = backends.BACKENDS["ref"]
    functions = types.SimpleNamespace(forward=ref.forward, backward=ref.backward,
                                      try_launch=lambda: tried.append(torch.ones(3).data_ptr()))
    with untried_backends(monkeypatch):
        monkeypatch.setitem(backends.BACKENDS, "cpu", backends.Backend("cpu", ("cpu",), frozenset(), lambda: functions, ""))
        f = torch.compile(lambda x, w: ln_kernel.layer_norm(x, w), fullgraph=True, backend="aot_eager")
        case = Case((2, 3, 16))
        assert torch.equal(f(case.x, case.w), ln_kernel.layer_norm(case.x, case.w, impl="ref"))
        assert len(tried) == 1 and tried[0] != 0
    torch.compiler.reset()


@pytest.mark.parametrize("impl, kind, message", [("cpu", "cuda", "impl='cpu' needs a CPU tensor, got one on cuda"),
                                                 ("triton", "mps", "impl='triton' needs a CUDA tensor, got one on mps")])
def test_a_backend_is_refused_tensors_of_a_device_that_is_not_its_own(impl, kind, message):
    with pytest.raises(ValueError, match=message):
        backends.resolve(impl, kind, torch.float32, torch.float32)
