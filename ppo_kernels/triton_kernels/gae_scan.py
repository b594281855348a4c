"""Generalised advantage estimation as a scan, backwards over every sequence:

    delta_t = r_t + gamma * (1 - terminated_t) * V_next - V_t
    A_t = a_t * A_next + delta_t,    a_t = gamma * lam * (1 - (terminated_t or truncated_t))

A step is an affine map of A_next, and maps compose associatively: (a1, b1), then (a2, b2), is (a1 a2, a2 b1 + b2). In
mode "skip" a masked step is the identity, and V_next comes from a scan of its own that carries values over the gaps.

Chunks of BLOCK_T steps are counted from the end of each sequence. `_sequences` takes ROWS sequences per program and
carries (A, V) from chunk to chunk. Few long sequences would leave most of a GPU idle: there `_chunks` takes one chunk
per program, twice: first it reduces each chunk to one map; then it composes the maps of the later chunks, in the order
of the carry and so to the same bits, and scans its own. Lengths are read on the device only.

All in fp64, where the order of composition is lost on the result: BLOCK_T, which follows the mean length, changes the
last bit of about one advantage in 10^8. Bytes per step: 16 (fp32, no flags), 24 where every chunk is read twice.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.triton_kernels import launch

STEPS_PER_THREAD = 4  # as _tile has it
TILE = 1024  # steps a program takes at a time
MAX_ROWS = 128  # sequences that _chunks can tell apart
LONG = 8  # chunks per sequence from which two visits should beat one chain


@triton.jit
def _apply(a, b, x, CUTS: tl.constexpr):
    """a * x + b. Nothing crosses a cut, a = 0: neither NaN nor infinity."""
    y = tl.fma(a, x, b)
    if CUTS:
        y = tl.where(a == 0, b, y)
    return y


@triton.jit
def _compose(a1, b1, a2, b2):
    return a1 * a2, _apply(a2, b2, b1, False)


@triton.jit
def _compose_with_cuts(a1, b1, a2, b2):
    return a1 * a2, _apply(a2, b2, b1, True)


@triton.jit
def _latest(known1, value1, known2, value2):
    return known1 | known2, tl.where(known2 != 0, value2, value1)


@triton.jit
def _tile(x0, x1, x2, x3):
    """[ROWS, 4 * GROUPS] from four [ROWS, GROUPS], in registers: a thread scans four steps all by itself."""
    x = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    if len(x0.shape) == 1:
        return tl.reshape(x, [4 * x0.shape[0]])
    else:
        return tl.reshape(x, [x0.shape[0], 4 * x0.shape[1]])


@triton.jit
def _load(ptr, column, left, other):
    """Steps column, ..., column + 3, backwards from ptr, as a tile, and the first three of them by themselves."""
    x0 = tl.load(ptr - column, mask=column < left, other=other)
    x1 = tl.load(ptr - column - 1, mask=column + 1 < left, other=other)
    x2 = tl.load(ptr - column - 2, mask=column + 2 < left, other=other)
    x3 = tl.load(ptr - column - 3, mask=column + 3 < left, other=other)
    return _tile(x0, x1, x2, x3), x0, x1, x2


@triton.jit
def _last(x):
    """The last column: [ROWS, 1], or a scalar."""
    axis: tl.constexpr = len(x.shape) - 1
    last = tl.arange(0, x.shape[axis]) == x.shape[axis] - 1
    return tl.sum(tl.where(last, x, 0), axis=axis, keep_dims=axis == 1)


@triton.jit
def _scan(inputs, start, top, inside, bootstrap, following, discounts, MASK: tl.constexpr, BLOCK_T: tl.constexpr):
    """Steps top, top - 1, ... as maps of the advantage after top, and `following` for the next chunk.

    start, top, inside, bootstrap, following: [ROWS, 1], or scalars for one row. inside: step top + 1 belongs to the
    sequence; if it is masked, `following` is the value after top.
    Returns: a, b [ROWS, BLOCK_T], or [BLOCK_T] for one row; left, how many of them are steps; following.
    """
    rewards, values, valid, next_values, terminated, truncated = inputs
    gamma, decay = discounts
    left = tl.minimum(tl.maximum(top + 1 - start, 0), BLOCK_T).to(tl.int32)
    column = 4 * tl.arange(0, BLOCK_T // 4)
    has_next = (column < left) & ((column > 0) | inside)
    r, _, _, _ = _load(rewards + top, column, left, 0.0)
    v, v0, v1, v2 = _load(values + top, column, left, 0.0)
    if next_values is not None:
        v_next, _, _, _ = _load(next_values + top, column, left, 0.0)
    else:
        v_next = _tile(tl.load(values + top - column + 1, mask=has_next, other=bootstrap), v0, v1, v2)
    if MASK == "skip" or MASK == "zero":
        exists, m0, m1, m2 = _load(valid + top, column, left, 0)
        exists = exists.to(tl.int1)
        if MASK == "zero":
            r = tl.where(exists, r, 0.0)
            v = tl.where(exists, v, 0.0)
        if next_values is None:
            known = _tile(tl.load(valid + top - column + 1, mask=has_next, other=1), m0, m1, m2).to(tl.int32)
            if MASK == "skip":
                known, v_next = tl.associative_scan((known, v_next), len(r.shape) - 1, _latest)
                v_next = tl.where(known != 0, v_next, following)
                following = _last(v_next)
            else:
                v_next = tl.where(known != 0, v_next, 0.0)
    a = tl.full(r.shape, 1.0, tl.float64) * decay
    axis: tl.constexpr = len(r.shape) - 1
    if terminated is not None:
        ended, _, _, _ = _load(terminated + top, column, left, 0)
        v_next = tl.where(ended.to(tl.int1), 0.0, v_next)
        a = tl.where(ended.to(tl.int1), 0.0, a)
    if truncated is not None:
        cut, _, _, _ = _load(truncated + top, column, left, 0)
        a = tl.where(cut.to(tl.int1), 0.0, a)
    b = tl.fma(gamma, v_next.to(tl.float64), r.to(tl.float64) - v.to(tl.float64))
    if MASK == "skip":
        a = tl.where(exists, a, 1.0)
        b = tl.where(exists, b, 0.0)
    if terminated is not None or truncated is not None:
        a, b = tl.associative_scan((a, b), axis, _compose_with_cuts)
    else:
        a, b = tl.associative_scan((a, b), axis, _compose)
    return a, b, left, following


@triton.jit
def _store(advantages, returns, values, valid, a, top, left):
    column = tl.arange(0, a.shape[len(a.shape) - 1])
    at, live = top - column, column < left
    a = a.to(tl.float32)
    v = tl.load(values + at, mask=live, other=0.0)
    result = a + v
    if valid is not None:
        counts = tl.load(valid + at, mask=live, other=0).to(tl.int1)
        a = tl.where(counts, a, 0.0)
        result = tl.where(counts, result, 0.0)
    tl.store(advantages + at, a, mask=live)
    tl.store(returns + at, result, mask=live)


@triton.jit
def _bounds(segments, row, rows, steps):
    """Where sequences start and end: inside [0, steps), whatever segments says."""
    start = tl.load(segments + row, mask=row < rows, other=0)
    end = tl.load(segments + row + 1, mask=row < rows, other=0)
    return tl.maximum(start, 0), tl.minimum(end, steps)


@triton.jit
def _discounts(numbers, row_lams, row, rows):
    """(gamma, gamma * lam) in fp64, of all sequences or of each one."""
    gamma, gamma_low, decay, decay_low = numbers
    gamma = tl.cast(gamma, tl.float64) + gamma_low
    if row_lams is None:
        return gamma, tl.cast(decay, tl.float64) + decay_low
    else:
        return gamma, gamma * tl.load(row_lams + row, mask=row < rows, other=0.0)


@triton.jit(do_not_specialize=["rows", "steps"])
def _sequences(
    rewards, values, valid, next_values, terminated, truncated, bootstraps, segments, advantages, returns, rows, steps,
    numbers, row_lams, MASK: tl.constexpr, BLOCK_T: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS sequences per program, chunk after chunk."""
    inputs = (rewards, values, valid, next_values, terminated, truncated)
    cuts: tl.constexpr = terminated is not None or truncated is not None
    row = tl.program_id(0).to(tl.int64)
    if ROWS > 1:  # one row is not a tile of height 1, which Triton may lay out with all its columns in one thread
        row = row * ROWS + tl.arange(0, ROWS)[:, None]
    start, end = _bounds(segments, row, rows, steps)
    longest = tl.max(end - start) if ROWS > 1 else end - start
    bootstrap = (row * 0).to(tl.float32)
    if bootstraps is not None:
        bootstrap = tl.load(bootstraps + row, mask=row < rows, other=0.0)
    following = bootstrap
    running = (row * 0).to(tl.float64)
    discounts = _discounts(numbers, row_lams, row, rows)
    for chunk in range(tl.cdiv(longest, BLOCK_T)):
        top = end - 1 - chunk * BLOCK_T
        a, b, left, following = _scan(inputs, start, top, chunk > 0, bootstrap, following, discounts, MASK, BLOCK_T)
        a = _apply(a, b, running, cuts)
        running = _last(a)
        _store(advantages, returns, values, valid, a, top, left)


