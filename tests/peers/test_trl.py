"""GRPOTrainer._compute_loss of TRL 1.16.0 and of GRPOMixin on the same inputs: loss, gradients of all weights, metrics.

The inputs are drawn, not generated: they reach what a training without vLLM and tools does not.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import trl_setup
from draws import FP32, close
from peft import PromptTuningConfig
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2ForCausalLM,
)
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl_setup import EOS, PAD, Ours, apart

from ppo_kernels import fused_ppo_loss
from ppo_kernels.integrations import trl as integration
from ppo_kernels.integrations.trl import GRPOMixin

B, P, T = 5, 6, 9
LOSS_TYPES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
LEVELS = ("token", "sequence")
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def processing_class():
    return trl_setup.tokenizer()


@pytest.fixture(scope="module")
def fresh_pair(tmp_path_factory, processing_class):
    """(stock, ours), of one and the same model unless `cls` says otherwise."""

    def make(model=None, classes=(GRPOTrainer, Ours), **options):
        if model is None:
            torch.manual_seed(0)
            model = Qwen2ForCausalLM(trl_setup.config(len(processing_class)))
        path = tmp_path_factory.mktemp("trainer")
        trainers = []
        for cls in classes:
            trainers.append(trl_setup.make(cls, copy.deepcopy(model), processing_class, path, **options))
            trainers[-1].model.train()
        return trainers

    return make


@pytest.fixture(scope="module")
def shared_pair(fresh_pair):
    return fresh_pair()


@pytest.fixture
def pair(shared_pair):
    """The trainers of `shared_pair` with whatever the test sets on them undone after it."""
    before = [(dict(vars(x)), dict(vars(x.args))) for x in shared_pair]
    yield shared_pair
    for trainer, (own, args) in zip(shared_pair, before, strict=True):
        vars(trainer).clear()
        vars(trainer).update(own)
        vars(trainer.args).clear()
        vars(trainer.args).update(args)
        trainer.model.train()


def draw(trainer, seed=0, spread=0.4):
    """Inputs of _compute_loss: left-padded prompts, completions of 0 to T tokens, log-ratios of deviation `spread`."""
    torch.manual_seed(seed)
    lengths = torch.tensor([T, 3, 0, 6, 1])
    completion_mask = (torch.arange(T) < lengths[:, None]).long()
    prompt_mask = (torch.arange(P) >= torch.tensor([[0], [2], [4], [1], [5]])).long()
    vocabulary = trainer.model.config.vocab_size
    completion_ids = torch.randint(EOS, vocabulary, (B, T)).masked_fill(completion_mask == 0, PAD)
    inputs = {
        "prompt_ids": torch.randint(EOS, vocabulary, (B, P)).masked_fill(prompt_mask == 0, PAD),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.3, -0.7, 0.4, -1.9, 0.0]),
        "num_items_in_batch": torch.tensor(57),
    }
    ids, masks = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    with torch.no_grad():
        logprobs, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, masks, T)

    def near(deviation):
        return (logprobs + deviation * torch.randn(B, T)) * completion_mask

    inputs |= {"old_per_token_logps": near(spread), "ref_per_token_logps": near(0.8)}
    return inputs


def clone(inputs):
    return {name: x.clone() for name, x in inputs.items()}


def compute(trainer, inputs):
    """(loss, {weight: gradient}, metrics)"""
    trainer._metrics = {mode: type(trainer._metrics[mode])(list) for mode in ("train", "eval")}
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer._compute_loss(trainer.model, clone(inputs))
    if loss.requires_grad:
        loss.backward()
    grads = {name: x.grad.clone() for name, x in trainer.model.named_parameters() if x.grad is not None}
    return loss.item(), grads, {f"{m}/{k}": v for m, x in trainer._metrics.items() for k, v in x.items()}


def assert_same(trainers, inputs):
    (want, want_grads, want_metrics), (got, got_grads, got_metrics) = (compute(x, inputs) for x in trainers)
    close(got, want, what="loss")
    assert apart(got_grads, want_grads) <= FP32
    assert got_metrics.keys() == want_metrics.keys()
    for name, values in want_metrics.items():
        close(got_metrics[name], values, what=name)
    return got


def options_on(trainers, inputs, *names):
    """Set what TRL's constructor would set, and add what its rollout would add to the inputs."""
    own, args = {}, {}
    for name in names:
        if name == "on_policy":
            del inputs["old_per_token_logps"]
        elif name == "beta":
            own["beta"] = 0.2
        elif name == "bias_kl":
            own["beta"], args["use_bias_correction_kl"] = 0.2, True
        elif name == "delta":
            args["delta"] = 1.5
        elif name == "delta_below_the_bound":
            args["delta"] = 1.1
        elif name == "delta_below_one":
            args["delta"] = 0.9
        elif name in ("vllm_token", "vllm_sequence"):
            own |= {"use_vllm": True, "vllm_importance_sampling_correction": True}
            ratio = torch.tensor([1.4, 0.6, 1.0, 0.0, 2.5])[:, None]
            if name == "vllm_token":
                ratio = (0.5 * torch.randn(B, T) * inputs["completion_mask"]).exp() * (torch.rand(B, T) > 0.2)
            inputs["importance_sampling_ratio"] = ratio
        elif name == "tools":
            inputs["tool_mask"] = (torch.rand(B, T) > 0.3).long()
        elif name == "off_policy":
            own["off_policy_mask_threshold"] = 0.1
        elif name == "off_policy_sampler":
            own["off_policy_mask_threshold"] = 0.1
            inputs["sampling_per_token_logps"] = inputs["ref_per_token_logps"] + 0.5
        elif name == "top_entropy":
            own["top_entropy_quantile"] = 0.4
        elif name == "advantages_per_token":
            inputs["advantages"] = torch.randn(B, T)
        elif name == "accumulation":
            own["current_gradient_accumulation_steps"], args["steps_per_generation"] = 3, 6
        elif name == "eval":
            for trainer in trainers:
                trainer.model.eval()
        elif name == "all_masked":
            inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
        else:
            raise ValueError(name)
    for trainer in trainers:
        vars(trainer).update(own)
        vars(trainer.args).update(args)


