"""Sample responses, then score them under all four models.

Layout: the prompt is padded on the left; what follows is on the right, so that token t of it is column P + t in every
row and all PPO tensors are [B, T]. In a conversation T also holds what the environment said, outside the mask. The
masks made here are carried along; nothing is derived from "token != pad".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from ppo_kernels.trainer import rewards, seeds
from ppo_kernels.trainer.algo import Algorithm
from ppo_kernels.trainer.config import Config
from ppo_kernels.trainer.data import Row, Text, pad
from ppo_kernels.trainer.models import Policy, Roles, Scalar, autocast
from ppo_kernels.trainer.ranks import Ranks

Environment = Callable[[Row], Any]  # called once for each conversation; see docs/trainer.md


class Samples(NamedTuple):
    ids: torch.Tensor  # [B, P + T] int64
    attention: torch.Tensor  # [B, P + T] bool: prompt and what follows, not padding
    mask: torch.Tensor  # [B, T] bool: tokens the actor wrote, each turn up to and including its first EOS
    turn_rewards: torch.Tensor  # [B, T] fp32: the environment's, at the last token of the turn
    ends: torch.Tensor  # [B, T] bool: the last token of each turn
    has_eos: torch.Tensor  # [B] bool: the last turn ended by itself
    turns: list[list[str]]  # B lists of responses


class Trajectory(NamedTuple):
    """Everything one update needs, [B, T] unless noted; column t belongs to token P + t."""

    ids: torch.Tensor  # [B, P + T]
    attention: torch.Tensor  # [B, P + T]
    mask: torch.Tensor
    logprobs: torch.Tensor  # nats, under the actor that sampled
    ref_logprobs: torch.Tensor
    entropy: torch.Tensor
    values: torch.Tensor  # the critic's estimate BEFORE token t is chosen
    turn_rewards: torch.Tensor
    scores: torch.Tensor  # [B] of the whole conversation
    has_eos: torch.Tensor  # [B]

    def rows(self, index: Any) -> Trajectory:
        """Some rows, without the columns that are padding in all of them."""
        picked = Trajectory(*(field[index] for field in self))
        width = self.mask.shape[1]
        prompt = self.ids.shape[1] - width
        used = picked.attention.any(0).nonzero()
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, prompt)
        start, keep = min(first, prompt - 1), max(last + 1 - prompt, 1)
        wide = [field[:, start : prompt + keep] for field in picked[:2]]
        return Trajectory(*wide, *(field[:, :keep] if field.dim() == 2 else field for field in picked[2:]))


# ---- sampling -------------------------------------------------------------------------------------------------------


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """logits [B, V], uniform [B] in [0, 1) -> a token each [B], by inverting the cumulative distribution.

    Ancestral sampling without top-k or top-p (N+4). A token of probability 0 is never drawn. From logits that are not
    finite the last token is: there must be one, and its log-prob ends the update.
    """
    probabilities = torch.softmax(logits.float(), -1)
    if torch.are_deterministic_algorithms_enabled():  # sums of integers have no order, CUDA's of floats change theirs
        cumulative = probabilities.nan_to_num_().mul_(2.0**40).round_().long().cumsum(-1)
        point = (uniform.double() * cumulative[:, -1]).long()
    else:
        cumulative = probabilities.cumsum(-1)
        total = cumulative[:, -1]
        point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point[:, None], right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: list[list[int]],
    uniforms: torch.Tensor,  # [B, at most so many new tokens]
    temperature: float,
    text: Text,
    ranks: Ranks,
    lockstep: bool = False,  # every rank must call the model equally often (FSDP)
) -> list[list[int]]:
    """The response to each prompt, its EOS included if it ended: what is judged and valued ends there too (N+13). An
    EOS inside the prompt means nothing."""
    ids, mask = (x.to(ranks.device) for x in pad(prompts, "left", text.pad))
    eos = torch.tensor(text.eos, device=ranks.device)
    uniforms = uniforms.to(ranks.device)
    cache, new = DynamicCache(), ids
    running = torch.ones(len(prompts), dtype=torch.bool, device=ranks.device)
    tokens, valid = [], []
    for step in range(uniforms.shape[1]):
        token = draw(policy.logits(new, mask, 1, cache)[:, -1] / temperature, uniforms[:, step])
        token = torch.where(running, token, text.pad)
        tokens.append(token)
        valid.append(running)
        mask = torch.cat([mask, running[:, None]], 1)
        running = running & ~torch.isin(token, eos)
        new = token[:, None]
        going = bool(running.any())
        if not (ranks.any(going) if lockstep else going):
            break
    lengths = torch.stack(valid, 1).sum(1).tolist()
    return [row[:length] for row, length in zip(torch.stack(tokens, 1).tolist(), lengths, strict=True)]


class Scripted:
    """The environment of a row with `turns`: asks them one after the other, whatever the answers."""

    def __init__(self, row: Row) -> None:
        self.left = list(row.get("turns", [])[1:])

    def step(self, response: str) -> tuple[str | None, float]:
        return (self.left.pop(0) if self.left else None), 0.0


def converse(
    policy: Policy,
    rows: list[Row],
    keys: list[tuple[int | str, ...]],  # one for each row: its random numbers are a function of it
    text: Text,
    environment: Environment | None,
    config: Config,
    ranks: Ranks,
    between: Callable[[], None] = lambda: None,  # called between forwards of many tokens
) -> Samples:
    """A response to each row's prompt, and to whatever its environment replies, for at most data.max_turns turns."""
    prompts = [text.prompt(row) for row in rows]
    after: list[list[int]] = [[] for _ in rows]  # everything behind the prompt
    written: list[list[bool]] = [[] for _ in rows]  # by the actor
    rewarded: list[dict[int, float]] = [{} for _ in rows]
    turns: list[list[str]] = [[] for _ in rows]
    ended = [False] * len(rows)
    lockstep = config.train.parallel == "fsdp" and ranks.size > 1
    together = ranks.together if lockstep else contextlib.nullcontext  # an error here must not leave others waiting
    with together("an environment"):
        worlds = [rewards.begin(environment or Scripted, row) for row in rows]
    active = list(range(len(rows)))
    for turn in range(config.data.max_turns):
        for chunk in _chunks(active, config.rollout.microbatch, lockstep, ranks):
            between()
            contexts = [prompts[i] + after[i] for i in chunk] or [[text.pad]]
            width = config.rollout.max_new_tokens
            random = [seeds.uniforms(width, *keys[i], turn) for i in chunk] or [torch.zeros(width)]
            with autocast(config, ranks):
                responses = generate(
                    policy, contexts, torch.stack(random), config.rollout.temperature, text, ranks, lockstep
                )
            for i, response in zip(chunk, responses, strict=False):
                after[i] += response
                written[i] += [True] * len(response)
                ended[i] = response[-1] in text.eos
                turns[i].append(text.decode(response))
        going = []
        with together("an environment"):
            for i in active:
                reply, reward = rewards.step(worlds[i], turns[i][-1])
                rewarded[i][len(after[i]) - 1] = reward
                if reply is not None and turn + 1 < config.data.max_turns:
                    said = text.reply(reply, rows[i], ended[i])
                    longest = len(prompts[i]) + len(after[i]) + len(said) + config.rollout.max_new_tokens
                    if text.room is not None and longest > text.room:
                        continue  # the next turn does not fit: the conversation ends here
                    after[i] += said
                    written[i] += [False] * len(said)
                    going.append(i)
        active = going
        if not (ranks.any(bool(active)) if lockstep else active):
            break
    ids, attention = pad(prompts, "left", text.pad)
    more, more_attention = pad(after, "right", text.pad)
    mask, ends = (torch.zeros(more.shape, dtype=torch.bool) for _ in range(2))
    turn_rewards = torch.zeros(more.shape)
    for i, flags in enumerate(written):
        mask[i, : len(flags)] = torch.tensor(flags)
        for column, reward in rewarded[i].items():
            turn_rewards[i, column] = reward
            ends[i, column] = True
    return Samples(
        torch.cat([ids, more], 1), torch.cat([attention, more_attention], 1), mask, turn_rewards, ends,
        torch.tensor(ended), turns,
    )  # fmt: skip


