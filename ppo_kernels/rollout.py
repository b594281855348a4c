"""Rollout correction: importance weights for tokens that another engine sampled (Yao et al. 2025, "off-policy RL")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_kernels.aggregation import Sequences
from ppo_kernels.config import PPOLossConfig


def importance_weights(
    log_ratio: Tensor, valid: Tensor | None, sequences: Sequences | None, config: PPOLossConfig
) -> Tensor:
    """w [N] from log_ratio [N] = old_logprobs - rollout_logprobs (nats), by config.rollout_is_*; 1 where not valid."""
    log_ratio = log_ratio if valid is None else torch.where(valid, log_ratio, 0.0)
    low = -math.inf if config.rollout_is_min is None else config.rollout_is_min
    high = math.inf if config.rollout_is_max is None else config.rollout_is_max
    log_weight = judged = log_ratio
    if sequences is not None and (config.rollout_is_level != "token" or config.rollout_is_mode == "seq_mask"):
        mean = sequences.mean(log_ratio, valid)
        if config.rollout_is_level == "sequence":
            log_weight = sequences.expand(sequences.sum(log_ratio))
        elif config.rollout_is_level == "sequence_geomean":
            log_weight = mean
        judged = mean if config.rollout_is_mode == "seq_mask" else log_weight
    weight = log_weight.exp()
    if config.rollout_is_mode == "truncate":
        weight = weight.clamp(low, high)
    else:
        judged = judged.exp()
        weight = torch.where((judged >= low) & (judged <= high), weight, 0.0)  # NaN is not inside
    return weight if valid is None else torch.where(valid, weight, 1.0)
