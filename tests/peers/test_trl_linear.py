"""FusedLinearGRPOLoss and liger-kernel 0.8.5's LigerFusedLinearGRPOLoss: loss, metrics, gradients of all inputs."""

from __future__ import annotations

import math

import pytest
import torch
from draws import FP32, close
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

from ppo_kernels.integrations.trl import FusedLinearGRPOLoss

B, T, H, V = 5, 7, 16, 53
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo", "vespo")


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(dtype=torch.float32, seed=0, bias=True):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(B, T, H), 0.3 * torch.randn(V, H)
    tokens = torch.randint(0, V, (B, T))
    bias = 0.3 * torch.randn(V) if bias else None
    logprobs = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    mask = (torch.arange(T) < torch.tensor([T, 2, 0, 5, 1])[:, None]).long()
    return {
        "_input": hidden.to(dtype),
        "lin_weight": weight.to(dtype),
        "selected_token_ids": tokens,
        "attention_mask": mask,
        "advantages": torch.tensor([1.3, -0.7, 0.4, -1.9, 0.0]),
        "bias": None if bias is None else bias.to(dtype),
        "old_per_token_logps": logprobs + 0.4 * torch.randn(B, T),
        "ref_per_token_logps": logprobs + 0.8 * torch.randn(B, T),
    }


def compute(cls, inputs, upstream=1.0, **options):
    """(loss, metrics, [gradients])"""
    if cls is LigerFusedLinearGRPOLoss:
        options["compiled"] = False
    leaves = [inputs[name] for name in ("_input", "lin_weight", "bias") if inputs[name] is not None]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    given = dict(zip(("_input", "lin_weight", "bias"), leaves, strict=False))
    loss, metrics = cls(**options)(**{**inputs, **given})
    (upstream * loss).backward()
    return loss.item(), [x.item() for x in metrics], [x.grad for x in leaves]


