"""XOR parity: every one of the members can be lost; nothing wrong or incomplete is ever handed out."""

from __future__ import annotations

import functools
import operator
import random
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.digest import crc
from rackrun.checkpoint.errors import FormatVersionError, IntegrityError
from rackrun.checkpoint.parity import (
    Descriptor,
    Encoder,
    ParityError,
    Rebuilder,
    XorSet,
    open_parity,
    rebuild,
    write_header,
    xor_into,
)

LENGTHS = [0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 255, 1000]


@dataclass
class World:
    shards: dict[int, bytes]
    descriptor: Descriptor
    parity: dict[int, bytes]

    @property
    def xor_set(self) -> XorSet:
        return self.descriptor.xor_set()

    def without(self, *lost: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return (
            {rank: shard for rank, shard in self.shards.items() if rank not in lost},
            {rank: parity for rank, parity in self.parity.items() if rank not in lost},
        )


def encoded(lengths: list[int], seed: int = 0) -> World:
    members = tuple(10 * i + 3 for i in range(len(lengths)))
    shards = {rank: random.Random(seed + rank).randbytes(n) for rank, n in zip(members, lengths, strict=True)}
    crcs = tuple(crc(memoryview(shard)) for shard in shards.values())
    descriptor = Descriptor(generation=7, members=members, lengths=tuple(lengths), crcs=crcs)
    parity = {}
    for keeper in members:
        encoder = Encoder(descriptor.xor_set(), keeper, bytearray(b"\xff" * descriptor.xor_set().row_bytes))
        for rank, shard in shards.items():
            encoder.add(rank, 0, shard)
        parity[keeper] = bytes(encoder.parity())
    return World(shards, descriptor, parity)


worlds = st.builds(
    encoded,
    st.lists(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 700)), min_size=2, max_size=7),
    st.integers(0, 1000),
)


# -- the code itself ---------------------------------------------------------------------------------------------------


@given(worlds)
def test_any_one_lost_member_is_rebuilt(world: World) -> None:
    for lost, shard in world.shards.items():
        assert rebuild(world.descriptor, lost, *world.without(lost), bytearray(b"\xff" * len(shard))) == shard


@pytest.mark.parametrize("lengths", [[0, 0], [0, 1], [1, 1], [1, 0, 0], [0, 0, 0, 0], [1] * 8, [5000, 0, 1, 64]])
def test_shards_of_no_and_of_one_byte_are_rebuilt(lengths: list[int]) -> None:
    world = encoded(lengths)
    for lost, shard in world.shards.items():
        assert rebuild(world.descriptor, lost, *world.without(lost)) == shard


@given(worlds)
def test_the_parity_is_the_xor_of_the_padded_stripes_of_its_row(world: World) -> None:
    """Said once more, and slowly."""
    xor_set, members = world.xor_set, world.xor_set.members
    width = xor_set.row_bytes
    padded = {rank: shard.ljust(width * (len(members) - 1), b"\0") for rank, shard in world.shards.items()}
    for row, keeper in enumerate(members):
        stripes = []
        for i, rank in enumerate(members):
            cut = [padded[rank][k : k + width] for k in range(0, len(padded[rank]), width)] if width else []
            cut.insert(i, bytes(width))
            stripes.append(cut[row] if width else b"")
        assert list(world.parity[keeper]) == [
            functools.reduce(operator.xor, column) for column in zip(*stripes, strict=True)
        ]


@given(st.lists(st.integers(0, 10**12), min_size=2, max_size=40))
def test_each_member_keeps_one_nth_less_one_of_the_longest_shard(lengths: list[int]) -> None:
    xor_set = XorSet(tuple(range(len(lengths))), tuple(lengths))
    assert 0 <= xor_set.row_bytes * (len(lengths) - 1) - max(lengths) < 64 * (len(lengths) - 1)
    for owner in xor_set.members:
        spans = sorted(xor_set.stripe(owner, keeper) for keeper in xor_set.members if keeper != owner)
        assert sum(stop - start for start, stop in spans) == lengths[owner], "each byte goes to one keeper"
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_first_member_keeps_row_0_and_so_on_round() -> None:
    xor_set = XorSet((0, 1, 2, 3), (192, 192, 192, 192))
    assert [xor_set.stripe(0, keeper) for keeper in range(4)] == [(0, 0), (0, 64), (64, 128), (128, 192)]
    assert [xor_set.stripe(2, keeper) for keeper in range(4)] == [(0, 64), (64, 128), (0, 0), (128, 192)]


