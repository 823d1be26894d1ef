"""The folder of a run with faults that nobody had to run: a journal as a coordinator writes it, a history as the harness does.

Ranks sit on trays of `SLOTS`, the last slot of each a spare. A step takes `STEP_S`; every rank that is killed is noticed after 3 ms,
and its spare has committed a step after `RECOVERY_S`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rackrun.chaos.evidence.history import HistoryWriter
from rackrun.chaos.evidence.run_evidence import Verdict
from rackrun.chaos.evidence.summary import StrikeSummary, Summary, host_facts, write_summary
from rackrun.chaos.faults.fault_types import Subjects
from rackrun.chaos.faults.processes.kill import Kill
from rackrun.chaos.faults.targets import Exactly
from rackrun.chaos.plan.definition import AtStep, Inject, Par, Plan, write_plan
from rackrun.coordinator.journal.journal_writer import Journal
from rackrun.coordinator.observe.recoveries import LostRank, RecoveryRecord
from rackrun.protocol.commands import Decided, GenerationPlan, Member, Notice, ResumeGeneration, StartWorker
from rackrun.protocol.events import TrayJoined, WorkerExited
from rackrun.protocol.ids import Generation, Incarnation, Position, Rank, SlotId, Step, TrayId
from rackrun.protocol.policy_types import Decision, Failure, Rung
from rackrun.protocol.wire import UnitCommitted

STEP_S, RECOVERY_S = 0.2, 0.15
SLOTS = 5
BEGAN_S = 1000.0
"""The host's monotonic clock when the run was started; its coordinator began half a second later."""
COORDINATOR_S = 0.5


def loss_of(step: int) -> float:
    return 2.0 + 3.0 / math.sqrt(step + 1) + 0.05 * math.sin(step)


