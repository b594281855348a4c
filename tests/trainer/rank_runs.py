"""What the ranks of test_ranks.py do: whole runs of the trainer, one after the other in one group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.launch import launch
from ppo_kernels.trainer.settings import load

TIMES = ("seconds", "time/")


def rows(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in found]


def go(base: dict[str, Any], *overrides: str, **options: Any) -> tuple[int, list[str], Path]:
    config = load(list(overrides), base)
    code, problems = launch(config, **options)
    return code, problems, Path(config.out) / config.name


def resume(folder: Path, config: Config) -> int:
    return launch(config, folder)[0]


def base() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ["PPO_KERNELS_TEST_BASE"])
    return found


def equal_runs(rank: int, world: int) -> dict[str, Any]:
    """Every way of training, on all ranks; and what each rank was told."""
    found = {}
    for name, overrides in CASES.items():
        code, problems, _ = go(base(), f"name={name}-{world}", "save.every=9", *overrides)
        found[name] = (code, problems)
    return found


CASES = {
    "ddp": ["ppo.microbatch=2"],
    "fsdp": ["train.parallel=fsdp"],
    "budget": ["ppo.max_tokens=24", "train.loss=logits", "kl.target=0.1", "ppo.whiten_rewards=true"],
    "mixed": ["mix.rows=4", "mix.ptx_coef=0.5", "reward.normalize=running", "optim.critic_warmup=1"],
    "turns": ["data.max_turns=2", "eval.prompts=7", "eval.curve_prompts=7"],
    "turns-fsdp": ["data.max_turns=2", "train.parallel=fsdp"],
}


def unequal_ranks(rank: int, world: int) -> dict[str, Any]:
    """One rank meets an error or a signal; a run is saved by many ranks and goes on."""
    found: dict[str, Any] = {}

    def broken(samples: list[dict[str, Any]]) -> list[float]:
        if rank == 1:
            raise ValueError("out of cheese")
        return [0.0] * len(samples)

    function = {"reward_function": broken} if rank == 1 else {}
    found["error"] = go(base(), "name=error", **function)[:2]

    judge = Path(base()["out"]).parent / f"judge-{rank}.py"
    judge.write_text(f"def judge(samples):\n    return [1 / (1 - {rank}) if s['response'] else 0.0 for s in samples]\n")
    found["metric"] = go(base(), "name=metric", f"eval.metric={judge}:judge")[:2]

    calls = 0

    def sometimes(samples: list[dict[str, Any]]) -> list[float]:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 5:
            raise ConnectionError("the judge does not answer")
        return counted(samples)

    settings = ("name=judge", "save.every=9")
    code, _, folder = go(base(), *settings, reward_function=sometimes)
    saved = sorted(place.name for place in folder.glob("checkpoints/step_*"))
    found["judge"] = (code, saved, launch(load(list(settings), base()), folder, reward_function=counted)[0])
    found["judge-straight"] = go(base(), "name=judge-straight", "save.every=9", reward_function=counted)[0]
    calls = 0

    def asked(samples: list[dict[str, Any]]) -> list[float]:
        nonlocal calls
        calls += 1
        if rank == 1 and calls == 4:
            os.kill(os.getpid(), 15)
        return [sample["response"].count("e") / 10 for sample in samples]

    for parallel in ("ddp", "fsdp"):
        name = f"stop-{parallel}"
        found["straight", parallel] = go(
            base(), f"name={name}-straight", f"train.parallel={parallel}", reward_function=counted
        )[0]
        calls = 0
        code, _, folder = go(base(), f"name={name}", f"train.parallel={parallel}", reward_function=asked)
        found["asked", parallel] = code
        config = load([f"name={name}", f"train.parallel={parallel}"], base())
        found["resumed", parallel] = launch(config, folder, reward_function=counted)[0]
    found["bad"] = go(base(), "name=bad", "rollout.prompts=9", "ppo.minibatches=3")[:2]
    dist.barrier()
    return found


def counted(samples: list[dict[str, Any]]) -> list[float]:
    return [sample["response"].count("e") / 10 for sample in samples]


def final(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "final" / "model.safetensors")
