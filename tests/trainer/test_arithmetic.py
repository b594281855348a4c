from __future__ import annotations

import re

import pytest

from ppo_kernels.trainer.arithmetic import Row, last_integer, rows, score, split

QUESTION = re.compile(r"What is (\d+)([-+*])(\d+)\?")


def operands(row: Row) -> tuple[int, str, int]:
    (message,) = row["prompt"]
    assert message.keys() == {"role", "content"}
    assert message["role"] == "user"
    match = QUESTION.fullmatch(message["content"])
    assert match
    return int(match[1]), match[2], int(match[3])


def reward(response: str, answer: str) -> float:
    row = {"prompt": [{"role": "user", "content": "What is 7+5?"}], "answer": answer}
    (value,) = score([{"prompt": row["prompt"], "response": response, "row": row}])
    return value


@pytest.mark.parametrize(
    ("response", "integer"),
    [
        ("12", "12"),
        ("12.", "12"),
        ("12.\n", "12"),
        ("It is 12, I think.", "12"),
        ("7+5=12", "12"),
        ("7 + 5 = 12!", "12"),
        ("First 11, no: 12", "12"),
        ("12 is 7+5", "5"),
        ("The answer is...12", "12"),
        ("Answer.12", "12"),
        ("12:30", "30"),
        ("12kg", "12"),
        ("**12**", "12"),
        ("\\boxed{12}", "12"),
        ("012", "12"),
        ("+12", "12"),
        ("0", "0"),
        ("000", "0"),
        ("-0", "0"),
        # thousands
        ("1,200", "1200"),
        ("1,200.", "1200"),
        ("1,234,567", "1234567"),
        ("-1,200", "-1200"),
        ("5, 7, 12", "12"),
        ("5,7,12", "12"),
        ("1,2003", "2003"),
        ("1234,567", "567"),
        ("0,123", "123"),
        ("1 200", "200"),
        # signs
        ("-3", "-3"),
        ("−3", "-3"),
        ("–3", "-3"),
        ("4-7=-3", "-3"),
        ("4 - 7 = −3.", "-3"),
        ("it is -3", "-3"),
        ("(-3)", "-3"),
        ("$-3$", "-3"),
        ("_-3_", "-3"),
        ("**-3**", "-3"),
        ("answer:-3", "-3"),
        ("5--3", "-3"),
        ("10\n-7", "-7"),
        # not signs
        ("10-7", "7"),
        ("10−7", "7"),
        ("10 -7", "7"),
        ("10 - 7", "7"),
        ("(2)-7", "7"),
        ("x-7", "7"),
        ("1–3", "3"),
        ("- 3", "3"),
    ],
)
def test_the_last_integer_is_read(response: str, integer: str) -> None:
    assert last_integer(response) == integer
    assert reward(response, integer) == 1.0
    assert reward(response, str(int(integer) + 1)) == 0.0
    if integer != "0":
        assert reward(response, str(-int(integer))) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        *["", "twelve", "-", ".", ",", "NaN", "inf"],
        *["12.5", "-12.5", "1.12", "12.0", "1,200.5", "12: 12.5", ".12", "is -.12", "1.2.12"],
        *["12e12", "12E-12", "1e12", "12.5e12"],
    ],
)
def test_no_integer_is_read_out_of_a_decimal_or_out_of_nothing(response: str) -> None:
    assert last_integer(response) is None
    assert reward(response, "12") == 0.0


def test_five_thousand_digits_are_a_wrong_answer_and_not_an_error() -> None:
    """int() refuses them; a policy that repeats one token writes them."""
    assert reward("1" * 5000, "1") == 0.0
    assert reward("7+5=12" + ",111" * 5000 + "1", "12") == 0.0


def test_one_reward_a_sample_in_their_order() -> None:
    some = rows(seed=0, count=6)
    samples = [{"prompt": row["prompt"], "response": f"= {row['answer']}", "row": row} for row in some]
    samples[2]["response"] = samples[4]["response"] = "?"
    assert score(samples) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert score([]) == []


def test_every_answer_is_right_and_every_operator_occurs() -> None:
    some = rows(seed=0, count=300)
    for row in some:
        a, operator, b = operands(row)
        assert row.keys() == {"prompt", "answer"}
        assert row["answer"] == str({"+": a + b, "-": a - b, "*": a * b}[operator])
        assert 0 <= min(a, b) <= max(a, b) <= 20
    assert {operands(row)[1] for row in some} == set("+-*")
    assert any(row["answer"].startswith("-") for row in some)


def test_the_rows_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    assert rows(3, 50) == rows(3, 50)
    assert rows(3, 50) != rows(4, 50)
    assert split(3, 50, 20) == split(3, 50, 20)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("train", "heldout"), [(1000, 200), (1, 1), (10, 1300), (0, 7), (7, 0), (0, 0)])
def test_no_operand_pair_of_an_operator_is_on_both_sides(seed: int, train: int, heldout: int) -> None:
    sides = split(seed, train, heldout)
    assert tuple(map(len, sides)) == (train, heldout)
    asked = [{operands(row) for row in side} for side in sides]
    assert tuple(map(len, asked)) == (train, heldout), "no question twice"
    pairs = [{(operator, *sorted((a, b))) for a, operator, b in side} for side in asked]
    assert not pairs[0] & pairs[1]


def test_all_questions_can_be_asked_and_no_more() -> None:
    assert len({operands(row) for row in rows(0, 27, largest=2)}) == 27
    assert {operands(row)[1] for row in rows(0, 9, operators="*", largest=2)} == {"*"}
    with pytest.raises(ValueError, match="raise largest=2"):
        rows(0, 28, largest=2)
    with pytest.raises(ValueError, match="raise largest=2"):
        split(0, 27, 1, largest=2)
