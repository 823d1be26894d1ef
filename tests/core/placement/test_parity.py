"""Sets in the core: who is in which, what can be rebuilt from where, and what is one loss too many."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from rackrun.core.placement.snapshot_keepers import keepers_of
from rackrun.protocol.commands import BreakGeneration, FenceWorker, GenerationPlan, Keeper, ResumeGeneration, Stripes
from rackrun.protocol.events import SnapshotStriped, TrayJoined
from rackrun.protocol.ids import Generation, Step, TrayId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, stop_in

ALL = ("a/0", "b/0", "c/0", "d/0")
TWO_OF_FOUR: dict[str, Any] = {"snapshot_copies": "rs", "set_size": 4, "set_parity": 2}


class Rack(CoreHarness):
    """Trays a to d with a rank each, which are one set, and e with a spare for each of two."""

    def __init__(self, trays: str = "abcde", spares: int = 2, slots: int = 1, **config: Any) -> None:
        fields = {"snapshot_copies": "xor", "start_over": True, **config}
        super().__init__(JobConfig(trays_min=len(trays), trays_max=len(trays), spares=spares, **fields))
        for tray in trays:
            self.join(tray, 2 if tray == "e" else slots)

    def stripes(self, slot: str, step: int, besides: int = -1, generation: int | None = None) -> None:
        self.tell(
            SnapshotStriped(
                **self._who(slot),
                generation=Generation(generation or self.view.generation),
                step=Step(step),
                besides=Step(besides),
            )
        )

    def stripe_all(self, step: int, besides: int = -1) -> None:
        for slot in self.members:
            self.stripes(slot, step, besides)

    @property
    def plan(self) -> GenerationPlan:
        return every(ResumeGeneration, self.answers)[-1].plan


@pytest.fixture
def four() -> Rack:
    """All have given the stripes of step 4, and have gone on."""
    rack = Rack()
    rack.train("unique")
    assert rack.members == list(ALL)
    rack.stripe_all(4)
    return rack


def sets(plan: GenerationPlan) -> list[list[str]]:
    return [[f"{keeper.rank}{keeper.tray}" for keeper in of] for of in plan.sets]


# -- sets --------------------------------------------------------------------------------------------------------------
def test_a_plan_has_sets_over_trays_instead_of_mirrors() -> None:
    plan = Rack().plan
    assert plan.mirrors == {}
    assert plan.sets == (tuple(Keeper(rank, TrayId(t), f"{t}:2") for rank, t in enumerate("abcd")),)  # type: ignore[arg-type]


def test_who_keeps_something_of_a_trays_snapshots_is_known() -> None:
    assert keepers_of(Rack().plan) == {tray: tuple(other for other in "abcd" if other != tray) for tray in "abcd"}
    assert keepers_of(Rack("ae", spares=0).plan) == {"a": ("e",), "e": ("a",)}
    assert keepers_of(Rack(snapshot_copies="local").plan) == {}


def test_sets_are_as_large_as_was_asked_for_and_their_members_on_different_trays() -> None:
    plan = Rack("abcdefgh", spares=0, slots=2, set_size=4).plan
    assert sorted(keeper.rank for of in plan.sets for keeper in of) == list(range(16))
    for of in plan.sets:
        assert len({keeper.tray for keeper in of}) == len(of) >= 4


def test_members_are_on_different_hosts_where_there_are_several() -> None:
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=0, snapshot_copies="xor"))
    for tray, host in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")):
        harness.tell(
            TrayJoined(tray=TrayId(tray), host=host, slots=1, store=f"{tray}:1", snapshots=f"{tray}:2", codec=True)
        )
    assert sets(only(ResumeGeneration, harness.answers).plan) == [["0a", "2c"], ["1b", "3d"]]


def test_trays_that_are_too_unlike_for_sets_are_mirrored_and_it_is_said() -> None:
    harness = Rack("ae", spares=0)
    resumed = only(ResumeGeneration, harness.answers)
    assert resumed.plan.sets == ()
    assert resumed.plan.mirrors == {"a": "e:2/e", "e": "a:2/a"}
    assert resumed.protected == (
        "snapshots in memory: a copy of each on another tray; any one tray may be lost, for 2 x 100% of a "
        "shard more memory on a rank (3 ranks on 2 trays make no XOR sets)"
    )


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        (
            "xor",
            "their parity over sets of 4 trays; any one tray may be lost, for 2 x 33% of a shard more memory on a rank",
        ),
        (
            "mirror",
            "a copy of each on another tray; any one tray may be lost, for 2 x 100% of a shard more memory on a rank",
        ),
        ("local", "on their own tray alone and lost with it"),
    ],
)
def test_what_it_survives_and_costs_is_said(copies: str, said: str) -> None:
    resumed = only(ResumeGeneration, Rack(snapshot_copies=copies).answers)
    assert resumed.protected == f"snapshots in memory: {said}"


def test_of_a_set_with_two_parities_any_two_trays_may_be_lost_and_it_is_said() -> None:
    resumed = only(ResumeGeneration, Rack(**TWO_OF_FOUR).answers)
    assert resumed.plan.parity == 2
    assert resumed.protected == (
        "snapshots in memory: their parity over sets of 4 trays; any two trays may be lost, for 2 x 100% of a "
        "shard more memory on a rank"
    )


def test_where_there_are_too_few_trays_for_two_parities_they_are_mirrored_and_it_is_said() -> None:
    resumed = only(ResumeGeneration, Rack("ab", spares=0, **TWO_OF_FOUR).answers)
    assert (resumed.plan.sets, resumed.plan.parity) == ((), 1)
    assert "any one tray may be lost" in resumed.protected
    assert resumed.protected.endswith("(2 ranks on 2 trays make no RS sets)")


def test_with_a_tray_that_lacks_the_codec_all_are_mirrored_and_it_is_said() -> None:
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=0, snapshot_copies="rs", set_size=4, set_parity=2))
    for tray in "abcd":
        joined = TrayJoined(
            tray=TrayId(tray), host=tray, slots=1, store="a:1", snapshots=f"{tray}:2", codec=tray != "c"
        )
        harness.tell(joined)
    resumed = only(ResumeGeneration, harness.answers)
    assert resumed.plan.mirrors
    assert "no codec of Reed-Solomon on c" in resumed.protected


def test_local_copies_nothing() -> None:
    plan = Rack(snapshot_copies="local").plan
    assert (plan.mirrors, plan.sets) == ({}, ())


def test_with_one_tray_there_is_nothing_to_say() -> None:
    resumed = only(ResumeGeneration, Rack("a", spares=0, slots=4).answers)
    assert (resumed.plan.sets, resumed.plan.mirrors, resumed.protected) == ((), {}, "")


def test_after_a_loss_sets_are_formed_anew(four: Rack) -> None:
    four.tray_lost("b")
    plan = plan_in(four.park_all(passed=5, snapshots=[4]))
    assert sets(plan) == [["0a", "2c", "3d", "1e"]]


# -- rebuilt -----------------------------------------------------------------------------------------------------------
def test_a_lost_trays_shard_is_rebuilt_from_the_other_members_and_their_rows(four: Rack) -> None:
    four.tray_lost("b")
    plan = plan_in(four.park_all(passed=5, snapshots=[4]))
    assert plan.rollback == 4
    (restore,) = plan.restores
    assert (restore.rank, restore.snapshot, restore.sources) == (1, "", ())
    assert restore.rebuild == tuple(
        Stripes(
            rank=rank,  # type: ignore[arg-type]
            row=f"{slot[0]}:2/1/{rank}",
            snapshot=f"{slot[0]}:2/{slot}/{four.incarnation[slot]}",
        )
        for rank, slot in enumerate(ALL)
        if rank != 1
    )


def test_what_its_own_tray_has_is_asked_first(four: Rack) -> None:
    four.exits("b/0", snapshots=[4])
    (restore,) = plan_in(four.park_all(passed=5, snapshots=[4])).restores
    assert restore.snapshot
    assert not restore.rebuild


def test_a_member_that_died_on_a_living_tray_gives_what_it_has_left(four: Rack) -> None:
    dead = four.incarnation["c/0"]
    four.exits("c/0", snapshots=[4])
    four.tray_lost("b")
    plan = plan_in(four.park_all(passed=5, snapshots=[4]))
    by_rank = {restore.rank: restore for restore in plan.restores}
    assert by_rank[2].snapshot == f"c:2/c/0/{dead}"  # type: ignore[index]
    assert [one.snapshot for one in by_rank[1].rebuild if one.rank == 2] == [f"c:2/c/0/{dead}"]  # type: ignore[index]


def test_two_lost_of_one_set_are_one_too_many(four: Rack) -> None:
    four.tray_lost("b")
    four.tray_lost("c")
    assert every(FenceWorker, four.park_all(passed=5, snapshots=[4]))
    assert four.view.phase == "restarting"
    assert "no copy of its state is left" in four.view.reason


@pytest.mark.parametrize("lost", [*combinations("abcd", 2)])
def test_two_lost_of_a_set_with_two_parities_are_rebuilt_from_the_other_two(lost: tuple[str, str]) -> None:
    rack = Rack(**TWO_OF_FOUR)
    rack.train("unique")
    rack.stripe_all(4)
    for tray in lost:
        rack.tray_lost(tray)
    plan = plan_in(rack.park_all(passed=5, snapshots=[4]))
    assert plan.rollback == 4
    ranks = {tray: rank for rank, tray in enumerate("abcd")}
    assert [restore.rank for restore in plan.restores] == [ranks[tray] for tray in lost]
    for restore in plan.restores:
        assert [one.rank for one in restore.rebuild] == [ranks[tray] for tray in "abcd" if tray not in lost]
        assert (restore.members, restore.parity) == ((0, 1, 2, 3), 2)


def test_a_keeper_that_is_lost_while_it_is_read_leaves_enough_for_another_plan() -> None:
    rack = Rack(**TWO_OF_FOUR)
    rack.train("unique")
    rack.stripe_all(4)
    rack.tray_lost("b")
    (first,) = plan_in(rack.park_all(passed=5, snapshots=[4])).restores
    assert [one.rank for one in first.rebuild] == [0, 2, 3]
    assert only(BreakGeneration, rack.tray_lost("c")).generation == 3
    again = plan_in(rack.park_all(passed=5, snapshots=[4]))
    assert {restore.rank: [one.rank for one in restore.rebuild] for restore in again.restores} == {1: [0, 3], 2: [0, 3]}


def test_three_lost_of_a_set_with_two_parities_are_one_too_many() -> None:
    rack = Rack(**TWO_OF_FOUR)
    rack.train("unique")
    rack.stripe_all(4)
    for tray in "abc":
        rack.tray_lost(tray)
    rack.park_all(passed=5, snapshots=[4])
    assert "no copy of its state is left" in rack.view.reason


def test_one_lost_of_each_of_two_sets_is_survived() -> None:
    rack = Rack("abcdef", set_size=2)  # e and f have three slots, of which two wait
    rack.train("unique")
    assert sets(rack.plan) == [["0a", "2c", "4e"], ["1b", "3d"]]
    rack.stripe_all(4)
    rack.tray_lost("a")
    rack.tray_lost("d")
    plan = plan_in(rack.park_all(passed=5, snapshots=[4]))
    assert {restore.rank: [one.rank for one in restore.rebuild] for restore in plan.restores} == {0: [2, 4], 3: [1]}


def test_and_without_a_checkpoint_the_job_says_so_and_stops() -> None:
    rack = Rack(start_over=False)
    rack.train("unique")
    rack.stripe_all(20)
    rack.tray_lost("b")
    rack.tray_lost("c")
    stop = stop_in(rack.park_all(passed=21, snapshots=[20]))
    assert "no copy of its state is left" in stop.because
    assert "--checkpoint-dir" in stop.remedy


@pytest.mark.parametrize("silent", range(4))
def test_unless_all_members_have_given_their_stripes_nothing_is_rebuilt(silent: int) -> None:
    rack = Rack()
    rack.train("unique")
    for slot in (slot for at, slot in enumerate(ALL) if at != silent):
        rack.stripes(slot, 4)
    rack.tray_lost("b")
    assert every(FenceWorker, rack.park_all(passed=5, snapshots=[4]))


def test_a_survivor_without_its_own_snapshot_of_the_step_breaks_the_rebuild(four: Rack) -> None:
    four.tray_lost("b")
    four.timer("gather")
    four.parks("a/0", passed=5, snapshots=[4])
    four.parks("c/0", passed=5, snapshots=[4])
    assert every(FenceWorker, four.parks("d/0", passed=5, snapshots=[6]))


def test_the_newest_step_that_can_be_had_is_taken(four: Rack) -> None:
    four.stripe_all(8, besides=4)
    four.tray_lost("b")
    assert plan_in(four.park_all(passed=9, snapshots=[4, 8])).rollback == 8


def test_until_all_have_the_newer_one_elsewhere_the_older_one_counts(four: Rack) -> None:
    for slot in ALL[:-1]:
        four.stripes(slot, 8, besides=4)
    four.tray_lost("b")
    assert plan_in(four.park_all(passed=9, snapshots=[4, 8])).rollback == 4


def test_rows_that_keepers_have_dropped_are_not_counted_on(four: Rack) -> None:
    four.stripe_all(8, besides=4)
    four.stripe_all(12, besides=8)
    four.tray_lost("b")
    assert every(FenceWorker, four.park_all(passed=13, snapshots=[4])), "who has only step 4 has nothing"


def test_stripes_of_a_step_that_was_rolled_back_are_forgotten(four: Rack) -> None:
    """The step is computed again, with the same bits; but the snapshot of it is another file."""
    for slot in ("a/0", "c/0", "d/0"):
        four.stripes(slot, 6, besides=4)
    four.exits("b/0", snapshots=[4])
    assert plan_in(four.park_all(passed=7, snapshots=[4, 6])).rollback == 4
    four.resume_all()
    four.stripes(four.members[1], 6, generation=1)  # with it the old row would be complete
    four.tray_lost("c")
    assert every(FenceWorker, four.park_all(passed=7, snapshots=[6]))


def test_stripes_that_are_told_of_late_count_if_their_step_still_does(four: Rack) -> None:
    """A push outlives the generation in which it began."""
    four.is_severed("a/0")
    four.park_all(passed=8, snapshots=[4, 8])
    for slot in ALL:
        four.stripes(slot, 8, besides=4, generation=1)
        four.stripes(slot, 9, besides=4, generation=1)  # nobody has ever passed it
    four.resume_all()
    four.tray_lost("b")
    assert plan_in(four.park_all(passed=10, snapshots=[8, 9])).rollback == 8


def test_a_rank_that_was_itself_restored_is_no_input_before_it_has_given_its_new_stripes(four: Rack) -> None:
    """It has a snapshot of the step, but as a file of its own: other bytes than those in the rows."""
    four.tray_lost("b")
    newcomer = four.view.spares[0].slot
    four.park_all(passed=5, snapshots=[4])
    four.resume_all()
    four.tray_lost("c")
    assert every(FenceWorker, four.park_all(passed=4, snapshots=[4])), "two of the old set are gone"
    rack = Rack()
    rack.train("unique")
    rack.stripe_all(4)
    rack.tray_lost("b")
    rack.park_all(passed=5, snapshots=[4])
    rack.resume_all()
    assert newcomer in rack.members
    rack.stripe_all(5, besides=4)
    rack.tray_lost("c")
    plan = plan_in(rack.park_all(passed=6, snapshots=[4, 5]))
    assert plan.rollback == 5
    assert [one.row for one in plan.restores[0].rebuild] == ["a:2/2/0", "d:2/2/3", "e:2/2/1"]


def test_with_two_parities_another_may_be_lost_before_it_has_given_them() -> None:
    rack = Rack(**TWO_OF_FOUR)
    rack.train("unique")
    rack.stripe_all(4)
    rack.tray_lost("b")
    rack.park_all(passed=5, snapshots=[4])
    rack.resume_all()
    rack.tray_lost("c")
    plan = plan_in(rack.park_all(passed=4, snapshots=[4]))
    assert {restore.rank: [one.rank for one in restore.rebuild] for restore in plan.restores} == {2: [0, 3]}


def test_a_loss_in_the_middle_of_a_rebuild_is_rebuilt_again(four: Rack) -> None:
    """The newcomer is gone, the inputs are not."""
    four.tray_lost("b")
    first = plan_in(four.park_all(passed=5, snapshots=[4]))
    spare = next(member.slot for member in first.members if member.rank == 1)
    four.exits(spare)
    again = plan_in(four.park_all(passed=5, snapshots=[4]))
    assert again.restores == first.restores


@pytest.mark.parametrize("tray", ["a", "c", "d"])
def test_a_keeper_that_is_lost_while_it_is_read_makes_another_plan_at_once(four: Rack, tray: str) -> None:
    four.tray_lost("b")
    plan_in(four.park_all(passed=5, snapshots=[4]))
    assert only(BreakGeneration, four.tray_lost(tray)).generation == 3
    assert every(FenceWorker, four.park_all(passed=5, snapshots=[4])), "that was one too many"


def test_what_was_rebuilt_and_is_not_what_was_lost_is_not_rebuilt_from_there_again(four: Rack) -> None:
    four.stripe_all(8, besides=4)
    four.tray_lost("b")
    plan = plan_in(four.park_all(passed=9, snapshots=[4, 8]))
    newcomer = next(member.slot for member in plan.members if member.rank == 1)
    answers = four.finds_damaged(newcomer, 8, plan.restores[0].rebuild[0].row)
    assert only(BreakGeneration, answers).because == "the snapshot of step 8 for rank 1 cannot be used (chunk 0)"
    assert plan_in(four.park_all(passed=9, snapshots=[4, 8])).rollback == 4


def test_a_tray_that_has_come_back_has_empty_memory(four: Rack) -> None:
    four.join("a", 1)  # lost, and there again at once
    four.tray_lost("b")
    assert every(FenceWorker, four.park_all(passed=5, snapshots=[4]))


def test_what_is_told_of_a_set_that_never_was_is_ignored(four: Rack) -> None:
    for slot in ALL:
        four.stripes(slot, 6, besides=4, generation=99)
    four.tray_lost("b")
    assert plan_in(four.park_all(passed=7, snapshots=[4, 6])).rollback == 4
