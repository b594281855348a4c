"""A vocabulary on several ranks: an error is one on every rank, and none waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
from vocab_parallel_cases import ENTRIES, LINEAR
from vocab_parallel_errors import WAIT, mistakes

pytestmark = ranks.MARKS


def refused(results: list[dict[Any, Any]], name: Any, kind: str, *words: str) -> None:
    for rank, got in enumerate(results):
        found, message = got["refusals"][name]
        assert found == kind, f"rank {rank}: {found}: {message}"
        for word in words:
            assert word in message, f"rank {rank}: {message}"


@pytest.mark.parametrize("token", [-1, 10, 12, 10**9])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_token_outside_of_the_whole_vocabulary_is_an_error_on_every_rank(vocab_ranks, entry, token):
    refused(vocab_ranks, (entry, "token", token), "IndexError", str(token), "< 10")


@pytest.mark.parametrize("what", ["widths", "vocab_size", "entropy", "tokens"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_ranks_that_do_not_agree_are_an_error_on_every_rank(vocab_ranks, entry, what):
    widths = [5] + [4] * (len(vocab_ranks) - 1)
    word = f"has {widths} columns on the ranks of process_group" if what == "widths" else "process_group: its ranks"
    refused(vocab_ranks, (entry, what), "ValueError", word)


def test_a_part_of_a_dtensors_gradient_is_refused(vocab_ranks):
    """Replicate would say that every rank has all of it."""
    refused(vocab_ranks, ("hidden", "parts of its gradient"), "TypeError", "hidden is a DTensor")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_vocabulary_larger_than_all_ranks_have_is_refused(vocab_ranks, entry):
    refused(vocab_ranks, (entry, "too large a vocab_size"), "ValueError", "vocab_size", str(4 * len(vocab_ranks)))


@pytest.mark.parametrize("wrong", ["number", "name", "mesh"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_group_of_the_wrong_type_is_refused(vocab_ranks, entry, wrong):
    refused(vocab_ranks, (entry, "group", wrong), "TypeError", "process_group must be a torch.distributed.ProcessGroup")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_second_derivative_is_refused(vocab_ranks, entry):
    refused(vocab_ranks, (entry, "double backward"), "RuntimeError", "once differentiable")


@pytest.mark.parametrize("entry", ["logits", "loss"])
def test_a_second_backward_over_the_logits_is_refused(vocab_ranks, entry):
    refused(vocab_ranks, (entry, "inplace twice"), "RuntimeError")


@pytest.mark.parametrize("how", ["rows", "sums"])
def test_logits_that_are_another_dtensor_are_refused(vocab_ranks, how):
    for entry in ("logits of", "loss of"):
        refused(vocab_ranks, (entry, how), "TypeError", "logits is a DTensor with placements")


def test_logits_that_are_copies_are_those_of_one_process(vocab_ranks):
    refused(vocab_ranks, ("logits of", "copies"), "", "no error")


@pytest.mark.parametrize("entry", LINEAR)
def test_a_sharded_weight_without_a_group_is_refused_for_it_may_be_fsdps(vocab_ranks, entry):
    refused(vocab_ranks, (entry, "no group"), "TypeError", "full_tensor(", "process_group")


@pytest.mark.parametrize("entry", [*LINEAR, "logits of"])
def test_a_group_that_is_not_the_meshs_is_refused(vocab_ranks, entry):
    refused(vocab_ranks, (entry, "another group"), "ValueError", "process_group", "mesh")


def test_a_weight_that_is_sharded_along_its_other_axis_is_refused(vocab_ranks):
    refused(vocab_ranks, ("hidden", "columns of H"), "TypeError", "weight is a DTensor")


def test_a_rank_outside_of_the_group_is_refused(vocab_4_ranks):
    assert [got["outside"][0] for got in vocab_4_ranks] == ["", "", "TypeError", "TypeError"]
    assert all("process_group must be" in got["outside"][1] for got in vocab_4_ranks[2:])


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    return ranks.run(mistakes, 2, tmp_path_factory.mktemp("mistaken"), limit=90)


def refused_at_once(mistaken, name: str) -> None:
    for got in mistaken:
        assert {kind for kind, _ in got[name]} == {"ValueError"}, got
        assert got[name, "seconds"] < WAIT


def test_the_true_vocabulary_of_shards_that_are_not_padded_is_an_error_on_every_rank(mistaken):
    """7 columns as 4 and 3, which the first rank takes for 8 and the second for 6."""
    refused_at_once(mistaken, "vocab_size without padding")


def test_a_rank_without_columns_beside_one_with_some_is_an_error_on_every_rank(mistaken):
    """The second rank takes the whole vocabulary for empty."""
    refused_at_once(mistaken, "a rank without columns")


def test_widths_that_give_chunks_of_different_sizes_are_an_error_on_every_rank(mistaken):
    refused_at_once(mistaken, "widths, in chunks")


def test_an_error_on_one_rank_ends_the_others_at_the_groups_timeout(mistaken):
    """What is not the same on every rank cannot be known to the others."""
    (waited,), (failed,) = (got["a mask on one rank"] for got in mistaken)
    assert failed[0] == "ValueError"
    assert waited[0] in ("RuntimeError", "DistBackendError")
    assert mistaken[1]["a mask on one rank", "seconds"] < WAIT
