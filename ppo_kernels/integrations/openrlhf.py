"""OpenRLHF 0.11.2: its PolicyLoss, ValueLoss, log-probs, entropy and GAE, computed here.

    ray job submit --runtime-env-json='{"worker_process_setup_hook":
        "ppo_kernels.integrations.openrlhf.worker_setup_hook"}' -- python3 -m openrlhf.cli.train_ppo_ray ...

or call install(), before or after OpenRLHF is imported. It imports nothing of OpenRLHF itself, so that no worker
touches a device before Ray has said which. Masked positions, which OpenRLHF fills with whatever is there, are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_kernels import PPOLossConfig, gae, ppo_loss, ppo_value_loss
from ppo_kernels import logprobs_from_logits as row_logprobs
from ppo_kernels.integrations.patching import Patches

TESTED = ">=0.11.2,<=0.11.2"

patches = Patches("openrlhf", TESTED)


class PolicyLoss(torch.nn.Module):
    """The arguments and results are those of openrlhf.models.PolicyLoss."""

    def __init__(
        self,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        dual_clip: float | None = None,
        token_level_loss: bool = True,
        policy_loss_type: str = "ppo",
        is_correction_level: str = "off",
        is_correction_mode: str = "mask",
        is_correction_gating: str = "ratio",
        is_correction_threshold: Sequence[float] = (0.5, 5.0),
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("is_correction_level", is_correction_level, ("off", "token", "seq")),
            ("is_correction_mode", is_correction_mode, ("mask", "clip")),
            ("is_correction_gating", is_correction_gating, ("ratio", "binary_kl", "tv")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
        self.low, self.high = is_correction_threshold
        self.level, self.clamp, self.gating = is_correction_level, is_correction_mode == "clip", is_correction_gating
        if self.clamp and (self.level == "seq" or self.gating != "ratio"):
            raise ValueError("is_correction_mode='clip' clamps the ratio of a token: level 'token', gating 'ratio'")
        if self.level != "off" and self.gating != "ratio" and self.low > 0:
            raise ValueError(f"is_correction_threshold is {self.low, self.high}, but a divergence has no lower bound")
        self.gspo = policy_loss_type == "gspo"
        self.config = PPOLossConfig.openrlhf(
            policy_loss_type,
            clip_low=clip_eps_low,
            clip_high=clip_eps_high,
            dual_clip=dual_clip,
            aggregation="token-mean" if token_level_loss and not self.gspo else "seq-mean-token-mean",
        )

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor | None = None,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        weights = vllm_kl = filtered = None
        proximal = old_log_probs
        if self.level != "off":
            if rollout_log_probs is None:
                raise ValueError(f"rollout_log_probs is None, but is_correction_level={self.level!r} needs it")
            if self.gspo:
                proximal = rollout_log_probs  # the ratio itself corrects
            else:
                weights, filtered = self._correction(old_log_probs, rollout_log_probs, action_mask)
                vllm_kl = _masked_mean(rollout_log_probs - old_log_probs, action_mask)
        out = ppo_loss(
            log_probs,
            proximal,
            advantages,
            action_mask,
            config=self.config,
            token_weights=weights,  # there are no other terms, and OpenRLHF's metrics do not know the weights
            **_counts(self.config, dp_size, batch_num_tokens, global_batch_size),
        )
        clipped = out.metrics.mean("clip_fraction_low") + out.metrics.mean("clip_fraction_high")
        ppo_kl = _masked_mean(old_log_probs - log_probs.detach(), action_mask)
        return out.loss, clipped, ppo_kl, vllm_kl, filtered

    def _correction(self, old: Tensor, rollout: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weight of each token [B, T], share of tokens or sequences outside the threshold)."""
        log_weight = old - rollout
        statistic = log_weight if self.gating == "ratio" else _divergence(rollout.exp(), old.exp(), self.gating)
        counted = torch.ones_like(old, dtype=torch.bool) if mask is None else mask != 0
        if self.level == "seq":
            length = counted.sum(-1, keepdim=True)
            statistic = torch.where(counted, statistic, 0.0).sum(-1, keepdim=True) / length.clamp(min=1)
            counted = length > 0
        if self.gating == "ratio":
            statistic = statistic.exp()
        inside = (statistic >= self.low) & (statistic <= self.high)
        weight = statistic.clamp(self.low, self.high) if self.clamp else torch.where(inside, log_weight.exp(), 0.0)
        return weight, _masked_mean((~inside).to(old.dtype), counted)


class ValueLoss(torch.nn.Module):
    """The arguments and result are those of openrlhf.models.ValueLoss."""

    def __init__(self, clip_eps: float | None = None, token_level_loss: bool = True) -> None:
        super().__init__()
        aggregation = "token-mean" if token_level_loss else "seq-mean-token-mean"
        self.config = PPOLossConfig.openrlhf(value_clip=clip_eps, aggregation=aggregation)

    def forward(
        self,
        values: Tensor,
        old_values: Tensor,
        returns: Tensor,
        action_mask: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: float | Tensor | None = None,
        global_batch_size: float | Tensor | None = None,
    ) -> Tensor:
        counts = _counts(self.config, dp_size, batch_num_tokens, global_batch_size)
        return ppo_value_loss(values, returns, action_mask, old_values=old_values, config=self.config, **counts).loss


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """fp32; the logits stay as they are, which OpenRLHF divides in place."""
    return row_logprobs(logits, labels, temperature=temperature)


def compute_entropy(logits: Tensor) -> Tensor:
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return row_logprobs(logits, tokens, return_entropy=True)[1]


def get_advantages_and_returns(
    self: Any, values: Tensor, rewards: Tensor, action_mask: Tensor, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    found = gae(rewards, values, action_mask, gamma=gamma, lam=lambd, mask_mode="zero")
    return found.advantages, found.returns


def install() -> None:
    """Replace them in OpenRLHF, now or as soon as it is imported. RuntimeError, then, where its signatures differ."""
    if patches:
        return
    maker = "openrlhf.trainer.ppo_utils.experience_maker"
    patches.after_import("openrlhf.models.loss", lambda m: _replace(m, PolicyLoss, ValueLoss))
    patches.after_import("openrlhf.models.utils", lambda m: _replace(m, log_probs_from_logits, compute_entropy))
    patches.after_import(maker, lambda m: _replace(m.RemoteExperienceMaker, get_advantages_and_returns))


def uninstall() -> None:
    patches.undo()


def worker_setup_hook() -> None:
    """For Ray's runtime_env, see the module's docstring."""
    install()


def _replace(owner: Any, *ours: Any) -> None:
    for one in ours:
        patches.replace(owner, one.__name__, one)


def _counts(config: PPOLossConfig, dp_size: int, tokens: Any, sequences: Any) -> dict[str, Any]:
    """OpenRLHF scales by dp_size only what it divides by a global count."""
    normalizer = tokens if config.aggregation == "token-mean" else sequences
    return {"normalizer": normalizer, "loss_scale": 1.0 if normalizer is None else dp_size}


def _masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    valid = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def _divergence(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """Of the policies' choices between a token and all others; p: rollout, q: training policy."""
    p, q = (x.clamp(1e-6, 1 - 1e-6) for x in (p, q))  # where the logarithms are finite
    if kind == "tv":
        return (p - q).abs()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
