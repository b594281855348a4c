"""From a valid configuration to an exit code: the ranks start, mistakes are told before models load, the run goes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppo_kernels.trainer import preflight
from ppo_kernels.trainer.checkpoint import DiskFull, NoCheckpoint
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.demo import show
from ppo_kernels.trainer.disk import no_room
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.folder import begin, new_folder, obstacles
from ppo_kernels.trainer.plan import check_run
from ppo_kernels.trainer.ranks import RankError, Ranks, start
from ppo_kernels.trainer.rewards import PluginError, RewardFunction
from ppo_kernels.trainer.run import Failed, execute
from ppo_kernels.trainer.stop import Stop


def launch(
    config: Config, folder: Path | None = None, check: bool = False, reward_function: RewardFunction | None = None
) -> tuple[int, list[str]]:
    """Runs or, with the `folder` of an earlier run, goes on; returns the exit code (see ppo-train --help) and what to
    say about it. `check`: one update on a plan that is shown, nothing saved."""
    joined = dist.is_initialized()
    found: Path | str = folder or Path(config.out) / config.name
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(config.train.deterministic)
    ranks = start(config.train.device, config.train.threads)
    try:
        given, config = config, with_directories(config, ranks)
        with ranks.together("the check of the configuration"):
            problems = preflight.problems(config, ranks.size, reward_function) if ranks.main else []
        problems = ranks.gather(problems)
        problems += ranks.gather(obstacles(given, folder) if ranks.main and folder is not None else [])
        if problems:
            return 2, problems if ranks.main else []
        if check:
            check_run(config, ranks, reward_function)
            return 0, []
        found = _folder(given, folder, ranks)
        if isinstance(found, str):
            return 2, [found] if ranks.main else []
        with _undone(found, ranks.main and folder is None):
            summary = execute(config, found, ranks, reward_function, None if folder is None else given)
        if ranks.main:
            with contextlib.suppress(OSError):  # the run is complete, whoever reads this
                show(summary, found)
        return 0, []
    except Stop as stop:
        return 75, [f"asked to end ({stop}): saved, go on with ppo-train --resume {found}"] if ranks.main else []
    except BlockingIOError:
        return 2, [f"{found} is in use by another process"]
    except (DataError, ModuleNotFoundError) as error:
        return 1, [str(error)]
    except PluginError as error:
        saved = not check and (Path(found) / "checkpoints").exists()
        return 2, [f"{error}; once mended, go on with ppo-train --resume {found}" if saved else str(error)]
    except Failed as error:
        return 3, [str(error)] if ranks.main else []
    except NoCheckpoint as error:
        return 4, [str(error)]
    except RankError as error:
        return 1, [str(error)]
    except Exception as error:
        if not isinstance(error, DiskFull) and not no_room(error):
            raise
        begun = not check and (Path(found) / "config.yaml").exists()
        then = f"go on with ppo-train --resume {found}" if begun else "begin again"
        return 5, [f"{error}; make room, then {then}"] if ranks.main else []
    finally:
        if dist.is_initialized() and not joined:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


@contextlib.contextmanager
def _undone(place: Path, new: bool) -> Iterator[None]:
    """A run that fails before it has measured anything leaves no folder: once corrected it can have its name."""
    try:
        yield
    except Exception as error:
        begun = any((place / name).exists() for name in ("before.json", "start", "checkpoints"))
        if new and not begun and not isinstance(error, Stop) and not no_room(error):
            shutil.rmtree(place, ignore_errors=True)
        raise


def with_directories(config: Config, ranks: Ranks) -> Config:
    """model.actor=smollm2-135m names a model that is fetched and converted once. Raises DataError."""
    if config.model.actor != "smollm2-135m":
        return config
    from ppo_kernels.trainer.smollm import smollm_directory

    with ranks.together("fetching the model"):
        if ranks.main:
            smollm_directory()
    model = config.model.model_copy(update={"actor": str(smollm_directory())})
    return config.model_copy(update={"model": model})


def _folder(config: Config, folder: Path | None, ranks: Ranks) -> Path | str:
    """The run's folder on every rank, or what is wrong."""
    found: list[Any] = []
    with ranks.together("making the run's folder"):
        if ranks.main:
            try:
                place = folder or new_folder(Path(config.out), config.name, numbered=config.demo is not None)
                if folder is None:
                    try:
                        begin(config, place)
                    except OSError:  # or it would be in the way, and could not be resumed
                        shutil.rmtree(place, ignore_errors=True)
                        raise
                found = [place]
            except FileExistsError as error:
                updates = Path(str(error)) / "metrics.jsonl"
                made = updates.read_bytes().count(b'"stage": "ppo"') if updates.exists() else 0
                found = [f"{error} has {made} updates; use --resume {error}, or name=..."]
                if not (Path(str(error)) / "config.yaml").exists():  # not a run, or killed while it began
                    found = [f"{error} is there, but not a run: config.yaml is missing; remove it, or use name=..."]
    return ranks.gather(found)[0]  # type: ignore[no-any-return]
