"""verl 0.9.1: policy losses by name, and install() for everything else on the way from logits to loss.

    VERL_USE_EXTERNAL_MODULES=ppo_kernels.integrations.verl python -m verl.trainer.main_ppo \\
        actor_rollout_ref.actor.policy_loss.loss_mode=ppo_kernels ...

Importing this module registers "ppo_kernels" (verl's vanilla), "ppo_kernels_gspo", "ppo_kernels_sapo",
"ppo_kernels_cispo" and "ppo_kernels_gpg". A module of your own that also calls install(), named in that variable
instead, replaces compute_gae_advantage_return, compute_value_loss, logprobs_from_logits and entropy_from_logits in the
driver and in every worker. Masked positions, which verl fills with whatever is there, are 0.
"""

from __future__ import annotations

from typing import Any

import torch
import verl
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import torch_functional

from ppo_kernels import PPOLossConfig, gae, masked_whiten, ppo_loss, ppo_value_loss
from ppo_kernels import logprobs_from_logits as row_logprobs
from ppo_kernels.integrations.patching import Patches, check_signature

TESTED = ">=0.9.1,<=0.9.1"
LOSS_MODES = ("vanilla", "gspo", "sapo", "cispo", "gpg")

patches = Patches("verl", TESTED)


def aggregation(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of PPOLossConfig, arguments of ppo_loss) that do what agg_loss does with these."""
    normalizer = {"token-mean": batch_num_tokens, "token-sum": None}.get(mode, global_batch_size)
    if dp_size > 1 and normalizer is None and mode != "token-sum":
        raise ValueError(f"loss_agg_mode={mode!r} with dp_size={dp_size} needs the count of the global batch")
    length = mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return {"aggregation": mode, "agg_max_len": length}, {"normalizer": normalizer, "loss_scale": dp_size}


def policy_loss(loss_mode: str) -> Any:
    """verl's policy loss of this name, computed here."""

    def compute(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if config is None:
            raise ValueError("config is None, expected verl's ActorConfig")
        if loss_mode == "sapo":
            loss_agg_mode = "seq-mean-token-mean"  # whatever is asked, as verl does
        options, counts = aggregation(loss_agg_mode, response_mask, **config.global_batch_info)
        if loss_mode == "vanilla":
            options["dual_clip"] = config.get("clip_ratio_c", 3.0)
        if loss_mode == "sapo":
            options |= {"sapo_tau_pos": config.tau_pos, "sapo_tau_neg": config.tau_neg}
        low, high = config.clip_ratio_low, config.clip_ratio_high
        options["clip_low"] = config.clip_ratio if low is None else low
        options["clip_high"] = config.clip_ratio if high is None else high
        out = ppo_loss(
            log_prob,
            old_log_prob,
            advantages,
            response_mask,
            config=PPOLossConfig.verl(loss_mode, **options),
            token_weights=rollout_is_weights,  # there are no other terms, and verl's metrics do not know the weights
            **counts,
        )
        if loss_mode == "gpg":
            return out.loss, {}
        return out.loss, {
            "actor/pg_clipfrac": out.metrics.mean("clip_fraction_low") + out.metrics.mean("clip_fraction_high"),
            "actor/ppo_kl": out.metrics.mean("approx_kl_k1"),
            "actor/pg_clipfrac_lower": out.metrics.mean("dual_clip_fraction"),
        }

    return compute


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    options, counts = aggregation(
        loss_agg_mode, response_mask, dp_size, batch_num_tokens, global_batch_size, loss_scale_factor
    )
    config = PPOLossConfig.verl(value_clip=cliprange_value, **options)
    out = ppo_value_loss(vpreds, returns, response_mask, old_values=values, config=config, **counts)
    return out.loss, out.metrics.mean("value_clip_fraction")


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(whitened advantages, returns); one valid token, which verl refuses, whitens to 0."""
    found = gae(token_level_rewards, values, response_mask, gamma=float(gamma), lam=float(lam))
    return masked_whiten(found.advantages, response_mask, unbiased=True), found.returns


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = False) -> Tensor:
    """fp32. inplace_backward, when a caller asks for it, writes the gradient over logits, as flash-attn's does; another
    use of the logits in backward is then autograd's error. (It is verl's default, also where logits have another use.)
    """
    inplace = inplace_backward and logits.is_contiguous() and not logits.is_leaf
    return row_logprobs(logits, labels, inplace_grad=inplace)


def entropy_from_logits(logits: Tensor) -> Tensor:
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return row_logprobs(logits, tokens, return_entropy=True)[1]


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    return entropy_from_logits(logits)


def install() -> None:
    """Replace what the module's docstring names. RuntimeError where this verl's signatures differ."""
    if patches:
        return
    patches.replace(core_algos, "compute_gae_advantage_return", compute_gae_advantage_return)
    patches.replace(core_algos, "compute_value_loss", compute_value_loss)
    for function in (logprobs_from_logits, entropy_from_logits, entropy_from_logits_with_chunking):
        patches.replace(torch_functional, function.__name__, function)


def uninstall() -> None:
    patches.undo()


def register() -> None:
    for mode in LOSS_MODES:
        ours, theirs = policy_loss(mode), core_algos.get_policy_loss_fn(mode)
        check_signature(f"verl {verl.__version__}: the policy loss {mode}", theirs, ours, f"verl {TESTED}")
        core_algos.register_policy_loss("ppo_kernels" if mode == "vanilla" else f"ppo_kernels_{mode}")(ours)


register()
