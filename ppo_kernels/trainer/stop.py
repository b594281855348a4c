"""Ending in time: SIGTERM, SIGINT and SIGUSR1 ask a run to save and stop; a second one, later, ends it at once."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType

from ppo_kernels.trainer.ranks import Ranks

ECHO = 1.0  # seconds: a batch system and torchrun may each pass on the same signal
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop(Exception):
    """The run was asked to end; `signals` caught it."""


class Signals:
    """While it is open, signals set a flag, nothing more; all ranks agree on it where they meet anyway."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self.since = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught, self.since = number, time.monotonic()
        elif time.monotonic() > self.since + ECHO:
            os._exit(128 + number)

    def check(self, ranks: Ranks) -> None:
        """A collective. Raises Stop on every rank once one was asked."""
        if ranks.any(self.caught is not None):
            raise Stop(signal.Signals(self.caught).name if self.caught else "another rank was asked to end")
