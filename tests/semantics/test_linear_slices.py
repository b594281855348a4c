"""memory="low" cuts a large vocabulary into slices, whose statistics are combined and whose logits are made again."""

from __future__ import annotations

import pytest
import torch
from checks import INTERPRETER
from oracle import LossSpec
from test_linear_oracle import a_batch, assert_grads, check_loss, check_scores, head, loss_by_oracle, lossy, scored

from ppo_kernels import PPOLossConfig, logprobs_from_hidden

N, H, V = 5, 8, 5003
SMALL = {"memory": "low", "chunk_bytes": 1}
MASK = torch.tensor([1, 0, 1, 1, 1])


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


def upstream():
    return torch.randn(N), torch.randn(N)


@pytest.mark.parametrize("chunk_bytes", [1] if INTERPRETER else [1, 10_000, 40_000, 90_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64][: 1 if INTERPRETER else 4]
)
def test_slices_of_any_size(dtype, chunk_bytes):
    inputs, tokens = head((N,), V, H, dtype), torch.randint(V, (N,))
    check_scores(inputs, tokens, MASK, upstream=upstream(), how={"memory": "low", "chunk_bytes": chunk_bytes})


@pytest.mark.parametrize("width", [4097] if INTERPRETER else [2047, 2048, 2049, 4095, 4096, 4097, 8193])
def test_vocabularies_beside_a_multiple_of_any_slice(width):
    """The scored tokens are the first and last, and those at either side of every power of two."""
    edges = [x for k in range(8, 14) for x in (2**k - 1, 2**k) if x < width]
    tokens = torch.tensor([0, *edges, width - 1])
    up = torch.randn(len(tokens)), torch.randn(len(tokens))
    check_scores(head((len(tokens),), width, 3), tokens, upstream=up, how=SMALL)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": torch.linspace(0.4, 2.0, N)},
        {"logit_softcap": 3.0},
        {"logit_softcap": 5.0, "logit_scale": 0.5, "temperature": 0.7},
        {"vocab_size": 4500},  # ends within a slice
        {"vocab_size": 1000},  # whole slices do not exist
        {"ignore_index": 7},
    ][:: 4 if INTERPRETER else 1],
    ids=lambda options: " ".join(options),
)
def test_options_of_the_head(options):
    inputs, tokens = head((N,), V, H), torch.randint(1000, (N,))
    tokens[3] = 7
    width = options.get("vocab_size", V)
    inputs["weight"][width:] = torch.nan
    got = check_scores(inputs, tokens, MASK, upstream=upstream(), how=SMALL, **options)
    assert (got.grads["weight"][width:] == 0).all()
    assert (got.grads["bias"][width:] == 0).all()


@pytest.mark.parametrize("banned", [slice(0, 4500), slice(500, V), slice(500, 4500)], ids=["first", "last", "middle"])
def test_slices_without_a_single_possible_token(banned):
    inputs, tokens = head((N,), V, H), torch.tensor([0, 100, 499, 499, 0])
    if banned.start == 0:
        tokens = V - 1 - tokens
    inputs["bias"][banned] = -torch.inf
    got = check_scores(inputs, tokens, MASK, upstream=upstream(), how=SMALL)
    assert (got.grads["bias"][banned] == 0).all()


def test_a_maximum_that_grows_from_slice_to_slice():
    """And one that falls: each slice is some thirty nats above the last."""
    inputs, tokens = head((N,), V, H), torch.tensor([0, 1200, 2500, 4000, V - 1])
    slope = torch.linspace(0, 90, V)
    for bias in (slope, slope.flip(0)):
        inputs["bias"] = bias.contiguous()
        got = scored(inputs, tokens, upstream=(torch.ones(N), torch.ones(N)), memory="low", chunk_bytes=1)
        want = scored(inputs, tokens, upstream=(torch.ones(N), torch.ones(N)))
        assert (got.logprobs - want.logprobs).abs().max() <= 2e-6 * want.logprobs.abs().max()
        assert (got.entropy - want.entropy).abs().max() <= 2e-5
        for name, x in got.grads.items():
            assert (x - want.grads[name]).norm() <= 2e-5 * x.norm(), name


def test_a_row_of_nan_is_nan_alone_and_a_masked_one_is_not_read():
    inputs, tokens = head((N,), V, H), torch.randint(V, (N,))
    inputs["hidden"][1:3] = torch.nan
    got = logprobs_from_hidden(tokens=tokens, mask=MASK, **inputs, **SMALL)
    assert got.isnan().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("options", [{}, {"entropy_coef": 0.1, "temperature": 0.7}], ids=["policy", "entropy"])
def test_the_loss(options):
    inputs, tokens = head((N,), V, H), torch.randint(V, (N,))
    rest = {"values": torch.randn(N), "returns": torch.randn(N)}
    check_loss(inputs, tokens, *a_batch(inputs, tokens), MASK, options=options, how=SMALL, **rest)


def test_a_loss_that_waits_for_the_whole_sequence():
    inputs, tokens = head((1, N), V, H), torch.randint(V, (1, N))
    _, advantages = a_batch(inputs, tokens)
    config = PPOLossConfig(ratio_level="sequence_token", entropy_coef=0.1)
    got = lossy(inputs, tokens, None, advantages, MASK[None], config=config, **SMALL)
    given = (inputs, tokens, None, advantages, MASK[None])
    want, plain = (
        loss_by_oracle(*given, spec=LossSpec(entropy_coef=0.1), dtype=dtype) for dtype in (torch.float64, None)
    )
    assert_grads(got.grads, want.grads, plain.grads, torch.float32)


@pytest.mark.parametrize("frozen", ["weight"] if INTERPRETER else ["hidden", "weight", "bias"])
def test_who_wants_no_gradient_gets_none(frozen):
    inputs, tokens, up = head((N,), V, H), torch.randint(V, (N,)), torch.randn(N)
    want = scored(inputs, tokens, upstream=(up, None))
    leaves = {k: x.clone().requires_grad_(k != frozen) for k, x in inputs.items()}
    logprobs_from_hidden(tokens=tokens, **leaves, **SMALL).backward(up)
    assert leaves.pop(frozen).grad is None
    for name, x in leaves.items():
        assert (x.grad - want.grads[name]).norm() <= 4e-6 * x.grad.norm(), name


def test_weights_of_any_strides():
    inputs, tokens, up = head((N,), V, H), torch.randint(V, (N,)), upstream()
    want = scored(inputs, tokens, upstream=up, **SMALL)
    base = torch.stack([inputs["weight"], inputs["weight"] * torch.nan], 1)
    for weight in (inputs["weight"].T.contiguous().T, base[:, 0]):
        leaf = weight.requires_grad_()
        lp, h = logprobs_from_hidden(inputs["hidden"], leaf, tokens, bias=inputs["bias"], return_entropy=True, **SMALL)
        (grad,) = torch.autograd.grad([lp, h], leaf, up)
        assert (grad - want.grads["weight"]).norm() <= 2e-6 * grad.norm()
