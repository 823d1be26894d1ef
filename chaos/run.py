"""A plan, carried out in a real job, and judged against the same job without faults.

::

    OUT/ plan.yaml        as it was given, with its seed
         reference/       the run without faults: stdout.txt, stderr.txt, run/ (rackrun's --out-dir), reference.json
         faulted/         the run with them, the same
         history.jsonl    what happened, on the clock of the run with faults
         resolved.json    what was struck, by name: a plan that repeats it
         summary.json     `Summary`
         repro.sh         does it again
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

import msgspec

from rackrun.chaos.conductor import Conductor, Order, See, Strike, TakeBack
from rackrun.chaos.doctor import check_plan
from rackrun.chaos.evidence import Evidence, Trace, Verdict, read_trace
from rackrun.chaos.faults import CrashAt, Subjects, name_of
from rackrun.chaos.injectors import Injected, Missed, Outcome, inject
from rackrun.chaos.job import Ended, Job, Sight
from rackrun.chaos.oracles import judge, overall
from rackrun.chaos.plan import AtPoint, Every, Inject, Plan, parts_of, write_plan
from rackrun.chaos.points import POINTS
from rackrun.chaos.seeds import stream
from rackrun.errors import UsageError

__all__ = ["StrikeTold", "Summary", "run_plan", "run_reference"]

FORMAT = 1
HOOKS = "rackrun.chaos.inside"
POLL_S = 0.02
REFERENCE_LIMIT_S = 3600.0


class StrikeTold(msgspec.Struct, frozen=True, kw_only=True):
    fault: str
    whom: tuple[str, ...]
    step: int
    """The newest that was committed."""
    at_s: float
    took: bool | None
    detail: str


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    plan: str
    seed: int
    expect: str
    holds: bool | None
    """All oracles; None: unknown."""
    verdicts: tuple[Verdict, ...]
    strikes: tuple[StrikeTold, ...]
    recoveries: tuple[str, ...]
    steps: int
    seconds: float
    reference_seconds: float
    command: tuple[str, ...]
    out: str


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """``reference.json``"""

    command: tuple[str, ...]
    seconds: float


def run_plan(
    plan: Plan,
    command: Sequence[str],
    *,
    out: Path,
    seed: int | None = None,
    reference: Path | None = None,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> Summary:
    """``command``: rackrun's options, the script, its arguments; ``{out}`` in it becomes the folder of the run. ``reference``: the folder of
    such a run without faults, else there is one first. ``limit_s``: how long the run with faults may take; default: a minute, and ten times the
    reference. Raises `UsageError`, before anything is started, for what cannot be; and when the script fails without faults."""
    if seed is not None:
        plan = msgspec.structs.replace(plan, seed=seed)
    check_plan(plan)
    _check_command(command)
    _make(out)
    (out / "plan.yaml").write_text(write_plan(plan))
    if reference is None:
        tell("the run without faults")
        reference = out / "reference"
        run_reference(command, reference, env=env)
    known = _read_reference(reference, command)
    limit_s = 60.0 + 10 * known.seconds if limit_s is None else limit_s
    tell(f"the run with faults, seed {plan.seed}")
    performance = _Performance(plan, command, out, env, tell)
    ended = performance.play(limit_s)
    conductor = performance.conductor
    evidence = Evidence(
        plan,
        read_trace(reference / "run", reference / "inside"),
        read_trace(performance.folder / "run", performance.folder / "inside"),
        ended,
        limit_s,
        tuple(conductor.records),
        tuple(conductor.nobody),
        _undone(conductor, ended),
        any(s.kind is Subjects.COORDINATOR for r in conductor.records if r.took for s in r.strike.subjects),
    )
    summary = _summary(evidence, known, command, out)
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    (out / "resolved.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(conductor.resolved()), indent=1) + b"\n"
    )
    _write_repro(out, command)
    return summary


def run_reference(command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None) -> Trace:
    """The run without faults. Raises `UsageError` when it fails, or commits nothing."""
    _make(folder)
    with Job(folder, _arguments(command, folder), env=env) as job:
        ended = job.finish(REFERENCE_LIMIT_S)
    trace = read_trace(folder / "run", folder / "inside")
    look = f"look at {folder / 'stderr.txt'}."
    if ended.exit_code != 0:
        how = f"ended with exit code {ended.exit_code}" if ended.exit_code is not None else "did not end"
        raise UsageError(f"the run without faults {how}.", remedy=look)
    if not trace.steps:
        raise UsageError(
            "the run without faults committed no step, so there is nothing to compare.",
            remedy=f"use @rackrun.elastic and run.steps() in the script; {look}",
        )
    told = Reference(command=tuple(command), seconds=ended.seconds)
    (folder / "reference.json").write_bytes(msgspec.json.encode(told))
    return trace


class _Performance:
    """The run with faults: what is seen goes to the conductor, what it orders to the injectors, what came of it back."""

    def __init__(
        self, plan: Plan, command: Sequence[str], out: Path, env: Mapping[str, str] | None, tell: Callable[[str], None]
    ) -> None:
        self.conductor = Conductor(plan)
        self.folder = out / "faulted"
        _make(self.folder)
        self._plan, self._command, self._env, self._tell = plan, command, env, tell
        self._history = out / "history.jsonl"
        self._under_way: dict[int, Injected] = {}
        """Strikes of which it is not known yet whether they took effect."""
        self._lasting: dict[int, Injected] = {}
        """Those to be taken back."""
        self._sight: Sight | None = None

    def play(self, limit_s: float) -> Ended:
        with (
            self._history.open("w", encoding="utf-8") as self._file,
            Job(self.folder, _arguments(self._command, self.folder), points=_points(self._plan), env=self._env) as job,
        ):
            self._job = job
            self._write("started", pid=job.process.pid)
            while not job.over and job.now_s < limit_s:
                self._look()
                self._hear()
                time.sleep(POLL_S)
            ended = job.finish(limit_s - job.now_s)
            self._hear()
            self._let_time_pass()
            for injected in self._lasting.values():
                injected.take_back()  # of the dead: helpers of ours
            self._write("ended", exit_code=ended.exit_code, left=list(ended.left))
        return ended

    def _look(self) -> None:
        sight = self._job.sight()
        if sight is not None:
            if self._sight is None or sight.step > self._sight.step:
                self._write("committed", step=sight.step)
            self._sight = sight
        if self._sight is not None:  # a coordinator that stands still hides the job, and the plan goes on
            see = See(self._job.now_s, self._sight.step, self._sight.scene, self._job.points())
            self._obey(self.conductor.see(see))

    def _hear(self) -> None:
        """Of what was struck."""
        for number, injected in list(self._under_way.items()):
            outcome = injected.outcome()
            if outcome is not None:
                del self._under_way[number]
                self._confirm(number, outcome)

    def _let_time_pass(self) -> None:
        """The job is over: what only waited to be taken back needs not be waited for. What was still to be done has nobody to be done to."""
        if self._sight is None or _endless(self._plan):
            return
        while (wake_s := self.conductor.wake_s) is not None and not self._under_way:
            see = See(max(wake_s, self._job.now_s), self._sight.step, self._sight.scene, self._job.points())
            self._obey(self.conductor.see(see))

    def _obey(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Strike():
                    self._strike(order)
                case TakeBack(number):
                    self._lasting.pop(number).take_back()
                    self._write("taken back", strike=number)

    def _strike(self, strike: Strike) -> None:
        assert self._sight is not None, "orders follow from what is seen"
        whom = [str(subject) for subject in strike.subjects]
        self._write("strike", strike=strike.number, fault=msgspec.to_builtins(strike.fault), whom=whom)
        self._tell(f"after step {self._sight.step}: {name_of(strike.fault)} of {', '.join(whom)}")
        draw = stream(self._plan.seed, "strike", strike.number)
        try:
            injected = inject(strike, self._sight.scene, self._job, lambda: draw.getrandbits(32))
        except (Missed, OSError) as error:
            self._confirm(strike.number, Outcome(False, str(error)))
        else:
            self._under_way[strike.number] = injected
            if strike.fault.lasts:
                self._lasting[strike.number] = injected
            self._write("begun", strike=strike.number)
            self._hear()

    def _confirm(self, number: int, outcome: Outcome) -> None:
        self._write("confirmed", strike=number, took=outcome.took, detail=outcome.detail)
        if not outcome.took:
            self._tell(f"it did not take effect: {outcome.detail}")
        self._obey(self.conductor.confirm(number, took=outcome.took, detail=outcome.detail))

    def _write(self, what: str, **more: object) -> None:
        self._file.write(json.dumps({"at_s": round(self._job.now_s, 4), "what": what, **more}) + "\n")
        self._file.flush()


# -- before
def _check_command(command: Sequence[str]) -> None:
    options = list(takewhile(lambda word: not word.endswith(".py"), command))
    if not command:
        raise UsageError("there is no script to run.", remedy="give rackrun's options and the script after --.")
    for index, word in enumerate(options):
        name, _, value = word.partition("=")
        if name.replace("_", "-") == "--out-dir":
            raise UsageError("--out-dir is chosen by the harness.", remedy="leave it out; see --out.")
        if name.replace("_", "-") == "--checkpoint-dir" and "{out}" not in (
            value or " ".join(options[index + 1 :][:1])
        ):
            raise UsageError(
                "the run with faults would go on from the checkpoints of the one without.",
                remedy="say --checkpoint-dir {out}/checkpoints: each run gets a folder of its own.",
            )


def _arguments(command: Sequence[str], folder: Path) -> list[str]:
    """With our hooks in the workers."""
    words = [word.replace("{out}", str(folder.resolve())) for word in command]
    for index, word in enumerate(words):
        if word == "--preload" and index + 1 < len(words):
            words[index + 1] += f",{HOOKS}"
            return words
        if word.startswith("--preload="):
            words[index] += f",{HOOKS}"
            return words
    return ["--preload", HOOKS, *words]


def _points(plan: Plan) -> list[str]:
    """That it names."""
    named = []
    for part in parts_of(plan.plan):
        if isinstance(part, Inject):
            named += [part.when.point] if isinstance(part.when, AtPoint) else []
            named += [part.fault.point] if isinstance(part.fault, CrashAt) else []
    return [point for point in POINTS if point in named]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(path.name in ("summary.json", "reference", "faulted", "run") for path in folder.iterdir()):
            raise UsageError(f"{folder} holds an earlier run.", remedy="name another --out, or remove that one.")
        (folder / ".probe").touch()
        (folder / ".probe").unlink()
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}.", remedy="choose another --out.") from error


def _read_reference(folder: Path, command: Sequence[str]) -> Reference:
    try:
        found = msgspec.json.decode((folder / "reference.json").read_bytes(), type=Reference)
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{folder} is no run without faults: {error}.", remedy="name the folder reference/ of an earlier run."
        ) from error
    if found.command != tuple(command):
        raise UsageError(
            f"{folder} is a run of another command: {shlex.join(found.command)}.", remedy="compare like with like."
        )
    return found


# -- after
def _undone(conductor: Conductor, ended: Ended) -> str:
    stops = conductor.plan.expect == "stops" and ended.exit_code != 0
    if conductor.done or stops or _endless(conductor.plan):
        return ""
    return f"the job ended (exit code {ended.exit_code}) before the plan was carried out"


def _endless(plan: Plan) -> bool:
    """It goes on for as long as the job does."""
    return any(isinstance(part, Every) and part.times is None for part in parts_of(plan.plan))


def _summary(evidence: Evidence, reference: Reference, command: Sequence[str], out: Path) -> Summary:
    verdicts = judge(evidence)
    result = evidence.trace.result
    return Summary(
        plan=evidence.plan.name,
        seed=evidence.plan.seed,
        expect=evidence.plan.expect,
        holds=overall(verdicts),
        verdicts=tuple(verdicts),
        strikes=tuple(
            StrikeTold(
                fault=name_of(record.strike.fault),
                whom=tuple(map(str, record.strike.subjects)),
                step=record.step,
                at_s=round(record.at_s, 3),
                took=record.took,
                detail=record.detail,
            )
            for record in evidence.records
        ),
        recoveries=result.recoveries if result is not None else (),
        steps=evidence.trace.steps,
        seconds=round(evidence.ended.seconds, 3),
        reference_seconds=round(reference.seconds, 3),
        command=tuple(command),
        out=str(out),
    )


def _write_repro(out: Path, command: Sequence[str]) -> None:
    path = out / "repro.sh"
    path.write_text(
        "#!/bin/sh\n"
        "# What was struck, again, by name and step. With plan.yaml instead of resolved.json: drawn again, from the same seed.\n"
        f"cd {shlex.quote(os.getcwd())} || exit\n"
        f'rackctl chaos run {shlex.quote(str(out.resolve() / "resolved.json"))} "$@" -- {shlex.join(command)}\n'
    )
    path.chmod(0o755)
