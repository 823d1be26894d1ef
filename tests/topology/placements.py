"""What the tests of the placement share: drawn topologies, and an oracle that tries every assignment.

The oracle knows nothing of the solver: it counts each term from the slots' names, in plain Python.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hypothesis import strategies as st
from msgspec.structs import replace

from rackrun.topology.model.mesh import Mesh
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray
from rackrun.topology.placement.rank_assignment import Fitness

USABLE, AVOID, BAD = Fitness.USABLE, Fitness.AVOID, Fitness.BAD


def tray(rack: str, index: int, gpus: int) -> Tray:
    name = f"{rack}-{index}"
    return Tray(name=name, index=index, gpus=tuple(Gpu(uuid=f"GPU-{name}-{at}", index=at) for at in range(gpus)))


def machine(trays: int, gpus: int, serial: str = "a", fabric: tuple[str, ...] = ()) -> Rack:
    return Rack(serial=serial, trays=tuple(tray(serial, index, gpus) for index in range(trays)), fabric=fabric)


def joined(*racks: Rack) -> Topology:
    """Each rack one clique of a domain of its own."""
    return Topology.of(racks, [cut(rack.serial, 1, rack.trays) for rack in racks])


def cut(domain: str, number: int, trays: tuple[Tray, ...]) -> Clique:
    return Clique(id=CliqueId(domain, number), gpus=tuple(gpu.uuid for one in trays for gpu in one.gpus))


@dataclass
class Drawn:
    topology: Topology
    mesh: Mesh
    spares: int
    health: dict[str, Fitness] = field(default_factory=dict)
    lemons: dict[str, int] = field(default_factory=dict)


FABRICS: tuple[tuple[str, ...], ...] = (("leaf-0", "top"), ("leaf-1", "top"), ("top",), ())


def draw_topology(chance: random.Random, slots: int, racks: int = 4, trays: int = 6, gpus: int = 4) -> Topology:
    """Racks under one, two or no switches, of at most ``slots`` GPUs; cliques cut by rack, tray or GPU, or across racks."""
    per_tray = chance.randint(1, gpus)
    left = max(1, slots // per_tray)
    built = []
    for at in range(chance.randint(1, racks)):
        if left:
            built.append(machine(chance.randint(1, min(trays, left)), per_tray, f"r{at}", chance.choice(FABRICS)))
            left -= len(built[-1].trays)
    how = chance.choice(["rack", "rack", "tray", "half", "gpu", "anyhow"])
    cliques: dict[CliqueId, list[str]] = {}
    for number, rack in enumerate(built):
        for one in rack.trays if how != "tray" else ():
            for gpu in one.gpus:
                half = chance.randint(0, 1) if how == "gpu" else int(one.index * 2 >= len(rack.trays))
                name = (
                    CliqueId("d", chance.randint(0, 2))
                    if how == "anyhow"
                    else CliqueId(f"d{number}", half * (how != "rack"))
                )
                cliques.setdefault(name, []).append(gpu.uuid)
    return Topology.of(built, [Clique(id=name, gpus=tuple(members)) for name, members in cliques.items()])


def draw_case(chance: random.Random, slots: int, world: int, racks: int = 4, trays: int = 6, gpus: int = 4) -> Drawn:
    """A topology, a mesh that is no larger than it, spares, and what is known of its slots."""
    topology = draw_topology(chance, slots, racks, trays, gpus)
    room = min(len(topology.seats), world)
    axes = {}
    for name in chance.sample(["pp", "dp", "tp", "ep", "cp"], chance.randint(1, 4)):
        axes[name] = chance.choice([size for size in (1, 2, 2, 3, 4, room) if size <= room])
        room //= axes[name]
    spares = chance.choice([0, chance.randint(0, len(topology.seats) - math.prod(axes.values()))])
    lemons = {chance.choice(topology.seats).slot: chance.randint(1, 3) for _ in range(chance.choice([0, 0, 2, 4]))}
    return Drawn(topology, Mesh.of(axes), spares, draw_health(chance, topology, chance.randint(0, 3)), lemons)


def draw_health(chance: random.Random, topology: Topology, count: int) -> dict[str, Fitness]:
    names = [seat.slot for seat in topology.seats] * 2 + sorted(topology.trays)
    return {chance.choice(names): chance.choice([AVOID, BAD]) for _ in range(count)}


def chances() -> st.SearchStrategy[random.Random]:
    return st.randoms(use_true_random=False)


def shuffled(topology: Topology, order: random.Random) -> Topology:
    """The same, found in another order."""
    racks = [
        replace(rack, trays=tuple(order.sample([replace(one, gpus=tuple(order.sample(one.gpus, len(one.gpus)))) for one in rack.trays], len(rack.trays))))
        for rack in topology.racks
    ]  # fmt: skip
    cliques = [replace(one, gpus=tuple(order.sample(one.gpus, len(one.gpus)))) for one in topology.cliques]
    return Topology.of(order.sample(racks, len(racks)), order.sample(cliques, len(cliques)))


# -- the oracle


@dataclass
class Oracle:
    """Every term of an assignment, and the best there is of all."""

    topology: Topology
    mesh: Mesh
    spares: int = 0
    health: Mapping[str, Fitness] = field(default_factory=dict)
    lemons: Mapping[str, int] = field(default_factory=dict)
    previous: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self.seat = {seat.slot: seat for seat in self.topology.seats}
        self.open = [slot for slot in self.seat if self.fitness(slot) != BAD]
        self.coordinates = list(itertools.product(*(range(size) for _, size in self.mesh.axes)))
        self.rank = {at: rank for rank, at in enumerate(self.coordinates)}
        self.group = [
            tuple(at for at, (name, _) in zip(place, self.mesh.axes, strict=True) if name not in self.mesh.bound)
            for place in self.coordinates
        ]
        self.homes = {seat.slot: seat.clique for seat in self.topology.seats}
        first = {
            clique: next(s.rack for s in self.topology.seats if s.clique == clique) for clique in {*self.homes.values()}
        }
        self.far = {(a, b): far(first[a], first[b], a == b, self.topology) for a in first for b in first}
        self.pairs = list(self._pairs())

    def fitness(self, slot: str) -> Fitness:
        return max(self.health.get(slot, USABLE), self.health.get(slot.rpartition("/")[0], USABLE))

    def _pairs(self) -> Iterator[tuple[bool, int, int]]:
        for at, (name, size) in enumerate(self.mesh.axes):
            for place in self.coordinates if name not in self.mesh.bound else ():
                if place[at] + 1 < size:
                    yield name == "pp", self.rank[place], self.rank[(*place[:at], place[at] + 1, *place[at + 1 :])]

    def terms(self, slots: tuple[str, ...]) -> tuple[int, ...]:
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, group in enumerate(self.group):
            members.setdefault(group, []).append(rank)
        crossing = uprooted = touched = 0
        for ranks in members.values():
            now = {self.homes[slots[rank]] for rank in ranks}
            crossing += len(now) > 1
            if self.previous is not None:
                before = {self.homes[self.previous[rank]] for rank in ranks if self.previous[rank] in self.seat}
                left = len(before) == 1 and self.homes[slots[ranks[0]]] not in before
                uprooted += left and len(ranks) > 1
                touched += any(self.previous[rank] != slots[rank] for rank in ranks) + left
        free = [self.homes[slot] for slot in self.open if slot not in slots]
        distance = {True: 0, False: 0}
        for is_pp, one, other in self.pairs:
            distance[is_pp] += self.far[self.homes[slots[one]], self.homes[slots[other]]]
        return (
            crossing,
            uprooted,
            sum(self.fitness(slot) == AVOID for slot in slots),
            sum(a != b for a, b in zip(slots, self.previous, strict=True)) if self.previous is not None else 0,
            touched,
            distance[True],
            distance[False],
            sum(free.count(clique) ** 2 for clique in {*free}),
            sum(self.lemons.get(slot, 0) for slot in slots),
        )

    def holds_back(self, slots: tuple[str, ...]) -> bool:
        if self.previous is not None or not self.spares:
            return True
        used = [self.homes[slot].domain for slot in slots]
        every = [clique.domain for clique in self.homes.values()]
        return all(used.count(domain) + self.spares <= every.count(domain) for domain in {*used})

    def best(self) -> tuple[int, ...] | None:
        """None: there is no assignment in which no bound group crosses."""
        found = (self.terms(slots) for slots in self._assignments([]) if self.holds_back(slots))
        return min(found, default=None)

    def _assignments(self, slots: list[str]) -> Iterator[tuple[str, ...]]:
        if len(slots) == len(self.group):
            yield tuple(slots)
            return
        group = self.group[len(slots)]
        mates = [slots[rank] for rank in range(len(slots)) if self.group[rank] == group]
        for slot in self.open:
            if slot not in slots and (not mates or self.homes[mates[0]] == self.homes[slot]):
                yield from self._assignments([*slots, slot])


def far(one: Rack, other: Rack, same: bool, topology: Topology) -> int:
    """0 in one clique, 1 in one rack, 2 under one switch, 3 under one switch of switches, ..."""
    if same:
        return 0
    if one.serial == other.serial:
        return 1
    depth = max(len(rack.fabric) for rack in topology.racks)
    shared = 0
    for a, b in zip(reversed(one.fabric), reversed(other.fabric), strict=False):
        if a != b:
            break
        shared += 1
    return 2 + depth - shared
