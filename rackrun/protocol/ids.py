"""Identifiers of ranks, steps, generations, slots, trays and snapshots: plain values, compared and stored everywhere.

The core's value types are ``gc=False``. They are frozen and made of values, so they cannot be part of a reference
cycle. A large world has very many of them, and the garbage collector would visit all of them again and again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NewType

import msgspec

__all__ = [
    "BEGIN",
    "EVERY",
    "NEXT_TURN",
    "Generation",
    "Incarnation",
    "Position",
    "Rank",
    "SlotId",
    "Step",
    "TrayId",
    "after_step",
    "at_step",
    "slot_id",
    "snapshot_id",
    "step_of",
    "step_in",
    "steps_in",
    "tray_of",
    "unit_text",
]

Rank = NewType("Rank", int)
Step = NewType("Step", int)
Generation = NewType("Generation", int)
"""One membership of the world: the fencing token. It only grows, and is on disk before it is announced."""
Incarnation = NewType("Incarnation", int)
"""One start of one worker process. It only grows over the whole job, so a late message identifies its sender."""
TrayId = NewType("TrayId", str)
SlotId = NewType("SlotId", str)
"""A place for one worker, ``tray/index``, such as ``tray-03/1``. The index is the worker's LOCAL_RANK and never
changes."""


class Position(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A unit of work that a gate closes: the step itself (``phase`` 0), or a phase that runs after it.

    Positions are ordered as they run. Phases that the loop's body calls after the step are 1, 2, ...; those of
    ``run.every`` follow (`EVERY` + 1, ...), and then those that the body calls before the next step (`NEXT_TURN` + 1,
    ...). ``run.at_end`` phases stand after the last step, at ``step == total steps``.
    """

    step: int
    phase: int = 0


EVERY = 1000
"""The number that those of ``run.every`` phases begin after (`Position.phase`)."""
NEXT_TURN = 2000
"""The number that those of phases begin after which the loop's body calls before its step (`Position.phase`)."""


def unit_text(at: Position) -> str:
    """Return the unit's name for people: "step 4", "step 4 phase 1", "step 4 every 1" (a phase of ``run.every``), or
    "before step 5 phase 1"."""
    if at.phase > NEXT_TURN:
        return f"before step {at.step + 1} phase {at.phase - NEXT_TURN}"
    if at.phase > EVERY:
        return f"step {at.step} every {at.phase - EVERY}"
    return f"step {at.step} phase {at.phase}" if at.phase else f"step {at.step}"


BEGIN = Position(-1, 0)
"""The position before the first step: nothing is committed."""


def at_step(step: int) -> str:
    """Return where a job was, for people: "at step 3", or "before the first step"."""
    return f"at step {step}" if step >= 0 else _UNBEGUN


def after_step(step: int) -> str:
    """Return what a job had done, for people: "after step 3", or "before the first step"."""
    return f"after step {step}" if step >= 0 else _UNBEGUN


_UNBEGUN = "before the first step"


def slot_id(tray: TrayId, index: int) -> SlotId:
    """Return the id of the slot with this index in a tray."""
    return SlotId(f"{tray}/{index}")


_STEP_BITS = 40


def snapshot_id(layout: Generation, step: Step) -> Step:
    """Return the id that a snapshot has everywhere except in plans.

    ``layout`` is the generation in which the ranks received the shards that they hold; 0 until the state is sharded
    anew. Snapshots of one step in two layouts have different ids.
    """
    return Step((layout << _STEP_BITS) + step)


def step_in(layout: Generation, snapshot: Step) -> Step | None:
    """Return the step of a snapshot id if it belongs to ``layout``, else None."""
    return Step(snapshot - (layout << _STEP_BITS)) if snapshot >> _STEP_BITS == layout else None


def step_of(snapshot: Step) -> Step:
    """Return the step that a snapshot id contains, and ignore its layout. Only for messages to people: snapshots of one
    step in two layouts differ."""
    return Step(snapshot & ((1 << _STEP_BITS) - 1))


def steps_in(layout: Generation, snapshots: Iterable[Step]) -> tuple[Step, ...]:
    """Return the steps of those snapshot ids that belong to ``layout``, in the given order."""
    before = layout << _STEP_BITS
    return tuple([Step(snapshot - before) for snapshot in snapshots if snapshot >> _STEP_BITS == layout])


def tray_of(slot: SlotId) -> TrayId:
    """Return the tray that a slot belongs to."""
    return TrayId(slot.rpartition("/")[0])
