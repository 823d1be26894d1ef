"""Ends the process of a rank whose state is of no use after an attempt, and says what its script did to it.

Each function names the paths that have changed, where they are known, and what to do about it. The world then goes on
from another copy of the state.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rackrun.protocol.ids import Position
from rackrun.worker.device.rank_exit import leave

__all__ = ["judge_post_gate_failures", "leave_changed_between", "leave_torn", "leave_unrestorable"]


def leave_torn(rank: int, at: Position, changed: Sequence[str]) -> None:
    """End this process: what it has ``changed`` in the unit at ``at``, which does not count, has no copy to put back."""
    unit = f"step {at.step}" if not at.phase else f"a phase after step {at.step}"
    leave(
        rank,
        f"changed {_listed(changed)} in {unit}, which does not count, and has no copy to put back. "
        "Remedy: change it in every step from the first, or after optimizer.step(), and by operations that torch counts "
        "(not through .data).",
    )


def leave_unrestorable(rank: int, at: Position, mine: Sequence[str]) -> None:
    """End this process: some rank has changed state that it cannot put back (see `UnitUndo.not_put_back`), and ranks
    that joined since have copied it. ``mine``: what this rank has changed so."""
    what = f"changed {_listed(mine)}" if mine else "has a peer that changed its state"
    leave(
        rank,
        f"{what} before the first optimizer.step() of step {at.step}, which was not seen before, and had begun that "
        "step before a failure: nobody can tell what it was then. Remedy: change what an optimizer trains after "
        "optimizer.step(), or before it in every step.",
    )


def leave_changed_between(rank: int, at: Position, path: str) -> None:
    """End this process: what is at ``path`` changed between two units on this rank alone."""
    leave(
        rank,
        f"had another {path} when step {at.step} began than at the end of the unit before, alone among the ranks: its "
        "memory, or a script that changes tracked state between two steps on one rank.",
    )


def judge_post_gate_failures(rank: int, at: Position, *, corrupted_state: bool) -> None:
    """Decide what a collective that broke after the gate means: print that it was harmless, or end this process, whose
    state is torn (``corrupted_state``)."""
    if not corrupted_state:
        print(
            f"rackrun: rank {rank} used a collective after optimizer.step() in step {at.step}, and it broke. "
            "No tracked state came of it; but what the step returns or shows here may be this rank's value alone.",
            file=sys.stderr,
            flush=True,
        )
        return
    leave(
        rank,
        f"used a collective after optimizer.step() in step {at.step}, and it broke: its state is torn. "
        "Remedy: keep collectives before optimizer.step(), or in phases.",
    )


def _listed(paths: Sequence[str]) -> str:
    return paths[0] + (f" (and {len(paths) - 1} others)" if len(paths) > 1 else "")
