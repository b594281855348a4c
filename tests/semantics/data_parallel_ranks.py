"""What a rank does with its share of the batch: some of the rows, micro-batches, slices of the sequence, or nothing."""

from __future__ import annotations

from itertools import pairwise

import distributed_page
import torch
import torch.distributed as dist
from checks import leaf
from data_parallel_batch import AGGREGATIONS, ENTRIES, ROWS, SHARES, TERMS, H, T, V, batch, call, config_of
from torch import nn

from ppo_kernels import PPOLossConfig, PPOLossOutput, fused_ppo_loss, masked_whiten, ppo_loss

WHOLE_SEQUENCES = {
    "gspo": {"ratio_level": "sequence", "aggregation": "seq-mean-token-mean"},
    "gspo-token": {"ratio_level": "sequence_token", "aggregation": "seq-mean-token-mean"},
    "seq-mean-token-mean": {"aggregation": "seq-mean-token-mean"},
}
WHITENINGS = [
    {},
    {"unbiased": True},
    {"shift_mean": False},
    {"eps_on": "std", "eps": 1e-2},
    {"eps_on": "clamp", "eps": 9.0},
]


def everything(rank: int, world: int) -> dict[str, object]:
    rows = ROWS[world][rank]
    result: dict[str, object] = {"rows whitened": whitenings(rows)}
    for entry in ENTRIES:
        for aggregation in AGGREGATIONS:
            result["rows", entry, aggregation] = data_parallel(entry, aggregation, rows)

    for order in ("contiguous", "zigzag"):
        columns = positions(order, rank, world)
        index = (slice(None), columns)
        result[order, "columns"] = columns
        result[order, "whitened"] = whitenings(index)
        for entry in ENTRIES:
            for aggregation in AGGREGATIONS:
                if aggregation != "seq-mean-token-mean":
                    result[order, entry, aggregation] = sliced(entry, aggregation, index)
            result[order, entry, "token_weights"] = sliced_token_weights(entry, index)
            result[order, entry, "none"] = sliced_none(entry, index)
        for name, options in WHOLE_SEQUENCES.items():
            result[order, "gathered", name] = gathered(order, index, rank, world, **options)

    result["nothing anywhere"] = nothing_anywhere()
    result |= two_only(rank) if world == 2 else four_only(rank)
    return result


