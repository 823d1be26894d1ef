"""docs/frameworks.md is what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.table import PAGE, Feature, features, page


def test_the_page_is_what_the_tests_show() -> None:
    assert PAGE.read_text() == page(features()), "run: python -m tests.frameworks.table"


def test_a_marker_becomes_a_line_also_one_of_a_parameter(tmp_path: Path) -> None:
    marked = '@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.feature("TRL", "packing"))])\n'
    (tmp_path / "test_a.py").write_text(
        f'{marked}@pytest.mark.feature("TRL", "GRPO", how="refused")\ndef test_it(a):\n    pass\n'
    )
    found = features(tmp_path)
    assert set(found) == {
        Feature("TRL", "packing", "works", "test_it"),
        Feature("TRL", "GRPO", "refused", "test_it"),
    }
    lines = page(found).splitlines()
    assert lines[-2:] == ["| packing | works | `test_it` |", "| GRPO | refused | `test_it` |"]


@pytest.mark.parametrize("marker", ['"Nobody", "a"', '"TRL", "a", how="perhaps"', '"TRL", name'])
def test_a_marker_that_says_nothing_is_an_error(marker: str, tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(f"@pytest.mark.feature({marker})\ndef test_it():\n    pass\n")
    with pytest.raises(ValueError, match="test_it"):
        features(tmp_path)
