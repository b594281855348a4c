"""Shared fixtures: seeds, the device and backend under test, loud GPU skips.

PPO_KERNELS_TEST_DEVICE=cuda runs the semantics on a GPU; PPO_KERNELS_BACKEND and PPO_KERNELS_ISA pick what is tested.
PPO_KERNELS_TEST_SHARD=i/n runs one n-th of the tests, so that n processes share them.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

try:
    import hypothesis
except ImportError:
    hypothesis = None

DEVICE = os.environ.get("PPO_KERNELS_TEST_DEVICE", "cpu")
BACKEND = os.environ.get("PPO_KERNELS_BACKEND", "native" if DEVICE == "cpu" else "triton")

INTERPRETER = BACKEND == "triton" and DEVICE == "cpu"
SHARD, SHARDS = (int(x) for x in os.environ.get("PPO_KERNELS_TEST_SHARD", "0/1").split("/"))

if hypothesis is not None:
    hypothesis.settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
    )
    hypothesis.settings.load_profile("repeatable")
    collect_ignore: list[str] = []
else:
    here = Path(__file__).parent
    collect_ignore = [str(p) for p in sorted(here.rglob("test_*.py")) if "\nfrom hypothesis" in p.read_text()]


def pytest_configure(config: pytest.Config) -> None:
    if INTERPRETER:
        import interpreter

        interpreter.hurry()
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "cpu_only(reason): has no meaning on a GPU, for the reason given")
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shards: list[list[pytest.Item]] = [[] for _ in range(SHARDS)]
    for item in items:
        shards[zlib.crc32(item.nodeid.encode()) % SHARDS].append(item)
    items[:] = shards.pop(SHARD)
    config.hook.pytest_deselected(items=[item for others in shards for item in others])
    no_gpu = pytest.mark.skip(reason="NOT RUN: needs a CUDA device and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        cpu_only = item.get_closest_marker("cpu_only")
        if cpu_only and DEVICE != "cpu":
            item.add_marker(pytest.mark.skip(reason=cpu_only.args[0]))


def pytest_report_header() -> str:
    return f"ppo_kernels under test: device={DEVICE} backend={BACKEND} isa={os.environ.get('PPO_KERNELS_ISA', 'best')}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for path in collect_ignore:
        name = os.path.relpath(path)
        terminalreporter.write_line(f"NOT RUN: {name} needs hypothesis, which is not installed", red=True)


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
def not_interpreted() -> None:
    """For tests of what Triton's interpreter cannot do."""
    if INTERPRETER:
        pytest.skip("Triton's interpreter keeps global state: it runs in one thread, and needs triton")


@pytest.fixture
def same_bits_promised() -> None:
    """For tests of bitwise equality between differently shaped calls."""
    if BACKEND == "reference":
        pytest.skip(
            "the reference backend is plain PyTorch, whose reductions may round differently for different shapes"
        )
