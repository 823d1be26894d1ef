"""Write the HTML page of a campaign: the tally of `rackrun.chaos.runs.campaign`, one cell for each seed."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import all_faults
from rackrun.chaos.report.run_text import NAMES, duration
from rackrun.chaos.runs.campaign import TallyHeader, TallyLine, read_tally
from rackrun.errors import UsageError
from rackrun.pages import templates

__all__ = ["read_lines", "tally_line", "write_overview"]

WRONG = 200
"""The most runs that are shown in full; beyond, only their number is given."""
CELLS = 20_000
_FAMILIES = {name_of(kind): kind.family.value for kind in all_faults()}
_TEMPLATE = Path(__file__).with_name("campaign_page.html.j2")


def write_overview(tally: Path, path: Path) -> list[TallyLine]:
    """Write the page to ``path``, and return the lines of the tally.

    Raises `UsageError` when ``tally`` is no tally, or ``path`` cannot be written.
    """
    command, lines = read_lines(tally)
    wrong = sorted((line for line in lines if line.holds is not True), key=lambda line: line.holds is None)
    try:
        templates.write(
            path,
            _TEMPLATE,
            tally=tally,
            lines=lines,
            wrong=wrong[:WRONG],
            wrong_count=len(wrong),
            false_count=sum(line.holds is False for line in wrong),
            families=_families(lines),
            shown=lines[:CELLS],
            NAMES=NAMES,
            command=shlex.join(command),
            duration=duration,
            kept=lambda line: _kept_page(tally, line),
        )
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}.",
            remedy=f"copy {tally} to where it can: the page is made beside it.",
        ) from error
    return lines


def read_lines(tally: Path) -> tuple[tuple[str, ...], list[TallyLine]]:
    """Return the campaign's command, and its lines by seed. Raises `UsageError` if there is none yet."""
    lines = sorted(read_tally(tally), key=lambda line: line.seed)
    if not tally.stat().st_size:
        raise UsageError(f"{tally} is empty: no seed has been run yet.", remedy="run rackctl chaos campaign first.")
    return msgspec.json.decode(tally.read_bytes().partition(b"\n")[0], type=TallyHeader).command, lines


def tally_line(lines: Sequence[TallyLine]) -> str:
    """Return the campaign's result in one line, for a log."""
    counts = Counter(line.holds for line in lines)
    told = ", ".join(f"{counts[holds]} {NAMES[holds]}" for holds in (True, False, None) if counts[holds])
    return f"chaos: {len(lines)} runs, {sum(line.struck for line in lines)} faults: {told or 'none'}"


def _kept_page(tally: Path, line: TallyLine) -> str:
    """Return the address of a run's own page, as seen from the campaign's; "" if the run was not kept."""
    page = Path(f"{tally}.runs", f"seed-{line.seed:06}", "report.html")
    return quote(bytes(page.relative_to(tally.parent))) if page.exists() else ""


def _families(lines: Sequence[TallyLine]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of runs by family of faults. A run counts for each family that it has."""
    known = {(line.label, line.holds) for line in lines}
    labels = sorted({label for label, _ in known}, key=lambda label: (label != "survivable", label))
    columns = [(label, holds) for label in labels for holds in (True, False, None) if (label, holds) in known]
    counts: Counter[tuple[str, str, bool | None]] = Counter()
    for line in lines:
        for family in {_FAMILIES.get(fault, fault) for fault in line.faults} | {"all"}:
            counts[family, line.label, line.holds] += 1
    families = [*sorted({family for family, _, _ in counts} - {"all"}), "all"]
    head = ["", *(f"{label} {NAMES[holds]}".strip() for label, holds in columns)]
    return head, [[family, *(str(counts[family, *column] or "–") for column in columns)] for family in families]
