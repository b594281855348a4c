"""ratio_level "sequence" and "sequence_token" (GSPO): by hand, and what must not depend on padding, order or layout."""

from __future__ import annotations

import math

import pytest
import torch
from checks import assert_close, leaf, same_bits
from torch.profiler import ProfilerActivity, profile

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

LEVELS = pytest.mark.parametrize("level", ["sequence", "sequence_token"])
LOSS_TYPES = pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
NAN = math.nan
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def run(lp, old, advantages, mask=None, *, upstream=1.0, **options):
    x = leaf(torch.as_tensor(lp))
    given = {k: options.pop(k) for k in GIVEN if k in options}
    out = ppo_loss(x, old, torch.as_tensor(advantages), mask, config=PPOLossConfig(**options), **given)
    (out.loss * upstream).sum().backward()
    return out, x.grad


GIVEN = ("ref_logprobs", "rollout_logprobs", "rollout_is_weights", "token_weights", "cu_seqlens", "normalizer")


def logs(*ratios):
    return torch.tensor(ratios, dtype=torch.float64).log().float()


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_the_ratio_is_the_geometric_mean_and_its_gradient_is_shared_or_each_tokens_own():
    """Ratios 1.21 and 1: s = 1.1. GSPO eq. 7 gives each token mean(A) s / n; eq. 13 gives it A_t s / n."""
    lp, old, advantages = logs(1.21, 1.0)[None], torch.zeros(1, 2), [[1.0, 3.0]]
    rest = {"aggregation": "seq-mean-token-mean", "per_token_outputs": ("ratio",)}
    out, grad = run(lp, old, advantages, ratio_level="sequence", **rest)
    assert_close(out.loss, -1.1 * 2, 5e-7)
    assert_close(grad, [[-1.1, -1.1]], 5e-7)
    assert_close(out.per_token["ratio"], [[1.1, 1.1]], 5e-7)
    out, grad = run(lp, old, advantages, ratio_level="sequence_token", **rest)
    assert_close(out.loss, -1.1 * 2, 5e-7)
    assert_close(grad, [[-0.55, -1.65]], 5e-7)
    metrics = out.metrics.compute()
    assert metrics["ratio_min"] == metrics["ratio_max"] == pytest.approx(1.1, rel=5e-7)
    assert metrics["approx_kl_k1"] == pytest.approx(-math.log(1.21) / 2, rel=5e-7)  # of the tokens themselves
    assert metrics["approx_kl_k2"] == pytest.approx(math.log(1.21) ** 2 / 4, rel=5e-7)
    assert metrics["approx_kl_k3"] == pytest.approx((0.21 - math.log(1.21)) / 2, rel=2e-6)


@LEVELS
def test_a_masked_token_is_not_in_the_mean(level):
    lp = torch.cat([logs(1.21, 8.0, 1.0)[None], logs(1.0, 1.0, 4.0)[None]])
    lp[1, 2] = NAN
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    out, grad = run(
        lp,
        torch.zeros(2, 3),
        [1.0, -1.0],
        mask,
        ratio_level=level,
        aggregation="seq-mean-token-mean",
        per_token_outputs=("ratio",),
    )
    assert_close(out.per_token["ratio"], [[1.1, 0, 1.1], [1, 1, 0]], 5e-7)
    assert_close(grad, [[-0.275, 0, -0.275], [0.25, 0.25, 0]], 5e-7)


@LEVELS
def test_one_sequence_is_clipped_as_a_whole(level):
    """Token ratios 2 and 0.5: the mean is 1, nothing is clipped. Ratios 2 and 2: both tokens are."""
    lp = torch.stack([logs(2.0, 0.5), logs(2.0, 2.0)])
    out, grad = run(
        lp, torch.zeros(2, 2), [1.0, 1.0], ratio_level=level, aggregation="token-mean", per_token_outputs=("clip_mask",)
    )
    assert_close(out.loss, -(1 + 1 + 1.2 + 1.2) / 4, 5e-7)
    assert_close(grad, [[-0.25, -0.25], [0, 0]], 5e-7)
    assert out.per_token["clip_mask"].tolist() == [[False, False], [True, True]]
    assert out.metrics.compute()["clip_fraction_high"] == 0.5


