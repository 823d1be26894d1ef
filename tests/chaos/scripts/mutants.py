"""``--preload mutants``, with RACKRUN_TEST_MUTANT=NAME: a rackrun that breaks one promise. The launcher, agents and workers all import it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

__all__ = ["MUTANTS"]

MUTANTS: dict[str, Callable[[], None]] = {}
ONE_STEP = 9
"""Well after the step at which `tiny.py` holds."""


def mutant(install: Callable[[], None]) -> Callable[[], None]:
    MUTANTS[install.__name__.replace("_", " ")] = install
    return install


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """``around(original, *args)`` instead of ``owner.name(*args)``."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        return around(original, *args, **more)

    setattr(owner, name, wrapped)


# -- in workers
@mutant
def a_step_that_is_done_again_draws_other_random_numbers() -> None:
    from rackrun.worker.loop import unit_attempt
    from rackrun.worker.steps import step

    attempt = [0]

    def begun(original: Any, self: Any, at: Any, number: int, world: Any) -> None:
        attempt[0] = number
        original(self, at, number, world)

    wrap(step.Step, "__init__", begun)
    wrap(unit_attempt, "reseed", lambda original, *parts: original(*parts, *attempt[:1] * bool(attempt[0])))


@mutant
def a_sample_is_used_twice() -> None:
    from rackrun.worker.data import loader

    calls = [0]

    def ids(original: Any, *args: Any) -> Any:
        found = original(*args).copy()
        calls[0] += 1
        if calls[0] == 2 * ONE_STEP:
            found[1] = found[0]
        return found

    wrap(loader.BatchPlan, "ids", ids)


@mutant
def a_rank_leaves_an_update_out() -> None:
    from rackrun.worker.loop import unit_runner

    def before(original: Any, self: Any, optimizer: Any, args: Any, kwargs: Any) -> None:
        original(self, optimizer, args, kwargs)
        if self._world.rank == 1 and self.step_in_hand._at.step == ONE_STEP + 2:  # the last one
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    wrap(unit_runner.UnitRunner, "_before_optimizer", before)


@mutant
def a_newcomer_keeps_what_it_began_with() -> None:
    import torch

    from rackrun.worker.loop import join_generation

    def restore(original: Any, self: Any, plan: Any, *, fresh: bool) -> None:
        tensors = self._state.tensors()
        first = next(
            name for name, tensor in sorted(tensors.items()) if tensor.is_floating_point() and tensor.numel() > 1
        )
        held = tensors[first].detach().clone()
        original(self, plan, fresh=fresh)
        if fresh:
            with torch.no_grad():
                self._state.tensors()[first].copy_(held)

    wrap(join_generation.Rejoin, "_restore", restore)


# -- in agents
@mutant
def who_stands_still_for_a_moment_is_given_up() -> None:
    from rackrun.agent.tray import worker_liveness

    def begin(original: Any, self: Any, tray: Any, uplink: Any, mirror: Any, _floor_ms: int) -> None:
        original(self, tray, uplink, mirror, 100)

    wrap(worker_liveness.LivenessWatch, "__init__", begin)


# -- in the launcher, which hosts the coordinator
@mutant
def a_stop_has_no_reason() -> None:
    import msgspec

    from rackrun.launch.run import run_directory

    def finish(original: Any, self: Any, result: Any) -> None:
        original(self, msgspec.structs.replace(result, because="", remedy=""))

    wrap(run_directory.RunDirectory, "finish", finish)


@mutant
def the_end_never_comes() -> None:
    from rackrun.core.lifecycle import shutdown

    wrap(shutdown.Shutdown, "release_if_finished", lambda _original, _self, _at_ms: None)


@mutant
def a_process_is_left() -> None:
    from rackrun.launch.run import local_agents

    def kill(original: Any, self: Any) -> None:
        original(self)
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL)

    wrap(local_agents.LocalAgents, "kill", kill)


@mutant
def the_coordinator_decides_by_what_is_no_event() -> None:
    from rackrun.core.machine import control_plane
    from rackrun.protocol.commands import Notice
    from rackrun.protocol.events import WorkerExited

    def handle(original: Any, self: Any, event: Any) -> Any:
        more = [Notice(text=f"process {os.getpid()}")] if isinstance(event, WorkerExited) else []
        return [*original(self, event), *more]

    wrap(control_plane.ControlPlane, "handle", handle)


_wanted = os.environ.get("RACKRUN_TEST_MUTANT", "")
if _wanted:
    MUTANTS[_wanted]()
