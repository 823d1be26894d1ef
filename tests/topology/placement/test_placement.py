"""Which rank sits where, and what happens to it when something is lost: told on racks that exist."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rackrun.core.members.slot_order import split
from rackrun.protocol.ids import SlotId, TrayId
from rackrun.topology.model.errors import DoesNotFit, TopologyError
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Topology
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.rank_assignment import Placement, place
from tests.topology.placements import AVOID, BAD, cut, joined, machine

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "racks"
NVL72 = read_rack_file(EXAMPLES / "gb200-nvl72.yaml")
TWO = read_rack_file(EXAMPLES / "two-gb200-nvl72.yaml")
HGX = read_rack_file(EXAMPLES / "hgx-h100.yaml")
TP4 = Mesh.of({"dp": 16, "tp": 4})


def trays_of(slots: tuple[str, ...]) -> list[str]:
    return sorted({slot.rpartition("/")[0] for slot in slots})


def moved(placement: Placement) -> dict[int, str]:
    return {move.rank: move.target for move in placement.moves}


# -- from nothing


def test_an_nvl72_trains_on_16_trays_and_holds_two_back() -> None:
    placed = place(NVL72, TP4, spares=8)
    assert placed.slots == tuple(f"tray-{rank // 4:02}/{rank % 4}" for rank in range(64))
    assert placed.spares == tuple(f"tray-{tray}/{gpu}" for tray in (16, 17) for gpu in range(4))
    assert placed.moves == ()


def test_two_racks_take_a_pipeline_each_and_keep_two_trays_each() -> None:
    placed = place(TWO, Mesh.of({"pp": 2, "dp": 16, "tp": 4}), spares=8)
    assert trays_of(placed.spares) == ["rack-00-tray-16", "rack-00-tray-17", "rack-01-tray-16", "rack-01-tray-17"]
    assert placed.terms.pp == 0, "the stages of a pipeline share a rack"
    assert placed.terms.dp == 2 * 4 * 3, "one step of dp crosses, for both stages and 4 ranks, over a leaf and a spine"


def test_expert_parallelism_over_a_whole_rack_fits_one_rack_each() -> None:
    placed = place(TWO, Mesh.of({"dp": 2, "ep": 64}), spares=8)
    assert {slot[:7] for slot in placed.slots[:64]} == {"rack-00"}
    assert {slot[:7] for slot in placed.slots[64:]} == {"rack-01"}


def test_a_group_of_8_takes_one_hgx_host() -> None:
    placed = place(HGX, Mesh.of({"dp": 3, "tp": 8}))
    assert [trays_of(placed.slots[at : at + 8]) for at in (0, 8, 16)] == [["tray-00"], ["tray-01"], ["tray-02"]]
    assert trays_of(placed.spares) == ["tray-03"]


@pytest.mark.parametrize(("trays", "gpus"), [(1, 5), (1, 1), (2, 4), (3, 2), (4, 4), (5, 3), (18, 4)])
def test_in_one_clique_the_same_slots_wait_as_on_a_machine_without_topology(trays: int, gpus: int) -> None:
    topology = joined(machine(trays, gpus))
    for spares in range(trays * gpus):
        training, waiting = split({TrayId(f"a-{tray}"): gpus for tray in range(trays)}, spares)
        placed = place(topology, Mesh.of({"dp": len(training)}), spares=spares)
        assert placed.slots == training
        assert placed.spares == waiting


def test_without_nvlink_between_trays_whole_trays_wait_too() -> None:
    placed = place(Topology.of([machine(18, 4)]), Mesh.of({"dp": 64}))
    assert trays_of(placed.spares) == ["a-16", "a-17"]
    assert place(Topology.of([machine(4, 4)]), Mesh.of({"dp": 10})).slots == split(
        {TrayId(f"a-{tray}"): 4 for tray in range(4)}, 6
    )[0]  # fmt: skip


def test_bad_slots_count_as_held_back_and_degrading_ones_wait() -> None:
    placed = place(NVL72, TP4, spares=8, health={"tray-02": BAD, "tray-09/1": AVOID}, lemons={"tray-05/0": 2})
    assert "tray-02" not in trays_of((*placed.slots, *placed.spares))
    assert {"tray-09/1", "tray-05/0"} <= set(placed.spares)
    assert placed.spares[-1] == "tray-09/1", "and it comes last"
    assert (placed.terms.degrading, placed.terms.lemons) == (0, 0)


def test_only_preflighted_slots_are_used() -> None:
    ready = {f"tray-{tray:02}" for tray in range(17)}
    placed = place(NVL72, TP4, spares=8, preflighted=ready)
    assert trays_of(placed.spares) == ["tray-16"]
    lost = {"tray-16": BAD, "tray-00/0": BAD}
    with pytest.raises(DoesNotFit):
        place(NVL72, TP4, preflighted=ready, health=lost, previous=placed)
    assert moved(place(NVL72, TP4, health=lost, previous=placed)) == {0: "tray-17/0"}


# -- repair


def test_a_lost_tray_is_replaced_by_the_nearest_whole_one() -> None:
    board = PlacementArrays(NVL72)
    placed = place(board, TP4, spares=8)
    after = place(board, TP4, previous=placed, health={"tray-03": BAD})
    assert moved(after) == {12 + gpu: f"tray-16/{gpu}" for gpu in range(4)}
    assert {move.why for move in after.moves} == {f"tray-03/{gpu} is lost" for gpu in range(4)}
    assert after.terms.touched == 1
    again = place(board, TP4, previous=after, health={"tray-03": BAD, "tray-16/2": BAD})
    assert moved(again) == {14: "tray-17/0"}


def test_the_nearest_tray_is_the_one_with_the_next_index() -> None:
    placed = place(NVL72, TP4, health={"tray-02": BAD, "tray-12": BAD})
    back = {"tray-10": BAD}
    assert trays_of(placed.spares) == []
    assert trays_of(tuple(moved(place(NVL72, TP4, previous=placed, health=back)).values())) == ["tray-12"]
    assert place(NVL72, TP4, previous=placed).spares_for(0)[0] == "tray-02/0"


def test_who_sits_on_a_slot_has_passed_its_preflight() -> None:
    placed = place(NVL72, TP4, spares=8)
    after = place(NVL72, TP4, previous=placed, preflighted={"tray-17"}, health={"tray-05/3": BAD})
    assert moved(after) == {23: "tray-17/0"}


def test_without_a_spare_in_its_clique_the_whole_group_moves() -> None:
    mesh = Mesh.of({"dp": 32, "tp": 4})
    placed = place(TWO, mesh, spares=8)
    used_up = {"rack-00-tray-16": BAD, "rack-00-tray-17": BAD}
    bare = place(TWO, mesh, previous=placed, health=used_up)
    assert bare.moves == ()
    after = place(TWO, mesh, previous=bare, health={**used_up, "rack-00-tray-05/2": BAD})
    assert sorted(moved(after)) == [20, 21, 22, 23]
    assert {slot[:7] for slot in moved(after).values()} == {"rack-01"}
    assert "which has 63 usable slots left" in after.moves[0].why
    assert after.terms.uprooted == 1
    assert after.spares_for(0) == ("rack-00-tray-05/0", "rack-00-tray-05/1", "rack-00-tray-05/3"), (
        "what it left behind serves the others"
    )


def test_the_group_that_lost_most_is_the_one_that_moves() -> None:
    topology = joined(machine(3, 4, "a"), machine(3, 4, "b"))
    mesh = Mesh.of({"dp": 5, "tp": 4})
    placed = place(topology, mesh)
    home = {rank: slot[0] for rank, slot in enumerate(placed.slots)}
    full = next(name for name in "ab" if list(home.values()).count(name) == 12)
    lost = [slot for slot in placed.slots if slot[0] == full]
    after = place(topology, mesh, previous=placed, health={lost[0]: BAD, lost[5]: BAD, lost[6]: BAD})
    assert sorted(moved(after)) == sorted(
        [placed.slots.index(lost[0]), *(placed.slots.index(lost[at]) for at in range(4, 8))]
    )


def test_a_rank_on_a_degrading_gpu_moves_while_a_better_one_is_free_and_no_group_moves_for_it() -> None:
    mesh = Mesh.of({"dp": 32, "tp": 4})
    placed = place(TWO, mesh, spares=8)
    after = place(TWO, mesh, previous=placed, health={"rack-00-tray-04/1": AVOID})
    assert moved(after) == {17: "rack-00-tray-16/0"}
    assert after.moves[0].why == "rack-00-tray-04/1 is on its way out"
    none_left = {"rack-00-tray-16": BAD, "rack-00-tray-17": BAD, "rack-00-tray-04/1": AVOID}
    stays = place(TWO, mesh, previous=placed, health=none_left)
    assert stays.moves == ()
    assert "no better one is free" in " ".join(stays.explain(17))


def test_a_group_that_moves_goes_where_no_slot_is_degrading_however_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackrun.topology.placement.exhaustive.CELLS_MAX", 0)
    racks = [machine(2, 2, name, (leaf, "top")) for name, leaf in (("a", "leaf-0"), ("b", "leaf-0"), ("c", "leaf-1"))]
    topology = joined(*racks)
    mesh = Mesh.of({"dp": 2, "tp": 2})
    previous = [SlotId(name) for name in ("a-0/0", "a-0/1", "a-1/0", "a-1/1")]
    near = place(topology, mesh, previous=previous, health={"a-1/0": BAD})
    assert moved(near) == {2: "b-0/0", 3: "b-0/1"}
    far = place(
        topology, mesh, previous=previous, health={"a-1/0": BAD, "b-0/1": AVOID, "b-1/0": AVOID, "b-1/1": AVOID}
    )
    assert moved(far) == {2: "c-0/0", 3: "c-0/1"}


def test_a_degrading_spare_is_better_than_none() -> None:
    placed = place(NVL72, TP4, spares=8)
    health = {"tray-16": BAD, "tray-17": AVOID, "tray-00/0": BAD}
    assert moved(place(NVL72, TP4, previous=placed, health=health)) == {0: "tray-17/0"}


def test_a_rank_that_is_bound_to_nothing_takes_the_nearest_spare() -> None:
    placed = place(TWO, Mesh.of({"dp": 128}), spares=8)
    gone = {"rack-00-tray-16": BAD, "rack-00-tray-17": BAD}
    assert moved(place(TWO, placed.mesh, previous=placed, health={"rack-00-tray-07/0": BAD})) == {
        28: "rack-00-tray-16/0"
    }
    after = place(TWO, placed.mesh, previous=placed, health={**gone, "rack-00-tray-07/0": BAD})
    assert moved(after) == {28: "rack-01-tray-16/0"}
    assert after.terms.uprooted == 0


def test_a_tray_that_is_gone_from_the_topology_is_lost() -> None:
    placed = place(NVL72, TP4, spares=8)
    rack = NVL72.racks[0]
    smaller = Topology.of(
        [type(rack)(serial=rack.serial, trays=rack.trays[1:], fabric=rack.fabric)],
        [cut(NVL72.cliques[0].id.domain, 32766, rack.trays[1:])],
    )
    after = place(smaller, TP4, previous=placed.slots)
    assert sorted(moved(after)) == [0, 1, 2, 3]
    assert {(move.source, move.why) for move in after.moves} == {(None, "it had no slot of this topology")}


def test_a_world_that_grows_keeps_what_stands() -> None:
    smaller = place(NVL72, Mesh.of({"dp": 15, "tp": 4}), spares=12)
    after = place(NVL72, TP4, previous=[*smaller.slots, *[SlotId("")] * 4])
    assert after.slots[:60] == smaller.slots
    assert sorted(moved(after)) == [60, 61, 62, 63]


# -- when it does not fit


def test_what_does_not_fit_is_told_in_figures() -> None:
    with pytest.raises(DoesNotFit) as error:
        place(NVL72, Mesh.of({"dp": 9, "tp": 8}), spares=8)
    assert "9 groups of 8 ranks (tp)" in error.value.what
    assert "72 of 72 slots, 9 groups" in error.value.what
    assert "8 slots of each NVLink domain held back" in error.value.what
    assert error.value.remedy
    with pytest.raises(DoesNotFit, match="2 groups of 16 ranks"):
        place(HGX, Mesh.of({"dp": 2, "tp": 16}))


def test_a_group_crosses_cliques_only_when_that_is_allowed() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 12})
    placed = place(HGX, mesh, allow_cross_clique=True)
    assert placed.terms.crossing == 2
    assert len(set(placed.slots)) == 24
    assert "NVLink does not join them" in " ".join(placed.explain(0))
    after = place(HGX, mesh, previous=placed, health={placed.slots[3]: BAD}, allow_cross_clique=True)
    assert sorted(moved(after)) == [3]
    with pytest.raises(DoesNotFit):
        place(HGX, Mesh.of({"dp": 3, "tp": 11}), allow_cross_clique=True)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [({"health": {"tray-99": BAD}}, "'tray-99'"), ({"preflighted": ["x/0"]}, "'x/0'"), ({"lemons": {"y": 1}}, "'y'")],
)
def test_a_slot_that_there_is_not_is_an_error(wrong: dict[str, object], what: str) -> None:
    with pytest.raises(TopologyError, match=what):
        place(NVL72, TP4, **wrong)  # type: ignore[arg-type]


def test_the_previous_placement_must_be_of_the_same_size() -> None:
    with pytest.raises(
        TopologyError, match="places 3 ranks on 2 different slots of the topology, and the mesh has 64 ranks"
    ):
        place(NVL72, TP4, previous=[SlotId(f"tray-00/{index}") for index in (0, 1, 1)])


@pytest.mark.parametrize(("axes", "bound"), [({"dp": 0}, None), ({"dp": -1}, None), ({"dp": 4}, ["tp"])])
def test_a_mesh_that_cannot_be_is_an_error(axes: dict[str, int], bound: list[str] | None) -> None:
    with pytest.raises(TopologyError):
        Mesh.of(axes, bound)


# -- the mesh


def test_ranks_are_row_major_and_bound_axes_may_stand_anywhere() -> None:
    mesh = Mesh.of({"pp": 2, "ep": 2, "dp": 3, "tp": 2})
    assert mesh.bound == ("ep", "tp")
    assert mesh.groups.tolist()[:2] == [[0, 1, 6, 7], [2, 3, 8, 9]]
    assert mesh.coordinate(8) == (("pp", 0), ("ep", 1), ("dp", 1), ("tp", 0))
    assert mesh.neighbours(1) == ([4], [0, 2])
    assert Mesh.of({"dp": 2, "cp": 2}, ["cp"]).groups.tolist() == [[0, 1], [2, 3]]
    assert Mesh.of({}).world_size == 1


# -- telling


def test_a_rank_is_explained_in_a_few_plain_lines() -> None:
    placed = place(NVL72, TP4, spares=8)
    after = place(NVL72, TP4, previous=placed, health={"tray-03/1": BAD})
    assert after.explain(13) == [
        "rank 13 (dp 3, tp 1) sits on tray-16/0: rack 1825024170029, tray 16, GPU 0, clique 4f2c9a1e-7d0b-4a5e-9c3f-1b8e6d2a7c90.32766.",
        "Its tp group is the 4 ranks 12, 13, 14, 15: all in one clique.",
        "It moved: tray-03/1 is lost.",
        "If it is lost: tray-16/1, tray-16/2, tray-16/3, tray-17/0 and 3 more.",
        "The whole placement: crossing 0, uprooted 0, degrading 0, moved 1, touched 1, pp 0, dp 0, imbalance 49, lemons 0.",
    ]
    with pytest.raises(TopologyError, match="no rank 64"):
        placed.explain(64)


def test_equal_placements_have_equal_ids() -> None:
    one, other = place(NVL72, TP4, spares=8), place(PlacementArrays(NVL72), TP4, spares=8)
    assert one == other
    assert hash(one) == hash(other)
    assert one != place(NVL72, TP4, spares=8, health={"tray-00/0": BAD})
    assert one != place(NVL72, Mesh.of({"dp": 16, "tp": 4}, ["dp"]), spares=8), "the same slots, bound otherwise"


# -- size


def test_a_hundred_thousand_gpus_are_placed_in_seconds_and_repaired_in_milliseconds() -> None:
    topology = joined(*(machine(18, 4, f"r{rack:04}", (f"leaf-{rack // 16}", "spine")) for rack in range(1389)))
    mesh = Mesh.of({"pp": 8, "dp": 1389, "tp": 8})
    start = time.process_time()  # others may use the processors too
    board = PlacementArrays(topology)
    placed = place(board, mesh, spares=8)
    from_nothing_s = time.process_time() - start
    assert placed.terms.pp == 0
    repairs = []
    for rack in range(0, 50, 5):
        start = time.process_time()
        after = place(board, mesh, previous=placed, health={f"r{rack:04}-3/1": BAD})
        assert len(after.moves) == 1
        repairs.append(time.process_time() - start)
    assert from_nothing_s < 20, "1 s on an idle core"
    assert min(repairs) < 0.1, "2 ms on an idle core"
