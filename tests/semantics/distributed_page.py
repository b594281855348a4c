"""Runs the examples of docs/distributed.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text()
DATA_PARALLEL, _rest = PAGE.split("\n## Vocabulary parallel\n")
VOCABULARY_PARALLEL = _rest.split("\n## ")[0]


def run(text: str) -> Iterator[dict[str, Any]]:
    """After each block of Python in `text`: all names so far."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "distributed.md", "exec"), names)
        yield names
