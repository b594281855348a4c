"""kl_gradient: what the KL term counts as, and what its gradient is; by hand for each estimator."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_close, leaf

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

ESTIMATORS = ("k1", "k2", "k3", "abs")
GRADIENTS = ("autograd", "k2", "is_weighted", "score")
ENTRIES = pytest.mark.parametrize("entry", ["logprobs", "logits"])
INF, NAN = math.inf, math.nan


def kl_only(entry, d, delta=None, *, ratio_level="token", upstream=1.0, **options):
    """(KL, dKL/dlogprob, output) of tokens with logprob - ref = d, logprob - old = delta and no advantage."""
    d = torch.tensor(d).view(-1, 1)
    delta = torch.zeros_like(d) if delta is None else torch.tensor(delta).view(-1, 1)
    new = torch.full_like(d, -math.log(2))
    config = PPOLossConfig(
        kl_coef=1.0, aggregation="token-sum", ratio_level=ratio_level, per_token_outputs=("kl",), **options
    )
    rest = {"ref_logprobs": new - d, "config": config}
    if entry == "logits":
        x = torch.zeros(len(d), 1, 2, requires_grad=True)
        out = fused_ppo_loss(x, torch.zeros(len(d), 1, dtype=torch.long), new - delta, torch.zeros_like(d), **rest)
    else:
        x = leaf(new)
        out = ppo_loss(x, new - delta, torch.zeros_like(d), **rest)
    (out.loss * upstream).backward()
    grad = x.grad[..., 0] * 2 if entry == "logits" else x.grad
    if out.kl.isfinite():
        assert_close(out.kl, out.loss.detach(), 1e-6, scale=1e-6)
        assert_close(out.kl, out.per_token["kl"].sum(), 1e-6, scale=1.0)
        assert out.metrics.compute()["ref_kl"] == pytest.approx(out.kl.item() / len(d), rel=1e-6, abs=1e-7)
    return out.per_token["kl"].flatten().tolist(), grad.flatten().tolist(), out


def value(estimator, d):
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "abs": abs(d)}[estimator]


def slope(estimator, d):
    return {"k1": 1.0, "k2": d, "k3": 1 - math.exp(-d), "abs": math.copysign(1.0, d)}[estimator]


@ENTRIES
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("gradient", "level"),
    [*((g, "token") for g in GRADIENTS), ("is_weighted", "sequence"), ("is_weighted", "sequence_token")],
)
def test_value_and_gradient(gradient, level, estimator, entry):
    ds, deltas = [0.7, -0.7, 1.5, -2.0, 0.7, -0.7], [0.0, 0.0, 0.0, 0.0, 0.5, -0.5]
    values, grads, _ = kl_only(entry, ds, deltas, kl_estimator=estimator, kl_gradient=gradient, ratio_level=level)
    ratio = [math.exp(x) if gradient == "is_weighted" else 1.0 for x in deltas]
    k, dk = [value(estimator, d) for d in ds], [slope(estimator, d) for d in ds]
    assert_close(values, [r * x for r, x in zip(ratio, k, strict=True)], 2e-6)
    want = {
        "autograd": dk,
        "k2": ds,
        "is_weighted": [r * (x + y) for r, x, y in zip(ratio, k, dk, strict=True)],
        "score": [x + y for x, y in zip(k, dk, strict=True)],
    }[gradient]
    assert_close(grads, want, 2e-6, scale=0.5)


@ENTRIES
@pytest.mark.parametrize("gradient", ["is_weighted", "score", "k2"])
def test_r_times_k3_has_the_gradient_r_times_d_to_the_last_digit(gradient, entry):
    """k3 + dk3 = d: the parts, expm1(-d) + d and -expm1(-d), must not be rounded and added: e^12.3 has few digits."""
    ds = [2.0**-10, -(2.0**-10), 2.0**-6, 2.0**-20, -12.3]
    _, grads, _ = kl_only(entry, ds, kl_gradient=gradient)
    if entry == "logprobs":
        reference = [float(torch.tensor(-math.log(2)) - (torch.tensor(-math.log(2)) - torch.tensor(d))) for d in ds]
        assert_close(grads, reference, 2e-7)
    else:
        assert_close(grads, ds, 1e-6, scale=0.2)


@ENTRIES
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_equal_policies_have_no_kl_and_no_gradient_but_k1s(gradient, entry):
    for estimator in ESTIMATORS if entry == "logprobs" else ("k1", "k3"):
        values, grads, _ = kl_only(entry, [0.0], kl_estimator=estimator, kl_gradient=gradient)
        assert values == [0.0]
        assert grads == pytest.approx([1.0 if estimator == "k1" and gradient != "k2" else 0.0], abs=2e-7)


@ENTRIES
def test_the_value_of_k2s_gradient_is_the_estimators(entry):
    """verl's "k3+": k3 in the loss, k2 in the gradient."""
    values, grads, _ = kl_only(entry, [1.5], kl_estimator="k3", kl_gradient="k2")
    assert_close(values, [math.exp(-1.5) + 0.5], 1e-6)
    assert_close(grads, [1.5], 1e-6)


