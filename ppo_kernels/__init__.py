"""Fused, exact PPO losses for language models. See README.md for a tour and docs/ for the formulas."""

from ppo_kernels.advantages import (
    AdaptiveKLController,
    FixedKLController,
    GAEOutput,
    gae,
    masked_whiten,
    shape_rewards,
)
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.logprobs import logprobs_from_logits
from ppo_kernels.loss import PPOLossOutput, fused_ppo_loss, ppo_loss
from ppo_kernels.metrics import PPOMetrics

__version__ = "0.1.0"

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "GAEOutput",
    "PPOLossConfig",
    "PPOLossOutput",
    "PPOMetrics",
    "fused_ppo_loss",
    "gae",
    "logprobs_from_logits",
    "masked_whiten",
    "ppo_loss",
    "shape_rewards",
]
