"""The same mathematics once more in plain PyTorch, sharing no code with the library: what a reader can check by eye,
and what `train.loss=reference` trains with. Slow on purpose: every intermediate has a name.
"""

from __future__ import annotations

import torch

from ppo_kernels.trainer.config import PPOConfig


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [B, T+1, V], tokens [B, T+1]; row t scores token t+1. Log-probs and entropies [B, T], 0 where masked."""
    log_p = torch.log_softmax(logits[:, :-1].float() / temperature, dim=-1)
    chosen = log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return chosen.where(mask, 0.0), entropy.where(mask, 0.0)


def token_rewards(
    scores: torch.Tensor,  # [B]
    logprobs: torch.Tensor,  # [B, T]
    ref_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_coef: float,
    kl_estimator: str,
) -> torch.Tensor:
    """-kl_coef * KL at every token, plus the score at the last one, [B, T]."""
    log_ratio = logprobs - ref_logprobs
    estimate = {
        "k1": log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": torch.exp(-log_ratio) - 1 + log_ratio,
    }[kl_estimator]
    rewards = (-kl_coef * estimate).where(mask, 0.0)
    for row in range(len(rewards)):
        valid = mask[row].nonzero()
        if len(valid):
            rewards[row, valid[-1]] += scores[row]
    return rewards


def advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, ppo: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, and returns = advantages + values; [B, T], 0 where masked."""
    result = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        following_value = following_advantage = torch.tensor(0.0)
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            delta = rewards[row, t] + ppo.gamma * following_value - values[row, t]
            following_advantage = result[row, t] = delta + ppo.gamma * ppo.lam * following_advantage
            following_value = values[row, t]
    return result, (result + values).where(mask, 0.0)


def whiten(x: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True) -> torch.Tensor:
    """Unit (biased) variance over the valid positions, and zero mean or the mean as it was; 0 elsewhere."""
    valid = x[mask]
    white = (x - valid.mean()) / torch.sqrt(valid.var(unbiased=False) + 1e-8)
    return (white if shift_mean else white + valid.mean()).where(mask, 0.0)


def loss(
    logits: torch.Tensor,  # [B, T+1, V]
    tokens: torch.Tensor,  # [B, T+1]
    old_logprobs: torch.Tensor,  # [B, T], and so are all below
    advantages: torch.Tensor,
    mask: torch.Tensor,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    normalizer: float,  # valid tokens of the whole minibatch, over all ranks, divided by the ranks
    temperature: float,
    clip: float,
    ppo: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """The clipped policy loss, clipped value loss and entropy bonus: loss, new log-probs [B, T], metrics."""
    new_logprobs, entropy = logprobs(logits, tokens, mask, temperature)

    def mean(x: torch.Tensor) -> torch.Tensor:
        return (x * mask).sum() / normalizer

    log_ratio = new_logprobs - old_logprobs.where(mask, 0.0)
    ratio = torch.exp(log_ratio)
    surrogate = ratio * advantages
    clipped = torch.clamp(ratio, 1 - clip, 1 + clip) * advantages
    policy_loss = mean(-torch.min(surrogate, clipped))

    error = torch.square(values - returns)
    outside = torch.zeros_like(error)
    if ppo.value_clip is not None:
        near_old = old_values + torch.clamp(values - old_values, -ppo.value_clip, ppo.value_clip)
        clipped_error = torch.square(near_old - returns)
        outside = (clipped_error > error).float()
        error = torch.max(error, clipped_error)
    value_loss = mean(0.5 * error)

    total = policy_loss + ppo.vf_coef * value_loss - ppo.entropy_coef * mean(entropy)
    count = max(float(mask.sum()), 1.0)
    metrics = {
        "tokens": float(mask.sum()),
        "policy_loss": policy_loss.item() * normalizer / count,
        "value_loss": value_loss.item() * normalizer / count,
        "ratio_mean": (ratio * mask).sum().item() / count,
        "ratio_min": ratio[mask].min().item() if mask.any() else 1.0,
        "ratio_max": ratio[mask].max().item() if mask.any() else 1.0,
        "approx_kl_k1": (-log_ratio * mask).sum().item() / count,
        "approx_kl_k3": ((ratio - 1 - log_ratio) * mask).sum().item() / count,
        "clip_fraction": ((clipped < surrogate) * mask).sum().item() / count,
        "value_clip_fraction": (outside * mask).sum().item() / count,
        "entropy": (entropy * mask).sum().item() / count,
    }
    return total, new_logprobs.detach(), metrics
