"""The process in which a user's policy runs: ``python -m rackrun.coordinator.policy_child module:function``.

One line in, one line out, each a message as JSON: `AskPolicy` on standard input, `PolicyAnswered` on standard output; the first line
out says whether the function could be loaded. Whatever the user's code prints goes to standard error, with the traceback of what it
raises. It ends with its parent, or when its input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from rackrun.core.commands import AskPolicy
from rackrun.core.events import PolicyAnswered
from rackrun.core.situation import Decision

__all__ = ["answer", "load", "main"]

_PR_SET_PDEATHSIG = 1
_TOLD_MAX = 500
"""Characters of an error that are passed on."""


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it may be killed at any time
    pid = os.getpid()
    try:
        function = load(sys.argv[1])
    except BaseException as error:  # noqa: BLE001 - a user's module may do anything while it is imported
        _only(pid)
        with contextlib.suppress(Exception):  # of an error that cannot be printed
            traceback.print_exc()
        _say(answers, PolicyAnswered(question=0, trouble=f"cannot be loaded: {_told(error)}"))
        return 1
    _only(pid)
    _say(answers, PolicyAnswered(question=0))
    for line in questions:
        answered = answer(function, msgspec.json.decode(line, type=AskPolicy))
        _only(pid)
        _say(answers, answered)
    return 0


def load(name: str) -> Callable[..., object]:
    """``module:function``; a dot leads into a class or an object. Raises whatever the import does."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, not a function of (failure, view)")
    return found


def answer(function: Callable[..., object], question: AskPolicy) -> PolicyAnswered:
    """Never raises."""
    try:
        decision = function(question.failure, question.view)
        if decision is not None and not isinstance(decision, Decision):
            raise TypeError(f"returned a {type(decision).__name__}, not a Decision or None")
        answered = PolicyAnswered(question=question.question, decision=decision)
        return msgspec.json.decode(
            msgspec.json.encode(answered), type=PolicyAnswered
        )  # its fields are what they should be
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        with contextlib.suppress(Exception):  # of an error that cannot be printed
            traceback.print_exc()
        return PolicyAnswered(question=question.question, trouble=f"failed with {_told(error)}")


def _only(pid: int) -> None:
    """A copy that user code has made of this process, and that came back here, asks and answers nothing."""
    if os.getpid() != pid:
        os._exit(0)


def _told(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - its __str__ is user code too
        text = "which cannot be told"
    return f"{type(error).__name__}: {text}"[:_TOLD_MAX].encode("utf-8", "replace").decode()


def _say(answers: BinaryIO, answered: PolicyAnswered) -> None:
    answers.write(msgspec.json.encode(answered) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
