"""Class 5: the autograd wrapper."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
import torch.utils.checkpoint
from checks import assert_close, assert_logits_grad, leaf, same_bits
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, ppo_loss, shape_rewards

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
N, V = 5, 33


def problem(dtype=torch.float32, rows=N, width=V):
    logits = torch.randn(rows, width, dtype=dtype)
    tokens = torch.randint(width, (rows,))
    old = logprobs_from_logits(logits, tokens) + torch.linspace(-0.5, 0.5, rows)
    return logits, tokens, old, torch.randn(rows)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fused", [False, True])
def test_case_37_another_consumer_of_the_logits_gets_its_gradient(fused, dtype):
    base, tokens, old, adv = problem(dtype)
    x = leaf(base)
    z = x * 1
    before = z.detach().clone()
    loss = fused_ppo_loss(z, tokens, old, adv).loss if fused else logprobs_from_logits(z, tokens).sum()
    (loss + (z.float() ** 2).sum()).backward()
    assert same_bits(z.detach(), before)
    if fused:
        want = oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits
    else:
        want = oracle.score(base, tokens).d_logits(np.ones(N))
    want = want + 2 * oracle.to_numpy(base)
    if dtype == torch.float32:
        assert_logits_grad(x.grad, want)
    else:  # two roundings and a sum in the logits' dtype
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert (np.abs(oracle.to_numpy(x.grad) - want) <= 3 * eps * (np.abs(want) + 1)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "options",
    [{}, {"shift": True}, {"config": PPOLossConfig(temperature=0.5, entropy_coef=0.1)}],
    ids=["plain", "shift", "temperature"],
)
def test_case_37_no_input_is_modified(options, dtype):
    n = N - 1 if options.get("shift") else N
    inputs = {
        "logits": torch.randn(2, N, V, dtype=dtype),
        "tokens": torch.randint(V, (2, N)),
        "old_logprobs": torch.randn(2, n) - 3,
        "advantages": torch.randn(2, n),
        "mask": torch.randint(2, (2, n)),
        "values": torch.randn(2, n),
        "old_values": torch.randn(2, n),
        "returns": torch.randn(2, n),
        "ref_logprobs": torch.randn(2, n) - 3,
        "token_weights": torch.rand(2, n),
        "value_mask": torch.randint(2, (2, n)),
    }
    before = {k: v.clone() for k, v in inputs.items()}
    versions = {k: v._version for k, v in inputs.items()}
    inputs["logits"].requires_grad_()
    inputs["values"].requires_grad_()
    fused_ppo_loss(**inputs, **options).loss.backward()
    for name, x in inputs.items():
        assert same_bits(x, before[name]), name
        assert x._version == versions[name], name


def test_case_37_gae_and_friends_do_not_modify_inputs():
    r, v, m = torch.randn(2, 4), torch.randn(2, 4), torch.randint(2, (2, 4))
    before = [x.clone() for x in (r, v, m)]
    gae(r, v, m)
    masked_whiten(r, m)
    shape_rewards(r[:, 0], r, v, m, kl_coef=0.1)
    for a, b in zip((r, v, m), before, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_38_retain_graph_gives_the_same_gradient_twice(dtype):
    base, tokens, _, adv = problem(dtype)
    x = leaf(base)
    lp, h = logprobs_from_logits(x, tokens, return_entropy=True)
    loss = (lp * adv).sum() + h.sum()
    first = torch.autograd.grad(loss, x, retain_graph=True)[0]
    second = torch.autograd.grad(loss, x)[0]
    assert same_bits(first, second)
    assert_logits_grad(first, oracle.score(base, tokens).d_logits(adv.numpy(force=True), np.ones(N)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_38_retain_graph_through_the_fused_loss(dtype):
    base, tokens, old, adv = problem(dtype)
    x, values = leaf(base), torch.randn(N, requires_grad=True)
    out = fused_ppo_loss(x, tokens, old, adv, values=values, returns=torch.zeros(N))
    want = oracle.fused(base, tokens, old, adv, spec=LossSpec(), values=values, returns=torch.zeros(N))
    first = [g.clone() for g in torch.autograd.grad(out.loss, (x, values), retain_graph=True)]
    first_scaled = [g.clone() for g in torch.autograd.grad(out.loss * 4, (x, values), retain_graph=True)]
    second = torch.autograd.grad(out.loss, (x, values))
    for a, scaled, b in zip(first, first_scaled, second, strict=True):
        assert same_bits(a, b)
        assert same_bits(a * 4, scaled)  # a power of two: exact in every dtype
    assert_logits_grad(first[0], want.d_logits)
    assert_close(first[1], want.result.d_values, 5e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("fused", [False, True])
def test_case_38_gradients_already_given_out_are_not_touched_again(fused, dtype):
    """A buffer kept for a second backward must not be the one the caller (or x.grad) holds."""
    base, tokens, old, adv = problem(dtype)
    x = leaf(base)
    loss = fused_ppo_loss(x, tokens, old, adv).loss if fused else logprobs_from_logits(x, tokens).mean()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    kept = first.clone()
    (scaled,) = torch.autograd.grad(loss * 8, x, retain_graph=True)
    assert same_bits(first, kept)
    assert same_bits(scaled, kept * 8)
    first.zero_()
    scaled.fill_(7.0)
    loss.backward(retain_graph=True)
    assert same_bits(x.grad, kept)
    x.grad.mul_(0.5)
    x.grad = None
    loss.backward(retain_graph=True)
    loss.backward()
    assert same_bits(x.grad, kept + kept)


@pytest.mark.parametrize("fused", [False, True])
def test_case_38_logits_changed_between_forward_and_backward_are_noticed_or_harmless(fused):
    base, tokens, old, adv = problem()
    x = leaf(base)
    z = x * 1
    loss = fused_ppo_loss(z, tokens, old, adv).loss if fused else logprobs_from_logits(z, tokens).sum()
    with torch.no_grad():
        z.mul_(2)
    try:
        loss.backward()
    except RuntimeError:
        return
    want = (
        oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits
        if fused
        else oracle.score(base, tokens).d_logits(np.ones(N))
    )
    assert_logits_grad(x.grad, want)


@pytest.mark.parametrize("inplace_grad", [False, True])
def test_case_37_activation_checkpointing_recomputes_the_loss(inplace_grad):
    base, tokens, old, adv = problem()
    x = leaf(base)

    def loss_of(x):
        return fused_ppo_loss(x * 1, tokens, old, adv, inplace_grad=inplace_grad).loss

    torch.utils.checkpoint.checkpoint(loss_of, x, use_reentrant=False).backward()
    assert_logits_grad(x.grad, oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits)


def test_case_38_gradients_accumulate_over_two_losses_of_one_tensor():
    base, tokens, old, adv = problem()
    x = leaf(base)
    for _ in range(2):
        fused_ppo_loss(x, tokens, old, adv).loss.backward()
    assert_logits_grad(x.grad, 2 * oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [3.0, 1 / 7, -1.0, 65536.0, 0.0])
def test_upstream_scale_multiplies_the_gradient(scale, dtype):
    """(loss * 3), loss / accumulation_steps and a GradScaler's 2^16: fp16 overflows only where the true value does."""
    base, tokens, old, adv = problem(dtype)
    x, values = leaf(base), torch.randn(N, requires_grad=True)
    (fused_ppo_loss(x, tokens, old, adv, values=values, returns=torch.zeros(N)).loss * scale).backward()
    want = oracle.fused(base, tokens, old, adv, spec=LossSpec(), values=values, returns=torch.zeros(N))
    assert_close(values.grad, want.result.d_values * scale, 5e-7)
    if dtype == torch.float32 or scale == 0.0:
        assert_logits_grad(x.grad, want.d_logits * scale)
    else:  # a bf16 gradient already rounded may be rounded once more
        eps = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        tiny = {torch.bfloat16: 0.0, torch.float16: 2.0**-24}[dtype] * max(1.0, abs(scale))
        error = np.abs(oracle.to_numpy(x.grad) - want.d_logits * scale)
        inside = np.abs(want.d_logits * scale) < 65000
        bound = (
            2.5 * eps * np.abs(want.d_logits * scale)
            + tiny
            + 1e-6 * np.abs(want.d_logits * scale).max(-1, keepdims=True)
        )
        assert (error[inside] <= bound[inside]).all()


