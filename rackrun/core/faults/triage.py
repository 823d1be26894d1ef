"""Response to a verdict on a GPU: its rank is fenced now, replaced at the next step boundary, or left alone.

The verdicts of all trays pass `rackrun.topology.health.circuit_breaker` first: if many trays report the same at once,
the trays are not the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rackrun.core.generation.facts import Facts, HardwareChanged, WorkersMustGo
from rackrun.core.generation.outbox import Outbox
from rackrun.core.members.rack import RackMachine
from rackrun.protocol.commands import Notice, SetTimer, Worker
from rackrun.protocol.events import DeviceChecked, DeviceJudged
from rackrun.protocol.gpu_health import GpuVerdict, Response
from rackrun.protocol.ids import TrayId, slot_id
from rackrun.protocol.timers import BreakerWakes, SelfExitOver
from rackrun.topology.health.circuit_breaker import Breaker, PassedVerdict, SwitchSuspected, WithheldVerdict
from rackrun.topology.model.racks import CliqueId

__all__ = ["SELF_EXIT_MS", "Triage"]


SELF_EXIT_MS = 500
"""Milliseconds that a process whose CUDA context is lost has to end by itself. Its own error says more than the
verdict, if it raises one."""


@dataclass(slots=True)
class Triage:
    """Acts on verdicts."""

    rack: RackMachine
    out: Outbox
    facts: Facts
    breaker: Breaker = field(default_factory=lambda: Breaker({}))
    _wake_at_ms: int | None = None
    _failed: dict[Worker, str] = field(default_factory=dict)
    """Workers that have a moment to end by themselves, each with the reason from its GPU's verdict."""
    _awaited: str = ""
    _early: list[DeviceJudged] | None = field(default_factory=list)
    """Verdicts from before all trays had joined, when it is not known yet how many trays are "many". None
    afterwards."""

    def learn(self, cliques: Mapping[str, CliqueId], at_ms: int) -> None:
        """Tell the circuit breaker which trays and cliques there are, and act on the verdicts that arrived before all
        trays had joined."""
        self.breaker.learn({**dict.fromkeys(self.rack.trays), **cliques})
        early, self._early = self._early, None
        for event in early or ():
            self.judged(event)
        if early:
            self.tick(at_ms)

    def forget(self, tray: TrayId) -> None:
        """Forget a lost tray."""
        self.breaker.forget(tray)
        if self._early:
            self._early = [event for event in self._early if event.tray != tray]

    def judged(self, event: DeviceJudged) -> None:
        """Handle a verdict."""
        if event.tray not in self.rack.trays:
            return  # it was lost before the verdicts of the beginning were acted on
        if self._early is not None:
            self._early.append(event)
        else:
            self._act(self.breaker.handle(event.at_ms, event.tray, event.verdict), event.at_ms)

    def tick(self, at_ms: int) -> None:
        """Act on verdicts whose time in the breaker is over."""
        self._wake_at_ms = None
        self._act(self.breaker.tick(at_ms), at_ms)

    def close_breaker(self, at_ms: int) -> None:
        """Act on the verdicts that were held back, and on later ones again, as an operator asked."""
        held = list(self.breaker.withheld.values())
        self.breaker.reset()
        self.out.emit(Notice(text=f"the breaker is closed; {len(held)} verdicts were held back"))
        for one in held:
            self._passed(TrayId(one.tray), one.verdict, at_ms)

    def overdue(self, worker: Worker) -> None:
        """Fence a worker if it has not ended by itself."""
        record = self.rack.occupants.get(worker.slot)
        because = self._failed.pop(worker, "")
        if because and record is not None and record.alive and record.worker == worker:
            self.facts.add(WorkersMustGo({worker: because}))

    def checked(self, event: DeviceChecked) -> None:
        """Record whether a GPU is fit for use."""
        slot = slot_id(event.tray, event.index)
        if not self.rack.lives(slot):
            return
        self.rack.devices.checked(slot, event.unfit)
        record = self.rack.occupants.get(slot)
        if record is None or record.rank is None:
            why = f"may not be used: {'; '.join(event.unfit)}" if event.unfit else "may be used now"
            self.out.emit(Notice(text=f"{slot}{', a spare,' if record is not None else ''} {why}"))
        self.facts.add(HardwareChanged())

    def awaits(self, what: str) -> None:
        """Notify people that only GPUs that are unfit now can help, and again when others are awaited."""
        text = f"{what}. Waiting for {self.rack.unfit()}"
        if text != self._awaited:
            self._awaited = text
            self.out.emit(Notice(text=text))

    def _act(self, decisions: Sequence[PassedVerdict | WithheldVerdict | SwitchSuspected], at_ms: int) -> None:
        for decision in decisions:
            match decision:
                case PassedVerdict():
                    self._passed(TrayId(decision.tray), decision.verdict, at_ms)
                case WithheldVerdict():
                    self.out.emit(Notice(text=f"{decision.tray}: {decision.verdict} Not acted on: {decision.reason}"))
                case SwitchSuspected():
                    self.out.emit(Notice(text=decision.reason))

    def set_timer(self) -> None:
        """Request to be woken when the breaker has to look at a verdict again."""
        wake = self.breaker.wake_at_ms
        if wake is not None and wake != self._wake_at_ms:
            self._wake_at_ms = wake
            self.out.emit(SetTimer(timer=BreakerWakes(), at_ms=wake))

    def _passed(self, tray: TrayId, verdict: GpuVerdict, at_ms: int) -> None:
        if tray not in self.rack.trays:
            return  # the tray was lost while its verdict waited
        slot = slot_id(tray, verdict.index)
        devices = self.rack.devices
        devices.judged(tray, verdict)
        self.out.emit(Notice(text=f"{tray}: {verdict}"))
        because = f"GPU {verdict.index} is {verdict.health.value}: {verdict.reasons}"
        match verdict.response:
            case Response.RESTART:
                if (record := self.rack.occupants.get(slot)) is not None and record.alive:
                    worker = record.worker
                    self._failed[worker] = because
                    self.out.emit(
                        SetTimer(timer=SelfExitOver(worker.slot, worker.incarnation), at_ms=at_ms + SELF_EXIT_MS)
                    )
            case Response.FENCE:
                whole_tray = verdict.scope == "tray"
                slots = self.rack.slots_on(tray) if whole_tray else [slot]
                there = [self.rack.occupants[one] for one in slots if one in self.rack.occupants]
                going = [record.worker for record in there if record.alive]
                self.facts.add(WorkersMustGo(dict.fromkeys(going, because)))
            case Response.SWAP | Response.LEAVE:
                pass  # `HardwareChanged` begins a planned swap where one is due
        self.facts.add(HardwareChanged())
