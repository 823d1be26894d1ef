"""An event costs the core as much in a large world as in a small one: what the interpreter does for it is counted, whatever the machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest

from rackrun.chaos.simulator.core_benchmark import STORIES, Scenario, instant_workers_of
from rackrun.chaos.simulator.instant_workers import InstantWorkers
from rackrun.core.generation.world import World
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.protocol.commands import Command
from rackrun.protocol.events import Event
from rackrun.protocol.ids import Rank

SMALL, LARGE = 32, 192
ALMOST_NOTHING = 1.1


class Counted:
    """Instructions of the interpreter in `ControlPlane.handle`, from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.instructions = 0
        handle = ControlPlane.handle

        def counted(core: ControlPlane, event: Event) -> Sequence[Command]:
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                return handle(core, event)
            finally:
                sys.settrace(before)

        monkeypatch.setattr(ControlPlane, "handle", counted)

    def _trace(self, frame: FrameType, kind: str, _argument: object) -> Any:
        if kind == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif kind == "opcode":
            self.instructions += 1
        return self._trace


def of_an_event(ranks: int, story: Scenario, monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patched:
        crowd: InstantWorkers = instant_workers_of(ranks, story)
        story.before(crowd)
        crowd.forget_costs()
        counted = Counted(patched)
        story.tell(crowd)
    assert crowd.core.view().phase == story.ends
    assert crowd.events >= ranks
    return counted.instructions / crowd.events


def of_a_beginning(ranks: int, monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patched:
        counted = Counted(patched)
        crowd = instant_workers_of(ranks)
    return counted.instructions / crowd.events


@pytest.mark.parametrize("name", STORIES)
def test_an_event_costs_no_more_where_there_are_more_ranks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = (of_an_event(ranks, STORIES[name], monkeypatch) for ranks in (SMALL, LARGE))
    assert large <= ALMOST_NOTHING * small


def test_nor_does_one_while_a_world_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_a_beginning(LARGE, monkeypatch) <= ALMOST_NOTHING * of_a_beginning(SMALL, monkeypatch)


def test_the_check_sees_who_looks_at_all_ranks_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    story, answered = STORIES["one is lost and replaced"], World.answered

    def looks_at_all(world: World, rank: Rank) -> bool:
        return answered(world, rank) and all(record.alive for record in world.members.values())

    def looks_at_all_each_time(world: World, rank: Rank) -> bool:
        return all(record.alive for record in world.members.values()) and answered(world, rank)

    grown = []
    for mutant in (looks_at_all, looks_at_all_each_time):
        monkeypatch.setattr(World, "answered", mutant)
        small, large = (of_an_event(ranks, story, monkeypatch) for ranks in (SMALL, LARGE))
        grown.append(large > ALMOST_NOTHING * small)
    assert grown == [False, True]
