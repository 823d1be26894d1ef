"""Verdicts about a tray's slots, derived from the driver's readings of its GPUs. Pure: times come with the readings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from rackrun.protocol.events import DeviceChecked, DeviceJudged, TrayDescribed
from rackrun.protocol.ids import TrayId
from rackrun.topology.gpu_driver.readings import FabricState, NvlinkState, NvmlUnavailable, TrayReading
from rackrun.topology.health.findings import preflight
from rackrun.topology.health.ignored_checks import HEALTH_VARIABLE, Part, is_lone, without
from rackrun.topology.health.tray_health import Said, TrayHealth
from rackrun.topology.model.racks import CliqueId

__all__ = ["DeviceEvent", "GpuVerdicts", "cliques_of"]

DeviceEvent = DeviceJudged | DeviceChecked | TrayDescribed
_UP = (NvlinkState.ACTIVE, NvlinkState.SLEEP)


class GpuVerdicts:
    """``handle(at_ms, said) -> events``. Before `begin`, it is unknown which GPU belongs to which slot.

    ``cliques``: the clique that each slot should join, from the rack file; if it names none, the one of the first
    registration. ``ignored`` parts are not judged, nor are the links and the fabric of a GPU without a peer to use them
    with (`rackrun.topology.health.ignored_checks`).
    """

    def __init__(
        self,
        tray: TrayId,
        slots: int,
        cliques: Mapping[int, CliqueId] | None = None,
        ignored: Collection[Part] = (),
    ) -> None:
        self._tray = tray
        self._gpus: tuple[int, ...] | None = None
        self._slot_of: dict[int, int] = {}
        self._health = TrayHealth()
        self._cliques = dict(cliques or {})
        self._named = bool(cliques)
        self._ignored = tuple(ignored)
        self._lone = False
        self._alone = False
        self._links: dict[int, int] = {}
        """The largest number of links that were up, by slot."""
        self.unfit: dict[int, tuple[str, ...]] = dict.fromkeys(range(slots), ())
        """Why each slot is unfit; (): it is fit."""

    @property
    def begun(self) -> bool:
        """Whether `begin` was called, so that slots have GPUs."""
        return self._gpus is not None

    def begin(self, gpus: Sequence[int]) -> None:
        """Set the GPUs: ``gpus[i]`` is the GPU of slot i, by NVML's index. Later slots have none, and are fit."""
        self._gpus = tuple(gpus)
        self._slot_of = {gpu: slot for slot, gpu in enumerate(self._gpus)}

    def handle(self, at_ms: int, said: Said) -> list[DeviceEvent]:
        """Return the events for a reading: verdicts first, then which slots may be used."""
        whole = said
        if isinstance(said, TrayReading):
            self._lone = not self._named and is_lone(said, self._gpus or ())
            said = without(said, self._parts)
        events: list[DeviceEvent] = [
            DeviceJudged(tray=self._tray, verdict=msgspec.structs.replace(verdict, index=self._slot_of[verdict.index]))
            for verdict in self._health.handle(at_ms, said)
            if verdict.index in self._slot_of  # GPUs without a slot are not judged
        ]
        if isinstance(whole, TrayReading):
            self._update_cliques(whole)
        if isinstance(said, TrayReading | NvmlUnavailable):
            events += self._changes({slot: self._reasons_against(slot, said) for slot in self.unfit})
        return events

    @property
    def _parts(self) -> tuple[Part, ...]:
        return ("fabric", "links") if self._lone else self._ignored

    @property
    def unjudged(self) -> str:
        """Describe for people which parts are not judged, and why; "": none."""
        why = "its only GPU has no NVLink peer" if self._lone else HEALTH_VARIABLE
        return f"{', '.join(self._parts)} ({why})" if self._parts else ""

    def unwatched(self) -> list[DeviceEvent]:
        """Report every slot as fit, because there will be no readings."""
        return self._changes(dict.fromkeys(self.unfit, ()))

    def _changes(self, unfit: Mapping[int, tuple[str, ...]]) -> list[DeviceEvent]:
        changed = [slot for slot in self.unfit if unfit[slot] != self.unfit[slot]]
        self.unfit.update(unfit)
        return [DeviceChecked(tray=self._tray, index=slot, unfit=unfit[slot]) for slot in changed]

    def _reasons_against(self, slot: int, said: TrayReading | NvmlUnavailable) -> tuple[str, ...]:
        if self._gpus is None:
            return preflight(said, ())
        if slot >= len(self._gpus):
            return ()
        links = None if "links" in self._parts else self._links.get(slot)
        return preflight(said, (self._gpus[slot],), clique=self._clique(slot), links=links)

    def _clique(self, slot: int) -> CliqueId | None:
        if "fabric" in self._parts:
            return None  # not checked whether it has joined
        return self._cliques.get(slot) or (CliqueId(f"host:{self._tray}", 0) if self._alone else None)

    def _update_cliques(self, reading: TrayReading) -> None:
        self._cliques = {**cliques_of(reading, self._gpus or ()), **self._cliques}
        in_rack = any(gpu.platform is not None and gpu.platform.chassis for gpu in reading.gpus)
        # Without a fabric of several hosts GPUs need not register, and on some machines they never do.
        self._alone = not in_rack and not self._cliques
        for gpu in reading.gpus:
            slot = self._slot_of.get(gpu.index)
            if slot is not None and gpu.links is not None:
                up = sum(state in _UP for state in gpu.links)
                self._links[slot] = max(up, self._links.get(slot, 0))


def cliques_of(reading: TrayReading, gpus: Sequence[int]) -> dict[int, CliqueId]:
    """Return the registered clique of each slot. A GPU that is still registering counts as in the clique that all
    others of its tray have joined."""
    by_index = {gpu.index: gpu.fabric for gpu in reading.gpus}
    fabrics = [by_index.get(gpu) for gpu in gpus]
    joined = {slot: fabric.joined for slot, fabric in enumerate(fabrics) if fabric}
    found = {slot: clique for slot, clique in joined.items() if clique is not None}
    others = set(found.values())
    if len(others) == 1:
        waiting = (FabricState.NOT_STARTED, FabricState.IN_PROGRESS)
        late = [slot for slot, fabric in enumerate(fabrics) if fabric and fabric.state in waiting]
        found |= dict.fromkeys(late, others.pop())
    return found
