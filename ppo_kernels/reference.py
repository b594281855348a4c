"""The specification: all the mathematics in plain PyTorch, for any device and for dtypes up to float64.

One row of logits x [V] with target y and temperature T, z = x / T:

    m = max(x),  t_i = (x_i - m) / T,  s = sum(exp(t_i)),  w = sum(exp(t_i) * t_i)
    logprob = t_y - log(s),   entropy H = log(s) - w / s
    dL/dx_i = (c * (1[i=y] - p_i) - e * p_i * (log p_i + H)) / T,   p_i = exp(t_i) / s,   log p_i + H = t_i - w / s

where c = dL/dlogprob and e = dL/dentropy come from the token loss, which never sees the vocabulary.
Masked rows are dropped by selection before any arithmetic: a masked slot may hold NaN and changes nothing.
The kernels (csrc/) compute exactly these functions; the operators in ops.py choose between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels.config import KL_ESTIMATORS, LossParams
from ppo_kernels.metrics import NO_MAXIMUM


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 inputs are computed in float64, all others in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------------------------------
# Rows of logits
# ---------------------------------------------------------------------------------------------------------------------


def scored_rows(logits: Tensor, tokens: Tensor, shift: bool) -> tuple[Tensor, Tensor]:
    """logits [N, V] and tokens [N] such that row n scores tokens[n]; with `shift` row t scores token t + 1."""
    if shift:
        logits, tokens = logits[..., :-1, :], tokens[..., 1:]
    return logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1).to(torch.int64)


def row_stats(
    logits: Tensor, tokens: Tensor, valid: Tensor | None, temperature: float, vocab_size: int, shift: bool
) -> tuple[Tensor, ...]:
    """(logprobs, entropy, row_max m, row_sum s, row_mean w / s), each [N]; 0, 0, 0, 1, 0 for rows that are not
    valid."""
    logits, tokens = scored_rows(logits, tokens, shift)
    check_tokens(tokens, valid, vocab_size)
    x = logits[:, :vocab_size].to(accumulate_dtype(logits.dtype))
    if valid is not None:
        x = x.masked_fill(~valid[:, None], 0.0)
        tokens = tokens.masked_fill(~valid, 0)
    in_range = (tokens >= 0) & (tokens < vocab_size)  # on a CPU check_tokens has raised; elsewhere NaN shows the fault
    y = tokens.masked_fill(~in_range, 0)[:, None]
    row_max = x.amax(-1)
    t = (x - row_max[:, None]) / temperature
    exp_t = t.exp()
    weighted = torch.where(exp_t == 0, 0.0, exp_t * t)  # -inf logits: 0 * -inf is 0 here
    t_y = t.gather(-1, y)[:, 0].masked_fill(~in_range, torch.nan)
    others = exp_t.scatter(-1, y, 0.0).sum(-1)
    log_sum = torch.log1p(others + torch.expm1(t_y))  # the sum is near 1 for a peaked row: log1p keeps what is left
    row_sum = others + t_y.exp()
    logprobs = t_y - log_sum
    row_mean = weighted.sum(-1) / row_sum
    entropy = log_sum - row_mean
    if valid is not None:
        logprobs, entropy, row_max, row_mean = (
            x.masked_fill(~valid, 0.0) for x in (logprobs, entropy, row_max, row_mean)
        )
        row_sum = row_sum.masked_fill(~valid, 1.0)
    return logprobs, entropy, row_max, row_sum, row_mean


def row_grad(
    logits: Tensor,
    tokens: Tensor,
    valid: Tensor | None,
    temperature: float,
    vocab_size: int,
    shift: bool,
    logprobs: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_mean: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """dL/dlogits, shape and dtype of logits, contiguous; rows with zero coefficients (or not valid) are exactly 0."""
    grad = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, tokens = scored_rows(logits, tokens, shift)
    x = rows[:, :vocab_size].to(accumulate_dtype(logits.dtype))
    active = grad_logprobs != 0
    if grad_entropy is not None:
        active = active | (grad_entropy != 0)
    if valid is not None:
        active = active & valid
    c = grad_logprobs[:, None]
    t = (x - row_max[:, None]) / temperature
    p = t.exp() / row_sum[:, None]
    y = tokens.clamp(0, vocab_size - 1)[:, None]
    dx = -c * p.scatter(-1, y, torch.expm1(logprobs)[:, None])  # p_y - 1 to full precision
    if grad_entropy is not None and row_mean is not None:
        dx = dx - grad_entropy[:, None] * torch.where(p == 0, 0.0, p * (t - row_mean[:, None]))
    dx = torch.where(active[:, None], dx / temperature, 0.0).to(grad.dtype)
    target = grad[..., :-1, :vocab_size] if shift else grad[..., :vocab_size]
    target.copy_(dx.view(target.shape))
    return grad


def check_tokens(tokens: Tensor, valid: Tensor | None, vocab_size: int) -> None:
    """On a CPU, IndexError for a token outside the vocabulary; elsewhere a check would synchronise."""
    if tokens.device.type != "cpu":
        return
    bad = (tokens < 0) | (tokens >= vocab_size)
    if valid is not None:
        bad = bad & valid
    if bool(bad.any()):
        raise_bad_token(tokens, int(bad.nonzero()[0]), vocab_size)


def raise_bad_token(tokens: Tensor, position: int, vocab_size: int) -> None:
    """The error both CPU paths raise."""
    token = int(tokens[position])
    raise IndexError(
        f"tokens holds {token} at scored position {position}, expected 0 <= token < {vocab_size}; mask it out"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loss of one token
# ---------------------------------------------------------------------------------------------------------------------


class TokenLoss(NamedTuple):
    """What `token_loss` returns. `terms`: loss, policy_loss, value_loss, kl; `metrics`: sums as in metrics.NAMES."""

    terms: Tensor
    metrics: Tensor
    grad_logprobs: Tensor
    grad_entropy: Tensor
    grad_values: Tensor


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


def policy_surrogate(log_ratio: Tensor, advantages: Tensor, p: LossParams) -> tuple[Tensor, Tensor]:
    """max(-A r, -A clip(r)), then at most -dual_clip * A where A < 0, and its derivative by log_ratio.

    Eq. 7 of PPO, eq. 5 of dual-clip PPO. Bounds are inclusive: a ratio exactly on a bound still has derivative -A r.
    """
    ratio = log_ratio.clamp(-p.log_ratio_clamp, p.log_ratio_clamp).exp()
    high = (advantages > 0) & (ratio > p.ratio_high)
    low = (advantages < 0) & (ratio < p.ratio_low)
    dual = (advantages < 0) & (ratio > p.dual_clip)
    bound = torch.where(high, p.ratio_high, torch.where(low, p.ratio_low, 0.0))
    if p.dual_clip != torch.inf:
        bound = torch.where(dual, p.dual_clip, bound)
    constant = high | low | dual | ((advantages == 0) & ~ratio.isnan())  # 0 * inf is 0 here
    value = -advantages * torch.where(constant, bound.to(ratio.dtype), ratio)
    return value, torch.where(constant | (log_ratio.abs() > p.log_ratio_clamp), 0.0, value)


def kl_estimate(log_ratio: Tensor, p: LossParams) -> tuple[Tensor, Tensor]:
    """Per-token estimate of KL(policy || reference) and its derivative, from d = logprob - ref_logprob; both clamps."""
    kind = KL_ESTIMATORS[int(p.kl_estimator)]
    d = log_ratio.clamp(-p.kl_input_clamp, p.kl_input_clamp)
    if kind == "k1":
        value, slope = d, torch.ones_like(d)
    elif kind == "k2":
        value, slope = 0.5 * d * d, d
    elif kind == "k3":
        value, slope = torch.expm1(-d) + d, -torch.expm1(-d)
    else:
        value, slope = d.abs(), d.sign()
    outside = (value.abs() > p.kl_output_clamp) | (log_ratio.abs() > p.kl_input_clamp)
    return value.clamp(-p.kl_output_clamp, p.kl_output_clamp), torch.where(outside, 0.0, slope)


def value_loss(
    values: Tensor, old_values: Tensor | None, returns: Tensor, p: LossParams
) -> tuple[Tensor, Tensor, Tensor]:
    """(l, dl/dV, clipped) with l = value_loss_scale * max((V - R)^2, (V_clipped - R)^2): the pessimistic choice."""
    error, clipped = values - returns, torch.zeros_like(values, dtype=torch.bool)
    if old_values is not None:
        moved = values - old_values
        bounded = torch.where(moved > 0, old_values + p.value_clip, old_values - p.value_clip) - returns
        clipped = (moved.abs() > p.value_clip) & (bounded.square() > error.square())
        error = torch.where(clipped, bounded, error)
    slope = torch.where(clipped, 0.0, 2 * p.value_loss_scale * error)
    return p.value_loss_scale * error.square(), slope, clipped


def token_loss(logprobs: Tensor, entropy: Tensor | None, inputs: TokenInputs, params: Sequence[float]) -> TokenLoss:
    """Loss, metrics and the coefficients dL/dlogprob, dL/dentropy, dL/dvalues, all [N] but for the sums."""
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
    policy, slope = policy_surrogate(log_ratio, advantages, p)
    token, kl, kl_term = policy, zeros, zeros.sum()
    loss = policy_term = share(policy).sum()
    grad_entropy = zeros.clone()
    if entropy is not None:
        entropy = select(entropy)
        if p.entropy_coef != 0:
            loss = loss - p.entropy_coef * share(entropy).sum()
            token = token - p.entropy_coef * entropy
            grad_entropy = share(torch.full_like(entropy, -p.entropy_coef))
    if inputs.ref_logprobs is not None:
        kl, kl_slope = kl_estimate(logprobs - select(inputs.ref_logprobs), p)
        kl_term = share(kl).sum()
        if p.kl_coef != 0:
            loss = loss + p.kl_coef * kl_term
            token = token + p.kl_coef * kl
            slope = slope + p.kl_coef * kl_slope

    value_term, value_tokens, value_clipped = zeros.sum(), zeros.sum(), zeros.sum()
    grad_values = zeros.clone()
    values, old_values, returns = inputs.values, inputs.old_values, inputs.returns
    if values is not None and returns is not None and inputs.value_weight is not None:
        value_valid = torch.ones_like(valid) if inputs.value_valid is None else inputs.value_valid
        values, returns = torch.where(value_valid, values, 0.0), torch.where(value_valid, returns, 0.0)
        old_values = None if old_values is None else torch.where(value_valid, old_values, 0.0)
        squared, value_slope, clipped = value_loss(values, old_values, returns, p)
        counted_values = value_valid & (inputs.value_weight != 0)
        value_term = torch.where(counted_values, squared * inputs.value_weight, 0.0).sum()
        grad_values = torch.where(counted_values, p.vf_coef * inputs.value_weight * value_slope, 0.0)
        value_tokens, value_clipped = value_valid.sum(), (clipped & value_valid).sum()
        loss = loss + p.vf_coef * value_term

    clamped = log_ratio.clamp(-p.log_ratio_clamp, p.log_ratio_clamp)
    ratio = clamped.exp()
    per_token = (
        valid,
        ratio,
        -clamped,
        0.5 * clamped.square(),
        torch.expm1(clamped) - clamped,
        (advantages < 0) & (ratio < p.ratio_low),
        (advantages > 0) & (ratio > p.ratio_high),
        (advantages < 0) & (ratio > p.dual_clip),
        log_ratio.abs() > p.log_ratio_clamp,
        zeros if entropy is None else entropy,
        kl,
        ~token.isfinite(),
    )
    none = ratio.new_full((1,), NO_MAXIMUM)
    known = valid & ~ratio.isnan()
    extremes = [torch.cat([torch.where(known, x, NO_MAXIMUM), none]).amax() for x in (ratio, -ratio)]
    metrics = [*(select(x.to(ratio.dtype)).sum() for x in per_token), value_tokens, value_clipped, *extremes]
    terms = torch.stack([loss, policy_term, value_term, kl_term])
    return TokenLoss(terms, torch.stack([x.float() for x in metrics]), share(slope), grad_entropy, grad_values)


# ---------------------------------------------------------------------------------------------------------------------
# Generalised advantage estimation
# ---------------------------------------------------------------------------------------------------------------------


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
    """Advantages and returns, flat [N]; sequence i is segments[i]:segments[i+1] (Schulman et al. 2016, eq. 16).
    row_lam [sequences] replaces lam.

    delta_t = r_t + gamma * (1 - terminated_t) * V_next - V_t
    A_t = delta_t + gamma * lam * (1 - (terminated_t or truncated_t)) * A_next
    """
    n = rewards.shape[0]
    acc = torch.float64
    r, v = rewards.to(acc), values.to(acc)
    if valid is not None and mask_mode == "zero":
        r, v = r.masked_fill(~valid, 0.0), v.masked_fill(~valid, 0.0)
    starts, ends = segments[:-1], segments[1:]
    lengths = ends - starts
    decay = gamma * (lam if row_lam is None else row_lam.to(acc))
    running = torch.zeros(starts.shape[0], dtype=acc, device=r.device)
    following = torch.zeros_like(running) if bootstrap is None else bootstrap.to(acc)
    advantages = torch.zeros(n, dtype=acc, device=r.device)
    for step in range(int(lengths.max()) if lengths.numel() else 0):
        live = lengths > step  # sequences that reach this far back from their end
        at = (ends - 1 - step).clamp(0, max(n - 1, 0))
        here = live & valid[at] if valid is not None and mask_mode == "skip" else live
        ended = torch.zeros_like(here) if terminated is None else terminated[at]
        cut = ended if truncated is None else ended | truncated[at]
        nxt = following if next_values is None else next_values[at].to(acc)
        delta = r[at] + gamma * torch.where(ended, 0.0, nxt) - v[at]
        current = delta + decay * torch.where(cut, 0.0, running)
        running = torch.where(here, current, running)
        following = torch.where(here, v[at], following)
        advantages[at[here]] = current[here]
    advantages = advantages.to(accumulate_dtype(rewards.dtype))
    returns = advantages + values.to(advantages.dtype)
    if valid is not None:
        advantages, returns = advantages.masked_fill(~valid, 0.0), returns.masked_fill(~valid, 0.0)
    return advantages, returns


# ---------------------------------------------------------------------------------------------------------------------
# Whitening
# ---------------------------------------------------------------------------------------------------------------------


def whiten(x: Tensor, valid: Tensor | None, shift_mean: bool, unbiased: bool, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) over valid elements, 0 at the others, in two passes; all equal gives 0."""
    wide = x.double() if valid is None else torch.where(valid, x.double(), 0.0)
    count = torch.full((), x.numel(), device=x.device) if valid is None else valid.sum()
    mean = wide.sum() / count.clamp(min=1)
    centred = wide - mean if valid is None else torch.where(valid, wide - mean, 0.0)
    variance = centred.square().sum() / (count - int(unbiased)).clamp(min=1)
    whitened = torch.where(centred == 0, 0.0, centred * torch.rsqrt(variance + eps))  # eps may be 0
    if not shift_mean:
        whitened = whitened + mean if valid is None else torch.where(valid, whitened + mean, 0.0)
    return whitened.to(accumulate_dtype(x.dtype))
