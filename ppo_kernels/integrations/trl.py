"""TRL's GRPOTrainer on this library's kernels; tested with trl 1.16.0, transformers 5.24 and peft 0.21.

    class Trainer(GRPOMixin, GRPOTrainer): ...

GRPOTrainer 1.16 asks the model for log-probs, not logits: model(..., labels=labels, fused_lm_head=True). The mixin
answers that call inside the model's forward, where the logits of the completion still have the dtype that the head
gave them: log-probs and entropies by `logprobs_from_logits`, and in training the loss itself by one `fused_ppo_loss`
that leaves its gradient in the logits' memory. Losses, gradients and metrics are TRL's, for every loss_type and option.

What that loss does not express is TRL's own `_compute_loss` on these log-probs, which costs one more visit to the
logits and memory for their gradient: the entropy bonus (entropy_coef, use_adaptive_entropy), delta <= 1, and trainers
derived from GRPOTrainer that bring a `_compute_loss` of their own.

Memory: one buffer [B, T + 1, V] of logits in the head's dtype per micro-batch. TRL's own head never holds it; it
computes the logits twice instead.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import ModelOutput
from trl.trainer import grpo_trainer

from ppo_kernels import PPOLossOutput, fused_ppo_loss, logprobs_from_logits
from ppo_kernels.integrations.trl_loss import (
    CLIPPED,
    GLOBAL_TOKEN_MEAN,
    FusedLinearGRPOLoss,
    clipped,
    kl_divergence,
    log_ratios,
    loss_config,
    policy_ratio,
    vespo_weights,
)

__all__ = ["TESTED", "FusedLinearGRPOLoss", "GRPOMixin"]

TESTED = "trl 1.16.0"

Base: Any = grpo_trainer.GRPOTrainer if TYPE_CHECKING else object


@dataclass
class ScoredOutput(ModelOutput):  # type: ignore[misc]
    """What the model returns: per token [B, rows], 0 where the label is -100; `loss` if one was asked for."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    aux_loss: Tensor | None = None


def score_in_forward(model: Any, temperature: float) -> None:
    """Replace the answer of `model` to forward(..., labels=labels, fused_lm_head=True); any other call is as before.

    Further arguments: logits_to_keep; want_entropy; ppo_loss, a function of logits [B, rows + 1, V] and their labels
    [B, rows + 1], whose row t scores label t + 1.
    """
    inner = model.forward
    keeps = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @functools.wraps(type(model).forward)  # generate() looks at the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop("fused_lm_head", False):
            return inner(*args, **kwargs)
        labels, ppo_loss = kwargs.pop("labels"), kwargs.pop("ppo_loss", None)
        want_entropy, keep = kwargs.pop("want_entropy", True), kwargs.pop("logits_to_keep", 0)
        output = inner(*args, **kwargs, **({"logits_to_keep": keep} if keeps else {}), use_cache=False)
        logits, aux_loss = output.logits, getattr(output, "aux_loss", None)
        labels = labels[:, -logits.shape[1] :].to(logits.device)
        if ppo_loss is not None:
            found = ppo_loss(logits, labels)
            return ScoredOutput(found.loss, found.logprobs, found.entropy, aux_loss)
        options = {"temperature": temperature, "shift": True, "return_entropy": want_entropy}
        scores: Any = logprobs_from_logits(logits, labels, labels[:, 1:] != -100, **options)
        return ScoredOutput(None, *(scores if want_entropy else (scores, None)), aux_loss)

    model.forward = types.MethodType(forward, model)


