"""Everything that a run is given, put together once: what loop.py and evaluate.py work with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ppo_kernels.trainer.algo import Algorithm
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import Row, Text
from ppo_kernels.trainer.mix import Source
from ppo_kernels.trainer.models import Roles
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rewards import RewardFunction
from ppo_kernels.trainer.rollout import Environment


class Task(NamedTuple):
    config: Config
    ranks: Ranks
    text: Text
    train: list[Row]
    heldout: list[Row]
    roles: Roles
    reward_function: RewardFunction | None
    environment: Environment | None
    metric: Callable[[list[dict[str, Any]]], list[float]] | None
    sources: list[Source]
    algorithm: Algorithm
    between: Callable[[], None]  # called between long forwards: raises Stop when the run was asked to end
