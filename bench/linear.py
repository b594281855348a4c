"""`make bench-linear`: the PPO loss from hidden states and the head's weight, forward and backward, no logits given.

Beside it: the three matrix products alone, plain PyTorch with logits [N, V], and other fused heads on the same shapes:
torch's linear_cross_entropy (another loss, the same work) and Liger's LigerFusedLinearGRPOLoss. Contenders take turns
in every round and medians are compared; memory is the high-water mark of a fresh process beyond inputs and gradients.
Writes bench/results/linear-<device>.json and .md.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, logprobs_from_hidden
from ppo_kernels.linear import CHUNK_BYTES

HIDDEN, VOCAB, ROUNDS = 1024, 151936, 2
CONFIG = PPOLossConfig(return_entropy=False)


class Batch:
    """hidden [N, H], weight [V, H], and what the loss reads. half: every other row is masked."""

    def __init__(self, rows: int, dtype: torch.dtype, half: bool = False, vocab: int = VOCAB) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
        self.weight = torch.randn(vocab, HIDDEN, generator=generator).mul_(HIDDEN**-0.5).to(dtype).requires_grad_()
        self.tokens = torch.randint(vocab, (rows,), generator=generator)
        self.advantages = torch.randn(rows, generator=generator)
        self.mask = torch.arange(rows) % 2 == 0 if half else torch.ones(rows, dtype=torch.bool)
        with torch.no_grad():
            old = logprobs_from_hidden(self.hidden, self.weight, self.tokens)
        self.old_logprobs = old + 0.1 * torch.randn(rows, generator=generator)
        self.products: list[Tensor] = []

    def for_products(self) -> list[Tensor]:
        """hidden, weight and logits [N, V] in fp32, where the products alone find and leave them."""
        if not self.products:
            self.products = [x.detach().float() for x in (self.hidden, self.weight)]
            self.products.append(torch.zeros(len(self.hidden), len(self.weight)))
        return self.products

    def clear(self) -> None:
        self.results: tuple[Tensor, ...] = ()
        self.hidden.grad = self.weight.grad = None


def ours(batch: Batch, **options: Any) -> None:
    given = (batch.hidden, batch.weight, batch.tokens, batch.old_logprobs, batch.advantages, batch.mask)
    fused_linear_ppo_loss(*given, config=CONFIG, **options).loss.backward()


def low(batch: Batch) -> None:
    ours(batch, memory="low")


@torch.no_grad()
def score(batch: Batch) -> None:
    logprobs_from_hidden(batch.hidden, batch.weight, batch.tokens, batch.mask)


def one_product(batch: Batch) -> None:
    hidden, weight, logits = batch.for_products()
    torch.mm(hidden, weight.T, out=logits)


def three_products(batch: Batch) -> None:
    """Into logits that are there, and two new tensors: the gradients are new in every contender. In fp32: on a CPU
    without 16-bit instructions those of 16-bit tensors take many times as long."""
    one_product(batch)
    hidden, weight, logits = batch.for_products()
    batch.results = logits @ weight, logits.T @ hidden


def eager(batch: Batch) -> None:
    """As trainers write it, with an fp32 softmax."""
    logprobs = torch.log_softmax((batch.hidden @ batch.weight.T).float(), -1).gather(-1, batch.tokens[:, None])[:, 0]
    ratio = (logprobs - batch.old_logprobs).exp()
    loss = -torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    ((loss * batch.mask).sum() / batch.mask.sum()).backward()


def torch_linear_cross_entropy(batch: Batch) -> None:
    F.linear_cross_entropy(batch.hidden, batch.weight, batch.tokens).backward()


def liger(batch: Batch) -> None:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    rows, length = len(batch.tokens), 128
    shaped: Callable[[Tensor], Tensor] = lambda x: x.view(rows // length, length, *x.shape[1:])  # noqa: E731
    loss(
        shaped(batch.hidden),
        batch.weight,
        shaped(batch.tokens),
        shaped(batch.mask),
        shaped(batch.advantages)[:, 0],
        old_per_token_logps=shaped(batch.old_logprobs),
    )[0].backward()


CONTENDERS: dict[str, Callable[[Batch], None]] = {
    "ours": ours,
    "ours, memory='low'": low,
    "three products": three_products,
    "eager": eager,
    "torch linear_cross_entropy": torch_linear_cross_entropy,
    "liger GRPO": liger,
    "ours, log-probs alone": score,
    "one product": one_product,
}


def race(contenders: dict[str, tuple[Callable[[Batch], None], Batch]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _, batch in contenders.values():
        batch.for_products()
    for _ in range(rounds):
        for name, (contender, batch) in contenders.items():
            batch.clear()
            start = time.perf_counter()
            contender(batch)
            times[name].append(time.perf_counter() - start)
            batch.clear()
    medians = {name: round(statistics.median(values), 3) for name, values in times.items()}
    print(medians, flush=True)
    return medians


def available() -> dict[str, Callable[[Batch], None]]:
    missing = {
        "torch linear_cross_entropy": not hasattr(F, "linear_cross_entropy"),
        "liger GRPO": importlib.util.find_spec("liger_kernel") is None,
    }
    for name in (name for name, is_missing in missing.items() if is_missing):
        print(f"{name}: not installed here, left out")
    return {name: contender for name, contender in CONTENDERS.items() if not missing.get(name)}


def timing(rows: int, dtype: torch.dtype, names: list[str], rounds: int) -> dict[str, Any]:
    whole = Batch(rows, dtype)
    contenders = {name: (contender, whole) for name, contender in available().items() if name in names}
    contenders["ours, half the rows masked"] = ours, Batch(rows, dtype, half=True)
    return {"rows": rows, "dtype": str(dtype)[6:], "rounds": rounds, "median_s": race(contenders, rounds)}


# ---- memory ---------------------------------------------------------------------------------------------------------


def _high_water(name: str, rows: int, dtype: torch.dtype, result: multiprocessing.Queue[int]) -> None:
    from memory import _status

    CONTENDERS[name](Batch(256, dtype, vocab=512))  # loads code and starts threads
    batch = Batch(rows, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    CONTENDERS[name](batch)
    gradients = sum(x.grad.nbytes for x in (batch.hidden, batch.weight) if x.grad is not None)
    result.put(_status("VmHWM") - before - gradients)


def memory(name: str, rows: int, dtype: torch.dtype) -> int:
    """Bytes beyond inputs and gradients."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_high_water, args=(name, rows, dtype, result))
    process.start()
    value: int = result.get(timeout=900)
    process.join()
    return value


