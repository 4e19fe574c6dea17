"""The Triton (CUDA) kernels of ln_kernel.py: forward, backward and tap, as backends.py lists them.

Never run on a real GPU. Tested in Triton's interpreter (TRITON_INTERPRET=1) and compiled for sm_80, sm_90 and sm_100:
`python bench.py triton` prints registers, spills, barriers and global traffic.

Backward. A program works on one part of one example, row by row: a row stays in registers, so that x and dy are read once
and dx is written once, and so do that part's sums for dweight and dbias. The parts, small against x, are added up by a
second kernel, in a fixed order: no atomics, the same bits in every run. One wave of programs: as many as the device keeps
resident, whatever B is. Rows too long for registers (WHOLE_ROW) are cut into tiles of channels, whose programs get the row's
two means from a kernel before them: x and dy are then read twice.

tap: the per-example sums alone, of a norm layer that somebody else computes; x and dy are read once.

x + branch is formed on the way, as residual streams need it, and its gradient goes to both. Otherwise the addition and its
backward pass would be a read and a write of the residual stream each, which the compiler cannot fuse into our kernels.

rows = B * T. A kernel's pointer that is None leaves out what belongs to it.
"""

import torch
import triton
import triton.language as tl

MIN_ROWS = 8        # of a part: its sums are 8 bytes per channel, against 8 to 16 per channel and row
WHOLE_ROW = 4096    # channels: beyond, dweight, dbias, x, dy and the sum's gradient do not fit into a program's registers
TILE = 2048         # channels of a program where a row is cut
REGISTERS = 80      # of a thread of the backward pass: with fewer some spill, and with more fewer programs are resident
FINISH = {"PARTS": 64, "TILE": 32, "num_warps": 4}   # sums of so many parts and channels at a time


