"""Write ``trace.json``: a run with faults as Chrome trace events, for https://ui.perfetto.dev or any reader of the
format.

The processes of the trace are the job, its racks, its trays and its ranks; times are microseconds since the harness
started the job.

=========  =========================================================================================================
``job``    recoveries (a bar each, with its stages in it), what the coordinator noticed and decided, generations,
           notices, and the newest committed step as a counter
``rack``   strikes on the whole rack
``tray``   strikes on the tray, its agent or its slots; a track for each slot, with the workers in it
``ranks``  a track for each rank: its steps and phases and, in the first one after a recovery, its restore
=========  =========================================================================================================

Arrows lead from a fault to its detection, to the decision, and to the first step afterwards of a rank that was lost, or
of rank 0. Where there are more than `STEP_SLICES` steps times ranks, those away from faults are merged, and say how
many they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from rackrun.chaos.evidence.history import Placed
from rackrun.chaos.report.analysis.downsample import Detail, StepBucket, choose_detail, every_nth, lanes, merged
from rackrun.chaos.report.analysis.journal_timeline import JournalTimeline, RankUnit, units_by_rank
from rackrun.chaos.report.analysis.recovery_chains import Chain, stages_of
from rackrun.chaos.report.analysis.report_data import Material
from rackrun.chaos.report.analysis.slot_occupancy import SlotOccupancy, seats_of
from rackrun.protocol.ids import Position, unit_text

__all__ = ["STEP_SLICES", "Tracer", "write_trace"]

STEP_SLICES = 20_000
COUNTS = 2_000
JOB, RANKS, RACKS, TRAYS = 1, 2, 100, 1000
"""Numbers of the trace's processes; racks and trays are counted on from theirs."""

NOWHERE = (0, 0)

Span = tuple[float, float]
UnitKey = tuple[int, int, int]
"""Rank, step, generation."""