# ---- clamps ---------------------------------------------------------------------------------------------------------


FAR = [1.5, -1.5]


@ENTRIES
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_input_clamp_autograd_gives_nothing_and_k2_goes_on(estimator, entry):
    """verl's straight-through k2 is of the unclamped difference: its pull grows with the distance."""
    for gradient, want in (("autograd", [0.0, 0.0]), ("k2", FAR)):
        values, grads, _ = kl_only(entry, FAR, kl_estimator=estimator, kl_gradient=gradient, kl_input_clamp=1.0)
        assert_close(values, [value(estimator, math.copysign(1.0, d)) for d in FAR], 1e-6)
        assert_close(grads, want, 1e-6, scale=0.1)


@ENTRIES
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_output_clamp_autograd_gives_nothing_and_k2_goes_on(estimator, entry):
    for gradient, want in (("autograd", [0.0, 0.0]), ("k2", FAR)):
        values, grads, _ = kl_only(entry, FAR, kl_estimator=estimator, kl_gradient=gradient, kl_output_clamp=0.3)
        assert_close(values, [math.copysign(0.3, value(estimator, d)) for d in FAR], 1e-6)
        assert_close(grads, want, 1e-6, scale=0.1)


@ENTRIES
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_input_clamp_score_and_is_weighted_have_no_gradient(estimator, entry):
    """NeMo-RL's calculate_kl detaches the weight there."""
    for gradient, ratio in (("score", 1.0), ("is_weighted", math.exp(0.5))):
        values, grads, _ = kl_only(
            entry, FAR, [0.5, 0.5], kl_estimator=estimator, kl_gradient=gradient, kl_input_clamp=1.0
        )
        assert_close(values, [ratio * value(estimator, math.copysign(1.0, d)) for d in FAR], 1e-6)
        assert grads == [0.0, 0.0]


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_beyond_the_input_clamp_is_weighted_by_a_sequences_ratio_has_no_gradient_either(level):
    """A sequence of one token: the token level's gradient is 0."""
    options = {"kl_estimator": "k1", "kl_gradient": "is_weighted", "kl_input_clamp": 1.0}
    assert kl_only("logprobs", [1.5], [0.5], ratio_level=level, **options)[1] == [0.0]


@ENTRIES
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_output_clamp_score_and_is_weighted_have_no_gradient(estimator, level, entry):
    """The clamp is of what enters the loss: NeMo-RL's calculate_kl multiplies by the weight first."""
    least = min(abs(value(estimator, d)) for d in FAR)
    for gradient, bound in (("score", least / 2), ("is_weighted", least * 1.2)):  # 1.2: beyond it only by e^0.5
        rest = {"kl_estimator": estimator, "kl_output_clamp": bound, "ratio_level": level}
        values, grads, _ = kl_only(entry, FAR, [0.5, 0.5], kl_gradient=gradient, **rest)
        assert_close(values, [math.copysign(bound, value(estimator, d)) for d in FAR], 1e-6)
        assert grads == [0.0, 0.0]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_difference_or_an_estimate_exactly_on_its_clamp_is_inside(gradient):
    """d = 0.5 against 0.5; k2 = 0.125 against 0.125."""
    base = -1.0
    for clamp, estimator in (({"kl_input_clamp": 0.5}, "k1"), ({"kl_output_clamp": 0.125}, "k2")):
        x = torch.tensor([[base]], requires_grad=True)
        config = PPOLossConfig(kl_coef=1.0, kl_estimator=estimator, kl_gradient=gradient, **clamp)
        out = ppo_loss(
            x, torch.tensor([[base]]), torch.zeros(1, 1), ref_logprobs=torch.tensor([[base - 0.5]]), config=config
        )
        out.loss.backward()
        k, dk = (0.5, 1.0) if estimator == "k1" else (0.125, 0.5)
        want = {"autograd": dk, "k2": 0.5, "is_weighted": k + dk, "score": k + dk}[gradient]
        assert out.loss.item() == k
        assert x.grad.item() == want


@ENTRIES
def test_is_weighted_and_a_clamped_log_ratio_leaves_only_the_estimates_own_gradient(entry):
    """r is held: r k has the gradient r dk."""
    values, grads, _ = kl_only(entry, [0.7], [2.0], kl_estimator="k2", kl_gradient="is_weighted", log_ratio_clamp=0.5)
    assert_close(values, [math.exp(0.5) * 0.245], 1e-6)
    assert_close(grads, [math.exp(0.5) * 0.7], 1e-6)


# ---- sequence ratios ------------------------------------------------------------------------------------------------


