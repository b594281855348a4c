"""What a checkpoint can suffer on a disk: a resume sees it, says so, takes the one before, and never begins anew."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_kernels.trainer.checkpoint import verify

from .runs import MARKS, Trial, assert_same, sha256, tree, verified

pytestmark = MARKS
pytest_plugins = ("trainer.run_fixtures",)

FILES = ("state/__0_0.distcp", "state/.metadata", "actor/model.safetensors", "actor/config.json", "progress.json")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


WAYS: tuple[Callable[[Path], None], ...] = (truncate, empty, flip, Path.unlink)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_no_damage_is_overlooked(name: str, way: Callable[[Path], None], copy: Trial) -> None:
    newest = copy.checkpoints()[-1]
    assert verify(newest) == ""
    way(newest / name)
    assert name in verify(newest) or name == "manifest.json"
    assert verify(newest) != ""


def test_no_single_bit_is_overlooked_wherever_it_is(copy: Trial) -> None:
    """A flipped bit of the manifest may leave it saying the same, of any other file it may not."""
    rng, newest = random.Random(0), copy.checkpoints()[-1]
    whole = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json"}
    for path, data in whole.items():
        for _ in range(20):
            bit = rng.randrange(8 * len(data))
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            assert str(path.relative_to(newest)) in verify(newest)
        path.write_bytes(data)
    assert verify(newest) == ""


@pytest.mark.parametrize(
    ("name", "way"),
    [*zip(FILES, [flip, *WAYS], strict=True), ("manifest.json", truncate)],
)
def test_a_damaged_checkpoint_costs_the_updates_since_the_one_before(
    name: str, way: Callable[[Path], None], copy: Trial, expected: dict[str, Any]
) -> None:
    way(copy.checkpoints()[-1] / name)
    resumed = copy.resume()
    assert resumed.code == 0
    assert "ppo-train: checkpoint step_000004 cannot be used: " in resumed.err
    assert name in resumed.err
    assert "ppo-train: resumed at update 2\n" in resumed.err
    assert_same(copy, expected)


def test_with_every_checkpoint_damaged_nothing_is_touched(copy: Trial) -> None:
    first, second = copy.checkpoints()
    (first / "manifest.json").unlink()
    flip(second / "state" / "__0_0.distcp")
    before = tree(copy.folder)
    resumed = copy.resume()
    assert resumed.code == 4
    assert "none of the 2 checkpoints" in resumed.err
    assert "state/__0_0.distcp is not what was written" in resumed.err
    assert tree(copy.folder) == before


@pytest.mark.parametrize("gone", [[], ["metrics.jsonl"], ["best", "final", "summary.json"]])
def test_without_checkpoints_but_with_signs_of_updates_nothing_is_touched(gone: list[str], copy: Trial) -> None:
    (copy.folder / "checkpoints" / "step_000002").rename(copy.folder / "checkpoints" / "step_000002-mine")
    for name in ["checkpoints/step_000004", *gone]:
        path = copy.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = tree(copy.folder)
    resumed = copy.resume()
    assert resumed.code == 4
    assert "but no checkpoint in" in resumed.err
    assert tree(copy.folder) == before


def test_half_written_checkpoints_are_no_checkpoints(copy: Trial, expected: dict[str, Any]) -> None:
    """Even one that lacks nothing but its name; and one whose name is there while its files are not."""
    newest = copy.checkpoints()[-1]
    newest.rename(newest.with_name("tmp-step_000004"))
    shutil.copytree(copy.checkpoints()[0], newest.with_name("tmp-old-step_000004"))
    (newest / "state").mkdir(parents=True)
    resumed = copy.resume()
    assert resumed.code == 0
    assert "checkpoint step_000004 cannot be used: manifest.json is missing" in resumed.err
    assert_same(copy, expected)


def test_damage_found_again_and_again_never_costs_the_last_good_one(models: Path, tmp_path: Path) -> None:
    """Updates 3 and 4 are broken, and only two are to be kept: the new ones count, the broken ones do not."""
    settings = ["save.every=1", "save.keep=4"]
    trial = Trial(models, tmp_path, *settings)
    assert trial.begin().code == 0
    expected = sha256(trial.folder / "final" / "model.safetensors")
    for place in trial.checkpoints()[-2:]:
        flip(place / "actor" / "model.safetensors")
    for kill in ("save:renamed:1", "save:rename:1"):
        assert trial.resume("save.keep=2", fault=kill).code == -signal.SIGKILL
        assert verified(trial.folder)[-1] == "step_000003"
    assert trial.resume().code == 0
    assert verified(trial.folder) == ["step_000003", "step_000004"]
    assert sha256(trial.folder / "final" / "model.safetensors") == expected


def test_a_whole_checkpoint_of_other_models_is_refused(copy: Trial, models: Path, tmp_path: Path) -> None:
    """The directory that the configuration names holds another model now."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(models / "actor", tmp_path / "other")
    config = AutoConfig.from_pretrained(models / "actor")
    config.intermediate_size = 24
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    written = copy.folder / "config.yaml"
    written.write_text(written.read_text().replace(str(models / "actor"), str(tmp_path / "other")))
    before = tree(copy.folder)
    resumed = copy.resume()
    assert resumed.code == 4, resumed.err
    assert "step_000004 is whole, but is not of these models" in resumed.err
    assert tree(copy.folder) == before
