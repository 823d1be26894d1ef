"""Memory for snapshots is made beside training: nobody waits for what is made ahead, and which steps have a snapshot stays as it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.memory_plan import Ceiling
from rackrun.checkpoint.base.errors import CheckpointError, MemoryPlanError
from rackrun.checkpoint.image.host_copies import HostCopies
from rackrun.worker.snapshots import snapshot_memory
from rackrun.worker.snapshots.shard_snapshots import Snapshots
from rackrun.worker.snapshots.snapshot_memory import SnapshotMemory, chunk_bytes_for
from rackrun.worker.state.state_image import StateImages
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.tensors.optimizer_sizes import bytes_to_come

SIZE = 100_000
ME: dict[str, Any] = {"rank": 3, "fencing_token": 1}


class Kernel:
    """Makes arenas, each when the test lets it. ``fails``: the next so many, for want of memory."""

    def __init__(self) -> None:
        self.asked, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        self.fails = 0
        self.at_work = threading.Lock()
        self.threads: list[int] = []

    def create(self, fd: int, **how: Any) -> Arena:
        with OneRankCommunicator(self.at_work):
            self.threads.append(how["populating"].threads)
            self.asked.release()
            while not self.may_go.acquire(timeout=0.01):
                if not how["populating"].wanted():
                    raise CheckpointError("not wanted.", remedy="")
            if self.fails:
                self.fails -= 1
                raise MemoryPlanError("the test has none.")
            return made(fd, **how)

    def was_asked(self) -> None:
        assert self.asked.acquire(timeout=60.0)

    def let_go(self, arenas: int) -> None:
        for _ in range(arenas):
            self.may_go.release()


class OneRankCommunicator:
    """A lock that nobody else may hold."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two arenas are made at once"

    def __exit__(self, *_: object) -> None:
        self._lock.release()


made = Arena.create


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    found = Kernel()
    monkeypatch.setattr(Arena, "create", found.create)
    return found


@pytest.fixture
def fds() -> Iterator[list[int]]:
    found = [os.memfd_create("test", os.MFD_CLOEXEC) for _ in range(2)]
    yield found
    for fd in found:
        os.close(fd)


