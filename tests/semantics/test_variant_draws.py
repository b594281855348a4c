"""Every option of the losses of other trainers at once, at random, through both entry points against the oracle."""

from __future__ import annotations

import pytest
import torch
from checks import INTERPRETER, examples
from variant_cases import check, draw

DTYPES = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16, torch.float64: 12}


def seeds(number):
    return range(max(6, examples(number) * 2 if INTERPRETER else number))


@pytest.mark.parametrize("seed", seeds(64))
def test_from_logprobs(seed):
    check(draw(seed, fused=False, dtype=torch.float32))


@pytest.mark.parametrize(("dtype", "seed"), [(d, s) for d, n in DTYPES.items() for s in seeds(n)], ids=str)
def test_from_logits(dtype, seed):
    # float64 is compared to 13 digits: bounds that fp32 has too
    exact = {"clip_low": 0.25, "clip_high": 0.3125, "sapo_tau_neg": 1.0625} if dtype == torch.float64 else {}
    check(draw(seed + 1000, fused=True, dtype=dtype, **exact))


@pytest.mark.parametrize("seed", seeds(12))
def test_from_float64_logprobs(seed):
    exact = {"clip_low": 0.25, "clip_high": 0.3125, "sapo_tau_neg": 1.0625}
    check(draw(seed + 2000, fused=False, dtype=torch.float64, **exact))


@pytest.mark.parametrize("kl_gradient", ["autograd", "k2", "is_weighted", "score"][:: 2 if INTERPRETER else 1])
@pytest.mark.parametrize("ratio_level", ["token", "sequence", "sequence_token"])
@pytest.mark.parametrize("loss_type", ["ppo", "cispo", "reinforce", "sapo"])
def test_each_loss_with_each_ratio_and_each_kl_gradient(loss_type, ratio_level, kl_gradient):
    chosen = {"loss_type": loss_type, "ratio_level": ratio_level, "kl_gradient": kl_gradient, "kl_coef": 0.3}
    chosen |= {"dual_clip": None, "cispo_ratio_min": None, "cispo_ratio_max": None}
    chosen |= {"kl_input_clamp": None, "kl_output_clamp": 0.3}
    check(draw(3000, fused=ratio_level != "token", dtype=torch.float32, **chosen))
