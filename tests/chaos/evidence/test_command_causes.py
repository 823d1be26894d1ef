"""Every command of the core has a cause: the rule that sent it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rackrun.chaos.simulator.fuzzing.fuzz import play
from rackrun.core.machine.apply import APPLY, APPLY_OF_WORKER
from rackrun.core.machine.control_plane import ControlPlane
from rackrun.core.machine.rules import REACTIONS, RULES
from rackrun.core.machine.timers import TIMERS
from rackrun.protocol.commands import Command
from rackrun.protocol.events import Event, TimerFired

SEEDS = 20_000 if os.environ.get("RACKRUN_HYPOTHESIS") == "large" else 60
FACTS = {kind.__name__ for kind in REACTIONS}
EVENTS = {kind.__name__ for kind in (*APPLY, *APPLY_OF_WORKER)}
TIMERS_BY_NAME = {kind.__name__ for kind in TIMERS}
CONDITIONS = {name for name, _, _ in RULES}


class Recorder(ControlPlane):
    """A core whose causes are checked after every event, and counted."""

    causes: ClassVar = Counter[str]()

    def handle(self, event: Event) -> Sequence[Command]:
        commands = super().handle(event)
        if commands:
            assert len(self.sent_by) == len(commands)
            timer = {type(event.timer).__name__} if isinstance(event, TimerFired) else set()
            own = {type(event).__name__, "JobBegins", *timer}
            for rule in self.sent_by:
                assert rule in FACTS | CONDITIONS | own, f"{rule} does not act on {event}"
            self.causes.update(self.sent_by)
        return commands


def test_every_command_of_many_seeds_is_sent_by_a_registered_rule() -> None:
    Recorder.causes.clear()
    for seed in range(SEEDS):
        assert not play(seed, Recorder).violation, seed
    causes = Recorder.causes.keys()
    assert causes <= FACTS | EVENTS | TIMERS_BY_NAME | CONDITIONS
    assert all(causes & table for table in (FACTS, EVENTS, TIMERS_BY_NAME, CONDITIONS)), "rules of every table send"
    assert "" not in causes


def test_a_violation_is_shown_with_the_rule_of_every_command() -> None:
    class Wrong(ControlPlane):
        def handle(self, event: Event) -> Sequence[Command]:
            commands = super().handle(event)
            assert self.view().phase != "training", "not this far"
            return commands

    last = next(outcome.last for seed in range(50) if (outcome := play(seed, Wrong)).violation)
    assert any(" -> JobBegins: SetTimer(" in line for line in last) or any(": StartWorker(" in line for line in last)


def test_every_fact_and_condition_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operate.md").read_text()
    assert not [name for name in FACTS | CONDITIONS if f"| `{name}` |" not in page]
