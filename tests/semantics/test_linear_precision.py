"""bf16 and fp16 inputs, autocast, loss scaling, float64: the error against float64 is that of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from checks import INTERPRETER, assert_close, leaf
from oracle import to_numpy
from test_linear_oracle import (
    a_batch,
    as_multiplied,
    check_loss,
    check_scores,
    distance,
    head,
    lossy,
    scored,
    scored_by_oracle,
)

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, fused_ppo_loss

HALVES = [torch.bfloat16, torch.float16]
N, H, V = 20, 16, 50
WAYS = {
    "by default": {},
    "ragged chunks": {"chunk_bytes": 7 * 4 * V},
    "little memory": {"memory": "low"},
    "little memory, a few rows": {"memory": "low", "chunk_bytes": 9 * 4 * N},
}
FEW = ["ragged chunks", "little memory"] if INTERPRETER else list(WAYS)


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def problem(dtype, **options):
    return head((N,), V, H, dtype, **options), torch.randint(V, (N,)), torch.rand(N) < 0.8


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("bias", [True, False])
def test_scores_of_half_inputs(bias, way, dtype):
    inputs, tokens, mask = problem(dtype, bias=bias)
    check_scores(inputs, tokens, mask, upstream=(torch.randn(N), torch.randn(N)), how=WAYS[way])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1, "temperature": 0.7}], ids=["policy", "entropy"])
def test_the_loss_of_half_inputs(options, way, dtype):
    inputs, tokens, mask = problem(dtype)
    old, advantages = a_batch(inputs, tokens)
    check_loss(inputs, tokens, old, advantages, mask, options=options, how=WAYS[way])


@pytest.mark.parametrize("under", [False, True], ids=["16-bit weight", "autocast"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", FEW)
def test_gradients_are_on_the_whole_as_near_as_those_of_plain_pytorch(way, dtype, under):
    """By the root of the mean square error of many draws. Where a product of 16-bit matrices cannot be had in fp32, as
    on a CPU, each chunk's is rounded once: 1.08 times the error of one product in three chunks, 1.00 without chunks."""
    squares: dict[str, list[float]] = {}
    for _ in range(10 if INTERPRETER else 40):
        inputs, tokens, mask = problem(torch.float32 if under else dtype)
        up, autocast = (torch.randn(N), torch.randn(N)), dtype if under else None
        got = scored(inputs, tokens, mask, upstream=up, under=autocast, **WAYS[way])
        want = scored_by_oracle(as_multiplied(inputs, autocast), tokens, mask, upstream=up)
        plain = scored_by_oracle(inputs, tokens, mask, upstream=up, dtype=None, under=autocast)
        for name, exact in want.grads.items():
            if name in got.grads:
                sums = squares.setdefault(name, [0.0, 0.0])
                sums[0] += distance(got.grads[name], exact) ** 2
                sums[1] += distance(plain.grads[name], exact) ** 2
    assert len(squares) == 3
    for name, (error, reached) in squares.items():
        assert error <= 1.2**2 * reached, f"{name}: {(error / reached) ** 0.5:.3f} times the error of plain PyTorch"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_long_batch_does_not_lose_the_weights_gradient_in_half_sums(memory, dtype):
    """Chunks of one row, each adding less than half an ulp of the sum so far: their sum is not kept in bf16."""
    rows = 10 if INTERPRETER else 100
    inputs = {"hidden": torch.ones(rows, 2, dtype=dtype), "weight": torch.zeros(3, 2, dtype=dtype)}
    tokens = torch.zeros(rows, dtype=torch.long)
    how = {"chunk_bytes": 1, "memory": memory}
    zeros = torch.zeros(rows)
    check_scores(inputs, tokens, upstream=(torch.ones(rows), zeros), how=how)


@pytest.mark.parametrize("scale", [65536.0, 1.0])
@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("memory", ["fast", "low"])
def test_an_fp16_gradient_too_small_for_fp16_survives_under_a_loss_scaler(memory, kind, scale):
    """Without its factor every gradient of the logits of a batch of a million tokens is below fp16's smallest."""
    inputs, tokens, mask = problem(torch.float16)
    old, advantages = a_batch(inputs, tokens)
    config = PPOLossConfig(ratio_level=kind, aggregation="token-mean")
    given = [x.view(4, 5) for x in (tokens, old, advantages, mask)]
    inputs["hidden"] = inputs["hidden"].view(4, 5, H)
    rest = {"config": config, "normalizer": 2.0e6, "memory": memory}
    got = lossy(inputs, *given, upstream=scale, **rest)
    exact = lossy({k: x.double() for k, x in inputs.items()}, *given, upstream=scale, **rest)
    plain = {k: leaf(x) for k, x in inputs.items()}
    logits = torch.nn.functional.linear(plain["hidden"], plain["weight"], plain["bias"])
    (fused_ppo_loss(logits, *given, config=config, normalizer=2.0e6).loss * scale).backward()
    for name, x in got.grads.items():
        want = to_numpy(exact.grads[name])
        reached = abs(to_numpy(plain[name].grad) - want)
        assert abs(to_numpy(x) - want).max() <= 1.1 * reached.max() + 6e-8, name
    if scale > 1:
        assert all((x != 0).any() for x in got.grads.values())


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_fp16_under_a_loss_scaler(memory):
    inputs, tokens, mask = problem(torch.float16)
    given = (tokens, *a_batch(inputs, tokens), mask)
    check_loss(inputs, *given, options={"entropy_coef": 0.01}, upstream=1024.0, how={"memory": memory})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("hidden", ["fp32", "half"])
