"""The Triton (CUDA) kernels of ln_kernel.py: forward(...) and backward(...), same arguments and results as its ref.

Never run on a real GPU. Tested in Triton's interpreter (TRITON_INTERPRET=1) and compiled for sm_80 and sm_90:
`python bench.py triton` prints registers, spills and global traffic.

One program holds whole rows in registers, so the backward pass reads x and dy once and writes dx once. Each program
works on one part of one example and keeps that example's dweight and dbias in registers; the parts, small against x
(ROWS_PER_PART), are added up by a second kernel, in a fixed order: no atomics, the same bits in every run.
A row must fit the registers of one program: fine up to C = 16384; above, it spills and slows down.

pid -> (example b, part). rows = B * T.
"""

import torch
import triton
import triton.language as tl

ROWS_PER_PART = 32   # at least: partial sums are 8 bytes per channel and part, against 6 to 12 per channel and row


@triton.jit
def forward_kernel(x, w, b, y, stats, rows, C, eps,      # x, y (rows, C); w, b (C,); stats (1 or 2, rows)
                   RMS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    centred = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    if not RMS:
        mean = tl.sum(centred, 0) / C
        centred = tl.where(mask, centred - mean, 0.0)
        tl.store(stats + rows + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    tl.store(stats + row, rstd)
    out = centred * rstd * tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(b + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * C + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(dy, x, w, stats, dx, partials,       # dy, x, dx (rows, C); w (C,); partials (B, parts, 1 or 2, C)
                    rows, T, C, parts, RMS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    b, part = pid // parts, pid % parts
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    weight = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(b * T + part * T // parts, b * T + (part + 1) * T // parts):
        d = tl.load(dy + row * C + cols, mask=mask, other=0.0).to(tl.float32)   # 0 past C: adds nothing to any sum
        xhat = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(stats + row)
        if RMS:
            xhat = xhat * rstd
        else:
            xhat = (xhat - tl.load(stats + rows + row)) * rstd
        g = d * weight
        grad = g - xhat * (tl.sum(g * xhat, 0) / C)
        if not RMS:
            grad -= tl.sum(g, 0) / C
        tl.store(dx + row * C + cols, (grad * rstd).to(dx.dtype.element_ty), mask=mask)
        dw += d * xhat
        if BIAS:
            db += d
    KINDS: tl.constexpr = 2 if BIAS else 1
    tl.store(partials + pid * KINDS * C + cols, dw, mask=mask)
    if BIAS:
        tl.store(partials + (pid * KINDS + 1) * C + cols, db, mask=mask)


@triton.jit
def finish_kernel(partials, metric, c, sq, B, C, parts,  # metric (kinds, C); c (kinds, B, C); sq (1 or 2, kinds, B)
                  METRIC: tl.constexpr, BLOCK: tl.constexpr):
    b, kind, kinds = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(parts):
        total += tl.load(partials + ((b * parts + part) * kinds + kind) * C + cols, mask=mask, other=0.0)
    tl.store(c + (kind * B + b) * C + cols, total, mask=mask)
    tl.store(sq + kind * B + b, tl.sum(total * total, 0))
    if METRIC:
        p = tl.load(metric + kind * C + cols, mask=mask, other=0.0)
        tl.store(sq + (kinds + kind) * B + b, tl.sum(total * total * p, 0))


def forward(x, weight, bias, eps, rms, out_dtype):
    x, C = x.contiguous(), x.shape[-1]
    rows = x.numel() // C
    y = torch.empty_like(x, dtype=out_dtype)
    stats = x.new_empty((1 if rms else 2, rows), dtype=torch.float32)
    with torch.cuda.device_of(x):   # Triton launches on the current device
        forward_kernel[(rows,)](x, weight.contiguous(), None if bias is None else bias.contiguous(), y, stats, rows, C,
                                eps, RMS=rms, BIAS=bias is not None, **launch(C))
    return y, stats


def backward(dy, x, weight, stats, metric, rms, has_bias, tracked):
    dy, x, B, C = dy.contiguous(), x.contiguous(), x.shape[0], x.shape[-1]
    rows, kinds = stats.shape[1], 2 if has_bias else 1
    parts = max(1, min(rows // B // ROWS_PER_PART, -(-_programs_wanted(x) // B)))
    dx, partials = torch.empty_like(x), x.new_empty((B, parts, kinds, C), dtype=torch.float32)
    c = x.new_empty((kinds, B, C), dtype=torch.float32)
    sq = x.new_empty((1 if metric is None else 2, kinds, B), dtype=torch.float32)
    if metric is not None:
        metric = metric[:kinds].float().contiguous()
    with torch.cuda.device_of(x):
        backward_kernel[(B * parts,)](dy, x, weight.contiguous(), stats, dx, partials, rows, rows // B, C, parts,
                                      RMS=rms, BIAS=has_bias, **launch(C))
        finish_kernel[(B, kinds)](partials, metric, c, sq, B, C, parts, METRIC=metric is not None, **launch(C))
    if not rms and not has_bias:   # its probe still has bias rows: they are 0
        sq = torch.cat([sq, torch.zeros_like(sq)], 1)
    dw, *db = (v.sum(0).to(weight.dtype) for v in c)
    return dx, dw, db[0] if has_bias else None, sq.flatten(0, 1) if tracked else None


def try_launch():
    """Triton compiles its launcher in C at the first launch: better found out here than within a step."""
    try:
        x = torch.ones(1, 1, 16, device="cuda")
        forward(x, x[0, 0], None, 1e-5, True, x.dtype)
        torch.cuda.synchronize()
    except Exception as e:   # of a compiler, a linker, a driver
        raise RuntimeError("Triton cannot launch a kernel: install a C compiler (gcc), Python's headers (python3-dev) and a "
                           f"driver that is new enough for this torch ({type(e).__name__}: {' '.join(str(e).split())})") from e


def launch(C):
    """A row in one block, 8 to 16 channels per thread: wide loads, and x, dy, w and both sums fit in registers."""
    block = triton.next_power_of_2(C)
    warps = min(32, max(1, block // (256 if block <= 4096 else 512)))
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": True}


def _programs_wanted(x):
    """A few per multiprocessor, so that all are busy to the end."""
    return 4 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
