"""What users' reward functions, environments and rows of several turns may do in a conversation, and in a whole run."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_kernels.trainer import Config, train
from ppo_kernels.trainer.data import Row, load_rows, read_rows
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.launch import launch
from ppo_kernels.trainer.rewards import PluginError
from tests import ranks

from .conftest import World
from .test_conversation import Told, chat, conversation, judged, talk

# ---- a reward function ----------------------------------------------------------------------------------------------


def test_one_number_per_turn_lands_on_the_turns_and_one_for_all_is_the_score(world: World) -> None:
    rows, samples, _ = conversation(world)
    both: list[Any] = [[10.0, 20.0, 30.0], 7.0, [5.0]]
    trajectory = judged(world, samples, rows, world.text, lambda given: both)
    paid = [x for _, x in rows[0]["says"]]
    assert trajectory.turn_rewards[0][samples.ends[0]].tolist() == [10 + paid[0], 20 + paid[1], 30 + paid[2]]
    assert int((trajectory.turn_rewards[0] != 0).sum()) == 3
    assert torch.equal(trajectory.turn_rewards[1:], samples.turn_rewards[1:])
    assert trajectory.scores.tolist() == [0.0, 7.0, 5.0]


def test_a_reward_function_is_given_every_answer_and_the_row(world: World) -> None:
    rows, samples, _ = conversation(world)
    given: list[dict[str, Any]] = []

    def keep(each: list[dict[str, Any]]) -> list[float]:
        given.extend(each)
        return [0.0] * 3

    judged(world, samples, rows, world.text, keep)
    assert [sample["responses"] for sample in given] == samples.turns == [row["heard"] for row in rows]
    assert [sample["response"] for sample in given] == [turns[-1] for turns in samples.turns]
    assert all(sample["row"] is row for sample, row in zip(given, rows, strict=True))


@pytest.mark.parametrize("returned", [[[1.0, 2.0], 0.0, 0.0], [0.0, 0.0, [1.0, 2.0]], [0.0, [], 0.0]])
def test_a_number_too_many_or_too_few_is_told_with_the_turns(world: World, returned: Any) -> None:
    rows, samples, _ = conversation(world)
    with pytest.raises(PluginError, match=r"reward.function returned \d numbers for a sample of \d turns"):
        judged(world, samples, rows, world.text, lambda given: returned)


# ---- environments ---------------------------------------------------------------------------------------------------


def test_a_conversation_does_not_depend_on_who_else_is_talking(world: World) -> None:
    rows = [
        {"prompt": p, "says": [("hm", 0.0)] * n + [(None, 0.0)]} for p, n in (("the film", 2), ("song", 0), ("a", 1))
    ]
    together = talk(world, copy.deepcopy(rows), world.text)
    pieces = talk(world, copy.deepcopy(rows), world.text, None, Told, "rollout.microbatch=1")
    assert together.turns == pieces.turns
    assert [len(turns) for turns in together.turns] == [3, 1, 2]


def test_every_turn_has_random_numbers_of_its_own(world: World) -> None:
    indifferent: Any = SimpleNamespace(logits=lambda ids, *_: torch.zeros(len(ids), 1, 420))
    rows: list[Row] = [{"prompt": "a", "says": [("hm", 0.0)] * 3} for _ in range(2)]
    samples = talk(world, rows, world.text, indifferent, Told, "data.max_turns=3")
    assert len({turn for turns in samples.turns for turn in turns}) == 6


def test_max_turns_is_the_last_word(world: World) -> None:
    rows: list[Row] = [{"prompt": "a", "says": [("go on", float(n)) for n in range(9)]}]
    samples = talk(world, rows, world.text, None, Told, "data.max_turns=2")
    assert [len(turns) for turns in samples.turns] == [2]
    assert float(samples.turn_rewards.sum()) == 1.0
    assert bool(samples.mask[0, -1]), "nothing is said after the last answer"


class Broken:
    """An environment that does what its row says is wrong with it."""

    def __init__(self, row: Row) -> None:
        self.row = row
        if row["wrong"] == "begin":
            raise KeyError("secret")

    def step(self, response: str) -> Any:
        if self.row["wrong"] == "step":
            raise ZeroDivisionError("division by zero")
        return self.row["wrong"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("begin", r"data.environment raised KeyError: 'secret'"),
        ("step", r"data.environment: step raised ZeroDivisionError: division by zero"),
        (None, r"step returned None, expected \(text or None, number\)"),
        ("ab", r"step returned 'ab', expected"),
        ((None,), r"step returned \(None,\), expected"),
        (("a", 1.0, False, {}), r"step returned \('a', 1.0, False, \{\}\), expected"),
        ((1, 1.0), r"step returned \(1, 1.0\), expected"),
        ((None, None), r"step returned \(None, None\), expected"),
        ((None, "1"), r"step returned \(None, '1'\), expected"),
    ],
)
def test_a_broken_environment_is_told_as_what_it_is(world: World, wrong: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        talk(world, [{"prompt": "a", "wrong": wrong}], world.text, None, Broken)


# ---- rows with turns, and whole runs --------------------------------------------------------------------------------


def test_a_row_with_turns_asks_them_in_order_whatever_the_answers(world: World, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [{"turns": ["one", "two", "three"]}, {"prompt": "alone"}, {"turns": ["only"]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read_rows(file)
    text = chat(world)
    samples = talk(world, rows, text, None, None, "rollout.max_new_tokens=4")
    assert [len(turns) for turns in samples.turns] == [3, 1, 1]
    assert not samples.turn_rewards.any()
    said = world.tokenizer.decode(samples.ids[0][samples.attention[0]])
    assert said.startswith("<bos>user:one<eos><bos>assistant:")
    assert said.index("user:two") < said.index("user:three")
    assert torch.equal(samples.ends.sum(1), torch.tensor([3, 1, 1]))
    assert len(talk(world, rows, text, None, None, "data.max_turns=2").turns[0]) == 2


@pytest.mark.parametrize("turns", [[], "one", [1], None, [["a"]]])
def test_turns_that_are_no_texts_are_told_with_their_place(tmp_path: Path, turns: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"turns": turns}) + "\n")
    with pytest.raises(DataError, match=r"rows.jsonl, (line|row) 1: turns must be a list of texts"):
        read_rows(file)


def test_a_line_separator_inside_a_text_ends_no_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    prompts = ["one\u2028line", "another\x85one", "and one\x0cmore"]
    body = "\r\n".join(json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts)
    file.write_bytes(("\ufeff" + body).encode())
    assert [row["prompt"] for row in read_rows(file)] == prompts


ENVIRONMENT = """
class Echo:
    def __init__(self, row):
        self.count = 0
    def step(self, response):
        self.count += 1
        if self.count == 2 and FAILS:
            raise RuntimeError("out of echoes")
        return ("and then" if self.count < 3 else None), float("e" in response)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_of_conversations_trains_or_says_why_not(
    quick: dict[str, Any], tmp_path: Path, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "echo.py"
    file.write_text(ENVIRONMENT.replace("FAILS", str(fails)))
    quick["data"] |= {"environment": f"{file}:Echo", "max_turns": 3}
    code = train(Config(**quick))
    if fails:
        assert code == 2
        assert "data.environment: step raised RuntimeError: out of echoes" in capsys.readouterr().err
        return
    assert code == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "quick" / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["stage"] == "ppo"]
    assert len(updates) == 4
    assert all(row["val/first_logprob_drift"] < 1e-4 for row in updates)
    assert all(6 < row["response_length/mean"] <= 18 for row in updates), "three turns of at most six tokens"


