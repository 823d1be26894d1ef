"""Runs the user's ``main``, and enters it again in the same process when the ranks have to hold other shards.

A new entry keeps the connection to the agent and the thread that listens to it, the heartbeat page, the memory that
holds snapshots, and checkpoints that are being written. It discards the model and everything that refers to it, data
loading processes, process groups and meshes; the script builds those anew.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from rackrun.link.heartbeat_page import Activity
from rackrun.worker.device.rank_exit import leave
from rackrun.worker.loop.entry_parts import MainHandover
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.decisions.interruptions import LoopDrained, Superseded
from rackrun.worker.process.runtime import Runtime

__all__ = ["run_main"]

T = TypeVar("T")
_NOT_BOUND = (
    "rackrun: the loop over run.steps() was over when this process came to it, so what its body binds (the step's number, a loss) is not there. "
    "Remedy: bind such names before the loop, or keep what is needed after it in a tracked object."
)


def run_main(runtime: Runtime, make: Callable[[MainHandover | None], Run], main: Callable[[Run], T]) -> T:
    """Run ``main`` until it has returned for good, and return its result.

    ``make`` creates the `Run` for each entry; its argument is what the former entry leaves behind, None at the first.
    Errors of ``main`` propagate, unless ``main`` is to be entered again.
    """
    run = make(None)
    while True:
        runtime.begin_main()
        try:
            try:
                result = main(run)
            except LoopDrained:
                result = cast("T", None)  # the job ends, and may start again where it has ended
            run._finish()
            if not run._leaves(None):
                return result
        except BaseException as error:
            if not run._leaves(error):
                if isinstance(error, NameError) and run._came_after_loop:
                    error.add_note(_NOT_BOUND)
                raise
        carried = run._let_go()
        result = run = None  # type: ignore[assignment]
        gc.collect()  # models hold reference cycles; free their memory for the next model
        if runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        _begin_again(runtime)
        run = make(carried)


def _begin_again(runtime: Runtime) -> None:
    """Wait for a plan that this process can start over with, and prepare the runtime for it.

    Ends the process when the plan needs state that this process no longer has.
    """
    world, page = runtime.world, runtime.page
    while True:
        page.enter(Activity.RECOVERING, world.passed)
        plan = world.wait_plan()
        mine = runtime.member_of(plan)
        if plan.reshard is None and not mine.fresh:
            leave(mine.rank, "has left main, and has no state any more to go on with.")
        try:
            runtime.begin_again(plan)
        except Superseded:
            continue
        page.enter(Activity.SETUP, world.passed, *runtime.entry_allowance())
        return
