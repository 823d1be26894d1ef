"""The gate's sums: what every rank concludes from them."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rackrun.errors import StepError
from rackrun.protocol.ids import Position
from rackrun.worker.membership.decisions.gate import CollectiveOrder, agreed, complete, offered
from rackrun.worker.membership.decisions.gate_sums import ZERO_SUMS, GateSums

AT = Position(3, 1)


def order(*calls: str) -> CollectiveOrder:
    made = CollectiveOrder()
    for call in calls:
        made.add(call)
    return made


def total(orders: list[CollectiveOrder], at: list[Position] | None = None) -> list[float]:
    positions = at or [AT] * len(orders)
    parts = [offered(position, made, ZERO_SUMS) for position, made in zip(positions, orders, strict=True)]
    found: Any = sum(parts)
    return [float(one) for one in found]


def test_all_at_the_same_place_agree_on_the_sums() -> None:
    mine = ZERO_SUMS._replace(loss=1.5, samples=4, ids_digest=7, step_s=0.5, ahead=1)
    summed = offered(AT, order("a"), mine) + offered(AT, order("a"), mine)
    values = agreed(summed.tolist(), 2, AT)
    assert values is not None
    assert values.scalars == tuple(2 * value for value in mine.scalars)


@given(st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), min_size=1, max_size=5))
def test_what_each_rank_shares_is_known_to_all_to_the_bit_and_on_its_way_in_a_plan(rows: list[list[float]]) -> None:
    offers = [
        offered(AT, order("a"), ZERO_SUMS._replace(loss=1.0, shared=tuple(row)), rank, len(rows))
        for rank, row in enumerate(rows)
    ]
    summed: Any = sum(offers)
    sums = agreed(summed.tolist(), len(rows), AT)
    assert sums is not None
    assert sums.loss == len(rows)
    bits = [struct.pack("d", value + 0.0) for row in rows for value in row]  # -0.0 is 0.0 there
    assert [struct.pack("d", value) for value in sums.shared] == bits
    again = GateSums.of(msgspec.msgpack.decode(msgspec.msgpack.encode(sums.values)))
    assert [struct.pack("d", value) for value in again.shared] == bits
    assert again.scalars == sums.scalars


def test_what_is_known_last_is_as_if_it_had_been_known_at_first() -> None:
    mine = ZERO_SUMS._replace(samples=4, loss=1.5, tried=1)
    later = offered(AT, order("a"), mine._replace(loss=0.0, tried=0))
    complete(later, loss=1.5, tried=1)
    assert later.tolist() == offered(AT, order("a"), mine).tolist()


def test_a_rank_that_is_missing_is_no_agreement() -> None:
    assert agreed(total([order(), order()]), 3, AT) is None


def test_ranks_in_other_units_are_refused() -> None:
    with pytest.raises(StepError, match="another unit"):
        agreed(total([order(), order()], [AT, Position(4, 1)]), 2, AT)


@given(st.integers(2, 8192), st.integers(1, 10), st.text(), st.text())
def test_one_rank_with_other_collectives_is_seen_among_thousands(
    size: int, others: int, usual: str, other: str
) -> None:
    same, odd = order(usual), order(other)
    others = min(others, size - 1)
    summed = [
        (size - others) * a + others * b
        for a, b in zip(offered(AT, same, ZERO_SUMS).tolist(), offered(AT, odd, ZERO_SUMS).tolist(), strict=True)
    ]
    if same.fingerprint == odd.fingerprint:
        assert agreed(summed, size, AT) == ZERO_SUMS
    else:
        with pytest.raises(StepError, match="same collectives"):
            agreed(summed, size, AT)


def test_the_order_counts_but_not_what_goes_between_two_ranks() -> None:
    assert order("a", "b").fingerprint != order("b", "a").fingerprint
    made = order("a")
    before = made.fingerprint
    made.add_collective("send", [torch.ones(2)])
    assert made.fingerprint == before
    made.add_collective("allreduce", [torch.ones(2)])
    assert made.fingerprint != before


def test_ranks_may_gather_parts_of_different_sizes() -> None:
    one, other = order(), order()
    one.add_collective("allgather", [[torch.ones(2), torch.ones(3)]])
    other.add_collective("allgather", [[torch.ones(3), torch.ones(2)]])
    assert one.fingerprint == other.fingerprint
