"""Read Slurm's topology: its blocks are NVLink domains by convention, its switches the network above.

Formats: topology.yaml(5) and topology.conf(5); SLURM_TOPOLOGY_ADDR of sbatch(1), ``block.node`` or
``switch.switch.node``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import yaml

from rackrun.topology.model.errors import TopologyError
from rackrun.topology.sources.partial_topology import FoundTray, Kind, PartialTopology

__all__ = ["expand_hosts", "from_topology_addr", "from_topology_conf", "from_topology_yaml", "of_blocks"]

HOSTS_MAX = 200_000
_PART = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Expand a host list such as ``tray[01-03,07],login`` to names; leading zeros are kept. Raises `TopologyError`."""
    found: list[str] = []
    for item in _outside_brackets(text):
        pieces = re.split(r"\[([^\]]*)\]", item)
        choices = [_numbers(piece, text) if at % 2 else [piece] for at, piece in enumerate(pieces)]
        names = 1
        for choice in choices:
            names *= len(choice)
        if len(found) + names > HOSTS_MAX:
            raise TopologyError(f"{text[:60]!r} are more than {HOSTS_MAX} hosts.", remedy="mend the range.")
        found += ["".join(parts) for parts in itertools.product(*choices)]
    return found


def from_topology_yaml(text: str, where: str = "topology.yaml") -> PartialTopology:
    """Return the first topology of blocks and the first of switches in a topology.yaml. Raises `TopologyError`."""
    try:
        document = yaml.safe_load(text)
        topologies = [one for one in document if "block" in one or "tree" in one]
        block = next((one["block"] for one in topologies if "block" in one), None)
        tree = next((one["tree"] for one in topologies if "tree" in one), None)
        blocks = [(str(one["block"]), str(one["nodes"])) for one in (block or {}).get("blocks", [])]
        switches = [
            (str(one["switch"]), str(one.get("children", "")), str(one.get("nodes", "")))
            for one in (tree or {}).get("switches", [])
        ]
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise TopologyError(f"{where} is no topology of Slurm: {error}.", remedy="see topology.yaml(5).") from error
    return of_blocks("slurm", where, blocks, switches)


def from_topology_conf(text: str, where: str = "topology.conf") -> PartialTopology:
    """Return the topology in a topology.conf. Raises `TopologyError`.

    Its lines are ``BlockName=... Nodes=...`` and ``SwitchName=... Switches=...|Nodes=...``.
    """
    blocks, switches = [], []
    joined = re.sub(r"\\\s*\n", " ", text)
    for number, line in enumerate(joined.splitlines(), 1):
        words = line.partition("#")[0].split()
        fields = {key.lower(): value for key, separator, value in (word.partition("=") for word in words) if separator}
        if "blockname" in fields:
            if "nodes" not in fields:
                raise TopologyError(f"{where}:{number}: a block without Nodes.", remedy="see topology.conf(5).")
            blocks.append((fields["blockname"], fields["nodes"]))
        elif "switchname" in fields:
            switches.append((fields["switchname"], fields.get("switches", ""), fields.get("nodes", "")))
        elif words and "blocksizes" not in fields:
            raise TopologyError(f"{where}:{number}: {line.strip()[:60]!r}.", remedy="see topology.conf(5).")
    return of_blocks("slurm", where, blocks, switches)


def from_topology_addr(host: str, addr: str, pattern: str = "", where: str = "SLURM_TOPOLOGY_ADDR") -> PartialTopology:
    """Return the topology of this node, from its environment.

    ``pattern``: SLURM_TOPOLOGY_ADDR_PATTERN, such as ``block.node`` or ``switch.node``. Raises `TopologyError`.
    """
    parts, kinds = addr.split("."), pattern.split(".")
    if pattern and len(kinds) != len(parts):
        raise TopologyError(
            f"SLURM_TOPOLOGY_ADDR is {addr!r}, of the pattern {pattern!r}.", remedy="give both of the same job."
        )
    above = list(zip(parts, kinds if pattern else ["switch"] * len(parts), strict=True))[:-1]
    block = next((name for name, kind in above if kind == "block"), "")
    switches = tuple(name for name, kind in reversed(above) if kind == "switch")
    return PartialTopology(kind="slurm", where=where, trays=(FoundTray(host=host, block=block, fabric=switches),))


def of_blocks(
    kind: Kind, where: str, blocks: Sequence[tuple[str, str]], switches: Sequence[tuple[str, str, str]]
) -> PartialTopology:
    """Return the topology of blocks, (name, hosts), and switches, (name, switches below, hosts).

    Hosts and switches are lists that `expand_hosts` reads. Raises `TopologyError` for a host in two blocks.
    """
    block_of: dict[str, str] = {}
    for block, nodes in blocks:
        for host in expand_hosts(nodes):
            if block_of.setdefault(host, block) != block:
                raise TopologyError(
                    f"{where}: {host} is in the blocks {block_of[host]} and {block}.", remedy="name it in one."
                )
    above: dict[str, str] = {}
    leaf_of: dict[str, str] = {}
    for switch, children, nodes in switches:
        above.update(dict.fromkeys(expand_hosts(children), switch))
        leaf_of.update(dict.fromkeys(expand_hosts(nodes), switch))
    trays = tuple(
        FoundTray(host=host, block=block_of.get(host, ""), fabric=_upwards(leaf_of.get(host, ""), above))
        for host in sorted(block_of.keys() | leaf_of.keys())
    )
    return PartialTopology(kind=kind, where=where, trays=trays)


def _upwards(switch: str, above: dict[str, str]) -> tuple[str, ...]:
    path: list[str] = []
    while switch and switch not in path:
        path.append(switch)
        switch = above.get(switch, "")
    return tuple(path)


def _outside_brackets(text: str) -> list[str]:
    if re.sub(r"[^\[\]]", "", text).replace("[]", ""):
        raise TopologyError(f"{text[:60]!r} are no hosts: brackets.", remedy="write tray[01-18].")
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text) if item.strip()]


def _numbers(text: str, whole: Any) -> list[str]:
    found: list[str] = []
    for item in text.split(","):
        match = _PART.fullmatch(item.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or first > last or last - first >= HOSTS_MAX:
            raise TopologyError(f"{item!r} in {str(whole)[:60]!r} is no range.", remedy="write tray[01-18].")
        found += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return found
