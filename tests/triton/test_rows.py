"""How rows are cut up: every boundary of chunks, tiles, blocks and splits, at every alignment, against float64."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, reference

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("NOT RUN: needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton.language", reason="NOT RUN: triton is not installed")

from ppo_kernels import triton_kernels
from ppo_kernels.triton_kernels import launch

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = (1.0, None, math.inf)  # temperature, row_temperature, softcap


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 2 tiles of 32 lanes and splits of 2 blocks, so that short rows have several of each."""
    monkeypatch.setattr(launch, "MAX_LANES", 32)
    monkeypatch.setattr(launch, "MAX_UNROLL", 2)
    monkeypatch.setattr(launch, "MAX_BLOCKS", 2)
    launch.row_shape.cache_clear()
    yield
    launch.row_shape.cache_clear()


def at_offset(logits: torch.Tensor, offset: int) -> torch.Tensor:
    """The same logits, `offset` elements after a multiple of 16 bytes, rows 3 elements apart, with NaN around them."""
    n, vocab = logits.shape
    wide = torch.full((n * (vocab + 3) + 32,), torch.nan, dtype=logits.dtype)
    start = -wide.data_ptr() // wide.element_size() % (16 // wide.element_size()) + offset
    rows = wide.as_strided((n, vocab), (vocab + 3, 1), start)
    rows.copy_(logits)
    return rows


