"""Class 6: sizes at the edges, int64 addressing, tensor subclasses, instruction sets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import oracle
import pytest
import ranks
import torch
from checks import assert_close, assert_entropy, assert_logits_grad, assert_logprobs, leaf, same_bits
from oracle import LossSpec

import ppo_kernels
from ppo_kernels import PPOLossConfig, fused_ppo_loss, gae, logprobs_from_logits, masked_whiten, ppo_loss, shape_rewards

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
cpu_only = pytest.mark.cpu_only("about memory that exists only when touched, or about CPU libraries")


def rows_far_apart(stride, dtype, rows=3, width=9):
    """`rows` rows whose element offsets pass 2^31; only the touched pages of the storage ever exist."""
    storage = torch.empty((rows - 1) * stride + width, dtype=dtype)
    view = storage.as_strided((rows, width), (stride, 1))
    view.copy_(torch.randn(rows, width))
    return view


@cpu_only
@pytest.mark.parametrize("dtype", FLOATS)
def test_case_48_row_offsets_past_two_to_the_31(dtype):
    logits = rows_far_apart(2**30 + 7, dtype)
    small = logits.contiguous()
    tokens = torch.tensor([1, 4, 8])
    assert (logits.stride(0)) * 2 > 2**31
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    want = oracle.score(small, tokens)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)

    x = logits.detach().requires_grad_()
    fused_ppo_loss(x, tokens, None, torch.ones(3)).loss.backward()
    assert_logits_grad(x.grad, oracle.fused(small, tokens, None, torch.ones(3), spec=LossSpec()).d_logits)


@cpu_only
def test_case_48_gradient_written_in_place_past_two_to_the_31():
    logits = rows_far_apart(2**30 + 7, torch.bfloat16)
    small = logits.contiguous()
    tokens = torch.tensor([1, 4, 8])
    x = logits.detach().requires_grad_()
    fused_ppo_loss(x, tokens, None, torch.ones(3), inplace_grad=True).loss.backward()
    assert_logits_grad(x.grad.contiguous(), oracle.fused(small, tokens, None, torch.ones(3), spec=LossSpec()).d_logits)


@cpu_only
def test_case_48_batch_stride_past_two_to_the_31_with_shift():
    storage = torch.empty(2**31 + 64, dtype=torch.bfloat16)
    logits = storage.as_strided((2, 4, 9), (2**31 + 5, 9, 1))
    logits.copy_(torch.randn(2, 4, 9))
    tokens = torch.randint(9, (2, 4))
    assert_logprobs(
        logprobs_from_logits(logits, tokens, shift=True), oracle.score(logits.contiguous(), tokens, shift=True).logprobs
    )


@pytest.mark.gpu
def test_case_48_more_than_two_to_the_31_logits_on_the_gpu():
    logits = torch.randn(1, 151936, device="cuda", dtype=torch.bfloat16).expand(14200, -1).contiguous().requires_grad_()
    tokens = torch.arange(14200, device="cuda")
    lp = logprobs_from_logits(logits, tokens)
    lp.sum().backward()
    small = logits.detach()[-4:].contiguous().requires_grad_()
    small_lp = logprobs_from_logits(small, tokens[-4:])
    small_lp.sum().backward()
    assert same_bits(lp[-4:].contiguous(), small_lp)
    assert same_bits(logits.grad[-4:].contiguous(), small.grad)


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3), (0, 0)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_case_51_no_rows(shape, dtype):
    logits, tokens = torch.empty(*shape, 8, dtype=dtype).requires_grad_(), torch.empty(shape, dtype=torch.long)
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    assert lp.shape == h.shape == shape
    out = fused_ppo_loss(logits, tokens, torch.empty(shape), torch.empty(shape), config=PPOLossConfig(entropy_coef=0.1))
    assert out.loss == 0
    assert out.loss.grad_fn is not None
    (out.loss + lp.sum() + h.sum()).backward()
    assert logits.grad.shape == logits.shape
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_case_51_no_tokens_in_ppo_loss(aggregation):
    for shape in ((0, 3), (2, 0)):
        lp = torch.empty(shape, requires_grad=True)
        out = ppo_loss(lp, torch.empty(shape), torch.empty(shape), config=PPOLossConfig(aggregation=aggregation))
        out.loss.backward()
        assert out.loss == 0
        assert lp.grad.shape == shape


def test_case_51_shift_of_a_single_token_scores_nothing():
    logits = torch.randn(2, 1, 8, requires_grad=True)
    tokens = torch.zeros(2, 1, dtype=torch.long)
    assert logprobs_from_logits(logits, tokens, shift=True).shape == (2, 0)
    out = fused_ppo_loss(logits, tokens, torch.empty(2, 0), torch.empty(2, 0), shift=True)
    out.loss.backward()
    assert out.loss == 0
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0,), (0, 0)])
def test_case_51_no_steps_in_gae_and_friends(shape):
    out = gae(torch.empty(shape), torch.empty(shape), torch.empty(shape))
    assert out.advantages.shape == out.returns.shape == shape
    assert masked_whiten(torch.empty(shape)).shape == shape
    if len(shape) == 2:
        empty = torch.empty(shape)
        assert shape_rewards(torch.ones(shape[0]), empty, empty, empty, kl_coef=0.1).shape == shape


def test_case_51_empty_packed_input():
    cu = torch.tensor([0], dtype=torch.int32)
    assert gae(torch.empty(0), torch.empty(0), cu_seqlens=cu).advantages.shape == (0,)
    assert gae(torch.empty(0), torch.empty(0), cu_seqlens=torch.tensor([0, 0], dtype=torch.int32)).advantages.shape == (
        0,
    )


@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (2, 3, 0)])
def test_case_51_no_vocabulary_is_refused(shape):
    with pytest.raises(ValueError, match="logits"):
        logprobs_from_logits(torch.empty(shape), torch.zeros(shape[:-1], dtype=torch.long))


@pytest.mark.gpu
def test_case_53_same_input_twenty_times_and_in_any_order_of_rows():
    logits = torch.randn(300, 50257, device="cuda", dtype=torch.bfloat16)
    tokens = torch.randint(50257, (300,), device="cuda")
    first = logprobs_from_logits(logits, tokens)
    for _ in range(20):
        assert same_bits(logprobs_from_logits(logits, tokens), first)
    order = torch.randperm(300, device="cuda")
    assert same_bits(logprobs_from_logits(logits[order], tokens[order]), first[order])


def test_case_54_very_large_vocabulary():
    logits, tokens = torch.randn(4, 262144).bfloat16(), torch.randint(262144, (4,))
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    want = oracle.score(logits, tokens)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    x = logits.float().requires_grad_()
    logprobs_from_logits(x, tokens).sum().backward()
    assert (x.grad.double().sum(-1).abs() < 1e-6).all()  # the probabilities sum to 1


class Tagged(torch.Tensor):
    """The plainest tensor subclass."""


def test_case_56_a_plain_tensor_subclass_is_scored_right():
    logits, tokens = torch.randn(3, 7), torch.tensor([0, 3, 6])
    got = logprobs_from_logits(logits.as_subclass(Tagged), tokens)
    assert_logprobs(got.as_subclass(torch.Tensor), oracle.score(logits, tokens).logprobs)


def score_dtensors(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    logits, tokens = torch.randn(4, 10), torch.tensor([0, 4, 5, 9])
    want = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    errors = []
    for placement in (Replicate(), Shard(-1)):
        x = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        ids = distribute_tensor(tokens, mesh, [Replicate()])
        for args in ((x, tokens), (x, ids)):
            try:
                got = logprobs_from_logits(*args)
            except (ValueError, TypeError, NotImplementedError) as error:
                errors.append(str(error))
                continue
            if hasattr(got, "full_tensor"):
                got = got.full_tensor()
            assert got.shape == want.shape, got.shape
            torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)
        try:
            fused_ppo_loss(x, tokens, torch.zeros(4), torch.ones(4))
        except (ValueError, TypeError, NotImplementedError) as error:
            errors.append(str(error))
    return errors


@ranks.DISTRIBUTED
@ranks.ONCE
@pytest.mark.parametrize("world", [1, 2])
def test_case_56_a_dtensor_is_right_or_a_clear_error(world, tmp_path):
    for errors in ranks.run(score_dtensors, world, tmp_path):
        assert all(re.search("logits|dtensor", error, re.IGNORECASE) for error in errors), errors


SELF_CHECK = """
    import torch, ppo_kernels
    torch.manual_seed(0)
    x = torch.randn(4, 5003, requires_grad=True)
    t = torch.tensor([0, 1, 2, 5002])
    lp, h = ppo_kernels.logprobs_from_logits(x, t, return_entropy=True)
    (lp + h).sum().backward()
    y = x.detach().double().requires_grad_()
    logp = torch.log_softmax(y, -1)
    want = logp.gather(-1, t[:, None])[:, 0]
    want_h = -(logp.exp() * logp).sum(-1)
    (want + want_h).sum().backward()
    assert (lp - want).abs().max() <= 2e-6 * want.abs().max(), (lp, want)
    assert (h - want_h).abs().max() <= 2e-6 * want_h.abs().max(), (h, want_h)
    assert (x.grad - y.grad).norm() <= 2e-6 * y.grad.norm()
    print("right")
