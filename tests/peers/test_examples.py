"""The examples do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_cartpole_reaches_its_solved_score():
    done = subprocess.run(
        [sys.executable, "examples/cartpole.py"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    assert "solved" in done.stdout
