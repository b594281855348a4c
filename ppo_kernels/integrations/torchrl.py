"""torchrl 0.14.1: its GAE through `gae`. The loss is in torchrl_loss.py.

    from ppo_kernels.integrations import torchrl
    torchrl.install()

After that every torchrl.objectives.value.GAE and MultiAgentGAE, vectorised or not, computes its advantages here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchrl.objectives.value import functional

from ppo_kernels import gae
from ppo_kernels.integrations.patching import Patches

TESTED = ">=0.14.1,<=0.14.1"

patches = Patches("torchrl", TESTED)


def generalized_advantage_estimate(
    gamma: float | Tensor,
    lmbda: float | Tensor,
    state_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> tuple[Tensor, Tensor]:
    """torchrl's function of the same name, and its vectorised one: (advantage, value_target), dtype of state_value.

        delta_t = r_t + gamma * (1 - terminated_t) * next_value_t - value_t
        A_t = delta_t + gamma * lmbda * (1 - done_t) * A_{t+1}

    All tensors have one shape, time on `time_dim`, by default [*B, T, F]; done and terminated (default: done) are
    flags. next_state_value is not read where terminated. gamma and lmbda are numbers or tensors of one element; reading
    a tensor waits for its device. Not differentiable: NotImplementedError for inputs that want a gradient.
    """
    for name, x in (("gamma", gamma), ("lmbda", lmbda)):
        if isinstance(x, Tensor) and x.numel() != 1:
            raise NotImplementedError(f"{name} has shape {list(x.shape)}, but only one number for all steps is offered")
    terminated = done if terminated is None else terminated
    given = {"next_state_value": next_state_value, "reward": reward, "done": done, "terminated": terminated}
    for name, x in given.items():
        if x.shape != state_value.shape:
            raise ValueError(f"{name} has shape {list(x.shape)}, expected {list(state_value.shape)} like state_value")
    wanted = [x for x in (state_value, gamma, lmbda, *given.values()) if isinstance(x, Tensor) and x.requires_grad]
    if torch.is_grad_enabled() and wanted:
        raise NotImplementedError("GAE here is not differentiable: give differentiable=False, or detached tensors")
    dtype = torch.promote_types(torch.promote_types(reward.dtype, state_value.dtype), next_state_value.dtype)
    shape = state_value.movedim(time_dim, -1).shape
    reward, value, following, cut = (
        x.movedim(time_dim, -1).reshape(-1, shape[-1])
        for x in (reward.to(dtype), state_value, torch.where(terminated, 0.0, next_state_value), done)
    )
    found = gae(reward, value, gamma=float(gamma), lam=float(lmbda), next_values=following, truncated=cut)
    advantage, value_target = (x.view(shape).movedim(-1, time_dim).to(state_value.dtype) for x in found)
    return advantage, value_target


def install() -> None:
    """torchrl's GAE and MultiAgentGAE call this module's function from now on. RuntimeError if theirs has changed."""
    if not patches:
        for name in ("generalized_advantage_estimate", "vec_generalized_advantage_estimate"):
            patches.replace(functional, name, generalized_advantage_estimate)


def uninstall() -> None:
    """torchrl's own functions again."""
    patches.undo()
