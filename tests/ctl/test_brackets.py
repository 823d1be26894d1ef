"""What users and errors say is shown as it is, whatever it looks like to the library that draws tables."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rackrun.coordinator.report.run_report import read_report
from rackrun.ctl.run_render import render_report, render_result, render_status
from rackrun.launch.run.run_directory import Result
from tests.chaos.recorded import write_run

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ["[/]", "[/bold] over", "[red]x", "expected shape [3, 4], got [/usr/lib]", "[link=a", "\\[", ":warning: [b]"]
DRAWS = [*(ROOT / "rackrun" / "ctl").rglob("*.py"), *(ROOT / "rackrun" / "launch").rglob("*.py")]
DRAWS += [*(ROOT / "chaos").rglob("*.py"), *(ROOT / "topology").rglob("*.py")]


def drawn(render: Any, *what: Any) -> str:
    """On a console that takes markup, which is the default."""
    console = Console(file=io.StringIO(), width=400)
    render(console, *what)
    said: str = console.file.getvalue()  # type: ignore[attr-defined]
    return said


@pytest.mark.parametrize("text", HOSTILE)
def test_a_report_and_a_result_show_what_was_said(text: str, tmp_path: Path) -> None:
    report = read_report(write_run(tmp_path / "out") / "faulted" / "run" / "journal.sqlite")
    said = drawn(render_report, msgspec.structs.replace(report, because=text, exit_code=1, run_id=text))
    assert said.count(text) == 2
    result = Result(run_id="r", exit_code=1, because=text, remedy=text, steps=1, recoveries=(text,), seconds=1.0)
    assert drawn(render_result, result).count(text) == 3


@pytest.mark.parametrize("because", ["rank 1 lost", "rank 1 lost."])
def test_a_result_says_which_part_is_the_remedy(because: str) -> None:
    result = Result(run_id="r", exit_code=3, because=because, remedy="ask again.", steps=1, recoveries=(), seconds=1.0)
    assert "\nrank 1 lost. Remedy: ask again.\n" in drawn(render_result, result)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_status_shows_what_was_said(text: str) -> None:
    status = {
        "run_id": text,
        "uptime_s": 1.0,
        "recoveries": 1,
        "last_recovery": text,
        "progress": {"position": [1, 0], "steps_per_s": 1.0, "values": {"note": text}},
        "core": {
            "phase": text,
            "waits": text,
            "ranks": [{"rank": 0, "slot": text, "incarnation": 1, "state": "ready"}],
            "trays": [
                {
                    "tray": "tray-00",
                    "withdrawn": {"tray-00/0": text},
                    "probation": {"tray-00/0": text},
                    "unjudged": text,
                }
            ],
        },
    }
    assert drawn(render_status, status).count(text) == 9


def test_no_console_takes_markup() -> None:
    """So that nobody has to remember it."""
    found = []
    for path in DRAWS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if given.get("markup") != "False" or given.get("emoji") != "False":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found, "give Console markup=False, emoji=False, and style with Text"
