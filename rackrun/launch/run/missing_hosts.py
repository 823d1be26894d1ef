"""Messages about hosts that have not joined, while a job waits for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rackrun.launch.options.arguments import LaunchOptions

__all__ = ["AGAIN_S", "FIRST_S", "expected_trays", "who_is_missing"]

FIRST_S, AGAIN_S = 5.0, 30.0
"""Seconds until the first message, because hosts do not start at the same moment, and between further ones."""


def expected_trays(options: LaunchOptions) -> tuple[str, ...]:
    """Return the trays' names if they are known in advance, from a rack file or by node rank. (): only their number is
    known."""
    if options.rack is not None:
        return tuple(tray.name for rack in options.rack.topology.racks for tray in rack.trays)
    if options.node_rank is not None:
        return tuple(f"tray-{index:02}" for index in range(options.nodes_max * options.trays))
    return ()


def who_is_missing(here: Iterable[tuple[str, str]], wanted: int, expected: Sequence[str], trays_a_host: int) -> str:
    """Return a line about missing trays; "": none is missing. ``here``: trays that have joined, with their hosts."""
    joined = dict(here)
    if len(joined) >= wanted:
        return ""
    came = ", ".join(f"{tray} ({host})" if host else tray for tray, host in sorted(joined.items())) or "nobody"
    absent = [tray for tray in expected if tray not in joined]
    missing = (
        ", ".join(f"{tray}{_rank_of(tray, trays_a_host)}" for tray in absent)
        if absent
        else f"{wanted - len(joined)} more"
    )
    return f"waiting for hosts: {len(joined)} of {wanted} trays are here: {came}; missing: {missing}"


def _rank_of(tray: str, trays_a_host: int) -> str:
    number = tray.removeprefix("tray-")
    return f" (--node-rank {int(number) // trays_a_host})" if number != tray and number.isdigit() else ""
