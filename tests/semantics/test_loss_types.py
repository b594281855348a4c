"""loss_type "ppo", "cispo", "reinforce" and "sapo", worked out by hand: values, clips, and what overflows."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_close, leaf, same_bits
from variant_cases import tokens

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

INF, NAN = math.inf, math.nan
ENTRIES = pytest.mark.parametrize("entry", ["logprobs", "logits"])
LEVELS = pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
BOTH = pytest.mark.parametrize(  # from logits, the two levels of sequences differ in nothing that runs in a kernel
    ("entry", "level"),
    [
        *(("logprobs", level) for level in ("token", "sequence", "sequence_token")),
        ("logits", "token"),
        ("logits", "sequence"),
    ],
)
LOSS_TYPES = ("ppo", "cispo", "reinforce", "sapo")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gate(ratio, tau):
    return 4 / tau * sigmoid(tau * (ratio - 1))


def slope(ratio, tau):
    """Of the gate, by the log of the ratio."""
    return 4 * sigmoid(tau * (ratio - 1)) * sigmoid(-tau * (ratio - 1)) * ratio


def check(entry, table, **options):
    """Each row: (ratio, advantage, loss, dL/dlogprob) of a token of log-prob -1."""
    new = [-1.0] * len(table)
    old = [-1 - math.log(ratio) for ratio, *_ in table]
    losses, gradients, out = tokens(entry, new, old, [A for _, A, *_ in table], **options)
    assert_close(losses, [row[2] for row in table], 1e-6, scale=1e-6)
    assert_close(gradients, [row[3] for row in table], 2e-6, scale=1e-6)
    assert_close(out.loss, sum(row[2] for row in table), 1e-6, scale=1.0)
    return out.metrics.compute()


# ---- values ---------------------------------------------------------------------------------------------------------


@BOTH
def test_cispo_weighs_the_logprob_by_a_constant_clipped_on_both_sides(entry, level):
    """-A w l with l = -1: the loss is A w; the gradient -A w is there inside and outside of the bounds."""
    table = [(2.0, 1.0, 1.2, -1.2), (2.0, -1.0, -1.2, 1.2), (0.5, 1.0, 0.8, -0.8), (0.5, -2.0, -1.6, 1.6)]
    table += [(1.1, 2.0, 2.2, -2.2), (1.1, 0.0, 0.0, 0.0)]
    metrics = check(entry, table, loss_type="cispo", ratio_level=level)
    assert metrics["clip_fraction_low"] == pytest.approx(2 / 6)  # whatever the sign of A
    assert metrics["clip_fraction_high"] == pytest.approx(2 / 6)
    assert metrics["dual_clip_fraction"] == 0


@ENTRIES
@pytest.mark.parametrize(
    ("bounds", "weights"),
    [
        ({"cispo_ratio_max": 5.0}, (0.01, 2.0, 5.0)),
        ({"cispo_ratio_min": 0.5}, (0.5, 2.0, 100.0)),
        ({"cispo_ratio_min": 0.5, "cispo_ratio_max": 5.0}, (0.5, 2.0, 5.0)),
        ({"cispo_ratio_min": 3.0, "cispo_ratio_max": 3.0}, (3.0, 3.0, 3.0)),
        ({"cispo_ratio_max": 0.2}, (0.01, 0.2, 0.2)),  # a raw bound, not 1 + 0.2: TRL's epsilon_high
        ({"cispo_ratio_max": 0.0}, (0.0, 0.0, 0.0)),
    ],
)
def test_cispo_bounds_are_absolute_and_one_alone_has_no_partner(entry, bounds, weights):
    table = [(ratio, 1.0, w, -w) for ratio, w in zip((0.01, 2.0, 100.0), weights, strict=True)]
    check(entry, table, loss_type="cispo", **bounds)


@BOTH
def test_reinforce_has_no_ratio_but_still_reports_it(entry, level):
    table = [(r, A, A, -A) for r in (0.1, 1.0, 10.0) for A in (1.0, -2.0, 0.0)]
    metrics = check(entry, table, loss_type="reinforce", ratio_level=level)
    assert metrics["ratio_mean"] == pytest.approx(3.7, rel=1e-6)
    assert metrics["clip_fraction"] == 0


@BOTH
def test_sapo_gates_with_a_temperature_for_each_sign(entry, level):
    """At ratio 1 the gate is 2 / tau and its slope 1: the policy gradient."""
    table = [(1.0, 1.0, -2.0, -1.0), (1.0, -1.0, 2 / 1.05, 1.0), (1.0, 0.0, 0.0, 0.0)]
    table += [(r, 1.5, -1.5 * gate(r, 1.0), -1.5 * slope(r, 1.0)) for r in (0.3, 1.4, 6.0)]
    table += [(r, -1.5, 1.5 * gate(r, 1.05), 1.5 * slope(r, 1.05)) for r in (0.3, 1.4, 6.0)]
    metrics = check(entry, table, loss_type="sapo", ratio_level=level)
    assert metrics["clip_fraction"] == 0


@ENTRIES
def test_sapo_temperatures_are_options(entry):
    table = [(r, A, -A * gate(r, tau), -A * slope(r, tau)) for r in (0.5, 2.0) for A, tau in ((1.0, 3.0), (-1.0, 0.25))]
    check(entry, table, loss_type="sapo", sapo_tau_pos=3.0, sapo_tau_neg=0.25)
    assert check(entry, [(2.0, 1.0, -2.924234315, -1.572895466)], loss_type="sapo")["tokens"] == 1


@pytest.mark.parametrize("options", [{}, {"loss_type": "sapo"}], ids=["ppo", "sapo"])
def test_float64_keeps_the_options_in_float64(options):
    """1.2 and 1.05 once went through fp32."""
    lp = torch.tensor([[math.log(2.0)]], dtype=torch.float64)
    advantage = -1.0 if options else 1.0
    out = ppo_loss(lp, torch.zeros_like(lp), torch.full_like(lp, advantage), config=PPOLossConfig(**options))
    assert out.loss.item() == pytest.approx(gate(2.0, 1.05) if options else -1.2, rel=1e-14)


# ---- the log-ratio clamp --------------------------------------------------------------------------------------------


@ENTRIES
@pytest.mark.parametrize(
    ("loss_type", "up", "down"),
    [
        ("ppo", (math.exp(0.5), 0.0), (-math.exp(-0.5), 0.0)),
        ("sapo", (gate(math.exp(0.5), 1.05), 0.0), (-gate(math.exp(-0.5), 1.0), 0.0)),
        ("cispo", (-1.2, 1.2), (0.8, -0.8)),  # a constant of the ratio: the gradient of the log-prob stays
        ("reinforce", (-1.0, 1.0), (1.0, -1.0)),
    ],
)
def test_the_clamp_of_the_log_ratio_stops_only_gradients_through_the_ratio(entry, loss_type, up, down):
    table = [(math.exp(2.0), -1.0, *up), (math.exp(-2.0), 1.0, *down)]
    metrics = check(entry, table, loss_type=loss_type, log_ratio_clamp=0.5)
    assert metrics["log_ratio_clamp_fraction"] == 1
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.5), rel=1e-6)


def test_a_log_ratio_exactly_on_the_clamp_is_inside():
    for delta, gradient in ((0.5, math.exp(0.5)), (0.5000001, 0.0)):
        _, grads, out = tokens("logprobs", [delta], [0.0], [-1.0], log_ratio_clamp=0.5)
        assert grads == pytest.approx([gradient], rel=1e-6)
        assert out.metrics.compute()["log_ratio_clamp_fraction"] == (gradient == 0)


# ---- ratios exactly on a bound --------------------------------------------------------------------------------------


@LEVELS
def test_a_ratio_exactly_on_a_bound_keeps_its_gradient_and_is_not_counted_as_clipped(level):
    """Ratio 1 and bounds 1: the only ratio that exp gives exactly."""
    for loss_type, options in {
        "ppo": {"clip_low": 0.0},
        "cispo": {"cispo_ratio_min": 1.0, "cispo_ratio_max": 1.0},
    }.items():
        _, grads, out = tokens(
            "logprobs", [-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0], loss_type=loss_type, ratio_level=level, **options
        )
        assert grads == [-1.0, 1.0]
        assert out.metrics.compute()["clip_fraction"] == 0
        assert not out.per_token["clip_mask"].any()


# ---- overflow -------------------------------------------------------------------------------------------------------

OVERFLOW = {
    "ppo": [(100, 1, -1.2, 0), (100, 0, 0, 0), (-100, 0, 0, 0), (-100, 1, 0, 0), (-100, -1, 0.8, 0)],
    "cispo": [(100, 1, 1.2, -1.2), (100, -1, -1.2, 1.2), (-100, 1, 0.8, -0.8), (-100, -1, -0.8, 0.8), (100, 0, 0, 0)],
    "reinforce": [(100, 1, 1, -1), (100, -1, -1, 1), (-100, 1, 1, -1), (100, 0, 0, 0), (-100, 0, 0, 0)],
    "sapo": [
        (100, 1, -4, 0),
        (100, -1, 4 / 1.05, 0),
        (100, 0, 0, 0),
        (-100, 0, 0, 0),
        (-100, 1, -4 * sigmoid(-1), 0),
        (-100, -1, gate(0.0, 1.05), 0),
        (5, 1, -4, 0),  # e^5: the sigmoid's rest underflows, the ratio does not overflow
        (4, -1, gate(math.exp(4), 1.05), slope(math.exp(4), 1.05)),
    ],
}


@BOTH
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_log_ratios_of_100_leave_no_nan_where_a_clip_binds_or_the_advantage_is_zero(loss_type, level, entry):
    table = OVERFLOW[loss_type]
    old = [-1.0 - delta for delta, *_ in table]
    losses, grads, out = tokens(
        entry, [-1.0] * len(table), old, [float(row[1]) for row in table], loss_type=loss_type, ratio_level=level
    )
    assert_close(losses, [row[2] for row in table], 2e-6, scale=1e-30)
    assert_close(grads, [row[3] for row in table], 5e-6, scale=1e-25)
    assert_close(out.loss, sum(row[2] for row in table), 1e-6, scale=1.0)
    assert out.metrics.compute()["nonfinite"] == 0


@BOTH
@pytest.mark.parametrize("delta", [100.0, 1e30])
def test_dual_clip_binds_an_infinite_ratio(entry, level, delta):
    losses, grads, out = tokens(entry, [-1.0], [-1.0 - delta], [-2.0], dual_clip=3.0, ratio_level=level)
    assert (losses, grads, out.loss.item()) == ([6.0], [0.0], 6.0)
    assert out.metrics.compute()["dual_clip_fraction"] == 1
    assert out.per_token["dual_clip_mask"].item() is True


@BOTH
def test_an_unbounded_ratio_overflows_loudly_and_alone(entry, level):
    """A < 0 without dual_clip: the loss is what it is; the other tokens' gradients are theirs."""
    losses, grads, out = tokens(entry, [-1.0, -1.0], [-101.0, -1.0], [-1.0, -1.0], ratio_level=level)
    assert losses == [INF, 1.0]
    assert out.loss == INF
    assert out.metrics.compute()["nonfinite"] == 1
    assert not math.isfinite(grads[0])
    assert grads[1] == pytest.approx(1.0, rel=1e-6)


