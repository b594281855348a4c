"""per_token_outputs, and aggregation "none": losses per token under any upstream gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import variants_oracle as oracle
from checks import assert_close, leaf, same_bits

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss
from ppo_kernels.config import PER_TOKEN_OUTPUTS

NAN = math.nan
ENTRIES = pytest.mark.parametrize("entry", ["logprobs", "logits"])


def call(entry, x, old, advantages, mask=None, **rest):
    if entry == "logprobs":
        return ppo_loss(x, old, advantages, mask, **rest)
    rest.pop("entropy", None)
    return fused_ppo_loss(x, torch.zeros(old.shape, dtype=torch.long), old, advantages, mask, **rest)


def inputs(entry, *shape):
    return torch.randn(*shape, 5) if entry == "logits" else torch.randn(*shape) - 1.5


# ---- per_token_outputs ----------------------------------------------------------------------------------------------


@ENTRIES
def test_by_hand(entry):
    """One token held by the upper bound, one by the dual clip, one free, one masked."""
    lp = torch.full((1, 4), -math.log(2))
    ratios = torch.tensor([[2.0, 8.0, 1.1, 1.0]])
    old, ref = lp - ratios.log(), lp - 0.5
    old[0, 3] = NAN
    advantages, mask = torch.tensor([[1.0, -1.0, 2.0, NAN]]), torch.tensor([[1, 1, 1, 0]])
    config = PPOLossConfig(
        dual_clip=3.0, kl_coef=0.1, kl_estimator="k1", entropy_coef=0.5, per_token_outputs=PER_TOKEN_OUTPUTS
    )
    x = torch.zeros(1, 4, 2) if entry == "logits" else lp
    weights = torch.tensor([[1.0, 0.5, 2.0, NAN]])
    out = call(
        entry,
        x.requires_grad_(),
        old,
        advantages,
        mask,
        ref_logprobs=ref,
        entropy=-lp,
        rollout_is_weights=weights,
        config=config,
    )
    policy = [-1.2, 1.5, -4.4, 0.0]
    bonus = [0.05 - 0.5 * math.log(2)] * 3 + [0.0]
    expected = {
        "loss": [p + b for p, b in zip(policy, bonus, strict=True)],
        "policy_loss": policy,
        "kl": [0.5, 0.5, 0.5, 0.0],
        "ratio": [2.0, 8.0, 1.1, 0.0],
        "clip_mask": [True, False, False, False],
        "dual_clip_mask": [False, True, False, False],
        "rollout_is_weights": [1.0, 0.5, 2.0, 0.0],
    }
    assert list(out.per_token) == list(PER_TOKEN_OUTPUTS)
    for name, want in expected.items():
        got = out.per_token[name]
        assert got.shape == (1, 4)
        assert not got.requires_grad
        assert got.dtype == (torch.bool if name.endswith("mask") else torch.float32)
        assert_close(got.double(), np.array([want], dtype=float), 2e-6, scale=0.1, what=name)


@ENTRIES
def test_only_what_was_asked_for_in_that_order(entry):
    x, old, advantages = inputs(entry, 2, 3), torch.zeros(2, 3), torch.ones(2, 3)
    assert call(entry, x, old, advantages).per_token == {}
    config = PPOLossConfig(per_token_outputs=("ratio", "clip_mask", "loss"))
    assert list(call(entry, x, old, advantages, config=config).per_token) == ["ratio", "clip_mask", "loss"]
    one = call(entry, x, old, advantages, config=PPOLossConfig(per_token_outputs=("rollout_is_weights",)))
    assert one.per_token["rollout_is_weights"].tolist() == [[1.0] * 3] * 2  # without a correction


@ENTRIES
@pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence_token"])
def test_asking_for_them_changes_nothing_else(entry, ratio_level):
    x, old, advantages = inputs(entry, 2, 3), torch.randn(2, 3) - 1, torch.randn(2, 3)
    results = []
    for names in ((), PER_TOKEN_OUTPUTS):
        y = leaf(x)
        config = PPOLossConfig(ratio_level=ratio_level, per_token_outputs=names)
        out = call(entry, y, old, advantages, config=config, rollout_logprobs=old + 0.1)
        out.loss.backward()
        results.append((out.loss.detach(), y.grad, out.metrics.packed, out.logprobs))
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)


@ENTRIES
@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
def test_the_losses_with_their_weights_are_the_loss(loss_type, entry):
    x, old, advantages = inputs(entry, 3, 4), torch.randn(3, 4) - 1, torch.randn(3, 4)
    mask, weights = torch.rand(3, 4) < 0.7, torch.rand(3, 4)
    config = PPOLossConfig(
        loss_type=loss_type, per_token_outputs=("loss", "policy_loss", "kl"), kl_coef=0.1, kl_gradient="is_weighted"
    )
    out = call(
        entry, x.requires_grad_(), old, advantages, mask, config=config, ref_logprobs=old - 0.2, token_weights=weights
    )
    share = weights / mask.sum()
    assert_close(out.loss, (out.per_token["loss"] * share).sum(), 1e-6, scale=1.0)
    assert_close(out.policy_loss, (out.per_token["policy_loss"] * share).sum(), 1e-6, scale=1.0)
    assert_close(out.kl, (out.per_token["kl"] * share).sum(), 1e-6, scale=1.0)
    for x in out.per_token.values():
        assert not x[~mask].any()


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 4)])
def test_they_have_the_shape_of_the_scored_tokens(shape, shift):
    scored = (*shape[:-1], shape[-1] - shift)
    config = PPOLossConfig(per_token_outputs=PER_TOKEN_OUTPUTS)
    rest = {"config": config, "shift": shift, "rollout_logprobs": torch.zeros(scored)}
    out = fused_ppo_loss(
        torch.randn(*shape, 7), torch.zeros(shape, dtype=torch.long), torch.zeros(scored), torch.ones(scored), **rest
    )
    for name, x in out.per_token.items():
        assert x.shape == scored, name


def test_packed_with_shift_has_zeros_before_each_boundary():
    config = PPOLossConfig(per_token_outputs=PER_TOKEN_OUTPUTS, ratio_level="sequence", aggregation="none")
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    out = fused_ppo_loss(
        torch.randn(5, 7).requires_grad_(),
        torch.zeros(5, dtype=torch.long),
        torch.full((4,), -5.0),
        torch.tensor([1.0, -1.0]),
        config=config,
        shift=True,
        cu_seqlens=ends,
    )
    assert out.loss.shape == (4,)
    assert out.loss[1] == 0
    assert (out.loss[[0, 2, 3]] != 0).all()
    for name in ("loss", "ratio", "rollout_is_weights"):
        assert out.per_token[name][1] == 0
        assert (out.per_token[name][[0, 2, 3]] != 0).all()
    assert out.per_token["ratio"][2] == out.per_token["ratio"][3] != out.per_token["ratio"][0]


# ---- aggregation "none" ---------------------------------------------------------------------------------------------


def problem(entry, dtype=torch.float32):
    torch.manual_seed(5)
    x = inputs(entry, 3, 4).to(dtype)
    new = torch.log_softmax(x.float(), -1)[..., 0] if entry == "logits" else x.float()
    rest = {
        "ref_logprobs": new + torch.randn(3, 4) * 0.4,
        "returns": torch.randn(3, 4),
        "token_weights": torch.rand(3, 4) + 0.5,
        "loss_scale": 1.25,
    }
    return x, new - torch.randn(3, 4) * 0.4, torch.randn(3, 4), torch.rand(3, 4) < 0.7, rest


LEVELS = pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence_token"])
UPSTREAMS = {
    "random": lambda: torch.randn(3, 4),
    "one token": lambda: torch.zeros(3, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(3.0)),
    "stride 0": lambda: torch.tensor(2.0).expand(3, 4),
    "one column": lambda: torch.tensor([[1.0], [0.0], [-2.0]]).expand(3, 4),
    "transposed": lambda: torch.randn(4, 3).t(),
    "zeros": lambda: torch.zeros(3, 4),
}


@ENTRIES
@LEVELS
@pytest.mark.parametrize("how", UPSTREAMS)
def test_any_upstream_gradient(how, ratio_level, entry):
    """Against autograd of the oracle; the values' gradient passes the same way."""
    x, old, advantages, mask, rest = problem(entry)
    options = {"ratio_level": ratio_level, "kl_coef": 0.2, "entropy_coef": 0.1, "aggregation": "none"}
    upstream, values = UPSTREAMS[how](), torch.randn(3, 4)
    entropy = torch.rand(3, 4)
    y, v = leaf(x), leaf(values)
    out = call(entry, y, old, advantages, mask, values=v, entropy=entropy, config=PPOLossConfig(**options), **rest)
    assert out.loss.shape == (3, 4)
    out.loss.backward(upstream)

    wide, wide_values = oracle.constant(x).requires_grad_(), oracle.constant(values).requires_grad_()
    if entry == "logits":
        o = oracle.Options(**options)
        lp, entropy = oracle.score(wide, torch.zeros(3, 4, dtype=torch.long), mask, o)
    else:
        lp, entropy = wide, oracle.constant(entropy)
    want = oracle.loss(
        lp, old, advantages, mask, entropy=entropy, values=wide_values, options=oracle.Options(**options), **rest
    )
    assert want.margin > 1e-4
    want.loss.backward(oracle.constant(upstream))
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=2.0)
    assert not out.loss[~mask].any()
    assert_close(y.grad, wide.grad, 1e-6, scale=float(wide.grad.abs().max()))
    assert_close(v.grad, wide_values.grad, 1e-6, scale=float(wide_values.grad.abs().max()))
    assert out.policy_loss.shape == out.kl.shape == out.value_loss.shape == ()
    assert_close(out.policy_loss, want.policy_loss, 1e-6, scale=want.size)


