"""What `make gpu` measures, and the process that measures it: gpu.py starts it, and starts it again if it dies.

    stats   logprobs_from_logits without gradient       grad, grad_   its backward alone: the operators row_grad(_)
    scores  logprobs_from_logits, forward and backward  split   ppo_loss of them: the vocabulary is read twice
    fused, fused_   fused_ppo_loss forward and backward, with a gradient of its own and in place of the logits
    token_loss   ppo_loss forward and backward          gae, whiten
    linear, linear_low   fused_linear_ppo_loss forward and backward, and with memory="low"
    linear_scores        logprobs_from_hidden without gradient

gpu_cases.py --output FILE [--first I] [--deadline TIME] [--no-graph KINDS] [--only REGEX] [--dry]   JSON, one a line
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

VOCABULARY = ("stats", "fused_", "grad", "fused", "split", "grad_")
LINEAR = ("linear", "linear_low", "linear_scores")
GAE_SHAPES = ((512, 4096), (8, 65536), (64, 32768), (8192, 256), (65536, 64))
RESTART_ME, SECONDS_PER_CASE = 4, 45
DRY_FAULTS = {"hangs": lambda: time.sleep(600), "dies": lambda: os._exit(9), "spends": lambda: None}  # rehearsed


class Case(NamedTuple):
    """`columns`: the vocabulary; for gae the steps of a sequence; 1 where there is one number per token."""

    quantity: str
    rows: int
    columns: int
    dtype: str = "fp32"
    masked: float = 0.0
    entropy: bool = False
    contender: str = "ours"

    @property
    def kind(self) -> str:
        return self.quantity if self.contender == "ours" else f"{self.quantity}/{self.contender}"

    @property
    def name(self) -> str:
        entropy, masked = " H" if self.entropy else "", f" {self.masked:.0%} masked" if self.masked else ""
        return f"{self.kind} {self.rows}x{self.columns} {self.dtype}{entropy}{masked}"


def cases(dry: bool, only: str = "") -> list[Case]:
    """Those whose name has the pattern `only` in it, in the order of importance: the budget may end before the list."""
    return [case for case in _cases(dry) if re.search(only, case.name)]


def _cases(dry: bool) -> list[Case]:
    if dry:
        shapes = [(4, 24, "bf16", 0.0, True), (6, 9, "fp32", 0.5, False)]
        rows, vocab, steps, tokens, small, head = 6, 9, [(3, 8)], [32], (16, 8), (16, 40)
    else:
        shapes = [(8192, 151936, "bf16", 0.0, entropy) for entropy in (False, True)]
        rows, vocab, steps, tokens, small = 8192, 151936, GAE_SHAPES, [8192, 65536, 1 << 20], (65536, 8)
        head = (rows, vocab)
    per_token = [Case("gae", *shape, masked=masked) for masked in (0.0, 0.5) for shape in steps]
    per_token += [
        Case(q, n, 1, masked=masked) for q in ("token_loss", "whiten") for n in tokens for masked in (0.0, 0.5)
    ]
    peers = [Case("fused", rows, vocab, "bf16", 0.0, True, contender) for contender in ("eager", "compile")]
    peers += [Case("fused", rows, vocab, "bf16", 0.0, False, contender) for contender in ("eager", "liger")]
    peers += [Case("scores", rows, vocab, "bf16", 0.0, False, contender) for contender in ("ours", "eager", "trl")]
    peers += [Case("fused", *small, "bf16", 0.0, True, contender) for contender in ("eager", "compile")]
    linear = _linear(*head)
    peers += [Case("linear", *head, "bf16", 0.0, False, contender) for contender in ("eager", "liger")]
    first = _vocabulary(shapes)
    if dry:
        hangs, dies, spends = (Case(fault, 1, 1) for fault in DRY_FAULTS)
        rest = [*_vocabulary([(*small, "bf16", 0.0, True)]), *peers]
        return [*first, *per_token, *linear, hangs, dies, *rest, spends, first[0]]
    few = [(n, 151936, "bf16", 0.0, False) for n in (64, 256, 1024)]
    early = [
        *((n, v, "bf16", 0.0, False) for v in (50257, 151643) for n in (8192, 256, 64)),
        (8192, 151936, "bf16", 0.5, False),
        *((65536, 8, dtype, 0.0, True) for dtype in ("bf16", "fp32")),
    ]
    late = [
        *((n, 151936, "fp32", 0.0, entropy) for n in (8192, 256) for entropy in (False, True)),
        *((n, 32000, "bf16", 0.0, False) for n in (8192, 256)),
        *((n, 151936, "bf16", 0.0, True) for n in (64, 256, 1024)),
        *((8192, v, "bf16", 0.0, False) for v in (128256, 262144, 1000)),
    ]
    matrix = itertools.product(
        (0.0, 0.5), ("bf16", "fp32"), (151936, 32000, 50257, 128256, 151643, 262144, 1000, 8), (8192, 256, 64, 1024)
    )
    rest = [(n, v, dtype, masked, entropy) for masked, dtype, v, n in matrix for entropy in (False, True)]
    peers += [Case("fused", 256, vocab, "bf16", 0.0, True, contender) for contender in ("eager", "compile")]
    odd = [Case("linear", rows, 151643, "bf16", contender=contender) for contender in ("ours", "products")]
    ordered = [*first, *per_token[:2], *_vocabulary(few), *linear, *_vocabulary(early), *per_token[2:], *peers, *odd]
    return list(dict.fromkeys([*ordered, *_vocabulary([*late, *rest])]))


def _vocabulary(shapes: Iterable[Any]) -> list[Case]:
    return [Case(quantity, *shape) for shape in shapes for quantity in VOCABULARY]


def _linear(rows: int, vocab: int) -> list[Case]:
    """The contender called products: the matrix products alone, three or one."""
    loss = [("linear", masked, contender) for masked in (0.0, 0.5) for contender in ("ours", "products")]
    scores = [("linear_scores", 0.0, contender) for contender in ("ours", "products")]
    chosen = [*loss, *scores, ("linear_low", 0.0, "ours")]
    return [Case(q, rows, vocab, "bf16", masked, False, contender) for q, masked, contender in chosen]


def measure(case: Case, timer: Any, capture: bool) -> dict[str, Any]:
    """Checked first; then peak memory, plain calls, and replays of a captured call."""
    from gpu_work import Absent, prepare

    if case.quantity in DRY_FAULTS:
        DRY_FAULTS[case.quantity]()
        raise Absent("this case ends the budget of a dry run")
    work = prepare(case, timer.device)
    work.reset()
    record: dict[str, Any] = {"ideal_bytes": work.ideal_bytes, "logits_bytes": work.logits_bytes}
    record |= work.check(work.run())
    record["peak_bytes"] = timer.peak_bytes(work.run, work.reset)
    record["plain"] = timer.median(work.run, work.reset)
    if not capture:
        record["graph"] = {"skipped": "it failed before"}
    elif record["plain"]["ms"] > 1e3:
        record["graph"] = {"skipped": "longer than a second"}
    else:
        record["graph"] = timer.graph_median(work.run, work.reset)
    return record


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=float("inf"))
    parser.add_argument("--no-graph", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    listed = cases(options.dry, options.only)

    with options.output.open("a") as file:

        def tell(**message: Any) -> None:
            file.write(json.dumps(message) + "\n")
            file.flush()

        from gpu_timer import Timer
        from gpu_work import Absent

        timer = Timer(options.dry, failing_capture=options.first == 0)
        if options.first == 0:
            tell(event="ceiling", **timer.copy_bandwidth())
        for i, case in enumerate(listed[options.first :], options.first):
            if time.time() > options.deadline or (i and listed[i - 1].quantity == "spends"):
                tell(event="budget", case=i)
                return
            compiles = case.contender == "compile" or case.kind == "linear/liger"
            factor = 4.0 if compiles else 0.05 if case.quantity in DRY_FAULTS else 1.0
            tell(event="begin", case=i, seconds=SECONDS_PER_CASE * factor)
            capture = case.kind not in options.no_graph.split(",")
            try:
                record = measure(case, timer, capture)
            except Absent as absent:
                record = {"skipped": str(absent)}
            except Exception as error:
                record = {"error": f"{type(error).__name__}: {str(error)[-400:]}"}
            tell(event="record", case=i, kind=case.kind, clock=timer.clock, **case._asdict(), **record)
            # A failed capture, or an access outside the memory, can leave the process unable to go on.
            failed_capture = "not_captured" in record.get("graph", {})
            if failed_capture or ("error" in record and not usable(timer)):
                sys.exit(RESTART_ME)


def usable(timer: Any) -> bool:
    """Whether the device still answers after an error."""
    import torch

    try:
        timer.cuda.synchronize()
        timer.cuda.empty_cache()
        return float(torch.ones(2, device=timer.device).sum()) == 2
    except RuntimeError:
        return False


if __name__ == "__main__":
    main()
