"""Named points in the code of a worker, where it can be made to crash, and that plans can wait for.

Each is before or after a function of ``rackrun.worker``: ``gate.before``, ``gate.after``.
"""

from __future__ import annotations

__all__ = ["FUNCTIONS", "POINTS"]

FUNCTIONS = {
    "gate": "world.World.pass_gate",
    "commit": "units.UnitRunner._committed",
    "report": "reports.Reports.committed",
    "snapshot": "snapshot.Snapshots.take",
    "release": "world.World.wait_released",
    "break": "world.World.on_break",
    "plan": "world.World.on_plan",
    "place": "rejoin.Rejoin._take_place",
    "group": "builder.build_communicator",
    "join": "world.World.join",
    "send": "restore._send",
    "receive": "restore._receive",
    "load": "snapshot.Snapshots.load",
    "restore": "rejoin.Rejoin._restore",
}
"""In a step, after it, and in a recovery, in that order."""
POINTS = tuple(f"{name}.{side}" for name in FUNCTIONS for side in ("before", "after"))
