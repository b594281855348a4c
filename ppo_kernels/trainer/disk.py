"""Files that are whole or not there, and what a disk says when it is full."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ppo_kernels.trainer.ranks import RankError

NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def write_whole(path: Path, text: str) -> None:
    """The file has all of the text, or is as it was."""
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(text)
    sync(beside)
    beside.rename(path)
    sync(path.parent)


def read_json(path: Path) -> Any:
    """None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fingerprint(folder: Path, size: int = 1 << 16) -> str:
    """A digest of a directory's files by name, size, beginning and end: weights of many gigabytes in no time."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        length = path.stat().st_size
        digest.update(f"{path.name} {length}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(size))
            file.seek(max(length - size, 0))
            digest.update(file.read(size))
    return digest.hexdigest()


def sync(path: Path) -> None:
    """To the disk, not to its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_io(error: BaseException | None) -> bool:
    """A disk's error, as it is, as the reason of another, or told by another rank."""
    while error is not None:
        # tokenizers, like safetensors in Rust, has no exception of its own: it is all in the text
        if isinstance(error, OSError | RankError | SafetensorError) or "(os error " in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def no_room(error: BaseException) -> bool:
    """No space, file too large, or quota."""
    return getattr(error, "errno", None) in NO_ROOM or any(f"(os error {number})" in str(error) for number in NO_ROOM)
