"""The numbers of one update: their names and the line that shows them.

Names follow the ones other PPO trainers log, so that curves overlay. Means are over valid tokens only.
"""

from __future__ import annotations

import torch

from ppo_kernels.trainer.checkpoint import Progress
from ppo_kernels.trainer.rollout import Trajectory


def summarize(
    batch: Trajectory,
    kl: torch.Tensor,  # [B, T], by the penalty's own estimator (N+15)
    total: float,  # mean sum of a response's rewards
    returns: torch.Tensor,  # [B, T]
    progress: Progress,
    metrics: dict[str, float],
) -> dict[str, float]:
    mask = batch.mask
    length = mask.sum(1).float()
    residual = (returns - batch.values)[mask].var(unbiased=False)
    scores = batch.scores + batch.turn_rewards.sum(1)
    stats = {
        "objective/scores": float(scores.mean()),
        "objective/scores_std": float(scores.std(unbiased=False)),
        "objective/kl": float(kl.sum(1).mean()),  # nats per response
        "objective/kl_coef": progress.kl_coef,
        "objective/rlhf_reward": total,
        "objective/non_score_reward": float(-progress.kl_coef * kl.sum(1).mean()),
        "objective/entropy": float(batch.entropy[mask].mean()),  # nats per token
        "response_length/mean": float(length.mean()),
        "response_length/max": float(length.max()),
        "response_length/eos_rate": float(batch.has_eos.float().mean()),
        "critic/explained_var": float(1 - residual / returns[mask].var(unbiased=False).clamp(min=1e-8)),
        "loss/policy_avg": metrics["policy_loss"],
        "loss/value_avg": metrics["value_loss"],
        "loss/policy_first": metrics["first_loss_policy"],
        "loss/value_first": metrics["first_loss_value"],
        "policy/approxkl_avg": metrics["approx_kl_k3"],
        "policy/clipfrac_avg": metrics["clip_fraction"],
        "policy/clip_range": progress.clip,
        "policy/entropy_avg": metrics["entropy"],
        "val/clipfrac_avg": metrics["value_clip_fraction"],
        "val/ratio": metrics["ratio_mean"],
        "val/ratio_max": metrics["ratio_max"],
        "val/first_logprob_drift": metrics["first_logprob_drift"],  # must be rounding only
        "grad_norm/actor": metrics["grad_norm_actor"],
        "grad_norm/critic": metrics["grad_norm_critic"],
        "optimizer_steps": metrics["optimizer_steps"],
        "skipped_steps": metrics["skipped_steps"],
        "stopped_early": metrics["stopped_early"],
        "episode": float((progress.update + 1) * len(mask)),
        "rollbacks": float(progress.stream),
    }
    return stats | {f"loss/{name}": metrics[f"{name}_loss"] for name in ("ptx", "sft") if f"{name}_loss" in metrics}


def step_line(number: int, total: int, s: dict[str, float]) -> str:
    heldout = f" (eval {s['heldout/reward']:.3f})" if "heldout/reward" in s else ""
    mixed = "".join(f" {name} {s[f'loss/{name}']:.2f}" for name in ("ptx", "sft") if f"loss/{name}" in s)
    return (
        f"upd {number}/{total} | score {s['objective/scores']:.3f}{heldout} | kl {s['objective/kl']:.2f} "
        f"β {s['objective/kl_coef']:.3g} | len {s['response_length/mean']:.1f} "
        f"eos {s['response_length/eos_rate']:.0%} | loss π {s['loss/policy_avg']:+.3f} v {s['loss/value_avg']:.3f}"
        f"{mixed} | clip {s['policy/clipfrac_avg']:.1%} ratio {s['val/ratio']:.2f} | "
        f"ev {s['critic/explained_var']:.2f} | gn {s['grad_norm/actor']:.1f}/{s['grad_norm/critic']:.1f} | "
        f"{s['time/update']:.1f} s (gen {s['time/generate'] / s['time/update']:.0%})"
    )
