from __future__ import annotations

import copy

import pytest
import torch

from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.config import Config, load
from ppo_kernels.trainer.data import encode, pad
from ppo_kernels.trainer.loop import prompt_batch
from ppo_kernels.trainer.rollout import Trajectory, generate, score
from ppo_kernels.trainer.update import Optimizers, merge, minibatch_gradients, minibatches, update

from .conftest import World


def rollout(world: World, count: int = 16) -> tuple[Trajectory, torch.Tensor, torch.Tensor]:
    """A trajectory of ragged responses with random advantages and returns."""
    generator = torch.Generator().manual_seed(0)
    ids, mask = pad(encode(world.tokenizer, world.prompts.train[:count], 20, eos=False), "left")
    samples = generate(world.roles.actor, ids, mask, world.config.rollout, generator)
    lengths = torch.randint(1, samples.mask.shape[1] + 1, (count, 1), generator=generator)
    keep = samples.mask & (torch.arange(samples.mask.shape[1]) < lengths)
    attention = samples.attention.clone()
    attention[:, samples.prompt_width :] &= keep
    samples = samples._replace(mask=keep, attention=attention)
    trajectory = score(samples, world.roles, ALGORITHMS["fused"], world.config.rollout)
    noise = [torch.randn(keep.shape, generator=generator).where(keep, 0.0) for _ in range(2)]
    return trajectory, noise[0], trajectory.values + noise[1]


def gradients(world: World, batch: tuple[Trajectory, torch.Tensor, torch.Tensor], config: Config) -> list[torch.Tensor]:
    models = (world.roles.actor, world.roles.critic)
    for model in models:
        model.zero_grad()
    algorithm = ALGORITHMS[config.train.loss_backend]
    minibatch_gradients(*batch, world.roles.actor, world.roles.critic, algorithm, config)
    return [parameter.grad.clone() for model in models for parameter in model.parameters()]


def moved(trajectory: Trajectory) -> Trajectory:
    """As if the policy had moved since: ratios on both sides of the clip range."""
    shift = torch.linspace(-0.5, 0.5, trajectory.mask.numel()).view_as(trajectory.logprobs)
    return trajectory._replace(logprobs=trajectory.logprobs + shift, values=trajectory.values - shift)


@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("microbatch", [1, 2, 4, 8])
def test_a_microbatch_never_changes_the_gradient(world: World, microbatch: int, backend: str) -> None:
    trajectory, advantages, returns = rollout(world)
    batch = (moved(trajectory), advantages, returns)
    options = [f"train.loss_backend={backend}", "ppo.entropy_coef=0.01"]
    whole = gradients(world, batch, load([*options, "ppo.microbatch=16"]))
    pieces = gradients(world, batch, load([*options, f"ppo.microbatch={microbatch}"]))
    for expected, actual in zip(whole, pieces, strict=True):
        assert float((expected - actual).norm() / expected.norm()) < 1e-6


