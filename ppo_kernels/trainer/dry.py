"""One update that is thrown away, for `ppo-train --check`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import transformers
from transformers import AutoTokenizer

from ppo_kernels.trainer.checkpoint import Progress
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import load_rows
from ppo_kernels.trainer.log import Log, Stage
from ppo_kernels.trainer.loop import ppo_update
from ppo_kernels.trainer.models import Roles, load_roles
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.rewards import RewardFunction
from ppo_kernels.trainer.run import make_task
from ppo_kernels.trainer.stop import Signals
from ppo_kernels.trainer.update import Optimizers


def dry_update(
    config: Config, ranks: Ranks, reward_function: RewardFunction | None
) -> tuple[Roles, int, dict[str, float]]:
    """The models, the longest sequence that may occur (tokens, first turn), and the update's numbers."""
    transformers.utils.logging.disable_progress_bar()
    with (
        tempfile.TemporaryDirectory() as folder,
        Signals() as signals,
        Log(Path(folder), "check", [Stage("check", 1)], tensorboard=False, silent=True) as log,
    ):
        roles = load_roles(config, ranks)
        tokenizer = AutoTokenizer.from_pretrained(config.model.actor)
        task = make_task(config, ranks, load_rows(config.data), tokenizer, roles, signals, log, reward_function)
        optimizers = Optimizers(roles.actor.model, roles.critic, config.optim)
        progress = Progress(kl_coef=config.kl.coef, clip=config.ppo.clip)
        stats, _ = ppo_update(task, progress, optimizers)
    longest = max(len(task.text.prompt(row)) for row in task.train) + config.rollout.max_new_tokens
    return roles, longest, stats
