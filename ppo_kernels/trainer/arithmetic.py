"""A verifiable task: "What is 7+5?", and a reward that reads the answer instead of judging it."""

from __future__ import annotations

import random
import re
from typing import Any

Row = dict[str, Any]  # {"prompt": [{"role": "user", "content": "What is 7+5?"}], "answer": "12"}

COMPUTE = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

# A minus is a sign where it touches the number and stands neither behind an operand ("10-7", "(2)-7", "10 -7") nor
# inside a word ("covid-19"). A decimal or a power of ten is a number too, matched whole so that no part of it is read
# as an integer.
NUMBER = re.compile(
    r"""
    (?: (?<![^\W_]) (?<![)\]]) (?<!\d\ ) (?P<minus> [-−–] ) )?
    (?: (?P<integer> [1-9]\d{0,2} (?:,\d{3})+ (?!\d) | \d+ )
        (?P<fraction> (?:\.\d+)* (?:[eE][-+−]?\d+)? )
      | (?<![\w.]) \.\d+ )
    """,
    re.VERBOSE,
)


def rows(seed: int, count: int, operators: str = "+-*", largest: int = 20) -> list[Row]:
    """`count` different questions on operands in [0, largest], in random order, the same for the same seed.

    Raises ValueError when there are not that many.
    """
    return split(seed, count, 0, operators, largest)[0]


def split(
    seed: int, train: int, heldout: int, operators: str = "+-*", largest: int = 20
) -> tuple[list[Row], list[Row]]:
    """`train` and `heldout` different questions; 5+7 on one side keeps both 5+7 and 7+5 off the other.

    Raises ValueError when there are not that many.
    """
    rng = random.Random(seed)
    numbers = range(largest + 1)
    pairs = [(a, operator, b) for operator in operators for a in numbers for b in numbers[a:]]
    rng.shuffle(pairs)
    sides: tuple[list[Row], list[Row]] = ([], [])
    for a, operator, b in pairs:
        side, wanted = (sides[1], heldout) if len(sides[1]) < heldout else (sides[0], train)
        both = [_row(a, operator, b), _row(b, operator, a)][: 2 if a != b else 1]
        side += both[: wanted - len(side)]
    if len(sides[0]) < train or len(sides[1]) < heldout:
        total = len(operators) * len(numbers) ** 2
        raise ValueError(
            f"{train} + {heldout} questions of {total}: held-out ones leave {len(sides[0])} to train on; "
            f"raise largest={largest}"
        )
    for side in sides:
        rng.shuffle(side)
    return sides


def _row(a: int, operator: str, b: int) -> Row:
    content = f"What is {a}{operator}{b}?"
    return {"prompt": [{"role": "user", "content": content}], "answer": str(COMPUTE[operator](a, b))}


def score(samples: list[dict[str, Any]]) -> list[float]:
    """1.0 where the last number in `sample["response"]` is the integer `sample["row"]["answer"]`, else 0.0.

    "1,200" is 1200; "12." is 12 and "12.5" is no integer; "−3" with any minus is -3, and "10-7" ends in 7.
    """
    return [float(last_integer(sample["response"]) == sample["row"]["answer"]) for sample in samples]


def last_integer(text: str) -> str | None:
    """The last number in plain digits ("-3", "1200"), or None when it is no integer or there is none."""
    numbers = list(NUMBER.finditer(text))
    if not numbers or numbers[-1]["integer"] is None or numbers[-1]["fraction"]:
        return None
    digits = numbers[-1]["integer"].replace(",", "").lstrip("0") or "0"  # not int(): it refuses thousands of digits
    return f"-{digits}" if numbers[-1]["minus"] and digits != "0" else digits
