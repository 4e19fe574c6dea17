"""
per_example.py against its oracle: a plain autograd loop over examples, in float64.

Letters as there: B examples, T positions, C channels in, O channels out, V vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rightbatch import per_example

METHODS = ["simultaneous", "gram"]
WAYS = pytest.mark.parametrize("method, weighted", [*((m, False) for m in METHODS), (None, True)], indirect=["method"])
SHAPES = [(5, 7, 11, 13), (1, 6, 4, 3), (3, 1, 5, 2), (2, 17, 1, 1), (13, 3, 2, 31)]  # B, T, C, O


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


@pytest.fixture
def method(request, monkeypatch):
    """Makes this method the cheaper one, whatever the shapes; None leaves the choice."""
    if request.param:
        monkeypatch.setattr(per_example, "cheaper_method", lambda *shape: request.param)
    return request.param


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def zero_probe(rows, B, dtype=torch.float64):
    return torch.zeros(rows, B, dtype=dtype, requires_grad=True)


def example_grads(run, parameters, B):
    """The oracle. run(b) is example b's share of the loss, untracked; for each parameter (B, *its shape), float64."""
    grads = [torch.autograd.grad(run(slice(b, b + 1)), parameters) for b in range(B)]
    return [torch.stack([g[i] for g in grads]).double() for i in range(len(parameters))]


def sq_norms(c, p=None):
    c2 = c.square() if p is None else c.square() * p
    return c2.flatten(1).sum(1)


def linear_case(B, T, C, O, bias=True, dtype=torch.float64):
    """Inputs, a random upstream gradient, and the oracle's float64 contributions to weight and bias."""
    x, weight, b, up = leaf(B, T, C), leaf(O, C), leaf(O) if bias else None, torch.randn(B, T, O, dtype=torch.float64)
    x, weight, b, up = (None if t is None else t.detach().to(dtype) for t in (x, weight, b, up))
    exact = [t.to(torch.float64, copy=True).requires_grad_() for t in (weight, b) if t is not None]

    def share(n):
        return (F.linear(x[n].double(), *exact) * up[n].double()).sum()

    c = example_grads(share, exact, B)
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, weight, b)]
    return *leaves, up, c


# ---------------------------------------------------------------------------------------------------------------------
# linear


@pytest.mark.parametrize("method", METHODS, indirect=True)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_norms_equal_the_loop_over_examples(shape, bias, method):
    x, weight, b, up, c = linear_case(*shape, bias=bias)
    probe = zero_probe(2, shape[0])
    (per_example.linear(x, weight, b, probe) * up).sum().backward()
    torch.testing.assert_close(probe.grad[0], sq_norms(c[0]), rtol=1e-11, atol=0)
    if bias:
        torch.testing.assert_close(probe.grad[1], sq_norms(c[1]), rtol=1e-11, atol=0)
    else:
        assert (probe.grad[1] == 0).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_metric_rows_are_the_weighted_norms(shape, bias):
    B, _, C, O = shape
    x, weight, b, up, c = linear_case(*shape, bias=bias)
    metric = torch.rand(O, C, dtype=torch.float64), torch.rand(O, dtype=torch.float64) if bias else None
    probe = zero_probe(4, B)
    (per_example.linear(x, weight, b, probe, metric=metric) * up).sum().backward()
    for i, c_i in enumerate(c):
        torch.testing.assert_close(probe.grad[i], sq_norms(c_i), rtol=1e-11, atol=0)
        torch.testing.assert_close(probe.grad[2 + i], sq_norms(c_i, metric[i]), rtol=1e-11, atol=0)
    torch.testing.assert_close(weight.grad, c[0].sum(0), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_linear_outputs_and_gradients_are_those_of_torch(method):
    x, weight, b, up, _ = linear_case(5, 7, 11, 13, dtype=torch.float32)
    expected = F.linear(x, weight, b)
    expected_grads = torch.autograd.grad((expected * up).sum(), (x, weight, b))
    actual = per_example.linear(x, weight, b, zero_probe(2, 5, torch.float32))
    grads = torch.autograd.grad((actual * up).sum(), (x, weight, b))
    assert torch.equal(actual, expected)
    assert torch.equal(grads[0], expected_grads[0])
    if method == "gram":  # the same single product
        assert torch.equal(grads[1], expected_grads[1])
    for actual_grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (7, 2, 3)])
