"""What a process is told about its place: NCCL's variables, each with its reason, and the cores near its GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.rack_file import read_rack_file
from rackrun.topology.model.racks import Gpu, Rack, Topology, Tray
from rackrun.topology.placement.rank_environment import binding, cores, nccl_environment
from tests.topology.placements import cut, machine

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "racks"
NVL72 = read_rack_file(EXAMPLES / "gb200-nvl72.yaml")
HGX = read_rack_file(EXAMPLES / "hgx-h100.yaml")


def told(topology: Topology, slot: str) -> dict[str, str]:
    variables = nccl_environment(topology, SlotId(slot))
    assert all(variable.why for variable in variables)
    return {variable.name: variable.value for variable in variables}


def one_tray(*cpus: str, numa: int | None = 0) -> Topology:
    gpus = tuple(Gpu(uuid=f"GPU-{at}", index=at, cpus=text, numa=numa) for at, text in enumerate(cpus))
    return Topology.of([Rack(serial="a", trays=(Tray(name="t", index=0, gpus=gpus),))])


def test_a_tray_of_an_nvl72_uses_nvlink_between_trays_and_the_cards_near_its_gpus() -> None:
    assert told(NVL72, "tray-03/2") == {"NCCL_MNNVL_ENABLE": "2", "NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_3,mlx5_4"}
    near = {variable.name: variable.why for variable in nccl_environment(NVL72, SlotId("tray-03/2"))}
    assert near["NCCL_IB_HCA"] == "the cards near the GPUs of tray-03; near GPU 2: mlx5_3"


def test_all_of_a_tray_see_the_same_cards() -> None:
    for tray, gpus in (("tray-00", 4), ("tray-17", 4)):
        assert len({told(NVL72, f"{tray}/{gpu}")["NCCL_IB_HCA"] for gpu in range(gpus)}) == 1


def test_between_hgx_hosts_there_is_no_nvlink() -> None:
    assert told(HGX, "tray-01/0")["NCCL_MNNVL_ENABLE"] == "0"


def test_a_machine_without_gpus_needs_nothing_else() -> None:
    assert told(read_rack_file(EXAMPLES / "cpu.yaml"), "tray-00/0") == {"NCCL_MNNVL_ENABLE": "0"}


def test_the_clique_is_named_only_where_a_domain_is_cut() -> None:
    rack = machine(4, 2)
    topology = Topology.of([rack], [cut("d", 7, rack.trays[:2]), cut("d", 8, rack.trays[2:])])
    assert told(topology, "a-0/0")["NCCL_MNNVL_CLIQUE_ID"] == "7"
    assert told(topology, "a-3/1")["NCCL_MNNVL_CLIQUE_ID"] == "8"
    assert "NCCL_MNNVL_CLIQUE_ID" not in told(NVL72, "tray-00/0")


def test_gpus_share_the_cores_of_their_cpu_evenly() -> None:
    bound = [binding(NVL72, SlotId(f"tray-05/{gpu}")) for gpu in range(4)]
    assert [(found.cpus[0], found.cpus[-1], len(found.cpus), found.numa) for found in bound] == [
        (0, 35, 36, 0), (36, 71, 36, 0), (72, 107, 36, 1), (108, 143, 36, 1),
    ]  # fmt: skip
    assert bound[1].why == "part 2 of 2 of cores 0-71, shared by 2 GPUs, memory of node 0"


def test_what_does_not_divide_goes_to_the_first() -> None:
    assert [len(binding(one_tray("0-6", "0-6", "0-6"), SlotId(f"t/{at}")).cpus) for at in range(3)] == [3, 2, 2]


def test_both_threads_of_a_core_go_to_one_gpu() -> None:
    topology = one_tray(*["0-47,96-143"] * 4)
    assert binding(topology, SlotId("t/1")).cpus == (*range(12, 24), *range(108, 120))


def test_where_there_are_too_few_cores_all_are_shared() -> None:
    assert [binding(one_tray("4", "4"), SlotId(f"t/{at}")).cpus for at in range(2)] == [(4,), (4,)]


def test_where_the_topology_says_nothing_nothing_is_bound() -> None:
    found = binding(one_tray("", numa=None), SlotId("t/0"))
    assert (found.cpus, found.numa) == ((), None)
    assert found.why == "the topology names no cores near GPU 0"


@given(
    st.lists(st.sampled_from(["0-7", "8-15", "0-15", "4-11", "", "3", "0-3,8-11", "0,2,4,6"]), min_size=1, max_size=8)
)
def test_each_has_cores_near_its_gpu_and_equal_neighbours_share_none(cpus: list[str]) -> None:
    topology = one_tray(*cpus)
    bound = [binding(topology, SlotId(f"t/{at}")).cpus for at in range(len(cpus))]
    for text, own in zip(cpus, bound, strict=True):
        assert set(own) <= set(cores(text))
        assert bool(own) == bool(text)
    if len(set(cpus)) == 1 and len(cores(cpus[0])) >= len(cpus):
        assert sorted(core for own in bound for core in own) == list(cores(cpus[0]))


@pytest.mark.parametrize(("text", "found"), [("", ()), ("3", (3,)), ("0-3, 8", (0, 1, 2, 3, 8)), ("2,1,2", (1, 2))])
def test_a_list_of_cores(text: str, found: tuple[int, ...]) -> None:
    assert cores(text) == found


@pytest.mark.parametrize("text", ["a", "3-1", "1,,2", "-1", "1-"])
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="no list of cores of t/0"):
        binding(one_tray(text), SlotId("t/0"))


def test_a_slot_that_there_is_not_is_refused() -> None:
    for ask in (binding, nccl_environment):
        with pytest.raises(TopologyError, match="no slot"):
            ask(NVL72, SlotId("tray-99/0"))
