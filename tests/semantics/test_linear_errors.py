"""What the linear forms refuse: one sentence that names the argument, before anything is computed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden

B, T, H, V = 2, 3, 4, 5
X = torch.zeros(B, T)
INT = torch.zeros(B, T, dtype=torch.long)
VALUES = "looking at values on a GPU would need a synchronisation"


def scores(**changed):
    args = {"hidden": torch.zeros(B, T, H), "weight": torch.zeros(V, H), "tokens": INT} | changed
    return logprobs_from_hidden(**args)


def loss(**changed):
    args = {"hidden": torch.zeros(B, T, H), "weight": torch.zeros(V, H), "tokens": INT}
    return fused_linear_ppo_loss(**(args | {"old_logprobs": X, "advantages": X} | changed))


CALLS = [scores, loss]


def refuses(call, error, name, **changed):
    with pytest.raises(error, match=rf"\b{name}\b") as info:
        call(**changed)
    assert type(info.value) in (error if isinstance(error, tuple) else (error,)), type(info.value)
    assert "\n" not in str(info.value).strip()
    assert len(str(info.value)) < 400


def test_the_good_inputs_of_this_file_are_good():
    for call in CALLS:
        call()
        call(bias=torch.zeros(V), mask=torch.ones(B, T), chunk_bytes=1, memory="low", valid_rows=6)
        call(bias=None, chunk_bytes=None, memory="fast", valid_rows=None, reduce_hidden_grad=False)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (TypeError, "hidden", np.zeros((B, T, H))),
        (TypeError, "hidden", [[1.0]]),
        (TypeError, "hidden", None),
        (TypeError, "hidden", torch.zeros(B, T, H, dtype=torch.long)),
        (TypeError, "hidden", torch.zeros(B, T, H, dtype=torch.bool)),
        (TypeError, "hidden", torch.zeros(B, T, H, dtype=torch.complex64)),
        (ValueError, "hidden", torch.zeros(())),
        (TypeError, "weight", np.zeros((V, H))),
        (TypeError, "weight", None),
        (TypeError, "weight", torch.nn.Linear(H, V)),
        (TypeError, "weight", torch.zeros(V, H, dtype=torch.long)),
        (TypeError, "weight", torch.zeros(V, H, dtype=torch.complex64)),
        (ValueError, "weight", torch.zeros(H)),
        (ValueError, "weight", torch.zeros(H, V)),
        (ValueError, "weight", torch.zeros(V, 1)),
        (ValueError, "weight", torch.zeros(1, V, H)),
        (ValueError, "weight", torch.zeros(0, H)),
        ((TypeError, ValueError), "weight", torch.zeros(V, H, dtype=torch.float64)),
        ((TypeError, ValueError), "weight", torch.zeros(V, H, dtype=torch.bfloat16)),
        ((TypeError, ValueError), "weight", torch.zeros(V, H, device="meta")),
        (TypeError, "bias", [0.0] * V),
        (TypeError, "bias", True),
        (TypeError, "bias", torch.zeros(V, dtype=torch.long)),
        (ValueError, "bias", torch.zeros(V + 1)),
        (ValueError, "bias", torch.zeros(1)),
        (ValueError, "bias", torch.zeros(())),
        (ValueError, "bias", torch.zeros(1, V)),
        ((TypeError, ValueError), "bias", torch.zeros(V, dtype=torch.float16)),
        ((TypeError, ValueError), "bias", torch.zeros(V, device="meta")),
        (TypeError, "tokens", [[0, 1, 2], [0, 1, 2]]),
        (TypeError, "tokens", None),
        (TypeError, "tokens", X),
        (ValueError, "tokens", torch.zeros(B, T + 1, dtype=torch.long)),
        (ValueError, "tokens", torch.zeros(T, dtype=torch.long)),
        (ValueError, "tokens", torch.zeros(B, T, 1, dtype=torch.long)),
        (ValueError, "tokens", torch.zeros(B, T, dtype=torch.long, device="meta")),
        (TypeError, "mask", [[1, 1, 1], [1, 1, 1]]),
        (TypeError, "mask", torch.ones(B, T, dtype=torch.complex64)),
        (ValueError, "mask", torch.ones(B, 1)),
        (ValueError, "mask", torch.ones(T)),
        (ValueError, "chunk_bytes", 0),
        (ValueError, "chunk_bytes", -1),
        (TypeError, "chunk_bytes", 1.5),
        (TypeError, "chunk_bytes", "1"),
        (ValueError, "hidden", torch.zeros(B, T, 0)),
        (ValueError, "memory", "medium"),
        ((TypeError, ValueError), "memory", None),
        (ValueError, "valid_rows", -1),
        (TypeError, "valid_rows", 2.5),
        (TypeError, "valid_rows", "6"),
        (TypeError, "process_group", object()),
        (ValueError, "temperature", 0.0),
        (ValueError, "temperature", math.nan),
        (TypeError, "temperature", "1"),
        (ValueError, "temperature", torch.ones(T)),
        (TypeError, "temperature", torch.ones((), dtype=torch.int64)),
    ],
)
def test_arguments_of_both(call, error, name, value):
    refuses(call, error, name, **{name: value})


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "vocab_size", 0),
        (ValueError, "vocab_size", V + 1),
        (TypeError, "vocab_size", 2.5),
        (TypeError, "ignore_index", 1.0),
        (ValueError, "logit_softcap", 0.0),
        (ValueError, "logit_scale", -1.0),
        (TypeError, "logit_scale", "1"),
        (TypeError, "inplace_grad", True),
        (TypeError, "values", X),
    ],
)
def test_options_of_logprobs(error, name, value):
    refuses(scores, error, name, **{name: value})


@pytest.mark.parametrize("name", ["old_logprobs", "advantages", "values", "old_values", "returns", "token_weights"])
@pytest.mark.parametrize("bad", ["list", "shape"])
def test_per_token_arguments_of_the_loss(name, bad):
    value = [[0.0] * T] * B if bad == "list" else torch.zeros(B, T + 1)
    good = {"values": X, "old_values": X, "returns": X, "token_weights": X}
    refuses(loss, TypeError if bad == "list" else ValueError, name, **(good | {name: value}))


def test_there_are_no_logits_to_write_the_gradient_over():
    refuses(loss, ValueError, "inplace_grad", inplace_grad=True)
    loss(inplace_grad=False)


def test_options_of_the_loss():
    refuses(loss, ValueError, "vocab_size", config=PPOLossConfig(vocab_size=V + 1))
    refuses(loss, TypeError, "config", config={"clip_low": 0.2})
    refuses(loss, ValueError, "returns", values=X)
    refuses(loss, ValueError, "old_values", values=X, returns=X, config=PPOLossConfig(value_clip=0.2))
    refuses(loss, ValueError, "ref_logprobs", config=PPOLossConfig(kl_coef=0.1))
    refuses(loss, ValueError, "normalizer", normalizer=3, config=PPOLossConfig(aggregation="token-sum"))
    refuses(loss, ValueError, "cu_seqlens", cu_seqlens=torch.tensor([0, 6], dtype=torch.int32))


def test_unknown_keywords_are_type_errors():
    for call in CALLS:
        with pytest.raises(TypeError, match="clip_ratio_c"):
            call(clip_ratio_c=3.0)


def test_shift_needs_a_sequence_axis_and_per_token_arguments_one_shorter():
    with pytest.raises(ValueError, match="shift"):
        logprobs_from_hidden(torch.zeros(H), torch.zeros(V, H), torch.tensor(0), shift=True)
    for call in CALLS:
        refuses(call, ValueError, "mask", shift=True, mask=torch.ones(B, T))
    short = torch.zeros(B, T - 1)
    loss(shift=True, old_logprobs=short, advantages=short)
    refuses(loss, ValueError, "old_logprobs", shift=True, advantages=short)


@pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("token", [V, -1, -100])
def test_tokens_out_of_range(call, token):
    tokens = INT.clone()
    tokens[1, 2] = token
    for how in ({}, {"chunk_bytes": 1}, {"memory": "low"}):
        refuses(call, IndexError, "tokens", tokens=tokens, **how)
        call(tokens=tokens, mask=torch.tensor([[1, 1, 1], [1, 1, 0]]), **how)


@pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")
def test_tokens_that_are_padding_columns_are_out_of_range():
    tokens = torch.full((B, T), 3)
    refuses(scores, IndexError, "tokens", tokens=tokens, vocab_size=3)
    refuses(loss, IndexError, "tokens", tokens=tokens, config=PPOLossConfig(vocab_size=3))


@pytest.mark.cpu_only(VALUES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, math.nan])
def test_a_mask_that_is_neither_zero_nor_one(call, value):
    mask = torch.ones(B, T)
    mask[1, 1] = value
    refuses(call, ValueError, "mask", mask=mask)


@pytest.mark.cpu_only(VALUES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("count", [0, 4, 6, 7])
def test_a_wrong_count_of_valid_rows(call, count):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    call(mask=mask, valid_rows=5)
    refuses(call, ValueError, "valid_rows", mask=mask, valid_rows=count)
    if count != 6:
        refuses(call, ValueError, "valid_rows", valid_rows=count)


@pytest.mark.cpu_only(VALUES)
def test_a_refused_call_modifies_and_leaks_nothing():
    hidden, weight = torch.randn(2, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    kept = hidden.detach().clone(), weight.detach().clone()
    with pytest.raises(IndexError):
        fused_linear_ppo_loss(hidden, weight, torch.tensor([0, V]), torch.zeros(2), torch.ones(2), chunk_bytes=1)
    assert torch.equal(hidden.detach(), kept[0])
    assert torch.equal(weight.detach(), kept[1])
    assert hidden.grad is None
    assert weight.grad is None
