"""What everything takes in the model, in seconds. The defaults are of a small job; a report of a real run gives others."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["SimCosts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCosts:
    step_s: float = 1.0
    """Computing of a unit on one rank, without waiting."""
    gate_s: float = 0.001
    start_s: float = 8.0
    """From a worker's fork to its first step, or to where a spare waits."""
    park_s: float = 0.006
    """From the order to the report."""
    regroup_s: float = 0.05
    """Once all members have come to the exchange."""
    handshake_s: float = 20.0
    """Members that have not come together by then say so."""
    takeover_s: float = 0.4
    """State from a peer or a snapshot."""
    reenter_s: float = 3.0
    """``main`` is entered again, with all that it builds."""
    seal_s: float = 0.3
    copy_s: float = 0.4
    """A sealed snapshot to other trays."""
    write_s: float = 1.5
    """A rank's part of a checkpoint, to disk."""
    read_s: float = 1.0
    """One from disk, by a world that begins."""
    see_exit_s: float = 0.005
    """From a process's end to its agent's knowing."""
    latency_s: float = 0.0005
    """Of one message between an agent and the coordinator."""
    stall_s: float = 6.0
    """Without progress: the watch's deadline."""
    unsure_s: float = 20.0
    """The same in the first two units of a generation."""
    connect_s: float = 60.0
    """Ranks that do not come together at their start give up, with an exception."""
    silence_s: float = 2.0
    """Of a process that does not even tick."""
    sever_s: float = 2.0
    """A collective has failed, and nobody has said why."""
    lease_s: float = 15.0
    orphan_s: float = 120.0
    """An agent without a coordinator ends itself after this long."""
    spread: float = 0.3
    """Everything takes so much more at times, uniformly."""

    def of(self, seconds: float, draw: random.Random) -> float:
        return seconds * (1 + self.spread * draw.random())
