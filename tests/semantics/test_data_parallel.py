"""Many ranks give what one process gives: each computes on its share of the rows, some of which are nothing.

Each rank computes on its share of one batch that all can draw; the reference is the oracle on the whole of it. Two
launches run all the cases (importing torch is most of a launch), and the tests look at what came back.
"""

from __future__ import annotations

import pytest
import ranks
import torch
from checks import assert_close, assert_logits_grad, leaf
from data_parallel_batch import ANY_AGGREGATION, ANY_ENTRY, SHARES, Whole, assert_same, batch, whole
from torch import nn

from ppo_kernels import PPOLossConfig, fused_ppo_loss

pytestmark = ranks.MARKS


@ANY_AGGREGATION
@ANY_ENTRY
def test_unequal_and_empty_shares_with_the_global_count_add_up_to_one_process(data_ranks, entry, aggregation):
    """A mean of the ranks' own means would count the token of a short share more than that of a long one."""
    assert_same([got["rows", entry, aggregation] for got in data_ranks], whole(aggregation), torch.cat)


@ANY_AGGREGATION
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("share", SHARES)
def test_ddp_divides_by_the_number_of_ranks_so_each_scales_by_it(data_2_ranks, share, micro_batches, aggregation):
    assert_averaged([got["ddp", share, aggregation, micro_batches] for got in data_2_ranks], whole(aggregation))


@pytest.mark.parametrize("share", SHARES)
def test_fsdp_divides_as_ddp_does(data_2_ranks, share):
    assert_averaged([got["fsdp", share] for got in data_2_ranks], whole("token-mean"))


def assert_averaged(results: list[dict], want: Whole) -> None:
    hidden = batch()["hidden"].double()
    head = torch.einsum("btv,bth->vh", torch.from_numpy(want.logits), hidden)
    critic = torch.einsum("bt,bth->h", torch.from_numpy(want.values), hidden)[None]
    for got in results:
        assert_logits_grad(got["head"], head.numpy())
        assert_logits_grad(got["critic"], critic.numpy())


def test_a_step_without_a_valid_token_on_any_rank_is_zero_everywhere(data_ranks):
    for got in (got["nothing anywhere"] for got in data_ranks):
        assert got["loss"] == 0
        assert (got["grad"] == 0).all()
        assert (got["white"] == 0).all()
        assert all(value == 0 for value in got["metrics"].values())


def test_the_code_of_the_page_gives_the_loss_and_gradients_of_one_process(data_2_ranks):
    pages = [got["page"] for got in data_2_ranks]
    data, accumulated, slices, weighted, sequence_ratio = zip(*pages, strict=True)
    rows = {name: torch.cat([got[name] for got in data]) for name in ("tokens", "old_logprobs", "advantages", "mask")}
    weight = leaf(data[0]["weight"])
    logits = nn.functional.linear(torch.cat([got["hidden"] for got in data]), weight, data[0]["bias"])
    want = fused_ppo_loss(logits, **rows).loss
    want.backward()
    for got in data + accumulated:
        assert_close(got["loss"], want.double(), 5e-7, scale=1.0)
        assert_logits_grad(got["weight.grad"], weight.grad.double().numpy())

    x = slices[0]
    shifted = {name: x[name][:, :-1] for name in ("old_logprobs", "advantages", "mask")}
    columns = torch.cat([got["columns"] for got in slices])
    cases = [
        (slices, "loss", {}),
        (weighted, "same", {"aggregation": "seq-mean-token-mean"}),
        (sequence_ratio, "out.loss", {"aggregation": "seq-mean-token-mean", "ratio_level": "sequence"}),
    ]
    for pages, name, options in cases:
        logits = leaf(x["logits"])
        want = fused_ppo_loss(logits, x["tokens"], **shifted, shift=True, config=PPOLossConfig(**options)).loss
        want.backward()
        found = sum(got[name] for got in pages) if name == "same" else pages[0][name]
        assert_close(found, want.double(), 5e-7, scale=1.0)
        if name != "same":  # which has no backward
            grad = torch.cat([got["local.grad"] for got in pages], 1)
            assert_logits_grad(grad, logits.grad[:, columns].double().numpy())