class GRPOMixin(Base):  # type: ignore[misc]
    """Put it before GRPOTrainer, or a trainer derived from it, in the list of bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stock = grpo_trainer.GRPOTrainer
        scorer = getattr(super()._get_per_token_logps_and_entropies, "__func__", None)
        if not hasattr(grpo_trainer, "add_fused_lm_head") or scorer is not stock._get_per_token_logps_and_entropies:
            raise NotImplementedError(
                f"{type(self).__name__} computes log-probs in a way that GRPOMixin does not know: it was tested with "
                f"{TESTED}, whose GRPOTrainer calls model(..., fused_lm_head=True)"
            )
        self._own_loss = super()._compute_loss.__func__ is not stock._compute_loss
        for model in (self.model, self.ref_model):
            if model is not None:
                model = self.accelerator.unwrap_model(model)
                model = model.get_base_model() if hasattr(model, "get_base_model") else model
                score_in_forward(model, self.temperature)
                if self.args.cast_lm_head_to_fp32:  # TRL's cast alone would be undone by autocast
                    model.lm_head.forward = torch.autocast(model.device.type, enabled=False)(model.lm_head.forward)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        score = super()._get_per_token_logps_and_entropies
        given = inspect.signature(score).bind(model, *args, **kwargs).arguments
        options = {"logits_to_keep": given["logits_to_keep"] + 1, "want_entropy": given.get("compute_entropy", False)}
        return score(functools.partial(model, **options), *args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        small_delta = self.loss_type in CLIPPED and self.args.delta is not None and self.args.delta <= 1
        if self._own_loss or self._entropy_bonus_enabled or small_delta:
            return super()._compute_loss(model, inputs)  # type: ignore[no-any-return]
        mask = inputs["completion_mask"] != 0  # [B, T], like every per-token input
        if inputs.get("tool_mask") is not None:
            mask = mask & (inputs["tool_mask"] != 0)
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages  # [B, 1] or [B, T]
        length = mask.shape[1]
        ppo_loss = functools.partial(self._ppo_loss, inputs, mask, advantages)
        outputs: list[Any] = []

        def score(**kwargs: Any) -> Any:
            outputs.append(model(**kwargs, logits_to_keep=length + 1, ppo_loss=ppo_loss))
            return outputs[-1]

        prepare = super()._get_per_token_logps_and_entropies  # TRL makes the model's arguments, images and all
        extra = {name: inputs[name] for name in inspect.signature(prepare).parameters if name in inputs}
        parts = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        prepare(score, *parts, length, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled, **extra)
        loss, aux_loss = outputs[0].loss, outputs[0].aux_loss
        logprobs, entropy = outputs[0].log_probs[:, -length:], outputs[0].entropy[:, -length:]
        self._log_loss_metrics(inputs, mask, advantages, logprobs, entropy)
        if self.aux_loss_enabled:
            self._logged["aux_loss"].append(self.accelerator.gather_for_metrics(aux_loss.detach()).mean().item())
            loss = loss + self.router_aux_loss_coef * aux_loss / self._accumulated
        return loss  # type: ignore[no-any-return]

    @property
    def _logged(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]  # type: ignore[no-any-return]

    @property
    def _accumulated(self) -> int:
        """Over how many micro-batches the loss is accumulated."""
        return self.current_gradient_accumulation_steps if self.model.training else 1

    def _ppo_loss(
        self, inputs: dict[str, Any], mask: Tensor, advantages: Tensor, logits: Tensor, tokens: Tensor
    ) -> PPOLossOutput:
        length, rows, temperature = mask.shape[1], logits.shape[1] - 1, self.temperature

        def wide(x: Tensor | None) -> Any:
            """[B, T] or [B, 1] -> [B, rows]: a model without logits_to_keep scores the prompt too."""
            return x if x is None else F.pad(x.expand(mask.shape), (rows - length, 0))

        scores = None
        if self.loss_type == "vespo" or self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None:
            options: Any = {"temperature": temperature, "shift": True, "return_entropy": True}
            with torch.no_grad():  # the same bits as in the loss
                scores = [x[:, -length:] for x in logprobs_from_logits(logits, tokens, wide(mask), **options)]
        normalizer, loss_scale = None, 1 / self._accumulated
        if self.loss_type in GLOBAL_TOKEN_MEAN:  # the count of the generation batch, rescaled to one update
            normalizer, loss_scale = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes, 1.0
            if self.model.training:
                normalizer = normalizer * self._accumulated / self.args.steps_per_generation
        return fused_ppo_loss(
            logits,
            tokens,
            wide(inputs.get("old_per_token_logps")),
            wide(advantages),
            wide(mask),
            config=loss_config(
                self.loss_type,
                self.importance_sampling_level,
                self.epsilon_low,
                self.epsilon_high,
                self.args,
                kl_coef=self.beta,
                temperature=temperature,
            ),
            ref_logprobs=wide(inputs["ref_per_token_logps"]) if self.beta != 0.0 else None,
            rollout_is_weights=wide(self._policy_weights(inputs, mask, advantages, scores)),
            normalizer=normalizer,
            loss_scale=loss_scale,
            shift=True,
            inplace_grad=True,
        )

    def _policy_weights(
        self, inputs: dict[str, Any], mask: Tensor, advantages: Tensor, scores: list[Tensor] | None
    ) -> Tensor | None:
        """The constant factors of the policy loss, not of the KL term: [B, T] or [B, 1]; scores: log-prob, entropy."""
        weights = []
        old_logprobs = inputs.get("old_per_token_logps")
        if scores is not None:
            logprobs, entropy = scores
            if self.loss_type == "vespo":
                log_ratio = log_ratios(logprobs, old_logprobs, mask)
                is_ratio = inputs.get("importance_sampling_ratio")
                weights.append(vespo_weights(log_ratio, advantages, is_ratio, self.args))
            if self.off_policy_mask_threshold is not None:
                sampled = inputs.get("sampling_per_token_logps", logprobs if old_logprobs is None else old_logprobs)
                sampled = torch.where(mask, sampled, 0.0)
                threshold = self.off_policy_mask_threshold
                weights.append(self.get_off_policy_mask(advantages, logprobs, sampled, mask, threshold))
            if self.top_entropy_quantile < 1.0:
                weights.append(self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile))
        if self.use_vllm and self.vllm_importance_sampling_correction and self.loss_type != "vespo":
            weights.append(inputs["importance_sampling_ratio"])
        return functools.reduce(torch.mul, [x.float() for x in weights]) if weights else None

    @torch.no_grad()
    def _log_loss_metrics(
        self, inputs: dict[str, Any], mask: Tensor, advantages: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> None:
        """TRL's metrics of the loss; all means in one reduction over the processes."""
        log_ratio = log_ratios(logprobs, inputs.get("old_per_token_logps"), mask)
        ratio = policy_ratio(log_ratio, mask, self.importance_sampling_level)
        logged = {"entropy": entropy}
        if self.beta != 0.0:
            kl = kl_divergence(logprobs, inputs["ref_per_token_logps"], mask)
            logged["kl"] = kl * ratio if self.args.use_bias_correction_kl else kl
        delta = self.args.delta if self.loss_type in CLIPPED else None
        capped = ratio if delta is None else ratio.clamp(max=delta)
        low, high = clipped(capped, advantages, self.epsilon_low, self.epsilon_high, self.loss_type)
        if self.loss_type == "cispo":
            logged["cispo_clip_ratio"] = high
        elif self.loss_type == "vespo":
            is_ratio = inputs.get("importance_sampling_ratio")
            logged["vespo/phi_seq_mean"] = vespo_weights(log_ratio, advantages, is_ratio, self.args)
        elif self.loss_type in CLIPPED:
            logged |= {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
            for name, x, extreme in (("low_min", low, grpo_trainer.nanmin), ("high_max", high, grpo_trainer.nanmax)):
                of_sequences = x.squeeze(1) if x.shape[1] == 1 else (x * mask).sum(-1) / mask.sum(-1)
                self._logged[f"clip_ratio/{name}"].append(extreme(self.accelerator.gather(of_sequences)).item())
        counted = [mask if x.shape[1] > 1 else torch.ones_like(x, dtype=torch.bool) for x in logged.values()]
        sums = [torch.stack([(x * m).sum(), m.sum()]) for x, m in zip(logged.values(), counted, strict=True)]
        totals = self.accelerator.reduce(torch.stack(sums), reduction="sum")
        for name, mean in zip(logged, (totals[:, 0] / totals[:, 1].clamp(min=1.0)).tolist(), strict=True):
            self._logged[name].append(mean)
