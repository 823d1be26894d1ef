"""Write the HTML page of a campaign: the tally of `rackrun.chaos.runs.campaign`, one cell for each seed."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import all_faults
from rackrun.chaos.report.html_page import document, figure, table
from rackrun.chaos.report.run_text import NAMES, duration
from rackrun.chaos.runs.campaign import Head, Line, read_tally
from rackrun.errors import UsageError

__all__ = ["read_lines", "tally_line", "write_overview"]

WRONG = 200
"""The most runs that are shown in full; beyond, only their number is given."""
CELLS = 20_000
_FAMILIES = {name_of(kind): kind.family.value for kind in all_faults()}
_CLASS = {True: "holds", False: "fails", None: "unknown"}


def write_overview(tally: Path, path: Path) -> list[Line]:
    """Write the page to ``path``, and return the lines of the tally.

    Raises `UsageError` when ``tally`` is no tally, or ``path`` cannot be written.
    """
    command, lines = read_lines(tally)
    wrong = sorted((line for line in lines if line.holds is not True), key=lambda line: line.holds is None)
    cells = [[line.seed, _CLASS[line.holds], _hint(line)] for line in lines[:CELLS]]
    parts = [
        _banner(tally, lines, wrong),
        _section("False and unknown", _wrong(tally, wrong)) if wrong else "",
        _section("By family of faults", _families(lines)),
        figure("seeds", "Seeds", "A square each; its faults are in its hint."),
        _section("The campaign", f"<pre>{escape(shlex.join(command) or 'the command is not in the tally')}</pre>"),
    ]
    partial = path.with_name(f".{path.name}.part")
    seeds = {"cells": cells, "left_out": max(0, len(lines) - CELLS)}
    try:
        partial.write_text(document(f"{tally.name}: {len(lines)} runs", parts, {"seeds": seeds}), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.",
            remedy=f"copy {tally} to where it can: the page is made beside it.",
        ) from error
    return lines


def read_lines(tally: Path) -> tuple[tuple[str, ...], list[Line]]:
    """Return the campaign's command, and its lines by seed. Raises `UsageError` if there is none yet."""
    lines = sorted(read_tally(tally), key=lambda line: line.seed)
    if not tally.stat().st_size:
        raise UsageError(f"{tally} is empty: no seed has been run yet.", remedy="run rackctl chaos campaign first.")
    return msgspec.json.decode(tally.read_bytes().partition(b"\n")[0], type=Head).command, lines


def tally_line(lines: Sequence[Line]) -> str:
    """Return the campaign's result in one line, for a log."""
    counts = Counter(line.holds for line in lines)
    told = ", ".join(f"{counts[holds]} {NAMES[holds]}" for holds in (True, False, None) if counts[holds])
    return f"chaos: {len(lines)} runs, {sum(line.struck for line in lines)} faults: {told or 'none'}"


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _hint(line: Line) -> str:
    told = [
        f"seed {line.seed}: {NAMES[line.holds]}",
        f"{line.label}, {', '.join(dict.fromkeys(line.faults))}",
        line.layout,
    ]
    told += [f"{name}: {why[:200]}" for name, why in line.wrong.items()] or [line.because[:200]]
    return "\n".join(filter(None, told))


def _banner(tally: Path, lines: Sequence[Line], wrong: Sequence[Line]) -> str:
    kind = "fails" if any(line.holds is False for line in wrong) else "unknown" if wrong or not lines else "holds"
    struck, seconds = sum(line.struck for line in lines), sum(line.seconds for line in lines)
    if not lines:
        said = "No seed has been run yet."
    elif not wrong:
        said = f"{len(lines)} runs, {struck} faults: every run ended as it must, and nothing was lost."
    else:
        false = sum(line.holds is False for line in wrong)
        said = f"{len(lines)} runs, {struck} faults: {false} not as they must be, {len(wrong) - false} unknown."
    badge = f'<span class="badge {kind}">{ {"holds": "true", "fails": "FALSE", "unknown": "unknown"}[kind] }</span>'
    recoveries = sum(line.recoveries for line in lines)
    facts = f"{recoveries} recoveries, {sum(line.steps for line in lines)} steps, {duration(seconds)} of runs; {tally}"
    return (
        f'<header class="{kind}"><p class="verdict">{badge} {escape(said)}</p>'
        f"<h1>A campaign</h1><p>{escape(facts)}</p></header>"
    )


def _wrong(tally: Path, wrong: Sequence[Line]) -> str:
    rows = []
    for line in wrong[:WRONG]:
        kept = Path(f"{tally}.runs") / f"seed-{line.seed:06}"
        why = "; ".join(f"{name}: {text}" for name, text in line.wrong.items()) or line.because
        link = f"{kept.parent.name}/{kept.name}/report.html"
        seed = f'<a href="{escape(link)}">{line.seed}</a>' if (kept / "report.html").exists() else str(line.seed)
        badge = f'<span class="badge {_CLASS[line.holds]}">{NAMES[line.holds]}</span>'
        faults = escape(", ".join(line.faults))
        rows.append(
            [seed, badge, escape(line.label), faults, escape(line.layout), f'<div class="detail">{escape(why)}</div>']
        )
    more = f"<p>And {len(wrong) - WRONG} more.</p>" if len(wrong) > WRONG else ""
    return table(["seed", "", "label", "faults", "layout", "why"], rows, (0,)) + more


def _families(lines: Sequence[Line]) -> str:
    """Return the table of runs by family of faults. A run counts for each family that it has."""
    known = {(line.label, line.holds) for line in lines}
    labels = sorted({label for label, _ in known}, key=lambda label: (label != "survivable", label))
    columns = [(label, holds) for label in labels for holds in (True, False, None) if (label, holds) in known]
    counts: Counter[tuple[str, str, bool | None]] = Counter()
    for line in lines:
        for family in {_FAMILIES.get(fault, fault) for fault in line.faults} | {"all"}:
            counts[family, line.label, line.holds] += 1
    families = [*sorted({family for family, _, _ in counts} - {"all"}), "all"]
    head = ["", *(f"{label} {NAMES[holds]}".strip() for label, holds in columns)]
    rows = [[escape(family), *(str(counts[family, *column] or "–") for column in columns)] for family in families]
    return table(head, rows, range(1, len(head)))
