"""One update that is thrown away, for `ppo-train --check`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import transformers

from ppo_kernels.trainer.checkpoint import Progress
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import load_rows
from ppo_kernels.trainer.log import Log, Stage
from ppo_kernels.trainer.loop import ppo_update
from ppo_kernels.trainer.models import load_roles, load_tokenizer
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rewards import RewardFunction
from ppo_kernels.trainer.run import make_task
from ppo_kernels.trainer.stop import Signals
from ppo_kernels.trainer.task import Task
from ppo_kernels.trainer.update import Optimizers


@contextlib.contextmanager
def dry_task(config: Config, ranks: Ranks, reward_function: RewardFunction | None) -> Iterator[Task]:
    transformers.utils.logging.disable_progress_bar()
    with (
        tempfile.TemporaryDirectory() as folder,
        Signals() as signals,
        Log(Path(folder), "check", [Stage("check", 1)], tensorboard=False, silent=True) as log,
    ):
        roles = load_roles(config, ranks)
        tokenizer = load_tokenizer(config.model.actor)
        yield make_task(config, ranks, load_rows(config.data), tokenizer, roles, signals, log, reward_function)


def dry_update(task: Task) -> dict[str, float]:
    optimizers = Optimizers(task.roles.actor.model, task.roles.critic, task.config.optim)
    progress = Progress(kl_coef=task.config.kl.coef, clip=task.config.ppo.clip)
    return ppo_update(task, progress, optimizers)[0]
