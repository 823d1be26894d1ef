"""How long everything takes in the model, in seconds.

The defaults are those of a small job; a report of a real run gives others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["SimCosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    """Durations in seconds of virtual time."""

    step_s: float = 1.0
    """The computing of a unit on one rank, without waits."""
    gate_s: float = 0.001
    start_s: float = 8.0
    """From a worker's fork to its first step, or to where a spare waits."""
    park_s: float = 0.006
    """From the break command to the worker's report."""
    regroup_s: float = 0.05
    """To build the groups, once all members have come to the exchange."""
    handshake_s: float = 20.0
    """After this long, members that have not all come together report it."""
    takeover_s: float = 0.4
    """To copy state from a peer or a snapshot."""
    reenter_s: float = 3.0
    """To enter ``main`` again, with all that it builds."""
    seal_s: float = 0.3
    copy_s: float = 0.4
    """To copy a sealed snapshot to other trays."""
    write_s: float = 1.5
    """To write a rank's part of a checkpoint to disk."""
    read_s: float = 1.0
    """To read a checkpoint from disk, by a world that begins."""
    see_exit_s: float = 0.005
    """From the end of a process until its agent knows."""
    latency_s: float = 0.0005
    """The latency of one message between an agent and the coordinator."""
    stall_s: float = 6.0
    """Without progress: the watchdog's deadline."""
    unsure_s: float = 20.0
    """The same deadline in the first two units of a generation."""
    connect_s: float = 60.0
    """Ranks that do not come together at their start give up after this long, with an exception."""
    silence_s: float = 2.0
    """Silence of a process that gives no sign of life, after which it counts as stalled."""
    sever_s: float = 2.0
    """After this long, a worker whose collective has failed without a given reason reports it."""
    grace_s: float = 10.0
    """As `rackrun.protocol.agent_config.AgentConfig.grace_s`."""
    lease_s: float = 15.0
    orphan_s: float = 30.0
    """An agent tries for this long to resume a link that broke, as `rackrun.agent.main` says."""
    spread: float = 0.3
    """The largest random addition to each duration, as a share of it."""

    def of(self, seconds: float, draw: random.Random) -> float:
        return seconds * (1 + self.spread * draw.random())