def _chunks(rows: list[int], size: int, lockstep: bool, ranks: Ranks) -> list[list[int]]:
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    if lockstep:  # as many on every rank, empty ones at the end
        most = max(ranks.gather([len(chunks)]))
        chunks += [[]] * (most - len(chunks))
    return chunks


# ---- scoring --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(
    samples: Samples,
    rows: list[Row],
    roles: Roles,
    function: rewards.RewardFunction | None,
    algorithm: Algorithm,
    text: Text,
    config: Config,
    ranks: Ranks,
) -> Trajectory:
    """Log-probs are computed again by a forward pass like the one that trains (N+24): a cache rounds differently."""
    width, parts = samples.mask.shape[1], []
    for at in range(0, len(samples.mask), config.rollout.microbatch):
        cut = slice(at, at + config.rollout.microbatch)
        ids, attention, mask = (x[cut].to(ranks.device) for x in samples[:3])
        judged = torch.zeros(len(ids))
        with autocast(config, ranks):
            logprobs, entropy = algorithm.logprobs(roles.actor, ids, attention, mask, config.rollout.temperature)
            ref_logprobs, _ = algorithm.logprobs(roles.reference, ids, attention, mask, config.rollout.temperature)
            values = response_values(roles.critic, ids, attention, width)
            if roles.reward is not None:
                judged = config.reward.model_weight * sequence_scores(roles.reward, ids, attention, text.pad).cpu()
        parts.append([logprobs.cpu(), ref_logprobs.cpu(), entropy.cpu(), values.cpu(), judged])
    logprobs, ref_logprobs, entropy, values, scores = (torch.cat(columns) for columns in zip(*parts, strict=True))
    turn_rewards = samples.turn_rewards.clone()
    if function is not None:
        given = [
            {"prompt": row["prompt"], "response": turns[-1], "responses": turns, "row": row}
            for row, turns in zip(rows, samples.turns, strict=True)
        ]
        for i, values_of_turns in enumerate(rewards.call(function, given, "reward.function")):
            weighted = [config.reward.function_weight * value for value in values_of_turns]
            if len(weighted) == 1:
                scores[i] += weighted[0]
            else:
                turn_rewards[i, samples.ends[i]] += torch.tensor(weighted)
    return Trajectory(
        samples.ids, samples.attention, samples.mask, logprobs, ref_logprobs, entropy, values, turn_rewards, scores,
        samples.has_eos,
    )  # fmt: skip


