"""The Triton kernels by themselves, in Triton's interpreter: TRITON_INTERPRET=1, set before anything imports triton."""

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="NOT RUN: needs a process with TRITON_INTERPRET=1 (make test starts one)")
    for item in items:
        if "tests/triton/" in item.path.as_posix():
            item.add_marker(skip)
