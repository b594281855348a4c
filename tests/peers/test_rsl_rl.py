"""rsl_rl's released PPO, driven through its own storage, against gae_rsl_rl and PPOLossConfig.rsl_rl()."""

from __future__ import annotations

import copy

import pytest
import torch
from draws import FP32, close
from rsl_rl.algorithms import PPO
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from tensordict import TensorDict

from ppo_kernels import PPOLossConfig, ppo_loss
from ppo_kernels.integrations.rl_gae import gae_gymnasium, gae_rsl_rl, whiten_rsl_rl

ENVS, STEPS, ACTIONS = 6, 20, 3


def observe(envs: int = ENVS) -> TensorDict:
    return TensorDict({"policy": torch.randn(envs, 5)}, [envs])


def make(envs: int = ENVS, steps: int = STEPS, **options) -> PPO:
    groups = {"actor": ["policy"], "critic": ["policy"]}
    gaussian = {"class_name": "GaussianDistribution", "init_std": 0.5, "std_type": "scalar"}
    actor = MLPModel(observe(envs), groups, "actor", ACTIONS, [16], "elu", False, gaussian)
    critic = MLPModel(observe(envs), groups, "critic", 1, [16], "elu", False)
    storage = RolloutStorage("rl", envs, steps, observe(envs), [ACTIONS])
    once = {"num_learning_epochs": 1, "num_mini_batches": 1, "max_grad_norm": 1e9, "schedule": "fixed"}
    return PPO(actor, critic, storage, **{**once, **options})


def play(ppo: PPO, time_outs: bool = True) -> dict[str, torch.Tensor]:
    """Fills the storage; returns what the environment said, [T, N], and the last observation's value [N]."""
    envs, rows, observation = ppo.storage.num_envs, [], observe(ppo.storage.num_envs)
    with torch.no_grad():
        for _ in range(ppo.storage.num_transitions_per_env):
            ppo.act(observation)
            rewards, dones = torch.randn(envs), torch.rand(envs) < 0.2
            over = (dones & (torch.rand(envs) < 0.5)).float()
            observation = observe(envs)
            ppo.process_env_step(observation, rewards, dones, {"time_outs": over} if time_outs else {})
            rows.append((rewards, dones, over))
        ppo.compute_returns(observation)
        last_values = ppo.critic(observation).squeeze(-1)
    rewards, dones, over = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"rewards": rewards, "dones": dones, "time_outs": over, "last_values": last_values}


@pytest.mark.parametrize("time_outs", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.5)])
def test_compute_returns_with_time_outs(gamma, lam, time_outs):
    ppo = make(gamma=gamma, lam=lam)
    seen = play(ppo, time_outs)
    stored = ppo.storage
    over = seen["time_outs"] if time_outs else None
    values = stored.values.squeeze(-1)
    out = gae_rsl_rl(seen["rewards"], values, seen["dones"], seen["last_values"], over, gamma=gamma, lam=lam)
    close(out.returns, stored.returns.squeeze(-1))
    close(whiten_rsl_rl(out.advantages), stored.advantages.squeeze(-1))


def test_compute_returns_of_its_stored_tensors():
    ppo = make(normalize_advantage_per_mini_batch=True)
    last_values, stored = play(ppo)["last_values"], ppo.storage
    out = gae_rsl_rl(stored.rewards, stored.values, stored.dones, last_values[:, None])
    close(out.returns, stored.returns)
    close(out.advantages, stored.advantages)


def test_theirs_is_wrong_a_time_out_takes_the_value_of_the_state_before_the_step():
    """One step, r = 1, cut by the time limit in a state worth 2; the state before was worth 10."""
    one = {"rewards": torch.tensor([[1.0]]), "values": torch.tensor([[10.0]])}
    theirs = gae_rsl_rl(
        **one, dones=torch.tensor([[1]]), last_values=torch.zeros(1), time_outs=torch.tensor([[1]]), gamma=0.5
    )
    right = gae_gymnasium(
        **one,
        next_value=torch.zeros(1),
        terminated=torch.tensor([[0]]),
        truncated=torch.tensor([[1]]),
        final_values=torch.tensor([[2.0]]),
        gamma=0.5,
    )
    assert theirs.returns.item() == 1 + 0.5 * 10
    assert right.returns.item() == 1 + 0.5 * 2


