"""What machines read of a run is documented: every field of it, and as a schema."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from rackrun.chaos.evidence import history
from rackrun.chaos.evidence.summary import FORMAT, FaultTimes, Host, StrikeSummary, Summary, read_summary
from rackrun.chaos.report.schemas import schemas
from rackrun.chaos.report.write_reports import make_report
from rackrun.coordinator.report.goodput import Goodput
from tests.chaos.recorded import write_run

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "chaos_report.md").read_text()
ENTRIES: tuple[type[msgspec.Struct], ...] = history.Entry.__args__


@pytest.mark.parametrize("name", schemas())
def test_the_schemas_in_the_documentation_are_those_of_the_types(name: str) -> None:
    told = "python -m rackrun.chaos.report.schemas docs/schemas; when an old reader breaks by it, raise the format"
    assert (DOCS / "schemas" / name).read_bytes() == schemas()[name], told


@pytest.mark.parametrize("kind", [Summary, StrikeSummary, FaultTimes, Host, Goodput, *ENTRIES])
def test_every_field_is_documented(kind: type[msgspec.Struct]) -> None:
    missing = [field.encode_name for field in msgspec.structs.fields(kind) if f"`{field.encode_name}`" not in PAGE]
    assert not missing


def test_every_kind_of_line_is_documented_and_so_is_the_format() -> None:
    assert [tag for kind in ENTRIES if f"| `{(tag := kind.__struct_config__.tag)}` |" not in PAGE] == []
    assert f"`format` is {FORMAT};" in PAGE


def test_what_a_run_leaves_is_what_the_types_say_and_nothing_else(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    make_report(out)
    written = (out / "summary.json").read_bytes()
    assert msgspec.json.decode(written) == msgspec.json.decode(msgspec.json.encode(read_summary(out)))
    for line in (out / "history.jsonl").read_bytes().splitlines():
        assert msgspec.json.encode(msgspec.json.decode(line, type=history.Entry)) == line
