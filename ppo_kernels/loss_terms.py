"""The specification of everything of size N: the loss of each token, its metrics, and dL/dlogprob and dL/dentropy.

Plain PyTorch, for any device and for dtypes up to float64; the kernels (csrc/token_loss.h and
triton_kernels/token_loss.py) compute exactly `token_loss` for ratios of tokens. Derivatives are written out next to
their values: autograd's would be NaN where a clipped branch overflows. Masked slots are dropped by selection before any
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels.aggregation import Sequences
from ppo_kernels.config import KL_ESTIMATORS, KL_GRADIENTS, LOSS_TYPES, RATIO_LEVELS, LossParams
from ppo_kernels.metrics import NO_MAXIMUM


class TokenInputs(NamedTuple):
    """Everything of size N that the loss reads, flat [N]. `weight` is the share of each token in the loss."""

    old_logprobs: Tensor | None
    advantages: Tensor
    valid: Tensor | None
    weight: Tensor
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    value_valid: Tensor | None = None
    value_weight: Tensor | None = None


class Term(NamedTuple):
    """A term of the loss, per token [N], and its derivatives by the log of the ratio and by the token's log-prob."""

    value: Tensor
    by_ratio: Tensor
    by_logprob: Tensor


class Ratio(NamedTuple):
    """The policy ratio of each token [N] at its level."""

    ratio: Tensor
    clamped: Tensor  # bool: no gradient
    token_log: Tensor  # of the token itself: what the KL metrics are of


def policy_ratio(log_ratio: Tensor, p: LossParams, sequences: Sequences | None, valid: Tensor) -> Ratio:
    bound = p.log_ratio_clamp
    if sequences is None:
        log = log_ratio.clamp(-bound, bound)
        return Ratio(log.exp(), log_ratio.abs() > bound, log)
    mean = sequences.mean(log_ratio, valid)
    return Ratio(mean.clamp(max=bound).exp(), mean > bound, log_ratio)


def policy_surrogate(
    r: Ratio, logprobs: Tensor, advantages: Tensor, p: LossParams
) -> tuple[Term, Tensor, Tensor, Tensor]:
    """(the term, and bool [N] each: clipped from below, from above, by dual_clip).

    Each is linear in A for a given sign of A. Bounds are inclusive: a ratio exactly on one still has its gradient.
    """
    kind = LOSS_TYPES[int(p.loss_type)]
    ratio, nothing = r.ratio, torch.zeros_like(r.ratio)
    high, low, dual = ratio > p.ratio_high, ratio < p.ratio_low, (advantages < 0) & (ratio > p.dual_clip)
    if kind == "ppo":
        high, low = (advantages > 0) & high, (advantages < 0) & low
        bound = torch.where(high, p.ratio_high, torch.where(low, p.ratio_low, nothing))
        if p.dual_clip != torch.inf:
            bound = torch.where(dual, p.dual_clip, bound)
        constant = high | low | dual | ((advantages == 0) & ~ratio.isnan())  # 0 * inf is 0 here
        value = -advantages * torch.where(constant, bound, ratio)
        return Term(value, torch.where(constant | r.clamped, 0.0, value), nothing), low, high, dual
    if kind == "sapo":
        tau = torch.where(advantages > 0, p.sapo_tau_pos, torch.full_like(ratio, p.sapo_tau_neg))
        gate, rest = torch.sigmoid(tau * (ratio - 1)), torch.sigmoid(-tau * (ratio - 1))
        slope = -4 * advantages * torch.where(rest == 0, 0.0, ratio * rest) * gate
        return Term(-advantages * gate * 4 / tau, torch.where(r.clamped, 0.0, slope), nothing), low, high, dual
    slope = -advantages
    if kind == "cispo":
        weight = ratio.clamp(p.ratio_low, p.ratio_high)
        slope = torch.where((advantages == 0) & ~ratio.isnan(), 0.0, slope * weight)
    return Term(torch.where(slope == 0, 0.0, slope * logprobs), nothing, slope), low, high, dual