def test_is_weighted_by_a_sequences_ratio_spreads_the_gradient_through_it():
    """s = e^0.1 of log-ratios (0.2, 0): each token gets s dk_t and half of s (k_1 + k_2)."""
    lp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old, ref = torch.tensor([[-1.2, -1.0]]), torch.tensor([[-1.5, -0.75]])
    rest = {"ref_logprobs": ref}
    for level in ("sequence", "sequence_token"):
        config = PPOLossConfig(
            kl_coef=1.0, kl_estimator="k2", kl_gradient="is_weighted", ratio_level=level, aggregation="token-sum"
        )
        lp.grad = None
        out = ppo_loss(lp, old, torch.zeros(1, 2), config=config, **rest)
        out.loss.backward()
        s, k, dk = math.exp(0.1), (0.125, 0.03125), (0.5, -0.25)
        assert_close(out.loss, s * sum(k), 1e-6)
        shared = [sum(k) / 2] * 2 if level == "sequence" else k
        assert_close(lp.grad, [[s * (a + b) for a, b in zip(dk, shared, strict=True)]], 1e-6)


# ---- extremes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize(("entry", "estimator"), [*(("logprobs", e) for e in ESTIMATORS), ("logits", "k3")])
def test_both_clamps_hold_any_difference_finite(estimator, gradient, entry):
    """verl's and NeMo-RL's: 20 before the exponential, 10 after it."""
    ds = [-200.0, 200.0, -1e30, 1e30, 0.5]
    values, grads, out = kl_only(
        entry, ds, kl_estimator=estimator, kl_gradient=gradient, kl_input_clamp=20.0, kl_output_clamp=10.0
    )
    held = [value(estimator, math.copysign(20.0, d)) for d in ds[:4]]
    assert_close(values[:4], [min(10.0, max(-10.0, k)) for k in held], 1e-6)
    assert_close(grads[:4], [0.0] * 4 if gradient != "k2" else ds[:4], 1e-6)
    assert grads[4] != 0
    assert out.loss.isfinite()


@ENTRIES
def test_the_output_clamp_alone_holds_an_infinite_estimate(entry):
    """OpenRLHF, slime: exp(200) is infinite, its clamp 10; autograd's 0 * inf would be NaN."""
    values, grads, _ = kl_only(entry, [-200.0], kl_output_clamp=10.0)
    assert values == [10.0]
    assert grads == [0.0]


@ENTRIES
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_without_a_coefficient_the_kl_is_only_reported(gradient, entry):
    """References without probability for the token: ref_kl shows it, the loss and its gradient do not."""
    refs = torch.tensor([[-200.0], [-INF], [INF], [NAN], [-1.0]])
    config = PPOLossConfig(kl_coef=0.0, kl_gradient=gradient)
    found = []
    for given in (refs, None):
        rest = {"ref_logprobs": given, "config": config}
        if entry == "logits":
            x = torch.zeros(5, 1, 2, requires_grad=True)
            out = fused_ppo_loss(x, torch.zeros(5, 1, dtype=torch.long), None, torch.ones(5, 1), **rest)
        else:
            x = torch.zeros(5, 1, requires_grad=True)
            out = ppo_loss(x, None, torch.ones(5, 1), **rest)
        out.loss.backward()
        found.append((out.loss.item(), x.grad.tolist()))
        assert out.metrics.compute()["nonfinite"] == 0
    assert found[0] == found[1]


@ENTRIES
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_masked_slots_of_the_reference_are_not_read(gradient, entry):
    mask, logits = torch.tensor([[1, 0], [0, 0]]), torch.randn(2, 2, 3)
    found = []
    for junk in (0.0, NAN, INF, -INF):
        ref = torch.tensor([[-1.5, junk], [junk, junk]])
        config = PPOLossConfig(kl_coef=0.5, kl_gradient=gradient, ratio_level="sequence_token")
        rest = {"ref_logprobs": ref, "config": config}
        x = leaf(logits if entry == "logits" else logits[..., 0])
        if entry == "logits":
            out = fused_ppo_loss(x, torch.zeros(2, 2, dtype=torch.long), None, torch.ones(2, 2), mask, **rest)
        else:
            out = ppo_loss(x, None, torch.ones(2, 2), mask, **rest)
        out.loss.backward()
        found.append((out.loss.item(), out.kl.item(), x.grad.tolist(), out.metrics.packed.tolist()))
    assert found.count(found[0]) == len(found)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_of_zero_weights_an_infinite_estimate_with_zero(level):
    logprobs = torch.tensor([[-200.0]], requires_grad=True)
    config = PPOLossConfig(kl_coef=0.1, kl_gradient="is_weighted", ratio_level=level)
    one = torch.ones(1, 1)
    out = ppo_loss(logprobs, -one, one, ref_logprobs=-one, config=config)
    out.loss.backward()
    assert out.loss.item() == 0
    assert logprobs.grad.item() == 0
