"""A disk that is full: training goes on and says so, no checkpoint is lost, and in the end nothing is missing."""

from __future__ import annotations

import os
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from ppo_kernels.trainer import faults

from . import mischief
from .runs import MARKS, Trial, assert_same, sha256, verified

pytestmark = MARKS
pytest_plugins = ("trainer.run_fixtures",)


def count(folder: Path, file: Path) -> None:
    """At every point that the run passes, writes down how many checkpoints verify."""
    passed = faults.point

    def point(name: str) -> None:
        with file.open("a") as lines:
            lines.write(f"{len(verified(folder))}\n")
        passed(name)

    faults.point = point


def no_room_for_tokenizers(place: str) -> None:
    write = PreTrainedTokenizerFast.save_pretrained

    def save(self: Any, folder: Path) -> Any:
        if place in str(folder):
            mischief.limit_files(3000)
        try:
            return write(self, folder)
        finally:
            mischief.limit_files(resource.RLIM_INFINITY)

    PreTrainedTokenizerFast.save_pretrained = save


def write_to_a_full_disk(descriptor: int) -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)


@pytest.mark.parametrize("stage", ["begin", "state", "actor", "manifest", "rename", "renamed"])
def test_a_save_that_fails_loses_nothing(stage: str, trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    ended = trial.begin(f"save:{stage}:2:full", prepare=partial(count, trial.folder, counts))
    assert ended.code == 0
    assert "checkpoint step_000002 could not be written ([Errno 28] No space left on device" in ended.err
    assert "training goes on without it" in ended.err
    numbers = [int(line) for line in counts.read_text().split()]
    assert 0 not in numbers[numbers.index(1) :]
    assert_same(trial, expected, checkpoints=False)
    assert verified(trial.folder)[-1] == "step_000004"


def test_a_checkpoint_that_cannot_be_pruned_is_no_failure(trial: Trial, expected: dict[str, Any]) -> None:
    ended = trial.begin("save:prune:1:full")
    assert (ended.code, ended.err) == (0, "")
    assert_same(trial, expected)


@pytest.mark.parametrize("fault", ["run:folder:1", "run:before:1", "save:state:0", "end:final:1", "end:report:1"])
def test_where_the_run_cannot_do_without_it_ends_and_goes_on_later(
    fault: str, trial: Trial, expected: dict[str, Any]
) -> None:
    ended = trial.begin(f"{fault}:full")
    assert ended.code == 5
    then = "begin again" if fault == "run:folder:1" else f"go on with ppo-train --resume {trial.folder}"
    assert f"make room, then {then}" in ended.err
    assert trial.going_on().wait().code == 0
    assert_same(trial, expected)


def test_a_best_actor_that_could_not_be_written_is_not_taken_for_the_best(
    trial: Trial, expected: dict[str, Any]
) -> None:
    ended = trial.begin("best:swap:1:full")
    assert ended.code == 0
    assert "the best actor could not be written" in ended.err
    assert_same(trial, expected, checkpoints=False)


def test_three_saves_in_a_row_that_fail_end_the_run(trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    """Files cannot grow from the 5th call of the reward function on: everything that is written is cut short."""
    trial.overrides += ["save.every=1", "log.tensorboard=true"]
    counts = tmp_path / "counts"
    ended = trial.begin(MISCHIEF="5:full", prepare=partial(count, trial.folder, counts))
    assert ended.code == 5, ended
    for update in (2, 3, 4):
        assert f"checkpoint step_{update:06d} could not be written" in ended.err
    assert "three checkpoints in a row could not be written" in ended.err
    assert f"{trial.folder / 'metrics.jsonl'} cannot be written" in ended.err
    assert verified(trial.folder) == ["step_000000", "step_000001"]
    assert trial.resume().code == 0
    assert_same(trial, expected, checkpoints=False)


def test_with_room_again_nothing_is_missing(trial: Trial, expected: dict[str, Any]) -> None:
    """The row that was cut in two and those behind it are written when there is room."""
    trial.overrides += ["save.every=1", "log.tensorboard=true"]
    ended = trial.begin(MISCHIEF="5:full,8:room")
    assert ended.code == 0, ended
    assert ended.err.count("metrics.jsonl cannot be written") == 1
    assert verified(trial.folder) == ["step_000001", "step_000004"]
    assert_same(trial, expected, checkpoints=False)


def test_a_row_that_waited_is_written_before_the_next(trial: Trial, expected: dict[str, Any]) -> None:
    ended = trial.begin("log:metrics:2:full")
    assert ended.code == 0
    assert f"{trial.folder / 'metrics.jsonl'} cannot be written" in ended.err
    assert_same(trial, expected)


def test_files_that_can_never_be_written_are_done_without(trial: Trial, expected: dict[str, Any]) -> None:
    assert trial.begin("update:logged:1").code == -signal.SIGKILL
    for name in ("metrics.jsonl", "events.log", "tb"):
        (trial.folder / name).unlink(missing_ok=True)
        (trial.folder / name).touch() if name == "tb" else (trial.folder / name).mkdir()
    ended = trial.resume("log.tensorboard=true")
    assert ended.code == 0
    for name in ("metrics.jsonl", "events.log", "tb"):
        assert ended.err.count(f"{trial.folder / name} cannot be written") == 1
        (trial.folder / name).rmdir() if name != "tb" else (trial.folder / name).unlink()
    (trial.folder / "metrics.jsonl").touch()
    rows = {key: value for key, value in expected.items() if not key.startswith("row ")}
    assert_same(trial, rows)


def test_a_best_actor_that_could_not_be_replaced_is_still_there(trial: Trial) -> None:
    assert trial.begin("best:swap:2:full").code == 0
    best, second = (trial.folder / name / "model.safetensors" for name in ("best", "checkpoints/step_000002/actor"))
    assert sha256(best) == sha256(second)


@pytest.mark.parametrize(("place", "code"), [("step_000002", 0), ("final", 5)])
def test_a_tokenizer_that_cannot_be_written_is_a_full_disk_too(
    place: str, code: int, trial: Trial, expected: dict[str, Any]
) -> None:
    """It says so in an Exception of no kind."""
    ended = trial.begin(prepare=partial(no_room_for_tokenizers, place))
    assert ended.code == code
    assert "File too large (os error 27)" in ended.err
    if code:
        assert trial.resume().code == 0
    assert_same(trial, expected, checkpoints=False)


@pytest.mark.parametrize("number", [1, 2])
def test_nobody_has_to_listen(number: int, trial: Trial, expected: dict[str, Any]) -> None:
    """Output goes to a file on the full disk."""
    assert trial.begin("save:state:2:full", prepare=partial(write_to_a_full_disk, number)).code == 0
    assert_same(trial, expected, checkpoints=False)
