"""One PPO update: epochs over shuffled minibatches, one optimizer step per minibatch (N+17).

A minibatch is cut into microbatches to save memory. Every token's loss is divided by the valid tokens of the whole
minibatch, so that the sum of the microbatches' gradients is the minibatch's gradient, however it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ppo_kernels.trainer.algo import Algorithm
from ppo_kernels.trainer.config import Config, OptimConfig
from ppo_kernels.trainer.models import Scalar, logits_of
from ppo_kernels.trainer.rollout import Trajectory, response_values


class Optimizers:
    """AdamW for actor and critic, each with its own learning rate (N+6, N+21)."""

    def __init__(self, actor: PreTrainedModel, critic: Scalar, config: OptimConfig) -> None:
        self.config = config
        self.models = (actor, critic)
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=lr, eps=config.eps, weight_decay=0.0, fused=True)
            for model, lr in ((actor, config.actor_lr), (critic, config.critic_lr))
        ]

    def schedule(self, done: float) -> float:
        """Sets the learning rates for the fraction `done` of training; returns the actor's."""
        factor = 1.0 - done if self.config.schedule == "linear" else 1.0
        for optimizer, lr in zip(self.optimizers, (self.config.actor_lr, self.config.critic_lr), strict=True):
            optimizer.param_groups[0]["lr"] = lr * factor
        return self.config.actor_lr * factor

    def step(self) -> list[float]:
        """Clips and applies the gradients, then clears them; a non-finite gradient is not applied. Norms, unclipped."""
        norms = [
            float(torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.max_grad_norm))
            for model in self.models
        ]
        for optimizer in self.optimizers:
            if all(map(math.isfinite, norms)):
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norms


def minibatch_gradients(
    batch: Trajectory,
    advantages: torch.Tensor,  # [B, T], and so is `returns`
    returns: torch.Tensor,
    actor: PreTrainedModel,
    critic: Scalar,
    algorithm: Algorithm,
    config: Config,
) -> tuple[dict[str, float], float]:
    """Adds the minibatch's gradients to the parameters; returns its metrics and max |new - old log-prob|."""
    width, rows = batch.mask.shape[1], batch.mask.shape[0]
    normalizer = max(float(batch.mask.sum()), 1.0)
    parts, drift = [], 0.0
    for at in range(0, rows, config.ppo.microbatch):
        cut = slice(at, at + config.ppo.microbatch)
        mask, ids, attention = batch.mask[cut], batch.ids[cut], batch.attention[cut]
        loss, logprobs, metrics = algorithm.loss(
            logits_of(actor, ids, attention, width + 1),
            ids[:, -width - 1 :],
            batch.logprobs[cut],
            advantages[cut],
            mask,
            response_values(critic, ids, attention, width),
            batch.values[cut],
            returns[cut],
            normalizer,
            config.rollout.temperature,
            config.ppo,
        )
        loss.backward()
        parts.append(metrics)
        drift = max(drift, float((logprobs - batch.logprobs[cut]).where(mask, 0.0).abs().max()))
    return merge(parts), drift


def update(
    batch: Trajectory,
    advantages: torch.Tensor,
    returns: torch.Tensor,
    actor: PreTrainedModel,
    critic: Scalar,
    optimizers: Optimizers,
    algorithm: Algorithm,
    config: Config,
    generator: torch.Generator,
) -> dict[str, float]:
    """All epochs; returns metrics averaged over tokens and steps."""
    parts: list[dict[str, float]] = []
    norms: list[list[float]] = []
    first_drift = 0.0
    for rows in minibatches(len(batch.mask), config.ppo.epochs, config.ppo.minibatches, generator):
        piece = Trajectory(*(field[rows] for field in batch))
        metrics, drift = minibatch_gradients(piece, advantages[rows], returns[rows], actor, critic, algorithm, config)
        norms.append(optimizers.step())
        if not parts:
            first_drift = drift
        parts.append(metrics)
    return merge(parts) | {
        "first_loss_policy": parts[0]["policy_loss"],
        "first_loss_value": parts[0]["value_loss"],
        "first_logprob_drift": first_drift,
        "grad_norm_actor": sum(norm[0] for norm in norms) / len(norms),
        "grad_norm_critic": sum(norm[1] for norm in norms) / len(norms),
        "optimizer_steps": len(norms),
        "skipped_steps": sum(not all(map(math.isfinite, norm)) for norm in norms),
    }


def minibatches(rows: int, epochs: int, count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(rows, generator=generator).chunk(count)


def merge(parts: list[dict[str, float]]) -> dict[str, float]:
    """Token-weighted means of the parts' means; sums of counts; extremes of extremes."""
    tokens = max(sum(part["tokens"] for part in parts), 1.0)
    merged = {key: sum(part[key] * part["tokens"] for part in parts) / tokens for key in parts[0]}
    return merged | {
        "tokens": tokens,
        "ratio_min": min(part["ratio_min"] for part in parts),
        "ratio_max": max(part["ratio_max"] for part in parts),
    }
