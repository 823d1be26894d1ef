"""Read trays' places from NMX (NVLink's manager), and the switches above them from NetQ (the network's manager).

Formats: NMX's ``nmx/v1/compute-nodes`` and NetQ's ``topologygraph/fetch-topology``, as NVIDIA's topograph requests
them. A node's name must be its host name.

A domain's UUID is used as a name for trays that belong together, not as the driver's cluster UUID: nothing states that
the two are the same, and NMX's compute nodes name no clique.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rackrun.topology.model.errors import TopologyError
from rackrun.topology.sources.partial_topology import FoundTray, PartialTopology

__all__ = ["from_netq_graph", "from_nmx_compute_nodes"]

HOST_TIER = -1


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    chassis: str = msgspec.field(default="", name="ChassisSerialNumber")
    slot: int | None = msgspec.field(default=None, name="SlotID")
    tray: int | None = msgspec.field(default=None, name="TrayIndex")


class _ComputeNode(msgspec.Struct, frozen=True, kw_only=True):
    name: str = msgspec.field(name="Name")
    domain: str = msgspec.field(default="", name="DomainUUID")
    health: str = msgspec.field(default="", name="Health")
    place: _Place = msgspec.field(default=_Place(), name="LocationInfo")


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    tier: int


class _Tier(msgspec.Struct, frozen=True, kw_only=True):
    compounded_nodes: tuple[_Node, ...] = ()


class _Link(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    """``NODE-*-NODE``; the order does not say which node is above the other."""


class _Graph(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[_Tier, ...]
    links: tuple[_Link, ...]


def from_nmx_compute_nodes(document: Any, where: str = "NMX") -> PartialTopology:
    """Return the topology in a list of compute nodes, decoded from JSON. Raises `TopologyError`.

    A node without a name is left out with a note.
    """
    try:
        nodes = msgspec.convert(document, tuple[_ComputeNode, ...])
    except msgspec.ValidationError as error:
        raise TopologyError(
            f"{where} is no list of compute nodes: {error}.", remedy="give the answer of nmx/v1/compute-nodes."
        ) from error
    notes = [f"{node.name} is {node.health} by {where}" for node in nodes if node.health not in ("", "HEALTHY")]
    nameless = sum(not node.name for node in nodes)
    if nameless:
        notes.append(f"{nameless} compute nodes of {where} have no name and are left out")
    trays = tuple(
        FoundTray(
            host=node.name.partition(".")[0],
            rack=node.place.chassis,
            index=node.place.tray,
            slot=node.place.slot,
            block=node.domain if node.domain.strip("0-") else "",
        )
        for node in nodes
        if node.name
    )
    return PartialTopology(kind="nmx", where=where, trays=trays, notes=tuple(notes))


def from_netq_graph(document: Any, where: str = "NetQ") -> PartialTopology:
    """Return the topology in NetQ's graph, decoded from JSON: a list with one item. Raises `TopologyError`.

    A host may be connected to several switches. Switches that share something below them count as one, named after the
    first.
    """
    try:
        (graph,) = msgspec.convert(document, tuple[_Graph])
    except msgspec.ValidationError as error:
        raise TopologyError(
            f"{where} is no graph of a network: {error}.", remedy="give the answer of fetch-topology."
        ) from error
    nodes = {node.id: node for tier in graph.nodes for node in tier.compounded_nodes}
    above: dict[str, set[str]] = {}
    for link in graph.links:
        ends = sorted((nodes[end] for end in link.id.split("-*-") if end in nodes), key=lambda node: node.tier)
        if len(ends) == 2 and ends[0].tier < ends[1].tier:
            above.setdefault(ends[0].id, set()).add(ends[1].id)
    hosts = [node for node in nodes.values() if node.tier == HOST_TIER]
    paths = _paths([host.id for host in hosts], above)
    trays = tuple(
        FoundTray(
            host=host.name.partition(".")[0],
            fabric=tuple(min(nodes[switch].name for switch in switches) for switches in paths[host.id]),
        )
        for host in sorted(hosts, key=lambda host: host.name)
    )
    return PartialTopology(kind="nmx", where=where, trays=trays)


def _paths(hosts: Iterable[str], above: Mapping[str, set[str]]) -> dict[str, list[frozenset[str]]]:
    """Return the switches above each host, tier by tier. Every link goes to a higher tier, so this ends."""
    at = {host: frozenset([host]) for host in hosts}
    paths: dict[str, list[frozenset[str]]] = {host: [] for host in at}
    while at:
        higher = {group: frozenset[str]().union(*(above.get(one, ()) for one in group)) for group in set(at.values())}
        joined = _joined(group for group in higher.values() if group)
        at = {host: joined[min(higher[group])] for host, group in at.items() if higher[group]}
        for host, group in at.items():
            paths[host].append(group)
    return paths


def _joined(groups: Iterable[frozenset[str]]) -> dict[str, frozenset[str]]:
    """Merge groups that share a member, and return member -> its merged group."""
    of: dict[str, frozenset[str]] = {}
    for group in groups:
        whole = group.union(*(of[one] for one in group if one in of))
        of.update(dict.fromkeys(whole, whole))
    return of
