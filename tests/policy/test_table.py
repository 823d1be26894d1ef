"""More than a hundred situations, each with the decision and the reason that are expected (``table.txt``)."""

from __future__ import annotations

from pathlib import Path

from rackrun.policy import Rung, choose, parse_rules, parse_weights
from tests.policy.situations import situation

TABLE = Path(__file__).with_name("table.txt")
ROWS = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_table_has_a_hundred_situations_and_every_rung() -> None:
    assert len(ROWS) >= 100
    assert len({row[:3] for row in ROWS}) == len(ROWS)
    assert {row[3] for row in ROWS} == {rung.value for rung in Rung}


def test_each_decision_is_the_expected_one_for_the_expected_reason() -> None:
    wrong = []
    for words, rules, weights, rung, reason in ROWS:
        decision = choose(*situation(words), parse_rules(rules), parse_weights(weights))
        start = reason.removesuffix(" ...")
        same = decision.reason.startswith(start) if reason != start else decision.reason == reason
        if decision.rung.value != rung or not same:
            wrong.append(f"{words} | {rules} | {weights}: {decision.reason}")
    assert not wrong, "\n" + "\n".join(wrong)
