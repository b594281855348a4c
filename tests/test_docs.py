"""The code in README.md and docs/ runs, and what is generated is up to date."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", ["custom_losses.md", "linear.md"])
def test_the_code_of_a_page_runs_from_top_to_bottom(name):
    code = blocks(ROOT / "docs" / name)
    assert code
    exec(compile("\n".join(code), name, "exec"), {})


def test_the_table_of_features_is_the_one_the_presets_give():
    spec = importlib.util.spec_from_file_location("features", ROOT / "docs" / "features.py")
    features = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(features)
    assert features.PAGE.read_text() == features.page(), "run: python docs/features.py"
