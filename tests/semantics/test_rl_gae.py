"""integrations.rl_gae: the conventions of classic RL. tests/peers compares them with the released packages."""

from __future__ import annotations

import pytest
import torch
from checks import assert_close, same_bits
from oracle import NAN
from torch import Tensor

from ppo_kernels.integrations.rl_gae import gae_cleanrl, gae_gymnasium, gae_rsl_rl, whiten_rsl_rl

STEPS, ENVS, GAMMA, LAM = 30, 3, 0.99, 0.95


def expected(
    rewards: Tensor, values: Tensor, following: Tensor, terminated: Tensor, ended: Tensor
) -> tuple[Tensor, Tensor]:
    """[T, N] in float64: V_next of every step, nothing after a termination, the trace cut at every end."""
    carry, rows = torch.zeros(ENVS, dtype=torch.float64), []
    for t in reversed(range(len(rewards))):
        delta = (
            rewards[t].double() + GAMMA * torch.where(terminated[t], 0.0, following[t].double()) - values[t].double()
        )
        carry = delta + GAMMA * LAM * torch.where(ended[t], 0.0, carry)
        rows.insert(0, carry)
    return torch.stack(rows), torch.stack(rows) + values.double()


def check(got, want) -> None:
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32
        assert_close(g, w, 1e-6, scale=1.0)


@pytest.fixture
def played() -> dict[str, Tensor]:
    ended = torch.rand(STEPS, ENVS) < 0.2
    ended[STEPS - 1, 0] = True
    x = {name: torch.randn(STEPS, ENVS) for name in ("rewards", "values", "final_values")}
    return {**x, "terminated": ended & (torch.rand(STEPS, ENVS) < 0.5), "ended": ended, "last": torch.randn(ENVS)}


def after(x: dict[str, Tensor]) -> Tensor:
    return torch.cat([x["values"][1:], x["last"][None]])


def test_gymnasium_a_truncated_episode_goes_on_with_the_value_of_its_final_state(played):
    x, cut = played, played["ended"] & ~played["terminated"]
    following = torch.where(cut, x["final_values"], after(x))
    want = expected(x["rewards"], x["values"], following, x["terminated"], x["ended"])
    given = (x["rewards"], x["values"], x["last"], x["terminated"], cut)
    got = gae_gymnasium(*given, x["final_values"])
    check(got, want)
    unread = torch.where(cut, x["final_values"], NAN)
    assert same_bits(gae_gymnasium(*given, unread).advantages, got.advantages)


def test_gymnasium_terminated_and_truncated_at_once_is_terminated(played):
    x, nothing = played, torch.full((STEPS, ENVS), NAN)
    both = gae_gymnasium(x["rewards"], x["values"], x["last"], x["ended"], x["ended"], nothing)
    assert same_bits(both.advantages, gae_gymnasium(x["rewards"], x["values"], x["last"], x["ended"]).advantages)


def test_gymnasium_the_value_after_the_last_step_is_not_read_where_it_ended_an_episode(played):
    x = played
    given = (x["rewards"], x["values"])
    unread = torch.where(x["ended"][-1], NAN, x["last"])
    got = gae_gymnasium(*given, unread, x["ended"])
    assert same_bits(got.advantages, gae_gymnasium(*given, x["last"], x["ended"]).advantages)


@pytest.mark.parametrize("trailing", [False, True])
def test_rsl_rl_a_time_out_adds_the_value_of_the_state_before_the_step(played, trailing):
    x, over = played, played["ended"] & ~played["terminated"]
    rewards = torch.where(over, x["rewards"] + GAMMA * x["values"], x["rewards"])
    want = expected(rewards, x["values"], after(x), x["ended"], x["ended"])
    given = [x["rewards"], x["values"], x["ended"].byte(), x["last"], over.float()]
    if trailing:
        got = gae_rsl_rl(*(t.unsqueeze(-1) for t in given))
        check([g.squeeze(-1) for g in got], want)
    else:
        check(gae_rsl_rl(*given), want)


@pytest.mark.parametrize("flags", [torch.bool, torch.float32, torch.int64])
def test_cleanrl_a_flag_of_the_state_before_a_step_ends_the_step_before(played, flags):
    x = played
    dones = torch.cat([torch.ones(1, ENVS, dtype=torch.bool), x["ended"][:-1]])
    want = expected(x["rewards"], x["values"], after(x), x["ended"], x["ended"])
    check(gae_cleanrl(x["rewards"], x["values"], dones.to(flags), x["last"], x["ended"][-1]), want)
    check(gae_cleanrl(x["rewards"], x["values"], dones.to(flags), x["last"][None], x["ended"][-1].to(flags)), want)


def test_whitening_adds_eps_to_the_unbiased_deviation():
    x = torch.randn(40, dtype=torch.float64)
    for scaled in (x, 1e-8 * x):
        assert_close(whiten_rsl_rl(scaled), (scaled - scaled.mean()) / (scaled.std() + 1e-8), 1e-12, scale=1.0)
    assert whiten_rsl_rl(torch.tensor([3.0])).tolist() == [0.0]


def test_errors_name_the_argument(played):
    x = played
    given = {"rewards": x["rewards"], "values": x["values"]}
    ended = {"terminated": x["terminated"], "truncated": x["ended"]}
    for error, call in {
        "truncated needs final_values": lambda: gae_gymnasium(**given, next_value=x["last"], **ended),
        "next_value has shape": lambda: gae_gymnasium(**given, next_value=x["last"][:1], terminated=x["ended"]),
        "values has shape": lambda: gae_rsl_rl(x["rewards"], x["values"][:-1], x["ended"], x["last"]),
        "time_outs has shape": lambda: gae_rsl_rl(
            **given, dones=x["ended"], last_values=x["last"], time_outs=x["last"]
        ),
        "dones has shape": lambda: gae_cleanrl(
            **given, dones=x["ended"][1:], next_value=x["last"], next_done=x["last"]
        ),
        "rewards has shape": lambda: gae_rsl_rl(x["last"], x["last"], x["last"], x["last"]),
        "gamma is 2": lambda: gae_cleanrl(
            **given, dones=x["ended"], next_value=x["last"], next_done=x["last"] > 0, gamma=2
        ),
    }.items():
        with pytest.raises(ValueError, match=error):
            call()
