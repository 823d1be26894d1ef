"""What is said against the GPUs of living trays: verdicts on their health, and why one must not be taken into use now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rackrun.protocol.gpu_health import Health, Response, Verdict
from rackrun.protocol.ids import SlotId, TrayId, slot_id, tray_of
from rackrun.topology.placement.objective import Fitness

__all__ = ["Devices"]


@dataclass(slots=True)
class Devices:
    edition: int = 0
    """Changes with whatever is said."""
    _verdicts: dict[SlotId, Verdict] = field(default_factory=dict)
    """Of GPUs that are to be left, until a better verdict comes."""
    _on_tray: dict[TrayId, dict[SlotId, Verdict]] = field(default_factory=dict)
    """The same, tray by tray."""
    _unfit: dict[SlotId, tuple[str, ...]] = field(default_factory=dict)
    _refused: dict[SlotId, str] = field(default_factory=dict)
    """Slots of trays whose story cannot be: how their GPUs are does not matter."""
    _probation: dict[SlotId, str] = field(default_factory=dict)
    """Slots whose ranks were slow there, or wrong, and how."""
    _unrepeated: dict[SlotId, None] = field(default_factory=dict)
    """Slots on which something was computed once that did not come again."""

    def judged(self, tray: TrayId, verdict: Verdict) -> None:
        self.edition += 1
        slot = slot_id(tray, verdict.index)
        if verdict.response in (Response.SWAP, Response.FENCE):
            self._verdicts[slot] = verdict
            self._on_tray.setdefault(tray, {})[slot] = verdict
        elif verdict.health is Health.OK:
            self._verdicts.pop(slot, None)
            self._on_tray.get(tray, {}).pop(slot, None)

    def checked(self, slot: SlotId, unfit: tuple[str, ...]) -> None:
        self.edition += 1
        if unfit:
            self._unfit[slot] = unfit
        else:
            self._unfit.pop(slot, None)

    def refuse(self, tray: TrayId, slots: int, why: str) -> None:
        """What the tray tells of itself cannot be: none of its slots is used until it joins anew."""
        self.edition += 1
        self._refused |= {slot_id(tray, index): why for index in range(slots)}

    def put_on_probation(self, slot: SlotId, because: str) -> None:
        self.edition += 1
        self._probation[slot] = because

    def end_probation(self, slot: SlotId) -> None:
        self.edition += 1
        self._probation.pop(slot, None)
        self._unrepeated.pop(slot, None)

    def did_not_repeat(self, slot: SlotId, because: str) -> bool:
        """Once may be a particle. Whether it was not the first time: then the slot is on probation."""
        again = slot in self._unrepeated
        self._unrepeated[slot] = None
        if again:
            self.put_on_probation(slot, because)
        return again

    def on_probation(self, slot: SlotId) -> bool:
        return slot in self._probation

    def forget(self, tray: TrayId) -> None:
        """The tray is lost. The agent that comes back asks the hardware anew."""
        self.edition += 1
        self._on_tray.pop(tray, None)
        for known in (self._verdicts, self._unfit, self._refused, self._probation, self._unrepeated):
            for slot in [slot for slot in known if tray_of(slot) == tray]:
                del known[slot]

    # -- what follows ----------------------------------------------------------------------------------------------
    @property
    def all_takeable(self) -> bool:
        """`may_be_taken` holds for every slot."""
        return not (self._unfit or self._refused or self._verdicts)

    @property
    def all_usable(self) -> bool:
        """`fitness` is the best of every slot."""
        return not (self._verdicts or self._probation)

    def doubted(self) -> dict[TrayId, None]:
        """Trays with a slot that may not be taken, as far as these know."""
        return dict.fromkeys(tray_of(slot) for known in (self._verdicts, self._unfit, self._refused) for slot in known)

    def verdict(self, slot: SlotId) -> Verdict | None:
        """The worst on its GPU, or on its whole tray."""
        there = self._on_tray.get(tray_of(slot)) if self._verdicts else None
        if not there:
            return None
        found = [verdict for judged, verdict in there.items() if judged == slot or verdict.scope == "tray"]
        fences = [verdict for verdict in found if verdict.response is Response.FENCE]
        return next(iter(fences or found), None)

    def fitness(self, slot: SlotId) -> Fitness:
        """For one that sits there already."""
        verdict = self.verdict(slot)
        if verdict is None:
            return Fitness.AVOID if slot in self._probation else Fitness.USABLE
        return Fitness.BAD if verdict.response is Response.FENCE else Fitness.AVOID

    def may_be_taken(self, slot: SlotId) -> bool:
        """By one that does not sit there yet. A GPU on its way out may, as the last choice."""
        if self.all_takeable:
            return True
        return not self.unfit(slot) and self.fitness(slot) is not Fitness.BAD

    def may_come(self, slot: SlotId) -> bool:
        """It may not be taken now, but that passes by itself, or may."""
        return slot in self._unfit and slot not in self._refused and self.fitness(slot) is not Fitness.BAD

    def unfit(self, slot: SlotId) -> tuple[str, ...]:
        """Why it may not be taken into use now; empty: it may."""
        return (self._refused[slot],) if slot in self._refused else self._unfit.get(slot, ())

    def because(self, slot: SlotId) -> str:
        """Why whoever sits there is to leave; "" when nothing speaks against it."""
        verdict = self.verdict(slot)
        if verdict is None:
            return self._probation.get(slot, "")
        return f"GPU {verdict.index} is {verdict.health.value}: {verdict.reasons}"

    def against(self) -> Mapping[SlotId, str]:
        """What is known to be wrong, slot by slot."""
        unfit = {slot: "; ".join(self.unfit(slot)) for slot in (*self._refused, *self._unfit)}
        return {**self._probation, **unfit, **{slot: str(verdict) for slot, verdict in self._verdicts.items()}}
