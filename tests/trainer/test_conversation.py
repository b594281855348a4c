"""Several turns: whose token is whose, what each of them carries, and what users' environments may do."""

from __future__ import annotations

import copy
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_kernels.trainer.algo import ALGORITHMS
from ppo_kernels.trainer.data import Row, Text
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.movies import EOS, PAD
from ppo_kernels.trainer.rollout import Samples, Trajectory, converse, score
from ppo_kernels.trainer.settings import load

from .conftest import World
from .test_update import BACKENDS, gradients, make, minibatch, moved

CHAT = (
    "{% for m in messages %}<bos>{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)


def question(content: str, **more: Any) -> Row:
    return {"prompt": [{"role": "user", "content": content}], **more}


def chat(world: World, template: str = CHAT, **special: str) -> Text:
    tokenizer = copy.deepcopy(world.tokenizer)
    tokenizer.chat_template = template
    for name, token in special.items():
        setattr(tokenizer, name, token)
    return Text(tokenizer, world.config.data)


def encode(world: World, text: str) -> list[int]:
    ids: list[int] = world.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def letters(world: World, text: str) -> list[int]:
    """One token per character, as no tokenizer would write a word."""
    ids: list[int] = world.tokenizer.convert_tokens_to_ids(list(text))
    return ids


class Speaker:
    """A policy that says the given tokens: of each conversation one list a turn. Told apart by their first prompt."""

    def __init__(self, script: dict[tuple[int, ...], list[list[int]]]) -> None:
        self.script = {prompt: [*turns] for prompt, turns in script.items()}
        self.heard: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)  # what each turn was an answer to
        self.saying: list[list[int]] = []

    def logits(self, ids: torch.Tensor, attention: torch.Tensor, keep: int, cache: Any) -> torch.Tensor:
        if ids.shape == attention.shape:
            contexts = [row[real].tolist() for row, real in zip(ids, attention, strict=True)]
            self.saying = [self.answer(context) for context in contexts]
        now = torch.tensor([turn.pop(0) if turn else 0 for turn in self.saying])
        return torch.nn.functional.one_hot(now, 420)[:, None] * 1e4

    def answer(self, context: list[int]) -> list[int]:
        prompt = next(prompt for prompt in self.script if tuple(context[: len(prompt)]) == prompt)
        self.heard[prompt].append(context)
        return [*self.script[prompt].pop(0)]


class Told:
    """An environment that says and pays what the row has it say, and writes down what it hears."""

    def __init__(self, row: Row) -> None:
        self.row, self.left = row, [*row["says"]]

    def step(self, response: str) -> tuple[str | None, float]:
        self.row.setdefault("heard", []).append(response)
        answer: tuple[str | None, float] = self.left.pop(0)
        return answer


def talk(
    world: World, rows: list[Row], text: Text, policy: Any = None, environment: Any = Told, *overrides: str
) -> Samples:
    keys: list[tuple[int | str, ...]] = [("test", i) for i in range(len(rows))]
    config = load(list(overrides), world.config.model_dump())
    return converse(policy or world.roles.actor, rows, keys, text, environment, config, world.ranks)


def judged(world: World, samples: Samples, rows: list[Row], text: Text, function: Any = None) -> Trajectory:
    roles = world.roles._replace(reward=None)
    return score(samples, rows, roles, function, ALGORITHMS["linear"], text, world.config, world.ranks)


# ---- whose token is whose -------------------------------------------------------------------------------------------


