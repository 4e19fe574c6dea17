"""The head's loss in chunks is plain cross entropy: loss, every gradient and every per-example norm, with less memory."""

import os

import pytest
import torch
import torch.nn.functional as F

import train
from benchmarks import tools
from model import GPT, GPTConfig
from rightbatch.kernels import head_loss
from tests.helpers import check_against_oracle, gpt_batch, make_gpt


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks and pieces of a few rows, the last ones shorter, and everything worth it."""
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 5 * 37 * 4)
    monkeypatch.setattr(head_loss, "PIECE_BYTES", {"cpu": 2 * 37 * 4})
    monkeypatch.setattr(head_loss, "WORTH_BYTES", 0)


def inputs(N=23, C=8, V=37, dtype=torch.float32, scale=3.0):
    g = torch.Generator().manual_seed(0)
    x = (scale * torch.randn(N, C, generator=g)).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=g).to(dtype).requires_grad_()
    return x, weight, torch.randint(V, (N,), generator=g)


def both(x, weight, targets, grad=0.25):
    losses = F.cross_entropy(F.linear(x, weight), targets), head_loss.linear_cross_entropy(x[None], weight, targets[None])
    return zip(*[(loss.detach(), *torch.autograd.grad(loss * grad, (x, weight))) for loss in losses])


def probed(x, weight, targets):
    """The head of exact mode on one example, and its probe."""
    probe = torch.zeros(2, 1, dtype=head_loss.accumulation_dtype(x), requires_grad=True)
    return head_loss.probed_linear_cross_entropy(x[None], weight, targets[None], probe), probe


@pytest.mark.parametrize("N", [1, 4, 5, 23])
def test_loss_and_gradients_are_those_of_plain_cross_entropy(N, small_chunks):
    for plain, ours in both(*inputs(N, dtype=torch.float64)):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)
    for plain, ours in both(*inputs(N)):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_logits_far_apart_neither_overflow_nor_lose_the_loss(small_chunks):
    x, weight, targets = inputs(scale=200.0)  # probabilities of the targets far below the smallest float32
    (loss, ours), *grads = both(x, weight, targets)
    assert loss > 500
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    for plain, ours in grads:
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("loss_of", [lambda x, w, t: head_loss.linear_cross_entropy(x, w, t),
                                     lambda x, w, t: probed(x, w, t)[0]])
def test_ignored_targets_have_no_loss_and_no_gradient(loss_of, small_chunks):
    x, weight, targets = inputs(dtype=torch.float64)
    targets[[0, 7, 22]] = -100
    expected = F.cross_entropy(F.linear(x, weight), targets)
    loss = loss_of(x, weight, targets)
    with torch.no_grad():
        pieces = head_loss.cross_entropy_in_pieces(F.linear(x, weight), targets)
    torch.testing.assert_close(torch.stack([loss.detach(), pieces]), expected.detach().expand(2))
    for a, b in zip(torch.autograd.grad(loss, (x, weight)), torch.autograd.grad(expected, (x, weight))):
        torch.testing.assert_close(a, b)


def test_a_loss_that_is_not_finite_stays_so(small_chunks):
    x, weight, targets = inputs()
    with torch.no_grad():
        x[3, 0] = float("nan")
    assert head_loss.linear_cross_entropy(x, weight, targets).isnan()


def test_bf16_autocast_is_as_near_to_float32_as_plain_autocast(small_chunks):
    x, weight, targets = inputs(64, scale=1.0)
    (_, truth_x, truth_w), _ = zip(*both(x, weight, targets))
    with torch.autocast("cpu", torch.bfloat16):
        plain = F.cross_entropy(F.linear(x, weight).float(), targets)
        ours = head_loss.linear_cross_entropy(x, weight, targets)
    assert ours.dtype == torch.float32 and ours.item() == pytest.approx(plain.item(), abs=1e-5)
    for truth, a, b in zip((truth_x, truth_w), torch.autograd.grad(ours * 0.25, (x, weight)),
                           torch.autograd.grad(plain * 0.25, (x, weight))):
        assert a.dtype == torch.float32 and (a - truth).norm() <= 1.5 * (b - truth).norm()


def test_a_second_backward_pass_is_refused_not_wrong(small_chunks):
    x, weight, targets = inputs()
    loss = head_loss.linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("mode", ["norm", "exact"])
@pytest.mark.parametrize("overrides", [{}, {"tie_weights": False}, {"activation_checkpointing": "block"}], ids=str)
def test_per_example_norms_are_right_with_it(overrides, mode, small_chunks):
    x, y = gpt_batch(6)
    check_against_oracle(make_gpt(**overrides), x, y, micro=3, mode=mode)


@pytest.mark.parametrize("mode", [None, "exact"])
def test_the_models_gradients_and_its_evaluation_are_those_of_the_plain_path(mode, monkeypatch, small_chunks):
    x, y = gpt_batch(4)
    results = []
    for worth in (1 << 40, 0):
        monkeypatch.setattr(head_loss, "WORTH_BYTES", worth)
        model = make_gpt()
        probes = None if mode is None else torch.zeros(len(model.probe_sites(mode)), 2, 4, requires_grad=True)
        logits, loss = model(x, y, probes=probes)
        assert (logits is None) == (worth == 0)  # in training large logits are not kept
        loss.backward()
        with torch.no_grad():
            logits, evaluated = model.eval()(x, y)
        results.append([loss.detach(), logits, evaluated, *(p.grad for p in model.parameters())])
    for plain, ours in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["norm", "exact"])
def test_it_compiles_without_a_graph_break(mode, small_chunks):
    model = make_gpt()
    x, y = gpt_batch(4)
    check_against_oracle(model, x, y, micro=2, forward=torch.compile(model, fullgraph=True, backend="aot_eager"), mode=mode)


def test_rows_of_whole_logits_are_aligned_where_a_gpu_needs_it_and_their_gradient_is_the_same(monkeypatch, small_chunks):
    """As on CUDA: in a buffer with longer rows."""
    x, y = gpt_batch(6)
    made = []
    monkeypatch.setattr(head_loss, "row_length", lambda V, device: made.append(head_loss.padded(V)) or made[-1])
    check_against_oracle(make_gpt(), x, y, micro=3, mode="exact")
    assert made and head_loss.row_length(50257, torch.device("cuda")) % 8 == 0
    monkeypatch.undo()
    assert [head_loss.row_length(50257, torch.device(kind)) for kind in ("cuda", "cpu")] == [50288, 50257]


def test_small_logits_and_fp16_take_the_plain_path():
    assert head_loss.worth_it(1024, 50257, "cpu") and not head_loss.worth_it(3072, 65, "cpu")
    with torch.autocast("cpu", torch.float16):
        assert not head_loss.worth_it(1024, 50257, "cpu")


@pytest.mark.parametrize("vocab_size", [37, 48, 65, 50257, 50304])
def test_rows_of_the_buffer_start_at_cache_lines(vocab_size):
    length = head_loss.padded(vocab_size)
    assert vocab_size <= length < vocab_size + 32 and length % 32 == 16


@pytest.mark.parametrize("mode", [None, "exact"])
def test_logits_are_held_once_in_training(mode, monkeypatch):
    shape = dict(n_layer=1, n_head=1, n_embd=8, block_size=64, vocab_size=4000)
    x, y = tools.batch_of(shape, 4)
    logits = 4 * 256 * 4000
    peaks = []
    for worth in (1 << 40, 0):
        monkeypatch.setattr(head_loss, "WORTH_BYTES", worth)
        model = GPT(GPTConfig(**shape))
        probes = None if mode is None else torch.zeros(len(model.probe_sites(mode)), 2, 4, requires_grad=True)

        def step():
            model(x, y, probes=probes)[1].backward()
            model.zero_grad(set_to_none=True)
        peaks.append(tools.peak_bytes(step))
    assert peaks[0] > 1.9 * logits and peaks[1] < 1.2 * logits + head_loss.PIECE_BYTES["cpu"]


def test_a_run_with_a_large_vocabulary_resumes_bit_for_bit(tmp_path, tiny_args, monkeypatch, small_chunks):
    monkeypatch.setattr(head_loss, "CHUNK_BYTES", 20 * 64 * 4)
    from trainer import checkpoint
    settings = dict(max_tokens=1280, checkpoint_tokens=640, eval_tokens=0, dropout=0.1)
    monkeypatch.setattr(train.Run, "draw", lambda run: "")
    assert train.main(tiny_args(out_dir=tmp_path / "whole", **settings)) == 0
    assert train.main(tiny_args(out_dir=tmp_path / "cut", stop_tokens=640, **settings)) == 0
    assert train.main(tiny_args(out_dir=tmp_path / "cut", resume=True, **settings)) == 0
    whole, cut = (checkpoint.load(str(tmp_path / name))["model"] for name in ("whole", "cut"))
    assert all(torch.equal(whole[n], cut[n]) for n in whole)


def interpreted(test):
    return test if os.environ.get("TRITON_INTERPRET") == "1" else None    # by a process of test_ln_kernel.py


@interpreted
@pytest.mark.parametrize("V, dtype", [(257, torch.float32), (65, torch.bfloat16), (16, torch.float32)])
def test_interpreted_triton_gives_the_losses_and_gradients_of_float64(V, dtype, monkeypatch):
    """Rows of several blocks, an odd number of columns, a row in a padded buffer, logits that would overflow."""
    from rightbatch.kernels import head_triton
    monkeypatch.setattr(head_triton, "OPTIONS", {"BLOCK": 64, "num_warps": 1})
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(5, V + 7, generator=generator).to(dtype)
    logits = buffer[:, :V]
    logits[1] *= 200
    logits[2, 3] = float("-inf")
    targets = torch.tensor([0, V - 1, 5, 7, head_loss.IGNORE])
    logits[4] = float("nan")   # reaches nothing from a row that does not count
    beyond, exact = buffer[:, V:].clone(), logits.double()
    losses = torch.empty(5)
    head_triton.softmax_minus_onehot_(logits, targets, losses)
    torch.testing.assert_close(losses.double(), F.cross_entropy(exact, targets, reduction="none"), rtol=1e-5, atol=1e-5)
    expected = exact.softmax(1) - F.one_hot(targets.clamp_min(0), V)
    expected[4] = 0
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-6 if dtype == torch.float32 else 2**-7)
    assert torch.equal(buffer[:, V:], beyond)


@interpreted
def test_interpreted_triton_a_logit_that_is_not_a_number_stays_in_its_row():
    from rightbatch.kernels import head_triton
    logits = torch.randn(3, 40)
    logits[1, 7] = float("nan")
    losses = torch.empty(3)
    head_triton.softmax_minus_onehot_(logits, torch.tensor([1, 2, 3]), losses)
    assert losses.isnan().tolist() == [False, True, False] and logits.isnan().all(1).tolist() == [False, True, False]
