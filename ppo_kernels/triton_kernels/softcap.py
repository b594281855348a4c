"""Differences of logits, as the row kernels take them: of logits x, or of S * tanh(x / S) with a softcap S.

A cap is monotone, so the maximum m of a row is the raw one. With S = 30 a capped logit has an ulp of 2e-6, too coarse
for log-probs; so the capped difference is taken as a product, to a few ulps of itself. For a = x / S <= b = m / S:

    S * (tanh(a) - tanh(b)) = 2 S * (e^(2a - 2b) - 1) * f / ((1 + q_a) * (1 + q_b)),   q_a = e^(-2|a|)
    f = q_a where 0 <= a,  1 where a < 0 <= b,  q_b where b < 0;   the slope of the cap is 4 q_a / (1 + q_a)^2

-inf stays -inf, a column that does not exist; its slope is 0. `cap` is None, which leaves nothing of this in a kernel,
or numbers (launch.softcap_numbers).
"""

import triton
import triton.language as tl

from ppo_kernels.triton_kernels.arithmetic import power_of_two


@triton.jit
def one_over(x):
    """1 / x for x in [1, 2]: division errs by 2 ulp, with a step of Newton's method by half of one."""
    r = 1 / x
    return tl.fma(r, tl.fma(-x, r, 1.0), r)


@triton.jit
def below(m, cap):
    """What `difference` needs of m."""
    if cap is None:
        return m
    else:
        k, k_low, twice = cap
        q, _ = power_of_two(-tl.abs(m), k, k_low)
        positive = tl.div_rn(twice, 1 + q)
        return m, positive, tl.where(m >= 0, positive, positive * q)


@triton.jit
def difference(x, m, cap):
    """x - m, or of both capped; m as `below` gives it."""
    if cap is None:
        return x - m
    else:
        k, k_low, _ = cap
        top, positive, negative = m
        q, _ = power_of_two(-tl.abs(x), k, k_low)
        gap = tl.where(x == top, 0.0, x - top)  # infinite logits may be equal
        _, grown = power_of_two(gap, k, k_low)
        d = grown * tl.where(x >= 0, positive * q, negative) * one_over(1 + q)
        return tl.where(x == -float("inf"), x, d)


@triton.jit
def slope(x, cap):
    """The derivative of a capped logit."""
    q, _ = power_of_two(-tl.abs(x), cap[0], cap[1])
    r = one_over(1 + q)
    return 4 * q * r * r
