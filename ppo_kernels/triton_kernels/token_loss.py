"""The loss of given log-probs: everything of size N in one launch, then the sums of its programs in another.

`policy_term` is the loss mathematics, the same as token_loss in ppo_kernels/loss_terms.py; row_fused.py calls it too.
Sums are taken in fp64, a fixed tree in each program and then over programs in order: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppo_kernels.metrics import NAMES
from ppo_kernels.triton_kernels import launch
from ppo_kernels.triton_kernels.arithmetic import LOWEST, excess, exp
from ppo_kernels.triton_kernels.row_math import load_mask

BLOCK = 512
SUMS = tl.constexpr(18)  # of which 4 are terms of the loss and 14 metrics; then 2 maxima
WIDTH = tl.constexpr(32)  # of a row of partial sums


@triton.jit
def clamp(x, bound):
    """x held in [-bound, bound]; NaN stays."""
    return tl.where(x > bound, bound, tl.where(x < -bound, -bound, x))


@triton.jit
def kl_estimate(log_ratio, loss_params):
    """The KL estimate of a token, its derivative by logprob, and the sum of both, after the input clamp."""
    _, _, _, _, _, _, kind, input_clamp, _, _, _, _, _, _, _, _, _, _ = loss_params
    d = clamp(log_ratio, input_clamp)
    exp_d = exp(-d)
    k3 = excess(-d, exp_d)
    sign = (d > 0).to(tl.float32) - (d < 0).to(tl.float32)
    value = tl.where(kind == 0, d, tl.where(kind == 1, 0.5 * d * d, tl.where(kind == 2, k3, tl.abs(d))))
    k3_slope = tl.where(tl.abs(d) > 0.5, 1 - exp_d, d - k3)
    slope = tl.where(kind == 0, 1.0, tl.where(kind == 1, d, tl.where(kind == 2, k3_slope, sign)))
    both = tl.where(kind == 2, d, value + slope)
    outside = tl.abs(log_ratio) > input_clamp
    return value, tl.where(outside, 0.0, slope), tl.where(outside, 0.0, both)


@triton.jit
def policy_loss(ratio, logprob, advantage, loss_params):
    """The policy loss of one token, its derivative by logprob, and whether it was clipped: low, high, dual."""
    ratio_low, ratio_high, dual_clip, _, _, _, _, _, _, _, _, _, _, kind, tau_pos, tau_neg, _, _ = loss_params
    low, high, gains, loses = ratio < ratio_low, ratio > ratio_high, advantage > 0, advantage < 0
    dual = loses & (ratio > dual_clip)
    no_advantage = (advantage == 0) & (ratio == ratio)  # 0 * inf is 0 here
    if kind == 0:  # ppo
        low, high = loses & low, gains & high
        constant = low | high | dual | no_advantage
        held = tl.where(high, ratio_high, tl.where(low, ratio_low, tl.where(dual, dual_clip, 0.0)))
        value = -advantage * tl.where(constant, held, ratio)
        slope = tl.where(constant, 0.0, value)
    elif kind == 3:  # sapo
        tau = tl.where(gains, tau_pos, tau_neg)
        e = exp(-tau * (ratio - 1))
        gate, rest = 1 / (1 + e), 1 / (1 + 1 / e)
        value = -advantage * gate * 4 / tau
        slope = -4 * advantage * tl.where(rest == 0, 0.0, ratio * rest) * gate
    else:  # cispo, reinforce
        weight = tl.where(low, ratio_low, tl.where(high, ratio_high, ratio))
        slope = tl.where(kind == 1, tl.where(no_advantage, 0.0, -advantage * weight), -advantage)
        value = tl.where(slope == 0, 0.0, slope * logprob)
    return value, slope, low, high, dual


@triton.jit
def policy_term(logprob, entropy, old, advantage, weight, ref, loss_params):
    """One token: (c = dL/dlogprob, e = dL/dentropy, policy loss, KL, loss, log-ratio clamped, ratio, low, high, dual,
    clamped). old, ref: None where not given."""
    _, _, _, bound, entropy_coef, kl_coef, _, _, kl_output_clamp, _, _, _, _, loss_type, _, _, kl_gradient, _ = (
        loss_params
    )
    if old is None:
        log_ratio = logprob - logprob
    else:
        log_ratio = logprob - old
    is_clamped = tl.abs(log_ratio) > bound
    x = clamp(log_ratio, bound)
    ratio = exp(x)
    policy, slope, low, high, dual = policy_loss(ratio, logprob, advantage, loss_params)
    by_ratio = (loss_type == 0) | (loss_type == 3)
    slope = tl.where(is_clamped & by_ratio, 0.0, slope)
    loss, kl = policy, policy * 0
    if ref is not None:
        kl, kl_slope, both = kl_estimate(logprob - ref, loss_params)
        weighted_slope = tl.where(ratio == 0, 0.0, ratio * tl.where(is_clamped, kl_slope, both))
        kl = tl.where(kl_gradient == 2, tl.where(ratio == 0, 0.0, ratio * kl), kl)
        kl_slope = tl.where(kl_gradient == 2, weighted_slope, tl.where(kl_gradient == 3, both, kl_slope))
        kl_slope = tl.where(tl.abs(kl) > kl_output_clamp, 0.0, kl_slope)
        kl_slope = tl.where(kl_gradient == 1, logprob - ref, kl_slope)
        kl = clamp(kl, kl_output_clamp)
        slope = tl.where(kl_coef != 0, slope + kl_coef * kl_slope, slope)  # 0 * inf is 0 here, and below
        loss = tl.where(kl_coef != 0, loss + kl_coef * kl, loss)
    loss = tl.where(entropy_coef != 0, loss - entropy_coef * entropy, loss)
    c = tl.where(weight == 0, 0.0, weight * slope)
    e = tl.where((weight == 0) | (entropy_coef == 0), 0.0, -weight * entropy_coef)
    return c, e, policy, kl, loss, x, ratio, low, high, dual, is_clamped


@triton.jit
def row_coefficients(logprob, entropy, inputs, n, valid, loss_params):
    """(c, e) of tokens n, for the kernels that have just computed their log-probs."""
    old_logprobs, advantages, weights, ref_logprobs = inputs
    advantage = tl.load(advantages + n, mask=valid, other=0.0)
    weight = tl.load(weights + n, mask=valid, other=0.0)
    old, ref = None, None
    if old_logprobs is not None:
        old = tl.load(old_logprobs + n, mask=valid, other=0.0)
    if ref_logprobs is not None:
        ref = tl.load(ref_logprobs + n, mask=valid, other=0.0)
    token = policy_term(logprob, entropy, old, advantage, weight, ref, loss_params)
    return token[0], token[1]


@triton.jit
def square(error, delta):
    """error^2, or beyond delta the line that goes on from it."""
    size = tl.abs(error)
    return tl.where(size > delta, delta * (2 * size - delta), error * error)


@triton.jit
def value_term(value, old, target, loss_params):
    """(squared error, its derivative by the value, clipped) of one value; old: None where not given."""
    _, _, _, _, _, _, _, _, _, clip, _, _, delta, _, _, _, _, _ = loss_params
    error = value - target
    if old is None:
        return square(error, delta), 2 * clamp(error, delta), tl.zeros_like(value).to(tl.int1)
    moved = value - old
    bounded = tl.where(moved > 0, old + clip, old - clip) - target
    clipped = (tl.abs(moved) > clip) & (square(bounded, delta) > square(error, delta))
    error = tl.where(clipped, bounded, error)
    return square(error, delta), tl.where(clipped, 0.0, 2 * clamp(error, delta)), clipped


@triton.jit
def weighted(x, weight):
    """weight * x in fp64; a token of weight 0 adds nothing, whatever it holds."""
    return tl.where(weight == 0, 0.0, weight.to(tl.float64) * x.to(tl.float64))


@triton.jit
def token_loss_kernel(
    logprobs, entropies, old_logprobs, advantages, valids, weights, ref_logprobs,
    values, old_values, returns, value_valids, value_weights,
    loss_params, grad_logprobs, grad_entropies, grad_values, partials, n_tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    n = pid * BLOCK + tl.arange(0, BLOCK)
    here = n < n_tokens
    valid = load_mask(valids, n, here)
    logprob = tl.load(logprobs + n, mask=valid, other=0.0)
    entropy = tl.zeros([BLOCK], tl.float32)
    if entropies is not None:
        entropy = tl.load(entropies + n, mask=valid, other=0.0)
    old, ref = None, None
    if old_logprobs is not None:
        old = tl.load(old_logprobs + n, mask=valid, other=0.0)
    if ref_logprobs is not None:
        ref = tl.load(ref_logprobs + n, mask=valid, other=0.0)
    advantage = tl.load(advantages + n, mask=valid, other=0.0)
    weight = tl.load(weights + n, mask=valid, other=0.0)
    c, e, policy, kl, loss, x, ratio, low, high, dual, is_clamped = policy_term(
        logprob, entropy, old, advantage, weight, ref, loss_params
    )
    tl.store(grad_logprobs + n, c, mask=here)
    if entropies is None:
        e = tl.zeros([BLOCK], tl.float32)
    tl.store(grad_entropies + n, e, mask=here)

    to = partials + pid * WIDTH
    zero = tl.zeros([BLOCK], tl.float64)
    wide = x.to(tl.float64)
    tl.store(to + 0, tl.sum(weighted(policy, weight), 0))
    tl.store(to + 1, tl.sum(weighted(entropy, weight), 0))
    tl.store(to + 2, tl.sum(weighted(kl, weight), 0))
    tl.store(to + 4, tl.sum(valid.to(tl.float64), 0))
    tl.store(to + 5, tl.sum(tl.where(valid, ratio.to(tl.float64), zero), 0))
    tl.store(to + 6, tl.sum(tl.where(valid, -wide, zero), 0))
    tl.store(to + 7, tl.sum(tl.where(valid, 0.5 * wide * wide, zero), 0))
    tl.store(to + 8, tl.sum(tl.where(valid, excess(x, ratio).to(tl.float64), zero), 0))
    tl.store(to + 9, tl.sum((valid & low).to(tl.float64), 0))
    tl.store(to + 10, tl.sum((valid & high).to(tl.float64), 0))
    tl.store(to + 11, tl.sum((valid & dual).to(tl.float64), 0))
    tl.store(to + 12, tl.sum((valid & is_clamped).to(tl.float64), 0))
    tl.store(to + 13, tl.sum(entropy.to(tl.float64), 0))
    tl.store(to + 14, tl.sum(tl.where(valid, kl.to(tl.float64), zero), 0))
    finite = tl.abs(loss) < float("inf")
    tl.store(to + 15, tl.sum((valid & ~finite).to(tl.float64), 0))
    tl.store(to + 18, tl.max(tl.where(valid, ratio, LOWEST), 0).to(tl.float64))
    tl.store(to + 19, tl.max(tl.where(valid, -ratio, LOWEST), 0).to(tl.float64))

    if values is not None:
        counted = load_mask(value_valids, n, here)
        value = tl.load(values + n, mask=counted, other=0.0)
        target = tl.load(returns + n, mask=counted, other=0.0)
        _, _, _, _, _, _, _, _, _, _, vf_coef, scale, _, _, _, _, _, _ = loss_params
        share = tl.load(value_weights + n, mask=counted, other=0.0) * scale
        old_value = None
        if old_values is not None:
            old_value = tl.load(old_values + n, mask=counted, other=0.0)
        squared, slope, clipped = value_term(value, old_value, target, loss_params)
        tl.store(grad_values + n, tl.where(share == 0, 0.0, vf_coef * share * slope), mask=here)
        tl.store(to + 3, tl.sum(weighted(squared, share), 0))
        tl.store(to + 16, tl.sum(counted.to(tl.float64), 0))
        tl.store(to + 17, tl.sum((counted & clipped).to(tl.float64), 0))


@triton.jit
def finish_kernel(partials, loss_params, terms, metrics, programs, HAS_VALUES: tl.constexpr, ROWS: tl.constexpr):
    """terms [4]: loss, policy loss, value loss, KL; metrics as in ppo_kernels.metrics.NAMES."""
    column = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float64)
    maxima = tl.full([WIDTH], LOWEST, tl.float64)
    written = column < SUMS + 2
    if not HAS_VALUES:
        written = written & (column != 3) & (column != 16) & (column != 17)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        part = tl.load(partials + row[:, None] * WIDTH + column, mask=(row < programs)[:, None] & written, other=0.0)
        sums += tl.sum(part, 0)
        maxima = tl.maximum(maxima, tl.max(tl.where((row < programs)[:, None], part, LOWEST), 0))
    result = tl.where(column < SUMS, sums, maxima)
    _, _, _, _, entropy_coef, kl_coef, _, _, _, _, vf_coef, _, _, _, _, _, _, _ = loss_params
    policy = tl.sum(tl.where(column == 0, result, 0.0), 0)
    entropy = tl.sum(tl.where(column == 1, result, 0.0), 0)
    kl = tl.sum(tl.where(column == 2, result, 0.0), 0)
    value = tl.sum(tl.where(column == 3, result, 0.0), 0)
    loss = policy
    loss = tl.where(entropy_coef != 0, loss - entropy_coef * entropy, loss)
    loss = tl.where(kl_coef != 0, loss + kl_coef * kl, loss)
    loss += vf_coef * value
    tl.store(terms + 0, loss.to(tl.float32))
    tl.store(terms + 1, policy.to(tl.float32))
    tl.store(terms + 2, value.to(tl.float32))
    tl.store(terms + 3, kl.to(tl.float32))
    tl.store(metrics + column - 4, result.to(tl.float32), mask=(column >= 4) & (column < SUMS + 2))


def flat_inputs(inputs: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """loss_terms.TokenInputs as the kernels read them; bool for the two masks."""
    return [launch.flat(x, torch.bool if i in (2, 8) else torch.float32) for i, x in enumerate(inputs)]


def token_loss(logprobs: Tensor, entropy: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    """The operator ppo_kernels::token_loss."""
    *given, params = args
    inputs = flat_inputs(tuple(given))
    n = logprobs.numel()
    terms = torch.empty(4, dtype=torch.float32, device=logprobs.device)
    metrics = torch.empty(len(NAMES), dtype=torch.float32, device=logprobs.device)
    grads = [torch.empty(n, dtype=torch.float32, device=logprobs.device) for _ in range(2)]
    has_values = inputs[5] is not None
    grads.append(torch.empty_like(grads[0]) if has_values else torch.zeros_like(grads[0]))
    programs = triton.cdiv(n, BLOCK)
    partials = torch.empty(programs, WIDTH.value, dtype=torch.float64, device=logprobs.device)
    numbers = tuple(map(float, params))
    arguments = (launch.flat(logprobs), launch.flat(entropy), *inputs, numbers, *grads, partials, n)
    launch.run(token_loss_kernel, programs, arguments, num_warps=4, device=logprobs.device, BLOCK=BLOCK)
    arguments = (partials, numbers, terms, metrics, programs)
    launch.run(finish_kernel, 1, arguments, num_warps=4, device=logprobs.device, HAS_VALUES=has_values, ROWS=64)
    return terms, metrics, *grads
