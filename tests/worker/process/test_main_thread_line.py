"""Where a rank stands, for people: the line of the script that its main thread is in."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from rackrun.worker.process.main_thread_line import place_of_main_thread
from tests.worker import harness  # noqa: F401 - sets the number of threads before torch is imported


def seen_from_another_thread(do: Callable[[Callable[[], None]], None]) -> str:
    """What is said while ``do`` waits in the function that it is given."""
    found: list[str] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: found.append(place_of_main_thread()))
        thread.start()
        thread.join()

    do(look)
    return found[0]


def test_a_rank_stands_where_the_script_calls_what_takes_long() -> None:
    """In `threading`, which is not the script's; its line is named first."""

    def evaluate(wait: Callable[[], None]) -> None:
        wait()

    place = seen_from_another_thread(evaluate)
    assert place.startswith("tests/worker/process/test_main_thread_line.py:")
    assert " in look, in threading." in place


def test_in_a_library_that_calls_the_script_back_it_is_the_innermost_line_of_the_script() -> None:
    class Held(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            found.append(place_of_main_thread())
            return gradient

    found: list[str] = []
    Held.apply(torch.ones(1, requires_grad=True)).backward()  # type: ignore[no-untyped-call]
    assert found[0].startswith("tests/worker/process/test_main_thread_line.py:")
    assert found[0].partition(" in ")[2].startswith("backward")