def test_a_conversation_is_what_was_said_and_only_the_models_part_is_masked_in(world: World) -> None:
    """Three at once: one ends its turns by itself, one is cut short, one is over after a turn."""
    text = chat(world)
    rows = [
        question("a", says=[("yes", 0.5), ("no", -1.0), ("never said", 2.0)]),
        question("bcd", says=[("", 0.0), ("x", 0.0), (None, 1.0)]),
        question("e", says=[(None, 4.0)]),
    ]
    red, green, blue = (letters(world, word) for word in ("red", "green", "blue"))
    script = {
        tuple(text.prompt(rows[0])): [[*red, EOS], [*blue, EOS], [EOS]],
        tuple(text.prompt(rows[1])): [green, [*blue, EOS], red],
        tuple(text.prompt(rows[2])): [[*red, EOS]],
    }
    samples = talk(world, rows, text, Speaker(script), Told, "data.max_turns=3", "rollout.max_new_tokens=5")

    def user(content: str) -> list[int]:
        return encode(world, f"<bos>user:{content}<eos><bos>assistant:")

    expected = [
        [(red, 1), ([EOS], 1), (user("yes"), 0), (blue, 1), ([EOS], 1), (user("no"), 0), ([EOS], 1)],
        [(green, 1), ([EOS], 0), (user(""), 0), (blue, 1), ([EOS], 1), (user("x"), 0), ([*red, 0, 0], 1)],
        [(red, 1), ([EOS], 1)],
    ]
    prompt_width = samples.ids.shape[1] - samples.mask.shape[1]
    for i, parts in enumerate(expected):
        said = [token for tokens, _ in parts for token in tokens]
        mine = [bool(by_model) for tokens, by_model in parts for _ in tokens]
        real = samples.attention[i]
        assert samples.ids[i][real].tolist() == text.prompt(rows[i]) + said
        assert real[prompt_width:].tolist() == [True] * len(said) + [False] * (samples.mask.shape[1] - len(said))
        assert samples.mask[i].tolist() == mine + [False] * (samples.mask.shape[1] - len(said))
    assert samples.has_eos.tolist() == [True, False, True]
    assert samples.turns == [["red", "blue", ""], ["green", "blue", "red"], ["red"]]
    assert [row["heard"] for row in rows] == samples.turns


def test_a_turns_reward_lands_on_its_last_token(world: World) -> None:
    text = world.text
    rows: list[Row] = [
        {"prompt": "a", "says": [("red", 0.5), ("", -1.0), ("never said", 2.0)]},
        {"prompt": "b", "says": [(None, 4.0)]},
    ]
    script = {tuple(text.prompt(rows[0])): [[40, 41, EOS], [42], [43, 44]], tuple(text.prompt(rows[1])): [[45, EOS]]}
    samples = talk(world, rows, text, Speaker(script), Told, "data.max_turns=3", "rollout.max_new_tokens=3")
    between = [0.0] * len(encode(world, "red"))
    # [43, 44] goes on to the third token; an empty reply leaves two turns side by side
    assert samples.turn_rewards[0].tolist() == [0.0, 0.0, 0.5, *between, 0.0, 0.0, -1.0, 0.0, 0.0, 2.0]
    assert samples.turn_rewards[1].tolist()[:3] == [0.0, 4.0, 0.0]
    assert torch.equal(samples.ends, samples.turn_rewards != 0)


def test_what_the_model_wrote_is_never_tokenized_again(world: World) -> None:
    text = chat(world)
    rows = [question("a", says=[("go on", 0.0), (None, 0.0)])]
    the, whole = letters(world, "the"), encode(world, "the")
    assert whole != the
    prompt = tuple(text.prompt(rows[0]))
    policy = Speaker({prompt: [[*the, EOS], [*the, EOS]]})
    samples = talk(world, rows, text, policy)
    heard = [*prompt, *the, EOS, *encode(world, "<bos>user:go on<eos><bos>assistant:")]
    assert policy.heard[prompt] == [[*prompt], heard]
    assert samples.ids[0].tolist() == [*heard, *the, EOS]
    assert samples.turns == [["the", "the"]]


CLOSINGS = {  # template -> what follows an answer that ended by itself, one that was cut short
    CHAT: ("<bos>user:hi<eos><bos>assistant:", "<eos><bos>user:hi<eos><bos>assistant:"),
    CHAT.replace("<eos>", "\n<eos>\n"): ("\n<bos>user:hi\n<eos>\n<bos>assistant:",
                                         "\n<eos>\n<bos>user:hi\n<eos>\n<bos>assistant:"),
    CHAT.replace("<eos>", "</turn>"): ("</turn><bos>user:hi</turn><bos>assistant:",) * 2,
    CHAT.replace("<eos>", "{{ '<eos>' if m.role == 'user' else ' .' }}"): (
        " .<bos>user:hi<eos><bos>assistant:",) * 2,
}  # fmt: skip


@pytest.mark.parametrize("template", CLOSINGS)
def test_an_answer_is_closed_once_by_the_model_or_by_the_template(world: World, template: str) -> None:
    """Also where space stands before the end, where turns end in plain text, and where only the user's end in EOS."""
    text = chat(world, template)
    replies = tuple(world.tokenizer.decode(text.reply("hi", question("?"), ended)) for ended in (True, False))
    assert replies == CLOSINGS[template]


def test_an_empty_reply_keeps_its_own_end(world: World) -> None:
    template = CHAT.replace("<eos>", "{{ '<eos>' if m.role == 'user' }}").replace("{{ m.role }}:", "")
    reply = chat(world, template).reply("", question("?"), ended=True)
    assert world.tokenizer.decode(reply).startswith("<bos><eos><bos>")


