"""Fixtures of the tests that kill, starve and damage runs: `pytest_plugins = ("trainer.run_fixtures",)`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from .runs import Trial, make_models, outcome


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Not to be changed."""
    trial = Trial(models, tmp_path_factory.mktemp("finished"))
    assert trial.begin().code == 0
    return trial


@pytest.fixture(scope="session")
def expected(finished: Trial) -> dict[str, Any]:
    """What a run leaves that nothing disturbed."""
    return outcome(finished.folder)


@pytest.fixture
def trial(models: Path, tmp_path: Path) -> Trial:
    return Trial(models, tmp_path)


@pytest.fixture
def copy(models: Path, finished: Trial, tmp_path: Path) -> Trial:
    """A finished run, to be damaged."""
    trial = Trial(models, tmp_path)
    shutil.copytree(finished.folder, trial.folder)
    return trial
