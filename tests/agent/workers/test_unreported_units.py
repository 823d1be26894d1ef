"""What an agent reads in the page of a worker that died without a word: as whom it did its last unit, and in which generation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.protocol.ids import BEGIN, Position
from rackrun.protocol.wire import UnitSealed

STEP = Position(7)


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    fd = HeartbeatPage.create("last words")
    page = HeartbeatPage(fd)
    yield page
    page.close()
    os.close(fd)


def unreported(page: HeartbeatPage, told: tuple[int, Position] = (0, BEGIN)) -> UnitSealed | None:
    return WorkerHandle.unreported_unit(SimpleNamespace(page=page, reported_unit=told, slot="t/0", incarnation=3))  # type: ignore[arg-type]


def does_the_step(page: HeartbeatPage, generation: int) -> None:
    page.new_generation(generation)
    page.enter(Activity.STEP, STEP)
    page.seal_ledger(STEP, np.array([4, 5], np.int64))


def test_a_step_that_it_has_told_of_is_not_said_again_in_the_generation_that_it_dies_in(page: HeartbeatPage) -> None:
    """In which it may be another rank: the samples would be those of two."""
    does_the_step(page, generation=1)
    page.new_generation(2)
    page.enter(Activity.RECOVERING, STEP)
    assert unreported(page, told=(1, STEP)) is None


def test_a_step_that_it_has_not_told_of_is_of_the_generation_that_it_was_done_in(page: HeartbeatPage) -> None:
    does_the_step(page, generation=1)
    page.new_generation(2)
    found = unreported(page)
    assert found is not None
    assert (found.generation, found.at, np.frombuffer(found.ids, "<i8").tolist()) == (1, STEP, [4, 5])


def test_a_step_that_is_done_again_after_it_was_told_is_said_again(page: HeartbeatPage) -> None:
    does_the_step(page, generation=1)
    does_the_step(page, generation=2)
    found = unreported(page, told=(1, STEP))
    assert found is not None
    assert found.generation == 2
