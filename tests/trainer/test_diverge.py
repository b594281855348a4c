"""What is not finite, or explodes, is not learnt: steps are left out, the run goes back, and in the end gives up."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from ppo_kernels.trainer.checkpoint import is_due

from .runs import MARKS, Trial, assert_same, outcome, sha256, untimed, verified

pytestmark = MARKS
pytest_plugins = ("trainer.run_fixtures",)


class Bad(NamedTuple):
    """A run whose batch of update 3 has a score that is no number, whenever it is drawn."""

    trial: Trial
    expected: dict[str, Any]
    third: str  # the digest of that batch
    fourth: str  # and of the one after, when nothing is wrong


@pytest.fixture(scope="module")
def bad(models: Path, finished: Trial, tmp_path_factory: pytest.TempPathFactory) -> Bad:
    place = tmp_path_factory.mktemp("bad")
    for name in ("good", "bad"):
        (place / name).mkdir()
    good, trial = Trial(models, place / "good"), Trial(models, place / "bad")
    assert good.begin(RECORD=str(place / "digests")).code == 0
    digests = (place / "digests").read_text().split()
    third, fourth = digests[1 + 6], digests[1 + 7]  # a check before the run comes first
    assert trial.begin(MISCHIEF=f"{third}:nan").code == 0
    return Bad(trial, outcome(trial.folder), third, fourth)


def finite(folder: Path) -> bool:
    return all(bool(x.isfinite().all()) for path in folder.rglob("*.safetensors") for x in load_file(path).values())


# ---- rewards that are not finite ------------------------------------------------------------------------------------


def test_a_bad_batch_is_not_learnt_and_the_run_takes_another_way(bad: Bad, finished: Trial) -> None:
    assert (
        "update 3 diverged: scores of the rollout are not finite; back to update 2 with other samples and kl.coef 0.08"
    ) in bad.trial.events()
    rows, undisturbed = bad.trial.rows(), finished.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [untimed(row) for row in rows[:2]] == [untimed(row) for row in undisturbed[:2]]
    assert [row["rollbacks"] for row in rows] == [0, 0, 1, 1]
    assert [row["objective/kl_coef"] for row in rows] == [0.04, 0.04, 0.08, 0.08]
    assert rows[2]["objective/kl"] != undisturbed[2]["objective/kl"]
    assert finite(bad.trial.folder)


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("update:sampled:3", id="before it goes back"),
        pytest.param("update:sampled:4", id="after it went back, before anything is saved"),
        pytest.param("save:renamed:3", id="after the next checkpoint"),
    ],
)
def test_killed_around_a_rollback_it_ends_the_same(kill: str, bad: Bad, trial: Trial) -> None:
    assert trial.begin(kill, MISCHIEF=f"{bad.third}:nan").code == -signal.SIGKILL
    assert trial.resume(MISCHIEF=f"{bad.third}:nan").code == 0
    assert_same(trial, bad.expected)


def test_asked_to_end_just_before_a_rollback_it_goes_back_no_less_far(
    bad: Bad, models: Path, finished: Trial, tmp_path: Path
) -> None:
    """What a signal saved, update 3, is not where the undisturbed run goes back to: that is update 2."""
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight, stopped = (Trial(models, tmp_path / name) for name in ("straight", "stopped"))
    assert straight.begin(MISCHIEF=f"{bad.fourth}:nan").code == 0
    assert "update 4 diverged" in straight.events()
    assert stopped.begin(MISCHIEF=f"7:TERM,{bad.fourth}:nan").code == 75
    assert verified(stopped.folder)[-1] == "step_000003"
    assert stopped.resume(MISCHIEF=f"{bad.fourth}:nan", fault="update:logged:1").code == -signal.SIGKILL
    assert stopped.resume(MISCHIEF=f"{bad.fourth}:nan").code == 0
    assert_same(stopped, outcome(straight.folder))


def test_what_a_signal_saved_is_gone_once_the_run_went_back_behind_it(trial: Trial, expected: dict[str, Any]) -> None:
    """Update 3 was saved, 4 diverges, update 3 is made again otherwise, and killed: a row of one and weights of the
    other must not meet."""
    assert trial.begin(MISCHIEF="7:TERM").code == 75
    assert trial.resume(MISCHIEF="1:nan", fault="update:logged:1").code == -signal.SIGKILL
    assert verified(trial.folder) == ["step_000000", "step_000002"]
    assert trial.resume().code == 0
    assert_same(trial, expected)


@pytest.mark.parametrize("what", ["nan", "inf"])
def test_bad_forever_it_gives_up_and_keeps_the_batch(what: str, trial: Trial, expected: dict[str, Any]) -> None:
    ended = trial.begin(MISCHIEF=f"4+:{what}")
    assert ended.code == 3
    kept = trial.folder / "diverged_000001.pt"
    assert f"update 1 diverged (scores of the rollout are not finite) after 2 rollbacks; its " \
        f"batch is in {kept}" in ended.err  # fmt: skip
    assert [line.rpartition("kl.coef ")[2] for line in trial.events().splitlines() if "back to" in line] == [
        "0.08", "0.16"
    ]  # fmt: skip
    batch = torch.load(kept)
    assert batch["scores"].shape == (4,)
    assert not batch["scores"].isfinite().all()
    assert batch["ids"].shape[1] > batch["mask"].shape[1]
    assert verified(trial.folder) == ["step_000000"]
    assert not (trial.folder / "final").exists()
    assert trial.resume().code == 0  # with a reward that is well again, nothing was lost
    assert_same(trial, expected)


def test_without_rollbacks_it_gives_up_at_once(bad: Bad, trial: Trial) -> None:
    trial.overrides += ["guard.max_rollbacks=0"]
    ended = trial.begin(MISCHIEF=f"{bad.third}:nan")
    assert ended.code == 3
    assert f"after 0 rollbacks; its batch is in {trial.folder / 'diverged_000003.pt'}" in ended.err
    assert trial.resume("guard.max_rollbacks=2", MISCHIEF=f"{bad.third}:nan").code == 0
    assert_same(trial, bad.expected)


def test_a_held_out_reward_that_is_no_number_is_not_the_best(trial: Trial, finished: Trial) -> None:
    """Nothing is greater than NaN: it would stay the best for ever."""
    assert trial.begin(MISCHIEF="6:nan").code == 0
    assert [row["heldout/reward"] for row in trial.rows()][1:3] == [pytest.approx(float("nan"), nan_ok=True)] * 2
    final, best = (trial.folder / name / "model.safetensors" for name in ("final", "best"))
    assert sha256(best) == sha256(final) == sha256(finished.folder / "final" / "model.safetensors")


# ---- steps that explode ---------------------------------------------------------------------------------------------

EXPLOSIVE = ("optim.actor_lr=0.1", "guard.max_ratio=1.2")


def test_steps_that_explode_are_left_out_and_counted(trial: Trial) -> None:
    """Of the two steps of an update the first has ratio 1 and is taken: it leads too far, and the second is not."""
    trial.overrides += [*EXPLOSIVE, "guard.max_skips=9"]
    assert trial.begin().code == 0
    assert [row["optimizer_steps"] + row["skipped_steps"] for row in trial.rows()] == [2] * 4
    assert sum(row["skipped_steps"] for row in trial.rows()) > 0
    assert [row["val/ratio_max"] > 1.2 for row in trial.rows()] == [row["skipped_steps"] > 0 for row in trial.rows()]
    assert "optimizer steps left out" in trial.events()
    assert finite(trial.folder)


def test_a_checkpoint_in_the_middle_of_left_out_steps_is_none_to_go_back_to(trial: Trial) -> None:
    """It is one to resume from."""
    trial.overrides += [*EXPLOSIVE, "save.every=1", "train.updates=3", "guard.max_skips=9"]
    assert trial.begin("save:begin:4").code == -signal.SIGKILL
    skipped = {row["step"]: row["skipped_steps"] > 0 for row in trial.rows()}
    newest = trial.checkpoints()[-1]
    assert newest.name == "step_000002"
    assert skipped[2]
    assert not is_due(newest)
    assert trial.resume().err == "ppo-train: resumed at update 2\n"


def test_steps_left_out_in_updates_one_after_the_other_are_in_a_row(trial: Trial) -> None:
    """Each update begins with a step from a ratio of 1, which says nothing about the policy."""
    trial.overrides += [*EXPLOSIVE, "guard.max_rollbacks=0"]
    ended = trial.begin()
    assert ended.code == 3
    assert "3 optimizer steps in a row left out: a token's ratio is" in ended.err


def test_explosions_in_a_row_end_the_run(trial: Trial) -> None:
    trial.overrides += [*EXPLOSIVE, "guard.max_skips=1", "guard.max_rollbacks=1"]
    ended = trial.begin()
    assert ended.code == 3
    assert "1 optimizer steps in a row left out: a token's ratio is" in ended.err
    assert "above guard.max_ratio=1.2" in ended.err
    assert trial.events().count("with other samples and kl.coef") == 1
    assert finite(trial.folder)
    assert torch.load(next(trial.folder.glob("diverged_*.pt")))["scores"].isfinite().all()


def test_weights_that_give_no_numbers_are_given_up_too(trial: Trial) -> None:
    """The first step is taken; the forward pass after it overflows, and so does the rollout of the next update, which
    has to draw tokens from NaN: that was an IndexError."""
    trial.overrides += ["optim.actor_lr=1.0e10", "guard.max_rollbacks=1"]
    ended = trial.begin()
    assert ended.code == 3
    assert "Traceback" not in ended.err
    places = [trial.folder / "checkpoints" / name for name in verified(trial.folder)]
    assert [place.name for place in places if is_due(place)] == ["step_000000"]
    assert finite(trial.folder)
