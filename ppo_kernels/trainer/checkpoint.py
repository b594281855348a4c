"""Checkpoints that survive anything: written beside, verified by checksums, renamed into place, pruned afterwards.

    checkpoints/step_000100/
        state/           weights that train and both optimizers, torch.distributed.checkpoint (every rank its shards)
        progress.json    everything else: counters, KL coefficient, reward moments
        actor/           a plain transformers directory
        manifest.json    size and sha256 of every file; written last, so that a folder without it is no checkpoint

A resume takes the newest folder whose manifest verifies. There is no random state: see seeds.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from ppo_kernels.trainer import faults
from ppo_kernels.trainer.disk import is_io, sha256, sync
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.models import Roles, plain_directory
from ppo_kernels.trainer.ranks import Ranks, reshard
from ppo_kernels.trainer.rewards import Moments
from ppo_kernels.trainer.update import Optimizers

FINISHED = re.compile(r"step_\d{6,}")
UNFINISHED = re.compile(r"tmp-(old-)?step_\d{6,}")


class NoCheckpoint(Exception):
    """There were checkpoints, and none of them can be used."""


class DiskFull(Exception):
    """What was to be saved could not be."""


@dataclasses.dataclass
class Progress:
    """Where a run is, besides weights and optimizers."""

    kl_coef: float
    clip: float
    update: int = 0  # finished ones
    stream: int = 0  # rollbacks so far; each starts other random streams
    skips: int = 0  # optimizer steps left out in a row
    moments: Moments = dataclasses.field(default_factory=Moments)
    heldout: dict[str, float] = dataclasses.field(default_factory=dict)  # the last evaluation's
    best: float | None = None  # held-out reward
    seconds: float = 0.0  # of all processes that worked on this run
    due: bool = True  # saved because save.every said so, in good order: a rollback may go there
    pending: dict[str, float] | None = None  # the numbers of an update whose evaluation failed, and is to be made again

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Progress:
        fields = json.loads(text)
        return cls(**fields | {"moments": Moments(*fields["moments"])})


class Checkpoints:
    def __init__(self, folder: Path, keep: int, tokenizer: Any, ranks: Ranks, log: Log) -> None:
        self.folder, self.keep, self.tokenizer, self.ranks, self.log = folder, keep, tokenizer, ranks, log
        self.failures = 0
        self.size = 0  # bytes of the last one

    # ---- save -------------------------------------------------------------------------------------------------------

    def save(self, progress: Progress, roles: Roles, optimizers: Optimizers) -> bool:
        """Every rank calls it. A full disk is reported, and training goes on; the third time in a row is DiskFull."""
        name = f"step_{progress.update:06d}"
        try:
            with self.ranks.together("saving"):
                if self.ranks.main:
                    self._begin(name)
            self._write(name, progress, roles, optimizers)
            with self.ranks.together("saving"):
                if self.ranks.main:
                    self._publish(name)
        except Exception as error:
            if not is_io(error):
                raise
            if self.ranks.main:
                shutil.rmtree(self.folder / f"tmp-{name}", ignore_errors=True)
            self.failures += 1
            self.log.note(f"checkpoint {name} could not be written ({error}); training goes on without it", loud=True)
            if self.failures >= 3:
                raise DiskFull(f"three checkpoints in a row could not be written: {error}") from error
            return False
        self.failures = 0
        if self.ranks.main:
            self._tidy(name)
        return True

    def _begin(self, name: str) -> None:
        faults.point("save:begin")
        self.folder.mkdir(exist_ok=True)
        self._clear()
        free = shutil.disk_usage(self.folder).free
        if free < 1.2 * self.size:
            raise OSError(28, f"{free >> 20} MiB free, a checkpoint takes {self.size >> 20}")
        (self.folder / f"tmp-{name}").mkdir()

    def _write(self, name: str, progress: Progress, roles: Roles, optimizers: Optimizers) -> None:
        place = self.folder / f"tmp-{name}"
        with self.ranks.together("saving"):
            try:
                with quiet():
                    save_tensors(tensors(optimizers), checkpoint_id=place / "state", no_dist=self.ranks.size == 1)
            except CheckpointException as error:
                raise OSError(reason(error)) from None
            faults.point("save:state")
        with self.ranks.together("saving"):
            plain_directory(roles.actor.model, self.tokenizer, place / "actor", self.ranks)
            if self.ranks.main:
                (place / "progress.json").write_text(progress.to_json())
            faults.point("save:actor")

    def _publish(self, name: str) -> None:
        place = self.folder / f"tmp-{name}"
        files = sorted(path for path in place.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(place)): (path.stat().st_size, sha256(path)) for path in files}
        self.size = sum(size for size, _ in manifest.values())
        faults.point("save:manifest")
        (place / "manifest.json").write_text(json.dumps(manifest, indent=1))
        folders = [path for path in place.rglob("*") if path.is_dir()]
        for path in [*files, place / "manifest.json", *folders, place]:
            sync(path)
        faults.point("save:rename")
        target = self.folder / name
        if target.exists():  # found broken by a resume
            target.rename(self.folder / f"tmp-old-{name}")
        place.rename(target)
        sync(self.folder)
        faults.point("save:renamed")

    def _tidy(self, name: str) -> None:
        """Keeps `name`, and the last self.keep to which a rollback may go; what is newer than `name` is broken, and
        will be replaced."""
        older = [place for place in newest_first(self.folder) if update_of(place) <= update_of(self.folder / name)]
        kept = [place for place in older if is_due(place)][: self.keep]
        for place in older[1:]:
            if place not in kept:
                self._remove(place)
        self._clear()

    def _clear(self) -> None:
        for place in self.folder.glob("tmp-*"):
            if UNFINISHED.fullmatch(place.name):
                shutil.rmtree(place, ignore_errors=True)

    def _remove(self, place: Path) -> None:
        """Renamed first: a folder with its name is whole."""
        away = place.with_name(f"tmp-old-{place.name}")
        with contextlib.suppress(OSError):
            shutil.rmtree(away, ignore_errors=True)
            place.rename(away)
            faults.point("save:prune")
            shutil.rmtree(away, ignore_errors=True)

    # ---- restore ----------------------------------------------------------------------------------------------------

    def restore(self, optimizers: Optimizers, rollback_from: int | None = None) -> Progress | None:
        """Loads the newest checkpoint that verifies; None if none was ever written. With `rollback_from`, an update,
        the newest before it that was due; later ones are removed, for the run takes another way from there.

        Raises NoCheckpoint if there are some and none can be used. Newer ones that cannot are named in a warning.
        """
        found: list[tuple[str, str]] = []
        if self.ranks.main:
            for place in newest_first(self.folder):
                if rollback_from is not None and (update_of(place) > rollback_from or not is_due(place)):
                    continue
                problem = verify(place)
                found.append((place.name, problem))
                if not problem:
                    break
                self.log.note(f"checkpoint {place.name} cannot be used: {problem}", loud=True)
        found = self.ranks.gather(found)
        good = next((name for name, problem in found if not problem), None)
        if good is None:
            if found:
                raise NoCheckpoint(f"none of the {len(found)} checkpoints in {self.folder} can be used: {found[0][1]}")
            return None
        place = self.folder / good
        try:
            with quiet():
                load_tensors(tensors(optimizers), checkpoint_id=place / "state", no_dist=self.ranks.size == 1)
        except CheckpointException as error:
            raise NoCheckpoint(f"{place} is whole, but is not of these models: {reason(error)}") from None
        if self.ranks.main:
            for later in newest_first(self.folder) if rollback_from is not None else []:
                if update_of(later) > update_of(place):
                    self._remove(later)
            self._tidy(good)
        return Progress.from_json((place / "progress.json").read_text())

    # ---- best -------------------------------------------------------------------------------------------------------

    def save_best(self, target: Path, roles: Roles) -> bool:
        """The actor as a plain directory at `target`, replaced as a whole."""
        place, old = target.with_name("tmp-best"), target.with_name("tmp-old-best")
        try:
            with self.ranks.together("saving the best actor"):
                if self.ranks.main:
                    shutil.rmtree(place, ignore_errors=True)
                    shutil.rmtree(old, ignore_errors=True)
                plain_directory(roles.actor.model, self.tokenizer, place, self.ranks)
                if self.ranks.main:
                    if target.exists():
                        target.rename(old)
                    faults.point("best:swap")
                    place.rename(target)
                    shutil.rmtree(old, ignore_errors=True)
        except Exception as error:
            if not is_io(error):
                raise
            if self.ranks.main and old.exists() and not target.exists():
                old.rename(target)
            self.log.note(f"the best actor could not be written ({error})", loud=True)
            return False
        return True


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints; anything else in their folder is the user's."""
    return sorted((place for place in folder.glob("step_*") if FINISHED.fullmatch(place.name)), key=update_of)[::-1]


