"""The second oracle: the losses of other trainers as their papers write them, in float64 and differentiable PyTorch.

It shares no code with ppo_kernels, nor with oracle.py, whose gradients are written out by hand: here autograd makes
them, and `.detach()` stands wherever a formula stops the gradient. A sequence is a Python loop over the indices of its
tokens that count; a masked slot is never looked at. Meant for inputs whose unselected branches do not overflow: the
edges are worked out by hand in the tests.

l, o, b, f: log-probs (nats) under the policy, the old policy, the sampling engine, the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

INF = math.inf


@dataclass(frozen=True)
class Options:
    """Names and defaults as in PPOLossConfig, so that one dict of keywords builds both."""

    clip_low: float = 0.2
    clip_high: float | None = None
    dual_clip: float | None = None
    log_ratio_clamp: float | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_gradient: str = "autograd"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    value_clip: float | None = None
    vf_coef: float = 0.5
    value_loss_scale: float = 0.5
    value_loss_type: str = "mse"
    huber_delta: float = 10.0
    aggregation: str = "token-mean"
    agg_max_len: float | None = None
    agg_include_empty: bool = False
    ratio_level: str = "token"
    loss_type: str = "ppo"
    cispo_ratio_min: float | None = None
    cispo_ratio_max: float | None = None
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    rollout_is_level: str = "token"
    rollout_is_mode: str = "truncate"
    rollout_is_min: float | None = None
    rollout_is_max: float | None = None
    rollout_mask_in_denominator: bool = True
    nonfinite: str = "propagate"
    temperature: float = 1.0
    vocab_size: int | None = None


class Margin:
    """The smallest distance of any number from a switch of branch: fp32 and fp64 may disagree about a closer one."""

    def __init__(self) -> None:
        self.least = INF

    def near(self, x: Tensor, bound: float | None, relative: bool = False) -> None:
        if bound is not None and math.isfinite(bound) and x.numel():
            gap = (x.detach() - bound).abs() / (bound if relative and bound > 0 else 1.0)
            self.least = min(self.least, float(gap.min()))


@dataclass
class Loss:
    loss: Tensor  # a scalar, or of the tokens' shape for aggregation "none"; carries its graph
    policy_loss: float
    value_loss: float
    kl: float
    metrics: dict[str, float]
    per_token: dict[str, Tensor]
    valid: Tensor  # bool: the tokens that count in the end
    size: float  # the sum of the absolute terms: what rounding errors are relative to
    margin: float


def constant(x: Any) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def flat(x: Any) -> Tensor | None:
    return None if x is None else constant(x).reshape(-1)


def sequences(shape: Sequence[int], cu_seqlens: Any = None, shift: bool = False) -> list[list[int]]:
    """Flat indices of the scored tokens of each sequence; a packed shift scores none across a boundary."""
    if cu_seqlens is not None:
        return [list(range(a, max(a, b - shift))) for a, b in pairwise(int(x) for x in cu_seqlens)]
    total, length = math.prod(shape), shape[-1] if shape else 1
    if len(shape) < 2:
        return [list(range(total))]
    return [list(range(i * length, (i + 1) * length)) for i in range(math.prod(shape[:-1]))]


def clamped(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else x.clamp(-bound, bound)


def rollout_weights(log_ratio: Tensor, o: Options, margin: Margin) -> Tensor:
    """The weights of one sequence from o - b of its tokens."""
    mean = log_ratio.mean().exp().expand_as(log_ratio)
    weight = {"token": log_ratio.exp(), "sequence": log_ratio.sum().exp().expand_as(mean), "sequence_geomean": mean}[
        o.rollout_is_level
    ]
    judged = mean if o.rollout_is_mode == "seq_mask" else weight
    margin.near(judged, o.rollout_is_min, relative=True)
    margin.near(judged, o.rollout_is_max, relative=True)
    if o.rollout_is_mode == "truncate":
        return (
            weight.clamp(o.rollout_is_min, o.rollout_is_max)
            if (o.rollout_is_min, o.rollout_is_max)
            != (
                None,
                None,
            )
            else weight
        )
    for out in (
        judged < (-INF if o.rollout_is_min is None else o.rollout_is_min),
        judged > (INF if o.rollout_is_max is None else o.rollout_is_max),
    ):
        weight = torch.where(out, 0.0, weight)
    return weight


def ratio_of(new: Tensor, old: Tensor, o: Options, margin: Margin) -> tuple[Tensor, Tensor, Tensor]:
    """(r, log-ratio that the KL metrics are of, held by log_ratio_clamp) for the tokens of one sequence."""
    delta, bound = new - old, o.log_ratio_clamp
    if o.ratio_level == "token":
        margin.near(delta.abs(), bound)
        held = delta.abs() > (INF if bound is None else bound)
        return clamped(delta, bound).exp(), clamped(delta, bound), held
    mean = delta.mean()
    margin.near(mean, bound)
    log = mean.expand_as(delta)
    if o.ratio_level == "sequence_token":
        log = new - new.detach() + mean.detach()
    held = log > (INF if bound is None else bound)
    return log.clamp(max=INF if bound is None else bound).exp(), delta, held


def policy_loss(r: Tensor, new: Tensor, A: Tensor, o: Options, margin: Margin) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, clipped from below, clipped from above, dual-clipped)."""
    no = torch.zeros_like(A, dtype=torch.bool)
    low, high = 1 - o.clip_low, 1 + (o.clip_low if o.clip_high is None else o.clip_high)
    if o.loss_type == "ppo":
        for bound in (low, high, o.dual_clip):
            margin.near(r, bound, relative=True)
        loss, dual = torch.maximum(-A * r, -A * r.clamp(low, high)), no
        if o.dual_clip is not None:
            loss, dual = torch.where(A < 0, torch.minimum(loss, -o.dual_clip * A), loss), (A < 0) & (r > o.dual_clip)
        return loss, (A < 0) & (r < low), (A > 0) & (r > high), dual
    if o.loss_type == "cispo":
        if (o.cispo_ratio_min, o.cispo_ratio_max) != (None, None):
            low = -INF if o.cispo_ratio_min is None else o.cispo_ratio_min
            high = INF if o.cispo_ratio_max is None else o.cispo_ratio_max
        margin.near(r, low, relative=True)
        margin.near(r, high, relative=True)
        return -A * r.clamp(low, high).detach() * new, r < low, r > high, no
    if o.loss_type == "reinforce":
        return -A * new, no, no, no
    tau = torch.where(A > 0, torch.full_like(A, o.sapo_tau_pos), torch.full_like(A, o.sapo_tau_neg))
    return -A * torch.sigmoid(tau * (r - 1)) * 4 / tau, no, no, no


