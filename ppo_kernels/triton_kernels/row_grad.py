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
    known_token,
    load_coefficients,
    load_mask,
    load_stats,
    offset_of,
    row_scale,
    scored_row,
)
from ppo_kernels.triton_kernels.small_rows import SMALL, small_row_grad

RUNTIME = ["inner", "shift", "stride_outer", "stride_inner", "grad_stride_outer", "grad_stride_inner", "parts"]


HEAD = tl.constexpr(16)  # at least as many elements as may lie before a multiple of 16 bytes


@triton.jit
def head_of(x):
    """(elements of x before its first multiple of 16 bytes, x from there on)."""
    address = x.to(tl.int64)
    start = (address + 15) & -16
    head = (start - address) // (x.dtype.element_ty.primitive_bitwidth // 8)
    return head.to(tl.int32), tl.multiple_of(start.to(x.dtype), 16)


@triton.jit
def store_zeros(grad, first, last, columns, BLOCK: tl.constexpr):
    """Zeros in blocks [first, last) of a row, which start after its head; the head belongs to block 0."""
    head, to = head_of(grad)
    zeros = tl.zeros([BLOCK], grad.dtype.element_ty)
    if first == 0:
        column = tl.arange(0, HEAD)
        tl.store(grad + column, tl.zeros([HEAD], grad.dtype.element_ty), mask=column < tl.minimum(head, columns))
    column = tl.arange(0, BLOCK)
    for block in range(first, last):
        left = columns - head - block * BLOCK
        if left >= BLOCK:
            tl.store(to + block * BLOCK + column, zeros)
        else:
            tl.store(to + block * BLOCK + column, zeros, mask=column < left)


@triton.jit
def store_special(
    row, grad, start, y, vocab, columns, k, factors, cap,
    ENTROPY: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The gradient of columns [start, start + SIZE), one of which may be the target's.

    Without WHOLE they may be padding (0) or not exist.
    """
    column = tl.arange(0, SIZE)
    if WHOLE:
        x = tl.load(row + start + column).to(tl.float32)
        g = gradient(x, column == y - start, k, factors, cap, ENTROPY)
        tl.store(grad + start + column, rounded(g, grad.dtype.element_ty))
    else:
        exists = column < vocab - start
        x = tl.load(row + start + column, mask=exists, other=-float("inf")).to(tl.float32)
        g = tl.where(exists, gradient(x, column == y - start, k, factors, cap, ENTROPY), 0.0)
        tl.store(grad + start + column, rounded(g, grad.dtype.element_ty), mask=column < columns - start)


@triton.jit
def store_gradient(
    row, grad, first, last, y, vocab, columns, k, factors, cap,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr, CONGRUENT: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """The gradient of blocks [first, last) of a row: whole blocks without the target, the target's, then the others.

    y: the target as int32, negative if it is outside the vocabulary. Blocks start at a multiple of 16 bytes, after the
    head of the row, which belongs to block 0. That needs logits and gradient to be CONGRUENT modulo 16 bytes; otherwise
    elements are read and written one by one.
    """
    if CONGRUENT:
        head, row_from = head_of(row)
        _, grad_from = head_of(grad)
        if first == 0:
            of_head = tl.minimum(vocab, head), tl.minimum(columns, head)
            store_special(row, grad, 0, y, of_head[0], of_head[1], k, factors, cap, ENTROPY, False, HEAD)
    else:
        head, row_from, grad_from = 0, row, grad
    vocab, columns, y = vocab - head, columns - head, y - head
    PART: tl.constexpr = BLOCK // 4  # of a block that is not plain: it takes more registers
    column = tl.arange(0, BLOCK)
    whole = vocab // BLOCK
    target = tl.where(y >= 0, y // BLOCK, -1)
    plain = tl.minimum(last, whole)
    mine = (target >= first) & (target < plain)
    end = plain - mine.to(tl.int32)
    for step in range(first, end):
        i = step
        if REVERSED:
            i = first + end - 1 - step
        block = i + (mine & (i >= target)).to(tl.int32)
        x = tl.load(row_from + block * BLOCK + column).to(tl.float32)
        g = rounded(gradient(x, None, k, factors, cap, ENTROPY), grad.dtype.element_ty)
        tl.store(grad_from + block * BLOCK + column, g)
    if mine:
        for start in range(target * BLOCK, (target + 1) * BLOCK, PART):
            store_special(row_from, grad_from, start, y, vocab, columns, k, factors, cap, ENTROPY, True, PART)
    for start in range(tl.maximum(first, whole) * BLOCK, last * BLOCK, PART):
        store_special(row_from, grad_from, start, y, vocab, columns, k, factors, cap, ENTROPY, False, PART)


@triton.jit(do_not_specialize=RUNTIME)
def row_grad_kernel(
    logits, grad, tokens, valids, stats, grad_logprobs, grad_entropies,
    inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, parts, vocab, columns, k, per_t,
    temperatures, cap,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, CONGRUENT: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    q, part = pid // parts, pid % parts
    first = part * BLOCKS
    last = tl.minimum(first + BLOCKS, tl.cdiv(columns, BLOCK).to(tl.int32))
    to = grad + offset_of(q, inner, shift, grad_stride_outer, grad_stride_inner)
    scored, n = scored_row(q, inner, shift)
    valid = load_mask(valids, n, scored)
    c, e = load_coefficients(grad_logprobs, grad_entropies, n, valid)
    if (c != 0) | (e != 0):
        y = known_token(tl.load(tokens + q + shift), vocab)
        logprob, top, total, mean = load_stats(stats, n, valid)
        k, per_t = row_scale(temperatures, n, valid, k, per_t)
        factors = gradient_factors(logprob, top, total, mean, c, e, k, per_t, cap, ENTROPY)
        row = logits + offset_of(q, inner, shift, stride_outer, stride_inner)
        store_gradient(row, to, first, last, y, vocab, columns, k, factors, cap, ENTROPY, BLOCK, CONGRUENT, False)
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
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
    *coefficients: Tensor | None,
) -> None:
    rows = launch.Rows(logits, tokens, valid, temperature, row_temperature, softcap, vocab_size, shift, grad)
    logprobs, row_max, row_sum, row_mean, grad_logprobs, grad_entropy = map(launch.flat, coefficients)
    stats = logprobs, row_max, row_sum, row_mean if grad_entropy is not None else None
    args = (rows.logits, grad, rows.tokens, rows.valid, stats, grad_logprobs, grad_entropy)
    if vocab_size <= SMALL:
        small_row_grad(rows, args)
        return
    block = launch.grad_block(rows.columns, logits.element_size())
    warps = launch.grad_warps(block, logits.element_size())
    if rows.cap is not None:
        block //= 2  # fewer columns a thread, for each takes more registers
    parts = triton.cdiv(rows.columns, block * launch.GRAD_BLOCKS)
    launch.run(
        row_grad_kernel,
        rows.all * parts,
        (*args, *rows.numbers(), *rows.grad_strides, parts, vocab_size, rows.columns, *rows.scaling),
        num_warps=warps,
        device=logits.device,
        ENTROPY=grad_entropy is not None,
        BLOCK=block,
        BLOCKS=launch.GRAD_BLOCKS,
        CONGRUENT=rows.congruent,
    )
