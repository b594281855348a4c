"""A run's folder: how it begins, who may write to it, and what a resume finds in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml

import ppo_kernels
from ppo_kernels.trainer import faults
from ppo_kernels.trainer.checkpoint import NoCheckpoint, newest_first, update_of
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.disk import fingerprint, read_json, sha256, write_whole
from ppo_kernels.trainer.settings import ConfigError, another_run, flat, load, read_file

DECISIVE = ("torch", "transformers", "cpu", "gpu", "threads", "backend", "ranks")  # what rounding depends on
DATA = ("data.train", "data.heldout")
FILES = (*DATA, "data.environment", "reward.function", "eval.metric", "mix.ptx", "mix.sft",
         "model.actor", "model.reference", "model.critic", "reward.model")  # fmt: skip


def new_folder(out: Path, name: str, numbered: bool = False) -> Path:
    """runs/name, made; an earlier run is never touched: FileExistsError, or runs/name-2 and so on if `numbered`."""
    for number in range(1, 10_000 if numbered else 2):
        folder = out / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(str(out / name))


def begin(config: Config, folder: Path) -> None:
    """What a new run's folder holds first."""
    write_whole(folder / "env.json", json.dumps(environment() | {"files": input_files(config)}, indent=1))
    write_config(config, folder)
    faults.point("run:folder")


def write_config(config: Config, folder: Path) -> None:
    write_whole(folder / "config.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time; the system lets go when that ends, however it ends. Raises BlockingIOError."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def environment() -> dict[str, Any]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in (Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else [])
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": " ".join(["ppo-train", *sys.argv[1:]]),
        "ppo_kernels": ppo_kernels.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "cpu": cpu,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "backend": os.environ.get("PPO_KERNELS_BACKEND", "automatic"),
        "ranks": dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    }


def input_files(config: Config) -> dict[str, str]:
    """A digest of each file and model directory that the configuration names, by key."""
    values = flat(config.model_dump())
    paths = {key: Path(re.sub(r"(\.py):\w+$", r"\1", values[key])) for key in FILES if values[key]}
    return {key: sha256(path) if path.is_file() else fingerprint(path) for key, path in paths.items() if path.exists()}


def obstacles(config: Config, folder: Path) -> list[str]:
    """Why the run in the folder cannot go on with this configuration; empty if it can."""
    try:
        saved = load([], read_file(folder / "config.yaml"))
    except ConfigError as error:
        return [f"{folder} is not a run: {problem}" for problem in error.problems]
    made = max(map(update_of, newest_first(folder / "checkpoints")), default=0)
    fewer = [f"train.updates={config.train.updates}: {folder} has made {made} updates"]
    return another_run(saved, config) + (fewer if made > config.train.updates else [])


def go_on(config: Config, folder: Path) -> list[str]:
    """Before a resume: forgets what was written before the first checkpoint, for the run starts again, and writes down
    a changed configuration. Returns what is worth saying; raises NoCheckpoint if updates were made and none is left.
    """
    said = []
    metrics = folder / "metrics.jsonl"
    if not newest_first(folder / "checkpoints"):
        signs = [name for name in ("best", "final", "summary.json") if (folder / name).exists()]
        if metrics.exists() and b'"stage": "ppo"' in metrics.read_bytes():
            signs.append("updates in metrics.jsonl")
        if signs:
            raise NoCheckpoint(f"{folder} has {', '.join(signs)}, but no checkpoint in {folder / 'checkpoints'}")
        metrics.unlink(missing_ok=True)
        said.append(f"{folder} was ended before its first checkpoint: starting at update 0")
    saved, given = (flat(x.model_dump()) for x in (load([], read_file(folder / "config.yaml")), config))
    changed = [f"{key}={given[key]!r} (was {saved.get(key)!r})" for key in given if given[key] != saved.get(key)]
    if changed:  # written down, or the next resume would fall back to the old one
        write_config(config, folder)
        said.append(f"from here on {', '.join(changed)}")
    began, now = read_json(folder / "env.json") or {}, environment()
    others = [f"{key} {now[key]} (was {began[key]})" for key in DECISIVE if key in began and now[key] != began[key]]
    files = input_files(config)
    written = {key: digest for key, digest in began.get("files", {}).items() if given[key] == saved.get(key)}
    new = [key for key, digest in written.items() if files.get(key) != digest]
    others += [f"{key}={given[key]} has changed" for key in new]
    if set(new) & set(DATA):  # of other prompts; it is made again
        (folder / "before.json").unlink(missing_ok=True)
    if others:
        said.append(f"not to the bit what it would have been: {', '.join(others)}")
    return said
