"""Signals that a scheduler sends to every process of a job, which workers leave to their agent.

The agent decides what happens to its workers. A worker does not end because of such a signal, unless its script has a
handler of its own or the agent has told it to end. Processes that a worker forks or starts have the default handlers
again, because they belong to the script.
"""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

from rackrun.link.heartbeat_page import HeartbeatPage

__all__ = ["FOR_THE_AGENT", "leave_to_agent"]

FOR_THE_AGENT = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_page: HeartbeatPage | None = None


def leave_to_agent(page: HeartbeatPage) -> None:
    """Install the handlers in a worker, before its script begins."""
    global _page  # noqa: PLW0603 - handlers are the process's, too
    _page = page
    for number in FOR_THE_AGENT:
        signal.signal(number, _held)
        signal.siginterrupt(number, False)  # system calls are restarted
    os.register_at_fork(after_in_child=_usual_again)


def _held(number: int, frame: FrameType | None) -> None:
    del frame
    if number == signal.SIGTERM and _page is not None and _page.to_end:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _usual_again() -> None:
    for number in FOR_THE_AGENT:
        if signal.getsignal(number) is _held:
            with contextlib.suppress(
                ValueError
            ):  # a fork in another thread than the main one: its child's main thread is that one
                signal.signal(number, signal.SIG_DFL)
