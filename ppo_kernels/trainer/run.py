"""A run from its configuration to its report: folders, stages, checkpoints, rollbacks, the way back after a kill."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers

from ppo_kernels.trainer import faults, mix, rewards
from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.checkpoint import Checkpoints, DiskFull, NoCheckpoint, Progress
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import Rows, Text, load_rows
from ppo_kernels.trainer.disk import read_json, write_whole
from ppo_kernels.trainer.evaluate import evaluate, load_metric, measures
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.folder import go_on, locked
from ppo_kernels.trainer.log import Log, Stage
from ppo_kernels.trainer.loop import ppo
from ppo_kernels.trainer.models import Roles, load_roles, load_tokenizer, parameters, plain_directory
from ppo_kernels.trainer.ranks import Ranks
from ppo_kernels.trainer.record import rows as written_rows
from ppo_kernels.trainer.report import write_report
from ppo_kernels.trainer.rewards import Moments, clipped
from ppo_kernels.trainer.stop import Signals
from ppo_kernels.trainer.task import Task
from ppo_kernels.trainer.update import Diverged, Optimizers

STAGES = (("before", 5), ("PPO", 100), ("after", 5), ("report", 2))


class Failed(Exception):
    """The run diverged and its rollbacks are used up; the message says where the batch is."""


def execute(
    config: Config,
    folder: Path,
    ranks: Ranks,
    reward_function: rewards.RewardFunction | None = None,
    resumed: Config | None = None,
) -> dict[str, Any]:
    """The run in `folder`, from where it is; returns its summary (empty on ranks other than 0).

    `resumed`: the configuration as it was given, of a run that was begun before.
    """
    transformers.utils.logging.disable_progress_bar()  # one progress display is enough
    stages = [Stage("text", 6), Stage("SFT", 100), Stage("reward model", 40)] if config.demo else [Stage("models", 5)]
    stages += [Stage(*stage) for stage in STAGES]
    with contextlib.ExitStack() as stack:
        said = []
        with ranks.together("opening the run's folder"):
            if ranks.main:
                stack.enter_context(locked(folder))
                said = go_on(resumed, folder) if resumed else []
        signals = stack.enter_context(Signals())
        log = stack.enter_context(
            Log(folder, f"ppo_kernels · {folder}", stages, config.log.tensorboard, silent=not ranks.main)
        )
        for text in said:
            log.note(text, loud=True)
        if config.demo:
            from ppo_kernels.trainer.demo import prepare

            config, rows, facts = prepare(config, folder, log, lambda: signals.check(ranks))
            roles = load_roles(config, ranks)
        else:
            log.begin("models")
            rows, facts = load_rows(config.data), {"text": config.data.train}
            roles = load_roles(config, ranks)
            counts = f"{len(rows.train)} training and {len(rows.heldout)} held-out prompts"
            log.end(f"{parameters(roles.actor.model):,} parameters, {counts}")
        tokenizer = load_tokenizer(config.model.actor)
        task = make_task(config, ranks, rows, tokenizer, roles, signals, log, reward_function)
        return train(task, folder, log, signals, facts)


# ---- the parts of a task --------------------------------------------------------------------------------------------


def make_task(
    config: Config, ranks: Ranks, rows: Rows, tokenizer: Any, roles: Roles, signals: Signals, log: Log,
    reward_function: rewards.RewardFunction | None = None,
) -> Task:  # fmt: skip
    """`reward_function` instead of reward.function. Raises DataError."""
    base = roles.actor.base
    generation = getattr(base, "generation_config", None)
    models = (base, roles.critic.classifier, getattr(roles.reward, "classifier", None))
    text = Text(
        tokenizer,
        config.data,
        getattr(generation, "eos_token_id", None),
        vocabulary=base.get_input_embeddings().weight.shape[0],
        room=min(filter(None, map(_positions, models)), default=None),
    )
    limit = config.data.max_prompt
    measured = [[(len(text.prompt(row)), row) for row in part] for part in (rows.train, rows.heldout)]
    kept = [[(length, row) for length, row in part if length <= limit] for part in measured]
    dropped = sum(map(len, measured)) - sum(map(len, kept))
    if dropped:
        log.note(f"{dropped} prompts of more than data.max_prompt={limit} tokens left out")
    if rows.shared:
        log.note(f"{rows.shared} training prompts left out: they are held out")
    if not all(kept):
        raise DataError(f"no prompt has at most data.max_prompt={limit} tokens")
    longest = max(length for part in kept for length, _ in part) + config.rollout.max_new_tokens
    train, heldout = ([row for _, row in part] for part in kept)
    if text.room is not None and longest > text.room:
        raise DataError(
            f"prompt and response take up to {longest} tokens, the models have {text.room} positions: lower "
            "data.max_prompt or rollout.max_new_tokens"
        )
    return Task(
        config, ranks, text, train, heldout, roles,
        reward_function or rewards.reward_function(config.reward, config.data.train),
        rewards.load_plugin(config.data.environment) if config.data.environment else None,
        load_metric(config.eval.metric), mix.load_sources(config.mix, text, config.data.prompt_key),
        ALGORITHMS[config.train.loss],
        (lambda: signals.check(ranks)) if ranks.size == 1 else (lambda: None),
    )  # fmt: skip


def _positions(model: Any) -> int | None:
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


# ---- the run --------------------------------------------------------------------------------------------------------


def train(task: Task, folder: Path, log: Log, signals: Signals, facts: dict[str, str]) -> dict[str, Any]:
    """From the first evaluation to the report, or from wherever an earlier process was ended; returns the summary.

    Raises Stop (saved, to be resumed), Failed, NoCheckpoint, DiskFull.
    """
    config, ranks, roles = task.config, task.ranks, task.roles
    optimizers = Optimizers(roles.actor.model, roles.critic, config.optim)
    checkpoints = Checkpoints(folder / "checkpoints", config.save.keep, task.text.tokenizer, ranks, log)
    sets = {"heldout": task.heldout[: config.eval.prompts], "train": task.train[: config.eval.prompts]}

    log.begin("before")
    first = ranks.gather([read_json(folder / "before.json")] if ranks.main else [])[0]
    if not first:  # of the actor as it was loaded, whatever checkpoint is restored below
        first = {name: evaluate(task, rows, name)._asdict() for name, rows in sets.items()}
        with ranks.together("writing the first evaluation"):
            if ranks.main:
                write_whole(folder / "before.json", json.dumps(first))
                faults.point("run:before")
    progress = checkpoints.restore(optimizers)
    if progress is None:
        progress = Progress(kl_coef=config.kl.coef, clip=config.ppo.clip, heldout=curve_point(task, 0, folder, log))
        if config.reward.normalize == "start":  # N+10
            progress.moments = Moments().add(clipped(torch.tensor(first["train"]["scores"]), config.reward))
        if not checkpoints.save(progress, roles, optimizers):
            raise OSError(28, "the first checkpoint could not be written, so nothing could be resumed")
    else:
        log.cut(progress.update - bool(progress.pending))
        log.note(f"resumed at update {progress.update}", loud=True)
    log.end(_one_line(first["heldout"]["estimates"], config))

    saved = progress.update - bool(progress.pending)

    def save(progress: Progress, now: bool = False) -> None:
        nonlocal saved
        if progress.update == saved:
            return
        asked = ranks.any(signals.caught is not None)
        done = progress.update == config.train.updates
        reward = progress.heldout["heldout/reward"]
        new = progress.heldout["heldout/update"] == progress.update and math.isfinite(reward)
        better = new and (progress.best is None or reward > progress.best)
        if better and (not config.save.best or checkpoints.save_best(folder / "best", roles)):
            progress.best = reward
        regular = progress.update % config.save.every == 0
        progress.due = regular and not progress.skips and not progress.pending
        if regular or done or asked or now:
            log.sync()
            if checkpoints.save(progress, roles, optimizers):
                saved = progress.update
            elif asked and not done:
                raise DiskFull(f"asked to end, but update {progress.update} could not be saved")
        if asked and not done:
            signals.check(ranks)

    def roll_back(progress: Progress, diverged: Diverged) -> Progress:
        nonlocal saved
        optimizers.clear()
        stream = progress.stream + 1
        if stream > config.guard.max_rollbacks:
            path = folder / f"diverged_{progress.update + 1:06d}.pt"
            where = f"its batch is in {path}"
            try:
                if ranks.main:
                    torch.save(diverged.batch._asdict(), path)
            except (OSError, RuntimeError) as error:
                where = f"its batch could not be written to {path}: {error}"
            raise Failed(
                f"update {progress.update + 1} diverged ({diverged}) after {progress.stream} rollbacks; {where}"
            )
        restored = checkpoints.restore(optimizers, rollback_from=progress.update)
        if restored is None:
            raise NoCheckpoint(f"{folder / 'checkpoints'} holds no checkpoint to go back to")
        restored.kl_coef *= config.guard.raise_kl ** (stream - restored.stream)
        restored.stream, saved = stream, restored.update
        restored.skips, restored.seconds, restored.best = 0, progress.seconds, progress.best
        log.cut(restored.update)
        log.note(
            f"update {progress.update + 1} diverged: {diverged}; back to update {restored.update} with other samples "
            f"and kl.coef {restored.kl_coef:.3g}",
            loud=True,
        )
        return restored

    log.begin("PPO", config.train.updates)
    earlier = [row for row in written_rows(folder / "metrics.jsonl") if row.get("stage") == "ppo"]
    progress = ppo(
        task, progress, optimizers, log, lambda update: curve_point(task, update, folder, log), save, roll_back, earlier
    )
    log.end()

    log.begin("after")
    after = {name: evaluate(task, rows, name) for name, rows in sets.items()}
    log.end(_one_line(after["heldout"].estimates, config))

    log.begin("report")
    with ranks.together("writing the final models"):
        faults.point("end:final")
        plain_directory(roles.actor.model, task.text.tokenizer, folder / "final", ranks)
        plain_directory(roles.critic.classifier, task.text.tokenizer, folder / "final" / "critic", ranks)
    summary: dict[str, Any] = {}
    with ranks.together("writing the report"):
        if ranks.main:
            summary = {
                "updates": progress.update,
                "measures": measures(config),
                "before": {name: first[name]["estimates"] for name in sets},
                "after": {name: after[name].estimates for name in sets},
                "prompts": {name: len(rows) for name, rows in sets.items()},
                "stage_seconds": {view.name: round(view.seconds, 2) for view in log.views[:-1]}
                | {"PPO": round(progress.seconds, 2), "total": round(log.elapsed(), 2)},
                "sizes": {"parameters": parameters(roles.actor.model), **facts},
            }
            write_whole(folder / "summary.json", json.dumps(summary, indent=1))
            _write_samples(folder, sets["heldout"], first["heldout"], after["heldout"]._asdict(), config.eval.samples)
            faults.point("end:report")
            write_report(folder)
    log.end(str(folder / "report.html"))
    return summary


def curve_point(task: Task, update: int, folder: Path, log: Log) -> dict[str, float]:
    """Held-out measures, and the first answers as a table. It is never broken off: the update before it is not saved
    yet."""
    task = task._replace(between=lambda: None)
    result = evaluate(task, task.heldout[: task.config.eval.curve_prompts], "heldout")
    if task.ranks.main:
        answers = list(zip(result.texts, result.rewards, strict=True))[: task.config.eval.samples]
        lines = "".join(json.dumps({"text": text, "reward": reward}) + "\n" for text, reward in answers)
        try:
            (folder / "samples").mkdir(exist_ok=True)
            write_whole(folder / "samples" / f"{update:06d}.jsonl", lines)
        except OSError as error:
            log.note(f"held-out answers of update {update} could not be written ({error})", loud=True)
    return result.flat("heldout") | {"heldout/update": update}


def _one_line(estimates: dict[str, Any], config: Config) -> str:
    labels = measures(config)
    shown = [f"{labels[name].label} {estimates[name][0]:+.3f}" for name in ("reward", "metric") if name in estimates]
    return f"held-out: {', '.join(shown)}"


def _write_samples(folder: Path, rows: list[Any], before: Any, after: Any, count: int) -> None:
    """The first `count` held-out prompts, unselected, with one sampled response each."""
    lines = []
    for row, old, old_score, new, new_score in list(
        zip(rows, before["texts"], before["rewards"], after["texts"], after["rewards"], strict=True)
    )[:count]:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        lines.append(json.dumps({"prompt": prompt, "before": old, "before_reward": old_score, "after": new,
                                 "after_reward": new_score}))  # fmt: skip
    write_whole(folder / "samples.jsonl", "\n".join(lines) + "\n")
