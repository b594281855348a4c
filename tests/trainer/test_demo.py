"""`ppo-train demo --smoke`, from text to report, and what it leaves behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_kernels.trainer import cli
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.folder import new_folder
from ppo_kernels.trainer.settings import SMOKE, load

QUICK = [
    "demo.sft.steps=12",
    "demo.reward.steps=10",
    "train.updates=2",
    "eval.prompts=16",
    "eval.curve_prompts=16",
    "eval.every=1",
]


def run(folder: Path, *overrides: str, options: tuple[str, ...] = ()) -> Path:
    out = folder / "runs"
    assert cli.main(["demo", "--smoke", *options, f"out={out}", *QUICK, *overrides]) == 0
    return max(out.iterdir(), key=lambda path: path.stat().st_ctime_ns)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return run(folder)


def rows(folder: Path, stage: str = "ppo") -> list[dict[str, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["stage"] == stage]


def test_every_file_is_there(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names >= {"config.yaml", "env.json", "metrics.jsonl", "events.log", "samples.jsonl", "summary.json"}
    assert (finished / "report.html").stat().st_size > 20_000
    assert [path.name for path in sorted((finished / "samples").iterdir())] == [f"{i:06d}.jsonl" for i in range(3)]
    assert list((finished / "tb").glob("events.out.tfevents.*"))


def test_the_saved_configuration_makes_the_same_configuration(finished: Path) -> None:
    assert Config.model_validate(yaml.safe_load((finished / "config.yaml").read_text())).train.updates == 2


def test_metrics_have_one_row_per_update_with_every_name(finished: Path) -> None:
    found = rows(finished)
    assert [row["step"] for row in found] == [1, 2]
    names = """objective/scores objective/kl objective/kl_coef objective/rlhf_reward objective/entropy loss/policy_avg
        loss/value_avg policy/approxkl_avg policy/clipfrac_avg policy/entropy_avg val/clipfrac_avg val/ratio
        val/first_logprob_drift critic/explained_var grad_norm/actor grad_norm/critic response_length/mean
        response_length/eos_rate lr time/update heldout/reward heldout/reward_low heldout/metric heldout/kl"""
    for row in found:
        assert set(names.split()) <= set(row)
        assert all(isinstance(value, float | int | str) for value in row.values())
        assert row["val/first_logprob_drift"] < 1e-4
        assert row["optimizer_steps"] == 4
    assert rows(finished, "sft")
    assert "reward/validation_correlation" in rows(finished, "reward_model")[-1]


def test_the_report_needs_nothing_but_itself(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", page)
    assert page.count("<svg") >= 12
    assert "nan" not in page.lower()


def test_the_final_actor_is_a_plain_transformers_directory(finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    tokenizer = AutoTokenizer.from_pretrained(finished / "final")
    ids = tokenizer("the film", return_tensors="pt")["input_ids"]
    assert model(ids).logits.shape == (1, ids.shape[1], SMOKE["demo"]["model"]["vocab"])
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


def test_a_second_run_takes_the_next_name_reuses_the_models_and_gives_the_same_numbers(
    finished: Path, tmp_path: Path, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished.parent.parent / "cache", private_cache)
    shutil.copytree(finished, tmp_path / "runs" / "smoke")
    again = run(tmp_path)
    assert again.name == "smoke-2"
    assert "from the cache" in capsys.readouterr().out
    assert rows(again, "sft")[-1]["cached"]
    timing = re.compile(r"^(seconds|time/)")
    for first, second in zip(rows(finished), rows(again), strict=True):
        keys = [key for key in first if not timing.match(key)]
        assert [first[key] for key in keys] == [second[key] for key in keys]


def test_fresh_trains_again(finished: Path, tmp_path: Path, private_cache: Path) -> None:
    shutil.copytree(finished.parent.parent / "cache", private_cache)
    again = run(tmp_path, options=("--fresh",))
    assert "cached" not in rows(again, "sft")[-1]


@pytest.mark.parametrize("loss", ["reference", "logits"])
def test_all_losses_train_the_same_policy(finished: Path, tmp_path: Path, private_cache: Path, loss: str) -> None:
    shutil.copytree(finished.parent.parent / "cache", private_cache)
    plain = run(tmp_path, f"train.loss={loss}")
    for name in ("loss/policy_first", "loss/value_first"):
        assert rows(plain)[0][name] == pytest.approx(rows(finished)[0][name], rel=1e-5)
    for name in ("objective/kl", "objective/scores", "policy/entropy_avg", "heldout/reward"):
        assert rows(plain)[-1][name] == pytest.approx(rows(finished)[-1][name], rel=1e-3)
    for one, other in zip(*(torch_weights(folder) for folder in (finished, plain)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def torch_weights(folder: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(folder / "final").parameters())


def test_adaptive_kl_and_a_fresh_critic_run_too(finished: Path, tmp_path: Path, private_cache: Path) -> None:
    shutil.copytree(finished.parent.parent / "cache", private_cache)
    other = run(tmp_path, "kl.target=0.001", "kl.horizon=100", "model.critic=actor", "reward.missing_eos_value=0.5")
    coefficients = [row["objective/kl_coef"] for row in rows(other)]
    assert coefficients[0] == 0.1
    assert coefficients[1] != 0.1


def test_an_earlier_run_is_never_touched(tmp_path: Path) -> None:
    names = [new_folder(tmp_path, "demo", numbered=True).name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]
    with pytest.raises(FileExistsError):
        new_folder(tmp_path, "demo")


@pytest.mark.slow
def test_ppo_raises_the_reward_on_held_out_prompts_of_the_built_in_text(tmp_path: Path) -> None:
    assert cli.main(["demo", "--smoke", f"out={tmp_path}"]) == 0
    summary = json.loads((tmp_path / "smoke" / "summary.json").read_text())
    before, after = summary["before"]["heldout"], summary["after"]["heldout"]
    assert after["reward"][1] > before["reward"][2]
    assert after["metric"][1] > before["metric"][2]


def test_the_smoke_configuration_is_valid() -> None:
    assert load([], SMOKE).data.train == "toy"
