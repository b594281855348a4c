"""Class 13: gradient accumulation and the arithmetic of data parallelism in one process."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from checks import assert_close, assert_logits_grad, assert_logprobs, leaf
from oracle import LossSpec

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss


def test_case_95_the_split_into_micro_batches_does_not_matter():
    """Lengths 1 and 3, advantages +1 and -1: 0.5 either way; a mean of means would give 0."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    adv = torch.tensor([[1.0, 0, 0], [-1, -1, -1]])

    def accumulate(splits):
        lp = torch.zeros(2, 3, requires_grad=True)
        total = 0.0
        for rows in splits:
            loss = ppo_loss(lp[rows], torch.zeros_like(lp[rows]), adv[rows], mask[rows], normalizer=4).loss
            loss.backward()
            total += loss.item()
        return total, lp.grad

    whole, whole_grad = accumulate([slice(0, 2)])
    split, split_grad = accumulate([slice(0, 1), slice(1, 2)])
    assert whole == split == 0.5
    assert torch.equal(whole_grad, split_grad)
    assert whole_grad.tolist() == [[-0.25, 0, 0], [0.25, 0.25, 0.25]]


OPTIONS = {"entropy_coef": 0.02, "kl_coef": 0.1, "value_clip": 0.2}
AGGREGATIONS = [
    {"aggregation": "token-mean"},
    {"aggregation": "seq-mean-token-mean"},
    {"aggregation": "seq-mean-token-sum"},
    {"aggregation": "seq-mean-token-sum-norm", "agg_max_len": 16},
]


def random_batch():
    shape = (6, 5)
    logits, tokens = torch.randn(*shape, 23), torch.randint(23, shape)
    mask = torch.rand(shape) < 0.6
    mask[0], mask[1] = False, True
    per_token = {n: torch.randn(shape) for n in ("advantages", "values", "returns")}
    per_token |= {"old_logprobs": torch.randn(shape) - 3, "ref_logprobs": torch.randn(shape) - 3}
    return logits, tokens, mask, per_token | {"old_values": per_token["values"] + torch.randn(shape)}


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_cases_95_96_every_term_with_a_global_normalizer(aggregation, as_tensor):
    """Summed over micro-batches or ranks, with the global count as denominator: the one batch's loss and gradient."""
    logits, tokens, mask, per_token = random_batch()
    config, spec = PPOLossConfig(**OPTIONS, **aggregation), LossSpec(**OPTIONS, **aggregation)
    count = int(mask.sum()) if aggregation["aggregation"] == "token-mean" else int((mask.sum(-1) > 0).sum())
    want = oracle.fused(
        logits,
        tokens,
        mask=mask,
        spec=spec,
        advantages=per_token["advantages"],
        old=per_token["old_logprobs"],
        ref=per_token["ref_logprobs"],
        **{k: per_token[k] for k in ("values", "returns", "old_values")},
    )
    assert want.result.margin > 1e-5
    for splits in ([slice(0, 6)], [slice(0, 1), slice(1, 2), slice(2, 6)], [slice(i, i + 1) for i in range(6)]):
        x, values = leaf(logits), leaf(per_token["values"])
        total = 0.0
        for rows in splits:
            inputs = {k: v[rows] for k, v in per_token.items()} | {"values": values[rows]}
            normalizer = torch.tensor(float(count)) if as_tensor else count
            out = fused_ppo_loss(x[rows], tokens[rows], mask=mask[rows], config=config, normalizer=normalizer, **inputs)
            out.loss.backward()
            total += out.loss.item()
        assert_close(total, want.result.loss, 5e-7, scale=1.0)
        assert_close(x.grad, want.d_logits, 1e-6, scale=float(np.abs(want.d_logits).max()))
        assert_close(values.grad, want.result.d_values, 5e-7, scale=1e-2)


def test_case_96_ddp_averages_so_each_rank_scales_by_the_world_size():
    """Ranks with 5 tokens, 1 token and none: the mean over ranks of the gradients is the single-process gradient."""
    adv, mask = torch.randn(3, 5), torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    new, old = -torch.rand(3, 5), -torch.rand(3, 5)
    single = leaf(new)
    ppo_loss(single, old, adv, mask).loss.backward()
    ranks = []
    for rank in range(3):
        lp = leaf(new)
        ppo_loss(
            lp[rank : rank + 1],
            old[rank : rank + 1],
            adv[rank : rank + 1],
            mask[rank : rank + 1],
            normalizer=6,
            loss_scale=3.0,
        ).loss.backward()
        ranks.append(lp.grad)
    assert_close(torch.stack(ranks).mean(0), single.grad.double(), 5e-7, scale=1e-2)


