"""Profiles: the situations for which generators of random plans draw faults.

A fault's row says which variants of it belong to which profile, so a new fault is drawn without a change of a generator.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["Profile"]


class Profile(StrEnum):
    """A situation for which faults are drawn."""

    # -- families of the simulator's fuzz: a seed switches each of them on or off
    KILLS = "kills"
    ERRORS = "errors"
    CRASHES = "crashes"
    HANGS = "hangs"
    SLOW = "slow"
    TRAYS = "trays"
    NETWORK = "network"
    CONTROL = "control"
    HARDWARE = "hardware"
    ROT = "rot"
    LEAVING = "leaving"
    DISK = "disk"
    """The storage of checkpoints, in jobs that write some."""

    # -- faults of simulated jobs that must survive
    FEW_WORKERS = "few workers"
    FEW_CONNECTIONS = "few connections"
    LONG = "long jobs"
    """Dozens of them, in a job of thousands of units."""
    LONG_HANGS = "hangs of long jobs"

    # -- parts of scenarios in the simulator
    CORRUPT_STATE = "corrupt state"
    CORRUPT_PARAMETERS = "corrupt parameters"
    DAMAGED_CHECKPOINT = "a damaged checkpoint"
    AFTER_GATE = "after a gate"
    """A rank is lost right after a gate that the others do not always see pass."""
    CUT_FROM_PEERS = "cut from its peers"
    """A tray that all ranks wait for when they come together again."""
    TRAY_RETURNS = "a tray returns"

    # -- parts of scenarios in campaigns
    ARMED = "armed for a recovery"
    """Takes effect when a recovery comes to a point."""
    LOST_IN_RECOVERY = "lost in a recovery"
    STOPPED_IN_RECOVERY = "stopped in a recovery"
    COORDINATOR_CRASHES = "the coordinator crashes"
    COORDINATOR_KILLED = "the coordinator is killed"
    SCRIPT_BUG = "an error of the script's"

    # -- at a rank of any script, of whose job only the numbers of steps and spares are known
    ANY_SCRIPT_LOSES = "any script loses a rank"
    ANY_SCRIPT_STOPS = "any script stands still for a moment"
