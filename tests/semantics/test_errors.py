"""The error contract: every bad input is refused before anything runs, by a message that names the argument."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ppo_kernels import (
    AdaptiveKLController,
    PPOLossConfig,
    fused_ppo_loss,
    gae,
    logprobs_from_logits,
    masked_whiten,
    ppo_loss,
    shape_rewards,
)

B, T, V = 2, 3, 5
INT = torch.zeros(B, T, dtype=torch.long)
X = torch.zeros(B, T)


def scores(**changed):
    args = {"logits": torch.zeros(B, T, V), "tokens": INT} | changed
    return logprobs_from_logits(**args)


def policy(**changed):
    args = {"logprobs": X, "old_logprobs": X, "advantages": X} | changed
    return ppo_loss(**args)


def fused(**changed):
    args = {"logits": torch.zeros(B, T, V), "tokens": INT, "old_logprobs": X, "advantages": X} | changed
    return fused_ppo_loss(**args)


def advantages(**changed):
    return gae(**({"rewards": X, "values": X} | changed))


def rewards(**changed):
    return shape_rewards(
        **(
            {"scores": torch.zeros(B), "logprobs": X, "ref_logprobs": X, "mask": torch.ones(B, T), "kl_coef": 0.1}
            | changed
        )
    )


def whiten(**changed):
    return masked_whiten(**({"x": X} | changed))


def refuses(call, error, name, **changed):
    """`call` raises `error`; the message names the argument and is one sentence."""
    with pytest.raises(error, match=rf"\b{name}\b") as info:
        call(**changed)
    assert type(info.value) is error, type(info.value)
    assert "\n" not in str(info.value).strip()
    assert len(str(info.value)) < 400


def test_the_good_inputs_of_this_file_are_good():
    for call in (scores, policy, fused, advantages, rewards, whiten):
        call()


@pytest.mark.parametrize("call", [scores, fused])
@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (TypeError, "logits", np.zeros((B, T, V))),
        (TypeError, "logits", [[1.0]]),
        (TypeError, "logits", None),
        (TypeError, "logits", torch.zeros(B, T, V, dtype=torch.long)),
        (TypeError, "logits", torch.zeros(B, T, V, dtype=torch.bool)),
        (TypeError, "logits", torch.zeros(B, T, V, dtype=torch.complex64)),
        (ValueError, "logits", torch.zeros(())),
        (ValueError, "logits", torch.zeros(B, T, 0)),
        (TypeError, "tokens", [[0, 1, 2], [0, 1, 2]]),
        (TypeError, "tokens", None),
        (TypeError, "tokens", X),
        (ValueError, "tokens", torch.zeros(B, T + 1, dtype=torch.long)),
        (ValueError, "tokens", torch.zeros(T, dtype=torch.long)),
        (ValueError, "tokens", torch.zeros(B, T, 1, dtype=torch.long)),
        (TypeError, "mask", [[1, 1, 1], [1, 1, 1]]),
        (TypeError, "mask", torch.ones(B, T, dtype=torch.complex64)),
        (ValueError, "mask", torch.ones(B, 1)),
        (ValueError, "mask", torch.ones(T)),
    ],
)
def test_logits_tokens_mask(call, error, name, value):
    refuses(call, error, name, **{name: value})


@pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")
@pytest.mark.parametrize("call", [scores, fused, policy, advantages, rewards, whiten])
@pytest.mark.parametrize("value", [0.5, 2.0, -1.0, float("nan")])
def test_a_mask_that_is_neither_zero_nor_one(call, value):
    mask = torch.ones(B, T)
    mask[1, 1] = value
    refuses(call, ValueError, "mask", mask=mask)


@pytest.mark.cpu_only("a GPU cannot raise without a synchronisation")
@pytest.mark.parametrize("call", [scores, fused])
@pytest.mark.parametrize("token", [V, -1, -100])
def test_tokens_out_of_range(call, token):
    tokens = INT.clone()
    tokens[1, 2] = token
    refuses(call, IndexError, "tokens", tokens=tokens)
    call(tokens=tokens, mask=torch.tensor([[1, 1, 1], [1, 1, 0]]))


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "temperature", 0.0),
        (ValueError, "temperature", -1.0),
        (ValueError, "temperature", math.nan),
        (ValueError, "temperature", math.inf),
        (ValueError, "temperature", 1e-40),
        (ValueError, "temperature", 1e40),
        (TypeError, "temperature", "1"),
        (TypeError, "temperature", None),
        (ValueError, "vocab_size", 0),
        (ValueError, "vocab_size", -1),
        (ValueError, "vocab_size", V + 1),
        (TypeError, "vocab_size", 2.5),
        (TypeError, "vocab_size", "5"),
        (TypeError, "process_group", object()),
        (TypeError, "ignore_index", 1.0),
        (TypeError, "ignore_index", True),
        *((ValueError, name, x) for name in ("logit_softcap", "logit_scale") for x in (0.0, -1.0, math.nan, math.inf)),
        *((TypeError, name, x) for name in ("logit_softcap", "logit_scale") for x in ("1", torch.ones(()))),
        (TypeError, "temperature", torch.ones((), dtype=torch.int64)),
        (ValueError, "temperature", torch.ones(1)),
        (ValueError, "temperature", torch.ones(2, 3, 1)),
    ],
)
def test_options_of_logprobs(error, name, value):
    refuses(scores, error, name, **{name: value})


def test_vocab_size_larger_than_the_logits_in_the_config():
    refuses(fused, ValueError, "vocab_size", config=PPOLossConfig(vocab_size=V + 1))


def test_shift_needs_a_sequence_axis():
    with pytest.raises(ValueError, match="shift"):
        logprobs_from_logits(torch.zeros(V), torch.tensor(0), shift=True)


@pytest.mark.parametrize("name", ["mask", "old_logprobs", "advantages", "values", "ref_logprobs"])
def test_shift_wants_per_token_arguments_one_shorter(name):
    short = torch.zeros(B, T - 1)
    good = {
        "old_logprobs": short,
        "advantages": short,
        "mask": torch.ones(B, T - 1),
        "values": short,
        "returns": short,
        "ref_logprobs": short,
    }
    fused(shift=True, **good)
    refuses(fused, ValueError, name, shift=True, **(good | {name: torch.ones(B, T)}))


@pytest.mark.parametrize("call", [policy, fused])
@pytest.mark.parametrize(
    "name",
    ["old_logprobs", "advantages", "values", "old_values", "returns", "ref_logprobs", "token_weights", "value_mask"],
)
@pytest.mark.parametrize("bad", ["list", "numpy", "shape", "complex"])
def test_per_token_arguments(name, bad, call):
    value = {
        "list": [[0.0] * T] * B,
        "numpy": np.zeros((B, T)),
        "shape": torch.zeros(B, T + 1),
        "complex": torch.zeros(B, T, dtype=torch.complex64),
    }[bad]
    good = {
        "values": X,
        "old_values": X,
        "returns": X,
        "ref_logprobs": X,
        "token_weights": X,
        "value_mask": torch.ones(B, T),
    }
    refuses(call, ValueError if bad == "shape" else TypeError, name, **(good | {name: value}))


@pytest.mark.parametrize("bad", [torch.zeros(B, T, dtype=torch.long), [[0.0]], None])
def test_logprobs_of_ppo_loss(bad):
    refuses(policy, TypeError, "logprobs", logprobs=bad)


@pytest.mark.parametrize("bad", [torch.zeros(B, T + 1), torch.zeros(T)])
def test_entropy_shape(bad):
    refuses(policy, ValueError, "entropy", entropy=bad)


@pytest.mark.parametrize("call", [policy, fused])
def test_arguments_that_need_another(call):
    refuses(call, ValueError, "returns", values=X)
    refuses(call, ValueError, "values", returns=X)
    refuses(call, ValueError, "old_values", values=X, returns=X, config=PPOLossConfig(value_clip=0.2))
    refuses(call, ValueError, "ref_logprobs", config=PPOLossConfig(kl_coef=0.1))


@pytest.mark.parametrize("call", [policy, fused])
def test_arguments_that_exclude_each_other(call):
    refuses(call, ValueError, "rollout_is_weights", rollout_logprobs=X, rollout_is_weights=X)
    refuses(call, ValueError, "normalizer", normalizer=3, config=PPOLossConfig(aggregation="token-sum"))


@pytest.mark.cpu_only("looking at values on a GPU would need a synchronisation")
@pytest.mark.parametrize("call", [policy, fused])
def test_negative_rollout_weights(call):
    refuses(call, ValueError, "rollout_is_weights", rollout_is_weights=X - 1)


def test_entropy_coef_needs_entropy():
    refuses(policy, ValueError, "entropy", config=PPOLossConfig(entropy_coef=0.1))


@pytest.mark.parametrize("call", [policy, fused])
@pytest.mark.parametrize("name", ["process_group"])
def test_later_features_say_so(call, name):
    refuses(call, TypeError, name, **{name: X})


@pytest.mark.parametrize("call", [policy, fused])
@pytest.mark.parametrize("bad", [{"clip_low": 0.2}, "verl", 0.2])
def test_config_of_the_wrong_type(call, bad):
    refuses(call, TypeError, "config", config=bad)


PACKED = {"logprobs": torch.zeros(6), "old_logprobs": torch.zeros(6), "advantages": torch.zeros(6)}
BAD_CU = [
    (ValueError, torch.tensor([1, 6], dtype=torch.int32)),
    (ValueError, torch.tensor([0, 5], dtype=torch.int32)),
    (ValueError, torch.tensor([0, 7], dtype=torch.int32)),
    (ValueError, torch.tensor([0, 4, 3, 6], dtype=torch.int32)),
    (ValueError, torch.tensor([[0, 6]], dtype=torch.int32)),
    (ValueError, torch.tensor([], dtype=torch.int32)),
    (TypeError, torch.tensor([0.0, 6.0])),
    (TypeError, [0, 6]),
]


@pytest.mark.cpu_only("checking cu_seqlens on a GPU would need a synchronisation")
@pytest.mark.parametrize(("error", "cu_seqlens"), BAD_CU)
def test_cu_seqlens(error, cu_seqlens):
    refuses(
        policy,
        error,
        "cu_seqlens",
        **PACKED,
        cu_seqlens=cu_seqlens,
        config=PPOLossConfig(aggregation="seq-mean-token-mean"),
    )
    refuses(advantages, error, "cu_seqlens", rewards=torch.zeros(6), values=torch.zeros(6), cu_seqlens=cu_seqlens)


def test_cu_seqlens_needs_packed_input():
    cu_seqlens = torch.tensor([0, 6], dtype=torch.int32)
    refuses(policy, ValueError, "cu_seqlens", cu_seqlens=cu_seqlens)
    refuses(advantages, ValueError, "cu_seqlens", cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "clip_low", -0.1),
        (ValueError, "clip_low", math.nan),
        (TypeError, "clip_low", "0.2"),
        (ValueError, "clip_high", -0.1),
        (ValueError, "dual_clip", 1.0),
        (ValueError, "dual_clip", 0.5),
        (ValueError, "log_ratio_clamp", -1.0),
        (ValueError, "kl_estimator", "k9"),
        (ValueError, "kl_input_clamp", -1.0),
        (ValueError, "kl_output_clamp", -1.0),
        (ValueError, "value_clip", -0.1),
        (ValueError, "aggregation", "mean"),
        (ValueError, "agg_max_len", 0),
        (ValueError, "agg_max_len", -3),
        (ValueError, "temperature", 0.0),
        (ValueError, "temperature", -2.0),
        (ValueError, "vocab_size", 0),
        (ValueError, "entropy_coef", math.nan),
        (ValueError, "kl_coef", math.nan),
        (ValueError, "vf_coef", math.nan),
        (ValueError, "value_loss_scale", math.nan),
        (TypeError, "entropy_coef", "0.1"),
        (TypeError, "entropy_coef", None),
        (TypeError, "vocab_size", 5.5),
    ],
)
def test_config_values(error, name, value):
    refuses(PPOLossConfig, error, name, **{name: value})


def test_config_is_frozen_and_needs_a_length_for_the_norm_mode():
    with pytest.raises(ValueError, match="agg_max_len"):
        PPOLossConfig(aggregation="seq-mean-token-sum-norm")
    with pytest.raises(Exception, match=r"clip_low|cannot assign"):
        PPOLossConfig().clip_low = 0.3


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (TypeError, "rewards", [[0.0]]),
        (TypeError, "values", [[0.0]]),
        (ValueError, "values", torch.zeros(B, T + 1)),
        (ValueError, "values", torch.zeros(T)),
        (ValueError, "mask", torch.ones(B, 1)),
        (TypeError, "mask", [[1]]),
        (ValueError, "terminated", torch.zeros(B)),
        (ValueError, "next_values", torch.zeros(B, 1)),
        (ValueError, "bootstrap_value", torch.zeros(B + 1)),
        (ValueError, "bootstrap_value", torch.zeros(B, T)),
        (ValueError, "mask_mode", "ignore"),
        (ValueError, "gamma", math.nan),
        (ValueError, "lam", math.nan),
        (TypeError, "gamma", "1"),
        (TypeError, "lam", None),
        (ValueError, "lam", torch.full((B + 1,), 0.9)),
        (ValueError, "lam", torch.full((B,), 1.5)),
        (TypeError, "lam", torch.ones(B, dtype=torch.int64)),
        (ValueError, "value_lam", -0.1),
        (ValueError, "value_lam", torch.full((B,), math.nan)),
        (TypeError, "rewards", torch.zeros(B, T, dtype=torch.complex64)),
    ],
)
def test_arguments_of_gae(error, name, value):
    refuses(advantages, error, name, **{name: value})


@pytest.mark.parametrize("name", ["truncated"])
def test_truncated_shape_and_company(name):
    refuses(advantages, ValueError, "next_values", truncated=torch.zeros(B, T))
    refuses(advantages, ValueError, "truncated", truncated=torch.zeros(B), next_values=X)


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "scores", torch.zeros(B + 1)),
        (ValueError, "scores", X),
        (TypeError, "scores", [0.0] * B),
        (ValueError, "logprobs", torch.zeros(T)),
        (ValueError, "ref_logprobs", torch.zeros(B, 1)),
        (ValueError, "mask", torch.ones(B, 1)),
        (ValueError, "kl_estimator", "k9"),
        (ValueError, "placement", "first"),
        (ValueError, "clip", -1.0),
        (ValueError, "has_eos", torch.ones(B, T)),
        (ValueError, "kl_coef", math.nan),
        (TypeError, "kl_coef", "0.1"),
    ],
)
def test_arguments_of_shape_rewards(error, name, value):
    changed = {name: value} | ({"missing_eos_penalty": 1.0} if name == "has_eos" else {})
    refuses(rewards, error, name, **changed)


def test_missing_eos_penalty_needs_has_eos():
    refuses(rewards, ValueError, "has_eos", missing_eos_penalty=1.0)


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (TypeError, "x", [1.0]),
        (TypeError, "x", INT),
        (ValueError, "mask", torch.ones(B, 1)),
        (ValueError, "eps", -1.0),
        (ValueError, "eps", math.nan),
        (ValueError, "eps_on", "variance"),
        (TypeError, "process_group", object()),
    ],
)
def test_arguments_of_masked_whiten(error, name, value):
    refuses(whiten, error, name, **{name: value})


def test_unknown_keywords_are_type_errors_everywhere():
    for call in (scores, policy, fused, advantages, rewards, whiten):
        with pytest.raises(TypeError, match="clip_ratio_c"):
            call(clip_ratio_c=3.0)


@pytest.mark.parametrize(("name", "value"), [("target", 0.0), ("target", -1.0), ("horizon", 0), ("horizon", -5)])
def test_arguments_of_the_adaptive_controller(name, value):
    refuses(
        AdaptiveKLController, ValueError, name, **({"init_kl_coef": 0.1, "target": 6.0, "horizon": 100} | {name: value})
    )


def test_nothing_is_modified_or_leaked_by_a_refused_call():
    logits = torch.randn(2, V, requires_grad=True)
    kept = logits.detach().clone()
    with pytest.raises(IndexError):
        fused_ppo_loss(logits, torch.tensor([0, V], device="cpu"), torch.zeros(2), torch.ones(2), inplace_grad=True)
    assert torch.equal(logits.detach(), kept)
    assert logits._version == 0
