"""The tables of docs/trainer.md: every tag is in the code file named, every test exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainer.md").read_text()
CODE = ROOT / "ppo_kernels" / "trainer"
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests" / "trainer").glob("test_*.py"))


def table(letter: str) -> list[list[str]]:
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(rf"\| {re.escape(letter)}\d+ \|", line)
    ]
    return [[cell.strip(" |") for cell in row] for row in rows]


def test_every_implementation_detail_is_tagged_in_its_code_and_has_its_test() -> None:
    rows = table("N+")
    assert [row[0] for row in rows] == [f"N+{i}" for i in range(1, 26)]
    for tag, _, file, *test in rows:
        if file.startswith("not built"):
            continue
        assert re.search(rf"{re.escape(tag)}\b", (CODE / file).read_text()), f"{tag} is not in {file}"
        assert f"def {test[0]}(" in TESTS, f"{tag}: no test {test[0]}"


def test_every_tag_in_the_code_is_in_the_table() -> None:
    known = {row[0] for row in table("N+")}
    used = {tag for path in CODE.glob("*.py") for tag in re.findall(r"N\+\d+", path.read_text())}
    assert used <= known


def test_every_mistake_of_others_has_its_test() -> None:
    rows = table("D")
    assert [row[0] for row in rows] == [f"D{i}" for i in range(1, 14)]
    for tag, _, test in rows:
        assert f"def {test}(" in TESTS, f"{tag}: no test {test}"


def test_the_page_names_every_exit_code_and_section() -> None:
    from ppo_kernels.trainer.cli import EXAMPLES
    from ppo_kernels.trainer.config import Config

    for code in re.findall(r"\b(\d+) [a-z]", EXAMPLES.partition("exit codes:")[2]):
        assert re.search(rf"\b{code}\b", PAGE.partition("Exit codes:")[2]), code
    for section in set(Config.model_fields) - {"name", "out", "seed", "demo", "log", "save"}:
        assert re.search(rf"`?{section}[.:]", PAGE), section
