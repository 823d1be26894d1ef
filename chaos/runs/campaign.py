"""Run many plans, each drawn from its seed, and keep a tally with one line for each. Seeds in the tally are not run
again.

::

    TALLY                 JSON lines: `TallyHeader`, then a `TallyLine` for each seed
    TALLY.runs/ racks/               rack files of jobs whose GPUs fail
                references/NAME/     runs without faults: one for all seeds that compute the same
                seed-000012/         kept only if the run was not right: as `rackrun.chaos.runs.run_plan` leaves it
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from rackrun.chaos.base.job_command import check_script
from rackrun.chaos.base.job_layout import JobLayout
from rackrun.chaos.faults.fault_types import name_of
from rackrun.chaos.faults.table.fault_table import all_faults
from rackrun.chaos.runs.draw_run import FLAGS, DrawnRun, draw_flags, draw_run
from rackrun.chaos.runs.reference_run import ReferenceRun, run_reference, writable
from rackrun.chaos.runs.run_plan import Summary, run_plan
from rackrun.errors import UsageError

__all__ = ["TallyHeader", "TallyLine", "TallySums", "read_tally", "run_campaign"]

FORMAT = 1
_DRAWN_OPTIONS = (
    "--nproc-per-node",
    "--spares",
    "--trays",
    "--checkpoint-dir",
    "--checkpoint-every",
    "--max-restarts",
    "--min-ranks",
)


class TallyHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a tally."""

    campaign: int = FORMAT
    command: tuple[str, ...]


class TallyLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one seed."""

    seed: int
    label: str
    """The `rackrun.chaos.plan.survivability.Label` of the plan."""
    holds: bool | None
    faults: tuple[str, ...]
    struck: int
    """The number of faults that took effect."""
    layout: str
    """``2x2-2 ddp exact``: trays x slots - spares; "+ disk": with checkpoints."""
    recoveries: int
    steps: int
    seconds: float
    because: str
    """How the job ended."""
    wrong: dict[str, str] = {}
    """Oracle -> its reason, for the oracles that did not say *true*."""


@dataclass
class TallySums:
    """The sums of a campaign, by family of faults; a run counts for each family that it has."""

    runs: Counter[tuple[str, str, bool | None]] = field(default_factory=Counter)
    """(family, label, holds) -> the number of runs."""
    seeds: int = 0
    faults: int = 0
    seconds: float = 0.0
    wrong: list[TallyLine] = field(default_factory=list)

    def add(self, line: TallyLine) -> None:
        """Count one run."""
        self.seeds += 1
        self.faults += line.struck
        self.seconds += line.seconds
        for family in dict.fromkeys(_FAMILIES[name] for name in line.faults):
            self.runs[family, line.label, line.holds] += 1
        self.runs["all", line.label, line.holds] += 1
        if line.holds is not True:
            self.wrong.append(line)

    def families(self) -> list[str]:
        return [*sorted({family for family, _, _ in self.runs} - {"all"}), "all"]


_FAMILIES = {name_of(kind): kind.family.value for kind in all_faults()}


class _Same(NamedTuple):
    """What determines the bits of a run: jobs that are equal in this are compared with the same reference."""

    ranks: int
    wrap: str
    reduction: str
    flags: str


class _References:
    """The runs without faults, each made when it is first needed; other runs that need the same one wait meanwhile."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self._folder, self._command = folder, command
        self._locks: dict[_Same, threading.Lock] = {}
        self._lock = threading.Lock()

    def of(self, drawn: DrawnRun) -> ReferenceRun:
        """Return the reference of a drawn job. Raises `UsageError` when the script fails without faults."""
        same = _Same(drawn.layout.ranks, drawn.wrap, drawn.reduction, drawn.flags)
        alone = JobLayout(slots=same.ranks)
        command = _command(self._command, alone, same)
        name = f"{same.ranks}-{same.wrap}-{same.reduction}"
        folder = self._folder / (f"{name}-{same.flags.replace(',', '+')}" if same.flags else name)
        with self._lock:
            lock = self._locks.setdefault(same, threading.Lock())
        with lock:
            if not (folder / "reference.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                run_reference(command, folder)
        return ReferenceRun(folder, command)


def run_campaign(  # noqa: PLR0913 - all but three have a default
    seeds: Iterable[int],
    command: Sequence[str],
    *,
    tally: Path,
    limit_s: float | None = None,
    jobs: int = 2,
    tell: Callable[[str], None] = lambda _line: None,
    draw: Callable[[int], DrawnRun] | None = None,
    flags: Sequence[str] = FLAGS,
    sums: TallySums | None = None,
) -> TallySums:
    """Run the seeds that are not in the tally yet, and return the sums of the whole tally.

    ``command``: rackrun's options that hold for all runs, the script, its arguments; ``{wrap}``, ``{reduction}`` and
    ``{flags}`` in it become what is drawn, the flags from ``flags``. ``limit_s``: no seed is begun after that many
    seconds. ``jobs``: how many runs go on at a time. ``sums`` is updated in place, so that the sums are known even if
    the campaign is interrupted or fails. Raises `UsageError`.
    """
    for word in command:
        if word.replace("_", "-").partition("=")[0] in _DRAWN_OPTIONS:
            raise UsageError(f"the campaign chooses {word} at random for each run.", remedy="remove it from COMMAND.")
    sums, known = TallySums() if sums is None else sums, set()
    for line in read_tally(tally, command):
        sums.add(line)
        known.add(line.seed)
    check_script(command)
    _open_tally(tally)
    runs = Path(f"{tally}.runs")
    draw = draw or partial(draw_run, racks=runs / "racks")
    with_flags = any("{flags}" in word for word in command)
    references = _References(runs / "references", command)
    began_s, one_writer = time.monotonic(), threading.Lock()
    pending = iter([seed for seed in seeds if seed not in known])
    trouble: list[BaseException] = []

    def work() -> None:
        while not trouble and (limit_s is None or time.monotonic() - began_s < limit_s):
            with one_writer:
                seed = next(pending, None)
            if seed is None:
                return
            try:
                drawn = draw(seed)
                drawn = (
                    drawn._replace(flags=draw_flags(seed, flags, reduction=drawn.reduction)) if with_flags else drawn
                )
                line = _one(drawn, seed, command, references, runs)
            except BaseException as error:  # noqa: BLE001 - the others end what they are at, then it is raised
                trouble.append(error)
                return
            with one_writer:
                _append(tally, command, line)
                sums.add(line)
                tell(_told(line))

    with ThreadPoolExecutor(jobs) as pool:
        try:
            wait([pool.submit(work) for _ in range(jobs)])
        except KeyboardInterrupt as error:
            trouble.append(error)  # the runs under way end first, and are reported
    if trouble:
        raise trouble[0]
    return sums


def read_tally(path: Path, command: Sequence[str] | None = None) -> list[TallyLine]:
    """Return the lines of a tally; empty if there is none. Raises `UsageError` for a tally of another command or
    another file."""
    if not path.exists() or not path.stat().st_size:
        return []
    try:
        head, *rest = (
            path.read_bytes().rpartition(b"\n")[0].split(b"\n")
        )  # a last line without an end was being written
        found = msgspec.json.decode(head, type=TallyHeader)
        lines = [msgspec.json.decode(line, type=TallyLine) for line in rest]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{path} is not a file of campaign results: {error}.", remedy="name another --tally."
        ) from error
    if found.campaign != FORMAT or (command is not None and found.command != tuple(command)):
        raise UsageError(
            f"{path} is the tally of another campaign: {' '.join(found.command)}.", remedy="name another tally."
        )
    return lines


