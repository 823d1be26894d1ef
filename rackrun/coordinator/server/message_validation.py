"""Checks of agents' messages beyond their types, on which the core relies.

An agent with the job's token may still be broken, or run on a machine with bad memory. An invalid message costs it only
its own connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rackrun.errors import RackrunError
from rackrun.protocol.events import DeviceChecked, Event, OfWorker, TrayDescribed, TrayJoined
from rackrun.protocol.wire import FillerState, StateCopied, Telemetry, UnitCommitted, UnitSealed
from rackrun.topology.sources.partial_topology import PartialTopology

__all__ = ["SLOTS_MAX", "unlikely"]

SLOTS_MAX = 4096
"""Largest number of slots of one tray."""
_NUMBER_MAX = 2**62
"""Limit of steps, generations and numbers derived from them, because the core and SQLite add to them."""
_NAME_CHARS_MAX = 1_000
_ID_BYTES = 8
_topology = msgspec.json.Decoder(list[PartialTopology])


def unlikely(message: Event | Telemetry, slots: int) -> str:
    """Return why no agent of a tray with ``slots`` slots would send this; "": one may."""
    if isinstance(message, TrayJoined):
        return _of_tray(message)
    if because := _numbers(msgspec.structs.asdict(message)):
        return because
    if isinstance(message, OfWorker | UnitCommitted | UnitSealed | StateCopied | FillerState):
        index = message.slot.rpartition("/")[2]
        if not (
            index.isascii()
            and index.isdecimal()
            and len(index) <= 6
            and str(int(index)) == index
            and int(index) < slots
        ):
            return f"there is no slot {message.slot!r}"
    if isinstance(message, UnitCommitted | UnitSealed) and len(message.ids) % _ID_BYTES:
        return f"{len(message.ids)} bytes are no list of sample ids"
    if isinstance(message, DeviceChecked) and not 0 <= message.index < slots:
        return f"there is no slot {message.index}"
    if isinstance(message, TrayDescribed):
        return _of_topology(message.topology)
    return ""


def _of_tray(joined: TrayJoined) -> str:
    if not 0 < joined.slots <= SLOTS_MAX:
        return f"a tray of {joined.slots} slots"
    if any(not 0 <= index < joined.slots for index in joined.unfit):
        return "a slot that is unfit and not there"
    if max(len(joined.tray), len(joined.host), len(joined.store), len(joined.snapshots)) > _NAME_CHARS_MAX:
        return "a name without an end"
    return _of_topology(joined.topology)


def _of_topology(data: bytes) -> str:
    try:
        if data:
            _topology.decode(data)
    except (msgspec.MsgspecError, RackrunError, ValueError, RecursionError) as error:
        return f"what the tray is cannot be read: {error}"
    return ""


def _numbers(value: Any) -> str:
    """Return which number in ``value``, at any depth, is out of range; "": none."""
    if isinstance(value, bool) or value is None or isinstance(value, str | bytes | float):
        return ""
    if isinstance(value, int):
        return "" if -_NUMBER_MAX <= value <= _NUMBER_MAX else f"the number {value}"
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return next((because for one in (*value, *value.values()) if (because := _numbers(one))), "")
    if isinstance(value, list | tuple):
        return next((because for one in value if (because := _numbers(one))), "")
    return ""
