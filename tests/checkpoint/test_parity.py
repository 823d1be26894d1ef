"""XOR parity: every one of the members can be lost; nothing wrong or incomplete is ever handed out."""

from __future__ import annotations

import contextlib
import functools
import operator
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.digest import crc
from rackrun.checkpoint.errors import FormatVersionError, IntegrityError
from rackrun.checkpoint.parity import Row, rebuild, xor_into
from rackrun.checkpoint.xor_set import ParityError, RowHeader, XorSet, decode_header, encode_header

LENGTHS = [0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 255, 1000]


@dataclass
class World:
    shards: dict[int, bytes]
    rows: dict[int, RowHeader]
    parity: dict[int, bytes]

    @property
    def xor_set(self) -> XorSet:
        return XorSet(tuple(self.shards))

    def stripe(self, owner: int, keeper: int) -> bytes:
        start, stop = self.xor_set.stripe(owner, keeper, len(self.shards[owner]))
        return self.shards[owner][start:stop]

    def rebuilt(
        self, lost: int, *also: int, pieces: int = 97, threads: int = 1, **damaged: Mapping[int, bytes]
    ) -> bytes:
        """``also``: lost as well. ``damaged``: shards, or parity, to be read instead."""
        shards, parity = damaged.get("shards", self.shards), damaged.get("parity", self.parity)
        into = bytearray()

        def room(size: int) -> bytearray:
            into.extend(b"\xff" * size)
            return into

        def read(keeper: int, member: int | None, start: int, stop: int) -> Iterator[bytes]:
            assert lost not in (keeper, member)
            source = parity[keeper] if member is None else shards[member]
            for at in range(start, stop, pieces):
                yield source[at : min(at + pieces, stop)]

        rows = {keeper: row for keeper, row in self.rows.items() if keeper not in (lost, *also)}
        rebuild(rows, lost, room, read, threads)
        return bytes(into)


def encoded(lengths: list[int], seed: int = 0) -> World:
    members = tuple(10 * i + 3 for i in range(len(lengths)))
    shards = {rank: random.Random(seed + rank).randbytes(n) for rank, n in zip(members, lengths, strict=True)}
    world = World(shards, {}, {})
    for keeper in members:
        row = Row(7, world.xor_set, keeper)
        for owner in members:
            if owner != keeper:
                give(row, owner, len(shards[owner]), world.stripe(owner, keeper))
        world.rows[keeper], world.parity[keeper] = row.header(), row.parity().tobytes()
    return world


def give(row: Row, owner: int, length: int, stripe: bytes) -> None:
    incoming = row.begin(owner, length)
    incoming.add(stripe)
    incoming.end(crc(memoryview(stripe)))


worlds = st.builds(
    encoded,
    st.lists(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 700)), min_size=2, max_size=7),
    st.integers(0, 1000),
)


# -- the code itself ---------------------------------------------------------------------------------------------------


@given(worlds, st.integers(1, 2000))
def test_any_one_lost_member_is_rebuilt(world: World, pieces: int) -> None:
    for lost, shard in world.shards.items():
        assert world.rebuilt(lost, pieces=pieces) == shard


@pytest.mark.parametrize("lengths", [[0, 0], [0, 1], [1, 1], [1, 0, 0], [0, 0, 0, 0], [1] * 8, [5000, 0, 1, 64]])
def test_shards_of_no_and_of_one_byte_are_rebuilt(lengths: list[int]) -> None:
    world = encoded(lengths)
    for lost, shard in world.shards.items():
        assert world.rebuilt(lost, threads=3) == shard