@LEVELS
def test_cispo_without_an_upper_bound_and_no_advantage_is_zero_at_any_ratio(level):
    losses, grads, out = tokens(
        "logprobs", [-1.0, -1.0], [-101.0, -1.0], [0.0, 1.0], loss_type="cispo", cispo_ratio_min=0.0, ratio_level=level
    )
    assert losses == [0.0, 1.0]
    assert grads == [0.0, -1.0]
    assert out.loss == 1.0


# ---- log-probs of -inf ----------------------------------------------------------------------------------------------

NO_PROBABILITY = [  # (options, A, loss, gradient) of l = -inf, o = -1: the ratio is 0
    ({}, 1.0, 0.0, 0.0),
    ({}, -1.0, 0.8, 0.0),
    ({}, 0.0, 0.0, 0.0),
    ({"loss_type": "sapo"}, 1.0, -gate(0.0, 1.0), 0.0),
    ({"loss_type": "sapo"}, -1.0, gate(0.0, 1.05), 0.0),
    ({"loss_type": "reinforce"}, 0.0, 0.0, 0.0),
    ({"loss_type": "reinforce"}, 1.0, INF, -1.0),
    ({"loss_type": "cispo"}, 0.0, 0.0, 0.0),
    ({"loss_type": "cispo"}, 1.0, INF, -0.8),
    ({"loss_type": "cispo", "cispo_ratio_max": 5.0}, 1.0, 0.0, 0.0),  # the weight is 0
]


