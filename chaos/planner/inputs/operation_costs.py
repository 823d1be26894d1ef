"""What everything takes, in seconds, and how each figure came to be known: a file that `rackrun.chaos.planner.inputs.calibrate` writes from a real run."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from rackrun.chaos.base.errors import PlannerError

__all__ = ["PlanCosts", "read_costs", "write_costs"]


class PlanCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times are of the whole job, as all ranks see them. The defaults are guesses for a large job, and said to be so."""

    step_s: float = 10.0
    """Of an undisturbed step, all ranks there."""
    between_steps_s: float = 0.0
    """The script's own code, for each step."""
    detect_s: float = 15.0
    """From a fault until the coordinator knows: the lease of a tray. A process that dies is seen within milliseconds."""
    regroup_s: float = 5.0
    """Nobody is restored: until all compute again."""
    takeover_s: float = 20.0
    """Spares get state and take over: until all compute again."""
    reenter_s: float = 30.0
    """``main`` is entered again, when a sharded world changes its size. 0 for DDP."""
    first_step_s: float = 0.0
    """The first step after a recovery takes so much longer."""
    start_s: float = 120.0
    """Of a worker, until it stands at its first step; and of a tray that has come back, until its workers are ready."""
    load_s: float = 120.0
    """Of a checkpoint on disk, by all ranks."""
    relaunch_s: float = 3600.0
    """Until somebody starts a stopped job again."""
    snapshot_s: float = 0.2
    """What all ranks wait for a snapshot in memory."""
    copy_s: float = 5.0
    """From there until its copies are on other trays."""
    checkpoint_s: float = 2.0
    """What all ranks wait for a checkpoint on disk."""
    write_s: float = 60.0
    """From there until it is whole on disk."""
    state_bytes: float = 5e9
    """Of one rank: only what the policy prices a load with."""
    origin: dict[str, str] = {}
    """Field -> where its figure is from. A field that is not here is a guess."""

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
            raise PlannerError(f"there is no cost {', '.join(strange)}.", remedy=f"costs are {', '.join(fields)}.")

    def guessed(self) -> list[str]:
        return [name for name in self.__struct_fields__ if name not in {"origin", *self.origin}]


def read_costs(path: Path) -> PlanCosts:
    """Raises PlannerError."""
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
    return msgspec.json.format(msgspec.json.encode(costs), indent=1).decode() + "\n"
