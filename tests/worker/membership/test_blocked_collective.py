"""What a rank tells of the collective in which it is blocked: only what is certain, as a deadlock is judged by it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rackrun.link.heartbeat_page import HeartbeatPage
from rackrun.protocol.events import CollectiveWait
from rackrun.protocol.ids import Generation
from rackrun.worker.communicators.gate_tree import GATE_SUM
from rackrun.worker.membership.decisions.script_scope import Scope
from rackrun.worker.membership.elastic_group import ElasticGroup
from rackrun.worker.membership.worker_membership import WorkerMembership

SIZE = 4


class Pending(dist.Work):
    """The first wait times out. ``meanwhile`` is called in the second, which finds its end."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._looked, self._meanwhile = False, meanwhile
        self.future: torch.futures.Future[Any] = torch.futures.Future()

    def is_completed(self) -> bool:
        return self._looked

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._looked:
            self._looked = True
            raise RuntimeError("Operation timed out!")
        self._meanwhile()
        return True

    def get_future(self) -> Any:
        return self.future


class Slow:
    """A communicator whose collectives take a while."""

    batches = False

    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self.works: list[Pending] = []
        self.seen: list[CollectiveWait | None] = []
        """What the page has said in each wait."""

    def call(self, name: str, *args: Any, on_host: bool = False) -> dist.Work:
        del name, args, on_host
        self.works.append(Pending(lambda: self.seen.append(self._page.blocked)))
        return self.works[-1]

    def break_(self) -> None:
        pass


@pytest.fixture
def page(world: WorkerMembership) -> HeartbeatPage:
    return world.page


@pytest.fixture
def slow(world: WorkerMembership) -> Slow:
    return Slow(world.page)


@pytest.fixture(autouse=True)
def in_step(world: WorkerMembership, slow: Slow) -> None:
    """Rank 0 of four, in a step of generation 7, with a pair besides."""
    world.create_default(0, SIZE)
    assert world.new_group([0, 1], "", "pair") is not None
    world.scope = Scope.UNIT
    world.machine.start_alone(Generation(7))
    for group in world.groups:
        group.communicator = slow  # type: ignore[assignment]


def ones() -> torch.Tensor:
    return torch.ones(2)


def test_who_waits_for_a_while_tells_in_what_and_how_many_it_has_called_in_each_group(
    world: WorkerMembership, page: HeartbeatPage, slow: Slow
) -> None:
    everyone, pair = world.groups
    for group in (everyone, pair, everyone):
        group.allreduce([ones()]).wait()
    _, _, third = slow.seen
    assert third is not None
    assert (third.generation, third.number) == (7, 2)
    assert dict(third.called)[third.group] == 2
    assert sorted(count for _, count in third.called) == [1, 2]
    assert page.blocked is None, "it goes on"


def test_one_group_has_one_number_whoever_tells_of_it(world: WorkerMembership, slow: Slow) -> None:
    everyone, pair = world.groups
    everyone.allreduce([ones()]).wait()
    pair.allreduce([ones()]).wait()
    first, second = slow.seen
    assert first is not None
    assert second is not None
    assert first.group != second.group
    assert {group for group, _ in first.called} == {group for group, _ in second.called} == {first.group, second.group}


def calls(group: ElasticGroup, name: str) -> dist.Work:
    match name:
        case "send":
            return group.send([ones()], 1)
        case "recv":
            return group.recv([ones()], 1)
        case "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = 1
            return group.broadcast([ones()], options)
        case "reduce":
            return group.reduce([ones()])
        case "alltoall":
            return group.all_to_all_single(ones(), ones())
        case _:
            return group.allreduce([torch.ones(0)])


@pytest.mark.parametrize("name", ["send", "recv", "broadcast", "reduce", "alltoall", "of nothing"])
def test_what_may_end_before_all_have_called_it_is_not_told(name: str, world: WorkerMembership, slow: Slow) -> None:
    calls(world.groups[1], name).wait()
    assert slow.seen == [None]


@pytest.mark.parametrize(("name", "count"), [("send", 1), ("recv", 1), ("broadcast", 2)])
def test_sends_and_receives_are_not_in_the_order_of_collectives_and_all_else_is(
    name: str, count: int, world: WorkerMembership, slow: Slow
) -> None:
    calls(world.groups[1], name).wait()
    world.groups[1].allreduce([ones()]).wait()
    last = slow.seen[-1]
    assert last is not None
    assert last.number == count


def test_the_gates_tree_has_an_order_of_its_own(world: WorkerMembership) -> None:
    everyone = world.groups[0]
    first, second = (world.blocked.count(everyone, name, [ones()]) for name in ("allreduce", GATE_SUM))
    assert first is not None
    assert second is not None
    assert (first.number, second.number) == (1, 1)
    assert first.group != second.group


def test_in_a_phase_threads_of_the_script_may_call_collectives(
    world: WorkerMembership, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, ours, theirs = (
        threading.main_thread(),
        threading.Thread(name="rackrun-control"),
        threading.Thread(name="saves"),
    )
    world.in_phase = True
    for threads, told in (([main, ours, theirs], False), ([main, ours], True)):
        monkeypatch.setattr(threading, "enumerate", lambda threads=threads: threads)
        world.groups[0].allreduce([ones()]).wait()
        assert (slow.seen[-1] is not None) is told


@pytest.mark.parametrize("scope", [Scope.AFTER, Scope.SETUP])
def test_what_is_neither_a_step_nor_a_phase_is_not_told_of(scope: Scope, world: WorkerMembership, slow: Slow) -> None:
    world.scope = scope
    world.groups[0].allreduce([ones()]).wait()
    assert slow.seen == [None]


def test_as_long_as_a_future_is_out_its_callbacks_may_call_collectives(world: WorkerMembership, slow: Slow) -> None:
    world.groups[0].allreduce([ones()]).get_future()
    world.groups[1].allreduce([ones()]).wait()
    assert slow.seen == [None]
    slow.works[0].future.set_result(None)
    world.groups[1].allreduce([ones()]).wait()
    assert slow.seen[-1] is not None


def test_a_future_whose_callback_runs_is_still_out(world: WorkerMembership, slow: Slow) -> None:
    future = world.groups[0].allreduce([ones()]).get_future()

    def reduces(_: object) -> None:
        world.groups[1].allreduce([ones()]).wait()

    future.add_done_callback(reduces)
    slow.works[0].future.set_result(None)
    assert slow.seen == [None]


def test_where_another_thread_has_called_a_collective_nothing_is_certain_until_the_next_generation(
    world: WorkerMembership, slow: Slow
) -> None:
    thread = threading.Thread(
        target=lambda: world.groups[1].allreduce([ones()], None), name="rackrun-of-a-test", daemon=True
    )
    thread.start()
    thread.join()
    world.groups[0].allreduce([ones()]).wait()
    assert slow.seen == [None]
    world.blocked.new_generation()
    world.groups[0].allreduce([ones()]).wait()
    last = slow.seen[-1]
    assert last is not None
    assert last.number == 1


def test_what_another_thread_waits_for_is_not_told(world: WorkerMembership, slow: Slow) -> None:
    work = world.groups[0].allreduce([ones()])
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    thread.join()
    assert slow.seen == [None]


def test_more_groups_than_the_page_has_room_for_are_not_told_of(page: HeartbeatPage) -> None:
    many = [(number, 1) for number in range(113)]
    page.tell_blocked(7, 1, 1, many)
    assert page.blocked is not None
    assert page.blocked.called == tuple(many)
    page.tell_not_blocked()
    page.tell_blocked(7, 1, 1, [*many, (113, 1)])
    assert page.blocked is None
