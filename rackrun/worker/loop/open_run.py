"""``rackrun.begin``: a run for code that cannot be put into a function ``main(run)``, such as a framework's trainer."""

from __future__ import annotations

import os
import sys
import threading
import traceback

from rackrun.errors import UsageError
from rackrun.link.process.script_end import at_script_end, script_ended
from rackrun.worker.data.loader import BatchPlan, StepOrder
from rackrun.worker.loop.run import Opened, Run
from rackrun.worker.process.runtime import start

__all__ = ["begin", "open_run"]

_ENTERED_ONCE = "rackrun.begin() has opened the run in the middle of a script, which cannot run again in its process"
_opened: list[Run] = []


def begin(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    seed: int = 0,
    mesh: dict[str, int] | None = None,
    snapshot_every: int | None = None,
) -> Run:
    """Open the run of this process, once, and return it. The arguments mean what they mean for `rackrun.elastic`.

    Everything that holds inside of ``main(run)`` holds from here to the end of the script: the run ends when the script
    ends without an error, and then waits for the other ranks. As the script cannot be run again in the same process, a
    world of sharded models keeps its number of ranks.

    Raises `UsageError` at a second call, and for sizes that do not divide.
    """
    return open_run(BatchPlan(global_batch_size, micro_batch_size, seed), mesh, snapshot_every)


def open_run(
    sizes: BatchPlan,
    mesh: dict[str, int] | None = None,
    snapshot_every: int | None = None,
    order: StepOrder | None = None,
) -> Run:
    """Open the run as `begin` does. ``order``: a framework's own micro-batches."""
    if _opened:
        raise UsageError(
            "rackrun.begin() was called twice in one process.", remedy="open one run, and train in one loop over it."
        )
    runtime = start()
    runtime.begin_main()
    run = Run(runtime, sizes, mesh, snapshot_every, opened=Opened(_ENTERED_ONCE, order))
    _opened.append(run)
    at_script_end(run._finish)
    if runtime.boot is None:  # no agent's worker calls `script_ended` here
        # Not atexit: by then the interpreter has closed its pools of threads, and starts none any more.
        threading._register_atexit(_interpreter_ends)  # type: ignore[attr-defined]
    return run


def _interpreter_ends() -> None:
    """Finish the run unless the script has ended with an error, which the interpreter has kept in ``sys``. An error of
    the run itself ends the process with exit code 1, which the interpreter would not do here."""
    if getattr(sys, "last_value", None) is not None:
        return
    try:
        script_ended()
    except BaseException:  # noqa: BLE001 - whatever it is, it ends the process
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
