"""Where ranks sit when trays tell of their NVLink cliques: at the start, after a loss, and when the world begins again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rackrun.core.machine.view import TrayView
from rackrun.core.members.rack import RackMachine
from rackrun.core.placement.seating import Seating
from rackrun.protocol.commands import Command, FenceWorker, Notice, ResumeGeneration, StartWorker, StopJob
from rackrun.protocol.events import TrayDescribed, TrayJoined
from rackrun.protocol.gpu_health import Health
from rackrun.protocol.ids import Rank, SlotId, TrayId
from rackrun.protocol.job_config import JobConfig
from tests.core.core_harness import CoreHarness, every, only, plan_in, ranks, stop_in, topology_of


def two_cliques(**settings: Any) -> CoreHarness:
    """Trays a, b in clique x and c, d in clique y, two GPUs each."""
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=settings.pop("spares", 0), **settings))
    for tray in "abcd":
        harness.join(tray, 2, clique="x" if tray in "ab" else "y")
    return harness


def tensor_parallel(pairs: int = 2, size: int = 2, **settings: Any) -> CoreHarness:
    harness = two_cliques(mesh=(("dp", pairs), ("tp", size)), **settings)
    harness.train()
    return harness


def joins_with_the_gpu_of_a(harness: CoreHarness, tray: str) -> Sequence[Command]:
    lying = topology_of(tray, 1, "x").replace(f"GPU-{tray}-0".encode(), b"GPU-a-0")
    event = TrayJoined(tray=TrayId(tray), host=tray, slots=1, store=f"{tray}:1", snapshots=f"{tray}:2", topology=lying)
    return harness.tell(event)


def clique_of(slot: str) -> str:
    return "x" if slot[0] in "ab" else "y"


def test_spares_are_held_back_in_every_nvlink_domain() -> None:
    harness = two_cliques(spares=4)
    trained = [rank.slot for rank in harness.view.ranks]
    assert [clique_of(slot) for slot in trained] == ["x", "x", "y", "y"]


def test_a_status_page_shows_each_trays_rack_clique_and_who_keeps_its_snapshots() -> None:
    harness = two_cliques()
    harness.train()
    trays: dict[str, TrayView] = {tray.tray: tray for tray in harness.view.trays}
    assert len({trays[name].clique for name in "ab"}) == len({trays[name].clique for name in "cd"}) == 1
    assert trays["a"].clique != trays["c"].clique
    assert all(tray.rack for tray in trays.values())
    assert [tray.keepers for tray in trays.values()] == [("b",), ("c",), ("d",), ("a",)]


def test_where_a_group_needs_a_whole_clique_a_whole_clique_waits() -> None:
    harness = two_cliques(mesh=(("dp", 1), ("tp", 4)), spares=4)
    assert len({clique_of(rank.slot) for rank in harness.view.ranks}) == 1


def test_the_mesh_decides_how_many_train_and_what_is_left_over_waits() -> None:
    harness = tensor_parallel(pairs=3)
    assert harness.view.world_size == 6
    assert len(harness.view.spares) == 2


def test_a_mesh_that_no_clique_has_room_for_is_refused_before_anything_starts() -> None:
    harness = two_cliques(mesh=(("dp", 1), ("tp", 8)))
    stop = only(StopJob, harness.answers)
    assert stop.exit_code == 2
    assert "inside one clique" in stop.because
    assert not every(StartWorker, harness.answers)


def test_a_slot_whose_gpu_is_not_fit_at_the_start_gets_no_rank() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=2))
    harness.join("a", 2, clique="x", unfit={0: "its fabric registration is not completed"})
    harness.join("b", 2, clique="x")
    assert "a/0" not in [rank.slot for rank in harness.view.ranks]


def test_trays_that_contradict_each_other_end_the_job_and_both_are_named() -> None:
    harness = CoreHarness(JobConfig(trays_min=2, trays_max=2, spares=0))
    harness.join("a", 1, clique="x")
    stop = stop_in(joins_with_the_gpu_of_a(harness, "b"))
    assert stop.exit_code == 2
    assert "a/0" in stop.because
    assert "b/0" in stop.because


def test_a_lost_member_of_a_bound_group_is_replaced_inside_its_clique() -> None:
    harness = tensor_parallel(pairs=3)  # one clique has two pairs; the other one, and both spares
    spares = [spare.slot for spare in harness.view.spares]
    near = next(rank.slot for rank in harness.view.ranks if clique_of(rank.slot) == clique_of(spares[0]))
    harness.exits(near)
    plan = plan_in(harness.park_all())
    assert all(clique_of(plan.members[r].slot) == clique_of(plan.members[r + 1].slot) for r in (0, 2, 4))


def test_a_group_whose_clique_has_no_room_moves_as_a_whole() -> None:
    harness = tensor_parallel(
        pairs=1, size=3
    )  # ranks 0, 1, 2 in one clique, which has one spare; four more wait in the other
    here = clique_of(harness.view.ranks[0].slot)
    for spare in [spare.slot for spare in harness.view.spares if clique_of(spare.slot) == here]:
        harness.judges(spare, Health.LOST)
    lost = harness.view.ranks[1].slot
    harness.judges(lost, Health.LOST)
    harness.timer("gather")
    for rank in harness.view.ranks:
        if rank.state == "breaking":
            harness.parks(rank.slot, snapshots=(4,))
    fenced = [command.slot for command in every(FenceWorker, harness.answers)]
    assert len(fenced) == 4, "the spare, the lost one, and the two that have to leave with it"


def test_without_room_in_any_clique_the_job_stops_and_says_what_would_help() -> None:
    harness = tensor_parallel(pairs=2, size=3)  # three of each clique's four; a spare in each
    here = clique_of(harness.view.ranks[0].slot)
    for spare in [spare.slot for spare in harness.view.spares if clique_of(spare.slot) == here]:
        harness.judges(spare, Health.LOST)
    harness.judges(harness.view.ranks[0].slot, Health.LOST)
    stop = stop_in(harness.park_all())
    assert stop.exit_code == 3
    assert "NVLink clique" in stop.because
    assert "--cross-clique" in stop.remedy


def test_with_leave_it_goes_on_over_the_network() -> None:
    harness = tensor_parallel(pairs=2, size=3, cross_clique=True)
    here = clique_of(harness.view.ranks[0].slot)
    for spare in [spare.slot for spare in harness.view.spares if clique_of(spare.slot) == here]:
        harness.judges(spare, Health.LOST)
    harness.judges(harness.view.ranks[0].slot, Health.LOST)
    plan = plan_in(harness.park_all())
    assert {clique_of(slot) for rank, slot in ranks(plan).items() if rank < 3} == {"x", "y"}


def test_a_mesh_that_only_the_script_names_is_held_against_the_cliques() -> None:
    harness = two_cliques(spares=2)
    slots = [rank.slot for rank in harness.view.ranks]
    answers = [command for slot in slots for command in harness.ready(slot, "all", mesh={"dp": 1, "tp": 6})]
    stop = stop_in(answers)
    assert stop.exit_code == 2
    assert "NVLink does not join them" in stop.because
    assert "--mesh dp=1,tp=6" in stop.remedy


def test_a_mesh_of_another_size_than_the_world_is_refused() -> None:
    harness = two_cliques(spares=2)
    stop = stop_in(harness.ready(harness.view.ranks[0].slot, "all", mesh={"dp": 2, "tp": 4}))
    assert stop.exit_code == 2
    assert "dp=2,tp=4 is not of 6 ranks" in stop.because


def test_a_mesh_that_fits_as_ranks_sit_is_kept_for_later() -> None:
    harness = two_cliques(spares=4)
    for rank in harness.view.ranks:
        harness.ready(rank.slot, "all", mesh={"dp": 2, "tp": 2})
    for spare in harness.view.spares:
        harness.ready(spare.slot)
    harness.exits(harness.view.ranks[0].slot)
    plan = plan_in(harness.park_all())
    assert clique_of(plan.members[0].slot) == clique_of(plan.members[1].slot)


def test_a_tray_that_comes_late_and_contradicts_the_others_is_not_used() -> None:
    harness = two_cliques(spares=2)
    harness.train()
    answers = joins_with_the_gpu_of_a(harness, "e")
    assert "e is not used" in only(Notice, answers).text
    assert not every(StartWorker, answers)
    assert harness.view.phase == "training"


def test_trays_whose_driver_was_silent_at_first_are_known_when_they_tell() -> None:
    harness = CoreHarness(JobConfig(trays_min=4, trays_max=4, spares=2, mesh=(("dp", 3), ("tp", 2))))
    for tray in "abcd":
        harness.join(tray, 2)
    harness.train()
    for tray in "abcd":
        harness.tell(TrayDescribed(tray=TrayId(tray), topology=topology_of(tray, 2, "x" if tray in "ab" else "y")))
    assert not every(Notice, harness.answers)
    harness.exits("a/0")
    moved = harness.park_all(snapshots=(4,))
    assert only(FenceWorker, moved).slot == "a/1", "both spares are in the other clique: the pair moves there"


@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_restart_keeps_groups_inside_their_cliques(lost: str) -> None:
    harness = two_cliques(mesh=(("dp", 2), ("tp", 2)))
    harness.elastic(harness.members[0])
    harness.tray_lost(lost)
    for slot in [slot for slot in harness.incarnation if slot[0] != lost]:
        if harness.view.phase == "restarting":
            harness.exits(slot)
    plan = every(ResumeGeneration, harness.answers)[-1].plan
    assert plan.generation == 2
    assert all(clique_of(plan.members[r].slot) == clique_of(plan.members[r + 1].slot) for r in (0, 2))
    assert not any(member.slot.startswith(lost) for member in plan.members)


def test_a_spare_may_be_named_that_waits_where_a_lost_rank_was() -> None:
    harness = two_cliques(spares=2)
    harness.train()
    seats = {rank.rank: rank.slot for rank in harness.view.ranks}
    here, other = seats[Rank(0)], harness.view.spares[0].slot
    staff = harness.core._job.seating.staff(seats, [Rank(0), Rank(5)], [here, other], {Rank(5): here})
    assert staff is not None
    assert staff.seats == {5: here, 0: other}


# -- trays that come back otherwise ----------------------------------------------------------------------------------
def test_a_tray_may_come_back_with_fewer_slots_than_it_had() -> None:
    harness = two_cliques(spares=4)
    harness.train()
    harness.stalls("a/1", silent=True)  # a point against its slot
    harness.park_all()
    harness.resume_all()
    harness.tray_lost("a")
    harness.join("a", 1, clique="x")
    assert "a/1" not in ranks(plan_in(harness.park_all())).values()


def test_a_tray_that_contradicts_others_is_not_used_however_well_its_gpus_are() -> None:
    harness = two_cliques(spares=4)
    harness.train()
    harness.judges("d/1", Health.LOST)
    harness.exits("d/1")
    joins_with_the_gpu_of_a(harness, "e")
    harness.checks("e/0", "its driver does not answer")
    assert not every(StartWorker, harness.checks("e/0"))
    harness.tray_lost("e")
    assert only(StartWorker, harness.join("e", 1, clique="x")).slot == "e/0", "it tells something else now"


def test_where_a_rank_sits_is_said_with_its_group_or_why_that_is_not_known() -> None:
    harness = tensor_parallel()
    seating, seats = harness.core._job.seating, {rank.rank: rank.slot for rank in harness.view.ranks}
    clique = seating.where(seats, Rank(1))
    assert clique[0].startswith(f"rank 1 (dp 0, tp 1) sits on {seats[Rank(1)]}")
    assert "clique" in clique[1]
    gone = seating.where({**seats, Rank(3): SlotId("z/0")}, Rank(3))
    assert gone == ["rank 3 (dp 1, tp 1) sits on z/0.", "Some ranks' slots are there no more."]
    plain = Seating(JobConfig(trays_min=1, trays_max=1, spares=0), RackMachine()).where(
        {Rank(0): SlotId("a/0")}, Rank(0)
    )
    assert plain == ["rank 0 (dp 0) sits on a/0.", "Nobody has told of NVLink cliques."]