@ENTRIES
@LEVELS
def test_its_sum_is_the_token_sum(ratio_level, entry):
    x, old, advantages, mask, rest = problem(entry)
    found = []
    for aggregation in ("none", "token-sum"):
        y, v = leaf(x), torch.zeros(3, 4, requires_grad=True)
        config = PPOLossConfig(ratio_level=ratio_level, aggregation=aggregation, kl_coef=0.2)
        out = call(entry, y, old, advantages, mask, values=v, config=config, **rest)
        out.loss.sum().backward()
        found.append((out, out.loss.detach().sum(), y.grad, v.grad))
    (a, *each), (b, *total) = found
    for x, y in zip(each, total, strict=True):
        assert_close(x, y, 1e-6, scale=float(y.abs().max()))
    for name in ("policy_loss", "value_loss", "kl"):
        assert_close(getattr(a, name), getattr(b, name), 1e-6, scale=1.0)
    assert a.metrics.compute() == pytest.approx(b.metrics.compute(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_mean_taken_outside_is_the_token_mean(dtype):
    x, old, advantages, mask, rest = problem("logits", dtype)
    grads = []
    for aggregation in ("none", "token-mean"):
        y = leaf(x)
        config = PPOLossConfig(aggregation=aggregation, kl_coef=0.2)
        out = call("logits", y, old, advantages, mask, values=torch.zeros(3, 4), config=config, **rest)
        loss = out.loss.sum() / mask.sum() if aggregation == "none" else out.loss
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        loss.backward()
        grads.append(y.grad)
    epsilon = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[dtype]
    assert_close(grads[0], grads[1].double(), epsilon, scale=float(grads[1].abs().max()) * 1e-3)


def test_a_slice_of_the_losses_reaches_only_its_tokens():
    x, old, advantages, _, rest = problem("logits")
    y = leaf(x)
    out = call("logits", y, old, advantages, values=torch.zeros(3, 4), config=PPOLossConfig(aggregation="none"), **rest)
    out.loss[1, 1:3].sum().backward()
    assert y.grad[1, 1:3].abs().amax(-1).gt(0).any()
    y.grad[1, 1:3] = 0
    assert not y.grad.any()


@ENTRIES
def test_nan_in_one_loss_stays_in_its_slot(entry):
    x, old, advantages, _, rest = problem(entry)
    old[1, 2] = NAN
    y = leaf(x)
    config = PPOLossConfig(aggregation="none")
    out = call(entry, y, old, advantages, values=torch.zeros(3, 4), config=config, **rest)
    assert out.loss.isnan().sum() == 1
    out.loss[0].sum().backward()
    others = torch.ones(3, 4, dtype=torch.bool)
    others[1, 2] = False
    assert y.grad[others].isfinite().all()
    assert y.grad[0].any()