def kl_loss(new: Tensor, ref: Tensor, r: Tensor, o: Options, margin: Margin) -> Tensor:
    d = new - ref
    margin.near(d.abs(), o.kl_input_clamp)
    if o.kl_estimator == "abs":
        margin.near(d, 0.0)
    x = clamped(d, o.kl_input_clamp)
    k = {"k1": x, "k2": x * x / 2, "k3": torch.exp(-x) - 1 + x, "abs": x.abs()}[o.kl_estimator]
    if o.kl_gradient in ("score", "is_weighted"):  # NeMo-RL, calculate_kl: weighted first, clamped afterwards
        weight = r if o.kl_gradient == "is_weighted" else torch.exp(new - new.detach())
        weighted = torch.where(x == d, weight, weight.detach()) * k
        margin.near(weighted.abs(), o.kl_output_clamp)
        return clamped(weighted, o.kl_output_clamp)
    margin.near(k.abs(), o.kl_output_clamp)
    k = clamped(k, o.kl_output_clamp)
    if o.kl_gradient == "k2":  # verl, kl_penalty with a "+"
        return d * d / 2 - (d * d / 2).detach() + k.detach()
    return k


def value_losses(
    value: Tensor, old: Tensor | None, target: Tensor, o: Options, margin: Margin
) -> tuple[Tensor, Tensor]:
    def h(error: Tensor) -> Tensor:
        if o.value_loss_type == "mse":
            return error**2
        return torch.where(error.abs() > o.huber_delta, o.huber_delta * (2 * error.abs() - o.huber_delta), error**2)

    plain = h(value - target)
    if o.value_clip is None:
        return o.value_loss_scale * plain, torch.zeros_like(value, dtype=torch.bool)
    assert old is not None
    moved = (value - old).detach().abs() > o.value_clip
    held = h(old + (value - old).clamp(-o.value_clip, o.value_clip) - target)
    margin.near((value - old).abs(), o.value_clip)
    margin.near((held - plain)[moved], 0.0)
    return o.value_loss_scale * torch.where(moved, torch.maximum(plain, held), plain), moved & (held > plain)


def shares(counted: list[bool], rows: list[list[int]], o: Options, normalizer: Any, scale: float) -> Tensor:
    """What each token's loss counts in the whole."""
    result = torch.zeros(len(counted), dtype=torch.float64, device="cpu")
    lengths = [sum(counted[i] for i in row) for row in rows]
    if normalizer is None:
        normalizer = (
            sum(lengths) if o.aggregation == "token-mean" else sum(n > 0 or o.agg_include_empty for n in lengths)
        )
    normalizer = float(normalizer) or 1.0
    for row, length in zip(rows, lengths, strict=True):
        for i in row:
            if counted[i]:
                result[i] = (
                    scale
                    * {
                        "none": 1.0,
                        "token-sum": 1.0,
                        "token-mean": 1 / normalizer,
                        "seq-mean-token-mean": 1 / normalizer / length,
                        "seq-mean-token-sum": 1 / normalizer,
                        "seq-mean-token-sum-norm": 1 / normalizer / (o.agg_max_len or 1),
                    }[o.aggregation]
                )
    return result


