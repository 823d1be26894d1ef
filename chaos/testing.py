"""The pytest fixture ``chaos``: runs a script with a plan's faults, and fails the test if the training is not the same.

The run without faults is shared by all runs of a session with the same script (its text), command and environment.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, TypedDict, Unpack

import msgspec
import pytest

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.job_command import check_command
from rackrun.chaos.base.random_streams import stream
from rackrun.chaos.evidence.explanations import explain
from rackrun.chaos.evidence.run_evidence import Trace
from rackrun.chaos.oracles.training.diagnosis import judge_script
from rackrun.chaos.plan.builders import make_plan
from rackrun.chaos.plan.definition import AtStep, Inject, Part, Plan, parts_of, read_plan
from rackrun.chaos.plan.survivability import check_targets
from rackrun.chaos.plan.survivable_plans import draw_plan
from rackrun.chaos.runs.reference_run import run_reference
from rackrun.chaos.runs.run_plan import Summary, check_run, run_plan
from rackrun.errors import RackrunError, UsageError

__all__ = ["Chaos", "JobOptions", "References"]

_SIZES = ("--trays", "--rack", "--nproc", "--spares")
FIRST_LIMIT_S = 600.0
"""Seconds that a run without faults may take by default."""


class _Without(NamedTuple):
    """A run without faults."""

    folder: Path
    trace: Trace


class JobOptions(TypedDict, total=False):
    """The options of a job; see `Chaos`."""

    ranks: int
    spares: int
    trays: int | None
    args: Sequence[object]
    options: Sequence[str]
    env: Mapping[str, str] | None
    limit_s: float | None
    may_differ: Sequence[str]


@dataclass
class References:
    """The runs without faults of a session."""

    folder: Path
    _known: dict[tuple[str, int], _Without | UsageError] = field(default_factory=dict)

    def get(
        self, script: Path, command: Sequence[str], env: Mapping[str, str], limit_s: float | None, *, turn: int = 0
    ) -> _Without:
        """Return the ``turn``-th run without faults; one that failed is not tried again. Raises `UsageError`."""
        key = _key(script, command, env), turn
        if key not in self._known:
            folder = self.folder / f"{key[0]}-{turn}"
            try:
                trace = run_reference(command, folder, env=env, step_by_step=True, limit_s=limit_s or FIRST_LIMIT_S)
                self._known[key] = _Without(folder, trace)
            except UsageError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, UsageError):
            raise known
        return known


@dataclass
class Chaos:
    """The fixture. ``survives``, ``stops`` and ``repeats`` fail the test and say why; ``run`` only returns the result.

    All take the script (relative to the test's folder, or to where pytest was started) and

    - ``plan``: a plan, a part of one, a YAML or JSON file, or nothing: one is drawn from ``--chaos-seed``;
    - ``ranks``, ``spares``, ``trays``: the size of the job, on this machine; ``args``: the script's arguments;
      ``options``: further options of rackrun; ``env``: variables added to this process's environment;
    - ``limit_s``: the seconds that each run may take;
    - ``may_differ``: patterns of names of untracked state that does not influence the training (a plot, a cache).
    """

    seed: int
    """The seed of the session: ``--chaos-seed``."""
    folder: Path
    references: References
    near: Path
    """The folder of the test."""
    test: str
    """The test's id in pytest."""
    tell: Callable[[str], None] = lambda _text: None
    _runs: int = 0

    def survives(
        self, script: str | Path, *, plan: Plan | Part | str | Path | None = None, **job: Unpack[JobOptions]
    ) -> Summary:
        """Fail the test unless the job ends well with the same losses, samples and weights as without faults.

        They are compared bit for bit, and nothing may be left behind.
        """
        return self._judged(
            self.run(script, plan=plan, expect="survives", **job), f"{script} does not survive this plan."
        )

    def stops(self, script: str | Path, *, plan: Plan | Part | str | Path, **job: Unpack[JobOptions]) -> Summary:
        """Fail the test unless the job stops with a reason and a remedy, because the plan takes more than can be
        survived."""
        return self._judged(self.run(script, plan=plan, expect="stops", **job), f"{script} does not stop as it should.")

    def repeats(self, script: str | Path, **job: Unpack[JobOptions]) -> None:
        """Fail the test unless two runs without faults are the same bit for bit, on which all other checks rely."""
        try:
            path = self._find(script)
            job = _whole(job, spares=0)
            command, env, limit_s = _command(path, job), job.get("env") or {}, job.get("limit_s")
            first, second = (self.references.get(path, command, env, limit_s, turn=turn) for turn in (0, 1))
        except RackrunError as error:
            self._fail(f"{script} cannot be tested: {error}")
        found = judge_script(first.trace, first.trace, second.trace)
        if found is not None:
            self._fail(
                f"{script} does not do the same twice.\n\n{found}\n\nThe two runs: {first.folder} and {second.folder}"
            )

    def run(
        self,
        script: str | Path,
        *,
        plan: Plan | Part | str | Path | None = None,
        expect: Literal["survives", "stops"] | None = None,
        **job: Unpack[JobOptions],
    ) -> Summary:
        """Run the script with the plan's faults, and return the result, whatever it is.

        The test fails only if the run is impossible.
        """
        out = self.folder / str(self._runs)
        self._runs += 1
        job = _whole(job, spares=1)
        env, limit_s = job.get("env") or {}, job.get("limit_s")
        try:
            path = self._find(script)
            command = _command(path, job)
            check_command(command)
            given = self._plan(plan)
            if given is not None:
                given = msgspec.structs.replace(given, expect=expect or given.expect)
                if not any(option.startswith(_SIZES) for option in job.get("options", ())):
                    check_targets(given, ranks=job["ranks"], spares=job["spares"], trays=job.get("trays"))
                check_run(given, command)
            without = self.references.get(path, command, env, limit_s)
            drawn = stream(self.seed, self.test, self._runs).getrandbits(32)
            if given is None:
                given = draw_plan(drawn, steps=without.trace.steps, spares=job["spares"])
            _check_steps(given, without.trace.steps)
            summary = run_plan(
                msgspec.structs.replace(given, expect=expect or given.expect, seed=given.seed or drawn),
                command,
                out=out,
                reference=without.folder,
                limit_s=limit_s,
                env=env,
                step_by_step=True,
                may_differ=job.get("may_differ", ()),
                repeat=lambda: self.references.get(path, command, env, limit_s, turn=1).trace,
            )
        except RackrunError as error:
            self._fail(f"{script} cannot be tested: {error}")
        self.tell(self._again(summary))
        return summary

    # -- helpers
    def _judged(self, summary: Summary, title: str) -> Summary:
        if summary.holds is not True:
            pytest.fail(f"{title}\n\n{explain(summary)}\n\n{self._again(summary)}", pytrace=False)
        return summary

    def _fail(self, message: str) -> NoReturn:
        pytest.fail(message, pytrace=False)

    def _again(self, summary: Summary) -> str:
        return "\n".join(
            [
                f"All of it:  {summary.out}",
                f"Again:      {summary.out}/repro.sh",
                f"With the test: pytest --chaos-seed {self.seed} {shlex.quote(self.test)}",
                f"Smaller:    rackctl chaos reduce {summary.out}/resolved.json",
            ]
        )

    def _find(self, name: str | Path) -> Path:
        for path in (self.near / name, Path.cwd() / name):
            if path.is_file():
                return path.resolve()
        raise UsageError(
            f"there is no {name} in {self.near}, nor in {Path.cwd()}.",
            remedy="name it relative to the test's folder, or wholly.",
        )

    def _plan(self, plan: Plan | Part | str | Path | None) -> Plan | None:
        if plan is None or isinstance(plan, Plan):
            return plan
        return read_plan(self._find(plan)) if isinstance(plan, str | Path) else make_plan(plan)


def _check_steps(plan: Plan, steps: int) -> None:
    late = [
        part.when.step for part in parts_of(plan.plan) if isinstance(part, Inject) and isinstance(part.when, AtStep)
    ]
    if late and max(late) >= steps - 1:
        raise PlanError(
            f"the plan strikes after step {max(late)}, and the script does steps 0 to {steps - 1}.",
            remedy=f"strike after step {max(steps - 2, 0)} at the latest, or have it do more steps.",
        )


def _whole(job: JobOptions, spares: int) -> JobOptions:
    if strange := job.keys() - JobOptions.__annotations__.keys():
        raise TypeError(f"there is no {', '.join(sorted(strange))}; there are {', '.join(JobOptions.__annotations__)}")
    return JobOptions(ranks=2, spares=spares) | job


def _command(script: Path, job: JobOptions) -> list[str]:
    ranks, spares, trays = job["ranks"], job["spares"], job.get("trays")
    if ranks < 1 or spares < 0:
        raise UsageError(f"a job of {ranks} ranks and {spares} spares.", remedy="ask for at least one rank.")
    slots, hosts = ranks + spares, trays or 1
    if slots % hosts:
        raise UsageError(
            f"{slots} workers ({ranks} ranks and {spares} spares) cannot be divided evenly among {hosts} trays.",
            remedy="make ranks + spares a multiple of trays.",
        )
    size = ["--trays", str(trays)] if trays else []
    size += ["--nproc-per-node", str(slots // hosts), "--spares", str(spares)]
    return [*size, *job.get("options", ()), str(script), *map(str, job.get("args", ()))]


def _key(script: Path, command: Sequence[str], env: Mapping[str, str]) -> str:
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    what = (sys.executable, os.getcwd(), list(command), sorted({**around, **env}.items()))
    return hashlib.blake2b(repr(what).encode() + script.read_bytes(), digest_size=8).hexdigest()