@LEVELS
@pytest.mark.parametrize(("options", "A", "loss", "gradient"), NO_PROBABILITY, ids=str)
def test_a_token_without_probability(options, A, loss, gradient, level):
    losses, grads, out = tokens("logprobs", [-INF], [-1.0], [A], ratio_level=level, **options)
    assert_close(losses, [loss], 1e-6, scale=1e-30)
    assert_close(grads, [gradient], 1e-6)
    assert_close(out.loss, loss, 1e-6, scale=1e-30)
    assert out.metrics.compute()["nonfinite"] == (not math.isfinite(loss))


@LEVELS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("A", [0.0, 1.0, -1.0])
def test_the_gradient_of_logits_is_finite_where_the_token_has_no_probability(loss_type, level, A):
    """Row 0: p(token) = 0 by a -inf logit. dL/dz = c (1[i = y] - p): c is finite, so are the other columns."""
    x = torch.tensor([[[-INF, 0.5, 0.0]], [[1.0, 0.5, 0.0]]]).requires_grad_()
    zeros = torch.zeros(2, 1, dtype=torch.long)
    config = PPOLossConfig(loss_type=loss_type, ratio_level=level)
    old = torch.tensor([[-1.0], [-0.7]])
    fused_ppo_loss(x, zeros, old, torch.full((2, 1), A), config=config).loss.backward()
    assert x.grad.isfinite().all()
    if A == 0:
        assert not x.grad.any()
    if A == 1 and loss_type in ("ppo", "sapo"):
        assert not x.grad[0].any()
    if A == 1:
        assert x.grad[1].abs().max() > 0.1


