"""The names of things: who is who in a job. Plain values, compared and stored everywhere.

Values are ``gc=False`` in the core: frozen, and made of values, they can be in no cycle, and a large world has very many of them. The
collector would go through all of them again and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

import msgspec

__all__ = [
    "BEGIN",
    "Generation",
    "Incarnation",
    "Position",
    "Rank",
    "SlotId",
    "Step",
    "TrayId",
    "slot_id",
    "snapshot_id",
    "step_of",
    "step_in",
    "steps_in",
    "tray_of",
]

Rank = NewType("Rank", int)
Step = NewType("Step", int)
Generation = NewType("Generation", int)
"""One membership of the world. Monotone, persisted before anyone is told: the fencing token."""
Incarnation = NewType("Incarnation", int)
"""One start of one worker process. Monotone over the whole job, so a late message names its sender."""
TrayId = NewType("TrayId", str)
SlotId = NewType("SlotId", str)
"""A place for one worker, ``tray/index``, such as ``tray-03/1``. Its index is LOCAL_RANK for life."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A unit of work that a gate closes: the step itself (``phase`` 0), or a phase that runs after it (1, 2, ...).

    Positions are ordered as they run. ``run.at_end`` phases stand after the last step, at ``step == total steps``.
    """

    step: int
    phase: int = 0


BEGIN = Position(-1, 0)
"""Before the first step: nothing is committed."""


def slot_id(tray: TrayId, index: int) -> SlotId:
    return SlotId(f"{tray}/{index}")


_STEP_BITS = 40


def snapshot_id(layout: Generation, step: Step) -> Step:
    """What a snapshot is called everywhere but in plans. ``layout``: the generation in which the ranks got the shards that they
    have; 0 until they are cut anew. Snapshots of one step in two layouts are two things."""
    return Step((layout << _STEP_BITS) + step)


def step_in(layout: Generation, snapshot: Step) -> Step | None:
    """The step of a snapshot in this layout; None for one in another."""
    return Step(snapshot - (layout << _STEP_BITS)) if snapshot >> _STEP_BITS == layout else None


def step_of(snapshot: Step) -> Step:
    """The step of a snapshot, for people: in whatever layout."""
    return Step(snapshot & ((1 << _STEP_BITS) - 1))


def steps_in(layout: Generation, snapshots: Iterable[Step]) -> tuple[Step, ...]:
    """The steps of those in this layout."""
    before = layout << _STEP_BITS
    return tuple([Step(snapshot - before) for snapshot in snapshots if snapshot >> _STEP_BITS == layout])


def tray_of(slot: SlotId) -> TrayId:
    return TrayId(slot.rpartition("/")[0])
