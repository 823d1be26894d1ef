"""What --log-to takes, and what it refuses before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rackrun.coordinator.sinks.targets import KINDS, make_sink, parse_target
from rackrun.errors import UsageError
from tests.coordinator.sinks.openings import opening


def test_a_path_is_made_absolute_and_everything_else_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_target("jsonl:a/b.jsonl").path == tmp_path / "a/b.jsonl"
    otlp = parse_target("otlp:http://localhost:4318")
    assert (otlp.target, otlp.path) == ("http://localhost:4318", None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("csv:a.csv", "there is no kind 'csv'"),
        ("values.jsonl", "there is no kind"),
        ("jsonl:", "names no target"),
        ("otlp:localhost:4318", "is no http:// or https:// URL"),
        ("otlp:http://host:port", "Port could not be cast"),
    ],
)
def test_what_names_no_sink_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_target(text)


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.imports])
def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=f"pip install {kind}"):
        parse_target(f"{kind}:x")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sink_is_made_without_its_package(kind: str, tmp_path: Path) -> None:
    assert make_sink(opening(kind, "http://localhost", tmp_path)).run in ("", "job-1")
