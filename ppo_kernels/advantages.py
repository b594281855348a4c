"""Advantages, rewards, whitening and KL controllers: the N-sized half of PPO around the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ppo_kernels import checks, ops, reference
from ppo_kernels.config import PPOLossConfig
from ppo_kernels.loss_terms import kl_estimate
from ppo_kernels.reference import WHITEN_EPS_ON, accumulate_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MASK_MODES = ("skip", "zero", "dense")
PLACEMENTS = ("last_token", "after_last")


class GAEOutput(NamedTuple):
    """advantages and returns = advantages + values, fp32 (fp64 for fp64 rewards), 0 at masked positions, detached."""

    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float | Tensor = 0.95,
    bootstrap_value: Tensor | None = None,
    terminated: Tensor | None = None,
    truncated: Tensor | None = None,
    next_values: Tensor | None = None,
    mask_mode: str = "skip",
    cu_seqlens: Tensor | None = None,
    value_lam: float | Tensor | None = None,
) -> GAEOutput:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), one sequence per row.

        delta_t = r_t + gamma * (1 - terminated_t) * V_next - V_t
        A_t = delta_t + gamma * lam * (1 - (terminated_t or truncated_t)) * A_next

    Args:
        rewards, values: [B, T], or [T], or packed [N] with cu_seqlens. values[t] is the value before step t.
        mask: same shape, bool, integer or float 0/1; 1 for the steps that are the policy's own.
        gamma, lam: discount and GAE parameter, in [0, 1]. lam may be a tensor [B], one for each sequence (VAPO's
            length-adaptive GAE, Yue et al. 2025); its values are checked on a CPU.
        bootstrap_value: [B] (0-dim for [T]): V after the last step. Default 0: the sequences end.
        terminated: flags; the episode ended at t for good: nothing follows.
        truncated: flags; the episode was cut at t: its value goes on, its advantages do not. Needs next_values, which
            hold the value of the state it was cut in.
        next_values: V_next of every step, instead of the value of the next step.
        mask_mode: "skip": masked steps do not exist, neither read nor counted (tool output between turns); "zero":
            they have reward and value 0 and discount; "dense": they count fully, only their results are 0. In the
            first two a reward at a masked step is not read: put it on the last valid one, as shape_rewards does.
        cu_seqlens: [B + 1] int32; sequence i is [cu_seqlens[i], cu_seqlens[i+1]).
        value_lam: lam for the returns alone, by a second scan (decoupled GAE: VC-PPO, Yuan et al. 2025). Default: lam.

    Raises: TypeError, ValueError before any computation.
    """
    rewards = checks.floating("rewards", rewards)
    if rewards.dim() not in (1, 2):
        raise ValueError(
            f"rewards has shape {list(rewards.shape)}, expected [B, T], [T], or packed [N] with cu_seqlens"
        )
    shape, device = rewards.shape, rewards.device
    values = checks.floating("values", values, rewards, shape)
    if mask_mode not in MASK_MODES:
        raise ValueError(f"mask_mode must be one of {', '.join(MASK_MODES)}, got {mask_mode!r}")
    gamma = checks.number("gamma", gamma, 0, 1, "0 <= gamma <= 1")
    if truncated is not None and next_values is None:
        raise ValueError("truncated needs next_values, the value of the state each cut episode was left in")
    if cu_seqlens is not None:
        if rewards.dim() != 1:
            raise ValueError(f"cu_seqlens needs packed rewards [N], got shape {list(shape)}")
        segments = checks.cu_seqlens(cu_seqlens, rewards, shape[0])
        sequences: tuple[int, ...] = (segments.shape[0] - 1,)
    else:
        sequences = tuple(shape[:-1])
        count = sequences[0] if sequences else 1
        segments = torch.arange(count + 1, device=device) * shape[-1]
    lams = [_lam("lam", lam, rewards, sequences)]
    if value_lam is not None:
        lams.append(_lam("value_lam", value_lam, rewards, sequences))
    if bootstrap_value is not None:
        bootstrap_value = checks.floating("bootstrap_value", bootstrap_value, rewards, sequences).reshape(-1)
    if next_values is not None:
        next_values = checks.floating("next_values", next_values, rewards, shape).reshape(-1)
    valid, ended, cut = (
        None if checked is None else checked.reshape(-1)
        for checked in (
            checks.mask(name, x, rewards, shape)
            for name, x in (("mask", mask), ("terminated", terminated), ("truncated", truncated))
        )
    )
    flat = (rewards.reshape(-1), values.reshape(-1), valid, bootstrap_value, next_values, ended, cut)
    scans = [ops.gae(*flat, segments, gamma, one, mask_mode, per_sequence) for one, per_sequence in lams]
    return GAEOutput(scans[0][0].view(shape), scans[-1][1].view(shape))


def _lam(name: str, lam: object, rewards: Tensor, sequences: tuple[int, ...]) -> tuple[float, Tensor | None]:
    """(lam, None) of a number, (0, lam [B]) of one for each sequence."""
    if not isinstance(lam, Tensor):
        return checks.number(name, lam, 0, 1, f"0 <= {name} <= 1"), None
    lam = checks.floating(name, lam, rewards, sequences).reshape(-1)
    if checks.eager_cpu(lam) and not bool(((lam >= 0) & (lam <= 1)).all()):
        raise ValueError(f"{name} must hold only 0 <= {name} <= 1")
    return 0.0, lam


