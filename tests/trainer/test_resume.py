"""Killed anywhere and resumed, a run ends bit for bit as if it had never been killed; and a resume never does harm."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ppo_kernels.trainer import faults, train
from ppo_kernels.trainer.settings import load, read_file

from .runs import MARKS, MISCHIEF, Trial, assert_same, differences, outcome, sha256, start, tree, untimed
from .soak import soak

pytestmark = MARKS
pytest_plugins = ("trainer.run_fixtures",)

KILLS = [
    "run:folder:1", "run:before:1", "save:begin:1", "save:state:1", "save:renamed:1",  # before there is a checkpoint
    "update:sampled:3", "update:trained:4", "log:metrics:2", "update:logged:3", "best:swap:2",  # which replaces one
    "save:state:2", "save:actor:2", "save:manifest:2", "save:rename:2", "save:renamed:2",
    "save:renamed:3", "save:prune:1",  # the third is the first to push one out
    "end:final:1", "end:report:1",
]  # fmt: skip


def test_every_point_is_passed() -> None:
    assert {kill.rpartition(":")[0] for kill in KILLS} == set(faults.POINTS)


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_at_any_point_changes_nothing(kill: str, trial: Trial, expected: dict[str, Any]) -> None:
    assert trial.begin(kill).code == -signal.SIGKILL
    assert trial.resume().code == 0
    assert_same(trial, expected)


def test_kills_in_a_row_change_nothing(trial: Trial, expected: dict[str, Any]) -> None:
    """Twice before the first checkpoint, twice in the same save, twice before the same save, and at the very end."""
    assert trial.begin("run:before:1").code == -signal.SIGKILL
    for kill in ("save:rename:1", "save:state:2", "save:rename:1", "update:logged:3", "update:logged:1", "end:final:1"):
        assert trial.resume(fault=kill).code == -signal.SIGKILL
    assert trial.resume().code == 0
    assert_same(trial, expected)


@pytest.mark.slow
def test_kills_at_random_instants_change_nothing(models: Path, finished: Trial, tmp_path: Path) -> None:
    assert soak(models, tmp_path, kills=5, seed=1) == []


@pytest.mark.slow
def test_the_real_command_goes_on_though_what_it_says_goes_to_a_full_disk(trial: Trial, finished: Trial) -> None:
    """Python itself ends with 120 when it cannot say all."""
    assert trial.begin("save:rename:2").code == -signal.SIGKILL
    command = [sys.executable, "-m", "ppo_kernels.trainer", "--resume", trial.folder]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"ppo-train: resumed at update 0\n")
    assert sha256(trial.folder / "final" / "model.safetensors") == sha256(finished.folder / "final/model.safetensors")


def test_a_demo_is_killed_while_it_makes_its_models_and_after(finished: Trial, tmp_path: Path) -> None:
    """In SFT, where nothing is kept; and before the first checkpoint, when the models are there."""
    demo = ["demo", "--smoke", "demo.sft.steps=4", "demo.reward.steps=4", "demo.cache=false", "train.updates=2",
            "rollout.prompts=4", "rollout.max_new_tokens=4", "eval.prompts=4", "eval.curve_prompts=4",
            "eval.samples=2", "log.tensorboard=false", "eval.metric=null"]  # fmt: skip
    killed, straight = tmp_path / "killed" / "smoke", tmp_path / "straight" / "smoke"
    assert start([*demo, f"out={straight.parent}"]).wait().code == 0
    assert start([*demo, f"out={killed.parent}"], PPO_KERNELS_FAULT="log:metrics:1").wait().code == -signal.SIGKILL
    resume = ["--resume", str(killed)]
    assert start(resume, PPO_KERNELS_FAULT="run:before:1").wait().code == -signal.SIGKILL
    assert start(resume, PPO_KERNELS_FAULT="save:state:2").wait().code == -signal.SIGKILL
    assert start(resume).wait().code == 0
    differ = differences(outcome(killed), outcome(straight))
    assert not differ, differ


# ---- what is in the folder ------------------------------------------------------------------------------------------


def test_rows_after_the_checkpoint_and_half_a_row_are_cut(trial: Trial, expected: dict[str, Any]) -> None:
    trial.begin("update:trained:4")
    with (trial.folder / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "ppo", "step": 4, "sec')
    assert trial.resume().code == 0
    assert [row["step"] for row in trial.rows()] == [1, 2, 3, 4]
    assert_same(trial, expected)


def test_a_damaged_row_does_not_cost_those_behind_it(copy: Trial) -> None:
    metrics = copy.folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([lines[0], b"#" + lines[1], *lines[2:]]))
    before = metrics.read_bytes()
    assert copy.resume().code == 0
    assert metrics.read_bytes() == before


def test_tensorboard_has_every_update_once(models: Path, finished: Trial, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trial = Trial(models, tmp_path, "log.tensorboard=true")
    assert trial.begin("update:logged:3").code == -signal.SIGKILL
    assert trial.resume(fault="save:renamed:1").code == -signal.SIGKILL
    assert trial.resume().code == 0
    events = EventAccumulator(str(trial.folder / "tb"))
    events.Reload()
    values = [(event.step, pytest.approx(event.value)) for event in events.Scalars("objective/scores")]
    assert [(row["step"], row["objective/scores"]) for row in finished.rows()] == values


def test_what_a_resume_finds_missing_it_makes_again(trial: Trial, expected: dict[str, Any]) -> None:
    trial.begin("update:sampled:3")
    (trial.folder / "before.json").write_text('{"heldout": {"estim')
    for name in ("env.json", "events.log", ".lock"):
        (trial.folder / name).unlink()
    shutil.rmtree(trial.folder / "best")
    (trial.folder / "tmp-best").mkdir()
    (trial.folder / "tmp-old-best").mkdir()
    assert trial.resume().code == 0
    assert_same(trial, {**expected, "best/model.safetensors": sha256(trial.folder / "best/model.safetensors")})


def test_a_finished_run_is_resumed_to_the_same_end(copy: Trial, expected: dict[str, Any]) -> None:
    assert copy.resume().code == 0
    assert_same(copy, expected)


def test_files_of_the_user_survive(copy: Trial, expected: dict[str, Any]) -> None:
    mine = ["notes.txt", "checkpoints/notes.txt", "checkpoints/tmp-mine/a", "checkpoints/step_000002-mine/a",
            "checkpoints/step_best/a", "checkpoints/tmp-notes", "final/README.md", "tmp-mine/a"]  # fmt: skip
    for name in mine:
        (copy.folder / name).parent.mkdir(exist_ok=True)
        (copy.folder / name).write_text(name)
    shutil.rmtree(copy.folder / "checkpoints" / "step_000004")
    assert copy.resume().code == 0
    assert [(copy.folder / name).read_text() for name in mine] == mine
    for name in mine:
        (copy.folder / name).unlink()
    assert_same(copy, {**expected, "unfinished": outcome(copy.folder)["unfinished"]})


def test_a_run_is_never_begun_where_one_is(finished: Trial) -> None:
    before = tree(finished.folder)
    ended = finished.begin()
    assert ended.code == 2
    assert f"{finished.folder} has 4 updates; use --resume {finished.folder}, or name=" in ended.err
    assert tree(finished.folder) == before


def test_a_folder_that_moved_goes_on(trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    trial.begin("save:renamed:2")
    trial.folder = trial.folder.rename(tmp_path / "elsewhere")
    assert trial.resume().code == 0
    assert_same(trial, expected)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_run_in_use_is_left_alone(trial: Trial, expected: dict[str, Any], tmp_path: Path) -> None:
    """While it has no checkpoint yet, too: what looks like a run that never began is being written."""
    flag = tmp_path / "asleep"
    first = trial.beginning(MISCHIEF="2:sleep", ASLEEP=str(flag))
    while not flag.exists():
        pass
    second = trial.resume()
    assert second.code == 2
    assert f"{trial.folder} is in use by another process" in second.err
    flag.unlink()
    assert first.wait().code == 0
    assert_same(trial, expected)


def test_a_resume_that_would_make_it_another_run_is_refused(finished: Trial) -> None:
    before = tree(finished.folder)
    ended = finished.resume("ppo.clip=0.3", "seed=2", "train.updates=6")
    assert ended.code == 2
    assert "ppo.clip: this run was started with 0.2, 0.3 would make it another run" in ended.err
    assert "seed: this run was started with 1, 2 would make it another run" in ended.err
    assert "train.updates:" not in ended.err
    assert tree(finished.folder) == before


def test_from_python_a_resume_is_refused_alike(finished: Trial, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    before, written = tree(finished.folder), read_file(finished.folder / "config.yaml")
    for override, folder in (("ppo.clip=0.3", finished.folder), ("seed=1", tmp_path), ("seed=1", tmp_path / "none")):
        assert train(load([override], written), resume=folder) == 2
    said = capsys.readouterr().err
    assert "ppo.clip: this run was started with 0.2, 0.3 would make it another run" in said
    assert said.count("is not a run") == 2
    assert tree(finished.folder) == before
    assert not (tmp_path / "none").exists()


def test_files_that_changed_since_the_run_began_are_named(models: Path, trial: Trial, tmp_path: Path) -> None:
    prompts, function = (tmp_path / name for name in ("prompts.jsonl", "reward.py"))
    shutil.copy(models / "prompts.jsonl", prompts)
    shutil.copy(MISCHIEF, function)
    trial.overrides += [f"data.train={prompts}", f"reward.function={function}:score"]
    assert trial.begin("save:renamed:2").code == -signal.SIGKILL
    assert trial.resume(fault="save:state:1").err == "ppo-train: resumed at update 2\n"
    prompts.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
    function.write_text(function.read_text() + "# changed\n")
    resumed = trial.resume()
    assert resumed.code == 0
    said = f"not to the bit what it would have been: data.train={prompts} has changed, reward.function={function}:score"
    assert f"ppo-train: {said} has changed\n" in resumed.err


def test_held_out_prompts_that_changed_are_judged_anew(models: Path, trial: Trial, tmp_path: Path) -> None:
    """Before and after are of the same prompts, and a resume comes to its end."""
    lines = (models / "prompts.jsonl").read_text().splitlines(keepends=True)
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("".join(lines[:3]))
    trial.overrides += [f"data.heldout={heldout}"]
    assert trial.begin("save:renamed:2").code == -signal.SIGKILL
    heldout.write_text("".join(lines[:2]))
    assert trial.resume().code == 0
    assert len((trial.folder / "samples.jsonl").read_text().splitlines()) == 2


def test_other_weights_under_the_same_name_are_named(models: Path, trial: Trial, tmp_path: Path) -> None:
    """A reference is in no checkpoint."""
    shutil.copytree(models / "actor", tmp_path / "reference")
    trial.overrides += [f"model.reference={tmp_path / 'reference'}"]
    assert trial.begin("save:renamed:2").code == -signal.SIGKILL
    weights = tmp_path / "reference" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert f"model.reference={tmp_path / 'reference'} has changed" in trial.resume().err


def test_fewer_updates_than_were_made_are_refused(finished: Trial) -> None:
    before = tree(finished.folder)
    ended = finished.resume("train.updates=3")
    assert (ended.code, ended.err) == (2, f"ppo-train: train.updates=3: {finished.folder} has made 4 updates\n")
    assert tree(finished.folder) == before


@pytest.mark.parametrize("text", [None, "", "name: tiny\nout: [", "name: tiny\nmodel: 5\n"])
def test_a_folder_without_a_whole_configuration_is_no_run(text: str | None, trial: Trial) -> None:
    trial.folder.mkdir(parents=True)
    (trial.folder / "env.json").touch()
    if text is not None:
        (trial.folder / "config.yaml").write_text(text)
    before = tree(trial.folder)
    ended = trial.resume()
    assert ended.code == 2
    assert "config.yaml" in ended.err or "model" in ended.err
    assert tree(trial.folder) == before


def test_a_folder_that_was_killed_before_its_configuration_says_what_to_do(trial: Trial) -> None:
    trial.folder.mkdir(parents=True)
    ended = trial.begin()
    assert ended.code == 2
    assert "is there, but not a run: config.yaml is missing; remove it, or use name=" in ended.err


# ---- more updates ---------------------------------------------------------------------------------------------------


def test_a_finished_run_goes_on_for_more_updates_and_remembers_how_many(copy: Trial, finished: Trial) -> None:
    """The learning rate is a function of train.updates: of 8, it is at update 5 what it was at update 3 of 4."""
    assert copy.resume("train.updates=8", fault="update:logged:3").code == -signal.SIGKILL
    assert "from here on train.updates=8 (was 4)" in copy.events()
    assert copy.resume().code == 0  # of 8, without being told again
    rows = copy.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [untimed(row) for row in rows[:4]] == [untimed(row) for row in finished.rows()]
    shares = (1, 0.75, 0.5, 0.25, 0.5, 0.375, 0.25, 0.125)
    assert [row["lr"] for row in rows] == [pytest.approx(1e-2 * share) for share in shares]
    assert [place.name for place in copy.checkpoints()] == ["step_000006", "step_000008"]


def test_with_a_constant_rate_more_updates_are_the_longer_run(models: Path, finished: Trial, tmp_path: Path) -> None:
    for name in ("long", "short"):
        (tmp_path / name).mkdir()
    longer = Trial(models, tmp_path / "long", "optim.schedule=constant", "train.updates=6")
    short = Trial(models, tmp_path / "short", "optim.schedule=constant", "train.updates=3")
    assert longer.begin().code == short.begin().code == 0
    assert short.resume("train.updates=6").code == 0
    assert outcome(short.folder)["final/model.safetensors"] == outcome(longer.folder)["final/model.safetensors"]
