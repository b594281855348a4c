"""The losses of TRL's GRPOTrainer and of liger-kernel's LigerFusedLinearGRPOLoss; tested with trl 1.16.0, liger 0.8.5.

Options in their names and meaning become a PPOLossConfig (`loss_config`); what they log is computed from log-probs,
[B, T]. `FusedLinearGRPOLoss` takes the place of liger's class. It imports neither package.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden

TESTED = "trl 1.16.0, liger-kernel 0.8.5"
GLOBAL_TOKEN_MEAN = ("cispo", "dapo", "vespo")  # over num_items_in_batch
CLIPPED = ("bnpo", "dapo", "dr_grpo", "grpo", "luspo")


def loss_config(
    loss_type: str, level: str, epsilon_low: float, epsilon_high: float, options: Any, **same: Any
) -> PPOLossConfig:
    """options: an object with the other attributes, named as in TRL; same: fields of PPOLossConfig, as they are."""
    if loss_type == "cispo":
        same["cispo_ratio_max"] = epsilon_high  # the cap itself, not 1 + epsilon_high
    elif loss_type == "sapo":
        same["sapo_tau_pos"], same["sapo_tau_neg"] = options.sapo_temperature_pos, options.sapo_temperature_neg
    elif loss_type in CLIPPED:
        same["clip_low"], same["clip_high"], delta = epsilon_low, epsilon_high, options.delta
        if delta is not None:  # delta caps the ratio before the minimum is taken, so the lower of the two bounds counts
            same["clip_high"], same["dual_clip"] = min(epsilon_high, delta - 1), max(delta, 1 + epsilon_high)
    same["kl_gradient"] = "is_weighted" if options.use_bias_correction_kl else "autograd"
    return PPOLossConfig.trl_grpo(loss_type, ratio_level=level, agg_max_len=options.max_completion_length, **same)


def log_ratios(logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """[B, T]; 0 where masked, and everywhere on policy (None)."""
    return torch.zeros_like(logprobs) if old_logprobs is None else torch.where(mask, logprobs - old_logprobs, 0.0)


def policy_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """[B, T], or [B, 1] of level "sequence"."""
    if level == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The estimate k3 [B, T]; 0 where masked."""
    d = torch.where(mask, logprobs - ref_logprobs, 0.0)
    return torch.expm1(-d) + d


def clipped(
    ratio: Tensor, advantages: Tensor, epsilon_low: float, epsilon_high: float, loss_type: str
) -> tuple[Tensor, Tensor]:
    """Where a bound takes the gradient (low, high), float, shape of ratio; advantages [B, 1] or [B, T]."""
    least, most = -math.inf, epsilon_high if loss_type == "cispo" else math.inf
    if loss_type in CLIPPED:
        least, most = 1 - epsilon_low, 1 + epsilon_high
    return ((ratio < least) & (advantages < 0)).float(), ((ratio > most) & (advantages > 0)).float()


