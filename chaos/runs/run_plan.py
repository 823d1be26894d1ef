"""Carry out a plan in a real job, and judge the job against the same job without faults.

::

    OUT/ plan.yaml        the plan as given, with its seed
         reference/       the run without faults: stdout.txt, stderr.txt, run/ (rackrun's --out-dir), reference.json
         faulted/         the run with faults, the same files
         history.jsonl    what happened, on the clock of the run with faults
         resolved.json    what was struck, by name: a plan that repeats it
         summary.json     `Summary`
         again/           a second run without faults, where there was a difference to explain
         repro.sh         runs it again
         report.html, trace.json, report.md      for people (`rackrun.chaos.report`)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from rackrun.chaos.base.job_command import ENTER, arguments, check_command, check_script, preloading
from rackrun.chaos.base.job_layout import layout_of
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.evidence.history import HistoryWriter
from rackrun.chaos.evidence.run_evidence import RunEvidence, Trace, read_trace
from rackrun.chaos.evidence.summary import StrikeSummary, Summary, host_facts, write_summary
from rackrun.chaos.faults.crash_points import POINTS
from rackrun.chaos.faults.fault_row import Need
from rackrun.chaos.faults.fault_types import Subjects, name_of
from rackrun.chaos.faults.table.fault_table import needs_of, row_of
from rackrun.chaos.faults.targets import SlotOccupant
from rackrun.chaos.injectors import Injected, Missed, StrikeOutcome, inject
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.injectors.resources.gpu_errors import driver_for
from rackrun.chaos.oracles import judge, overall
from rackrun.chaos.oracles.training.diagnosis import judge_script, judge_untracked
from rackrun.chaos.plan.conductor import Conductor, Observation, Order, StrikeOrder, StrikeRecord, TakeBack
from rackrun.chaos.plan.definition import (
    AtPoint,
    FlipFlop,
    Inject,
    Plan,
    Swizzle,
    check,
    faults_of,
    is_endless,
    kind_of,
    parts_of,
    write_plan,
)
from rackrun.chaos.plan.survivability import check_budget, check_targets
from rackrun.chaos.report.write_reports import report_on
from rackrun.chaos.runs.reference_run import Reference, ReferenceRun, make_folder, read_reference, run_reference
from rackrun.chaos.runs.repro_script import write_repro
from rackrun.chaos.testbed.host_placement import check_hosts, hosts_needed, links_needed, trays_of
from rackrun.chaos.testbed.job_under_test import JobObservation, JobResult, JobUnderTest, checkpoints_in
from rackrun.chaos.testbed.network.hosts import HostSpread
from rackrun.errors import UsageError
from rackrun.protocol.ids import after_step

__all__ = ["Performance", "StrikeSummary", "Summary", "check_run", "run_plan"]

POLL_S = 0.02
COMPARED = ("losses", "samples", "weights", "untracked")
"""Oracles that compare a run with the one without faults."""


def run_plan(  # noqa: PLR0913 - all but two have a default
    plan: Plan,
    command: Sequence[str],
    *,
    out: Path,
    seed: int | None = None,
    reference: Path | ReferenceRun | None = None,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
    step_by_step: bool = False,
    repeat: Callable[[], Trace] | None = None,
    may_differ: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _line: None,
) -> Summary:
    """Run the job without faults and with those of ``plan``, compare the two, and write the reports.

    ``command``: rackrun's options, the script, its arguments; ``{out}`` in it becomes the folder of the run.
    ``reference``: the folder of an earlier run without faults; by default there is one first. ``limit_s``: how many
    seconds each run may take, by default a minute and ten times the reference for the one with faults.
    ``step_by_step``: the state of the ranks is recorded before every step, so that the first difference can be named,
    and a step waits until the strikes that belong after the step before have begun. ``repeat`` returns a second run
    without faults where there is a difference to explain; by default it is made then. ``may_differ``: patterns of names
    of untracked state that does not influence the training.

    Raises `UsageError` for an impossible plan or command, before anything is started, and when the script fails without
    faults.
    """
    if seed is not None:
        plan = msgspec.structs.replace(plan, seed=seed)
    check_run(plan, command)
    check_script(command)
    reference_run = (
        reference if isinstance(reference, ReferenceRun) else ReferenceRun(reference or out / "reference", command)
    )
    if reference is not None:
        read_reference(reference_run.folder, reference_run.command, step_by_step=step_by_step)
    make_folder(out)
    (out / "plan.yaml").write_text(write_plan(plan))
    if reference is None:
        tell("the run without faults")
        run_reference(command, reference_run.folder, env=env, step_by_step=step_by_step, limit_s=limit_s)
    known = read_reference(reference_run.folder, reference_run.command, step_by_step=step_by_step)
    limit_s = 60.0 + 10 * known.seconds if limit_s is None else limit_s
    tell(f"the run with faults, seed {plan.seed}")
    reference_trace = read_trace(reference_run.folder / "run", reference_run.folder / "inside", whole=False)
    performance = Performance(
        plan, command, out, env, tell, step_by_step=step_by_step, last_step=reference_trace.last_step
    )
    try:
        ended = performance.play(limit_s)
    except KeyboardInterrupt:
        for line in performance.so_far():
            tell(line)
        raise
    conductor = performance.conductor
    evidence = RunEvidence(
        plan,
        reference_trace,
        read_trace(performance.folder / "run", performance.folder / "inside"),
        ended,
        limit_s,
        tuple(conductor.records),
        tuple(conductor.nobody),
        _undone(conductor, ended),
        any(
            s.kind is Subjects.COORDINATOR and r.strike.fault.loses
            for r in conductor.records
            if r.took
            for s in r.strike.subjects
        ),
        performance.places,
        performance.began_wall_s,
        began_monotonic_s=performance.began_monotonic_s,
        struck_s=performance.struck_s,
        may_differ=tuple(may_differ),
        late_s=performance.late_s,
    )
    summary = _summary(evidence, known, command, out, reference_run.folder)
    if any(verdict.oracle in COMPARED and verdict.holds is False for verdict in summary.verdicts):
        tell("they differ: the run without faults once more")
        again = repeat or (
            lambda: run_reference(
                reference_run.command, out / "again", env=env, step_by_step=step_by_step, limit_s=limit_s
            )
        )
        evidence = dataclasses.replace(evidence, again=again())
        summary = _summary(evidence, known, command, out, reference_run.folder)
        summary = msgspec.structs.replace(summary, diagnosis=_diagnosis(evidence))
    write_summary(out, summary)
    (out / "resolved.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(conductor.resolved()), indent=1) + b"\n"
    )
    options = ["--step-by-step"] if step_by_step else []
    options += [word for name in may_differ for word in ("--may-differ", name)]
    write_repro(out / "repro.sh", "resolved.json", command, options=options, env=env or {})
    return report_on(out, summary, tell)


class Performance:
    """The run with faults: passes observations to the conductor, its orders to the injectors, and their
    outcomes back."""

    def __init__(
        self,
        plan: Plan,
        command: Sequence[str],
        out: Path,
        env: Mapping[str, str] | None,
        tell: Callable[[str], None],
        *,
        step_by_step: bool = False,
        last_step: int | None = None,
    ) -> None:
        self.conductor, self._step_by_step = Conductor(plan, last_step=last_step), step_by_step
        self.folder = out / "faulted"
        make_folder(self.folder)
        self._plan, self._command, self._env, self._tell = plan, command, env, tell
        self._out = out
        self._placed: set[str] = set()
        self._under_way: dict[int, Injected] = {}
        """Strikes whose outcome is not known yet, by number."""
        self._lasting: dict[int, Injected] = {}
        """Strikes of faults that last, until they are taken back, by number."""
        self._close: Callable[[], None] = lambda: None
        """Frees, after the job, what was made for it."""
        self._sight: JobObservation | None = None
        self.places: dict[int, tuple[str, ...]] = {}
        self.began_wall_s = 0.0
        self.began_monotonic_s = 0.0
        self.struck_s: dict[int, float] = {}
        self.late_s = 0.0
        self.begun_s: dict[int, float] = {}
        """Strike -> when it was injected, in seconds since the job's start. Finding the subjects takes a moment."""

    def play(self, limit_s: float) -> JobResult:
        """Start the job, carry the plan out, and return how the job ended; after ``limit_s`` seconds it is killed."""
        with (
            (self._out / "history.jsonl").open("w", encoding="utf-8") as file,
            self._start() as job,
        ):
            self._job, self._history, self.began_wall_s = job, HistoryWriter(file), time.time() - job.now_s
            self.began_monotonic_s = job.started_s
            self._write("started", 0.0, pid=job.process.pid, monotonic_s=job.started_s, wall_s=self.began_wall_s)
            while not job.over and job.now_s < limit_s:
                self._look()
                self._hear()
                self._let_go_on()
                asked_s = time.monotonic()
                time.sleep(POLL_S)
                self.late_s = max(self.late_s, time.monotonic() - asked_s - POLL_S)
            self._hear()
            self._take_all_back()  # our helpers are not leftovers of the job
            ended = job.finish(limit_s - job.now_s)
            self._hear()
            self._let_time_pass()
            self._take_all_back()
            self._history.give_up(job.now_s)
            self._write("ended", exit_code=ended.exit_code, left=list(ended.left))
        self._close()
        return ended

    def so_far(self) -> list[str]:
        """Return lines that tell what happened up to now, for a run that was interrupted."""
        step = -1 if self._sight is None else self._sight.step
        words = {True: "took effect", False: "took no effect", None: "nobody knows whether it took effect"}
        struck = [
            f"struck {after_step(one.step)}: {name_of(one.strike.fault)} of {', '.join(map(str, one.strike.subjects))}: {words[one.took]}"
            for one in self.conductor.records
        ]
        return [f"it was interrupted {after_step(step)}", *(struck or ["nothing was struck"])]

    def _start(self) -> JobUnderTest:
        rack, env = driver_for(self._plan, self._command, self.folder) or (None, {})
        if rack is not None:
            self._close = rack.close
        words, spread = arguments(self._command, self.folder), None
        if hosts_needed(self._plan):
            trays, words = trays_of(preloading(words, ENTER))
            spread = HostSpread(trays, links_needed(self._plan))
        needs = needs_of(faults_of(self._plan))
        return JobUnderTest(
            self.folder,
            words,
            points=_points(self._plan),
            env={**(self._env or {}), **env},
            driver=rack,
            own_disk=Need.DISK in needs,
            own_clocks=Need.CLOCKS in needs,
            spread=spread,
            step_by_step=self._step_by_step,
        )

    def _look(self) -> None:
        sight = self._job.sight()
        if sight is not None:
            if self._sight is None or sight.step > self._sight.step:
                self._write("committed", step=sight.step)
            self._sight = sight
            for place in sight.scene.places:
                self._place(place)
        if self._sight is not None:  # a stopped coordinator hides the job, and the plan goes on
            see = Observation(self._job.now_s, self._sight.step, self._sight.scene, self._job.points())
            self._obey(self.conductor.see(see))

    def _let_go_on(self) -> None:
        """Let the step after the one that was seen begin.

        When the plan is done, or the coordinator stands still, all steps may begin.
        """
        if self.conductor.done or any(self._hides(record) for record in self.conductor.records):
            self._job.let_go_on()
        elif self._sight is not None:
            self._job.let_go_on(self._sight.step + 1)

    def _hides(self, record: StrikeRecord) -> bool:
        """Whether the strike hides the job, because its coordinator stands still."""
        of_coordinator = any(subject.kind is Subjects.COORDINATOR for subject in record.strike.subjects)
        return of_coordinator and record.took is not False and record.back_s is None

    def _place(self, place: SlotOccupant) -> None:
        if place.slot not in self._placed:
            self._placed.add(place.slot)
            self._write("placed", slot=place.slot, tray=place.tray, clique=place.clique, rack=place.rack)

    def _hear(self) -> None:
        """Ask for the outcomes of strikes that are under way."""
        for number, injected in list(self._under_way.items()):
            try:
                outcome = injected.outcome()
            except OSError as error:  # the evidence has gone with the job
                outcome = StrikeOutcome(False, f"nobody knows: {error}")
            if outcome is not None:
                del self._under_way[number]
                self._confirm(number, outcome)

    def _let_time_pass(self) -> None:
        """After the job's end, let the conductor finish: no waits are needed, and what is still due finds nothing to
        strike."""
        if self._sight is None or is_endless(self._plan):
            return
        while (wake_s := self.conductor.wake_s) is not None and not self._under_way:
            see = Observation(max(wake_s, self._job.now_s), self._sight.step, self._sight.scene, self._job.points())
            self._obey(self.conductor.see(see))

    def _obey(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case StrikeOrder():
                    self._strike(order)
                case TakeBack(number) if number in self._lasting:
                    self._lasting.pop(number).take_back()
                    self._write("taken back", strike=number)
                case TakeBack():
                    pass  # it goes with the job

    def _take_all_back(self) -> None:
        while self._lasting:
            self._lasting.popitem()[1].take_back()

    def _strike(self, strike: StrikeOrder) -> None:
        assert self._sight is not None, "orders follow from what is seen"
        whom = [str(subject) for subject in strike.subjects]
        slots = [(p.slot, p.incarnation) for subject in strike.subjects for p in self._sight.scene.of(subject)]
        self._write("strike", strike=strike.number, fault=msgspec.to_builtins(strike.fault), whom=whom, slots=slots)
        self._tell(f"{after_step(self._sight.step)}: {name_of(strike.fault)} of {', '.join(whom)}")
        scene = self._sight.scene
        self.places[strike.number] = tuple(place.slot for one in strike.subjects for place in scene.of(one))
        draw = stream(self._plan.seed, "strike", strike.number)
        try:
            injected = inject(strike, self._sight.scene, self._job, lambda: draw.getrandbits(32))
        except (Missed, OSError) as error:
            self._confirm(strike.number, StrikeOutcome(False, str(error)))
        else:
            self._under_way[strike.number] = injected
            self.begun_s[strike.number] = self._job.now_s
            if strike.fault.lasts:
                self._lasting[strike.number] = injected
            self._write("begun", strike=strike.number)
            self._hear()

    def _confirm(self, number: int, outcome: StrikeOutcome) -> None:
        struck_s = None if outcome.struck_s is None else outcome.struck_s - self._job.started_s
        if struck_s is not None:
            self.struck_s[number] = struck_s
        self._write("confirmed", strike=number, took=outcome.took, detail=outcome.detail, struck_s=struck_s)
        if not outcome.took:
            self._tell(f"it did not take effect: {outcome.detail}")
        self._obey(self.conductor.confirm(number, took=outcome.took, detail=outcome.detail))

    def _write(self, what: str, at_s: float | None = None, **more: object) -> None:
        self._history.tell(what, self._job.now_s if at_s is None else at_s, **more)


# -- before
def check_run(plan: Plan, command: Sequence[str]) -> None:
    """Raise `UsageError` for a plan or command that is impossible, on this machine or at all."""
    check(plan)
    check_plan(plan)
    layout = layout_of(command)
    if layout is not None:
        check_targets(plan, ranks=layout.ranks, spares=layout.spares, trays=layout.trays)
    check_budget(plan, layout)
    check_hosts(plan, command)
    check_command(command)
    _check_storage(plan, command)
    driver_for(plan, command, None)


def _check_storage(plan: Plan, command: Sequence[str]) -> None:
    for part in parts_of(plan.plan):
        if (
            isinstance(part, Inject | FlipFlop | Swizzle)
            and kind_of(part.target) is Subjects.STORAGE
            and checkpoints_in(command) is None
        ):
            raise UsageError(
                f"{name_of(part.fault)} strikes checkpoints, and the job writes none.",
                remedy="say --checkpoint-dir {out}/checkpoints, and how often: --checkpoint-every STEPS.",
            )


def _points(plan: Plan) -> list[str]:
    """Return the points that the plan names."""
    named = list(plan.watch)
    for part in parts_of(plan.plan):
        if isinstance(part, Inject):
            named += [part.when.point] if isinstance(part.when, AtPoint) else []
            named += row_of(part.fault).points(part.fault)
    return [point for point in POINTS if point in named]


# -- after
def _diagnosis(evidence: RunEvidence) -> str:
    """Return why the runs differ.

    Returns "" if nothing differs, or only what also differs between two runs without faults.
    """
    found = judge_script(evidence.reference, evidence.trace, evidence.again)
    return str(found or judge_untracked(evidence) or "")


def _undone(conductor: Conductor, ended: JobResult) -> str:
    """Return why the plan was not carried out completely, or ""."""
    stops = conductor.plan.expect == "stops" and ended.exit_code != 0
    if stops or not conductor.owes:
        return ""
    return f"the job ended (exit code {ended.exit_code}) before the plan was carried out"


def _summary(
    evidence: RunEvidence, reference: Reference, command: Sequence[str], out: Path, reference_folder: Path
) -> Summary:
    verdicts = judge(evidence)
    result, ended = evidence.trace.result, evidence.ended
    began = datetime.now(UTC) - timedelta(seconds=ended.seconds)
    return Summary(
        plan=evidence.plan.name,
        seed=evidence.plan.seed,
        expect=evidence.plan.expect,
        holds=overall(verdicts),
        verdicts=tuple(verdicts),
        strikes=tuple(
            StrikeSummary(
                number=record.strike.number,
                family=record.strike.fault.family,
                fault=name_of(record.strike.fault),
                whom=tuple(map(str, record.strike.subjects)),
                step=record.step,
                at_s=round(record.at_s, 3),
                took=record.took,
                detail=record.detail,
                back_s=None if record.back_s is None else round(record.back_s, 3),
            )
            for record in evidence.records
        ),
        recoveries=result.recoveries if result is not None else (),
        steps=evidence.trace.steps,
        reference_steps=evidence.reference.steps,
        seconds=round(ended.seconds, 3),
        reference_seconds=round(reference.seconds, 3),
        exit_code=ended.exit_code,
        because=result.because if result is not None else "",
        remedy=result.remedy if result is not None else "",
        host=host_facts(),
        began=f"{began:%Y-%m-%dT%H:%M:%SZ}",
        command=tuple(command),
        reference=str(reference_folder),
        out=str(out),
        may_differ=evidence.may_differ,
    )
