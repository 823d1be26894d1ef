"""The environment of the process on a slot: NCCL's variables, its CPU cores, and its memory node.

It is pure: nothing is read from this machine, and nothing is set.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.errors import TopologyError
from rackrun.topology.model.racks import GpuLocation, Topology

__all__ = ["Binding", "Variable", "binding", "cores", "nccl_environment"]

_PART = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True)
class Variable:
    """An environment variable, with the reason for its value."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Binding:
    """Arguments for ``sched_setaffinity`` and ``set_mempolicy``, with the reason."""

    cpus: tuple[int, ...]
    """Empty when the topology does not name cores; leave the affinity as it is then."""
    numa: int | None
    """The NUMA node of the CPU to which the GPU is attached. On Grace, the GPU's own memory is another node."""
    why: str


def nccl_environment(topology: Topology, slot: SlotId) -> tuple[Variable, ...]:
    """Return NCCL's variables for the process on ``slot``, rank or spare, sorted by name.

    They depend on the topology alone: NCCL reads its environment once, and a spare has read it long before it gets a
    rank.

    ``NCCL_MNNVL_ENABLE`` (NVLink between hosts) is 2 (automatic) where some clique spans trays. There, one rank whose
    fabric is not up silently turns it off for its whole communicator, with 1 as with 2, so preflight has to check that.
    Otherwise it is 0, so that a fabric which no clique needs cannot end the job.

    ``NCCL_MNNVL_CLIQUE_ID`` is set only where a domain is divided into several cliques. If the driver divided it, the
    number is the driver's own; if a rack file did, NCCL would not know of it.

    ``NCCL_IB_HCA`` names the cards near the GPUs of the tray exactly, which leaves out those for storage and
    management. It is the same for the whole tray: processes of one host that see different cards would number them
    differently.

    Source: NCCL 2.30, ``src/init.cc`` and ``src/mnnvl.cc``. Raises `TopologyError` for an unknown slot.
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
    """Return the cores near the GPU of ``slot``, and its memory node.

    The cores are shared evenly, in order of index, with the tray's GPUs that have the same ones.

    Each run of consecutive cores is divided separately, so that ``0-47,96-143``, two threads of each core, gives both
    threads of a core to one GPU. Spares are included: a spare that takes a rank over is bound correctly already.

    Raises `TopologyError` for a malformed list of cores or an unknown slot.
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
    """Parse a list of cores: ``"0-3,8"`` gives (0, 1, 2, 3, 8); empty text gives (). Raises `TopologyError`."""
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


def _seat(topology: Topology, slot: SlotId) -> GpuLocation:
    seat = topology.by_slot.get(slot)
    if seat is None:
        raise TopologyError(f"{slot!r} is no slot of the topology.", remedy="name it as the topology does.")
    return seat
