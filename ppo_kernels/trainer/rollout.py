"""Sample responses, then score them under all four models.

Layout: prompts are padded on the left and responses on the right, so that response token t is column P + t for every
row and all PPO tensors are [B, T]. The masks made here are carried along; nothing is derived from "token != pad".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from ppo_kernels.trainer.algo import Algorithm
from ppo_kernels.trainer.config import RolloutConfig
from ppo_kernels.trainer.data import EOS, PAD
from ppo_kernels.trainer.models import Roles, Scalar, logits_of


class Samples(NamedTuple):
    ids: torch.Tensor  # [B, P + T] int64
    attention: torch.Tensor  # [B, P + T] bool: prompt and response, not padding
    mask: torch.Tensor  # [B, T] bool: response tokens up to and including the first EOS
    has_eos: torch.Tensor  # [B] bool: ended by itself
    prompt_width: int  # P


class Trajectory(NamedTuple):
    """Everything one update needs, [B, T] unless noted; row t belongs to response token t."""

    ids: torch.Tensor  # [B, P + T]
    attention: torch.Tensor  # [B, P + T]
    mask: torch.Tensor
    logprobs: torch.Tensor  # nats, under the actor that sampled
    ref_logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor  # the critic's estimate BEFORE token t is chosen
    scores: torch.Tensor  # [B] the reward model's
    has_eos: torch.Tensor  # [B]


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    ids: torch.Tensor,  # [B, P] left-padded prompts
    mask: torch.Tensor,  # [B, P] bool
    config: RolloutConfig,
    generator: torch.Generator,
) -> Samples:
    """Plain ancestral sampling at one temperature, no top-k or top-p (N+4), stopping each row at its first EOS.

    An EOS inside the prompt means nothing: only sampled tokens end a row.
    """
    prompt_width, cache = ids.shape[1], DynamicCache()
    running = torch.ones(ids.shape[0], dtype=torch.bool)
    new, valid = ids, []
    for _ in range(config.max_new_tokens):
        logits = logits_of(model, new, mask, 1, cache)[:, -1].float()
        token = torch.multinomial((logits / config.temperature).softmax(-1), 1, generator=generator).squeeze(1)
        token = torch.where(running, token, PAD)
        valid.append(running)
        ids = torch.cat([ids, token[:, None]], 1)
        mask = torch.cat([mask, running[:, None]], 1)
        running = running & (token != EOS)
        new = token[:, None]
        if not running.any():
            break
    return Samples(ids, mask, torch.stack(valid, 1), ~running, prompt_width)


@torch.no_grad()
def score(samples: Samples, roles: Roles, algorithm: Algorithm, config: RolloutConfig) -> Trajectory:
    """Log-probs are computed again by a forward pass like the one that trains (N+24): a cache rounds differently."""
    width = samples.mask.shape[1]
    logprobs, entropy = response_logprobs(roles.actor, samples, algorithm, config.temperature)
    ref_logprobs, _ = response_logprobs(roles.reference, samples, algorithm, config.temperature)
    values = response_values(roles.critic, samples.ids, samples.attention, width)
    scores = sequence_scores(roles.reward, samples.ids, samples.attention)
    return Trajectory(
        samples.ids, samples.attention, samples.mask, logprobs, ref_logprobs, entropy, values, scores, samples.has_eos
    )


def response_logprobs(
    model: PreTrainedModel, samples: Samples, algorithm: Algorithm, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the response tokens and entropies there, both [B, T] in nats (N+5: one temperature everywhere)."""
    logits = logits_of(model, samples.ids, samples.attention, samples.mask.shape[1] + 1)
    tokens = samples.ids[:, samples.prompt_width - 1 :]
    return algorithm.logprobs(logits, tokens, samples.mask, temperature)


def response_values(critic: Scalar, ids: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """[B, T]: the position before response token t has seen the prompt and tokens 0..t-1."""
    values: torch.Tensor = critic(ids, attention)
    return values[:, -width - 1 : -1]


def sequence_scores(reward: Scalar, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """[B]: query and response together (N+1), read at the last real token (N+8), padding moved to the right."""
    ids, attention = pad_right(ids, attention)
    last = attention.sum(1) - 1
    return reward(ids, attention).gather(1, last[:, None]).squeeze(1)  # type: ignore[no-any-return]


def pad_right(ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows with every padding position moved behind the text, cut to the longest row."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    mask = mask.gather(1, order)
    return ids.gather(1, order).where(mask, PAD), mask
