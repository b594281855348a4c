"""Every option of the losses of other trainers and every preset, from hidden states: the draws of variant_cases.py.

Hidden states and weight have few bits, so that their product is exact in every dtype: the loss has to meet the bars of
a loss of logits, and only the gradients of the product are rounded.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
import variants_oracle as oracle
from checks import INTERPRETER, examples
from oracle import to_numpy
from test_linear_oracle import Product, luck
from test_presets import ALL, make
from torch import Tensor
from variant_cases import GARBAGE, Case, attempt, check

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss
from ppo_kernels.config import PER_TOKEN_OUTPUTS

SIZE = 6
DTYPES = {torch.float32: 24, torch.bfloat16: 10, torch.float16: 10, torch.float64: 6}


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Matrices this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads(1)


@dataclass
class LinearCase(Case):
    """The call on hidden states whose logits `scores["logits"]` are."""

    head: dict[str, Tensor] | None = None
    rows: Tensor | None = None  # of hidden, that count
    how: dict | None = None

    def ask_the_oracle(self) -> None:
        super().ask_the_oracle()
        exact, plain = (
            Product(self.head, self.rows, self.options["vocab_size"], dtype) for dtype in (torch.float64, None)
        )
        d_logits = self.want_grads["logits"][..., : self.options["vocab_size"]]
        self.want_head, self.plain_head = exact.grads(d_logits), plain.grads(d_logits)

    def run(self):
        leaves = {k: x.clone().requires_grad_() for k, x in self.head.items()}
        values = {k: x.clone().requires_grad_() for k, x in self.scores.items() if k == "values"}
        config = PPOLossConfig(**self.options, per_token_outputs=PER_TOKEN_OUTPUTS)
        rest = {**leaves, **values, **self.given, **self.how}
        out = fused_linear_ppo_loss(mask=self.mask, config=config, shift=self.shift, **rest)
        (out.loss * self.upstream).sum().backward()
        self.head_grads = {k: x.grad for k, x in leaves.items()}
        return out, {k: x.grad for k, x in values.items()}


def few_bits(shape, steps, size, dtype):
    """Multiples of `size`, at most `steps` of them."""
    return (torch.randint(-steps, steps + 1, shape) * size).to(dtype)


def from_hidden(case: Case, rng: random.Random) -> LinearCase:
    """The same case with logits that are a product; old, reference and rollout log-probs move with the new ones."""
    dtype, shape = case.scores["logits"].dtype, case.scores["logits"].shape
    head = {
        "hidden": few_bits((*shape[:-1], SIZE), 4, 0.5, dtype),
        "weight": few_bits((shape[-1], SIZE), 4, 0.25, dtype),
    }
    if rng.random() < 0.5:
        head["bias"] = few_bits((shape[-1],), 8, 0.25, dtype)
    logits = Product(head, dtype=torch.float64).logits.detach().to(dtype)

    rows = torch.ones(shape[:-1], dtype=torch.bool)
    if case.shift:
        rows[..., -1] = False
    if case.mask is not None:
        (rows[..., :-1] if case.shift else rows).logical_and_(case.mask)
    cu_seqlens = case.given.get("cu_seqlens")
    if case.shift and cu_seqlens is not None:
        rows[[b - 1 for a, b in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True) if b > a]] = False

    given, o = dict(case.given), oracle.Options(**case.options)
    score = (given["tokens"], case.mask, o, cu_seqlens, case.shift)
    new = oracle.score(logits.detach().double().cpu(), *score)[0]
    moved = (new - case.scored[0]).to(case.scores["logits"].device)
    for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs"):
        if given.get(name) is not None:
            given[name] = (given[name].double() + moved).to(given[name].dtype)
    head["hidden"][~rows] = rng.choice(GARBAGE[:3])
    if case.options["vocab_size"]:
        head["weight"][case.options["vocab_size"] :] = 64.0
    how = {"memory": rng.choice(("fast", "low")), "chunk_bytes": rng.choice((None, 1, 4 * 13 * 3, 1 << 20))}
    scores = case.scores | {"logits": logits}
    found = LinearCase(case.options, scores, given, case.mask, case.shift, case.upstream, head=head, rows=rows, how=how)
    found.ask_the_oracle()
    return found


def draw(seed: int, dtype: torch.dtype, **fixed) -> LinearCase:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(200):
        case = attempt(rng, True, dtype, dict(fixed))
        if case.is_clear and (found := from_hidden(case, rng)).is_clear:
            return found
    raise AssertionError("every draw came too near a switch of branch")


def check_linear(case: LinearCase) -> None:
    check(case)
    dtype = case.head["hidden"].dtype
    upstream = abs(case.upstream) if isinstance(case.upstream, float) else 1.0
    for name, got in case.head_grads.items():
        assert got.dtype == dtype, name
        want, value = case.want_head[name], to_numpy(got)
        error, reached = np.linalg.norm(value - want), np.linalg.norm(case.plain_head[name] - want)
        size, terms = np.linalg.norm(want), case.want_head[f"terms of {name}"]
        # Where a loss is small because its terms cancel, so does the gradient of the logits.
        terms = max(float(terms), 0.1 * case.want.size * upstream)
        bar = {torch.float32: max(2e-6 * size, 2 * reached, 1e-6 * terms), torch.float64: 1e-12 * (size + terms)}.get(
            dtype, luck(dtype, got.device) * reached + 2e-6 * size + 1e-6 * terms
        )
        assert error <= bar, f"{name}: error {error:.3g} > {bar:.3g} of {size:.3g}, plain PyTorch {reached:.3g}"
        assert name != "hidden" or (value[~case.rows.cpu().numpy()] == 0).all()
        assert name == "hidden" or (value[case.options["vocab_size"] or len(value) :] == 0).all()


def seeds(number):
    return range(max(2, examples(number)) if INTERPRETER else number)


@pytest.mark.parametrize(("dtype", "seed"), [(d, s) for d, n in DTYPES.items() for s in seeds(n)], ids=str)
def test_any_options(dtype, seed):
    # float64 is compared to 13 digits: bounds that fp32 has too
    exact = {"clip_low": 0.25, "clip_high": 0.3125, "sapo_tau_neg": 1.0625} if dtype == torch.float64 else {}
    check_linear(draw(seed + 5000, dtype, **exact))


@pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence_token"][:: 2 if INTERPRETER else 1])
@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"][:: 2 if INTERPRETER else 1])
def test_each_loss_with_each_ratio(loss_type, ratio_level):
    chosen = {"loss_type": loss_type, "ratio_level": ratio_level, "kl_coef": 0.3, "entropy_coef": 0.02}
    chosen |= {"dual_clip": None, "cispo_ratio_min": None, "cispo_ratio_max": None}
    check_linear(draw(6000, torch.float32, **chosen))


@pytest.mark.parametrize("aggregation", ["token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "none"])
def test_each_aggregation(aggregation):
    check_linear(draw(7000, torch.float32, aggregation=aggregation))


@pytest.mark.parametrize("correction", ["truncate", "mask", "seq_mask"])
def test_each_rollout_correction(correction):
    chosen = {"rollout_is_mode": correction, "rollout_is_max": 1.5, "rollout_mask_in_denominator": False}
    check_linear(draw(8000, torch.float32, **chosen))


@pytest.mark.parametrize(("name", "variant"), ALL[:: 6 if INTERPRETER else 1])
def test_every_preset(name, variant):
    config = make(name, variant)
    options = {f.name: getattr(config, f.name) for f in fields(oracle.Options)}
    check_linear(draw(9000, torch.float32, **options))
