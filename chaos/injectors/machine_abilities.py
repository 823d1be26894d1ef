"""What this machine can do, on which it depends whether a fault can be injected here."""

from __future__ import annotations

import os

from rackrun.chaos.faults.fault_types import Complaint
from rackrun.chaos.injectors.processes.cpu_slowdown import quota_here
from rackrun.chaos.injectors.resources.gpu_errors import driver_refusal
from rackrun.chaos.injectors.resources.memory_exhaustion import memory_here
from rackrun.chaos.testbed.machine.fake_clock import can_move
from rackrun.chaos.testbed.machine.leaked_resources import can_be_private
from rackrun.chaos.testbed.network.hosts import hosts_here

__all__ = ["ThisMachine"]


class ThisMachine:
    """The machine of this process, as `rackrun.chaos.faults.strike_tools.Machine`."""

    def without_driver(self) -> Complaint | None:
        return driver_refusal()

    def without_hosts(self) -> Complaint | None:
        return hosts_here()

    def has_private_files(self) -> bool:
        return can_be_private()

    def can_limit_memory(self) -> bool:
        return memory_here(os.getpid()) is not None

    def clock_problem(self) -> str:
        return can_move()

    def how_slowed(self) -> str:
        above = quota_here(os.getpid())
        if above is None:
            return "stopped and woken in short turns: as root, in a control group with a quota, it would be finer"
        return f"quota of a control group under {above}"
