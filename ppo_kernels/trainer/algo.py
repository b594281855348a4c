"""The mathematics of PPO as five functions: from hidden states (`linear`), from logits (`logits`), or in plain PyTorch
from `eager.py` (`reference`).

Shapes: ids and attention are [B, P + T], everything else is [B, T] with a bool mask, or [B]. One temperature divides
the logits of the rollout, the reference and the loss (N+5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ppo_kernels import (
    PPOLossConfig,
    fused_linear_ppo_loss,
    fused_ppo_loss,
    gae,
    logprobs_from_hidden,
    logprobs_from_logits,
    masked_whiten,
    shape_rewards,
)
from ppo_kernels.trainer import eager
from ppo_kernels.trainer.config import PPOConfig
from ppo_kernels.trainer.models import Policy

Pair = tuple[torch.Tensor, torch.Tensor]
Metrics = dict[str, float]


class Algorithm(NamedTuple):
    """Signatures and meaning as written out in eager.py; the first and the last take a policy instead of logits."""

    logprobs: Callable[..., Pair]
    token_rewards: Callable[..., torch.Tensor]
    advantages: Callable[..., Pair]
    whiten: Callable[..., torch.Tensor]
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor, Metrics]]


def _logprobs_linear(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor, temperature: float
) -> Pair:
    keep = mask.shape[1] + 1
    hidden = policy.hidden(ids, attention, keep)
    pair = logprobs_from_hidden(
        hidden, policy.head.weight, ids[:, -keep:], mask, bias=policy.head.bias, temperature=temperature, shift=True,
        return_entropy=True, **policy.head.options,
    )  # fmt: skip
    return pair[0], pair[1]


def _logprobs_logits(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor, temperature: float
) -> Pair:
    keep = mask.shape[1] + 1
    logits = policy.logits(ids, attention, keep)
    pair = logprobs_from_logits(logits, ids[:, -keep:], mask, temperature=temperature, shift=True, return_entropy=True)
    return pair[0], pair[1]


def _logprobs_eager(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, mask: torch.Tensor, temperature: float
) -> Pair:
    keep = mask.shape[1] + 1
    return eager.logprobs(policy.logits(ids, attention, keep), ids[:, -keep:], mask, temperature)


def _advantages(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, ppo: PPOConfig) -> Pair:
    output = gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return output.advantages, output.returns


def _loss_config(temperature: float, clip: float, ppo: PPOConfig, **head: Any) -> PPOLossConfig:
    return PPOLossConfig(
        clip_low=clip, value_clip=ppo.value_clip, vf_coef=ppo.vf_coef, entropy_coef=ppo.entropy_coef,
        temperature=temperature, **head,
    )  # fmt: skip


def _loss_linear(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor,
    mask: torch.Tensor, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, normalizer: float,
    temperature: float, clip: float, ppo: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:  # fmt: skip
    keep = mask.shape[1] + 1
    output = fused_linear_ppo_loss(
        policy.hidden(ids, attention, keep), policy.head.weight, ids[:, -keep:], old_logprobs, advantages, mask,
        bias=policy.head.bias, config=_loss_config(temperature, clip, ppo, **policy.head.options), values=values,
        old_values=old_values, returns=returns, normalizer=normalizer, shift=True,
    )  # fmt: skip
    return _finish(output, normalizer)


def _loss_logits(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor,
    mask: torch.Tensor, values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, normalizer: float,
    temperature: float, clip: float, ppo: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:  # fmt: skip
    keep = mask.shape[1] + 1
    logits = policy.logits(ids, attention, keep)
    output = fused_ppo_loss(
        logits, ids[:, -keep:], old_logprobs, advantages, mask, config=_loss_config(temperature, clip, ppo),
        values=values, old_values=old_values, returns=returns, normalizer=normalizer, shift=True,
        inplace_grad=logits.requires_grad and logits.is_contiguous(),  # used nowhere else: they become the gradient
    )  # fmt: skip
    return _finish(output, normalizer)


def _finish(output: Any, normalizer: float) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    metrics: Metrics = output.metrics.compute()
    to_mean = normalizer / max(metrics["tokens"], 1.0)
    metrics["policy_loss"] = float(output.policy_loss) * to_mean
    metrics["value_loss"] = float(output.value_loss) * to_mean
    return output.loss, output.logprobs, metrics


def _loss_eager(
    policy: Policy, ids: torch.Tensor, attention: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
    keep = arguments[2].shape[1] + 1  # of the mask
    return eager.loss(policy.logits(ids, attention, keep), ids[:, -keep:], *arguments)


ALGORITHMS = {
    "linear": Algorithm(_logprobs_linear, shape_rewards, _advantages, masked_whiten, _loss_linear),
    "logits": Algorithm(_logprobs_logits, shape_rewards, _advantages, masked_whiten, _loss_logits),
    "reference": Algorithm(_logprobs_eager, eager.token_rewards, eager.advantages, eager.whiten, _loss_eager),
}