def test_both_backends_give_the_same_loss_metrics_and_gradients(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    batch = moved(trajectory)
    results = []
    for backend in ("fused", "reference"):
        config = load([f"train.loss_backend={backend}", "ppo.entropy_coef=0.01", "rollout.temperature=0.7"])
        grads = gradients(world, (batch, advantages, returns), config)
        actor, critic = world.roles.actor, world.roles.critic
        metrics, _ = minibatch_gradients(batch, advantages, returns, actor, critic, ALGORITHMS[backend], config)
        results.append((metrics, grads))
    (fused, fused_grads), (plain, plain_grads) = results
    for name, value in plain.items():
        assert fused[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for expected, actual in zip(plain_grads, fused_grads, strict=True):
        assert float((expected - actual).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", ["advantages", "whiten", "logprobs"])
def test_both_backends_agree_on_the_other_functions(world: World, name: str) -> None:
    trajectory, advantages, _ = rollout(world)
    mask = trajectory.mask
    arguments = {
        "advantages": (advantages, trajectory.values, mask, world.config.ppo),
        "whiten": (advantages, mask),
        "logprobs": (torch.randn(16, mask.shape[1] + 1, 99), torch.randint(99, (16, mask.shape[1] + 1)), mask, 0.7),
    }[name]
    fused, plain = (getattr(ALGORITHMS[backend], name)(*arguments) for backend in ("fused", "reference"))
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (fused, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_ratio_is_1_before_the_first_step(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    actor, critic = world.roles.actor, world.roles.critic
    metrics, drift = minibatch_gradients(
        trajectory, advantages, returns, actor, critic, ALGORITHMS["fused"], world.config
    )
    assert drift < 1e-4
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_fraction"] == 0


def test_a_rollout_at_another_temperature_is_noticed(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    config = load(["rollout.temperature=0.7"])
    actor, critic = world.roles.actor, world.roles.critic
    _, drift = minibatch_gradients(trajectory, advantages, returns, actor, critic, ALGORITHMS["fused"], config)
    assert drift > 1e-2


def test_one_optimizer_step_per_minibatch(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    config = load(["ppo.epochs=3", "ppo.minibatches=4", "ppo.microbatch=2"])
    actor, critic = copy.deepcopy(world.roles.actor), world.roles.critic
    optimizers = Optimizers(actor, critic, config.optim)
    result = update(
        trajectory, advantages, returns, actor, critic, optimizers, ALGORITHMS["fused"], config, torch.Generator()
    )
    assert result["optimizer_steps"] == 12
    assert result["skipped_steps"] == 0
    assert result["tokens"] == 3 * int(trajectory.mask.sum())
    assert any(not torch.equal(a, b) for a, b in zip(actor.parameters(), world.roles.actor.parameters(), strict=True))


def test_a_gradient_that_is_not_finite_is_not_applied(world: World) -> None:
    optimizers = Optimizers(world.roles.actor, world.roles.critic, world.config.optim)
    before = copy.deepcopy(world.roles.actor.state_dict())
    next(world.roles.actor.parameters()).grad = torch.full_like(next(world.roles.actor.parameters()), float("nan"))
    optimizers.step()
    assert all(torch.equal(before[name], value) for name, value in world.roles.actor.state_dict().items())


def test_every_row_is_in_one_minibatch_of_each_epoch() -> None:
    pieces = list(minibatches(12, 2, 3, torch.Generator().manual_seed(0)))
    assert [len(piece) for piece in pieces] == [4] * 6
    for epoch in (pieces[:3], pieces[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(12))


def test_means_of_microbatches_are_weighted_by_tokens() -> None:
    parts = [
        {"tokens": 1.0, "ratio_mean": 1.0, "ratio_min": 0.9, "ratio_max": 1.0},
        {"tokens": 3.0, "ratio_mean": 2.0, "ratio_min": 0.5, "ratio_max": 4.0},
    ]
    assert merge(parts) == {"tokens": 4.0, "ratio_mean": 1.75, "ratio_min": 0.5, "ratio_max": 4.0}


def test_learning_rates_fall_linearly_and_keep_their_ratio(world: World) -> None:
    optimizers = Optimizers(world.roles.actor, world.roles.critic, load([]).optim)
    assert optimizers.schedule(0.25) == pytest.approx(5e-4 * 0.75)
    assert optimizers.optimizers[1].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.75)


def test_prompts_come_in_a_fresh_order_each_epoch_and_depend_on_the_seed_alone() -> None:
    config = load(["rollout.prompts=4", "ppo.minibatches=2"])
    prompts = list("abcdefgh")
    first = prompt_batch(prompts, 0, config) + prompt_batch(prompts, 1, config)
    second = prompt_batch(prompts, 2, config) + prompt_batch(prompts, 3, config)
    assert sorted(first) == sorted(second) == prompts
    assert first != second
    assert prompt_batch(prompts, 3, config) == second[4:]