def summed(x: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    total = x.clone()
    dist.all_reduce(total)
    return total


def outcome(out: PPOLossOutput, loss: torch.Tensor, **grads: torch.Tensor) -> dict[str, object]:
    """Scalars added up over the ranks, and this rank's gradients."""
    loss.backward()
    terms = torch.stack([loss.detach(), out.policy_loss, out.value_loss, out.kl])
    return {
        "terms": summed(terms),
        "metrics": out.metrics.all_reduce().compute(),
        **{name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in grads.items()},
    }


def normalizer_of(aggregation: str, sequences: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """The global count of valid tokens, or that of sequences: the one given."""
    return {"token-mean": summed(mask.sum()), "token-sum": None}.get(aggregation, sequences)


def data_parallel(entry: str, aggregation: str, rows: slice) -> dict[str, object]:
    logits, values = leaf(batch()["logits"][rows]), leaf(batch()["values"][rows])
    mask = batch()["mask"][rows]
    normalizer = normalizer_of(aggregation, summed(mask.any(-1).sum()), mask)
    out = call(entry, logits, rows, values, config=config_of(aggregation), normalizer=normalizer)
    return outcome(out, out.loss, logits=logits, values=values)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.critic = nn.Linear(H, V, bias=False), nn.Linear(H, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(batch()["weight"])
            self.critic.weight.copy_(batch()["value_weight"])

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(hidden), self.critic(hidden)[..., 0]


def averaged_by(wrap, aggregation: str, rows: slice, world: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """The gradients of a model whose wrapper averages them over the ranks; all micro-batches but the last are local.

    With micro-batches the gradient is written over the logits, which the wrapper has seen.
    """
    model = wrap(Policy())
    mask = batch()["mask"][rows]
    normalizer = normalizer_of(aggregation, summed(mask.any(-1).sum()), mask)
    arguments = {"config": config_of(aggregation), "normalizer": normalizer, "loss_scale": world}
    cuts = torch.linspace(rows.start, rows.stop, micro_batches + 1).long().tolist()
    for i, (start, stop) in enumerate(pairwise(cuts)):
        last = i == micro_batches - 1
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = last  # what its no_sync() sets
        else:
            model.set_requires_gradient_sync(last)
        part = slice(start, stop)
        logits, values = model(batch()["hidden"][part])
        out = call("fused", logits, part, values, **arguments, inplace_grad=micro_batches > 1)
        out.loss.backward()
    head, critic = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return {"head": head, "critic": critic}


def fully_sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def positions(order: str, rank: int, world: int) -> torch.Tensor:
    """The columns of a rank: one piece, or as in ring attention the r-th piece of 2 * world and the r-th from the end,
    which shares out the work under a causal mask."""
    if order == "contiguous":
        return torch.arange(T).chunk(world)[rank]
    pieces = torch.arange(T).chunk(2 * world)
    return torch.cat([pieces[rank], pieces[2 * world - 1 - rank]])


def lengths_of(mask: torch.Tensor) -> torch.Tensor:
    """Valid tokens of each sequence [B] over all slices."""
    return summed(mask.sum(-1))


def sliced(entry: str, aggregation: str, index: tuple[slice, torch.Tensor]) -> dict[str, object]:
    """Aggregations whose weight of a token does not depend on the rest of its sequence."""
    logits, values = leaf(batch()["logits"][index]), leaf(batch()["values"][index])
    mask = batch()["mask"][index]
    normalizer = normalizer_of(aggregation, (lengths_of(mask) > 0).sum(), mask)
    out = call(entry, logits, index, values, config=config_of(aggregation), normalizer=normalizer)
    return outcome(out, out.loss, logits=logits, values=values)


def sliced_token_weights(entry: str, index: tuple[slice, torch.Tensor]) -> dict[str, object]:
    """seq-mean-token-mean without values: 1 / length as a weight, the number of sequences as the denominator."""
    logits, lengths = leaf(batch()["logits"][index]), lengths_of(batch()["mask"][index])
    weights = (1 / lengths.clamp(min=1))[:, None].expand(batch()["mask"][index].shape)
    count = (lengths > 0).sum()
    config = PPOLossConfig(entropy_coef=TERMS["entropy_coef"], kl_coef=TERMS["kl_coef"], dual_clip=TERMS["dual_clip"])
    out = call(entry, logits, index, None, config=config, normalizer=count, token_weights=weights)
    return outcome(out, out.loss, logits=logits)


def sliced_none(entry: str, index: tuple[slice, torch.Tensor]) -> dict[str, object]:
    """seq-mean-token-mean with all terms: the losses of the tokens, weighted by the caller."""
    logits, values = leaf(batch()["logits"][index]), leaf(batch()["values"][index])
    lengths = lengths_of(batch()["mask"][index])
    weights = (1 / lengths.clamp(min=1) / (lengths > 0).sum())[:, None]
    out = call(entry, logits, index, values, config=config_of("none"))
    return outcome(out, (out.loss * weights).sum(), logits=logits, values=values)


def gathered(order: str, index: tuple[slice, torch.Tensor], rank: int, world: int, **options: object):
    """Losses that need whole sequences: [B, T] of all on every rank, and the gradient through one's own slice."""
    x, columns = batch(), index[1]
    logits = leaf(x["logits"][index])
    log_p = torch.log_softmax(logits, -1)
    logprobs = log_p.gather(-1, x["tokens"][index][..., None])[..., 0]
    slices = [torch.empty_like(logprobs) for _ in range(world)]
    dist.all_gather(slices, logprobs.detach())
    slices[rank] = logprobs
    place = torch.cat([positions(order, r, world) for r in range(world)]).argsort()
    whole = torch.cat(slices, -1)[:, place]
    out = ppo_loss(whole, x["old_logprobs"], x["advantages"], x["mask"], config=PPOLossConfig(**options))
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": logits.grad, "columns": columns}


def whitenings(index: object) -> list[torch.Tensor]:
    x, mask = 100 + batch()["advantages"][index], batch()["mask"][index]
    return [masked_whiten(x, mask, process_group=dist.group.WORLD, **options) for options in WHITENINGS]


def nothing_anywhere() -> dict[str, object]:
    """A step in which no rank has a valid token: the global count is 0."""
    mask = torch.zeros(2, 3, dtype=torch.bool)
    logits, old = torch.randn(2, 3, V, requires_grad=True), torch.zeros(2, 3)
    tokens = torch.zeros(2, 3, dtype=torch.long)
    out = fused_ppo_loss(logits, tokens, old, old, mask, normalizer=summed(mask.sum()))
    out.loss.backward()
    white = masked_whiten(old + 7, mask, process_group=dist.group.WORLD)
    metrics = out.metrics.all_reduce().compute()
    return {"loss": out.loss.detach(), "grad": logits.grad, "white": white, "metrics": metrics}


def two_only(rank: int) -> dict[object, dict]:
    """Models in wrappers, which take seconds to import."""
    result: dict[object, dict] = {"page": run_the_page()}
    for share, rows in SHARES.items():
        result["fsdp", share] = averaged_by(fully_sharded, "token-mean", rows[rank], 2, 3)
        for aggregation in AGGREGATIONS:
            for micro_batches in (1, 3):
                result["ddp", share, aggregation, micro_batches] = averaged_by(
                    nn.parallel.DistributedDataParallel, aggregation, rows[rank], 2, micro_batches
                )
    return result


def run_the_page() -> list[dict[str, torch.Tensor]]:
    """What docs/distributed.md has after each of its blocks on data parallelism."""
    after = []
    for names in distributed_page.run(distributed_page.DATA_PARALLEL):
        found = {name: x.detach().clone() for name, x in names.items() if isinstance(x, torch.Tensor)}
        head = names["model"].module
        found |= {"weight": head.weight.detach(), "bias": head.bias.detach(), "weight.grad": head.weight.grad.clone()}
        if "local" in names:
            found["local.grad"] = names["local"].grad.clone()
            names["local"].grad.zero_()
        after.append(found | {"out.loss": names["out"].loss.detach()})
    return after


def four_only(rank: int) -> dict[str, object]:
    """Groups that are not all ranks, and tensors of different dtypes."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = pairs[rank // 2], pairs[1 - rank // 2]
    half = slice(4 * (rank // 2), 4 * (rank // 2) + 4)
    rows = slice(half.start, half.start + 3) if rank % 2 == 0 else slice(half.start + 3, half.stop)
    columns = positions("contiguous", rank % 2, 2)
    try:
        masked_whiten(torch.ones(2), process_group=other)
        refusal = ""
    except TypeError as error:
        refusal = str(error)
    x = torch.tensor([[1.0, 2.0], [3.0], [], [10.0]][rank], dtype=[torch.bfloat16, torch.float64][rank % 2])
    logits, values = leaf(batch()["logits"][half, columns]), leaf(batch()["values"][half, columns])
    out = call(
        "fused",
        logits,
        (half, columns),
        values,
        config=config_of("token-mean"),
        normalizer=summed(batch()["mask"][half, columns].sum()),
    )
    return {
        "pair whitened": masked_whiten(batch()["advantages"][rows], batch()["mask"][rows], process_group=mine),
        "refusal": refusal,
        "dtypes": masked_whiten(x, process_group=dist.group.WORLD),
        "2 x 2": outcome(out, out.loss, logits=logits, values=values),
        "2 x 2 index": (torch.arange(half.start, half.stop), columns),
    }
