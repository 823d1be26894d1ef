"""docs/checkpoint_faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "checkpoint_faults.md"


def test_every_fault_has_tests_that_exist() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if re.match(r"\| \d+ ", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, 34))
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, name in named:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), name