@triton.jit
def _search(values, valid, at, end, other, WIDTH: tl.constexpr):
    """The value at the first valid step in [at, end); `other` if there is none."""
    offset = tl.arange(0, WIDTH)
    first = tl.full([], WIDTH, tl.int32)
    while (at < end) & (first == WIDTH):
        left = tl.minimum(end - at, WIDTH).to(tl.int32)
        found = tl.load(valid + at + offset, mask=offset < left, other=0).to(tl.int1)
        first = tl.min(tl.where(found, offset, WIDTH))
        at += tl.where(first == WIDTH, WIDTH, first)
    return tl.load(values + at, mask=at < end, other=other)


@triton.jit(do_not_specialize=["rows", "steps"])
def _chunks(
    rewards, values, valid, next_values, terminated, truncated, bootstraps, segments, advantages, returns, rows, steps,
    numbers, row_lams, maps_a, maps_b, followings, MASK: tl.constexpr, BLOCK_T: tl.constexpr, MAX_ROWS: tl.constexpr,
    REDUCE: tl.constexpr,
):  # fmt: skip
    """One chunk per program: those of the first sequence, from its end; of the second, ... REDUCE: to one map."""
    inputs = (rewards, values, valid, next_values, terminated, truncated)
    cuts: tl.constexpr = terminated is not None or truncated is not None
    program = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, MAX_ROWS)
    starts, ends = _bounds(segments, every, rows, steps)
    chunks = (tl.maximum(ends - starts, 0) + BLOCK_T - 1) // BLOCK_T
    row = tl.sum(((tl.cumsum(chunks, 0) <= program) & (every < rows)).to(tl.int32))
    if row >= rows:
        return
    chunk = program - tl.sum(tl.where(every < row, chunks, 0))
    start, end = _bounds(segments, row, rows, steps)
    bootstrap = 0.0
    if bootstraps is not None:
        bootstrap = tl.load(bootstraps + row)
    top = end - 1 - chunk * BLOCK_T
    following = bootstrap
    if MASK == "skip" and next_values is None:
        if REDUCE:
            following = _search(values, valid, top + 1, end, bootstrap, 4 * BLOCK_T)
            tl.store(followings + program, following)
        else:
            following = tl.load(followings + program)
    discounts = _discounts(numbers, row_lams, row, rows)
    a, b, left, _ = _scan(inputs, start, top, chunk > 0, bootstrap, following, discounts, MASK, BLOCK_T)
    if REDUCE:
        tl.store(maps_a + program, _last(a))
        tl.store(maps_b + program, _last(b))
    else:
        running = tl.zeros([], tl.float64)
        first = program - chunk
        for i in range(0, chunk, 8):
            for j in tl.static_range(8):
                later = i + j < chunk
                map_a = tl.load(maps_a + first + i + j, mask=later, other=1.0)
                map_b = tl.load(maps_b + first + i + j, mask=later, other=0.0)
                running = _apply(map_a, map_b, running, cuts)
        _store(advantages, returns, values, valid, _apply(a, b, running, cuts), top, left)