def _open_tally(tally: Path) -> None:
    """Remove an incomplete last line. Raises `UsageError` if the tally cannot be written."""
    writable(tally.absolute().parent, option="--tally")
    try:
        whole = tally.read_bytes().rpartition(b"\n") if tally.exists() else (b"", b"", b"")
        with tally.open("ab") as file:
            file.truncate(len(whole[0]) + len(whole[1]))
    except OSError as error:
        raise UsageError(f"{tally} cannot be written: {error.strerror}.", remedy="choose another --tally.") from error


def _append(path: Path, command: Sequence[str], line: TallyLine) -> None:
    with path.open("ab") as file:
        if not file.tell():
            file.write(msgspec.json.encode(TallyHeader(command=tuple(command))) + b"\n")
        file.write(msgspec.json.encode(line) + b"\n")


def _one(drawn: DrawnRun, seed: int, command: Sequence[str], references: _References, runs: Path) -> TallyLine:
    reference = references.of(drawn)
    out = runs / f"seed-{seed:06}"
    shutil.rmtree(out, ignore_errors=True)  # left by a campaign that was interrupted
    same = _Same(drawn.layout.ranks, drawn.wrap, drawn.reduction, drawn.flags)
    words = _command(command, drawn.layout, same)
    summary = run_plan(drawn.plan, words, out=out, reference=reference)
    if summary.holds is True:
        shutil.rmtree(out)
    return _line(drawn, seed, summary)


def _line(drawn: DrawnRun, seed: int, summary: Summary) -> TallyLine:
    layout = drawn.layout
    size = f"{layout.trays}x{layout.slots}-{layout.spares}{' on a rack' * bool(layout.rack)}{' + disk' * layout.checkpoints}"
    return TallyLine(
        seed=seed,
        label=drawn.label.value,
        holds=summary.holds,
        faults=drawn.faults,
        struck=sum(strike.took is True for strike in summary.strikes),
        layout=f"{size} {drawn.wrap} {drawn.reduction}{' ' * bool(drawn.flags)}{drawn.flags}",
        recoveries=len(summary.recoveries),
        steps=summary.steps,
        seconds=summary.seconds,
        because=next(verdict.because for verdict in summary.verdicts if verdict.oracle == "ending"),
        wrong={one.oracle: one.because for one in summary.verdicts if one.holds is not True},
    )


def _command(command: Sequence[str], layout: JobLayout, same: _Same) -> list[str]:
    drawn = {"{wrap}": same.wrap, "{reduction}": same.reduction, "{flags}": same.flags}
    words = list(command)
    for name, value in drawn.items():
        words = [word.replace(name, value) for word in words]
    return [*layout.options(), *words]


def _told(line: TallyLine) -> str:
    verdict = {True: "as it must", False: "WRONG", None: "unknown"}[line.holds]
    end = "; ".join(f"{name}: {why}" for name, why in line.wrong.items()) or line.because
    return f"seed {line.seed}: {line.label}, {', '.join(line.faults)} ({line.layout}): {verdict}, {end}"
