"""Stories of faults: several in one run, one after the other, because most of a run is its start."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tests.faults.scripts.strike import ANYONE, CLOCK, IN_COLLECTIVE, IN_GATE, Fault
from tests.faults.trained import RANKS

__all__ = [
    "AT_THE_END",
    "AT_THE_START",
    "IN_A_RECOVERY",
    "IN_A_UNIT",
    "Chapter",
    "Plot",
    "chapters",
    "lost_when_it_had_finished",
    "random_story",
    "told",
]


@dataclass(frozen=True)
class Chapter:
    """Where a story stands: at ``step``, ``rank`` is lost. Names of faults begin with its number."""

    number: int
    step: int | None
    rank: int

    def fault(self, name: str, place: str, *, other: int = 0, **more: object) -> Fault:
        """A fault of the rank that is lost, or of the ``other``-th after it."""
        rank = (self.rank + other) % RANKS
        fields: dict[str, object] = {"rank": rank, "step": self.step, **more}
        return Fault(name=f"{self.number} {name}", place=place, **fields)  # type: ignore[arg-type]

    def struck(self, name: str) -> str:
        return f"{self.number} {name}"


Plot: TypeAlias = Callable[[Chapter], tuple[Fault, ...]]


def lost(place: str) -> Plot:
    return lambda at: (at.fault("lost", place),)


def lost_waiting(place: str, peer_place: str) -> Plot:
    """It dies in a collective that one peer has not entered yet, so all others wait in it too."""
    return lambda at: (
        at.fault("lost", place),
        at.fault("held back", peer_place, other=1, then="wait", until=at.struck("lost")),
    )


def gate_unseen_by(place: str, others: Sequence[int]) -> Plot:
    """These have the gate's result, but the world breaks before they have noticed."""
    return lambda at: (
        at.fault("lost", place),
        *(at.fault(f"slow {n}", "gate reduced", other=n, then="sleep", delay_ms=300) for n in others),
    )


def late_for_the_gate(at: Chapter) -> tuple[Fault, ...]:
    """Some survivors have entered the gate that the lost rank never enters; one comes only when the world is broken."""
    late = at.fault("late", "before the gate", other=2, then="wait", until=at.struck("lost"))
    return at.fault("lost", "gate entered"), late


def lost_in_a_snapshot(at: Chapter) -> tuple[Fault, ...]:
    """Snapshots are taken after every other step."""
    step = at.step // 2 * 2 if at.step is not None else None
    return (at.fault("lost", "snapshot half written", step=step),)


_IN_ANY_UNIT: dict[str, Plot] = {
    "in forward": lost("forward"),
    "in backward": lost("backward"),
    "waiting in a collective": lost_waiting(IN_COLLECTIVE, "entering a collective"),
    "before the gate": lost("before the gate"),
    "in the gate, before its all-reduce": lost("gate entered"),
    "in the gate's all-reduce": lost_waiting(IN_GATE, "gate entered"),
    "in a gate that one survivor has not seen pass": gate_unseen_by("gate reduced", [1]),
    "in a gate that nobody else has seen pass": gate_unseen_by("before the update", [1, 2, 3]),
    "in a gate that one survivor has not entered": late_for_the_gate,
    "before the update": lost("before the update"),
    "after the update": lost("after the update"),
    "at the end of the step": lost("end of the step"),
    "before it tells of its commit": lost("before report"),
    "after it told of its commit": lost("after commit"),
    "between steps": lost("between steps"),
    "in an evaluation": lost("evaluation"),
    "at the end of an evaluation": lost("evaluation reduced"),
}

IN_A_UNIT: dict[str, dict[str, Plot]] = {
    "ddp": _IN_ANY_UNIT,
    "fsdp": {**_IN_ANY_UNIT, "with a snapshot in the making": lost_in_a_snapshot},
}
"""Places that every step, or every fourth, passes: 3, 7 and 11 have an evaluation."""

_AT_ANY_START: dict[str, Plot] = {
    "in the first forward": lost("forward"),
    "after the first update": lost("after the update"),
    "between the first two steps": lost("between steps"),
}

AT_THE_START = {"ddp": _AT_ANY_START, "fsdp": _AT_ANY_START}

_AT_ANY_END: dict[str, Plot] = {
    "in the last step": lambda at: (at.fault("lost", "backward", step=13),),
    "in the phase at the end": lost("at the end"),
    "after the loop": lost("after the loop"),
    "after the last update": lambda at: (at.fault("lost", "after the update", step=13),),
    "at the end of the phase at the end": lost("exported"),
}

