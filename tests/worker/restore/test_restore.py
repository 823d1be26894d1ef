"""A newcomer is filled from several live replicas at once, and what they give is compared."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from rackrun.protocol.commands import Restore
from rackrun.protocol.ids import Rank
from rackrun.worker.communicators.communicator import PointToPoint
from rackrun.worker.loop.run import Run
from rackrun.worker.restore import live_restore, process_vm
from rackrun.worker.restore.live_restore import RestoreCallbacks, run_restores
from rackrun.worker.restore.restore_transfer import landing_places
from rackrun.worker.state.state_manifest import StateManifest, TensorInfo
from rackrun.worker.state.tracked_state import TrackedState
from rackrun.worker.steps.step import Step
from tests.worker.harness import HOSTS_ONLY, Ended, moments
from tests.worker.scripts import Samples, adam

Train = Callable[..., Ended]
CPU = torch.device("cpu")


def wide(damage: str = "") -> Callable[[Run], None]:
    """A tensor too large to travel packed. ``damage``: rank 1 changes a bit of its own there, in step 4."""

    def main(run: Run) -> None:
        model = DDP(nn.Sequential(nn.Linear(10, 4000), nn.Tanh(), nn.Linear(4000, 10)))
        optimizer = adam(model)
        run.track(model=model, optimizer=optimizer)
        data = run.loader(Samples())

        @run.step
        def step(step: Step) -> None:
            for batch in data:
                step.backward((model(batch) - batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            if damage and int(step) == 4 and run.rank == 1:
                with torch.no_grad():
                    getattr(model.module[0], damage).view(-1)[7] += 1e-6

        for number in run.steps(8):
            step(number)

    return main


@HOSTS_ONLY
@pytest.mark.parametrize("readable", [0, 1, 2])
def test_state_comes_from_two_sources_bit_for_bit(readable: int, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory that may be read, and over sockets from those whose memory may not."""
    answers = iter([True] * readable + [False] * (2 - readable) + [True] * readable)  # asked again after reading
    monkeypatch.setattr(process_vm.PeerProcess, "is_there", lambda _: next(answers))
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert ended.plans[0].restores[0].sources == (0, 1)


def test_what_arrives_is_written_straight_into_tensors_that_lie_as_at_their_source() -> None:
    """Memory between costs a page fault for every 4 KiB of state, in the middle of a recovery."""
    rows, columns = torch.zeros(4, 6), torch.zeros(6, 4).t()
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = {
        path: (TensorInfo(path, "float32", tuple(like.shape), False, False, strides), tensor)
        for path, like, strides, tensor in (
            ("row-major", rows, (), rows),
            ("channels last", last, last.stride(), last),
            ("row-major, here by columns", rows, (), columns),
            ("channels last, here row-major", last, last.stride(), torch.zeros(2, 3, 4, 5)),
        )
    }
    places = landing_places(found, torch.device("cpu"))
    assert [path for path, place in places.items() if place is not None] == ["row-major", "channels last"]
    assert places["row-major"].data_ptr() == rows.data_ptr()  # type: ignore[union-attr]