def kl_estimate(log_ratio: Tensor, p: LossParams) -> tuple[Tensor, Tensor, Tensor]:
    """k of KL(policy || reference) by d = logprob - ref_logprob, dk/dd, and k + dk/dd without cancellation.

    After the input clamp; the output's is the caller's.
    """
    kind = KL_ESTIMATORS[int(p.kl_estimator)]
    d = log_ratio.clamp(-p.kl_input_clamp, p.kl_input_clamp)
    if kind == "k3":
        value, slope, both = torch.expm1(-d) + d, -torch.expm1(-d), d
    else:
        if kind == "k1":
            value, slope = d, torch.ones_like(d)
        elif kind == "k2":
            value, slope = 0.5 * d * d, d
        else:
            value, slope = d.abs(), d.sign()
        both = value + slope
    outside = log_ratio.abs() > p.kl_input_clamp
    return value, torch.where(outside, 0.0, slope), torch.where(outside, 0.0, both)


def kl_term(log_ratio: Tensor, r: Ratio, p: LossParams) -> Term:
    """The KL term of the loss, before kl_coef; log_ratio = logprob - ref_logprob."""
    gradient = KL_GRADIENTS[int(p.kl_gradient)]
    value, slope, both = kl_estimate(log_ratio, p)
    by_ratio, by_logprob = torch.zeros_like(value), {"score": both, "k2": log_ratio}.get(gradient, slope)
    if gradient == "is_weighted":
        value, slope, both = (torch.where(r.ratio == 0, 0.0, x) for x in (value, slope, both))  # 0 * inf is 0 here
        if p.ratio_level == 0:  # of one and the same log-prob: r * k + r * dk, whose parts may cancel
            by_logprob = r.ratio * torch.where(r.clamped, slope, both)
        else:
            still = r.clamped | (log_ratio.abs() > p.kl_input_clamp)
            by_ratio, by_logprob = torch.where(still, 0.0, r.ratio * value), r.ratio * slope
        value = r.ratio * value
    if gradient != "k2":  # which passes the clamp by
        over = value.abs() > p.kl_output_clamp
        by_ratio, by_logprob = torch.where(over, 0.0, by_ratio), torch.where(over, 0.0, by_logprob)
    return Term(value.clamp(-p.kl_output_clamp, p.kl_output_clamp), by_ratio, by_logprob)


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, p: LossParams
) -> tuple[Tensor, Tensor, Tensor]:
    """(l, dl/dV, clipped) with l = value_loss_scale * max(h(V - R), h(V_clipped - R)): the pessimistic choice.

    h is the square, or beyond huber_delta the line that goes on from it.
    """
    error, clipped = values - returns, torch.zeros_like(values, dtype=torch.bool)
    if old_values is not None:
        moved = values - old_values
        bounded = torch.where(moved > 0, old_values + p.value_clip, old_values - p.value_clip) - returns
        clipped = (moved.abs() > p.value_clip) & (_square(bounded, p) > _square(error, p))
        error = torch.where(clipped, bounded, error)
    slope = 2 * p.value_loss_scale * error.clamp(-p.huber_delta, p.huber_delta)
    return p.value_loss_scale * _square(error, p), torch.where(clipped, 0.0, slope), clipped


def _square(error: Tensor, p: LossParams) -> Tensor:
    if p.huber_delta == torch.inf:
        return error.square()
    size = error.abs()
    return torch.where(size > p.huber_delta, p.huber_delta * (2 * size - p.huber_delta), error.square())


class TokenLoss(NamedTuple):
    """`terms` [4]: loss, policy_loss, value_loss, kl; `metrics`: sums as in metrics.NAMES; then per token [N].

    dL/dlogprob is grad_logprobs and, for ratios of sequences, the sequence mean of grad_ratio.
    """

    terms: Tensor
    metrics: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    grad_values: Tensor
    grad_ratio: Tensor
    losses: Tensor  # weighted
    per_token: dict[str, Tensor]


