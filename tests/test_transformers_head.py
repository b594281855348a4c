"""Hidden states instead of logits, from causal LMs of transformers: tiny, of random weights, nothing is downloaded."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from ppo_kernels import PPOLossConfig, fused_linear_ppo_loss, fused_ppo_loss, logprobs_from_hidden  # noqa: E402
from ppo_kernels.integrations.transformers import patch_lm_head  # noqa: E402

VOCAB, HIDDEN, LENGTH = 97, 16, 6  # 97: no other axis is as long
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.5,  # logits of several units, that a cap bends
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB, "initializer_range": 0.5}
MODELS = {
    "Llama": ({}, 1.0, None),
    "Llama tied": ({"tie_word_embeddings": True}, 1.0, None),
    "Qwen2": ({}, 1.0, None),
    "Qwen3": ({"tie_word_embeddings": True}, 1.0, None),
    "GPT2": ({"bos_token_id": 1, "eos_token_id": 2}, 1.0, None),
    "Phi": ({}, 1.0, None),  # its head has a bias
    "Mixtral": ({"num_local_experts": 2}, 1.0, None),
    "Gemma2": ({"final_logit_softcapping": 3.0}, 1.0, 3.0),
    "Gemma3Text": ({"final_logit_softcapping": None}, 1.0, None),
    "Cohere": ({"logit_scale": 0.0625}, 0.0625, None),
    "Granite": ({"logits_scaling": 6.0}, 1 / 6.0, None),
    "HyperCLOVAX": ({"logits_scaling": 6.0}, 6.0, None),  # the same name as Granite's, and the inverse
}


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads only wait for each other on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


every_model = pytest.mark.parametrize("name", MODELS)


def build(name="Llama", kind=None, **options):
    name, settings = name.split()[0], MODELS[name][0]
    torch.manual_seed(0)
    config = getattr(transformers, name + "Config")(**(GPT2 if name == "GPT2" else SIZES) | settings | options)
    model = (kind or transformers.AutoModelForCausalLM.from_config)(config)
    return model.to(torch.get_default_device()).eval()


def batch(rows=2):
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(
        torch.get_default_device()
    )


def as_logits(hidden, head):
    """What the handle says: z = softcap * tanh(scale * logits / softcap)."""
    scale, softcap = head.options["logit_scale"], head.options["logit_softcap"]
    z = F.linear(hidden, head.weight, head.bias) * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


class Changed(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


# ---- what it returns ------------------------------------------------------------------------------------------------


@every_model
def test_the_hidden_states_are_those_that_give_the_logits(name):
    model, tokens = build(name), batch()
    expected = model(tokens).logits
    head = patch_lm_head(model)
    hidden = model(tokens).logits
    assert head.options == {"logit_softcap": MODELS[name][2], "logit_scale": MODELS[name][1], "vocab_size": None}
    assert hidden.shape == (2, LENGTH, HIDDEN)
    assert hidden.dtype == model.dtype
    assert expected.abs().max() > 0.5 * (MODELS[name][2] or 0.0)
    torch.testing.assert_close(as_logits(hidden, head), expected, rtol=1e-6, atol=1e-6)


@every_model
def test_log_probs_loss_and_every_gradient_are_those_of_the_logits(name):
    model, tokens = build(name), batch()
    generator = torch.Generator("cpu").manual_seed(2)
    old, advantages = torch.randn(2, 2, LENGTH - 1, generator=generator, device="cpu").to(tokens.device)
    config = PPOLossConfig(entropy_coef=0.1, temperature=0.8)
    logits = model(tokens).logits
    old = torch.log_softmax(logits.detach() / 0.8, -1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0] + 0.1 * old
    expected = fused_ppo_loss(logits, tokens, old, advantages, config=config, shift=True)
    expected.loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()

    head = patch_lm_head(model)
    config = PPOLossConfig(entropy_coef=0.1, temperature=0.8, **head.options)
    hidden = model(tokens).logits
    found = fused_linear_ppo_loss(
        hidden, head.weight, tokens, old, advantages, bias=head.bias, config=config, shift=True
    )
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == {name for name, x in model.named_parameters() if x.grad is not None}
    for parameter, x in model.named_parameters():
        if x.grad is not None:
            error = (x.grad - gradients[parameter]).norm()
            assert error <= 1e-4 * gradients[parameter].norm() + 1e-7, parameter

    scores = logprobs_from_hidden(
        hidden, head.weight, tokens, bias=head.bias, temperature=0.8, shift=True, **head.options
    )
    torch.testing.assert_close(scores, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_in_bf16_the_hidden_states_are_bf16_and_give_the_same_bits():
    model, tokens = build("Qwen3").to(torch.bfloat16), batch()
    expected = model(tokens).logits
    head = patch_lm_head(model)
    hidden = model(tokens).logits
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(as_logits(hidden, head), expected, rtol=0, atol=0)


class Shapes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.rows_of_logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.dim() == 3 and out.shape[-1] == VOCAB:
            self.rows_of_logits = max(self.rows_of_logits, out.numel() // VOCAB)
        return out


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Granite"])
def test_no_logits_are_computed(name):
    model, tokens = build(name), batch()
    with Shapes() as before:
        model(tokens)
    patch_lm_head(model)
    with Shapes() as after:
        model(tokens)
    assert (before.rows_of_logits, after.rows_of_logits) == (2 * LENGTH, 1)


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])])
def test_logits_to_keep_slices_the_hidden_states(keep):
    model, tokens = build(), batch()
    patch_lm_head(model)
    everything, kept = model(tokens).logits, model(tokens, logits_to_keep=keep).logits
    assert torch.equal(kept, everything[:, -keep:] if isinstance(keep, int) else everything[:, keep])


def test_the_other_outputs_stay():
    model, tokens = build("Mixtral"), batch()
    expected = model(tokens, output_router_logits=True, output_hidden_states=True)
    patch_lm_head(model)
    found = model(tokens, output_router_logits=True, output_hidden_states=True)
    assert found.keys() == expected.keys()
    assert torch.equal(found.aux_loss, expected.aux_loss)
    assert torch.equal(found.logits, found.hidden_states[-1])


def test_columns_that_a_model_cuts_off_are_padding():
    class Padded(Changed):
        def change(self, logits):
            return logits[..., : VOCAB - 7]

    assert patch_lm_head(build(kind=Padded)).options["vocab_size"] == VOCAB - 7


# ---- what stays, and what unpatch restores --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama", "Llama tied", "GPT2"])
def test_parameters_state_dict_and_ties_stay_and_unpatch_restores(name):
    model, tokens = build(name), batch()
    head = model.get_output_embeddings()
    before = [dict(vars(model)), dict(vars(head)), model.state_dict(), dict(model.named_parameters())]
    signature, expected = inspect.signature(model.forward), model(tokens, labels=tokens)
    with patch_lm_head(model) as patch:
        assert patch.weight is head.weight
        assert list(model.state_dict()) == list(before[2])
        assert all(x is before[3][n] for n, x in model.named_parameters())
        assert (patch.weight is model.get_input_embeddings().weight) == (name != "Llama")
        assert inspect.signature(model.forward) == signature
        assert model(tokens).logits.shape[-1] == HIDDEN
    assert vars(model) == before[0]
    assert vars(head) == before[1]
    found = model(tokens, labels=tokens)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    patch.unpatch()  # again: nothing


def test_patching_twice_gives_the_handle_there_is():
    model = build()
    assert patch_lm_head(model) is patch_lm_head(model)


def test_a_forward_that_was_replaced_since_is_not_lost():
    model = build()
    head = patch_lm_head(model)
    mine = model.forward
    model.forward = theirs = lambda *args, **kwargs: mine(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM.forward was replaced since"):
        head.unpatch()
    assert model.forward is theirs
    model.forward = mine
    head.unpatch()
    assert "forward" not in vars(model)


def test_a_copy_is_patched_and_independent():
    model, tokens = build("Llama tied"), batch()
    head = patch_lm_head(model)
    reference = copy.deepcopy(model)
    expected = reference(tokens).logits
    with torch.no_grad():
        head.weight.mul_(2.0)
    assert torch.equal(reference(tokens).logits, expected)
    assert not torch.equal(model(tokens).logits, expected)
    assert patch_lm_head(reference).weight is reference.lm_head.weight
    patch_lm_head(reference).unpatch()
    assert reference(tokens).logits.shape[-1] == VOCAB
    assert model(tokens).logits.shape[-1] == HIDDEN


def test_patching_draws_no_random_numbers_and_leaves_no_gradient():
    model = build("GPT2", resid_pdrop=0.5).train()
    before = torch.get_rng_state()
    patch_lm_head(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(x.grad is None for x in model.parameters())


def test_a_model_without_memory_yet_can_be_patched():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("Gemma2").config)
    assert patch_lm_head(model).options["logit_softcap"] == 3.0


# ---- generate and labels --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_generate_is_as_before(options):
    model, tokens = build("Gemma2"), batch()
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(tokens)} | options
    torch.manual_seed(3)
    expected = model.generate(tokens, **options)
    patch_lm_head(model)
    torch.manual_seed(3)
    assert torch.equal(model.generate(tokens, **options), expected)
    assert model(tokens).logits.shape[-1] == HIDDEN


def test_a_generate_that_fails_leaves_the_patch_on():
    model = build()
    patch_lm_head(model)
    with pytest.raises(ValueError, match="not_an_argument"):
        model.generate(batch(), not_an_argument=1)
    assert model(batch()).logits.shape[-1] == HIDDEN


def test_generation_that_outlives_the_call_is_refused():
    model = build()
    patch_lm_head(model)
    with pytest.raises(RuntimeError, match="unpatch"):
        model.init_continuous_batching()


def test_labels_are_refused_by_keyword_and_by_position():
    model, tokens = build(), batch()
    expected = model(tokens, labels=tokens).loss
    head = patch_lm_head(model)
    at = list(inspect.signature(model.forward).parameters).index("labels")
    for args, kwargs in ([(tokens,), {"labels": tokens}], [(tokens, *[None] * (at - 1), tokens), {}]):
        with pytest.raises(ValueError, match="hidden states"):
            model(*args, **kwargs)
    model(tokens, labels=None)
    with head.logits():
        assert torch.equal(model(tokens, labels=tokens).loss, expected)


# ---- what it refuses ------------------------------------------------------------------------------------------------


class OneColumnMore(Changed):
    def change(self, logits):
        logits[..., 5] += 1.0
        return logits


class Masked(Changed):
    def change(self, logits):
        logits[..., 3:9] = torch.finfo(logits.dtype).min
        return logits


class Learned(Changed):
    def change(self, logits):
        return logits * F.softplus(self.model.norm.weight[0]).cpu()


class Negative(Changed):
    def change(self, logits):
        return -logits


class SquareRoot(Changed):
    def change(self, logits):
        return logits.sign() * logits.abs().sqrt()


class Normalised(Changed):
    def change(self, logits):
        return logits.log_softmax(-1)


@pytest.mark.parametrize("kind", [OneColumnMore, Masked, Learned, Negative, SquareRoot, Normalised])
def test_logits_that_softcap_and_scale_cannot_express_are_refused(kind):
    model = build(kind=kind)
    with pytest.raises(NotImplementedError, match=f"{kind.__name__} does more to its logits than softcap"):
        patch_lm_head(model)
    assert "forward" not in vars(model)
    assert model(batch()).logits.shape[-1] == VOCAB


class Twice(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        self.lm_head(self.model(*args, **kwargs).last_hidden_state)
        return super().forward(*args, **kwargs)


class WithoutItsHead(transformers.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        output.logits = F.linear(output.last_hidden_state, self.lm_head.weight)
        return output


@pytest.mark.parametrize(("kind", "times"), [(Twice, 2), (WithoutItsHead, 0)])
def test_a_head_that_is_not_called_once_is_refused(kind, times):
    with pytest.raises(NotImplementedError, match=f"called its head {times} times"):
        patch_lm_head(build(kind=kind))


class LowRank(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", [LowRank, lambda *sizes: nn.Sequential(nn.Linear(*sizes))])
def test_a_head_that_is_more_than_its_weight_is_refused(kind):
    model = build()
    model.lm_head = kind(HIDDEN, VOCAB)
    with pytest.raises(TypeError, match=rf"{type(model.lm_head).__name__}, expected a plain torch.nn.Linear"):
        patch_lm_head(model)


def test_a_head_whose_forward_was_replaced_is_refused():
    model = build()
    model.lm_head.forward = torch.autocast("cpu", enabled=False)(model.lm_head.forward)
    with pytest.raises(TypeError, match="whose forward was replaced"):
        patch_lm_head(model)


def test_what_is_not_a_causal_lm_or_wraps_one_is_refused():
    model = build()
    for wrapped in (nn.DataParallel(model), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="patch the model inside"):
            patch_lm_head(wrapped)
    with pytest.raises(TypeError, match="LlamaModel has no output embeddings"):
        patch_lm_head(model.model)
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=VOCAB)
    with pytest.raises(TypeError, match="encoder-decoder"):
        patch_lm_head(transformers.T5ForConditionalGeneration(config))


def test_a_tuple_is_refused():
    model = build()
    patch_lm_head(model)
    with pytest.raises(TypeError, match="return_dict"):
        model(batch(), return_dict=False)


# ---- wrappers -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not dist.is_available(), reason="NOT RUN: this torch has no torch.distributed")
@pytest.mark.parametrize("order", ["patched, sharded", "sharded, patched"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the hidden states are a view, as any logits_to_keep is
def test_under_fsdp2_the_weight_is_whole_after_forward_and_gets_its_gradient(order):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    tokens = batch()

    def gradients(model, head):
        hidden = model(tokens).logits
        assert type(head.weight) in (nn.Parameter, torch.Tensor)
        advantages = torch.linspace(-1.0, 1.0, LENGTH - 1).expand(2, -1)
        config = PPOLossConfig(**head.options)
        fused_linear_ppo_loss(hidden, head.weight, tokens, None, advantages, config=config, shift=True).loss.backward()
        return [getattr(x.grad, "to_local", lambda x=x: x.grad)() for x in model.parameters()]

    plain, model = build("Gemma2"), build("Gemma2")
    expected = gradients(plain, patch_lm_head(plain))
    backend = "nccl" if tokens.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in order.split(", "):
            if step == "patched":
                head = patch_lm_head(model)
            else:
                for part in (*model.model.layers, model):
                    fsdp.fully_shard(part)
        for x, y in zip(gradients(model, head), expected, strict=True):
            torch.testing.assert_close(x, y)
    finally:
        dist.destroy_process_group()


def test_torch_compile_sees_no_break_and_follows_the_patch():
    torch._dynamo.reset()
    model, tokens = build(num_hidden_layers=0), batch()
    head = patch_lm_head(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens, use_cache=False).logits, model(tokens).logits)
    with head.logits():
        assert compiled(tokens, use_cache=False).logits.shape[-1] == VOCAB
    assert compiled(tokens, use_cache=False).logits.shape[-1] == HIDDEN
    with pytest.raises(TypeError, match="patch the model inside"):
        patch_lm_head(compiled)


def test_the_integration_needs_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it is an error
    spec = importlib.util.spec_from_file_location("fresh", inspect.getfile(patch_lm_head))
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_snippet_of_the_documentation_runs():
    page = (Path(__file__).parents[1] / "docs" / "integrations.md").read_text()
    section = page[page.index("## transformers:") :]
    exec(section.split("```python\n")[1].split("```")[0], {})
