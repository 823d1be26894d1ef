"""Where a job's ranks are on its racks, why, and what is wrong: from its journal, during and after the run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias, Union

import msgspec

from rackrun.coordinator.journal.journal_reader import as_of_today, open_journal, resume_of
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.core.machine.state_replay import COMMANDS, EVENTS, SeatChange, SlotStatus, StateReplay, Trouble
from rackrun.errors import UsageError
from rackrun.protocol.commands import Answer, CondemnWorker, FenceWorker, ReleaseWorkers, StartWorker, StopJob
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Generation, Rank, SlotId, tray_of
from rackrun.protocol.job_config import JobConfig
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import CliqueId

__all__ = ["GpuFact", "RankPlacement", "read_placement"]

_Command: TypeAlias = StartWorker | CondemnWorker | FenceWorker | ReleaseWorkers | Answer | StopJob
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Union[EVENTS])  # noqa: UP007 - the kinds that are selected
_commands = msgspec.json.Decoder(_Command)
_CALLED = {"out": "out of use"}


class GpuFact(NamedTuple):
    """A known fact about a GPU, or about neighbouring GPUs on a tray."""

    slots: str
    """The slots: ``tray-03/1``, ``tray-03/0-3``."""
    who: str
    """Who is there: ``rank 13``, ``ranks 12 to 15``, ``spare``; "": nobody."""
    trouble: Trouble
    why: str

    def __str__(self) -> str:
        who = f"{self.who} on {self.slots}" if self.who else self.slots
        what = "" if self.trouble == "lost" else f"{_CALLED.get(self.trouble, self.trouble)}: "
        return f"{who}: {what}{self.why}"


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a job's ranks."""

    run_id: str
    exit_code: int | None
    """Exit code; None: the job runs, or its launcher was killed."""
    because: str
    rows_lost: int
    past: StateReplay = field(repr=False)
    whys: dict[Generation, str] = field(repr=False)
    """For each plan, its recovery in one line, or the decision's reason."""
    standings: dict[SlotId, SlotStatus] = field(repr=False)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the newest plan; before the first, one data-parallel axis over all ranks."""
        return self.past.seating.mesh or Mesh.of({"dp": max(len(self.past.seats), 1)})

    @property
    def spares_ready(self) -> int:
        """Number of spares that may be used now, or at the end of the job."""
        return sum(
            one.spare == "ready" and one.trouble not in ("out", "unfit", "drained") for one in self.standings.values()
        )

    def known(self) -> list[GpuFact]:
        """Return what is known about GPUs; neighbours on a tray with the same facts are combined."""
        found: list[list[SlotStatus]] = []
        for standing in self.standings.values():
            if standing.why:
                if found and _goes_on(found[-1][-1], standing):
                    found[-1].append(standing)
                else:
                    found.append([standing])
        return [
            GpuFact(_span([one.slot for one in group]), _who(group), group[0].trouble, group[0].why) for group in found
        ]

    def problems(self) -> list[str]:
        """Return everything that is not as it should be."""
        past = self.past
        found = [f"the job ended with exit code {self.exit_code}: {self.because}"] if self.exit_code else []
        if self.rows_lost:
            found.append(f"{self.rows_lost} rows of the journal could not be written: what follows may be old")
        found += [past.broken] if past.broken else []
        found += [str(one) for one in self.known() if one.trouble not in ("", "drained")]
        if self.exit_code is None and past.spares_wanted:
            found += self._short_of_spares()
        return found

    def _short_of_spares(self) -> list[str]:
        past, ready = self.past, self.spares_ready
        found = [f"{ready} of {past.spares_wanted} spares are ready"] if ready < past.spares_wanted else []
        board = past.seating.board
        by_slot = board.topology.by_slot if board else {}
        asked: dict[CliqueId | None, list[Rank]] = {}
        for rank, slot in past.seats.items():
            asked.setdefault(by_slot[slot].clique if slot in by_slot else None, []).append(rank)
        for clique, ranks in asked.items():
            if not past.successors(ranks[0], 1):
                where = f" of clique {clique}" if clique is not None else ""
                found.append(f"nobody is ready to take over for one of the {len(ranks)} ranks{where}")
        return found

    def explain(self, rank: int) -> list[str]:
        """Explain in a few lines where ``rank`` is, since when and why, and who would take over. Raises UsageError if
        there is no such rank."""
        past = self.past
        slot = past.seats.get(Rank(rank))
        if slot is None:
            size = len(past.seats)
            raise UsageError(
                f"the job has no rank {rank}: it has {size} ranks.",
                remedy=f"name a rank from 0 to {size - 1}." if size else "see rackctl report for how it ended.",
            )
        lines = past.seating.where(past.seats, Rank(rank))
        lines += self._story(past.sat[Rank(rank)])
        standing = self.standings[slot]
        if standing.trouble == "lost":
            lines.append(f"Now {standing.why}.")
        elif standing.trouble:
            lines.append(f"Its slot is {_CALLED.get(standing.trouble, standing.trouble)}: {standing.why}.")
        elif standing.why:
            lines.append(f"Of its slot: {standing.why}.")
        if self.exit_code is None:
            if standing.trouble == "lost":
                lines.append("Somebody is to take over: its recovery is under way.")
            else:
                if going := past.leaving().get(Rank(rank)):
                    lines.append(f"At the next step boundary it leaves for {going}.")
                lines.append(self._next(Rank(rank)))
        return lines

    def _story(self, sat: list[SeatChange]) -> Iterator[str]:
        first, *_ = sat
        began = f"It was placed on {first.worker.slot} in generation {first.generation}, at the start"
        yield f"{began}{', and has stayed' if len(sat) == 1 else ''}."
        for before, after in pairwise(sat):
            again = before.worker.slot == after.worker.slot
            what = f"started again on {after.worker.slot}" if again else f"moved to {after.worker.slot}"
            when = f"In generation {after.generation}, {after.at_ms / 1e3:.1f} s after the start"
            yield f"{when}, it {'was ' if again else ''}{what}: {self.whys.get(after.generation, '?')}."

    def _next(self, rank: Rank) -> str:
        found = self.past.successors(rank)
        if not found:
            coming = [one.slot for one in self.standings.values() if one.spare == "starting"]
            waits = f"; it would wait for {', '.join(coming)}" if coming else ""
            return f"If it is lost now: no spare that may take over is ready{waits}."
        names = [staff.seats[rank] for staff in found]
        with_it = [str(other) for other in sorted(found[0].uprooted)]
        group = f", and ranks {', '.join(with_it)} move with it" if with_it else ""
        later = f"; then {', '.join(names[1:])}" if names[1:] else ""
        return f"If it is lost now: {names[0]} takes over{group}{later}."


def read_placement(path: Path) -> RankPlacement:
    """Read the placement from a journal. Raises UsageError if ``path`` is not a journal that this version can read."""
    with open_journal(path) as (connection, meta):
        config = meta.get("config")
        past = StateReplay(
            msgspec.json.decode(config, type=JobConfig)
            if config
            else JobConfig(trays_min=1, trays_max=1, spares=0),  # an older journal without it
            gathers_standstills=_gathers_standstills(connection),
        )
        whys: dict[Generation, str] = {}
        names = [kind.__name__ for kind in (*EVENTS, *COMMANDS)]
        marks = ", ".join("?" * len(names))
        for kind, name, at_ms, body in connection.execute(
            f"SELECT kind, name, at_ms, body FROM events WHERE name IN ({marks}) ORDER BY id",  # noqa: S608 - marks are ours
            names,
        ):
            if kind == "event":
                past.apply_event(_events.decode(as_of_today(body)))
            elif name == "ResumeGeneration":
                resume = resume_of(body)
                whys[resume.plan.generation] = resume.because
                past.apply_command(resume, at_ms)
            else:
                past.apply_command(_commands.decode(body), at_ms)
        past.finish()
        for (body,) in connection.execute("SELECT body FROM recoveries ORDER BY generation"):
            recovery = msgspec.json.decode(body, type=RecoveryRecord)
            whys[Generation(recovery.generation)] = recovery.line()
    over = past.over
    exit_code = int(meta["exit_code"]) if meta.get("exit_code") else over.exit_code if over else None
    return RankPlacement(
        run_id=meta.get("run_id", ""),
        exit_code=exit_code,
        because=meta.get("because", "") or (over.because if over else ""),
        rows_lost=int(meta.get("rows_lost", 0)),
        past=past,
        whys=whys,
        standings=past.standings(),
    )


def _gathers_standstills(connection: sqlite3.Connection) -> bool:
    """Return whether the job gathered reports of standstills before it acted on them: older ones did not."""
    query = (
        "SELECT 1 FROM events WHERE name IN ('SetTimer', 'TimerFired')"
        " AND CAST(body AS TEXT) LIKE '%\"standstills\"%' LIMIT 1"
    )
    return connection.execute(query).fetchone() is not None


def _goes_on(one: SlotStatus, other: SlotStatus) -> bool:
    """Return whether the next slot of the same tray has the same facts, and ranks on both are neighbours too."""
    tray, _, index = one.slot.rpartition("/")
    same = (one.trouble, one.why, one.spare) == (other.trouble, other.why, other.spare)
    next_rank = None if one.rank is None else one.rank + 1
    return same and other.slot == f"{tray}/{int(index) + 1}" and other.rank == next_rank


def _span(slots: list[SlotId]) -> str:
    if len(slots) == 1:
        return slots[0]
    first, last = (slot.rpartition("/")[2] for slot in (slots[0], slots[-1]))
    return f"{tray_of(slots[0])}/{first}-{last}"


def _who(group: list[SlotStatus]) -> str:
    first, last = group[0].rank, group[-1].rank
    if first is None:
        return "spare" if group[0].spare else ""
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