def test_loss_scale_option_equals_an_outer_factor():
    base, tokens, old, adv = problem()
    grads = []
    for inner, outer in ((3.0, 1.0), (1.0, 3.0)):
        x = leaf(base)
        out = fused_ppo_loss(x, tokens, old, adv, loss_scale=inner)
        (out.loss * outer).backward()
        grads.append(x.grad)
        assert_close(
            out.loss * outer,
            oracle.fused(base, tokens, old, adv, spec=LossSpec(), loss_scale=3.0).result.loss,
            5e-7,
            scale=1.0,
        )
    assert_close(grads[0], grads[1], 5e-7, scale=float(grads[0].abs().max()))


def second_derivative_of_square(loss, x):
    """d/dx of |dloss/dx|^2, or the RuntimeError on the way there."""
    grad = torch.autograd.grad(loss, x, create_graph=True)[0]
    (grad**2).sum().backward()
    return x.grad


def test_case_39_double_backward_through_scores_is_refused_or_right():
    base, tokens, _, _ = problem(torch.float64)
    x, y = leaf(base), leaf(base)
    reference = torch.log_softmax(y, -1).gather(-1, tokens[:, None]).sum()
    right = second_derivative_of_square(reference, y)
    try:
        got = second_derivative_of_square(logprobs_from_logits(x, tokens).sum(), x)
    except RuntimeError:
        return
    assert_close(got, right, 1e-9, scale=1.0)