@BOTH
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_nonfinite_mask_drops_the_token_and_keeps_the_denominator(loss_type, level, entry):
    """Tokens 1 and 2 are lost: one by its own log-prob, one by the old one. 4 tokens remain the denominator."""
    config = PPOLossConfig(loss_type=loss_type, ratio_level=level, nonfinite="mask", entropy_coef=0.1, kl_coef=0.2)
    old, ref = torch.tensor([[-1.0, -1.0, NAN, -1.2]]), torch.tensor([[-1.1, -1.3, -1.0, -1.0]])
    advantages = torch.tensor([[1.0, 2.0, 3.0, -1.0]])
    good = torch.tensor([[True, False, False, True]])
    logits = torch.randn(1, 4, 3)
    logits[0, 1, 0] = -INF
    ids = torch.zeros(1, 4, dtype=torch.long)

    def run(mask, config, normalizer):
        inputs = {"ref_logprobs": ref, "config": config, "normalizer": normalizer}
        if entry == "logits":
            x = leaf(logits)
            out = fused_ppo_loss(x, ids, old, advantages, mask, **inputs)
        else:
            x = leaf(torch.log_softmax(logits, -1)[..., 0])
            out = ppo_loss(x, old, advantages, mask, entropy=torch.ones(1, 4), **inputs)
        out.loss.backward()
        return out, x.grad

    out, grad = run(None, config, None)
    want, want_grad = run(good, PPOLossConfig(loss_type=loss_type, ratio_level=level, entropy_coef=0.1, kl_coef=0.2), 4)
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(grad, want_grad, 1e-6, scale=0.1)
    assert not grad[0, 1:3].any()
    metrics, others = out.metrics.compute(), want.metrics.compute()
    assert metrics.pop("nonfinite") == 2
    assert others.pop("nonfinite") == 0
    assert metrics == pytest.approx(others, rel=1e-6)


def test_nonfinite_counts_what_was_dropped_and_what_overflowed():
    """A NaN log-prob is dropped; a finite log-ratio of 100 that no clip binds is not: its loss is infinite."""
    _, grads, out = tokens("logprobs", [-1.0, NAN, -1.0], [-101.0, -1.0, -1.0], [-1.0] * 3, nonfinite="mask")
    assert out.loss == INF
    assert out.metrics.compute()["nonfinite"] == 2
    assert grads[1:] == [0.0, 1.0]


# ---- weights, masks, empty batches ----------------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("content", [NAN, INF, -INF])
def test_a_token_of_weight_zero_adds_nothing_whatever_its_inputs_hold(loss_type, level, content):
    advantages = torch.tensor([[content], [1.0]])
    weights = torch.tensor([[0.0], [1.0]])
    lp, old = leaf(torch.full((2, 1), -1.0)), torch.full((2, 1), -1.25)
    ref = torch.tensor([[content], [-1.5]])
    config = PPOLossConfig(loss_type=loss_type, ratio_level=level, kl_coef=0.1, aggregation="token-sum")
    out = ppo_loss(lp, old, advantages, config=config, token_weights=weights, ref_logprobs=ref)
    out.loss.backward()
    alone = leaf(torch.full((1, 1), -1.0))
    want = ppo_loss(alone, old[1:], advantages[1:], config=config, ref_logprobs=ref[1:])
    want.loss.backward()
    assert same_bits(out.loss, want.loss)
    assert lp.grad.tolist() == [[0.0], alone.grad[0].tolist()]


