"""The gradient of rows of logits from their stats and coefficients: the vocabulary is read once and written once.

One program a part of a row: BLOCKS blocks of BLOCK columns. Rows without a coefficient are zeroed without being read.
The gradient may take the place of the logits: each thread writes only what it has read itself.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.strides import in_place
from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.arithmetic import rounded
from ppo_kernels.triton_kernels.row_math import (
    gradient,
    gradient_factors,
    load_coefficients,
    load_mask,
    load_stats,
    offset_of,
    scored_row,
)
from ppo_kernels.triton_kernels.small_rows import SMALL, small_row_grad

RUNTIME = ["inner", "shift", "stride_outer", "stride_inner", "grad_stride_outer", "grad_stride_inner", "parts"]


@triton.jit
def aligned_row(x, offset, ALIGNED: tl.constexpr):
    """x + offset, known to start at a multiple of 16 bytes or not."""
    if ALIGNED:
        return tl.multiple_of(x + offset, 16)
    else:
        return x + offset


@triton.jit
def store_zeros(grad, first, last, columns, BLOCK: tl.constexpr):
    """Zeros in blocks [first, last) of a row."""
    column = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], grad.dtype.element_ty)
    for block in range(first, last):
        start = block * BLOCK
        if start + BLOCK <= columns:
            tl.store(grad + start + column, zeros)
        else:
            tl.store(grad + start + column, zeros, mask=column < columns - start)


@triton.jit
def store_gradient(
    row, grad, first, last, y, vocab, columns, k, factors, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
    REVERSED: tl.constexpr,
):  # fmt: skip
    """The gradient of blocks [first, last) of a row: whole blocks without the target, then the others."""
    column = tl.arange(0, BLOCK)
    dtype: tl.constexpr = grad.dtype.element_ty
    whole = (vocab // BLOCK).to(tl.int32)
    target = tl.where(y >= 0, y // BLOCK, -1).to(tl.int32)
    plain = tl.minimum(last, whole)
    mine = (target >= first) & (target < plain)
    end = plain - mine.to(tl.int32)
    for step in range(first, end):
        i = step
        if REVERSED:
            i = first + end - 1 - step
        block = i + (mine & (i >= target)).to(tl.int32)
        start = block * BLOCK
        x = tl.load(row + start + column).to(tl.float32)
        tl.store(grad + start + column, rounded(gradient(x, None, k, factors, ENTROPY), dtype))
    for block in range(first, last):
        if (block == target) | (block >= whole):
            start = block * BLOCK
            exists = column < vocab - start
            x = tl.load(row + start + column, mask=exists, other=-float("inf")).to(tl.float32)
            g = gradient(x, column == y - start, k, factors, ENTROPY)
            g = rounded(tl.where(exists, g, 0.0), dtype)
            tl.store(grad + start + column, g, mask=column < columns - start)


@triton.jit(do_not_specialize=RUNTIME)
def row_grad_kernel(
    logits, grad, tokens, valids, stats, grad_logprobs, grad_entropies,
    inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, parts, vocab, columns, k, per_t,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    q, part = pid // parts, (pid % parts).to(tl.int32)
    first = part * BLOCKS
    last = tl.minimum(first + BLOCKS, tl.cdiv(columns, BLOCK).to(tl.int32))
    to = aligned_row(grad, offset_of(q, inner, shift, grad_stride_outer, grad_stride_inner), GRAD_ALIGNED)
    scored, n = scored_row(q, inner, shift)
    valid = load_mask(valids, n, scored)
    c, e = load_coefficients(grad_logprobs, grad_entropies, n, valid)
    if (c != 0) | (e != 0):
        y = tl.load(tokens + q + shift).to(tl.int64)
        logprob, _, top, total, mean = load_stats(stats, n, valid)
        factors = gradient_factors(logprob, top, total, mean, c, e, k, per_t, ENTROPY)
        row = aligned_row(logits, offset_of(q, inner, shift, stride_outer, stride_inner), ALIGNED)
        store_gradient(row, to, first, last, y, vocab, columns, k, factors, ENTROPY, BLOCK, False)
    else:
        store_zeros(to, first, last, columns, BLOCK)


def row_grad(logits: Tensor, *args: Any) -> Tensor:
    """The operator ppo_kernels::row_grad."""
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_grad_into(grad, logits, *args)
    return grad


def row_grad_(logits: Tensor, *args: Any) -> None:
    """The operator ppo_kernels::row_grad_."""
    in_place(row_grad_into, logits, *args)


def row_grad_into(
    grad: Tensor,
    logits: Tensor,
    tokens: Tensor,
    valid: Tensor | None,
    temperature: float,
    vocab_size: int,
    shift: bool,
    *coefficients: Tensor | None,
) -> None:
    rows = launch.Rows(logits, tokens, valid, temperature, vocab_size, shift, grad)
    logprobs, row_max, row_sum, row_mean, grad_logprobs, grad_entropy = map(launch.flat, coefficients)
    stats = logprobs, row_max, row_sum, row_mean if grad_entropy is not None else None
    args = (rows.logits, grad, rows.tokens, rows.valid, stats, grad_logprobs, grad_entropy)
    if vocab_size <= SMALL:
        small_row_grad(rows, args)
        return
    block = launch.grad_block(rows.columns, logits.element_size())
    parts = triton.cdiv(rows.columns, block * launch.GRAD_BLOCKS)
    launch.run(
        row_grad_kernel,
        rows.all * parts,
        (*args, *rows.numbers(), *rows.grad_strides, parts, vocab_size, rows.columns, rows.k, rows.per_t),
        num_warps=launch.grad_warps(block, logits.element_size()),
        device=logits.device,
        ENTROPY=grad_entropy is not None,
        BLOCK=block,
        BLOCKS=launch.GRAD_BLOCKS,
        ALIGNED=rows.aligned,
        GRAD_ALIGNED=rows.grad_aligned,
    )
