"""Sums over one row of logits x [V] with target y, shared by every kernel that reads rows.

    m = max(x_i),  t_i = (x_i - m) * k,  s = sum(2^t_i),  w = sum(2^t_i * t_i),   i != y, k = log2(e) / T

With a softcap, x_i - m is the difference of the capped logits (softcap.py).

The target is left out, so that a target that holds nearly all probability keeps its 1 - p; row_math.finish adds it.

A row is cut into splits of BLOCKS blocks, a block into UNROLL tiles of LANES chunks of 16 bytes. A lane keeps (m, s, w)
of its chunks in registers: nothing crosses lanes inside a loop. Lanes, and later splits, are added up in fixed point:
integer sums have no order, so the result is the same bits for any number of warps, layout, alignment or batch.

A row that does not start at a multiple of 16 bytes is read in aligned chunks too, and shifted into place in registers.
Nothing is read after the row's end, and before its start only what is in its first chunk of 16 bytes, which PyTorch's
allocators put into the same storage.
"""

import triton
import triton.language as tl

from ppo_kernels.triton_kernels.arithmetic import EXP2_ZERO, LOWEST, at_least, exp2
from ppo_kernels.triton_kernels.softcap import below, difference

FIXED_POINT = tl.constexpr(2.0**40)  # sums are >= 1 and at most V
MAX_VOCAB = 2**21


# ---- chunks of 16 bytes ---------------------------------------------------------------------------------------------