def test_a_prompt_that_is_a_text_is_answered_as_text(world: World) -> None:
    """The template is for messages: half a conversation in it would be none."""
    text = chat(world)
    assert text.reply("hi", {"prompt": "a text"}, ended=True) == encode(world, "hi")


def test_a_template_that_drops_answers_is_refused(world: World) -> None:
    text = chat(world, "{% for m in messages if m.role == 'user' %}{{ m.content }}<eos>{% endfor %}")
    with pytest.raises(DataError, match="leaves out what an assistant said"):
        text.reply("hi", question("?"), ended=True)


def test_padding_that_is_the_end_token_changes_nothing(world: World) -> None:
    """N+2: the same weights, asked with padding of their own and with EOS for padding."""
    rows = [question("the film", says=[("why", 1.0), (None, 0.0)]), question("that very old movie", says=[(None, 2.0)])]
    own, same = chat(world), chat(world, pad_token="<eos>")
    assert (own.pad, same.pad) == (PAD, EOS)
    one, other = (talk(world, rows, text) for text in (own, same))
    assert not torch.equal(one.ids, other.ids)
    for name in ("attention", "mask", "turn_rewards", "ends", "has_eos", "turns"):
        assert str(getattr(one, name)) == str(getattr(other, name)), name
    assert torch.equal(one.ids[one.attention], other.ids[other.attention])
    first, second = (judged(world, x, rows, text) for x, text in ((one, own), (other, same)))
    for name in ("logprobs", "ref_logprobs", "entropy", "scores"):
        torch.testing.assert_close(getattr(first, name), getattr(second, name), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.values[first.mask], second.values[second.mask], rtol=1e-5, atol=1e-6)


# ---- what each token carries ----------------------------------------------------------------------------------------


def conversation(world: World) -> tuple[list[Row], Samples, Trajectory]:
    """Of the tiny model itself: rows of one, two and three turns, in which the environment says different things."""
    rows: list[Row] = [
        {"prompt": "the film", "says": [("was it good", 1.0), ("and why", -2.0), (None, 0.5)]},
        {"prompt": "that very old movie", "says": [("hm", 0.0), (None, 3.0)]},
        {"prompt": "her song", "says": [(None, -1.0)]},
    ]
    samples = talk(world, rows, world.text, None, Told, "rollout.max_new_tokens=5", "data.max_turns=3")
    return rows, samples, judged(world, samples, rows, world.text, lambda given: [0.25 * len(s["row"]) for s in given])


def environments(trajectory: Trajectory) -> torch.Tensor:
    """[B, T]: what the environment said."""
    width = trajectory.mask.shape[1]
    theirs = trajectory.attention[:, -width:] & ~trajectory.mask
    assert theirs.any()
    return theirs


def test_the_environments_tokens_are_attended_to(world: World) -> None:
    rows, samples, trajectory = conversation(world)
    first = int(environments(trajectory)[0].nonzero()[0])
    width = samples.mask.shape[1]
    ids = samples.ids.clone()
    ids[0, -width + first] = 99
    changed = judged(world, samples._replace(ids=ids), rows, world.text)
    for name in ("logprobs", "entropy"):
        one, other = getattr(trajectory, name)[0], getattr(changed, name)[0]
        assert torch.equal(one[:first], other[:first]), "nothing before it knows of it"
        later = samples.mask[0] & (torch.arange(width) > first)
        assert bool((one[later] != other[later]).all())


