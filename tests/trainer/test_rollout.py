from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_kernels.trainer import seeds
from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.data import Rows, pad
from ppo_kernels.trainer.evaluate import evaluate, load_metric, measures
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.models import assert_no_dropout, scalar_from
from ppo_kernels.trainer.movies import BOS, EOS, PAD
from ppo_kernels.trainer.pretrain import new_language_model
from ppo_kernels.trainer.rollout import (
    Samples,
    converse,
    draw,
    generate,
    pad_right,
    response_values,
    score,
    sequence_scores,
)
from ppo_kernels.trainer.run import make_task
from ppo_kernels.trainer.stop import Signals

from .conftest import World
from .test_peer_defects import task

PROMPTS = [[BOS, 40, 41], [BOS, 50, 51, 52, 53, 54], [BOS, EOS, 60, 61]]


def sampled(world: World, seed: int = 0) -> Samples:
    rows = [{"prompt": text} for text in ("the film", "that very old movie was", "her song")]
    keys: list[tuple[int | str, ...]] = [("test", seed, i) for i in range(len(rows))]
    return converse(world.roles.actor, rows, keys, world.text, None, world.config, world.ranks)


def test_a_row_has_the_same_logits_with_and_without_padding(world: World) -> None:
    ids, mask = pad(PROMPTS, "left")
    together = world.roles.actor.logits(ids, mask, 1)
    for row, tokens in enumerate(PROMPTS):
        alone = torch.tensor([tokens])
        expected = world.roles.actor.logits(alone, torch.ones_like(alone, dtype=torch.bool), 1)
        torch.testing.assert_close(together[row], expected[0], rtol=0, atol=2e-6)


def test_a_row_has_the_same_score_and_values_with_and_without_padding(world: World) -> None:
    samples = sampled(world)
    reward = world.roles.reward
    assert reward is not None
    scores = sequence_scores(reward, samples.ids, samples.attention, PAD)
    values = response_values(world.roles.critic, samples.ids, samples.attention, samples.mask.shape[1])
    width = samples.ids.shape[1] - samples.mask.shape[1]
    for row in range(len(samples.ids)):
        tokens = samples.ids[row][samples.attention[row]][None]
        outputs = reward(tokens, torch.ones_like(tokens, dtype=torch.bool))[0]
        torch.testing.assert_close(scores[row], outputs[-1])
        length = int(samples.mask[row].sum())
        # the value before the first response token is read at the last prompt token
        start = int(samples.attention[row, :width].sum()) - 1
        torch.testing.assert_close(values[row, :length], outputs[start : start + length])


@pytest.mark.parametrize("backend", ["linear", "logits", "reference"])
def test_a_log_prob_depends_only_on_what_came_before_and_the_temperature(world: World, backend: str) -> None:
    samples = sampled(world)
    rows = [{"prompt": ""}] * 3
    trajectory = score(samples, rows, world.roles, None, ALGORITHMS[backend], world.text, world.config, world.ranks)
    row, width = 1, samples.ids.shape[1] - samples.mask.shape[1]
    cut = samples.ids[row : row + 1, : width + 3]
    logits = world.roles.actor.logits(cut, samples.attention[row : row + 1, : width + 3], 2)
    expected = torch.log_softmax(logits[0, 0] / world.config.rollout.temperature, -1)[cut[0, width + 2]]
    torch.testing.assert_close(trajectory.logprobs[row, 2], expected)


def test_a_microbatch_of_the_rollout_changes_rounding_only(world: World) -> None:
    samples, rows = sampled(world), [{"prompt": ""}] * 3
    small = world.config.model_copy(update={"rollout": world.config.rollout.model_copy(update={"microbatch": 1})})
    whole, pieces = (
        score(samples, rows, world.roles, None, ALGORITHMS["linear"], world.text, config, world.ranks)
        for config in (world.config, small)
    )
    for one, other in zip(whole, pieces, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


class Scripted:
    """A policy that says the given tokens, one row each, whatever it is asked."""

    def __init__(self, *rows: list[int]) -> None:
        self.script = torch.tensor(rows)
        self.step = 0

    def logits(self, *_: object) -> torch.Tensor:
        tokens = self.script[:, self.step]
        self.step += 1
        return torch.nn.functional.one_hot(tokens, 100)[:, None] * 1e4


def said(world: World, prompts: list[list[int]], *script: list[int]) -> list[list[int]]:
    policy: Any = Scripted(*script)
    return generate(policy, prompts, torch.zeros(len(prompts), 4), 0.8, world.text, world.ranks)


def test_responses_end_at_their_first_eos_and_one_in_the_prompt_means_nothing(world: World) -> None:
    responses = said(world, [[BOS, EOS, 9], [BOS, 9]], [20, 21, EOS, 22], [30, 31, 32, 33])
    assert responses == [[20, 21, EOS], [30, 31, 32, 33]]


def test_sampling_stops_when_every_row_has_ended(world: World) -> None:
    assert said(world, [[BOS, 9], [BOS, 9]], [20, EOS], [EOS, 1]) == [[20, EOS], [EOS]]


def test_a_response_has_padding_behind_it_and_no_loss_there(world: World) -> None:
    samples = sampled(world)
    width = samples.ids.shape[1] - samples.mask.shape[1]
    assert torch.equal(samples.mask, samples.attention[:, width:])
    for row in range(len(samples.mask)):
        tokens = samples.ids[row, width:][samples.mask[row]]
        assert (tokens[:-1] != EOS).all()
        assert bool(samples.has_eos[row]) == (int(tokens[-1]) == EOS)


def test_the_same_seed_samples_the_same_tokens(world: World) -> None:
    assert torch.equal(sampled(world, seed=3).ids, sampled(world, seed=3).ids)
    assert not torch.equal(sampled(world, seed=3).ids, sampled(world, seed=4).ids)


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def determinism(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("determinism")
def test_a_draw_follows_the_distribution_and_never_takes_a_token_of_probability_0() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0, 2.0, float("-inf")]])
    points = torch.linspace(0, 1, 100_001)[:-1]
    tokens = draw(logits.expand(len(points), -1), points)
    frequency = torch.bincount(tokens, minlength=5) / len(points)
    torch.testing.assert_close(frequency, torch.softmax(logits[0], -1), rtol=0, atol=2e-5)
    for point in (0.0, 1 - 2**-24):
        for hole in (0, 4):
            one = torch.zeros(1, 5)
            one[0, hole] = float("-inf")
            assert int(draw(one, torch.tensor([point]))) != hole
    assert int(draw(torch.full((1, 5), float("nan")), torch.tensor([0.5]))) == 4


