"""Model of the file system to which all ranks write checkpoints, and from which a world restores when it begins again.

A checkpoint is complete when every rank of one world has written its part in one life of the job (from one start to the
next); the first that is complete stays. All ranks of a world that begins agree on the newest usable checkpoint. One
that turns out to be damaged is never read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rackrun.chaos.faults.virtual_strike import CallFault
from rackrun.chaos.simulator.base.ground_truth import StateHistory, must
from rackrun.chaos.simulator.cluster.restore_sources import Owner

if TYPE_CHECKING:
    from rackrun.chaos.simulator.cluster.simulation import Simulation
    from rackrun.chaos.simulator.cluster.worker_model import SimulatedWorker

__all__ = ["CheckpointStorage", "Unusable"]


KEPT = 3
_CALLS = ("write", "fsync", "rename")


class Unusable(Exception):
    """There are checkpoints, and none of them can be used."""


@dataclass(slots=True)
class _Files:
    """The parts of one checkpoint, by rank."""

    parts: dict[int, StateHistory] = field(default_factory=dict)
    torn: bool = False
    """Whether one of the parts is not what was written."""


class CheckpointStorage:
    """The storage of one job."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._begun: dict[tuple[int, int, int], _Files] = {}
        """(step, life, world) -> the parts written so far."""
        self._writing: dict[Owner, None] = {}
        """Processes that are still writing their part of a checkpoint."""
        self._whole: dict[int, _Files] = {}
        self._damaged: dict[int, None] = {}
        self._began: dict[int, StateHistory | None] = {}
        """The generation that began a world -> the state it began with; None: no checkpoint could be used."""
        self._faults: dict[int, CallFault] = {}

    # -- faults
    def strike(self, fault: CallFault, number: int) -> Callable[[], object]:
        """Put a fault in force, and return the function that takes it back."""
        self._faults[number] = fault
        return lambda: self._faults.pop(number, None)

    def rot(self) -> bool:
        """Damage the newest complete checkpoint. Returns False if there is none."""
        there = [step for step in self._whole if step not in self._damaged]
        if there:
            self._whole[max(there)].torn = True
        return bool(there)

    def _failing(self, call: str) -> CallFault | None:
        """Return the worst fault in force for ``call``: an error counts more than a slow or torn call."""
        order = ("slow", "torn")
        found = [fault for fault in self._faults.values() if fault.call == call]
        return min(found, key=lambda fault: order.index(fault.error) if fault.error in order else -1, default=None)

    # -- writing
    def save(self, process: SimulatedWorker) -> bool:
        """Begin to write the part of ``process``, which has passed a gate after which all ranks write.

        Returns False if it is still writing an older checkpoint, and therefore skips this one.
        """
        if process.owner in self._writing:
            return False
        self._writing[process.owner] = None
        key = (process.passed, self._sim.life(process.generation), self._sim.eras[process.generation].world)
        what = (key, process.its_rank, process.state_now, _CALLS)
        self._later(process, self._sim.costs.write_s, self._write, process, *what)
        return True

    def _later(self, process: SimulatedWorker, seconds: float, do: Callable[..., None], *args: object) -> None:
        """Call ``do`` later in a thread of its own, which only the end of the process stops."""
        self._sim.engine.after(self._sim.costs.of(seconds, self._sim.draw["disk"]), process.do, do, *args)

    def _write(
        self,
        process: SimulatedWorker,
        key: tuple[int, int, int],
        rank: int,
        history: StateHistory,
        calls: tuple[str, ...],
        torn: bool = False,
    ) -> None:
        for at, call in enumerate(calls, 1):
            match self._failing(call):
                case None:
                    pass
                case CallFault(error="torn"):
                    torn = True
                case CallFault(error="slow", slow_s=slow_s):
                    self._later(process, slow_s, self._write, process, key, rank, history, calls[at:], torn)
                    return
                case _:
                    self._writing.pop(process.owner, None)
                    self._sim.marks.sometimes("a checkpoint was given up")
                    return
        self._writing.pop(process.owner, None)
        files = self._begun.setdefault(key, _Files())
        files.parts[rank], files.torn = history, files.torn or torn
        step, _, world = key
        if len(files.parts) == world and step not in self._whole:
            self._whole[step] = files
            self._remove_old()
            self._sim.coordinator.checkpointed(process.agent, step)

    def _remove_old(self) -> None:
        """Remove all but the newest few checkpoints. Those found damaged or not to be trusted do not count."""
        there = sorted(self._whole.keys() - self._damaged.keys())
        for step in there[:-KEPT]:
            del self._whole[step]
            self._sim.marks.sometimes("an old checkpoint was removed")

    def distrust(self, good: int, newest: int) -> None:
        """Treat checkpoints of steps after ``good`` as damaged: all that exist or are being written, and ``newest``."""
        for step in [step for step, _, _ in self._begun if step > good] + [newest] * (newest > good):
            if step not in self._damaged:
                self._damaged[step] = None
                self._sim.marks.sometimes("a checkpoint was not to be trusted")

    def began_with(self, generation: int) -> StateHistory:
        """Return the state with which the world of ``generation`` began."""
        return self._began.get(generation) or self._sim.truth.began

    # -- reading
    def begins(self, generation: int) -> StateHistory:
        """Return the state with which the world of ``generation`` begins, the same on all its ranks. Raises
        `Unusable`."""
        if generation not in self._began:
            self._began[generation] = self._newest()
        found = self._began[generation]
        if found is None:
            raise Unusable
        return found

    def _newest(self) -> StateHistory | None:
        for step in sorted(self._whole.keys() - self._damaged.keys(), reverse=True):
            if self._failing("read") is not None:
                continue  # it may still be complete
            files = self._whole[step]
            if files.torn:
                self._damaged[step] = None
                self._sim.marks.sometimes("a damaged checkpoint was passed over")
                continue
            self._sim.marks.sometimes("a world began from a checkpoint")
            return self._joined(step, files)
        return None if self._whole else self._sim.truth.began

    def _joined(self, step: int, files: _Files) -> StateHistory:
        """Join the parts of a checkpoint.

        They may be of several generations, where the step was done again, but must be of the same training.
        """
        found = list(files.parts.values())
        must(all(one.unit == step for one in found), f"a checkpoint of step {step} with parts of other steps")
        self._sim.truth.trusts(found[0], f"a world that begins from the checkpoint of step {step}")
        if not self._sim.job.exact:
            must(
                len({tuple(one.worlds()) for one in found}) == 1,
                f"a checkpoint of step {step} in parts of two trainings",
            )
        return found[0]
