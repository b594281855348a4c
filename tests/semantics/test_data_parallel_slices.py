"""Many ranks that have slices of each sequence, in one piece or in two as in ring attention, give what one gives."""

from __future__ import annotations

import pytest
import ranks
import torch
from checks import assert_close, assert_logits_grad
from data_parallel_batch import (
    AGGREGATIONS,
    ANY_ENTRY,
    TERMS,
    Whole,
    assert_same,
    assert_same_scalars,
    batch,
    columns_of,
    whole,
)
from data_parallel_ranks import WHOLE_SEQUENCES

pytestmark = ranks.MARKS
ANY_ORDER = pytest.mark.parametrize("order", ["contiguous", "zigzag"])


@pytest.mark.parametrize("aggregation", [a for a in AGGREGATIONS if a != "seq-mean-token-mean"])
@ANY_ENTRY
@ANY_ORDER
def test_slices_of_the_sequence_with_global_counts_add_up_to_one_process(data_ranks, order, entry, aggregation):
    """Sequences are counted as wholes: one that is on four ranks is one sequence. In contiguous order the last of four
    slices is padding alone."""
    results = [got[order, entry, aggregation] for got in data_ranks]
    assert_same(results, whole(aggregation), columns_of(data_ranks, order))


@ANY_ENTRY
@ANY_ORDER
def test_seq_mean_token_mean_of_slices_is_token_mean_with_the_lengths_as_weights(data_ranks, order, entry):
    """A slice knows its own part of a sequence's length; token_weights carry the whole one, in all terms but values."""
    terms = {k: v for k, v in TERMS.items() if k != "value_clip"}
    want = Whole(values=False, **terms, aggregation="seq-mean-token-mean")
    assert_same([got[order, entry, "token_weights"] for got in data_ranks], want, columns_of(data_ranks, order))


@ANY_ENTRY
@ANY_ORDER
def test_seq_mean_token_mean_of_slices_with_values_is_the_callers_sum_of_losses_per_token(data_ranks, order, entry):
    want, results = whole("seq-mean-token-mean"), [got[order, entry, "none"] for got in data_ranks]
    for got in results:
        assert_close(got["terms"][0], want.loss, 5e-7, scale=1.0)
    put = columns_of(data_ranks, order)
    assert_logits_grad(put([got["logits"] for got in results]), want.logits)
    assert_close(put([got["values"] for got in results]), want.values, 1e-6, scale=abs(want.values).max())


@pytest.mark.parametrize("name", WHOLE_SEQUENCES)
@ANY_ORDER
def test_a_loss_that_needs_whole_sequences_takes_gathered_log_probs(data_ranks, order, name):
    """A ratio of sequences is a mean over slices that no rank has; [B, T] log-probs are small enough to gather."""
    want = Whole(values=False, **WHOLE_SEQUENCES[name])
    results = [got[order, "gathered", name] for got in data_ranks]
    for got in results:
        assert_close(got["loss"], want.loss, 5e-7, scale=1.0)
    assert_logits_grad(columns_of(data_ranks, order)([got["logits"] for got in results]), want.logits)


def test_rows_and_slices_at_once(data_4_ranks):
    """Two data-parallel groups of two slices each: one count over all four ranks."""
    for name in ("logits", "values"):
        found = torch.zeros_like(batch()[name])
        for got in data_4_ranks:
            rows, columns = got["2 x 2 index"]
            found[rows[:, None], columns] = got["2 x 2"][name]
        want = getattr(whole("token-mean"), name)
        assert_close(found, want, 1e-6, scale=abs(want).max())
    assert_same_scalars([got["2 x 2"] for got in data_4_ranks], whole("token-mean"))
