"""fp32 functions good to about 1 ulp, each in one fixed order of operations, and the rounding of results.

The hardware's exp2 errs by 2 ulp, which the sums over a row can bear; its log2 errs by 2^-22 absolutely, which a
log-prob near 0 can not.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_LOW = tl.constexpr(1.925963033500e-08)  # log2(e) less its fp32 value
LOWEST = tl.constexpr(-3.4028234663852886e38)
EXP2_ZERO = tl.constexpr(-160.0)  # 2^x is exactly 0 in fp32 from here down


@triton.jit
def exp2(x):
    """2^x, subnormal results flushed to 0: one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return libdevice.exp2(x)


@triton.jit
def at_least(x, bound):
    """max(x, bound), or NaN for NaN."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp(x):
    """e^x for any x, accurate where x * log2(e) alone would round the exponent's last bits away."""
    t = x * LOG2E
    y = tl.exp2(t)
    low = tl.fma(x, LOG2E, -t) + x * LOG2E_LOW  # what t lacks
    return tl.where(tl.abs(t) < 128, tl.fma(y, low * LN2, y), y)


@triton.jit
def power_of_two(d, k, k_low):
    """2^u and 2^u - 1 for u = d * (k + k_low) <= 0, each to about an ulp of itself; 0 and -1 from u = -127 down."""
    d = at_least(d, -127.0 / k)
    shifted = tl.fma(d, k, 12583039.0)  # 1.5 * 2^23 + 127: its low bits are the exponent of 2^round(u)
    f = tl.fma(d, k_low, tl.fma(d, k, 12583039.0 - shifted))
    scale = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    p = tl.fma(f, 1.52527338e-5, 1.54035304e-4)  # ln(2)^i / i!
    p = tl.fma(p, f, 1.33335581e-3)
    p = tl.fma(p, f, 9.61812911e-3)
    p = tl.fma(p, f, 5.55041087e-2)
    p = tl.fma(p, f, 0.240226507)
    p = tl.fma(p, f, LN2) * f
    return tl.fma(scale, p, scale), tl.fma(scale, p, scale - 1)


@triton.jit
def excess(x, exp_x):
    """e^x - 1 - x without cancellation near 0; exp_x is e^x."""
    p = tl.fma(x, 1 / 40320, 1 / 5040)
    p = tl.fma(p, x, 1 / 720)
    p = tl.fma(p, x, 1 / 120)
    p = tl.fma(p, x, 1 / 24)
    p = tl.fma(p, x, 1 / 6)
    p = tl.fma(p, x, 1 / 2)
    return tl.where(tl.abs(x) > 0.5, exp_x - 1 - x, p * x * x)


@triton.jit
def expm1(x):
    """e^x - 1."""
    e = exp(x)
    return tl.where(tl.abs(x) > 0.5, e - 1, x + excess(x, e))


@triton.jit
def log1p(u):
    """ln(1 + u) for u in [0, 1]: 2 artanh(u / (2 + u))."""
    z = tl.div_rn(u, 2 + u)
    return 2 * z * _artanh_series(z * z)


@triton.jit
def log(x):
    """ln(x) for x >= 1."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # so that the rest is in [sqrt(1/2), sqrt(2))
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    z = tl.div_rn(f - 1, f + 1)
    return tl.where(x == x, tl.fma(exponent.to(tl.float32), LN2, 2 * z * _artanh_series(z * z)), x)


@triton.jit
def _artanh_series(z2):
    """artanh(z) / z for z^2 <= 1/9."""
    p = tl.fma(z2, 1 / 17, 1 / 15)
    p = tl.fma(p, z2, 1 / 13)
    p = tl.fma(p, z2, 1 / 11)
    p = tl.fma(p, z2, 1 / 9)
    p = tl.fma(p, z2, 1 / 7)
    p = tl.fma(p, z2, 1 / 5)
    p = tl.fma(p, z2, 1 / 3)
    return tl.fma(p, z2, 1.0)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x as dtype, to nearest even. The interpreter's own conversion to bf16 cuts digits off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
