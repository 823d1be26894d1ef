"""Named points in the code of workers, agents and the coordinator at which a process can crash or a plan can wait.

Each point is before or after one function: ``gate.before``, ``gate.after``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rackrun.chaos.faults.fault_types import Subjects

__all__ = ["FUNCTIONS", "MODEL_POINTS", "POINTS", "points_of", "surround"]

_WORKER = {
    "gate": "worker.membership.worker_membership:WorkerMembership.pass_gate",
    "commit": "worker.loop.unit_runner:UnitRunner._committed",
    "report": "worker.process.reports:Reports.committed",
    "snapshot": "worker.snapshots.shard_snapshots:Snapshots.take",
    "release": "worker.membership.worker_membership:WorkerMembership.wait_released",
    "compare": "worker.integrity.silent_corruption:CorruptionCheck._compare",
    "judge": "worker.integrity.silent_corruption:CorruptionCheck._judge",
    "differ": "worker.process.reports:Reports.differ",
    "break": "worker.membership.worker_membership:WorkerMembership.on_break",
    "await_plan": "worker.membership.worker_membership:WorkerMembership.wait_plan",
    "plan": "worker.membership.worker_membership:WorkerMembership.on_plan",
    "place": "worker.loop.join_generation:Rejoin._take_place",
    "group": "worker.membership.communicator_builder:build_communicator",
    "join": "worker.membership.worker_membership:WorkerMembership.join",
    "send": "worker.restore.live_restore:_send",
    "receive": "worker.restore.live_restore:_receive",
    "load": "worker.snapshots.shard_snapshots:Snapshots.load",
    "restore": "worker.loop.join_generation:Rejoin._restore",
}
"""Functions of a worker: in a step, after it, in a comparison of replicas, and in a recovery, in that order."""
_AGENT = {
    "agent_start": "agent.tray.tray:TrayAgent._start",
    "agent_fork": "agent.tray.tray:TrayAgent._bring_up",
    "agent_born": "agent.tray.tray:TrayAgent._server_spoke",
    "agent_report": "agent.tray.tray:TrayAgent._report",
    "agent_pass": "agent.tray.tray:TrayAgent._pass_on",
    "agent_tell": "agent.tray.tray:TrayAgent._deliver",
    "agent_copy": "agent.snapshots.mirror:Mirror._copy",
    "agent_keep": "agent.snapshots.mirror:SnapshotCopies.keep",
    "agent_stop": "agent.tray.tray:TrayAgent.stop",
}
"""Functions of an agent: start a worker, report its end, pass a break or a plan on to workers and their answers back,
have a snapshot copied, keep another tray's snapshot, and leave."""
_COORDINATOR = {
    "coordinator_joined": "coordinator.shell.driver:Driver.joined",
    "coordinator_lost": "coordinator.shell.driver:Driver.lost",
    "coordinator_event": "coordinator.shell.driver:Driver._handle",
    "coordinator_persist": "coordinator.shell.driver:Driver._persist",
    "coordinator_send": "coordinator.shell.driver:Driver._send",
    "coordinator_heard": "coordinator.shell.driver:Driver.receive_telemetry",
    "coordinator_close": "coordinator.server.http_server:Server.close",
}
FUNCTIONS = {**_WORKER, **_AGENT, **_COORDINATOR}
"""Name of a function in points -> its module (below ``rackrun``) and its qualified name, as ``module:function``."""


def _both_sides(functions: Mapping[str, str]) -> tuple[str, ...]:
    """Return ``NAME.before`` and ``NAME.after`` for each name."""
    return tuple(f"{name}.{side}" for name in functions for side in ("before", "after"))


POINTS = _both_sides(FUNCTIONS)
MODEL_POINTS = (
    "agent: joining",
    "worker: ready",
    "worker: entering",
    "worker: applied",
    "worker: sealing",
    "worker: parking",
    "worker: planned",
    "worker: restoring",
    "worker: resuming",
    "worker: pausing",
    "worker: finishing",
)
"""The points of the simulator's models."""


def points_of(kind: Subjects) -> tuple[str, ...]:
    """Return the points that a process of this kind can reach."""
    of = {Subjects.RANK: _WORKER, Subjects.SPARE: _WORKER, Subjects.AGENT: _AGENT, Subjects.COORDINATOR: _COORDINATOR}
    return _both_sides(of.get(kind, {}))


def surround(path: str, before: Callable[[], object], after: Callable[[], object]) -> None:
    """Replace the function at ``path`` (a value of `FUNCTIONS`) by one that calls ``before``, the original, then
    ``after``.

    The replacement applies to this process and to those that it forks. ``after`` is not called when the original
    raises.
    """
    name, _, function = path.partition(":")
    *outer, last = function.split(".")
    owner: Any = importlib.import_module(f"rackrun.{name}")
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
