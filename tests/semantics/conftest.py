"""What the ranks of a launch bring back, for all the modules whose tests look at it: each launch happens once.

data_2_ranks and data_4_ranks, vocab_2_ranks and vocab_4_ranks: of each rank, what it returned. data_ranks and
vocab_ranks: a test of both.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import ranks


def launched(module: str, world: int) -> Any:
    """A fixture: what `everything` of `module` returns on each of `world` ranks."""

    @pytest.fixture(scope="session")
    def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
        return ranks.run(import_module(module).everything, world, tmp_path_factory.mktemp(f"{module}_{world}"))

    return results


def two_and_four(name: str) -> Any:
    """A fixture: what each of 2 ranks returns, then what each of 4 does."""

    @pytest.fixture(params=[2, 4], ids=["2-ranks", "4-ranks"])
    def results(request: pytest.FixtureRequest) -> list[Any]:
        return request.getfixturevalue(f"{name}_{request.param}_ranks")

    return results


data_2_ranks, data_4_ranks = launched("data_parallel_ranks", 2), launched("data_parallel_ranks", 4)
vocab_2_ranks, vocab_4_ranks = launched("vocab_parallel_ranks", 2), launched("vocab_parallel_ranks", 4)
data_ranks, vocab_ranks = two_and_four("data"), two_and_four("vocab")
