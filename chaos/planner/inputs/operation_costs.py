"""What every operation costs, in seconds, with the origin of each figure.

`rackrun.chaos.planner.inputs.calibrate` writes such a file from a real run.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import PlannerError

__all__ = ["PlanCosts", "read_costs", "write_costs"]


class PlanCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a whole job, as all its ranks see them. The defaults are guesses for a large job, and are named
    as such."""

    step_s: float = 10.0
    """An undisturbed step, with all ranks."""
    between_steps_s: float = 0.0
    """The script's own code between two steps."""
    detect_s: float = 15.0
    """From a fault until the coordinator knows: the lease of a tray. The death of a process is seen within
    milliseconds."""
    regroup_s: float = 5.0
    """Until all ranks compute again, when nothing is restored."""
    takeover_s: float = 20.0
    """Until all ranks compute again, when spares get state and take over."""
    reenter_s: float = 30.0
    """Entering ``main`` again when a sharded world changes its size; 0 for DDP."""
    first_step_s: float = 0.0
    """How much longer the first step after a recovery takes."""
    start_s: float = 120.0
    """A worker's start until its first step, or a returned tray's until its workers are ready."""
    load_s: float = 120.0
    """Loading a checkpoint from disk, on all ranks."""
    relaunch_s: float = 3600.0
    """Until a stopped job is started again by hand."""
    snapshot_s: float = 0.2
    """How long all ranks wait for a snapshot in memory."""
    copy_s: float = 5.0
    """From there until its copies are on other trays."""
    checkpoint_s: float = 2.0
    """How long all ranks wait for a checkpoint on disk."""
    write_s: float = 60.0
    """From there until it is complete on disk."""
    state_bytes: float = 5e9
    """Bytes of state of one rank, with which only the policy prices a load."""
    origin: dict[str, str] = {}
    """Field -> where its figure is from. A field that is missing here is a guess."""

    def __post_init__(self) -> None:
        fields = [name for name in self.__struct_fields__ if name != "origin"]
        wrong = [name for name in fields if not 0 <= getattr(self, name) < math.inf]
        if not wrong and self.step_s == 0:
            wrong = ["step_s"]
        if wrong:
            raise PlannerError(
                f"costs cannot be {', '.join(f'{name} {getattr(self, name)}' for name in wrong)}.",
                remedy="give seconds from 0, and a step above 0.",
            )
        if strange := [name for name in self.origin if name not in fields]:
            raise PlannerError(
                f"rackrun knows no cost that is called {', '.join(strange)}.", remedy=f"costs are {', '.join(fields)}."
            )

    def guessed(self) -> list[str]:
        """Return the names of the costs that are guesses."""
        return [name for name in self.__struct_fields__ if name not in {"origin", *self.origin}]


def read_costs(path: Path) -> PlanCosts:
    """Read a file of costs. Raises PlannerError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlanCosts)
    except OSError as error:
        raise PlannerError(
            f"{path} cannot be read: {error.strerror}.", remedy="write it with rackctl plan calibrate."
        ) from error
    except msgspec.DecodeError as error:
        raise PlannerError(
            f"{path} is no file of costs: {error}.", remedy="write it with rackctl plan calibrate."
        ) from error


def write_costs(costs: PlanCosts) -> str:
    """Return the costs as JSON."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=1).decode() + "\n"