AT_THE_END = {"ddp": _AT_ANY_END, "fsdp": _AT_ANY_END}


def lost_when_it_had_finished(at: Chapter, *, also: bool) -> tuple[Fault, ...]:
    """It has returned from ``main``, and waits for another that has not. ``also``: that one is lost when the first loss is known."""
    until = at.struck("lost")
    there = "after the loop"
    other = at.fault("held back", there, other=1, then="wait", until=until, delay_ms=500)
    lost = at.fault("lost", "before release")
    return (lost, other, at.fault("lost too", there, other=1, after=at.struck("held back"))) if also else (lost, other)


def then(name: str, place: str, *, other: int = 0, **more: object) -> Plot:
    """A rank is lost, and in the recovery from that another one: the newcomer in its place (0), or a survivor."""
    return lambda at: (
        at.fault("lost", "forward"),
        at.fault(name, place, other=other, after=at.struck("lost"), **{"step": None, **more}),
    )


_IN_ANY_RECOVERY: dict[str, Plot] = {
    "a survivor, told that the world breaks": then("survivor", "after break", other=1),
    "a survivor, told of the plan": then("survivor", "before plan", other=2),
    "the newcomer, before it takes its place": then("newcomer", "before place", rank=ANYONE),
    "a survivor, before it builds groups": then("survivor", "before group", other=3),
    "a survivor that has built groups": then("survivor", "after group", other=1),
    "the newcomer, before it builds groups": then("newcomer", "before group"),
    "a survivor that has all it needs": then("survivor", "after restore", other=2),
    "the newcomer, in its first step": then("newcomer", "backward"),
}

IN_A_RECOVERY: dict[str, dict[str, Plot]] = {
    "ddp": {
        **_IN_ANY_RECOVERY,
        "a source, before it sends": then("source", "before send", other=3),
        "a source that has sent": then("source", "after send", other=1),
        "the newcomer, before it receives": then("newcomer", "before receive"),
        "the newcomer that has received": then("newcomer", "after receive"),
    },
    "fsdp": {
        **_IN_ANY_RECOVERY,
        "a survivor, before it goes back": then("survivor", "before load", other=3),
        "a survivor that has gone back": then("survivor", "after load", other=1),
        "the newcomer, before it gets its snapshot": then("newcomer", "before load"),
        "the newcomer that has its snapshot": then("newcomer", "after load"),
    },
}


def chapters(plots: Mapping[str, Plot], steps: Sequence[int | None]) -> dict[str, dict[str, tuple[Fault, ...]]]:
    """Stories with a chapter for each of ``steps``, until every plot has been told once: title -> chapters."""
    names = list(plots)
    found = {}
    for first in range(0, len(names), len(steps)):
        story = {}
        for number, (name, step) in enumerate(zip(names[first:], steps, strict=False), start=1):
            story[name] = plots[name](Chapter(number, step, (first + number) % RANKS))
        found["; ".join(story)] = story
    return found


def random_story(seed: int) -> dict[str, tuple[Fault, ...]]:
    """Three times one rank or two, at any moment of a few steps; two are lost within 60 ms of each other."""
    rng = random.Random(seed)
    story = {}
    for number, step in enumerate((3, 6, 9), start=1):
        at = Chapter(number, step + rng.randrange(3), rng.randrange(RANKS))
        mark = at.fault("now", "between steps", other=rng.randrange(RANKS), then="mark")
        moment_ms = rng.uniform(0, 40)
        victims = {"lost": (0, moment_ms)}
        if rng.random() < 0.6:
            victims["lost too"] = (rng.randrange(1, RANKS), moment_ms + rng.choice([0, rng.uniform(0, 60)]))
        faults = [
            at.fault(name, CLOCK, other=other, step=None, after=mark.name, delay_ms=round(delay_ms, 1))
            for name, (other, delay_ms) in victims.items()
        ]
        ranks = ", ".join(str(fault.rank) for fault in faults)
        delays = ", ".join(str(fault.delay_ms) for fault in faults)
        story[f"after step {at.step}, rank {ranks} after {delays} ms"] = (mark, *faults)
    return story


def told(story: dict[str, tuple[Fault, ...]]) -> list[Fault]:
    return [fault for faults in story.values() for fault in faults]