def update_of(place: Path) -> int:
    return int(place.name.removeprefix("step_"))


def is_due(place: Path) -> bool:
    try:
        return Progress.from_json((place / "progress.json").read_text()).due
    except (OSError, ValueError, TypeError, KeyError):
        return False


def reason(error: CheckpointException) -> str:
    """It is no Exception, and hides what happened in a dictionary."""
    return "; ".join(" ".join(str(cause).split()) for cause, _ in error.failures.values())


def tensors(optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """What trains, and the optimizers' moments: the very tensors, so that loading into them is loading the run."""
    found: dict[str, torch.Tensor] = {}
    reshard(*optimizers.models.values())  # or the parameters found here would be those of the last forward
    for role, model in optimizers.models.items():
        state = dict(optimizers.optimizers[role].state)  # a plain one: a parameter it does not know is an error
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[f"{role}.{name}"] = parameter.detach()
                found |= {f"{role}_optimizer.{name}.{key}": value for key, value in state[parameter].items()}
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.distributed.checkpoint warns that there is one process even when it is told so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def verify(place: Path) -> str:
    """What is wrong with a checkpoint; empty if nothing is."""
    try:
        manifest = json.loads((place / "manifest.json").read_text())
        for name, (size, digest) in manifest.items():
            if not (place / name).is_file():
                return f"{name} is missing"
            if (place / name).stat().st_size != size:
                return f"{name} has {(place / name).stat().st_size} bytes instead of {size}"
            if sha256(place / name) != digest:
                return f"{name} is not what was written"
        return "" if "progress.json" in manifest else "the manifest lacks progress.json"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (ValueError, TypeError, AttributeError, OSError) as error:
        return f"manifest.json cannot be read: {error}"
