"""Carry out faults inside the processes of a job, where this module is preloaded.

It is imported by ``rackrun --preload rackrun.chaos.inprocess.inprocess_faults``, and does nothing without
``RACKRUN_CHAOS_INSIDE``, which names a folder:

- ``orders/PID/NUMBER``: an order that an injector has written for one process. At the place in the code that the order
  is for, the process removes it, writes ``done/NUMBER-PID``, and only then carries it out.
- ``points/NAME``: grows by a byte whenever a process reaches that point, for the points in ``RACKRUN_CHAOS_POINTS``.
- ``storage/`` and ``poison/``: orders for every process that comes to the place.
- ``held/RANK``: written at the end, a digest of all tracked state of the rank.
- ``ends/RANK.json``: written at the end, what the rank's script reaches besides
  (`rackrun.chaos.inprocess.state_recorder`).
- ``agents/TRAY``: written by the launcher at its start, how it starts each agent.

With ``RACKRUN_CHAOS_STEP_BY_STEP`` each rank records its state before every step and waits there for the harness
(`rackrun.chaos.inprocess.state_recorder`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rackrun.chaos.faults.crash_points import FUNCTIONS, surround
from rackrun.chaos.faults.fault_row import HookPlace, HookVisit
from rackrun.chaos.faults.table.fault_table import Fault, row_of
from rackrun.chaos.inprocess.restore_times import watch_restores
from rackrun.chaos.inprocess.state_recorder import STEP_BY_STEP, EndRecorder, StateRecorder, comparable_plain

if TYPE_CHECKING:
    import torch

    from rackrun.protocol.agent_config import AgentConfig
    from rackrun.worker.loop.unit_runner import UnitRunner

__all__ = ["FOLDER", "POINTS", "FaultOrder", "FaultReport"]

Poisons = Callable[[random.Random, str, str], str]
"""Poison a drawn sample in hand, given how and what that does; returns what was done."""
FOLDER, POINTS = "RACKRUN_CHAOS_INSIDE", "RACKRUN_CHAOS_POINTS"


class FaultOrder(msgspec.Struct, frozen=True):
    """A fault that one process, or every process that comes to the place, has to carry out."""

    number: int
    """The number of the strike."""
    fault: Fault
    seed: int
    """The seed of what the fault draws at random when it strikes."""


class FaultReport(msgspec.Struct, frozen=True):
    """The report of a process that it carries out an order."""

    detail: str
    at_s: float
    """When it began, on the host's monotonic clock."""


class _Hooks:
    """The places in the code at which orders are carried out, in every process of the job that trains."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._visits: dict[str, int] = {}

    def take(self, visit: HookVisit) -> FaultOrder | None:
        """Take an order for this process that is due at this visit, so that it is carried out once; None if there is
        none."""
        orders = self._folder / "orders" / str(os.getpid())
        if not orders.is_dir():
            return None
        for path in sorted(orders.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):  # withdrawn meanwhile
                order = msgspec.json.decode(path.read_bytes(), type=FaultOrder)
                if is_due(order, visit):
                    path.unlink()
                    return order
        return None

    def tell(self, order: FaultOrder, detail: str) -> None:
        """Report that ``order`` is being carried out. Call it first: some faults end the process."""
        path = self._folder / "done" / f"{order.number}-{os.getpid()}"
        partial = path.with_suffix(".part")
        partial.write_bytes(msgspec.json.encode(FaultReport(detail, time.monotonic())))
        partial.rename(path.with_suffix(".json"))

    def carry_out(self, visit: HookVisit, units: UnitRunner | None = None, poison: Poisons | None = None) -> None:
        """Carry out an order that is due at this visit, if there is one.

        ``units`` has the step in hand, ``poison`` poisons a sample in hand, where the place has these.
        """
        if order := self.take(visit):
            inside = row_of(order.fault).inside
            assert inside is not None, "an order without it is never due"
            inside.run(order.fault, _Process(self, order, visit, units, poison))

    # -- places
    def in_step(self, units: UnitRunner) -> None:
        """Carry out an order at the beginning of an attempt of a step."""
        self.carry_out(HookVisit(HookPlace.STEP), units)

    def before_update(self, units: UnitRunner) -> None:
        """Carry out an order before the first optimizer step of a step, when the gradients are complete."""
        if units.step_in_hand is not None:
            self.carry_out(HookVisit(HookPlace.UPDATE), units)

    def in_collective(self) -> None:
        """Carry out an order before a collective."""
        self.carry_out(HookVisit(HookPlace.COLLECTIVE))

    def at_point(self, point: str) -> None:
        """Count a visit of ``point``, and carry out an order there."""
        with (self._folder / "points" / point).open("ab") as file:
            file.write(b".")
        self._visits[point] = nth = self._visits.get(point, 0) + 1
        self.carry_out(HookVisit(HookPlace.POINT, point, nth))

    def at_end(self, units: UnitRunner) -> None:
        """Write a digest of the rank's tracked state, once it has finished."""
        state, rank = units._state, units._world.rank
        digest = hashlib.sha256(msgspec.msgpack.encode(comparable_plain(state)))
        for name, tensor in sorted(state.tensors().items()):
            digest.update(name.encode() + _bytes(tensor))
        partial = self._folder / "held" / f"{rank}.part"
        partial.write_text(digest.hexdigest())
        partial.rename(partial.with_suffix(""))


