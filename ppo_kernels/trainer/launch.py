"""From a valid configuration to an exit code: the ranks start, mistakes are told before models load, the run goes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ppo_kernels.trainer import preflight
from ppo_kernels.trainer.checkpoint import DiskFull, NoCheckpoint
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.demo import show
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.plan import check_run
from ppo_kernels.trainer.ranks import RankError, Ranks, start
from ppo_kernels.trainer.rewards import PluginError, RewardFunction
from ppo_kernels.trainer.run import Failed, begin, check_resumable, execute, new_folder
from ppo_kernels.trainer.stop import Stop


def launch(
    config: Config, folder: Path | None = None, check: bool = False, reward_function: RewardFunction | None = None
) -> tuple[int, list[str]]:
    """Runs or, with the `folder` of an earlier run, goes on; returns the exit code (see ppo-train --help) and what to
    say about it. `check`: one update on a plan that is shown, nothing saved."""
    ranks = start(config.train.device, config.train.threads)
    try:
        problems = ranks.gather(preflight.problems(config, ranks.size, reward_function) if ranks.main else [])
        if problems:
            return 2, problems if ranks.main else []
        if check:
            check_run(config, ranks, reward_function)
            return 0, []
        found = _folder(config, folder, ranks)
        if isinstance(found, str):
            return 2, [found] if ranks.main else []
        if folder is not None and ranks.main:
            check_resumable(found)
        summary = execute(config, found, ranks, reward_function)
        if ranks.main:
            show(summary, found)
        return 0, []
    except Stop as stop:
        return 75, [f"asked to end ({stop}): saved, go on with ppo-train --resume {found}"] if ranks.main else []
    except BlockingIOError:
        return 2, [f"{found} is in use by another process"]
    except (DataError, ModuleNotFoundError) as error:
        return 1, [str(error)]
    except PluginError as error:
        return 2, [str(error)]
    except Failed as error:
        return 3, [str(error)] if ranks.main else []
    except NoCheckpoint as error:
        return 4, [str(error)]
    except (DiskFull, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (28, 27, 122):  # no space, file too large, quota
            raise
        return 5, [str(error)] if ranks.main else []
    except RankError as error:
        return 1, [str(error)]
    finally:
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _folder(config: Config, folder: Path | None, ranks: Ranks) -> Path | str:
    """The run's folder on every rank, or what is wrong."""
    found: list[Any] = []
    if ranks.main:
        try:
            place = folder or new_folder(Path(config.out), config.name, numbered=config.demo is not None)
            if folder is None:
                begin(config, place)
            found = [place]
        except FileExistsError as error:
            updates = Path(str(error)) / "metrics.jsonl"
            made = updates.read_bytes().count(b'"stage": "ppo"') if updates.exists() else 0
            found = [f"{error} has {made} updates; use --resume {error}, or name=..."]
    return ranks.gather(found)[0]  # type: ignore[no-any-return]
