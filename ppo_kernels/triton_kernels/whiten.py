"""Whitening in two launches: count, mean and squared deviations of each program's elements; then every program adds
those up (Chan et al. 1979), in order, and whitens its own. All in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.row_math import load_mask

PARTS = 512  # partial results read at a time


@triton.jit
def moments_kernel(x, valids, moments, size, BLOCK: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    valid = load_mask(valids, at, at < size)
    value = tl.load(x + at, mask=valid, other=0.0).to(tl.float64)
    count = tl.sum(valid.to(tl.float64), 0)
    mean = tl.sum(value, 0) / tl.maximum(count, 1.0)
    off = tl.where(valid, value - mean, 0.0)
    tl.store(moments + pid * 3, count)
    tl.store(moments + pid * 3 + 1, mean)
    tl.store(moments + pid * 3 + 2, tl.sum(off * off, 0))


@triton.jit
def whiten_kernel(
    x, valids, moments, out, size, programs, eps, unbiased, shift_mean,
    EPS_ON: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    count = tl.zeros([PARTS], tl.float64)
    total = tl.zeros([PARTS], tl.float64)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        n = tl.load(moments + part * 3, mask=part < programs, other=0.0)
        count += n
        total += n * tl.load(moments + part * 3 + 1, mask=part < programs, other=0.0)
    all_count = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(all_count, 1.0)
    squares = tl.zeros([PARTS], tl.float64)
    for start in range(0, programs, PARTS):
        part = start + tl.arange(0, PARTS)
        n = tl.load(moments + part * 3, mask=part < programs, other=0.0)
        off = tl.load(moments + part * 3 + 1, mask=part < programs, other=0.0) - mean
        inside = tl.load(moments + part * 3 + 2, mask=part < programs, other=0.0)
        squares += tl.where(n > 0, inside + n * off * off, 0.0)
    variance = tl.sum(squares, 0) / tl.maximum(all_count - unbiased, 1.0)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = load_mask(valids, at, at < size)
    off = tl.load(x + at, mask=valid, other=0.0).to(tl.float64) - mean
    if EPS_ON == "std":
        deviation = tl.sqrt(variance) + eps
    elif EPS_ON == "var":
        deviation = tl.sqrt(variance + eps)
    else:
        deviation = tl.sqrt(tl.where(variance < eps, eps, variance))
    whitened = tl.where(off == 0, 0.0, off / deviation) + tl.where(shift_mean != 0, 0.0, mean)
    tl.store(out + at, tl.where(valid, whitened, 0.0).to(tl.float32), mask=at < size)


def whiten(x: Tensor, valid: Tensor | None, shift_mean: bool, unbiased: bool, eps: float, eps_on: str) -> Tensor:
    """The operator ppo_kernels::whiten."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    dense, valids, size = x.contiguous(), launch.flat(valid, torch.bool), x.numel()
    block = 1024 if size <= 2**20 else 8192  # every program reads the results of all others
    programs = triton.cdiv(size, block)
    moments = torch.empty(programs, 3, dtype=torch.float64, device=x.device)
    launch.run(moments_kernel, programs, (dense, valids, moments, size), num_warps=4, device=x.device, BLOCK=block)
    args = (dense, valids, moments, out, size, programs, eps, float(unbiased), int(shift_mean))
    options = {"EPS_ON": eps_on, "BLOCK": block, "PARTS": PARTS}
    launch.run(whiten_kernel, programs, args, num_warps=4, device=x.device, **options)
    return out
