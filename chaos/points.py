"""Named points in the code of workers, agents and the coordinator, where they can be made to crash, and that plans can wait for.

Each is before or after a function: ``gate.before``, ``gate.after``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rackrun.chaos.faults import Subjects

__all__ = ["FUNCTIONS", "POINTS", "points_of", "surround"]

_WORKER = {
    "gate": "worker.world.World.pass_gate",
    "commit": "worker.units.UnitRunner._committed",
    "report": "worker.reports.Reports.committed",
    "snapshot": "worker.snapshot.Snapshots.take",
    "release": "worker.world.World.wait_released",
    "compare": "worker.corruption.CorruptionCheck._compare",
    "judge": "worker.corruption.CorruptionCheck._judge",
    "differ": "worker.reports.Reports.differ",
    "break": "worker.world.World.on_break",
    "await_plan": "worker.world.World.wait_plan",
    "plan": "worker.world.World.on_plan",
    "place": "worker.rejoin.Rejoin._take_place",
    "group": "worker.builder.build_communicator",
    "join": "worker.world.World.join",
    "send": "worker.restore._send",
    "receive": "worker.restore._receive",
    "load": "worker.snapshot.Snapshots.load",
    "restore": "worker.rejoin.Rejoin._restore",
}
"""In a step, after it, in a comparison of replicas, and in a recovery, in that order."""
_AGENT = {
    "agent_start": "agent.tray.Tray._start",
    "agent_fork": "agent.tray.Tray._bring_up",
    "agent_born": "agent.tray.Tray._server_spoke",
    "agent_report": "agent.tray.Tray._report",
    "agent_pass": "agent.tray.Tray._pass_on",
    "agent_tell": "agent.tray.Tray._deliver",
    "agent_copy": "agent.mirror.Mirror._copy",
    "agent_keep": "agent.mirror.Copies.keep",
    "agent_stop": "agent.tray.Tray.stop",
}
"""It starts a worker, tells of its end, passes a break or a plan on to workers and their answers back, has a snapshot copied, keeps
another's, and leaves."""
_COORDINATOR = {
    "coordinator_joined": "coordinator.driver.Driver.joined",
    "coordinator_lost": "coordinator.driver.Driver.lost",
    "coordinator_event": "coordinator.driver.Driver._handle",
    "coordinator_persist": "coordinator.driver.Driver._persist",
    "coordinator_send": "coordinator.driver.Driver._send",
    "coordinator_heard": "coordinator.driver.Driver.heard",
    "coordinator_close": "coordinator.server.Server.close",
}
FUNCTIONS = {**_WORKER, **_AGENT, **_COORDINATOR}
"""Below ``rackrun``."""


def _both_sides(functions: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name}.{side}" for name in functions for side in ("before", "after"))


POINTS = _both_sides(FUNCTIONS)


def points_of(kind: Subjects) -> tuple[str, ...]:
    """Those that a process of this kind can come to."""
    of = {Subjects.RANK: _WORKER, Subjects.SPARE: _WORKER, Subjects.AGENT: _AGENT, Subjects.COORDINATOR: _COORDINATOR}
    return _both_sides(of.get(kind, {}))


def surround(path: str, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Have these called whenever the function ``path`` (of `FUNCTIONS`) is, in this process and those that it forks."""
    package, module, *outer, last = path.split(".")
    owner: Any = importlib.import_module(f"rackrun.{package}.{module}")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, last)

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        after()
        return result

    @functools.wraps(original)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        before()
        result = await original(*args, **kwargs)
        after()
        return result

    setattr(owner, last, awaited if inspect.iscoroutinefunction(original) else called)
