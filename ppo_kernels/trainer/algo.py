"""The mathematics of PPO as five functions, from the library (`fused`) or from `eager.py` (`reference`).

Shapes: B responses of at most T tokens. logits are [B, T+1, V] and tokens [B, T+1]: the last prompt position and the
response, so that logits row t scores response token t; everything else is [B, T] with a bool mask, or [B].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, shape_rewards
from ppo_kernels.trainer import eager
from ppo_kernels.trainer.config import KLConfig, PPOConfig


class Algorithm(NamedTuple):
    """Signatures and meaning as written out in eager.py."""

    logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    token_rewards: Callable[..., torch.Tensor]
    advantages: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    whiten: Callable[..., torch.Tensor]
    loss: Callable[..., tuple[torch.Tensor, torch.Tensor, dict[str, float]]]


def _logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    pair = logprobs_from_logits(logits, tokens, mask, temperature=temperature, shift=True, return_entropy=True)
    return pair[0], pair[1]


def _token_rewards(
    scores: torch.Tensor,
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    has_eos: torch.Tensor,
    kl_coef: float,
    kl: KLConfig,
    missing_eos_penalty: float,
) -> torch.Tensor:
    return shape_rewards(
        scores,
        logprobs,
        ref_logprobs,
        mask,
        kl_coef=kl_coef,
        kl_estimator=kl.estimator,
        missing_eos_penalty=missing_eos_penalty,
        has_eos=has_eos,
    )


def _advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, ppo: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    output = gae(rewards, values, mask, gamma=ppo.gamma, lam=ppo.lam)
    return output.advantages, output.returns


def _loss(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    normalizer: float,
    temperature: float,
    ppo: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    config = PPOLossConfig(
        clip_low=ppo.clip,
        value_clip=ppo.value_clip,
        vf_coef=ppo.vf_coef,
        entropy_coef=ppo.entropy_coef,
        temperature=temperature,
    )
    output = fused_ppo_loss(
        logits,
        tokens,
        old_logprobs,
        advantages,
        mask,
        config=config,
        values=values,
        old_values=old_values,
        returns=returns,
        normalizer=normalizer,
        shift=True,
        inplace_grad=logits.requires_grad,  # the logits are used nowhere else, so their memory becomes the gradient
    )
    metrics: dict[str, Any] = output.metrics.compute()
    to_mean = normalizer / max(metrics["tokens"], 1.0)
    metrics["policy_loss"] = float(output.policy_loss) * to_mean
    metrics["value_loss"] = float(output.value_loss) * to_mean
    return output.loss, output.logprobs, metrics


ALGORITHMS = {
    "fused": Algorithm(_logprobs, _token_rewards, _advantages, masked_whiten, _loss),
    "reference": Algorithm(eager.logprobs, eager.token_rewards, eager.advantages, eager.whiten, eager.loss),
}
