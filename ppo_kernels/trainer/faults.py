"""Points at which the tests end the process, to prove that nothing is lost there: PPO_KERNELS_FAULT=save:rename:2 kills
it, as kill -9 would, the second time it comes by `save:rename`; save:rename:2:full has the disk full there instead."""

from __future__ import annotations

import errno
import os
import signal

POINTS = (
    "run:folder", "run:before", "update:sampled", "update:trained", "log:metrics", "update:logged", "best:swap",
    "save:begin", "save:state", "save:actor", "save:manifest", "save:rename", "save:renamed", "save:prune",
    "end:final", "end:report",
)  # fmt: skip
_seen: dict[str, int] = {}


def point(name: str) -> None:
    wanted = os.environ.get("PPO_KERNELS_FAULT")
    if not wanted:
        return
    assert name in POINTS, name
    _seen[name] = _seen.get(name, 0) + 1
    stage, what, count, *kind = wanted.split(":")
    if name == f"{stage}:{what}" and (_seen[name] == int(count) or (kind and count == "0")):
        if kind:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        os.kill(os.getpid(), signal.SIGKILL)