@given(worlds)
def test_a_row_is_the_xor_of_one_padded_stripe_of_each_other_member(world: World) -> None:
    """Said once more, and slowly."""
    members = world.xor_set.members
    for row, keeper in enumerate(members):
        stripes = []
        for i, rank in enumerate(members):
            shard = world.shards[rank]
            width = -(-len(shard) // ((len(members) - 1) * 64)) * 64
            cut = [shard[k * width : (k + 1) * width] for k in range(len(members) - 1)]
            cut.insert(i, b"")
            stripes.append(cut[row])
        widest = max(map(len, stripes))
        padded = [stripe.ljust(widest, b"\0") for stripe in stripes]
        assert list(world.parity[keeper]) == [
            functools.reduce(operator.xor, column) for column in zip(*padded, strict=True)
        ]


@given(st.integers(0, 10**12), st.integers(2, 40))
def test_each_byte_of_a_shard_goes_to_one_keeper_whatever_the_others_lengths(length: int, members: int) -> None:
    xor_set = XorSet(tuple(range(members)))
    assert 0 <= xor_set.widest(length) * (members - 1) - length < 64 * (members - 1)
    for owner in xor_set.members:
        spans = sorted(xor_set.stripe(owner, keeper, length) for keeper in xor_set.members if keeper != owner)
        assert sum(stop - start for start, stop in spans) == length
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_first_member_keeps_row_0_and_so_on_round() -> None:
    xor_set = XorSet((0, 1, 2, 3))
    assert [xor_set.stripe(0, keeper, 192) for keeper in range(4)] == [(0, 0), (0, 64), (64, 128), (128, 192)]
    assert [xor_set.stripe(2, keeper, 192) for keeper in range(4)] == [(0, 64), (64, 128), (0, 0), (128, 192)]


@given(st.integers(0, 300), st.integers(0, 9), st.integers(0, 9))
def test_xor_does_not_mind_where_bytes_begin(length: int, at: int, other: int) -> None:
    a = np.frombuffer(random.Random(1).randbytes(400), np.uint8).copy()
    b = np.frombuffer(random.Random(2).randbytes(400), np.uint8)
    expected = a.copy()
    expected[at : at + length] = [x ^ y for x, y in zip(a[at : at + length], b[other : other + length], strict=True)]
    xor_into(a[at : at + length], b[other : other + length])
    assert (a == expected).all()


def test_a_stripe_of_more_than_a_block_is_whole() -> None:
    shards = [random.Random(i).randbytes(3 * 2**20 + 5) for i in range(2)]
    row = Row(1, XorSet((0, 1, 2)), 2)
    for owner, shard in enumerate(shards):
        give(row, owner, len(shard), _stripe(row, owner, shard))
    expected = functools.reduce(
        np.bitwise_xor, [np.frombuffer(_stripe(row, owner, shard), np.uint8) for owner, shard in enumerate(shards)]
    )
    assert (row.parity() == expected).all()


def _stripe(row: Row, owner: int, shard: bytes) -> bytes:
    start, stop = row.xor_set.stripe(owner, row.keeper, len(shard))
    return shard[start:stop]


# -- in pieces, as they arrive -----------------------------------------------------------------------------------------


@given(worlds, st.integers(0, 1000))
def test_owners_may_come_in_any_order_and_at_the_same_time(world: World, seed: int) -> None:
    shuffler = random.Random(seed)
    for keeper in world.xor_set.members:
        row = Row(7, world.xor_set, keeper)
        left = {owner: world.stripe(owner, keeper) for owner in world.xor_set.members if owner != keeper}
        incoming = {}
        while left:
            owner = shuffler.choice(list(left))
            if owner not in incoming:
                incoming[owner] = row.begin(owner, len(world.shards[owner]))
            elif left[owner] and shuffler.random() < 0.8:
                size = shuffler.randint(1, len(left[owner]))
                incoming[owner].add(left[owner][:size])
                left[owner] = left[owner][size:]
            elif not left[owner]:
                assert owner in row.missing
                incoming[owner].end(crc(memoryview(world.stripe(owner, keeper))))
                del left[owner]
        assert (row.header(), row.parity().tobytes()) == (world.rows[keeper], world.parity[keeper])


def test_a_row_without_every_stripe_has_no_header() -> None:
    world = encoded([100, 200, 300])
    row = Row(7, world.xor_set, 3)
    give(row, 13, 200, world.stripe(13, 3))
    assert row.missing == [23]
    with pytest.raises(ParityError, match=r"the stripes of \[23\] never came"):
        row.header()


def test_a_stripe_that_comes_twice_or_of_a_stranger_or_of_the_keeper_is_refused() -> None:
    world = encoded([100, 200, 300])
    row = Row(7, world.xor_set, 3)
    give(row, 13, 200, world.stripe(13, 3))
    for owner in (13, 3):
        with pytest.raises(ParityError, match="no stripe in rank 3's row, or gave it before"):
            row.begin(owner, 200)
    with pytest.raises(ParityError, match="rank 4 is not in the set"):
        row.begin(4, 200)
    give(row, 23, 300, world.stripe(23, 3))
    assert row.header() == world.rows[3]


@pytest.mark.parametrize("wrong", ["damaged", "short", "long", "broken off"])
def test_a_stripe_that_is_not_what_its_owner_sent_spoils_the_row_for_good(wrong: str) -> None:
    world = encoded([1000, 1000, 1000])
    row = Row(7, world.xor_set, 3)
    stripe = world.stripe(13, 3)
    came = {"damaged": bytes([stripe[0] ^ 1]) + stripe[1:], "short": stripe[:-1], "long": stripe + b"x"}
    incoming = row.begin(13, 1000)

    def arrives() -> None:
        incoming.add(came.get(wrong, stripe))
        if wrong == "broken off":
            incoming.broke_off()
        incoming.end(crc(memoryview(stripe)))

    with pytest.raises((ParityError, IntegrityError)):
        arrives()
    with pytest.raises(ParityError, match="spoiled"):
        give(row, 23, 1000, world.stripe(23, 3))
    with pytest.raises(ParityError, match="row of generation 7"):
        row.header()


def test_a_row_grows_with_the_widest_stripe_in_the_memory_that_it_is_given() -> None:
    asked = []
    memory = bytearray()

    def room(size: int) -> bytearray:
        if size > len(memory):
            asked.append(size)
            memory.extend(bytes(size - len(memory)))
        return memory

    world = encoded([128, 256, 1024])
    row = Row(7, world.xor_set, 3, room)
    for owner in (13, 23):
        give(row, owner, len(world.shards[owner]), world.stripe(owner, 3))
    assert asked == [128, 512]
    assert bytes(memory) == world.parity[3]


# -- nothing wrong is handed out ---------------------------------------------------------------------------------------


def test_every_single_bit_flip_in_what_a_rebuild_uses_is_detected() -> None:
    world = encoded([150, 90, 33])
    for lost in world.shards:
        for kind, of in (("shards", world.shards), ("parity", world.parity)):
            for rank in (rank for rank in of if rank != lost):
                for bit in range(8 * len(of[rank])):
                    flipped = bytearray(of[rank])
                    flipped[bit // 8] ^= 1 << bit % 8
                    with contextlib.suppress(IntegrityError):  # or that byte is not of use for this one
                        assert world.rebuilt(lost, **{kind: {**of, rank: bytes(flipped)}}) == world.shards[lost]


def test_two_lost_members_are_refused() -> None:
    with pytest.raises(ParityError, match=r"rank 3 cannot be rebuilt .*: parity replaces one member.*Remedy"):
        encoded([100] * 8).rebuilt(3, 13)


def test_rows_of_two_generations_are_not_mixed() -> None:
    world, other = encoded([100, 100, 100]), encoded([100, 100, 100])
    world.rows[13] = msgspec.structs.replace(other.rows[13], generation=8)
    with pytest.raises(ParityError, match="not of one set and one generation"):
        world.rebuilt(3)


def test_bytes_that_are_missing_at_their_source_are_noticed() -> None:
    world = encoded([100, 100, 100])
    with pytest.raises(ParityError, match="that were asked for"):
        world.rebuilt(3, shards={**world.shards, 13: world.shards[13][:20]})


def test_every_single_bit_flip_in_the_header_is_detected() -> None:
    header = encoded([100, 0, 7]).rows[3]
    data = bytearray(encode_header(header))
    for bit in range(8 * (8 + len(msgspec.json.encode(header)))):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            decode_header(data)
        data[bit // 8] ^= 1 << bit % 8
    assert decode_header(data) == header


@pytest.mark.parametrize("kept", [0, 7, 8, 20, 100])
def test_a_cut_header_is_refused(kept: int) -> None:
    with pytest.raises(IntegrityError):
        decode_header(encode_header(encoded([100, 0, 7]).rows[3])[:kept])


GOOD = {"generation": 1, "keeper": 1, "members": [1, 2], "lengths": [0, 4], "crcs": [0, 6], "format": 2}


def crafted(fields: Mapping[str, object]) -> bytes:
    encoded = msgspec.json.encode(fields)
    return len(encoded).to_bytes(4, "little") + crc(memoryview(encoded)).to_bytes(4, "little") + encoded


@pytest.mark.parametrize(
    "change",
    [
        {"members": [1]},
        {"members": [1, 1]},
        {"keeper": 3},
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
def test_a_header_that_lies_is_refused_before_its_lengths_are_used(change: dict[str, object]) -> None:
    assert decode_header(crafted(GOOD)) == RowHeader(1, 1, (1, 2), (0, 4), (0, 6))
    with pytest.raises(IntegrityError):
        decode_header(crafted(GOOD | change))


@given(st.binary(max_size=200))
def test_a_header_that_is_none_is_refused(junk: bytes) -> None:
    for data in (junk, len(junk).to_bytes(4, "little") + crc(memoryview(junk)).to_bytes(4, "little") + junk):
        with pytest.raises(IntegrityError):
            decode_header(data)


def test_another_format_is_told_from_damage_and_unknown_fields_are_ignored() -> None:
    assert decode_header(crafted(GOOD | {"colour": "red"})).members == (1, 2)
    with pytest.raises(FormatVersionError, match="format 3, this release reads 2"):
        decode_header(crafted({"format": 3, "members": {"new": "ways"}}))


@given(st.integers(2, 300))
def test_the_header_has_room_for_the_largest(members: int) -> None:
    ranks = tuple(range(2**63 - members, 2**63))
    largest = RowHeader(2**63, 2**63 - 1, ranks, (2**46,) * members, (2**32 - 1,) * members)
    data = encode_header(largest)
    assert len(data) == largest.xor_set().header_bytes
    assert decode_header(data) == largest


def test_equal_headers_are_equal_bytes() -> None:
    assert msgspec.json.encode(RowHeader(1, 2, (1, 2), (3, 0), (5, 0))) == (
        b'{"generation":1,"keeper":2,"members":[1,2],"lengths":[3,0],"crcs":[5,0],"format":2}'
    )
