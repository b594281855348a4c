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
from ppo_kernels.hidden import fused_linear_ppo_loss, logprobs_from_hidden
from ppo_kernels.logprobs import logprobs_from_logits
from ppo_kernels.loss import fused_ppo_loss, ppo_loss, ppo_value_loss
from ppo_kernels.metrics import PPOMetrics
from ppo_kernels.output import PPOLossOutput

__version__ = "0.1.0"

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "GAEOutput",
    "PPOLossConfig",
    "PPOLossOutput",
    "PPOMetrics",
    "fused_linear_ppo_loss",
    "fused_ppo_loss",
    "gae",
    "logprobs_from_hidden",
    "logprobs_from_logits",
    "masked_whiten",
    "ppo_loss",
    "ppo_value_loss",
    "shape_rewards",
]
