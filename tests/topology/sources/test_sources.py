"""Several sources, one topology: whatever their order; what contradicts is refused, and both are named."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rackrun.topology.gpu_driver.readings import Platform
from rackrun.topology.model.errors import SourcesDisagree, TopologyError
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.kubernetes import (
    from_kubernetes_nodes,
    from_labels,
    from_topograph_graph,
    from_topograph_model,
    parse_clique,
)
from rackrun.topology.sources.nvidia_smi import from_smi_csv, parse_topo_matrix, with_matrix
from rackrun.topology.sources.partial_topology import (
    FoundGpu,
    FoundTray,
    Kind,
    PartialTopology,
    merge,
    partial_of_reading,
)
from rackrun.topology.sources.slurm import expand_hosts, from_topology_addr, from_topology_conf, from_topology_yaml
from tests.topology.readings import CLIQUE, DOMAIN, FABRIC, gpu, tray

GOLDEN = Path(__file__).parents[1] / "golden"
OTHER = "a97d3c52-60fb-4e18-8a24-c5d1f09b3e67"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text()


def nvml(host: str, index: int, *, fabric: Any = FABRIC, chassis: str = "rack-a", uuid: str = "") -> PartialTopology:
    place = Platform(chassis=chassis, slot=index + 5, tray=index, host=1, module=1)
    gpus = [
        gpu(at, uuid=uuid or f"GPU-{host}-{at}", fabric=fabric, platform=replace(place, module=at + 1))
        for at in range(2)
    ]
    return partial_of_reading(replace(tray(), gpus=tuple(gpus)), host)


def hosts(kind: Kind, where: str, *trays: FoundTray) -> PartialTopology:
    return PartialTopology(kind=kind, where=where, trays=trays)


# -- merging
def test_the_order_of_sources_does_not_matter() -> None:
    partials = [
        nvml("a", 3), nvml("b", 1), nvml("c", 0, chassis="rack-b", fabric=replace(FABRIC, domain=OTHER)),
        hosts("kubernetes", "labels", FoundTray(host="a", clique=CLIQUE, fabric=("leaf-1",)), FoundTray(host="elsewhere")),
        hosts("slurm", "topology.yaml", FoundTray(host="a", block="r1", fabric=("wrong",)), FoundTray(host="c", block="r2")),
        hosts("rack file", "rack.yaml", FoundTray(host="b", serial="S-b", slot=99)),
    ]  # fmt: skip
    topology = merge(partials)
    for seed in range(20):
        assert merge(random.Random(seed).sample(partials, len(partials))) == topology
    first, second = topology.racks
    assert (first.serial, [one.name for one in first.trays], first.fabric) == ("rack-a", ["b", "a"], ("leaf-1",))
    assert (first.trays[0].serial, first.trays[0].slot) == ("S-b", 6), "the driver comes first, others fill in"
    assert [one.name for one in second.trays] == ["c"]
    assert topology.by_slot["a/1"].clique == CLIQUE
    assert topology.by_slot["c/0"].clique == CliqueId(OTHER, 32766)


def test_labels_that_contradict_the_driver_are_refused_and_both_are_named() -> None:
    label = hosts("kubernetes", "kubectl get nodes", FoundTray(host="a", clique=CliqueId(OTHER, 32766)))
    with pytest.raises(SourcesDisagree) as error:
        merge([label, nvml("a", 0)])
    assert f"GPU 0 of a is in clique {CLIQUE} by NVML on a, and {OTHER}.32766 by kubectl get nodes" in error.value.what


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (FoundTray(host="a", rack="rack-z"), "host a is in rack rack-a by NVML on a, and rack-z by rack.yaml"),
        (FoundTray(host="a", index=7), "host a is compute tray 0 by NVML on a, and 7 by rack.yaml"),
        (FoundTray(host="a", gpus=(FoundGpu(index=1, uuid="GPU-old"),)), "GPU 1 of a is GPU-a-1 by NVML on a, and GPU-old by rack.yaml"),
    ],
)  # fmt: skip
def test_a_rack_file_that_is_out_of_date_is_refused(wrong: FoundTray, what: str) -> None:
    with pytest.raises(SourcesDisagree) as error:
        merge([nvml("a", 0), hosts("rack file", "rack.yaml", wrong)])
    assert what in error.value.what


def test_two_trays_of_one_place_or_with_one_gpu_are_refused() -> None:
    with pytest.raises(TopologyError, match="the tray index"):
        merge([nvml("a", 0), nvml("b", 0)])
    with pytest.raises(TopologyError, match="the GPU UUID GPU-x is there twice"):
        merge([nvml("a", 0, uuid="GPU-x")])
    with pytest.raises(TopologyError, match="the tray serial S is there twice"):
        merge([nvml("a", 0), nvml("b", 1), *(hosts("nmx", "NMX", FoundTray(host=name, serial="S")) for name in "ab")])
    with pytest.raises(TopologyError, match="no source knows any GPU"):
        merge([hosts("slurm", "topology.conf", FoundTray(host="a", block="b"))])


def test_a_tray_that_does_not_know_its_rack_is_in_that_of_its_clique() -> None:
    lonely = partial_of_reading(replace(tray(), gpus=(gpu(0, uuid="GPU-z"),)), "z")
    assert [one.name for one in merge([nvml("a", 1), lonely]).racks[0].trays] == ["z", "a"]
    assert merge([lonely]).racks[0].serial == DOMAIN


def test_a_block_stands_for_a_domain_only_where_no_driver_has_spoken() -> None:
    plain = [
        hosts("nvidia-smi", f"nvidia-smi on {name}", FoundTray(host=name, gpus=(FoundGpu(index=0, uuid=name),)))
        for name in "ab"
    ]
    blocks = hosts("slurm", "topology.yaml", *(FoundTray(host=name, block="r1") for name in "ab"))
    assert {seat.clique for seat in merge([*plain, blocks]).seats} == {CliqueId("block:r1", 0)}
    alone = replace(FABRIC, state=0, domain="", clique=0, mask=0)
    spoken = [nvml(name, at, fabric=alone) for at, name in enumerate("ab")]
    assert {seat.clique for seat in merge([*spoken, blocks]).seats} == {CliqueId("host:a", 0), CliqueId("host:b", 0)}


def test_a_tray_may_lie_in_two_cliques() -> None:
    partial = nvml("a", 0)
    (found,) = partial.trays
    halves = (found.gpus[0], replace(found.gpus[1], clique=CliqueId(DOMAIN, 2)))
    topology = merge([replace(partial, trays=(replace(found, gpus=halves),))])
    assert [str(seat.clique) for seat in topology.seats] == [f"{DOMAIN}.32766", f"{DOMAIN}.2"]


# -- Kubernetes and topograph
def test_labels_of_kubernetes_nodes_are_read() -> None:
    trays = {one.host: one for one in from_kubernetes_nodes(json.loads(golden("kubernetes-nodes.json"))).trays}
    assert trays["tray01-02"].clique == CLIQUE
    assert trays["tray01-02"].fabric == ("leaf-1", "spine-1")
    assert trays["tray02-03"].clique == CliqueId(OTHER, 32766), "topograph's label has the same form"
    assert (trays["login"].clique, trays["login"].fabric) == (None, ("leaf-9", "spine-1", "core-1"))
    assert trays["bare"] == FoundTray(host="bare")


@pytest.mark.parametrize("label", ["nonsense", f"{DOMAIN}", f"{DOMAIN}.x", f"{DOMAIN}.1.2"])
def test_a_clique_label_that_is_none_is_refused(label: str) -> None:
    with pytest.raises(TopologyError, match=r"nvidia.com/gpu.clique of a is"):
        from_labels("a", {"nvidia.com/gpu.clique": label}, "labels")


def test_the_domain_of_zeros_stands_for_none() -> None:
    assert parse_clique("00000000-0000-0000-0000-000000000000.0") is None
    assert parse_clique(f"{DOMAIN.upper()}.7") == CliqueId(DOMAIN, 7)


def test_topographs_graph_is_read() -> None:
    trays = {
        one.host: one for one in from_topograph_graph(json.loads(golden("topograph-graph.json")), "topograph").trays
    }
    assert (trays["n04"].block, trays["n04"].fabric, trays["n04"].clique) == ("nvl2", ("leaf-2", "spine-1"), None)
    assert trays["n06"].clique == CliqueId(DOMAIN, 7)
    assert trays["n07"] == FoundTray(host="n07")


@pytest.mark.parametrize(
    "document", [None, [], {}, {"instances": [3]}, {"instances": [{}]}, {"items": 3}, {"items": [{}]}]
)
def test_what_is_no_list_of_nodes_is_refused(document: Any) -> None:
    with pytest.raises(TopologyError, match="is no graph"):
        from_topograph_graph(document, "x")
    with pytest.raises(TopologyError, match="is no list of nodes"):
        from_kubernetes_nodes(document)


def test_topographs_model_of_an_nvl72_is_read() -> None:
    found = from_topograph_model(golden("topograph-model-nvl72.yaml"), "model")
    trays = {one.host: one for one in found.trays}
    assert (found.kind, Counter(one.block for one in found.trays)) == (
        "topograph", {"nvl-11": 18, "nvl-12": 18, "nvl-21": 18, "nvl-22": 18},
    )  # fmt: skip
    assert trays["tray2118"] == FoundTray(host="tray2118", block="nvl-21", fabric=("leaf-21", "spine-2", "core"))


def test_topographs_model_of_an_irregular_tree_is_read() -> None:
    trays = {one.host: one for one in from_topograph_model(golden("topograph-model-tree.yaml"), "model").trays}
    assert {host: one.block for host, one in trays.items()} == {
        "h21": "nv2", "h22": "nv2", "h25": "", "h34": "", "h35": "nv3", "h36": "nv3",
    }  # fmt: skip
    assert (trays["h25"].fabric, trays["h36"].fabric) == (("left", "top"), ("far", "right", "top"))


def test_topographs_model_of_two_accelerator_domains_is_read() -> None:
    trays = {one.host: one for one in from_topograph_model(golden("topograph-model-dual.yaml"), "model").trays}
    assert Counter(one.block for one in trays.values()) == {"domain-1": 16, "domain-2": 5}
    assert (trays["node0009"].fabric, trays["node0032"].fabric) == (
        ("rack-1-01", "hall-1", "core"), ("rack-1-03", "hall-1", "core"),
    )  # fmt: skip
    assert "node0031" not in trays


@pytest.mark.parametrize(
    "text", ["a: [", "3", "", "{}", "switches: [{name: a}]", "switches: {a: 3}", "a: 2026-13-45", "switches: {a: {nodes: b}}",
             "{switches: {}, blocks: [{switch: a}]}", "{switches: {}, nodes: {a: {attributes: x}}}"]
)  # fmt: skip
def test_what_is_no_model_of_topograph_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="model is no model of topograph"):
        from_topograph_model(text, "model")


# -- Slurm
def test_a_block_topology_that_topograph_wrote_for_slurm_is_read() -> None:
    trays = from_topology_conf(golden("slurm-dra-blocks.conf")).trays
    assert Counter(one.block for one in trays) == {"east1": 8, "east2": 8, "west1": 8, "west2": 8}
    assert trays[-1].host == "srv2208"


def test_slurms_topology_yaml_is_read() -> None:
    trays = {one.host: one for one in from_topology_yaml(golden("slurm-nvl72.yaml")).trays}
    assert len(trays) == 37
    assert trays["tray02-18"] == FoundTray(host="tray02-18", block="rack02", fabric=("leaf2", "spine1"))
    assert trays["login1"].block == ""


def test_slurms_topology_conf_is_read() -> None:
    blocks = {one.host: one.block for one in from_topology_conf(golden("slurm-blocks.conf")).trays}
    assert (blocks["node01"], blocks["node12"], blocks["node16"], "node10" in blocks) == ("b1", "b3", "b4", False)
    tree = {one.host: one.fabric for one in from_topology_conf(golden("slurm-tree.conf")).trays}
    assert tree["b"] == ("leaf1", "spine1", "core")
    assert tree["c10"] == ("leaf2", "spine2", "core")


def test_slurms_environment_names_a_nodes_place() -> None:
    (block,) = from_topology_addr("a", "rack01.a", "block.node").trays
    assert (block.block, block.fabric) == ("rack01", ())
    (tree,) = from_topology_addr("a", "core.spine1.leaf2.a", "switch.switch.switch.node").trays
    assert (tree.block, tree.fabric) == ("", ("leaf2", "spine1", "core"))
    assert from_topology_addr("a", "core.leaf2.a").trays[0].fabric == ("leaf2", "core")
    with pytest.raises(TopologyError, match="of the pattern"):
        from_topology_addr("a", "core.a", "switch.switch.node")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]), ("a[1-3]", ["a1", "a2", "a3"]), ("a[08-11]", ["a08", "a09", "a10", "a11"]),
        ("a[1,3-4]-x,b", ["a1-x", "a3-x", "a4-x", "b"]), ("r[1-2]t[1-2]", ["r1t1", "r1t2", "r2t1", "r2t2"]), ("", []),
    ],
)  # fmt: skip
def test_hosts_are_expanded(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text", ["a[1-", "a]1[", "a[3-1]", "a[x]", "a[[1]]", "a[]", "a[1-999999999]", "a[1-999]b[1-999]"]
)
def test_what_names_no_hosts_is_refused(text: str) -> None:
    with pytest.raises(TopologyError):
        expand_hosts(text)


@pytest.mark.parametrize(
    "text", ["a: [", "3", "- {block: 3}", "- {block: {blocks: [{block: a}]}}", "- {tree: {switches: [3]}}"]
)
def test_what_is_no_topology_yaml_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="is no topology of Slurm"):
        from_topology_yaml(text)


def test_what_is_no_topology_conf_is_refused_with_its_line() -> None:
    with pytest.raises(TopologyError, match=r"topology\.conf:2: 'nonsense'"):
        from_topology_conf("# fine\nnonsense\n")
    with pytest.raises(TopologyError, match=r"topology\.conf:1: a block without Nodes"):
        from_topology_conf("BlockName=a\n")
    with pytest.raises(TopologyError, match="n1 is in the blocks a and b"):
        from_topology_conf("BlockName=a Nodes=n[1-2]\nBlockName=b Nodes=n1\n")


# -- nvidia-smi
def test_nvidia_smis_csv_is_read() -> None:
    (found,) = from_smi_csv(golden("smi-gb200.csv"), "a").trays
    assert [(one.index, one.bdf, one.serial, one.clique) for one in found.gpus] == [
        (0, "00000008:01:00.0", "1650000000001", CLIQUE), (1, "00000009:01:00.0", "1650000000002", CLIQUE),
        (2, "00000018:01:00.0", "", None), (3, "00000019:01:00.0", "", None),
    ]  # fmt: skip
    with pytest.raises(TopologyError, match="nvidia-smi on a says 'No devices"):
        from_smi_csv("No devices were found\n", "a")


def test_the_matrix_of_a_gb200_says_nothing_of_its_nics() -> None:
    matrix = parse_topo_matrix(golden("topo-gb200.txt"))
    assert matrix.nvlinks == dict.fromkeys(range(4), 18)
    assert matrix.nics == dict.fromkeys(range(4), ())
    assert matrix.cpus == {0: "0-71", 1: "0-71", 2: "72-143", 3: "72-143"}


def test_the_matrix_of_an_h100_names_the_nearest_nics() -> None:
    matrix = parse_topo_matrix(golden("topo-h100.txt"))
    assert matrix.nics == {at: (f"mlx5_{nic}",) for at, nic in enumerate([0, 3, 4, 5, 6, 9, 2, 1])}
    assert matrix.numa == {at: at // 4 for at in range(8)}
    assert matrix.cpus[7] == "48-95,144-191"


def test_a_matrix_is_read_through_warnings_escapes_wraps_and_legends() -> None:
    matrix = parse_topo_matrix(golden("topo-odd.txt"))
    assert matrix.nics == {0: ("mlx5_10", "mlx5_2"), 1: ("mlx5_10",)}
    assert (matrix.cpus, matrix.numa) == ({1: "48-95,144-191"}, {0: 0, 1: 1})
    assert parse_topo_matrix(golden("topo-run-together.txt")).nics == {0: ("mlx5_1", "mlx5_0")}


def test_the_matrix_fills_what_the_csv_leaves_open() -> None:
    (found,) = with_matrix(
        from_smi_csv(golden("smi-gb200.csv"), "a"), parse_topo_matrix(golden("topo-gb200.txt"))
    ).trays
    assert [one.cpus for one in found.gpus] == ["0-71", "0-71", "72-143", "72-143"]


@pytest.mark.parametrize("text", ["", "nvidia-smi: command not found", "GPU0\tNV1\tNV2\n"])
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(TopologyError, match="no matrix"):
        parse_topo_matrix(text)
