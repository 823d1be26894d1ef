"""NVLink's manager knows where trays stand, the network's which switches are above them; drivers know better than both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rackrun.topology.model.errors import SourcesDisagree, TopologyError
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.nmx import from_netq_graph, from_nmx_compute_nodes
from rackrun.topology.sources.partial_topology import FoundGpu, FoundTray, PartialTopology, merge
from tests.topology.readings import CLIQUE
from tests.topology.sources.test_sources import golden, hosts, nvml

DOMAIN = "7d3f8a10-52c4-4c1b-9a6e-0b2d4e6f8a1c"


def compute_nodes() -> PartialTopology:
    return from_nmx_compute_nodes(json.loads(golden("nmx-compute-nodes.json")))


def test_compute_nodes_are_read_with_their_place() -> None:
    found = compute_nodes()
    assert found.trays == (
        FoundTray(host="gb-05", rack="1825024170029", index=4, slot=5, block=DOMAIN),
        FoundTray(host="gb-13", rack="1825024170029", index=12, slot=22, block=DOMAIN),
        FoundTray(host="gb-19", rack="1825024170030", index=0, slot=1),
    )
    assert found.notes == ("gb-13 is DEGRADED by NMX", "1 compute nodes of NMX have no name and are left out")


def test_they_give_nvidia_smi_what_it_does_not_know() -> None:
    smi = [
        hosts("nvidia-smi", f"nvidia-smi on {host}", FoundTray(host=host, gpus=(FoundGpu(index=0, uuid=host),)))
        for host in ("gb-05", "gb-13")
    ]
    slurm = hosts("slurm", "topology.yaml", FoundTray(host="gb-05", block="other"), FoundTray(host="gb-13", block="x"))
    (rack,) = merge([*smi, slurm, compute_nodes()]).racks
    assert (rack.serial, [(tray.index, tray.slot) for tray in rack.trays]) == ("1825024170029", [(4, 5), (12, 22)])
    seats = merge([*smi, slurm, compute_nodes()]).seats
    assert {seat.clique for seat in seats} == {CliqueId(f"block:{DOMAIN}", 0)}, "the first source with a block counts"


def test_their_domain_is_not_held_against_the_drivers() -> None:
    topology = merge([nvml("gb-05", 4, chassis="1825024170029"), compute_nodes()])
    assert {seat.clique for seat in topology.seats} == {CLIQUE}


@pytest.mark.parametrize(
    ("index", "chassis", "what"),
    [
        (4, "1825024170031", "host gb-05 is in rack 1825024170031 by NVML on gb-05, and 1825024170029 by NMX"),
        (7, "1825024170029", "host gb-05 is compute tray 7 by NVML on gb-05, and 4 by NMX"),
    ],
)
def test_a_place_that_contradicts_the_drivers_is_refused_and_both_are_named(
    index: int, chassis: str, what: str
) -> None:
    with pytest.raises(SourcesDisagree) as error:
        merge([compute_nodes(), nvml("gb-05", index, chassis=chassis)])
    assert what in error.value.what


def test_netqs_graph_gives_the_switches_above_each_host() -> None:
    """Two leaves that share a host count as one; links between leaves, and to what is not described, count as nothing."""
    fabric = {one.host: one.fabric for one in from_netq_graph(json.loads(golden("netq-graph.json"))).trays}
    assert fabric == {
        "gb-05": ("leaf-a", "spine-1"), "gb-13": ("leaf-a", "spine-1"), "gb-19": ("leaf-c", "spine-1"), "unplugged": (),
    }  # fmt: skip


@pytest.mark.parametrize(
    "document", [None, {}, 3, [3], [{}], [{"Name": 3}], [{"Name": "a", "LocationInfo": {"TrayIndex": "x"}}]]
)
def test_what_is_neither_is_refused(document: Any) -> None:
    with pytest.raises(TopologyError, match="NMX is no list of compute nodes"):
        from_nmx_compute_nodes(document)
    with pytest.raises(TopologyError, match="NetQ is no graph of a network"):
        from_netq_graph(document)
