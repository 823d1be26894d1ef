"""Checksums: what a CRC32C is, how a payload is cut into chunks, and which damage is seen."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.base import digest
from rackrun.checkpoint.base.digest import CHUNK_BYTES, ChunkDigests, chunk_crcs, content_digest, crc
from tests.checkpoint.arenas import digesting


def test_crc_is_the_published_crc32c() -> None:
    assert crc(memoryview(b"123456789")) == 0xE3069283
    assert crc(memoryview(bytes(32))) == 0x8A9136AA  # RFC 3720, B.4
    assert crc(np.frombuffer(b"123456789", dtype=np.uint8)) == 0xE3069283


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_crc_can_be_continued(data: bytes, cut: int) -> None:
    assert crc(memoryview(data[cut:]), crc(memoryview(data[:cut]))) == crc(memoryview(data))


@given(data=st.binary(max_size=300), chunk_bytes=st.integers(1, 64), threads=st.integers(1, 4))
def test_there_is_one_crc_a_chunk_whatever_the_threads(data: bytes, chunk_bytes: int, threads: int) -> None:
    expected = [crc(memoryview(data[at : at + chunk_bytes])) for at in range(0, len(data), chunk_bytes)]
    crcs = chunk_crcs(memoryview(data), chunk_bytes, threads)
    assert crcs.dtype == np.uint32
    assert crcs.tolist() == expected


@given(chunks=st.lists(st.binary(max_size=50), max_size=20), threads=st.integers(1, 4))
def test_chunks_that_come_one_after_another_get_the_same_crcs(chunks: list[bytes], threads: int) -> None:
    digests = ChunkDigests(threads)
    for index, chunk in enumerate(chunks):
        digests.add(index, memoryview(chunk))
        assert len(digesting()) <= threads
    assert digests.finish() == {index: crc(memoryview(chunk)) for index, chunk in enumerate(chunks)}
    assert not digesting()


def test_no_chunk_is_begun_once_its_digests_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def slow(chunk: memoryview) -> int:
        begun.set()
        assert may_end.wait(60.0)
        return len(chunk)

    monkeypatch.setattr(digest, "crc", slow)
    digests = ChunkDigests(1)
    for index in range(3):
        digests.add(index, memoryview(bytes(index + 1)))
    assert begun.wait(60.0)
    end_threads = digests._end_threads

    def let_end() -> None:
        may_end.set()
        end_threads()

    monkeypatch.setattr(digests, "_end_threads", let_end)
    digests.stop()
    assert digests._found == {0: 1}
    assert not digesting()


def test_a_chunk_that_cannot_be_digested_is_an_error_and_ends_no_thread_early() -> None:
    digests, released = ChunkDigests(1), memoryview(b"1")
    released.release()
    digests.add(0, released)
    digests.add(1, memoryview(b"123456789"))
    with pytest.raises(ValueError, match="released"):
        digests.finish()
    assert digests._found == {1: 0xE3069283}
    assert not digesting()
    digests.stop()


def test_an_empty_payload_has_no_chunks() -> None:
    assert len(chunk_crcs(memoryview(b""))) == 0


def test_a_chunk_is_8_mib_unless_said_otherwise() -> None:
    assert len(chunk_crcs(memoryview(bytearray(CHUNK_BYTES + 1)), threads=2)) == 2


@pytest.mark.parametrize("size", [1, 7, 64, 257])
def test_every_single_bit_flip_changes_the_crc(size: int) -> None:
    data = bytearray(random.Random(size).randbytes(size))
    whole = crc(memoryview(data))
    for bit in range(size * 8):
        data[bit // 8] ^= 1 << bit % 8
        assert crc(memoryview(data)) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_content_digest_is_blake2b_256() -> None:
    assert content_digest(b"abc") == "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319"
