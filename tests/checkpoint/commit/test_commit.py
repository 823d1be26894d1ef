"""When a checkpoint is whole, when the older one may go, and what happens when holders, ranks or coordinators do not
stay."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rackrun.checkpoint.base.errors import CheckpointError, IntegrityError, StaleFencingToken
from rackrun.checkpoint.commit.checkpoint_choice import choose
from rackrun.checkpoint.commit.commit_protocol import (
    Abandon,
    Begin,
    CheckpointBegan,
    Commit,
    CommitPolicy,
    CommitRecord,
    Committer,
    Confirmed,
    Deadline,
    Disagreement,
    HolderJoined,
    HolderLost,
    MembershipBegan,
    Output,
    ParitySet,
    Pinned,
    Repair,
    Retire,
    ShardSealed,
    UnderReplicated,
    Unpinned,
    decode_record,
)
from rackrun.checkpoint.commit.commit_records import redundancy
from tests.checkpoint.commit_model import FAULTS, Model


class Job:
    """Two ranks on trays A and B, each a holder and a domain of its own, and what the committer answers."""

    def __init__(self, copies: int = 2, min_copies: int | None = None, sets: tuple[ParitySet, ...] = ()) -> None:
        self.ranks = tuple(sets[0].members) if sets else (0, 1)
        self.committer = Committer(CommitPolicy(copies=copies, min_copies=min_copies))
        self.tell(MembershipBegan(fencing_token=1, owners=self.ranks, sets=sets))

    def tell(self, *events: msgspec.Struct) -> list[Output]:
        return [output for event in events for output in self.committer.handle(event)]  # type: ignore[arg-type]

    def begin(self, number: int) -> list[Output]:
        return self.tell(CheckpointBegan(number=number, step=number * 10))

    def seal(self, number: int, owner: int, holder: str, /, **changes: object) -> list[Output]:
        usual = ShardSealed(
            number=number, step=number * 10, fencing_token=self.committer.fencing_token, owner=owner, holder=holder,
            domain=f"rack {holder}", digest=f"{changes.get('kind', 'data')} {owner} of {number}",
            layout_hash=f"layout {owner}",
        )  # fmt: skip
        return self.tell(msgspec.structs.replace(usual, **changes))

    def commit(self, number: int) -> list[Output]:
        """Every rank on A and B."""
        self.begin(number)
        return [output for owner in (0, 1) for holder in "AB" for output in self.seal(number, owner, holder)]

    def confirm(self, number: int, holders: str = "AB") -> list[Output]:
        return self.tell(*(Confirmed(number=number, holder=holder) for holder in holders))


def record_in(outputs: list[Output]) -> CommitRecord:
    (record,) = [output.record for output in outputs if isinstance(output, Commit)]
    return record


def heals_in(outputs: list[Output]) -> list[Repair]:
    return [output for output in outputs if isinstance(output, Repair)]


# -- committing --


def test_a_checkpoint_commits_when_every_shard_has_its_copies_in_distinct_domains() -> None:
    job = Job()
    assert job.begin(1) == [Begin(number=1, step=10, fencing_token=1, keep=())]
    assert job.seal(1, 0, "A") == job.seal(1, 1, "B") == job.seal(1, 0, "B") == []
    record = record_in(job.seal(1, 1, "A"))
    assert (record.number, record.step, record.fencing_token, record.degraded) == (1, 10, 1, False)
    assert [(s.owner, s.digest, s.holders) for s in record.shards] == [
        (0, "data 0 of 1", (("A", "rack A"), ("B", "rack B"))),
        (1, "data 1 of 1", (("A", "rack A"), ("B", "rack B"))),
    ]


def test_two_copies_in_one_domain_are_one() -> None:
    job = Job()
    job.begin(1)
    for owner in (0, 1):
        job.seal(1, owner, "A")
        assert job.seal(1, owner, "B", domain="rack A") == []
    job.seal(1, 0, "C")
    assert record_in(job.seal(1, 1, "C")).number == 1


@pytest.mark.parametrize(
    "changes", [{"step": 11}, {"fencing_token": 0}, {"fencing_token": 2}, {"owner": 7}, {"number": 2}]
)
def test_a_copy_of_another_step_fencing_token_owner_or_unknown_checkpoint_does_not_count(
    changes: dict[str, object],
) -> None:
    job = Job()
    job.begin(1)
    job.seal(1, 0, "A"), job.seal(1, 0, "B"), job.seal(1, 1, "A")
    assert job.seal(1, 1, "B", **changes) == []
    assert job.committer.newest is None


def test_the_same_message_twice_counts_once() -> None:
    job = Job()
    job.begin(1)
    for _ in range(3):
        assert job.seal(1, 0, "A") == job.seal(1, 1, "A") == []


def test_late_messages_of_an_older_fencing_token_are_ignored() -> None:
    job = Job()
    job.begin(1)
    job.seal(1, 0, "A"), job.seal(1, 0, "B"), job.seal(1, 1, "A")
    assert job.tell(MembershipBegan(fencing_token=2, owners=(0, 1))) == [
        Abandon(number=1, reason="fencing token 2 began")
    ]
    assert job.seal(1, 1, "B", fencing_token=1) == []
    assert job.seal(1, 1, "B", fencing_token=2) == []
    assert job.committer.keep() == ()


def test_a_coordinator_with_an_older_fencing_token_is_refused() -> None:
    job = Job()
    job.tell(MembershipBegan(fencing_token=5, owners=(0, 1)))
    for fencing_token, owners in ((4, (0, 1)), (5, (0, 1, 2))):
        with pytest.raises(StaleFencingToken):
            job.tell(MembershipBegan(fencing_token=fencing_token, owners=owners))
    assert job.tell(MembershipBegan(fencing_token=5, owners=(0, 1))) == []


def test_numbers_are_never_used_again() -> None:
    job = Job()
    job.begin(2)
    for number in (1, 2):
        with pytest.raises(CheckpointError, match="durable counter"):
            job.begin(number)


def test_a_checkpoint_that_a_newer_one_overtook_never_commits() -> None:
    job = Job()
    job.begin(1)
    outputs = job.commit(2)
    assert Abandon(number=1, reason="checkpoint 2 committed before it") in outputs
    assert [o for owner in (0, 1) for h in "AB" for o in job.seal(1, owner, h)] == []


def test_holders_that_disagree_do_not_make_a_commit_until_one_side_is_whole() -> None:
    job = Job(min_copies=1)
    job.begin(1)
    for owner, holder in ((1, "A"), (1, "B"), (0, "A")):
        job.seal(1, owner, holder)
    assert job.seal(1, 0, "B", digest="x") == [Disagreement(number=1, owner=0, digests=("data 0 of 1", "x"))]
    assert record_in(job.seal(1, 0, "C")).shards[0].holders == (("A", "rack A"), ("C", "rack C"))


def test_holders_that_disagree_are_not_committed_at_the_deadline_either() -> None:
    job = Job(min_copies=1)
    job.begin(1)
    for owner, holder, digest in ((1, "A", "1"), (1, "B", "1"), (0, "A", "x"), (0, "B", "y")):
        job.seal(1, owner, holder, digest=digest)
    (abandoned,) = job.tell(Deadline(number=1))
    assert isinstance(abandoned, Abandon)
    assert "ranks [0]" in abandoned.reason


def test_a_holder_that_contradicts_itself_is_not_believed() -> None:
    job = Job()
    job.begin(1)
    job.seal(1, 1, "A"), job.seal(1, 1, "B"), job.seal(1, 0, "A", digest="x"), job.seal(1, 0, "A")
    job.seal(1, 0, "B")
    assert job.committer.newest is None
    assert [holder for holder, _ in record_in(job.seal(1, 0, "C")).shards[0].holders] == ["B", "C"]


# -- deadlines --


def test_at_the_deadline_too_few_copies_are_an_event_and_the_slots_are_free_again() -> None:
    job = Job()
    job.begin(1)
    job.seal(1, 0, "A"), job.seal(1, 0, "B"), job.seal(1, 1, "B")
    (abandoned,) = job.tell(Deadline(number=1))
    assert abandoned == Abandon(number=1, reason="too few copies at the deadline of the shards of ranks [1]")
    assert job.committer.keep() == ()
    assert job.seal(1, 1, "A") == job.tell(Deadline(number=1)) == []


def test_a_degraded_commit_is_flagged_healed_and_keeps_the_older_checkpoint_until_then() -> None:
    job = Job(min_copies=1)
    job.commit(1)
    job.confirm(1)
    job.begin(2)
    job.seal(2, 0, "A"), job.seal(2, 0, "B"), job.seal(2, 1, "B")
    outputs = job.tell(Deadline(number=2))
    assert record_in(outputs).degraded
    assert outputs[1:] == [UnderReplicated(number=2, owners=(1,)), Repair(number=2, owner=1, to="A")]
    assert job.confirm(2) == []
    assert job.committer.keep() == (1, 2)
    assert job.seal(2, 1, "A") == [UnderReplicated(number=2, owners=()), Retire(number=1)]


def test_a_degraded_commit_replaces_an_older_one_that_is_no_safer() -> None:
    job = Job(min_copies=1)
    job.commit(1)
    job.tell(HolderLost(holder="B"))
    job.begin(2)
    job.seal(2, 0, "A"), job.seal(2, 1, "A")
    job.tell(Deadline(number=2))
    assert job.confirm(2, "A") == [Retire(number=1)]


def test_a_degraded_commit_below_the_floor_is_not_made() -> None:
    job = Job(copies=3, min_copies=2)
    job.begin(1)
    job.seal(1, 0, "A"), job.seal(1, 0, "B"), job.seal(1, 1, "A")
    assert isinstance(job.tell(Deadline(number=1))[0], Abandon)


# -- retiring --


def test_the_older_checkpoint_goes_only_when_all_holders_have_confirmed_the_newer() -> None:
    job = Job()
    job.commit(1)
    job.confirm(1)
    assert not [o for o in job.commit(2) if isinstance(o, Retire)]
    assert job.committer.keep() == (1, 2)
    assert job.begin(3) == [Begin(number=3, step=30, fencing_token=1, keep=(1, 2))]
    assert job.confirm(2, "A") == []
    assert job.confirm(2, "B") == [Retire(number=1)]
    assert job.committer.keep() == (2, 3)


def test_a_checkpoint_that_may_still_commit_is_kept_from_before_anyone_seals_it() -> None:
    job = Job()
    job.begin(1)
    assert job.begin(2) == [Begin(number=2, step=20, fencing_token=1, keep=(1,))]


def test_a_pinned_checkpoint_is_never_retired() -> None:
    job = Job()
    job.commit(1)
    job.tell(Pinned(number=1, by="recovery 1"), Pinned(number=1, by="flush"))
    job.commit(2)
    assert job.confirm(2) == []
    assert job.tell(Unpinned(number=1, by="flush")) == []
    assert job.committer.keep() == (1, 2)
    assert job.tell(Unpinned(number=1, by="recovery 1")) == [Retire(number=1)]


def test_a_pin_keeps_what_never_commits_too() -> None:
    job = Job()
    job.begin(1)
    job.tell(Pinned(number=1, by="best effort"), MembershipBegan(fencing_token=2, owners=(0, 1)))
    assert job.committer.keep() == (1,)


# -- losses and healing --


def test_a_lost_holder_counts_no_more_and_the_newest_checkpoint_is_healed_elsewhere() -> None:
    job = Job()
    job.tell(HolderJoined(holder="C", domain="rack C"), HolderJoined(holder="D", domain="rack A"))
    job.commit(1)
    assert job.tell(HolderLost(holder="B")) == [
        UnderReplicated(number=1, owners=(0, 1)),
        Repair(number=1, owner=0, to="C"),
        Repair(number=1, owner=1, to="C"),
    ]
    assert job.seal(1, 0, "B") == []
    assert job.seal(1, 0, "C") == [UnderReplicated(number=1, owners=(1,))]
    assert job.seal(1, 1, "C") == [UnderReplicated(number=1, owners=())]


def test_a_copy_that_heals_in_a_newer_fencing_token_counts_if_it_is_the_records() -> None:
    job = Job()
    job.commit(1)
    job.tell(HolderLost(holder="B"), MembershipBegan(fencing_token=2, owners=(0, 1)))
    assert [o.to for o in job.tell(HolderJoined(holder="B", domain="rack B")) if isinstance(o, Repair)] == ["B", "B"]
    assert job.seal(1, 0, "B", fencing_token=1, digest="x") == []
    assert job.seal(1, 0, "B", fencing_token=1) == [UnderReplicated(number=1, owners=(1,))]


def test_a_heal_whose_target_is_lost_is_given_to_another() -> None:
    job = Job()
    job.tell(*(HolderJoined(holder=h, domain=f"rack {h}") for h in "CD"))
    job.commit(1)
    assert heals_in(job.tell(HolderLost(holder="B"))) == [
        Repair(number=1, owner=0, to="C"),
        Repair(number=1, owner=1, to="D"),  # the least loaded
    ]
    assert heals_in(job.tell(HolderLost(holder="C"))) == [Repair(number=1, owner=0, to="D")]


def test_a_loss_before_the_commit_takes_its_copies_away() -> None:
    job = Job()
    job.begin(1)
    job.seal(1, 0, "A"), job.seal(1, 0, "B"), job.seal(1, 1, "B")
    job.tell(HolderLost(holder="B"))
    assert job.seal(1, 1, "A") == []


def test_an_agent_that_connects_holds_what_it_says_and_no_more() -> None:
    job = Job()
    record = record_in(job.commit(1))
    job.committer = Committer(CommitPolicy(), [record])
    job.tell(MembershipBegan(fencing_token=1, owners=(0, 1)))
    outputs = job.tell(HolderJoined(holder="A", domain="rack A"))  # empty: it was restarted as well
    assert outputs[0] == UnderReplicated(number=1, owners=(0, 1))
    assert [heal.to for heal in heals_in(outputs)] == ["A", "A"]


# -- parity --

XOR = ParitySet(members=(0, 1, 2))
HOME = "ABC"


def test_a_complete_parity_set_commits_and_an_incomplete_one_does_not() -> None:
    job = Job(sets=(XOR,))
    job.begin(1)
    told = [job.seal(1, r, HOME[r], kind=kind) for kind in ("data", "parity") for r in XOR.members]
    assert told[:-1] == [[]] * 5
    record = record_in(told[-1])
    assert [(s.owner, s.kind) for s in record.shards] == [(r, kind) for r in XOR.members for kind in ("data", "parity")]


def test_a_parity_set_in_one_domain_protects_nothing() -> None:
    job = Job(sets=(XOR,))
    job.begin(1)
    for r in XOR.members:
        for kind in ("data", "parity"):
            assert job.seal(1, r, HOME[r], kind=kind, domain="rack A" if r < 2 else "rack C") == []


def test_the_lost_member_of_a_set_is_healed_once_with_its_parity_block_beside_it() -> None:
    job = Job(sets=(XOR,))
    job.begin(1)
    for r in XOR.members:
        for kind in ("data", "parity"):
            job.seal(1, r, HOME[r], kind=kind)
    job.tell(HolderJoined(holder="D", domain="rack D"))
    assert job.tell(HolderLost(holder="B")) == [
        UnderReplicated(number=1, owners=(0, 1, 2)),
        Repair(number=1, owner=1, kind="data", to="D"),
        Repair(number=1, owner=1, kind="parity", to="D"),
    ]
    job.seal(1, 1, "D")
    assert job.seal(1, 1, "D", kind="parity") == [UnderReplicated(number=1, owners=())]


def test_two_losses_in_a_set_heal_nothing_because_there_is_no_source() -> None:
    job = Job(sets=(XOR,))
    job.begin(1)
    for r in XOR.members:
        for kind in ("data", "parity"):
            job.seal(1, r, HOME[r], kind=kind)
    job.tell(HolderLost(holder="A"), HolderLost(holder="B"))
    heals = [o for o in job.tell(HolderJoined(holder="D", domain="rack D")) if isinstance(o, Repair)]
    assert 0 not in {h.owner for h in heals if h.kind == "data"}


@settings(deadline=None)
@given(
    st.lists(st.sets(st.sampled_from("abcd"), max_size=3), min_size=6, max_size=6),
    st.booleans(),
    st.integers(1, 3),
)
def test_redundancy_is_the_least_number_of_domains_whose_loss_loses_the_shard(
    where: list[set[str]], in_set: bool, limit: int
) -> None:
    domains = {(r, kind): where[2 * r + i] for r in range(3) for i, kind in enumerate(("data", "parity"))}

    def there(lost: set[str]) -> bool:
        left = {item for item, places in domains.items() if places - lost}
        others = [(r, kind) for r in (1, 2) for kind in ("data", "parity")]
        return (0, "data") in left or (in_set and all(item in left for item in others))

    every = [{d for i, d in enumerate("abcd") if mask >> i & 1} for mask in range(16)]
    least = min((len(lost) for lost in every if not there(lost)), default=limit)
    assert redundancy(0, domains, XOR if in_set else None, limit) == min(least, limit)  # type: ignore[arg-type]


# -- the log --


def test_a_restarted_coordinator_goes_on_from_its_log() -> None:
    job = Job()
    records = [record_in(job.commit(1)), record_in(job.commit(2))]
    job.committer = Committer(CommitPolicy(), [decode_record(record.encode()) for record in records])
    assert job.committer.newest == records[1]
    assert job.committer.keep() == (1, 2)
    job.tell(MembershipBegan(fencing_token=1, owners=(0, 1)))
    assert job.seal(3, 0, "A") == []  # begun by an earlier life: it never commits
    assert job.confirm(2) == [Retire(number=1)]
    with pytest.raises(CheckpointError):
        job.begin(2)


def test_every_bit_flip_in_a_record_is_found() -> None:
    job = Job()
    job.begin(1)
    outputs = [o for owner in (0, 1) for h in "AB" for o in job.seal(1, owner, h)]
    data = record_in(outputs).encode()
    assert decode_record(data) == record_in(outputs)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(IntegrityError):
            decode_record(bytes(flipped))
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            decode_record(data[:length])


def test_two_records_of_one_checkpoint_that_differ_are_refused() -> None:
    record = record_in(Job().commit(1))
    other = CommitRecord.of(1, 10, 9, copies=record.all_copies())
    with pytest.raises(IntegrityError, match="two coordinators have committed it"):
        Committer(CommitPolicy(), [record, other])
    with pytest.raises(IntegrityError, match=r"two writers have committed it.*commit-000000000001\.json"):
        choose([], [record, other])
    with pytest.raises(IntegrityError, match="does not match its digest"):
        Committer(CommitPolicy(), [msgspec.structs.replace(record, step=11)])


def test_a_record_is_degraded_only_where_that_is_said() -> None:
    copies = record_in(Job().commit(1)).all_copies()
    assert not CommitRecord.of(1, 10, 9, copies=copies).degraded
    assert CommitRecord.of(1, 10, 9, copies=copies, degraded=True).degraded


def test_unusable_policies_and_sets_are_refused() -> None:
    for wrong in ({"copies": 0}, {"copies": 1, "min_copies": 2}, {"min_copies": 0}):
        with pytest.raises(CheckpointError):
            CommitPolicy(**wrong)
    for members, tolerates in (((0,), 1), ((0, 0), 1), ((0, 1), 2), ((0, 1), 0)):
        with pytest.raises(CheckpointError):
            ParitySet(members=members, tolerates=tolerates)


# -- all interleavings --

DEGRADES = CommitPolicy(copies=2, min_copies=1)


@pytest.mark.parametrize(
    ("fault", "checkpoints"),
    [
        ("holder 0", 2),
        ("rank 0", 3),
        ("coordinator", 2),
        ("deadline", 1),
        pytest.param("deadline", 2, marks=pytest.mark.stories),
    ],
)
def test_whatever_breaks_at_any_moment_the_newest_commit_survives(fault: str, checkpoints: int) -> None:
    model = Model(policy=DEGRADES, checkpoints=checkpoints, kinds=(fault,))
    model.explore()
    assert model.most_committed == checkpoints
    assert model.states > (1000 if checkpoints > 1 else 100)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_breaks_at_any_moment_of_three_checkpoints_the_newest_commit_survives(fault: str) -> None:
    model = Model(policy=DEGRADES, kinds=(fault,))
    model.explore()
    assert model.most_committed == 3
    assert model.states > 10_000


@pytest.mark.soak
@pytest.mark.parametrize(
    ("faults", "checkpoints", "overlap"),
    [
        (("holder 0", "coordinator"), 2, False),
        (("holder 0", "deadline"), 2, False),
        (("rank 0", "coordinator"), 2, False),
        (("deadline",), 3, True),
        (("rank 0",), 3, True),
    ],
)
@pytest.mark.timeout(900)
def test_two_faults_and_snapshots_that_find_no_room_change_nothing(
    faults: tuple[str, ...], checkpoints: int, overlap: bool
) -> None:
    model = Model(policy=DEGRADES, checkpoints=checkpoints, kinds=faults, faults=len(faults), overlap=overlap)
    model.explore()
    assert model.most_committed == checkpoints


class KeepsNothing(Committer):
    def _checkpoint_began(self, event: CheckpointBegan) -> list[Output]:
        return [msgspec.structs.replace(begin, keep=()) for begin in super()._checkpoint_began(event)]


class KeepsOnlyCommitted(Committer):
    def _checkpoint_began(self, event: CheckpointBegan) -> list[Output]:
        keep = tuple(self.committed)
        return [msgspec.structs.replace(begin, keep=keep) for begin in super()._checkpoint_began(event)]


class ForgetsLosses(Committer):
    def _forget(self, holder: str) -> None:
        pass


class RetiresAtOnce(Committer):
    def _replaces(self, new: int, old: int) -> bool:
        return new > old


@pytest.mark.parametrize(
    ("wrong", "fault", "overlap"),
    [
        (KeepsNothing, "deadline", True),
        (KeepsOnlyCommitted, "deadline", True),
        (ForgetsLosses, "holder 0", False),
        (RetiresAtOnce, "deadline", False),
    ],
)
def test_the_search_finds_a_committer_that_breaks_a_rule(wrong: type[Committer], fault: str, overlap: bool) -> None:
    model = Model(policy=DEGRADES, checkpoints=3, kinds=(fault,), committer=wrong, overlap=overlap)
    with pytest.raises(AssertionError, match=r"is not available|no committed checkpoint is available"):
        model.explore()
