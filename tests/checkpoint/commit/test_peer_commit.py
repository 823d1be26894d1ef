"""What ranks agree on after a save: the same on all of them, whatever one of them does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from rackrun.checkpoint.commit.peer_commit import CommitOutcome, CommitParticipant, Sealed
from rackrun.checkpoint.commit.peers import Peers, PeersGone

WORLD = 3
Settle = Callable[..., list[CommitOutcome | PeersGone]]


def sealed(rank: int, step: int = 7, **what: Any) -> Sealed:
    return Sealed(step=step, digest=f"digest {rank}", layout_hash="layout", **what)


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def settle(store: dist.HashStore) -> Settle:
    """``settle(number, {rank: what it says}, seconds={rank: how long it waits})``: what each of those ranks hears."""
    desks = [CommitParticipant(Peers(store, rank, WORLD), 1, seconds=60) for rank in range(WORLD)]

    def one(rank: int, number: int, said: Sealed, seconds: float) -> CommitOutcome | PeersGone:
        desks[rank]._seconds = seconds
        try:
            return desks[rank].settle(number, said)
        except PeersGone as error:
            return error

    def run(
        number: int, said: dict[int, Sealed], seconds: dict[int, float] | None = None
    ) -> list[CommitOutcome | PeersGone]:
        waits = dict.fromkeys(range(WORLD), 60.0) | (seconds or {})
        with ThreadPoolExecutor(WORLD) as pool:
            return list(pool.map(lambda rank: one(rank, number, said[rank], waits[rank]), said))

    return run


def committed(heard: list[CommitOutcome | PeersGone]) -> CommitOutcome:
    """The one outcome that all have heard."""
    assert isinstance(heard[0], CommitOutcome)
    assert all(one == heard[0] for one in heard)
    return heard[0]


def test_a_checkpoint_commits_once_every_rank_has_sealed_and_the_record_names_each(settle: Settle) -> None:
    record = committed(settle(1, {rank: sealed(rank) for rank in range(WORLD)})).record
    assert record is not None
    assert (record.number, record.step, record.owners) == (1, 7, (0, 1, 2))
    assert [shard.digest for shard in record.shards] == ["digest 0", "digest 1", "digest 2"]


def test_one_rank_that_has_failed_says_why_to_all(settle: Settle) -> None:
    said = {rank: sealed(rank) for rank in range(WORLD)} | {1: Sealed(step=7, failure="no slot")}
    outcome = committed(settle(1, said))
    assert (outcome.record, outcome.reason) == (None, "rank 1: no slot")


def test_a_silent_rank_is_given_up_and_the_next_checkpoint_commits(settle: Settle) -> None:
    outcome = committed(settle(1, {0: sealed(0), 2: sealed(2)}, {0: 0.3}))
    assert outcome.record is None
    assert "did not answer" in outcome.reason
    assert committed(settle(2, {rank: sealed(rank) for rank in range(WORLD)})).record is not None


def test_ranks_that_hear_nothing_of_rank_0_do_not_guess(settle: Settle) -> None:
    heard = settle(1, {1: sealed(1), 2: sealed(2)}, {1: 0.2, 2: 0.2})
    assert all(isinstance(one, PeersGone) for one in heard)


def test_nothing_goes_to_disk_while_one_rank_still_writes_an_older_checkpoint(settle: Settle) -> None:
    said = {rank: sealed(rank, due=True, writing=rank == 2) for rank in range(WORLD)}
    outcome = committed(settle(1, said))
    assert (outcome.flush, outcome.passed_over) == (False, True)
    outcome = committed(settle(2, {rank: sealed(rank, due=True) for rank in range(WORLD)}))
    assert (outcome.flush, outcome.passed_over) == (True, False)


def test_the_store_does_not_grow_with_checkpoints(settle: Settle, store: dist.HashStore) -> None:
    for number in range(1, 4):
        settle(number, {rank: sealed(rank) for rank in range(WORLD)})
    before = store.num_keys()
    for number in range(4, 20):
        settle(number, {rank: sealed(rank) for rank in range(WORLD)})
    assert store.num_keys() == before
