"""Small vocabularies (classic action spaces): several rows a program, one row of the tile [ROWS, WIDTH] each.

The same functions as for long rows: a logit is a lane of its own, with s = 1 and w = 0 against its own value.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.arithmetic import LOWEST, at_least, rounded
from ppo_kernels.triton_kernels.row_math import (
    column,
    finish,
    gradient,
    gradient_factors,
    known_token,
    load_coefficients,
    load_mask,
    load_stats,
    locate,
    offset_of,
    row_scale,
    scored_row,
    store_stats,
    target_logit,
    where_valid,
)
from ppo_kernels.triton_kernels.rows import combine
from ppo_kernels.triton_kernels.token_loss import row_coefficients

SMALL = 64
TILE = 1024  # logits a program: one row a thread where it fits
RUNTIME = ["inner", "shift", "stride_outer", "stride_inner", "grad_stride_outer", "grad_stride_inner", "n_rows"]


@triton.jit
def tile_sums(x, y, k, cap, ENTROPY: tl.constexpr):
    """(m, s, w) of the rows of x [ROWS, WIDTH] without their targets y [ROWS]; -inf where there is no column."""
    x = tl.where(tl.arange(0, x.shape[1]) == y[:, None], -float("inf"), x)
    s = tl.where(x == x, tl.where(x == -float("inf"), 0.0, 1.0), x)
    return combine(at_least(x, LOWEST), s, tl.zeros_like(x), k, cap, ENTROPY, 1)


@triton.jit
def load_tile(logits, tokens, offset, token, valid, vocab, WIDTH: tl.constexpr):
    """(x [ROWS, WIDTH], y)."""
    y = known_token(tl.load(tokens + token, mask=valid, other=0), vocab)
    column = tl.arange(0, WIDTH)
    there = valid[:, None] & (column < vocab)
    x = tl.load(logits + offset[:, None] + column, mask=there, other=-float("inf")).to(tl.float32)
    return x, y


@triton.jit
def store_gradient(
    grad, offset, here, active, x, y, stats, c, e, vocab, columns, k, per_t, temperatures, cap, ENTROPY: tl.constexpr
):
    """Stores the gradient of the tile's rows at their offsets; zeros where not `active`."""
    logprob, top, total, mean = stats
    of_row = gradient_factors(logprob, top, total, mean, c, e, k, per_t, cap, ENTROPY)
    factors = ()
    for i in tl.static_range(len(of_row)):
        factors = factors + (of_row[i][:, None],)
    i = tl.arange(0, x.shape[1])
    g = gradient(x, i == y[:, None], column(k, temperatures), factors, cap, ENTROPY)
    g = rounded(tl.where(active[:, None] & (i < vocab), g, 0.0), grad.dtype.element_ty)
    tl.store(grad + offset[:, None] + i, g, mask=here[:, None] & (i < vocab))
    for start in range(vocab, columns, x.shape[1]):  # columns that do not exist
        tl.store(grad + offset[:, None] + start + i, 0.0, mask=here[:, None] & (start + i < columns))


