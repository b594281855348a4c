"""Parts of a batch in one process, one after another, add up to the whole: as many ranks do, without the ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import ranks
import torch
from checks import assert_close, assert_logits_grad, leaf
from data_parallel_batch import ANY_AGGREGATION, ANY_ENTRY, ROWS, TERMS, T, Whole, batch, call, config_of, whole
from torch import nn

from ppo_kernels import PPOMetrics, fused_ppo_loss, ppo_value_loss

pytestmark = ranks.MARKS


@ANY_AGGREGATION
@ANY_ENTRY
@pytest.mark.parametrize("cuts", [[0, 8], [0, 4, 4, 7, 8], [0, 1, 2, 3, 4, 5, 6, 7, 8]], ids=len)
def test_micro_batches_of_any_size_add_up_to_the_batch_and_their_metrics_too(cuts, entry, aggregation):
    want, mask = whole(aggregation), batch()["mask"]
    counts = {"token-mean": mask.sum(), "token-sum": None}
    normalizer = counts.get(aggregation, mask.any(-1).sum())
    logits, values, total = leaf(batch()["logits"]), leaf(batch()["values"]), 0.0
    metrics: PPOMetrics | None = None
    for start, stop in pairwise(cuts):
        rows = slice(start, stop)
        out = call(entry, logits[rows], rows, values[rows], config=config_of(aggregation), normalizer=normalizer)
        out.loss.backward()
        total += out.loss.item()
        metrics = out.metrics if metrics is None else metrics + out.metrics
    assert_close(total, want.loss, 5e-7, scale=1.0)
    assert_logits_grad(logits.grad, want.logits)
    assert_close(values.grad, want.values, 1e-6, scale=abs(want.values).max())
    for name, value in metrics.compute().items():
        assert_close(value, want.metrics[name], 1e-6, scale=1.0, what=name)


def test_the_labels_are_shifted_before_the_sequence_is_cut():
    """Cut first, shift=True would lose the last token of every slice: its label is the next slice's first token."""
    logits, tokens, mask = leaf(batch()["logits"]), batch()["tokens"], batch()["mask"][:, 1:]
    old, adv = batch()["old_logprobs"][:, 1:], batch()["advantages"][:, 1:]
    fused_ppo_loss(logits, tokens, old, adv, mask, shift=True).loss.backward()
    pad = {"tokens": tokens[:, 1:], "old_logprobs": old, "advantages": adv, "mask": mask}
    pad = {name: nn.functional.pad(x, (0, 1)) for name, x in pad.items()}  # the last row scores nothing
    sliced_logits, total = leaf(batch()["logits"]), 0.0
    for columns in torch.arange(T).chunk(4):
        part = {name: x[:, columns] for name, x in pad.items()}
        out = fused_ppo_loss(sliced_logits[:, columns], **part, normalizer=mask.sum())
        out.loss.backward()
        total += out.loss.item()
    assert_logits_grad(sliced_logits.grad, logits.grad.double().numpy())


def test_values_with_a_mask_of_their_own_are_divided_by_their_own_count_in_a_call_of_their_own():
    """One normalizer cannot be both the number of tokens and that of values."""
    x, config = batch(), config_of("token-mean")
    want = Whole(value_mask=True, **TERMS)
    logits, values, total = leaf(x["logits"]), leaf(x["values"]), 0.0
    for rows in ROWS[4]:
        policy = call("fused", logits[rows], rows, None, config=config, normalizer=x["mask"].sum())
        targets = {"old_values": x["old_values"][rows], "config": config, "normalizer": x["value_mask"].sum()}
        value = ppo_value_loss(values[rows], x["returns"][rows], x["value_mask"][rows], **targets)
        (policy.loss + value.loss).backward()
        total += (policy.loss + value.loss).item()
    assert_close(total, want.loss, 5e-7, scale=1.0)
    assert_logits_grad(logits.grad, want.logits)
    assert_close(values.grad, want.values, 1e-6, scale=abs(want.values).max())