def test_a_later_turn_has_the_log_probs_of_the_whole_conversation_read_at_once(world: World) -> None:
    """What the rollout sampled from a cache, turn by turn, is what training computes."""
    _, samples, trajectory = conversation(world)
    for i in range(len(samples.ids)):
        tokens = samples.ids[i][samples.attention[i]]
        with world.roles.actor.head.logits():
            logits = world.roles.actor.model(tokens[None]).logits[0].detach() / world.config.rollout.temperature
        alone = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None]).squeeze(1)
        mine = samples.mask[i][samples.attention[i, -samples.mask.shape[1] :]]
        torch.testing.assert_close(
            trajectory.logprobs[i][samples.mask[i]], alone[-len(mine) :][mine], atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_environments_token_has_as_log_prob_or_value_changes_nothing(world: World, backend: str) -> None:
    """Not the rewards, not the advantages, not their whitening, not the loss, its metrics or its gradient."""
    _, _, clean = conversation(world)
    algorithm, config = ALGORITHMS[backend], make(f"train.loss={backend}", "ppo.entropy_coef=0.01")
    theirs = environments(clean)
    junk = [50.0 * torch.randn(theirs.shape) for _ in range(4)]
    names = ("logprobs", "ref_logprobs", "values", "entropy")
    dirty = clean._replace(**{n: getattr(clean, n).where(~theirs, x) for n, x in zip(names, junk, strict=True)})
    results = []
    for batch in (clean, dirty):
        rewards = batch.turn_rewards + algorithm.token_rewards(
            batch.scores, batch.logprobs, batch.ref_logprobs - 0.1, batch.mask, kl_coef=0.3, kl_estimator="k1"
        )
        advantages, returns = algorithm.advantages(rewards, batch.values, batch.mask, config.ppo)
        white = algorithm.whiten(advantages, batch.mask)
        trained = moved(clean)._replace(logprobs=moved(clean).logprobs.where(~theirs, batch.logprobs),
                                        values=moved(clean).values.where(~theirs, batch.values))  # fmt: skip
        metrics = minibatch(world, (trained, white, returns), config)
        results.append(
            (rewards, advantages, returns, white, metrics, gradients(world, (trained, white, returns), config))
        )
    for tensors in zip(*(result[:4] for result in results), strict=True):
        assert torch.equal(*tensors)
        assert not tensors[0][theirs].any()
    assert results[0][4] == results[1][4]
    assert all(map(torch.equal, results[0][5], results[1][5]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_comes_from_predicting_or_valuing_an_environments_token(world: World, backend: str) -> None:
    _, _, batch = conversation(world)
    keep, config = batch.mask.shape[1] + 1, make("ppo.entropy_coef=0.01")
    policy = world.roles.actor
    hidden = policy.hidden(batch.ids, batch.attention, keep).detach().requires_grad_()
    stub: Any = SimpleNamespace(
        head=policy.head, hidden=lambda *_: hidden, logits=lambda *_: hidden @ policy.head.weight.T
    )
    values = batch.values.clone().requires_grad_()
    advantages = torch.randn(batch.mask.shape)
    loss, _, _ = ALGORITHMS[backend].loss(
        stub, batch.ids, batch.attention, batch.logprobs + 0.1, advantages, batch.mask, values, batch.values,
        batch.values + advantages, float(batch.mask.sum()), 0.8, 0.2, config.ppo,
    )  # fmt: skip
    loss.backward()
    assert hidden.grad is not None
    assert values.grad is not None
    assert torch.equal(hidden.grad[:, :-1].any(-1), batch.mask)
    assert not hidden.grad[:, -1].any()
    assert not values.grad[~batch.mask].any()
    assert values.grad[batch.mask].all()


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """By its definition: the sum over later steps of (gamma lam)^l times the temporal differences."""
    values = [*values, 0.0]
    deltas = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@pytest.mark.parametrize("backend", BACKENDS)
def test_advantages_are_those_of_the_models_tokens_side_by_side(world: World, backend: str) -> None:
    """GAE jumps over what the environment said: no step of discount, no value of its tokens."""
    rows, samples, batch = conversation(world)
    config = make("ppo.gamma=0.9", "ppo.lam=0.8")
    algorithm = ALGORITHMS[backend]
    rewards = batch.turn_rewards + algorithm.token_rewards(
        batch.scores, batch.logprobs, batch.ref_logprobs - 0.1, batch.mask, kl_coef=0.3, kl_estimator="k1"
    )
    advantages, returns = algorithm.advantages(rewards, batch.values, batch.mask, config.ppo)
    white = algorithm.whiten(advantages, batch.mask)[batch.mask]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(white.var(unbiased=False)) == pytest.approx(1.0, abs=1e-4)
    for i, row in enumerate(rows):
        mine = samples.mask[i].nonzero().flatten().tolist()
        expected = [-0.3 * (float(batch.logprobs[i, t] - batch.ref_logprobs[i, t]) + 0.1) for t in mine]
        lasts = [t for t in mine if bool(samples.ends[i, t])]
        assert len(lasts) == len(row["says"])
        for t, (_, paid) in zip(lasts, row["says"], strict=True):
            expected[mine.index(t)] += paid
        expected[-1] += 0.25 * len(row)
        assert rewards[i][mine].tolist() == pytest.approx(expected, abs=1e-5)
        found = plain_gae(expected, batch.values[i][mine].tolist(), 0.9, 0.8)
        assert advantages[i][mine].tolist() == pytest.approx(found, abs=1e-5)
        assert returns[i][mine].tolist() == pytest.approx((advantages + batch.values)[i][mine].tolist(), abs=1e-6)
