"""liger-kernel 0.8.5: fused_ppo_loss of hidden @ weight.T against its chunked loss (eager, on the CPU), and
integrations.liger against its Triton kernels (in Triton's interpreter)."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import NamedTuple

import draws
import pytest
import torch
from draws import FP32, INF, NAN, close, close_grads
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from liger_kernel.ops.grpo_loss import fused_selective_log_softmax
from liger_kernel.transformers.grpo_loss import triton_grpo_loss
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_ppo_loss, logprobs_from_logits
from ppo_kernels.integrations import liger as ours
from ppo_kernels.integrations.trl_loss import log_ratios, vespo_weights

BATCH, LENGTH, VOCAB, HIDDEN = 3, 4, 37, 8
SHAPE = (BATCH, LENGTH)
MANY = (12, 9)  # enough that a gradient's size is that of the tokens not clipped
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
NO_SEQUENCE = ("cispo", "sapo", "vespo")
OPTIONS = {
    "default": {},
    "no_kl": {"beta": 0.0},
    "corrected_kl": {"use_bias_correction_kl": True, "beta": 0.3},
    "delta": {"delta": 1.5, "beta": 0.0},
    "delta_corrected": {"delta": 1.5, "use_bias_correction_kl": True},
    "clip_higher": {"epsilon_low": 0.1, "epsilon_high": 0.4, "temperature": 0.7},
    "sapo": {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
    "vespo": {"vespo_k_pos": 1.0, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5},
}


class Batch(NamedTuple):
    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    bias: Tensor  # [V]
    tokens: Tensor
    mask: Tensor
    advantages: Tensor  # [B]
    old: Tensor
    ref: Tensor

    @property
    def logits(self) -> Tensor:
        return self.hidden @ self.weight.T + self.bias


def batch(kind: str = "lengths_int", temperature: float = 1.0, shape: tuple[int, int] = SHAPE) -> Batch:
    hidden, weight, bias = torch.randn(*shape, HIDDEN), 0.3 * torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    tokens = torch.randint(VOCAB, shape)
    logprobs = logprobs_from_logits(hidden @ weight.T + bias, tokens, temperature=temperature)
    old, ref = (logprobs + 0.5 * torch.randn(shape) for _ in range(2))
    hidden, weight, bias = (x.requires_grad_() for x in (hidden, weight, bias))
    return Batch(hidden, weight, bias, tokens, draws.mask(kind, shape), torch.randn(shape[0]), old, ref)


def our_config(loss_type, level="token", **options):
    names = {
        "beta": "kl_coef",
        "epsilon_low": "clip_low",
        "epsilon_high": "cispo_ratio_max" if loss_type == "cispo" else "clip_high",
        "delta": "dual_clip",
        "sapo_temperature_pos": "sapo_tau_pos",
        "sapo_temperature_neg": "sapo_tau_neg",
        "temperature": "temperature",
    }
    overrides = {names[name]: value for name, value in options.items() if name in names}
    if options.get("use_bias_correction_kl"):
        overrides["kl_gradient"] = "is_weighted"
    if loss_type == "dr_grpo":
        overrides["agg_max_len"] = 11
    return PPOLossConfig.liger(loss_type, **{"ratio_level": level, **overrides})


def compare_chunked(b, loss_type, level, options, ratio=None, items=None, old=True):
    theirs = LigerFusedLinearGRPOLoss(
        loss_type=loss_type, importance_sampling_level=level, compiled=False, max_completion_length=11, **options
    )
    want, metrics = theirs(
        b.hidden,
        b.weight,
        b.tokens,
        b.mask,
        b.advantages,
        bias=b.bias,
        ref_per_token_logps=b.ref,
        old_per_token_logps=b.old if old else None,
        vllm_is_ratio=ratio,
        num_items_in_batch=items,
    )
    weights = None if ratio is None else ratio.view(len(b.mask), -1)
    if loss_type == "vespo":
        current = logprobs_from_logits(b.logits.detach(), b.tokens, temperature=options.get("temperature", 1.0))
        log_ratio = log_ratios(current, b.old if old else None, b.mask != 0)
        weights = vespo_weights(log_ratio, b.advantages[:, None], weights, SimpleNamespace(**vars(theirs)))
    config = our_config(loss_type, level, **options)
    luspo = b.mask.sum(-1, keepdim=True).expand(b.mask.shape) / b.mask.shape[1] if loss_type == "luspo" else None
    out = fused_ppo_loss(
        b.logits,
        b.tokens,
        b.old if old else None,
        b.advantages,
        b.mask,
        config=config,
        ref_logprobs=b.ref if options.get("beta") != 0.0 else None,
        rollout_is_weights=None if weights is None else weights.expand(b.mask.shape),
        normalizer=items if loss_type in ("dapo", "cispo", "vespo") else None,
        token_weights=luspo,
    )
    for leaf in (b.hidden, b.weight, b.bias):
        close_grads(out.loss, want, leaf)
    found = out.metrics.compute()
    if options.get("beta") != 0.0:
        close(found["ref_kl"], metrics[0])
    if loss_type not in NO_SEQUENCE:  # Liger's clip ratio of cispo looks at the sign of the advantage, ours does not
        close(found["clip_fraction"], metrics[-1])


def cases():
    for loss_type in LOSS_TYPES:
        for level in ("token",) if loss_type in NO_SEQUENCE else ("token", "sequence"):
            for name, options in OPTIONS.items():
                of_another_type = name in ("sapo", "vespo") and name != loss_type
                if not of_another_type and not (loss_type in NO_SEQUENCE and "delta" in name):
                    yield pytest.param(loss_type, level, options, id=f"{loss_type}-{level}-{name}")


@pytest.mark.parametrize(("loss_type", "level", "options"), list(cases()))
def test_chunked_loss(loss_type, level, options):
    kind = "all" if loss_type == "luspo" else "lengths_int"  # luspo counts padding: below
    temperature = options.get("temperature", 1.0)
    for ratio in (None, 0.5 + torch.rand(MANY[0]), 0.5 + torch.rand(MANY[0], 1), 0.5 + torch.rand(MANY)):
        compare_chunked(batch(kind, temperature, MANY), loss_type, level, options, ratio)
    compare_chunked(batch("all", temperature, MANY), loss_type, level, options, items=77)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_without_old_logprobs_the_gradient_is_kept(loss_type):
    compare_chunked(batch("all", shape=MANY), loss_type, "token", {}, old=False)


def test_the_luspo_preset_is_ligers_sequence_loss_without_kl():
    b = batch("all")
    theirs = LigerFusedLinearGRPOLoss(
        loss_type="luspo", importance_sampling_level="sequence", beta=0.0, compiled=False, use_ref_model=False
    )
    want, _ = theirs(b.hidden, b.weight, b.tokens, b.mask, b.advantages, bias=b.bias, old_per_token_logps=b.old)
    config = PPOLossConfig.liger("luspo", kl_coef=0.0)
    out = fused_ppo_loss(b.logits, b.tokens, b.old, b.advantages, b.mask, config=config)
    close_grads(out.loss, want, b.hidden)


# -- triton_grpo_loss


def with_last_row(b: Batch) -> Tensor:
    """[B, T + 1, V], a leaf: the last row predicts nothing."""
    return torch.nn.functional.pad(b.logits.detach(), (0, 0, 0, 1), value=3.0).requires_grad_()


def compare_triton(b, upstream=None, **options):
    theirs, mine = with_last_row(b), with_last_row(b)
    arguments = (b.old, b.ref, b.tokens, b.advantages, b.mask)
    want = triton_grpo_loss(theirs, *arguments, **{"inplace": False, **options})
    got = ours.triton_grpo_loss(mine, *arguments, **{"inplace": False, **options})
    if options.get("reduce"):
        assert len(got[1]) == len(want[1])
        for a, c in zip(got[1], want[1], strict=True):
            close(a, c)
    else:
        for a, c in zip(got[1:], want[1:], strict=True):
            assert (a is None) == (c is None)
            if a is not None:
                close(a, c)
                assert a.dtype == c.dtype
    close(got[0], want[0])
    if options["loss_type"] == "luspo" and options["importance_sampling_level"] == "token" and options.get("reduce"):
        return  # that gradient of Liger's is wrong: below
    upstream = torch.ones_like(want[0]) if upstream is None else upstream
    for x, loss in ((theirs, want[0]), (mine, got[0])):
        loss.backward(upstream)
        assert (x.grad[:, -1] == 0).all()
    scale = theirs.grad.abs().max().clamp(min=1e-30)
    close(mine.grad / scale, theirs.grad / scale, FP32, "gradient")


def triton_cases():
    renamed = {"epsilon_low": "eps_low", "epsilon_high": "eps_high"}
    for case in cases():
        loss_type, level, options = case.values
        options = {renamed.get(name, name): value for name, value in options.items()}
        yield pytest.param(loss_type, level, options, id=case.id)


@pytest.mark.parametrize(("loss_type", "level", "options"), list(triton_cases()))
def test_triton_grpo_loss(loss_type, level, options):
    options = {"temperature": 0.9, "loss_type": loss_type, "importance_sampling_level": level, **options}
    ratio = 0.5 + torch.rand(SHAPE if level == "token" else (BATCH, 1))
    compare_triton(batch("lengths_int", options["temperature"]), reduce=True, num_items_in_batch=17, **options)
    b = batch("holes", options["temperature"])
    compare_triton(b, reduce=True, vllm_is_ratio=ratio, max_completion_length=11, **options)
    compare_triton(b, torch.randn(SHAPE), vllm_is_ratio=ratio, **options)


def test_signature_and_defaults_are_ligers():
    for mine, theirs in (
        (ours.triton_grpo_loss, triton_grpo_loss),
        (ours.fused_selective_log_softmax, fused_selective_log_softmax),
    ):
        want = [(p.name, p.default) for p in inspect.signature(theirs).parameters.values()]
        assert [(p.name, p.default) for p in inspect.signature(mine).parameters.values()] == want


@pytest.mark.parametrize("reduce", [False, True])
def test_inplace_writes_the_gradient_over_the_logits_and_is_the_default(reduce):
    b = batch()
    logits, kept = with_last_row(b), with_last_row(b)
    arguments = (b.old, b.ref, b.tokens, b.advantages, b.mask)
    ours.triton_grpo_loss(logits, *arguments, reduce=reduce)[0].sum().backward()
    ours.triton_grpo_loss(kept, *arguments, reduce=reduce, inplace=False)[0].sum().backward()
    close(logits.grad, kept.grad, 0.0)
    assert torch.equal(logits, logits.grad)


@pytest.mark.parametrize("masked", [False, True])
def test_fused_selective_log_softmax(masked):
    b = batch("holes")
    ids = torch.cat([torch.randint(VOCAB, (BATCH, 3)), b.tokens], 1)  # prompt and completion
    mask = torch.cat([torch.ones(BATCH, 3, dtype=torch.bool), b.mask], 1) if masked else None
    want = fused_selective_log_softmax(with_last_row(b), ids, 0.7, mask)
    got = ours.fused_selective_log_softmax(with_last_row(b), ids, 0.7, mask)
    close(got, want)
    assert not got.requires_grad


def test_options_that_cannot_be_honoured_are_refused_by_name():
    b = batch()
    arguments = (with_last_row(b), b.old, b.ref, b.tokens, b.advantages, b.mask)
    for options, error, name in (
        ({"delta": 0.9}, NotImplementedError, "delta"),
        ({"delta": 1.5, "loss_type": "vespo"}, ValueError, "delta"),
        ({"delta": 2.0, "loss_type": "sapo"}, ValueError, "delta"),
        ({"importance_sampling_level": "sequence", "loss_type": "cispo"}, ValueError, "importance_sampling_level"),
        ({"importance_sampling_level": "sequence_token"}, ValueError, "importance_sampling_level"),
        ({"loss_type": "gspo"}, ValueError, "loss_type"),
    ):
        with pytest.raises(error, match=name):
            ours.triton_grpo_loss(*arguments, **options)


# -- where Liger is wrong


def test_below_delta_ligers_kernel_drops_a_gradient_that_its_chunked_loss_has_and_ours_too():
    """delta = 1.2 under 1 + eps_high = 1.4, A < 0: the loss is -A r for a ratio of 1.3, by the clipped branch."""
    b = batch("all")
    logits = with_last_row(b)
    old = fused_selective_log_softmax(logits, b.tokens, 1.0) - torch.tensor(1.3).log()
    advantages = -torch.ones(BATCH)
    options = {"delta": 1.2, "beta": 0.0, "temperature": 1.0, "inplace": False}
    arguments = (old, None, b.tokens, advantages, b.mask)
    losses = [f(logits, *arguments, **options)[0] for f in (triton_grpo_loss, ours.triton_grpo_loss)]
    for loss in losses:
        close(loss, torch.full(SHAPE, 1.3))
    theirs, mine = (torch.autograd.grad(loss.sum(), logits)[0] for loss in losses)
    assert (theirs == 0).all()
    chunked = LigerFusedLinearGRPOLoss(
        delta=1.2, epsilon_high=0.4, beta=0.0, loss_type="bnpo", compiled=False, use_ref_model=False
    )
    want, _ = chunked(b.hidden, b.weight, b.tokens, b.mask, advantages, b.bias, old_per_token_logps=old)
    want = torch.autograd.grad(want, b.bias)[0]
    assert want.abs().max() > 0.01
    close(mine.sum((0, 1)) / b.mask.sum(), want)


def test_luspo_counts_the_losses_of_padding_in_ligers_chunked_loss_and_not_here():
    b = batch("lengths_int")
    theirs = LigerFusedLinearGRPOLoss(loss_type="luspo", compiled=False)
    arguments = (b.hidden, b.weight, b.tokens, b.mask, b.advantages, b.bias, b.ref)
    want, _ = theirs(*arguments, b.old)
    other, _ = theirs(*arguments, b.old + 0.5 * (1 - b.mask))  # only padding differs
    assert (want - other).abs() > 1e-3
    options = {"loss_type": "luspo", "reduce": True, "inplace": False, "temperature": 1.0, "eps_high": 0.2}
    got, same = (
        ours.triton_grpo_loss(with_last_row(b), old, b.ref, b.tokens, b.advantages, b.mask, **options)[0]
        for old in (b.old, b.old + 0.5 * (1 - b.mask))
    )
    assert torch.equal(got, same)


def test_the_gradient_of_ligers_luspo_kernel_takes_the_lengths_of_other_sequences():
    """It reads lengths [B, 1] as if they were [B, L]: token t of sequence i gets that of sequence i + t, or beyond."""
    b = batch("all")
    b.mask[1, 2:], b.mask[2, 1:] = 0, 0
    lengths = b.mask.sum(-1, keepdim=True)
    assert lengths.flatten().tolist() == [4, 2, 1]
    arguments = (b.old, b.ref, b.tokens, b.advantages, b.mask)
    options = {"loss_type": "luspo", "inplace": False}
    right, theirs, mine = (with_last_row(b) for _ in range(3))
    (triton_grpo_loss(right, *arguments, **options)[0] * lengths).mean().backward()  # its own losses, reduced by hand
    triton_grpo_loss(theirs, *arguments, reduce=True, **options)[0].backward()
    ours.triton_grpo_loss(mine, *arguments, reduce=True, **options)[0].backward()
    close(mine.grad, right.grad)
    close(theirs.grad[0, :3], right.grad[0, :3] * torch.tensor([1.0, 2 / 4, 1 / 4])[:, None])


def test_nan_in_old_logprobs_of_padding_is_nan_in_ligers_chunked_loss_and_untouched_here():
    b = batch("lengths_int")
    old = b.old.masked_fill(b.mask == 0, NAN)
    theirs = LigerFusedLinearGRPOLoss(compiled=False)
    assert theirs(b.hidden, b.weight, b.tokens, b.mask, b.advantages, b.bias, b.ref, old)[0].isnan()
    clean, _ = theirs(b.hidden, b.weight, b.tokens, b.mask, b.advantages, b.bias, b.ref, b.old)
    config = our_config("dapo")
    out = fused_ppo_loss(b.logits, b.tokens, old, b.advantages, b.mask, config=config, ref_logprobs=b.ref)
    close_grads(out.loss, clean, b.hidden)


def test_a_first_block_of_banned_tokens_is_nan_in_ligers_kernel_and_not_here():
    logits = torch.randn(1, 2, 2100)
    logits[..., :2048] = -INF
    ids = torch.tensor([[2050]])
    assert fused_selective_log_softmax(logits, ids, 1.0).isnan().all()
    close(ours.fused_selective_log_softmax(logits, ids, 1.0), torch.log_softmax(logits[0, :1, 2048:], -1)[:, 2:3])


def test_a_loss_that_overflows_with_advantage_0_is_nan_in_liger_and_0_here():
    b = batch("all")
    old = torch.full(SHAPE, -200.0)
    arguments = (old, None, b.tokens, torch.zeros(BATCH), b.mask)
    options = {"beta": 0.0, "reduce": True, "inplace": False}
    assert triton_grpo_loss(with_last_row(b), *arguments, **options)[0].isnan()
    logits = with_last_row(b)
    loss = ours.triton_grpo_loss(logits, *arguments, **options)[0]
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


def test_k3_of_a_small_log_ratio_has_the_wrong_sign_in_liger_and_not_here():
    b = batch("all")
    logits = with_last_row(b)
    logprobs = fused_selective_log_softmax(logits, b.tokens, 1.0)
    ref = logprobs + 1e-4 * torch.randn(SHAPE)
    options = {"reduce": False, "inplace": False, "temperature": 1.0}
    arguments = (logits, None, ref, b.tokens, b.advantages, b.mask)
    assert (triton_grpo_loss(*arguments, **options)[1] < 0).any()
    assert (ours.triton_grpo_loss(*arguments, **options)[1] >= 0).all()
