"""Runs a function in N processes that are the ranks of one gloo group, and fails loudly.

    def work(rank, world):  # at the top level of a module beside the test
        ...
        return {"loss": loss}  # anything torch.save takes

    first, second = ranks.run(work, 2, tmp_path)

A rank that raises ends the others and fails the test with what every rank wrote to stderr; so does the time limit,
shortly before which each rank writes where it stands. Importing torch is most of the time: put many checks into one
`work`.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

Work = Callable[[int, int], Any]

DISTRIBUTED = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
ONCE = pytest.mark.skipif(
    any(os.environ.get(name) for name in ("PPO_KERNELS_BACKEND", "PPO_KERNELS_ISA")),
    reason="what ranks do is the same on every backend, and launching them is slow: run on the default one",
)
MARKS = [pytest.mark.cpu_only("gloo"), DISTRIBUTED, ONCE]  # of a module whose every test is about ranks


class Ended(NamedTuple):
    """How a rank ended: its exit status (-9: killed by signal 9) and what it wrote to stderr."""

    status: int
    stderr: str


def run(work: Work, world: int, folder: Path, *, limit: float = 240.0) -> list[Any]:
    """[work(0, world), ..., work(world - 1, world)]."""
    place = Path(tempfile.mkdtemp(dir=folder))
    end(work, world, place, limit=limit, all_succeed=True)
    return [torch.load(place / f"result-{rank}.pt") for rank in range(world)]


def end(work: Work, world: int, folder: Path, *, limit: float, all_succeed: bool = False) -> list[Ended]:
    """How each rank ended; AssertionError if one still runs after `limit` seconds, or fails and all_succeed."""
    path = [str(Path(__file__).parent), *sys.path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"stderr-{rank}.txt" for rank in range(world)]
    processes = []
    deadline = time.monotonic() + limit
    try:
        for rank, log in enumerate(logs):
            arguments = [work.__module__, work.__name__, rank, world, folder, limit]
            with log.open("wb") as stderr:
                command = [sys.executable, __file__, *map(str, arguments)]
                processes.append(subprocess.Popen(command, env=env, stdout=stderr, stderr=stderr))
        while True:
            statuses = [process.poll() for process in processes]
            failed = all_succeed and any(status not in (None, 0) for status in statuses)
            late = None in statuses and time.monotonic() > deadline
            if failed or late:
                what = "a rank failed" if failed else f"a rank still runs after {limit} seconds"
                raise AssertionError(f"{what}; exit statuses {statuses}{_what_was_written(logs)}")
            if None not in statuses:
                return [Ended(status, log.read_text()) for status, log in zip(statuses, logs, strict=True)]
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _what_was_written(logs: list[Path]) -> str:
    return "".join(f"\n---- rank {rank}\n{log.read_text()[-4000:]}" for rank, log in enumerate(logs))


def _rank(module: str, name: str, rank: int, world: int, folder: Path, limit: float) -> None:
    """One rank; it never returns: gloo's threads can abort the interpreter while it shuts down."""
    status = 1
    try:
        faulthandler.dump_traceback_later(0.95 * limit)
        work = getattr(importlib.import_module(module), name)
        store, timeout = f"file://{folder}/store", timedelta(seconds=120)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
        torch.save(work(rank, world), folder / f"result-{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    module, name, rank, world, folder, limit = sys.argv[1:]
    _rank(module, name, int(rank), int(world), Path(folder), float(limit))
