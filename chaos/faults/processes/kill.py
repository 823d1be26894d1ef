"""Kill: a signal ends processes."""

from __future__ import annotations

from typing import Literal

from rackrun.chaos.faults.fault_row import FaultRow, StrikeCost, always
from rackrun.chaos.faults.fault_types import PROCESSES, BaseFault, Family, Subjects
from rackrun.chaos.faults.profiles import Profile
from rackrun.chaos.faults.targets import A_RANK, A_SPARE, A_TRAY, AN_AGENT, THE_COORDINATOR, Several, Target
from rackrun.chaos.faults.virtual_strike import VirtualAgent, VirtualStrike

__all__ = ["ROW", "Kill"]

_NUMBERS = {"KILL": 9, "SEGV": 11, "ABRT": 6, "BUS": 7, "TERM": 15}
_WHOM: tuple[Target, ...] = (A_RANK, A_RANK, Several(Subjects.RANK, 2), A_SPARE, AN_AGENT, A_TRAY)


class Kill(BaseFault, frozen=True, kw_only=True, tag="kill"):
    """A signal ends the process; the processes of a tray or a rack get it all at once."""

    family = Family.PROCESS
    strikes = (*PROCESSES, Subjects.COORDINATOR)
    loses = True
    signal: Literal["KILL", "SEGV", "ABRT", "BUS", "TERM"] = "KILL"


def _simulate(fault: Kill, strike: VirtualStrike) -> bool:
    def end(agent: VirtualAgent) -> None:
        agent.die(told=strike.subject.kind is Subjects.AGENT or strike.chance(0.5))

    return strike.each(worker=lambda worker: worker.end(signal=_NUMBERS[fault.signal]), agent=end)


def _not_simulated(_: Kill, kind: Subjects) -> str:
    return "its coordinator does not end before the job" if kind is Subjects.COORDINATOR else ""


ROW = FaultRow(
    example=Kill(),
    how="signal by pidfd; a tray's processes all at once",
    inject=lambda fault, tools: tools.send_signal(fault.signal),
    by_signals=True,
    simulate=_simulate,
    not_simulated=_not_simulated,
    cost=always(StrikeCost.SUBJECTS_AT_ONCE),
    looks_like=lambda fault: fault.signal,
    justifies_loss=always(True),
    draw=lambda d: (Kill(signal=d.choice(["KILL", "KILL", "SEGV", "ABRT", "BUS", "TERM"])), d.choice(_WHOM)),
    variants={
        Profile.KILLS: lambda *_: [
            (Kill(), A_RANK),
            (Kill(signal="SEGV"), A_RANK),
            (Kill(), Several(Subjects.RANK, 2)),
            (Kill(), A_SPARE),
        ],
        Profile.TRAYS: lambda *_: [(Kill(), A_TRAY), (Kill(), AN_AGENT)],
        Profile.FEW_WORKERS: lambda *_: [(Kill(), A_RANK)],
        Profile.LONG: lambda *_: [
            (Kill(), A_RANK),
            (Kill(), Several(Subjects.RANK, 2)),
            (Kill(), A_SPARE),
            (Kill(), A_TRAY),
        ],
        Profile.LOST_IN_RECOVERY: lambda d, _: [(Kill(signal=d.choice(["KILL", "SEGV"])), A_RANK)],
        Profile.COORDINATOR_KILLED: lambda d, _: [(Kill(signal=d.choice(["KILL", "ABRT"])), THE_COORDINATOR)],
        Profile.ANY_SCRIPT_LOSES: lambda d, _: [
            (Kill(), A_RANK),
            (Kill(signal=d.choice(["SEGV", "ABRT", "BUS"])), A_RANK),
        ],
    },
    in_soak={"kill": Kill(), "segv": Kill(signal="SEGV")},
)