OPTIONS = [
    (),
    ("on_policy",),
    ("on_policy", "bias_kl"),
    ("beta",),
    ("bias_kl", "delta"),
    ("delta",),
    ("delta_below_the_bound",),
    ("delta_below_one",),
    ("vllm_token", "beta"),
    ("vllm_sequence",),
    ("tools", "beta"),
    ("off_policy",),
    ("off_policy_sampler", "advantages_per_token"),
    ("top_entropy", "beta"),
    ("advantages_per_token", "tools"),
    ("accumulation",),
    ("eval", "beta"),
    ("all_masked", "beta"),
    ("vllm_token", "tools", "off_policy_sampler", "top_entropy", "bias_kl", "accumulation", "delta"),
]


@pytest.mark.parametrize("names", OPTIONS, ids=lambda names: "-".join(names) or "plain")
@pytest.mark.parametrize(("loss_type", "level"), itertools.product(LOSS_TYPES, LEVELS))
def test_every_loss_and_option(loss_type, level, names, pair, monkeypatch):
    calls = []
    monkeypatch.setattr(integration, "fused_ppo_loss", lambda *a, **k: calls.append(1) or fused_ppo_loss(*a, **k))
    inputs = draw(pair[0])
    high = 1.3 if loss_type == "cispo" else 0.28
    for trainer in pair:
        trainer.loss_type, trainer.importance_sampling_level, trainer.epsilon_high = loss_type, level, high
    options_on(pair, inputs, *names)
    assert_same(pair, inputs)
    clips = loss_type not in ("cispo", "sapo", "vespo")
    assert bool(calls) != (clips and "delta_below_one" in names)  # that one is TRL's own loss on our log-probs


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("names", [(), ("beta", "tools"), ("top_entropy", "accumulation")], ids=str)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_entropy_bonus(loss_type, names, adaptive, pair):
    """Micro-batches of two updates: the controller moves at the end of each."""
    inputs = draw(pair[0])
    options_on(pair, inputs, *names)
    for trainer in pair:
        trainer.loss_type = loss_type
        trainer.entropy_coef, trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy = 0.1, True, adaptive
        trainer.args.entropy_target, trainer.args.entropy_coef_delta = 5.0, 0.03
    for synchronised in (False, True, False, True):
        for trainer in pair:
            trainer.accelerator.gradient_state._set_sync_gradients(synchronised)
        assert_same(pair, inputs)
        assert pair[0].entropy_coef == pair[1].entropy_coef
    assert (pair[1].entropy_coef != 0.1) == adaptive


def test_log_probs_of_the_rollout_are_those_of_the_loss(pair):
    """The ratio before any update is exactly 1: what is scored in batches of 2 has the bits of the whole."""
    _, ours = pair
    inputs = draw(ours)
    ids, masks = (torch.cat([inputs[f"prompt_{x}"], inputs[f"completion_{x}"]], 1) for x in ("ids", "mask"))
    whole = ours._get_per_token_logps_and_entropies(ours.model, ids, masks, T, compute_entropy=True)
    assert len(whole) == 3
    assert whole[1].shape == whole[0].shape == (B, T)
    inputs["old_per_token_logps"] = whole[0].detach()
    ours.beta = 0.1
    inputs["ref_per_token_logps"] = whole[0].detach()
    _, _, metrics = compute(ours, inputs)
    assert metrics["train/kl"] == [0.0]
    assert metrics["train/clip_ratio/region_mean"] == [0.0]
    parts = ours._get_per_token_logps_and_entropies(ours.model, ids, masks, T, batch_size=2)
    assert parts[1] is None
    torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=FP32)  # the model's own products depend on the batch
    assert torch.equal(parts[0] == 0, masks[:, P:] == 0)


