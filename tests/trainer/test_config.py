from __future__ import annotations

import pytest

from ppo_kernels.trainer import cli
from ppo_kernels.trainer.config import SMOKE, ConfigError, load


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(list(overrides))
    return caught.value.problems


def test_overrides_reach_every_level_and_later_ones_win() -> None:
    config = load(["seed=7", "ppo.clip=0.1", "ppo.clip=0.3", "ppo.value_clip=null"], SMOKE)
    assert (config.seed, config.ppo.clip, config.ppo.value_clip) == (7, 0.3, None)
    assert config.data.source == "toy"
    assert SMOKE["ppo"] == {"updates": SMOKE["ppo"]["updates"], "microbatch": SMOKE["ppo"]["microbatch"]}  # unchanged


def test_a_number_yaml_reads_as_text_is_still_a_number() -> None:
    assert load(["optim.actor_lr=1e-6"]).optim.actor_lr == 1e-6


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems("ppo.clp=0.1", "kl.coef=-1", "nonsense", "train.loss_backend=fast", "seed.x=1")
    assert len(found) == 5
    assert any("ppo.clp" in line and "did you mean ppo.clip?" in line for line in found)
    assert any("kl.coef=-1" in line for line in found)
    assert any("key=value" in line for line in found)
    assert any("train.loss_backend='fast'" in line and "reference" in line for line in found)


def test_a_name_in_the_wrong_section_is_found() -> None:
    assert "did you mean kl.target?" in problems("ppo.target=6")[0]
    assert "did you mean rollout.temperature?" in problems("temperature=0.7")[0]


def test_minibatches_that_do_not_divide_name_the_nearest_that_do() -> None:
    (line,) = problems("ppo.minibatches=3")
    assert line == "ppo.minibatches=3 does not divide rollout.prompts=64; try 2 or 4"


def test_a_path_in_the_name_is_refused() -> None:
    assert "name=" in problems("name=../elsewhere")[0]


def test_the_command_exits_2_and_prints_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "ppo.clp=0.1", "--smoke", "kl.coef=x"]) == 2
    printed = capsys.readouterr().err
    assert "ppo.clp" in printed
    assert "kl.coef" in printed