def test_autocast_multiplies_in_its_dtype_and_an_fp32_weight_gets_an_fp32_gradient(hidden, way, dtype):
    inputs, tokens, mask = problem(torch.float32)
    if hidden == "half":
        inputs["hidden"] = inputs["hidden"].to(dtype)
    up = (torch.randn(N), torch.randn(N))
    got = check_scores(inputs, tokens, mask, upstream=up, under=dtype, how=WAYS[way])
    assert got.grads["weight"].dtype == got.grads["bias"].dtype == torch.float32
    old, advantages = a_batch(inputs | {"hidden": inputs["hidden"].float()}, tokens)
    got, _ = check_loss(inputs, tokens, old, advantages, mask, under=dtype, how=WAYS[way])
    assert got.grads["hidden"].dtype == inputs["hidden"].dtype
    assert got.grads["weight"].dtype == torch.float32
    assert got.loss.dtype == torch.float32


def test_autocast_of_bf16_parameters_changes_nothing():
    inputs, tokens, mask = problem(torch.bfloat16)
    up = (torch.randn(N), torch.randn(N))
    a = scored(inputs, tokens, mask, upstream=up)
    b = scored(inputs, tokens, mask, upstream=up, under=torch.bfloat16)
    assert torch.equal(a.logprobs, b.logprobs)
    assert all(torch.equal(x, b.grads[name]) for name, x in a.grads.items())


@pytest.mark.parametrize("memory", ["fast", "low"])
def test_a_backward_inside_autocast_is_the_one_outside(memory):
    inputs, tokens, mask = problem(torch.float32)
    old, advantages = a_batch(inputs, tokens)
    want = lossy(inputs, tokens, old, advantages, mask, under=torch.bfloat16, memory=memory)
    leaves = {k: leaf(x) for k, x in inputs.items()}
    with torch.autocast(inputs["hidden"].device.type, torch.bfloat16):
        rest = {"tokens": tokens, "old_logprobs": old, "advantages": advantages, "mask": mask, "memory": memory}
        fused_linear_ppo_loss(**leaves, **rest).loss.backward()
    for name, x in leaves.items():
        assert torch.equal(x.grad, want.grads[name]), name


@pytest.mark.parametrize("way", FEW)
def test_float64(way):
    inputs, tokens, mask = problem(torch.float64)
    up = (torch.randn(N, dtype=torch.float64), torch.randn(N, dtype=torch.float64))
    check_scores(inputs, tokens, mask, upstream=up, how=WAYS[way])
    old, advantages = a_batch(inputs, tokens)
    config = PPOLossConfig(entropy_coef=0.1)
    got = lossy(inputs, tokens, old.double(), advantages.double(), mask, config=config, **WAYS[way])
    leaves = {k: leaf(x) for k, x in inputs.items()}
    logits = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves["bias"])
    want = fused_ppo_loss(logits, tokens, old.double(), advantages.double(), mask, config=config)
    want.loss.backward()
    assert got.loss.dtype == torch.float64
    assert_close(got.loss, want.loss, 1e-13, scale=1.0)
    for name, x in got.grads.items():
        assert_close(x, leaves[name].grad, 1e-12, scale=float(x.abs().max()), what=name)


def test_fp32_results_whatever_the_inputs_dtype():
    for dtype in HALVES:
        inputs, tokens, mask = problem(dtype)
        got = scored(inputs, tokens, mask, upstream=(torch.ones(N), None))
        assert got.logprobs.dtype == got.entropy.dtype == torch.float32
        out = lossy(inputs, tokens, *a_batch(inputs, tokens), mask)
        assert out.loss.dtype == out.logprobs.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    inputs, tokens, mask = problem(torch.float64)
    check_scores(inputs, tokens, mask, upstream=(torch.randn(N), torch.randn(N)), under=torch.bfloat16)
