"""Health verdicts on the GPUs of live trays, and the reasons for which a GPU must not be used now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from rackrun.protocol.gpu_health import GpuVerdict, Health, Response
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.topology.placement.objective import Fitness

__all__ = ["GpuFitness", "ProbationCause"]


class ProbationCause(Enum):
    """What a slot is on probation for. Each cause is ended, and used as evidence, by whom it concerns."""

    SLOW = auto()
    """Its rank was slow."""
    WRONG = auto()
    """What was computed there was wrong, or may have been."""
    STANDSTILLS = auto()
    """Its tray stood still repeatedly."""


@dataclass(slots=True)
class GpuFitness:
    """What is known against each slot's GPU."""

    edition: int = 0
    """Changes whenever anything in this object changes."""
    _verdicts: dict[SlotId, GpuVerdict] = field(default_factory=dict)
    """Verdicts on GPUs that should be left (SWAP or FENCE), until a better verdict comes."""
    _on_tray: dict[TrayId, dict[SlotId, GpuVerdict]] = field(default_factory=dict)
    """The verdicts of ``_verdicts``, by tray."""
    _unfit: dict[SlotId, tuple[str, ...]] = field(default_factory=dict)
    _refused: dict[SlotId, str] = field(default_factory=dict)
    """Slots of trays whose reported topology is impossible, with the reason. The health of their GPUs does not
    matter."""
    _probation: dict[SlotId, dict[ProbationCause, str]] = field(default_factory=dict)
    """Slots on probation, with the reason for each cause."""
    _unrepeated: dict[SlotId, None] = field(default_factory=dict)
    """Slots on which a result was computed once that did not repeat."""

    def judged(self, tray: TrayId, verdict: GpuVerdict) -> None:
        """Record a verdict on a tray's GPU."""
        self.edition += 1
        slot = slot_id(tray, verdict.index)
        if verdict.response in (Response.SWAP, Response.FENCE):
            self._verdicts[slot] = verdict
            self._on_tray.setdefault(tray, {})[slot] = verdict
        elif verdict.health is Health.OK:
            self._verdicts.pop(slot, None)
            self._on_tray.get(tray, {}).pop(slot, None)

    def checked(self, slot: SlotId, unfit: tuple[str, ...]) -> None:
        """Record why a slot's GPU is unfit; (): it is fit."""
        self.edition += 1
        if unfit:
            self._unfit[slot] = unfit
        else:
            self._unfit.pop(slot, None)

    def refuse(self, tray: TrayId, slots: int, why: str) -> None:
        """Use none of the tray's slots until it joins again, because its reported topology is impossible."""
        self.edition += 1
        self._refused |= {slot_id(tray, index): why for index in range(slots)}

    def put_on_probation(self, slot: SlotId, cause: ProbationCause, because: str) -> None:
        """Make a slot the last choice from now on; ``because`` is shown to operators."""
        self.edition += 1
        self._probation.setdefault(slot, {})[cause] = because

    def end_probation(self, slot: SlotId, cause: ProbationCause) -> None:
        """End a slot's probation for one cause."""
        self.edition += 1
        causes = self._probation.get(slot, {})
        causes.pop(cause, None)
        if not causes:
            self._probation.pop(slot, None)

    def forgive(self, slot: SlotId) -> bool:
        """End a slot's probation for every cause, because an operator says that it works. Return whether it was on
        probation."""
        self.edition += 1
        self._unrepeated.pop(slot, None)
        return self._probation.pop(slot, None) is not None

    def did_not_repeat(self, slot: SlotId, because: str) -> bool:
        """Record a result that did not repeat on this slot; return whether it was not the first.

        A single one may be a particle hit. The second puts the slot on probation.
        """
        again = slot in self._unrepeated
        self._unrepeated[slot] = None
        if again:
            self.put_on_probation(slot, ProbationCause.WRONG, because)
        return again

    def on_probation(self, slot: SlotId, cause: ProbationCause | None = None) -> bool:
        """Return whether a slot is on probation for ``cause``; None: for any."""
        return slot in self._probation if cause is None else cause in self._probation.get(slot, ())

    def probation(self, slot: SlotId) -> str:
        """Return why a slot is on probation; "": it is not."""
        return "; ".join(self._probation.get(slot, {}).values())

    def forget(self, tray: TrayId) -> None:
        """Forget everything about a lost tray. Its agent reads the hardware again when it comes back."""
        self.edition += 1
        self._on_tray.pop(tray, None)
        for known in (self._verdicts, self._unfit, self._refused, self._probation, self._unrepeated):
            for slot in [slot for slot in known if tray_of(slot) == tray]:
                del known[slot]

    # -- what follows ----------------------------------------------------------------------------------------------
    @property
    def all_takeable(self) -> bool:
        """Whether `may_be_taken` holds for every slot."""
        return not (self._unfit or self._refused or self._verdicts)

    @property
    def all_usable(self) -> bool:
        """Whether every slot has the best `fitness`."""
        return not (self._verdicts or self._probation)

    def doubted(self) -> dict[TrayId, None]:
        """Return the trays with a slot that may not be taken, according to this object."""
        return dict.fromkeys(tray_of(slot) for known in (self._verdicts, self._unfit, self._refused) for slot in known)

    def verdict(self, slot: SlotId) -> GpuVerdict | None:
        """Return the worst verdict on a slot's GPU or on its whole tray; None: there is none."""
        there = self._on_tray.get(tray_of(slot)) if self._verdicts else None
        if not there:
            return None
        found = [verdict for judged, verdict in there.items() if judged == slot or verdict.scope == "tray"]
        fences = [verdict for verdict in found if verdict.response is Response.FENCE]
        return next(iter(fences or found), None)

    def fitness(self, slot: SlotId) -> Fitness:
        """Return how fit a slot is for a worker that is already in it."""
        verdict = self.verdict(slot)
        if verdict is None:
            return Fitness.AVOID if slot in self._probation else Fitness.USABLE
        return Fitness.BAD if verdict.response is Response.FENCE else Fitness.AVOID

    def may_be_taken(self, slot: SlotId) -> bool:
        """Return whether a new worker may use the slot. A failing GPU may be used as the last choice."""
        if self.all_takeable:
            return True
        return not self.unfit(slot) and self.fitness(slot) is not Fitness.BAD

    def may_come(self, slot: SlotId) -> bool:
        """Return whether the slot cannot be taken now for a reason that may pass by itself."""
        return slot in self._unfit and slot not in self._refused and self.fitness(slot) is not Fitness.BAD

    def unfit(self, slot: SlotId) -> tuple[str, ...]:
        """Return why the slot must not be taken into use now; (): it may be."""
        return (self._refused[slot],) if slot in self._refused else self._unfit.get(slot, ())

    def because(self, slot: SlotId) -> str:
        """Return why the worker in the slot should leave it; "": no reason is known."""
        verdict = self.verdict(slot)
        if verdict is None:
            return self.probation(slot)
        return f"GPU {verdict.index} is {verdict.health.value}: {verdict.reasons}"

    def against(self) -> Mapping[SlotId, str]:
        """Return all known problems, by slot."""
        unfit = {slot: "; ".join(self.unfit(slot)) for slot in (*self._refused, *self._unfit)}
        probation = {slot: self.probation(slot) for slot in self._probation}
        return {**probation, **unfit, **{slot: str(verdict) for slot, verdict in self._verdicts.items()}}
