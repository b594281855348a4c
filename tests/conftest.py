"""Shared fixtures: seeds, the device and backend under test, loud GPU skips.

PPO_KERNELS_TEST_DEVICE=cuda runs the semantics on a GPU; PPO_KERNELS_BACKEND and PPO_KERNELS_ISA pick what is tested.
"""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

DEVICE = os.environ.get("PPO_KERNELS_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("PPO_KERNELS_BACKEND", "native" if DEVICE == "cpu" else "triton")

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "cpu_only(reason): has no meaning on a GPU, for the reason given")
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="NOT RUN: needs a CUDA device and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        cpu_only = item.get_closest_marker("cpu_only")
        if cpu_only and DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=cpu_only.args[0]))


def pytest_report_header() -> str:
    return f"ppo_kernels under test: device={DEVICE} backend={BACKEND} isa={os.environ.get('PPO_KERNELS_ISA', 'best')}"


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Every test draws from torch's generator seeded by its own name, so that running it alone changes nothing."""
    value = zlib.crc32(request.node.nodeid.split("::", 1)[-1].encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def threads():
    """Restores torch's thread count for tests that change it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def fused_kernels() -> None:
    """For tests of what only a fused kernel can do."""
    if BACKEND == "reference":
        pytest.skip("the reference backend is plain PyTorch: it materialises log_softmax")


@pytest.fixture
def same_bits_promised() -> None:
    """For tests of bitwise equality between differently shaped calls."""
    if BACKEND == "reference":
        pytest.skip(
            "the reference backend is plain PyTorch, whose reductions may round differently for different shapes"
        )
