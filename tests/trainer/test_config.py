from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ppo_kernels.trainer import cli
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.settings import DEMO, SMOKE, ConfigError, load, names, resumed


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return caught.value.problems


def test_overrides_reach_every_level_and_later_ones_win() -> None:
    config = load(["seed=7", "ppo.clip=0.1", "ppo.clip=0.3", "ppo.value_clip=null", "demo.sft.steps=9"], SMOKE)
    assert (config.seed, config.ppo.clip, config.ppo.value_clip) == (7, 0.3, None)
    assert config.data.train == "toy"
    assert config.demo is not None
    assert (config.demo.sft.steps, config.demo.model.hidden) == (9, SMOKE["demo"]["model"]["hidden"])
    assert SMOKE["demo"]["sft"]["steps"] != 9  # unchanged


def test_a_number_yaml_reads_as_text_is_still_a_number() -> None:
    assert load(["optim.actor_lr=1e-6"]).optim.actor_lr == 1e-6


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems("ppo.clp=0.1", "kl.coef=-1", "nonsense", "train.loss=linar", "seed.x=1", "ppo.minibatches=0")
    assert len(found) == 6
    assert any("ppo.clp" in line and "did you mean ppo.clip?" in line for line in found)
    assert any("kl.coef=-1" in line for line in found)
    assert any("key=value" in line for line in found)
    assert any("train.loss='linar'" in line and "did you mean linear?" in line for line in found)


def test_a_name_in_the_wrong_section_is_found() -> None:
    assert "did you mean kl.target?" in problems("ppo.target=6")[0]
    assert "did you mean rollout.temperature?" in problems("temperature=0.7")[0]


def test_minibatches_that_do_not_divide_name_the_nearest_that_do() -> None:
    (line,) = problems("ppo.minibatches=3")
    assert line == "ppo.minibatches=3 does not divide rollout.prompts=64; try 2 or 4"
    (line,) = problems("ppo.minibatches=3", "rollout.samples_per_prompt=2")
    assert "the 128 sequences of" in line


def test_settings_that_contradict_each_other_say_so() -> None:
    assert "must start above 0" in problems("kl.target=6", "kl.coef=0")[0]
    assert "must hold ppo.clip=0.2" in problems("ppo.clip_target_kl=0.1", "ppo.clip_bounds=[0.3,0.4]")[0]


def test_a_section_that_is_absent_by_default_has_names_too() -> None:
    assert "demo.sft.steps" in names()
    assert len(names()) == len(set(names()))


def test_a_run_goes_on_with_its_own_configuration_only() -> None:
    saved = load([], DEMO).model_dump(mode="json")
    assert resumed(saved, ["train.updates=99", "save.every=7", "log.tensorboard=false"]).train.updates == 99
    with pytest.raises(ConfigError) as caught:
        resumed(saved, ["seed=2", "ppo.clip=0.3"])
    assert len(caught.value.problems) == 2
    assert "ppo.clip: this run was started with 0.2, 0.3" in caught.value.problems[0]


def test_every_key_is_read_somewhere() -> None:
    """A key that nothing reads is a promise that nobody keeps (whiten_rewards of a peer)."""
    folder = Path(cli.__file__).parent
    source = " ".join(path.read_text() for path in folder.glob("*.py") if path.name not in ("config.py", "settings.py"))
    assert [name for name in names() if not re.search(rf"\b{name.rpartition('.')[2]}\b", source)] == []


def test_the_defaults_are_valid_and_survive_the_file() -> None:
    for base in ({}, DEMO, SMOKE):
        config = load([], base)
        assert Config.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_a_path_in_the_name_is_refused() -> None:
    assert "name=" in problems("name=../elsewhere")[0]


def test_the_command_exits_2_and_prints_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "ppo.clp=0.1", "--smoke", "kl.coef=x"]) == 2
    printed = capsys.readouterr().err
    assert "ppo.clp" in printed
    assert "kl.coef" in printed


def test_the_defaults_are_the_papers() -> None:
    config = load([])
    assert (config.ppo.gamma, config.ppo.lam, config.optim.eps) == (1.0, 0.95, 1e-5)
    assert (config.kl.estimator, config.kl.horizon, config.optim.schedule) == ("k1", 10_000, "linear")
