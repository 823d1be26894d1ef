"""The build of a plan's communicators: awaited until it is over or outdated, and reported when it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rackrun.link.exchange import ExchangeUnreachable
from rackrun.protocol.events import WorkerUnbuilt
from rackrun.protocol.ids import Generation, Incarnation, SlotId
from rackrun.worker.device.device_queue import queue_of
from rackrun.worker.membership.decisions.interruptions import Superseded
from rackrun.worker.membership.generation_build import GenerationBuild

PLAN = cast("Any", SimpleNamespace(generation=Generation(3)))


class Held:
    """A build, and what it asks the machine. ``in_the_end`` is called when it waits for the next plan, which comes
    then."""

    def __init__(self, in_the_end: Callable[[Held], None] = lambda held: None) -> None:
        self.superseded, self.reports, self._in_the_end = False, list[WorkerUnbuilt | None](), in_the_end
        device = torch.device("cpu")
        self.build = GenerationBuild(
            SlotId("t/0"),
            Incarnation(1),
            "",
            device,
            queue_of(device),
            cast("Any", self),
            cast("threading.Condition", self),
        )

    def is_superseded(self, generation: int) -> bool:
        assert generation == 3
        return self.superseded

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        if not predicate():
            self._in_the_end(self)
            self.superseded = True
            assert predicate()

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait(self, *, over: bool, error: Exception | None = None) -> None:
        self.build.wait(PLAN, cast("Any", SimpleNamespace(over=over, error=error)), rank=0)


def test_a_build_that_is_over_is_awaited_no_longer() -> None:
    held = Held()
    held.wait(over=True)
    assert held.build.take_failure() is None
    assert not held.superseded


def test_nobody_waits_for_the_build_of_a_plan_that_is_outdated() -> None:
    held = Held()
    with pytest.raises(Superseded):
        held.wait(over=False)
    assert held.build.take_failure() is None


@pytest.mark.parametrize("error", [RuntimeError("a peer did not come"), ExchangeUnreachable("no route")])
def test_a_failed_build_is_reported_once_while_it_waits_for_the_next_plan(error: Exception) -> None:
    held = Held(lambda held: held.reports.extend([held.build.take_failure(), held.build.take_failure()]))
    with pytest.raises(Superseded):
        held.wait(over=True, error=error)
    first, second = held.reports
    assert first is not None
    assert (first.generation, first.because) == (3, str(error))
    assert first.cut_off == isinstance(error, ExchangeUnreachable)
    assert second is None


def test_a_failure_that_a_newer_generation_overtakes_is_not_reported() -> None:
    held = Held()
    with pytest.raises(Superseded):
        held.wait(over=True, error=RuntimeError("a peer did not come"))
    assert held.build.take_failure() is None
