"""Rollout correction: weights for tokens that another engine sampled, by rollout_is_level and rollout_is_mode."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_close, leaf, same_bits

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

NAN, INF = math.nan, math.inf
W = ("rollout_is_weights",)
LEVELS = ("token", "sequence", "sequence_geomean")
MODES = ("truncate", "mask", "seq_mask")


def weights_of(*rows, mask=None, entry="logprobs", **options):
    """w per token for rows of ratios pi_old / pi_rollout; A = 1 and pi = pi_old, so that the policy loss is -w."""
    ratios = torch.tensor(rows, dtype=torch.float64)
    old = torch.full(ratios.shape, -1.0)
    rollout = (-1 - ratios.log()).float()
    config = PPOLossConfig(per_token_outputs=(*W, "policy_loss"), aggregation="token-sum", **options)
    rest = {"rollout_logprobs": rollout, "mask": mask, "config": config}
    if entry == "logits":
        logits = torch.stack([old, torch.log1p(-old.exp())], -1).requires_grad_()
        out = fused_ppo_loss(logits, torch.zeros(ratios.shape, dtype=torch.long), old, torch.ones(ratios.shape), **rest)
    else:
        out = ppo_loss(old.requires_grad_(), old.detach(), torch.ones(ratios.shape), **rest)
    weights = out.per_token["rollout_is_weights"]
    assert_close(out.per_token["policy_loss"], -weights, 1e-6)
    assert_close(out.loss, -weights.sum(), 2e-6, scale=1.0)
    out.loss.backward()
    return weights.tolist()


# ---- by hand --------------------------------------------------------------------------------------------------------

RATIOS = (2.0, 0.5, 4.0)  # their product 4, its cube root 1.587
GEOMEAN = 4.0 ** (1 / 3)
BY_HAND = [
    ("token", "truncate", (0.6, 3.0), (2, 0.6, 3)),
    ("token", "truncate", (None, 3.0), (2, 0.5, 3)),
    ("token", "truncate", (0.6, None), (2, 0.6, 4)),
    ("token", "truncate", (None, None), (2, 0.5, 4)),
    ("token", "mask", (0.6, 3.0), (2, 0, 0)),
    ("token", "mask", (None, 3.0), (2, 0.5, 0)),
    ("token", "mask", (0.6, None), (2, 0, 4)),
    ("token", "seq_mask", (0.6, 3.0), (2, 0.5, 4)),  # the mean decides; the weights are not truncated
    ("token", "seq_mask", (0.6, 1.5), (0, 0, 0)),
    ("token", "seq_mask", (1.6, None), (0, 0, 0)),
    ("sequence", "truncate", (0.6, 3.0), (3, 3, 3)),
    ("sequence", "truncate", (4.5, None), (4.5, 4.5, 4.5)),
    ("sequence", "mask", (0.6, 3.0), (0, 0, 0)),
    ("sequence", "mask", (0.6, 5.0), (4, 4, 4)),
    ("sequence", "seq_mask", (0.6, 3.0), (4, 4, 4)),
    ("sequence", "seq_mask", (0.6, 1.5), (0, 0, 0)),
    ("sequence_geomean", "truncate", (0.6, 3.0), (GEOMEAN,) * 3),
    ("sequence_geomean", "truncate", (0.6, 1.5), (1.5,) * 3),
    ("sequence_geomean", "mask", (0.6, 3.0), (GEOMEAN,) * 3),
    ("sequence_geomean", "mask", (0.6, 1.5), (0, 0, 0)),
    ("sequence_geomean", "seq_mask", (0.6, 1.5), (0, 0, 0)),
]


@pytest.mark.parametrize(
    ("entry", "level", "mode", "bounds", "want"),
    [*(("logprobs", *row) for row in BY_HAND), *(("logits", *row) for row in BY_HAND[::4])],
)
def test_weights_by_hand(entry, level, mode, bounds, want):
    """The second row, ratios of 1, shows that each sequence has its own; the masked fourth column that it is not in."""
    options = {"rollout_is_level": level, "rollout_is_mode": mode}
    options |= {"rollout_is_min": bounds[0], "rollout_is_max": bounds[1]}
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    got = weights_of((*RATIOS, 1e3), (1.0, 1.0, 1e9, 1e-9), mask=mask, entry=entry, **options)
    low, high = (bounds[0] or 0.0), (bounds[1] or INF)
    ones = min(max(1.0, low), high) if mode == "truncate" else float(low <= 1 <= high)
    assert_close(got, [[*want, 0.0], [ones, ones, 0.0, 0.0]], 1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_exactly_on_a_bound_is_inside(level, mode):
    options = {"rollout_is_level": level, "rollout_is_mode": mode, "rollout_is_min": 1.0, "rollout_is_max": 1.0}
    assert weights_of((1.0, 1.0), **options) == [[1.0, 1.0]]


@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("how", ["logprobs", "weights", "per sequence"])
def test_weights_of_one_change_no_bit(how, ratio_level, loss_type):
    lp, old, advantages = torch.randn(3, 4), torch.randn(3, 4) * 0.5, torch.randn(3, 4)
    config = PPOLossConfig(ratio_level=ratio_level, loss_type=loss_type, rollout_is_max=1.0, rollout_is_mode="mask")
    given = {
        "logprobs": {"rollout_logprobs": old},
        "weights": {"rollout_is_weights": torch.ones(3, 4)},
        "per sequence": {"rollout_is_weights": torch.ones(3)},
    }[how]
    a, b = leaf(lp), leaf(lp)
    plain = ppo_loss(a, old, advantages, config=config)
    corrected = ppo_loss(b, old, advantages, config=config, **given)
    plain.loss.backward()
    corrected.loss.backward()
    assert same_bits(plain.loss.detach(), corrected.loss.detach())
    assert same_bits(a.grad, b.grad)
    assert same_bits(plain.metrics.packed, corrected.metrics.packed)


@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
@pytest.mark.parametrize(
    ("entry", "ratio_level"), [("logprobs", "token"), ("logprobs", "sequence"), ("logits", "token")]
)
def test_a_weight_multiplies_the_policy_loss_and_nothing_else(entry, ratio_level, loss_type):
    """Twice the weight: twice the policy loss, the same KL, entropy and value losses, the same metrics."""
    logits, ids = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    old, ref, advantages = torch.randn(2, 3) - 1.5, torch.randn(2, 3) - 1.5, torch.randn(2, 3)
    rest = {"ref_logprobs": ref, "values": torch.randn(2, 3), "returns": torch.randn(2, 3)}
    results = []
    for factor in (1.0, 2.0):
        config = PPOLossConfig(
            ratio_level=ratio_level,
            loss_type=loss_type,
            kl_coef=0.2,
            entropy_coef=0.1,
            per_token_outputs=("policy_loss", "kl"),
        )
        weights = torch.full((2, 3), factor)
        if entry == "logits":
            x = leaf(logits)
            out = fused_ppo_loss(x, ids, old, advantages, config=config, rollout_is_weights=weights, **rest)
        else:
            x = leaf(torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0])
            out = ppo_loss(
                x, old, advantages, entropy=torch.ones(2, 3), config=config, rollout_is_weights=weights, **rest
            )
        out.loss.backward()
        results.append((out, x.grad))
    (one, grad), (two, grad_two) = results
    assert_close(two.policy_loss, 2 * one.policy_loss, 1e-6)
    assert_close(two.per_token["policy_loss"], 2 * one.per_token["policy_loss"], 1e-6)
    assert same_bits(two.per_token["kl"], one.per_token["kl"])
    assert same_bits(two.kl, one.kl)
    assert same_bits(two.value_loss, one.value_loss)
    assert same_bits(two.metrics.packed, one.metrics.packed)
    assert_close(two.loss - one.loss, one.policy_loss, 1e-6, scale=float(two.loss.detach().abs()) + 1)
    assert not same_bits(grad, grad_two)


def test_the_weight_is_a_constant_also_when_the_old_policy_is_the_current_one():
    """old_logprobs=None: w = pi / pi_rollout of this very step; the gradient is w times the policy gradient."""
    rollout = torch.tensor([[-1.0, -2.0, -1.5]])
    logits, ids = torch.randn(1, 3, 4), torch.tensor([[0, 1, 2]])
    advantages = torch.tensor([[1.0, -2.0, 0.5]])
    config = PPOLossConfig(per_token_outputs=W, rollout_is_max=100.0, aggregation="token-sum")
    x = leaf(logits)
    out = fused_ppo_loss(x, ids, None, advantages, rollout_logprobs=rollout, config=config)
    out.loss.backward()
    lp = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    weights = (lp - rollout).exp()
    assert_close(out.per_token["rollout_is_weights"], weights, 2e-6)
    assert_close(out.loss, -(weights * advantages).sum(), 2e-6, scale=1.0)
    y = leaf(logits)
    plain = fused_ppo_loss(
        y, ids, None, advantages, rollout_is_weights=weights, config=PPOLossConfig(aggregation="token-sum")
    )
    plain.loss.backward()
    assert_close(x.grad, y.grad, 2e-6, scale=0.5)


# ---- the denominator ------------------------------------------------------------------------------------------------

DENOMINATORS = [  # policy losses of tokens that stay: row 0 has tokens 0 and 2 of three, row 1 none of two, row 2 one
    ("token-mean", True, 6, (1, 1, 1)),
    ("token-mean", False, 3, (1, 1, 1)),
    ("seq-mean-token-mean", True, 3, (1 / 3, 1 / 3, 1)),
    ("seq-mean-token-mean", False, 2, (1 / 2, 1 / 2, 1)),
    ("seq-mean-token-sum", True, 3, (1, 1, 1)),
    ("seq-mean-token-sum", False, 2, (1, 1, 1)),
    ("seq-mean-token-sum-norm", True, 3, (0.1, 0.1, 0.1)),
    ("seq-mean-token-sum-norm", False, 2, (0.1, 0.1, 0.1)),
    ("token-sum", True, 1, (1, 1, 1)),
    ("token-sum", False, 1, (1, 1, 1)),
]


@pytest.mark.parametrize("entry", ["logprobs", "logits"])
@pytest.mark.parametrize(("aggregation", "kept", "divisor", "shares"), DENOMINATORS)
def test_rejected_tokens_stay_in_the_denominator_or_leave_it(aggregation, kept, divisor, shares, entry):
    """Every term: rejected tokens lose only their policy loss, or also their KL, entropy and place in the metrics."""
    weights = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 9.0], [1.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    advantages = torch.tensor([[1.0, 50.0, 2.0], [50.0, 50.0, NAN], [4.0, NAN, NAN]])
    ids, zeros = torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, 3)
    ones = torch.full((3, 3), -math.log(2))
    config = PPOLossConfig(
        aggregation=aggregation,
        agg_max_len=10.0,
        rollout_mask_in_denominator=kept,
        kl_coef=1.0,
        kl_estimator="k1",
        entropy_coef=1.0,
    )
    rest = {"config": config, "rollout_is_weights": weights, "ref_logprobs": ones - 0.5}
    rest |= {"values": zeros + 1, "returns": zeros}
    if entry == "logits":
        out = fused_ppo_loss(torch.zeros(3, 3, 2, requires_grad=True), ids, ones, advantages, mask, **rest)
    else:
        out = ppo_loss(ones, ones, advantages, mask, entropy=-ones, **rest)
    policy = -sum(s * a for s, a in zip(shares, (1.0, 2.0, 4.0), strict=True)) / divisor
    assert out.policy_loss.item() == pytest.approx(policy, rel=1e-6)
    metrics = out.metrics.compute()
    assert metrics["tokens"] == (6 if kept else 3)
    assert metrics["value_tokens"] == 6  # values were sampled by nobody
    lengths, rows = ((3, 2, 1), 3) if kept else ((2, 0, 1), 2)
    by_mode = {
        "token-mean": 1.0,
        "seq-mean-token-mean": 1.0,
        "seq-mean-token-sum": sum(lengths) / rows,
        "seq-mean-token-sum-norm": sum(lengths) / rows / 10,
        "token-sum": float(sum(lengths)),
    }
    assert out.kl.item() == pytest.approx(0.5 * by_mode[aggregation], rel=1e-6)
    values = {
        "token-mean": 1,
        "seq-mean-token-mean": 1,
        "seq-mean-token-sum": 2,
        "seq-mean-token-sum-norm": 0.2,
        "token-sum": 6,
    }
    assert out.value_loss.item() == pytest.approx(0.5 * values[aggregation], rel=1e-6)
    total = policy + (0.5 - math.log(2)) * by_mode[aggregation] + 0.25 * values[aggregation]
    assert out.loss.item() == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
@pytest.mark.parametrize("kept", [True, False])
def test_rejected_tokens_that_leave_the_mask_leave_the_mean_ratio_too(kept, level):
    """verl masks them before the loss: the GSPO ratio of log-ratios (0.2, 0) without the second is e^0.2."""
    config = PPOLossConfig(
        ratio_level=level, rollout_mask_in_denominator=kept, per_token_outputs=("ratio",), clip_low=0.5, clip_high=0.5
    )
    lp = torch.tensor([[0.2, 0.0]], requires_grad=True)
    out = ppo_loss(
        lp, torch.zeros(1, 2), torch.ones(1, 2), config=config, rollout_is_weights=torch.tensor([[1.0, 0.0]])
    )
    out.loss.backward()
    ratio = math.exp(0.1 if kept else 0.2)
    assert_close(out.per_token["ratio"], [[ratio, ratio if kept else 0.0]], 1e-6)
    assert_close(out.loss, -ratio / (2 if kept else 1), 1e-6)
    assert lp.grad[0, 0] < 0
    assert (lp.grad[0, 1] != 0) == (kept and level == "sequence")


@pytest.mark.parametrize("entry", ["logprobs", "logits"])
@pytest.mark.parametrize("loss_type", ["ppo", "cispo"])
def test_a_rejected_token_is_not_counted_as_clipped_but_by_cispo_which_does_not_look_at_the_advantage(loss_type, entry):
    old, zero = torch.full((1, 1), -math.log(2) - 1.0), torch.zeros(1, 1)
    config = PPOLossConfig(loss_type=loss_type, per_token_outputs=("clip_mask",))
    for weight in (1.0, 0.0):
        rest = {"rollout_is_weights": zero + weight, "config": config}
        if entry == "logits":
            out = fused_ppo_loss(torch.zeros(1, 1, 2, requires_grad=True), zero.long(), old, zero + 1, **rest)
        else:
            out = ppo_loss(zero - math.log(2), old, zero + 1, **rest)
        counted = bool(weight) or loss_type == "cispo"
        assert out.metrics.compute()["clip_fraction_high"] == counted
        assert out.per_token["clip_mask"].item() is counted


# ---- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["logprobs", "logits"])
def test_weights_per_sequence_padded_and_packed(entry):
    per_sequence, lengths = torch.tensor([0.5, 2.0, 0.0]), [3, 1, 2]
    spread = per_sequence.repeat_interleave(torch.tensor(lengths))
    advantages, logits, ids = torch.randn(6), torch.randn(6, 5), torch.randint(5, (6,))
    ends = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    config = PPOLossConfig(aggregation="seq-mean-token-mean", rollout_mask_in_denominator=False, per_token_outputs=W)
    results = []
    for weights in (per_sequence, spread):
        rest = {"rollout_is_weights": weights, "cu_seqlens": ends, "config": config}
        x = leaf(logits if entry == "logits" else logits[:, 0])
        out = (
            fused_ppo_loss(x, ids, None, advantages, **rest)
            if entry == "logits"
            else ppo_loss(x, None, advantages, **rest)
        )
        out.loss.backward()
        results.append((out, x.grad))
    (a, grad), (b, grad_b) = results
    assert same_bits(a.loss.detach(), b.loss.detach())
    assert same_bits(grad, grad_b)
    assert a.per_token["rollout_is_weights"].tolist() == spread.tolist()
    assert a.metrics.compute()["tokens"] == 4


def test_square_batches_take_one_weight_per_sequence_not_per_token():
    out = ppo_loss(
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        torch.ones(2, 2),
        rollout_is_weights=torch.tensor([0.5, 2.0]),
        config=PPOLossConfig(per_token_outputs=W),
    )
    assert out.per_token["rollout_is_weights"].tolist() == [[0.5, 0.5], [2.0, 2.0]]


# ---- extremes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["logprobs", "logits"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_that_overflow_are_truncated_or_rejected(level, sign, entry):
    """TRL's product over a long sequence: 200 tokens off by 1 nat each."""
    old = torch.full((1, 200), -1.0)
    rollout = old - sign if level == "sequence" else old - 200 * sign
    for mode, want in (("truncate", 3.0 if sign > 0 else 0.5), ("mask", 0.0)):
        config = PPOLossConfig(
            rollout_is_level=level, rollout_is_mode=mode, rollout_is_min=0.5, rollout_is_max=3.0, per_token_outputs=W
        )
        rest = {"rollout_logprobs": rollout, "config": config}
        if entry == "logits":
            x = torch.zeros(1, 200, 3).requires_grad_()
            out = fused_ppo_loss(x, torch.zeros(1, 200, dtype=torch.long), old, torch.ones(1, 200), **rest)
        else:
            x = leaf(old)
            out = ppo_loss(x, old, torch.ones(1, 200), **rest)
        out.loss.backward()
        assert (out.per_token["rollout_is_weights"] == want).all()
        assert x.grad.isfinite().all()
        assert x.grad.any() == (want != 0)


