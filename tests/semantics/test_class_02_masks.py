"""Class 2: values at masked slots, empty masks, denominators."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_logits_grad, leaf, same_bits
from oracle import INF, NAN, LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss

AGGREGATIONS = [
    {"aggregation": "token-mean"},
    {"aggregation": "seq-mean-token-mean"},
    {"aggregation": "seq-mean-token-mean", "agg_include_empty": True},
    {"aggregation": "seq-mean-token-sum"},
    {"aggregation": "seq-mean-token-sum-norm", "agg_max_len": 8},
]
PER_TOKEN = [
    "logprobs",
    "old_logprobs",
    "advantages",
    "entropy",
    "values",
    "old_values",
    "returns",
    "ref_logprobs",
    "token_weights",
]


def full_batch(shape=(3, 4)):
    """Every per-token argument of ppo_loss, away from the kinks of the loss."""
    logprobs = -torch.rand(shape) - 0.5
    batch = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + torch.tensor([0.05, -0.1, 0.4, -0.5])[: shape[-1]],
        "advantages": torch.randn(shape),
        "entropy": torch.rand(shape) + 1,
        "values": torch.randn(shape),
        "returns": torch.randn(shape),
        "ref_logprobs": logprobs - 0.3,
        "token_weights": torch.rand(shape) + 0.5,
    }
    return batch | {"old_values": batch["values"] + 0.05}


def config_and_spec(**options):
    options = {"entropy_coef": 0.02, "kl_coef": 0.1, "value_clip": 0.2} | options
    return PPOLossConfig(**options), LossSpec(**options)


def call(batch, mask, config, **rest):
    batch = dict(batch)
    first = [batch.pop(name) for name in ("logprobs", "old_logprobs", "advantages")]
    return ppo_loss(*first, mask, config=config, **batch, **rest)


def call_oracle(batch, mask, spec, **rest):
    renamed = {"ref_logprobs": "ref"}
    batch = dict(batch)
    first = [batch.pop(name) for name in ("logprobs", "old_logprobs", "advantages")]
    return oracle.ppo(*first, mask, spec=spec, **{renamed.get(k, k): v for k, v in batch.items()}, **rest)


@pytest.mark.parametrize("payload", [NAN, INF, -INF, 3.0e38])
@pytest.mark.parametrize("slot", ["logprobs", "old_logprobs", "advantages"])
def test_case_11_payload_of_a_masked_slot_by_hand(slot, payload):
    args = {"logprobs": [[0.0, 0.0]], "old_logprobs": [[0.0, 0.0]], "advantages": [[1.0, 1.0]]}
    args = {k: torch.tensor(v) for k, v in args.items()}
    args[slot][0, 1] = payload
    args["logprobs"].requires_grad_()
    out = ppo_loss(*args.values(), torch.tensor([[1, 0]]))
    out.loss.backward()
    assert out.loss == -1
    assert args["logprobs"].grad.tolist() == [[-1, 0]]
    metrics = out.metrics.compute()
    assert metrics["approx_kl_k1"] == metrics["approx_kl_k2"] == metrics["approx_kl_k3"] == 0
    assert metrics["clip_fraction"] == 0
    assert metrics["nonfinite"] == 0
    assert metrics["tokens"] == 1


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: "-".join(map(str, a.values())))
@pytest.mark.parametrize("payload", [NAN, INF, -INF])
@pytest.mark.parametrize("slot", PER_TOKEN)
def test_case_12_no_argument_leaks_from_masked_slots_in_any_aggregation(slot, payload, aggregation):
    batch = full_batch()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    config, _ = config_and_spec(**aggregation)

    def run(poison):
        inputs = {k: v.clone() for k, v in batch.items()}
        if poison:
            inputs[slot][~mask] = payload
        for name in ("logprobs", "entropy", "values"):
            inputs[name].requires_grad_()
        out = call(inputs, mask, config)
        out.loss.backward()
        return out, [inputs[name].grad for name in ("logprobs", "entropy", "values")]

    clean, clean_grads = run(False)
    poisoned, grads = run(True)
    assert clean.loss.isfinite()
    assert same_bits(clean.loss, poisoned.loss)
    for a, b in zip(clean_grads, grads, strict=True):
        assert same_bits(a, b)
        assert (b[~mask] == 0).all()
    assert clean.metrics.compute() == poisoned.metrics.compute()


@pytest.mark.parametrize("payload", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_11_a_whole_masked_row_of_logits(dtype, payload):
    logits = torch.randn(2, 3, 33, dtype=dtype)
    tokens = torch.randint(33, (2, 3))
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    old, adv = torch.full((2, 3), -3.5), torch.randn(2, 3)
    results = []
    for poison in (False, True):
        x = logits.clone()
        if poison:
            x[~mask] = payload
        x.requires_grad_()
        out = fused_ppo_loss(x, tokens, old, adv, mask, config=PPOLossConfig(entropy_coef=0.01))
        out.loss.backward()
        results.append((out.loss, out.logprobs, x.grad))
        assert (x.grad[~mask] == 0).all()
        assert (out.logprobs[~mask] == 0).all()
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(
    "slot", ["logprobs", "old_logprobs", "advantages", "entropy", "values", "returns", "ref_logprobs"]
)
def test_case_11_an_unmasked_nan_stays_visible(slot):
    batch = full_batch()
    batch[slot][2, 1] = NAN
    config, _ = config_and_spec(value_clip=None)
    batch.pop("old_values")
    assert call(batch, torch.ones(3, 4), config).loss.isnan()


def test_case_11_metrics_count_an_unmasked_nan():
    logprobs = torch.tensor([[-1.0, NAN, -1.0]])
    out = ppo_loss(logprobs, torch.full((1, 3), -1.0), torch.ones(1, 3), torch.tensor([[1, 1, 0]]))
    assert out.metrics.compute()["nonfinite"] == 1


def test_case_13_numerator_leaves_masked_tokens_out():
    # at ratio 1 the loss of a token is -advantage
    logprobs = torch.zeros(2, 2, requires_grad=True)
    adv = torch.tensor([[-1.0, -100.0], [-1.0, 50.0]])
    out = ppo_loss(logprobs, torch.zeros(2, 2), adv, torch.tensor([[1, 0], [1, 0]]))
    out.loss.backward()
    assert out.loss == 1
    assert logprobs.grad.tolist() == [[0.5, 0], [0.5, 0]]


def test_case_14_masked_mean_divides_by_the_valid_count():
    adv = torch.tensor([[-2.0, -2, -9, -9]])
    assert ppo_loss(torch.zeros(1, 4), torch.zeros(1, 4), adv, torch.tensor([[1, 1, 0, 0]])).loss == 2


@pytest.mark.parametrize("aggregation", AGGREGATIONS[1:], ids=lambda a: "-".join(map(str, a.values())))
def test_case_15_padding_advantages_do_not_enter_sequence_losses(aggregation):
    zeros, mask = torch.zeros(1, 4), torch.tensor([[1, 1, 0, 0]])
    config = PPOLossConfig(**aggregation)
    padded = ppo_loss(zeros, zeros, torch.tensor([[1.0, 1, 10, 10]]), mask, config=config).loss
    clean = ppo_loss(zeros, zeros, torch.tensor([[1.0, 1, 0, 0]]), mask, config=config).loss
    assert same_bits(padded, clean)
    if aggregation["aggregation"] == "seq-mean-token-mean":
        assert padded == -1


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: "-".join(map(str, a.values())))
def test_case_16_empty_mask_gives_exactly_zero(aggregation):
    config, _ = config_and_spec(**aggregation)
    inputs = full_batch((2, 3))
    for name in ("logprobs", "entropy", "values"):
        inputs[name].requires_grad_()
    out = call(inputs, torch.zeros(2, 3), config)
    assert out.loss == 0
    assert out.loss.grad_fn is not None
    assert out.policy_loss == out.value_loss == out.kl == 0
    out.loss.backward()
    for name in ("logprobs", "entropy", "values"):
        assert inputs[name].grad is not None
        assert (inputs[name].grad == 0).all()
    metrics = out.metrics.compute()
    assert metrics["tokens"] == metrics["value_tokens"] == 0
    for key, value in metrics.items():
        assert np.isfinite(value), key


@pytest.mark.parametrize(
    "aggregation",
    [a for a in AGGREGATIONS if not a.get("agg_include_empty")],
    ids=lambda a: "-".join(map(str, a.values())),
)
def test_case_16_an_empty_row_changes_nothing(aggregation):
    config, spec = config_and_spec(**aggregation)
    batch = full_batch((2, 3))
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    with_empty = call(batch, mask, config).loss
    without = call({k: v[:1] for k, v in batch.items()}, mask[:1], config).loss
    assert_close(with_empty, call_oracle(batch, mask, spec).loss, 5e-7)
    assert_close(with_empty, without, 2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inplace_grad", [False, True])
@pytest.mark.parametrize("shift", [False, True])
def test_case_17_all_tokens_masked_still_backpropagates_zeros(dtype, inplace_grad, shift):
    logits = torch.randn(2, 3, 17, dtype=dtype).requires_grad_()
    z = logits * 1
    shape = (2, 2) if shift else (2, 3)
    out = fused_ppo_loss(
        z,
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(shape),
        torch.ones(shape),
        torch.zeros(shape),
        shift=shift,
        inplace_grad=inplace_grad,
    )
    assert out.loss == 0
    assert out.loss.requires_grad
    assert out.loss.grad_fn is not None
    out.loss.backward()
    assert logits.grad.dtype == dtype
    assert logits.grad.shape == logits.shape
    assert (logits.grad == 0).all()


def test_case_17_masked_scores_backpropagate_zeros():
    logits = torch.randn(2, 3, 17, requires_grad=True)
    lp, h = logprobs_from_logits(logits, torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3), return_entropy=True)
    (lp.sum() + h.sum()).backward()
    assert (lp == 0).all()
    assert (h == 0).all()
    assert (logits.grad == 0).all()


LOSSES = torch.tensor([[1.0, 1, 1, 1], [4, 0, 0, 0]])
ROW_18_MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"aggregation": "token-mean"}, 1.6),
        ({"aggregation": "seq-mean-token-mean"}, 2.5),
        ({"aggregation": "seq-mean-token-sum"}, 4.0),
        ({"aggregation": "seq-mean-token-sum-norm", "agg_max_len": 4}, 1.0),
    ],
)
@pytest.mark.parametrize("padding", [0, 1, 5])
def test_case_18_denominators_by_hand_and_under_padding(options, expected, padding):
    adv = torch.nn.functional.pad(-LOSSES, (0, padding), value=7.0)
    mask = torch.nn.functional.pad(ROW_18_MASK, (0, padding))
    zeros = torch.zeros_like(adv)
    assert_close(ppo_loss(zeros, zeros, adv, mask, config=PPOLossConfig(**options)).loss, expected, 2e-7)


@pytest.mark.parametrize(("include_empty", "expected"), [(False, 2.5), (True, 5 / 3)])
def test_case_19_whether_a_fully_masked_row_is_counted_is_an_option(include_empty, expected):
    adv = torch.cat([-LOSSES, torch.full((1, 4), 3.0)])
    mask = torch.cat([ROW_18_MASK, torch.zeros(1, 4, dtype=torch.long)])
    config = PPOLossConfig(aggregation="seq-mean-token-mean", agg_include_empty=include_empty)
    zeros = torch.zeros(3, 4)
    assert_close(ppo_loss(zeros, zeros, adv, mask, config=config).loss, expected, 2e-7)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.bfloat16, torch.float16],
)
def test_case_20_counts_do_not_saturate_in_the_dtype_of_the_mask(dtype):
    """bf16 cannot count past 256, uint8 not past 255, int8 not past 127."""
    n = 3001
    zeros = torch.zeros(1, n)
    out = ppo_loss(zeros, zeros, torch.ones(1, n), torch.ones(1, n, dtype=dtype))
    assert_close(out.loss, -1.0, 5e-7)
    assert out.metrics.compute()["tokens"] == n


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    ],
)
def test_case_21_every_mask_dtype_means_the_same(dtype):
    batch = full_batch()
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    config, _ = config_and_spec()
    assert same_bits(call(batch, mask.to(dtype), config).loss, call(batch, mask.bool(), config).loss)
    logits, tokens = torch.randn(3, 4, 9), torch.randint(9, (3, 4))
    assert same_bits(
        logprobs_from_logits(logits, tokens, mask.to(dtype)), logprobs_from_logits(logits, tokens, mask.bool())
    )


def test_case_21_a_fractional_mask_is_refused_not_truncated():
    with pytest.raises(ValueError, match="mask"):
        ppo_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[1.0, 0.5]]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: "-".join(map(str, a.values())))
def test_every_term_and_gradient_under_masks_matches_the_oracle(aggregation):
    batch = full_batch((4, 4))
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    config, spec = config_and_spec(**aggregation)
    for name in ("logprobs", "entropy", "values"):
        batch[name].requires_grad_()
    out = call(batch, mask, config, loss_scale=1.5)
    want = call_oracle(batch, mask, spec, loss_scale=1.5)
    out.loss.backward()
    assert_close(out.loss, want.loss, 1e-6, scale=0.1)
    assert_close(batch["logprobs"].grad, want.d_logprobs, 5e-7, scale=1e-2)
    assert_close(batch["entropy"].grad, want.d_entropy, 5e-7)
    assert_close(batch["values"].grad, want.d_values, 5e-7, scale=1e-2)


def test_token_weights_scale_the_loss_but_not_the_denominator():
    zeros, adv = torch.zeros(1, 4), torch.full((1, 4), -1.0)
    out = ppo_loss(zeros, zeros, adv, torch.tensor([[1, 1, 1, 0]]), token_weights=torch.tensor([[0.0, 2.0, 0.5, 9.0]]))
    assert_close(out.loss, 2.5 / 3, 2e-7)


def test_masked_logits_gradient_is_written_not_left_uninitialised():
    """An early return for masked rows must still write zeros; NaN-filled memory makes a miss visible."""
    for _ in range(3):
        garbage = torch.full((64, 2048), NAN)
        del garbage
        logits = leaf(torch.randn(64, 2048))
        mask = (torch.arange(64) % 3 == 0).long()
        fused_ppo_loss(logits, torch.zeros(64, dtype=torch.long), torch.zeros(64), torch.ones(64), mask).loss.backward()
        assert (logits.grad[mask == 0] == 0).all()


def test_rows_with_zero_advantage_or_clipped_ratio_get_exactly_zero_gradient():
    logits = leaf(torch.randn(3, 50))
    tokens = torch.tensor([1, 2, 3])
    lp = logprobs_from_logits(logits.detach(), tokens)
    old = lp - torch.tensor([0.0, 1.0, 0.05])  # row 1: ratio e, clipped for a positive advantage
    out = fused_ppo_loss(logits, tokens, old, torch.tensor([0.0, 1.0, 1.0]))
    out.loss.backward()
    want = oracle.fused(logits, tokens, old, torch.tensor([0.0, 1.0, 1.0]), spec=LossSpec())
    assert (logits.grad[:2] == 0).all()
    assert_logits_grad(logits.grad, want.d_logits)