class _Job:
    """Writes one journal. ``kills``: step -> rank."""

    def __init__(self, folder: Path, ranks: int, steps: int, kills: dict[int, int]) -> None:
        (folder / "run").mkdir(parents=True)
        (folder / "inside").mkdir()
        self.folder, self.kills, self.steps = folder, kills, steps
        per_tray = SLOTS - 1
        self.trays = [f"tray-{index:02}" for index in range(-(-ranks // per_tray))]
        self.seat = {
            rank: (SlotId(f"{self.trays[rank // per_tray]}/{rank % per_tray}"), rank + 1) for rank in range(ranks)
        }
        self.spare = {tray: (SlotId(f"{tray}/{per_tray}"), ranks + index + 1) for index, tray in enumerate(self.trays)}
        self.incarnation = ranks + len(self.trays)
        self.generation = 1
        self.strikes: list[tuple[int, int, float, SlotId, int, float]] = []
        """Step, rank, when, slot, incarnation, first commit afterwards."""

    def write(self, *, wrong_step: int | None = None) -> None:
        journal = Journal(self.folder / "run" / "journal.sqlite", run_id="job-1")
        journal.fact("began_monotonic_s", BEGAN_S + COORDINATOR_S)
        for tray in self.trays:
            joined = TrayJoined(at_ms=0, tray=TrayId(tray), host="host-a", slots=SLOTS, store="", snapshots="")
            cause = journal.event(joined)
        self._resume(journal, 10, cause, Position(-1), None, "all are there")
        for rank, (slot, incarnation) in [*self.seat.items(), *((0, spare) for spare in self.spare.values())]:
            self._start(journal, slot, incarnation, 10, cause, rank)
        now_ms = 1000.0
        for step in range(self.steps):
            began_ms = now_ms
            if step in self.kills:
                now_ms = self._kill(journal, step, self.kills[step], now_ms + 0.4e3 * STEP_S)
            now_ms += 1e3 * STEP_S
            loss = loss_of(step) * (1.0 + 1e-9 * (step == wrong_step))
            self._commit(journal, step, loss, now_ms, (now_ms - began_ms) / 1e3)
            if step % 500 == 499:
                journal.flush(300.0)
        for key, value in (
            ("exit_code", 0),
            ("because", f"all {len(self.seat)} ranks have finished"),
            ("ended_ms", now_ms + 50),
        ):
            journal.fact(key, value)
        journal.flush(300.0)
        journal.close()
        self.end_s = COORDINATOR_S + now_ms / 1e3 + 0.06

    def _commit(self, journal: Journal, step: int, loss: float, now_ms: float, seconds: float) -> None:
        for rank, (slot, incarnation) in self.seat.items():
            ids = struct.pack("<2q", 2 * (step * len(self.seat) + rank), 2 * (step * len(self.seat) + rank) + 1)
            journal.unit(
                UnitCommitted(
                    slot=slot,
                    incarnation=Incarnation(incarnation),
                    generation=Generation(self.generation),
                    rank=Rank(rank),
                    at=Position(step),
                    attempt=int(step in self.kills),
                    seconds=seconds,
                    gate=(loss, 2.0 * len(self.seat), 77.0 + step),
                    ids=ids,
                ),
                now_ms,
            )

    def _start(self, journal: Journal, slot: SlotId, incarnation: int, at_ms: int, cause: int, rank: int) -> None:
        start = StartWorker(
            slot=slot,
            incarnation=Incarnation(incarnation),
            spare=slot.endswith(f"/{SLOTS - 1}"),
            rank=Rank(rank),
            world_size=len(self.seat),
            generation=Generation(self.generation),
            store="",
        )
        journal.command(start, at_ms, cause)

    def _resume(
        self, journal: Journal, at_ms: int, cause: int, committed: Position, fresh: int | None, why: str
    ) -> None:
        members = tuple(
            Member(rank=Rank(rank), slot=slot, incarnation=Incarnation(of), fresh=rank == fresh)
            for rank, (slot, of) in self.seat.items()
        )
        plan = GenerationPlan(
            generation=Generation(self.generation),
            world_size=len(members),
            members=members,
            store="",
            layout=Generation(0),
            full=len(members),
            committed=committed,
        )
        command = ResumeGeneration(plan=plan, because=why)
        journal.persist(command, at_ms)
        journal.command(command, at_ms, cause)

    def _kill(self, journal: Journal, step: int, rank: int, at_ms: float) -> float:
        slot, incarnation = self.seat[rank]
        tray = slot.partition("/")[0]
        fault = at_ms + 3
        exited = WorkerExited(
            at_ms=int(fault), slot=slot, incarnation=Incarnation(incarnation), signal=9, step=Step(step)
        )
        cause = journal.event(exited)
        self.generation += 1
        what = f"rank {rank} lost (SIGKILL)"
        decision = Decision(rung=Rung.SWAP, reason="swap: 4 x 1 s")
        journal.command(
            Decided(generation=Generation(self.generation), failure=Failure(what=what), decision=decision),
            int(fault) + 15,
            cause,
        )
        to, of = self.spare[tray]
        self.seat[rank] = to, of
        self._resume(journal, int(fault) + 16, cause, Position(step - 1), rank, what)
        self.incarnation += 1
        self._start(journal, slot, self.incarnation, int(fault) + 16, cause, 0)
        self.spare[tray] = slot, self.incarnation
        ended = at_ms + 1e3 * RECOVERY_S + 1e3 * STEP_S
        journal.recovery(
            RecoveryRecord(
                generation=self.generation,
                kind="swap",
                because=what,
                fault_ms=fault,
                break_ms=fault + 0.5,
                parked_ms=fault + 10,
                plan_ms=fault + 16,
                resumed_ms=fault + 100,
                committed_ms=ended,
                lost=(LostRank(rank=Rank(rank), slot=slot, how="SIGKILL", to=to),),
                world_size=len(self.seat),
                redone=(step,),
                rungs=("swap",),
                reasons=("swap: 4 x 1 s",),
                decided_ms=fault + 15,
            )
        )
        restored_s = BEGAN_S + COORDINATOR_S + fault / 1e3
        with (self.folder / "inside" / "restores").open("a") as file:
            file.write(f"{rank} {self.generation} {restored_s + 0.03:.6f} {restored_s + 0.09:.6f}\n")
        self.strikes.append((step, rank, COORDINATOR_S + at_ms / 1e3, slot, incarnation, COORDINATOR_S + ended / 1e3))
        return at_ms + 1e3 * RECOVERY_S


def write_run(
    out: Path,
    *,
    ranks: int = 4,
    steps: int = 20,
    kills: dict[int, int] | None = None,
    wrong_step: int | None = None,
    holds: bool | None = True,
    verdicts: Sequence[Verdict] = (),
    notice: str = "",
    diagnosis: str = "",
) -> Path:
    """What `rackrun.chaos.runs.run_plan.run_plan` leaves before it makes its reports."""
    kills = {7: 1} if kills is None else kills
    _Job(out / "reference", min(ranks, 4), steps, {}).write()
    (out / "reference" / "reference.json").write_text(
        '{"command": ["train.py"], "seconds": 5.0, "monotonic_s": 1000.0}'
    )
    job = _Job(out / "faulted", ranks, steps, kills)
    job.write(wrong_step=wrong_step)
    if notice:
        journal = Journal(out / "faulted" / "run" / "journal.sqlite", run_id="job-1")
        journal._next_id = 1_000_000
        journal.command(Notice(text=notice), 1500, 1)
        journal.close()
    with (out / "history.jsonl").open("w") as file:
        _tell(HistoryWriter(file), job)
    parts = tuple(
        Inject(when=AtStep(step=step - 1), fault=Kill(), target=Exactly(Subjects.RANK, (str(rank),)))
        for step, rank in kills.items()
    )
    plan = Plan(plan=Par(parts=parts), name="ranks are killed", seed=3)
    (out / "plan.yaml").write_text(write_plan(plan))
    (out / "resolved.json").write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
    told = [
        StrikeSummary(
            number=number,
            fault="kill",
            family="process",
            whom=(f"rank {rank}",),
            step=step - 1,
            at_s=round(at_s, 3),
            took=True,
            detail="SIGKILL: gone",
        )
        for number, (step, rank, at_s, *_) in enumerate(job.strikes)
    ]
    summary = Summary(
        plan=plan.name,
        seed=plan.seed,
        expect="survives",
        diagnosis=diagnosis,
        holds=holds,
        verdicts=tuple(verdicts)
        or (Verdict(oracle="losses", holds=holds, because=f"{steps} of {steps}, bit for bit"),),
        strikes=tuple(told),
        recoveries=(),
        steps=steps,
        reference_steps=steps,
        seconds=job.end_s,
        reference_seconds=5.0,
        exit_code=0,
        because=f"all {ranks} ranks have finished",
        host=host_facts(),
        began="2026-01-31T12:00:00Z",
        command=("--nproc-per-node", str(ranks), "train.py"),
        reference=str(out / "reference"),
        out=str(out),
    )
    write_summary(out, summary)
    return out


def _tell(history: HistoryWriter, job: _Job) -> None:
    history.tell("started", 0.0, pid=1, monotonic_s=BEGAN_S, wall_s=1.7e9)
    per_tray = SLOTS - 1
    for index, tray in enumerate(job.trays):
        for slot in range(SLOTS):
            rack = f"rack-{index // 18}"
            history.tell("placed", 0.9, slot=f"{tray}/{slot}", tray=tray, clique=rack, rack=rack)
    assert per_tray > 0
    strikes = {strike[0]: (number, strike) for number, strike in enumerate(job.strikes)}
    now_s = COORDINATOR_S + 1.0
    for step in range(job.steps):
        if step in strikes:
            number, (_, rank, at_s, where, incarnation, _) = strikes[step]
            history.tell(
                "strike",
                at_s - 0.002,
                strike=number,
                fault={"fault": "kill"},
                whom=[f"rank {rank}"],
                slots=[(where, incarnation)],
            )
            history.tell("begun", at_s, strike=number)
            history.tell("confirmed", at_s + 0.01, strike=number, took=True, detail="SIGKILL: gone", struck_s=at_s)
            now_s += RECOVERY_S
        now_s += STEP_S
        history.tell("committed", now_s + 0.01, step=step)
    history.tell("ended", job.end_s, exit_code=0, left=[])
