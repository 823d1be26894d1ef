"""How far a rank has come in its collectives: as its device has. Whoever stands before a collective is told from who waits in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rackrun.agent.tray.worker_liveness import _stall
from rackrun.agent.workers.worker_handle import WorkerHandle
from rackrun.link.heartbeat_page import Activity, HeartbeatPage
from rackrun.protocol.ids import Step
from rackrun.worker.device.device_queue import queue_of
from rackrun.worker.loop.run import Run
from rackrun.worker.membership.collective_progress import CollectiveProgress, Entered
from tests.worker.device.test_own_time_of_devices import Device, Place
from tests.worker.harness import Ended, TinyCluster
from tests.worker.nccl_double import stream_of
from tests.worker.scripts import adam, ddp, fit


@pytest.fixture
def page() -> Iterator[HeartbeatPage]:
    fd = HeartbeatPage.create("progress")
    page = HeartbeatPage(fd)
    os.close(fd)
    page.new_generation(1)
    yield page
    page.close()


@pytest.fixture
def progress(page: HeartbeatPage) -> CollectiveProgress:
    return CollectiveProgress(page, Device())


class Asked:
    """A collective in flight."""

    def __init__(self) -> None:
        self.over = False

    def is_over(self, work: Any) -> bool:
        assert work is self
        return bool(self.over)


def enqueue(progress: CollectiveProgress) -> tuple[Entered, Place, Asked]:
    entered, reached, work = progress.enter(), Place(), Asked()
    entered.reached = reached
    entered.enqueued(cast("Any", work), cast("Any", work))
    return entered, reached, work


def test_a_collective_is_entered_when_the_device_has_come_to_it_and_completed_when_it_has_passed(
    progress: CollectiveProgress, page: HeartbeatPage
) -> None:
    _, first, work = enqueue(progress)
    _, second, _ = enqueue(progress)
    progress.update_page()
    assert page.collectives == (0, 0), "the host is ahead, which says nothing"
    first.at_s = 1.0
    progress.update_page()
    assert page.collectives == (1, 0)
    work.over = True
    progress.update_page()
    assert page.collectives == (1, 1)
    second.at_s = 2.0
    progress.update_page()
    assert page.collectives == (2, 1)


def test_what_the_stream_has_waited_for_is_known_by_the_place_behind_the_wait(
    progress: CollectiveProgress, page: HeartbeatPage
) -> None:
    entered, reached, work = enqueue(progress)
    behind = Place()
    entered.waited(behind)
    assert entered.work is None, "it holds the memory of its result"
    reached.at_s = 1.0
    progress.update_page()
    assert page.collectives == (1, 0)
    behind.at_s = 2.0
    progress.update_page()
    assert page.collectives == (1, 1)
    assert not work.over


def test_a_hosts_collective_that_is_ahead_of_the_device_does_not_hide_where_that_stands(
    progress: CollectiveProgress, page: HeartbeatPage
) -> None:
    enqueue(progress)
    progress.completed(progress.enter())
    progress.update_page()
    assert page.collectives == (0, 0)


def test_a_rank_that_waits_in_a_collective_of_the_hosts_waits(
    progress: CollectiveProgress, page: HeartbeatPage
) -> None:
    entered = progress.enter()
    progress.update_page()
    assert page.collectives == (1, 0)
    progress.completed(entered)
    progress.update_page()
    assert page.collectives == (1, 1)


def test_behind_a_gate_all_is_over_and_a_generation_begins_from_nothing(
    progress: CollectiveProgress, page: HeartbeatPage
) -> None:
    enqueue(progress)
    progress.update_page()
    progress.all_completed()
    assert page.collectives == (1, 1)
    progress.update_page()
    assert page.collectives == (1, 1)
    enqueue(progress)
    progress.update_page()
    progress.new_generation(2)
    assert page.collectives == (0, 0)
    progress.update_page()
    assert page.collectives == (0, 0)


def test_a_device_that_has_failed_is_no_further_than_it_was(progress: CollectiveProgress, page: HeartbeatPage) -> None:
    entered, reached, _ = enqueue(progress)
    reached.at_s = 1.0
    progress.update_page()

    class Failed(Place):
        def passed(self) -> bool:
            raise RuntimeError("CUDA error: unspecified launch failure")

    entered.reached = Failed()
    progress.update_page()
    assert page.collectives == (1, 0)


def test_where_the_host_computes_what_it_has_called_for_is_entered(page: HeartbeatPage) -> None:
    import torch

    progress = CollectiveProgress(page, queue_of(torch.device("cpu")))
    entered = progress.enter()
    assert page.collectives == (1, 0)
    progress.completed(entered)
    progress.update_page()
    assert page.collectives == (1, 1)


# -- a whole job: a kernel hangs on one rank, and the others wait for it


class Watched(TinyCluster):
    """The agent's part: stalls are told once every rank stands as it will for ever."""

    hung = 1
    turn_ms = 50

    def _turn(self) -> None:
        super()._turn()
        pages = {child.rank: child.page for child in self._children.values() if not child.spare}
        if self._ended.plans or len(pages) < self._ranks or not all(self._stands(*one) for one in pages.items()):
            return
        for child in list(self._children.values()):
            if not child.spare:
                worker = SimpleNamespace(page=child.page, slot=child.worker.slot, incarnation=child.worker.incarnation)
                self._event(_stall(cast("WorkerHandle", worker), for_ms=5000))

    def _stands(self, rank: int, page: HeartbeatPage) -> bool:
        entered, completed = page.collectives
        if page.activity is not Activity.STEP or page.at.step != 3 or page.called < 1:
            return False
        return page.called > entered == completed if rank == self.hung else entered > completed


@pytest.mark.parametrize("mode", ["late", "stuck"])
def test_a_kernel_that_hangs_is_blamed_on_its_own_rank_and_the_others_lose_nothing(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(run: Run) -> None:
        model = ddp(run)
        mode = os.environ.get("RACKRUN_NCCL_DOUBLE")

        def hang(step: int) -> None:
            if mode and step == 3 and run._world._slot.endswith(f"/{Watched.hung}"):
                stream_of(run._world).hang()

        fit(run, model, adam(model), before=hang)

    def job(kind: type[TinyCluster]) -> Ended:
        cluster = kind(main)
        try:
            return cluster.run()
        finally:
            cluster.close()

    monkeypatch.delenv("RACKRUN_NCCL_DOUBLE", raising=False)
    undisturbed = job(TinyCluster)
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    ended = job(Watched)
    assert len(ended.plans) == 1, ended
    assert any("stalled at collective" in line for line in ended.story), ended
    [fresh] = [member.rank for member in ended.plans[0].members if member.fresh]
    assert fresh == Watched.hung
    assert not ended.differences(undisturbed), ended
    assert ended.told[-1][1].step >= Step(7)