def test_random_numbers_are_a_function_of_their_key_alone() -> None:
    first = seeds.uniforms(5, "sample", 1, 0, 7, 3)
    torch.manual_seed(99)
    assert torch.equal(first, seeds.uniforms(9, "sample", 1, 0, 7, 3)[:5])
    assert not torch.equal(first, seeds.uniforms(5, "sample", 1, 1, 7, 3))


def test_padding_moves_behind_the_text() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 0], [1, 2, 3, 0, 4]])
    mask = torch.tensor([[False, False, True, True, False], [True, True, True, True, False]])
    moved, moved_mask = pad_right(ids, mask, 0)
    assert moved.tolist() == [[5, 6, 0, 0], [1, 2, 3, 0]]  # a real token with the padding id stays
    assert moved_mask.tolist() == [[True, True, False, False], [True] * 4]


@pytest.mark.parametrize("backend", ["linear", "reference"])
def test_the_score_lands_on_the_last_response_token(backend: str) -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    logprobs, reference = torch.full((2, 3), -1.0), torch.full((2, 3), -1.5)
    rewards = ALGORITHMS[backend].token_rewards(
        torch.tensor([2.0, -1.25]), logprobs, reference, mask, kl_coef=0.1, kl_estimator="k1"
    )
    expected = [[-0.05, 1.95, 0.0], [-0.05, -0.05, -1.30]]
    torch.testing.assert_close(rewards, torch.tensor(expected))


def test_fresh_heads_start_as_they_should(world: World) -> None:
    trunk = new_language_model(world.demo.model.model_copy(update={"hidden": 128}), seed=0)
    assert not scalar_from(trunk).classifier.score.weight.any()
    weight = scalar_from(trunk, torch.Generator().manual_seed(0)).classifier.score.weight
    assert float(weight.detach().std()) == pytest.approx(1 / 129**0.5, rel=0.15)


def test_dropout_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="dropout"):
        assert_no_dropout(torch.nn.Sequential(torch.nn.Dropout(0.1)))
    model = new_language_model(world.demo.model, seed=0)
    assert_no_dropout(model)
    model.config.attention_dropout = 0.1
    with pytest.raises(ValueError, match="attention_dropout"):
        assert_no_dropout(model)


def test_an_evaluation_gives_the_same_answers_for_the_same_weights(world: World) -> None:
    given = task(world, "eval.metric=vader")._replace(metric=load_metric("vader"))
    first, again = (evaluate(given, world.heldout[:12], "heldout") for _ in range(2))
    assert first == again
    assert len(first.texts) == len(first.rewards) == 12
    assert set(first.estimates) == set(measures(given.config))
    for estimate in first.estimates.values():
        assert estimate.low <= estimate.mean <= estimate.high
    assert evaluate(given, world.heldout[:12], "train").texts != first.texts


def test_prompts_that_are_too_long_are_left_out_and_counted(world: World, tmp_path: Path) -> None:
    rows = Rows([{"prompt": "the film"}, {"prompt": "the film " * 30}], [{"prompt": "her song"}], shared=3)
    log = Log(tmp_path, "", [], tensorboard=False, silent=False)
    config = world.config.model_copy(update={"data": world.config.data.model_copy(update={"max_prompt": 20})})
    with Signals() as signals, log:
        given = make_task(config, world.ranks, rows, world.tokenizer, world.roles, signals, log)
    assert given.train == rows.train[:1]
    events = (tmp_path / "events.log").read_text()
    assert "1 prompts of more than data.max_prompt=20 tokens left out" in events
    assert "3 training prompts left out: they are held out" in events