"""


@cpu_only
@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_case_57_every_instruction_set_level_gives_right_numbers_or_says_it_cannot_run(level):
    env = {k: v for k, v in os.environ.items() if k != "PPO_KERNELS_BACKEND"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SELF_CHECK)],
        env={**env, "PPO_KERNELS_ISA": level},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if result.returncode != 0:
        assert result.returncode > 0, f"killed by signal {-result.returncode}"
        assert level in result.stderr.splitlines()[-1], result.stderr[-2000:]
        pytest.skip(f"level {level} refused here: {result.stderr.splitlines()[-1]}")
    assert result.stdout.strip() == "right"


@cpu_only
def test_case_57_an_unknown_level_is_a_clear_error():
    env = {k: v for k, v in os.environ.items() if k != "PPO_KERNELS_BACKEND"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SELF_CHECK)],
        env={**env, "PPO_KERNELS_ISA": "v9"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode > 0
    assert "v9" in result.stderr.splitlines()[-1]


def disassemble(library):
    try:
        return subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", str(library)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
    except FileNotFoundError:
        pytest.skip("objdump is not installed")


@cpu_only
def test_case_57_the_baseline_library_holds_no_wide_registers():
    libraries = list(Path(ppo_kernels.__file__).parent.glob("*v2*.so"))
    if not libraries:
        pytest.skip("no x86-64-v2 native library was built here")
    for library in libraries:
        code = disassemble(library)
        assert "%zmm" not in code
        assert "%ymm" not in code
        assert "\tv" not in code  # VEX-encoded instructions all start with v


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("dtype", FLOATS)
def test_small_action_spaces(width, dtype):
    """Classic RL: many rows of a few logits each."""
    logits, tokens = leaf(torch.randn(257, width, dtype=dtype) * 2), torch.randint(width, (257,))
    g_lp, g_h = torch.randn(2, 257)
    lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
    torch.autograd.backward([lp, h], [g_lp, g_h])
    want = oracle.score(logits, tokens)
    assert_logprobs(lp, want.logprobs)
    assert_entropy(h, want.entropy)
    assert_logits_grad(logits.grad, want.d_logits(g_lp.numpy(force=True), g_h.numpy(force=True)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), [(4099, 8), (1031, 130)])
def test_many_rows_are_shared_out_between_threads_without_a_gap(rows, width, dtype):
    logits, tokens = leaf(torch.randn(rows, width, dtype=dtype)), torch.randint(width, (rows,))
    mask = torch.rand(rows) < 0.8
    out = fused_ppo_loss(logits, tokens, None, torch.ones(rows), mask)
    out.loss.backward()
    want = oracle.fused(logits, tokens, None, torch.ones(rows), mask, spec=LossSpec())
    assert_logprobs(out.logprobs, want.scores.logprobs)
    assert_close(out.loss, -1.0, 5e-7)
    assert_logits_grad(logits.grad, want.d_logits)


def test_nothing_is_read_past_the_end_of_a_row():
    """The neighbours of every row are huge; one lane too many would show."""
    for width in (5, 13, 127, 1000):
        wide = torch.full((4, width + 64), 1e30)
        wide[:, 16 : 16 + width] = torch.randn(4, width)
        logits = wide[:, 16 : 16 + width]
        tokens = torch.randint(width, (4,))
        lp, h = logprobs_from_logits(logits, tokens, return_entropy=True)
        want = oracle.score(logits.contiguous(), tokens)
        assert_logprobs(lp, want.logprobs)
        assert_entropy(h, want.entropy)


def test_nothing_is_written_outside_the_view_in_place():
    for dtype in FLOATS:
        wide = torch.full((4, 200), 7.0, dtype=dtype)
        view = wide[:, 16:117]
        view.copy_(torch.randn(4, 101))
        x = view.detach().requires_grad_()
        fused_ppo_loss(x, torch.randint(101, (4,)), None, torch.ones(4), inplace_grad=True).loss.backward()
        assert (wide[:, :16] == 7).all()
        assert (wide[:, 117:] == 7).all()


def test_memory_order_of_results_is_plain():
    logits = torch.randn(4, 2, 8).transpose(0, 1)
    lp = logprobs_from_logits(logits, torch.zeros(2, 4, dtype=torch.long))
    assert np.array_equal(lp.flatten().numpy(force=True), lp.contiguous().view(-1).numpy(force=True))
    assert_close(lp, oracle.score(logits.contiguous(), torch.zeros(2, 4, dtype=torch.long)).logprobs, 5e-7)