class Tracer:
    """A collector of trace events. A track is a process and a thread of the trace."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._tracks: dict[tuple[int, str], int] = {}
        self._flows = 0

    def process(self, pid: int, name: str) -> None:
        self._meta(pid, 0, "process_name", name=name)
        self._meta(pid, 0, "process_sort_index", sort_index=pid)

    def track(self, pid: int, name: str) -> tuple[int, int]:
        """Return the track of this name, which is made at the first call. Tracks are shown in the order in which they
        were made."""
        tid = self._tracks.get((pid, name))
        if tid is None:
            tid = self._tracks[pid, name] = 1 + sum(of == pid for of, _ in self._tracks)
            self._meta(pid, tid, "thread_name", name=name)
            self._meta(pid, tid, "thread_sort_index", sort_index=tid)
        return pid, tid

    def slice(self, track: tuple[int, int], name: str, begin_us: int, end_us: int, **args: object) -> None:
        """Add a slice of at least 1 us to a track; ``args`` are shown when it is selected."""
        pid, tid = track
        more = {"args": args} if args else {}
        self.events.append(
            {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin_us, "dur": max(1, end_us - begin_us), **more}
        )

    def instant(self, track: tuple[int, int], name: str, at_us: int, **args: object) -> None:
        pid, tid = track
        more = {"args": args} if args else {}
        self.events.append({"ph": "i", "s": "t", "name": name, "pid": pid, "tid": tid, "ts": at_us, **more})

    def count(self, pid: int, name: str, at_us: int, value: float) -> None:
        self.events.append({"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": {name: value}})

    def arrow(self, name: str, points: Sequence[tuple[tuple[int, int], int]]) -> None:
        """Draw an arrow. ``points``: tracks, and moments within slices there, in the order of time."""
        if len(points) < 2:
            return
        self._flows += 1
        for index, ((pid, tid), at_us) in enumerate(points):
            phase = "s" if index == 0 else "f" if index == len(points) - 1 else "t"
            more = {"bp": "e"} if phase != "s" else {}
            event = {"ph": phase, "cat": "fault", "name": name, "id": self._flows, "pid": pid, "tid": tid, "ts": at_us}
            self.events.append({**event, **more})

    def write(self, path: Path, **about: object) -> None:
        """Write the trace, with its events sorted by time.

        Of events that begin together the longest comes first, so that a slice comes before those within it.
        """
        self.events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0), -event.get("dur", 0)))
        partial = path.with_name(f".{path.name}.part")
        with partial.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n')
            file.write(b",\n".join(map(msgspec.json.encode, self.events)))
            file.write(b"\n]}\n")
        partial.replace(path)

    def _meta(self, pid: int, tid: int, what: str, **args: object) -> None:
        self.events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})


def write_trace(material: Material, path: Path) -> None:
    """Write the trace of a run to ``path``."""
    tracer = Tracer()
    tracer.process(JOB, f"job: {material.summary.plan or 'a plan'}")
    shown: dict[int, tuple[tuple[int, int], int]] = {}
    if material.job is not None:
        detail = choose_detail(material.chains, material.summary.steps, _ranks(material.job), STEP_SLICES)
        shown = _draw_ranks(tracer, material.job, material.chains, detail)
    places = [entry for entry in material.history if isinstance(entry, Placed)]
    _draw_trays(tracer, places, material.job, material.chains)
    arrows = _draw_faults(tracer, places, material.chains)
    if material.job is not None:
        _draw_job(tracer, material.job, material.chains, arrows)
    for chain, points in zip(material.chains, arrows, strict=True):
        if (end := shown.get(chain.strike.strike)) is not None:
            points.append(end)
        tracer.arrow(f"{chain.fault} of {', '.join(chain.strike.whom)}", points)
    tracer.write(
        path, plan=material.summary.plan, seed=material.summary.seed, clock="seconds since the job was started"
    )


def us(at_s: float) -> int:
    """Return seconds as whole microseconds, at least 0."""
    return max(0, round(at_s * 1e6))


# -- ranks
def _ranks(job: JournalTimeline) -> int:
    return max((planned.plan.world_size for planned in job.plans), default=0)


def _draw_ranks(
    tracer: Tracer, job: JournalTimeline, chains: Sequence[Chain], detail: Detail
) -> dict[int, tuple[tuple[int, int], int]]:
    """Draw the ranks. Returns, for each strike (by its number), where its first step afterwards ends."""
    tracer.process(RANKS, "ranks")
    wanted = {chain.strike.strike: unit for chain in chains if (unit := _first_unit(chain)) is not None}
    ends: dict[UnitKey, tuple[tuple[int, int], int]] = dict.fromkeys(wanted.values(), (NOWHERE, 0))
    restores = {
        (one.rank, generation): (one.began_s, one.ended_s)
        for generation, several in job.restores.items()
        for one in several
    }
    with units_by_rank(job) as units:
        for rank, mine in groupby(units, key=lambda unit: unit.rank):
            track = tracer.track(RANKS, f"rank {rank}")
            reached = 0
            for one in merged(_noting(mine, ends, track), detail):
                reached = _draw_unit(tracer, track, one, reached, restores)
    return {number: ends[unit] for number, unit in wanted.items() if ends[unit][0] != NOWHERE}


def _first_unit(chain: Chain) -> UnitKey | None:
    if chain.recovery is None or chain.first_step is None:
        return None
    rank = next((int(one.rank) for one in chain.recovery.lost if one.to), 0)
    return rank, chain.first_step, chain.recovery.generation


def _noting(
    units: Iterator[RankUnit], ends: dict[UnitKey, tuple[tuple[int, int], int]], track: tuple[int, int]
) -> Iterator[RankUnit]:
    """Pass the units on, and note in ``ends`` where those end that are its keys."""
    for unit in units:
        key = (unit.rank, unit.step, unit.generation)
        if key in ends and not unit.phase:
            ends[key] = track, us(unit.at_s) - 1
        yield unit


def _draw_unit(
    tracer: Tracer,
    track: tuple[int, int],
    one: RankUnit | StepBucket,
    reached_us: int,
    restores: dict[tuple[int, int], Span],
) -> int:
    """Draw a unit, and return where it ends. A commit that was reported late cannot begin before the last one has
    ended."""
    if isinstance(one, StepBucket):
        begin_us, end_us = max(us(one.from_s), reached_us), us(one.last.at_s)
        slowest_ms = round(one.slowest_s * 1e3, 3)
        name = f"steps {one.first.step} to {one.last.step}"
        tracer.slice(track, name, begin_us, end_us, units=one.units, slowest_ms=slowest_ms)
        return max(end_us, begin_us + 1)
    begin_us, end_us = max(us(one.at_s - one.seconds), reached_us), us(one.at_s)
    name = unit_text(Position(one.step, one.phase))
    again = {"attempt": one.attempt} if one.attempt else {}
    tracer.slice(track, name, begin_us, end_us, generation=one.generation, seconds=round(one.seconds, 6), **again)
    end_us = max(end_us, begin_us + 1)
    if (restored := restores.pop((one.rank, one.generation), None)) is not None:
        inner = max(us(restored[0]), begin_us), min(us(restored[1]), end_us)
        if inner[0] < inner[1]:
            tracer.slice(track, "restore", *inner)
    return end_us


# -- racks and trays
def _draw_trays(tracer: Tracer, places: Sequence[Placed], job: JournalTimeline | None, chains: Sequence[Chain]) -> None:
    racks = sorted({place.rack for place in places})
    trays = {place.tray: place.rack for place in places}
    for index, rack in enumerate(racks):
        tracer.process(RACKS + index, f"rack {rack}")
    for index, (tray, rack) in enumerate(sorted(trays.items())):
        tracer.process(TRAYS + index, f"tray {tray} (rack {rack})")
    seats = seats_of(job) if job is not None else []
    numbers = {tray: TRAYS + index for index, tray in enumerate(sorted(trays))}
    if any(chain.strike.slots for chain in chains):  # above the slots
        for tray in sorted({slot.partition("/")[0] for chain in chains for slot, _ in chain.strike.slots}):
            if tray in numbers:
                tracer.track(numbers[tray], "faults")
    for slot, mine in groupby(seats, key=lambda seat: seat.slot):
        pid = numbers.get(slot.partition("/")[0])
        if pid is not None:
            _draw_seats(tracer, tracer.track(pid, f"slot {slot}"), list(mine))


def _draw_seats(tracer: Tracer, track: tuple[int, int], seats: Sequence[SlotOccupancy]) -> None:
    reached = 0
    for seat in seats:
        begin_us, end_us = max(us(seat.from_s), reached), us(seat.to_s)
        if end_us > begin_us:
            ends = {"ends": seat.how} if seat.how else {}
            name = "spare" if seat.rank is None else f"rank {seat.rank}"
            tracer.slice(track, name, begin_us, end_us, incarnation=seat.incarnation, **ends)
            reached = end_us


def _draw_faults(
    tracer: Tracer, places: Sequence[Placed], chains: Sequence[Chain]
) -> list[list[tuple[tuple[int, int], int]]]:
    """Draw the faults. Returns for each strike where its arrow begins."""
    racks = {rack: RACKS + index for index, rack in enumerate(sorted({place.rack for place in places}))}
    trays = {tray: TRAYS + index for index, tray in enumerate(sorted({place.tray for place in places}))}
    rack_of = {place.slot: place.rack for place in places}
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for index, chain in enumerate(chains):
        slots = [slot for slot, _ in chain.strike.slots]
        pids = [trays[slot.partition("/")[0]] for slot in slots if slot.partition("/")[0] in trays]
        if any(whom.startswith("rack ") for whom in chain.strike.whom):
            pids = [racks[rack_of[slot]] for slot in slots if slot in rack_of]
        for pid in dict.fromkeys(pids or [JOB]):
            end_us = us(_fault_ends(chain))
            spans.setdefault(pid, []).append((us(chain.at_s), max(end_us, us(chain.at_s) + 1), index))
    found: list[list[tuple[tuple[int, int], int]]] = [[] for _ in chains]
    for pid, several in spans.items():
        several.sort()
        for lane, (begin_us, end_us, index) in zip(lanes([(b, e) for b, e, _ in several]), several, strict=True):
            chain = chains[index]
            track = tracer.track(pid, "faults" if not lane else f"faults ({lane + 1})")
            name = f"{chain.fault} of {', '.join(chain.strike.whom)}"
            told = {"took": chain.took, "detail": chain.detail, "strike": chain.strike.strike}
            tracer.slice(track, name, begin_us, end_us, **told)
            found[index] = found[index] or [(track, begin_us)]
    return found


def _fault_ends(chain: Chain) -> float:
    """Return the end of a fault: when it was taken back, if it lasts; otherwise when it was noticed."""
    return max(chain.back_s or chain.noticed_s or chain.at_s, chain.at_s + 1e-3)


# -- the job
def _draw_job(
    tracer: Tracer, job: JournalTimeline, chains: Sequence[Chain], arrows: list[list[tuple[tuple[int, int], int]]]
) -> None:
    _draw_recoveries(tracer, job, chains)
    noticed = [(us(c.noticed_s), us(_after(c.noticed_s, c.decided_s)), i) for i, c in enumerate(chains) if c.noticed_s]
    decided = [(us(c.decided_s), us(_after(c.decided_s, c.planned_s)), i) for i, c in enumerate(chains) if c.decided_s]
    for title, several in (("noticed", noticed), ("decided", decided)):
        several.sort()
        for lane, (begin_us, end_us, index) in zip(lanes([(b, e) for b, e, _ in several]), several, strict=True):
            chain = chains[index]
            track = tracer.track(JOB, title if not lane else f"{title} ({lane + 1})")
            if title == "noticed":
                assert chain.seen is not None
                name, more = f"{chain.seen.name} {chain.seen.slot or chain.seen.tray}", {"how": chain.seen.how}
            else:
                assert chain.recovery is not None
                name = chain.recovery.rungs[-1] if chain.recovery.rungs else "decided"
                more = {"because": "; ".join(chain.recovery.reasons)}
            tracer.slice(track, name, begin_us, end_us, **more)
            if not arrows[index] or begin_us >= arrows[index][-1][1]:
                arrows[index].append((track, begin_us))
    track, reached = tracer.track(JOB, "generations"), 0
    ends = [planned.at_s for planned in job.plans[1:]] + [job.end_s]
    for planned, end_s in zip(job.plans, ends, strict=True):
        begin_us = max(us(planned.at_s), reached)
        reached = max(us(end_s), begin_us + 1)
        name = f"generation {planned.plan.generation}"
        tracer.slice(track, name, begin_us, reached, world_size=planned.plan.world_size)
    for one in job.said:
        if one.name in ("Notice", "Answer"):
            more = {"rule": one.rule} if one.rule else {}
            tracer.instant(tracer.track(JOB, "notices"), str(one.body["text"]), us(one.at_s), **more)
    steps = sorted({(unit.at_s, unit.step) for unit in job.units if not unit.phase})
    for at_s, step in every_nth(steps, COUNTS):
        tracer.count(JOB, "committed step", us(at_s), step)


def _after(at_s: float, end_s: float | None) -> float:
    return max(at_s + 1e-3, end_s or 0.0)


def _draw_recoveries(tracer: Tracer, job: JournalTimeline, chains: Sequence[Chain]) -> None:
    """Draw one recovery for each generation, however many strikes have led to it."""
    drawn: dict[int, Chain] = {}
    for chain in chains:
        if chain.recovery is not None and stages_of(chain, job):
            drawn.setdefault(chain.recovery.generation, chain)
    several = sorted(drawn.values(), key=lambda chain: chain.at_s)
    spans = [(stages_of(chain, job)[0].from_s, stages_of(chain, job)[-1].to_s) for chain in several]
    for lane, (begin_s, end_s), chain in zip(lanes(spans), spans, several, strict=True):
        assert chain.recovery is not None
        track = tracer.track(JOB, "recoveries" if not lane else f"recoveries ({lane + 1})")
        tracer.slice(track, chain.recovery.line(), us(begin_s), us(end_s), generation=chain.recovery.generation)
        for stage in stages_of(chain, job):
            if us(stage.to_s) > us(stage.from_s):
                tracer.slice(track, stage.name, us(stage.from_s), us(stage.to_s))
