"""What follows from the sums of a row (rows.py): log-prob, entropy, and the gradient of its logits.

All per-row values may be scalars or vectors over rows.

    ln p_y = t_y - ln S,   H = ln S - E[t],   S = sum(2^t_i) over all columns, t here in nats
    dL/dx_i = (c * (1[i=y] - p_i) - e * p_i * (ln p_i + H)) / T,   ln p_i + H = t_i - E[t]

With a softcap (`cap`, softcap.py) the gradient has its slope at x_i as a factor.
"""

import triton
import triton.language as tl

from ppo_kernels import config
from ppo_kernels.triton_kernels.arithmetic import EXP2_ZERO, LN2, LOG2E, at_least, exp, exp2, expm1, log, log1p
from ppo_kernels.triton_kernels.rows import rescale
from ppo_kernels.triton_kernels.softcap import below, difference, slope

MIN_TEMPERATURE = tl.constexpr(config.MIN_TEMPERATURE)
MAX_TEMPERATURE = tl.constexpr(config.MAX_TEMPERATURE)


@triton.jit
def locate(n, inner, shift, stride_outer, stride_inner):
    """Of scored row n: the offset of its logits (int64), and the index of its token.

    Row numbers are int32, for a grid has at most 2^31 - 1 programs, and dividing int64 takes a hundred instructions.
    """
    outer, i = n // inner, n % inner
    return outer.to(tl.int64) * stride_outer + i.to(tl.int64) * stride_inner, outer * (inner + shift) + i + shift


@triton.jit
def scored_row(q, inner, shift):
    """Of row q of all rows: whether it scores a token (with shift, the last of a sequence does not), and as which n."""
    outer, i = q // (inner + shift), q % (inner + shift)
    return i < inner, outer * inner + i


@triton.jit
def offset_of(q, inner, shift, stride_outer, stride_inner):
    """Of row q of all rows: the offset of its first element (int64)."""
    outer, i = q // (inner + shift), q % (inner + shift)
    return outer.to(tl.int64) * stride_outer + i.to(tl.int64) * stride_inner


@triton.jit
def known_token(y, vocab):
    """A token as int32; -1 if it is outside the vocabulary."""
    y = y.to(tl.int64)
    return tl.where((y >= 0) & (y < vocab), y, -1).to(tl.int32)


@triton.jit
def load_mask(valids, n, here):
    """`here`, and where there is a mask, that too."""
    if valids is None:
        return here
    else:
        return here & tl.load(valids + n, mask=here, other=0).to(tl.int1)


@triton.jit
def row_scale(temperatures, n, mask, k, per_t):
    """(log2(e) / T, 1 / T) of rows n: as given, or by their own temperatures, rounded as the launcher would; NaN for a
    temperature that is out of range."""
    if temperatures is None:
        return k, per_t
    else:
        t = tl.load(temperatures + n, mask=mask, other=1.0).to(tl.float64)
        t = tl.where((t >= MIN_TEMPERATURE) & (t <= MAX_TEMPERATURE), t, float("nan"))
        return (tl.full([], LOG2E, tl.float64) / t).to(tl.float32), (tl.full([], 1.0, tl.float64) / t).to(tl.float32)


@triton.jit
def column(k, temperatures):
    """[R, 1] of what `row_scale` gave for rows [R]."""
    if temperatures is None:
        return k
    else:
        return k[:, None]


@triton.jit
def target_logit(row, y, valid):
    """x_y; NaN for a token outside the vocabulary, y = -1 (and an error with TRITON_DEBUG=1)."""
    tl.device_assert((y >= 0) | ~valid, "tokens: a token is outside the vocabulary")
    return tl.load(row + y, mask=(y >= 0) & valid, other=float("nan")).to(tl.float32)


@triton.jit
def finish(m, s, w, x_y, k, per_t, cap, ENTROPY: tl.constexpr):
    """(logprob, entropy, max, sum, mean of (x - max) / T) of rows, from sums without the target and x_y."""
    top = tl.maximum(m, x_y)
    at = below(top, cap)
    s, w = rescale(m, s, w, at, k, cap, ENTROPY)
    gap = difference(x_y, at, cap)
    t_y = at_least(gap * k, EXP2_ZERO)
    e_y = exp2(t_y)
    ln_e_y = gap * per_t
    larger = e_y >= s
    log_rest = log1p(tl.div_rn(tl.where(larger, s, e_y), tl.where(larger, e_y, s)))
    log_sum = tl.where(larger, ln_e_y, log(tl.where(larger, 1.0, s))) + log_rest
    logprob = tl.where(larger, 0 - log_rest, ln_e_y - log_sum)
    total = s + e_y
    mean = total
    if ENTROPY:
        mean = tl.div_rn(tl.fma(e_y, t_y, w), total) * LN2
    return logprob, log_sum - mean, top, total, mean