@pytest.mark.parametrize("call", ["logprobs", "entropy", "fused", "ppo"])
def test_case_39_double_backward_is_never_silent_zeros(call):
    base, tokens, old, adv = problem()
    x = leaf(base) if call != "ppo" else leaf(old)
    if call == "logprobs":
        loss = logprobs_from_logits(x, tokens).sum()
    elif call == "entropy":
        loss = logprobs_from_logits(x, tokens, return_entropy=True)[1].sum()
    elif call == "fused":
        loss = fused_ppo_loss(x, tokens, None, adv).loss
    else:
        loss = ppo_loss(x, old.detach(), torch.ones(N)).loss
    try:
        second = second_derivative_of_square(loss, x)
    except RuntimeError:
        return
    assert second is not None
    assert (second != 0).any()
    if call == "ppo":  # loss = -mean(exp(x - old)): d/dx of (exp(d)/N)^2 is 2 exp(2d)/N^2
        assert_close(second, np.full(N, 2 / N**2), 1e-5)


def test_case_39_create_graph_alone_is_harmless():
    base, tokens, old, adv = problem()
    x = leaf(base)
    grad = torch.autograd.grad(fused_ppo_loss(x, tokens, old, adv).loss, x, create_graph=True)[0]
    assert_logits_grad(grad, oracle.fused(base, tokens, old, adv, spec=LossSpec()).d_logits)


def test_case_41_no_gradient_for_logits_that_want_none():
    base, tokens, old, adv = problem()
    values = torch.randn(N, requires_grad=True)
    wanted = fused_ppo_loss(leaf(base), tokens, old, adv, values=values.detach(), returns=torch.zeros(N))
    out = fused_ppo_loss(base, tokens, old, adv, values=values, returns=torch.zeros(N))
    assert same_bits(out.loss, wanted.loss)
    assert out.loss != 0
    out.loss.backward()
    assert base.grad is None
    want = oracle.fused(base, tokens, old, adv, spec=LossSpec(), values=values, returns=torch.zeros(N))
    assert_close(values.grad, want.result.d_values, 5e-7)
    with torch.no_grad():
        silent = fused_ppo_loss(leaf(base), tokens, old, adv, values=values, returns=torch.zeros(N))
    assert same_bits(silent.loss, wanted.loss)
    assert not silent.loss.requires_grad
    constant = fused_ppo_loss(base, tokens, old, adv)
    assert not constant.loss.requires_grad
    assert same_bits(constant.logprobs, wanted.logprobs)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "no_requires_grad"])
def test_case_41_a_forward_without_gradient_allocates_no_second_logits(mode, fused_kernels):
    """The profiler sees every allocation made through PyTorch; a [N, V] gradient would be 4 MB."""
    logits = torch.randn(64, 16384)
    if mode != "no_requires_grad":
        logits.requires_grad_()
    tokens, old, adv = torch.zeros(64, dtype=torch.long), torch.zeros(64), torch.ones(64)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "no_requires_grad": torch.enable_grad}[
        mode
    ]
    with context():
        fused_ppo_loss(logits, tokens, old, adv)  # warm up
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            fused_ppo_loss(logits, tokens, old, adv)
            logprobs_from_logits(logits, tokens)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert largest < logits.numel() * 4 // 10


