"""liger-kernel 0.8.5: `triton_grpo_loss` and `fused_selective_log_softmax` with Liger's arguments, computed here.

Liger itself is not needed; logits may have any strides and be on any device. LigerFusedLinearGRPOLoss is in trl_loss.
Different on purpose: a masked slot may hold NaN, a batch may be empty, luspo's gradient is that of its loss.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ppo_kernels import fused_ppo_loss, logprobs_from_logits
from ppo_kernels.integrations.trl_loss import (
    CLIPPED,
    GLOBAL_TOKEN_MEAN,
    clipped,
    global_tokens,
    log_ratios,
    loss_config,
    vespo_weights,
)

TESTED = ">=0.8.5,<=0.8.5"


def triton_grpo_loss(
    logits: Tensor,
    old_logp: Tensor | None,
    ref_logp: Tensor | None,
    completion_ids: Tensor,
    advantages: Tensor,
    completion_mask: Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = True,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: float | Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """GRPO's loss of logits [B, L + 1, V] and completion_ids [B, L]; the last row of logits predicts nothing.

    Returns (loss, [kl mean if beta, clip ratio]) with reduce, else (loss [B, L], kl [B, L] or None, is_clipped [B, L]).
    inplace writes the gradient over the logits: in this call with reduce and ratios of tokens, else in backward.
    """
    if importance_sampling_level not in ("token", "sequence"):
        raise ValueError(f"importance_sampling_level must be token or sequence, got {importance_sampling_level!r}")
    if importance_sampling_level == "sequence" and loss_type not in CLIPPED:
        raise ValueError(f"importance_sampling_level='sequence' excludes loss_type={loss_type!r}")
    if delta is not None and loss_type not in CLIPPED:
        raise ValueError(f"delta={delta} excludes loss_type={loss_type!r}")
    if delta is not None and delta <= 1:
        raise NotImplementedError(f"delta is {delta}, but only a cap of the ratio above 1 is offered")
    length = completion_ids.shape[1]
    valid = torch.ones_like(completion_ids, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    options = SimpleNamespace(
        delta=delta,
        max_completion_length=length if max_completion_length is None else max_completion_length,
        sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg,
        use_bias_correction_kl=use_bias_correction_kl,
        vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg,
        vespo_lambda_neg=vespo_lambda_neg,
    )
    same = {"kl_coef": beta, "temperature": temperature, "return_entropy": False, "per_token_outputs": ("ratio", "kl")}
    arguments: dict[str, Any] = {}
    if not reduce:
        same["aggregation"] = "none"
    elif loss_type in GLOBAL_TOKEN_MEAN:
        arguments["normalizer"] = global_tokens(valid.sum().float(), num_items_in_batch)
    elif loss_type == "luspo":  # mean over [B, L] of each loss times the tokens of its sequence
        arguments["token_weights"] = (valid.sum(-1, keepdim=True) / max(length, 1)).expand(valid.shape)
    weights = None if vllm_is_ratio is None else vllm_is_ratio.view(len(valid), -1)  # [B, 1] or [B, L]
    if loss_type == "vespo":
        found = _logprobs(logits, completion_ids, valid, temperature)
        weights = vespo_weights(log_ratios(found, old_logp, valid), advantages[:, None], weights, options)
    out = fused_ppo_loss(
        logits,
        _shifted(completion_ids),
        old_logp,
        advantages,
        valid,
        config=loss_config(loss_type, importance_sampling_level, eps_low, eps_high, options, **same),
        ref_logprobs=ref_logp if beta != 0 else None,
        rollout_is_weights=None if weights is None else weights.expand(valid.shape),
        shift=True,
        inplace_grad=inplace,
        **arguments,
    )
    low, high = clipped(out.per_token["ratio"], advantages[:, None], eps_low, eps_high, loss_type)
    is_clipped = (low + high) * valid
    kl = out.per_token["kl"] if beta != 0 else None
    if not reduce:
        return out.loss, kl, is_clipped
    return out.loss, [x.sum() / valid.sum().clamp(min=1) for x in (kl, is_clipped) if x is not None]


def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None
) -> Tensor:
    """Log-probs [B, L], fp32 and without gradient, of the last L of input_ids under logits [B, L + 1, V]."""
    length = logits.shape[1] - 1
    mask = None if mask is None else mask[:, mask.shape[1] - length :]
    return _logprobs(logits, input_ids[:, input_ids.shape[1] - length :], mask, temperature)


@torch.no_grad()
def _logprobs(logits: Tensor, ids: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    return logprobs_from_logits(logits, _shifted(ids), mask, temperature=temperature, shift=True)


def _shifted(ids: Tensor) -> Tensor:
    """[B, L] -> [B, L + 1]: row t of the logits scores token t + 1, by addressing; a slice would be copied."""
    return torch.nn.functional.pad(ids, (1, 0))
