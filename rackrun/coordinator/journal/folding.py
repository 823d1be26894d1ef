"""Folding of old units in a journal to one row each, because one row for each rank grows by gigabytes a day.

A unit is checked before its rows are removed (`rackrun.coordinator.journal.ledger_check.fold`). The findings are kept,
and so are the unit's samples, so that it can be compared if it is ever computed again.
"""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from functools import cache, cached_property

from rackrun.coordinator.journal.job_mesh import mesh_of
from rackrun.coordinator.journal.journal_reader import resume_of
from rackrun.coordinator.journal.ledger_check import FINDINGS, Folded, LedgerRow, fold, samples_in
from rackrun.core.placement.mesh_resize import Axes
from rackrun.protocol.commands import GenerationPlan
from rackrun.protocol.ids import Position

__all__ = ["KEEP_ROWS", "Folding", "folded_units"]

KEEP_ROWS = 2_000_000
"""Number of rows of ``units`` that a journal keeps: about 600 MB."""
_LEAST_AGE_MS = 600_000.0
"""Younger units are not folded, because a rank may still report one, or they may be computed again at the moment."""
_AT_ONCE = 512
"""Rows in one transaction; persisting a generation has to wait for it."""


class Folding:
    """Folds one journal, on its writer's thread, with that thread's connection."""

    def __init__(
        self, connection: sqlite3.Connection, keep_rows: int = KEEP_ROWS, least_age_ms: float = _LEAST_AGE_MS
    ) -> None:
        self._connection, self._keep, self._least_age_ms = connection, keep_rows, least_age_ms
        self._rows: int = connection.execute("SELECT count(*) FROM units").fetchone()[0]
        self._plans: dict[int, GenerationPlan] = {}
        self._last_plan = 0
        """Id of the row of the last plan that was read."""

    def wrote(self, rows: int) -> None:
        """Count new rows of units; negative: rows that `some` has removed, once its transaction is committed."""
        self._rows += rows

    def give_up(self) -> None:
        """Stop folding, so that the journal grows from now on."""
        self._keep = sys.maxsize

    @property
    def due(self) -> bool:
        """Whether more rows wait than are to be kept."""
        return self._rows > self._keep

    @property
    def overdue(self) -> bool:
        """Return whether there are at least twice as many rows as are kept."""
        return self._rows >= 2 * self._keep

    def some(self) -> int:
        """Fold the oldest units in the open transaction: a few hundred rows, or one unit with more. Return how many
        rows."""
        folded = 0
        while folded < _AT_ONCE and self._rows - folded > self._keep:
            rows = self._oldest()
            if not rows:
                break
            folded += rows
        return folded

    def _oldest(self) -> int:
        """Fold the oldest unit; return how many rows it had, or 0 if it is too young."""
        connection = self._connection
        first = connection.execute("SELECT step, phase FROM units ORDER BY step, phase LIMIT 1").fetchone()
        if first is None:
            self._rows = 0
            return 0
        (newest,) = connection.execute(
            "SELECT committed_at_ms FROM units ORDER BY step DESC, phase DESC LIMIT 1"
        ).fetchone()
        units = connection.execute(
            "SELECT rank, generation, attempt, committed_at_ms, seconds, gate FROM units WHERE (step, phase) = (?, ?)",
            first,
        ).fetchall()
        if max(at_ms for *_, at_ms, _, _ in units) > newest - self._least_age_ms:
            return 0
        self._fold(Position(*first), units)
        for table in ("units", "ledger"):
            connection.execute(f"DELETE FROM {table} WHERE (step, phase) = (?, ?)", first)  # noqa: S608 - no input in it
        return len(units)

    def _fold(self, at: Position, units: list[tuple[int, int, int, float, float, bytes]]) -> None:
        connection, where = self._connection, (at.step, at.phase)
        rows = [
            LedgerRow(at, *rest)
            for rest in connection.execute(
                "SELECT rank, generation, count, digest, ids FROM ledger WHERE (step, phase) = (?, ?)", where
            )
        ]
        before = next(iter(folded_units(connection, at)), None)
        later = cache(lambda generation: self._who_tell_later(at, generation))
        folded, found = fold(
            at,
            [(rank, generation, samples_in(gate)) for rank, generation, *_, gate in units],
            rows,
            self._known_plans(),
            self._axes,
            before=before,
            goes_on=lambda generation, rank: rank in later(generation),
        )
        connection.executemany(
            "INSERT INTO findings VALUES (?, ?)", [(kind, what) for kind in FINDINGS for what in getattr(found, kind)]
        )
        if folded is None:
            return
        again = before is not None and folded is not before
        attempts, generations = max(one[2] for one in units), max(Counter(one[0] for one in units).values())
        vain = max(attempts, generations - 1) + again
        seconds = max(max(one[4] or 0.0, 0.0) for one in units)
        connection.execute(
            "INSERT INTO folded VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET generation = excluded.generation, samples = excluded.samples, untold = excluded.untold, "
            "ids = excluded.ids, seconds = max(seconds, excluded.seconds), vain = vain + excluded.vain",
            (*where, folded.generation, folded.samples, folded.unreported, folded.ids, seconds, vain),
        )

    @cached_property
    def _axes(self) -> Axes:
        """Return the axes of the mesh, which all ranks have reported long before their first unit is folded."""
        return mesh_of(self._connection)

    def _who_tell_later(self, at: Position, generation: int) -> set[int]:
        """Return the ranks that reported a later unit in that generation. This reads the keys of all later rows."""
        query = "SELECT DISTINCT rank FROM units WHERE (step, phase) > (?, ?) AND generation = ?"
        return {rank for (rank,) in self._connection.execute(query, (at.step, at.phase, generation))}

    def _known_plans(self) -> dict[int, GenerationPlan]:
        query = "SELECT id, body FROM generations WHERE stage = 'resume' AND id > ? ORDER BY id"
        for number, body in self._connection.execute(query, (self._last_plan,)).fetchall():
            plan = resume_of(body).plan
            self._plans[plan.generation], self._last_plan = plan, number
        return self._plans


def folded_units(connection: sqlite3.Connection, at: Position | None = None) -> list[Folded]:
    """Return the folded units: all, or the one at ``at``."""
    only, which = ("", ()) if at is None else (" WHERE (step, phase) = (?, ?)", (at.step, at.phase))
    query = f"SELECT step, phase, generation, samples, untold, ids FROM folded{only} ORDER BY step, phase"  # noqa: S608 - no input in it
    return [Folded(Position(step, phase), *rest) for step, phase, *rest in connection.execute(query, which)]