@given(st.integers(0, 300), st.integers(0, 9), st.integers(0, 9))
def test_xor_does_not_mind_where_bytes_begin(length: int, at: int, other: int) -> None:
    a = np.frombuffer(random.Random(1).randbytes(400), np.uint8).copy()
    b = np.frombuffer(random.Random(2).randbytes(400), np.uint8)
    expected = a.copy()
    expected[at : at + length] = [x ^ y for x, y in zip(a[at : at + length], b[other : other + length], strict=True)]
    xor_into(a[at : at + length], b[other : other + length])
    assert (a == expected).all()


def test_xor_of_more_than_a_block_is_whole() -> None:
    a = np.frombuffer(random.Random(1).randbytes(3 * 2**20 + 5), np.uint8)
    b = np.frombuffer(random.Random(2).randbytes(3 * 2**20 + 5), np.uint8)
    target = a.copy()
    xor_into(target, b)
    assert (target == a ^ b).all()


# -- in pieces, as they arrive -----------------------------------------------------------------------------------------


def pieces(shard: bytes, sizes: random.Random) -> list[tuple[int, bytes]]:
    cuts = sorted({0, len(shard), *(sizes.randint(0, len(shard)) for _ in range(5))})
    return [(start, shard[start:stop]) for start, stop in pairwise(cuts)]


@given(worlds, st.randoms(use_true_random=False))
def test_pieces_may_arrive_in_any_order_and_size(world: World, shuffler: random.Random) -> None:
    arriving = [(rank, *piece) for rank, shard in world.shards.items() for piece in pieces(shard, shuffler)]
    shuffler.shuffle(arriving)
    for keeper in world.xor_set.members:
        encoder = Encoder(world.xor_set, keeper)
        for rank, offset, data in arriving:
            encoder.add(rank, offset, data, crc(memoryview(data)))
        assert encoder.parity() == world.parity[keeper]


@given(worlds, st.randoms(use_true_random=False), st.data())
def test_a_rebuild_and_the_lost_members_parity_come_from_one_stream(
    world: World, shuffler: random.Random, data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(world.xor_set.members))
    shards, parity = world.without(lost)
    arriving = [
        (rank, kind, *piece)
        for kind, of in (("data", shards), ("parity", parity))
        for rank, content in of.items()
        for piece in pieces(content, shuffler)
    ]
    shuffler.shuffle(arriving)
    rebuilder, encoder = Rebuilder(world.descriptor, lost), Encoder(world.xor_set, lost)
    for rank, kind, offset, content in arriving:
        rebuilder.add(rank, offset, content, kind)
        if kind == "data":
            encoder.add(rank, offset, content)
    assert rebuilder.shard() == world.shards[lost]
    assert encoder.parity() == world.parity[lost]


@given(worlds, st.data())
def test_what_is_missing_is_all_that_has_to_be_sent(world: World, data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(world.xor_set.members))
    rebuilder, encoder = Rebuilder(world.descriptor, lost), Encoder(world.xor_set, lost)
    for (rank, kind), spans in rebuilder.missing().items():
        for start, stop in spans:
            content = world.shards[rank] if kind == "data" else world.parity[rank]
            rebuilder.add(rank, start, content[start:stop], kind)
    for rank, spans in encoder.missing().items():
        for start, stop in spans:
            encoder.add(rank, start, world.shards[rank][start:stop])
    assert rebuilder.shard() == world.shards[lost]
    assert encoder.parity() == world.parity[lost]


