"""Calls with a mistake in them: those that every rank makes, and those in which the ranks do not agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vocab_parallel_cases import ENTRIES, LINEAR, LOSSES, H, Ranks

from ppo_kernels import (
    PPOLossConfig,
    fused_linear_ppo_loss,
    fused_ppo_loss,
    logprobs_from_hidden,
    logprobs_from_logits,
)

WAIT = 2  # seconds, the timeout of a group whose ranks do not agree


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def call_of(entry: str, width: int, group: Any, *, token: int = 0, rows: int = 3, **options: Any) -> Any:
    """Of a shard of `width` columns; options go to the function, or to its config. With a backward by a factor that has
    a graph if create_graph."""
    create_graph, twice = options.pop("create_graph", False), options.pop("twice", False)
    tokens = torch.full((rows,), token)
    if entry in LINEAR:
        given: dict[str, Any] = {"hidden": torch.ones(rows, H, requires_grad=True)}
        given["weight"] = torch.ones(width, H, requires_grad=True)
    else:
        given = {"logits": torch.ones(rows, width, requires_grad=True) * 1}
    first = next(iter(given.values()))
    if entry in LOSSES:
        names = ("vocab_size", "return_entropy")
        config = PPOLossConfig(**{name: options.pop(name) for name in names if name in options})
        given |= {"old_logprobs": torch.zeros(rows), "advantages": torch.ones(rows), "config": config}
    out = ENTRIES[entry](tokens=tokens, process_group=group, **given, **options)
    loss = out.loss if entry in LOSSES else (out[0] if isinstance(out, tuple) else out).sum()
    if create_graph:
        (grad,) = torch.autograd.grad(loss, first, create_graph=True)
        grad.sum().backward()
    elif twice:
        loss.backward(retain_graph=True)
        loss.backward()
    return out


def refusals(at: Ranks) -> dict[Any, tuple[str, str]]:
    """Errors that every rank makes at the same place, and after which the group still works."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    first, same_ranks = at.rank == 0, dist.new_group()
    result: dict[Any, tuple[str, str]] = {}

    def note(name: Any, call: Callable[..., Any], *args: Any, **options: Any) -> None:
        result[name] = caught(lambda: call(*args, **options))

    for entry in ENTRIES:
        for token in (-1, 10, 12, 10**9):
            note((entry, "token", token), call_of, entry, 12 // at.world, at.group, token=token, vocab_size=10)
        note((entry, "widths"), call_of, entry, 4 + first, at.group)
        note((entry, "vocab_size"), call_of, entry, 4, at.group, vocab_size=7 + first)
        note((entry, "entropy"), call_of, entry, 4, at.group, return_entropy=first)
        note((entry, "tokens"), call_of, entry, 4, at.group, token=1 + first)
        note((entry, "too large a vocab_size"), call_of, entry, 4, at.group, vocab_size=4 * at.world + 1)
        for name, wrong in (("number", 3), ("name", "tp"), ("mesh", at.mesh)):
            note((entry, "group", name), call_of, entry, 4, wrong)
        note((entry, "double backward"), call_of, entry, 4, at.group, create_graph=True)
        if entry not in LINEAR:
            note((entry, "inplace twice"), call_of, entry, 4, at.group, inplace_grad=True, twice=True)

    logits, tokens = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)
    cut = {"rows": [Shard(0)], "sums": [Partial()], "columns": [Shard(-1)], "copies": [Replicate()]}
    tensors = {name: distribute_tensor(logits, at.mesh, how, src_data_rank=None) for name, how in cut.items()}
    old, adv = torch.zeros(4), torch.ones(4)
    for name in ("rows", "sums"):
        note(("logits of", name), logprobs_from_logits, tensors[name], tokens)
        note(("loss of", name), fused_ppo_loss, tensors[name], tokens, old, adv)
    note(("logits of", "copies"), logprobs_from_logits, tensors["copies"], tokens)
    note(("logits of", "another group"), logprobs_from_logits, tensors["columns"], tokens, process_group=same_ranks)
    weight, hidden = tensors["rows"], torch.ones(4, 8)
    for group, name in ((None, "no group"), (same_ranks, "another group")):
        note(("hidden", name), logprobs_from_hidden, hidden, weight, tokens, process_group=group)
        note(("linear", name), fused_linear_ppo_loss, hidden, weight, tokens, old, adv, process_group=group)
    options = {"process_group": at.group, "reduce_hidden_grad": False}
    note(("hidden", "parts of its gradient"), logprobs_from_hidden, tensors["copies"], logits, tokens, **options)
    note(("hidden", "columns of H"), logprobs_from_hidden, hidden, tensors["columns"], tokens, process_group=at.group)
    return result


def outsiders(rank: int) -> tuple[str, str]:
    """Ranks 2 and 3 are given what new_group gave them."""
    group = dist.new_group([0, 1])
    return caught(lambda: call_of("logits", 4, group))


MISTAKES: dict[str, Callable[[int, Any], Any]] = {
    "a rank without columns": lambda rank, group: [
        caught(lambda entry=entry: call_of(entry, 4 - 4 * rank, group)) for entry in ENTRIES
    ],
    "vocab_size without padding": lambda rank, group: [
        caught(lambda entry=entry: call_of(entry, 4 - rank, group, vocab_size=7)) for entry in ENTRIES
    ],
    "widths, in chunks": lambda rank, group: [
        caught(lambda: call_of("linear", 4 + 12 * rank, group, rows=9, chunk_bytes=64))
    ],
    "a mask on one rank": lambda rank, group: [
        caught(lambda: call_of("logits", 4, group, mask=torch.full((3,), 1 + rank)))
    ],
}


def mistakes(rank: int, world: int) -> dict[str, Any]:
    """Each with a group of its own, which is not used again: some ranks may wait until its time is up."""
    result: dict[str, Any] = {}
    for name, mistake in MISTAKES.items():
        group = dist.new_group(timeout=timedelta(seconds=WAIT))
        started = time.monotonic()
        result[name] = mistake(rank, group)
        result[name, "seconds"] = time.monotonic() - started
        dist.barrier()
    return result