@LEVELS
def test_the_log_ratio_clamp_holds_the_mean_from_above_only(level):
    """verl: torch.clamp(..., max=10). A mean of -25 keeps its ratio and its gradient."""
    lp = torch.tensor([[12.0, 12.0], [-25.0, -25.0], [30.0, -30.0]])
    out, grad = run(
        lp,
        torch.zeros(3, 2),
        -torch.ones(3),
        ratio_level=level,
        log_ratio_clamp=10.0,
        aggregation="token-sum",
        clip_low=1.0,
        per_token_outputs=("loss",),
    )
    ratios = [math.exp(10), math.exp(-25), 1.0]
    assert_close(out.per_token["loss"], [[r, r] for r in ratios], 1e-6)
    assert_close(grad, [[0.0, 0.0], [ratios[1]] * 2, [1.0, 1.0]], 1e-6)
    assert out.metrics.compute()["log_ratio_clamp_fraction"] == pytest.approx(2 / 6)


@LEVELS
def test_on_policy_the_ratio_is_one_and_the_gradient_is_kept(level):
    out, grad = run(torch.tensor([[-1.0, -5.0]]), None, [[1.0, 3.0]], ratio_level=level, aggregation="token-sum")
    assert out.loss == -4
    assert grad.tolist() == ([[-2.0, -2.0]] if level == "sequence" else [[-1.0, -3.0]])
    assert out.metrics.compute()["ratio_max"] == out.metrics.compute()["ratio_min"] == 1


@pytest.mark.parametrize("delta", [100.0, -100.0])
@LEVELS
def test_one_tokens_overflow_does_not_reach_a_clipped_sequence(level, delta):
    """exp of the token's own log-ratio overflows, that of the mean does too; the clip binds: no NaN, no gradient."""
    lp = torch.tensor([[delta * 2, 0.5], [0.1, 0.2]])
    out, grad = run(
        lp, torch.zeros(2, 2), [math.copysign(1.0, delta)] * 2, ratio_level=level, aggregation="seq-mean-token-mean"
    )
    bound, rest = (-1.2, -math.exp(0.15)) if delta > 0 else (0.8, math.exp(0.15))
    assert_close(out.loss, (bound + rest) / 2, 5e-7)
    assert_close(grad, [[0, 0], [rest / 4, rest / 4]], 5e-7)


def test_upstream_gradients_per_token_are_shared_over_the_sequence():
    """aggregation "none" and a gradient for token 0 alone: with one ratio per sequence it reaches all its tokens."""
    lp = torch.stack([logs(1.21, 1.0), logs(1.0, 1.0)])
    upstream = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    common = {"aggregation": "none", "upstream": upstream}
    _, grad = run(lp, torch.zeros(2, 2), [[1.0, 7.0], [5.0, 5.0]], ratio_level="sequence", **common)
    assert_close(grad, [[-1.65, -1.65], [0, 0]], 5e-7)
    _, grad = run(lp, torch.zeros(2, 2), [[1.0, 7.0], [5.0, 5.0]], ratio_level="sequence_token", **common)
    assert_close(grad, [[-3.3, 0], [0, 0]], 5e-7)


# ---- one level against another --------------------------------------------------------------------------------------

KL = {"kl_coef": 0.3, "kl_estimator": "k2"}


@LOSS_TYPES
@LEVELS
@pytest.mark.parametrize("kl_gradient", ["autograd", "k2", "is_weighted", "score"])
def test_sequences_of_one_token_give_the_token_level_loss(kl_gradient, level, loss_type):
    lp, old, ref, advantages = (torch.randn(7, 1) * s - 1 for s in (0.5, 0.5, 0.5, 1.0))
    options = KL | {"kl_gradient": kl_gradient, "loss_type": loss_type, "aggregation": "token-mean"}
    want, want_grad = run(lp, old, advantages + 1, ref_logprobs=ref, **options)
    out, grad = run(lp, old, advantages + 1, ref_logprobs=ref, ratio_level=level, **options)
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(grad, want_grad, 2e-6, scale=0.1)
    assert out.metrics.compute() == pytest.approx(want.metrics.compute(), rel=1e-6, abs=1e-7)


