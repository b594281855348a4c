"""Where the numbers go: metrics.jsonl (the truth), TensorBoard, events.log, and the screen or plain lines.

A disk that is full does not stop a run here: the first row that cannot be written is reported, loudly.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console

from ppo_kernels.trainer import faults
from ppo_kernels.trainer.screen import Screen, StageView, clock


class Stage(NamedTuple):
    name: str
    weight: float  # expected share of the run's time, for the time left

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "_")


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
        self._broken = False
        self._tensorboard = tensorboard and not silent
        self._metrics = (Path(os.devnull) if silent else folder / "metrics.jsonl").open("ab", buffering=0)
        self._events = (Path(os.devnull) if silent else folder / "events.log").open("a", buffering=1)
        self._writer = _tensorboard_writer(folder / "tb") if self._tensorboard else None
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
        if self._writer is not None:
            self._writer.close()

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
        self._write_safely(self._events, f"{self.elapsed():.1f}\t{text}\n")
        kind = text[:24]
        self._seen_notes[kind] = self._seen_notes.get(kind, 0) + 1
        if loud and not self.silent:
            print(f"ppo-train: {text}", file=sys.stderr, flush=True)
        elif self._seen_notes[kind] <= 3:
            if self._screen is None:
                self._print(f"  note: {text}")
            else:
                self._screen.note = text

    # ---- what a resume needs ----------------------------------------------------------------------------------------

    def size(self) -> int:
        """Bytes of metrics.jsonl so far."""
        return self._metrics.tell() if not self.silent else 0

    def cut(self, size: int, step: int) -> None:
        """Forgets every row after the first `size` bytes: those updates are made again, from `step` on."""
        if self.silent:
            return
        path = self.folder / "metrics.jsonl"
        os.truncate(path, min(size, path.stat().st_size))
        self._metrics.seek(0, os.SEEK_END)
        if self._writer is not None:
            self._writer.close()
            self._writer = _tensorboard_writer(self.folder / "tb", purge_step=step + 1)

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
        self._write_safely(self._metrics, (json.dumps(row) + "\n").encode())
        faults.point("log:metrics")
        if self._writer is not None:
            try:
                for name, value in row.items():
                    if "/" in name:
                        self._writer.add_scalar(name, value, row["step"])
            except OSError as error:
                self._complain("TensorBoard's events", error)

    def _write_safely(self, file: Any, line: Any) -> None:
        try:
            file.write(line)
        except OSError as error:
            self._complain(file.name, error)

    def _complain(self, what: str, error: OSError) -> None:
        if not self._broken:
            print(f"ppo-train: {what} cannot be written ({error}); training goes on", file=sys.stderr, flush=True)
        self._broken = True

    def _print(self, line: str) -> None:
        if not self.silent:
            print(line, flush=True)

    def _draw(self) -> None:
        if self._screen:
            self._screen.draw(self.views, self.elapsed(), self.left() if self.at >= 0 else 0.0)


def _tensorboard_writer(folder: Path, purge_step: int | None = None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=purge_step)
