"""Find out which faults this machine can inject, and why not the others.

A plan with a fault that cannot be injected here refuses to start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import PlanError, Unsupported
from rackrun.chaos.faults.crash_points import POINTS
from rackrun.chaos.faults.fault_types import CrashAt, all_faults, name_of
from rackrun.chaos.injectors import refusal
from rackrun.chaos.injectors.processes.cpu_slowdown import quota_here
from rackrun.chaos.plan.definition import AtPoint, FlipFlop, Inject, Plan, Swizzle, kind_of, parts_of

__all__ = ["Finding", "check_plan", "examine"]

_HOW = {
    "kill": "signal by pidfd; a tray's processes all at once",
    "pause": "SIGSTOP, SIGCONT",
    "preempt": "SIGTERM to the agent, SIGKILL after the notice",
    "raise": "in the step function",
    "hold_gil": "in the step function, for its seconds",
    "delay_collective": "before its next collective",
    "crash_at": f"at one of {len(POINTS)} points of workers, agents and the coordinator",
    "return": "an agent is started for a tray that has none",
    "duplicate": "another agent for a tray; another launcher on the same folder",
    "xid": "a driver of ours, compiled here, for a job with --rack",
    "gpu_fails": "the same",
    "partition": "each tray on a host of its own (network namespaces); frames dropped on the switch between them",
    "link": "the same, with a proxy before the coordinator; lost packets on the switch",
    "flip_bit": "in parameters or gradients; in a snapshot or a checkpoint, from outside",
    "exhaust_memory": "in a memory control group of its own",
    "disk_full": "on a tmpfs that is mounted for the run",
    "disk_fails": "in the file calls of the workers that write and read checkpoints",
    "step_clock": "a library in front of libc's, in agents and the coordinator",
    "poison_batch": "in whichever worker computes the sample",
}
_EXAMPLES: dict[str, dict[str, object]] = {
    "crash_at": {"point": POINTS[0]},
    "xid": {"code": 79},
    "gpu_fails": {"says": "lost"},
    "step_clock": {"by_s": 1.0},
    "link": {"latency_s": 0.1},
}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this machine can inject one kind of fault."""

    fault: str
    family: str
    can: bool
    how: str
    """How the fault is injected or, if it cannot be, why not."""
    remedy: str = ""


def examine() -> list[Finding]:
    """Return one finding for each kind of fault."""
    found = []
    machine = _machine()
    for kind in all_faults():
        name = name_of(kind)
        fault = msgspec.convert({"fault": name, **_EXAMPLES.get(name, {})}, kind)
        if name == "flip_bit":
            fault = msgspec.structs.replace(fault, of="parameters")
        refused = machine or refusal(fault, kind.strikes[0])  # type: ignore[arg-type]
        if refused:
            how, remedy = refused
        else:
            how, remedy = (_slow_here(), "") if name == "slow" else (_HOW[name], "")
        found.append(Finding(fault=name, family=kind.family.value, can=not refused, how=how, remedy=remedy))
    return found


def check_plan(plan: Plan) -> None:
    """Check that a real job on this machine can have every fault of the plan.

    Raises `Unsupported` for a fault that it cannot have, and `PlanError` for a point that does not exist.
    """
    if machine := _machine():
        raise Unsupported(f"{machine[0]}.", remedy=f"{machine[1]}.")
    for point in plan.watch:
        if point not in POINTS:
            raise PlanError(f"there is no point {point!r}.", remedy=f"give one of {', '.join(POINTS)}.")
    for part in parts_of(plan.plan):
        if not isinstance(part, Inject | FlipFlop | Swizzle):
            continue
        refused = refusal(part.fault, kind_of(part.target))
        if refused and isinstance(part.fault, CrashAt):
            raise PlanError(f"{refused[0]}.", remedy=f"{refused[1]}.")
        if refused:
            raise Unsupported(f"{refused[0]}.", remedy=f"{refused[1]}.")
        if isinstance(part, Inject) and isinstance(part.when, AtPoint) and part.when.point not in POINTS:
            raise PlanError(f"there is no point {part.when.point!r}.", remedy=f"give one of {', '.join(POINTS)}.")


def _machine() -> tuple[str, str] | None:
    """Return why no fault at all can be injected here, and what to do about it; None if faults can be injected."""
    if not sys.platform.startswith("linux") or not hasattr(os, "pidfd_open"):
        return "processes cannot be held on to by pidfd here", "use Linux 5.3 or newer"
    if not Path("/proc/self/maps").is_file():
        return "/proc is not there, by which processes are found", "mount it"
    return None


def _slow_here() -> str:
    above = quota_here(os.getpid())
    if above is None:
        return "stopped and woken in short turns: as root, in a control group with a quota, it would be finer"
    return f"quota of a control group under {above}"
