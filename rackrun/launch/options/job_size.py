"""Size of the job: hosts, trays, workers and spares, checked against each other."""

from __future__ import annotations

import argparse
import math
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from rackrun.errors import UsageError
from rackrun.launch.options.rack_options import Axes, HostRack, check_mesh, parse_mesh, rack_here

__all__ = ["JobSize", "size_of"]

_TRAYS_MAX = 1_000
_HOSTS_MAX = 100_000
_SLOTS_MAX = 10_000


class JobSize(NamedTuple):
    """Size of the job."""

    nodes_min: int
    nodes_max: int
    trays: int
    """Trays on this host."""
    slots: int
    """Slots of each tray; 0: ``rack`` gives the number for each."""
    rack: HostRack | None
    mesh: Axes
    ranks: int
    """Largest number of ranks."""


def size_of(args: argparse.Namespace) -> JobSize:
    """Return the size of the job. Raises UsageError."""
    nodes_min, nodes_max = _nodes(args.nnodes)
    mesh = parse_mesh(args.mesh)
    rack = None
    if args.rack is not None:
        rack = rack_here(
            Path(args.rack).expanduser(),
            nodes=(nodes_min, nodes_max),
            nproc=args.nproc_per_node,
            trays=args.trays,
            host=socket.gethostname(),
            trays_max=_TRAYS_MAX,
        )
        trays, slots, total = len(rack.trays), 0, len(rack.topology.seats)
        most = total
        _check_counts(args, total, f"of {args.rack}")
    else:
        trays, slots = args.trays, _slots(args.nproc_per_node)
        total, most = nodes_min * trays * slots, nodes_max * trays * slots
        _check_counts(args, total, f"({nodes_min} hosts x {trays} trays x {slots} workers)")
    check_mesh(mesh, total, args.spares, rack.topology if rack else None, cross_clique=args.cross_clique)
    ranks = math.prod(extent for _, extent in mesh) if mesh else most - args.spares
    return JobSize(nodes_min, nodes_max, trays, slots, rack, mesh, ranks)


def _nodes(text: str) -> tuple[int, int]:
    try:
        nodes_min, nodes_max = parse_min_max_nnodes(text)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes {text!r} is neither N nor MIN:MAX.", remedy="give a number of hosts.") from error
    if not 0 < nodes_min <= nodes_max:
        raise UsageError(f"--nnodes {text} is not a range of hosts.", remedy="give 1 <= MIN <= MAX.")
    if nodes_max > _HOSTS_MAX:
        raise UsageError(f"--nnodes {text} is more than {_HOSTS_MAX} hosts.", remedy="give the number of hosts.")
    return nodes_min, nodes_max


def _slots(text: str) -> int:
    try:
        slots = int(text)
    except ValueError:
        slots = _count_devices(text)
    if slots < 1:
        raise UsageError(f"--nproc-per-node {text} leaves nothing to run.", remedy="give at least 1.")
    if slots > _SLOTS_MAX:
        raise UsageError(
            f"--nproc-per-node {text} is more than {_SLOTS_MAX} workers.", remedy="give the workers of one tray."
        )
    return slots


def _count_devices(kind: str) -> int:
    """Return the number of devices, counted in a child: counting GPUs may initialise CUDA, and then this process could
    not fork workers."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = struct.pack("<q", determine_local_world_size(kind))
            except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
                answer = str(error).encode()[:500]
            os.write(writing, answer)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    if len(answer) == 8:
        return int(struct.unpack("<q", answer)[0])
    raise UsageError(
        f"--nproc-per-node {kind}: {answer.decode(errors='replace') or 'torch cannot count these devices.'}",
        remedy="give a number, or one of auto, cpu, gpu.",
    )


def _check_counts(args: argparse.Namespace, total: int, which: str) -> None:
    """Check the numbers of trays and spares against ``total`` slots; ``which`` describes those slots."""
    if not 1 <= args.trays <= _TRAYS_MAX:
        raise UsageError(f"--trays {args.trays} is out of range.", remedy=f"give 1 to {_TRAYS_MAX}.")
    if args.spares < 0:
        raise UsageError(f"--spares {args.spares} is negative.", remedy="give 0 or more.")
    if args.spares >= total:
        more = "give a larger rack" if args.rack else "raise --nproc-per-node"
        raise UsageError(
            f"--spares {args.spares} of {total} slots {which} leave no rank to train.",
            remedy=f"lower --spares below {total}, or {more}; spares are taken out of it.",
        )
    if args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts} is negative.", remedy="give 0 or more.")
    if args.node_rank is not None and args.node_rank < 0:
        raise UsageError(f"--node-rank {args.node_rank} is negative.", remedy="give 0 or more.")
