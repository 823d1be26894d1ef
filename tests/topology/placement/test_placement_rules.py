"""What holds for every placement, over drawn topologies, meshes and faults."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import DoesNotFit
from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.placement.arrays import PlacementArrays
from rackrun.topology.placement.rank_assignment import Placement, place
from tests.topology.placements import AVOID, BAD, USABLE, Drawn, Oracle, chances, draw_case, draw_health, shuffled

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "racks"
RACKS = {name: read_rack_file(EXAMPLES / f"{name}.yaml") for name in ("gb200-nvl72", "two-gb200-nvl72", "hgx-h100")}
few = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


class Story:
    """A placement, and then faults one after the other, each placed against the one before."""

    def __init__(self, chance: random.Random, case: Drawn | None = None) -> None:
        self.chance = chance
        self.case = case or draw_case(chance, slots=96, world=96)
        self.board = PlacementArrays(self.case.topology)
        self.preflighted: set[str] | None = None
        if chance.randint(0, 2) == 0:
            self.preflighted = {slot for slot in self.board.slots if chance.randint(0, 4)}
        self.placed: Placement | None = None
        self.step()

    def place(self, case: Drawn | None = None, previous: tuple[SlotId, ...] | None = None) -> Placement | None:
        case = case or self.case
        try:
            return place(
                case.topology, case.mesh, spares=case.spares, health=case.health, lemons=case.lemons,
                preflighted=self.preflighted, previous=previous,
            )  # fmt: skip
        except DoesNotFit:
            return None

    def step(self) -> None:
        before = self.placed
        if before is not None:
            self.case.health |= draw_health(self.chance, self.case.topology, self.chance.randint(1, 4))
        self.placed = self.place(previous=before.slots if before else None)
        Rules(self, before).check()

    def run(self, faults: int = 4) -> None:
        for _ in range(self.chance.randint(0, faults)):
            if self.placed is not None:
                self.step()


class Rules:
    """Counted from names, in plain Python."""

    def __init__(self, story: Story, before: Placement | None) -> None:
        self.story, self.before, self.case = story, before, story.case
        oracle = Oracle(self.case.topology, self.case.mesh, health=self.case.health)
        self.clique = oracle.homes
        self.ready = story.preflighted if story.preflighted is not None else set(self.clique)
        kept = set(before.slots) if before else set()
        self.fitness = {slot: oracle.fitness(slot) if slot in self.ready | kept else BAD for slot in self.clique}
        self.groups: dict[tuple[int, ...], list[int]] = {}
        for rank, group in enumerate(oracle.group):
            self.groups.setdefault(group, []).append(rank)
        self.oracle = oracle

    def check(self) -> None:
        placed = self.story.placed
        assert (placed is not None) == self.fits(), "it is placed exactly when all groups fit"
        if placed is None:
            return
        slots = placed.slots
        assert len({*slots, *placed.spares}) == len(slots) + len(placed.spares), "nobody shares a slot"
        for ranks in self.groups.values():
            assert len({self.clique[slots[rank]] for rank in ranks}) == 1, "no bound group crosses a clique"
        assert all(self.fitness[slot] != BAD for slot in (*slots, *placed.spares))
        moved = {move.rank: move for move in placed.moves}
        for rank, slot in enumerate(slots):
            old = self.before.slots[rank] if self.before else None
            assert (rank in moved) == (old is not None and old != slot)
            assert slot == old or slot in self.ready, "a spare that is not preflighted is never used"
        assert set(placed.spares) <= self.ready | set(self.before.slots if self.before else ())
        if self.before is not None:
            self.check_moves(self.before, len(moved))
        self.check_determinism(placed)
        self.check_explanations(placed)

    def fits(self) -> bool:
        usable = Counter(self.clique[slot] for slot, fitness in self.fitness.items() if fitness != BAD)
        every = Counter(self.clique.values())
        size = self.case.mesh.group_size
        domains: Counter[str] = Counter()
        for clique in every:
            domains[clique.domain] += usable[clique] // size
        if self.before is None:
            for domain in domains:
                slots = sum(count for clique, count in every.items() if clique.domain == domain)
                domains[domain] = min(domains[domain], max(0, slots - self.case.spares) // size)
        return sum(domains.values()) >= len(self.groups)

    def check_moves(self, before: Placement, moved: int) -> None:
        """The least: those that lost their slot, and those on degrading slots for whom a better one is left."""
        lost: Counter[CliqueId] = Counter()
        leaving: Counter[CliqueId] = Counter()
        free = Counter(self.clique[slot] for slot, fitness in self.fitness.items() if fitness == USABLE)
        usable = Counter(self.clique[slot] for slot, fitness in self.fitness.items() if fitness != BAD)
        for slot in before.slots:
            home = self.clique[slot]
            lost[home] += self.fitness[slot] == BAD
            leaving[home] += self.fitness[slot] == AVOID
            free[home] -= self.fitness[slot] == USABLE
            usable[home] -= self.fitness[slot] != BAD
        if self.case.mesh.group_size == 1:
            assert moved == lost.total() + min(leaving.total(), max(0, free.total() - lost.total()))
        elif all(lost[home] <= usable[home] for home in lost):
            escapes = sum(min(leaving[home], max(0, free[home] - lost[home])) for home in leaving)
            assert moved == lost.total() + escapes, "a spare in the same clique: nobody else moves"

    def check_determinism(self, placed: Placement) -> None:
        order = random.Random(placed.content_id)
        case = self.case
        health = dict(order.sample(sorted(case.health.items()), len(case.health)))
        again = replace(case, topology=shuffled(case.topology, order), health=health)
        other = self.story.place(again, self.before.slots if self.before else None)
        assert other is not None
        assert other.content_id == placed.content_id
        assert other == placed

    def check_explanations(self, placed: Placement) -> None:
        for rank in {0, placed.mesh.world_size - 1, *(move.rank for move in placed.moves[:2])}:
            assert placed.slots[rank] in placed.explain(rank)[0]
            spares = placed.spares_for(rank)
            assert set(spares) <= set(placed.spares)
            if placed.mesh.group_size > 1:
                assert {self.clique[slot] for slot in spares} <= {self.clique[placed.slots[rank]]}
            else:
                assert len(spares) == len(placed.spares)


@few
@given(chances())
def test_rules_hold_from_the_first_placement_to_the_last_fault(chance: random.Random) -> None:
    Story(chance).run()


REAL = [
    ("gb200-nvl72", {"dp": 16, "tp": 4}, 8),
    ("gb200-nvl72", {"dp": 8, "tp": 8}, 8),
    ("gb200-nvl72", {"ep": 64}, 8),
    ("two-gb200-nvl72", {"pp": 2, "dp": 16, "tp": 4}, 8),
    ("two-gb200-nvl72", {"pp": 4, "dp": 4, "tp": 8}, 8),
    ("two-gb200-nvl72", {"dp": 2, "ep": 64}, 8),
    ("two-gb200-nvl72", {"dp": 128}, 8),
    ("hgx-h100", {"dp": 3, "tp": 8}, 0),
    ("hgx-h100", {"dp": 4, "tp": 7}, 1),
]


def on_a_real_rack(name: str, axes: dict[str, int], spares: int, chance: random.Random) -> None:
    Story(chance, Drawn(RACKS[name], Mesh.of(axes), spares)).run(faults=8)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(REAL), chances())
def test_rules_hold_on_racks_that_exist(real: tuple[str, dict[str, int], int], chance: random.Random) -> None:
    on_a_real_rack(*real, chance)


@few
@given(chances())
def test_knowing_of_more_degrading_slots_never_leads_to_more_use_of_degrading_slots(chance: random.Random) -> None:
    knowing_more_never_hurts(chance)


def knowing_more_never_hurts(chance: random.Random) -> None:
    story = Story(chance)
    if story.placed is None:
        return
    case, previous = story.case, story.placed.slots
    worse = {slot: AVOID for slot in draw_health(chance, case.topology, 4) if "/" in slot}
    faults = draw_health(chance, case.topology, 2)
    for before in (None, previous):
        ignorant = replace(case, health=case.health | (faults if before else {}))
        told = replace(ignorant, health={**worse, **ignorant.health})
        one, other = story.place(ignorant, before), story.place(told, before)
        assert (one is None) == (other is None), "a slot to avoid is still a slot"
        if one is not None and other is not None:
            suspects = Oracle(told.topology, told.mesh, health=told.health)
            used = [sum(suspects.fitness(slot) == AVOID for slot in placed.slots) for placed in (one, other)]
            assert used[1] <= used[0]


@few
@given(chances())
def test_the_first_spare_of_a_rank_is_the_one_that_takes_it_over(chance: random.Random) -> None:
    the_first_spare_is_taken(chance)


def the_first_spare_is_taken(chance: random.Random) -> None:
    story = Story(chance)
    placed = story.placed
    if placed is None or any(story.case.health.values()):
        return
    rank = chance.randint(0, placed.mesh.world_size - 1)
    spares = placed.spares_for(rank)
    story.case.health = {placed.slots[rank]: BAD}
    after = story.place(previous=placed.slots)
    if spares:
        assert after is not None
        assert [(move.rank, move.target) for move in after.moves] == [(rank, spares[0])]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20))
def test_rules_hold_in_many_more_stories(seed: int) -> None:
    for number in range(500):
        Story(random.Random(seed * 1_000 + number)).run()
        knowing_more_never_hurts(random.Random(seed * 1_000 + number))
        the_first_spare_is_taken(random.Random(seed * 1_000 + number))
    for real in REAL:
        for number in range(10):
            on_a_real_rack(*real, random.Random(seed * 1_000 + number))
