"""Class 4: strides, contiguity, incoming gradients."""

from __future__ import annotations

import math

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, leaf, same_bits
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits, ppo_loss

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

VIEWS = {
    "transposed": lambda d: torch.randn(4, 2, 8, dtype=d).transpose(0, 1),
    "sequence_slice": lambda d: torch.randn(2, 5, 8, dtype=d)[:, :-1],
    "inner_sequence_slice": lambda d: torch.randn(2, 7, 8, dtype=d)[:, 2:6],
    "vocabulary_slice": lambda d: torch.randn(2, 4, 11, dtype=d)[..., :6],
    "vocabulary_slice_off_alignment": lambda d: torch.randn(2, 4, 11, dtype=d)[..., 3:],
    "every_other_row": lambda d: torch.randn(2, 8, 8, dtype=d)[:, ::2],
    "every_other_column": lambda d: torch.randn(2, 4, 16, dtype=d)[..., ::2],
    "column_major": lambda d: torch.randn(8, 2, 4, dtype=d).permute(1, 2, 0),
    "one_row_expanded": lambda d: torch.randn(1, 1, 8, dtype=d).expand(2, 4, 8),
    "one_sequence_expanded": lambda d: torch.randn(1, 4, 8, dtype=d).expand(2, 4, 8),
    "one_logit_expanded": lambda d: torch.randn(2, 4, 1, dtype=d).expand(2, 4, 8),
    "offset_storage": lambda d: torch.randn(2 * 4 * 8 + 3, dtype=d)[3:].view(2, 4, 8),
    "flipped_then_flipped": lambda d: torch.randn(2, 4, 8, dtype=d).flip(1).flip(1),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("view", VIEWS)
def test_cases_28_29_strided_logits_equal_their_contiguous_copy(view, dtype):
    logits = VIEWS[view](dtype)
    tokens = torch.randint(logits.shape[-1], logits.shape[:-1])
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1]])
    g_lp, g_h = torch.randn(2, 2, 4)
    results = []
    for x in (logits.detach().requires_grad_(), logits.contiguous().requires_grad_()):
        lp, h = logprobs_from_logits(x, tokens, mask, return_entropy=True)
        torch.autograd.backward([lp, h], [g_lp, g_h])
        results.append((lp, h, x.grad))
    want = oracle.score(logits, tokens, mask)
    for lp, h, grad in results:
        assert_logprobs(lp, want.logprobs)
        assert_entropy(h, want.entropy)
        assert_logits_grad(grad, want.d_logits(g_lp.numpy(force=True), g_h.numpy(force=True)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("view", VIEWS)
def test_cases_28_29_strided_logits_in_the_fused_loss(view, dtype):
    logits = VIEWS[view](dtype).detach().requires_grad_()
    before = logits.detach().clone()
    tokens = torch.randint(logits.shape[-1], (2, 4))
    old, adv = torch.full((2, 4), -2.0), torch.randn(2, 4)
    out = fused_ppo_loss(logits, tokens, old, adv, config=PPOLossConfig(entropy_coef=0.1))
    out.loss.backward()
    want = oracle.fused(before, tokens, old, adv, spec=LossSpec(entropy_coef=0.1))
    assert_close(out.loss, want.result.loss, 5e-7, scale=1.0)
    assert_logits_grad(logits.grad, want.d_logits)
    assert same_bits(logits.detach().contiguous(), before.contiguous())


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_29_views_of_a_leaf_get_their_gradient_in_the_leaf(dtype):
    base = leaf(torch.randn(2, 5, 8, dtype=dtype))
    tokens = torch.randint(6, (2, 4))
    logprobs_from_logits(base[:, :-1, :6], tokens).sum().backward()
    want = oracle.score(base.detach()[:, :-1, :6], tokens).d_logits(np.ones((2, 4)))
    assert_logits_grad(base.grad[:, :-1, :6].contiguous(), want)
    assert (base.grad[:, -1] == 0).all()
    assert (base.grad[..., 6:] == 0).all()


@pytest.mark.gpu
def test_case_29_a_sequence_slice_is_not_copied():
    logits = torch.randn(4, 513, 32000, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(32000, (4, 512), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs_from_logits(logits[:, :-1], tokens)
    assert torch.cuda.max_memory_allocated() - before < logits.numel() * 2 // 20


def test_case_29_a_sequence_slice_is_not_copied_on_the_cpu():
    """2 GB of address space, of which only the rows in the view exist: a copy of it all would be slow and large."""
    wide = torch.empty(2, 1 << 15, 1 << 14, dtype=torch.bfloat16)[:, : 1 << 15 : 1 << 14]
    wide.fill_(1.0)
    lp = logprobs_from_logits(wide, torch.zeros(2, 2, dtype=torch.long))
    assert_logprobs(lp, np.full((2, 2), -math.log(1 << 14)))


@pytest.mark.parametrize("view", ["expanded", "transposed", "sliced", "broadcast_scalar"])
def test_case_30_every_per_token_argument_has_its_own_strides(view):
    def strided(x):
        if view == "expanded":
            return x[:1].expand(2, 4)
        if view == "transposed":
            return x.t().contiguous().t()
        if view == "broadcast_scalar":
            return x[:1, :1].expand(2, 4)
        return torch.cat([x * 7 - 3, x], 1)[:, 4:]

    ids, mask = torch.randint(9, (2, 4)), torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    if view == "broadcast_scalar":
        mask = torch.ones(2, 4, dtype=torch.long)
    logits = torch.randn(2, 4, 9)
    names = [
        "old_logprobs",
        "advantages",
        "values",
        "old_values",
        "returns",
        "ref_logprobs",
        "token_weights",
        "value_mask",
    ]
    args = {name: torch.randn(2, 4) for name in names} | {
        "token_weights": torch.rand(2, 4),
        "value_mask": torch.ones(2, 4),
    }
    args["old_logprobs"] = args["old_logprobs"] - 2
    config = PPOLossConfig(entropy_coef=0.01, kl_coef=0.1, value_clip=0.2)

    def run(prepare):
        x = leaf(logits)
        a = {k: prepare(strided(v)) for k, v in args.items()}
        out = fused_ppo_loss(x, prepare(strided(ids)), mask=prepare(strided(mask)), config=config, **a)
        out.loss.backward()
        return out.loss, out.logprobs, x.grad

    for a, b in zip(run(lambda x: x), run(lambda x: x.contiguous().clone()), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("reduce", ["sum", "mean", "weighted", "sliced", "expanded", "transposed"])
def test_case_32_any_upstream_gradient_strides(reduce, dtype):
    logits = leaf(torch.randn(2, 3, 8, dtype=dtype))
    tokens = torch.randint(8, (2, 3))
    w = torch.tensor([[1.0, 0, 3], [0.5, -2, 1]])
    upstream = {
        "sum": torch.ones(2, 3),
        "mean": torch.full((2, 3), 1 / 6),
        "weighted": w,
        "sliced": w,
        "expanded": w[:1].expand(2, 3),
        "transposed": w,
    }[reduce]
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    if reduce in ("sum", "mean"):
        (getattr(lp, reduce)() + getattr(h, reduce)()).backward()
    elif reduce == "weighted":
        ((lp + h) * w).sum().backward()
    elif reduce == "sliced":
        view = torch.cat([w, w], 1)[:, 3:]
        torch.autograd.backward([lp, h], [view, view])
    elif reduce == "transposed":
        view = w.t().contiguous().t()
        torch.autograd.backward([lp, h], [view, view])
    else:
        torch.autograd.backward([lp, h], [w[:1].expand(2, 3), w[:1].expand(2, 3)])
    up = oracle.to_numpy(upstream)
    assert_logits_grad(logits.grad, oracle.score(logits, tokens).d_logits(up, up))


def test_case_33_a_loss_summed_over_copies_scales_every_row():
    """An upstream gradient that is itself a broadcast of one element, for the scalar loss."""
    logits = leaf(torch.randn(3, 8))
    tokens = torch.randint(8, (3,))
    loss = fused_ppo_loss(logits, tokens, None, torch.tensor([1.0, -2, 3])).loss
    loss.expand(5).sum().backward()
    want = oracle.fused(logits, tokens, None, torch.tensor([1.0, -2, 3]), spec=LossSpec(), loss_scale=5.0)
    assert_logits_grad(logits.grad, want.d_logits)


def test_case_34_upstream_gradients_are_per_token():
    logits = leaf(torch.randn(3, 8))
    tokens = torch.tensor([1, 2, 3])
    lp = logprobs_from_logits(logits, tokens)
    assert lp.shape == (3,)
    lp.backward(torch.tensor([1.0, 0.0, 3.0]))
    assert (logits.grad[1] == 0).all()
    assert_logits_grad(logits.grad, oracle.score(logits, tokens).d_logits(np.array([1.0, 0, 3])))


@pytest.mark.parametrize("dtype", FLOATS)
def test_case_35_each_output_alone_and_both(dtype):
    base = torch.tensor([[math.log(3), 0.0]], dtype=dtype)
    token = torch.tensor([0])
    want = oracle.score(base, token)
    if dtype == torch.float32:
        assert_close(want.entropy, [0.562335], 1e-6)
        assert_close(want.rows[(0,)].d_entropy, [-0.205990, 0.205990], 2e-6)
    for g_lp, g_h in ((0.0, 1.0), (1.0, 0.0), (1.0, 0.1)):
        logits = leaf(base)
        lp, h = logprobs_from_logits(logits, token, return_entropy=True)
        outputs = [(o, torch.tensor([g])) for o, g in ((lp, g_lp), (h, g_h)) if g]
        torch.autograd.backward(*map(list, zip(*outputs, strict=True)))
        assert_logits_grad(logits.grad, want.d_logits(np.array([g_lp]), np.array([g_h])))


def test_case_35_an_unused_output_does_not_crash_autograd_grad():
    logits = leaf(torch.randn(2, 5))
    lp, h = logprobs_from_logits(logits, torch.tensor([0, 1]), return_entropy=True)
    (from_h,) = torch.autograd.grad(h.sum(), logits, retain_graph=True)
    (from_lp,) = torch.autograd.grad(lp.sum(), logits)
    want = oracle.score(logits, torch.tensor([0, 1]))
    assert_logits_grad(from_h, want.d_logits(np.zeros(2), np.ones(2)))
    assert_logits_grad(from_lp, want.d_logits(np.ones(2)))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (2, 2, 1, 3)])
def test_case_36_outputs_have_the_shape_of_tokens(shape):
    logits, tokens = leaf(torch.randn(*shape, 7)), torch.randint(7, shape)
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    assert lp.shape == h.shape == shape
    want = oracle.score(logits, tokens)
    assert_logprobs(lp, want.logprobs)
    lp.sum().backward()
    assert_logits_grad(logits.grad, want.d_logits(np.ones(shape)))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_case_36_the_fused_loss_takes_any_leading_shape(shape):
    logits, tokens = leaf(torch.randn(*shape, 7)), torch.randint(7, shape)
    old, adv = torch.full(shape, -2.0), torch.randn(shape)
    out = fused_ppo_loss(logits, tokens, old, adv)
    out.loss.backward()
    want = oracle.fused(logits, tokens, old, adv, spec=LossSpec())
    assert out.logprobs.shape == shape
    assert_close(out.loss, want.result.loss, 5e-7, scale=1.0)
    assert_logits_grad(logits.grad, want.d_logits)


@pytest.mark.parametrize(
    ("logits_shape", "tokens_shape"),
    [((2, 3, 5), (3,)), ((2, 3, 5), (2, 1)), ((2, 3, 5), (6,)), ((2, 3, 5), (2, 3, 1)), ((6, 5), (2, 3)), ((5,), (1,))],
)
def test_case_36_other_shapes_of_tokens_are_refused(logits_shape, tokens_shape):
    with pytest.raises(ValueError, match="tokens"):
        logprobs_from_logits(torch.randn(logits_shape), torch.zeros(tokens_shape, dtype=torch.long))


PER_TOKEN = ["old_logprobs", "mask", "values", "old_values", "returns", "value_mask", "ref_logprobs", "token_weights"]


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,), (1,), (), (2, 3, 1), (3, 2), (2, 4), (6,)])
def test_case_72_nothing_broadcasts_silently(name, shape):
    args = {n: torch.ones(2, 3) for n in PER_TOKEN}
    args[name] = torch.ones(shape)
    config = PPOLossConfig(kl_coef=0.1, value_clip=0.2)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        ppo_loss(torch.zeros(2, 3), advantages=torch.ones(2, 3), config=config, **args)
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        fused_ppo_loss(
            torch.zeros(2, 3, 5),
            torch.zeros(2, 3, dtype=torch.long),
            advantages=torch.ones(2, 3),
            config=config,
            **args,
        )


@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,), (1,), (), (2, 3, 1), (2, 4), (6,)])
def test_case_72_advantages_broadcast_only_per_sequence(shape):
    with pytest.raises(ValueError, match=r"\badvantages\b"):
        ppo_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 3), (3, 3)])
def test_case_72_advantages_of_shape_b_are_per_sequence_also_when_b_equals_t(shape):
    lp, adv = torch.zeros(shape), torch.randn(shape[0])
    mask = torch.ones(shape)
    mask[0, 1:] = 0
    got = ppo_loss(lp, lp, adv, mask).loss
    assert_close(got, oracle.ppo(lp, lp, adv[:, None].expand(shape), mask, spec=LossSpec()).loss, 5e-7, scale=0.1)
    logits, tokens = torch.randn(*shape, 5), torch.randint(5, shape)
    a = fused_ppo_loss(logits, tokens, lp - 1, adv, mask)
    b = fused_ppo_loss(logits, tokens, lp - 1, adv[:, None].expand(shape), mask)
    assert same_bits(a.loss, b.loss)
