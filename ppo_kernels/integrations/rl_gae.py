"""GAE with the conventions of classic RL: time-major [T, N] tensors of T steps in N environments that reset themselves.

They differ in when a done flag is raised and in what a time limit means. `next` is the state after the last step.

    function        done flag of row t               after a time limit
    gae_gymnasium   the episode ended at step t      V of the state it was cut in (right)
    gae_rsl_rl      the episode ended at step t      V of the state before step t, added to the reward
    gae_cleanrl     it ended at step t - 1           nothing: as if the episode had ended for good

Tested with gymnasium 1.4.0, rsl-rl-lib 5.5.1, and CleanRL's ppo.py as of 2026 (it has no releases).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.advantages import GAEOutput, gae, masked_whiten
from ppo_kernels.presets import WHITEN_OPTIONS

TESTED = {"gymnasium": ">=1.4.0,<=1.4.0", "rsl-rl-lib": ">=5.5.1,<=5.5.1"}


def gae_gymnasium(
    rewards: Tensor,
    values: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor | None = None,
    final_values: Tensor | None = None,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> GAEOutput:
    """Advantages and returns [T, N] with the flags of gymnasium's vector environments: row t is the outcome of step t.

    For autoreset_mode=SAME_STEP, where every step is the policy's own.

    Args:
        rewards, values: [T, N]; values[t] is V before step t.
        next_value: [N], V of the state after the last step; not read where the last step ended an episode.
        terminated, truncated: [T, N] flags; truncated needs final_values.
        final_values: [T, N], V of the state each truncated episode was left in (of info["final_obs"]); read only there.
    """
    following = _following(rewards, values, next_value)
    if truncated is None:
        return _by_row(rewards, values, following, terminated, terminated, gamma, lam)
    if final_values is None:
        raise ValueError("truncated needs final_values, the value of the state each cut episode was left in")
    cut = checks.mask("truncated", truncated, rewards, rewards.shape)
    final_values = checks.floating("final_values", final_values, rewards, rewards.shape)
    assert cut is not None
    ended = cut | (checks.tensor("terminated", terminated) != 0)
    return _by_row(rewards, values, torch.where(cut, final_values, following), terminated, ended, gamma, lam)


def gae_rsl_rl(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    last_values: Tensor,
    time_outs: Tensor | None = None,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> GAEOutput:
    """What rsl_rl's PPO.compute_returns gives, before it normalises: [T, N] or [T, N, 1] like rewards.

    Args:
        rewards, values, dones: [T, N] or [T, N, 1]; dones[t]: the episode ended at step t, for whatever reason.
        last_values: [N] or [N, 1], V after the last step.
        time_outs: like rewards, flags; where one is set gamma * values[t] is added to the reward, as process_env_step
            does before it stores the reward. Leave it out for stored rewards.
    """
    shape = checks.floating("rewards", rewards).shape
    if len(shape) == 3 and shape[-1] == 1:
        rewards, values, dones = rewards.squeeze(-1), values.squeeze(-1), dones.squeeze(-1)
        last_values = last_values.reshape(-1)
        time_outs = None if time_outs is None else time_outs.squeeze(-1)
    if time_outs is not None:
        over = checks.mask("time_outs", time_outs, rewards, rewards.shape)
        checks.matching("values", values, rewards, rewards.shape)
        rewards = torch.where(over, rewards + gamma * values, rewards)  # type: ignore[arg-type]
    out = _by_row(rewards, values, _following(rewards, values, last_values), dones, dones, gamma, lam)
    return GAEOutput(*(x.view(shape) for x in out))


def gae_cleanrl(
    rewards: Tensor,
    values: Tensor,
    dones: Tensor,
    next_value: Tensor,
    next_done: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> GAEOutput:
    """What CleanRL's ppo.py computes: advantages and returns [T, N].

    Args:
        rewards, values: [T, N].
        dones: [T, N] flags; dones[t]: the state before step t is the first of an episode, so step t - 1 ended one.
        next_value: [N] or [1, N], V after the last step; next_done: [N], whether the last step ended an episode.
    """
    checks.mask("dones", dones, rewards, rewards.shape)
    ended = torch.cat([dones[1:], next_done.reshape(1, -1).to(dones.dtype)])
    following = _following(rewards, values, next_value.reshape(-1))
    return _by_row(rewards, values, following, ended, ended, gamma, lam)


def whiten_rsl_rl(advantages: Tensor) -> Tensor:
    """(A - mean) / (std + 1e-8) with the unbiased std, over all elements, as rsl_rl and CleanRL write it.

    One element, which makes theirs NaN, gives 0.
    """
    return masked_whiten(advantages, **WHITEN_OPTIONS["rsl_rl"])


def _following(rewards: Tensor, values: Tensor, next_value: Tensor) -> Tensor:
    """[T, N]: V after each step, were there no ends."""
    checks.floating("rewards", rewards)
    if rewards.dim() != 2 or rewards.shape[0] == 0:
        raise ValueError(f"rewards has shape {list(rewards.shape)}, expected [T, N] with T >= 1")
    checks.floating("values", values, rewards, rewards.shape)
    return torch.cat([values[1:], checks.floating("next_value", next_value, rewards, rewards.shape[1:])[None]])


def _by_row(
    rewards: Tensor, values: Tensor, following: Tensor, terminated: Tensor, ended: Tensor, gamma: float, lam: float
) -> GAEOutput:
    rewards, values, following, terminated, ended = (x.t() for x in (rewards, values, following, terminated, ended))
    out = gae(rewards, values, gamma=gamma, lam=lam, next_values=following, terminated=terminated, truncated=ended)
    return GAEOutput(*(x.t() for x in out))
