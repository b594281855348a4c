from __future__ import annotations

import copy

import pytest
import torch

from ppo_kernels.trainer.algo import ALGORITHMS, Metrics
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import update_rows
from ppo_kernels.trainer.loop import adapted_clip
from ppo_kernels.trainer.rollout import Trajectory, converse, score
from ppo_kernels.trainer.settings import SMOKE, load
from ppo_kernels.trainer.update import (
    Diverged,
    Optimizers,
    Setting,
    merge,
    microbatches,
    minibatch_gradients,
    minibatches,
    update,
)

from .conftest import World

Batch = tuple[Trajectory, torch.Tensor, torch.Tensor]
BACKENDS = ["linear", "logits", "reference"]


def make(*overrides: str) -> Config:
    return load(list(overrides), SMOKE)


def rollout(world: World, count: int = 16) -> Batch:
    """A trajectory of ragged responses with random advantages and returns."""
    generator = torch.Generator().manual_seed(0)
    rows = world.rows[:count]
    keys: list[tuple[int | str, ...]] = [("test", i) for i in range(count)]
    samples = converse(world.roles.actor, rows, keys, world.text, None, world.config, world.ranks)
    lengths = torch.randint(1, samples.mask.shape[1] + 1, (count, 1), generator=generator)
    keep = samples.mask & (torch.arange(samples.mask.shape[1]) < lengths)
    attention = samples.attention.clone()
    attention[:, -keep.shape[1] :] &= keep
    samples = samples._replace(mask=keep, attention=attention)
    trajectory = score(samples, rows, world.roles, None, ALGORITHMS["linear"], world.text, world.config, world.ranks)
    noise = [torch.randn(keep.shape, generator=generator).where(keep, 0.0) for _ in range(2)]
    return trajectory, noise[0], trajectory.values + noise[1]


def setting(world: World, config: Config) -> Setting:
    optimizers = Optimizers(world.roles.actor.model, world.roles.critic, config.optim)
    return Setting(config, world.roles, optimizers, ALGORITHMS[config.train.loss], [], 0, world.ranks)


def minibatch(world: World, batch: Batch, config: Config) -> Metrics:
    for model in (world.roles.actor.model, world.roles.critic):
        model.zero_grad()
    rows = torch.arange(len(batch[0].mask))
    return minibatch_gradients(*batch, rows, setting(world, config), config.ppo.clip, 0, 0)


def gradients(world: World, batch: Batch, config: Config) -> list[torch.Tensor]:
    minibatch(world, batch, config)
    models = (world.roles.actor.model, world.roles.critic)
    return [parameter.grad.clone() for model in models for parameter in model.parameters()]


def moved(trajectory: Trajectory) -> Trajectory:
    """As if the policy had moved since: ratios on both sides of the clip range."""
    shift = torch.linspace(-0.5, 0.5, trajectory.mask.numel()).view_as(trajectory.logprobs)
    return trajectory._replace(logprobs=trajectory.logprobs + shift, values=trajectory.values - shift)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", ["ppo.microbatch=1", "ppo.microbatch=2", "ppo.microbatch=8", "ppo.max_tokens=40"])
def test_a_microbatch_never_changes_the_gradient(world: World, limit: str, backend: str) -> None:
    trajectory, advantages, returns = rollout(world)
    batch = (moved(trajectory), advantages, returns)
    options = [f"train.loss={backend}", "ppo.entropy_coef=0.01"]
    whole = gradients(world, batch, make(*options, "ppo.microbatch=16"))
    pieces = gradients(world, batch, make(*options, limit))
    for expected, actual in zip(whole, pieces, strict=True):
        assert float((expected - actual).norm() / expected.norm()) < 1e-6


def test_a_token_budget_holds_with_padding_and_keeps_every_row(world: World) -> None:
    trajectory, *_ = rollout(world)
    rows = torch.arange(16)
    for budget in (24, 40, 100):
        pieces = microbatches(trajectory, rows, make(f"ppo.max_tokens={budget}"), world.ranks)
        assert sorted(torch.cat(pieces).tolist()) == rows.tolist()
        for piece in pieces:
            assert len(piece) == 1 or trajectory.rows(piece).ids.numel() <= budget


