"""Binding of a worker to cores and memory near its GPU."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Collection
from pathlib import Path

import msgspec

from rackrun.protocol.ids import SlotId
from rackrun.topology.model.racks import Gpu, Rack, Topology, Tray
from rackrun.topology.placement.rank_environment import Binding, binding, cores

__all__ = ["NOWHERE", "bind", "bindings", "cores_here"]

NOWHERE = Binding((), None, "not bound")
_CORES_MIN = 2
"""A worker has several threads, so it needs at least this many cores."""
_MPOL_PREFERRED = 1
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_NODES = Path("/sys/devices/system/node")


def bindings(topology: Topology, tray: str, here: Collection[int], allowed: Collection[int]) -> dict[int, Binding]:
    """Return the binding of each slot. ``here``: cores of this machine; ``allowed``: cores that this process may use.

    Returns nothing if the topology names cores that this machine does not have, because it describes another machine.
    Only the allowed cores of a GPU are divided among its slots.
    """
    place = topology.trays.get(tray)
    if place is None:
        return {}
    rack, found = place
    named = {core for gpu in found.gpus for core in cores(gpu.cpus, f"{tray}/{gpu.index}")}
    if not named <= set(here):
        return {}

    def confined(gpu: Gpu) -> Gpu:
        usable = [str(core) for core in cores(gpu.cpus) if core in allowed]
        return msgspec.structs.replace(gpu, cpus=",".join(usable))

    own: Tray = msgspec.structs.replace(found, gpus=tuple(confined(gpu) for gpu in found.gpus))
    alone = Topology.of([Rack(serial=rack.serial, trays=(own,))])
    bound = {gpu.index: binding(alone, SlotId(f"{tray}/{gpu.index}")) for gpu in own.gpus}
    return {index: one for index, one in bound.items() if len(one.cpus) >= _CORES_MIN}


def cores_here() -> frozenset[int]:
    """Return the cores that are online, whether or not this process may use them."""
    with contextlib.suppress(OSError):
        return frozenset(cores(Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip()))
    return frozenset(range(os.cpu_count() or 1))


def bind(cpus: Collection[int], numa: int | None) -> None:
    """Bind this process; its threads and the programs it starts inherit it. If the system refuses, nothing changes."""
    if cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
    number = _SET_MEMPOLICY.get(platform.machine())
    if numa is not None and number is not None and (_NODES / f"node{numa}").exists():
        words = (ctypes.c_ulong * (numa // 64 + 1))()
        words[numa // 64] = 1 << numa % 64
        bits = ctypes.c_ulong(len(words) * 64 + 1)  # the kernel subtracts one
        ctypes.CDLL(None).syscall(ctypes.c_long(number), ctypes.c_long(_MPOL_PREFERRED), words, bits)
