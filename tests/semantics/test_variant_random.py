"""The same draws with hypothesis at the dice: what fails is shrunk to few tokens and few options."""

from __future__ import annotations

import torch
from checks import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from variant_cases import attempt, check

DICE = st.randoms(use_true_random=False)


@settings(max_examples=examples(60))
@given(dice=DICE, seed=st.integers(0, 2**20), fused=st.booleans())
def test_any_options(dice, seed, fused):
    torch.manual_seed(seed)
    case = attempt(dice, fused, torch.float32, {})
    assume(case.is_clear)
    check(case)