def edges(vocab: int) -> torch.Tensor:
    """Target columns next to every boundary there may be."""
    near = {0, 1, vocab - 1, vocab - 2, vocab // 2}
    near |= {edge + d for edge in range(0, vocab, 256) for d in (-1, 0)}
    return torch.tensor(sorted({y for y in near if 0 <= y < vocab}))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("vocab", "softcap"),
    [(v, math.inf) for v in (65, 72, 255, 256, 257, 511, 512, 513, 1023, 1024, 1031, 2048, 2049, 3000)]
    + [(v, 30.0) for v in (72, 513, 2049)],
)
def test_stats_at_every_boundary(vocab: int, softcap: float, dtype: torch.dtype, small_shapes: None) -> None:
    tokens = edges(vocab)
    logits = (torch.randn(len(tokens), vocab) * 3).to(dtype)
    logits[::3, : vocab // 2] = -torch.inf
    logits[1::3, tokens[1::3]] += 30
    tokens[::3] = vocab - 1
    per_row = torch.where(tokens % 2 == 0, 0.7, 1.3)
    got = triton_kernels.row_stats(logits, tokens, None, 1.0, per_row, softcap, vocab, False, True)
    want = reference.row_stats(logits.double(), tokens, None, 1.0, per_row, softcap, vocab, False)
    for name, g, w in zip(("logprob", "entropy", "max", "sum", "mean"), got, want, strict=True):
        relative = {"logprob": 2e-6, "entropy": 1e-6}.get(name, 5e-7)  # of -ln p, however small, far from other logits
        error = (g - w).abs() / w.abs().clamp(min=1e-30 if name == "logprob" else 1)
        assert error.max() <= relative, (name, float(error.max()))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", [65, 520, 1031])
def test_alignment_changes_no_bit(vocab: int, dtype: torch.dtype, small_shapes: None) -> None:
    logits, tokens = torch.randn(3, vocab).to(dtype), torch.tensor([0, vocab // 2, vocab - 1])
    want = triton_kernels.row_stats(logits, tokens, None, *PLAIN, vocab, False, True)
    for offset in range(16 // logits.element_size()):
        got = triton_kernels.row_stats(at_offset(logits, offset), tokens, None, *PLAIN, vocab, False, True)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True)), offset


def token_inputs(n: int, logprobs: torch.Tensor) -> list[Any]:
    config = PPOLossConfig(entropy_coef=0.05, dual_clip=3.0)
    weight = torch.full((n,), 1 / n)
    return [logprobs + 0.1, torch.randn(n), None, weight, *[None] * 6, list(config.params())]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("one_visit", [False, True])
@pytest.mark.parametrize("vocab", [100, 512, 1031, 2500])
def test_one_visit_and_three_kernels_agree(
    vocab: int, one_visit: bool, dtype: torch.dtype, small_shapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the table would not choose the one-visit kernel: the stats are the same bits."""
    monkeypatch.setattr(launch, "one_visit_wins", lambda vocab, itemsize: one_visit)
    logits, tokens = torch.randn(5, vocab).to(dtype) * 3, torch.randint(vocab, (5,))
    stats = triton_kernels.row_stats(logits, tokens, None, *PLAIN, vocab, False, True)
    given = token_inputs(5, stats[0])
    grad, *outputs = triton_kernels.row_fused(at_offset(logits, 1), tokens, *PLAIN, vocab, False, True, *given)
    assert all(torch.equal(g, w) for g, w in zip(outputs[:5], stats, strict=True))
    loss = triton_kernels.token_loss(stats[0], stats[1], *given)
    assert all(torch.equal(g, w) for g, w in zip(outputs[5:], loss, strict=True))
    exact = reference.row_stats(logits.double(), tokens, None, *PLAIN, vocab, False)
    want = reference.row_grad(
        logits.double(), tokens, None, *PLAIN, vocab, False, exact[0], *exact[2:], loss[2].double(), loss[3].double()
    )
    largest = want.abs().amax(-1, keepdim=True)
    ulp = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    smallest = 2.0**-25 if dtype == torch.float16 else 0.0  # half of the smallest subnormal
    assert ((grad - want).abs() <= ulp * want.abs() + 1e-6 * largest + smallest).all()


@pytest.mark.parametrize("vocab", [40, 1031])
def test_the_gradient_touches_nothing_else(vocab: int, small_shapes: None) -> None:
    """Written in place inside a larger buffer: what lies between the rows stays as it is."""
    logits, tokens = torch.randn(4, vocab).bfloat16(), torch.randint(vocab - 3, (4,))
    rows = at_offset(logits, 3)
    base = rows.as_strided((rows.untyped_storage().nbytes() // 2,), (1,), 0)
    before = base.clone()
    args = (tokens, *PLAIN, vocab - 3, False, True, *token_inputs(4, torch.zeros(4)))
    triton_kernels.row_fused_(rows, *args)
    inside = torch.zeros_like(base, dtype=torch.bool)
    inside.as_strided(rows.shape, rows.stride(), rows.storage_offset()).fill_(True)
    assert torch.equal(base[~inside].isnan(), before[~inside].isnan())
    assert (rows[:, vocab - 3 :] == 0).all()
    assert torch.equal(rows, triton_kernels.row_fused(logits, *args)[0])


def largest_allocation(run: Any) -> int:
    """Bytes of the largest single tensor allocated while running."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    sizes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    return max(sizes)


@pytest.mark.parametrize("vocab", [48, 40000])
@pytest.mark.parametrize("shift", [False, True])
def test_nothing_of_the_vocabularys_size_is_allocated_but_the_gradient(vocab: int, shift: bool) -> None:
    rows = 2 if vocab > 1000 else 400
    logits, tokens = torch.randn(1, rows, vocab), torch.randint(vocab, (1, rows))
    mask = torch.ones(1, rows - shift)
    advantages = torch.randn(1, rows - shift)
    row_bytes = max(vocab, rows * 32) * 4  # partial sums and N-sized tensors are smaller
    assert (
        largest_allocation(lambda: logprobs_from_logits(logits, tokens, shift=shift, return_entropy=True)) < row_bytes
    )

    def loss(inplace: bool) -> None:
        x = logits.detach().requires_grad_()
        fused_ppo_loss(x, tokens, None, advantages, mask, shift=shift, inplace_grad=inplace).loss.backward()

    own = largest_allocation(lambda: loss(False))
    assert own == logits.nbytes
    assert largest_allocation(lambda: loss(True)) < row_bytes
