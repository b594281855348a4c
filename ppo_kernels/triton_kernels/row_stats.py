"""Log-prob, entropy, maximum and sum of rows of logits: the vocabulary is read once, nothing of its size is written.

One program a split of a row. A row of one split is finished on the spot; the sums of more go through memory (12 bytes a
split) to a second kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.arithmetic import LOWEST
from ppo_kernels.triton_kernels.row_math import (
    column,
    finish,
    known_token,
    load_mask,
    locate,
    row_scale,
    store_stats,
    target_logit,
    where_valid,
)
from ppo_kernels.triton_kernels.rows import combine, split_sums
from ppo_kernels.triton_kernels.small_rows import SMALL, small_row_stats

FINISH_ROWS = 32  # a program of row_finish_kernel
RUNTIME = ["inner", "shift", "stride_outer", "stride_inner", "splits", "n_rows"]  # no kernel of its own for any value


@triton.jit
def store_partial(partials, n, split, splits, m, s, w, ENTROPY: tl.constexpr):
    to = partials + (n.to(tl.int64) * splits + split) * 3
    tl.store(to, m)
    tl.store(to + 1, s)
    if ENTROPY:
        tl.store(to + 2, w)


@triton.jit
def row_sums(partials, splits, mask, k, cap, ENTROPY: tl.constexpr, SPLITS: tl.constexpr, AXIS: tl.constexpr):
    """(m, s, w) of rows from those of their splits. partials: where a row's begin, a scalar or [R, 1]."""
    split = tl.arange(0, SPLITS)
    there = mask & (split < splits)
    m = tl.load(partials + split * 3, mask=there, other=LOWEST)
    s = tl.load(partials + split * 3 + 1, mask=there, other=0.0)
    w = s
    if ENTROPY:
        w = tl.load(partials + split * 3 + 2, mask=there, other=0.0)
    return combine(m, s, w, k, cap, ENTROPY, AXIS)


@triton.jit(do_not_specialize=RUNTIME)
def row_stats_kernel(
    logits, tokens, valids, outputs, partials,
    inner, shift, stride_outer, stride_inner, splits, vocab, k, per_t, temperatures, cap,
    ENTROPY: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    n, split = pid // splits, pid % splits
    offset, token = locate(n, inner, shift, stride_outer, stride_inner)
    valid = load_mask(valids, n, n >= 0)
    if valid:
        k, per_t = row_scale(temperatures, n, valid, k, per_t)
        y = known_token(tl.load(tokens + token), vocab)
        row = logits + offset
        m, s, w = split_sums(row, split, y, vocab, k, cap, ENTROPY, LANES, UNROLL, BLOCKS, ALIGNED)
        if partials is None:
            stats = finish(m, s, w, target_logit(row, y, valid), k, per_t, cap, ENTROPY)
            store_stats(outputs, n, stats, None, ENTROPY)
        else:
            store_partial(partials, n, split, splits, m, s, w, ENTROPY)
    elif partials is None:
        store_stats(outputs, n, (0.0, 0.0, 0.0, 1.0, 0.0), None, ENTROPY)


@triton.jit(do_not_specialize=RUNTIME)
def row_finish_kernel(
    logits, tokens, valids, outputs, partials,
    inner, shift, stride_outer, stride_inner, splits, n_rows, vocab, k, per_t, temperatures, cap,
    ENTROPY: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = n < n_rows
    offset, token = locate(n, inner, shift, stride_outer, stride_inner)
    valid = load_mask(valids, n, here)
    y = known_token(tl.load(tokens + token, mask=valid, other=0), vocab)
    k, per_t = row_scale(temperatures, n, valid, k, per_t)
    splits_of, of_row = partials + (n.to(tl.int64) * splits * 3)[:, None], column(k, temperatures)
    m, s, w = row_sums(splits_of, splits, valid[:, None], of_row, cap, ENTROPY, SPLITS, 1)
    stats = finish(m, s, w, target_logit(logits + offset, y, valid), k, per_t, cap, ENTROPY)
    store_stats(outputs, n, where_valid(valid, stats), here, ENTROPY)


def row_stats(
    logits: Tensor,
    tokens: Tensor,
    valid: Tensor | None,
    temperature: float,
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
    want_entropy: bool,
) -> tuple[Tensor, ...]:
    """The operator ppo_kernels::row_stats."""
    launch.check_tokens(tokens, valid, vocab_size, shift)
    rows = launch.Rows(logits, tokens, valid, temperature, row_temperature, softcap, vocab_size, shift)
    outputs = rows.outputs(want_entropy)
    if vocab_size <= SMALL:
        small_row_stats(rows, outputs, want_entropy)
        return outputs
    shape = rows.shape
    partials = None if shape.splits == 1 else rows.empty(rows.n * shape.splits * 3)
    common: tuple[Any, ...] = (rows.logits, rows.tokens, rows.valid, outputs, partials)
    common += (*rows.numbers(), shape.splits)
    launch.run(
        row_stats_kernel,
        rows.n * shape.splits,
        (*common, vocab_size, *rows.scaling),
        num_warps=launch.row_warps(shape),
        device=logits.device,
        ENTROPY=want_entropy,
        LANES=shape.lanes,
        UNROLL=shape.unroll,
        BLOCKS=shape.blocks,
        ALIGNED=rows.aligned,
    )
    if partials is not None:
        launch.run(
            row_finish_kernel,
            triton.cdiv(rows.n, FINISH_ROWS),
            (*common, rows.n, vocab_size, *rows.scaling),
            num_warps=4,
            device=logits.device,
            ENTROPY=want_entropy,
            SPLITS=triton.next_power_of_2(shape.splits),
            ROWS=FINISH_ROWS,
        )
    return outputs