@triton.jit(do_not_specialize=RUNTIME)
def small_stats_kernel(
    logits, tokens, valids, outputs, n_rows, inner, shift, stride_outer, stride_inner, vocab, k, per_t,
    temperatures, cap,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = n < n_rows
    valid = load_mask(valids, n, here)
    offset, token = locate(n, inner, shift, stride_outer, stride_inner)
    x, y = load_tile(logits, tokens, offset, token, valid, vocab, WIDTH)
    x_y = target_logit(logits + offset, y, valid)
    k, per_t = row_scale(temperatures, n, valid, k, per_t)
    m, s, w = tile_sums(x, y, column(k, temperatures), cap, ENTROPY)
    store_stats(outputs, n, where_valid(valid, finish(m, s, w, x_y, k, per_t, cap, ENTROPY)), here, ENTROPY)


@triton.jit(do_not_specialize=RUNTIME)
def small_grad_kernel(
    logits, grad, tokens, valids, stats, grad_logprobs, grad_entropies, n_rows,
    inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, vocab, columns, k, per_t,
    temperatures, cap,
    ENTROPY: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = q < n_rows
    scored, n = scored_row(q, inner, shift)
    valid = load_mask(valids, n, here & scored)
    c, e = load_coefficients(grad_logprobs, grad_entropies, n, valid)
    active = valid & ((c != 0) | (e != 0))
    offset = offset_of(q, inner, shift, stride_outer, stride_inner)
    x, y = load_tile(logits, tokens, offset, q + shift, active, vocab, WIDTH)
    row = load_stats(stats, n, active)
    to = offset_of(q, inner, shift, grad_stride_outer, grad_stride_inner)
    k, per_t = row_scale(temperatures, n, active, k, per_t)
    store_gradient(grad, to, here, active, x, y, row, c, e, vocab, columns, k, per_t, temperatures, cap, ENTROPY)


@triton.jit(do_not_specialize=RUNTIME)
def small_fused_kernel(
    logits, grad, tokens, valids, outputs, token_inputs, loss_params, n_rows,
    inner, shift, stride_outer, stride_inner, grad_stride_outer, grad_stride_inner, vocab, columns, k, per_t,
    temperatures, cap,
    ENTROPY: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = q < n_rows
    scored, n = scored_row(q, inner, shift)
    stored = here & scored
    valid = load_mask(valids, n, stored)
    offset = offset_of(q, inner, shift, stride_outer, stride_inner)
    x, y = load_tile(logits, tokens, offset, q + shift, valid, vocab, WIDTH)
    x_y = target_logit(logits + offset, y, valid)
    tl.debug_barrier()  # all have read before one writes
    k, per_t = row_scale(temperatures, n, valid, k, per_t)
    m, s, w = tile_sums(x, y, column(k, temperatures), cap, ENTROPY)
    stats = where_valid(valid, finish(m, s, w, x_y, k, per_t, cap, ENTROPY))
    store_stats(outputs, n, stats, stored, ENTROPY)
    logprob, entropy, top, total, mean = stats
    c, e = row_coefficients(logprob, entropy, token_inputs, n, valid, loss_params)
    to = offset_of(q, inner, shift, grad_stride_outer, grad_stride_inner)
    active = valid & ((c != 0) | (e != 0))
    row = logprob, top, total, mean
    store_gradient(grad, to, here, active, x, y, row, c, e, vocab, columns, k, per_t, temperatures, cap, SPREAD)


def _launch(kernel: Any, rows: launch.Rows, n: int, args: tuple[Any, ...], **constants: Any) -> None:
    width = max(2, triton.next_power_of_2(rows.vocab))
    tile = TILE // width
    constants.update(ROWS=tile, WIDTH=width)
    launch.run(kernel, triton.cdiv(n, tile), args, num_warps=4, device=rows.logits.device, **constants)


def small_row_stats(rows: launch.Rows, outputs: tuple[Tensor, ...], want_entropy: bool) -> None:
    args = (rows.logits, rows.tokens, rows.valid, outputs, rows.n, *rows.numbers(), rows.vocab, *rows.scaling)
    _launch(small_stats_kernel, rows, rows.n, args, ENTROPY=want_entropy)


def small_row_grad(rows: launch.Rows, args: tuple[Any, ...]) -> None:
    args += (rows.all, *rows.numbers(), *rows.grad_strides, rows.vocab, rows.columns, *rows.scaling)
    _launch(small_grad_kernel, rows, rows.all, args, ENTROPY=args[6] is not None)


def small_row_fused(rows: launch.Rows, args: tuple[Any, ...], want_entropy: bool, spread: bool) -> None:
    args += (rows.all, *rows.numbers(), *rows.grad_strides, rows.vocab, rows.columns, *rows.scaling)
    _launch(small_fused_kernel, rows, rows.all, args, ENTROPY=want_entropy, SPREAD=spread)
