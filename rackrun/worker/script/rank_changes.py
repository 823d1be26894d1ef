"""Informs a script about its process's place in the world: calls back when it changes, and makes objects for rank 0
alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rackrun.worker.data.rng import undrawn
from rackrun.worker.process.reports import say
from rackrun.worker.script.user_line import keeps_something, user_line

__all__ = ["MainOnly", "RankChangeHooks"]


class RankChangeHooks:
    """Callbacks and rank-0 objects of one entry of ``main``. ``place``: returns (rank, number of ranks)."""

    def __init__(self, place: Callable[[], tuple[int, int]]) -> None:
        self._place = place
        self._known: tuple[int, int] | None = None
        self._callbacks: list[Callable[[], Any]] = []
        self._for_main: list[MainOnly] = []
        self._asked = ""
        """The line where the script asked, before it had a place, whether it is main, and the answer was no; "" if it
        did not ask."""
        self._kept = ""
        """The line where the answer was yes, and the script kept something made because of it; "" if there is none."""
        self._told_of_accelerate = False

    def on_join(self, function: Callable[[], Any]) -> None:
        """Call ``function()`` at every change of place, and now if there is a place already."""
        self._callbacks.append(function)
        if self._known is not None:
            function()

    def main_only(self, make: Callable[[], Any], is_main: Callable[[], bool]) -> MainOnly:
        """Return an object that stands for ``make()`` on rank 0."""
        self._for_main.append(MainOnly(make, is_main))
        return self._for_main[-1]

    def asked_for_main(self, *, is_main: bool) -> None:
        """Note that the script asks whether it is main. Only an answer before it has a place can become wrong."""
        if self._known is not None:
            return
        if not is_main:
            self._asked = self._asked or user_line()
        elif not self._kept and keeps_something(line := user_line()):
            self._kept = line

    def run_callbacks(self) -> None:
        """Run the callbacks if the place has changed. To be called whenever the script is about to continue. Random
        generators are left as they were."""
        now = self._place()
        if now == self._known:
            return
        self._known = now
        if now[0] == 0 and self._asked and not self._callbacks and not self._for_main:
            say(
                f"{self._asked}: this process has taken rank 0, and run.is_main was False when it was asked there, before run.steps(): what was "
                "made for rank 0 only is not here. Remedy: make it with run.main_only(...), or in a function given to run.on_join."
            )
        if self._kept and not self._callbacks and not self._for_main:
            say(
                f"{self._kept}: made where run.is_main was asked before run.steps(): if rank 0 is replaced, its successor does not have it. "
                "Remedy: none if it is of no use later; else make it with run.main_only(...), or in a function given to run.on_join."
            )
            self._kept = ""
        with undrawn():
            for one in self._for_main:
                one.close_if_replaced()
            for function in self._callbacks:
                function()
        self._tell_of_accelerate(*now)

    def _tell_of_accelerate(self, rank: int, ranks: int) -> None:
        """Say that Accelerate goes by an older rank of this process, if it does."""
        state = sys.modules.get("accelerate.state")
        kept = state.PartialState._shared_state.get("process_index") if state is not None else None
        if ranks > 1 and kept not in (None, rank) and not self._told_of_accelerate:
            self._told_of_accelerate = True
            say(
                f"this process is rank {rank} now, and Accelerate takes it for rank {kept}, as when the Accelerator was made: on a successor of rank 0 "
                "nothing is printed or saved by the main process. Remedy: rackrun.accelerate.follow_ranks(run) in main."
            )


class MainOnly:
    """Stands for the result of ``make()`` on rank 0, which makes it at the first use.

    On other ranks each of its methods does nothing and returns None. A rank that is no longer rank 0 closes its object.
    """

    def __init__(self, make: Callable[[], Any], is_main: Callable[[], bool]) -> None:
        self._make, self._is_main = make, is_main
        self._made: Any = None

    def close_if_replaced(self) -> None:
        """Close the object if this process is not rank 0 any more."""
        if self._made is not None and not self._is_main():
            made, self._made = self._made, None
            if callable(close := getattr(made, "close", None)):
                close()

    def __getattr__(self, name: str) -> Any:
        self.close_if_replaced()
        if not self._is_main():
            return _nothing
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, name)

    def __bool__(self) -> bool:
        return self._is_main()

    def __enter__(self) -> MainOnly:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        made, self._made = self._made, None
        if callable(close := getattr(made, "close", None)):
            close()


def _nothing(*args: Any, **kwargs: Any) -> None:
    del args, kwargs
