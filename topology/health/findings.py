"""What one reading says against a GPU, and against using it as a spare. Pure.

`against` concerns a GPU in use: only what makes it worse than it was, or threatens it. `preflight` concerns a GPU that
is to be used: all that NCCL and the driver require. NCCL silently turns NVLink off for a whole communicator when one
member's fabric registration is not complete, so one such spare would slow a rack down to network speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from rackrun.protocol.gpu_health import Health, Scope, health_of_action
from rackrun.topology.gpu_driver.readings import (
    FabricState,
    GpuReading,
    NvlinkState,
    NvmlUnavailable,
    TrayReading,
    fabric_faults,
)
from rackrun.topology.model.racks import CliqueId

__all__ = ["Finding", "against", "best_of", "preflight"]

_UP = (NvlinkState.ACTIVE, NvlinkState.SLEEP)
_SUMMARIES = {2: "unhealthy", 3: "limited capacity"}


class Finding(NamedTuple):
    """One problem found in a reading."""

    health: Health
    what: str
    fabric: bool = False
    passing: bool = False
    """Whether it may end by itself; then it counts only when it lasts."""
    scope: Scope = "gpu"


def against(reading: GpuReading, before: GpuReading | None = None) -> tuple[Finding, ...]:
    """Return all that ``reading`` says against a GPU in use.

    ``before``: the best state it was in (`best_of`). Only what it had then can count as lost.
    """
    found: list[Finding] = []
    if reading.verdict == "lost":
        found.append(Finding(Health.LOST, "the driver has lost the GPU"))
    elif reading.verdict == "reset_required":
        found.append(Finding(Health.RESET, "the driver requires a reset"))
    found += [Finding(Health.DEGRADED, f"{call}, twice in a row") for call in reading.failing]
    if reading.recovery_action is not None:
        health = health_of_action(reading.recovery_action)
        scope: Scope = "tray" if reading.recovery_action > 4 else "gpu"
        if health is not Health.OK:
            what = f"recovery action {reading.recovery_action}"
            found.append(Finding(health, what, fabric=health is Health.FABRIC, scope=scope))
    found += _memory(reading)
    found += _fabric(reading, before)
    down = _links_down(reading, before)
    if down:
        found.append(Finding(Health.DEGRADED, f"{_links(down)} down", fabric=True))
    return tuple(found)


def best_of(before: GpuReading, reading: GpuReading) -> GpuReading:
    """Return ``before`` with the fabric registration and the links that have come up since."""
    completed = before.fabric is not None and before.fabric.state == FabricState.COMPLETED
    fabric = before.fabric if completed or reading.fabric is None else reading.fabric
    links = tuple(
        was if was in _UP or now is None else now
        for was, now in zip_longest(before.links or (), reading.links or (), fillvalue=None)
    )
    return msgspec.structs.replace(before, fabric=fabric, links=links or None)


def _memory(reading: GpuReading) -> Iterable[Finding]:
    if reading.remapped and reading.remapped.failed:
        yield Finding(Health.DEGRADED, "a memory row failed and none is left to replace it")
    elif reading.remapped and reading.remapped.pending:
        yield Finding(Health.DEGRADED, "a memory row waits for a reset to be replaced")
    if reading.sram_threshold:
        yield Finding(Health.DEGRADED, "more SRAM errors than its threshold: replace it")


def _fabric(reading: GpuReading, before: GpuReading | None) -> Iterable[Finding]:
    fabric = reading.fabric
    if fabric is None:
        return
    was = before.fabric if before else None
    if was and was.state == FabricState.COMPLETED and fabric.state != FabricState.COMPLETED:
        yield Finding(Health.FABRIC, f"its fabric registration fell back to {_state(fabric.state)}", fabric=True)
    elif was and was.joined and fabric.joined and fabric.joined != was.joined:
        yield Finding(Health.FABRIC, f"it moved from clique {was.joined} to {fabric.joined}", fabric=True)
    faults = fabric_faults(fabric.mask)
    for what, passing in faults:
        if what != "fabric manager disconnected":  # existing connections keep working without it
            yield Finding(Health.DEGRADED, f"fabric: {what}", fabric=True, passing=passing)
    if not faults and fabric.summary in _SUMMARIES:
        yield Finding(Health.DEGRADED, f"fabric: {_SUMMARIES[fabric.summary]}", fabric=True)


def _links_down(reading: GpuReading, before: GpuReading | None) -> list[int]:
    """Return the indices of the NVLinks that are down.

    In a fabric every link must be up. Elsewhere a link may be unconnected, so only links that were up before count.
    """
    links = reading.links or ()
    in_fabric = reading.fabric is not None and reading.fabric.state == FabricState.COMPLETED
    was_up = (before.links or ()) if before else ()
    return [
        link
        for link, state in enumerate(links)
        if state not in _UP and (in_fabric or (link < len(was_up) and was_up[link] in _UP))
    ]


def preflight(
    reading: TrayReading | NvmlUnavailable,
    indices: Sequence[int],
    *,
    clique: CliqueId | None = None,
    links: int | None = None,
) -> tuple[str, ...]:
    """Return why the GPUs ``indices`` of this tray must not be used as spares now; empty when they may.

    ``clique``: the clique that they are to join. ``links``: how many NVLinks each must have up. None: not checked.
    """
    if isinstance(reading, NvmlUnavailable):
        return (f"nothing can be read of this tray: {reading.what}",)
    by_index = {gpu.index: gpu for gpu in reading.gpus}
    reasons: list[str] = []
    for index in indices:
        gpu = by_index.get(index)
        found = _against_spare(gpu, clique, links) if gpu else ["the driver does not list it"]
        reasons += [f"GPU {index}: {what}" for what in found]
    return tuple(reasons)


def _against_spare(gpu: GpuReading, clique: CliqueId | None, links: int | None) -> list[str]:
    findings = against(gpu)
    found = [finding.what for finding in findings]
    if clique is None or not clique.domain.startswith("host:"):
        # Within one host NCCL does not require it, and on some machines it never completes.
        found += _against_registration(gpu, clique)
    up = sum(state in _UP for state in gpu.links or ())
    down_is_said = any(finding.what.startswith("NVLink") for finding in findings)
    if links is not None and gpu.links is not None and up < links and not down_is_said:
        found.append(f"{up} NVLinks are up, not {links}")
    return found


def _against_registration(gpu: GpuReading, clique: CliqueId | None) -> Iterable[str]:
    fabric = gpu.fabric
    if fabric is None or fabric.state == FabricState.NOT_SUPPORTED:
        if clique is not None:
            yield f"it is in no fabric, but is to join clique {clique}"
        return
    if fabric.state != FabricState.COMPLETED:
        yield f"its fabric registration is {_state(fabric.state)}, not completed"
    elif fabric.status != 0:
        yield f"its fabric registration ended with code {fabric.status}"
    elif clique is not None and fabric.joined is None:
        yield f"it is in no NVLink domain, but is to join clique {clique}"
    elif clique is not None and fabric.joined != clique:
        yield f"it is in clique {fabric.joined}, not in {clique}"
    if any(what == "fabric manager disconnected" for what, _ in fabric_faults(fabric.mask)):
        yield "fabric: fabric manager disconnected"


def _state(state: int) -> str:
    return FabricState(state).name.lower().replace("_", " ") if state in set(FabricState) else str(state)


def _links(down: list[int]) -> str:
    return ("NVLink " if len(down) == 1 else "NVLinks ") + ", ".join(map(str, down))
