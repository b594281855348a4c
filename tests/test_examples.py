"""The examples do what their docstrings say, in shorter runs."""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def guess() -> ModuleType:
    spec = importlib.util.spec_from_file_location("guess_the_number", EXAMPLES / "guess_the_number.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def play(guess: ModuleType, secret: int, say: Callable[[list[int]], int], low: int, high: int, turns: int) -> bool:
    """Whether a player hits in time who is told the numbers that are left."""
    game, left = guess.Game({"secret": secret}), list(range(low, high + 1))
    for _ in range(turns):
        number = say(left)
        answer, _ = game.step(str(number))
        if answer is None:
            return True
        left = [n for n in left if (n > number if answer == "higher" else n < number)]
    return False


@pytest.mark.parametrize("n", [1, 2, 4, 7, 10])
def test_the_baselines_of_guess_the_number_are_those_of_players(guess: ModuleType, n: int) -> None:
    rng = random.Random(n)
    for turns in range(1, 5):
        secrets = range(3, 3 + n)
        halving = sum(play(guess, s, lambda left: left[len(left) // 2], 3, 2 + n, turns) for s in secrets)
        assert guess.by_halving(n, turns) == pytest.approx(halving / n)
        hits = sum(play(guess, rng.choice(secrets), rng.choice, 3, 2 + n, turns) for _ in range(2000))
        assert guess.by_elimination(n, turns) == pytest.approx(hits / 2000, abs=0.045)  # four standard errors
        blind = [secret in said for secret in range(n) for said in itertools.product(range(n), repeat=turns)]
        assert guess.by_chance(n, turns) == pytest.approx(sum(blind) / len(blind))


@pytest.mark.parametrize(
    ("text", "count"),
    [("3 to 9 6", 1), ("3 to 9 4 higher 8 lower 6", 3), ("3 to 9 4 higher 6 6", 3), ("3 to 9", None),
     ("3 to 9 4 higher 8 lower 7", None)],
)  # fmt: skip
def test_guesses_are_counted_until_the_hit(guess: ModuleType, text: str, count: int | None) -> None:
    assert guess.guesses(text, {"prompt": "3 to 9", "secret": 6}) == (count or float("inf"))


@pytest.mark.slow
def test_guess_the_number_learns(
    guess: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 30 updates, of 150, hits within four guesses rose by 20 points or more with each of seeds 1 to 4."""
    monkeypatch.setattr(sys, "argv", ["guess_the_number.py", "--updates", "30", "--out", str(tmp_path / "guess")])
    assert guess.main() == 0
    printed = capsys.readouterr().out
    table = re.findall(r"^  (\d)   (.*)$", printed.partition("hits within")[2], re.MULTILINE)[-guess.TURNS :]
    assert [int(k) for k, _ in table] == [1, 2, 3, 4]
    rates = [[float(x) for x in re.findall(r"([\d.]+)%", line)] for _, line in table]
    for chance, before, low, high, *_ in rates:
        assert low <= before <= high
        assert before <= chance + 5.0, "a player who ignores the answers"
    after = [row[4] for row in rates]
    assert after == sorted(after)
    assert all(hit <= best + 5.0 for hit, best in zip(after, (row[-1] for row in rates), strict=True))
    assert after[-1] > rates[-1][1] + 12.0
