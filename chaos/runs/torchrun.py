"""Carry out a plan against a script that torchrun starts, and compare the steps it reports with and without faults.

torchrun has no spares and no snapshots: when a rank is lost it ends all ranks and starts them again, as often as
``--max-restarts`` says; where they continue is up to the script. The results that can be compared with
`rackrun.chaos.runs.run_plan` are those visible from outside: steps computed again, the time to the next good step,
losses, and samples.
"""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import Unsupported
from rackrun.chaos.base.job_command import check_script
from rackrun.chaos.evidence.run_evidence import began_wall_s
from rackrun.chaos.faults.fault_types import Subjects, name_of
from rackrun.chaos.faults.table.fault_table import row_of
from rackrun.chaos.faults.targets import Scene, SlotOccupant
from rackrun.chaos.inprocess.step_probe import FOLDER, FinishedStep, read_finished_steps
from rackrun.chaos.plan.definition import AtPoint, FlipFlop, Inject, Plan, Swizzle, kind_of, parts_of, write_plan
from rackrun.chaos.runs.reference_run import writable
from rackrun.chaos.runs.run_plan import Performance
from rackrun.chaos.testbed.job_under_test import JobObservation, JobUnderTest
from rackrun.chaos.testbed.machine.processes import Process
from rackrun.coordinator.journal.journal_reader import open_journal
from rackrun.errors import UsageError

__all__ = ["TorchrunComparison", "TorchrunSummary", "compare", "run_outside", "steps_of_run"]

FORMAT = 1
_TRAY = "host"
_LOGS = "torchelastic_"
"""The prefix of a folder that torchrun makes for its logs in each run and never removes."""
_REFERENCE_LIMIT_S = 3600.0
ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""In torch 2.13, a restarted worker without this reads the gloo addresses of the attempt before, and never
continues."""


class TorchrunComparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two runs of the same training, one of them with faults."""

    steps: int
    """Steps that are finished at the end."""
    steps_without: int
    """The same, without faults."""
    steps_again: int
    """Steps that were finished before a fault and computed once more."""
    good_step_s: tuple[float | None, ...]
    """For each strike, the seconds until all ranks had finished a step that none had finished before; None: never."""
    same_losses: bool
    """Whether all losses are the same bit for bit, by the last report of every rank and step.

    A rank that is lost may not have reported its last step.
    """
    samples_twice: int
    """Samples that two finished steps or two ranks report, beyond those that do so without faults."""


class TorchrunSummary(TorchrunComparison, frozen=True, kw_only=True):
    """``summary.json`` of a job that rackrun did not start."""

    format: int = FORMAT
    launcher: str = "torchrun"
    plan: str
    seed: int
    exit_code: int | None
    struck: int
    missed: tuple[str, ...]
    """Strikes that were not carried out or had no effect."""
    left: tuple[str, ...]
    """Processes that outlived the job, and what it has left in temporary folders."""
    seconds: float
    reference_seconds: float
    command: tuple[str, ...]
    out: str

    @property
    def holds(self) -> bool | None:
        """Whether the job ended well and computed what it computes without faults; None if the faults did not
        happen."""
        if self.missed or not self.struck:
            return None
        ended = self.exit_code == 0 and self.steps == self.steps_without and not self.left
        return ended and self.same_losses and not self.samples_twice


def run_outside(
    plan: Plan,
    command: Sequence[str],
    *,
    out: Path,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda _line: None,
) -> TorchrunSummary:
    """Run the script under torchrun without and with the faults of ``plan``, and compare.

    ``command``: torchrun's options, the script, its arguments. The script must report its steps
    (`rackrun.chaos.inprocess.step_probe`). Raises `UsageError`.
    """
    _check(plan, command)
    check_script(command)
    writable(out)
    if any(out.iterdir()):
        raise UsageError(f"{out} is not empty.", remedy="name another --out.")
    (out / "plan.yaml").write_text(write_plan(plan))
    tell("torchrun: the run without faults")
    folder = out / "reference"
    folder.mkdir()
    with _Torchrun(folder, _filled(command, folder), env={**ENV, **(env or {})}) as job:
        reference_ended = job.finish(_REFERENCE_LIMIT_S)
    without = read_finished_steps(folder / "told")
    if reference_ended.exit_code != 0 or not without:
        raise UsageError(
            f"the run without faults ended with exit code {reference_ended.exit_code}, and told of {len(without)} steps.",
            remedy=f"have the script tell its steps (rackrun.chaos.inprocess.step_probe), and look at {folder / 'stderr.txt'}.",
        )
    tell(f"torchrun: the run with faults, seed {plan.seed}")
    performance = _Outside(plan, command, out, {**ENV, **(env or {})}, tell)
    ended = performance.play(60.0 + 10 * reference_ended.seconds if limit_s is None else limit_s)
    records, conductor = performance.conductor.records, performance.conductor
    struck_s = [performance.began_wall_s + performance.begun_s[one.strike.number] for one in records if one.took]
    missed = [*conductor.nobody, *(one.detail or "the job ended first" for one in records if not one.took)]
    missed += (
        [] if not conductor.owes else [f"the job ended (exit code {ended.exit_code}) before the plan was carried out"]
    )
    found = compare(without, read_finished_steps(performance.folder / "told"), struck_s)
    outside = TorchrunSummary(
        **msgspec.structs.asdict(found),
        plan=plan.name,
        seed=plan.seed,
        exit_code=ended.exit_code,
        struck=len(struck_s),
        missed=tuple(missed),
        left=tuple(one for one in ended.left if not Path(one).name.startswith(_LOGS)),
        seconds=round(ended.seconds, 3),
        reference_seconds=round(reference_ended.seconds, 3),
        command=tuple(command),
        out=str(out),
    )
    (out / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(outside), indent=1) + b"\n")
    return outside


