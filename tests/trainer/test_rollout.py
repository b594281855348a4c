from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.data import BOS, EOS, PAD, pad
from ppo_kernels.trainer.models import Scalar, assert_no_dropout, assign_roles, logits_of, new_language_model
from ppo_kernels.trainer.rollout import generate, pad_right, response_values, score, sequence_scores

from .conftest import World

PROMPTS = [[BOS, 40, 41], [BOS, 50, 51, 52, 53, 54], [BOS, EOS, 60, 61]]


def sampled(world: World, rows: list[list[int]] = PROMPTS, seed: int = 0):  # type: ignore[no-untyped-def]
    ids, mask = pad(rows, "left")
    return generate(world.roles.actor, ids, mask, world.config.rollout, torch.Generator().manual_seed(seed))


def test_a_row_has_the_same_logits_with_and_without_padding(world: World) -> None:
    ids, mask = pad(PROMPTS, "left")
    together = logits_of(world.roles.actor, ids, mask, 1)
    for row, tokens in enumerate(PROMPTS):
        alone = torch.tensor([tokens])
        expected = logits_of(world.roles.actor, alone, torch.ones_like(alone, dtype=torch.bool), 1)
        torch.testing.assert_close(together[row], expected[0], rtol=0, atol=2e-6)


def test_a_row_has_the_same_score_and_values_with_and_without_padding(world: World) -> None:
    samples = sampled(world)
    scores = sequence_scores(world.roles.reward, samples.ids, samples.attention)
    values = response_values(world.roles.critic, samples.ids, samples.attention, samples.mask.shape[1])
    for row in range(len(PROMPTS)):
        tokens = samples.ids[row][samples.attention[row]][None]
        outputs = world.roles.reward(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]
        torch.testing.assert_close(scores[row], outputs[-1])
        length = int(samples.mask[row].sum())
        start = len(PROMPTS[row]) - 1  # the value before the first response token is read at the last prompt token
        torch.testing.assert_close(values[row, :length], outputs[start : start + length])


def test_a_log_prob_depends_only_on_what_came_before_and_the_temperature(world: World) -> None:
    samples = sampled(world)
    trajectory = score(samples, world.roles, ALGORITHMS["reference"], world.config.rollout)
    row, width = 1, samples.prompt_width
    cut = samples.ids[row : row + 1, : width + 3]
    logits = logits_of(world.roles.actor, cut, samples.attention[row : row + 1, : width + 3], 2)
    expected = torch.log_softmax(logits[0, 0] / world.config.rollout.temperature, -1)[cut[0, width + 2]]
    torch.testing.assert_close(trajectory.logprobs[row, 2], expected)


class Scripted:
    """A model that says the given tokens, one row each, whatever it is asked."""

    def __init__(self, *rows: list[int]) -> None:
        self.script = torch.tensor(rows)
        self.step = 0

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        tokens = self.script[:, self.step]
        self.step += 1
        return SimpleNamespace(logits=torch.nn.functional.one_hot(tokens, 100)[:, None] * 1e4)

    __call__ = forward


def test_responses_end_at_their_first_eos_and_one_in_the_prompt_means_nothing(world: World) -> None:
    ids, mask = pad([[BOS, EOS, 9], [BOS, 9]], "left")
    config = world.config.rollout.model_copy(update={"max_new_tokens": 4})
    model = Scripted([20, 21, EOS, 22], [30, 31, 32, 33])
    samples = generate(model, ids, mask, config, torch.Generator())  # type: ignore[arg-type]
    assert samples.mask.tolist() == [[True, True, True, False], [True] * 4]
    assert samples.ids[0].tolist() == [BOS, EOS, 9, 20, 21, EOS, PAD]
    assert samples.has_eos.tolist() == [True, False]
    assert samples.attention[0].tolist() == [True] * 6 + [False]


def test_sampling_stops_when_every_row_has_ended(world: World) -> None:
    ids, mask = pad([[BOS, 9], [BOS, 9]], "left")
    model = Scripted([20, EOS, 1, 1], [EOS, 1, 1, 1])
    samples = generate(model, ids, mask, world.config.rollout, torch.Generator())  # type: ignore[arg-type]
    assert samples.mask.tolist() == [[True, True], [True, False]]


def test_the_same_seed_samples_the_same_tokens(world: World) -> None:
    assert torch.equal(sampled(world, seed=3).ids, sampled(world, seed=3).ids)
    assert not torch.equal(sampled(world, seed=3).ids, sampled(world, seed=4).ids)


def test_padding_moves_behind_the_text() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 0], [1, 2, 3, 0, 4]])
    mask = torch.tensor([[False, False, True, True, False], [True, True, True, True, False]])
    moved, moved_mask = pad_right(ids, mask)
    assert moved.tolist() == [[5, 6, 0, 0], [1, 2, 3, 0]]  # a real token with the padding id stays
    assert moved_mask.tolist() == [[True, True, False, False], [True] * 4]


@pytest.mark.parametrize("backend", ["fused", "reference"])
def test_the_score_lands_on_the_last_response_token(world: World, backend: str) -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    logprobs, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    rewards = ALGORITHMS[backend].token_rewards(
        torch.tensor([2.0, -1.0]), logprobs, reference, mask, torch.tensor([True, False]), 0.1, world.config.kl, 0.25
    )
    expected = [[-0.05, 1.95, 0.0], [-0.05, -0.05, -1.30]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_fresh_heads_start_as_they_should(world: World) -> None:
    trunk = new_language_model(world.config.model.model_copy(update={"hidden": 128}), seed=0).base_model
    assert not Scalar(trunk, zero_head=True).head.weight.any()
    assert not assign_roles(world.roles.reference, world.roles.reward, "zero").critic.head.weight.any()
    assert torch.equal(world.roles.critic.head.weight, world.roles.reward.head.weight)
    weight = Scalar(trunk, zero_head=False, generator=torch.Generator().manual_seed(0)).head.weight
    assert float(weight.detach().std()) == pytest.approx(1 / 129**0.5, rel=0.15)


def test_dropout_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="dropout"):
        assert_no_dropout(torch.nn.Sequential(torch.nn.Dropout(0.1)))
    model = new_language_model(world.config.model, seed=0)
    assert_no_dropout(model)
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        assert_no_dropout(model)
