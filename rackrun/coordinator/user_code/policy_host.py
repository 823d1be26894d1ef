"""Calls the user's policy in a process of its own, for at most a second, so that it neither blocks nor breaks the
coordinator.

The process is started before it is needed and lives on between questions. A process that takes too long is killed, with
everything that it has started, and another is started for the next question. Nothing here blocks: even a process that
cannot be killed is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from rackrun.coordinator.user_code.user_process import UserProcess, UserProcesses, first_line
from rackrun.errors import UsageError
from rackrun.protocol.commands import AskPolicy
from rackrun.protocol.events import PolicyAnswered

__all__ = ["ANSWER_S", "PolicyHost", "check"]

ANSWER_S = 1.0
_CHILD = "rackrun.coordinator.user_code.policy_child"
_REMEDY = (
    "name a function of (failure, view) as MODULE:FUNCTION, with the module in this directory or in PYTHONPATH; "
    "see docs/write_a_policy.md."
)


def check(function: str) -> None:
    """Load the function once, before anything is started. Raises UsageError if that fails."""
    try:
        trouble = msgspec.json.decode(first_line(_CHILD, function), type=PolicyAnswered).trouble
    except OSError as error:
        trouble = str(error)
    except msgspec.MsgspecError:
        trouble = "ends the process in which it is loaded"
    if trouble:
        raise UsageError(f"the policy {function} {trouble}.", remedy=_REMEDY)


class PolicyHost:
    """Calls the function that each question names.

    ``deliver`` receives one `PolicyAnswered` for each question, unless another was asked in the meantime: then its
    answer is no longer awaited.
    """

    def __init__(self, function: str, deliver: Callable[[PolicyAnswered], None], *, answer_s: float = ANSWER_S) -> None:
        self._function = function
        self._deliver = deliver
        self.answer_s = answer_s
        self._processes = UserProcesses()
        self._loaded = False
        self._asked: AskPolicy | None = None  # the question that the function is answering
        self._next: AskPolicy | None = None  # a newer question
        self._late: asyncio.TimerHandle | None = None

    def use(self, function: str) -> None:
        """Load another function, which will be asked from now on. A question under way keeps its time."""
        if self._asked is None and function != self._function:
            self._processes.end()
            self._function = function
            self.start()

    def start(self) -> None:
        """Start a child that loads the function. If it cannot be started, questions are answered with the trouble."""
        self._processes.reap()
        self._loaded = False
        try:
            self._processes.now = process = UserProcess(_CHILD, self._function)
        except OSError as error:
            self._fail(f"cannot be started: {error}")
            return
        process.listen(self._on_line, self._fail)

    def pids(self) -> list[int]:
        """Return the process ids of the children, including those that are being killed."""
        return self._processes.pids()

    def ask(self, command: AskPolicy) -> None:
        """Ask a question. A question that is still open is answered first, or runs out of time; its answer is
        dropped."""
        if self._asked is not None:
            self._next = command
        else:
            self._put(command)

    def close(self) -> None:
        """Drop open questions and end all children."""
        self._asked = self._next = None
        self._disarm()
        self._processes.close()

    # -- questions and answers
    def _put(self, command: AskPolicy) -> None:
        if command.function != self._function:
            self._processes.end()
            self._function = command.function
        self._asked = command
        self._late = asyncio.get_running_loop().call_later(self.answer_s, self._too_late)
        if self._processes.now is None:
            self.start()
        if self._processes.now is not None:
            self._processes.now.write(msgspec.json.encode(command))

    def _settle(self, answered: PolicyAnswered) -> None:
        self._disarm()
        self._asked, overtaken_by, self._next = None, self._next, None
        if overtaken_by is None:
            self._deliver(answered)
        else:
            self._put(overtaken_by)

    def _too_late(self) -> None:
        if self._loaded:
            self._fail(f"gave no answer within {self.answer_s:g} s")
        elif self._asked is not None:  # loading goes on: if killed, it would take as long the next time
            self._settle(PolicyAnswered(question=self._asked.question, trouble="is still being loaded"))

    def _fail(self, trouble: str) -> None:
        """End the process, which is of no use any more. Without an open question no other is started, because it might
        end at once too."""
        self._processes.end()
        if self._asked is None:
            return
        begun = self._loaded
        self._settle(PolicyAnswered(question=self._asked.question, trouble=trouble))
        if begun and self._processes.now is None:
            self.start()

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_line(self, line: bytes) -> None:
        try:
            answered = msgspec.json.decode(line, type=PolicyAnswered)
        except msgspec.MsgspecError as error:
            self._fail(f"answered what cannot be read: {error}")
            return
        if answered.question == 0:
            self._loaded = not answered.trouble
            if answered.trouble:
                self._fail(answered.trouble)
        elif self._asked is not None and answered.question == self._asked.question:
            self._settle(answered)
