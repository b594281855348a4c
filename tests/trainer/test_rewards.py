from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_kernels.trainer import rewards
from ppo_kernels.trainer.config import RewardConfig
from ppo_kernels.trainer.rewards import Moments, PluginError, call, finish, load_plugin

SCORES = torch.tensor([2.0, -1.0, 0.5, 9.0])
EOS = torch.tensor([True, False, True, True])


def finished(moments: Moments = Moments(), **options: object) -> tuple[list[float], Moments]:  # noqa: B008
    scores, after = finish(SCORES, EOS, RewardConfig.model_validate(options), moments)
    return scores.tolist(), after


def test_by_default_a_score_is_left_alone() -> None:
    assert finished()[0] == SCORES.tolist()


def test_a_response_that_never_ended_pays_or_gets_a_fixed_score() -> None:
    assert finished(missing_eos_value=1.5)[0] == [2.0, -2.5, 0.5, 9.0]
    assert finished(missing_eos="replace", missing_eos_value=-1.0)[0] == [2.0, -1.0, 0.5, 9.0]


def test_clipping_comes_before_normalising_and_the_penalty_after_it() -> None:
    clipped = np.clip(SCORES.numpy(), -3, 3)
    white = (clipped - clipped.mean()) / clipped.std()
    expected = white - np.array([0, 1.0, 0, 0])
    got, _ = finished(clip=3.0, normalize="batch", missing_eos_value=1.0)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_running_moments_are_those_of_all_scores_so_far() -> None:
    first = torch.tensor([5.0, 7.0, -2.0])
    got, moments = finished(Moments().add(first), normalize="running")
    together = np.concatenate([first.numpy(), SCORES.numpy()])
    assert moments.number == 7
    np.testing.assert_allclose(got, (SCORES.numpy() - together.mean()) / together.std(), rtol=1e-5)


def test_start_normalises_by_the_untrained_actors_scores_and_leaves_them() -> None:
    """N+10."""
    before = torch.tensor([1.0, 3.0])
    got, moments = finished(Moments().add(before), normalize="start")
    assert moments == Moments().add(before)
    np.testing.assert_allclose(got, (SCORES.numpy() - 2.0) / 1.0, rtol=1e-6)


def test_equal_scores_do_not_divide_by_zero() -> None:
    scores, _ = finish(torch.full((4,), 0.25), EOS, RewardConfig(normalize="batch"), Moments())
    assert scores.tolist() == [0.0] * 4


def test_equal_scores_so_far_are_only_centred() -> None:
    """An environment alone: every score is 0, and a division by 1e-6 made a million of a difference of 1."""
    scores, _ = finish(SCORES, EOS, RewardConfig(normalize="start"), Moments().add(torch.full((3,), 2.0)))
    assert scores.tolist() == [0.0, -3.0, -1.5, 7.0]


def test_one_huge_score_does_not_lose_the_running_mean() -> None:
    moments = Moments().add(torch.tensor([1e8, 1e8 + 1]))
    assert moments.mean == pytest.approx(1e8 + 0.5)


# ---- functions of the user's ----------------------------------------------------------------------------------------


def sample(turns: int = 1) -> dict[str, object]:
    return {"prompt": "p", "response": "r", "responses": ["r"] * turns, "row": {}}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 2.5], [[1.0], [2.5]]),
        (torch.tensor([1.0, 2.0]), [[1.0], [2.0]]),
        (np.array([1.0, 2.0]), [[1.0], [2.0]]),
        ([True, False], [[1.0], [0.0]]),
        ([[1, 2], 3.0], [[1.0, 2.0], [3.0]]),
        ((x for x in (1.0, 2.0)), [[1.0], [2.0]]),
    ],
)
def test_what_a_reward_function_may_return(returned: object, expected: list[list[float]]) -> None:
    assert call(lambda _: returned, [sample(2), sample(2)], "f") == expected  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "returned 1 values for 2 samples"),
        ([1.0, "good"], "returned 'good', expected a number"),
        ([1.0, None], "returned None"),
        ([[1.0, 2.0, 3.0], 1.0], "returned 3 numbers for a sample of 2 turns"),
        (None, "raised TypeError"),
    ],
)
def test_what_it_may_not(returned: object, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        call(lambda _: returned, [sample(2), sample(2)], "f")  # type: ignore[arg-type,return-value]


def test_an_error_inside_it_is_named() -> None:
    with pytest.raises(PluginError, match=r"reward.function raised ZeroDivisionError"):
        call(lambda samples: [1 / 0 for _ in samples], [sample()], "reward.function")
    with pytest.raises(PluginError, match=r"reward.function raised SystemExit: 0"):
        call(lambda samples: sys.exit(0), [sample()], "reward.function")


def test_a_plugin_that_is_not_there_says_what_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(samples): return []\nlimit = 3\n")
    assert callable(load_plugin(f"{file}:score"))
    for spec, message in (
        (f"{file}:scor", "has no function scor; it has score"),
        (f"{file}:limit", "has no function limit"),
        (f"{tmp_path / 'other.py'}:score", "there is no file"),
        ("score", "expected file.py:name"),
        (str(file), "expected file.py:name"),
    ):
        with pytest.raises(PluginError, match=message):
            load_plugin(spec)
    file.write_text("import nothing_of_this_name\n")
    with pytest.raises(PluginError, match="ModuleNotFoundError"):
        load_plugin(f"{file}:score")


def test_a_task_without_a_reward_of_its_own_says_so() -> None:
    config = RewardConfig(function="task")
    assert rewards.reward_function(config, "arithmetic") is not None
    with pytest.raises(PluginError, match="no reward of its own"):
        rewards.reward_function(config, "movies")


def test_a_plugin_may_hold_dataclasses_and_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("WORD = 'e'\n")
    file = tmp_path / "judge.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport beside_it\n"
        "@dataclass\nclass Judge:\n    word: str = beside_it.WORD\n    def __call__(self, samples): return []\n"
    )
    assert load_plugin(f"{file}:Judge")().word == "e"
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(PluginError, match="SystemExit"):
        load_plugin(f"{file}:Judge")