def test_case_42_only_logits_and_values_get_gradients():
    shape = (2, 3)
    lp = torch.zeros(shape, requires_grad=True)
    constants = {
        n: torch.zeros(shape, requires_grad=True) for n in ("old_logprobs", "returns", "old_values", "ref_logprobs")
    }
    constants["advantages"] = torch.ones(shape, requires_grad=True)
    constants["token_weights"] = torch.ones(shape, requires_grad=True)
    values = torch.full(shape, 0.1, requires_grad=True)
    config = PPOLossConfig(value_clip=0.2, kl_coef=0.1)
    ppo_loss(lp, values=values, config=config, **constants).loss.backward()
    for name, x in constants.items():
        assert x.grad is None, name
    assert_close(lp.grad, np.full(shape, -1 / 6), 5e-7)
    assert values.grad is not None

    logits = torch.randn(2, 3, 5, requires_grad=True)
    out = fused_ppo_loss(logits, torch.zeros(2, 3, dtype=torch.long), values=values, config=config, **constants)
    out.loss.backward()
    for name, x in constants.items():
        assert x.grad is None, name
    assert not out.logprobs.requires_grad
    assert not out.policy_loss.requires_grad
    assert out.entropy is None or not out.entropy.requires_grad


@pytest.mark.parametrize("old", ["detached", "none", "same_tensor"])
def test_case_42_ratio_one_still_has_a_gradient(old):
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    old_lp = {"detached": lp.detach(), "none": None, "same_tensor": lp}[old]
    adv = torch.tensor([1.0, -3.0])
    out = ppo_loss(lp, old_lp, adv)
    out.loss.backward()
    assert out.loss == 1.0  # -mean(adv)
    assert lp.grad.tolist() == [-0.5, 1.5]
    metrics = out.metrics.compute()
    assert metrics["ratio_mean"] == metrics["ratio_min"] == metrics["ratio_max"] == 1
    assert metrics["clip_fraction"] == 0


def test_case_42_old_logprobs_none_in_the_fused_loss():
    base, tokens, _, adv = problem()
    x = leaf(base)
    out = fused_ppo_loss(x, tokens, None, adv)
    out.loss.backward()
    want = oracle.fused(base, tokens, None, adv, spec=LossSpec())
    assert_close(out.loss, want.result.loss, 5e-7, scale=0.1)
    assert_logits_grad(x.grad, want.d_logits)


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("old_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_case_43_mixed_dtypes_and_autocast(autocast, old_dtype, logits_dtype):
    base, tokens, old, adv = problem(logits_dtype)
    old = old.to(old_dtype)
    x, values = leaf(base), torch.randn(N, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = fused_ppo_loss(
            x, tokens, old, adv.to(torch.bfloat16), values=values, returns=torch.zeros(N, dtype=torch.bfloat16)
        )
    assert out.loss.dtype == out.logprobs.dtype == torch.float32
    out.loss.backward()
    assert x.grad.dtype == logits_dtype
    assert values.grad.dtype == torch.float32
    want = oracle.fused(
        base, tokens, old, adv.to(torch.bfloat16), spec=LossSpec(), values=values, returns=torch.zeros(N)
    )
    assert want.result.margin > 1e-4
    assert_close(out.loss, want.result.loss, 5e-7, scale=1.0)
    assert_logits_grad(x.grad, want.d_logits)
    assert_close(values.grad, want.result.d_values, 5e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_case_43_half_values_get_a_half_gradient(dtype):
    values = torch.randn(N, dtype=dtype).requires_grad_()
    lp = torch.zeros(N, dtype=dtype).requires_grad_()
    out = ppo_loss(lp, torch.zeros(N), torch.ones(N), values=values, returns=torch.zeros(N))
    out.loss.backward()
    assert out.loss.dtype == torch.float32
    assert values.grad.dtype == lp.grad.dtype == dtype
    want = oracle.ppo(lp, torch.zeros(N), torch.ones(N), spec=LossSpec(), values=values, returns=torch.zeros(N))
    assert_close(values.grad, want.d_values, 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11)


@pytest.mark.parametrize("how", ["ppo_loss", "fused", "logprobs", "values"])
def test_case_39_a_second_derivative_is_an_error_on_the_way_to_one_input_too(how):
    """Upstream 1 has no graph, and autograd.grad walks only the paths to the inputs it is asked for."""
    x = leaf(torch.randn(2, 4))
    given = (torch.zeros(2, dtype=torch.int64), None, torch.ones(2))
    loss = {
        "ppo_loss": lambda: ppo_loss(x[:, 0], None, torch.ones(2)).loss,
        "fused": lambda: fused_ppo_loss(x, *given).loss,
        "logprobs": lambda: logprobs_from_logits(x, given[0]).sum(),
        "values": lambda: fused_ppo_loss(x.detach(), *given, values=x[:, 0], returns=torch.zeros(2)).loss,
    }[how]()
    (grad,) = torch.autograd.grad(loss + x.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once.differentiable|differentiate twice"):
        torch.autograd.grad(grad.sum(), x)