@triton.jit
def store_stats(outputs, n, stats, mask, ENTROPY: tl.constexpr):
    """Stores (logprob, entropy, max, sum, mean) of rows n."""
    logprobs, entropies, row_max, row_sum, row_mean = outputs
    logprob, entropy, top, total, mean = stats
    tl.store(logprobs + n, logprob, mask=mask)
    tl.store(row_max + n, top, mask=mask)
    tl.store(row_sum + n, total, mask=mask)
    if ENTROPY:
        tl.store(entropies + n, entropy, mask=mask)
        tl.store(row_mean + n, mean, mask=mask)


@triton.jit
def load_stats(stats, n, mask):
    """(logprob, max, sum, mean) of rows n; the mean only if it is given."""
    logprobs, row_max, row_sum, row_mean = stats
    logprob, top = tl.load(logprobs + n, mask=mask, other=0.0), tl.load(row_max + n, mask=mask, other=0.0)
    total, mean = tl.load(row_sum + n, mask=mask, other=1.0), logprob
    if row_mean is not None:
        mean = tl.load(row_mean + n, mask=mask, other=0.0)
    return logprob, top, total, mean


@triton.jit
def load_coefficients(grad_logprobs, grad_entropies, n, mask):
    """(c, e) of rows n; e is 0 where there is no gradient of the entropy."""
    c = tl.load(grad_logprobs + n, mask=mask, other=0.0)
    e = c * 0
    if grad_entropies is not None:
        e = tl.load(grad_entropies + n, mask=mask, other=0.0)
    return c, e


@triton.jit
def where_valid(valid, stats):
    """The stats of valid rows, and those that every other row has."""
    logprob, entropy, top, total, mean = stats
    return (
        tl.where(valid, logprob, 0.0),
        tl.where(valid, entropy, 0.0),
        tl.where(valid, top, 0.0),
        tl.where(valid, total, 1.0),
        tl.where(valid, mean, 0.0),
    )


@triton.jit
def gradient_factors(logprob, top, total, mean, c, e, k, per_t, cap, ENTROPY: tl.constexpr):
    """What `gradient` needs of a row, (r, a, b, a_y, b_y): dL/dx_i = 2^u_i * (a + b * u_i), u_i = (x_i - r) * k, and
    dL/dx_y = a_y + b_y * u_y. With an entropy gradient r is close to the mean logit, so that u is all it takes; with a
    softcap r is the maximum, and u less the last factor, E[t] in bits, stands beside b."""
    a = -c * tl.div_rn(per_t, total)
    a_y = -c * expm1(logprob) * per_t
    if cap is not None:
        b = -e * LN2 * tl.div_rn(per_t, total)
        b_y = -e * exp(logprob) * LN2 * per_t
        return below(top, cap) + (a, b, a_y, b_y, mean * LOG2E)
    elif ENTROPY:
        mean2 = mean * LOG2E
        r = top + tl.div_rn(mean2, k)
        lift = (r - top) * k
        unit = exp2(lift)  # 2^u is larger by this than 2^t
        off = lift - mean2  # u is smaller by this than t - E[t], for r is rounded
        b = -e * LN2 * tl.div_rn(per_t, total)
        b_y = -e * exp(logprob) * LN2 * per_t
        return r, unit * tl.fma(b, off, a), unit * b, tl.fma(b_y, off, a_y), b_y
    else:
        return top, a, a, a_y, a_y


@triton.jit
def gradient(x, is_target, k, factors, cap, ENTROPY: tl.constexpr):
    """dL/dx of logits. is_target: None if none of them is the row's target."""
    if cap is not None:
        return _capped_gradient(x, is_target, k, factors, cap, ENTROPY)
    r, a, b, a_y, b_y = factors
    u = (x - r) * k
    if ENTROPY:
        u = at_least(u, EXP2_ZERO)  # -inf: 0 * (a + b * u) is 0
        g = exp2(u) * tl.fma(b, u, a)
        a_y = tl.fma(b_y, u, a_y)
    else:
        g = exp2(u) * a
    if is_target is not None:
        g = tl.where(is_target, a_y, g)
    return g


@triton.jit
def _capped_gradient(x, is_target, k, factors, cap, ENTROPY: tl.constexpr):
    top, positive, negative, a, b, a_y, b_y, mean2 = factors
    t = at_least(difference(x, (top, positive, negative), cap) * k, EXP2_ZERO)
    g = exp2(t) * a
    if ENTROPY:
        g = exp2(t) * tl.fma(b, t - mean2, a)
        a_y = tl.fma(b_y, t - mean2, a_y)
    if is_target is not None:
        g = tl.where(is_target, a_y, g)
    return g * slope(x, cap)
