"""PPO-ptx and SFT beside PPO: what is added to the gradient, and from which texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ppo_kernels.trainer import mix
from ppo_kernels.trainer.config import MixConfig
from ppo_kernels.trainer.data import Text
from ppo_kernels.trainer.fetch import DataError
from ppo_kernels.trainer.mix import Example, Source, load_sources, negative_log_likelihood, pick
from ppo_kernels.trainer.movies import BOS, EOS
from ppo_kernels.trainer.update import minibatch_gradients

from .conftest import World
from .test_update import make, rollout, setting


def oracle(world: World, examples: list[Example]) -> torch.Tensor:
    """One row at a time, from log_softmax of whole logits."""
    total = torch.tensor(0.0)
    for ids, start in examples:
        row = torch.tensor([ids])
        log_p = world.roles.actor.logits(row, torch.ones_like(row), len(ids)).float().log_softmax(-1)[0]
        total = total - sum(log_p[at - 1, ids[at]] for at in range(start, len(ids)))
    return total


EXAMPLES = [Example([BOS, 40, 41, EOS], 1), Example([BOS, 50, 51, 52, 53, EOS], 3), Example([BOS, 60, 61], 2)]


def test_the_likelihood_is_of_the_tokens_behind_the_prompt_only(world: World) -> None:
    got = negative_log_likelihood(world.roles.actor, EXAMPLES, 0, torch.device("cpu"))
    torch.testing.assert_close(got, oracle(world, EXAMPLES), rtol=1e-5, atol=1e-5)
    assert mix.tokens(EXAMPLES) == 3 + 3 + 1


def test_its_gradient_is_added_to_ppos_times_its_coefficient(world: World) -> None:
    batch, rows = rollout(world), torch.arange(16)
    config = make("mix.rows=3", "ppo.microbatch=4")

    def gradient(*sources: Source) -> torch.Tensor:
        world.roles.actor.model.zero_grad()
        world.roles.critic.zero_grad()
        given = setting(world, config)._replace(sources=list(sources))
        metrics = minibatch_gradients(*batch, rows, given, 0.2, 0, 0)
        assert ("ptx_loss" in metrics) == bool(sources)
        return torch.cat([p.grad.flatten() for p in world.roles.actor.model.parameters()])

    plain, mixed = gradient(), gradient(Source("ptx", 0.5, EXAMPLES))
    world.roles.actor.model.zero_grad()
    (0.5 * oracle(world, EXAMPLES) / 7).backward()
    expected = torch.cat([p.grad.flatten() for p in world.roles.actor.model.parameters()])
    torch.testing.assert_close(mixed - plain, expected, rtol=1e-3, atol=1e-6)


def test_a_source_shorter_or_longer_than_the_run_is_never_cut_off() -> None:
    """A peer zips its loaders: the shorter one ends the epoch."""
    source = Source("ptx", 1.0, [Example([1, i], 1) for i in range(5)])
    seen = [example.ids[1] for step in range(5) for example in pick(source, 3, step, 0, 1)]
    assert all(seen.count(i) == 3 for i in range(5))
    assert sorted(seen[:5]) == list(range(5))
    assert pick(source, 3, 4, 0, 1) == pick(source, 3, 4, 0, 1)
    assert pick(source, 3, 4, 1, 1) != pick(source, 3, 4, 0, 1)


def test_texts_become_examples(world: World, tmp_path: Path) -> None:
    texts, pairs, more = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    texts.write_text("the film was good\n\n  \nher song is long and sad and dull and slow\n")
    pairs.write_text(json.dumps({"prompt": "the film", "response": " was good"}) + "\n")
    more.write_text(json.dumps({"text": "the film was good"}) + "\n")
    ptx, sft = load_sources(MixConfig(ptx=str(texts), sft=str(pairs), max_tokens=8), world.text)
    assert [example.start for example in ptx.examples] == [1, 1]
    assert ptx.examples[0].ids[-1] == EOS
    assert len(ptx.examples[1].ids) == 8
    assert ptx.examples[1].ids[-1] != EOS, "a text cut short has not ended"
    (example,) = sft.examples
    assert world.tokenizer.decode(example.ids[example.start : -1]) == " was good"
    assert load_sources(MixConfig(ptx=str(more)), world.text)[0].examples == ptx.examples[:1]


def test_a_source_that_gives_nothing_is_an_error(world: World, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty.txt", tmp_path / "bad.jsonl"
    empty.write_text("\n\n")
    bad.write_text(json.dumps({"prompt": "x"}) + "\n")
    with pytest.raises(DataError, match=r"mix.ptx: no text"):
        load_sources(MixConfig(ptx=str(empty)), world.text)
    with pytest.raises(DataError, match="needs a response"):
        load_sources(MixConfig(sft=str(bad)), world.text)


TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"


def test_an_answer_ends_as_the_template_ends_it_not_with_the_first_of_several_eos(world: World, tmp_path: Path) -> None:
    """generation_config lists <|end_of_text|> before <|eot_id|>: an SFT pair must teach the latter."""
    pairs, texts = tmp_path / "pairs.jsonl", tmp_path / "ptx.jsonl"
    row = {"question": [{"role": "user", "content": "the film"}], "response": " was good"}
    pairs.write_text(json.dumps(row) + "\n")
    texts.write_text(json.dumps({"text": "the film\u2028was good"}, ensure_ascii=False) + "\n")
    world.tokenizer.chat_template = TEMPLATE
    text = Text(world.tokenizer, world.config.data, [77, EOS])
    assert text.eos[0] == 77
    ptx, sft = load_sources(MixConfig(ptx=str(texts), sft=str(pairs)), text, prompt_key="question")
    assert [x.ids[-1] for x in (*ptx.examples, *sft.examples)] == [EOS, EOS]
