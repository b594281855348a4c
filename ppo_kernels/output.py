"""What every form of the loss shares: its output, and the loss of log-probs that are known."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ppo_kernels.autograd import TokenLoss
from ppo_kernels.batch import Batch, Given
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.loss_terms import TokenInputs, token_loss
from ppo_kernels.metrics import NAMES, PPOMetrics

DEFAULT = PPOLossConfig()


class PPOLossOutput(NamedTuple):
    """loss = policy_loss - entropy_coef * entropy + kl_coef * kl + vf_coef * value_loss, each aggregated and scaled.

    loss: differentiable scalar, fp32 (fp64 for fp64 inputs); with aggregation="none" per token [...].
    logprobs, entropy: [...], detached, 0 where masked; entropy is None when it was not computed.
    policy_loss, value_loss, kl: detached scalars, 0 without values or ref_logprobs; sums with aggregation="none".
    per_token: what config.per_token_outputs asked for, each [...], detached, 0 (False) where masked.
    """

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    policy_loss: Tensor
    value_loss: Tensor
    kl: Tensor
    metrics: PPOMetrics
    per_token: dict[str, Tensor]


def decomposes(config: PPOLossConfig) -> bool:
    """Whether a token's coefficients follow from its own log-prob: then the kernels know them in the first visit."""
    return config.ratio_level == "token" and config.aggregation != "none"


def loss_of_logprobs(batch: Batch, given: Given, logprobs: Tensor, entropy: Tensor | None) -> PPOLossOutput:
    """The loss of log-probs [N] that carry their gradient: everything of size N."""
    config = batch.config
    inputs = batch.inputs(given, logprobs.detach())
    sequences = None if config.ratio_level == "token" else batch.sequences
    reduce = config.aggregation != "none"
    loss, terms, metrics = TokenLoss.apply(
        logprobs, entropy, inputs.values, inputs, list(config.params()), sequences, reduce
    )
    loss = loss if reduce else loss.view(batch.shape)
    if batch.dropped is not None:
        metrics = metrics.index_add(0, batch.dropped.new_full((1,), NAMES.index("nonfinite")), batch.dropped.float())
    return output(batch, inputs, loss, terms, metrics, logprobs, entropy)


def output(
    batch: Batch,
    inputs: TokenInputs,
    loss: Tensor,
    terms: Tensor,
    metrics: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
) -> PPOLossOutput:
    _, policy, value, kl = terms.unbind()
    absent: tuple[str, ...] = ()
    absent += ("entropy",) if entropy is None else ()
    absent += ("ref_kl",) if inputs.ref_logprobs is None else ()
    absent += ("value_tokens", "value_clip_fraction") if inputs.values is None else ()
    logprobs, entropy = logprobs.detach(), None if entropy is None else entropy.detach()
    return PPOLossOutput(
        loss=loss,
        logprobs=batch.shaped(logprobs),
        entropy=None if entropy is None else batch.shaped(entropy),
        policy_loss=policy,
        value_loss=value,
        kl=kl,
        metrics=PPOMetrics(metrics, absent),
        per_token=_per_token(batch, inputs, logprobs, entropy) if batch.config.per_token_outputs else {},
    )


@torch.no_grad()
def _per_token(batch: Batch, inputs: TokenInputs, logprobs: Tensor, entropy: Tensor | None) -> dict[str, Tensor]:
    config = batch.config
    sequences = None if config.ratio_level == "token" else batch.sequences
    found = token_loss(logprobs, entropy, inputs, config.params(), sequences).per_token
    weights = batch.rollout_is_weights
    found["rollout_is_weights"] = torch.ones_like(logprobs) if weights is None else weights
    return {name: batch.shaped(found[name]) for name in config.per_token_outputs}


def checked_config(config: object) -> PPOLossConfig:
    if not isinstance(config, PPOLossConfig):
        raise TypeError(f"config must be a PPOLossConfig, got {type(config).__name__}")
    return config