# ---- report ---------------------------------------------------------------------------------------------------------

FAST = ["ours", "ours, memory='low'", "three products", "ours, log-probs alone", "one product"]
EVERY = list(CONTENDERS)
TIMINGS = ((1024, torch.float32, EVERY, ROUNDS), (1024, torch.bfloat16, FAST, ROUNDS))
MEMORY = ("ours", "ours, memory='low'", "eager", "liger GRPO")


def markdown(report: dict[str, Any]) -> str:
    releases = ", ".join(f"{name} {number}" for name, number in report["releases"].items())
    lines = [
        f"# {report['device']}, {report['threads']} threads: the loss from hidden states",
        "",
        f"`make bench-linear`: forward and backward from hidden [N, {HIDDEN}] and weight [{VOCAB}, {HIDDEN}], medians"
        f" of rounds in turn. {releases}. Ratios are to `three products` (`one product` for log-probs alone), which is"
        " in fp32: the products of 16-bit tensors would take many times as long on this CPU.",
        "",
        "| N | dtype | rounds | contender | seconds | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for case in report["timings"]:
        seconds = case["median_s"]
        for name, value in seconds.items():
            against = "one product" if name in ("ours, log-probs alone", "one product") else "three products"
            cells = f"{case['rows']} | {case['dtype']} | {case['rounds']} | {name} | {value:.2f}"
            lines.append(f"| {cells} | {value / seconds[against]:.2f} |")
    lines += [
        "",
        "Peak memory beyond inputs and gradients, a fresh process each. The workspace for logits is"
        f" {CHUNK_BYTES >> 20} MiB; the fp32 sum of a 16-bit weight's gradient is {VOCAB * HIDDEN * 4 >> 20} MiB.",
        "",
        "| N | dtype | contender | MiB |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['rows']} | {row['dtype']} | {row['contender']} | {row['bytes'] / 2**20:.0f} |"
        for row in report["memory"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    from run import RESULTS, device_name

    there = available()
    releases = {"torch": version("torch")}
    if "liger GRPO" in there:
        releases["liger-kernel"] = version("liger-kernel")
    report: dict[str, Any] = {"device": device_name(), "threads": torch.get_num_threads(), "releases": releases}
    report["timings"] = [timing(*case) for case in TIMINGS]
    report["memory"] = [
        {"rows": rows, "dtype": str(dtype)[6:], "contender": name, "bytes": memory(name, rows, dtype)}
        for rows, dtype, names in ((1024, torch.float32, MEMORY), (1024, torch.bfloat16, MEMORY[:1]))
        for name in names
        if name in there
    ]
    base = RESULTS / ("linear-" + re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-"))
    base.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
