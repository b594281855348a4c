"""Metrics of one loss call as sums and counts, so that means over micro-batches and ranks are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppo_kernels import checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Sums over valid tokens, in the order the kernels write them. log_ratio = new - old log-prob (nats).
SUMS = (
    "tokens",  # count of valid tokens
    "ratio",
    "approx_kl_k1",  # -log_ratio
    "approx_kl_k2",  # log_ratio^2 / 2
    "approx_kl_k3",  # ratio - 1 - log_ratio
    "clip_fraction_low",  # A < 0 and ratio < 1 - clip_low
    "clip_fraction_high",  # A > 0 and ratio > 1 + clip_high
    "dual_clip_fraction",  # A < 0 and ratio > dual_clip
    "log_ratio_clamp_fraction",
    "entropy",
    "ref_kl",  # config.kl_estimator of the policy against the reference
    "nonfinite",  # tokens whose loss is NaN or infinite
    "value_tokens",  # count of valid values
    "value_clip_fraction",  # clipped squared error strictly larger
)
MAXIMA = ("ratio_max", "minus_ratio_min")
NAMES = SUMS + MAXIMA
NO_MAXIMUM = torch.finfo(torch.float32).min


class PPOMetrics:
    """`packed`: fp32 [len(NAMES)]; add or all-reduce as often as needed, then `compute()` once."""

    def __init__(self, packed: Tensor, absent: tuple[str, ...] = ()) -> None:
        self.packed = packed
        self.absent = absent

    def __add__(self, other: PPOMetrics) -> PPOMetrics:
        """Metrics of both batches together."""
        n = len(SUMS)
        packed = torch.cat([self.packed[:n] + other.packed[:n], torch.maximum(self.packed[n:], other.packed[n:])])
        return PPOMetrics(packed, self.absent)

    def all_reduce(self, group: ProcessGroup | None = None) -> PPOMetrics:
        """Metrics over all ranks of `group` (two collectives); returns new metrics, leaves these as they are."""
        import torch.distributed as dist

        if group is not None:
            checks.group(group)
        sums, maxima = self.packed[: len(SUMS)].clone(), self.packed[len(SUMS) :].clone()
        dist.all_reduce(sums, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return PPOMetrics(torch.cat([sums, maxima]), self.absent)

    def mean(self, name: str) -> Tensor:
        """The mean of one of SUMS over the valid tokens (or values), 0-dim on the device: no synchronisation."""
        count = "value_tokens" if name == "value_clip_fraction" else "tokens"
        return self.packed[SUMS.index(name)] / self.packed[SUMS.index(count)].clamp(min=1)

    def compute(self) -> dict[str, float]:
        """Means over valid tokens as Python floats (one device synchronisation). All 0 when no token is valid.

        Keys: tokens, ratio_mean, ratio_min, ratio_max, approx_kl_k1, approx_kl_k2, approx_kl_k3, clip_fraction,
        clip_fraction_low, clip_fraction_high, dual_clip_fraction, log_ratio_clamp_fraction, nonfinite (a count), and
        where their inputs were given: entropy (nats), ref_kl (nats), value_tokens, value_clip_fraction.
        """
        sums = dict(zip(NAMES, self.packed.tolist(), strict=True))
        tokens, value_tokens = sums.pop("tokens"), sums.pop("value_tokens")
        ratio_max, minus_ratio_min = sums.pop("ratio_max"), sums.pop("minus_ratio_min")
        nonfinite, value_clipped = sums.pop("nonfinite"), sums.pop("value_clip_fraction")
        means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
        metrics = {"tokens": tokens, "nonfinite": nonfinite, "ratio_mean": means.pop("ratio"), **means}
        metrics["ratio_max"] = ratio_max if tokens else 0.0
        metrics["ratio_min"] = -minus_ratio_min if tokens else 0.0
        metrics["clip_fraction"] = means["clip_fraction_low"] + means["clip_fraction_high"]
        metrics["value_tokens"] = value_tokens
        metrics["value_clip_fraction"] = value_clipped / max(value_tokens, 1.0)
        return {name: value for name, value in metrics.items() if name not in self.absent}
