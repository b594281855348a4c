"""A tiny world for the trainer's tests: random models, the built-in text, no network, a private cache directory."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ppo_kernels.trainer.config import SMOKE, Config, load
from ppo_kernels.trainer.data import Prompts, Split, load_split, make_prompts, train_tokenizer
from ppo_kernels.trainer.models import Roles, Scalar, assign_roles, new_language_model


class World(NamedTuple):
    config: Config
    split: Split
    prompts: Prompts
    tokenizer: PreTrainedTokenizerFast
    roles: Roles


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def world() -> World:
    config = load([], SMOKE)
    split = load_split(config.data)
    generator = torch.Generator().manual_seed(0)
    language_model = new_language_model(config.model, seed=0)
    with torch.no_grad():
        for parameter in language_model.parameters():  # larger than a fresh model's, so that distributions differ
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    reward = Scalar(new_language_model(config.model, seed=1).base_model, zero_head=False, generator=generator)
    return World(
        config,
        split,
        make_prompts(split, config.data.prompt_words),
        train_tokenizer(split, config.model.vocab),
        assign_roles(language_model, reward),
    )
