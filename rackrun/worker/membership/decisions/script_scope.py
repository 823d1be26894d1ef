"""Where the script may call collectives: which part of it runs, and what is refused there."""

from __future__ import annotations

import threading
from enum import Enum

from rackrun.errors import CollectiveBroken, StepError

__all__ = ["Scope", "called_in_capture", "called_outside", "lost_after_loop", "refuse_thread", "script_threads"]


class Scope(Enum):
    """The part of the script that runs now, which decides what a collective may do."""

    SETUP = "before run.steps()"
    UNIT = "in a step or phase"
    OUTSIDE = "outside steps and phases"
    AFTER = "after the loop over run.steps()"


def refuse_thread(name: str) -> None:
    """Raise `StepError` if this is a thread of the script that calls the collective ``name``. To be called for a
    collective in a step or between two units.

    Whether such a call comes before or after a gate depends on timing and differs between ranks, and a process that
    takes over a rank has no such thread. A phase may wait for its threads (an asynchronous checkpoint). Threads of
    autograd, and those that call back when a collective is over, are not Python's threads and are allowed.
    """
    thread = threading.current_thread()
    if isinstance(thread, threading._DummyThread) or thread.name.startswith("rackrun-"):
        return
    raise StepError(
        f"a collective ({name}) was called by a thread of the script's own ({thread.name}), and no phase was waiting for it: when a rank is "
        "lost, it could not be called again.",
        remedy="call it in the main thread. A function of run.every or run.at_end may use a thread if it waits for it, as in "
        "torch.distributed.checkpoint.async_save(...).result(). Checkpoints beside training: rackrun --checkpoint-dir.",
    )


def called_outside() -> StepError:
    """Return the error for a collective outside steps and phases."""
    return StepError(
        "a collective was called outside steps and phases, where a lost peer could not be replaced.",
        remedy="move it into the @run.step function, or register the function that needs it with run.every or run.at_end. After a "
        "`break`, let go of what still iterates over run.steps(), such as a progress bar: it may yet go on.",
    )


def called_in_capture(name: str) -> StepError:
    """Return the error for the collective ``name`` while a CUDA graph is being captured: it would keep using this
    generation's communicator, which the next one frees, or a loopback, in which no other rank takes part."""
    return StepError(
        f"a collective ({name}) was called while a CUDA graph is captured: after a failure it would be replayed on a "
        "communicator that is gone.",
        remedy="capture compute only: end the capture before the collective, and begin another behind it.",
    )


def lost_after_loop(what_keeps: str = "") -> CollectiveBroken:
    """Return the error that ends a rank in the script's own code after the loop. ``what_keeps``: a sentence that says
    what keeps the rank from going on, or ""."""
    return CollectiveBroken(
        f"a peer was lost in the code after the loop over run.steps(), which only a new start can run again.{what_keeps}",
        remedy="give what needs collectives, or changes tracked state, to run.at_end(...), which is done again where it broke; or --checkpoint-dir, "
        "so that a new start goes on from the last step.",
    )


def script_threads() -> bool:
    """Whether threads of the script are running, which in a phase may call collectives."""
    main = threading.main_thread()
    return any(one is not main and not one.name.startswith("rackrun-") for one in threading.enumerate())
