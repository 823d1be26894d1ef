"""A topology is a value: the same one however it was found, and never one that cannot be."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.racks import Clique, CliqueId, Gpu, Rack, Topology, Tray


def tray(rack: str, index: int, gpus: int = 4) -> Tray:
    found = tuple(Gpu(uuid=f"GPU-{rack}-{index}-{at}", index=at) for at in range(gpus))
    return Tray(name=f"{rack}-{index}", index=index, gpus=found, serial=f"S-{rack}-{index}")


def rack(serial: str, trays: int = 3) -> Rack:
    return Rack(serial=serial, trays=tuple(tray(serial, index) for index in range(trays)))


def joined(of: Rack, domain: str = "d", clique: int = 1) -> Clique:
    return Clique(id=CliqueId(domain, clique), gpus=tuple(gpu.uuid for t in of.trays for gpu in t.gpus))


def shuffled(of: Rack, order: random.Random) -> Rack:
    trays = [replace(t, gpus=tuple(order.sample(t.gpus, len(t.gpus)))) for t in of.trays]
    return replace(of, trays=tuple(order.sample(trays, len(trays))))


def test_the_order_in_which_it_was_found_does_not_matter() -> None:
    racks = [rack("a"), rack("b")]
    cliques = [joined(racks[0], "x"), joined(racks[1], "y")]
    topology = Topology.of(racks, cliques)
    for seed in range(20):
        order = random.Random(seed)
        again = Topology.of(
            [shuffled(one, order) for one in order.sample(racks, 2)],
            [replace(one, gpus=tuple(order.sample(one.gpus, len(one.gpus)))) for one in order.sample(cliques, 2)],
        )
        assert again == topology
        assert again.content_id == topology.content_id
    assert Topology.from_json(topology.to_json()) == topology
    assert Topology.of([racks[0]]).content_id != topology.content_id


def test_every_gpu_has_a_seat_and_a_clique() -> None:
    one, other = rack("a"), rack("b")
    topology = Topology.of([one, other], [joined(one)])
    assert [seat.slot for seat in topology.seats][:5] == ["a-0/0", "a-0/1", "a-0/2", "a-0/3", "a-1/0"]
    assert topology.by_slot["a-2/3"].clique == CliqueId("d", 1)
    assert topology.by_slot["b-1/0"].clique == CliqueId("host:b-1", 0), "what is in none is joined with its own tray's"


@dataclass
class Impossible:
    what: str
    racks: list[Rack]
    cliques: list[Clique]


def impossible() -> list[Impossible]:
    one = rack("a")
    first = one.trays[0]
    twin = replace(first, index=7, name="twin", serial="other")
    return [
        Impossible("chassis serial a", [one, one], []),
        Impossible("tray name a-0", [replace(one, trays=(first, replace(first, index=9, serial="o")))], []),
        Impossible("GPU UUID GPU-a-0-0", [replace(one, trays=(first, twin))], []),
        Impossible("tray serial S-a-0", [replace(one, trays=(first, replace(tray("z", 3), serial="S-a-0")))], []),
        Impossible("tray index", [replace(one, trays=(first, replace(tray("z", 0), serial="o")))], []),
        Impossible("GPU index", [replace(one, trays=(replace(first, gpus=(Gpu(uuid="x", index=0), Gpu(uuid="y", index=0))),))], []),
        Impossible("clique d.1", [one], [joined(one), joined(one)]),
        Impossible("member of cliques GPU-a-0-0", [one], [joined(one), joined(one, "e")]),
        Impossible("clique d.1 has GPU-?, which is on no tray", [one], [Clique(id=CliqueId("d", 1), gpus=("GPU-?",))]),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", impossible(), ids=lambda wrong: wrong.what)
def test_what_cannot_be_is_refused_and_both_are_named(wrong: Impossible) -> None:
    with pytest.raises(TopologyError) as error:
        Topology.of(wrong.racks, wrong.cliques)
    assert wrong.what in error.value.what
    assert error.value.remedy


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"racks": 3}', b'{"racks": [{"serial": 1}]}'])
def test_what_is_no_topology_is_refused(data: bytes) -> None:
    with pytest.raises(TopologyError, match="no topology"):
        Topology.from_json(data)
