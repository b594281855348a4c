"""The operators as torch.library sees them: schemas, fake kernels, aliasing, compilation."""

import math
from typing import Any

import pytest
import torch

from ppo_kernels import PPOLossConfig, linear_autograd, ops

N, V = 6, 11


def row_arguments(shift: bool) -> tuple[torch.Tensor, list[Any]]:
    """With shift also a temperature for each row, and a softcap."""
    logits, tokens = torch.randn(2, N // 2 + shift, V), torch.randint(V - 1, (2, N // 2 + shift))
    tempered = (1.0, torch.rand(N) + 0.5, 2.0) if shift else (0.7, None, math.inf)
    return logits, [tokens, torch.arange(N) != 2, *tempered, V - 1, shift]


def token_arguments() -> list[Any]:
    old, advantages, ref, values, old_values, returns = (torch.randn(N) for _ in range(6))
    valid, weight = torch.arange(N) != 2, torch.full((N,), 0.2)
    config = PPOLossConfig(entropy_coef=0.1, kl_coef=0.1, value_clip=0.2, dual_clip=3.0)
    inputs = [old, advantages, valid, weight, ref, values, old_values, returns, valid, weight]
    return [*inputs, list(config.params())]


def all_calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}
    for shift in (False, True):
        logits, row = row_arguments(shift)
        stats = ops.row_stats(logits, *row, True)
        coefficients = (stats[0], *stats[2:], torch.randn(N), torch.randn(N))
        tokens, _, *options = row
        fused = (tokens, *options, True, *token_arguments())
        calls[f"row_stats-{shift}"] = ops.row_stats, (logits, *row, True)
        calls[f"row_grad-{shift}"] = ops.row_grad, (logits, *row, *coefficients)
        calls[f"row_grad_-{shift}"] = ops.row_grad_, (logits.clone(), *row, *coefficients)
        calls[f"row_fused-{shift}"] = ops.row_fused, (logits, *fused)
        calls[f"row_fused_-{shift}"] = ops.row_fused_, (logits.clone(), *fused)
        weight, bias, plan = torch.randn(V, 4), torch.randn(V), (0, False, -1, torch.float32)
        head = (torch.randn(*tokens.shape, 4), weight, bias, *row, True)
        calls[f"linear_stats-{shift}"] = linear_autograd.linear_stats, (*head, *plan)
        calls[f"linear_grad-{shift}"] = linear_autograd.linear_grad, (*head, *coefficients, *plan, [True, True, False])
    calls["token_loss"] = ops.token_loss, (torch.randn(N), torch.rand(N), *token_arguments())
    segments = torch.tensor([0, 2, N])
    absent = (None,) * 5
    calls["gae"] = ops.gae, (torch.randn(N), torch.randn(N), *absent, segments, 0.9, 0.8, "skip", torch.rand(2))
    calls["whiten"] = ops.whiten, (torch.randn(2, N), torch.rand(2, N) < 0.7, True, False, 1e-8, "var")
    calls["scale_"] = ops.scale_, (torch.randn(2, N), torch.tensor(0.5))
    return calls


@pytest.mark.parametrize("name", list(all_calls()))
def test_operator_passes_opcheck(name: str) -> None:
    operator, arguments = all_calls()[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", ["row_fused_", "row_grad_"])
def test_in_place_operator_writes_what_the_other_one_returns(name: str, shift: bool) -> None:
    _, (logits, *arguments) = all_calls()[f"{name}-{shift}"]
    returned = getattr(ops, name[:-1])(logits.clone(), *arguments)
    getattr(ops, name)(logits, *arguments)
    expected = returned if isinstance(returned, torch.Tensor) else returned[0]
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("vocab", [11, 70, 5000])
@pytest.mark.parametrize("softcap", [math.inf, 5.0])
def test_the_gradient_of_a_part_of_the_columns_is_that_part_of_the_gradient(vocab: int, softcap: float) -> None:
    """A target outside them is in none of them."""
    torch.manual_seed(0)
    logits, tokens, cut = torch.randn(N, vocab) * 3, torch.randint(vocab, (N,)), vocab // 3
    tokens[0], tokens[1] = 0, vocab - 1
    options = (None, 0.7, None, softcap)
    stats = ops.row_stats(logits, tokens, *options, vocab, False, True)
    coefficients = (stats[0], *stats[2:], torch.randn(N), torch.randn(N))
    whole = ops.row_grad(logits, tokens, *options, vocab, False, *coefficients)
    left = ops.row_grad(logits[:, :cut].contiguous(), tokens, *options, cut, False, *coefficients)
    right = ops.row_grad(logits[:, cut:], tokens - cut, *options, vocab - cut, False, *coefficients)
    torch.testing.assert_close(torch.cat([left, right], 1), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [8, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [math.inf, 30.0])
def test_one_visit_equals_stats_then_loss_then_gradient(vocab: int, dtype: torch.dtype, softcap: float) -> None:
    """The fused operator against the three it replaces, over several blocks of columns and a maximum that rises
    late."""
    torch.manual_seed(0)
    logits = torch.randn(N, vocab) * 3
    logits[1, vocab - 2] += 40.0
    logits[3, : vocab // 2] = -torch.inf
    logits = logits.to(dtype)
    tokens = torch.randint(vocab // 2, vocab, (N,))
    arguments = token_arguments()
    options = (1.0, None, softcap, vocab, False)
    grad, *stats_and_loss = ops.row_fused(logits, tokens, *options, True, *arguments)
    stats = ops.row_stats(logits, tokens, arguments[2], *options, True)
    loss = ops.token_loss(stats[0], stats[1], *arguments)
    expected = ops.row_grad(logits, tokens, arguments[2], *options, stats[0], *stats[2:], loss[2], loss[3])
    for got, want in zip(stats_and_loss[:5], stats, strict=True):
        assert torch.equal(got, want)
    rounding = 4e-6 if dtype == torch.float32 else 2**-7
    error, largest = (grad.double() - expected.double()).abs(), expected.double().abs()
    assert (error <= rounding * largest + 1e-7 * largest.amax(-1, keepdim=True)).all()
    torch.testing.assert_close(stats_and_loss[5], loss[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stats_and_loss[6], loss[1], rtol=1e-6, atol=1e-6)
