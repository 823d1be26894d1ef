"""What the documents of the kit become: a table that people read, which is never older than they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu.measured import documents, table

DOCS = Path(__file__).resolve().parents[2] / "docs" / "gpu_measured.md"


def document(ended_at: str, **checks: str) -> dict[str, Any]:
    return {
        "ended_at": ended_at,
        "facts": {"gpus": [{"name": "H"}], "torch": "2"},
        "checks": [
            {
                "id": name,
                "title": "a title",
                "expected": "1 | 2",
                "outcome": outcome,
                "must": True,
                "value": 0.123456,
                "unit": "s",
                "note": f"at {ended_at}",
            }
            for name, outcome in checks.items()
        ],
    }


def test_the_newest_outcome_of_a_check_counts_in_the_order_of_the_kit() -> None:
    told = [document("1", C1="fail", A1="ok"), document("2", C1="ok")]
    first, second = table(told).splitlines()[2:]
    assert first == "| A1 | a title | 1 / 2 | 0.1235 s: at 1 | yes | H, torch 2 |"
    assert second == "| C1 | a title | 1 / 2 | 0.1235 s: at 2 | yes | H, torch 2 |"


def test_what_was_cut_short_takes_no_outcome_away() -> None:
    (row,) = table([document("1", C1="fail"), document("2", C1="not reached")]).splitlines()[2:]
    assert "at 1 | **no**" in row
    (row,) = table([document("1", C1="not reached"), document("2", C1="not reached")]).splitlines()[2:]
    assert "at 2 | not reached" in row


def test_what_was_cut_short_is_not_told_where_another_gpu_has_an_outcome() -> None:
    other = document("2", C1="not reached", A1="skip", B1="not reached")
    other["facts"] = {"gpus": [{"name": "I"}], "torch": "2"}
    rows = table([document("1", C1="fail", A1="ok"), other]).splitlines()[2:]
    assert [(row[2:4], row[-12]) for row in rows] == [("A1", "H"), ("B1", "I"), ("C1", "H")]


def test_the_docs_have_the_table_of_the_documents_that_are_kept() -> None:
    """``python3 -m benchmarks.gpu.measured`` writes it."""
    _, _, rest = DOCS.read_text().partition("<!-- benchmarks.gpu.measured writes from here -->\n")
    assert rest.partition("\n<!-- to here -->")[0] == table(documents())