def vespo_weights(log_ratio: Tensor, advantages: Tensor, is_ratio: Tensor | None, options: Any) -> Tensor:
    """VESPO's phi(w) = exp(lambda + k log w - lambda w), shape of advantages ([B, 1] or [B, T]).

    w is the product of the sequence's ratios, and of is_ratio [B, T]; k and lambda go with the sign of the advantage.
    """
    least = math.log(1e-8)
    log_w = log_ratio.clamp(-20, 20).sum(-1, keepdim=True)
    if is_ratio is not None:
        log_w = log_w + is_ratio.log().clamp(least, 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(least, 20)
    good = advantages >= 0
    k = torch.where(good, options.vespo_k_pos, options.vespo_k_neg)
    rate = torch.where(good, options.vespo_lambda_pos, options.vespo_lambda_neg).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The loss from hidden states
# ---------------------------------------------------------------------------------------------------------------------


class FusedLinearGRPOLoss(torch.nn.Module):
    """In the place of LigerFusedLinearGRPOLoss: same arguments, same result (loss, (kl if beta != 0, clip fraction)).

    fused_linear_ppo_loss with Liger's arguments; compiled and chunk_size have no effect. TRL is followed where liger
    0.8.5 differs from it: luspo counts valid tokens only, and cispo, sapo and vespo take
    importance_sampling_level="sequence". A masked slot may hold NaN.
    delta <= 1: NotImplementedError.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: str = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: str = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        if loss_type in CLIPPED and delta is not None and delta <= 1:
            raise NotImplementedError(f"delta is {delta}, but only a cap of the ratio above 1 is offered")
        self.beta, self.loss_type, self.use_ref_model = beta, loss_type, use_ref_model
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.max_completion_length, self.importance_sampling_level = max_completion_length, importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.temperature, self.use_bias_correction_kl = temperature, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg
        self.config = loss_config(
            loss_type,
            importance_sampling_level,
            epsilon_low,
            epsilon_high,
            self,
            kl_coef=beta if use_ref_model else 0.0,
            temperature=temperature,
            return_entropy=False,
        )

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """_input [B, T, H], lin_weight [V, H], selected_token_ids and all per-token tensors [B, T], advantages [B]."""
        mask = attention_mask != 0
        tokens, count = selected_token_ids, mask.sum().float()
        normalizer: Tensor | float = count if self.loss_type == "bnpo" else float(len(mask))
        if self.loss_type in GLOBAL_TOKEN_MEAN:
            normalizer = global_tokens(count, num_items_in_batch)
        if vllm_is_ratio is not None:
            vllm_is_ratio = vllm_is_ratio.view(len(mask), -1)  # [B, 1] or [B, T]
        if not self.use_ref_model:
            ref_per_token_logps = None
        elif ref_per_token_logps is None and self.beta != 0:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"ref_per_token_logps is None, but beta={self.beta} needs it, or ref_input and its head"
                )
            ref_per_token_logps = self._score(ref_input, ref_weight, ref_bias, tokens, mask)

        weights, head = vllm_is_ratio, (_input, lin_weight)
        if self.loss_type == "vespo":
            log_ratio = log_ratios(self._score(*head, bias, tokens, mask), old_per_token_logps, mask)
            weights = vespo_weights(log_ratio, advantages[:, None], weights, self)
        loss, logprobs = fused_linear_ppo_loss(
            *head,
            tokens,
            old_per_token_logps,
            advantages,
            mask,
            bias=bias,
            config=self.config,
            ref_logprobs=ref_per_token_logps,
            rollout_is_weights=None if weights is None else weights.expand(mask.shape),
            normalizer=normalizer,
        )[:2]
        with torch.no_grad():
            log_ratio = log_ratios(logprobs, old_per_token_logps, mask)
            ratio = policy_ratio(log_ratio, mask, self.importance_sampling_level)
            low, high = clipped(ratio, advantages[:, None], self.epsilon_low, self.epsilon_high, self.loss_type)
            metrics = [(low + high).expand(mask.shape)]
            if self.beta != 0:
                reference = logprobs if ref_per_token_logps is None else ref_per_token_logps
                weight = ratio if self.use_bias_correction_kl else 1.0
                metrics.insert(0, kl_divergence(logprobs, reference, mask) * weight)
            return loss, tuple((x * mask).sum() / count.clamp(min=1) for x in metrics)

    @torch.no_grad()
    def _score(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, mask: Tensor) -> Tensor:
        return logprobs_from_hidden(hidden, weight, tokens, mask, bias=bias, temperature=self.temperature)


def global_tokens(count: Tensor, num_items_in_batch: Tensor | float | None) -> Tensor:
    """Valid tokens of all processes over their number; num_items_in_batch: the first of the two."""
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is not None:
        return torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=count.device).div(world).clamp(min=1)
    if world > 1:
        count = count.clone()
        dist.all_reduce(count)
    return (count / world).clamp(min=1)