class _Process:
    """This process, as `rackrun.chaos.faults.fault_row.InProcess`, while it carries out an order."""

    def __init__(
        self,
        hooks: _Hooks,
        order: FaultOrder,
        visit: HookVisit,
        units: UnitRunner | None,
        poison: Poisons | None,
    ) -> None:
        self.visit, self._hooks, self._order, self._units, self._poison = visit, hooks, order, units, poison

    def tell(self, detail: str) -> None:
        self._hooks.tell(self._order, detail)

    def step(self) -> int:
        return self._runner.step_in_hand._at.step if self._runner.step_in_hand is not None else -1

    @property
    def _runner(self) -> UnitRunner:
        assert self._units is not None, "a fault that is due in a step"
        return self._units

    def flip_parameters(self) -> None:
        modules = self._runner._state.modules.values()
        self._flip([p for module in modules for p in module.parameters()], "parameters")

    def flip_gradients(self) -> None:
        optimizers = self._runner._state.optimizers.values()
        held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._flip([p.grad for p in held if p.grad is not None], "gradients")

    def _flip(self, tensors: Sequence[torch.Tensor], of: str) -> None:
        """Flip one random bit in one of ``tensors``, in place, and report it. Only local, contiguous tensors
        are hit."""
        import torch

        draw = random.Random(self._order.seed)
        local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
        chosen = draw.choice([tensor for tensor in local if tensor.numel() and tensor.is_contiguous()])
        flat = chosen.data.view(-1).view(torch.uint8)  # .data: no version counter sees the write
        byte, bit = draw.randrange(flat.numel()), draw.randrange(8)
        flat[byte] ^= 1 << bit
        self.tell(f"bit {bit} of byte {byte} of the {of} in step {self.step()}")

    def poison(self, how: str, does: str) -> None:
        assert self._poison is not None, "a fault that is due when samples are in hand"
        self.tell(self._poison(random.Random(self._order.seed), how, does))


def is_due(order: FaultOrder, visit: HookVisit) -> bool:
    """Whether a process that comes to a place carries out the order there."""
    inside = row_of(order.fault).inside
    return inside is not None and inside.due(order.fault, visit)


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(array.tobytes())


