"""Find the smallest plan that still fails, starting from a plan that failed with a real job.

::

    DIR/ tries.jsonl      which plans were tried, how often, and what was wrong; a later call continues from it
         reference/       the run without faults, unless there is one beside the plan
         tries/           runs; those that were right are removed
         smallest.json    the smallest plan so far
         repro.sh         runs it
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import PlanError
from rackrun.chaos.base.job_command import check_command, check_script
from rackrun.chaos.evidence.run_evidence import read_trace
from rackrun.chaos.injectors.doctor import check_plan
from rackrun.chaos.plan.definition import Plan
from rackrun.chaos.plan.shrink_plan import shrink
from rackrun.chaos.runs.reference_run import Reference, run_reference, writable
from rackrun.chaos.runs.repro_script import write_repro
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.chaos.runs.simulated_counterpart import reduced_in_simulator
from rackrun.errors import UsageError
from rackrun.launch.run.run_directory import read_json

__all__ = ["NotFailing", "ReducedPlan", "ShrinkAttempt", "reduce_plan"]


class NotFailing(UsageError):
    """The plan does not fail, so there is nothing to reduce."""


class ShrinkAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``tries.jsonl``: one plan that was tried."""

    key: str
    """The digest of the plan."""
    runs: int
    wrong: tuple[str, ...]
    """The oracles that were false; empty if every run was right or unknown."""
    diagnosis: str = ""
    out: str = ""
    """The folder of the run that failed."""


class ReducedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reduction."""

    plan: Plan
    wrong: tuple[str, ...]
    diagnosis: str
    runs: int
    """The number of runs it took, including those of earlier calls."""
    simulator: str
    """What the simulator found."""
    out: str


Play = Callable[[Plan, Path], Summary]
"""Runs a plan in a folder that does not exist yet."""


def reduce_plan(  # noqa: PLR0913 - all but two have a default
    plan: Plan,
    command: Sequence[str],
    *,
    out: Path,
    repeats: int = 3,
    reference: Path | None = None,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
    simulate: bool = True,
    play: Play | None = None,
    may_differ: Sequence[str] = (),
    tell: Callable[[str], None] = lambda _line: None,
) -> ReducedPlan:
    """Reduce ``plan``, which strikes by names and steps, as ``resolved.json`` does.

    A plan counts as failing when one of ``repeats`` runs fails an oracle that the first failing run failed.
    ``reference``: a run of ``command`` without faults. ``play`` replaces real runs. Raises `NotFailing`.
    """
    if repeats < 1:
        raise UsageError(f"{repeats} repeats prove nothing.", remedy="ask for at least 1.")
    check_plan(plan)
    if play is None:
        check_command(command)
        check_script(command)
    writable(out)
    known = reference if reference is not None and (reference / "reference.json").exists() else None
    if play is None:
        known = known or _reference(command, out, env, limit_s, tell)
        play = _player(command, known, limit_s, env, may_differ)
    tries = _Tries(out, repeats, play, tell)
    first = tries.fails(plan, ())
    if first is None:
        raise NotFailing(
            f"the plan did not fail in {repeats} runs.", remedy="raise --repeats, where it fails now and then only."
        )
    said = ""
    if simulate:
        steps = read_trace(known / "run", known / "inside").steps if known is not None else 0
        smaller, said = reduced_in_simulator(plan, command, steps)
        tell(f"simulator: {said}")
        if smaller is not None and (found := tries.fails(smaller, first.wrong)) is not None:
            plan, first = smaller, found
    smallest, last = shrink(plan, first, lambda tried: tries.fails(tried, first.wrong))
    (out / "smallest.json").write_bytes(msgspec.json.format(msgspec.json.encode(smallest), indent=1) + b"\n")
    options = ["--step-by-step"] if _closely(known) else []
    options += [word for name in may_differ for word in ("--may-differ", name)]
    write_repro(out / "repro.sh", "smallest.json", command, options=options, env=env or {})
    return ReducedPlan(
        plan=smallest,
        wrong=last.wrong,
        diagnosis=last.diagnosis,
        runs=tries.runs,
        simulator=said,
        out=str(out),
    )


class _Tries:
    """The plans tried so far; the same plan is never tried twice."""

    def __init__(self, out: Path, repeats: int, play: Play, tell: Callable[[str], None]) -> None:
        self._out, self._repeats, self._play, self._tell = out, repeats, play, tell
        self._log = out / "tries.jsonl"
        self._known = {one.key: one for one in self._read()}

    @property
    def runs(self) -> int:
        return sum(one.runs for one in self._known.values())

    def fails(self, plan: Plan, like: tuple[str, ...]) -> ShrinkAttempt | None:
        """Try the plan, unless that has been done, and return the failure or None.

        ``like``: a failure counts only if one of these oracles is false; empty: any oracle.
        """
        key = hashlib.blake2b(msgspec.json.encode((plan, self._repeats)), digest_size=8).hexdigest()
        if key not in self._known:
            try:
                check_plan(plan)
                tried = self._try(plan, key, like)
            except PlanError:
                tried = ShrinkAttempt(key=key, runs=0, wrong=())
            with self._log.open("ab") as file:
                file.write(msgspec.json.encode(tried) + b"\n")
            self._known[key] = tried
        known = self._known[key]
        return known if known.wrong and (not like or set(like) & set(known.wrong)) else None

    def _try(self, plan: Plan, key: str, like: tuple[str, ...]) -> ShrinkAttempt:
        told = msgspec.to_builtins(plan.plan)
        count = len(told.get("parts", (told,))) if told["do"] != "heal" else 0
        for turn in range(self._repeats):
            folder = self._out / "tries" / f"{key}-{turn}"
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted call
            summary = self._play(plan, folder)
            wrong = tuple(verdict.oracle for verdict in summary.verdicts if verdict.holds is False)
            if wrong and (not like or set(like) & set(wrong)):
                self._tell(f"{count} faults: still wrong ({', '.join(wrong)})")
                return ShrinkAttempt(key=key, runs=turn + 1, wrong=wrong, diagnosis=summary.diagnosis, out=str(folder))
            shutil.rmtree(folder, ignore_errors=True)
        self._tell(f"{count} faults: not any more, in {self._repeats} runs")
        return ShrinkAttempt(key=key, runs=self._repeats, wrong=())

    def _read(self) -> list[ShrinkAttempt]:
        if not self._log.exists():
            return []
        whole = self._log.read_bytes().rpartition(b"\n")[0]
        self._log.write_bytes(whole + b"\n" if whole else b"")  # drops half a line of an interrupted call
        return [msgspec.json.decode(line, type=ShrinkAttempt) for line in whole.splitlines()]


def _reference(
    command: Sequence[str], out: Path, env: Mapping[str, str] | None, limit_s: float | None, tell: Callable[[str], None]
) -> Path:
    folder = out / "reference"
    if not (folder / "reference.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        tell("the run without faults")
        run_reference(command, folder, env=env, step_by_step=True, limit_s=limit_s)
    return folder


def _closely(reference: Path | None) -> bool:
    known = read_json(reference / "reference.json", Reference) if reference is not None else None
    return known is not None and known.step_by_step


def _player(
    command: Sequence[str],
    reference: Path,
    limit_s: float | None,
    env: Mapping[str, str] | None,
    may_differ: Sequence[str],
) -> Play:
    again: dict[str, Path] = {}
    closely = _closely(reference)

    def second() -> Path:
        folder = reference.parent / "again"
        if "again" not in again:
            if not (folder / "reference.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                run_reference(command, folder, env=env, step_by_step=closely, limit_s=limit_s)
            again["again"] = folder
        return folder

    def play(plan: Plan, folder: Path) -> Summary:
        return run_plan(
            plan,
            command,
            out=folder,
            reference=reference,
            limit_s=limit_s,
            env=env,
            step_by_step=closely,
            repeat=lambda: read_trace(second() / "run", second() / "inside"),
            may_differ=may_differ,
        )

    return play
