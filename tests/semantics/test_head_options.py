"""fused_ppo_loss with the options of a model's head: temperature per row, softcap, scale, ignored tokens."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, assert_logits_grad, leaf, same_bits

from ppo_kernels import PPOLossConfig, fused_ppo_loss, ppo_loss

B, T, V = 3, 5, 40
TEMPERATURES = {
    "a number": 0.7,
    "0-dim": torch.tensor(0.9),
    "per sequence": torch.tensor([0.5, 1.0, 2.0]),
    "per row": torch.linspace(0.4, 2.0, B * T).view(B, T),
}


@pytest.fixture
def given():
    torch.manual_seed(0)
    tokens = torch.randint(V, (B, T))
    return torch.randn(B, T, V) * 3, tokens, -3 + 0.1 * torch.randn(B, T), torch.randn(B, T)


def plainly(logits, tokens, temperature, softcap, scale):
    """(logprobs, entropy) in float64, by autograd."""
    z = logits * scale if softcap is None else softcap * torch.tanh(logits * scale / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.double().view(*temperature.shape, *[1] * (3 - temperature.dim()))
    log_p = torch.log_softmax(z / temperature, -1)
    return log_p.gather(-1, tokens[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (None, 0.25), (3.0, 1.0), (5.0, 0.5)])
@pytest.mark.parametrize("options", [{}, {"ratio_level": "sequence"}, {"loss_type": "cispo"}], ids=str)
def test_the_loss_is_that_of_the_tempered_scaled_and_capped_logits(given, temperature, softcap, scale, options):
    x, tokens, old, advantages = given
    temperature = TEMPERATURES[temperature]
    ignored = int(tokens[0, 0])
    config = PPOLossConfig(entropy_coef=0.1, **options)
    logits, exact = leaf(x), leaf(x.double())
    out = fused_ppo_loss(
        logits,
        tokens,
        old,
        advantages,
        temperature=temperature,
        config=PPOLossConfig(
            entropy_coef=0.1, logit_softcap=softcap, logit_scale=scale, ignore_index=ignored, **options
        ),
    )
    out.loss.backward()
    logprobs, entropy = plainly(exact, tokens, temperature, softcap, scale)
    want = ppo_loss(logprobs, old.double(), advantages.double(), tokens != ignored, entropy=entropy, config=config)
    want.loss.backward()
    assert_close(out.loss, want.loss, 2e-6, scale=1.0)
    assert_logits_grad(logits.grad, exact.grad.numpy(), 2e-6)
    assert (out.logprobs[tokens == ignored] == 0).all()


def test_a_packed_batch_takes_one_temperature_per_sequence(given):
    x, tokens, old, advantages = (t.view(B * T, *t.shape[2:]) for t in given)
    cu_seqlens, temperature = torch.tensor([0, 4, 15], dtype=torch.int32), torch.tensor([0.5, 2.0])
    per_row = torch.cat([temperature[:1].expand(4), temperature[1:].expand(11)])
    both = [
        fused_ppo_loss(x, tokens, old, advantages, temperature=t, cu_seqlens=cu_seqlens).loss
        for t in (temperature, per_row)
    ]
    assert same_bits(*both)


def test_the_argument_replaces_the_temperature_of_the_configuration(given):
    config = PPOLossConfig(temperature=3.0)
    assert same_bits(
        fused_ppo_loss(*given, temperature=0.7, config=config).loss,
        fused_ppo_loss(*given, config=PPOLossConfig(temperature=0.7)).loss,
    )


def test_shift_ignores_by_the_token_that_is_scored(given):
    x, tokens, old, advantages = given
    tokens = tokens.clone()
    tokens[:, 0], tokens[1, 2] = -100, -100  # the first is never scored
    out = fused_ppo_loss(x, tokens, old[:, 1:], advantages[:, 1:], shift=True, config=PPOLossConfig(ignore_index=-100))
    assert out.metrics.compute()["tokens"] == B * (T - 1) - 1
    assert out.logprobs[1, 1] == 0


@pytest.mark.parametrize(
    ("error", "temperature"),
    [(ValueError, torch.ones(T)), (TypeError, torch.ones(B, dtype=torch.int64)), (ValueError, 0.0), (TypeError, "1")],
)
def test_bad_temperatures(given, error, temperature):
    with pytest.raises(error, match="temperature"):
        fused_ppo_loss(*given, temperature=temperature)