def apart(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


def assert_same(inputs, **options):
    want, got = (
        compute(cls, inputs, upstream=1.7, **options) for cls in (LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss)
    )
    close(got[0], want[0], what="loss")
    close(got[1], want[1], what="metrics")
    for mine, theirs in zip(got[2], want[2], strict=True):
        assert mine.dtype == theirs.dtype
        assert apart(mine, theirs) <= FP32


OPTIONS = [
    {},
    {"beta": 0.0},
    {"beta": 0.1, "use_bias_correction_kl": True},
    {"use_ref_model": False},
    {"delta": 1.5, "temperature": 0.7},
    {"delta": 1.1},
    {"chunk_size": 2},
    {"chunk_size": 100, "epsilon_high": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_and_option(loss_type, options):
    if loss_type == "dr_grpo":
        options = {**options, "max_completion_length": 11}
    if loss_type == "cispo":
        options = {**options, "epsilon_high": 1.3}
    assert_same(draw(), loss_type=loss_type, **options)


@pytest.mark.parametrize("options", [{}, {"beta": 0.0, "delta": 1.5}, {"use_bias_correction_kl": True}], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_sequence_level(loss_type, options):
    options = {"max_completion_length": 11, "importance_sampling_level": "sequence", **options}
    assert_same(draw(), loss_type=loss_type, **options)


@pytest.mark.parametrize("shape", [(B,), (B, 1), (B, T)], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "vespo"])
def test_importance_ratio_of_the_sampler(loss_type, shape):
    inputs = draw()
    inputs["vllm_is_ratio"] = torch.rand(shape) * 2
    if shape == (B, T):
        inputs["vllm_is_ratio"] = inputs["vllm_is_ratio"].masked_fill(inputs["attention_mask"] == 0, 1.0)
    assert_same(inputs, loss_type=loss_type)


@pytest.mark.parametrize("count", [57, torch.tensor(57)], ids=["number", "tensor"])
@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "vespo", "grpo"])
def test_count_of_tokens_in_the_whole_batch(loss_type, count):
    assert_same({**draw(), "num_items_in_batch": count}, loss_type=loss_type)


def test_on_policy_without_old_log_probs():
    assert_same({**draw(), "old_per_token_logps": None})


def test_reference_from_its_hidden_states():
    inputs, other = draw(), draw(seed=1)
    inputs["ref_per_token_logps"] = None
    inputs |= {"ref_input": other["_input"], "ref_weight": other["lin_weight"], "ref_bias": other["bias"]}
    assert_same(inputs, temperature=0.7)


def test_head_without_bias():
    assert_same(draw(bias=False))


@pytest.mark.parametrize("frozen", ["_input", "lin_weight", "bias"])
def test_frozen_parts_get_no_gradient(frozen):
    inputs = draw()
    for name in ("_input", "lin_weight", "bias"):
        inputs[name].requires_grad_(name != frozen)
    loss, _ = FusedLinearGRPOLoss()(**inputs)
    loss.backward()
    assert [name for name in ("_input", "lin_weight", "bias") if inputs[name].grad is None] == [frozen]


def test_without_gradients_the_loss_is_the_same():
    inputs = draw()
    inputs["_input"].requires_grad_()
    want, _ = FusedLinearGRPOLoss()(**inputs)
    with torch.no_grad():
        got, _ = FusedLinearGRPOLoss()(**inputs)
    assert got == want
    assert not got.requires_grad


def test_bf16_is_about_as_far_from_fp32_as_liger():
    """liger's gradient of the logits is fp32, ours bf16 like that of any bf16 head; both sum the head's in fp32."""
    errors = {LigerFusedLinearGRPOLoss: 0.0, FusedLinearGRPOLoss: 0.0}
    for seed in range(5):
        inputs = draw(torch.bfloat16, seed)
        exact = {k: x.float() if torch.is_tensor(x) and x.dtype == torch.bfloat16 else x for k, x in inputs.items()}
        _, _, want = compute(LigerFusedLinearGRPOLoss, exact)
        for cls in errors:
            _, _, got = compute(cls, inputs)
            errors[cls] += sum(apart(x, y) ** 2 for x, y in zip(got, want, strict=True))
    assert errors[FusedLinearGRPOLoss] <= 1.3 * errors[LigerFusedLinearGRPOLoss]


# ---------------------------------------------------------------------------------------------------------------------
# Differences
# ---------------------------------------------------------------------------------------------------------------------


def test_luspo_counts_valid_tokens_as_trl_does():
    """liger 0.8.5: n_i times the loss of every slot, padding too, over B * T. Equal where it is one loss a sequence."""
    assert_same(draw(), loss_type="luspo", importance_sampling_level="sequence", beta=0.0)
    (theirs, _, _), (ours, _, _) = (
        compute(x, draw(), loss_type="luspo") for x in (LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss)
    )
    assert abs(theirs - ours) > 0.1


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_sequence_level_of_cispo_and_sapo_exists_only_here(loss_type):
    options = {"loss_type": loss_type, "importance_sampling_level": "sequence"}
    with pytest.raises(ValueError, match="not supported"):
        compute(LigerFusedLinearGRPOLoss, draw(), **options)
    assert math.isfinite(compute(FusedLinearGRPOLoss, draw(), **options)[0])


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
def test_a_masked_token_may_hold_anything(name):
    inputs = draw()
    want = compute(FusedLinearGRPOLoss, inputs)
    inputs[name] = inputs[name].masked_fill(inputs["attention_mask"] == 0, math.nan)
    got = compute(FusedLinearGRPOLoss, inputs)
    assert got[:2] == want[:2]
    assert all(torch.equal(x, y) for x, y in zip(got[2], want[2], strict=True))
    assert math.isnan(compute(LigerFusedLinearGRPOLoss, inputs)[0])


def test_errors_name_the_argument():
    with pytest.raises(NotImplementedError, match=r"delta is 0\.9"):
        FusedLinearGRPOLoss(delta=0.9)
    with pytest.raises(ValueError, match="ref_per_token_logps is None"):
        FusedLinearGRPOLoss()(**{**draw(), "ref_per_token_logps": None})
    with pytest.raises(ValueError, match="agg_max_len"):
        FusedLinearGRPOLoss(loss_type="dr_grpo")
