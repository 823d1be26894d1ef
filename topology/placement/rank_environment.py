"""What the process on a slot is told about its place: NCCL's environment, the cores it runs on, the memory it takes.

Pure: nothing is read from this machine and nothing is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.racks import Seat, Topology

__all__ = ["Binding", "Variable", "binding", "cores", "nccl_environment"]

_PART = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Binding:
    """For ``sched_setaffinity`` and ``set_mempolicy``."""

    cpus: tuple[int, ...]
    """Empty: the topology does not say, so leave them as they are."""
    numa: int | None
    """The node of the CPU that the GPU hangs on; on Grace the GPU's own memory is another node."""
    why: str


def nccl_environment(topology: Topology, slot: SlotId) -> tuple[Variable, ...]:
    """Of the process on ``slot``, rank or spare, by name.

    It depends on the topology alone: NCCL reads its environment once, and a spare has read it long before it gets a rank.

    ``NCCL_MNNVL_ENABLE``, NVLink between hosts: 2 (automatic) where some clique spans trays; there one rank whose fabric is not up
    turns it off for its whole communicator without a word, with 1 as with 2, so preflight has to see to that. Else 0: a fabric
    that no clique needs cannot end the job then.

    ``NCCL_MNNVL_CLIQUE_ID``: only where a domain is cut into several cliques. The driver's number is the same where it made the cut;
    where a rack file did, NCCL would not know of it.

    ``NCCL_IB_HCA``: the cards near the GPUs of the tray, by their exact names, which leaves out those for storage and management.
    The same for all of the tray: processes of one host that see different cards would number them differently.

    Source: NCCL 2.30, ``src/init.cc`` and ``src/mnnvl.cc``. Raises `TopologyError`.
    """
    seat = _seat(topology, slot)
    found = [_multi_node(topology)]
    domain = sorted(clique.id.clique for clique in topology.cliques if clique.id.domain == seat.clique.domain)
    if len(domain) > 1:
        others = ", ".join(map(str, domain))
        found.append(
            Variable(
                "NCCL_MNNVL_CLIQUE_ID",
                str(seat.clique.clique),
                f"domain {seat.clique.domain} is cut into cliques {others}; this slot is in {seat.clique.clique}",
            )
        )
    cards = dict.fromkeys(card for gpu in seat.tray.gpus for card in gpu.nics)
    if cards:
        near = ", ".join(seat.gpu.nics) or "none"
        why = f"the cards near the GPUs of {seat.tray.name}; near GPU {seat.gpu.index}: {near}"
        found.append(Variable("NCCL_IB_HCA", f"={','.join(cards)}", why))
    return tuple(sorted(found, key=lambda variable: variable.name))


def binding(topology: Topology, slot: SlotId) -> Binding:
    """The cores near the GPU of ``slot``, shared evenly with the tray's other GPUs that have the same ones; in order of index.

    Each run of consecutive cores is divided by itself, so that ``0-47,96-143``, two threads of each core, gives both threads of
    a core to one GPU. Spares count: a spare that takes a rank over is already where it belongs.

    Raises `TopologyError`: a list of cores that is none, or an unknown slot.
    """
    seat = _seat(topology, slot)
    own = cores(seat.gpu.cpus, slot)
    memory = "" if seat.gpu.numa is None else f", memory of node {seat.gpu.numa}"
    if not own:
        return Binding((), seat.gpu.numa, f"the topology names no cores near GPU {seat.gpu.index}{memory}")
    sharing = [gpu.index for gpu in seat.tray.gpus if set(cores(gpu.cpus, slot)) & set(own)]
    part, parts = sharing.index(seat.gpu.index), len(sharing)
    share = _share(own, part, parts)
    others = f"shared by {parts} GPUs" if parts > 1 else "its alone"
    if not share:
        return Binding(own, seat.gpu.numa, f"cores {seat.gpu.cpus}: too few to share among {parts} GPUs{memory}")
    return Binding(share, seat.gpu.numa, f"part {part + 1} of {parts} of cores {seat.gpu.cpus}, {others}{memory}")


def _share(own: tuple[int, ...], part: int, parts: int) -> tuple[int, ...]:
    starts = [at for at, core in enumerate(own) if not at or own[at - 1] != core - 1]
    runs = [own[start:end] for start, end in zip(starts, [*starts[1:], len(own)], strict=True)]
    if min(len(run) for run in runs) < parts:
        runs = [own]
    share: list[int] = []
    for run in runs:
        each, more = divmod(len(run), parts)
        start = part * each + min(part, more)
        share += run[start : start + each + (part < more)]
    return tuple(share)


def cores(text: str, whose: str = "") -> tuple[int, ...]:
    """``"0-3,8"`` as (0, 1, 2, 3, 8); nothing as (). Raises `TopologyError`."""
    found: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise TopologyError(
                f"{text!r} is no list of cores{whose and f' of {whose}'}.", remedy="write it as 0-71 or 0-3,8."
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _multi_node(topology: Topology) -> Variable:
    tray_of = {gpu.uuid: tray.name for _, tray in topology.trays.values() for gpu in tray.gpus}
    for clique in topology.cliques:
        if len({tray_of[gpu] for gpu in clique.gpus}) > 1:
            return Variable("NCCL_MNNVL_ENABLE", "2", f"NVLink joins trays, in clique {clique.id} for one")
    return Variable("NCCL_MNNVL_ENABLE", "0", "no clique spans trays: there is no NVLink between them")


def _seat(topology: Topology, slot: SlotId) -> Seat:
    seat = topology.by_slot.get(slot)
    if seat is None:
        raise TopologyError(f"{slot!r} is no slot of the topology.", remedy="name it as the topology does.")
    return seat
