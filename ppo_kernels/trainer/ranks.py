"""The processes of one run: `python -m ppo_kernels.trainer` is one of one, torchrun starts many.

After each rollout every rank holds the whole batch, a few megabytes. Rewards, whitening, minibatches and statistics
are then the same computation everywhere, bit for bit what one process computes, and only gradients are added up.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

T = TypeVar("T")


class RankError(Exception):
    """Another rank failed; the message says which and why."""


class Ranks(NamedTuple):
    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        return self.rank == 0

    def share(self, rows: Sequence[T]) -> Sequence[T]:
        """This rank's contiguous part of rows that all ranks know; `gather` puts the parts together in order."""
        return rows[self.rank * len(rows) // self.size : (self.rank + 1) * len(rows) // self.size]

    def gather(self, part: list[T]) -> list[T]:
        """The lists of all ranks, one after the other; small Python objects, tensors on the CPU."""
        if self.size == 1:
            return part
        parts: list[list[T]] = [[]] * self.size
        dist.all_gather_object(parts, part)
        return [item for each in parts for item in each]

    def any(self, flag: bool) -> bool:
        """True on every rank if it is on one."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag), device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What one rank cannot do ends this step on all of them, instead of leaving the others in a collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        problems = [p for p in self.gather([f"{type(error).__name__}: {error}" if error else ""]) if p]
        if error is not None:
            raise error
        if problems:
            raise RankError(f"{what} failed on another rank: {problems[0]}")


def start(device: str, threads: int | None) -> Ranks:
    """Joins the group that torchrun's environment describes, or one that exists; one process without either."""
    rank, size, local = (int(os.environ.get(name, default)) for name, default in
                         (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))  # fmt: skip
    cuda = device != "cpu" and torch.cuda.is_available()
    if threads:
        torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(local)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank, size, torch.device("cuda", local) if cuda else torch.device("cpu"))


def distribute(model: nn.Module, ranks: Ranks, parallel: str) -> nn.Module:
    """The module to call while training: `model` itself, in DDP, or sharded by FSDP2 (in place)."""
    if ranks.size == 1:
        return model
    if parallel == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, device_ids=[ranks.device.index] if ranks.device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    blocks = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextlib.contextmanager
def synchronised(module: Any, now: bool) -> Iterator[None]:
    """Around a forward and backward: gradients are averaged over ranks at its end, or kept to be added to."""
    if hasattr(module, "set_requires_gradient_sync"):  # FSDP2
        module.set_requires_gradient_sync(now)
        yield
    elif hasattr(module, "no_sync") and not now:  # DDP
        with module.no_sync():
            yield
    else:
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor put together (a collective); any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def reshard(*modules: Any) -> None:
    """FSDP2 keeps a root's weights whole after a forward without backward; an optimizer step would pass them by."""
    for module in modules:
        if hasattr(module, "reshard"):
            module.reshard()
