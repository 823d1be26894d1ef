"""What a restore reads: checkpoint first, tier second, nothing mixed, nothing unverified, nothing that turned out
bad."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import IntegrityError, NoUsableCheckpoint
from rackrun.checkpoint.commit.checkpoint_choice import ATTEMPTS_MAX, Holding, Tier, choose
from rackrun.checkpoint.commit.commit_records import CommitRecord, Copy, Kind, ParitySet

TRAYS = ("a", "b", "c", "d")


def digest(number: int, owner: int, kind: Kind = "data") -> str:
    return f"{kind} {owner} of {number}"


def copy_of(number: int, owner: int, holder: str, kind: Kind = "data") -> Copy:
    return Copy(
        owner=owner, kind=kind, holder=holder, domain=f"rack of {holder}", digest=digest(number, owner, kind),
        layout_hash=f"layout {owner}",
    )  # fmt: skip


def record(number: int, *, ranks: int = 2, sets: tuple[ParitySet, ...] = (), fencing_token: int = 1) -> CommitRecord:
    """Each rank's shard in its own tray and in the next; with sets in its own only, with its parity block."""
    if sets:
        places = [(r, TRAYS[r], kind) for r in range(ranks) for kind in ("data", "parity")]
    else:
        places = [(r, TRAYS[(r + i) % ranks], "data") for r in range(ranks) for i in (0, 1)]
    copies = [copy_of(number, owner, holder, kind) for owner, holder, kind in places]  # type: ignore[arg-type]
    return CommitRecord.of(number, number * 10, fencing_token, copies=copies, sets=sets, wanted=2)


def held(number: int, owner: int, holder: str, **changes: object) -> Holding:
    kind: Kind = changes.get("kind", "data")  # type: ignore[assignment]
    usual = Holding(
        number=number, step=number * 10, fencing_token=1, owner=owner, kind=kind, holder=holder,
        domain=f"rack of {holder}", tier=Tier.OWN_TRAY if holder == TRAYS[owner] else Tier.PEER_TRAY,
        digest=digest(number, owner, kind), layout_hash=f"layout {owner}", verified=True,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **changes)


def all_of(found: CommitRecord) -> list[Holding]:
    return [
        held(found.number, shard.owner, holder, kind=shard.kind, fencing_token=found.fencing_token)
        for shard in found.shards
        for holder, _ in shard.holders
    ]


# -- which checkpoint --


def test_the_newest_checkpoint_with_a_source_for_every_shard_is_taken() -> None:
    commits = [record(1), record(2), record(3)]
    plan = choose([h for r in commits for h in all_of(r)], commits)
    assert (plan.number, plan.step, plan.fencing_token, plan.committed) == (3, 30, 1, True)
    assert plan.passed_over == {}


def test_one_shard_without_a_source_sends_all_ranks_to_the_older_checkpoint() -> None:
    commits = [record(1), record(2)]
    inventory = all_of(commits[0]) + [h for h in all_of(commits[1]) if h.owner == 0]
    plan = choose(inventory, commits)
    assert plan.number == 1
    assert set(plan.sources) == {0, 1}
    assert "rank 1 has no source; held by a (rack of a), b (rack of b)" in plan.passed_over[2]


def test_a_near_copy_of_an_older_checkpoint_never_beats_a_far_copy_of_a_newer_one() -> None:
    commits = [record(1), record(2)]
    inventory = [held(1, r, TRAYS[r], tier=Tier.LIVE_PEER) for r in (0, 1)]
    inventory += [held(2, r, "lustre", tier=Tier.SHARED) for r in (0, 1)]
    assert choose(inventory, commits).number == 2


def test_a_lost_holder_is_no_source_and_the_reason_names_it() -> None:
    with pytest.raises(NoUsableCheckpoint, match=r"held by a \(rack of a, lost\), b \(rack of b, lost\)"):
        choose(all_of(record(1)), [record(1)], lost={"a", "b"})
    assert choose(all_of(record(1)), [record(1)], lost={"a"}).sources[0][0].holder == "b"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 11}, "b's is of step 11, fencing token 1"),
        ({"fencing_token": 2}, "b's is of step 10, fencing token 2"),
        ({"digest": "other"}, "b's differs from the record"),
        ({"layout_hash": "other"}, "b's differs from the record"),
        ({"verified": False}, "b's is not verified"),
    ],
)
def test_a_copy_that_is_not_the_records_is_no_source(changes: dict[str, object], reason: str) -> None:
    inventory = [held(1, 0, "a"), held(1, 1, "b", **changes)]
    with pytest.raises(NoUsableCheckpoint, match=reason):
        choose(inventory, [record(1)])