def test_a_long_prompt_and_a_long_response_do_not_share_a_microbatch(world: World) -> None:
    """One is padded left, the other right: together they are as wide as both."""
    trajectory, *_ = rollout(world, count=2)
    attention, mask = torch.zeros(2, 200, dtype=torch.bool), torch.zeros(2, 100, dtype=torch.bool)
    attention[0, :110] = attention[1, 90:] = mask[0, :10] = mask[1] = True
    wide = trajectory._replace(ids=torch.zeros(2, 200, dtype=torch.int64), attention=attention, mask=mask)
    sizes = [len(x) for x in microbatches(wide, torch.arange(2), make("ppo.max_tokens=220"), world.ranks)]
    assert sizes == [1, 1]


@pytest.mark.parametrize("budget", ["null", "24", "60"])
def test_all_ranks_get_equally_many_microbatches_and_together_every_row(world: World, budget: str) -> None:
    trajectory, *_ = rollout(world)
    rows = torch.randperm(16, generator=torch.Generator().manual_seed(5))
    config = load([f"ppo.max_tokens={budget}", "ppo.microbatch=4"])
    found = [microbatches(trajectory, rows, config, world.ranks._replace(rank=rank, size=4)) for rank in range(4)]
    assert len({len(pieces) for pieces in found}) == 1
    assert sorted(int(row) for pieces in found for piece in pieces for row in piece) == list(range(16))
    assert all(len(piece) for pieces in found for piece in pieces)


