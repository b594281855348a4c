"""The vocabulary on some of the ranks, beside data parallelism or copies on the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from checks import leaf
from torch import Tensor
from vocab_parallel_cases import ENTRIES, LINEAR, LOSSES, H

from ppo_kernels import PPOLossConfig, logprobs_from_hidden, logprobs_from_logits

ROWS, WIDTH = 6, 5  # of each data-parallel rank; of each vocabulary shard


def batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(8)
    n, v = 2 * ROWS, 2 * WIDTH
    x = {"hidden": torch.randn(n, H, generator=g), "weight": torch.randn(v, H, generator=g)}
    x["logits"], x["tokens"] = x["hidden"] @ x["weight"].T, torch.randint(v - 1, (n,), generator=g)
    logprobs = torch.log_softmax(x["logits"][:, :-1], -1).gather(-1, x["tokens"][:, None])[:, 0]
    x["old_logprobs"] = logprobs - torch.tensor([0.1, -0.1, 0.5])[torch.arange(n) % 3]
    x["advantages"] = torch.randn(n, generator=g)
    x["mask"] = torch.arange(n) % 12 < 8  # 6 on one data-parallel rank and 2 on the other
    return x


def parts(rank: int) -> tuple[slice, slice]:
    """Rows, and columns."""
    n, m = rank % 2 * ROWS, rank // 2 * WIDTH
    return slice(n, n + ROWS), slice(m, m + WIDTH)


def tensor_and_data_parallel(entry: str, rank: int) -> dict[str, Any]:
    """Ranks 0 and 2 have the columns of the first rows, 1 and 3 those of the others: a rank's number in its group is
    not its number."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    group, x = groups[rank % 2], batch()
    rows, columns = parts(rank)
    given: dict[str, Any] = {"logits": leaf(x["logits"][rows, columns])}
    if entry in LINEAR:
        given = {"hidden": leaf(x["hidden"][rows]), "weight": leaf(x["weight"][columns])}
    leaves, vocab_size = dict(given), 2 * WIDTH - 1
    given |= {"tokens": x["tokens"][rows], "mask": x["mask"][rows], "process_group": group}
    count = x["mask"][rows].sum()
    dist.all_reduce(count, group=across)
    if entry in LOSSES:
        given |= {name: x[name][rows] for name in ("old_logprobs", "advantages")}
        config = PPOLossConfig(entropy_coef=0.02, vocab_size=vocab_size)
        loss = ENTRIES[entry](**given, config=config, normalizer=count).loss
    else:
        loss = ENTRIES[entry](**given, vocab_size=vocab_size).sum() / count
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=across)
    grads = {name: x.grad for name, x in leaves.items()}
    if entry in LINEAR:
        dist.all_reduce(grads["weight"], group=across)
    return {"loss": total, "grads": grads}


def mesh_of_two_dimensions(rank: int) -> dict[str, Tensor]:
    """Copies over one dimension, columns over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, result = batch(), {}
    logits = distribute_tensor(x["logits"], mesh, [Replicate(), Shard(1)], src_data_rank=None).requires_grad_()
    logprobs_from_logits(logits, x["tokens"], x["mask"]).sum().backward()
    result["logits"] = logits.grad.to_local()
    weight = distribute_tensor(x["weight"], mesh, [Replicate(), Shard(0)], src_data_rank=None).requires_grad_()
    given = {"process_group": mesh.get_group("tp"), "reduce_hidden_grad": False}
    logprobs_from_hidden(x["hidden"], weight, x["tokens"], x["mask"], **given).sum().backward()
    result["weight"] = weight.grad.to_local()
    return result
