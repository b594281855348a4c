"""The specification: the mathematics in plain PyTorch, for any device and for dtypes up to float64.

One row of logits x [V] with target y and temperature T, z = x / T; with a softcap S, S * tanh(x / S) in place of x, and
its slope 1 - tanh^2 as a factor of the gradient (m stays that of the logits themselves, for a cap is monotone):

    m = max(x),  t_i = (x_i - m) / T,  s = sum(exp(t_i)),  w = sum(exp(t_i) * t_i)
    logprob = t_y - log(s),   entropy H = log(s) - w / s
    dL/dx_i = (c * (1[i=y] - p_i) - e * p_i * (log p_i + H)) / T,   p_i = exp(t_i) / s,   log p_i + H = t_i - w / s

where c = dL/dlogprob and e = dL/dentropy come from the token loss (loss_terms.py), which never sees the vocabulary.
Masked rows are dropped by selection before any arithmetic: a masked slot may hold NaN and changes nothing.
The kernels (csrc/) compute exactly these functions; the operators in ops.py choose between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.config import MAX_TEMPERATURE, MIN_TEMPERATURE


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


def tempered(
    x: Tensor, row_max: Tensor, temperature: float, row_temperature: Tensor | None, softcap: float
) -> tuple[Tensor, float | Tensor]:
    """(x - m) / T of rows x [N, V] with their m [N], after the softcap, and T; rows whose temperature is out of range
    are NaN. -inf stays -inf, a column that does not exist."""
    m, divisor = row_max[:, None], temperature if row_temperature is None else row_temperature.to(x.dtype)[:, None]
    if isinstance(divisor, Tensor):
        divisor = torch.where((divisor >= MIN_TEMPERATURE) & (divisor <= MAX_TEMPERATURE), divisor, torch.nan)
    if softcap == torch.inf:
        return (x - m) / divisor, divisor
    a, b = x.double() / softcap, m.double() / softcap  # a capped logit in fp32 is too coarse for a log-prob
    difference = torch.where(a == -torch.inf, a, softcap * (a.tanh() - b.tanh()))
    return difference.to(x.dtype) / divisor, divisor


def row_stats(
    logits: Tensor,
    tokens: Tensor,
    valid: Tensor | None,
    temperature: float,
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
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
    row_max = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)  # finite for a row of -inf, whose sum is 0 then
    t, _ = tempered(x, row_max, temperature, row_temperature, softcap)
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
    row_temperature: Tensor | None,
    softcap: float,
    vocab_size: int,
    shift: bool,
    logprobs: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    row_mean: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """dL/dlogits, shape and dtype of logits, contiguous; rows with zero coefficients (or not valid) are exactly 0.

    A token outside [0, vocab_size) is in none of these columns, which are then a part of the vocabulary.
    """
    grad = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    rows, tokens = scored_rows(logits, tokens, shift)
    x = rows[:, :vocab_size].to(accumulate_dtype(logits.dtype))
    active = grad_logprobs != 0
    if grad_entropy is not None:
        active = active | (grad_entropy != 0)
    if valid is not None:
        active = active & valid
    c = grad_logprobs[:, None]
    t, divisor = tempered(x, row_max, temperature, row_temperature, softcap)
    p = t.exp() / row_sum[:, None]
    here = ((tokens >= 0) & (tokens < vocab_size))[:, None]
    y = tokens[:, None].where(here, 0)
    minus_rest = torch.expm1(logprobs)[:, None].where(here, p[:, :1])  # p_y - 1, to full precision
    dx = -c * p.scatter(-1, y, minus_rest)
    if grad_entropy is not None and row_mean is not None:
        dx = dx - grad_entropy[:, None] * torch.where(p == 0, 0.0, p * (t - row_mean[:, None]))
    if softcap != torch.inf:
        dx = dx * (x.double() / softcap).cosh().pow(-2).to(x.dtype)
    dx = torch.where(active[:, None], dx / divisor, 0.0).to(grad.dtype)
    target = grad[..., :-1, :vocab_size] if shift else grad[..., :vocab_size]
    target.copy_(dx.view(target.shape))
    return grad


def check_tokens(tokens: Tensor, valid: Tensor | None, vocab_size: int) -> None:
    """On a CPU, IndexError for a token outside the vocabulary; elsewhere a check would synchronise."""
    if not checks.eager_cpu(tokens):
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


WHITEN_EPS_ON = ("var", "std", "clamp")


def whiten(
    x: Tensor,
    valid: Tensor | None,
    shift_mean: bool,
    unbiased: bool,
    eps: float,
    eps_on: str,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """(x - mean) / deviation over valid elements, 0 at the others, in two passes; all equal gives 0.

    deviation: sqrt(variance + eps), sqrt(variance) + eps or sqrt(max(variance, eps)) by eps_on. all_reduce adds a
    tensor up over ranks.
    """
    add = all_reduce or (lambda part: part)
    wide = x.double() if valid is None else torch.where(valid, x.double(), 0.0)
    local = wide.new_full((), x.numel()) if valid is None else valid.sum().double()
    total, count = add(torch.stack([wide.sum(), local])).unbind()
    mean = total / count.clamp(min=1)
    centred = wide - mean if valid is None else torch.where(valid, wide - mean, 0.0)
    rounding = 4 * torch.finfo(torch.float64).eps * mean.abs()  # that of the mean: equal values differ by nothing
    centred = torch.where(centred.abs() <= rounding, 0.0, centred)
    variance = add(centred.square().sum()) / (count - int(unbiased)).clamp(min=1)
    if eps_on == "std":
        deviation = variance.sqrt() + eps
    else:
        deviation = (variance + eps if eps_on == "var" else variance.clamp(min=eps)).sqrt()
    whitened = torch.where(centred == 0, 0.0, centred / deviation)  # eps may be 0
    if not shift_mean:
        whitened = whitened + mean if valid is None else torch.where(valid, whitened + mean, 0.0)
    return whitened.to(accumulate_dtype(x.dtype))