@given(worlds, st.data())
def test_a_missing_byte_is_named_and_no_parity_is_given(world: World, data: st.DataObject) -> None:
    keeper = data.draw(st.sampled_from(world.xor_set.members))
    encoder = Encoder(world.xor_set, keeper)
    due = [(rank, *span) for rank, spans in encoder.missing().items() for span in spans]
    if not due:
        assert not any(encoder.parity())
        return
    left_out, start, stop = data.draw(st.sampled_from(due))
    hole = data.draw(st.integers(start, stop - 1))
    for rank, shard in world.shards.items():
        if rank != left_out:
            encoder.add(rank, 0, shard)
    shard = world.shards[left_out]
    encoder.add(left_out, 0, shard[:hole])
    encoder.add(left_out, hole + 1, shard[hole + 1 :])
    assert encoder.missing() == {left_out: [(hole, hole + 1)]}
    with pytest.raises(
        ParityError, match=rf"1 bytes of 1 sources never came, .* {hole} to {hole + 1} of rank {left_out}"
    ):
        encoder.parity()
    encoder.add(left_out, hole, shard[hole : hole + 1])
    assert encoder.parity() == world.parity[keeper]


@given(worlds, st.data())
def test_a_byte_that_comes_twice_is_refused_and_changes_nothing(world: World, data: st.DataObject) -> None:
    keeper = data.draw(st.sampled_from(world.xor_set.members))
    encoder = Encoder(world.xor_set, keeper)
    due = [(rank, *span) for rank, spans in encoder.missing().items() for span in spans]
    for rank, shard in world.shards.items():
        encoder.add(rank, 0, shard)
    for rank, start, stop in due:
        again = data.draw(st.integers(start, stop - 1))
        with pytest.raises(ParityError, match="came before"):
            encoder.add(rank, again, world.shards[rank][again:])
    assert encoder.parity() == world.parity[keeper]


def test_bytes_beyond_a_shard_or_of_strangers_are_refused() -> None:
    world = encoded([100, 200, 300])
    encoder, rebuilder = Encoder(world.xor_set, 3), Rebuilder(world.descriptor, 3)
    with pytest.raises(ParityError, match="bytes 150 to 201 of rank 13's data, which has 200"):
        encoder.add(13, 150, bytes(51))
    with pytest.raises(ParityError, match="bytes -1 to 0"):
        encoder.add(13, -1, b"x")
    with pytest.raises(ParityError, match="rank 4 is not in the set"):
        encoder.add(4, 0, b"x")
    with pytest.raises(ParityError, match="rank 3 is the lost one"):
        rebuilder.add(3, 0, b"x")
    with pytest.raises(ParityError, match="not in the set"):
        Encoder(world.xor_set, 4)


def test_a_piece_that_was_damaged_on_its_way_is_refused_and_may_be_sent_again() -> None:
    world = encoded([1000, 1000, 1000])
    encoder = Encoder(world.xor_set, 3)
    encoder.add(13, 0, world.shards[13])
    good = world.shards[23]
    bad = bytes([good[0] ^ 1]) + good[1:]
    with pytest.raises(IntegrityError, match="rank 23's data have CRC32C"):
        encoder.add(23, 0, bad, crc(memoryview(good)))
    encoder.add(23, 0, good, crc(memoryview(good)))
    assert encoder.parity() == world.parity[3]


def test_parity_and_shards_are_written_in_place_over_what_was_there() -> None:
    world = encoded([300, 200, 100])
    payload = memoryview(bytearray(b"\xff" * world.xor_set.payload_bytes))
    room = write_header(payload, world.descriptor)
    encoder = Encoder(world.xor_set, 13, room)
    for rank, shard in world.shards.items():
        encoder.add(rank, 0, np.frombuffer(shard, np.uint8))
    encoder.parity()
    assert open_parity(payload) == (world.descriptor, world.parity[13])
    shard = bytearray(b"\xff" * 300)
    rebuild(world.descriptor, 3, *world.without(3), into=shard)
    assert shard == world.shards[3]
    with pytest.raises(ParityError, match="room for 301 bytes where 300 are to be written"):
        Rebuilder(world.descriptor, 3, bytearray(301))


# -- nothing wrong is handed out ---------------------------------------------------------------------------------------


