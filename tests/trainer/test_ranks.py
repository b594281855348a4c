"""Two processes are one process, and what one of them meets ends all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks

from . import rank_runs
from .rank_runs import CASES, final, rows

pytestmark = [ranks.DISTRIBUTED, pytest.mark.slow]


@pytest.fixture
def base(quick: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    texts, pairs, turns = (tmp_path / name for name in ("ptx.txt", "sft.jsonl", "turns.jsonl"))
    texts.write_text("\n".join(f"the film number {i} was long and then it stops" for i in range(20)))
    pairs.write_text("\n".join(json.dumps({"prompt": "the film", "response": f" is good {i}"}) for i in range(20)))
    turns.write_text("\n".join(json.dumps({"turns": [f"film {i}", " why"][: 1 + i % 2]}) for i in range(60)))
    quick["mix"] = {"ptx": str(texts), "sft": str(pairs), "ptx_coef": 0.0, "sft_coef": 0.0}
    quick["rollout"]["max_new_tokens"] = 4
    quick["train"]["updates"] = 3
    quick["data"]["heldout"] = str(turns)
    monkeypatch.setenv("PPO_KERNELS_TEST_BASE", json.dumps(quick))
    return quick


def test_two_processes_train_as_one_does(base: dict[str, Any], tmp_path: Path) -> None:
    two = ranks.run(rank_runs.equal_runs, 2, tmp_path)
    (one,) = ranks.run(rank_runs.equal_runs, 1, tmp_path)
    for name in CASES:
        assert [result[name] for result in (one, *two)] == [(0, [])] * 3, name
        folders = [Path(base["out"]) / f"{name}-{world}" for world in (1, 2)]
        for alone, together in zip(*map(rows, folders), strict=True):
            assert alone.keys() == together.keys()
            for key, value in alone.items():
                near = value if isinstance(value, str) else pytest.approx(value, rel=1e-5, abs=2e-6)
                assert together[key] == near, f"{name}: {key} of update {alone['step']}"
        for key, value in final(folders[0]).items():
            difference = (final(folders[1])[key] - value).norm() / value.norm().clamp(min=1e-6)
            assert difference < 1e-5, f"{name}: {key}"
        assert json.loads((folders[1] / "summary.json").read_text())["prompts"]["heldout"] >= 7


def test_what_one_rank_meets_ends_all_and_a_resume_is_bit_identical(base: dict[str, Any], tmp_path: Path) -> None:
    first, second = ranks.run(rank_runs.unequal_ranks, 2, tmp_path)
    assert second["error"][0] == 2
    assert "out of cheese" in second["error"][1][0]
    assert first["error"][0] != 0
    assert "out of cheese" in first["error"][1][0]
    assert (first["metric"][0], second["metric"][0]) == (1, 2)
    assert "eval.metric raised ZeroDivisionError" in first["metric"][1][0]
    assert (first["judge"][0], second["judge"][0]) == (1, 2)
    assert first["judge"][1:] == (["step_000000", "step_000001"], 0)
    judged, straight = (Path(base["out"]) / name for name in ("judge", "judge-straight"))
    assert rows(judged) == rows(straight)
    for parallel in ("ddp", "fsdp"):
        codes = [[x[what, parallel] for what in ("straight", "asked", "resumed")] for x in (first, second)]
        assert codes == [[0, 75, 0]] * 2
        folder = Path(base["out"]) / f"stop-{parallel}"
        straight = folder.with_name(folder.name + "-straight")
        assert rows(folder) == rows(straight)
        assert all(torch.equal(value, final(straight)[key]) for key, value in final(folder).items())
    assert (first["bad"][0], second["bad"][0]) == (2, 2)
    assert "rollout.prompts=9 does not divide over 2 ranks; try 8 or 10" in first["bad"][1]