def test_without_any_record_nothing_is_restored() -> None:
    with pytest.raises(NoUsableCheckpoint, match="Checkpoint 1: never committed"):
        choose(all_of(record(1)), [])
    with pytest.raises(NoUsableCheckpoint, match="Nothing was ever committed"):
        choose([], [])


def test_a_damaged_record_and_two_that_contradict_are_refused() -> None:
    damaged = msgspec.structs.replace(record(1), step=11)
    with pytest.raises(IntegrityError, match="does not match its digest"):
        choose(all_of(record(1)), [damaged])
    with pytest.raises(IntegrityError, match="differ"):
        choose(all_of(record(1)), [record(1), record(1, fencing_token=2)])


# -- probation --


def test_a_quarantined_checkpoint_is_never_taken_again() -> None:
    commits = [record(1), record(2)]
    inventory = [h for r in commits for h in all_of(r)]
    assert choose(inventory, commits, quarantined={2}).number == 1
    with pytest.raises(NoUsableCheckpoint, match=r"Checkpoint 2: quarantined.*Checkpoint 1: quarantined"):
        choose(inventory, commits, quarantined={1, 2})


def test_restores_that_fail_end_after_a_bounded_number_of_attempts() -> None:
    commits = [record(1), record(2)]
    inventory = [h for r in commits for h in all_of(r)]
    attempts: dict[int, int] = {}
    taken = []
    for _ in range(2 * ATTEMPTS_MAX):
        plan = choose(inventory, commits, attempts=attempts)
        taken.append(plan.number)
        attempts[plan.number] = attempts.get(plan.number, 0) + 1
    assert taken == [2] * ATTEMPTS_MAX + [1] * ATTEMPTS_MAX
    with pytest.raises(NoUsableCheckpoint, match=f"{ATTEMPTS_MAX} restores of it have failed"):
        choose(inventory, commits, attempts=attempts)


# -- uncommitted --


def test_an_uncommitted_checkpoint_is_read_only_as_best_effort_and_only_sealed_alike() -> None:
    commits, late = [record(1)], [held(2, 0, "a"), held(2, 1, "b")]
    inventory = all_of(commits[0]) + late
    assert choose(inventory, commits).number == 1
    plan = choose(inventory, commits, best_effort=True, owners=(0, 1))
    assert (plan.number, plan.committed) == (2, False)
    assert choose(inventory, commits, best_effort=True, owners=(0, 1, 2)).number == 1


@pytest.mark.parametrize("changes", [{"step": 21}, {"fencing_token": 2}, {"digest": "x"}, {"layout_hash": "x"}])
def test_an_uncommitted_checkpoint_that_differs_anywhere_is_not_read(changes: dict[str, object]) -> None:
    inventory = [held(2, 0, "a"), held(2, 1, "b"), held(2, 1, "a", **changes)]
    with pytest.raises(NoUsableCheckpoint, match="not sealed alike by all"):
        choose(inventory, [], best_effort=True, owners=(0, 1))


# -- sources --


def test_sources_are_ordered_from_a_live_peer_to_the_shared_directory() -> None:
    sets = (ParitySet(members=(0, 1, 2)),)
    found = record(1, ranks=3, sets=sets)
    inventory = all_of(found)
    for tier in (Tier.SHARED, Tier.LOCAL_DISK, Tier.PEER_TRAY, Tier.LIVE_PEER):
        inventory.append(held(1, 0, f"at {tier.name}", tier=tier))
    tiers = [source.tier for source in choose(inventory, [found]).sources[0]]
    assert tiers == [
        Tier.LIVE_PEER, Tier.OWN_TRAY, Tier.PEER_TRAY, Tier.PARITY, Tier.LOCAL_DISK, Tier.SHARED,
    ]  # fmt: skip


def test_a_rebuild_names_all_it_reads() -> None:
    found = record(1, ranks=3, sets=(ParitySet(members=(0, 1, 2)),))
    plan = choose(all_of(found), [found], lost={"b"})
    (rebuild,) = plan.sources[1]
    assert rebuild.tier == Tier.PARITY
    assert [(h.owner, h.kind, h.holder) for h in rebuild.inputs] == [
        (0, "data", "a"), (0, "parity", "a"), (2, "data", "c"), (2, "parity", "c"),
    ]  # fmt: skip