def test_every_single_bit_flip_in_what_a_rebuild_uses_is_detected() -> None:
    world = encoded([150, 90, 33])
    for lost in world.shards:
        shards, parity = world.without(lost)
        used = Rebuilder(world.descriptor, lost).missing()
        for (rank, kind), spans in used.items():
            source = shards if kind == "data" else parity
            for bit in (bit for start, stop in spans for bit in range(8 * start, 8 * stop)):
                flipped = bytearray(source[rank])
                flipped[bit // 8] ^= 1 << bit % 8
                damaged = {**source, rank: bytes(flipped)}
                with pytest.raises(IntegrityError, match=f"the rebuilt shard of rank {lost}"):
                    rebuild(world.descriptor, lost, *((damaged, parity) if kind == "data" else (shards, damaged)))


def test_two_lost_members_are_refused() -> None:
    world = encoded([100] * 8)
    with pytest.raises(ParityError, match=r"rank 3 cannot be rebuilt: \[13\] of its set are gone as well.*Remedy"):
        rebuild(world.descriptor, 3, *world.without(3, 13))


def test_an_unfinished_rebuild_says_what_is_missing() -> None:
    world = encoded([100, 100, 100])
    rebuilder = Rebuilder(world.descriptor, 3)
    for rank in (13, 23):
        rebuilder.add(rank, 0, world.shards[rank])
    rebuilder.add(13, 0, world.parity[13], "parity")
    with pytest.raises(ParityError, match="rank 23's parity"):
        rebuilder.shard()


def test_every_single_bit_flip_in_the_header_is_detected() -> None:
    world = encoded([100, 0, 7])
    payload = bytearray(world.xor_set.payload_bytes)
    write_header(memoryview(payload), world.descriptor)
    for bit in range(8 * (8 + len(world.descriptor.encode()))):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            open_parity(memoryview(payload))
        payload[bit // 8] ^= 1 << bit % 8
    assert open_parity(memoryview(payload))[0] == world.descriptor


@pytest.mark.parametrize("kept", [0, 7, 8, 20, 4095, -1])
def test_cut_parity_is_refused(kept: int) -> None:
    world = encoded([100, 0, 7])
    payload = bytearray(world.xor_set.payload_bytes)
    write_header(memoryview(payload), world.descriptor)
    with pytest.raises(IntegrityError):
        open_parity(memoryview(payload)[:kept])


@given(st.binary(max_size=200))
def test_a_descriptor_that_is_none_is_refused(junk: bytes) -> None:
    with pytest.raises(IntegrityError):
        Descriptor.decode(junk)


@pytest.mark.parametrize(
    "change",
    [
        {"members": [1]},
        {"members": [1, 1]},
        {"lengths": [1]},
        {"lengths": [1, -1]},
        {"lengths": [1, 2**46 + 1]},
        {"lengths": [1, 10**30]},
        {"lengths": [1, 1.5]},
        {"crcs": [1]},
        {"crcs": None},
        {"members": "ab"},
    ],
)
def test_a_descriptor_that_lies_is_refused_before_its_lengths_are_used(change: dict[str, object]) -> None:
    good = {"generation": 1, "members": [1, 2], "lengths": [3, 4], "crcs": [5, 6], "format": 1}
    assert Descriptor.decode(msgspec.json.encode(good)) == Descriptor(1, (1, 2), (3, 4), (5, 6))
    with pytest.raises(IntegrityError):
        Descriptor.decode(msgspec.json.encode(good | change))


def test_another_format_is_told_from_damage_and_unknown_fields_are_ignored() -> None:
    good = {"generation": 1, "members": [1, 2], "lengths": [3, 4], "crcs": [5, 6], "format": 1}
    assert Descriptor.decode(msgspec.json.encode(good | {"colour": "red"})).members == (1, 2)
    with pytest.raises(FormatVersionError, match="format 2, this release reads 1"):
        Descriptor.decode(msgspec.json.encode({"format": 2, "members": {"new": "ways"}}))


@given(st.integers(2, 300))
def test_the_header_has_room_for_the_largest_descriptor(members: int) -> None:
    ranks = tuple(range(2**63 - members, 2**63))
    largest = Descriptor(2**63, ranks, (2**46,) * members, (2**32 - 1,) * members)
    payload = memoryview(bytearray(largest.xor_set().header_bytes))
    write_header(payload, largest)
    assert Descriptor.decode(largest.encode()) == largest
    assert 8 + len(largest.encode()) <= len(payload)


def test_equal_descriptors_are_equal_bytes() -> None:
    assert Descriptor(1, (1, 2), (3, 4), (5, 6)).encode() == (
        b'{"generation":1,"members":[1,2],"lengths":[3,4],"crcs":[5,6],"format":1}'
    )
