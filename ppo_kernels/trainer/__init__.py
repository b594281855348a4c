"""The reference trainer: `ppo-train --help`, docs/trainer.md, and from Python

from ppo_kernels.trainer import Config, train
train(Config(model={"actor": "my-model"}, data={"train": "prompts.jsonl"}), reward_function=f)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ppo_kernels.trainer.config import Config

__all__ = ["Config", "train"]


def train(
    config: Config,
    reward_function: Callable[[list[dict[str, Any]]], list[Any]] | None = None,
    resume: str | Path | None = None,
) -> int:
    """What `ppo-train` does; returns its exit code, after printing what went wrong to stderr.

    reward_function: instead of reward.function; takes samples (dicts with prompt, response, responses, row), returns a
    number for each, or a list of one number per turn. resume: the folder of an earlier run to go on with.
    """
    from ppo_kernels.trainer.cli import say
    from ppo_kernels.trainer.launch import launch

    return say(*launch(config, Path(resume) if resume is not None else None, reward_function=reward_function))
