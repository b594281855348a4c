"""The numbers of one update: their names, the line that shows them, and what to do when they look wrong.

Names follow the ones other PPO trainers log, so that curves overlay. Means are over valid tokens only.
"""

from __future__ import annotations

import torch

from ppo_kernels.trainer.rollout import Trajectory


def summarize(
    trajectory: Trajectory,
    rewards: torch.Tensor,  # [B, T]
    returns: torch.Tensor,  # [B, T]
    kl_coef: float,
    metrics: dict[str, float],
) -> dict[str, float]:
    mask = trajectory.mask
    kl = (trajectory.logprobs - trajectory.ref_logprobs).where(mask, 0.0).sum(1).mean()
    length = mask.sum(1).float()
    residual = (returns - trajectory.values)[mask].var(unbiased=False)
    return {
        "objective/scores": float(trajectory.scores.mean()),
        "objective/scores_std": float(trajectory.scores.std(unbiased=False)),
        "objective/kl": float(kl),  # nats per response
        "objective/kl_coef": kl_coef,
        "objective/rlhf_reward": float(rewards.sum(1).mean()),
        "objective/entropy": float(trajectory.entropy[mask].mean()),  # nats per token
        "response_length/mean": float(length.mean()),
        "response_length/eos_rate": float(trajectory.has_eos.float().mean()),
        "critic/explained_var": float(1 - residual / returns[mask].var(unbiased=False).clamp(min=1e-8)),
        "loss/policy_avg": metrics["policy_loss"],
        "loss/value_avg": metrics["value_loss"],
        "loss/policy_first": metrics["first_loss_policy"],
        "loss/value_first": metrics["first_loss_value"],
        "policy/approxkl_avg": metrics["approx_kl_k3"],
        "policy/clipfrac_avg": metrics["clip_fraction"],
        "policy/entropy_avg": metrics["entropy"],
        "val/clipfrac_avg": metrics["value_clip_fraction"],
        "val/ratio": metrics["ratio_mean"],
        "val/ratio_max": metrics["ratio_max"],
        "val/first_logprob_drift": metrics["first_logprob_drift"],  # must be rounding only
        "grad_norm/actor": metrics["grad_norm_actor"],
        "grad_norm/critic": metrics["grad_norm_critic"],
        "optimizer_steps": metrics["optimizer_steps"],
        "skipped_steps": metrics["skipped_steps"],
    }


def step_line(number: int, total: int, s: dict[str, float]) -> str:
    heldout = f" (eval {s['heldout/reward']:.3f})" if "heldout/reward" in s else ""
    return (
        f"upd {number}/{total} | score {s['objective/scores']:.3f}{heldout} | kl {s['objective/kl']:.2f} "
        f"β {s['objective/kl_coef']:.3g} | len {s['response_length/mean']:.1f} "
        f"eos {s['response_length/eos_rate']:.0%} | loss π {s['loss/policy_avg']:+.3f} v {s['loss/value_avg']:.3f} | "
        f"clip {s['policy/clipfrac_avg']:.1%} ratio {s['val/ratio']:.2f} | ev {s['critic/explained_var']:.2f} | "
        f"gn {s['grad_norm/actor']:.1f}/{s['grad_norm/critic']:.1f} | {s['time/update']:.1f} s "
        f"(gen {s['time/generate'] / s['time/update']:.0%})"
    )


def watch(s: dict[str, float]) -> list[str]:
    """What a careful colleague would say about this update; empty when all is well."""
    advice = []
    if s["val/first_logprob_drift"] > 1e-4:
        advice.append(
            f"log-probs moved by {s['val/first_logprob_drift']:.1e} before the first step: rollout and training "
            "do not compute the same thing (temperature, masks, padding or dropout)"
        )
    if s["objective/kl"] < -0.5:
        advice.append(f"KL to the SFT model is {s['objective/kl']:.2f} nats, below 0: sampling and scoring disagree")
    if s["policy/clipfrac_avg"] > 0.3:
        advice.append(f"{s['policy/clipfrac_avg']:.0%} of tokens clipped: lower optim.actor_lr or ppo.epochs")
    if s["objective/scores_std"] < 1e-6:
        advice.append("every response has the same score: PPO has nothing to learn from")
    if s["skipped_steps"]:
        advice.append(f"{s['skipped_steps']:.0f} optimizer steps skipped: gradient not finite")
    return advice