def loss(
    logprobs: Tensor,
    old_logprobs: Any,
    advantages: Any,
    mask: Any = None,
    *,
    options: Options,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Any = None,
    returns: Any = None,
    value_mask: Any = None,
    ref_logprobs: Any = None,
    rollout_logprobs: Any = None,
    rollout_is_weights: Any = None,
    token_weights: Any = None,
    cu_seqlens: Any = None,
    shift: bool = False,
    normalizer: Any = None,
    loss_scale: float = 1.0,
) -> Loss:
    """The loss of float64 log-probs (and entropy, values) on the CPU, which may require a gradient."""
    o, margin, shape = options, Margin(), logprobs.shape
    rows = sequences(shape, cu_seqlens, shift)
    new = logprobs.reshape(-1)
    n = new.numel()

    def per_token(x: Any) -> Tensor | None:
        """Flat; one number per sequence is repeated for each of its tokens."""
        if x is None or x.shape == shape:
            return flat(x)
        each, result = flat(x), torch.zeros(n, dtype=torch.float64, device="cpu")
        assert each is not None
        for row, number in zip(rows, each, strict=True):
            result[row] = number
        return result

    def flags(x: Any) -> list[bool]:
        inside = {i for row in rows for i in row}
        given = [True] * n if x is None else [bool(v) for v in x.detach().reshape(-1).tolist()]
        return [i in inside and v for i, v in enumerate(given)]

    old = new.detach() if old_logprobs is None else per_token(old_logprobs)
    A, ref, rollout, extra = (per_token(x) for x in (advantages, ref_logprobs, rollout_logprobs, token_weights))
    assert old is not None
    assert A is not None
    counted = flags(mask)
    value_rows, value_counted = rows, counted
    if value_mask is not None:  # a packed shift may count the value before a boundary
        value_rows = [[i for i in row if i < n] for row in sequences(shape, cu_seqlens)]
        value_counted = [bool(v) for v in value_mask.detach().reshape(-1).tolist()]

    asked_for = list(counted)
    given_weights = per_token(rollout_is_weights)
    finite = [True] * n
    if o.nonfinite == "mask":
        read = [x.detach() for x in (new, old, ref, rollout, given_weights) if x is not None]
        finite = [all(math.isfinite(float(x[i])) for x in read) for i in range(n)]
    weights = torch.ones(n, dtype=torch.float64, device="cpu") if given_weights is None else given_weights
    if rollout is not None:
        for row in rows:
            here = [i for i in row if counted[i] and finite[i]]
            if here:
                weights[here] = rollout_weights(old[here] - rollout[here], o, margin)
    if not o.rollout_mask_in_denominator:
        counted = [c and w != 0 for c, w in zip(counted, weights.tolist(), strict=True)]
    share = shares(counted, rows, o, normalizer, loss_scale)
    if extra is not None:
        share = share * torch.where(share == 0, 0.0, extra)
    kept = [c and f for c, f in zip(counted, finite, strict=True)]
    dropped = sum(c and not f for c, f in zip(asked_for, finite, strict=True))

    parts: dict[str, list[Tensor]] = {
        name: []
        for name in ("loss", "policy_loss", "kl", "entropy", "ratio", "log", "low", "high", "dual", "held", "index")
    }
    for row in rows:
        here = [i for i in row if kept[i]]
        if not here:
            continue
        mine, a = new[here], A[here]
        r, log, held = ratio_of(mine, old[here], o, margin)
        policy, low, high, dual = policy_loss(r, mine, a, o, margin)
        w = weights[here]
        policy = w * policy  # and what has no policy loss has none that is clipped
        low, high, dual = low & (w != 0), high & (w != 0), dual & (w != 0)
        h = torch.zeros_like(mine) if entropy is None else entropy.reshape(-1)[here]
        k = torch.zeros_like(mine) if ref is None else kl_loss(mine, ref[here], r, o, margin)
        token = policy - o.entropy_coef * h + (o.kl_coef * k if o.kl_coef else 0.0)
        index = torch.tensor(here, device="cpu")
        for name, x in zip(parts, (token, policy, k, h, r, log, low, high, dual, held, index), strict=True):
            parts[name].append(x)
    found = {name: torch.cat([new[:0], *(x.to(torch.float64) for x in pieces)]) for name, pieces in parts.items()}
    index = found.pop("index").long()
    weight = share[index]

    losses = torch.zeros(n, dtype=torch.float64, device="cpu").index_add(0, index, weight * found["loss"])
    value_term, value_clip, value_tokens, size = 0.0, 0.0, 0.0, 0.0
    if values is not None:
        here = [i for i in range(n) if value_counted[i]]
        value_share = shares(value_counted, value_rows, o, normalizer, loss_scale)[here]
        given = flat(old_values)
        target = flat(returns)
        assert target is not None
        each, clipped = value_losses(
            values.reshape(-1)[here], None if given is None else given[here], target[here], o, margin
        )
        losses = losses.index_add(0, torch.tensor(here, dtype=torch.long, device="cpu"), o.vf_coef * value_share * each)
        value_term, value_clip, value_tokens = (
            float((value_share * each).detach().sum()),
            float(clipped.sum()),
            float(len(here)),
        )
        size += o.vf_coef * abs(value_term)
    terms = (found["policy_loss"], o.entropy_coef * found["entropy"], o.kl_coef * found["kl"])
    size += float(sum((weight * x).detach().abs().sum() for x in terms))

    tokens = len(index)

    def mean(x: Tensor) -> float:
        return float(x.detach().sum()) / max(tokens, 1)

    log, ratio = found["log"].detach(), found["ratio"].detach()
    metrics = {
        "tokens": float(tokens),
        "ratio_mean": mean(ratio),
        "ratio_min": float(ratio.min()) if tokens else 0.0,
        "ratio_max": float(ratio.max()) if tokens else 0.0,
        "approx_kl_k1": mean(-log),
        "approx_kl_k2": mean(log * log / 2),
        "approx_kl_k3": mean(log.exp() - 1 - log),
        "clip_fraction": mean(found["low"] + found["high"]),
        "clip_fraction_low": mean(found["low"]),
        "clip_fraction_high": mean(found["high"]),
        "dual_clip_fraction": mean(found["dual"]),
        "log_ratio_clamp_fraction": mean(found["held"]),
        "nonfinite": float(dropped + (~found["loss"].isfinite()).sum()),
    }
    if entropy is not None:
        metrics["entropy"] = mean(found["entropy"])
    if ref is not None:
        metrics["ref_kl"] = mean(found["kl"])
    if values is not None:
        metrics |= {"value_tokens": value_tokens, "value_clip_fraction": value_clip / max(value_tokens, 1)}

    def placed(x: Tensor) -> Tensor:
        return torch.zeros(n, dtype=torch.float64, device="cpu").index_add(0, index, x.detach()).view(shape)

    outputs = {name: placed(found[name]) for name in ("loss", "policy_loss", "kl", "ratio")}
    outputs |= {"clip_mask": placed(found["low"] + found["high"]), "dual_clip_mask": placed(found["dual"])}
    outputs["rollout_is_weights"] = placed(weights[index])
    return Loss(
        loss=losses.view(shape) if o.aggregation == "none" else losses.sum(),
        policy_loss=float((weight * found["policy_loss"]).detach().sum()),
        value_loss=value_term,
        kl=float((weight * found["kl"]).detach().sum()),
        metrics=metrics,
        per_token=outputs,
        valid=torch.tensor(kept, device="cpu").view(shape),
        size=size,
        margin=margin.least,
    )