class ScoresThePromptToo(Qwen2ForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def test_a_model_without_logits_to_keep(fresh_pair, processing_class):
    torch.manual_seed(0)
    trainers = fresh_pair(ScoresThePromptToo(trl_setup.config(len(processing_class))))
    inputs = draw(trainers[0])
    options_on(trainers, inputs, "bias_kl", "top_entropy", "vllm_sequence")
    assert_same(trainers, inputs)


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@pytest.mark.parametrize(
    ("model_class", "config_class", "options"),
    [
        (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 3.0, "head_dim": 16}),
        (CohereForCausalLM, CohereConfig, {"logit_scale": 0.3}),
        (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0}),
    ],
)
def test_logits_that_the_model_scales_or_caps_after_the_head(
    model_class, config_class, options, fresh_pair, processing_class
):
    """Its operations must survive that the gradient is written over their result."""
    torch.manual_seed(0)
    model = model_class(config_class(vocab_size=len(processing_class), **TINY, **options))
    trainers = fresh_pair(model)
    inputs = draw(trainers[0])
    options_on(trainers, inputs, "beta")
    assert_same(trainers, inputs)


def test_load_balancing_loss_of_a_mixture_of_experts(fresh_pair, processing_class):
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=len(processing_class), num_local_experts=4, **TINY)
    trainers = fresh_pair(MixtralForCausalLM(config), router_aux_loss_coef=0.3)
    assert trainers[1].aux_loss_enabled
    assert_same(trainers, draw(trainers[0]))


def test_prompt_tuning_puts_tokens_before_the_prompt(fresh_pair):
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trainers = fresh_pair(peft_config=adapter)
    trainers[1].model.load_state_dict(trainers[0].model.state_dict())
    assert_same(trainers, draw(trainers[0]))


def test_a_trainer_with_its_own_loss_keeps_it(fresh_pair):
    class OursOfGMPO(GRPOMixin, GMPOTrainer):
        pass

    trainers = fresh_pair(classes=(GMPOTrainer, OursOfGMPO))
    assert_same(trainers, draw(trainers[0]))


def test_a_trainer_that_scores_in_its_own_way_is_refused(fresh_pair):
    class Scorer(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    class OursOfScorer(GRPOMixin, Scorer):
        pass

    with pytest.raises(NotImplementedError, match=r"OursOfScorer .* trl 1\.16"):
        fresh_pair(classes=(OursOfScorer,))


# ---------------------------------------------------------------------------------------------------------------------
# Precision
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bf16_weights", "autocast", "head_in_fp32"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_bf16_is_no_further_from_fp32_than_stock(loss_type, how, fresh_pair, processing_class):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(trl_setup.config(len(processing_class))).bfloat16()
    (exact,) = fresh_pair(copy.deepcopy(model).float(), classes=(GRPOTrainer,), loss_type=loss_type)
    options = {"bf16": how == "autocast", "cast_lm_head_to_fp32": how == "head_in_fp32", "loss_type": loss_type}
    trainers = fresh_pair(model.float() if how == "autocast" else model, **options)
    squares = [0.0, 0.0]
    for seed in range(10):  # one draw alone favours one of them by up to a fifth
        inputs = draw(exact, seed)
        options_on([exact, *trainers], inputs, "beta")
        want, want_grads, _ = compute(exact, inputs)
        (stock, stock_grads, _), (ours, ours_grads, _) = (compute(x, inputs) for x in trainers)
        assert abs(ours - want) <= abs(stock - want) + 1e-5
        for i, grads in enumerate((stock_grads, ours_grads)):
            squares[i] += apart(grads, want_grads) ** 2
    assert math.sqrt(squares[1]) <= 1.1 * math.sqrt(squares[0])


# ---------------------------------------------------------------------------------------------------------------------
# Where TRL's own answer is not a number
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old_per_token_logps", "ref_per_token_logps"])
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_masked_token_may_hold_anything(name, value, pair):
    """TRL multiplies by the mask."""
    stock, ours = pair
    inputs = draw(stock)
    options_on(pair, inputs, "beta")
    want, *_ = compute(ours, inputs)
    inputs[name] = inputs[name].masked_fill(inputs["completion_mask"] == 0, value)
    got, grads, _ = compute(ours, inputs)
    assert got == want
    assert all(x.isfinite().all() for x in grads.values())
    assert math.isnan(compute(stock, inputs)[0])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_log_prob_that_the_sampler_does_not_know_says_nothing_of_the_policy(value, pair):
    inputs = draw(pair[0])
    options_on(pair, inputs, "off_policy_sampler")
    want = assert_same(pair, inputs)
    inputs["sampling_per_token_logps"][inputs["completion_mask"] == 0] = value
    assert assert_same(pair, inputs) == want
    inputs["sampling_per_token_logps"][3, 2] = NAN
    assert_same(pair, inputs)


def test_an_overflowing_ratio_that_is_clipped_has_gradient_zero(pair):
    """log ratio 100, advantage > 0: the loss is that of the bound, in both; TRL's gradient is 0 * inf."""
    stock, ours = pair
    inputs = draw(stock)
    inputs["advantages"] = torch.full((B,), 0.5)
    inputs["old_per_token_logps"] = inputs["old_per_token_logps"] - 100
    want, want_grads, _ = compute(stock, inputs)
    got, grads, _ = compute(ours, inputs)
    close(got, want)
    assert all(not x.any() for x in grads.values())
    assert any(x.isnan().any() for x in want_grads.values())
