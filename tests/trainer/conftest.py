"""A tiny world for the trainer's tests: random models, the built-in text, no network, a private cache directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from ppo_kernels.trainer.config import Config, DemoConfig
from ppo_kernels.trainer.data import Row, Text
from ppo_kernels.trainer.models import Roles, Scalar, assemble, scalar_from
from ppo_kernels.trainer.movies import Split, load_split, make_prompts, train_tokenizer
from ppo_kernels.trainer.pretrain import new_language_model
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.settings import SMOKE, load

ALONE = Ranks(0, 1, torch.device("cpu"))


class World(NamedTuple):
    config: Config
    demo: DemoConfig
    split: Split
    rows: list[Row]
    heldout: list[Row]
    tokenizer: PreTrainedTokenizerFast
    text: Text
    roles: Roles
    ranks: Ranks


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def random_models(demo: DemoConfig) -> tuple[Any, Scalar]:
    generator = torch.Generator().manual_seed(0)
    language_model = new_language_model(demo.model, seed=0)
    with torch.no_grad():
        for parameter in language_model.parameters():  # larger than a fresh model's, so that distributions differ
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return language_model, scalar_from(new_language_model(demo.model, seed=1), generator)


@pytest.fixture
def world() -> World:
    config = load([], SMOKE)
    assert config.demo is not None
    split = load_split("toy", 0, config.data.heldout_rows, config.demo.text.validation)
    prompts = make_prompts(split, config.demo.text.prompt_words)
    language_model, reward = random_models(config.demo)
    copies = [scalar_from(new_language_model(config.demo.model, seed=1)) for _ in range(2)]
    for copy in copies:
        copy.load_state_dict(reward.state_dict())
    reference = new_language_model(config.demo.model, seed=0)
    reference.load_state_dict(language_model.state_dict())
    tokenizer = train_tokenizer(split, config.demo.model.vocab)
    return World(
        config,
        config.demo,
        split,
        [{"prompt": text} for text in prompts.train],
        [{"prompt": text} for text in prompts.heldout],
        tokenizer,
        Text(tokenizer, config.data),
        assemble(config, ALONE, language_model, reference, *copies),
        ALONE,
    )


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """actor/ and reward/ as plain transformers directories, prompts.jsonl of 200 rows, and rewards.py."""
    folder = tmp_path_factory.mktemp("models")
    config = load([], SMOKE)
    assert config.demo is not None
    split = load_split("toy", 0, 120, 60)
    tokenizer = train_tokenizer(split, config.demo.model.vocab)
    language_model, reward = random_models(config.demo)
    for name, model in (("actor", language_model), ("reward", reward.classifier)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    prompts = make_prompts(split, 3).train[:200]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (folder / "rewards.py").write_text(
        "def score(samples):\n    return [s['response'].count('e') / (1 + len(s['response'])) for s in samples]\n"
    )
    return folder


@pytest.fixture
def quick(model_directory: Path, tmp_path: Path) -> dict[str, Any]:
    """A configuration of a run that takes a second: an untrained actor, a reward function, 4 updates."""
    return {
        "name": "quick",
        "out": str(tmp_path / "runs"),
        "model": {"actor": str(model_directory / "actor")},
        "data": {"train": str(model_directory / "prompts.jsonl"), "heldout_rows": 40},
        "reward": {"function": f"{model_directory / 'rewards.py'}:score"},
        "rollout": {"prompts": 8, "max_new_tokens": 6},
        "ppo": {"microbatch": 4},
        "optim": {"actor_lr": 1e-3, "critic_lr": 1e-3},
        "train": {"updates": 4, "threads": 1},
        "save": {"every": 2},
        "eval": {"prompts": 8, "every": 2, "curve_prompts": 8, "samples": 2},
        "log": {"tensorboard": False},
    }
