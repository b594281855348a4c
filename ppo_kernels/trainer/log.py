"""Where the numbers go: metrics.jsonl (the truth), TensorBoard, events.log, and the screen or plain lines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from rich.console import Console

from ppo_kernels.trainer.screen import Screen, StageView, clock


class Stage(NamedTuple):
    name: str
    weight: float  # expected share of the run's time, for the time left

    @property
    def slug(self) -> str:
        return self.name.lower().replace(" ", "_")


class Log:
    """One per run. Stages come in the order announced; between `begin` and `end`, `step` reports progress."""

    def __init__(self, folder: Path, title: str, stages: list[Stage], tensorboard: bool = True) -> None:
        self.folder, self.stages = folder, stages
        self.started = time.perf_counter()
        self.views = [StageView(stage.name) for stage in stages]
        self.at = -1
        self._rows: list[dict[str, Any]] = []
        self._seen_notes: dict[str, int] = {}
        self._metrics = (folder / "metrics.jsonl").open("a", buffering=1)
        self._events = (folder / "events.log").open("a", buffering=1)
        self._writer = _tensorboard_writer(folder / "tb") if tensorboard else None
        console = Console()
        self._screen = Screen(console, title) if console.is_terminal else None
        if self._screen is None:
            print(title, flush=True)

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
            print(f"[{view.name}] {view.line} | {clock(view.seconds)}", flush=True)
        self._draw()

    def step(self, number: int, values: dict[str, float], line: str) -> None:
        """One row of numbers for the running stage."""
        view = self.views[self.at]
        view.step, view.line, view.seconds = number, line, time.perf_counter() - view.started
        row = {"stage": self.stages[self.at].slug, "step": number, "seconds": round(self.elapsed(), 3), **values}
        self._write(row)
        if self._screen is None:
            print(f"[{view.name}] {line} | eta {clock(self.left())}", flush=True)
        else:
            self._screen.values.update(values)
            for name, value in values.items():
                self._screen.curves.setdefault(name, []).append(value)
        self._draw()

    def replay(self, rows: list[dict[str, Any]]) -> None:
        """Rows of an earlier run whose model is reused, so that this run's files are complete."""
        for row in rows:
            self._write(row | {"cached": True})

    def history(self) -> list[dict[str, Any]]:
        return self._rows

    def note(self, text: str) -> None:
        """Something worth saying: always in events.log, on screen the first three times it is said."""
        self._events.write(f"{self.elapsed():.1f}\t{text}\n")
        kind = text[:24]
        self._seen_notes[kind] = self._seen_notes.get(kind, 0) + 1
        if self._seen_notes[kind] > 3:
            return
        if self._screen is None:
            print(f"  note: {text}", flush=True)
        else:
            self._screen.note = text

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
        self._metrics.write(json.dumps(row) + "\n")
        if self._writer is not None:
            for name, value in row.items():
                if "/" in name:
                    self._writer.add_scalar(name, value, row["step"])

    def _draw(self) -> None:
        if self._screen:
            self._screen.draw(self.views, self.elapsed(), self.left() if self.at >= 0 else 0.0)


def _tensorboard_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder))