class Pins(HostCopies):
    def __init__(self) -> None:
        self.pinned: list[int] = []

    def pin(self, address: int, size: int) -> None:
        self.pinned.append(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture
def device() -> Pins:
    return Pins()


@pytest.fixture
def memory(fds: list[int], device: Pins) -> Iterator[SnapshotMemory]:
    found = SnapshotMemory(fds, device, threads=(1, 2))
    yield found
    closed(found)


def closed(memory: SnapshotMemory) -> None:
    memory.stop()
    ended(memory)
    for arena in (memory[0], memory[1]):
        if arena is not None:
            arena.close()


def ended(memory: SnapshotMemory) -> None:
    """Wait until nothing is being made."""
    for making in memory._making:
        if making is not None and making.thread is not None:
            making.thread.join(60.0)
            assert not making.thread.is_alive()


def test_who_asks_ahead_does_not_wait(memory: SnapshotMemory, kernel: Kernel) -> None:
    memory.ahead(SIZE, **ME)
    kernel.was_asked()
    assert memory.complete
    assert (memory[0], memory[1]) == (None, None)
    kernel.let_go(2)
    ended(memory)
    for slot in (0, 1):
        there = memory[slot]
        assert there is not None
        assert memory.arena(slot, SIZE, **ME) is there, "nothing is left to be made"


def test_a_snapshot_that_is_due_waits_for_its_memory_and_is_heard_of_meanwhile(
    memory: SnapshotMemory, kernel: Kernel
) -> None:
    memory.ahead(SIZE, **ME)
    heard: list[int] = []

    def waiting() -> None:
        heard.append(1)
        if len(heard) == 2:
            kernel.let_go(1)

    assert memory.arena(0, SIZE, **ME, waiting=waiting).payload_bytes >= SIZE
    assert len(heard) >= 2
    kernel.let_go(1)


def test_memory_that_nobody_has_asked_for_ahead_is_made_when_it_is_needed(
    memory: SnapshotMemory, kernel: Kernel
) -> None:
    kernel.let_go(1)
    assert memory.arena(1, SIZE, **ME).payload_bytes >= SIZE
    assert memory[0] is None
    assert not memory.complete


def test_what_somebody_waits_for_is_made_by_more_threads_than_what_is_made_beside_training(
    memory: SnapshotMemory, kernel: Kernel
) -> None:
    kernel.let_go(2)
    memory.arena(0, SIZE, **ME)
    memory.ahead(SIZE, **ME)
    ended(memory)
    assert kernel.threads == [2, 1]


def test_what_could_not_be_made_ahead_is_said_when_it_is_needed(memory: SnapshotMemory, kernel: Kernel) -> None:
    kernel.fails = 3
    kernel.let_go(3)
    memory.ahead(SIZE, **ME)
    ended(memory)
    assert memory.complete, "it is not tried again and again"
    with pytest.raises(MemoryPlanError, match="the test has none"):
        memory.arena(0, SIZE, **ME)
    kernel.let_go(1)
    assert memory.arena(1, SIZE, **ME).payload_bytes >= SIZE, "there is memory by now"


def test_what_the_host_cannot_bear_is_refused_and_nothing_is_allocated(
    memory: SnapshotMemory, fds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Ceiling("the test", 2 * SIZE, SIZE, "")
    monkeypatch.setattr(snapshot_memory, "ceilings", lambda _: (small,))
    memory.ahead(SIZE, **ME)
    ended(memory)
    for slot in (0, 1):
        with pytest.raises(MemoryPlanError):
            memory.arena(slot, SIZE, **ME)
    assert [os.fstat(fd).st_size for fd in fds] == [0, 0]


def test_an_arena_that_will_be_too_small_is_not_waited_for(memory: SnapshotMemory, kernel: Kernel) -> None:
    memory.ahead(SIZE, **ME)
    kernel.was_asked()
    found: list[Arena] = []
    asks = threading.Thread(target=lambda: found.append(memory.arena(0, 2 * SIZE, **ME)))
    asks.start()
    kernel.was_asked()  # for the larger one; the test has let none go
    assert not memory.complete, "the other one, which is to be as large, is not being made"
    kernel.let_go(1)
    asks.join(60.0)
    assert found[0].payload_bytes >= 2 * SIZE
    memory.ahead(2 * SIZE, **ME)
    kernel.let_go(1)
    assert memory.arena(1, 2 * SIZE, **ME).payload_bytes >= 2 * SIZE


def test_what_there_is_stays_whatever_is_asked_for_ahead(memory: SnapshotMemory) -> None:
    """A snapshot may be in it, which others go back to."""
    arena = memory.arena(0, SIZE, **ME)
    writer = arena.begin(1, 1)
    writer.payload[:4] = b"mine"
    writer.seal(4, "")
    memory.ahead(9 * SIZE, **ME)
    ended(memory)
    assert memory[0] is arena
    assert bytes(arena.reader(1).payload[:4]) == b"mine"
    assert memory.arena(1, 9 * SIZE, **ME).payload_bytes >= 9 * SIZE


def test_a_large_snapshot_has_few_chunks_and_none_has_more_than_32_mib(memory: SnapshotMemory) -> None:
    mib = 2**20
    chunks = [chunk_bytes_for(size) // mib for size in (1, 512 * mib, 513 * mib, 1024 * mib, 3000 * mib, 2**40)]
    assert chunks == [8, 8, 16, 16, 32, 32]
    assert memory.arena(0, SIZE, **ME).chunk_bytes == 8 * mib


def test_when_no_more_is_needed_what_is_being_made_ends_and_leaves_nothing(
    memory: SnapshotMemory, kernel: Kernel, fds: list[int]
) -> None:
    memory.ahead(SIZE, **ME)
    kernel.was_asked()
    memory.stop()
    ended(memory)
    assert (memory[0], memory[1]) == (None, None)
    assert [os.fstat(fd).st_blocks for fd in fds] == [0, 0]


def test_what_is_made_is_pinned_until_it_goes(memory: SnapshotMemory, device: Pins) -> None:
    memory.ahead(SIZE, **ME)
    first = [memory.arena(slot, SIZE, **ME).memory()[0] for slot in (0, 1)]
    assert sorted(device.pinned) == sorted(first)
    larger = memory.arena(0, 2 * SIZE, **ME).memory()[0]
    assert sorted(device.pinned) == sorted([larger, first[1]])


# -- snapshots
class Page:
    """A heartbeat page. The first snapshot's memory is there when it has been told twice that this rank waits."""

    mirrored = -1

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.told = kernel, 0

    def seal_snapshot(self, slot: int, named: int) -> None: ...

    def progress(self) -> None:
        self.told += 1
        if self.told == 2:
            self.kernel.let_go(2)


def runtime(fds: list[int], page: object) -> Any:
    world = SimpleNamespace(
        rank=0, layout=0, generation=1, replica_class="", has_mirrors=False, unless_broken=lambda act: act() or True
    )
    return SimpleNamespace(world=world, boot=SimpleNamespace(snapshot_fds=fds), device=torch.device("cpu"), page=page)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrackedState:
    state = TrackedState()
    state.track("model", model)
    state.track("optimizer", optimizer)
    return state


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()


def test_the_step_that_is_due_has_its_snapshot_however_late_the_memory(kernel: Kernel, fds: list[int]) -> None:
    model = nn.Linear(30, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    page = Page(kernel)
    snapshots = Snapshots(runtime(fds, page), trained(model, optimizer), every=1)
    try:
        one_step(model, optimizer)
        snapshots.expect()
        kernel.was_asked()
        snapshots.take(0)
        snapshots.settle()
        assert snapshots.own_image(0) is not None
        assert page.told >= 2
        assert snapshots.cost_s < 60.0, "the memory is no part of what the next one costs"
        assert kernel.asked.acquire(timeout=60.0), "that of the second was begun before it is needed"
        assert not kernel.asked.acquire(blocking=False), "what was expected was enough"
    finally:
        closed(snapshots._arenas)


@pytest.mark.parametrize(("device", "begun"), [("meta", True), ("cpu", False)])
def test_before_the_first_step_memory_of_the_host_is_left_to_optimizers_that_will_need_it(
    device: str, begun: bool, kernel: Kernel, fds: list[int]
) -> None:
    """The optimizers of a device do not (here: of one without memory). Else a host that is too small would not be told of: the kernel would end somebody."""
    model = nn.Linear(300, 100, device=device)
    snapshots = Snapshots(runtime(fds, Page(kernel)), trained(model, torch.optim.AdamW(model.parameters())), every=1)
    snapshots.expect()
    try:
        assert snapshots._arenas.complete == begun
        if begun:
            kernel.let_go(2)
            arena = snapshots._arenas.arena(0, 3 * 4 * 300 * 100, **ME)
            assert arena.payload_bytes < 1.1 * 3 * 4 * 300 * 100
    finally:
        closed(snapshots._arenas)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.SGD,
        lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    ],
)
def test_what_an_optimizer_will_hold_is_known_before_its_first_step(optimizer: Any) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300), nn.Linear(300, 10))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    chosen = optimizer(model.parameters())
    state = trained(model, chosen)

    def size() -> int:
        return StateImages(state).describe("").layout.total_bytes

    to_come = bytes_to_come([chosen])
    assert to_come is not None
    expected = size() + to_come
    one_step(model, chosen)
    assert size() <= expected <= 1.1 * size()
    assert bytes_to_come([chosen]) == 0 or not chosen.state


def test_of_an_optimizer_that_nobody_knows_nothing_is_expected_before_its_first_step() -> None:
    model = nn.Linear(30, 10)
    optimizer = torch.optim.Adagrad(model.parameters())
    optimizer.state.clear()
    assert bytes_to_come([torch.optim.AdamW(model.parameters()), optimizer]) is None