def test_a_normalizer_of_zero_divides_by_one():
    zeros = torch.zeros(2)
    assert ppo_loss(zeros, zeros, -torch.ones(2), normalizer=0).loss == 2
    assert ppo_loss(zeros, zeros, -torch.ones(2), torch.zeros(2), normalizer=0).loss == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.float64])
def test_a_tensor_normalizer_is_as_exact_as_a_number(dtype):
    new, old, adv = (torch.randn(7, dtype=torch.float64) for _ in range(3))
    number, tensor = (ppo_loss(new, old, adv, normalizer=n).loss for n in (7919, torch.tensor(7919, dtype=dtype)))
    assert_close(tensor, number.numpy(), 1e-15)


def test_padding_columns_and_rows_change_nothing():
    logits, tokens, mask, per_token = random_batch()
    config = PPOLossConfig(**OPTIONS)
    plain = fused_ppo_loss(logits, tokens, mask=mask, config=config, **per_token)
    pad = {k: torch.nn.functional.pad(v, (0, 3, 0, 2), value=float("nan")) for k, v in per_token.items()}
    padded = fused_ppo_loss(
        torch.nn.functional.pad(logits, (0, 0, 0, 3, 0, 2), value=float("nan")),
        torch.nn.functional.pad(tokens, (0, 3, 0, 2), value=-100),
        mask=torch.nn.functional.pad(mask, (0, 3, 0, 2)),
        config=config,
        **pad,
    )
    assert_close(padded.loss, plain.loss.double(), 3e-7, scale=1.0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda a: a["aggregation"])
def test_packed_input_equals_padded_input(aggregation):
    logits, tokens, mask, per_token = random_batch()
    lengths = [0, 5, 3, 1, 4, 2]
    keep = torch.arange(5)[None] < torch.tensor(lengths)[:, None]
    config = PPOLossConfig(**OPTIONS, **aggregation)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    padded_x, packed_x = leaf(logits), leaf(logits[keep])
    padded = fused_ppo_loss(padded_x, tokens, mask=mask & keep, config=config, **per_token)
    packed = fused_ppo_loss(
        packed_x,
        tokens[keep],
        mask=mask[keep],
        config=config,
        cu_seqlens=cu,
        **{k: v[keep] for k, v in per_token.items()},
    )
    padded.loss.backward()
    packed.loss.backward()
    assert_close(packed.loss, padded.loss.double(), 3e-7, scale=1.0)
    assert_close(packed_x.grad, padded_x.grad[keep].double(), 3e-7, scale=float(padded_x.grad.abs().max()))


def test_packed_input_takes_one_advantage_per_sequence():
    lengths = [2, 0, 3, 1]
    cu, adv = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32), torch.randn(4)
    new, old = -torch.rand(6), -torch.rand(6)
    spread = torch.cat([adv[i : i + 1].expand(n) for i, n in enumerate(lengths)])
    a = ppo_loss(new, old, adv, cu_seqlens=cu)
    b = ppo_loss(new, old, spread, cu_seqlens=cu)
    assert_close(a.loss, b.loss.double(), 1e-7, scale=1.0)


def test_packed_shift_masks_the_row_before_each_boundary():
    """Sequences of 3, 1 and 4 tokens in one [8]: the last token of each predicts nothing."""
    cu = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    logits, tokens, adv = leaf(torch.randn(8, 11)), torch.randint(11, (8,)), torch.randn(7)
    config = PPOLossConfig(aggregation="seq-mean-token-mean")
    out = fused_ppo_loss(logits, tokens, None, adv, cu_seqlens=cu, shift=True, config=config)
    out.loss.backward()
    want = oracle.score(logits, tokens, torch.tensor([1, 1, 0, 0, 1, 1, 1]), shift=True)
    assert_logprobs(out.logprobs, want.logprobs)
    a = oracle.to_numpy(adv)  # two sequences have something to score, with 2 and 3 tokens
    assert_close(out.loss, -(a[:2].mean() + a[4:].mean()) / 2, 5e-7, scale=1.0)
    assert_logits_grad(logits.grad, want.d_logits(-a / np.array([4, 4, 1, 1, 6, 6, 6])))