def geometry(rows: int, steps: int) -> tuple[int, int, bool]:
    """BLOCK_T, ROWS, and whether to use _chunks, by the mean length: the only one the host knows."""
    mean = triton.cdiv(steps, rows)
    block_t = min(max(triton.next_power_of_2(mean), 16), TILE)
    return block_t, TILE // block_t, rows <= MAX_ROWS and mean >= LONG * TILE


def _halves(x: float) -> tuple[float, float]:
    """x as a sum of two fp32 numbers: what a launch can pass."""
    high = ctypes.c_float(x).value
    return high, x - high


def gae(
    rewards: Tensor,
    values: Tensor,
    valid: Tensor | None,
    bootstrap: Tensor | None,
    next_values: Tensor | None,
    terminated: Tensor | None,
    truncated: Tensor | None,
    segments: Tensor,
    gamma: float,
    lam: float,
    mask_mode: str,
    row_lam: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, fp32 [N], of sequences segments[i]:segments[i + 1]; 0 where not valid."""
    device, steps, rows = rewards.device, rewards.shape[0], segments.shape[0] - 1
    # Zeros, for steps that segments leave out: they are not checked on a GPU.
    advantages, returns = (torch.zeros(steps, dtype=torch.float32, device=device) for _ in range(2))
    if steps == 0 or rows == 0:
        return advantages, returns
    r, v, boot, v_next = (launch.flat(x) for x in (rewards, values, bootstrap, next_values))
    mask, ended, cut = (launch.flat(x, torch.bool) for x in (valid, terminated, truncated))
    numbers = (*_halves(gamma), *_halves(gamma * lam))
    args = (r, v, mask, v_next, ended, cut, boot, segments.contiguous(), advantages, returns, rows, steps, numbers)
    args += (launch.flat(row_lam, torch.float64),)
    block_t, rows_per_program, long = geometry(rows, steps)
    options: dict[str, Any] = {
        "num_warps": max(1, block_t * rows_per_program // (STEPS_PER_THREAD * 32)),
        "device": device,
        "MASK": "none" if valid is None else mask_mode,
        "BLOCK_T": block_t,
    }
    if long:
        programs = steps // block_t + rows  # at least the number of chunks
        maps = torch.empty(3, programs, dtype=torch.float64, device=device)
        for reduce in (True, False):
            launch.run(_chunks, programs, (*args, *maps), MAX_ROWS=MAX_ROWS, REDUCE=reduce, **options)
    else:
        launch.run(_sequences, triton.cdiv(rows, rows_per_program), args, ROWS=rows_per_program, **options)
    return advantages, returns
