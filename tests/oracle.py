"""The test oracle: every formula of the library once more, in float64, as plainly as it can be said.

It shares no code with ppo_kernels. A vocabulary row is a numpy float64 vector, a token is a Python float, a sequence
is a Python loop. Every gradient is analytic, written branch by branch next to its value; `test_oracle.py` checks those
branches against float64 autograd and against numbers worked out by hand.

Conventions: new/old/ref are log-probabilities in nats, `delta = new - old`, `ratio = exp(delta)`, a mask is truthy
where a token counts, all losses are minimised. A masked slot is skipped by `continue`: its content is never looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

NAN = float("nan")
INF = float("inf")


def to_numpy(x: Any) -> np.ndarray:
    """Any tensor or array as float64, values unchanged (bf16 and fp16 widen exactly)."""
    if isinstance(x, torch.Tensor):
        return x.detach().to("cpu", torch.float64).numpy()
    return np.asarray(x, dtype=np.float64)


def to_mask(mask: Any, shape: Sequence[int]) -> np.ndarray:
    """`mask` as booleans of `shape`; None means every token counts."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    values = (
        mask.detach().cpu().numpy()
        if isinstance(mask, torch.Tensor) and mask.dtype != torch.bfloat16
        else to_numpy(mask)
    )
    assert values.shape == tuple(shape), (values.shape, shape)
    return values != 0


def exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return INF


# ---------------------------------------------------------------------------------------- one row of the vocabulary


@dataclass
class RowScore:
    logprob: float
    entropy: float
    d_logprob: np.ndarray  # [V] d logprob / d logits
    d_entropy: np.ndarray  # [V] d entropy / d logits