@pytest.mark.parametrize("shape", [(0, 3), (2, 3)])
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum", "none"]
)
@BOTH
def test_no_valid_token_gives_loss_zero_with_a_graph_and_zero_gradients(entry, level, aggregation, shape):
    """A rank without a token must still take part in backward; what the slots hold does not matter."""
    masked = torch.zeros(shape, dtype=torch.bool)
    junk = torch.full(shape, NAN)
    config = PPOLossConfig(
        loss_type=LOSS_TYPES[(len(aggregation) + len(level)) % 4],  # all of them, in turn
        ratio_level=level,
        aggregation=aggregation,
        entropy_coef=0.1,
        kl_coef=0.1,
        per_token_outputs=("loss", "ratio", "clip_mask", "rollout_is_weights"),
        rollout_mask_in_denominator=False,
    )
    rest = {"rollout_logprobs": junk, "ref_logprobs": junk, "config": config}
    if entry == "logits":
        x = torch.full((*shape, 5), NAN).requires_grad_()
        out = fused_ppo_loss(x, torch.full(shape, -7), junk, junk, masked, **rest)
    else:
        x = junk.clone().requires_grad_()
        out = ppo_loss(x, junk, junk, masked, entropy=junk, **rest)
    assert out.loss.requires_grad
    assert out.loss.shape == (shape if aggregation == "none" else ())
    assert not out.loss.any()
    out.loss.sum().backward()
    assert not x.grad.any()
    assert set(out.metrics.compute().values()) == {0.0}
    assert not any(y.any() for y in out.per_token.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_half_precision_logprobs_are_widened_exactly(loss_type):
    """bf16 and fp16 log-probs of a caller: the same loss as from the same numbers in fp32."""
    old, advantages = torch.tensor([-0.75, -2.0, -1.0]), torch.tensor([1.0, -1.0, 0.5])
    for dtype in (torch.bfloat16, torch.float16):
        lp = torch.tensor([-0.5, -1.0, -1.5], dtype=dtype)
        a, b = leaf(lp), leaf(lp.float())
        for x in (a, b):
            out = ppo_loss(x, old, advantages, config=PPOLossConfig(loss_type=loss_type))
            out.loss.backward()
        assert a.grad.dtype == dtype
        assert same_bits(a.grad, b.grad.to(dtype))


# ---- the Huber loss of values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "options", "loss", "gradient"),
    [
        (3.0, None, 0.0, {"huber_delta": 1.0}, 5.0, 2.0),  # 1 * (2 * 3 - 1); the slope of e^2 at delta
        (-3.0, None, 0.0, {"huber_delta": 1.0}, 5.0, -2.0),
        (0.5, None, 0.0, {"huber_delta": 1.0}, 0.25, 1.0),
        (1.0, None, 0.0, {"huber_delta": 1.0}, 1.0, 2.0),  # exactly at delta both forms agree
        (3.0, None, 0.0, {"huber_delta": 10.0}, 9.0, 6.0),
        (5.0, 1.0, 10.0, {"huber_delta": 2.0, "value_clip": 0.5}, 2 * (2 * 8.5 - 2), 0.0),  # held at 1.5: further off
        (1.0, 5.0, 10.0, {"huber_delta": 2.0, "value_clip": 0.5}, 2 * (2 * 9.0 - 2), -4.0),  # moved away: own error
        (1e20, None, 0.0, {"huber_delta": 1.0}, 2e20, 2.0),  # the square would overflow
    ],
)
@pytest.mark.parametrize("entry", ["logprobs", "logits"])
def test_huber_counts_a_large_error_linearly(value, old, target, options, loss, gradient, entry):
    v = torch.tensor([[value]], requires_grad=True)
    rest = {
        "values": v,
        "old_values": None if old is None else torch.tensor([[old]]),
        "returns": torch.tensor([[target]]),
        "config": PPOLossConfig(value_loss_type="huber", vf_coef=2.0, value_loss_scale=0.5, **options),
    }
    zeros = torch.zeros(1, 1)
    if entry == "logits":
        out = fused_ppo_loss(torch.zeros(1, 1, 3, requires_grad=True), zeros.long(), None, zeros, **rest)
    else:
        out = ppo_loss(zeros, None, zeros, **rest)
    out.loss.backward()
    assert out.value_loss.item() == pytest.approx(0.5 * loss, rel=1e-6)
    assert out.loss.item() == pytest.approx(loss, rel=1e-6)
    assert v.grad.item() == pytest.approx(gradient, rel=1e-6)
