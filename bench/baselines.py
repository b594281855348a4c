"""What a trainer would write by hand: the same quantities in eager PyTorch, for speed and memory beside ours."""

import torch
from torch import Tensor


def logprobs_and_entropy(logits: Tensor, tokens: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Per token, fp32, through a stored log-softmax."""
    logp = torch.log_softmax(logits.float(), dim=-1)
    gathered = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return gathered, -(logp.exp() * logp).sum(-1) if entropy else torch.zeros_like(gathered)


def ppo_loss(
    logits: Tensor, tokens: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, entropy_coef: float
) -> Tensor:
    """Clipped PPO loss with an entropy bonus, masked token mean."""
    logp, entropy = logprobs_and_entropy(logits, tokens, entropy_coef != 0)
    ratio = torch.exp(logp - old_logprobs)
    surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    return ((surrogate - entropy_coef * entropy) * mask).sum() / mask.sum()


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """The usual loop over time, [B] at a step."""
    advantages, running = torch.empty_like(rewards), torch.zeros_like(rewards[:, 0])
    following = torch.zeros_like(running)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        running = delta + gamma * lam * running
        advantages[:, t], following = running, values[:, t]
    return advantages, advantages + values