@LOSS_TYPES
def test_both_levels_have_one_total_gradient_for_constant_advantages(loss_type):
    """Under seq-mean-token-mean, summed over each sequence (verl's and OpenRLHF's GSPO)."""
    lp, old, mask = torch.randn(4, 6) * 0.3, torch.randn(4, 6) * 0.3, torch.rand(4, 6) < 0.7
    mask[0] = False
    advantages = torch.tensor([1.0, -1.0, 2.0, -0.5])
    options = {"loss_type": loss_type, "aggregation": "seq-mean-token-mean"}
    a, grad_a = run(lp, old, advantages, mask, ratio_level="sequence", **options)
    b, grad_b = run(lp, old, advantages, mask, ratio_level="sequence_token", **options)
    assert_close(a.loss, b.loss.detach(), 5e-7, scale=1.0)
    assert_close(grad_a.sum(-1), grad_b.sum(-1), 1e-6, scale=0.1)
    if loss_type in ("ppo", "sapo"):  # through the mean every token has the same share
        spread = (
            torch.where(mask, grad_a, NAN).nan_to_num(nan=math.inf).amin(-1),
            torch.where(mask, grad_a, -1e9).amax(-1),
        )
        assert_close(spread[0][1:], spread[1][1:], 1e-6)


# ---- what must not matter -------------------------------------------------------------------------------------------

OPTIONS = {"kl_coef": 0.2, "entropy_coef": 0.05, "kl_gradient": "is_weighted"}


def batch(shape, width=17):
    logits, tokens = torch.randn(*shape, width), torch.randint(width, shape)
    new = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
    old = new + torch.randn(shape) * 0.4
    rest = {
        "old_logprobs": old,
        "ref_logprobs": new + torch.randn(shape) * 0.4,
        "rollout_logprobs": old + torch.randn(shape) * 0.3,
        "advantages": torch.randn(shape),
    }
    return logits, tokens, rest


def fused(logits, tokens, rest, mask, config, **options):
    x = leaf(logits)
    out = fused_ppo_loss(x, tokens, mask=mask, config=config, **rest, **options)
    out.loss.sum().backward()
    return out, x.grad


AGGREGATIONS = pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
ROLLOUT = {"rollout_is_level": "sequence", "rollout_is_mode": "truncate", "rollout_is_max": 1.5}


@AGGREGATIONS
@LEVELS
@pytest.mark.parametrize("loss_type", ["ppo", "cispo"])
def test_padding_changes_nothing(loss_type, level, aggregation):
    logits, tokens, rest = batch((3, 4))
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1]])
    config = PPOLossConfig(ratio_level=level, loss_type=loss_type, aggregation=aggregation, **OPTIONS, **ROLLOUT)
    want, want_grad = fused(logits, tokens, rest, mask, config)

    def pad(x, value):
        return torch.nn.functional.pad(x, (*(0,) * 2 * (x.ndim - 2), 2, 3, 0, 1), value=value)

    out, grad = fused(
        pad(logits, NAN), pad(tokens, -100), {k: pad(v, NAN) for k, v in rest.items()}, pad(mask, 0), config
    )
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(grad[:3, 2:-3], want_grad, 1e-6, scale=float(want_grad.abs().max()))
    grad[:3, 2:-3] = 0
    assert not grad.any()


@AGGREGATIONS
@LEVELS
def test_the_order_of_sequences_changes_nothing(level, aggregation):
    logits, tokens, rest = batch((5, 4))
    mask, order = torch.rand(5, 4) < 0.7, torch.tensor([3, 0, 4, 2, 1])
    config = PPOLossConfig(ratio_level=level, aggregation=aggregation, **OPTIONS, **ROLLOUT)
    want, want_grad = fused(logits, tokens, rest, mask, config)
    out, grad = fused(logits[order], tokens[order], {k: v[order] for k, v in rest.items()}, mask[order], config)
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(grad, want_grad[order], 1e-6, scale=float(want_grad.abs().max()))


