"""Inject faults at a given rate for a given time, and measure how much throughput is kept and where the rest went.

The throughput without faults is measured in the same run, in the stretches in which all ranks and spares are there and
no fault is in force; a machine that slows down over time is thus not counted as a fault. A slot that is left out
because it has lost too many workers is returned to use, as an operator who has checked it would do.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from rackrun.chaos.base.job_command import check_script
from rackrun.chaos.base.job_layout import layout_of
from rackrun.chaos.evidence.explanations import last_words
from rackrun.chaos.evidence.run_evidence import Trace, read_trace
from rackrun.chaos.faults.fault_types import Subjects, name_of
from rackrun.chaos.faults.table.fault_table import FAULTS, Fault
from rackrun.chaos.faults.targets import One
from rackrun.chaos.plan.definition import Budget, Every, Inject, Par, Plan, Quiet, Seq
from rackrun.chaos.runs.run_plan import Performance, check_run
from rackrun.chaos.testbed.job_under_test import JobResult
from rackrun.coordinator.observe.recoveries import RecoveryRecord
from rackrun.coordinator.report.run_report import read_report
from rackrun.ctl.coordinator_client import ask
from rackrun.errors import UsageError
from rackrun.protocol.ids import after_step

__all__ = ["CALM_STEPS_MIN", "SOAK_FAULTS", "Soak", "LostTime", "run_soak", "waterfall"]

FORMAT = 1
CALM_STEPS_MIN = 20
"""The fewest steps without faults from which the time of a step is known."""
SOAK_FAULTS: dict[str, Fault] = {name: fault for row in FAULTS.values() for name, fault in row.in_soak.items()}
"""Name -> a fault that a soak can have."""
_GROUPED = "group.after"
_RETURN_EVERY_S = 1.0
_ENDED = (0, 143, -15)
_LAST_SPARE_S = 60.0
"""Seconds to wait at the end for a spare that is starting."""
_SAME_MS = 30_000.0
"""A fault that is noticed later than this many milliseconds after a strike has another cause."""
_CLOCK_MS = 100.0
"""A kill may be noticed this many milliseconds before its injector has read the clock."""


class LostTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds lost, each counted once for all ranks together."""

    detect: float = 0.0
    """From the strike to its first notice."""
    decide: float = 0.0
    """From the notice to the plan: all ranks have stopped, and one decision is made."""
    regroup: float = 0.0
    """From the plan until the last group is built."""
    restore: float = 0.0
    """From then until all ranks compute again."""
    rework: float = 0.0
    """The work of the broken step, the steps since a rollback, and the extra time of the first step."""
    spares: float = 0.0
    """The extra time of steps while a new spare started."""
    other: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(msgspec.structs.astuple(self)))


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a soak."""

    format: int = FORMAT
    command: tuple[str, ...]
    seed: int
    seconds: float
    """Seconds from the first committed step to the last."""
    faults: int
    steps: int
    calm_steps: int
    step_s: float | None
    """Seconds of a step without faults; None if there were too few such steps."""
    kept: float | None
    """The share of the throughput without faults that was kept."""
    lost_s: LostTime
    recoveries_s: tuple[float, ...]
    """For each recovery, the seconds from the fault until all ranks compute again."""
    spares: tuple[int, int]
    """The number of spares at the beginning and at the end."""
    ok: bool
    """Whether the job ran to its end, every sample counted once, every fault took effect, and the spares are back."""
    trouble: tuple[str, ...] = ()
    interrupted: bool = False
    """Whether the soak was interrupted by hand; everything else is about the time until then."""
    out: str


def run_soak(
    command: Sequence[str],
    *,
    out: Path,
    minutes: float,
    per_minute: float,
    faults: Sequence[str] = ("kill",),
    seed: int = 0,
    env: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Soak:
    """Run a soak.

    ``command``: as for `rackrun.chaos.runs.run_plan.run_plan`; its script has to train for longer than ``minutes``, and
    is ended at a step. ``per_minute``: how many faults strike, on average. Raises `UsageError`.
    """
    plan = _plan(faults, per_minute, seed, command)
    check_run(plan, command)
    check_script(command)
    soaking = _Soaking(plan, command, out, env, tell, minutes * 60)
    interrupted = False
    try:
        ended = soaking.play(minutes * 60 + 600)
    except KeyboardInterrupt:
        ended, interrupted = JobResult(None, 0.0, ()), True
    trace = read_trace(soaking.folder / "run", soaking.folder / "inside", whole=True)
    if interrupted and not trace.steps:
        tell(f"interrupted before the first step; what there is: {out}")
        raise KeyboardInterrupt
    if not trace.steps:
        raise UsageError(
            f"the job ended (exit code {ended.exit_code}) before it had committed a step.{last_words(soaking.folder, trace)}",
            remedy=f"mend the script first: run it by hand, and look at {soaking.folder / 'stderr.txt'}.",
        )
    trouble = _trouble(soaking, trace, ended.exit_code, ended.left)
    if interrupted:
        trouble = ("it was interrupted", *trouble[1:])
    soak = msgspec.structs.replace(_account(soaking, trace, command, seed, out, trouble), interrupted=interrupted)
    (out / "soak.json").write_bytes(msgspec.json.format(msgspec.json.encode(soak), indent=1) + b"\n")
    return soak


def _plan(names: Sequence[str], per_minute: float, seed: int, command: Sequence[str]) -> Plan:
    """Return the plan of a soak: the faults in turns, again and again.

    A strike waits until all spares are back from the one before.
    """
    unknown = [name for name in names if name not in SOAK_FAULTS]
    if unknown or not names:
        raise UsageError(
            f"a soak has no faults {', '.join(unknown)!r}.", remedy=f"name some of {', '.join(SOAK_FAULTS)}."
        )
    if per_minute <= 0:
        raise UsageError(f"{per_minute} faults a minute are none.", remedy="ask for more than 0.")
    layout = layout_of(command, on_rack=True)
    if layout is None or layout.spares < 1:
        raise UsageError("a soak needs a job with spares, and to know how many.", remedy="give --spares 1 or more.")
    mean_s = 60 / per_minute * len(names)
    parts = tuple(
        Every(mean_s=mean_s, part=Inject(fault=SOAK_FAULTS[name], target=One(Subjects.RANK))) for name in names
    )
    calm_first = Seq(parts=(Quiet(steps=2 * CALM_STEPS_MIN), Par(parts=parts)))
    return Plan(plan=calm_first, seed=seed, budget=Budget(slots=1), name="soak", watch=(_GROUPED,))


class _Soaking(Performance):
    """Records when all workers are there and no fault is in force, and ends the job when the time is over."""

    def __init__(
        self,
        plan: Plan,
        command: Sequence[str],
        out: Path,
        env: Mapping[str, str] | None,
        tell: Callable[[str], None],
        seconds: float,
    ) -> None:
        super().__init__(plan, command, out, env, tell)
        self._seconds, self._whole = seconds, 0
        self._first_s: float | None = None
        self._returned_s = 0.0
        self._stopped = self._was_calm = False
        self.calm: list[tuple[float, float]] = []
        """Stretches without faults: begin and end, Unix time."""
        self.grouped: list[float] = []
        """When the last group of a world was built, Unix time, for each world."""
        self.spares = (0, 0)

    def _look(self) -> None:
        super()._look()
        sight, now_s = self._sight, time.time()
        if sight is None or sight.step < 0:
            return
        places = sight.scene.places
        spares = sum(place.rank is None for place in places)
        self._first_s = now_s if self._first_s is None else self._first_s
        if len(places) > self._whole and not self.conductor.records:
            self._whole, self.spares = len(places), (spares, spares)
        if not self._stopped:  # afterwards, spares are dismissed
            self.spares = (self.spares[0], spares)
        over = now_s - self._first_s > self._seconds
        self._note(now_s, calm=len(places) == self._whole and not self._in_force() and not self._stopped)
        if over and (spares >= self.spares[0] or now_s - self._first_s > self._seconds + _LAST_SPARE_S):
            self._stopped = True
            self._job.stop()
        if now_s - self._returned_s > _RETURN_EVERY_S:
            self._returned_s = now_s
            self._return_slots()

    def _in_force(self) -> bool:
        return any(
            record.took is None or (record.strike.fault.lasts and record.took and record.back_s is None)
            for record in self.conductor.records
        )

    def _note(self, now_s: float, *, calm: bool) -> None:
        if calm and self.calm and self._was_calm:
            self.calm[-1] = (self.calm[-1][0], now_s)
        elif calm:
            self.calm.append((now_s, now_s))
        self._was_calm = calm
        with contextlib.suppress(FileNotFoundError):
            built_s = (self._job.inside / "points" / _GROUPED).stat().st_mtime
            if not self.grouped or built_s > self.grouped[-1]:
                self.grouped.append(built_s)

    def _return_slots(self) -> None:
        with contextlib.suppress(UsageError, ValueError):
            status = json.loads(ask(self._job.run, "/api/status", timeout_s=1.0))
            for tray in status["core"]["trays"]:
                for slot in tray["quarantined"]:
                    ask(self._job.run, "/api/return", json.dumps({"target": slot}).encode(), timeout_s=1.0)


# -- what came of it
def _trouble(soaking: _Soaking, trace: Trace, exit_code: int | None, left: Sequence[str]) -> tuple[str, ...]:
    found = [] if exit_code in _ENDED else [f"it ended with exit code {exit_code}"]
    found += [f"left behind: {process}" for process in left]
    found += trace.contradictions[:3]
    found += [trace.replayed.difference] if trace.replayed.difference else []
    found += [
        f"{name_of(record.strike.fault)} {after_step(record.step)} did not take effect: {record.detail}"
        for record in soaking.conductor.records
        if record.took is False
    ]
    found += soaking.conductor.nobody[:3]
    before, after = soaking.spares
    found += [f"{before} spares at the beginning, {after} at the end"] if after < before else []
    with contextlib.suppress(UsageError):
        ledger = read_report(soaking.folder / "run" / "journal.sqlite").ledger
        found += [*ledger.doubled[:3], *ledger.differing[:3], *ledger.missing[:3]]
    return tuple(found)


def _account(
    soaking: _Soaking, trace: Trace, command: Sequence[str], seed: int, out: Path, trouble: tuple[str, ...]
) -> Soak:
    began_s = trace.began_wall_s or 0.0
    commits = _commits(soaking.folder / "run" / "journal.sqlite")
    moments = [began_s + at_ms / 1e3 for at_ms in commits.values()]
    calm = [gap for gap in itertools.pairwise(moments) if _inside(gap, soaking.calm)]
    step_s = sum(end - begin for begin, end in calm) / len(calm) if len(calm) >= CALM_STEPS_MIN else None
    seconds = moments[-1] - moments[0] if moments else 0.0
    steps = max(len(moments) - 1, 0)
    struck_ms = [
        (soaking.began_wall_s + soaking.begun_s[record.strike.number] - began_s) * 1e3
        for record in soaking.conductor.records
        if record.took
    ]
    lost = waterfall(
        trace.recoveries,
        struck_ms,
        list(commits.values()),
        [(built_s - began_s) * 1e3 for built_s in soaking.grouped],
        [((begin - began_s) * 1e3, (end - began_s) * 1e3) for begin, end in soaking.calm],
        step_s,
    )
    return Soak(
        command=tuple(command),
        seed=seed,
        seconds=round(seconds, 3),
        faults=len(struck_ms),
        steps=steps,
        calm_steps=len(calm),
        step_s=step_s,
        kept=steps * step_s / seconds if step_s and seconds else None,
        lost_s=lost,
        recoveries_s=tuple(round(one.seconds, 3) for one in trace.recoveries if one.seconds is not None),
        spares=soaking.spares,
        ok=not trouble and step_s is not None,
        trouble=trouble,
        out=str(out),
    )


def _commits(journal: Path) -> dict[int, float]:
    """Return step -> the time in ms at which its last rank last committed it, in the order of steps."""
    if not journal.exists():
        return {}
    with closing(sqlite3.connect(journal)) as connection:
        query = "SELECT step, max(committed_at_ms) FROM units WHERE phase = 0 GROUP BY step ORDER BY step"
        return {step: at_ms for step, at_ms in connection.execute(query) if at_ms is not None}


def _inside(gap: tuple[float, float], stretches: Sequence[tuple[float, float]]) -> bool:
    at = bisect.bisect_right(stretches, (gap[0], float("inf"))) - 1
    return at >= 0 and gap[1] <= stretches[at][1]


def waterfall(
    recoveries: Sequence[RecoveryRecord],
    struck_ms: Sequence[float],
    commits_ms: Sequence[float],
    grouped_ms: Sequence[float],
    calm_ms: Sequence[tuple[float, float]],
    step_s: float | None,
) -> LostTime:
    """Divide the time that was lost between the first and the last commit among its causes.

    Lost is the time beyond ``step_s`` seconds for each step. ``struck_ms``: when faults took effect. ``commits_ms``:
    when steps were committed. ``grouped_ms``: when a rank had built its groups. ``calm_ms``: begin and end of the
    stretches without faults. Times are in milliseconds on the coordinator's clock, in ascending order. All causes are 0
    if ``step_s`` is None or there are fewer than two commits.
    """
    if step_s is None or len(commits_ms) < 2:
        return LostTime()
    step_ms, lost = step_s * 1e3, dict.fromkeys(LostTime.__struct_fields__, 0.0)
    for recovery in recoveries:
        plan_ms, resumed_ms, committed_ms = recovery.plan_ms, recovery.resumed_ms, recovery.committed_ms
        if plan_ms is None or resumed_ms is None or committed_ms is None or recovery.overtaken or recovery.planned:
            continue
        at = bisect.bisect_right(struck_ms, recovery.fault_ms + _CLOCK_MS)
        near = at > 0 and recovery.fault_ms - struck_ms[at - 1] < _SAME_MS
        strike_ms = min(struck_ms[at - 1], recovery.fault_ms) if near else recovery.fault_ms
        before = bisect.bisect_left(commits_ms, strike_ms)
        built = [ms for ms in grouped_ms if plan_ms <= ms <= resumed_ms]
        grouped = max(built, default=plan_ms)
        lost["detect"] += max(0.0, recovery.fault_ms - strike_ms)
        lost["decide"] += plan_ms - recovery.fault_ms
        lost["regroup"] += grouped - plan_ms
        lost["restore"] += resumed_ms - grouped
        lost["rework"] += strike_ms - commits_ms[before - 1] if before else 0.0
        lost["rework"] += committed_ms - resumed_ms - step_ms
        lost["spares"] += _start_of_spare(committed_ms, commits_ms, calm_ms, step_ms)
    whole = commits_ms[-1] - commits_ms[0] - (len(commits_ms) - 1) * step_ms
    lost["other"] = whole - sum(lost.values())
    return LostTime(**{name: round(ms / 1e3, 3) for name, ms in lost.items()})


def _start_of_spare(
    committed_ms: float, commits_ms: Sequence[float], calm_ms: Sequence[tuple[float, float]], step_ms: float
) -> float:
    """Return the extra milliseconds from the first good step until the next stretch without faults."""
    until = next((begin for begin, _ in calm_ms if begin >= committed_ms), commits_ms[-1])
    first, last = bisect.bisect_left(commits_ms, committed_ms), bisect.bisect_right(commits_ms, until) - 1
    if last <= first:
        return 0.0
    return commits_ms[last] - commits_ms[first] - (last - first) * step_ms
