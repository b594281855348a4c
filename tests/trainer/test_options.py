"""Whole runs with what a configuration can switch on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from ppo_kernels.trainer import cli, train
from ppo_kernels.trainer.settings import load

from .rank_runs import rows

Row = dict[str, Any]


def run(base: dict[str, Any], *overrides: str) -> tuple[Path, list[Row]]:
    config = load(list(overrides), base)
    assert train(config) == 0
    folder = Path(config.out) / config.name
    return folder, rows(folder)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final" / "model.safetensors")


def test_lora_trains_the_adapter_alone_and_its_reference_is_the_base(
    quick: dict[str, Any], model_directory: Path
) -> None:
    pytest.importorskip("peft")
    folder, found = run(quick, "name=lora", "model.lora_rank=4", "optim.actor_lr=1e-2")
    assert found[0]["objective/kl"] == pytest.approx(0, abs=1e-6)
    assert abs(found[-1]["objective/kl"]) > 1e-4
    before, after = load_file(model_directory / "actor" / "model.safetensors"), final(folder)
    assert before.keys() == after.keys(), "the adapter is merged: a plain directory"
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("proj" in name for name in changed)
    AutoModelForCausalLM.from_pretrained(folder / "final")

    shutil.copytree(folder, folder.with_name("again"))
    shutil.rmtree(folder.with_name("again") / "checkpoints" / "step_000004")
    again = load([], yaml.safe_load((folder / "config.yaml").read_text()))
    assert train(again, resume=folder.with_name("again")) == 0
    assert rows(folder.with_name("again")) == found
    assert all(torch.equal(value, after[name]) for name, value in final(folder.with_name("again")).items())


def test_gradient_checkpointing_changes_nothing(quick: dict[str, Any]) -> None:
    _, plain = run(quick, "name=plain")
    _, less = run(quick, "name=less", "train.gradient_checkpointing=true")
    for one, other in zip(plain, less, strict=True):
        assert {k: v for k, v in one.items() if k != "stage"} == pytest.approx(
            {k: v for k, v in other.items() if k != "stage"}, rel=1e-6, abs=1e-9
        )


def test_bf16_computes_alike_in_rollout_and_training(quick: dict[str, Any]) -> None:
    folder, found = run(quick, "name=bf16", "train.bf16=true", "ppo.microbatch=8", "ppo.minibatches=1")
    _, fp32 = run(quick, "name=fp32", "ppo.microbatch=8", "ppo.minibatches=1")
    for one in found:
        assert one["val/first_logprob_drift"] < 2e-2
    assert found[0]["grad_norm/actor"] != fp32[0]["grad_norm/actor"]
    assert found[0]["grad_norm/actor"] == pytest.approx(fp32[0]["grad_norm/actor"], rel=0.02)
    assert all(value.dtype == torch.float32 for value in final(folder).values())


def test_rewards_are_mixed_by_their_weights(quick: dict[str, Any], model_directory: Path) -> None:
    options = [f"reward.model={model_directory / 'reward'}", "reward.model_weight=0.5"]
    scores = []
    for name, weight in (("none", 0.0), ("some", 2.0)):
        _, found = run(quick, f"name={name}", *options, f"reward.function_weight={weight}", "train.updates=1")
        scores.append(found[0]["objective/scores"])
    _, alone = run(quick, "name=alone", "train.updates=1")
    assert scores[1] - scores[0] == pytest.approx(2 * alone[0]["objective/scores"], abs=1e-5)


def test_the_critic_may_come_from_three_places(quick: dict[str, Any], model_directory: Path) -> None:
    reward = str(model_directory / "reward")
    first = {}
    for name, options in {
        "actor": ["model.critic=actor"],
        "reward": ["model.critic=reward", f"reward.model={reward}", "reward.model_weight=0"],
        "path": [f"model.critic={reward}"],
    }.items():
        folder, found = run(quick, f"name={name}", "train.updates=1", *options)
        first[name] = found[0]["loss/value_first"]
        assert AutoModelForSequenceClassification.from_pretrained(folder / "final" / "critic").config.num_labels == 1
    assert first["reward"] == first["path"] != first["actor"]


def test_several_samples_of_one_prompt_differ(quick: dict[str, Any]) -> None:
    _, found = run(quick, "name=many", "rollout.prompts=2", "rollout.samples_per_prompt=4", "train.updates=1")
    assert found[0]["episode"] == 8
    assert found[0]["objective/scores_std"] > 0


def test_what_adapts_is_logged_and_bounded(quick: dict[str, Any]) -> None:
    options = ["ppo.clip_target_kl=1e-9", "kl.target=0.01", "kl.horizon=10", "reward.normalize=running"]
    _, found = run(quick, "name=adapt", *options, "ppo.clip_bounds=[0.1,0.4]")
    assert [row["policy/clip_range"] for row in found] == pytest.approx([0.2, 0.2 / 1.5, 0.1, 0.1])
    assert len({row["objective/kl_coef"] for row in found}) == 4


def test_nothing_adapts_while_the_actor_does_not_move(quick: dict[str, Any]) -> None:
    options = ["ppo.clip_target_kl=0.01", "kl.target=1", "kl.horizon=10", "optim.critic_warmup=3"]
    _, found = run(quick, "name=warm", *options)
    assert {(row["policy/clip_range"], row["objective/kl_coef"]) for row in found} == {(0.2, 0.04)}


def test_scores_are_normalised_as_the_untrained_actors_clipped_ones(quick: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "far.py"
    file.write_text("def score(samples): return [1000.0 if i == 0 else i % 2 for i, _ in enumerate(samples)]\n")
    options = [f"reward.function={file}:score", "reward.normalize=start", "reward.clip=1", "kl.coef=0"]
    folder, found = run(quick, "name=start", *options, "train.updates=1")
    clipped = torch.tensor(json.loads((folder / "before.json").read_text())["train"]["scores"]).clamp(-1, 1)
    scores = torch.tensor([1.0, 1, 0, 1, 0, 1, 0, 1])  # of the 8 samples, the first cut to 1
    expected = ((scores - clipped.mean()) / clipped.std(unbiased=False)).mean()
    assert found[0]["objective/rlhf_reward"] == pytest.approx(float(expected), abs=1e-5)


def test_a_model_with_dropout_and_a_padding_id_of_its_own_trains(quick: dict[str, Any], tmp_path: Path) -> None:
    """A stock GPT-2, and a padding token that was added to the tokenizer alone."""
    tokenizer = AutoTokenizer.from_pretrained(quick["model"]["actor"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == len(tokenizer) - 1
    config = GPT2Config(vocab_size=len(tokenizer) - 1, n_embd=16, n_layer=1, n_head=2, eos_token_id=2)
    assert config.attn_pdrop > 0
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    _, found = run(quick, "name=gpt2", f"model.actor={tmp_path / 'gpt2'}", "train.updates=2")
    assert all(row["val/first_logprob_drift"] < 1e-5 for row in found)


def test_a_run_that_fails_before_it_measures_leaves_no_folder(
    quick: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(quick["model"]["actor"], bare, ignore=shutil.ignore_patterns("token*"))
    for overrides, message in (
        ([f"model.actor={bare}"], "no tokenizer can be loaded"),
        (["data.max_prompt=1"], "no prompt has at most"),
        (["rollout.max_new_tokens=400"], "positions: lower"),
    ):
        assert train(load(overrides, quick)) == 1
        assert message in capsys.readouterr().err
        assert not (Path(quick["out"]) / "quick").exists()


def test_texts_beside_ppo_are_learned(quick: dict[str, Any], tmp_path: Path) -> None:
    texts, pairs = tmp_path / "ptx.txt", tmp_path / "sft.jsonl"
    texts.write_text("the film was good from start to end\n" * 3)
    pairs.write_text(json.dumps({"prompt": "her song", "response": " is sad"}) + "\n")
    options = [f"mix.ptx={texts}", f"mix.sft={pairs}", "mix.rows=4", "mix.ptx_coef=1", "mix.sft_coef=1"]
    _, found = run(quick, "name=mixed", *options, "train.updates=6", "optim.actor_lr=5e-3")
    for name in ("loss/ptx", "loss/sft"):
        assert found[-1][name] < found[0][name] - 0.5


def test_a_check_shows_the_plan_and_leaves_nothing(
    quick: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(quick))
    assert cli.main([str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    for part in ("8 sequences", "4 optimizer steps", "AdamW", "planned, on each rank", "not needed", "one update"):
        assert part in shown
    assert not Path(quick["out"]).exists()


def test_every_mistake_is_told_before_a_model_loads(
    quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(quick))

    def told(*overrides: str) -> str:
        assert cli.main([str(path), *overrides]) == 2
        assert not Path(quick["out"]).exists()
        return capsys.readouterr().err

    found = told("model.actor=nowhere", "data.train=moveis", "mix.ptx=no.txt", "optim.critic_warmup=9", "ppo.clp=1")
    for part in ("model.actor=nowhere", "did you mean movies?", "mix.ptx=no.txt", "critic_warmup=9", "ppo.clip?"):
        assert part in found
    assert "has no function scor; it has score" in told(f"reward.function={quick['reward']['function'][:-1]}")
    assert "expected a ...ForSequenceClassification" in told(f"reward.model={quick['model']['actor']}")
    assert "something must give a reward" in told("reward.function=null")
    assert "model.critic=reward needs reward.model" in told("model.critic=reward")
    assert "needs train.parallel=ddp" in told("model.lora_rank=2", "train.parallel=fsdp")
    broken = tmp_path / "broken.py"
    broken.write_text("def score(samples): return samples[0]['row']['answer']\n")
    assert "raised KeyError: 'answer'" in told(f"reward.function={broken}:score")
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"prompt": "x"}\n{"promt": "y"}\n')
    assert "bad.jsonl, line 2: no key 'prompt' among promt" in told(f"data.train={lines}")


def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, words = tmp_path / "bad.yaml", tmp_path / "words.yaml"
    bad.write_text("ppo: {clip: 0.2\n")
    words.write_text("just words\n")
    for name, part in ((bad, "not YAML"), (words, "expected `key: value`"), (tmp_path / "none.yaml", "no such file")):
        assert cli.main([str(name)]) == 2
        assert part in capsys.readouterr().err
    assert cli.main(["smollm-arithmetc"]) == 2
    assert "did you mean smollm-arithmetic?" in capsys.readouterr().err


@pytest.mark.parametrize("preset", sorted(cli.PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid(preset: Path) -> None:
    config = load([], yaml.safe_load(preset.read_text()))
    assert config.name == preset.stem
