"""The positions of streams, and the states from which a rank reads on."""

from __future__ import annotations

import pytest

from rackrun.errors import StepError, UsageError
from rackrun.protocol.ids import Position
from rackrun.worker.batch.batch_runs import shards_before
from rackrun.worker.data.stream_positions import ShardEntry, StreamPositions


def entry(position: int) -> ShardEntry:
    return ShardEntry(position, 0, position, b"{}", position)


class Attempt:
    def __init__(self, number: int) -> None:
        self.number = number
        self._at = Position(number)

    def __int__(self) -> int:
        return self.number


def commit(ranks: list[StreamPositions], turn: int, shards: int, owner: dict[int, int], *, lost: bool = False) -> None:
    """One step on all ranks. ``owner``: data shard -> rank. ``lost``: it is not committed."""
    steps = [Attempt(turn) for _ in ranks]
    for rank, (positions, step) in enumerate(zip(ranks, steps, strict=True)):
        positions.begins(step, 0, shards)
        if positions.is_due(0):
            for shard in range(shards):
                if owner[shard] == rank:
                    positions.has_read(step, 0, shard, entry(positions.position(0, shard) + 1))
    rows: list[bytes] = []
    for positions, step in zip(ranks, steps, strict=True):
        positions.exchange(step, lambda row: rows.append(row) or [row])  # type: ignore[func-returns-value]
    for positions, step in zip(ranks, steps, strict=True):
        positions.exchange(step, lambda _: rows)
        if not lost:
            positions.committed(step)


def made(count: int = 2, every: int = 3) -> list[StreamPositions]:
    found = [StreamPositions(4, 2) for _ in range(count)]
    for positions in found:
        positions.add(every)
    return found


OWNER = {0: 0, 1: 0, 2: 1, 3: 1}


def test_entries_of_all_ranks_are_kept_by_all_of_them_and_only_the_last_two() -> None:
    found = made()
    for turn in range(7):
        commit(found, turn, 4, OWNER)
    for positions in found:
        assert [positions.entries(0, shard) for shard in range(4)] == [(entry(3), entry(6))] * 4
        assert positions.state_dict() == found[0].state_dict()


def test_an_attempt_that_does_not_count_leaves_positions_as_they_were() -> None:
    found = made()
    commit(found, 0, 4, OWNER)
    before = found[0].state_dict()
    commit(found, 1, 4, OWNER, lost=True)
    commit(found, 1, 4, OWNER, lost=True)
    assert found[0].state_dict() == before
    assert found[0].steps_read(0) == 1


def test_a_smaller_batch_leaves_the_last_data_shards_where_they_are() -> None:
    found = made()
    for turn, shards in enumerate((4, 4, 2, 2, 2, 3, 4)):
        commit(found, turn, shards, OWNER)
    assert [found[0].position(0, shard) for shard in range(4)] == [7, 7, 4, 3]
    assert sum(found[0].position(0, shard) for shard in range(4)) == shards_before(((0, 4), (2, 2), (5, 3), (6, 4)), 7)
    assert [one.position for one in found[0].entries(0, 3)] == [1], "it was not read in the turns in which all are due"


def test_positions_go_on_from_its_state() -> None:
    found = made()
    for turn in range(4):
        commit(found, turn, 4, OWNER)
    (other,) = made(1)
    other.load_state_dict(found[0].state_dict())
    assert other.state_dict() == found[0].state_dict()
    assert other.entries(0, 1) == found[0].entries(0, 1)
    assert other.position(0, 2) == 4


def test_a_state_of_other_sizes_is_refused() -> None:
    other = StreamPositions(8, 2)
    other.add(3)
    with pytest.raises(UsageError, match="4 data shards with micro-batches of 2 samples"):
        other.load_state_dict(made()[0].state_dict())
    with pytest.raises(UsageError, match="this script reads 0"):
        StreamPositions(4, 2).load_state_dict(made()[0].state_dict())


def test_a_rank_that_reads_nothing_is_in_the_exchange_too() -> None:
    (positions,) = made(1)
    rows: list[bytes] = []
    positions.exchange(Attempt(0), lambda row: rows.append(row) or [row])  # type: ignore[func-returns-value]
    assert len(rows) == 1
    step = Attempt(0)
    positions.begins(step, 0, 4)
    with pytest.raises(StepError, match="do not read the same streams in step 0"):
        positions.exchange(step, lambda row: [*rows, row])


def test_ranks_that_read_different_streams_are_refused() -> None:
    (positions,) = made(1)
    positions.add(3)
    step, other = Attempt(0), Attempt(0)
    positions.begins(step, 0, 4)
    rows: list[bytes] = []
    positions.exchange(step, lambda row: rows.append(row) or [row])  # type: ignore[func-returns-value]
    positions.begins(other, 1, 4)
    with pytest.raises(StepError, match="do not read the same streams in step 0"):
        positions.exchange(other, lambda row: [*rows, row])
