"""Class 5, rows 44 and 46: torch.compile, meta and fake tensors."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, leaf, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, ppo_loss, shape_rewards

CONFIG = PPOLossConfig(entropy_coef=0.01, kl_coef=0.1, value_clip=0.2)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def scores(logits, tokens):
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    return lp.sum() + 0.1 * h.sum()


def run_scores(fn, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 33, requires_grad=True)
    loss = fn(x, torch.randint(33, (2, 3)))
    loss.backward()
    return loss.detach(), x.grad


def fused(logits, tokens, old, adv, mask, values):
    out = fused_ppo_loss(
        logits, tokens, old, adv, mask, values=values, old_values=old, returns=adv, ref_logprobs=old, config=CONFIG
    )
    return out.loss, out.logprobs


def run_fused(fn, seed=0):
    torch.manual_seed(seed)
    x, values = torch.randn(2, 3, 33, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]], dtype=torch.bool)
    loss, lp = fn(x, torch.randint(33, (2, 3)), torch.randn(2, 3) - 3, torch.randn(2, 3), mask, values)
    loss.backward()
    return loss.detach(), lp, x.grad, values.grad


def policy(lp, old, adv, mask, entropy):
    return ppo_loss(lp, old, adv, mask, entropy=entropy, config=PPOLossConfig(entropy_coef=0.01)).loss


def run_policy(fn, seed=0):
    torch.manual_seed(seed)
    lp, entropy = torch.randn(2, 3, requires_grad=True), torch.rand(2, 3, requires_grad=True)
    loss = fn(lp, torch.randn(2, 3), torch.randn(2, 3), torch.tensor([[1, 0, 1], [1, 1, 0]]), entropy)
    loss.backward()
    return loss.detach(), lp.grad, entropy.grad


def advantages(rewards, values, mask):
    out = gae(rewards, values, mask, gamma=0.9)
    return out.advantages, out.returns


def run_gae(fn, seed=0):
    torch.manual_seed(seed)
    return fn(torch.randn(2, 5), torch.randn(2, 5), torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]))


CASES = {
    "scores": (scores, run_scores),
    "fused": (fused, run_fused),
    "policy": (policy, run_policy),
    "gae": (advantages, run_gae),
}


@pytest.mark.gpu
def test_case_45_no_synchronisation_in_loss_and_gae():
    """What would break a CUDA graph capture raises here."""
    args = [x.cuda() for x in (torch.randn(2, 3, 33), torch.randint(33, (2, 3)), torch.randn(2, 3), torch.randn(2, 3))]
    mask, values = (
        torch.ones(2, 3, dtype=torch.bool, device="cuda"),
        torch.randn(2, 3, device="cuda", requires_grad=True),
    )
    args[0].requires_grad_()
    fused(*args, mask, values)[0].backward()  # compile and warm up
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused(*args, mask, values)[0].backward()
        gae(args[2], args[3], mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES)
def test_case_44_fullgraph_compile_gives_the_eager_values(case):
    fn, run = CASES[case]
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(fn), run(compiled), strict=True):
        assert_close(b, a, 5e-7, scale=0.1)
    for a, b in zip(run(fn, seed=1), run(compiled, seed=1), strict=True):  # the same graph, new data
        assert_close(b, a, 5e-7, scale=0.1)


def test_case_44_inductor_gives_the_eager_values():
    for a, b in zip(run_fused(fused), run_fused(torch.compile(fused, fullgraph=True)), strict=True):
        assert_close(b, a, 5e-7, scale=0.1)


def test_case_44_no_graph_breaks():
    explained = torch._dynamo.explain(fused)(
        torch.randn(2, 3, 33, requires_grad=True),
        torch.randint(33, (2, 3)),
        torch.randn(2, 3) - 3,
        torch.randn(2, 3),
        torch.ones(2, 3, dtype=torch.bool),
        torch.randn(2, 3, requires_grad=True),
    )
    assert explained.graph_break_count == 0


def test_case_44_dynamic_batch_and_length():
    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 3), (4, 3), (2, 7)):
        x, tokens = torch.randn(*shape, 33), torch.randint(33, shape)
        a, b = leaf(x), leaf(x)
        scores(a, tokens).backward()
        compiled(b, tokens).backward()
        assert same_bits(a.grad, b.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_case_44_compiled_out_of_range_tokens_still_raise(dtype):
    compiled = torch.compile(scores, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError):
        compiled(torch.randn(1, 2, 5, dtype=dtype), torch.tensor([[0, 5]], device="cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_case_44_meta_and_fake_tensors_give_shapes_dtypes_devices(kind, dtype):
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        device = "cpu" if kind == "fake" else "meta"
        logits = torch.empty(2, 3, 50000, dtype=dtype, device=device, requires_grad=True)
        tokens = torch.empty(2, 3, dtype=torch.long, device=device)
        per_token = torch.empty(2, 3, device=device)
        lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
        for x in (lp, h):
            assert x.shape == (2, 3)
            assert x.dtype == torch.float32
            assert x.device.type == device
        shifted = logprobs_from_logits(logits, tokens, shift=True)
        assert shifted.shape == (2, 2)
        out = fused_ppo_loss(
            logits,
            tokens,
            per_token,
            per_token,
            values=per_token,
            old_values=per_token,
            returns=per_token,
            ref_logprobs=per_token,
            config=CONFIG,
        )
        assert out.loss.shape == ()
        assert out.loss.dtype == torch.float32
        assert out.logprobs.shape == (2, 3)
        (out.loss + lp.sum()).backward()
        assert logits.grad.shape == logits.shape
        assert logits.grad.dtype == dtype
        assert gae(per_token, per_token).advantages.shape == (2, 3)
        assert masked_whiten(per_token).shape == (2, 3)
        assert shape_rewards(
            per_token[:, 0], per_token, per_token, torch.ones(2, 3, device=device), kl_coef=0.1
        ).shape == (2, 3)