def token_loss(
    logprobs: Tensor,
    entropy: Tensor | None,
    inputs: TokenInputs,
    params: Sequence[float],
    sequences: Sequences | None = None,
) -> TokenLoss:
    """Loss, metrics and the coefficients dL/dlogprob, dL/dentropy, dL/dvalues, all [N] but for the sums.

    sequences: what p.ratio_level other than "token" needs.
    """
    p = LossParams(*params)
    valid = torch.ones_like(logprobs, dtype=torch.bool) if inputs.valid is None else inputs.valid
    counted = valid & (inputs.weight != 0)  # a token of weight 0 adds nothing, whatever it holds
    zeros = torch.zeros_like(logprobs)

    def select(x: Tensor) -> Tensor:  # masked slots are read as 0
        return torch.where(valid, x, 0.0)

    def share(x: Tensor) -> Tensor:
        return torch.where(counted, x * inputs.weight, 0.0)

    logprobs, advantages = select(logprobs), select(inputs.advantages)
    log_ratio = logprobs - (logprobs if inputs.old_logprobs is None else select(inputs.old_logprobs))
    r = policy_ratio(log_ratio, p, sequences, valid)
    policy, low, high, dual = policy_surrogate(r, logprobs, advantages, p)
    token, kl, by_ratio, by_logprob = policy.value, zeros, policy.by_ratio, policy.by_logprob
    losses = policy_share = share(policy.value)
    kl_share = zeros
    grad_entropy = zeros.clone()
    if entropy is not None:
        entropy = select(entropy)
        if p.entropy_coef != 0:
            losses = losses - p.entropy_coef * share(entropy)
            token = token - p.entropy_coef * entropy
            grad_entropy = share(torch.full_like(entropy, -p.entropy_coef))
    if inputs.ref_logprobs is not None:
        kl, kl_by_ratio, kl_by_logprob = kl_term(logprobs - select(inputs.ref_logprobs), r, p)
        kl_share = share(kl)
        if p.kl_coef != 0:
            losses = losses + p.kl_coef * kl_share
            token = token + p.kl_coef * kl
            by_ratio, by_logprob = by_ratio + p.kl_coef * kl_by_ratio, by_logprob + p.kl_coef * kl_by_logprob

    value_share, value_tokens, value_clipped = zeros, zeros.sum(), zeros.sum()
    grad_values = zeros.clone()
    values, old_values, returns = inputs.values, inputs.old_values, inputs.returns
    if values is not None and returns is not None and inputs.value_weight is not None:
        value_valid = torch.ones_like(valid) if inputs.value_valid is None else inputs.value_valid
        values, returns = torch.where(value_valid, values, 0.0), torch.where(value_valid, returns, 0.0)
        old_values = None if old_values is None else torch.where(value_valid, old_values, 0.0)
        error, value_slope, clipped = value_loss(values, old_values, returns, p)
        counted_values = value_valid & (inputs.value_weight != 0)
        value_share = torch.where(counted_values, error * inputs.value_weight, 0.0)
        grad_values = torch.where(counted_values, p.vf_coef * inputs.value_weight * value_slope, 0.0)
        value_tokens, value_clipped = value_valid.sum(), (clipped & value_valid).sum()
        losses = losses + p.vf_coef * value_share

    sums = (
        valid,
        r.ratio,
        -r.token_log,
        0.5 * r.token_log.square(),
        torch.expm1(r.token_log) - r.token_log,
        low,
        high,
        dual,
        r.clamped,
        zeros if entropy is None else entropy,
        kl,
        ~token.isfinite(),
    )
    none = zeros.new_full((1,), NO_MAXIMUM)
    known = valid & ~r.ratio.isnan()
    extremes = [torch.cat([torch.where(known, x, NO_MAXIMUM), none]).amax() for x in (r.ratio, -r.ratio)]
    metrics = [*(select(x.to(zeros.dtype)).sum() for x in sums), value_tokens, value_clipped, *extremes]
    terms = torch.stack([x.sum() for x in (losses, policy_share, value_share, kl_share)])
    per_token = {"loss": token, "policy_loss": policy.value, "kl": kl, "ratio": r.ratio}
    per_token |= {"clip_mask": valid & (low | high), "dual_clip_mask": valid & dual}
    grad_ratio, grad_logprobs = share(by_ratio), share(by_logprob)
    if RATIO_LEVELS[int(p.ratio_level)] != "sequence":  # a token's gradient is its own
        grad_logprobs, grad_ratio = grad_logprobs + grad_ratio, zeros
    packed = torch.stack([x.float() for x in metrics])
    return TokenLoss(terms, packed, grad_logprobs, grad_entropy, grad_values, grad_ratio, losses, per_token)
