"""What two ends of a link keep, acknowledge and send again."""

from __future__ import annotations

import random

import pytest

from rackrun.link.channel import frame
from rackrun.link.reliable_messages import BATCH_BYTES, NumberedLink
from rackrun.protocol.commands import StopJob
from rackrun.protocol.wire import encode


def message(number: int) -> StopJob:
    return StopJob(exit_code=number, because="x")


def frames(*numbers: int) -> list[bytes]:
    return [frame(message(number)) for number in numbers]


def bodies(*numbers: int) -> list[bytes]:
    return [encode(message(number)) for number in numbers]


def test_what_is_packed_comes_out_in_order() -> None:
    one, other = NumberedLink(), NumberedLink()
    assert other.unpack(one.pack(frames(1, 2))) == bodies(1, 2)
    assert other.unpack(one.pack(frames(3))) == bodies(3)
    assert (one.sent, other.received) == (3, 3)


def test_what_has_come_before_is_dropped_by_its_number() -> None:
    one, other = NumberedLink(), NumberedLink()
    first, second = one.pack(frames(1, 2)), one.pack(frames(3))
    assert other.unpack(first) == bodies(1, 2)
    assert other.unpack(first) == []
    assert other.unpack(second) == bodies(3)
    (again,) = one.resume(0)
    assert other.unpack(again) == []


def test_a_packet_that_overlaps_brings_only_what_is_new() -> None:
    one, other = NumberedLink(), NumberedLink()
    other.unpack(one.pack(frames(1)))
    one.pack(frames(2, 3))  # lost with its connection
    (again,) = one.resume(0)
    assert other.unpack(again) == bodies(2, 3)


def test_only_what_the_other_end_lacks_is_sent_again() -> None:
    one, other = NumberedLink(), NumberedLink()
    other.unpack(one.pack(frames(1)))
    one.pack(frames(2))
    one.pack(frames(3))
    (again,) = one.resume(other.received)
    assert other.unpack(again) == bodies(2, 3)
    assert one.resume(3) == []


def test_what_is_acknowledged_is_kept_no_more() -> None:
    one, other = NumberedLink(kept_max=2), NumberedLink()
    packet = one.pack(frames(1, 2))
    assert not one.has_room
    other.unpack(packet)
    assert other.owes
    one.unpack(other.pack(frames(9)))  # the acknowledgement goes with any message
    assert one.has_room
    assert not other.owes
    assert not one.can_resume(1)
    with pytest.raises(ValueError, match="not kept"):
        one.resume(1)


def test_an_acknowledgement_needs_no_message() -> None:
    one, other = NumberedLink(), NumberedLink()
    for number in range(1, 65):
        assert not other.owes_much
        other.unpack(one.pack(frames(number)))
    assert other.owes_much
    assert one.unpack(other.pack()) == []
    assert not other.owes
    assert one.resume(64) == []


def test_an_acknowledgement_may_overtake_what_is_sent_again() -> None:
    one, other = NumberedLink(), NumberedLink()
    one.pack(frames(1, 2))  # lost with its connection
    one.unpack(other.pack(frames(8)))
    (again,) = one.resume(other.received)
    one.unpack(other.pack(frames(9)))
    assert other.unpack(one.pack()) == []
    assert other.resume(2) == [], "it acknowledges all the same"
    assert other.unpack(again) == bodies(1, 2)


def test_many_bytes_are_acknowledged_sooner() -> None:
    one, other = NumberedLink(), NumberedLink()
    other.unpack(one.pack([frame(StopJob(exit_code=1, because="x" * (1 << 20)))]))
    assert other.owes_much


@pytest.mark.parametrize(
    ("count", "size", "waiting", "over"), [(3, 10**6, 1, False), (2, 10**6, 1, True), (3, 10, 0, True)]
)
def test_more_than_is_allowed_overflows(count: int, size: int, waiting: int, over: bool) -> None:
    one = NumberedLink(count, size)
    one.pack(frames(1, 2))
    assert one.overflows(waiting, waiting) is over


def test_what_is_sent_again_goes_in_packets_of_a_bounded_size() -> None:
    one, other = NumberedLink(), NumberedLink()
    large = [frame(StopJob(exit_code=number, because="x" * (BATCH_BYTES // 2))) for number in range(5)]
    one.pack(large)
    packets = one.resume(0)
    assert len(packets) == 5
    assert sum(len(other.unpack(packet)) for packet in packets) == 5


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"\0" * 15, "no head"),
        (NumberedLink().pack([b"\x05\0\0\0hell"]), "after the last whole frame"),
        (b"\x02" + b"\0" * 15 + frames(2)[0], "message 2 came after message 0"),
        (b"\0" * 16, "message 0 came after"),
        (b"\x01" + b"\0" * 7 + b"\x01" + b"\0" * 7, "message 1 is acknowledged, and 0 were sent"),
    ],
    ids=["short", "half a frame", "a gap", "no number", "acknowledged what was not sent"],
)
def test_what_no_sane_peer_sends_is_refused(packet: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        NumberedLink().unpack(packet)


@pytest.mark.parametrize("seed", range(50))
def test_whenever_the_connection_breaks_each_message_comes_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    ends = NumberedLink(), NumberedLink()
    sent: tuple[list[bytes], list[bytes]] = [], []
    came: tuple[list[bytes], list[bytes]] = [], []
    on_the_way: tuple[list[bytes], list[bytes]] = [], []
    for at in range(300):
        side = draw.randrange(2)
        match draw.randrange(4):
            case 0 | 1:
                count = draw.randrange(3)
                sent[side].extend(bodies(*range(at, at + count)))
                on_the_way[side].append(ends[side].pack(frames(*range(at, at + count))))
            case 2 if on_the_way[side]:
                came[1 - side].extend(ends[1 - side].unpack(on_the_way[side].pop(0)))
            case 3 if draw.random() < 0.2:  # what is on the way is lost
                for one in range(2):
                    on_the_way[one][:] = ends[one].resume(ends[1 - one].received)
    for one in range(2):
        for packet in ends[one].resume(ends[1 - one].received):
            came[1 - one].extend(ends[1 - one].unpack(packet))
        assert came[1 - one] == sent[one]