def score_row(
    logits: np.ndarray,
    token: int,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> RowScore:
    """Softmax of one row [V] over the columns that exist; -inf columns are dropped: no probability, no gradient.

    The logits are scaled, then capped to softcap * tanh(logits / softcap), then divided by the temperature.
    """
    width = len(logits) if vocab_size is None else vocab_size
    assert 0 <= token < width, (token, width)
    live = np.flatnonzero(logits[:width] != -np.inf)
    d_logprob = np.zeros(len(logits))
    d_entropy = np.zeros(len(logits))
    if len(live) == 0 or not np.isfinite(logits[live]).all():
        d_logprob[:width] = d_entropy[:width] = NAN
        return RowScore(NAN, NAN, d_logprob, d_entropy)

    logits = logits * scale
    slope = np.full(len(logits), scale)
    if softcap is not None:
        with np.errstate(over="ignore"):  # cosh of a saturated logit: its slope is 0
            slope = scale / np.cosh(logits / softcap) ** 2
        logits = np.where(logits == -np.inf, logits, softcap * np.tanh(logits / softcap))

    # All but the largest logit are summed on their own: 1 - p and log(1 + tail) would lose a small tail.
    z = logits[live] / temperature
    top = int(z.argmax())
    shifted = z - z[top]
    weights = np.exp(shifted)
    log_sum = math.log1p(np.delete(weights, top).sum())
    log_p = shifted - log_sum
    p = np.exp(log_p)
    entropy = float(-(p * log_p).sum())
    logprob = (
        float(logits[token]) / temperature - float(z[top])
    ) - log_sum  # -inf if the token's own column was dropped

    d_logprob[live] = -p
    d_logprob[token] = p[live != token].sum()
    d_entropy[live] = -p * (log_p + entropy)
    factor = slope / temperature
    return RowScore(logprob, entropy, d_logprob * factor, d_entropy * factor)


@dataclass
class Scores:
    logprobs: np.ndarray  # tokens' shape, or [..., S-1] with shift
    entropy: np.ndarray
    rows: dict[tuple[int, ...], RowScore]  # index of the scored position -> its row; masked rows are absent
    logits_shape: tuple[int, ...]

    def d_logits(self, d_logprobs: np.ndarray, d_entropy: np.ndarray | None = None) -> np.ndarray:
        """Gradient of the logits for the given upstream gradients; zero for masked rows and the last row of a shift."""
        grad = np.zeros(self.logits_shape)
        for index, row in self.rows.items():
            up_logprob = float(d_logprobs[index])
            up_entropy = 0.0 if d_entropy is None else float(d_entropy[index])
            if up_logprob != 0:  # 0 * NaN must not appear where the loss does not depend on the row
                grad[index] += up_logprob * row.d_logprob
            if up_entropy != 0:
                grad[index] += up_entropy * row.d_entropy
        return grad


def score(
    logits: Any,
    tokens: Any,
    mask: Any = None,
    *,
    temperature: Any = 1.0,
    vocab_size: int | None = None,
    shift: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Scores:
    """logits [..., V], tokens [...] -> log-probability and entropy of every token that counts, 0 where masked.

    temperature: a number, or one for each result.
    """
    x = to_numpy(logits)
    ids = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    shape = (*ids.shape[:-1], ids.shape[-1] - 1) if shift else ids.shape
    valid, temperatures = to_mask(mask, shape), np.broadcast_to(to_numpy(temperature), shape)
    logprobs, entropy, rows = np.zeros(shape), np.zeros(shape), {}
    for index in np.ndindex(*shape):
        if not valid[index]:
            continue
        target = (*index[:-1], index[-1] + 1) if shift else index
        row = score_row(x[index], int(ids[target]), float(temperatures[index]), vocab_size, softcap, scale)
        logprobs[index], entropy[index], rows[index] = row.logprob, row.entropy, row
    return Scores(logprobs, entropy, rows, x.shape)


# ------------------------------------------------------------------------------------- terms of the loss, per token


@dataclass
class LossSpec:
    """The options of the loss, named as in PPOLossConfig so that one dict of keywords builds both."""

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    value_clip: float | None = None
    vf_coef: float = 0.5
    value_loss_scale: float = 0.5
    aggregation: str = "token-mean"
    agg_max_len: int | None = None
    agg_include_empty: bool = False
    temperature: float = 1.0
    vocab_size: int | None = None


@dataclass
class PolicyTerm:
    loss: float
    d_new: float
    ratio: float
    delta: float  # after the log-ratio clamp
    low: bool = False  # the lower clip bound binds (A < 0, ratio below 1 - clip_low)
    high: bool = False  # the upper clip bound binds (A > 0, ratio above 1 + clip_high)
    dual: bool = False  # the dual clip binds (A < 0, ratio above dual_clip)
    clamped: bool = False  # the log-ratio clamp binds
    margin: float = INF  # relative distance of the ratio from the nearest switch of branch


def policy_term(new: float, old: float | None, advantage: float, spec: LossSpec) -> PolicyTerm:
    """max(-A ratio, -A clip(ratio)), capped at -A dual_clip for A < 0. old=None: ratio 1, gradient kept."""
    delta = 0.0 if old is None else new - old
    if old is None and not math.isfinite(new):
        delta = NAN
    if math.isnan(delta) or math.isnan(advantage):
        return PolicyTerm(NAN, NAN, NAN, NAN)

    margin = INF
    clamped = False
    if spec.log_ratio_clamp is not None:
        margin = min(margin, abs(abs(delta) - spec.log_ratio_clamp))
        if delta > spec.log_ratio_clamp:
            delta, clamped = spec.log_ratio_clamp, True
        elif delta < -spec.log_ratio_clamp:
            delta, clamped = -spec.log_ratio_clamp, True
    ratio = exp(delta)
    lower = 1.0 - spec.clip_low
    upper = 1.0 + (spec.clip_low if spec.clip_high is None else spec.clip_high)
    for bound in (lower, upper, spec.dual_clip):
        if bound is not None and bound > 0:
            margin = min(margin, abs(ratio - bound) / bound)
    term = PolicyTerm(0.0, 0.0, ratio, delta, clamped=clamped, margin=margin)

    if advantage == 0:
        return term
    if advantage > 0 and ratio > upper:
        term.high = True
        term.loss = -advantage * upper
        return term
    if advantage < 0 and ratio < lower:
        term.low = True
        term.loss = -advantage * lower
        return term
    if advantage < 0 and spec.dual_clip is not None and ratio > spec.dual_clip:
        term.dual = True
        term.loss = -advantage * spec.dual_clip
        return term
    term.loss = -advantage * ratio
    term.d_new = 0.0 if clamped else -advantage * ratio
    return term


def kl_value(new: float, ref: float, estimator: str) -> tuple[float, float]:
    """Estimate of KL(policy || reference) from one sample of the policy, and its derivative by `new`."""
    d = new - ref
    if estimator == "k1":
        return d, 1.0
    if estimator == "k2":
        return 0.5 * d * d, d
    if estimator == "abs":
        return abs(d), math.copysign(1.0, d) if d != 0 else 0.0
    if estimator == "k3":
        try:
            return math.expm1(-d) + d, -math.expm1(-d)
        except OverflowError:
            return INF, -INF
    raise AssertionError(estimator)


def kl_term(new: float, ref: float, spec: LossSpec) -> tuple[float, float, float]:
    """(value, d value / d new, distance from a switch): the difference is clamped first, the estimate afterwards."""
    d, slope, margin = new - ref, 1.0, INF
    if spec.kl_estimator == "abs":
        margin = abs(d)
    if spec.kl_input_clamp is not None:
        margin = min(margin, abs(abs(d) - spec.kl_input_clamp))
        if abs(d) > spec.kl_input_clamp:
            d, slope = math.copysign(spec.kl_input_clamp, d), 0.0
    value, derivative = kl_value(d, 0.0, spec.kl_estimator)
    derivative = derivative * slope if slope != 0 else 0.0
    if spec.kl_output_clamp is not None:
        margin = min(margin, abs(abs(value) - spec.kl_output_clamp))
        if abs(value) > spec.kl_output_clamp:
            value, derivative = math.copysign(spec.kl_output_clamp, value), 0.0
    return value, derivative, margin


def value_term(value: float, old: float | None, target: float, spec: LossSpec) -> tuple[float, float, bool, float]:
    """(loss, d loss / d value, clipped branch is the larger, distance from a switch)."""
    plain = (value - target) ** 2
    if spec.value_clip is None:
        return spec.value_loss_scale * plain, spec.value_loss_scale * 2 * (value - target), False, INF
    assert old is not None
    move = value - old
    margin = abs(abs(move) - spec.value_clip)
    if abs(move) <= spec.value_clip:
        return spec.value_loss_scale * plain, spec.value_loss_scale * 2 * (value - target), False, margin
    clipped = (old + math.copysign(spec.value_clip, move) - target) ** 2
    margin = min(margin, abs(clipped - plain))
    if clipped > plain:
        return spec.value_loss_scale * clipped, 0.0, True, margin
    return spec.value_loss_scale * plain, spec.value_loss_scale * 2 * (value - target), False, margin


# ----------------------------------------------------------------------------------------------------- aggregation


def sequences(shape: Sequence[int], cu_seqlens: Sequence[int] | None = None) -> list[list[int]]:
    """Flat indices of each sequence: the rows of the last axis, or the segments of a packed [N]."""
    total = int(np.prod(shape, dtype=np.int64))
    if cu_seqlens is not None:
        return [list(range(int(a), int(b))) for a, b in pairwise(cu_seqlens)]
    length = shape[-1]
    if length == 0:
        return [[] for _ in range(int(np.prod(shape[:-1], dtype=np.int64)))]
    return [list(range(start, start + length)) for start in range(0, total, length)]


def aggregation_weights(
    valid: np.ndarray, spec: LossSpec, cu_seqlens: Any = None, normalizer: float | None = None
) -> list[float]:
    """Every mode is linear: weight[i] is what the i-th token's loss counts in the scalar. Masked tokens weigh 0."""
    flat = [bool(v) for v in valid.reshape(-1)]
    weights = [0.0] * len(flat)
    if spec.aggregation == "token-mean":
        denominator = max(sum(flat) if normalizer is None else normalizer, 1)
        return [1.0 / denominator if v else 0.0 for v in flat]

    rows = sequences(valid.shape, None if cu_seqlens is None else [int(c) for c in cu_seqlens])
    counts = [sum(flat[i] for i in row) for row in rows]
    n_rows = len(rows) if spec.agg_include_empty else sum(1 for n in counts if n > 0)
    denominator = max(n_rows if normalizer is None else normalizer, 1)
    for row, count in zip(rows, counts, strict=True):
        for i in row:
            if not flat[i]:
                continue
            if spec.aggregation == "seq-mean-token-mean":
                weights[i] = 1.0 / count / denominator
            elif spec.aggregation == "seq-mean-token-sum":
                weights[i] = 1.0 / denominator
            elif spec.aggregation == "seq-mean-token-sum-norm":
                assert spec.agg_max_len is not None
                weights[i] = 1.0 / (denominator * spec.agg_max_len)
            else:
                raise AssertionError(spec.aggregation)
    return weights


# -------------------------------------------------------------------------------------------------- the whole loss


@dataclass
class LossResult:
    loss: float
    policy_loss: float
    value_loss: float
    kl: float
    d_logprobs: np.ndarray
    d_entropy: np.ndarray
    d_values: np.ndarray | None
    metrics: dict[str, float] = field(default_factory=dict)
    margin: float = INF  # distance of the nearest token from a switch of branch; compare only away from 0


def ppo(
    new: Any,
    old: Any,
    advantages: Any,
    mask: Any = None,
    *,
    spec: LossSpec,
    entropy: Any = None,
    values: Any = None,
    old_values: Any = None,
    returns: Any = None,
    value_mask: Any = None,
    ref: Any = None,
    token_weights: Any = None,
    cu_seqlens: Any = None,
    normalizer: float | None = None,
    loss_scale: float = 1.0,
) -> LossResult:
    """The scalar loss from per-token inputs, token by token."""
    lp = to_numpy(new)
    shape = lp.shape
    valid = to_mask(mask, shape)

    def flat(x: Any) -> list[float] | None:
        return None if x is None else [float(v) for v in to_numpy(x).reshape(-1)]

    adv = to_numpy(advantages)
    if adv.ndim == len(shape) - 1:  # one advantage per sequence
        adv = np.repeat(adv[..., None], shape[-1], axis=-1)
    assert adv.shape == shape
    lp_, old_, adv_, ent_, ref_, w_ = flat(lp), flat(old), flat(adv), flat(entropy), flat(ref), flat(token_weights)
    agg = aggregation_weights(valid, spec, cu_seqlens, normalizer)

    policy = kl = bonus = 0.0
    d_lp, d_ent = np.zeros(lp.size), np.zeros(lp.size)
    margin = INF
    ratios: list[float] = []
    seen: dict[str, float] = dict.fromkeys(
        ["k1", "k2", "k3", "low", "high", "dual", "clamped", "entropy", "ref_kl", "nonfinite"], 0.0
    )
    for i, counts in enumerate(valid.reshape(-1)):
        if not counts:
            continue
        weight = agg[i] * (1.0 if w_ is None else w_[i])
        term = policy_term(lp_[i], None if old_ is None else old_[i], adv_[i], spec)
        margin = min(margin, term.margin)
        policy += weight * term.loss
        d_lp[i] += weight * term.d_new
        ratios.append(term.ratio)
        seen["k1"] += -term.delta
        seen["k2"] += 0.5 * term.delta**2
        seen["k3"] += term.ratio - 1.0 - term.delta
        seen["low"] += term.low
        seen["high"] += term.high
        seen["dual"] += term.dual
        seen["clamped"] += term.clamped
        seen["nonfinite"] += not math.isfinite(term.ratio) or not math.isfinite(lp_[i])
        if ent_ is not None:
            seen["entropy"] += ent_[i]
            if spec.entropy_coef != 0:
                bonus += weight * ent_[i]
                d_ent[i] -= spec.entropy_coef * weight
        if ref_ is not None:
            value, derivative, gap = kl_term(lp_[i], ref_[i], spec)
            seen["ref_kl"] += value
            kl += weight * value
            if spec.kl_coef != 0:
                margin = min(margin, gap)
                d_lp[i] += spec.kl_coef * weight * derivative

    value_loss, d_values, value_clipped, n_values = 0.0, None, 0, 0
    if values is not None:
        v_valid = valid if value_mask is None else to_mask(value_mask, shape)
        v_agg = aggregation_weights(v_valid, spec, cu_seqlens, normalizer)
        v_, vo_, r_ = flat(values), flat(old_values), flat(returns)
        d_values = np.zeros(lp.size)
        for i, counts in enumerate(v_valid.reshape(-1)):
            if not counts:
                continue
            loss, derivative, clipped, gap = value_term(v_[i], None if vo_ is None else vo_[i], r_[i], spec)
            margin = min(margin, gap)
            value_loss += v_agg[i] * loss
            d_values[i] = spec.vf_coef * v_agg[i] * derivative * loss_scale
            value_clipped += clipped
            n_values += 1
        d_values = d_values.reshape(shape)

    total = policy
    if spec.entropy_coef != 0:
        total -= spec.entropy_coef * bonus
    if spec.kl_coef != 0:
        total += spec.kl_coef * kl
    total += spec.vf_coef * value_loss

    n = len(ratios)
    per = max(n, 1)
    metrics = {
        "tokens": float(n),
        "ratio_mean": sum(ratios) / per,
        "ratio_min": min(ratios, default=NAN),
        "ratio_max": max(ratios, default=NAN),
        "approx_kl_k1": seen["k1"] / per,
        "approx_kl_k2": seen["k2"] / per,
        "approx_kl_k3": seen["k3"] / per,
        "clip_fraction": (seen["low"] + seen["high"]) / per,
        "clip_fraction_low": seen["low"] / per,
        "clip_fraction_high": seen["high"] / per,
        "dual_clip_fraction": seen["dual"] / per,
        "log_ratio_clamp_fraction": seen["clamped"] / per,
        "entropy": seen["entropy"] / per,
        "ref_kl": seen["ref_kl"] / per,
        "value_clip_fraction": value_clipped / max(n_values, 1),
        "value_tokens": float(n_values),
        "nonfinite": seen["nonfinite"],
    }
    return LossResult(
        total * loss_scale,
        policy,
        value_loss,
        kl,
        d_lp.reshape(shape) * loss_scale,
        d_ent.reshape(shape) * loss_scale,
        d_values,
        metrics,
        margin,
    )


@dataclass
class FusedResult:
    result: LossResult
    scores: Scores
    d_logits: np.ndarray


def fused(
    logits: Any,
    tokens: Any,
    old: Any,
    advantages: Any,
    mask: Any = None,
    *,
    spec: LossSpec,
    shift: bool = False,
    **rest: Any,
) -> FusedResult:
    """The loss from logits: score every row, take the loss, push its per-token gradients back through the rows."""
    scores = score(logits, tokens, mask, temperature=spec.temperature, vocab_size=spec.vocab_size, shift=shift)
    result = ppo(scores.logprobs, old, advantages, mask, spec=spec, entropy=scores.entropy, **rest)
    return FusedResult(result, scores, scores.d_logits(result.d_logprobs, result.d_entropy))


# ------------------------------------------------------------------------------------------ advantages and rewards


def gae_sequence(
    rewards: list[float],
    values: list[float],
    valid: list[bool],
    *,
    gamma: float,
    lam: float,
    bootstrap: float,
    terminated: list[bool],
    truncated: list[bool],
    next_values: list[float] | None,
    mask_mode: str,
) -> tuple[list[float], list[float]]:
    """One sequence, last step first. Outputs are 0 where the mask is."""
    length = len(rewards)
    advantages, returns = [0.0] * length, [0.0] * length
    carry, following = 0.0, bootstrap
    for t in reversed(range(length)):
        if mask_mode == "skip" and not valid[t]:
            continue
        reward, value = rewards[t], values[t]
        if mask_mode == "zero" and not valid[t]:
            reward = value = 0.0
        target = reward
        if not terminated[t]:
            target += gamma * (following if next_values is None else next_values[t])
        if terminated[t] or truncated[t]:
            carry = 0.0
        carry = (target - value) + gamma * lam * carry
        following = value
        if valid[t]:
            advantages[t], returns[t] = carry, carry + value
    return advantages, returns


def gae(
    rewards: Any,
    values: Any,
    mask: Any = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap_value: Any = None,
    terminated: Any = None,
    truncated: Any = None,
    next_values: Any = None,
    mask_mode: str = "skip",
    cu_seqlens: Any = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) for [T], [B, T], or packed [N]."""
    r = to_numpy(rewards)
    shape = r.shape

    def flat(x: Any, default: float) -> list[float]:
        return [default] * r.size if x is None else [float(v) for v in to_numpy(x).reshape(-1)]

    r_, v_ = flat(r, 0.0), flat(values, 0.0)
    m_ = [bool(v) for v in to_mask(mask, shape).reshape(-1)]
    term_, trunc_ = flat(terminated, 0.0), flat(truncated, 0.0)
    n_ = None if next_values is None else flat(next_values, 0.0)
    rows = sequences(shape, None if cu_seqlens is None else [int(c) for c in cu_seqlens])
    boot = [0.0] * len(rows) if bootstrap_value is None else [float(b) for b in to_numpy(bootstrap_value).reshape(-1)]
    advantages, returns = np.zeros(r.size), np.zeros(r.size)
    for row, bootstrap in zip(rows, boot, strict=True):
        a, g = gae_sequence(
            [r_[i] for i in row],
            [v_[i] for i in row],
            [m_[i] for i in row],
            gamma=gamma,
            lam=lam,
            bootstrap=bootstrap,
            terminated=[term_[i] != 0 for i in row],
            truncated=[trunc_[i] != 0 for i in row],
            next_values=None if n_ is None else [n_[i] for i in row],
            mask_mode=mask_mode,
        )
        for i, adv, ret in zip(row, a, g, strict=True):
            advantages[i], returns[i] = adv, ret
    return advantages.reshape(shape), returns.reshape(shape)


def shape_rewards(
    scores: Any,
    logprobs: Any,
    ref_logprobs: Any,
    mask: Any,
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
    placement: str = "last_token",
    clip: float | None = None,
    missing_eos_penalty: float | None = None,
    has_eos: Any = None,
) -> np.ndarray:
    """Per-token rewards [B, T]: minus the scaled KL at every valid token, plus the score at the sequence's end."""
    lp, ref = to_numpy(logprobs), to_numpy(ref_logprobs)
    valid = to_mask(mask, lp.shape)
    rewards = np.zeros(lp.shape)
    for b in range(lp.shape[0]):
        last = -1
        for t in range(lp.shape[1]):
            if not valid[b, t]:
                continue
            last = t
            rewards[b, t] = -kl_coef * kl_value(float(lp[b, t]), float(ref[b, t]), kl_estimator)[0]
        if last < 0:
            continue
        bonus = float(to_numpy(scores)[b])
        if clip is not None:
            bonus = min(max(bonus, -clip), clip)
        if missing_eos_penalty is not None and not bool(to_numpy(has_eos)[b]):
            bonus -= missing_eos_penalty
        slot = last if placement == "last_token" else min(last + 1, lp.shape[1] - 1)
        rewards[b, slot] += bonus
    return rewards


def whiten(
    x: Any, mask: Any = None, *, shift_mean: bool = True, unbiased: bool = False, eps: float = 1e-8
) -> np.ndarray:
    """(x - mean) / sqrt(var + eps) over the valid entries, in two passes; 0 elsewhere."""
    values = to_numpy(x)
    valid = to_mask(mask, values.shape)
    kept = [float(v) for v, m in zip(values.reshape(-1), valid.reshape(-1), strict=True) if m]
    out = np.zeros(values.shape)
    if not kept:
        return out
    mean = math.fsum(kept) / len(kept)
    divisor = len(kept) - 1 if unbiased and len(kept) > 1 else len(kept)
    var = math.fsum((v - mean) ** 2 for v in kept) / divisor
    for index in np.ndindex(*values.shape):
        if valid[index]:
            out[index] = (values[index] - mean) / math.sqrt(var + eps) + (0.0 if shift_mean else mean)
    return out


def adaptive_kl(value: float, kl: float, target: float, n_steps: int, horizon: float) -> float:
    """One update of the controller of Ziegler et al. 2019, section 2.2."""
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return value * (1.0 + error * n_steps / horizon)