@triton.jit
def forward_kernel(x, branch, w, b, total, y, stats,     # x, branch, total, y (rows, C); w, b (C,); stats (1 or 2, rows)
                   rows, C, eps, RMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    centred = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    if branch is not None:
        centred += tl.load(branch + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = centred.to(total.dtype.element_ty)
        tl.store(total + row * C + cols, rounded, mask=mask)
        centred = rounded.to(tl.float32)   # what the backward pass will read
    if not RMS:
        mean = tl.sum(centred, 0) / C
        centred = tl.where(mask, centred - mean, 0.0)
        tl.store(stats + rows + row, mean)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / C + eps)
    tl.store(stats + row, rstd)
    out = centred * rstd * tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    if b is not None:
        out += tl.load(b + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * C + cols, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def normalised(x, stats, row, rows, C, cols, mask, RMS: tl.constexpr):
    """xhat of some channels of a row, and its rstd."""
    xhat = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(stats + row)
    if not RMS:
        xhat -= tl.load(stats + rows + row)
    return xhat * rstd, rstd


@triton.jit
def both_sums(a, b):
    """Two sums over the threads of a program in one exchange."""
    return tl.split(tl.sum(tl.join(a, b), 0))


@triton.jit
def means_kernel(dy, x, w, stats, means, rows, C,        # means (2, rows) of w dy xhat and of w dy
                 RMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gx = tl.zeros([BLOCK], tl.float32)
    g = tl.zeros([BLOCK], tl.float32)
    for start in range(0, C, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < C
        own = tl.load(dy + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        own *= tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
        xhat, _ = normalised(x, stats, row, rows, C, cols, mask, RMS)
        gx += own * xhat
        g += own
    sum_gx, sum_g = both_sums(gx, g)
    tl.store(means + row, sum_gx / C)
    tl.store(means + rows + row, sum_g / C)


@triton.jit
def backward_kernel(dy, x, w, stats, means, dtotal, dx, dbranch, partials,   # partials (B, parts, 1 or 2, C)
                    rows, T, C, parts, RMS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    b, part = pid // parts, pid % parts
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < C
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(b * T + part * T // parts, b * T + (part + 1) * T // parts):
        d = tl.load(dy + row * C + cols, mask=mask, other=0.0).to(tl.float32)   # 0 past C: adds nothing to any sum
        xhat, rstd = normalised(x, stats, row, rows, C, cols, mask, RMS)
        dw += d * xhat
        if BIAS:
            db += d
        g = d * tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)   # from the cache: registers are scarce
        if means is not None:
            grad = g - xhat * tl.load(means + row)
            if not RMS:
                grad -= tl.load(means + rows + row)
        elif RMS:
            grad = g - xhat * (tl.sum(g * xhat, 0) / C)
        else:
            sum_gx, sum_g = both_sums(g * xhat, g)
            grad = g - xhat * (sum_gx / C) - sum_g / C
        grad *= rstd
        if dtotal is not None:
            grad += tl.load(dtotal + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * C + cols, grad.to(dx.dtype.element_ty), mask=mask)
        if dbranch is not None:
            tl.store(dbranch + row * C + cols, grad.to(dbranch.dtype.element_ty), mask=mask)
    KINDS: tl.constexpr = 2 if BIAS else 1
    tl.store(partials + pid * KINDS * C + cols, dw, mask=mask)
    if BIAS:
        tl.store(partials + (pid * KINDS + 1) * C + cols, db, mask=mask)


@triton.jit
def finish_kernel(partials, metric, grad, sq,            # metric, grad (KINDS, C); sq (tiles, rows of the probe, B) or None
                  B, C, parts, KINDS: tl.constexpr, SITES: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr):
    tile, kind = tl.program_id(0), tl.program_id(1)
    cols = tile * TILE + tl.arange(0, TILE)
    mask = cols < C
    total = tl.zeros([TILE], tl.float32)
    PLANES: tl.constexpr = SITES if metric is None else 2 * SITES   # the probe's rows: kinds, and again in the metric
    for b in range(B):
        c = tl.zeros([TILE], tl.float32)
        for start in range(0, parts, PARTS):
            part = (start + tl.arange(0, PARTS))[:, None]
            at = ((b * parts + part).to(tl.int64) * KINDS + kind) * C + cols[None, :]
            c += tl.sum(tl.load(partials + at, mask=(part < parts) & mask[None, :], other=0.0), 0)
        total += c
        if sq is not None:
            tl.store(sq + (tile * PLANES + kind) * B + b, tl.sum(c * c, 0))
            if metric is not None:
                p = tl.load(metric + kind * C + cols, mask=mask, other=0.0)
                tl.store(sq + (tile * PLANES + SITES + kind) * B + b, tl.sum(c * c * p, 0))
            if KINDS < SITES:   # a LayerNorm without a bias: the probe has rows for it, which are zero
                for plane in tl.static_range(KINDS, PLANES, SITES):
                    tl.store(sq + (tile * PLANES + plane) * B + b, 0.0)
    tl.store(grad + kind * C + cols, total.to(grad.dtype.element_ty), mask=mask)


@triton.jit
def tap_kernel(dy, x, partials, T, C, parts, eps,        # partials (B, parts, 1 or 2, C)
               RMS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    b, part = pid // parts, pid % parts
    cols = tl.arange(0, BLOCK)
    mask = cols < C
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(b * T + part * T // parts, b * T + (part + 1) * T // parts):
        xhat = tl.load(x + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            xhat = tl.where(mask, xhat - tl.sum(xhat, 0) / C, 0.0)
        xhat *= 1.0 / tl.sqrt(tl.sum(xhat * xhat, 0) / C + eps)
        d = tl.load(dy + row * C + cols, mask=mask, other=0.0).to(tl.float32)
        dw += d * xhat
        if BIAS:
            db += d
    KINDS: tl.constexpr = 2 if BIAS else 1
    tl.store(partials + pid * KINDS * C + cols, dw, mask=mask)
    if BIAS:
        tl.store(partials + (pid * KINDS + 1) * C + cols, db, mask=mask)


def tap(dy, x, eps, rms, bias):
    """(B, C or 2C), or None: a row that is too long for registers."""
    dy, x, B, C = dy.contiguous(), x.contiguous(), x.shape[0], x.shape[-1]
    T, kinds = x.numel() // (B * C), 2 if bias else 1
    parts, tiles, options = plan(B, T, C, multiprocessors(x))
    if tiles > 1:
        return None
    partials = x.new_empty((B, parts, kinds * C), dtype=torch.float32)
    with torch.cuda.device_of(x):
        tap_kernel[(B * parts,)](dy, x, partials, T, C, parts, eps, RMS=rms, BIAS=bias, **options)
    return partials.sum(1)


def forward(x, branch, weight, bias, eps, rms, out_dtype):
    """x + branch (None if there is no branch), its norm, stats."""
    x, C = x.contiguous(), x.shape[-1]
    rows = x.numel() // C
    y = torch.empty_like(x, dtype=out_dtype)
    stats = x.new_empty((1 if rms else 2, rows), dtype=torch.float32)
    branch = None if branch is None else branch.contiguous()
    total = x if branch is None else torch.empty_like(x)
    with torch.cuda.device_of(x):   # Triton launches on the current device
        forward_kernel[(rows,)](x, branch, weight.contiguous(), None if bias is None else bias.contiguous(), total, y, stats,
                                rows, C, eps, RMS=rms, **launch(C))
    return None if branch is None else total, y, stats


def backward(dtotal, dy, x, weight, stats, metric, rms, has_bias, tracked, branch_dtype):
    """dx, dbranch (None without a branch_dtype; dx itself where that is x's), dweight, dbias or None, sq or None."""
    dy, x, weight, B, C = dy.contiguous(), x.contiguous(), weight.contiguous(), x.shape[0], x.shape[-1]
    dtotal = None if dtotal is None else dtotal.contiguous()
    rows, kinds, sites = stats.shape[1], 2 if has_bias else 1, 1 if rms else 2
    parts, tiles, options = plan(B, rows // B, C, multiprocessors(x))
    dx, partials = torch.empty_like(x), x.new_empty((B, parts, kinds, C), dtype=torch.float32)
    dbranch = torch.empty_like(x, dtype=branch_dtype) if branch_dtype not in (None, x.dtype) else None
    grad, sq = weight.new_empty((kinds, C)), None
    if tracked:
        sq = stats.new_empty((-(-C // FINISH["TILE"]), sites * (1 if metric is None else 2), B))
    if metric is not None:
        metric = metric[:kinds].float().contiguous()
    with torch.cuda.device_of(x):
        means = None
        if tiles > 1:
            means = stats.new_empty((2, rows))
            means_kernel[(rows,)](dy, x, weight, stats, means, rows, C, RMS=rms, **options)
        backward_kernel[(B * parts, tiles)](dy, x, weight, stats, means, dtotal, dx, dbranch, partials, rows, rows // B, C,
                                            parts, RMS=rms, BIAS=has_bias, **options)
        finish_kernel[(-(-C // FINISH["TILE"]), kinds)](partials, metric, grad, sq, B, C, parts, KINDS=kinds, SITES=sites,
                                                        **FINISH)
    dbranch = dx if branch_dtype == x.dtype else dbranch
    return dx, dbranch, grad[0], grad[1] if has_bias else None, sq.sum(0) if tracked else None


def try_launch():
    """Triton compiles its launcher in C at the first launch: better found out here than within a step."""
    try:
        x = torch.ones(1, 1, 16, device="cuda")
        forward(x, None, x[0, 0], None, 1e-5, True, x.dtype)
        torch.cuda.synchronize()
    except Exception as e:   # of a compiler, a linker, a driver
        raise RuntimeError("Triton cannot launch a kernel: install a C compiler (gcc), Python's headers (python3-dev) and a "
                           f"driver that is new enough for this torch ({type(e).__name__}: {' '.join(str(e).split())})") from e


def launch(C):
    """A row in one block, 8 to 16 channels per thread: wide loads, and all that a row needs fits in registers."""
    block = triton.next_power_of_2(C)
    warps = min(32, max(1, block // (256 if block <= 4096 else 512)))
    return {"BLOCK": block, "num_warps": warps, "enable_fp_fusion": True}


def plan(B, T, C, multiprocessors):
    """(parts of an example, tiles of a row, launch options) of the backward pass: one wave of programs."""
    tiles = 1 if C <= WHOLE_ROW else -(-C // TILE)
    options = launch(C) | {"maxnreg": REGISTERS} if tiles == 1 else launch(TILE)   # which stays below without being told
    resident = max(1, 65536 // (REGISTERS * 32 * options["num_warps"]))   # registers of a multiprocessor
    return max(1, min(T // MIN_ROWS, multiprocessors * resident // (B * tiles))), tiles, options


def multiprocessors(x):
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