@AGGREGATIONS
@LEVELS
@pytest.mark.parametrize("shift", [False, True])
def test_packed_equals_padded(shift, level, aggregation):
    """Lengths 3, 0, 1, 4 next to each other with cu_seqlens, or one per row; advantages and weights per sequence."""
    lengths = [3, 0, 1, 4]
    logits, tokens, rest = batch((4, 4 + shift))
    rest = {k: v[:, :4] for k, v in rest.items()}
    rest["advantages"], rest["rollout_is_weights"] = torch.randn(4), torch.rand(4) + 0.5
    del rest["rollout_logprobs"]
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    config = PPOLossConfig(ratio_level=level, aggregation=aggregation, agg_include_empty=True, **OPTIONS)
    want, want_grad = fused(logits, tokens, rest, mask, config, shift=shift)

    whole = [n + shift for n in lengths]
    here = torch.arange(4 + shift) < torch.tensor(whole)[:, None]
    scored = mask if not shift else here  # a packed shift scores the row before each boundary too, and masks it
    packed = {
        k: v if v.ndim == 1 else torch.nn.functional.pad(v, (0, int(shift)), value=NAN)[scored] for k, v in rest.items()
    }
    if shift:
        packed = {k: v if v.numel() == 4 else v[:-1] for k, v in packed.items()}
    ends = torch.tensor([0, *whole]).cumsum(0).int()
    out, grad = fused(logits[here], tokens[here], packed, None, config, shift=shift, cu_seqlens=ends)
    assert_close(out.loss, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(grad, want_grad[here], 1e-6, scale=float(want_grad.abs().max()))
    assert out.metrics.compute() == pytest.approx(want.metrics.compute(), rel=2e-6, abs=1e-6)


@LEVELS
def test_as_many_packed_tokens_as_sequences_still_means_one_advantage_per_sequence(level):
    """[N] and [B] look alike; the rule is the one of [B, T] with B == T: per sequence."""
    ends = torch.tensor([0, 2, 2, 3], dtype=torch.int32)
    out, grad = run(
        torch.zeros(3), torch.zeros(3), [1.0, 5.0, 7.0], cu_seqlens=ends, ratio_level=level, aggregation="token-sum"
    )
    assert out.loss == -9
    assert grad.tolist() == [-1, -1, -7]


@LEVELS
@pytest.mark.parametrize(
    ("loss_type", "aggregation"),
    [
        ("ppo", "token-mean"),
        ("cispo", "seq-mean-token-mean"),
        ("reinforce", "seq-mean-token-sum"),
        ("sapo", "token-mean"),
    ],
)
def test_micro_batches_with_an_external_normalizer_add_up(loss_type, aggregation, level):
    logits, tokens, rest = batch((5, 4))
    mask = torch.rand(5, 4) < 0.6
    mask[1] = False
    mask[0] = True
    config = PPOLossConfig(ratio_level=level, loss_type=loss_type, aggregation=aggregation, **OPTIONS, **ROLLOUT)
    want, want_grad = fused(logits, tokens, rest, mask, config)
    count = int(mask.sum()) if aggregation == "token-mean" else int(mask.any(-1).sum())
    total, grads, metrics = 0.0, [], None
    for rows in (slice(0, 1), slice(1, 2), slice(2, 5)):
        part = {k: v[rows] for k, v in rest.items()}
        out, grad = fused(logits[rows], tokens[rows], part, mask[rows], config, normalizer=float(count))
        total, metrics = total + out.loss.item(), out.metrics if metrics is None else metrics + out.metrics
        grads.append(grad)
    assert_close(total, want.loss.detach(), 1e-6, scale=1.0)
    assert_close(torch.cat(grads), want_grad, 1e-6, scale=float(want_grad.abs().max()))
    assert metrics.compute() == pytest.approx(want.metrics.compute(), rel=2e-6, abs=1e-6)


# ---- autograd -------------------------------------------------------------------------------------------------------

CASES = {
    "sequence": {"ratio_level": "sequence"},
    "sequence_token": {"ratio_level": "sequence_token", "loss_type": "sapo"},
    "none": {"aggregation": "none", "loss_type": "cispo"},
    "sequence none": {"ratio_level": "sequence", "aggregation": "none"},
    "nonfinite": {"nonfinite": "mask"},
    "cispo": {"loss_type": "cispo"},
}


def config_of(case):
    return PPOLossConfig(**CASES[case], **OPTIONS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("entry", "dtype"), [*(("logits", dtype) for dtype in FLOATS), ("logprobs", torch.float32)])
def test_retain_graph_gives_the_same_gradient_again_and_a_scaled_one(entry, dtype, case):
    logits, tokens, rest = batch((2, 3))
    if entry == "logits":
        x = leaf(logits.to(dtype))
        loss = fused_ppo_loss(x, tokens, config=config_of(case), **rest).loss.sum()
    else:
        x = leaf(-torch.rand(2, 3).to(dtype))
        loss = ppo_loss(x, entropy=torch.rand(2, 3), config=config_of(case), **rest).loss.sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0].clone()
    scaled = torch.autograd.grad(loss * 4, x, retain_graph=True)[0]
    again = torch.autograd.grad(loss, x)[0]
    assert first.any()
    assert same_bits(first, again)
    spacing = 2.0**-24 if dtype == torch.float16 else 0.0  # of fp16's subnormals: 4 times one is not exact
    assert_close(scaled, first * 4, 0.0 if not spacing else 4 * spacing, scale=1.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("entry", ["logits", "logprobs"])
def test_double_backward_is_refused(entry, case):
    logits, tokens, rest = batch((2, 3))
    if entry == "logits":
        x = leaf(logits)
        loss = fused_ppo_loss(x, tokens, config=config_of(case), **rest).loss.sum()
    else:
        x = leaf(rest["old_logprobs"])
        loss = ppo_loss(x, entropy=torch.rand(2, 3), config=config_of(case), **rest).loss.sum()
    grad = torch.autograd.grad(loss, x, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        (grad**2).sum().backward()


@pytest.mark.parametrize("case", ["token", "sequence"])
def test_double_backward_is_refused_next_to_another_term(case):
    """A gradient penalty in a larger loss: grad carries no graph, the sum does, and nothing is said."""
    x = torch.zeros(2, 3, requires_grad=True)
    loss = ppo_loss(x, x.detach(), torch.ones(2, 3), config=PPOLossConfig(ratio_level=case)).loss
    grad = torch.autograd.grad(loss, x, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        ((grad**2).sum() + x.sum()).backward()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_inplace_gradient_is_the_same_gradient(dtype, case):
    logits, tokens, rest = batch((2, 3))
    grads = []
    for inplace in (False, True):
        x = leaf(logits.to(dtype))
        z = x * 1
        version = z._version
        out = fused_ppo_loss(z, tokens, config=config_of(case), inplace_grad=inplace, **rest)
        (out.loss * torch.linspace(0.5, 2, out.loss.numel()).view(out.loss.shape)).sum().backward()
        grads.append(x.grad)
        assert (z._version > version) == inplace
        assert same_bits(z.detach(), x.grad) == inplace
    assert same_bits(*grads)


@pytest.mark.parametrize("case", CASES)
def test_inplace_gradient_refuses_a_second_backward_and_another_consumer(case):
    logits, tokens, rest = batch((2, 3))
    z = leaf(logits) * 1
    loss = fused_ppo_loss(z, tokens, config=config_of(case), inplace_grad=True, **rest).loss.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        loss.backward()
    z = leaf(logits) * 1
    other = (z**2).sum()
    loss = fused_ppo_loss(z, tokens, config=config_of(case), inplace_grad=True, **rest).loss.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + other).backward()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("entry", ["logits", "logprobs"])
def test_no_input_is_modified(entry, shift, case):
    n = 3 - (shift and entry == "logits")
    inputs = {
        "old_logprobs": torch.randn(2, n) - 3,
        "advantages": torch.randn(2, n),
        "mask": torch.randint(2, (2, n)),
        "values": torch.randn(2, n),
        "old_values": torch.randn(2, n),
        "returns": torch.randn(2, n),
        "ref_logprobs": torch.randn(2, n) - 3,
        "token_weights": torch.rand(2, n),
        "rollout_is_weights" if shift else "rollout_logprobs": torch.rand(2, n),
        "normalizer": torch.tensor(5.0),
    }
    if CASES[case].get("aggregation") == "none":
        del inputs["normalizer"]
    if entry == "logits":
        inputs |= {"logits": torch.randn(2, 3, 9), "tokens": torch.randint(9, (2, 3))}
    else:
        inputs |= {"logprobs": torch.randn(2, n), "entropy": torch.rand(2, n)}
    before = {k: v.clone() for k, v in inputs.items()}
    versions = {k: v._version for k, v in inputs.items()}
    inputs["values"].requires_grad_()
    inputs["logits" if entry == "logits" else "logprobs"].requires_grad_()
    if entry == "logits":
        out = fused_ppo_loss(shift=shift, config=config_of(case), **inputs)
    else:
        out = ppo_loss(config=config_of(case), **inputs)
    out.loss.sum().backward()
    for name, x in inputs.items():
        assert same_bits(x, before[name]), name
        assert x._version == versions[name], name


def test_only_logprobs_entropy_and_values_get_gradients():
    shape = (2, 3)
    constants = {
        name: torch.rand(shape, requires_grad=True)
        for name in ("old_logprobs", "advantages", "ref_logprobs", "rollout_logprobs", "token_weights", "returns")
    }
    lp, values = torch.rand(shape, requires_grad=True), torch.rand(shape, requires_grad=True)
    entropy = torch.rand(shape, requires_grad=True)
    config = PPOLossConfig(ratio_level="sequence", **OPTIONS, **ROLLOUT)
    ppo_loss(lp, entropy=entropy, values=values, config=config, **constants).loss.backward()
    assert all(x.grad is None for x in constants.values())
    assert all(x.grad is not None and x.grad.any() for x in (lp, entropy, values))


# ---- torch.compile, fake tensors, memory ----------------------------------------------------------------------------

COMPILED = {
    "sequence": {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean", "rollout_is_level": "sequence"},
    "cispo": {"loss_type": "cispo", "cispo_ratio_max": 5.0, "rollout_is_mode": "mask", "rollout_is_max": 1.1},
    "sequence_token none": {"ratio_level": "sequence_token", "aggregation": "none", "kl_gradient": "score"},
    "nonfinite": {"nonfinite": "mask", "loss_type": "sapo", "rollout_mask_in_denominator": False},
}


@pytest.mark.parametrize(("case", "packed"), [("sequence", True), ("cispo", False)])
def test_fullgraph_compile_gives_the_eager_values(case, packed, not_interpreted):
    torch._dynamo.reset()
    outputs = ("ratio", "clip_mask") if case == "cispo" else ()
    config = PPOLossConfig(kl_coef=0.1, per_token_outputs=outputs, **COMPILED[case])
    logits, tokens, rest = batch((2, 3))
    ends = None
    if packed:
        logits, tokens, rest = logits.flatten(0, 1), tokens.flatten(), {k: v.flatten() for k, v in rest.items()}
        ends = torch.tensor([0, 1, 6], dtype=torch.int32)

    def loss_of(logits, tokens, rest, ends):
        out = fused_ppo_loss(logits, tokens, config=config, cu_seqlens=ends, **rest)
        return out.loss, out.logprobs, out.metrics.packed, *out.per_token.values()

    results = []
    for fn in (loss_of, torch.compile(loss_of, fullgraph=True, backend="aot_eager")):
        x = leaf(logits)
        found = fn(x, tokens, rest, ends)
        found[0].sum().backward()
        results.append((*(y.detach().float() for y in found), x.grad))
    for eager, compiled in zip(*results, strict=True):
        assert_close(compiled, eager, 1e-6, scale=float(eager.abs().max()) + 1e-3)


@pytest.mark.parametrize("case", COMPILED)
def test_meta_tensors_give_shapes_and_dtypes(case):
    def per_token():
        return torch.empty(2, 3, device="meta")

    logits = torch.empty(2, 3, 50000, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = fused_ppo_loss(
        logits,
        torch.empty(2, 3, dtype=torch.long, device="meta"),
        per_token(),
        per_token(),
        rollout_logprobs=per_token(),
        ref_logprobs=per_token(),
        config=PPOLossConfig(kl_coef=0.1, per_token_outputs=("ratio", "clip_mask"), **COMPILED[case]),
    )
    assert out.loss.shape == ((2, 3) if "none" in case else ())
    assert out.loss.dtype == torch.float32
    assert out.per_token["ratio"].shape == out.per_token["clip_mask"].shape == (2, 3)
    assert out.per_token["clip_mask"].dtype == torch.bool
    out.loss.sum().backward()
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("case", ["sequence", "none", "nonfinite"])
@pytest.mark.cpu_only("the profiler's memory events are those of the CPU")
def test_nothing_of_the_vocabularys_size_is_allocated_but_the_gradient(case, fused_kernels):
    width = 20000
    logits, tokens, rest = batch((1, 2), width)

    def sizes(inplace):
        x = logits.detach().requires_grad_()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            fused_ppo_loss(x, tokens, config=config_of(case), inplace_grad=inplace, **rest).loss.sum().backward()
        return [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]

    row = width * 4
    assert [size for size in sizes(False) if size >= row] == [logits.nbytes]
    assert max(sizes(True)) < row