def test_two_losses_in_a_set_of_single_parity_are_one_too_many() -> None:
    found = record(1, ranks=3, sets=(ParitySet(members=(0, 1, 2)),))
    with pytest.raises(NoUsableCheckpoint, match="its parity set is not complete"):
        choose(all_of(found), [found], lost={"a", "b"})


# -- against a brute force --


def brute(inventory: list[Holding], commits: list[CommitRecord], lost: set[str], bad: set[int]) -> int | None:
    """The newest checkpoint all of whose bytes are there, rebuilding row by row from what the code stands for."""
    for found in sorted(commits, key=lambda r: -r.number):
        if found.number in bad:
            continue
        known = {(s.owner, s.kind): s for s in found.shards}
        has = {
            (h.owner, h.kind)
            for h in inventory
            if h.holder not in lost and h.verified and h.number == found.number
            and (h.step, h.fencing_token) == (found.step, found.fencing_token) and (h.owner, h.kind) in known
            and h.digest == known[h.owner, h.kind].digest and h.layout_hash == known[h.owner, h.kind].layout_hash
        }  # fmt: skip
        if all((owner, "data") in has or _by_rows(owner, found.sets, has) for owner in found.owners):
            return found.number
    return None


def _by_rows(owner: int, sets: tuple[ParitySet, ...], has: set[tuple[int, Kind]]) -> bool:
    """Row i's parity is kept by member i and is the XOR of one chunk of every *other* member."""
    for parity in sets:
        if owner in parity.members:
            others = [m for m in parity.members if m != owner]
            return all((i, "parity") in has and all((m, "data") in has for m in others if m != i) for i in others)
    return False


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Holding], list[CommitRecord], set[str], set[int]]:
    ranks = draw(st.integers(2, 4))
    sets = draw(st.sampled_from([(), (ParitySet(members=tuple(range(ranks))),)]))
    commits = [
        record(n, ranks=ranks, sets=sets, fencing_token=draw(st.integers(1, 2)))
        for n in range(1, draw(st.integers(1, 3)) + 1)
    ]
    inventory = []
    for found, shard, holder in product(commits, range(ranks), (*TRAYS[:ranks], "disk")):
        for kind in ("data", "parity") if sets else ("data",):
            if draw(st.integers(0, 9)) < 4:
                continue
            whole = held(found.number, shard, holder, kind=kind, fencing_token=found.fencing_token)
            flaw: Any = draw(
                st.sampled_from([{}] * 8 + [{"fencing_token": 3}, {"step": 1}, {"verified": False}, {"digest": "flip"}])
            )
            inventory.append(msgspec.structs.replace(whole, **flaw))
    lost = draw(st.sets(st.sampled_from(TRAYS), max_size=3))
    return draw(st.permutations(inventory)), commits, lost, draw(st.sets(st.integers(1, 3), max_size=1))


@settings(max_examples=150, deadline=None)
@given(histories())
def test_the_choice_is_the_brute_forces_and_every_source_is_of_that_checkpoint(
    history: tuple[list[Holding], list[CommitRecord], set[str], set[int]],
) -> None:
    inventory, commits, lost, bad = history
    expected = brute(inventory, commits, lost, bad)
    if expected is None:
        with pytest.raises(NoUsableCheckpoint) as refused:
            choose(inventory, commits, lost, bad)
        assert all(f"Checkpoint {found.number}:" in str(refused.value) for found in commits)
        return
    plan = choose(inventory, commits, lost, bad)
    assert plan.number == expected
    assert plan == choose(inventory[::-1], commits[::-1], lost, bad)  # whatever the order of reports
    found = next(r for r in commits if r.number == expected)
    assert set(plan.sources) == set(found.owners)
    for owner, sources in plan.sources.items():
        assert sources
        assert [s.tier for s in sources] == sorted(s.tier for s in sources)
        for source in sources:
            read = source.inputs or [
                h
                for h in inventory
                if (h.number, h.owner, h.kind) == (expected, owner, "data") and h.holder == source.holder
            ]
            assert read
            assert all(
                h.holder not in lost and (h.step, h.fencing_token) == (found.step, found.fencing_token) for h in read
            )
            assert all(h.verified and "flip" not in h.digest for h in read)
