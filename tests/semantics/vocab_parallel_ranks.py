"""What a rank does with its part of the vocabulary: all the cases, then what the other modules have for it."""

from __future__ import annotations

from typing import Any

import distributed_page
import torch
import vocab_parallel_errors as errors
import vocab_parallel_extremes as extremes
import vocab_parallel_groups as groups
from checks import leaf
from torch import Tensor
from vocab_parallel_cases import ENTRIES, LAYOUTS, LOSSES, Case, Layout, Ranks, cases, terms_of
from vocab_parallel_inputs import drawn

from ppo_kernels import PPOLossConfig


def everything(rank: int, world: int) -> dict[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    at = Ranks(rank, world, mesh.get_group(), mesh)
    result: dict[Any, Any] = {str(case): computed(case, at) for case in cases(world)}
    result["extreme rows"] = extremes.rows(at)
    result["extreme rows of a head"] = extremes.rows_of_a_head(at)
    result["same bits"] = extremes.bits(at)
    result["refusals"] = errors.refusals(at)
    result["and then"] = computed(Case("linear", "padded", "chunks"), at)
    if world == 2:
        result["page"] = run_the_page()
    else:
        result["tensor and data parallel"] = {entry: groups.tensor_and_data_parallel(entry, rank) for entry in ENTRIES}
        result["mesh of two dimensions"] = groups.mesh_of_two_dimensions(rank)
        result["outside"] = errors.outsiders(rank)
    return result


def local_part(name: str, x: Tensor, layout: Layout, at: Ranks) -> Tensor:
    """This rank's, as a leaf: a tensor, or the DTensor that holds it; hidden is on every rank."""
    if name == "hidden":
        return leaf(x)
    axis = -1 if name == "logits" else 0
    if layout.dtensor and name != "bias":
        return sharded(x, axis, at.mesh).requires_grad_()
    part = layout.part(at.rank, at.world)
    return leaf(x[..., part] if axis else x[part])


def sharded(x: Tensor, axis: int, mesh: Any) -> Tensor:
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x.detach(), mesh, [Shard(axis)], src_data_rank=None)


def computed(case: Case, at: Ranks) -> dict[str, Any]:
    x, o, layout = drawn(case, at.world), case.options, LAYOUTS[case.layout]
    leaves = {name: local_part(name, x[name], layout, at) for name in case.tensors()}
    for name in o.get("frozen", ()):
        leaves[name].requires_grad_(False)
    if x.get("values") is not None:
        leaves["values"] = leaf(x["values"])
    given: dict[str, Any] = dict(leaves)
    if o.get("not_leaves") or o.get("call", {}).get("inplace_grad"):
        given |= {name: leaves[name] * 1 for name in case.tensors()}
    given |= {name: x[name] for name in ("tokens", "mask", "temperature") if name in x} | o.get("call", {})
    rows = dict(o.get("rows", {}))
    padded = layout.existing[at.world] != layout.stored[at.world]
    if padded:
        rows["vocab_size"] = layout.existing[at.world]
    if not (layout.dtensor and case.entry in ("logits", "loss")):
        given["process_group"] = at.group
    if case.entry in LOSSES:
        names = ("old_logprobs", "ref_logprobs", "advantages", "returns", "cu_seqlens")
        given |= {name: x[name] for name in names if name in x}
        given["config"] = PPOLossConfig(**terms_of(case), **rows, **o.get("call_config", {}))
        given["shift"] = o.get("shift", False)
    else:
        given |= {"return_entropy": o.get("entropy", True), "shift": o.get("shift", False), **rows}

    with torch.set_grad_enabled(not o.get("no_grad")), torch.autocast("cpu", o.get("autocast"), "autocast" in o):
        out = ENTRIES[case.entry](**given)
    if case.entry in LOSSES:
        found = {"logprobs": out.logprobs, "entropy": out.entropy, "loss": out.loss.detach()}
        found |= {"terms": torch.stack([out.policy_loss, out.value_loss, out.kl]), "metrics": out.metrics.packed}
        roots, upstream = [out.loss], [x["upstream"].to(out.loss.dtype)]
    else:
        logprobs, entropy = out if o.get("entropy", True) else (out, None)
        found = {"logprobs": logprobs.detach(), "entropy": None if entropy is None else entropy.detach()}
        used = ["logprobs", "entropy"] if entropy is not None else ["logprobs"]
        roots, upstream = [logprobs, entropy][: len(used)], x["upstream"][: len(used)]
        if o.get("upstream") in used:
            i = used.index(o["upstream"])
            roots, upstream = roots[i : i + 1], upstream[i : i + 1]
    if o.get("no_grad"):
        return found | {"grads": {}}
    torch.autograd.backward(roots, upstream, retain_graph=bool(o.get("twice")))
    if o.get("twice"):
        torch.autograd.backward(roots, [2 * u for u in upstream])
    grads = {name: None if leaf.grad is None else plain(leaf.grad) for name, leaf in leaves.items()}
    return found | {"grads": grads}


def plain(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def run_the_page() -> dict[str, Tensor]:
    """What the section of docs/distributed.md leaves behind."""
    after: dict[str, Tensor] = {}
    for names in distributed_page.run(distributed_page.VOCABULARY_PARALLEL):
        for name, x in names.items():
            if isinstance(x, Tensor):
                after[name] = plain(x.detach()).clone()
                if x.is_leaf and x.grad is not None:
                    after[f"{name}.grad"] = plain(x.grad).clone()
    return after