def test_a_weight_without_bounds_is_not_bounded():
    """No hidden clamp of the log: e^30 for a product of 30 tokens, each e^1."""
    config = PPOLossConfig(rollout_is_level="sequence", per_token_outputs=W)
    zeros = torch.zeros(1, 30)
    out = ppo_loss(zeros, zeros, zeros, rollout_logprobs=zeros - 1, config=config)
    assert_close(out.per_token["rollout_is_weights"], torch.full((1, 30), math.exp(30.0)), 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_sequences_product_keeps_its_digits(packed):
    """8192 log-ratios of 1e-3: the sum is 8.192; its error is the weight's relative error."""
    delta = torch.full((8192,) if packed else (1, 8192), 1e-3)
    config = PPOLossConfig(rollout_is_level="sequence", per_token_outputs=W)
    zeros = torch.zeros_like(delta)
    ends = torch.tensor([0, 8192], dtype=torch.int32) if packed else None
    out = ppo_loss(zeros, delta, zeros, rollout_logprobs=zeros, config=config, cu_seqlens=ends)
    want = math.exp(float(delta.double().sum()))
    assert_close(out.per_token["rollout_is_weights"].flatten()[0], want, 5e-6)


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_no_advantage_is_no_loss_whatever_the_weight(ratio_level):
    lp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    config = PPOLossConfig(ratio_level=ratio_level)
    out = ppo_loss(
        lp, lp.detach(), torch.tensor([[0.0, 1.0]]), config=config, rollout_is_weights=torch.tensor([[INF, 1.0]])
    )
    out.loss.backward()
    assert out.loss == -0.5
    assert lp.grad.isfinite().all()


@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
@pytest.mark.parametrize("ratio_level", ["token", "sequence_token"])
def test_a_rejected_token_may_hold_any_ratio_and_any_logprob(ratio_level, loss_type):
    """w = 0: nothing of its policy loss is left, not even an infinite one."""
    lp = torch.tensor([[-1.0], [-INF], [-1.0]], requires_grad=True)
    old = torch.tensor([[-200.0], [-1.0], [-1.25]])
    config = PPOLossConfig(loss_type=loss_type, ratio_level=ratio_level, aggregation="token-sum")
    out = ppo_loss(lp, old, -torch.ones(3, 1), config=config, rollout_is_weights=torch.tensor([[0.0], [0.0], [1.0]]))
    out.loss.backward()
    alone = torch.tensor([[-1.0]], requires_grad=True)
    want = ppo_loss(alone, old[2:], -torch.ones(1, 1), config=config)
    want.loss.backward()
    assert_close(out.loss, want.loss.detach(), 1e-6)
    assert lp.grad.flatten().tolist() == [0.0, 0.0, alone.grad.item()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("entry", ["logprobs", "logits"])
def test_masked_slots_of_rollout_inputs_are_not_read(entry, level, mode):
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    old, advantages = torch.full((2, 3), -1.0), torch.ones(2, 3)
    logits, ids = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    config = PPOLossConfig(
        rollout_is_level=level,
        rollout_is_mode=mode,
        rollout_is_min=0.5,
        rollout_is_max=2.0,
        rollout_mask_in_denominator=False,
        per_token_outputs=W,
        ratio_level="sequence",
    )
    found = []
    for junk in (0.0, NAN, INF, -INF):
        rollout = torch.tensor([[-1.2, junk, -0.9], [junk] * 3])
        x = leaf(logits if entry == "logits" else logits[..., 0])
        rest = {"rollout_logprobs": rollout, "config": config}
        if entry == "logits":
            out = fused_ppo_loss(x, ids, old, advantages, mask, **rest)
        else:
            out = ppo_loss(x, old, advantages, mask, **rest)
        out.loss.backward()
        found.append((out.loss.detach(), x.grad, out.metrics.packed, out.per_token["rollout_is_weights"]))
        assert out.loss != 0
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("entry", ["logprobs", "logits"])
def test_a_rollout_logprob_that_is_not_finite_is_masked_at_token_level(entry, bad):
    """vLLM returns NaN log-probs now and then."""
    rollout, old = torch.tensor([[-1.0, bad, -1.5]]), torch.full((1, 3), -1.25)
    config = PPOLossConfig(nonfinite="mask", per_token_outputs=W)
    logits, ids = torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.long)
    x = leaf(logits if entry == "logits" else logits[..., 0] - 1.25)
    rest = {"rollout_logprobs": rollout, "config": config}
    out = (
        fused_ppo_loss(x, ids, old, torch.ones(1, 3), **rest)
        if entry == "logits"
        else ppo_loss(x, old, torch.ones(1, 3), **rest)
    )
    out.loss.backward()
    ratio = 0.25 / math.exp(-1.25) if entry == "logits" else 1.0
    assert_close(out.loss, -ratio * (math.exp(-0.25) + math.exp(0.25)) / 3, 2e-6)
    assert x.grad.isfinite().all()
    assert not x.grad[0, 1].any()
    assert out.metrics.compute()["nonfinite"] == 1


@pytest.mark.parametrize(
    ("level", "mode", "high", "bad", "want"),
    [
        ("sequence", "truncate", 3.0, NAN, 2.0),
        ("sequence", "truncate", 3.0, INF, 2.0),
        ("sequence_geomean", "mask", 3.0, NAN, 2.0),
        ("sequence_geomean", "mask", 3.0, INF, 2.0),
        ("token", "seq_mask", 3.0, NAN, 2.0),
        ("token", "seq_mask", 3.0, INF, 2.0),
        ("sequence", "mask", 3.0, NAN, 2.0),
    ],
)
def test_a_rollout_logprob_that_is_not_finite_does_not_reach_its_sequences_weight(level, mode, high, bad, want):
    """It "adds nothing": the product and the mean are over the finite tokens, here one of ratio 2."""
    config = PPOLossConfig(
        nonfinite="mask",
        rollout_is_level=level,
        rollout_is_mode=mode,
        rollout_is_min=0.5,
        rollout_is_max=high,
        aggregation="token-sum",
    )
    x = torch.full((1, 2), -1.0, requires_grad=True)
    rollout = torch.tensor([[-1.0 - math.log(2), bad]])
    out = ppo_loss(x, x.detach(), torch.ones(1, 2), rollout_logprobs=rollout, config=config)
    out.loss.backward()
    assert_close(out.loss, -want, 1e-6)
    assert_close(x.grad, [[-want, 0.0]], 1e-6)