def score(
    logits: Tensor,
    tokens: Any,
    mask: Any,
    options: Options,
    cu_seqlens: Any = None,
    shift: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropy) of float64 logits [..., V] on the CPU; only rows that count are looked at, the others are 0.

    A column of -inf has no probability and no gradient.
    """
    tokens = tokens.detach().cpu().long()
    if shift:
        logits, tokens = logits[..., :-1, :], tokens[..., 1:]
    shape = tokens.shape
    inside = {i for row in sequences(shape, cu_seqlens, shift) for i in row}
    given = [True] * tokens.numel() if mask is None else [bool(v) for v in mask.detach().reshape(-1).tolist()]
    here = torch.tensor([i for i, v in enumerate(given) if v and i in inside], dtype=torch.long, device="cpu")
    rows = logits.reshape(-1, logits.shape[-1])[here, : options.vocab_size] / options.temperature
    log_p = torch.log_softmax(rows, -1)
    chosen = log_p.gather(-1, tokens.reshape(-1)[here, None])[:, 0]
    entropy = -(log_p.exp() * torch.where(log_p == -INF, 0.0, log_p)).sum(-1)
    zeros = torch.zeros(tokens.numel(), dtype=torch.float64, device="cpu")
    return zeros.index_add(0, here, chosen).view(shape), zeros.index_add(0, here, entropy).view(shape)
