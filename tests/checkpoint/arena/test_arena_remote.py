"""An image in an arena elsewhere, read in byte ranges: few of them, and nothing unverified."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.arena.arena import Arena
from rackrun.checkpoint.arena.arena_remote import RemoteSlot
from rackrun.checkpoint.base.errors import IntegrityError, NoUsableCheckpoint
from tests.checkpoint.arenas import CHUNK, content, create, save

SIZE = 10 * CHUNK + 10


class Elsewhere:
    """An arena in a memfd, with checkpoint 7 in it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("arena")
        self.arena: Arena = create(self.fd, slots=1, payload_bytes=SIZE)
        save(self.arena, 7, size=SIZE)
        self.asked: list[tuple[int, int]] = []
        self._payload_at = os.fstat(self.fd).st_size - -(-SIZE // 4096) * 4096

    def ask(self, start: int, into: memoryview) -> None:
        if start >= self._payload_at:
            self.asked.append(((start - self._payload_at) // CHUNK, -(-len(into) // CHUNK)))
        assert os.preadv(self.fd, [into], start) == len(into)

    def spoil(self, at: int) -> None:
        """Of the image, or of what comes before it (negative)."""
        place = self._payload_at + at
        os.pwrite(self.fd, bytes([os.pread(self.fd, 1, place)[0] ^ 1]), place)

    def close(self) -> None:
        self.arena.close()
        os.close(self.fd)


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    made = Elsewhere()
    yield made
    made.close()


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=8), st.integers(1, 12))
def test_what_is_read_is_what_was_sealed(ranges: list[list[int]], window: int) -> None:
    elsewhere = Elsewhere()
    try:
        slot = RemoteSlot(elsewhere.ask, 7, window * CHUNK)
        slot.expect((start, stop) for start, stop in ranges)
        for start, stop in ranges:
            assert bytes(slot.read(start, stop)) == content(7, SIZE)[start:stop]
    finally:
        elsewhere.close()


def test_neighbouring_chunks_that_are_wanted_are_asked_for_together_and_once(elsewhere: Elsewhere) -> None:
    slot = RemoteSlot(elsewhere.ask, 7, 3 * CHUNK)
    ranges = [(0, 10), (CHUNK - 4, CHUNK + 4), (3 * CHUNK - 1, 3 * CHUNK), (8 * CHUNK, 8 * CHUNK + 1)]
    slot.expect(ranges)
    for start, stop in ranges:
        slot.read(start, stop)
    assert elsewhere.asked == [(0, 3), (8, 1)], "chunks 3 to 7 are not read"


@pytest.mark.parametrize("at", [0, CHUNK, SIZE - 1])
def test_a_byte_that_is_not_what_was_sealed_is_never_given(at: int, elsewhere: Elsewhere) -> None:
    slot = RemoteSlot(elsewhere.ask, 7, CHUNK)
    elsewhere.spoil(at)
    with pytest.raises(IntegrityError, match=f"chunk {at // CHUNK} "):
        slot.read(at, at + 1)
    beside = 5 * CHUNK
    assert bytes(slot.read(beside, beside + 3)) == content(7, SIZE)[beside : beside + 3]


def test_a_damaged_table_is_seen_before_anything_is_read(elsewhere: Elsewhere) -> None:
    elsewhere.spoil(-4096)
    with pytest.raises(IntegrityError, match="chunk table"):
        RemoteSlot(elsewhere.ask, 7, CHUNK)


def test_one_damaged_record_is_made_good_by_its_copy(elsewhere: Elsewhere) -> None:
    elsewhere.spoil(-2 * 4096 + 20)
    assert bytes(RemoteSlot(elsewhere.ask, 7, CHUNK).read(0, 5)) == content(7, SIZE)[:5]
    elsewhere.spoil(-3 * 4096 + 20)
    with pytest.raises(IntegrityError, match="records"):
        RemoteSlot(elsewhere.ask, 7, CHUNK)


def test_another_checkpoint_is_not_taken_for_it(elsewhere: Elsewhere) -> None:
    with pytest.raises(NoUsableCheckpoint, match="holds checkpoint 7"):
        RemoteSlot(elsewhere.ask, 8, CHUNK)
    with pytest.raises(IntegrityError, match="of an image of"):
        RemoteSlot(elsewhere.ask, 7, CHUNK).read(0, SIZE + 1)