@triton.jit
def low_float(word, dtype: tl.constexpr):
    """The first (or only) logit in a 32-bit word, as fp32."""
    if dtype == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_float(word, dtype: tl.constexpr):
    """The second of two 16-bit logits in a 32-bit word, as fp32."""
    if dtype == tl.bfloat16:
        return (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def four(words):
    """[4 * LANES] -> four [LANES], in registers."""
    a, b = tl.split(tl.reshape(words, [words.shape[0] // 4, 2, 2]))
    w0, w2 = tl.split(a)
    w1, w3 = tl.split(b)
    return w0, w1, w2, w3


@triton.jit
def row_words(row, ALIGNED: tl.constexpr):
    """A row as 32-bit words from two starts, both multiples of 16 bytes: at or before its own, and at or after it; and
    the bytes between the first and its own."""
    if ALIGNED:
        words = tl.multiple_of(row.to(tl.pointer_type(tl.uint32), bitcast=True), 16)
        return words, words, 0
    else:
        start = row.to(tl.int64)
        low = tl.multiple_of((start & -16).to(tl.pointer_type(tl.uint32)), 16)
        high = tl.multiple_of(((start + 15) & -16).to(tl.pointer_type(tl.uint32)), 16)
        return low, high, (start & 15).to(tl.int32)


@triton.jit
def load_chunks(words, offset, live, dtype: tl.constexpr, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """LANES chunks of a row, four words each, from word `offset` on; -inf where not `live` [4 * LANES] (None: all are).

    A chunk lies in one aligned chunk or across two: the one with its first byte and the one with its last.
    """
    low, high, shift = words
    a = _load_words(low + offset, live, dtype, LANES)
    if ALIGNED:
        return four(a)
    a0, a1, a2, a3 = four(a)
    b0, b1, b2, b3 = four(_load_words(high + offset, live, dtype, LANES))
    by_two, by_one = (shift & 8) != 0, (shift & 4) != 0
    c0, c1, c2 = tl.where(by_two, a2, a0), tl.where(by_two, a3, a1), tl.where(by_two, b0, a2)
    c3, c4, c5 = tl.where(by_two, b1, a3), tl.where(by_two, b2, b0), tl.where(by_two, b3, b1)
    d0, d1, d2 = tl.where(by_one, c1, c0), tl.where(by_one, c2, c1), tl.where(by_one, c3, c2)
    d3, d4 = tl.where(by_one, c4, c3), tl.where(by_one, c5, c4)
    if dtype == tl.float32:
        return d0, d1, d2, d3
    bits = ((shift & 2) * 8).to(tl.uint32)  # 0 or 16
    e0, e1 = (d0 >> bits) | ((d1 << 1) << (31 - bits)), (d1 >> bits) | ((d2 << 1) << (31 - bits))
    e2, e3 = (d2 >> bits) | ((d3 << 1) << (31 - bits)), (d3 >> bits) | ((d4 << 1) << (31 - bits))
    return e0, e1, e2, e3


@triton.jit
def _load_words(start, live, dtype: tl.constexpr, LANES: tl.constexpr):
    if dtype == tl.float32:
        nothing: tl.constexpr = 0xFF800000
    elif dtype == tl.bfloat16:
        nothing: tl.constexpr = 0xFF80FF80
    else:
        nothing: tl.constexpr = 0xFC00FC00
    word = tl.arange(0, 4 * LANES)
    if live is None:
        return tl.load(start + word)
    else:
        return tl.load(start + word, mask=live, other=nothing)


# ---- sums of a lane -------------------------------------------------------------------------------------------------


@triton.jit
def rescale(m, s, w, top, k, cap, ENTROPY: tl.constexpr):
    """Sums against the maximum m, against a larger one instead. top: `below` of that."""
    d = at_least(difference(m, top, cap) * k, EXP2_ZERO)
    r = exp2(d)
    if ENTROPY:
        w = r * tl.fma(s, d, w)
    return r * s, w


@triton.jit
def add(x, top, s, w, k, cap, ENTROPY: tl.constexpr):
    t = at_least(difference(x, top, cap) * k, EXP2_ZERO)  # -inf: 2^t is 0, and 0 * t is too
    e = exp2(t)
    if ENTROPY:
        w = tl.fma(e, t, w)
    return s + e, w


@triton.jit
def add_block(
    row, words, block, y, vocab, whole, m, s, w, k, cap,
    ENTROPY: tl.constexpr, MASKED: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Adds a block of a row to (m, s, w) [LANES]. MASKED: without column y, and with the row's end if it is block
    `whole`, the first one that is not whole."""
    dtype: tl.constexpr = row.dtype.element_ty
    CHUNK: tl.constexpr = 128 // dtype.primitive_bitwidth
    PER_WORD: tl.constexpr = CHUNK // 4
    lane = tl.arange(0, LANES)
    word = block * (UNROLL * LANES * 4)
    column = word * PER_WORD
    given = ()
    for u in tl.static_range(UNROLL):
        live = None
        if MASKED:
            live = column + (u * LANES + tl.arange(0, 4 * LANES) // 4 + 1) * CHUNK <= vocab - (CHUNK - 1)
        given = given + load_chunks(words, word + u * LANES * 4, live, dtype, LANES, ALIGNED)
    logits = ()
    to_y = y - column - lane * CHUNK
    for j in tl.static_range(4 * UNROLL):
        x = low_float(given[j], dtype)
        if MASKED:
            x = tl.where(to_y == j // 4 * LANES * CHUNK + j % 4 * PER_WORD, -float("inf"), x)
        logits = logits + (x,)
        if PER_WORD == 2:
            x = high_float(given[j], dtype)
            if MASKED:
                x = tl.where(to_y == j // 4 * LANES * CHUNK + j % 4 * PER_WORD + 1, -float("inf"), x)
            logits = logits + (x,)
    if MASKED:  # the row's end, where the next chunk of 16 bytes may be another's: one column a lane
        rest = (vocab - (CHUNK - 1)) // CHUNK * CHUNK + lane
        here = (rest < vocab) & (block == whole) & (rest != y)
        logits = logits + (tl.load(row + rest, mask=here, other=-float("inf")).to(tl.float32),)
    top = m
    for j in tl.static_range(UNROLL * CHUNK + MASKED):
        top = tl.maximum(top, logits[j])
    at = below(top, cap)
    s, w = rescale(m, s, w, at, k, cap, ENTROPY)
    for j in tl.static_range(UNROLL * CHUNK + MASKED):
        s, w = add(logits[j], at, s, w, k, cap, ENTROPY)
    return top, s, w


@triton.jit
def split_sums(
    row, split, y, vocab, k, cap,
    ENTROPY: tl.constexpr, LANES: tl.constexpr, UNROLL: tl.constexpr, BLOCKS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """(m, s, w) of one split of a row: whole blocks without the target, then the target's, then the ragged one."""
    CHUNK: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    BLOCK: tl.constexpr = UNROLL * LANES * CHUNK
    words = row_words(row, ALIGNED)
    m = tl.full([LANES], LOWEST, tl.float32)
    s = tl.zeros([LANES], tl.float32)
    w = tl.zeros([LANES], tl.float32)
    first, whole = split * BLOCKS, (vocab - (CHUNK - 1)) // BLOCK
    last = tl.minimum(first + BLOCKS, whole)
    target = tl.where(y >= 0, y // BLOCK, -1)
    mine = (target >= first) & (target < last)
    for i in range(first, last - mine.to(tl.int32)):
        block = i + (mine & (i >= target)).to(tl.int32)
        m, s, w = add_block(row, words, block, y, vocab, whole, m, s, w, k, cap, ENTROPY, False, LANES, UNROLL, ALIGNED)
    for special in range(2):
        block = tl.where(special == 0, target, whole)
        ragged = (whole >= first) & (whole < first + BLOCKS)
        if ((special == 0) & mine) | ((special == 1) & ragged):
            m, s, w = add_block(
                row, words, block, y, vocab, whole, m, s, w, k, cap, ENTROPY, True, LANES, UNROLL, ALIGNED
            )
    return combine(m, s, w, k, cap, ENTROPY, 0)


@triton.jit
def combine(m, s, w, k, cap, ENTROPY: tl.constexpr, AXIS: tl.constexpr):
    """(m, s, w) over an axis of lanes or splits, the same bits in any order."""
    top = tl.max(m, AXIS, keep_dims=True)
    s, w = rescale(m, s, w, below(top, cap), k, cap, ENTROPY)
    nan = s != s
    any_nan = tl.max(nan.to(tl.int32), AXIS) != 0
    total = _fixed_point_sum(s, nan, any_nan, AXIS)
    if ENTROPY:
        weighted = _fixed_point_sum(w, nan, any_nan, AXIS)
    else:
        weighted = total
    return tl.max(m, AXIS), total, weighted


@triton.jit
def _fixed_point_sum(x, nan, any_nan, AXIS: tl.constexpr):
    fixed = (tl.where(nan, 0.0, x) * FIXED_POINT).to(tl.int64)
    total = tl.sum(fixed, AXIS).to(tl.float32) * (1 / FIXED_POINT)
    return tl.where(any_nan, float("nan"), total)
