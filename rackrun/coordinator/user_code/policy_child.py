"""Process in which a user's policy runs: ``python -m rackrun.coordinator.user_code.policy_child FD module:function``.

Each line is a message as JSON: `AskPolicy` on standard input, `PolicyAnswered` on descriptor FD. The first line of
output says whether the function could be loaded. The user code's own output goes to standard error, with the tracebacks
of its exceptions. The process ends with its parent, or when its input ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from rackrun.coordinator.user_code.child_setup import error_text, exit_in_forks, find, open_pipes
from rackrun.protocol.commands import AskPolicy
from rackrun.protocol.events import PolicyAnswered
from rackrun.protocol.policy_types import Decision

__all__ = ["answer", "load", "main"]


def main() -> int:
    questions, answers = open_pipes(int(sys.argv[1]))
    pid = os.getpid()
    try:
        function = load(sys.argv[2])
    except BaseException as error:  # noqa: BLE001 - a user's module may do anything while it is imported
        exit_in_forks(pid)
        _say(answers, PolicyAnswered(question=0, trouble=f"cannot be loaded: {error_text(error)}"))
        return 1
    exit_in_forks(pid)
    _say(answers, PolicyAnswered(question=0))
    for line in questions:
        answered = answer(function, msgspec.json.decode(line, type=AskPolicy))
        exit_in_forks(pid)
        _say(answers, answered)
    return 0


def load(name: str) -> Callable[..., object]:
    """Import the function, as `find` does. Raises TypeError if it is not callable."""
    found = find(name)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, not a function of (failure, view)")
    return found


def answer(function: Callable[..., object], question: AskPolicy) -> PolicyAnswered:
    """Call the function and return its answer. Never raises."""
    try:
        decision = function(question.failure, question.view)
        if decision is not None and not isinstance(decision, Decision):
            raise TypeError(f"returned a {type(decision).__name__}, not a Decision or None")
        answered = PolicyAnswered(question=question.question, decision=decision)
        return msgspec.json.decode(
            msgspec.json.encode(answered), type=PolicyAnswered
        )  # raises if a field has a wrong type
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return PolicyAnswered(question=question.question, trouble=f"failed with {error_text(error)}")


def _say(answers: BinaryIO, answered: PolicyAnswered) -> None:
    answers.write(msgspec.json.encode(answered) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