def _install(folder: Path, points: list[str]) -> None:
    """Hook the places in the code of this process and of those that it forks."""
    from rackrun.chaos.inprocess.data_faults import install_data
    from rackrun.chaos.inprocess.file_faults import install_files
    from rackrun.worker.loop import unit_runner as units
    from rackrun.worker.membership import elastic_group as group

    for name in ("orders", "done", "points", "held", "agents", "witness", "ends"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    hooks, runner = _Hooks(folder), units.UnitRunner
    install_data(hooks, folder)
    install_files(hooks, folder)
    run, before, finish, collective = runner.run, runner._before_optimizer, runner.finish, group.ElasticGroup._run

    def hooked_run(self: Any, at: Any, body: Callable[[Any], Any], name: str = "", **more: Any) -> Any:
        def struck(step: Any) -> Any:
            if not at.phase:
                hooks.in_step(self)
            return body(step)

        return run(self, at, struck, name, **more)

    def hooked_before(self: Any, optimizer: Any, args: Any, kwargs: Any) -> Any:
        hooks.before_update(self)
        return before(self, optimizer, args, kwargs)

    def hooked_finish(self: Any) -> None:
        finish(self)
        hooks.at_end(self)

    def hooked_collective(self: Any, *args: Any, **more: Any) -> Any:
        hooks.in_collective()
        return collective(self, *args, **more)

    runner.run, runner._before_optimizer, runner.finish = hooked_run, hooked_before, hooked_finish  # type: ignore[method-assign]
    group.ElasticGroup._run = hooked_collective  # type: ignore[method-assign]
    _hook_launcher(folder)
    watch_restores(folder)
    for name in dict.fromkeys(point.partition(".")[0] for point in points):
        surround(
            FUNCTIONS[name],
            functools.partial(hooks.at_point, f"{name}.before"),
            functools.partial(hooks.at_point, f"{name}.after"),
        )
    if os.environ.get(STEP_BY_STEP) == "1":
        _hook_witness(StateRecorder(folder))
    _hook_ends(EndRecorder(folder))  # the outermost hook: it is given the user's function


def _hook_ends(ends: EndRecorder) -> None:
    from rackrun.worker.loop import run
    from rackrun.worker.loop import unit_runner as units

    runner = units.UnitRunner
    do, finish, steps, end = runner.run, runner.finish, run.Run.steps, run.Run._finish

    def hooked_run(self: Any, at: Any, body: Callable[[Any], Any], name: str = "", **more: Any) -> Any:
        if not at.phase:
            ends.began(at.step, body)
        return do(self, at, body, name, **more)

    def looked_at(self: Any, total: int, phases: bool) -> Iterator[int]:
        try:
            yield from steps(self, total, phases=phases)
        finally:  # also when the loop is left early
            if not (self._units.leaving or self._world.broken):
                caller = sys._getframe(1)
                of_steps = caller.f_code is run.Steps.__next__.__code__
                ends.look(self._state, caller.f_back if of_steps and caller.f_back is not None else caller)

    def hooked_steps(self: Any, total: int, *, phases: bool = False) -> run.Steps:
        return run.Steps(looked_at(self, total, phases), total)

    def hooked_end(self: Any) -> None:
        if self._driven is not None and not (self._units.leaving or self._world.broken):
            ends.look(self._state, None)
        end(self)

    def hooked_finish(self: Any) -> None:
        finish(self)
        ends.write(self._world.rank, self._world.size)

    runner.run, runner.finish, run.Run.steps = hooked_run, hooked_finish, hooked_steps  # type: ignore[method-assign]
    run.Run._finish = hooked_end  # type: ignore[method-assign]


def _hook_witness(witness: StateRecorder) -> None:
    from rackrun.worker.loop import unit_runner as units

    runner = units.UnitRunner
    do, finish = runner.run, runner.finish

    def hooked_run(self: Any, at: Any, body: Callable[[Any], Any], name: str = "", **more: Any) -> Any:
        def seen(step: Any) -> Any:
            if not at.phase:
                witness.write(self, at.step, body, step.attempt)
            return body(step)

        if not at.phase:
            witness.wait(at.step)
        return do(self, at, seen, name, **more)

    def hooked_finish(self: Any) -> None:
        finish(self)
        witness.write(self, self._parts.last_step + 1)

    runner.run, runner.finish = hooked_run, hooked_finish  # type: ignore[method-assign]


def _hook_launcher(folder: Path) -> None:
    from rackrun.launch.run.local_agents import LocalAgents

    init = LocalAgents.__init__

    def hooked_init(self: LocalAgents, configs: Sequence[AgentConfig]) -> None:
        init(self, configs)
        for config in configs:
            path = folder / "agents" / config.tray
            path.touch(0o600)  # the file holds the job's token
            path.write_bytes(msgspec.json.encode(config))

    LocalAgents.__init__ = hooked_init  # type: ignore[method-assign]


_folder = os.environ.get(FOLDER, "")
if _folder:
    with contextlib.suppress(FileNotFoundError):  # the run is over, and its folder is gone
        _install(Path(_folder), [point for point in os.environ.get(POINTS, "").split(",") if point])
