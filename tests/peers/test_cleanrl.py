"""CleanRL's ppo.py is a script, not a package: its formulas, written out, and the example made in its manner."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from draws import FP32, close, close_grads
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss
from ppo_kernels.integrations.rl_gae import gae_cleanrl, gae_gymnasium, whiten_rsl_rl

ROOT = Path(__file__).parents[2]


def expected_gae(x: dict[str, Tensor], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """delta_t = r_t + gamma V_{t+1} (1 - d_{t+1}) - V_t with d_{t+1} the flag of the state after step t."""
    dones = torch.cat([x["dones"], x["next_done"][None]]).double()
    values = torch.cat([x["values"], x["next_value"].reshape(1, -1)]).double()
    carry, found = 0.0, []
    for t in reversed(range(len(x["rewards"]))):
        goes_on = 1 - dones[t + 1]
        carry = x["rewards"][t] + gamma * values[t + 1] * goes_on - values[t] + gamma * lam * goes_on * carry
        found.insert(0, carry)
    return torch.stack(found), torch.stack(found) + values[:-1]


def trajectories(dtype: torch.dtype, steps: int = 50, envs: int = 4) -> dict[str, Tensor]:
    return {
        "rewards": torch.randn(steps, envs, dtype=dtype),
        "values": torch.randn(steps, envs, dtype=dtype),
        "dones": (torch.rand(steps, envs) < 0.15).float(),
        "next_value": torch.randn(1, envs, dtype=dtype),
        "next_done": (torch.rand(envs) < 0.5).float(),
    }


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-13), (torch.float32, FP32)])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.5)])
def test_gae_with_flags_of_the_state_before_a_step(gamma, lam, dtype, rel):
    x = trajectories(dtype)
    for got, want in zip(gae_cleanrl(**x, gamma=gamma, lam=lam), expected_gae(x, gamma, lam), strict=True):
        assert got.dtype == dtype
        close(got, want, rel)


def test_gae_of_one_step():
    x = trajectories(torch.float64, steps=1)
    close(gae_cleanrl(**x).advantages, expected_gae(x, 0.99, 0.95)[0], 1e-13)


def test_gae_flags_before_a_step_are_flags_after_the_step_before():
    x = trajectories(torch.float32)
    after = torch.cat([x["dones"][1:], x["next_done"][None]])
    other = gae_gymnasium(x["rewards"], x["values"], x["next_value"][0], after)
    assert torch.equal(gae_cleanrl(**x).advantages, other.advantages)


def test_theirs_is_wrong_a_time_limit_counts_as_an_end():
    """One step, r = 1, cut by the time limit in a state worth 2: CleanRL's return is 1."""
    one = {"rewards": torch.tensor([[1.0]]), "values": torch.tensor([[0.0]]), "next_value": torch.zeros(1)}
    theirs = gae_cleanrl(**one, dones=torch.zeros(1, 1), next_done=torch.ones(1), gamma=0.5)
    truncated = {"truncated": torch.tensor([[1]]), "final_values": torch.tensor([[2.0]])}
    right = gae_gymnasium(**one, terminated=torch.tensor([[0]]), **truncated, gamma=0.5)
    assert (theirs.returns.item(), right.returns.item()) == (1.0, 2.0)


@pytest.mark.parametrize("value_clip", [0.2, None])
def test_loss_values_and_gradients(value_clip):
    """The mean of max(-A r, -A clip(r)), half the mean of the larger squared error, the mean entropy."""
    n, actions = 64, 4
    logits = torch.randn(n, actions, dtype=torch.float64, requires_grad=True)
    values = torch.randn(n, dtype=torch.float64, requires_grad=True)
    action, returns = torch.randint(actions, (n,)), values.detach() + torch.randn(n, dtype=torch.float64)
    old_values = values.detach() + 0.4 * torch.randn(n, dtype=torch.float64)
    advantages = torch.randn(n, dtype=torch.float64)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, action[:, None]).squeeze(-1)
    old = chosen.detach() + 0.4 * torch.randn(n, dtype=torch.float64)

    normalised = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = (chosen - old).exp()
    policy = torch.max(-normalised * ratio, -normalised * ratio.clamp(1 - 0.2, 1 + 0.2)).mean()
    error = (values - returns) ** 2
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.max(error, (near - returns) ** 2)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    want = policy - 0.01 * entropy.mean() + 0.5 * (0.5 * error.mean())

    config = PPOLossConfig.cleanrl(value_clip=value_clip)
    given = {"config": config, "values": values, "returns": returns}
    given |= {} if value_clip is None else {"old_values": old_values}
    whitened = whiten_rsl_rl(advantages)
    for leaf in (logits, values):
        close_grads(fused_ppo_loss(logits, action, old, whitened, **given).loss, want, leaf, 1e-7)
        close_grads(ppo_loss(chosen, old, whitened, entropy=entropy, **given).loss, want, leaf, 1e-7)
    out = fused_ppo_loss(
        logits.float(), action, old.float(), whitened.float(), config=PPOLossConfig.cleanrl(value_clip=None)
    )
    close(out.loss, policy - 0.01 * entropy.mean())


def test_gae_gymnasium_of_a_real_environment_is_the_discounted_return():
    """lam = 1, V = 0 but where an episode was cut: the return of every step, of episodes cut after 7 steps."""
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync", vector_kwargs=same_step, max_episode_steps=7)
    envs.reset(seed=0)
    rows = []
    for t in range(40):
        _, rewards, terminated, truncated, info = envs.step(np.full(2, int(t % 3 > 0)))
        assert not truncated.any() or info["final_obs"][truncated][0].shape == (4,)
        rows.append((rewards, terminated, truncated))
    rewards, terminated, truncated = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    assert truncated.any()
    nothing, worth = torch.zeros_like(rewards), 5.0
    out = gae_gymnasium(
        rewards,
        nothing,
        torch.zeros(2, dtype=rewards.dtype),
        terminated,
        truncated,
        torch.full_like(rewards, worth),
        gamma=0.9,
        lam=1.0,
    )
    want, carry = [], torch.zeros(2, dtype=rewards.dtype)
    for t in reversed(range(40)):
        carry = torch.where(truncated[t], worth, torch.where(terminated[t], 0.0, carry))
        carry = rewards[t] + 0.9 * carry
        want.insert(0, carry)
    close(out.returns, torch.stack(want), 1e-12)


def test_example_runs_and_says_when_it_has_not_solved_the_task():
    command = [sys.executable, str(ROOT / "examples/cartpole.py"), "--steps", "1024"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1, done.stderr
    assert "not solved" in done.stdout
