"""A control plane whose every event and command is told once more, to `StateReplay`, which must know the same."""

from __future__ import annotations

from collections.abc import Sequence

from rackrun.core.machine.control_plane import ControlPlane, View
from rackrun.core.machine.state_replay import COMMANDS, EVENTS, StateReplay
from rackrun.protocol.commands import Command, Notice, ResumeGeneration
from rackrun.protocol.events import Event
from rackrun.protocol.job_config import JobConfig
from tests.core.core_model import Cluster

IN_PLACE = ("training", "parking", "resuming")


class Followed(Cluster):
    def __init__(self, config: JobConfig, slots: int, units: int, shards: str, *, racks: bool = False) -> None:
        super().__init__(config, slots, units, shards, racks=racks)
        self.core = FollowedCore(config)


class FollowedCore(ControlPlane):
    def __init__(self, config: JobConfig) -> None:
        super().__init__(config)
        self.past = StateReplay(config)
        self.notices: list[str] = []
        self.compared = 0

    def handle(self, event: Event) -> Sequence[Command]:
        commands = super().handle(event)
        if isinstance(event, EVENTS):
            self.past.apply_event(event)
        for command in commands:
            if isinstance(command, COMMANDS):
                self.past.apply_command(command, event.at_ms)
        self.notices += [command.text for command in commands if isinstance(command, Notice)]
        if self.view().phase in IN_PLACE:
            self._compare(self.view(), resumed=any(isinstance(one, ResumeGeneration) for one in commands))
        assert (self.past.over is not None) == (self.view().phase == "stopped")
        return commands

    def _compare(self, view: View, *, resumed: bool) -> None:
        past, standings = self.past, self.past.standings()
        self.compared += 1
        assert past.seats == {one.rank: one.slot for one in view.ranks}
        assert not resumed or past.generation == view.generation
        gone = [one.rank for one in view.ranks if one.incarnation is None]
        assert gone == [rank for rank, slot in past.seats.items() if standings[slot].trouble == "lost"]
        spares = {one.slot: "starting" if one.state == "starting" else "ready" for one in view.spares}
        assert spares == {slot: one.spare for slot, one in standings.items() if one.spare}
        for tray in view.trays:
            assert tray.quarantined == tuple(
                slot for slot in past.rack.slots() if slot.startswith(f"{tray.tray}/") and past.rack.quarantined(slot)
            )
        withdrawn = {slot: why for tray in view.trays for slot, why in tray.withdrawn.items()}
        assert withdrawn == {slot: why for slot in past.rack.slots() if (why := past.rack.withdrawn(slot))}
        against = {slot: why for tray in view.trays for slot, why in tray.against.items()}
        assert dict(sorted(past.rack.devices.against().items())) == dict(sorted(against.items()))
