"""PPO on CartPole-v1, whole and small: the library is not for language models alone.

    pip install 'ppo_kernels[examples]'
    python examples/cartpole.py            # about a minute on one CPU core; --seed, --steps

An actor and a critic of two hidden layers play in eight environments; `gae_gymnasium` turns what happened into
advantages, and `fused_ppo_loss` is the loss, straight from the action logits [N, 2]. It stops when the mean return of
the last 100 episodes reaches 475 of 500, Gymnasium's bar for this task, and exits with 1 if that does not happen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from ppo_kernels import PPOLossConfig, PPOMetrics, fused_ppo_loss, logprobs_from_logits, masked_whiten
from ppo_kernels.integrations.rl_gae import gae_gymnasium

ENVIRONMENTS = 8
STEPS = 64  # of each environment between two updates
EPOCHS = 8  # passes over those steps
MINIBATCH = 128
GAMMA, LAMBDA = 0.98, 0.9
LEARNING_RATE = 1e-3  # falls to 0 with the steps left
SOLVED, EPISODES = 475.0, 100
LOSS = PPOLossConfig.cleanrl(clip_low=0.2, value_clip=0.2, vf_coef=0.5, entropy_coef=0.005)


class Rollout(NamedTuple):
    """What T steps in N environments left behind; row t is about step t."""

    observations: Tensor  # [T, N, 4], before the step
    actions: Tensor  # [T, N] int64
    logprobs: Tensor  # [T, N], of the actions
    values: Tensor  # [T, N], V before the step
    rewards: Tensor  # [T, N]
    terminated: Tensor  # [T, N] bool: the pole fell
    truncated: Tensor  # [T, N] bool: 500 steps are over, the pole stands
    final_values: Tensor  # [T, N], V of the state a truncated episode was left in, else 0


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(2, gain=0.01), mlp(1, gain=1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 4] -> action logits [..., 2] and values [...]."""
        return self.actor(observations), self.critic(observations).squeeze(-1)


def mlp(outputs: int, gain: float) -> nn.Sequential:
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Player:
    """The environments, where they stand, and the returns of the last episodes."""

    def __init__(self, seed: int) -> None:
        # An environment that ends is reset in the same step; the state it ended in is in info["final_obs"].
        same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.envs = gym.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="sync", vector_kwargs=same_step)
        self.observations = torch.from_numpy(self.envs.reset(seed=seed)[0])
        self.running = np.zeros(ENVIRONMENTS)
        self.returns: deque[float] = deque(maxlen=EPISODES)

    @torch.no_grad()
    def play(self, agent: Agent) -> Rollout:
        rows = []
        for _ in range(STEPS):
            observations = self.observations
            logits, values = agent(observations)
            actions = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
            logprobs = logprobs_from_logits(logits, actions)
            next_observations, rewards, terminated, truncated, info = self.envs.step(actions.numpy())
            final_values = torch.zeros(ENVIRONMENTS)
            if truncated.any():
                final = torch.from_numpy(np.stack(info["final_obs"][truncated]))
                final_values[torch.from_numpy(truncated)] = agent(final)[1]
            self._count(rewards, terminated | truncated)
            self.observations = torch.from_numpy(next_observations)
            outcome = (torch.from_numpy(rewards).float(), torch.from_numpy(terminated), torch.from_numpy(truncated))
            rows.append((observations, actions, logprobs, values, *outcome, final_values))
        return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True)))

    def _count(self, rewards: np.ndarray, ended: np.ndarray) -> None:
        self.running += rewards
        self.returns.extend(self.running[ended].tolist())
        self.running[ended] = 0

    def score(self) -> float:
        return sum(self.returns) / len(self.returns) if self.returns else 0.0

    def solved(self) -> bool:
        return len(self.returns) == EPISODES and self.score() >= SOLVED


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, next_value: Tensor) -> PPOMetrics:
    """EPOCHS passes of PPO over one rollout; returns the metrics of the last pass."""
    advantages, returns = gae_gymnasium(
        rollout.rewards,
        rollout.values,
        next_value,
        rollout.terminated,
        rollout.truncated,
        rollout.final_values,
        gamma=GAMMA,
        lam=LAMBDA,
    )
    batch = [rollout.observations, rollout.actions, rollout.logprobs, rollout.values, advantages, returns]
    observations, actions, old_logprobs, old_values, advantages, returns = (x.flatten(0, 1) for x in batch)
    for _ in range(EPOCHS):
        metrics = None
        for rows in torch.randperm(len(actions)).split(MINIBATCH):
            logits, values = agent(observations[rows])
            out = fused_ppo_loss(
                logits,
                actions[rows],
                old_logprobs[rows],
                masked_whiten(advantages[rows], unbiased=True),
                config=LOSS,
                values=values,
                old_values=old_values[rows],
                returns=returns[rows],
            )
            optimizer.zero_grad()
            out.loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            metrics = out.metrics if metrics is None else metrics + out.metrics
    return metrics


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300_000, help="of the environments together, at most")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are too small for more
    agent, player, start = Agent(), Player(args.seed), time.time()
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    updates = max(args.steps // (STEPS * ENVIRONMENTS), 1)
    for i in range(1, updates + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (i - 1) / updates)
        rollout = player.play(agent)
        with torch.no_grad():
            next_value = agent(player.observations)[1]
        metrics = update(agent, optimizer, rollout, next_value)
        if i % 20 == 0 or player.solved() or i == updates:
            m = metrics.compute()
            print(
                f"step {i * STEPS * ENVIRONMENTS:>7}  return {player.score():6.1f}  entropy {m['entropy']:.3f}  "
                f"kl {m['approx_kl_k3']:.4f}  clipped {m['clip_fraction']:.3f}  {time.time() - start:5.1f} s",
                flush=True,
            )
        if player.solved():
            break
    verdict = "solved" if player.solved() else f"not solved, {SOLVED} is needed"
    print(f"seed {args.seed}: mean return {player.score():.1f} of the last {len(player.returns)} episodes, {verdict}")
    return 0 if player.solved() else 1


if __name__ == "__main__":
    sys.exit(main())
