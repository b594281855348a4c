"""Runs of half a second in children of a fork server: tests kill them, starve them, and compare what they leave.

Importing torch and transformers takes seconds; forking a process that has them does not.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ppo_kernels.trainer import checkpoint, cli, evaluate
from ppo_kernels.trainer.config import DemoConfig
from ppo_kernels.trainer.movies import load_split, make_prompts, train_tokenizer

from .conftest import random_models

MISCHIEF = Path(__file__).with_name("mischief.py")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, f"{__package__}.warm"])
IMPORTED_IN = os.getpid()
TIMING = re.compile(r"seconds$|^time/")
MARKS = [
    pytest.mark.cpu_only("files and signals: the same with a GPU"),
    pytest.mark.skipif(
        any(os.environ.get(name) for name in ("PPO_KERNELS_BACKEND", "PPO_KERNELS_ISA")),
        reason="files and signals are the same on every backend: run on the default one",
    ),
]


class Ended(NamedTuple):
    code: int  # negative: the signal that ended it
    out: str
    err: str


class Running:
    def __init__(self, process: ForkServerProcess, pipes: list[Connection]) -> None:
        self.process, self.pipes = process, pipes

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def alive(self) -> bool:
        return self.process.is_alive()

    def wait(self, limit: float = 60.0) -> Ended:
        """What it writes is read afterwards: a run here says far less than a pipe holds."""
        self.process.join(limit)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"still running after {limit} seconds\n{self._said()}")
        return Ended(self.process.exitcode, *self._said())

    def _said(self) -> list[str]:
        said = []
        for pipe in self.pipes:
            with pipe, open(pipe.fileno(), encoding="utf-8", errors="replace", closefd=False) as file:
                said.append(file.read())
        return said


def start(arguments: list[str], prepare: Callable[[], None] | None = None, **environment: str) -> Running:
    """`ppo-train` with these arguments, in a child; `prepare`, of a module or a partial of one, is called there first.

    It is forked by a server that has imported what a run needs and started no thread: a fork of this process would
    lack the threads of whatever ran here before, and hang or die where it waits for them.
    """
    pipes, ends = zip(*(FORKS.Pipe(duplex=False) for _ in range(2)), strict=True)
    for end in ends:
        fcntl.fcntl(end.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the server to find this module
        ensure_running()
    process = FORKS.Process(target=_run, args=(arguments, prepare, {**os.environ, **environment}, ends))
    process.start()
    for end in ends:
        end.close()
    return Running(process, list(pipes))


def _run(
    arguments: list[str], prepare: Callable[[], None] | None, environment: dict[str, str], ends: tuple[Connection, ...]
) -> None:
    code = 1
    try:
        for number, end in enumerate(ends, 1):
            os.dup2(end.fileno(), number)
            end.close()
        sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        hurry()
        assert os.getppid() == IMPORTED_IN, "the fork server did not import this module: every run takes seconds"
        if prepare is not None:
            prepare()
        code = cli.main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stderr.flush()
        finally:
            os._exit(code)


def hurry() -> None:
    """Nothing here depends on how good the intervals are, and they take most of the time."""
    evaluate.bootstrap.__defaults__ = (20, 0)


class Trial:
    """A run, not begun yet, with a folder of its own."""

    def __init__(self, models: Path, place: Path, *overrides: str) -> None:
        self.folder, self.overrides, self.config = place / "runs" / "tiny", list(overrides), place / "tiny.yaml"
        self.config.write_text(yaml.safe_dump(tiny(models, place)))

    def begin(self, fault: str = "", **how: Any) -> Ended:
        return self.beginning(fault, **how).wait()

    def beginning(self, fault: str = "", **how: Any) -> Running:
        return start([str(self.config), *self.overrides], PPO_KERNELS_FAULT=fault, **how)

    def resume(self, *overrides: str, fault: str = "", **how: Any) -> Ended:
        return self.resuming(*overrides, fault=fault, **how).wait()

    def resuming(self, *overrides: str, fault: str = "", **how: Any) -> Running:
        return start(["--resume", str(self.folder), *overrides], PPO_KERNELS_FAULT=fault, **how)

    def going_on(self, fault: str = "", **how: Any) -> Running:
        """As whoever finds it dead would: resume, or begin again what had not begun."""
        if (self.folder / "config.yaml").exists():
            return self.resuming(fault=fault, **how)
        shutil.rmtree(self.folder, ignore_errors=True)
        return self.beginning(fault, **how)

    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoints/step_*"))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self) -> str:
        return (self.folder / "events.log").read_text()


def make_models(place: Path) -> Path:
    """actor/, as small as one can be, and prompts.jsonl."""
    demo = DemoConfig.model_validate({"model": {"hidden": 16, "layers": 1, "heads": 2, "ffn": 16, "vocab": 300}})
    split = load_split("toy", 0, 120, 60)
    random_models(demo)[0].save_pretrained(place / "actor")
    train_tokenizer(split, demo.model.vocab).save_pretrained(place / "actor")
    prompts = make_prompts(split, demo.text.prompt_words).train[:40]
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return place


def tiny(models: Path, place: Path) -> dict[str, Any]:
    """Saved at updates 0, 2 and 4; the last two are kept. The reward function is called for: both sets before, the
    curve (3), updates 1 (4) and 2 (5), the curve (6), updates 3 (7) and 4 (8), the curve (9), both sets after (11)."""
    return {
        "name": "tiny",
        "out": str(place / "runs"),
        "model": {"actor": str(models / "actor")},
        "data": {"train": str(models / "prompts.jsonl"), "heldout_rows": 16},
        "reward": {"function": f"{MISCHIEF}:score"},
        "rollout": {"prompts": 4, "max_new_tokens": 4},
        "ppo": {"epochs": 1, "minibatches": 2},
        "optim": {"actor_lr": 1e-2, "critic_lr": 1e-2},
        "train": {"updates": 4, "threads": 1, "device": "cpu"},
        "save": {"every": 2},
        "eval": {"prompts": 4, "every": 2, "curve_prompts": 4, "samples": 2},
        "log": {"tensorboard": False},
    }


# ---- what a run leaves ----------------------------------------------------------------------------------------------


def outcome(folder: Path, checkpoints: bool = True) -> dict[str, Any]:
    """All that must not depend on when a run was ended and resumed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {f"row {i}": untimed(row) for i, row in enumerate(rows)}
    found |= {name: (folder / name).read_text() for name in ("before.json", "samples.jsonl")}
    found["summary"] = {k: v for k, v in json.loads((folder / "summary.json").read_text()).items() if k[:5] != "stage"}
    weights = [path for path in folder.rglob("*.safetensors") if checkpoints or "checkpoints" not in path.parts]
    found |= {str(path.relative_to(folder)): sha256(path) for path in weights}
    if checkpoints:
        for path in folder.glob("checkpoints/*/progress.json"):
            found[str(path.relative_to(folder))] = untimed(json.loads(path.read_text()))
    found["unfinished"] = [str(path.relative_to(folder)) for path in folder.rglob("*tmp*")]
    return found


def untimed(row: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in row.items() if not TIMING.search(name)}


def assert_same(trial: Trial, expected: dict[str, Any], checkpoints: bool = True) -> None:
    found = outcome(trial.folder, checkpoints)
    if not checkpoints:
        expected = {key: value for key, value in expected.items() if not key.startswith("checkpoints/")}
    assert not differences(found, expected)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    return [f"{key}: {found.get(key)} instead of {expected.get(key)}" for key in keys]


def tree(folder: Path) -> dict[str, str]:
    """Every file by its content, but for those that a refused resume may touch."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "events.log")]
    return {str(path.relative_to(folder)): sha256(path) for path in files}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def verified(folder: Path) -> list[str]:
    return [place.name for place in sorted(folder.glob("checkpoints/step_*")) if not checkpoint.verify(place)]
