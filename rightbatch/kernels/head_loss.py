"""
The head and its cross entropy over a large vocabulary, without holding the logits twice.

    loss = head_loss.linear_cross_entropy(x, weight, targets)      # F.cross_entropy(F.linear(x, weight).float(), targets)

Plain torch holds logits, their log-softmax and their gradient at once, three times N x V numbers: 600 MB for 1,024 tokens of
GPT-2's vocabulary. But the gradient of a mean over tokens is known as soon as a row of logits is,

    d loss / d logits[n] = (softmax(logits[n]) - onehot(targets[n])) / N

so the forward pass goes over the rows in chunks: logits, losses, the gradient written over the logits, and from it at once
the chunk's share of the gradients of x and weight. Backward only multiplies those by the gradient that arrives, which
brings 1 / accumulation.

Where the head is a probed site (exact mode), its backward pass needs the logits' gradient example by example, as
per_example.linear does. So there the logits are made whole, and their gradient takes their place: they are held once.

    loss = head_loss.probed_linear_cross_entropy(x, weight, targets, probe)      # with the results of per_example.linear

N rows (B x T tokens), C channels, V vocabulary.
"""

import torch
import torch.nn.functional as F

from rightbatch import ln_kernel, per_example
from rightbatch.per_example import accumulation_dtype

# Rows whose logits fill this many bytes make a chunk. Each chunk packs the weight anew and adds to its gradient: in chunks of
# 32, 64 and 128 MiB instead of one of 206 MB the head of gpt_111m took 1.17, 1.10 and 1.05 times as long on two CPU cores.
CHUNK_BYTES = 256 * 2**20
# On a GPU each product should fill the device, and each launch counts: a chunk is this share of its memory, 2.5 GiB of 80.
CUDA_CHUNK_SHARE = 1 / 32
# Softmax goes over pieces that stay in the caches between its passes. On a GPU a piece is a kernel launch: a whole chunk.
PIECE_BYTES = {"cpu": 4 * 2**20}
# With fewer bytes of logits memory does not matter, and callers get their logits.
WORTH_BYTES = 64 * 2**20
IGNORE = -100  # F.cross_entropy's ignore_index: such targets have no loss and do not count in the mean


def worth_it(n_rows, vocab_size, device_type):
    """Whether logits are large enough for this to pay. fp16 is left to plain torch: its gradients must be multiplied by the
    loss scale *before* they are rounded, and here that is known only after."""
    half = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.float16
    return n_rows * vocab_size * 4 >= WORTH_BYTES and not half


def chunk_bytes(device):
    if device.type != "cuda":
        return CHUNK_BYTES
    return cuda_chunk_bytes(torch.cuda.get_device_properties(device).total_memory)


def cuda_chunk_bytes(memory):
    return max(CHUNK_BYTES, int(memory * CUDA_CHUNK_SHARE))


