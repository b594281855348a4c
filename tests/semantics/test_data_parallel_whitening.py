"""Whitening over a group of ranks is that of one process, and the loss of a rank is an error on the others."""

from __future__ import annotations

import os
import re
import signal
import time
from datetime import timedelta

import pytest
import ranks
import torch
import torch.distributed as dist
from checks import assert_close
from data_parallel_batch import batch, columns_of
from data_parallel_ranks import WHITENINGS

from ppo_kernels import masked_whiten

pytestmark = ranks.MARKS


@pytest.mark.parametrize("share", ["rows", "contiguous", "zigzag"])
@pytest.mark.parametrize(
    "case", range(len(WHITENINGS)), ids=lambda i: "-".join(f"{k}={v}" for k, v in WHITENINGS[i].items()) or "plain"
)
def test_whitening_over_a_group_is_that_of_one_process(data_ranks, share, case):
    """Around 100, where a sum of squares in fp32 would cancel."""
    if share == "rows":
        got = torch.cat([got["rows whitened"][case] for got in data_ranks])
    else:
        got = columns_of(data_ranks, share)([got[share, "whitened"][case] for got in data_ranks])
    x, mask, options = (100 + batch()["advantages"]).double(), batch()["mask"], dict(WHITENINGS[case])
    eps, eps_on = options.get("eps", 1e-8), options.get("eps_on", "var")
    variance, mean = x[mask].var(correction=int("unbiased" in options)), x[mask].mean()
    deviation = {"var": (variance + eps).sqrt(), "std": variance.sqrt() + eps, "clamp": variance.clamp(min=eps).sqrt()}
    want = (x - mean) / deviation[eps_on] + (0 if options.get("shift_mean", True) else mean)
    assert_close(got, torch.where(mask, want, 0.0), 3e-7, scale=1.0)


def test_whitening_over_some_of_the_ranks_is_that_of_their_part(data_4_ranks):
    got = torch.cat([got["pair whitened"] for got in data_4_ranks])
    x, mask = batch()["advantages"], batch()["mask"]
    for half in (slice(0, 4), slice(4, 8)):
        assert_close(got[half], masked_whiten(x[half], mask[half]).double(), 3e-7, scale=1.0)


def test_whitening_over_a_group_one_is_not_in_is_refused(data_4_ranks):
    """torch gives those outside no group but a number; a collective on it would say nothing and do nothing."""
    assert all("process_group must be" in got["refusal"] for got in data_4_ranks)


def test_whitening_of_different_dtypes_keeps_each_ranks_own(data_4_ranks):
    want = masked_whiten(torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64))
    assert [got["dtypes"].dtype for got in data_4_ranks] == [torch.float32, torch.float64, torch.float32, torch.float64]
    assert_close(torch.cat([got["dtypes"].double() for got in data_4_ranks]), want, 3e-7)


# ---- a rank that is lost --------------------------------------------------------------------------------------------


def whiten_until(rank: int, before_the_last) -> None:
    """Once with all ranks, so that what is lost is a peer and not the start; then once more after rank 1 has met with
    something."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    x, mask = torch.arange(4.0) + rank, torch.ones(4)
    masked_whiten(x, mask, process_group=group)
    if rank == 1:
        before_the_last(mask)
    masked_whiten(x, mask, process_group=group)


def one_is_killed(rank: int, world: int) -> None:
    whiten_until(rank, lambda mask: os.kill(os.getpid(), signal.SIGKILL))


def one_is_refused(rank: int, world: int) -> None:
    """An error before the collective, on one rank."""
    whiten_until(rank, lambda mask: mask.fill_(2))


def one_is_late(rank: int, world: int) -> None:
    whiten_until(rank, lambda mask: time.sleep(10))


@pytest.mark.parametrize(("work", "world"), [(one_is_killed, 3), (one_is_refused, 2), (one_is_late, 2)])
def test_the_loss_of_a_rank_is_an_error_on_the_others_and_not_a_hang(work, world, tmp_path):
    """A lost connection is noticed at once, a rank that does not come at the group's timeout."""
    ended = ranks.end(work, world, tmp_path, limit=120)
    assert ended[1].status == (-signal.SIGKILL if work is one_is_killed else 1), ended[1].stderr
    for other in (0, *range(2, world)):
        assert ended[other].status == 1, ended[other].stderr
        assert "in masked_whiten" in ended[other].stderr
        assert re.search("RuntimeError|DistBackendError", ended[other].stderr)
    if work is one_is_late:
        assert "Timed out" in ended[0].stderr