@HOSTS_ONLY
def test_a_source_that_goes_while_it_is_read_is_no_source(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number may be another's by now: what was read does not count, and the next plan reads again."""
    answers = itertools.chain([True, True, False], itertools.repeat(True))
    monkeypatch.setattr(process_vm.PeerProcess, "is_there", lambda _: next(answers))
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 2


@pytest.mark.parametrize("damage", ["weight", "bias"])
def test_a_replica_that_has_diverged_is_found_before_anyone_trains_on_it(damage: str, train: Train) -> None:
    reference = train(wide())
    late = max(i for i, what in enumerate(reference.moments[2]) if what.startswith("committed")) - 1
    ended = train(wide(damage), kill={2: late}, max_restarts=0)
    assert ended.exit_code == 3, ended
    assert "could not be restored on 3 slots" in ended.because


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError], ids=["memory", "device"])
def test_a_newcomer_whose_gpu_cannot_take_the_state_ends_and_another_takes_the_place(
    error: type[Exception], train: Train, tmp_path: Path
) -> None:
    """It is no lost peer: the next generation would come to the same, with the same newcomer, and so would all after that."""
    allocate = TrackedState.allocate

    def first_fails(state: TrackedState, manifest: StateManifest) -> dict[str, torch.Tensor]:
        with contextlib.suppress(FileExistsError), open(tmp_path / "first", "x") as file:
            file.write(str(os.getpid()))
        if (tmp_path / "first").read_text() == str(os.getpid()):
            raise error("CUDA error: out of memory")
        return allocate(state, manifest)

    def main(run: Run) -> None:
        TrackedState.allocate = first_fails  # type: ignore[method-assign,assignment]
        wide()(run)

    reference = train(wide())
    ended = train(main, spares=2, kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert len(ended.plans) == 2, ended


# -- on devices, with a second loss in the middle ------------------------------------------------------------------
class Crossing:
    """Between the ranks of one process: what hosts tell each other, by tags, and what devices give, in order. A rank that is broken tells nothing any
    more; what its device had still to give ends all the same, where it is received, with whatever lies there (NCCL: a kernel that leaves goes on
    counting up the steps that its peer waits for)."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, int, object], queue.SimpleQueue[torch.Tensor | None]] = {}
        self.broken: set[int] = set()
        self.before_piece: Callable[[int], None] = lambda rank: None

    def line(self, source: int, target: int, what: object) -> queue.SimpleQueue[torch.Tensor | None]:
        return self.lines.setdefault((source, target, what), queue.SimpleQueue())

    def world(self, rank: int) -> Any:
        return _End(self, rank)


class _End:
    batches = True

    def __init__(self, between: Crossing, rank: int) -> None:
        self._between, self._rank = between, rank

    def call(self, name: str, tensors: list[torch.Tensor], peer: int, tag: int, *, on_host: bool = False) -> Any:
        between, (tensor,) = self._between, tensors
        way = (self._rank, peer) if name == "send" else (peer, self._rank)
        line = between.line(*way, tag if on_host else "device")
        broken = self._rank in between.broken
        if name == "send":
            if on_host and broken:
                raise RuntimeError("Connection closed by peer")
            line.put(torch.full_like(tensor, 7) if broken else tensor.clone())
            return SimpleNamespace(wait=lambda *_: None)

        def arrives(*_: Any) -> None:
            given = line.get()
            if given is None:
                raise RuntimeError("Connection closed by peer")
            tensor.copy_(given)

        return SimpleNamespace(wait=arrives)

    def batch(self, operations: list[PointToPoint]) -> Any:
        if operations[0][0] == "send":
            self._between.before_piece(self._rank)
        works = [self.call(name, [tensor], peer, tag) for name, tensor, peer, tag in operations]
        return SimpleNamespace(wait=lambda *_: [work.wait() for work in works])


@contextlib.contextmanager
def _unreadable(tensors: Any) -> Iterator[None]:
    del tensors
    yield None


class Given(NamedTuple):
    infos: list[TensorInfo]
    tensors: dict[str, torch.Tensor]

    def manifest(self, replica_class: str) -> StateManifest:
        del replica_class
        return StateManifest(self.infos, b"")


def given(*paths: str, sizes: int = 2**17) -> Given:
    infos = [TensorInfo(path, "uint8", (sizes,), False, False) for path in paths]
    return Given(infos, {path: torch.arange(sizes, dtype=torch.int64).to(torch.uint8) for path in paths})


@pytest.mark.parametrize(
    ("paths", "breaks"),
    [
        (("t/param/0", "t/param/1", "t/param/2"), 1),
        (("t/buffer/0",), 0),
        (("t/param/0", "t/buffer/1", "t/param/2"), None),
    ],
    ids=["with digests", "without", "nobody breaks"],
)
def test_what_a_source_gives_once_it_was_broken_is_no_state_and_no_difference_of_replicas(
    paths: tuple[str, ...], breaks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer hears of that break later. Digests would show garbage, but not that it is no source's state; and of buffers there are none."""
    monkeypatch.setattr(live_restore, "readable", _unreadable)
    between, state, filled = Crossing(), given(*paths), list[dict[str, torch.Tensor]]()
    between.before_piece = lambda rank: between.broken.update({rank} & {breaks})
    here = {path: torch.zeros_like(tensor) for path, tensor in state.tensors.items()}
    newcomer: Any = SimpleNamespace(
        allocate=lambda manifest: here, load_plain=lambda manifest, tensors: filled.append(tensors)
    )
    plan: Any = SimpleNamespace(restores=[Restore(rank=Rank(2), sources=(Rank(0), Rank(1)))])

    def source(rank: int) -> None:
        gives: Any = SimpleNamespace(manifest=state.manifest, tensors=lambda: state.tensors)
        with contextlib.suppress(RuntimeError):
            run_restores(
                plan, rank, between.world(rank), gives, "", CPU, RestoreCallbacks(lambda: rank in between.broken)
            )
        for tag in range(16):
            between.line(rank, 2, tag).put(None)

    sources = [threading.Thread(target=source, args=[rank]) for rank in (0, 1)]
    for thread in sources:
        thread.start()
    lost = pytest.raises(RuntimeError, match="closed by peer")
    with contextlib.nullcontext() if breaks is None else lost:
        run_restores(plan, 2, between.world(2), newcomer, "", CPU, RestoreCallbacks(lambda: False))
    for thread in sources:
        thread.join()
    assert len(filled) == (breaks is None)
    assert filled == [] or all(torch.equal(here[path], state.tensors[path]) for path in paths)