def test_theirs_is_wrong_the_same_time_out_in_its_own_storage():
    ppo = make(envs=1, steps=1, gamma=0.5, normalize_advantage_per_mini_batch=True)
    observation = observe(1)
    with torch.no_grad():
        before = ppo.critic(observation)
        ppo.act(observation)
        ppo.process_env_step(observe(1), torch.ones(1), torch.ones(1), {"time_outs": torch.ones(1)})
        ppo.compute_returns(observe(1))
    close(ppo.storage.returns, (1 + 0.5 * before)[None])


def test_theirs_is_wrong_one_advantage_normalises_to_nan():
    ppo = make(envs=1, steps=1)
    play(ppo)
    assert ppo.storage.advantages.isnan().all()
    assert whiten_rsl_rl(torch.tensor([[0.7]])).item() == 0


OPTIONS = {
    "defaults": {},
    "clip_param": {"clip_param": 0.05},
    "value_loss_coef": {"value_loss_coef": 0.5},
    "entropy_coef": {"entropy_coef": 0.1},
    "unclipped_value_loss": {"use_clipped_value_loss": False},
    "per_mini_batch": {"normalize_advantage_per_mini_batch": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_update_losses_and_gradients(options):
    """Its own update(), one pass over one batch; gradients are what it leaves in the parameters."""
    ppo = make(**options)
    play(ppo)
    with torch.no_grad():  # away from the policy that played, so that ratios and values are clipped
        for p in (*ppo.actor.parameters(), *ppo.critic.parameters()):
            p.add_(0.1 * torch.randn_like(p))
    actor, critic, stored = copy.deepcopy(ppo.actor), copy.deepcopy(ppo.critic), ppo.storage
    advantages = stored.advantages.clone()
    losses = ppo.update()

    flat = {name: getattr(stored, name).flatten(0, 1) for name in ("observations", "actions", "actions_log_prob")}
    actor(flat["observations"], stochastic_output=True)
    per_step = (advantages, stored.values, stored.returns, critic(flat["observations"]))
    advantages, old_values, returns, values = (x.reshape(-1) for x in per_step)
    if options.get("normalize_advantage_per_mini_batch"):
        advantages = whiten_rsl_rl(advantages)
    clip = options.get("clip_param", 0.2)
    clipped = options.get("use_clipped_value_loss", True)
    config = PPOLossConfig.rsl_rl(
        clip_low=clip,
        value_clip=clip if clipped else None,
        vf_coef=options.get("value_loss_coef", 1.0),
        entropy_coef=options.get("entropy_coef", 0.01),
    )
    out = ppo_loss(
        actor.get_output_log_prob(flat["actions"]),
        flat["actions_log_prob"].squeeze(-1),
        advantages,
        entropy=actor.output_entropy,
        config=config,
        values=values,
        old_values=old_values if clipped else None,
        returns=returns,
    )
    metrics = out.metrics.compute()
    assert metrics["clip_fraction"] > 0.1
    assert metrics["value_clip_fraction"] > 0.02 or not clipped
    close(out.policy_loss, torch.tensor(losses["surrogate"]), FP32, "surrogate")
    close(out.value_loss, torch.tensor(losses["value"]), FP32, "value")
    close(torch.tensor(metrics["entropy"]), torch.tensor(losses["entropy"]), FP32, "entropy")
    out.loss.backward()
    for mine, theirs in zip((actor, critic), (ppo.actor, ppo.critic), strict=True):
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            close(p.grad, q.grad, FP32, f"gradient of {name}")


def test_theirs_is_wrong_a_ratio_that_overflows_makes_the_gradient_nan():
    ppo = make(envs=2, steps=4, use_clipped_value_loss=False)
    play(ppo)
    ppo.storage.actions_log_prob[0, 0] = -200.0
    ppo.storage.advantages[0, 0] = 1.0
    ppo.update()
    assert all(p.grad.isnan().any() for p in ppo.actor.parameters())
    logprobs = torch.tensor([-1.0], requires_grad=True)
    out = ppo_loss(logprobs, torch.tensor([-200.0]), torch.ones(1), config=PPOLossConfig.rsl_rl(entropy_coef=0.0))
    out.loss.backward()
    close(out.loss, torch.tensor(-1.2))
    assert logprobs.grad.item() == 0
