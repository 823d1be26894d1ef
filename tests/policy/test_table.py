"""More than a hundred situations, each with the decision and the reason that are expected (``table.txt``)."""

from __future__ import annotations

from pathlib import Path

import pytest
from situations import situation

from rackrun.core.policy import choose, parse_rules, parse_weights
from rackrun.core.situation import Rung

TABLE = Path(__file__).with_name("table.txt")
ROWS = [
    tuple(cell.strip() for cell in line.split("|"))
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]


def test_the_table_has_a_hundred_situations_and_every_rung_that_is_built() -> None:
    assert len(ROWS) >= 100
    assert len({row[:3] for row in ROWS}) == len(ROWS)
    assert {row[3] for row in ROWS} == {rung.value for rung in Rung} - {"acquire", "shrink"}


@pytest.mark.parametrize("row", ROWS, ids=[" | ".join(row[:3]) for row in ROWS])
def test_the_decision_is_the_expected_one_for_the_expected_reason(row: tuple[str, ...]) -> None:
    words, rules, weights, rung, reason = row
    decision = choose(*situation(words), parse_rules(rules), parse_weights(weights))
    assert decision.rung.value == rung
    if reason.endswith(" ..."):
        assert decision.reason.startswith(reason.removesuffix(" ..."))
    else:
        assert decision.reason == reason