def compare(
    without: Sequence[FinishedStep], told: Sequence[FinishedStep], struck_s: Sequence[float]
) -> TorchrunComparison:
    """Compare the reports of a run without faults with those of one with faults.

    ``told`` is in the order of time, and so are the strikes ``struck_s`` (Unix time).
    """
    ranks = {one.rank for one in without}
    last = {(one.rank, one.step): one for one in told}
    expected = {(one.rank, one.step): one for one in without}
    times = Counter((one.rank, one.step) for one in told)
    again = {step for (_, step), count in times.items() if count > 1}
    return TorchrunComparison(
        steps=len({step for _, step in last}),
        steps_without=len({step for _, step in expected}),
        steps_again=len(again),
        good_step_s=tuple(_good_step(told, struck, ranks) for struck in struck_s),
        same_losses=all(at in expected and one.loss == expected[at].loss for at, one in last.items()),
        samples_twice=max(0, _twice(last.values()) - _twice(expected.values())),
    )


def _good_step(told: Sequence[FinishedStep], struck_s: float, ranks: set[int]) -> float | None:
    known = max((one.step for one in told if one.at_s < struck_s), default=-1)
    done: dict[int, set[int]] = {}
    for one in told:
        if one.at_s >= struck_s and one.step > known:
            done.setdefault(one.step, set()).add(one.rank)
            if done[one.step] == ranks:
                return round(one.at_s - struck_s, 3)
    return None


def _twice(told: Iterable[FinishedStep]) -> int:
    ids = Counter(sample for one in told for sample in one.samples)
    return sum(count - 1 for count in ids.values())


def steps_of_run(run: Path) -> list[FinishedStep]:
    """Return the same reports for a job of rackrun, from its journal. ``run``: its ``--out-dir``."""
    with open_journal(run / "journal.sqlite") as (journal, _):
        began_s = began_wall_s(journal) or 0.0
        samples = {
            (step, rank, generation): struct.unpack(f"<{len(ids) // 8}q", ids)
            for step, rank, generation, ids in journal.execute(
                "SELECT step, rank, generation, ids FROM ledger WHERE phase = 0 AND ids IS NOT NULL"
            )
        }
        rows = journal.execute(
            "SELECT step, rank, generation, committed_at_ms, gate FROM units WHERE phase = 0 AND gate != x'' ORDER BY committed_at_ms"
        ).fetchall()
    return [
        FinishedStep(
            rank=rank,
            step=step,
            loss=float(struct.unpack("<d", gate[:8])[0]).hex(),
            samples=samples.get((step, rank, generation), ()),
            at_s=began_s + at_ms / 1e3,
            pid=0,
        )
        for step, rank, generation, at_ms, gate in rows
    ]


# -- the job
class _Torchrun(JobUnderTest):
    """A job that torchrun runs on this host; its slots are ``host/RANK``."""

    def __init__(self, folder: Path, arguments: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        self.told = folder / "told"
        self.told.mkdir(parents=True)
        self._read: dict[Path, int] = {}
        self._step = -1
        super().__init__(folder, arguments, env={**(env or {}), FOLDER: str(self.told.resolve())})

    def _program(self, arguments: Sequence[str]) -> list[str]:
        return ["-m", "torch.distributed.run", *arguments]

    def sight(self) -> JobObservation | None:
        """Return what the reports of the script and the processes show."""
        for path in self.told.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            steps = [msgspec.json.decode(line, type=FinishedStep).step for line in whole.splitlines()]
            self._step = max([self._step, *steps])
        places = [
            SlotOccupant(slot, _TRAY, _TRAY, _TRAY, int(slot.rpartition("/")[2]), pid.pid)
            for slot, pid in self._ranks()
        ]
        return JobObservation(self._step, Scene(tuple(places)))

    def workers(self) -> dict[str, Process]:
        return dict(self._ranks())

    def agents(self) -> dict[str, Process]:
        launcher = self.launcher()
        return {} if launcher is None else {_TRAY: launcher}

    def _ranks(self) -> list[tuple[str, Process]]:
        found = []
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            for pid in map(int, children.read_text().split()):
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    rank = next((word[5:].decode() for word in environ if word.startswith(b"RANK=")), None)
                    process = Process.of(pid)
                    if rank is not None and process is not None and process.state:
                        found.append((f"{_TRAY}/{rank}", process))
        return found


class _Outside(Performance):
    def _start(self) -> JobUnderTest:
        return _Torchrun(self.folder, _filled(self._command, self.folder), env=self._env)


def _filled(command: Sequence[str], folder: Path) -> list[str]:
    return [word.replace("{out}", str(folder.resolve())) for word in command]


def _check(plan: Plan, command: Sequence[str]) -> None:
    if plan.expect == "stops":
        raise Unsupported(
            "expect: stops cannot be judged under torchrun.", remedy="leave out expect: stops, or run it under rackrun."
        )
    if not any(word.endswith(".py") for word in command):
        raise UsageError("there is no script to run.", remedy="give torchrun's options and the script after --.")
    for part in parts_of(plan.plan):
        if not isinstance(part, Inject | FlipFlop | Swizzle):
            continue
        if not row_of(part.fault).by_signals or kind_of(part.target) is not Subjects.RANK:
            raise Unsupported(
                f"{name_of(part.fault)} of a {kind_of(part.target)} needs rackrun.",
                remedy="with torchrun: kill, pause or slow, of ranks.",
            )
        if isinstance(part, Inject) and isinstance(part.when, AtPoint):
            raise Unsupported("points are in rackrun's workers.", remedy="trigger it by a step or a time.")