def rows_per_chunk(n_rows, vocab_size, size=None, itemsize=4):
    """Chunks of nearly equal size."""
    chunks = -(-n_rows * vocab_size * itemsize // (size or CHUNK_BYTES))
    return max(1, -(-n_rows // chunks))


def padded(vocab_size):
    """Length of a row of the buffer for logits: each starts at a cache line, and not all in the same set of the cache. With
    50,288 in place of 50,257 numbers the three products took 0.83 of the time (768 channels) and 0.87 (192)."""
    lines = -(-vocab_size // 16)
    return 16 * (lines + 1 - lines % 2)


def softmax_minus_onehot_(logits, targets, losses):
    """Overwrite logits (n, V) with softmax - onehot, in their dtype, and losses (n,), in float32. Both are zero where targets
    say IGNORE."""
    if logits.is_cuda and logits.dtype != torch.float64 and ln_kernel.choose_impl("cuda")[0] == "triton":
        from rightbatch.kernels import head_triton
        return head_triton.softmax_minus_onehot_(logits, targets, losses)
    n, V = logits.shape
    rows = max(1, PIECE_BYTES.get(logits.device.type, CHUNK_BYTES) // (4 * V))
    keep = (targets != IGNORE)[:, None]
    for i in range(0, n, rows):
        piece, kept = logits[i:i + rows], keep[i:i + rows]
        target = targets[i:i + rows, None].masked_fill(~kept, 0)
        e = piece if piece.dtype == losses.dtype else piece.to(losses.dtype)
        top, own = e.amax(1, keepdim=True), e.gather(1, target)
        total = e.sub_(top).exp_().sum(1, keepdim=True)
        losses[i:i + rows] = (top + total.log() - own).masked_fill_(~kept, 0)[:, 0]
        e.mul_(total.reciprocal() * kept).scatter_add_(1, target, -kept.to(e.dtype))
        if e is not piece:
            piece.copy_(e)


def forward_and_gradients(x, weight, targets):
    """x (N, C), weight (V, C) in the dtype of the products, targets (N,) -> losses (N,), and the gradients of their *sum*: of x
    in its dtype, of weight in float32."""
    (N, C), V, wide = x.shape, weight.shape[0], accumulation_dtype(x)
    rows = min(N, rows_per_chunk(N, V, chunk_bytes(x.device), x.element_size() if x.is_cuda else 4))
    buffer = x.new_empty(rows, padded(V))[:, :V]
    dx, dW, losses = torch.empty_like(x), x.new_empty(V, C, dtype=wide), x.new_empty(N, dtype=wide)
    for i in range(0, N, rows):
        part, logits = x[i:i + rows], buffer[:min(rows, N - i)]
        torch.mm(part, weight.t(), out=logits)
        softmax_minus_onehot_(logits, targets[i:i + rows], losses[i:i + rows])
        torch.mm(logits, weight, out=dx[i:i + rows])
        if wide != x.dtype and x.is_cuda:  # summed in float32 inside the product, and added up there
            dW = torch.mm(logits.t(), part, out_dtype=wide) if i == 0 else torch.addmm(dW, logits.t(), part, out_dtype=wide)
        elif wide != x.dtype:
            product = logits.t().mm(part)
            dW.copy_(product) if i == 0 else dW.add_(product)
        elif i == 0:
            torch.mm(logits.t(), part, out=dW)
        else:
            dW.addmm_(logits.t(), part)
    return losses, dx, dW


# One opaque operation for torch.compile: tracing would unroll the chunks and take their one buffer apart.
@torch.library.custom_op("rightbatch::head_loss", mutates_args=())
def forward_and_gradients_op(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
                             ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return forward_and_gradients(x, weight, targets)


@forward_and_gradients_op.register_fake
def _(x, weight, targets):
    wide = accumulation_dtype(x)
    return x.new_empty(len(x), dtype=wide), torch.empty_like(x), weight.new_empty(weight.shape, dtype=wide)


def mean_of(losses, targets):
    """The mean over the tokens that count, and their number."""
    n_kept = (targets != IGNORE).sum().to(losses.dtype)
    return losses.sum() / n_kept, n_kept


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets):
        ctx.dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:  # as autocast does inside F.linear
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        op = forward_and_gradients_op if torch.compiler.is_compiling() else forward_and_gradients
        with torch.autocast(x.device.type, enabled=False):
            losses, dx, dW = op(x, weight, targets)
        loss, n_kept = mean_of(losses, targets)
        ctx.save_for_backward(n_kept, dx, dW)
        return loss

    @staticmethod
    def backward(ctx, g):
        n_kept, dx, dW = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        scale = g / n_kept
        if torch.compiler.is_compiling():
            return (dx * scale).to(x_dtype), (dW * scale).to(weight_dtype), None
        # In place, since the weight's gradient is as large as the weight. Autograd sees it and refuses a second backward pass.
        return (dx.to(scale.dtype) * scale).to(x_dtype), dW.mul_(scale).to(weight_dtype), None


def linear_cross_entropy(x, weight, targets):
    """Mean over all tokens of the cross entropy of F.linear(x, weight). x (B, T, C), weight (V, C), targets (B, T)."""
    return LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight, targets.reshape(-1))


def row_length(vocab_size, device):
    """Of whole logits. Unaligned rows, such as GPT-2's 50,257 bf16 numbers, keep a GPU's products from their wide loads."""
    return padded(vocab_size) if device.type == "cuda" else vocab_size


def losses_and_difference(x, weight, targets):
    """x (N, C), weight (V, C), targets (N,) -> losses (N,), softmax - onehot (N, V)."""
    V, length = len(weight), row_length(len(weight), x.device)
    if length > V:
        logits = x.new_empty(len(x), length)[:, :V]
        torch.mm(x, weight.t(), out=logits)
    else:
        logits = F.linear(x, weight)
    losses = x.new_empty(len(x), dtype=accumulation_dtype(x))
    softmax_minus_onehot_(logits, targets, losses)
    return losses, logits


# Opaque to torch.compile, which would keep the logits beside their gradient.
@torch.library.custom_op("rightbatch::head_difference", mutates_args=())
def losses_and_difference_op(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
                             ) -> tuple[torch.Tensor, torch.Tensor]:
    return losses_and_difference(x, weight, targets)


@losses_and_difference_op.register_fake
def _(x, weight, targets):
    V = len(weight)
    return x.new_empty(len(x), dtype=accumulation_dtype(x)), x.new_empty(len(x), row_length(V, x.device))[:, :V]


class ProbedLinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, probe, link_rows, link_idx):
        ctx.dtypes = x.dtype, weight.dtype
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        op = losses_and_difference_op if torch.compiler.is_compiling() else losses_and_difference
        with torch.autocast(x.device.type, enabled=False):
            losses, difference = op(x.flatten(0, 1), weight, targets.flatten())
        loss, n_kept = mean_of(losses, targets)
        ctx.save_for_backward(x, weight, n_kept, difference, link_idx)
        return loss

    @staticmethod
    def backward(ctx, g):
        x, weight, n_kept, difference, link_idx = ctx.saved_tensors
        x_dtype, weight_dtype = ctx.dtypes
        scale = g / n_kept
        late = x.is_cuda or torch.compiler.is_compiling()  # all results are proportional to it: no pass over the logits
        if not late:
            difference.mul_(scale.to(difference.dtype))
        difference = difference.view(*x.shape[:2], -1)
        dx = difference.flatten(0, 1).mm(weight).view(x.shape)
        dW, sq, rows = per_example.weight_grad(difference, x, None, link_idx)
        if late:
            dx, dW, sq = dx * scale, dW * scale, sq * scale.square()
        rows = None if not ctx.needs_input_grad[4] else rows * scale if late else rows
        sq = torch.cat([sq, torch.zeros_like(sq)])  # that of no bias
        return dx.to(x_dtype), dW.to(weight_dtype), None, sq, rows, None


def probed_linear_cross_entropy(x, weight, targets, probe, link=None):
    """linear_cross_entropy whose probe gets what per_example.linear gives: x (B, T, C), targets (B, T), probe (2, B); link from
    per_example.embedding(..., tied=True). The weight must not be frozen."""
    per_example.tracked("probed_linear_cross_entropy", probe, 2, len(x))
    return ProbedLinearCrossEntropy.apply(x, weight, targets, probe, *(link or (None, None)))


def cross_entropy_in_pieces(logits, targets):
    """The same loss without gradients, logits (N, V) untouched: for evaluation, which then holds them once."""
    rows, wide = rows_per_chunk(*logits.shape), accumulation_dtype(logits)
    total = sum(F.cross_entropy(logits[i:i + rows].to(wide), targets[i:i + rows], reduction="sum")
                for i in range(0, len(logits), rows))
    return total / (targets != IGNORE).sum()