@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_linear_takes_no_or_several_position_dimensions(shape, method):
    B = shape[0]
    x, weight, up = leaf(*shape, 5), leaf(4, 5), torch.randn(*shape, 4, dtype=torch.float64)
    probe = zero_probe(2, B)
    (per_example.linear(x, weight, None, probe) * up).sum().backward()
    (c,) = example_grads(lambda n: (F.linear(x[n], weight) * up[n]).sum(), [weight], B)
    torch.testing.assert_close(probe.grad[0], sq_norms(c), rtol=1e-11, atol=0)
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("method", METHODS, indirect=True)
@pytest.mark.parametrize("shape", [(4, 1, 384, 96), (4, 64, 96, 384), (1, 256, 128, 65), (2, 3, 64, 9973)])
def test_float32_norms_are_within_1e5_of_float64(shape, method):
    x, weight, b, up, c = linear_case(*shape, dtype=torch.float32)
    probe = zero_probe(2, shape[0], torch.float32)
    (per_example.linear(x, weight, b, probe) * up).sum().backward()
    assert probe.grad.dtype == torch.float32
    for row, c_i in zip(probe.grad.double(), c, strict=True):
        torch.testing.assert_close(row, sq_norms(c_i), rtol=2e-6, atol=0)


@pytest.mark.parametrize("spread", [1e-2, 1e-3])
@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_float32_norms_survive_a_gradient_that_cancels_over_positions(method, spread):
    # Inputs that share a large part, times gradients that sum to zero: without taking the means out first, the
    # gram method was wrong by 5e-4 and 1e-1 here.
    B, T, C, O = 3, 16, 96, 64
    g = torch.randn(B, T, O)
    g = g - g.mean(1, keepdim=True)
    x = spread * torch.randn(B, T, C) + torch.randn(B, 1, C)
    _, actual, _ = per_example.weight_grad(g, x, None, None)
    expected = sq_norms(torch.bmm(g.double().mT, x.double()))
    torch.testing.assert_close(actual[0].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_autocast_norms_are_those_of_the_bfloat16_products(method):
    # bfloat16 keeps 8 bits. The oracle starts from the same rounded x and g, so what is left is that the products are
    # rounded once more (simultaneous): at most 2^-8 of each element's square, less after averaging over elements.
    B, T, C, O = 4, 9, 33, 29
    x, weight, b, up, _ = linear_case(B, T, C, O, dtype=torch.float32)
    probe = zero_probe(2, B, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, weight, b)
        actual = per_example.linear(x, weight, b, probe)
    assert actual.dtype == torch.bfloat16 and torch.equal(actual, expected)
    expected_grads = torch.autograd.grad((expected * up).sum(), (x, weight, b))
    grads = torch.autograd.grad((actual * up).sum(), (x, weight, b, probe))
    g, x_rounded = up.bfloat16().double(), x.detach().bfloat16().double()
    torch.testing.assert_close(grads[3][0].double(), sq_norms(torch.bmm(g.mT, x_rounded)), rtol=2**-8, atol=0)
    torch.testing.assert_close(grads[3][1].double(), sq_norms(g.sum(1)), rtol=1e-5, atol=0)
    exact = torch.bmm(g.mT, x_rounded).sum(0).float()
    assert grads[1].dtype == torch.float32
    # Products of size sqrt(T) are rounded to 2^-9 of themselves, sums of B of them are not rounded again.
    assert (grads[1] - exact).abs().max() <= 2 * (expected_grads[1] - exact).abs().max()
    for actual_grad, expected_grad in zip(grads[:3], expected_grads, strict=True):
        assert actual_grad.dtype == expected_grad.dtype
        torch.testing.assert_close(actual_grad, expected_grad, rtol=2**-6, atol=2**-4)


# ---------------------------------------------------------------------------------------------------------------------
# embedding, positions


@pytest.mark.parametrize(("B", "T", "V", "C"), [(5, 13, 7, 3), (1, 1, 4, 2), (3, 17, 1, 5), (2, 4, 9973, 2)])
def test_embedding_sums_repeated_tokens_before_squaring(B, T, V, C):
    weight, idx, up = leaf(V, C), torch.randint(V, (B, T)), torch.randn(B, T, C, dtype=torch.float64)
    probe = zero_probe(1, B)
    output = per_example.embedding(idx, weight, probe)
    assert torch.equal(output, F.embedding(idx, weight))
    (output * up).sum().backward()
    (c,) = example_grads(lambda n: (F.embedding(idx[n], weight) * up[n]).sum(), [weight], B)
    torch.testing.assert_close(probe.grad[0], sq_norms(c), rtol=1e-11, atol=0)
    (expected,) = torch.autograd.grad((F.embedding(idx, weight) * up).sum(), [weight])
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize(("B", "T"), [(5, 7), (1, 1)])
def test_position_norms_equal_the_loop_and_unused_positions_count_nothing(B, T):
    x, weight, up = leaf(B, T, 3), leaf(9, 3), torch.randn(B, T, 3, dtype=torch.float64)
    probe = zero_probe(1, B)
    output = per_example.add_positions(x, weight, probe)
    expected = x + weight[:T]
    assert torch.equal(output, expected)
    actual_grads = torch.autograd.grad((output * up).sum(), (x, weight, probe))
    expected_grads = torch.autograd.grad((expected * up).sum(), (x, weight))
    assert all(torch.equal(a, b) for a, b in zip(actual_grads[:2], expected_grads, strict=True))
    (c,) = example_grads(lambda n: ((x[n] + weight[:T]) * up[n]).sum(), [weight], B)
    torch.testing.assert_close(actual_grads[2][0], sq_norms(c), rtol=1e-11, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# all of them in one small model, with a tied head


class Tiny:
    """Embedding, positions, one hidden layer, tied head. Sites: 0 tied matrix, 1 positions, 2 hidden layer."""

    def __init__(self, B=5, T=6, V=11, C=4, dtype=torch.float64):
        self.B, self.idx, self.targets = B, torch.randint(V, (B, T)), torch.randint(V, (B, T))
        self.idx[0] = self.idx[0, 0]  # one example repeats one token throughout
        self.wte, self.wpe = leaf(V, C, dtype=dtype), leaf(T + 2, C, dtype=dtype)
        self.weight, self.bias = leaf(C, C, dtype=dtype), leaf(C, dtype=dtype)
        self.parameters = [self.wte, self.wpe, self.weight, self.bias]
        self.metric = [torch.rand_like(p) for p in (self.weight, self.bias)]  # tables have none

    def loss(self, n=slice(None), probes=None, weighted=False, recompute=False):
        """Mean over all B examples of the examples n: example b's share is what it contributes."""
        rows = (lambda i, r: None) if probes is None else (lambda i, r: probes[i, r])
        h, link = per_example.embedding(self.idx[n], self.wte, rows(0, [0]), tied=True)
        h = per_example.add_positions(h, self.wpe, rows(1, [0]))

        def hidden(h):
            two, metric = ([0, 1, 2, 3], tuple(self.metric)) if weighted else ([0, 1], None)
            return h + torch.tanh(per_example.linear(h, self.weight, self.bias, rows(2, two), metric))

        h = checkpoint(hidden, h, use_reentrant=False) if recompute else hidden(h)
        logits = per_example.linear(h, self.wte, None, rows(0, [0, 1]), link=link)
        total = F.cross_entropy(logits.flatten(0, 1), self.targets[n].flatten(), reduction="sum")
        return total / self.targets.numel()

    def expected(self, weighted=False):
        wte, wpe, weight, bias = example_grads(lambda n: self.loss(n), self.parameters, self.B)
        none = torch.zeros(self.B, dtype=torch.float64)
        sites = [(wte, None), (wpe, None), (weight, bias)]
        plain = [[none if c is None else sq_norms(c) for c in site] for site in sites]
        if not weighted:
            return torch.stack([torch.stack(rows) for rows in plain])
        scaled = [[none, none], [none, none], [sq_norms(weight, self.metric[0]), sq_norms(bias, self.metric[1])]]
        return torch.stack([torch.stack(a + b) for a, b in zip(plain, scaled, strict=True)])

    def probes(self, weighted=False, dtype=torch.float64):
        return torch.zeros(3, 4 if weighted else 2, self.B, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("sizes", [{}, {"B": 1}, {"T": 1}, {"V": 31, "T": 3}, {"V": 3, "T": 19}])
@pytest.mark.parametrize("recompute", [False, True])
@WAYS
def test_tied_matrix_counts_once_with_its_cross_term(sizes, method, weighted, recompute):
    tiny = Tiny(**sizes)
    probes = tiny.probes(weighted)
    tiny.loss(probes=probes, weighted=weighted, recompute=recompute).backward()
    torch.testing.assert_close(probes.grad, tiny.expected(weighted), rtol=1e-10, atol=0)
    expected_grads = torch.autograd.grad(tiny.loss(), tiny.parameters)
    for p, grad in zip(tiny.parameters, expected_grads, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_tied_float32_norms_are_within_1e5_of_float64(method):
    tiny = Tiny(B=4, T=32, V=65, C=24, dtype=torch.float32)
    probes = tiny.probes(dtype=torch.float32)
    tiny.loss(probes=probes).backward()
    for p in (tiny.wte, tiny.wpe, tiny.weight, tiny.bias):  # the same values in float64: only the arithmetic differs
        p.grad = None
        p.data = p.data.double()
    torch.testing.assert_close(probes.grad.double(), tiny.expected(), rtol=1e-5, atol=0)


def test_without_the_link_the_cross_term_is_missing():
    # Guards the tests above: if the cross term were negligible here they would prove nothing.
    tiny, probes = Tiny(), Tiny().probes()
    h = per_example.embedding(tiny.idx, tiny.wte, probes[0, [0]])
    logits = per_example.linear(h + torch.tanh(h), tiny.wte, None, probes[0])
    F.cross_entropy(logits.flatten(0, 1), tiny.targets.flatten()).backward()

    def share(n):
        h = F.embedding(tiny.idx[n], tiny.wte)
        return F.cross_entropy(F.linear(h + torch.tanh(h), tiny.wte).flatten(0, 1), tiny.targets[n].flatten()) / tiny.B

    (c,) = example_grads(share, [tiny.wte], tiny.B)
    assert ((probes.grad[0, 0] / sq_norms(c) - 1).abs() > 0.01).all()


@WAYS
def test_small_chunks_give_the_same_numbers(monkeypatch, method, weighted):
    tiny = Tiny(B=13)
    expected = tiny.expected(weighted)
    for limit in (1, 100, 700):  # one row, some rows of an example, and for the hidden layer 4 + 4 + 4 + 1 examples
        monkeypatch.setattr(per_example, "CHUNK_BYTES", limit)
        probes = tiny.probes(weighted)
        loss = tiny.loss(probes=probes, weighted=weighted)
        grads = torch.autograd.grad(loss, [probes, *tiny.parameters])
        torch.testing.assert_close(grads[0], expected, rtol=1e-10, atol=0)
        for grad, wanted in zip(grads[1:], torch.autograd.grad(tiny.loss(), tiny.parameters), strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-14)


def test_pieces_cover_every_row_of_every_example_once_within_the_limit(monkeypatch):
    for limit in (1, 64, 1000, 10**6):
        monkeypatch.setattr(per_example, "CHUNK_BYTES", limit)
        for B, rows in [(1, 1), (13, 7), (12, 5), (3, 100)]:
            seen = torch.zeros(B, rows, dtype=torch.int)
            for b0, b1, r0, r1 in per_example.pieces(B, rows, row_bytes=12):
                seen[b0:b1, r0:r1] += 1
                assert (b1 - b0) * (r1 - r0) * 12 <= max(limit, 12)
            assert (seen == 1).all()


# aot_eager traces forward and backward as inductor does and needs no C++ compiler; one case goes all the way.
@pytest.mark.parametrize("method, weighted, recompute, backend", [
    ("simultaneous", False, False, "inductor"), ("gram", False, False, "aot_eager"), (None, True, False, "aot_eager"),
    (None, False, True, "aot_eager")], indirect=["method"])
def test_compiled_whole_graph_gives_the_same_norms(method, weighted, recompute, backend):
    torch._dynamo.reset()
    tiny = Tiny()
    probes = tiny.probes(weighted)
    step = torch.compile(lambda probes: tiny.loss(probes=probes, weighted=weighted, recompute=recompute), fullgraph=True,
                         backend=backend)
    step(probes).backward()
    torch.testing.assert_close(probes.grad, tiny.expected(weighted), rtol=1e-10, atol=0)


def test_compiled_under_autocast_equals_eager():
    torch._dynamo.reset()
    x, weight, b, up, _ = linear_case(4, 9, 33, 29, dtype=torch.float32)

    def step(probe):
        with torch.autocast("cpu", torch.bfloat16):
            return (per_example.linear(x, weight, b, probe) * up).sum()

    probes = [zero_probe(2, 4, torch.float32) for _ in range(2)]
    step(probes[0]).backward()
    torch.compile(step, fullgraph=True, backend="aot_eager")(probes[1]).backward()
    assert torch.equal(probes[0].grad, probes[1].grad)


# ---------------------------------------------------------------------------------------------------------------------
# the contract around the numbers


def test_without_a_probe_everything_is_plain_torch():
    x, weight, b, _, _ = linear_case(2, 3, 5, 4)
    idx, table, positions = torch.randint(7, (2, 3)), leaf(7, 5), leaf(4, 5)
    assert type(per_example.linear(x, weight, b).grad_fn) is type(F.linear(x, weight, b).grad_fn)
    assert type(per_example.embedding(idx, table).grad_fn) is type(F.embedding(idx, table).grad_fn)
    assert type(per_example.add_positions(x, positions).grad_fn) is type((x + positions[:3]).grad_fn)
    output, link = per_example.embedding(idx, table, tied=True)
    assert link is None and torch.equal(output, F.embedding(idx, table))


def test_no_grad_works_and_records_nothing():
    tiny = Tiny()
    with torch.no_grad():
        loss = tiny.loss(probes=tiny.probes())
    assert not loss.requires_grad and torch.equal(loss, tiny.loss())


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_frozen_parameters_count_zero_and_the_others_are_unchanged(method):
    x, weight, b, up, c = linear_case(4, 3, 5, 6)
    for frozen in ([weight], [b], [x], [x, weight], [weight, b]):
        for t in (x, weight, b):
            t.requires_grad_(all(t is not f for f in frozen)).grad = None
        probe = zero_probe(2, 4)
        (per_example.linear(x, weight, b, probe) * up).sum().backward()
        for row, t, c_t in zip(probe.grad, (weight, b), c, strict=True):
            torch.testing.assert_close(row, sq_norms(c_t) * t.requires_grad, rtol=1e-11, atol=0)
        assert all((t.grad is None) != t.requires_grad for t in (x, weight, b))
    table, probe = torch.randn(7, 5), zero_probe(1, 4)
    per_example.embedding(torch.randint(7, (4, 3)), table, probe).sum().backward()
    assert (probe.grad == 0).all()
    positions, probe = torch.randn(4, 5), zero_probe(1, 4)
    per_example.add_positions(x, positions, probe).sum().backward()
    assert (probe.grad == 0).all()


@pytest.mark.parametrize("method", METHODS, indirect=True)
def test_strided_inputs_and_expanded_gradients_are_fine(method):
    B, T, C, O = 4, 3, 5, 6
    x, weight = leaf(T, C, B).permute(2, 0, 1), leaf(C, O).t()
    probe = zero_probe(2, B)
    per_example.linear(x, weight, None, probe).sum().backward()  # sum: the gradient has strides 0
    leaf_weight = weight.detach().clone().requires_grad_()
    (c,) = example_grads(lambda n: F.linear(x[n], leaf_weight).sum(), [leaf_weight], B)
    torch.testing.assert_close(probe.grad[0], sq_norms(c), rtol=1e-11, atol=0)
    idx, table, probe = torch.randint(7, (T, B)).t(), leaf(7, C), zero_probe(1, B)
    per_example.embedding(idx, table, probe).sum().backward()
    (c,) = example_grads(lambda n: F.embedding(idx[n], table).sum(), [table], B)
    torch.testing.assert_close(probe.grad[0], sq_norms(c), rtol=1e-11, atol=0)


def test_norms_hold_the_scale_of_the_loss():
    # A mean over B examples and a loss scale s: c_b = s g_b / B, so |c_b|^2 = (s / B)^2 |g_b|^2.
    x, weight, b, _, _ = linear_case(4, 3, 5, 6)
    norms = []
    for scale in (1.0, 2.0**10 / 4):
        probe = zero_probe(2, 4)
        (per_example.linear(x, weight, b, probe).square().sum() * scale).backward()
        norms.append(probe.grad)
    torch.testing.assert_close(norms[1], norms[0] * (2.0**10 / 4) ** 2)


def test_the_method_follows_from_the_shapes_alone():
    assert per_example.cheaper_method(1, 768, 768) == "gram"
    assert per_example.cheaper_method(16, 768, 50257) == "gram"
    assert per_example.cheaper_method(256, 384, 1536) == "simultaneous"
    assert per_example.cheaper_method(1024, 768, 50257) == "simultaneous"
    assert all(per_example.cheaper_method(T, 48, 80) == per_example.cheaper_method(T, 80, 48) for T in range(1, 200))
    # Longer examples only ever move the choice from gram to simultaneous.
    choices = [per_example.cheaper_method(T, 384, 384) for T in range(1, 300)]
    assert choices == sorted(choices)


@pytest.mark.parametrize(("T", "expected"), [(2, "gram"), (64, "simultaneous")])
def test_auto_uses_the_cheaper_method_and_a_metric_forces_simultaneous(monkeypatch, T, expected):
    used = []
    for name in METHODS:
        original = getattr(per_example, name)
        monkeypatch.setattr(per_example, name, lambda *a, f=original, name=name: used.append(name) or f(*a))
    x, weight, b, _, _ = linear_case(2, T, 32, 32)
    per_example.linear(x, weight, b, zero_probe(2, 2)).sum().backward()
    metric = torch.rand_like(weight), torch.rand_like(b)
    per_example.linear(x, weight, b, zero_probe(4, 2), metric).sum().backward()
    assert per_example.cheaper_method(T, 32, 32) == expected
    assert used == [expected, "simultaneous"]


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("expected \\(2, 3\\)", lambda x, w, b: per_example.linear(x, w, b, zero_probe(1, 3))),
        ("expected \\(4, 3\\)", lambda x, w, b: per_example.linear(x, w, b, zero_probe(2, 3), (w, b))),
        ("p_bias=None", lambda x, w, b: per_example.linear(x, w, b, zero_probe(4, 3), (w, None))),
        ("expected \\(1, 3\\)", lambda x, w, b: per_example.add_positions(x, x[0], zero_probe(2, 3))),
    ],
)
def test_wrong_arguments_are_named(message, call):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(3, 2, 5), torch.randn(4, 5), torch.randn(4))


class TensorSizes(TorchDispatchMode):
    """Bytes of every storage that an operation returned."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen |= {t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        return out


@WAYS
def test_backward_never_makes_vocabulary_times_width_per_example(monkeypatch, method, weighted):
    B, T, V, C = 6, 5, 997, 32
    chunk = 40_000  # a third of one example's V x C
    monkeypatch.setattr(per_example, "CHUNK_BYTES", chunk)
    tiny = Tiny(B, T, V, C, dtype=torch.float32)
    loss = tiny.loss(probes=tiny.probes(weighted, torch.float32), weighted=weighted)
    with TensorSizes() as sizes:
        loss.backward()
    weight_grad, logits = 4 * V * C, 4 * B * T * V  # plain torch makes these too
    activation, example_logits = 4 * B * T * C, 4 * T * V
    assert max(sizes.seen - {weight_grad, logits}) <= max(chunk, activation, example_logits) < weight_grad
    assert max(sizes.seen) < 4 * B * V * C