def response_values(critic: Any, ids: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """[B, T]: the position before token t has seen the prompt and tokens 0..t-1."""
    values: torch.Tensor = critic(ids, attention)
    return values[:, -width - 1 : -1]


def sequence_scores(reward: Scalar, ids: torch.Tensor, attention: torch.Tensor, filler: int) -> torch.Tensor:
    """[B]: query and response together (N+1), read at the last real token (N+8), padding moved to the right."""
    ids, attention = pad_right(ids, attention, filler)
    last = attention.sum(1) - 1
    scores: torch.Tensor = reward(ids, attention)
    return scores.gather(1, last[:, None]).squeeze(1)


def pad_right(ids: torch.Tensor, mask: torch.Tensor, filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same rows with every padding position moved behind the text, cut to the longest row."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(mask.sum(1).max())]
    mask = mask.gather(1, order)
    return ids.gather(1, order).where(mask, filler), mask


# ---- every rank's ---------------------------------------------------------------------------------------------------


def gather(trajectory: Trajectory, filler: int, ranks: Ranks) -> Trajectory:
    """The rows of all ranks, in order, on every rank: prompts padded on the left, the rest on the right."""
    if ranks.size == 1:
        return trajectory
    parts: list[Trajectory] = ranks.gather([trajectory])
    width = max(part.mask.shape[1] for part in parts)
    prompt = max(part.ids.shape[1] - part.mask.shape[1] for part in parts)

    def fit(x: torch.Tensor, part: Trajectory, wide: bool, value: int) -> torch.Tensor:
        if x.dim() == 1:
            return x
        left = prompt - (part.ids.shape[1] - part.mask.shape[1]) if wide else 0
        return torch.nn.functional.pad(x, (left, width - part.mask.shape[1]), value=value)

    return Trajectory(
        *(
            torch.cat([fit(part[i], part, wide=i < 2, value=filler if i == 0 else 0) for part in parts])
            for i in range(len(trajectory))
        )
    )
