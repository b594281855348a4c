"""The tests here compare with released packages of other trainers. `make test-peers` installs those and runs them."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

PEERS = ("liger_kernel", "openrlhf", "rsl_rl", "torchrl", "trl", "verl")
missing = [name for name in PEERS if importlib.util.find_spec(name) is None]
if os.environ.get("TRITON_INTERPRET") != "1":
    missing.append("TRITON_INTERPRET=1, for Liger's kernels without a GPU")
collect_ignore_glob = ["test_*.py"] if missing else []

if not missing:
    torch.set_num_threads(1)  # every tensor here is small


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if missing:
        terminalreporter.write_line(
            f"NOT RUN: tests/peers needs `make test-peers` (missing here: {', '.join(missing)})", red=True
        )
