"""Memory of the linear forms, as PyTorch's profiler sees it: bounded by chunk_bytes, and by the rows that count."""

from __future__ import annotations

import pytest
import torch
from checks import INTERPRETER

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, heads, linear, logprobs_from_hidden

pytestmark = [
    pytest.mark.cpu_only("the profiler's memory events are those of the CPU"),
    pytest.mark.usefixtures("fused_kernels"),
    pytest.mark.skipif(INTERPRETER, reason="Triton's interpreter has memory of its own"),
]

ROWS, H, V = 64, 4, 16384
LOGITS, WEIGHT, CHUNK = ROWS * V * 4, V * H * 4, 1 << 20  # bytes: 4 MiB, 256 KiB, 1 MiB
SLACK = 64 * 1024


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def loss(hidden, weight, tokens, mask, **how):
    x = torch.zeros(ROWS)
    config = PPOLossConfig(entropy_coef=0.1)
    return fused_linear_ppo_loss(hidden, weight, tokens, x - 9, x + 1, mask, config=config, **how).loss


def sequence_loss(hidden, weight, tokens, mask, **how):
    x = torch.zeros(4, ROWS // 4)
    states, ids = hidden.view(*x.shape, H), tokens.view(x.shape)
    config = PPOLossConfig(ratio_level="sequence")
    return fused_linear_ppo_loss(states, weight, ids, x - 9, x + 1, mask.view(x.shape), config=config, **how).loss


def scores(hidden, weight, tokens, mask, **how):
    return logprobs_from_hidden(hidden, weight, tokens, mask, **how).sum()


CALLS = [(loss, "fast"), (sequence_loss, "low"), (scores, "fast"), (scores, "low")]


def largest_allocation(mask, grad=True, **how):
    """Bytes, of any forward or backward; what is freed again within one event does not count."""
    hidden, weight = torch.randn(ROWS, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    tokens = torch.zeros(ROWS, dtype=torch.long)
    with (
        torch.set_grad_enabled(grad),
        torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        for call, memory in CALLS:
            result = call(hidden, weight, tokens, mask, memory=memory, **how)
            if grad:
                torch.autograd.grad(result, (hidden, weight))
    return max(event.cpu_memory_usage for event in profile.events())


def test_no_allocation_is_beyond_the_chunk_and_one_gradient_of_the_weight():
    assert largest_allocation(torch.ones(ROWS), chunk_bytes=CHUNK) <= CHUNK + WEIGHT + SLACK < LOGITS / 2


def test_a_forward_alone_makes_no_gradient_of_the_weight():
    assert largest_allocation(torch.ones(ROWS), grad=False, chunk_bytes=CHUNK) <= CHUNK + SLACK


def test_rows_are_one_chunk_where_they_take_no_more_than_an_fp32_sum_of_the_gradient(monkeypatch):
    added, width = [], 64
    add, sums = heads.Grads.add, 4 * V * width
    monkeypatch.setattr(heads.Grads, "add", lambda *a: (added.append(1), add(*a)))
    monkeypatch.setattr(linear, "CHUNK_BYTES", CHUNK)
    assert LOGITS / 2 > CHUNK and sums + CHUNK > 1.1 * LOGITS  # noqa: PT018

    def chunks(dtype=torch.bfloat16, frozen=False, **how):
        added.clear()
        hidden, weight = torch.randn(ROWS, width, dtype=dtype), torch.randn(V, width, dtype=dtype)
        hidden.requires_grad_()
        weight.requires_grad_(not frozen)
        for call, memory in CALLS[::2]:
            call(hidden, weight, torch.zeros(ROWS, dtype=torch.long), torch.ones(ROWS), memory=memory, **how).backward()
        return len(added)

    assert chunks() == 2
    assert chunks(chunk_bytes=CHUNK) > 2
    assert chunks(torch.float32) > 2
    assert chunks(frozen=True) > 2


def test_memory_is_for_the_rows_that_count():
    mask = torch.zeros(ROWS)
    mask[[3, 40]] = 1
    assert largest_allocation(mask) <= WEIGHT + 4 * V * 4 + SLACK < LOGITS / 2
