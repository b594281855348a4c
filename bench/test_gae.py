"""GAE against the usual loop over time."""

from typing import Any

import baselines
import pytest
import torch
from race import race

from ppo_kernels import gae

SHAPES = [(256, 4096), (64, 1024), (8, 32768), (4096, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=[f"B{b}-T{t}" for b, t in SHAPES])
def test_gae(benchmark: Any, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    expected = baselines.gae(rewards.double(), values.double(), 0.99, 0.95)[0]
    torch.testing.assert_close(
        gae(rewards, values, gamma=0.99, lam=0.95).advantages.double(), expected, rtol=0, atol=1e-5
    )
    contenders = {
        "copy": lambda: (rewards.clone(), values.clone()),
        "eager": lambda: baselines.gae(rewards, values, 0.99, 0.95),
        "ours": lambda: gae(rewards, values, gamma=0.99, lam=0.95),
    }
    race(benchmark, contenders, lambda: None)