@torch.no_grad()
def shape_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    kl_estimator: str = "k1",
    placement: str = "last_token",
    clip: float | None = None,
    missing_eos_penalty: float | None = None,
    has_eos: Tensor | None = None,
    kl_input_clamp: float | None = None,
    kl_output_clamp: float | None = None,
) -> Tensor:
    """Per-token rewards [B, T]: -kl_coef * KL(policy, reference) at each valid token, and the score at the end.

    Args:
        scores: [B], one per sequence.
        logprobs, ref_logprobs: [B, T], nats; mask: [B, T] bool, integer or float 0/1.
        kl_estimator: "k1", "k2", "k3" or "abs", as in PPOLossConfig.
        placement: "last_token": the last valid token; "after_last": the slot after it (TRL, DeepSpeed-Chat), or the
            last valid token when there is none. A row without a valid token gets nothing.
        clip: scores are clamped to +-clip first.
        missing_eos_penalty: taken off the score where has_eos [B] is false.
        kl_input_clamp, kl_output_clamp: clamp the difference of the log-probs, or the estimate, to +-this (nats).

    Returns: fp32 [B, T]; 0 at masked tokens (but for placement="after_last").
    """
    scores = checks.floating("scores", scores)
    logprobs = checks.floating("logprobs", logprobs, scores)
    if logprobs.dim() != 2:
        raise ValueError(f"logprobs has shape {list(logprobs.shape)}, expected [B, T]")
    ref_logprobs = checks.floating("ref_logprobs", ref_logprobs, scores, logprobs.shape)
    checks.matching("scores", scores, None, logprobs.shape[:1])
    valid = checks.mask("mask", checks.tensor("mask", mask), scores, logprobs.shape)
    kl = PPOLossConfig(kl_estimator=kl_estimator, kl_input_clamp=kl_input_clamp, kl_output_clamp=kl_output_clamp)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {', '.join(PLACEMENTS)}, got {placement!r}")
    kl_coef = checks.non_negative("kl_coef", kl_coef)
    if clip is not None:
        clip = checks.positive("clip", clip)
    if missing_eos_penalty is not None:
        missing_eos_penalty = checks.non_negative("missing_eos_penalty", missing_eos_penalty)
    if (missing_eos_penalty is None) != (has_eos is None):
        raise ValueError("missing_eos_penalty and has_eos come together: the penalty, and which sequences are spared")
    assert valid is not None
    dtype = accumulate_dtype(logprobs.dtype)
    log_ratio = torch.where(valid, logprobs.to(dtype) - ref_logprobs.to(dtype), 0.0)
    cap = kl.params().kl_output_clamp
    rewards = -kl_coef * kl_estimate(log_ratio, kl.params())[0].clamp(-cap, cap)
    scores = scores.to(dtype)
    if clip is not None:
        scores = scores.clamp(-clip, clip)
    if has_eos is not None:
        spared = checks.mask("has_eos", has_eos, scores, scores.shape)
        scores = torch.where(spared, scores, scores - missing_eos_penalty)  # type: ignore[arg-type, operator]
    if logprobs.shape[1] == 0:
        return rewards
    position = torch.arange(logprobs.shape[1], device=logprobs.device)
    end = torch.where(valid, position, -1).amax(-1)
    if placement == "after_last":
        end = torch.where(end >= 0, (end + 1).clamp(max=logprobs.shape[1] - 1), end)
    return torch.where(position == end[:, None], rewards + scores[:, None], rewards)


@torch.no_grad()
def masked_whiten(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    process_group: ProcessGroup | None = None,
    eps_on: str = "var",
) -> Tensor:
    """(x - mean) / deviation over valid elements, 0 at masked ones; two passes in float64.

    x: any shape, floating; mask: same shape, bool, integer or float 0/1. shift_mean=False puts the mean back (rewards).
    unbiased: divide the variance by n - 1 (TRL, verl) instead of n. No or one valid element, or all equal: finite.
    eps_on: "var": the deviation is sqrt(variance + eps) (TRL, verl, NeMo-RL); "std": sqrt(variance) + eps (CleanRL,
    rsl_rl, AReaL); "clamp": sqrt(max(variance, eps)) (OpenRLHF).
    process_group: mean and variance are those of all its ranks' valid elements (two collectives of two numbers; every
    rank takes part, also one without a valid element).
    Returns fp32 (fp64 for fp64 x).
    """
    x = checks.floating("x", x)
    eps = checks.non_negative("eps", eps)
    valid = checks.mask("mask", mask, x, x.shape)
    if eps_on not in WHITEN_EPS_ON:
        raise ValueError(f"eps_on must be one of {', '.join(WHITEN_EPS_ON)}, got {eps_on!r}")
    if process_group is not None:
        return reference.whiten(x, valid, shift_mean, unbiased, eps, eps_on, checks.summing(process_group))
    result: Tensor = ops.whiten(x, valid, shift_mean, unbiased, eps, eps_on)
    return result


class FixedKLController:
    """A KL coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = checks.non_negative("kl_coef", kl_coef)

    def update(self, kl: float, n_steps: int) -> float:
        """Returns the unchanged coefficient."""
        return self.value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = float(state["value"])


class AdaptiveKLController(FixedKLController):
    """Drives the measured KL towards `target` (Ziegler et al. 2019, section 2.2).

    value *= 1 + clip(kl / target - 1, -0.2, 0.2) * n_steps / horizon, with kl in the unit of target (there: nats per
    sequence).
    """

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        self.value = checks.positive("init_kl_coef", init_kl_coef)
        self.target, self.horizon = checks.positive("target", target), checks.positive("horizon", horizon)

    def update(self, kl: float, n_steps: int) -> float:
        """After n_steps samples with mean KL `kl`; returns the new coefficient. A KL that is not finite is refused."""
        kl = checks.number("kl", kl, -float("inf"), float("inf"), "a finite number")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon
        return self.value
