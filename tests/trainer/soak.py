"""Kills one run at every injected point and at random instants, and says whether it ended as one never killed.

python -m tests.trainer.soak [--kills 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from ppo_kernels.trainer import faults

from .runs import Running, Trial, differences, make_models, outcome


def soak(models: Path, place: Path, kills: int, seed: int, points: bool = False, loud: bool = False) -> list[str]:
    """What differs from a run never killed, and what was never passed; empty if all is well."""
    early = [point for point in faults.POINTS if points and not point.startswith("end:")]
    late = [point for point in faults.POINTS if points and point.startswith("end:")]
    updates = 6 + (2 * kills + len(early)) // 4
    trials = []
    for name in ("straight", "killed"):
        (place / name).mkdir()
        trials.append(Trial(models, place / name, f"train.updates={updates}", "save.every=1", "eval.every=1"))
    straight, killed = trials
    assert straight.begin().code == 0
    pace = (straight.rows()[-1]["seconds"] - straight.rows()[0]["seconds"]) / (updates - 1)
    rng, problems = random.Random(seed), []
    for number, point in enumerate([*early, *[""] * kills, *late], 1):
        if point:
            code = killed.going_on(f"{point}:1").wait().code
            if code != -signal.SIGKILL:
                problems.append(f"{point} was not passed: exit {code}")
        else:
            running = killed.going_on()
            for _ in range(rng.choice((0, 1, 2))):  # 0: killed while it starts
                wait_for_a_row(killed, running)
            with contextlib.suppress(AssertionError):  # killed when its time is over
                running.wait(limit=rng.uniform(0, 2 * pace))
        if loud:
            print(
                f"{number:3} {point or 'a random instant'}, then {[p.name for p in killed.checkpoints()]}", flush=True
            )
    ended = killed.going_on().wait()
    if ended.code:
        return [*problems, f"exit {ended.code}: {ended.err}"]
    return problems + differences(outcome(killed.folder), outcome(straight.folder))


def wait_for_a_row(trial: Trial, running: Running) -> None:
    metrics, size = trial.folder / "metrics.jsonl", sys.maxsize
    while running.alive():
        now = metrics.stat().st_size if metrics.exists() else 0
        if now > size:
            return
        size = now  # a resume cuts it first
        time.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        problems = soak(make_models(place), place, arguments.kills, arguments.seed, points=True, loud=True)
    print(*problems, "not the same" if problems else "bit for bit the same", sep="\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
