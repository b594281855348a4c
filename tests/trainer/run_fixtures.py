"""Fixtures of the tests that kill, starve and damage runs: `pytest_plugins = ("trainer.run_fixtures",)`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_kernels.trainer import cli, evaluate

from .runs import Trial, hurry, make_models, outcome


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def finished(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Not to be changed. It runs in this process, so that children find everything imported and warm."""
    trial, threads = Trial(models, tmp_path_factory.mktemp("finished")), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.bootstrap, "__defaults__", evaluate.bootstrap.__defaults__)
        hurry()
        assert cli.main([str(trial.config)]) == 0
    torch.set_num_threads(threads)
    return trial


@pytest.fixture(scope="session")
def expected(finished: Trial) -> dict[str, Any]:
    """What a run leaves that nothing disturbed."""
    return outcome(finished.folder)


@pytest.fixture
def trial(models: Path, finished: Trial, tmp_path: Path) -> Trial:
    return Trial(models, tmp_path)


@pytest.fixture
def copy(models: Path, finished: Trial, tmp_path: Path) -> Trial:
    """A finished run, to be damaged."""
    trial = Trial(models, tmp_path)
    shutil.copytree(finished.folder, trial.folder)
    return trial
