"""What others offer: eager PyTorch, torch.compile of it, and Liger's and TRL's functions where they are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import baselines
import torch
from gpu_cases import Case
from gpu_work import COEF, Absent, Rows, Work, traffic


def peer_work(case: Case, batch: Rows) -> Work:
    """Bars are those of a 16-bit softmax. Liger's loss is another one (an advantage per sequence): not checked."""
    logits, coef = batch.logits, COEF if case.entropy else 0.0
    ideal = traffic(case, batch, 1, 1, 25)
    size = logits.numel() * logits.element_size()
    if case.quantity == "scores":
        score = {"eager": eager_scores, "trl": trl_scores}[case.contender]()

        def scores_and_gradient() -> Any:
            logprobs = score(logits, batch.tokens)
            return torch.autograd.grad(logprobs, logits, batch.upstream[0].to(logprobs.dtype))[0], logprobs.detach()

        def check(got: Any) -> dict[str, Any]:
            scores = batch.check_scores(got[1], None, bar=2e-2)
            return scores | batch.check_gradient(got[0], batch.upstream[0], None, bar=2e-2)

        return Work(scores_and_gradient, check, traffic(case, batch, 2, 1, 17), size)
    if case.contender == "liger":
        return Work(liger_grpo(case, batch), lambda got: {"checked": "no: another loss"}, ideal, size)
    loss_of: Callable[..., Any] = baselines.ppo_loss
    if case.contender == "compile":
        torch._dynamo.reset()
        backend = "aot_eager" if logits.device.type == "cpu" else "inductor"  # a dry run does not wait for a compiler
        loss_of = torch.compile(loss_of, dynamic=False, backend=backend)

    def loss_and_gradient() -> Any:
        loss = loss_of(logits, batch.tokens, batch.old, batch.advantages, batch.mask, coef)
        return torch.autograd.grad(loss, logits)[0], loss.detach(), None, None

    return Work(loss_and_gradient, lambda got: batch.check_loss(got, coef, peer=True), ideal, size)


def eager_scores() -> Callable[..., Any]:
    return lambda logits, tokens: baselines.logprobs_and_entropy(logits, tokens, False)[0]


def trl_scores() -> Callable[..., Any]:
    try:
        from trl.trainer.utils import selective_log_softmax
    except ImportError as error:
        raise Absent(f"trl: {error}") from None
    return functools.partial(_as_batch, selective_log_softmax)


def _as_batch(function: Callable[..., Any], logits: Any, tokens: Any) -> Any:
    return function(logits[None], tokens[None])[0]


def liger_grpo(case: Case, batch: Rows) -> Callable[[], Any]:
    """Its inputs are sequences with one row more than is scored: 8 of them, nearly as many rows as ours."""
    try:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss
    except ImportError as error:
        raise Absent(f"liger_kernel: {error}") from None
    sequences = 8 if case.rows % 8 == 0 else 1
    shape = (sequences, case.rows // sequences)
    tokens, old, mask = (x.view(shape)[:, :-1].contiguous() for x in (batch.tokens, batch.old, batch.mask))
    options = {"temperature": 1.0, "beta": 0.0, "eps_low": 0.2, "eps_high": 0.2, "inplace": False, "reduce": False}

    def run() -> Any:
        logits = batch.logits.view(*shape, -1)
        per_token = triton_grpo_loss(logits, old, None, tokens, batch.advantages[:sequences], mask, **options)[0]
        return torch.autograd.grad((per_token * mask).sum() / mask.sum(), batch.logits)[0]

    return run
