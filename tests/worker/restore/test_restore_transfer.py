"""A restore's bytes travel in rounds of large pieces: few launches, two rounds of memory, left in the middle when a newer generation comes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from rackrun.worker.communicators.communicator import PointToPoint
from rackrun.worker.restore import process_vm, restore_layout, restore_transfer
from rackrun.worker.restore.live_restore import _receive_pieces, _send_pieces
from rackrun.worker.restore.restore_layout import (
    PIECE_BYTES_MAX,
    PIECE_BYTES_MIN,
    ROUND_BYTES,
    ROUND_PIECES,
    RestoreLayout,
)
from rackrun.worker.restore.restore_transfer import ReceiveBuffers, SendBuffers
from rackrun.worker.state.state_manifest import StateManifest, TensorInfo
from tests.worker import nccl_double
from tests.worker.harness import HOSTS_ONLY, Ended, moments
from tests.worker.restore.test_restore import wide

Train = Callable[..., Ended]
CPU = torch.device("cpu")
GIB = 2**30


def layout_of(*sizes: int, sources: tuple[int, ...] = (1, 2)) -> RestoreLayout:
    tensors = [TensorInfo(f"t/param/{i}", "uint8", (size,), False, False) for i, size in enumerate(sizes)]
    return RestoreLayout(StateManifest(tensors, b""), sources)


# -- what is given by whom -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("sources", [(1,), (1, 2), (3, 1, 2)])
@pytest.mark.parametrize("sizes", [(2**17,), (3 * PIECE_BYTES_MIN + 5, 2**20), (40 * GIB, GIB, *[2**22] * 400)])
def test_sources_give_about_as_many_bytes_each(sizes: tuple[int, ...], sources: tuple[int, ...]) -> None:
    layout = layout_of(*sizes, sources=sources)
    given = Counter(dict.fromkeys(sources, 0))
    for piece in layout.pieces:
        given[piece.source] += piece.nbytes
    assert sum(given.values()) == sum(sizes)
    assert max(given.values()) - min(given.values()) <= max(piece.nbytes for piece in layout.pieces)


def test_pieces_are_large_where_there_is_much_and_small_where_there_is_little() -> None:
    assert max(piece.nbytes for piece in layout_of(40 * GIB).pieces) == PIECE_BYTES_MAX
    assert max(piece.nbytes for piece in layout_of(60 * 2**20).pieces) == PIECE_BYTES_MIN


@pytest.mark.parametrize("sizes", [(2**17,), (9 * GIB, *[2**21] * 300, 5 * 2**20), [2**17] * 500])
def test_a_round_is_bounded_for_each_source_and_every_piece_is_in_one(sizes: tuple[int, ...]) -> None:
    layout = layout_of(*sizes)
    rounds = layout.rounds()
    assert list(itertools.chain(*rounds)) == list(range(len(layout.pieces)))
    for indices, source in itertools.product(rounds, (1, 2)):
        theirs = [layout.pieces[index].nbytes for index in indices if layout.pieces[index].source == source]
        assert sum(theirs) <= ROUND_BYTES
        assert len(theirs) <= ROUND_PIECES


# -- on their way --------------------------------------------------------------------------------------------------
@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_layout, "PIECE_BYTES_MIN", 2**16)
    monkeypatch.setattr(restore_layout, "PIECE_BYTES_MAX", 2**16)
    monkeypatch.setattr(restore_layout, "ROUND_BYTES", 2**18)
    monkeypatch.setattr(restore_transfer, "_ROUNDS_OF_A_HOST", 2)


class Line:
    """A communicator between a source and a newcomer of one process. It can say when nobody waits any more."""

    batches = False

    def __init__(self, given: dict[int, torch.Tensor] | None = None) -> None:
        self.given = {} if given is None else given
        self.calls: list[str] = []
        self.begun = 0
        self.in_flight = self.most_in_flight = 0
        self.ends_after = 10**9

    def call(self, name: str, *args: Any) -> Any:
        self.calls.append(name)
        (tensor,), _, tag = args
        return Work([self._begin(name, tensor, tag)])

    def _begin(self, name: str, tensor: torch.Tensor, tag: int) -> Callable[[], None]:
        self.begun += 1
        self.in_flight += tensor.nbytes
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def over() -> None:
            self.in_flight -= tensor.nbytes
            if name == "send":
                self.given[tag] = tensor.clone()
            else:
                tensor.copy_(self.given[tag])

        return over

    def overtaken(self) -> bool:
        return self.begun >= self.ends_after


class Batching(Line):
    """Of a device."""

    batches = True

    def batch(self, operations: Sequence[PointToPoint]) -> Any:
        self.calls.append(f"batch of {len(operations)}")
        return Work([self._begin(name, tensor, tag) for name, tensor, _, tag in operations])


class Work:
    def __init__(self, parts: list[Callable[[], None]]) -> None:
        self._parts = parts

    def wait(self, timeout: Any = None) -> None:
        del timeout
        for part in self._parts:
            part()
        self._parts = []


def tensors_of(layout: RestoreLayout, *, seed: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed or 0)
    return {
        info.path: torch.zeros(info.shape, dtype=torch.uint8)
        if seed is None
        else torch.randint(256, info.shape, dtype=torch.uint8, generator=generator)
        for info in layout.infos.values()
    }


@pytest.fixture(params=[Line, Batching])
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    return request.param()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("small_rounds")
def test_what_is_sent_arrives_with_two_rounds_in_flight_at_most(line: Line) -> None:
    layout = layout_of(5 * 2**18 + 7, 2**17, 3 * 2**18)
    source, newcomer = tensors_of(layout, seed=1), tensors_of(layout)
    for rank in (1, 2):
        _send_pieces(line, layout, source, rank, 0, CPU, line.overtaken)  # type: ignore[arg-type]
    assert line.most_in_flight <= 2 * 2**18
    line.most_in_flight = 0
    _receive_pieces(line, layout, ReceiveBuffers(layout, newcomer, CPU), (), CPU, line.overtaken)  # type: ignore[arg-type]
    assert 2**18 < line.most_in_flight <= 2 * 2 * 2**18
    assert line.in_flight == 0
    assert all(torch.equal(newcomer[path], source[path]) for path in source)


@pytest.mark.usefixtures("small_rounds")
def test_a_round_is_one_batch_on_a_device() -> None:
    line, layout = Batching(), layout_of(2**20, sources=(1,))
    _send_pieces(line, layout, tensors_of(layout, seed=1), 1, 0, CPU, line.overtaken)  # type: ignore[arg-type]
    assert line.calls == ["batch of 4"] * 4


@pytest.mark.usefixtures("small_rounds")
def test_who_is_overtaken_leaves_in_the_middle_and_writes_nothing_more(line: Line) -> None:
    layout = layout_of(2**22)
    source, newcomer = tensors_of(layout, seed=1), tensors_of(layout)
    for rank in (1, 2):
        _send_pieces(line, layout, source, rank, 0, CPU, line.overtaken)  # type: ignore[arg-type]
    line.begun, line.ends_after = 0, 20
    with pytest.raises(RuntimeError, match="newer generation"):
        _receive_pieces(line, layout, ReceiveBuffers(layout, newcomer, CPU), (), CPU, line.overtaken)  # type: ignore[arg-type]
    assert line.begun < len(layout.pieces)
    with pytest.raises(RuntimeError, match="newer generation"):
        _send_pieces(line, layout, source, 1, 0, CPU, line.overtaken)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_lies_otherwise_here_or_on_another_device_goes_through_memory_between(
    elsewhere: bool, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``elsewhere``: as on a GPU a tensor of the host's is."""
    layout = layout_of(2**19, 2**19)
    source = tensors_of(layout, seed=1)
    newcomer = {path: torch.zeros(2 * 2**19, dtype=torch.uint8)[::2] for path in source}
    if elsewhere:
        newcomer = tensors_of(layout)
        monkeypatch.setattr(
            "rackrun.worker.restore.restore_transfer.landing_places", lambda tensors, _: dict.fromkeys(tensors)
        )
    for rank in (1, 2):
        _send_pieces(line, layout, source, rank, 0, CPU, line.overtaken)  # type: ignore[arg-type]
    landing = ReceiveBuffers(layout, newcomer, CPU)
    _receive_pieces(line, layout, landing, (), CPU, line.overtaken)  # type: ignore[arg-type]
    assert all(torch.equal(newcomer[path], source[path]) for path in source)
    assert not landing._whole
    assert not landing._between


