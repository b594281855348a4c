"""Where the numbers go: metrics.jsonl (the truth), TensorBoard, events.log, and the screen or plain lines.

A disk that is full does not stop a run here: it is told on stderr, and what could not be written is kept and written
once there is room again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

from rich.console import Console

from ppo_kernels.trainer import faults
from ppo_kernels.trainer.screen import Screen, StageView, clock


class Stage(NamedTuple):
    name: str
    weight: float  # expected share of the run's time, for the time left

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "_")


class Sink:
    """A file that only grows. What cannot be written is kept, and goes out before whatever comes next."""

    def __init__(self, path: Path, fault: str | None = None) -> None:
        self.path, self.fault = path, fault
        self.file: Any = None
        self.waiting = b""
        self.refused = False
        self.write(b"")

    def write(self, data: bytes) -> None:
        self.waiting += data
        try:
            self.file = self.file or self.path.open("a+b", buffering=0)
            if data and self.fault:
                faults.point(self.fault)
            while self.waiting:  # a disk takes what it has room for, and complains only the next time
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not self.refused:
                complain(self.path, error)
            self.refused = True
        else:
            self.refused = False

    def cut(self, until: Callable[[bytes], int]) -> None:
        """`until`: of all there is, how many bytes to keep."""
        if self.file is None:
            return
        with contextlib.suppress(OSError):
            self.file.seek(0)
            written = self.file.readall()
            size = until(written + self.waiting)
            self.file.truncate(min(size, len(written)))
            self.waiting = self.waiting[: max(size - len(written), 0)]

    def sync(self) -> None:
        if self.file:
            with contextlib.suppress(OSError):
                os.fsync(self.file.fileno())

    def close(self) -> None:
        if self.file:
            self.file.close()


class Log:
    """One per run. Stages come in the order announced; between `begin` and `end`, `step` reports progress."""

    def __init__(
        self, folder: Path, title: str, stages: list[Stage], tensorboard: bool = True, silent: bool = False
    ) -> None:
        """`silent`: another rank writes."""
        self.folder, self.stages, self.silent = folder, stages, silent
        self.started = time.perf_counter()
        self.views = [StageView(stage.name) for stage in stages]
        self.at = -1
        self._rows: list[dict[str, Any]] = []
        self._seen_notes: dict[str, int] = {}
        self._metrics = Sink(Path(os.devnull) if silent else folder / "metrics.jsonl", "log:metrics")
        self._events = Sink(Path(os.devnull) if silent else folder / "events.log")
        self._writer: Any = None
        if tensorboard and not silent:
            self._open_tensorboard()
        console = Console(quiet=silent)
        self._screen = Screen(console, title) if console.is_terminal and not silent else None
        if self._screen is None:
            self._print(title)

    def __enter__(self) -> Log:
        if self._screen:
            self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._screen:
            self._draw()
            self._screen.stop()
        self._metrics.close()
        self._events.close()
        self._to_tensorboard(lambda writer: writer.close())

    # ---- stages -----------------------------------------------------------------------------------------------------

    def begin(self, name: str, total: int = 1) -> None:
        self.at += 1
        assert self.stages[self.at].name == name, f"stage {name} announced as {self.stages[self.at].name}"
        view = self.views[self.at]
        view.total, view.started, view.state = total, time.perf_counter(), "running"
        self._rows = []
        self._draw()

    def end(self, line: str = "") -> None:
        view = self.views[self.at]
        view.state, view.step, view.seconds = "done", view.total, time.perf_counter() - view.started
        view.line = line or view.line
        if self._screen is None:
            self._print(f"[{view.name}] {view.line} | {clock(view.seconds)}")
        self._draw()

    def step(self, number: int, values: dict[str, float], line: str) -> None:
        """One row of numbers for the running stage."""
        view = self.views[self.at]
        view.step, view.line, view.seconds = number, line, time.perf_counter() - view.started
        row = {"stage": self.stages[self.at].slug, "step": number, "seconds": round(self.elapsed(), 3), **values}
        self._write(row)
        if self._screen is None:
            self._print(f"[{view.name}] {line} | eta {clock(self.left())}")
        else:
            self._screen.values.update(values)
            for name, value in values.items():
                self._screen.curves.setdefault(name, []).append(value)
        self._draw()

    def replay(self, rows: list[dict[str, Any]], **marks: Any) -> None:
        """Rows that were written elsewhere before, so that this run's files are complete."""
        for row in rows:
            self._write(row | marks)

    def history(self) -> list[dict[str, Any]]:
        return self._rows

    def note(self, text: str, loud: bool = False) -> None:
        """Something worth saying: always in events.log, on screen the first three times; `loud`: on stderr."""
        text = " ".join(text.split())  # an event is a line
        self._events.write(f"{self.elapsed():.1f}\t{text}\n".encode())
        kind = re.sub(r"[\d.,%+-]+", "", text)[:40]  # the same remark with another number is the same remark
        self._seen_notes[kind] = self._seen_notes.get(kind, 0) + 1
        if loud and not self.silent:
            say(f"ppo-train: {text}", sys.stderr)
        elif self._seen_notes[kind] <= 3:
            if self._screen is None:
                self._print(f"  note: {text}")
            else:
                self._screen.note = text

    # ---- what a resume needs ----------------------------------------------------------------------------------------

    def size(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return os.fstat(self._metrics.file.fileno()).st_size if self._metrics.file and not self.silent else 0

    def sync(self) -> None:
        """To the disk: a checkpoint's rows must not be younger than the checkpoint."""
        self._metrics.sync()
        self._to_tensorboard(lambda writer: writer.flush())

    def cut(self, update: int) -> None:
        """Forgets every row after that update: those updates are made again."""
        if self.silent:
            return
        self._metrics.cut(lambda rows: _until(rows, update))
        if self._writer is not None:
            self._to_tensorboard(lambda writer: writer.close())
            self._open_tensorboard(purge_step=update + 1)

    # ---- time -------------------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        return time.perf_counter() - self.started

    def left(self) -> float:
        """Seconds left: this stage at its own pace, the later ones at the pace seen so far. 0 when unknown."""
        view, weight = self.views[self.at], self.stages[self.at].weight
        done = view.step / max(view.total, 1)
        if done == 0 or view.seconds == 0:
            return 0.0
        pace = view.seconds / (weight * done)  # seconds per unit of weight
        return view.seconds * (1 - done) / done + pace * sum(stage.weight for stage in self.stages[self.at + 1 :])

    # ---- sinks ------------------------------------------------------------------------------------------------------

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        self._metrics.write((json.dumps(row) + "\n").encode())
        if row["stage"] == "ppo":  # other stages count other steps, which a purge would take for updates
            self._to_tensorboard(
                lambda writer: [writer.add_scalar(name, row[name], row["step"]) for name in row if "/" in name]
            )

    def _open_tensorboard(self, purge_step: int | None = None) -> None:
        try:
            self._writer = _tensorboard_writer(self.folder / "tb", purge_step)
        except OSError as error:
            complain(self.folder / "tb", error)

    def _to_tensorboard(self, act: Callable[[Any], Any]) -> None:
        """Its thread is dead after the first error: there is no second try, until the next process."""
        try:
            if self._writer is not None:
                act(self._writer)
        except OSError as error:
            self._writer = None
            complain(self.folder / "tb", error)

    def _print(self, line: str) -> None:
        if not self.silent:
            say(line, sys.stdout)

    def _draw(self) -> None:
        if self._screen:
            self._screen.draw(self.views, self.elapsed(), self.left() if self.at >= 0 else 0.0)


def say(line: str, stream: TextIO) -> None:
    """A full disk, or a reader who left, ends the talk, not the run."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)


def complain(path: Path, error: OSError) -> None:
    say(f"ppo-train: {path} cannot be written ({error}); training goes on", sys.stderr)


def _until(rows: bytes, update: int) -> int:
    """How many bytes of metrics.jsonl come before the first row of a later update, or one that is not whole."""
    size = 0
    for line in rows.splitlines(keepends=True):
        try:
            row = json.loads(line)
            later = row["stage"] == "ppo" and row["step"] > update
        except (ValueError, TypeError, KeyError):  # damaged; not a reason to lose the rows behind it
            later = False
        if later or not line.endswith(b"\n"):
            break
        size += len(line)
    return size


def _tensorboard_writer(folder: Path, purge_step: int | None = None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)
