"""Mistakes that other PPO trainers made, one test each; docs/trainer.md lists them beside those tested elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.checkpoint import Progress
from ppo_kernels.trainer.data import Text
from ppo_kernels.trainer.loop import ppo_update
from ppo_kernels.trainer.rollout import converse, generate
from ppo_kernels.trainer.stop import Signals
from ppo_kernels.trainer.task import Task
from ppo_kernels.trainer.update import Diverged, Optimizers, update

from .conftest import World
from .test_update import BACKENDS, make, minibatch, moved, rollout, setting


def task(world: World, *overrides: str, reward: Any = None, text: Text | None = None) -> Task:
    config = make(*overrides)
    return Task(
        config, world.ranks, text or world.text, world.rows, world.heldout, world.roles, reward, None, None, [],
        ALGORITHMS[config.train.loss], lambda: Signals().check(world.ranks),
    )  # fmt: skip


def one_update(given: Task) -> dict[str, float]:
    optimizers = Optimizers(given.roles.actor.model, given.roles.critic, given.config.optim)
    progress = Progress(kl_coef=given.config.kl.coef, clip=given.config.ppo.clip)
    return ppo_update(given, progress, optimizers)[0]


@pytest.mark.parametrize("minibatches", [1, 2, 4])
@pytest.mark.parametrize("microbatch", [1, 4, 16])
def test_d2_a_ratio_of_1_is_logged_as_1_however_the_batch_is_cut(
    world: World, minibatches: int, microbatch: int
) -> None:
    config = make(f"ppo.minibatches={minibatches}", f"ppo.microbatch={microbatch}", "optim.actor_lr=1e-12")
    result = update(*rollout(world), setting(world, config), 0, 0, 0.2, 0)
    assert result["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert result["approx_kl_k3"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_d3_what_lies_in_padding_enters_no_mean(world: World, backend: str) -> None:
    trajectory, advantages, returns = rollout(world)
    trajectory = moved(trajectory)
    config = make(f"train.loss={backend}", "ppo.entropy_coef=0.01")
    clean = minibatch(world, (trajectory, advantages, returns), config)
    hole = ~trajectory.mask
    assert hole.any()
    dirty = [x.masked_fill(hole, 7.7) for x in (trajectory.logprobs, trajectory.values, advantages, returns)]
    trajectory = trajectory._replace(logprobs=dirty[0], values=dirty[1])
    assert minibatch(world, (trajectory, dirty[2], dirty[3]), config) == pytest.approx(clean, rel=1e-6)


def test_d4_what_ends_a_response_is_what_spares_it_the_penalty(world: World) -> None:
    """Two tokens end a response, as a chat model's <|im_end|> and <|endoftext|> do; padding may be one of them."""
    other = 77
    text = Text(world.tokenizer, world.config.data, [other, 2])
    text.pad = other
    keys: list[tuple[int | str, ...]] = [("test", i) for i in range(64)]
    samples = converse(world.roles.actor, world.rows[:64], keys, text, None, world.config, world.ranks)
    width = samples.ids.shape[1] - samples.mask.shape[1]
    last = [int(ids[width:][mask][-1]) for ids, mask in zip(samples.ids, samples.mask, strict=True)]
    assert {other, 2} <= set(last)
    assert samples.has_eos.tolist() == [token in (other, 2) for token in last]
    full = samples.mask.all(1)
    assert (~samples.has_eos <= full).all(), "only a response that used all its tokens has not ended"


def test_d6_and_d13_whitened_advantages_have_mean_0_and_variance_1_over_valid_tokens(world: World) -> None:
    trajectory, advantages, _ = rollout(world)
    dirty = (advantages * 3 + 5).masked_fill(~trajectory.mask, 1e6)
    for backend in ("linear", "reference"):
        white = ALGORITHMS[backend].whiten(dirty, trajectory.mask)
        valid = white[trajectory.mask].double().numpy()
        np.testing.assert_allclose([valid.mean(), valid.std()], [0, 1], atol=1e-5)
        assert not white[~trajectory.mask].any()
        kept = ALGORITHMS[backend].whiten(dirty, trajectory.mask, shift_mean=False)[trajectory.mask].double().numpy()
        raw = dirty[trajectory.mask].double().numpy()
        np.testing.assert_allclose([kept.mean(), kept.std()], [raw.mean(), 1], rtol=1e-5)


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation made."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


def test_d12_logits_of_all_positions_never_exist(world: World) -> None:
    batch = rollout(world)
    vocabulary, tokens = world.demo.model.vocab, int(batch[0].mask.numel())
    with Largest() as seen:
        minibatch(world, batch, make("ppo.microbatch=16"))
    assert 0 < seen.elements < vocabulary * tokens / 2
    with Largest() as logits:
        minibatch(world, batch, make("ppo.microbatch=16", "train.loss=logits"))
    assert logits.elements >= vocabulary * tokens
    with Largest() as generation:
        prompts = [world.text.prompt(row) for row in world.rows[:16]]
        generate(world.roles.actor, prompts, torch.zeros(16, 9), 1.0, world.text, world.ranks)
    assert generation.elements < vocabulary * 16 * 4


def test_the_logged_kl_is_the_penaltys_own_estimator(world: World) -> None:
    """N+15: the KL logged, adapted to and paid for is one number."""
    with torch.no_grad():
        for parameter in world.roles.reference.model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    for estimator in ("k1", "k2", "k3"):
        stats = one_update(task(world, f"kl.estimator={estimator}", "optim.actor_lr=1e-12", "reward.model_weight=0"))
        assert stats["objective/rlhf_reward"] == pytest.approx(-0.1 * stats["objective/kl"], rel=1e-5)
        assert stats["objective/non_score_reward"] == pytest.approx(stats["objective/rlhf_reward"], rel=1e-5)
        if estimator != "k1":
            assert stats["objective/kl"] > 0


def test_a_score_that_is_not_finite_is_no_update(world: World) -> None:
    with pytest.raises(Diverged, match="not finite"):
        one_update(task(world, reward=lambda samples: [float("nan")] * len(samples)))