@pytest.mark.usefixtures("small_rounds")
def test_a_source_that_is_no_dense_block_is_laid_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(2**19, sources=(1,))
    whole = torch.randint(256, (2**20,), dtype=torch.uint8)
    given = SendBuffers({"t/param/0": whole[::2]}, CPU)
    found = torch.cat([given.piece(piece) for piece in layout.pieces])
    assert torch.equal(found, whole[::2])
    laid = given._laid
    given.piece(layout.pieces[0])
    assert given._laid is laid


# -- in a job ------------------------------------------------------------------------------------------------------
@HOSTS_ONLY
@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("readable", [0, 1])
def test_several_rounds_over_sockets_are_bit_equal(
    readable: int, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a source whose memory is read, too."""
    monkeypatch.setattr(restore_layout, "ROUND_BYTES", 2**17)
    answers = iter([True] * readable + [False] * (2 - readable) + [True] * readable)
    monkeypatch.setattr(process_vm.PeerProcess, "is_there", lambda _: next(answers))
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
    assert ended.plans[0].restores[0].sources == (0, 1)


@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("mode", nccl_double.MODES)
def test_over_a_communicator_that_has_batches_and_waits_for_nobody(
    mode: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RACKRUN_NCCL_DOUBLE", mode)
    reference = train(wide())
    ended = train(wide(), kill={2: moments(reference, 2, "wide")[0]})
    assert not ended.differences(reference), ended
