"""Random numbers as functions of what they are for (N+7).

No generator lives on between updates, so there is no state to save: any draw of a run can be made again, on any rank,
from the run's seed, the number of rollbacks so far (`stream`), the update and the row.
"""

from __future__ import annotations

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """One stream for each key, independent of all others."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


def uniforms(count: int, *key: int | str) -> torch.Tensor:
    """[count] fp32 in [0, 1)."""
    return torch.rand(count, generator=generator(*key))


def permutation(count: int, *key: int | str) -> torch.Tensor:
    """[count] int64."""
    return torch.randperm(count, generator=generator(*key))
