"""Read cliques and switches from Kubernetes node labels, and from topograph's graphs and models.

Label keys: NVIDIA GPU Operator (``nvidia.com/gpu.clique``, "<ClusterUUID>.<CliqueID>"), topograph's "Node Labels"
reference, AWS, CoreWeave. Graph: topograph's engine ``graph``. Models: topograph's "Modeling and API Simulation".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.racks import CliqueId
from rackrun.topology.sources.partial_topology import FoundTray, PartialTopology
from rackrun.topology.sources.slurm import of_blocks

__all__ = ["from_kubernetes_nodes", "from_labels", "from_topograph_graph", "from_topograph_model", "parse_clique"]

CLIQUE = "nvidia.com/gpu.clique"
BLOCKS = (
    "accelerator.topograph.run/domain",
    "network.topology.nvidia.com/accelerator",
    "ds.coreweave.com/nvlink.domain",
    "topology.k8s.aws/ultraserver-id",
)
TIERS = tuple(f"fabric.topograph.run/tier-{tier}" for tier in range(1, 9))
OLD_TIERS = tuple(f"network.topology.nvidia.com/{tier}" for tier in ("leaf", "spine", "core"))
_MODEL_DOMAIN = re.compile(r"accelerat.*/(?:domain|level-0)")
"""Further names that models use for `BLOCKS`."""
_CLIQUE = re.compile(r"([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\.(\d{1,10})", re.IGNORECASE | re.ASCII)


def parse_clique(text: str) -> CliqueId | None:
    """Parse ``<ClusterUUID>.<CliqueID>``. None for other text, and for the UUID of zeros, which means no fabric."""
    match = _CLIQUE.fullmatch(text.strip())
    if match is None or not match[1].strip("0-"):
        return None
    return CliqueId(match[1].lower(), int(match[2]))


def from_labels(host: str, labels: Mapping[str, str], where: str) -> PartialTopology:
    """Return the topology in the labels of one node, as a pod may see its own. Raises `TopologyError`."""
    return PartialTopology(kind="kubernetes", where=where, trays=(_tray(host, labels, where),))


def from_kubernetes_nodes(document: Any, where: str = "kubectl get nodes -o json") -> PartialTopology:
    """Return the topology in the labels of a list of nodes, decoded from JSON. Raises `TopologyError`."""
    try:
        nodes = [(node["metadata"]["name"], node["metadata"].get("labels") or {}) for node in document["items"]]
    except (KeyError, TypeError) as error:
        raise TopologyError(
            f"{where} is no list of nodes: {error!r}.", remedy="give `kubectl get nodes -o json`."
        ) from error
    return PartialTopology(
        kind="kubernetes", where=where, trays=tuple(_tray(_short(name), labels, where) for name, labels in nodes)
    )


def from_topograph_graph(document: Any, where: str) -> PartialTopology:
    """Return the topology in a graph of topograph, decoded from JSON.

    The form is ``{"instances": [{"id": ..., "network_layers": [leaf, spine], "attributes": {"nvlink": ...}}]}``. An
    instance's id must be its host name: run topograph with a map of instances to nodes. Raises `TopologyError`.
    """
    trays = []
    try:
        for instance in document["instances"]:
            domain = str((instance.get("attributes") or {}).get("nvlink") or "")
            clique = parse_clique(domain)
            fabric = tuple(str(layer) for layer in instance.get("network_layers") or ())
            trays.append(
                FoundTray(host=_short(instance["id"]), clique=clique, block="" if clique else domain, fabric=fabric)
            )
    except (KeyError, TypeError, AttributeError) as error:
        raise TopologyError(f"{where} is no graph: {error!r}.", remedy="use topograph's engine `graph`.") from error
    return PartialTopology(kind="topograph", where=where, trays=tuple(trays))


def from_topograph_model(text: str, where: str) -> PartialTopology:
    """Return the topology in a model of topograph (YAML).

    A model has ``switches`` with ``blocks``, or with ``nodes`` and ``capacity_blocks``.

    Models of the first form, where ``switches`` is a list, are refused. Of two levels of domains, the outer one is
    used. Raises `TopologyError`.
    """
    try:
        model = yaml.safe_load(text)
        switches = [
            (str(name), _several((of or {}).get("switches")), _several((of or {}).get("nodes")))
            for name, of in model["switches"].items()
        ]
        blocks = []
        for one in model.get("blocks") or ():
            said = {**(one.get("annotations") or {}), **(one.get("labels") or {})}
            domain = next((str(said[key]) for key in said if key in BLOCKS or _MODEL_DOMAIN.fullmatch(key)), "")
            blocks.append((domain, _several(one["nodes"])))
            switches.append((str(one.get("switch") or ""), "", _several(one["nodes"])))
        groups = model.get("capacity_blocks") or {}
        nvlink_of = {name: _nvlink(of) for name, of in groups.items()}
        blocks += [(nvlink_of[name], _several((of or {}).get("nodes"))) for name, of in groups.items()]
        for name, of in (model.get("nodes") or {}).items():
            blocks.append((_nvlink(of) or nvlink_of.get((of or {}).get("capacity_block"), ""), str(name)))
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise TopologyError(
            f"{where} is no model of topograph: {error}.", remedy="see its page on modeling."
        ) from error
    return of_blocks("topograph", where, [one for one in blocks if one[0]], switches)


def _several(names: Any) -> str:
    if not isinstance(names, list | None):
        raise TypeError(f"{names!r} is no list")
    return ",".join(map(str, names or ()))


def _nvlink(of: Any) -> str:
    return str(((of or {}).get("attributes") or {}).get("nvlink") or "")


def _tray(host: str, labels: Mapping[str, str], where: str) -> FoundTray:
    clique = None
    if CLIQUE in labels:
        clique = parse_clique(labels[CLIQUE])
        if clique is None and labels[CLIQUE]:
            raise TopologyError(
                f"the label {CLIQUE} of {host} is {labels[CLIQUE]!r} ({where}).",
                remedy="it should be <ClusterUUID>.<CliqueID>.",
            )
    block = next((labels[key] for key in BLOCKS if labels.get(key)), "")
    tiers = [labels[key] for key in TIERS if labels.get(key)] or [labels[key] for key in OLD_TIERS if labels.get(key)]
    return FoundTray(host=host, clique=clique or parse_clique(block), block=block, fabric=tuple(tiers))


def _short(name: str) -> str:
    return name.partition(".")[0]
