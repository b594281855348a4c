"""A reward function, and an environment, that do harm at a given call. It is loaded by path, as a user's would be.

MISCHIEF="7:TERM,9+:nan" sends SIGTERM during the 7th call of this process and returns NaN from the 9th on;
MISCHIEF="<digest>:nan" returns NaN for the batch with that digest, whichever call it is. RECORD names a file that is
given the digest of every batch. WORLD="3:TERM" sends it when the 3rd conversation begins, before anything is sampled.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

calls = {"MISCHIEF": 0, "WORLD": 0}


def score(samples: list[dict[str, Any]]) -> list[float]:
    digest = hashlib.sha256(repr([sample["responses"] for sample in samples]).encode()).hexdigest()[:12]
    if "RECORD" in os.environ:
        with Path(os.environ["RECORD"]).open("a") as file:
            file.write(f"{digest}\n")
    values = [sample["response"].count("e") / (1 + len(sample["response"])) for sample in samples]
    if len(samples) > 2:  # two are a check before the run
        values[0] = harm("MISCHIEF", digest, values[0])
    return values


class World:
    """Answers nothing: each conversation is one turn, as it would be without it."""

    def __init__(self, row: dict[str, Any]) -> None:
        harm("WORLD", "", 0.0)

    def step(self, response: str) -> tuple[None, float]:
        return None, 0.0


def harm(name: str, digest: str, value: float) -> float:
    """Does what is due, if anything; returns the value, or what is to stand for it."""
    calls[name] += 1
    for item in filter(None, os.environ.get(name, "").split(",")):
        when, _, what = item.partition(":")
        if when in (str(calls[name]), digest) or (when.endswith("+") and calls[name] >= int(when[:-1])):
            if what in ("nan", "inf"):
                return float(what)
            HARM[what]()
    return value


def sleep() -> None:
    flag = Path(os.environ["ASLEEP"])
    flag.touch()
    while flag.exists():
        time.sleep(0.005)


def limit_files(size: int) -> None:
    """As on a full disk, a write takes what there is room for, and the next one fails."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fail() -> None:
    raise ConnectionError("the judge does not answer")


HARM = {
    "raise": fail,
    "TERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "INT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "USR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "sleep": sleep,
    "full": lambda: limit_files(3000),
    "room": lambda: limit_files(resource.RLIM_INFINITY),
}
