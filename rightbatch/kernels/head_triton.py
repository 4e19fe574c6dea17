"""The cross entropy of head_loss.py on CUDA, in Triton: two passes over a row of logits (read; read and write: 6 bytes a
logit in bf16), where torch's operations, one after the other, make a pass each.

Never run on a real GPU; tested in Triton's interpreter and compiled for sm_80, sm_90 and sm_100 (python bench.py triton).
"""

import torch
import triton
import triton.language as tl

OPTIONS = {"BLOCK": 4096, "num_warps": 8}


@triton.jit
def cross_entropy_kernel(logits, targets, losses, stride, V, BLOCK: tl.constexpr):   # logits (n, V); targets, losses (n,)
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    target = tl.load(targets + row)
    kept = target >= 0                       # head_loss.IGNORE is below
    own = tl.load(at + target, mask=kept, other=0.0).to(tl.float32)
    top = tl.full([BLOCK], -float("inf"), tl.float32)   # largest logit so far, and the sum of exp(logit - top): one per lane
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        e = tl.load(at + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        above = tl.where(e > top, e, top)
        shift = tl.where(above == -float("inf"), 0.0, above)   # lanes that have seen nothing: exp(-inf) and not exp(nan)
        total = total * tl.exp(top - shift) + tl.exp(e - shift)
        top = above
    whole = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - whole), 0)
    tl.store(losses + row, tl.where(kept, whole + tl.log(total) - own, 0.0))
    tl.debug_barrier()   # own is read before another thread overwrites it
    for start in range(0, V, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        e = tl.load(at + cols, mask=cols < V, other=-float("inf")).to(tl.float32)
        softmax = tl.exp(e - whole) / total - tl.where(cols == target, 1.0, 0.0)
        tl.store(at + cols, tl.where(kept, softmax, 0.0).to(logits.dtype.element_ty), mask=cols < V)


def softmax_minus_onehot_(logits, targets, losses):
    """Overwrites logits (n, V) and losses (n,), in float32."""
    with torch.cuda.device_of(logits):
        cross_entropy_kernel[(len(logits),)](logits, targets.contiguous(), losses, logits.stride(0), logits.shape[1], **OPTIONS)