def sharded_run(rank: int, world: int) -> tuple[int, list[str]]:
    return launch(Config(**json.loads(os.environ["PPO_KERNELS_TEST_BASE"])))


@pytest.mark.slow
@ranks.DISTRIBUTED
@ranks.ONCE
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_environment_that_fails_on_one_rank_leaves_no_other_waiting(
    parallel: str, quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under FSDP every turn is a collective; under DDP a forward of what it wraps may be one."""
    file = tmp_path / "echo.py"
    file.write_text(ENVIRONMENT.replace("FAILS", "__import__('torch').distributed.get_rank() == 1"))
    quick["data"] |= {"environment": f"{file}:Echo", "max_turns": 3}
    quick["train"]["parallel"] = parallel
    monkeypatch.setenv("PPO_KERNELS_TEST_BASE", json.dumps(quick))
    first, second = ranks.run(sharded_run, 2, tmp_path, limit=90.0)
    assert (first[0], second[0]) == (1, 2)
    assert "out of echoes" in first[1][0]
    assert "data.environment: step raised RuntimeError: out of echoes" in second[1][0]


def test_prompts_that_are_all_held_out_are_told(quick: dict[str, Any], tmp_path: Path) -> None:
    """A game whose rows differ only in what the environment hides."""
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "guess", "secret": 3}\n')
    quick["data"] = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")}
    with pytest.raises(DataError, match="every training prompt is also a held-out one"):
        load_rows(Config(**quick).data)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "guess again", "secret": 4}\n')
    train, heldout, shared = load_rows(Config(**quick).data)
    assert (len(train), len(heldout), shared) == (1, 1, 1)
