"""Write all reports of a run into its folder: history and summary, ``trace.json``, ``report.html``, ``report.md``."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

from rackrun.chaos.evidence.history import write_history
from rackrun.chaos.evidence.summary import Summary, write_summary
from rackrun.chaos.report.analysis.report_data import read_material
from rackrun.chaos.report.chrome_trace import write_trace
from rackrun.chaos.report.html_page import write_page
from rackrun.chaos.report.run_text import markdown
from rackrun.errors import RackrunError, UsageError

__all__ = ["make_report", "report_on"]


def report_on(out: Path, summary: Summary, tell: Callable[[str], None]) -> Summary:
    """Write the reports at the end of a run, and return the completed summary.

    A failure of the reports is passed to ``tell`` and changes nothing in the run's verdict.
    """
    write_summary(out, summary)
    try:
        made = make_report(out)
    except (RackrunError, OSError, sqlite3.Error) as error:
        tell(f"there is no report: {error}")
        return summary
    except Exception as error:  # noqa: BLE001 - ours, and no reason to lose what the run has shown
        tell(f"there is no report: {type(error).__name__}: {error}. Remedy: please report this, with {out}.")
        return summary
    tell(f"the report is {out / 'report.html'}")
    return made


def make_report(out: Path) -> Summary:
    """Write all reports from what ``out`` holds; each call writes the same files.

    Raises `UsageError` when ``out`` holds no run with faults, or cannot be written.
    """
    material = read_material(out)
    try:
        write_history(out / "history.jsonl", material.history)
        write_summary(out, material.summary)
        (out / "report.md").write_text(markdown(material.summary), encoding="utf-8")
        write_trace(material, out / "trace.json")
        write_page(material, out / "report.html")
    except OSError as error:
        raise UsageError(
            f"{out} cannot be written: {error.strerror}.",
            remedy="copy the folder to where you may write; its reports are written into it.",
        ) from error
    return material.summary
