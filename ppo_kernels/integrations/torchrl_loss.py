"""torchrl 0.14.1: ClipPPOLoss of discrete actions through the fused kernels.

    from ppo_kernels.integrations.torchrl_loss import FusedClipPPOLoss
    loss = FusedClipPPOLoss(actor, critic, ...)

It takes the arguments of torchrl.objectives.ClipPPOLoss and gives the same entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, dispatch
from torch import Tensor
from torch.distributions import Categorical
from torchrl.modules import OneHotCategorical
from torchrl.objectives import ClipPPOLoss

from ppo_kernels import PPOLossConfig, logprobs_from_logits, ppo_loss, ppo_value_loss

TESTED = ">=0.14.1,<=0.14.1"

AGGREGATIONS = {"mean": "token-mean", "sum": "token-sum", "none": "none"}


class FusedClipPPOLoss(ClipPPOLoss):  # type: ignore[misc]  # torchrl has no types here
    """ClipPPOLoss: its arguments, keys and results, for actors that give a Categorical or torchrl's OneHotCategorical.

    Log-prob and entropy come from one visit to the logits, the three losses from `ppo_loss`: a ratio that overflows
    gives no NaN gradient. Positions outside torchrl's loss masks may hold anything, but for normalize_advantage, which
    is torchrl's own. The diagnostics are over the positions that count; clip_fraction and value_clip_fraction count
    where clipping takes effect. Coefficients are buffers of torchrl: reading them waits for their device, once a call.

    Raises: NotImplementedError for loss_critic_type="l1", delay_actor, max_importance_ratio, one entropy_coeff per
        head, and another distribution; ValueError for an advantage or value that is not one number per action.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, asked in {
            f"loss_critic_type={self.loss_critic_type!r}": self.loss_critic_type not in ("l2", "smooth_l1"),
            "delay_actor": self.delay_actor,
            "max_importance_ratio": self.max_importance_ratio is not None,
            "entropy_coeff for each head": self._entropy_coeff_map is not None,
        }.items():
            if asked:
                raise NotImplementedError(f"{name} is not offered here, use torchrl's ClipPPOLoss")
        heads = [x for x in self.actor_network.modules() if isinstance(x, ProbabilisticTensorDictModule)]
        kinds = [(x.distribution_class, list(x.dist_keys)) for x in heads]
        if kinds not in ([(Categorical, ["logits"])], [(OneHotCategorical, ["logits"])]):
            raise NotImplementedError(
                f"the actor's distributions are {kinds}, expected one (OneHot)Categorical of logits"
            )
        self._logits_key, self._one_hot = heads[0].in_keys[0], heads[0].distribution_class is OneHotCategorical

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        tensordict, keys = tensordict.clone(False), self.tensor_keys
        missing = tensordict.get(keys.advantage, None) is None
        if missing:
            params = self._cached_critic_network_params_detached
            self.value_estimator(tensordict, params=params, target_params=self.target_critic_network_params)
        advantage = tensordict.get(keys.advantage)
        advantage = self._maybe_normalize_advantage(advantage, tensordict, update_norm=missing).squeeze(-1)
        logits, tokens = self._logits_and_tokens(tensordict)
        mask, config = self._mask(tensordict, tokens), self._config()
        logprobs, entropy = logprobs_from_logits(logits, tokens, mask, return_entropy=True)
        result = self._objective(logprobs, tensordict.get(keys.sample_log_prob), advantage, mask, config)
        if self.entropy_bonus:
            bonus, nothing = replace(config, entropy_coef=float(self.entropy_coeff)), torch.zeros_like(logprobs)
            result["loss_entropy"] = ppo_loss(nothing, None, nothing, mask, entropy=entropy, config=bonus).loss
            result["entropy"] = entropy.detach().sum() / mask.sum().clamp(min=1)
        if self._has_critic:
            result |= self._critic(tensordict.detach() if self.separate_losses else tensordict, mask, config)
        return TensorDict(result)

    def _config(self) -> PPOLossConfig:
        low, high = ("clip_epsilon_low", "clip_epsilon_high") if self._asymmetric_clip else ["clip_epsilon"] * 2
        smooth = self.loss_critic_type == "smooth_l1"
        return PPOLossConfig.torchrl(
            clip_low=float(getattr(self, low)),
            clip_high=float(getattr(self, high)),
            entropy_coef=0.0,
            vf_coef=float(self.critic_coeff) if self._has_critic else 0.0,
            value_loss_type="huber" if smooth else "mse",
            value_loss_scale=0.5 if smooth else 1.0,
            value_clip=float(self.clip_value) if self.clip_value else None,
            aggregation=AGGREGATIONS[self.reduction],
        )

    def _run(self, name: str, call: Callable[[Any], Any]) -> Any:
        """call(the network of that name) with the parameters that the loss holds for it."""
        network = getattr(self, name)
        if not self.functional:
            return call(network)
        with getattr(self, name + "_params").to_module(network, preserve_module_state=False):
            return call(network)

    def _logits_and_tokens(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The actor's own logits: those of a Categorical are normalised, which costs a pass and spreads NaN."""
        parameters = self._run("actor_network", lambda actor: actor.get_dist_params(tensordict))
        action = tensordict.get(self.tensor_keys.action)
        return parameters.get(self._logits_key), action.argmax(-1) if self._one_hot else action

    def _mask(self, tensordict: TensorDictBase, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool)
        for found in (tensordict.get(key, None) for key in self._loss_mask_keys()):
            mask = mask if found is None else mask & self._expand_loss_mask(found, mask)
        return mask

    def _objective(
        self, logprobs: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: PPOLossConfig
    ) -> dict[str, Tensor]:
        out = ppo_loss(logprobs, old, advantage, mask, config=config)
        mean, log_ratio = out.metrics.mean, torch.where(mask, logprobs.detach() - old, -torch.inf).flatten()
        log_size = 2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)
        log_size = torch.where(mask.any(), log_size, -torch.inf)
        return {
            "loss_objective": out.loss,
            "clip_fraction": mean("clip_fraction_low") + mean("clip_fraction_high"),
            "kl_approx": mean("approx_kl_k1"),
            "ESS": log_size.exp() / mask.sum().clamp(min=1),
            "max_ratio": log_ratio.amax().exp(),
            "mean_ratio": mean("ratio"),
        }

    def _critic(self, tensordict: TensorDictBase, mask: Tensor, config: PPOLossConfig) -> dict[str, Tensor]:
        keys = self.tensor_keys
        returns, old_values = tensordict.get(keys.value_target).squeeze(-1), None
        if self.clip_value:
            old_values = tensordict.get(keys.value).squeeze(-1)
        values = self._run("critic_network", lambda critic: critic(tensordict)).get(keys.value).squeeze(-1)
        out = ppo_value_loss(values, returns, mask, old_values=old_values, config=config)
        result = {"loss_critic": out.loss}
        if self.clip_value:
            result["value_clip_fraction"] = out.metrics.mean("value_clip_fraction")
        if self.log_explained_variance:
            error, total = (_variance(returns - x, mask) for x in (values.detach(), 0))
            result["explained_variance"] = 1 - error / (total + torch.finfo(returns.dtype).eps)
        return result


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    """Of the positions that count; nothing is read back from the device."""
    count = mask.sum().clamp(min=1)
    off = torch.where(mask, x - torch.where(mask, x, 0.0).sum() / count, 0.0)
    return off.square().sum() / count
