"""Write ``report.html``, a single file that needs no other."""

from __future__ import annotations

import shlex
from itertools import groupby
from pathlib import Path

from rackrun.chaos.report.analysis.report_data import Material
from rackrun.chaos.report.plots import GOODPUT, plots_of
from rackrun.chaos.report.run_text import NAMES, duration, next_steps, sentence, story
from rackrun.pages import templates

__all__ = ["write_page"]

STORIES = 12
PLAN_CHARS = 200_000
_TEMPLATE = Path(__file__).with_name("run_page.html.j2")


def write_page(material: Material, path: Path) -> None:
    """Write the page of a run to ``path``."""
    summary = material.summary
    told = sorted(summary.strikes, key=lambda one: one.took is True)[:STORIES]  # trouble comes first
    resolved = material.out / "resolved.json"
    templates.write(
        path,
        _TEMPLATE,
        summary=summary,
        title=f"{NAMES[summary.holds]}: {summary.plan or 'chaos'}, seed {summary.seed}",
        why=_parts_of(summary.diagnosis),
        stories=[(one.number, story(one)) for one in sorted(told, key=lambda one: one.number)],
        plots=plots_of(material),
        GOODPUT=GOODPUT,
        command=shlex.join(["rackctl", "chaos", "run", str(resolved), "--", *summary.command]),
        resolved=_text_of(resolved),
        recoveries=summary.recoveries[: STORIES * 4],
        duration=duration,
        next_steps=next_steps,
        sentence=sentence,
    )


def _parts_of(diagnosis: str) -> list[tuple[bool, list[str]]]:
    """Return its paragraphs and, with True, its lists of facts: the indented lines."""
    parts = groupby(diagnosis.splitlines(), key=lambda line: line.startswith(" "))
    return [(facts, [line.strip() for line in lines]) for facts, lines in parts]


def _text_of(plan: Path) -> str:
    try:
        text = plan.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{plan.name} cannot be read: {error.strerror}"
    more = len(text) - PLAN_CHARS
    return text if more <= 0 else f"{text[:PLAN_CHARS]}\n... {more} characters more, in {plan.name}"