@pytest.mark.parametrize("backend", ["linear", "logits"])
def test_all_backends_give_the_same_loss_metrics_and_gradients(world: World, backend: str) -> None:
    trajectory, advantages, returns = rollout(world)
    batch = (moved(trajectory), advantages, returns)
    results = []
    for name in (backend, "reference"):
        config = make(f"train.loss={name}", "ppo.entropy_coef=0.01", "rollout.temperature=0.7", "ppo.microbatch=16")
        results.append((minibatch(world, batch, config), gradients(world, batch, config)))
    (fused, fused_grads), (plain, plain_grads) = results
    for name, value in plain.items():
        assert fused[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for expected, actual in zip(plain_grads, fused_grads, strict=True):
        assert float((expected - actual).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("name", ["advantages", "whiten", "whiten_rewards", "token_rewards"])
def test_all_backends_agree_on_the_other_functions(world: World, name: str) -> None:
    trajectory, advantages, _ = rollout(world)
    mask = trajectory.mask
    ref_logprobs = moved(trajectory).logprobs
    arguments, options = {
        "advantages": ((advantages, trajectory.values, mask, world.config.ppo), {}),
        "whiten": ((advantages, mask), {}),
        "whiten_rewards": ((advantages + 1, mask), {"shift_mean": False}),
        "token_rewards": (
            (trajectory.scores, trajectory.logprobs, ref_logprobs, mask),
            {"kl_coef": 0.3, "kl_estimator": "k3"},
        ),
    }[name]
    function = "whiten" if name.startswith("whiten") else name
    fused, plain = (
        getattr(ALGORITHMS[backend], function)(*arguments, **options) for backend in ("linear", "reference")
    )
    for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (fused, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ratio_is_1_before_the_first_step(world: World, backend: str) -> None:
    metrics = minibatch(world, rollout(world), make(f"train.loss={backend}"))
    assert metrics["logprob_drift"] < 1e-5
    assert metrics["ratio_min"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0


def test_a_rollout_at_another_temperature_is_noticed(world: World) -> None:
    assert minibatch(world, rollout(world), make("rollout.temperature=0.7"))["logprob_drift"] > 1e-2


def run(world: World, batch: Batch, config: Config, number: int = 0) -> Metrics:
    return update(*batch, setting(world, config), number, 0, config.ppo.clip, 0)


def weights(world: World) -> dict[str, torch.Tensor]:
    models = {"actor": world.roles.actor.model, "critic": world.roles.critic}
    return {f"{role}.{k}": v.clone() for role, model in models.items() for k, v in model.state_dict().items()}


def changed(world: World, before: dict[str, torch.Tensor]) -> set[str]:
    """The roles whose weights differ now."""
    return {name.partition(".")[0] for name, value in weights(world).items() if not torch.equal(before[name], value)}


def test_one_optimizer_step_per_minibatch_whatever_the_microbatches(world: World) -> None:
    batch, before = rollout(world), weights(world)
    for microbatch in (1, 2, 4):
        result = run(world, batch, make("ppo.epochs=3", "ppo.minibatches=4", f"ppo.microbatch={microbatch}"))
        assert result["optimizer_steps"] == 12
        assert result["skipped_steps"] == 0
        assert result["tokens"] == 3 * int(batch[0].mask.sum())
    assert changed(world, before) == {"actor", "critic"}


def test_a_policy_that_left_what_it_had_sampled_is_not_trained_on(world: World) -> None:
    """Every ratio is e^-8: none is above guard.max_ratio."""
    trajectory, advantages, returns = rollout(world)
    moved_away = trajectory._replace(logprobs=trajectory.logprobs + 8)
    before = weights(world)
    with pytest.raises(Diverged, match=r"the KL since the rollout is 7 nats per token, above guard.max_kl=5"):
        run(world, (moved_away, advantages, returns), make())
    assert not changed(world, before)
    assert run(world, (moved_away, advantages, returns), make("guard.max_kl=8"))["skipped_steps"] == 0


def test_a_gradient_that_is_not_finite_is_not_applied(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    before = weights(world)
    advantages[0, 0] = float("nan")
    config = make("ppo.epochs=1", "ppo.minibatches=2")
    result = run(world, (trajectory, advantages, returns), config)
    assert (result["skipped_steps"], result["optimizer_steps"]) == (1, 1)
    assert changed(world, before) == {"actor", "critic"}
    assert all(bool(value.isfinite().all()) for value in weights(world).values())


def test_steps_left_out_in_a_row_end_the_update_with_its_batch(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    before = weights(world)
    with pytest.raises(Diverged, match="3 optimizer steps in a row") as caught:
        run(world, (trajectory, advantages * float("nan"), returns), make("ppo.minibatches=4"))
    assert torch.equal(caught.value.batch.ids, trajectory.ids)
    assert changed(world, before) == set()


def test_a_ratio_that_explodes_is_not_followed(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    trajectory = trajectory._replace(logprobs=trajectory.logprobs - 6.0)
    before = weights(world)
    with pytest.raises(Diverged, match="ratio is"):
        run(world, (trajectory, advantages, returns), make("guard.max_kl=1000"))
    assert changed(world, before) == set()


def test_a_warm_up_of_the_critic_leaves_the_actor_as_it_is(world: World) -> None:
    batch, before = rollout(world), weights(world)
    config = make("optim.critic_warmup=2")
    run(world, batch, config, number=1)
    assert changed(world, before) == {"critic"}
    run(world, batch, config, number=2)
    assert changed(world, before) == {"actor", "critic"}


def test_an_update_stops_when_it_has_moved_far_enough(world: World) -> None:
    batch = rollout(world)
    result = run(world, batch, make("ppo.epochs=5", "ppo.target_kl_stop=1e-4", "optim.actor_lr=1e-3"))
    assert result["stopped_early"] == 1
    assert 0 < result["optimizer_steps"] < 10


def test_a_step_that_explodes_and_passes_the_kl_limit_counts_once(world: World) -> None:
    trajectory, advantages, returns = rollout(world)
    advantages[:] = float("nan")
    result = run(world, (moved(trajectory), advantages, returns), make("ppo.target_kl_stop=1e-9"))
    assert (result["optimizer_steps"], result["skipped_steps"], result["stopped_early"]) == (0, 1, 1)


def test_the_clip_range_follows_the_measured_kl() -> None:
    config = make("ppo.clip_target_kl=0.01", "ppo.clip_bounds=[0.1,0.3]")
    assert adapted_clip(0.2, 0.05, config) == pytest.approx(0.2 / 1.5)
    assert adapted_clip(0.2, 0.001, config) == pytest.approx(0.3)
    assert adapted_clip(0.2, 0.012, config) == 0.2
    assert adapted_clip(0.11, 1.0, config) == 0.1
    assert adapted_clip(0.2, float("nan"), config) == 0.2
    assert adapted_clip(0.2, 0.05, make()) == 0.2


def test_every_row_is_in_one_minibatch_of_each_epoch() -> None:
    pieces = list(minibatches(12, 2, 3, 0))
    assert [len(piece) for piece in pieces] == [4] * 6
    for epoch in (pieces[:3], pieces[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(12))


def test_means_of_microbatches_are_weighted_by_tokens() -> None:
    parts = [
        {"tokens": 1.0, "ratio_mean": 1.0, "ratio_min": 0.9, "ratio_max": 1.0, "logprob_drift": 0.5},
        {"tokens": 3.0, "ratio_mean": 2.0, "ratio_min": 0.5, "ratio_max": 4.0, "logprob_drift": 0.1},
    ]
    expected = {"tokens": 4.0, "ratio_mean": 1.75, "ratio_min": 0.5, "ratio_max": 4.0, "logprob_drift": 0.5}
    assert merge(parts) == expected


def test_learning_rates_keep_their_ratio_through_warm_up_and_decay(world: World) -> None:
    def rates(update: int, *overrides: str) -> tuple[float, float]:
        config = load(["optim.actor_lr=5e-4", "optim.critic_lr=1e-3", *overrides])
        optimizers = Optimizers(world.roles.actor.model, world.roles.critic, config.optim)
        actor = optimizers.schedule(update, 100)
        return actor, optimizers.optimizers["critic"].param_groups[0]["lr"]

    assert rates(25) == pytest.approx((5e-4 * 0.75, 1e-3 * 0.75))
    assert rates(0, "optim.warmup=4") == pytest.approx((1e-4, 2e-4))
    assert rates(50, "optim.schedule=cosine") == pytest.approx((2.5e-4, 5e-4))
    assert rates(99, "optim.schedule=constant") == pytest.approx((5e-4, 1e-3))


def test_a_fresh_optimizer_steps_as_one_whose_state_is_made_at_its_first_step(world: World) -> None:
    ours = Optimizers(world.roles.actor.model, world.roles.critic, make().optim)
    model = world.roles.actor.model
    twin = copy.deepcopy(model)
    plain = torch.optim.AdamW(twin.parameters(), lr=world.config.optim.actor_lr, eps=1e-5, weight_decay=0.0)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        mine.grad = torch.ones_like(mine)
        other.grad = torch.ones_like(other)
    ours.step("actor")
    plain.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def test_prompts_come_in_a_fresh_order_each_epoch_and_depend_on_the_seed_alone() -> None:
    config = load(["rollout.prompts=4", "ppo.minibatches=2"])
    rows = [{"prompt": letter} for letter in "abcdefgh"]

    def prompts(*updates: int, stream: int = 0) -> list[str]:
        return [row["prompt"] for number in updates for row in update_rows(rows, number, stream, config)]

    assert sorted(prompts(0, 1)) == sorted(prompts(2, 3)) == list("abcdefgh")
    assert prompts(0, 1) != prompts(2, 3)
    assert prompts(3) == prompts(2, 3)[4:]
    assert prompts(0, 1, stream=1) != prompts(0, 1)  # a rollback does not meet the same batch again


def test_samples_of_one_prompt_lie_side_by_side() -> None:
    config = load(["rollout.prompts=2", "rollout.samples_per_prompt=3"])
    picked = update_rows([{"prompt": "a"}, {"prompt": "b"}], 0, 0, config)
    assert [row["prompt"] for row in picked] in (list("aaabbb"), list("bbbaaa"))
