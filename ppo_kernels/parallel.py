"""Vocabulary-parallel arguments: which columns this rank has, from a process group or a DTensor's placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppo_kernels import checks
from ppo_kernels.pieces import Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def of_logits(logits: Any, process_group: ProcessGroup | None) -> tuple[Any, Shard | None]:
    """(this rank's logits, which columns they are; None if they are all)."""
    axis = getattr(logits, "ndim", 0) - 1
    if (found := _sharded_axis(logits, axis)) is not None:
        _same_group("logits", found[0], process_group)
        return logits.to_local(), found[1]
    if process_group is None:
        return logits, None
    return logits, _even_shard("logits", checks.tensor("logits", logits), axis, process_group)


def of_head(
    weight: Any, bias: Any, process_group: ProcessGroup | None, sum_hidden_grad: bool
) -> tuple[Any, Any, Shard | None]:
    """(weight, bias, which columns they are) of a head's weight [V, H] and bias [V]."""
    weight, shard = _of_rows("weight", weight, process_group)
    if _sharded_axis(bias, 0) is not None:
        bias, _ = _of_rows("bias", bias, process_group)
    return weight, bias, None if shard is None else shard._replace(sum_hidden_grad=sum_hidden_grad)


def _of_rows(name: str, weight: Any, process_group: ProcessGroup | None) -> tuple[Any, Shard | None]:
    """A sharded DTensor without a group is an error: it may be FSDP's."""
    if (found := _sharded_axis(weight, 0)) is not None:
        if process_group is None:
            raise TypeError(
                f"{name} is a DTensor with Shard(0): if the vocabulary is parallel, give process_group; if FSDP shards "
                f"it, {name}.full_tensor(grad_placements=[Partial('avg')]), or call from inside its FSDP module"
            )
        _same_group(name, found[0], process_group)
        return weight.to_local(), found[1]
    if process_group is None:
        return weight, None
    return weight, _even_shard(name, checks.tensor(name, weight), 0, process_group)


def _even_shard(name: str, x: Tensor, axis: int, process_group: ProcessGroup) -> Shard:
    """Every rank has as many columns as this one. On a CPU they ask each other, and it is an error on all if not;
    elsewhere that would be waiting, and pieces.over_ranks finds out."""
    import torch.distributed as dist

    group = checks.group(process_group)
    rank, ranks = group.rank(), group.size()
    if rank < 0:
        raise ValueError("process_group: this rank is not in it")
    if x.ndim <= max(axis, 0):
        raise ValueError(f"{name} has shape {list(x.shape)}, expected an axis of the vocabulary")
    width = x.shape[axis]
    if checks.eager_cpu(x):
        widths = torch.empty(ranks, dtype=torch.int64, device=x.device)
        dist.all_gather_into_tensor(widths, torch.full_like(widths[:1], width), group=group)
        if bool((widths != width).any()):
            raise ValueError(
                f"{name} has {widths.tolist()} columns on the ranks of process_group, expected as many on all"
            )
    return Shard(rank * width, width, ranks * width, group)


def _sharded_axis(x: Any, axis: int) -> tuple[ProcessGroup, Shard] | None:
    """(group, shard) if x is a DTensor that is sharded along `axis`, by one dimension of its mesh, and nowhere else."""
    if type(x).__name__ != "DTensor" or axis < 0:
        return None
    sharding = [i for i, placement in enumerate(x.placements) if placement.is_shard(axis)]
    others = [placement for i, placement in enumerate(x.placements) if i not in sharding]
    if len(sharding) != 1 or not all(placement.is_replicate() for placement in others):
        return None
    group = x.device_mesh.get_group(sharding[0])
    width = -(-x.shape[axis] // group.size())  # as torch.chunk cuts
    return group, Shard(min(group.rank() * width, x.shape[axis]), width, x.shape[axis], group)


def _same_group(name: str, found: ProcessGroup, given: ProcessGroup | None) -> None:
    if given is not None and checks.group(given) is not found:
        raise ValueError(f"process_group is not that of the DTensor {name}'s mesh")
