"""Parity: as many members as were promised can be lost; nothing wrong or incomplete is ever handed out."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import operator
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.checkpoint.base.digest import crc
from rackrun.checkpoint.base.errors import FormatVersionError, IntegrityError
from rackrun.checkpoint.redundancy import isal
from rackrun.checkpoint.redundancy.erasure_code import Row, mix_into, rebuild, xor_into
from rackrun.checkpoint.redundancy.galois import coefficient, multiply, solve
from rackrun.checkpoint.redundancy.stripe_set import (
    ParityError,
    Part,
    RowHeader,
    StripeSet,
    decode_header,
    encode_header,
)

needs_codec = pytest.mark.skipif(importlib.util.find_spec("pyeclib") is None, reason="needs rackrun[rs]")
LENGTHS = [0, 1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 255, 1000]


@dataclass
class World:
    stripe_set: StripeSet
    shards: dict[int, bytes]
    rows: dict[Part, RowHeader]
    parity: dict[Part, bytes]

    def stripe(self, owner: int, keeper: int, part: int = 0) -> bytes:
        start, stop = self.stripe_set.stripe(owner, Part(keeper, part), len(self.shards[owner]))
        return self.shards[owner][start:stop]

    def rebuilt(
        self, lost: int, *also: int, pieces: int = 97, threads: int = 1, **damaged: Mapping[Any, bytes]
    ) -> bytes:
        """``also``: lost as well. ``damaged``: shards, or parity, to be read instead."""
        shards, parity = damaged.get("shards", self.shards), damaged.get("parity", self.parity)
        gone = (lost, *also)
        into = bytearray()

        def header(part: Part) -> RowHeader:
            assert part.keeper not in gone
            return self.rows[part]

        def room(size: int) -> bytearray:
            into.extend(b"\xff" * size)
            return into

        def read(where: Part | int, start: int, stop: int) -> Iterator[bytes]:
            assert (where.keeper if isinstance(where, Part) else where) not in gone
            source = parity[where] if isinstance(where, Part) else shards[where]
            for at in range(start, stop, pieces):
                yield source[at : min(at + pieces, stop)]

        rebuild(self.stripe_set, lost, gone, header, room, read, threads)
        return bytes(into)


def encoded(lengths: list[int], seed: int = 0, lost_at_most: int = 1) -> World:
    members = tuple(10 * i + 3 for i in range(len(lengths)))
    shards = {rank: random.Random(seed + rank).randbytes(n) for rank, n in zip(members, lengths, strict=True)}
    world = World(StripeSet(members, lost_at_most), shards, {}, {})
    for part in (part for keeper in members for part in world.stripe_set.parts(keeper)):
        row = Row(7, world.stripe_set, part)
        for owner in row.owners:
            give(row, owner, len(shards[owner]), world.stripe(owner, *part))
        world.rows[part], world.parity[part] = row.header(), row.parity().tobytes()
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
    members = world.stripe_set.members
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
        assert list(world.parity[Part(keeper)]) == [
            functools.reduce(operator.xor, column) for column in zip(*padded, strict=True)
        ]


@given(st.integers(0, 10**12), st.integers(2, 40))
def test_each_byte_of_a_shard_goes_to_one_keeper_whatever_the_others_lengths(length: int, members: int) -> None:
    stripe_set = StripeSet(tuple(range(members)))
    assert 0 <= stripe_set.widest(length) * (members - 1) - length < 64 * (members - 1)
    for owner in stripe_set.members:
        spans = sorted(
            stripe_set.stripe(owner, Part(keeper), length) for keeper in stripe_set.members if keeper != owner
        )
        assert sum(stop - start for start, stop in spans) == length
        assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_the_first_member_keeps_row_0_and_so_on_round() -> None:
    stripe_set = StripeSet((0, 1, 2, 3))
    assert [stripe_set.stripe(0, Part(keeper), 192) for keeper in range(4)] == [(0, 0), (0, 64), (64, 128), (128, 192)]
    assert [stripe_set.stripe(2, Part(keeper), 192) for keeper in range(4)] == [(0, 64), (64, 128), (0, 0), (128, 192)]


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
    row = Row(1, StripeSet((0, 1, 2)), Part(2))
    for owner, shard in enumerate(shards):
        give(row, owner, len(shard), _stripe(row, owner, shard))
    expected = functools.reduce(
        np.bitwise_xor, [np.frombuffer(_stripe(row, owner, shard), np.uint8) for owner, shard in enumerate(shards)]
    )
    assert (row.parity() == expected).all()


def _stripe(row: Row, owner: int, shard: bytes) -> bytes:
    start, stop = row.stripe_set.stripe(owner, row.part, len(shard))
    return shard[start:stop]


# -- more than one lost: Reed-Solomon ----------------------------------------------------------------------------------
def all_losses(world: World) -> list[tuple[int, ...]]:
    """The lost one first."""
    members, most = world.stripe_set.members, world.stripe_set.parity
    return [lost for count in range(1, most + 1) for lost in permutations(members, count)]


@needs_codec
@pytest.mark.parametrize(("data", "parity"), [(n, m) for n in range(1, 5) for m in range(1, 4) if n + m < 7])
def test_whichever_members_are_lost_the_others_give_their_shards_back(data: int, parity: int) -> None:
    world = encoded([700 * i + 5 * i for i in range(data + parity)], lost_at_most=parity)
    for lost in all_losses(world):
        assert world.rebuilt(*lost) == world.shards[lost[0]]


@needs_codec
@given(
    st.lists(st.one_of(st.sampled_from(LENGTHS), st.integers(0, 3000)), min_size=3, max_size=9),
    st.integers(1, 4),
    st.integers(1, 500),
    st.data(),
)
def test_shards_of_any_lengths_are_rebuilt(lengths: list[int], parity: int, pieces: int, data: st.DataObject) -> None:
    world = encoded(lengths, lost_at_most=min(parity, len(lengths) - 1))
    lost = data.draw(st.sampled_from(all_losses(world)))
    assert world.rebuilt(*lost, pieces=pieces) == world.shards[lost[0]]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 10**9))
def test_each_byte_goes_to_as_many_keepers_as_may_be_lost(data: int, parity: int, length: int) -> None:
    stripe_set = StripeSet(tuple(range(data + parity)), parity)
    parts = [part for keeper in stripe_set.members for part in stripe_set.parts(keeper)]
    for owner in stripe_set.members:
        found = (stripe_set.stripe(owner, part, length) for part in parts)
        spans = sorted((start, stop) for start, stop in found if start < stop)
        assert all(spans.count(span) == parity for span in spans)
        assert sum(stop - start for start, stop in set(spans)) == length
        assert all(stripe_set.stripe(owner, part, length) == (0, 0) for part in stripe_set.parts(owner))


def test_a_set_that_may_lose_one_is_an_xor_set() -> None:
    """No multiplication is needed, and so no codec."""
    stripe_set = StripeSet((4, 5, 6, 7))
    for lost in stripe_set.members:
        for recipe in stripe_set.recipes(lost, [lost]):
            assert {*recipe.parities.values(), *recipe.stripes.values()} == {1}


@pytest.mark.parametrize("parity", [2, 3, 5, 16])
def test_any_square_part_of_the_code_can_be_inverted(parity: int) -> None:
    rng, most = random.Random(parity), 256 - parity
    for _ in range(30):
        size = rng.randint(1, parity)
        chosen, members = rng.sample(range(parity), size), rng.sample(range(most), size)
        rows = [[coefficient(j, i) for i in members] for j in chosen]
        for wanted in ([int(i == at) for i in range(size)] for at in range(size)):
            weights = solve(rows, wanted)
            for column in range(size):
                products = (multiply(weight, row[column]) for weight, row in zip(weights, rows, strict=True))
                assert functools.reduce(operator.xor, products) == wanted[column]


@needs_codec
@given(st.integers(0, 3000), st.integers(0, 9), st.integers(0, 9), st.integers(0, 255))
def test_bytes_are_multiplied_wherever_they_begin_and_nothing_beside_them_changes(
    length: int, at: int, other: int, factor: int
) -> None:
    before = np.frombuffer(random.Random(1).randbytes(length + 20), np.uint8)
    source = np.frombuffer(random.Random(2).randbytes(length + 20), np.uint8)
    target = before.copy()
    mix_into(target[at : at + length], source[other : other + length], factor)
    products = np.array([multiply(factor, value) for value in range(256)], np.uint8)[source[other : other + length]]
    assert (target[at : at + length] == before[at : at + length] ^ products).all()
    assert (target[:at] == before[:at]).all()
    assert (target[at + length :] == before[at + length :]).all()


@needs_codec
def test_every_single_bit_flip_in_what_a_rebuild_of_two_uses_is_detected() -> None:
    world = encoded([90, 70, 129, 33], lost_at_most=2)
    for lost, also in permutations(world.shards, 2):
        places: list[tuple[str, dict[Any, bytes]]] = [("shards", world.shards), ("parity", world.parity)]
        for kind, of in places:
            for name in of:
                for byte in range(len(of[name])):
                    flipped = bytearray(of[name])
                    flipped[byte] ^= 1 << (byte + lost) % 8
                    with contextlib.suppress(IntegrityError):  # or that byte is not of use for this one
                        damaged: dict[str, Any] = {kind: {**of, name: bytes(flipped)}}
                        assert world.rebuilt(lost, also, **damaged) == world.shards[lost]


@needs_codec
def test_more_than_may_be_lost_are_refused() -> None:
    with pytest.raises(
        ParityError, match=r"rank 3 cannot be rebuilt from \[23\], .*: parity replaces 2 members.*Remedy"
    ):
        encoded([100] * 4, lost_at_most=2).rebuilt(3, 13, 33)


@needs_codec
def test_parities_of_one_row_that_have_taken_in_other_stripes_are_not_mixed() -> None:
    world, other = (encoded([100] * 4, seed, lost_at_most=2) for seed in (0, 1))
    for part in world.rows:
        if part.number == 1:
            world.rows[part] = other.rows[part]
    with pytest.raises(ParityError, match="not of one set and one checkpoint"):
        world.rebuilt(3, 13)


@pytest.mark.parametrize(("members", "parity"), [(2, 2), (3, 0), (3, -1), (254, 3)])
def test_a_set_that_cannot_be_is_refused(members: int, parity: int) -> None:
    with pytest.raises(ParityError, match="cannot form a stripe set"):
        StripeSet(tuple(range(members)), parity)


def test_without_the_codec_what_needs_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> None:
        return None

    monkeypatch.setattr(isal, "_bundled", nowhere)
    monkeypatch.setattr("ctypes.util.find_library", nowhere)
    isal._library.cache_clear()
    try:
        with pytest.raises(isal.CodecMissing, match=r"pip install rackrun\[rs\]"):
            isal.check()
    finally:
        isal._library.cache_clear()


@needs_codec
def test_where_the_codec_came_along_no_process_is_started_to_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        raise AssertionError(f"looked for {name}")

    monkeypatch.setattr("ctypes.util.find_library", found)
    isal._library.cache_clear()
    isal.check()


# -- in pieces, as they arrive -----------------------------------------------------------------------------------------


@given(worlds, st.integers(0, 1000))
def test_owners_may_come_in_any_order_and_at_the_same_time(world: World, seed: int) -> None:
    shuffler = random.Random(seed)
    for keeper in world.stripe_set.members:
        row = Row(7, world.stripe_set, Part(keeper))
        left = {owner: world.stripe(owner, keeper) for owner in world.stripe_set.members if owner != keeper}
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
        assert (row.header(), row.parity().tobytes()) == (world.rows[Part(keeper)], world.parity[Part(keeper)])


def test_a_row_without_every_stripe_has_no_header() -> None:
    world = encoded([100, 200, 300])
    row = Row(7, world.stripe_set, Part(3))
    give(row, 13, 200, world.stripe(13, 3))
    assert row.missing == [23]
    with pytest.raises(ParityError, match=r"the stripes of ranks \[23\] never came"):
        row.header()


def test_a_stripe_that_comes_twice_or_of_a_stranger_or_of_the_keeper_is_refused() -> None:
    world = encoded([100, 200, 300])
    row = Row(7, world.stripe_set, Part(3))
    give(row, 13, 200, world.stripe(13, 3))
    for owner in (13, 3):
        with pytest.raises(ParityError, match="has no place in the row of parity of rank 3, or sent it twice"):
            row.begin(owner, 200)
    with pytest.raises(ParityError, match="rank 4 is not in the set"):
        row.begin(4, 200)
    give(row, 23, 300, world.stripe(23, 3))
    assert row.header() == world.rows[Part(3)]


@pytest.mark.parametrize("wrong", ["damaged", "short", "long", "broken off"])
def test_a_stripe_that_is_not_what_its_owner_sent_spoils_the_row_for_good(wrong: str) -> None:
    world = encoded([1000, 1000, 1000])
    row = Row(7, world.stripe_set, Part(3))
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
    with pytest.raises(ParityError, match="for checkpoint 7 cannot be used"):
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
    row = Row(7, world.stripe_set, Part(3), room)
    for owner in (13, 23):
        give(row, owner, len(world.shards[owner]), world.stripe(owner, 3))
    assert asked == [128, 512]
    assert bytes(memory) == world.parity[Part(3)]


# -- nothing wrong is handed out ---------------------------------------------------------------------------------------


def test_every_single_bit_flip_in_what_a_rebuild_uses_is_detected() -> None:
    world = encoded([150, 90, 33])
    for lost in world.shards:
        places: list[tuple[str, dict[Any, bytes]]] = [("shards", world.shards), ("parity", world.parity)]
        for kind, of in places:
            for rank in (rank for rank in of if rank != lost):
                for bit in range(8 * len(of[rank])):
                    flipped = bytearray(of[rank])
                    flipped[bit // 8] ^= 1 << bit % 8
                    with contextlib.suppress(IntegrityError):  # or that byte is not of use for this one
                        damaged: dict[str, Any] = {kind: {**of, rank: bytes(flipped)}}
                        assert world.rebuilt(lost, **damaged) == world.shards[lost]


def test_two_lost_members_are_refused() -> None:
    with pytest.raises(ParityError, match=r"rank 3 cannot be rebuilt .*: parity replaces one member.*Remedy"):
        encoded([100] * 8).rebuilt(3, 13)


def test_after_a_read_that_failed_no_further_stripe_is_begun() -> None:
    """Each may take as long as somebody silent is waited for."""
    world = encoded([1000] * 8)
    both, begun = threading.Barrier(2, timeout=100), []

    def read(where: Part | int, start: int, stop: int) -> Iterator[bytes]:
        begun.append(where)
        both.wait()
        raise TimeoutError("silent")

    with pytest.raises(TimeoutError, match="silent"):
        rebuild(world.stripe_set, 3, [3], world.rows.__getitem__, bytearray, read, threads=2)
    assert len(begun) == 2


def test_rows_of_two_checkpoints_are_not_mixed() -> None:
    world, other = encoded([100, 100, 100]), encoded([100, 100, 100])
    world.rows[Part(13)] = msgspec.structs.replace(other.rows[Part(13)], checkpoint=8)
    with pytest.raises(ParityError, match="not of one set and one checkpoint"):
        world.rebuilt(3)


def test_bytes_that_are_missing_at_their_source_are_noticed() -> None:
    world = encoded([100, 100, 100])
    with pytest.raises(ParityError, match="that were asked for"):
        world.rebuilt(3, shards={**world.shards, 13: world.shards[13][:20]})


def test_every_single_bit_flip_in_the_header_is_detected() -> None:
    header = encoded([100, 0, 7]).rows[Part(3)]
    data = bytearray(encode_header(header))
    for bit in range(8 * (8 + len(msgspec.json.encode(header)))):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            decode_header(memoryview(data))
        data[bit // 8] ^= 1 << bit % 8
    assert decode_header(bytes(data)) == header


@pytest.mark.parametrize("kept", [0, 7, 8, 20, 100])
def test_a_cut_header_is_refused(kept: int) -> None:
    with pytest.raises(IntegrityError):
        decode_header(encode_header(encoded([100, 0, 7]).rows[Part(3)])[:kept])


GOOD = {"generation": 1, "keeper": 1, "members": [1, 2], "lengths": [0, 4], "crcs": [0, 6], "format": 3}


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
            decode_header(memoryview(data))


def test_another_format_is_told_from_damage_and_unknown_fields_are_ignored() -> None:
    assert decode_header(crafted(GOOD | {"colour": "red"})).members == (1, 2)
    with pytest.raises(FormatVersionError, match="format 4; this release reads format 3"):
        decode_header(crafted({"format": 4, "members": {"new": "ways"}}))


@given(st.integers(2, 300))
def test_the_header_has_room_for_the_largest(members: int) -> None:
    ranks = tuple(range(2**63 - members, 2**63))
    largest = RowHeader(2**63, 2**63 - 1, ranks, (2**46,) * members, (2**32 - 1,) * members)
    data = encode_header(largest)
    assert len(data) == largest.stripe_set().header_bytes
    assert decode_header(data) == largest


def test_equal_headers_are_equal_bytes() -> None:
    assert msgspec.json.encode(RowHeader(1, 2, (1, 2), (3, 0), (5, 0))) == (
        b'{"generation":1,"keeper":2,"members":[1,2],"lengths":[3,0],"crcs":[5,0],"parity":1,"part":0,"format":3}'
    )
