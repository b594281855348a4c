"""SIGTERM, SIGINT and SIGUSR1: what has been trained is saved, the exit code is 75, and a resume changes nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .runs import MARKS, MISCHIEF, Running, Trial, assert_same, outcome, verified

pytestmark = MARKS
pytest_plugins = ("trainer.run_fixtures",)


@pytest.mark.parametrize("name", ["TERM", "INT", "USR1"])
def test_a_signal_saves_the_update_it_comes_in(name: str, trial: Trial, expected: dict[str, Any]) -> None:
    stopped = trial.begin(MISCHIEF=f"7:{name}")
    assert stopped.code == 75
    assert f"asked to end (SIG{name}): saved, go on with ppo-train --resume {trial.folder}" in stopped.err
    assert verified(trial.folder) == ["step_000000", "step_000002", "step_000003"]
    resumed = trial.resume()
    assert (resumed.code, resumed.err) == (0, "ppo-train: resumed at update 3\n")
    assert_same(trial, expected)


@pytest.mark.parametrize(
    ("call", "saved"),
    [
        pytest.param(1, [], id="in the evaluation before, where nothing is to be saved"),
        pytest.param(6, ["step_000000", "step_000002"], id="in an evaluation between updates"),
        pytest.param(8, ["step_000002", "step_000004"], id="in the last update"),
        pytest.param(10, ["step_000002", "step_000004"], id="in the evaluation after"),
    ],
)
def test_a_signal_at_other_times(call: int, saved: list[str], trial: Trial, expected: dict[str, Any]) -> None:
    assert trial.begin(MISCHIEF=f"{call}:TERM").code == 75
    assert verified(trial.folder) == saved
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_a_signal_while_sampling_ends_the_rollout_and_saves_what_came_before(
    models: Path, finished: Trial, tmp_path: Path
) -> None:
    """Four conversations each: both sets before, the curve, updates 1 and 2; the 22nd is the second of update 3."""
    settings = [f"data.environment={MISCHIEF}:World", "save.every=100", "eval.every=100"]
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight, stopped = (Trial(models, tmp_path / name, *settings) for name in ("straight", "stopped"))
    assert straight.begin().code == 0
    assert stopped.begin(WORLD="22:TERM").code == 75
    assert [row["step"] for row in stopped.rows()] == [1, 2]
    assert stopped.resume().err == "ppo-train: resumed at update 2\n"
    assert_same(stopped, outcome(straight.folder))


def test_signals_again_and_again_change_nothing(trial: Trial, expected: dict[str, Any]) -> None:
    """Each process is asked to end in its first update; the last two, in the evaluation after."""
    codes = [trial.begin(MISCHIEF="4:TERM").code]
    codes += [trial.resume(MISCHIEF="1:TERM").code for _ in range(5)]
    assert codes == [75] * 6
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_a_reward_function_that_raises_costs_no_update(trial: Trial, expected: dict[str, Any]) -> None:
    """In update 4: update 3 was not due to be saved; and twice in the evaluation after it."""
    ended = trial.begin(MISCHIEF="8:raise")
    assert ended.code == 2
    assert "reward.function raised ConnectionError: the judge does not answer; once mended, go on with" in ended.err
    assert verified(trial.folder)[-1] == "step_000003"
    assert trial.resume(MISCHIEF="1:raise").code == 2
    for call in (2, 1):
        assert trial.resume(MISCHIEF=f"{call}:raise").code == 2
        assert verified(trial.folder)[-1] == "step_000004"
        assert [row["step"] for row in trial.rows()] == [1, 2, 3]
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_an_evaluation_that_fails_between_updates_is_made_again(trial: Trial, expected: dict[str, Any]) -> None:
    trial.overrides += ["save.every=100"]
    assert trial.begin(MISCHIEF="6:raise").code == 2
    assert verified(trial.folder) == ["step_000000", "step_000002"]
    assert trial.resume("save.every=2", fault="log:metrics:2").code == -signal.SIGKILL
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_a_second_signal_ends_it_at_once(trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    flag = tmp_path / "asleep"
    running = trial.beginning(MISCHIEF="7:sleep", ASLEEP=str(flag))
    wait_for(flag, running)
    running.send(signal.SIGTERM)
    time.sleep(0.2)
    running.send(signal.SIGTERM)  # the same, passed on twice
    time.sleep(1.2)
    assert running.alive()
    running.send(signal.SIGTERM)
    assert running.wait(limit=5).code == 128 + signal.SIGTERM
    assert verified(trial.folder) == ["step_000000", "step_000002"]
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_a_signal_from_outside_waits_for_the_update(trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    flag = tmp_path / "asleep"
    running = trial.beginning(MISCHIEF="8:sleep", ASLEEP=str(flag))
    wait_for(flag, running)
    running.send(signal.SIGINT)
    time.sleep(0.2)
    flag.unlink()
    assert running.wait().code == 75
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_asked_to_end_on_a_full_disk_it_does_not_say_that_it_saved(trial: Trial, expected: dict[str, Any]) -> None:
    stopped = trial.begin("save:state:3:full", MISCHIEF="7:TERM")
    assert stopped.code == 5
    assert "asked to end, but update 3 could not be saved; make room, then go on with" in stopped.err
    assert trial.resume().code == 0
    assert_same(trial, expected)


def wait_for(flag: Path, running: Running) -> None:
    deadline = time.monotonic() + 60
    while not flag.exists():
        assert time.monotonic() < deadline, running.wait(limit=0)
        time.sleep(0.005)
