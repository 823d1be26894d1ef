"""Parse NVML's structures from bytes, by the layouts of nvml.h, and turn its masks and texts into values.

The binding's own classes are not used: its class for the fabric is version 2, its masks were wrong in some releases,
and its classes decode binary fields as text.
"""

from __future__ import annotations

import ctypes
import struct
import uuid
from typing import Any

from rackrun.topology.gpu_driver.readings import Fabric, Platform

__all__ = [
    "FABRIC_V2",
    "FABRIC_V3",
    "PLATFORM_V2",
    "SRAM_V1",
    "as_ranges",
    "first_bit",
    "parse_fabric",
    "parse_platform",
    "parse_sram_threshold",
    "text_of",
    "versioned",
]

FABRIC_V3, FABRIC_V2, PLATFORM_V2, SRAM_V1 = 0x03000028, 0x02000024, 0x0200002C, 0x01000068


def parse_fabric(raw: bytes) -> Fabric:
    """Parse ``nvmlGpuFabricInfo_v3_t`` or ``_v2_t``, by the version in its first word."""
    version, cluster, status, clique, state, mask = struct.unpack_from("<I16sIIB3xI", raw)
    return Fabric(
        state=state,
        domain=str(uuid.UUID(bytes=cluster)) if any(cluster) else "",
        clique=clique,
        status=status,
        mask=mask,
        summary=raw[36] if version == FABRIC_V3 else None,
    )


def parse_platform(raw: bytes) -> Platform:
    """Parse ``nvmlPlatformInfo_v2_t``."""
    guid, chassis, slot, tray, host, _, module = struct.unpack_from("<4x16s16s5B", raw)
    return Platform(
        chassis=chassis.partition(b"\0")[0].decode("ascii", errors="backslashreplace"),
        slot=slot,
        tray=tray,
        host=host,
        module=module,
        guid=guid[:8].hex() if not any(guid[8:]) else guid.hex(),
    )


def parse_sram_threshold(raw: bytes) -> bool:
    """Return ``bThresholdExceeded`` of ``nvmlEccSramErrorStatus_v1_t``."""
    return bool(struct.unpack_from("<I", raw, 96)[0])


def as_ranges(words: Any) -> str:
    """Return a bit mask as ranges, such as ``0-71,144``.

    ``words``: 64 bits each, the lowest first. Empty for no bits.
    """
    filled = [(at, int(word)) for at, word in enumerate(words or ()) if word]  # of 64 words, all but a few are 0
    bits = [at * 64 + bit for at, word in filled for bit in range(64) if word >> bit & 1]
    ranges: list[list[int]] = []
    for bit in bits:
        if ranges and ranges[-1][1] == bit - 1:
            ranges[-1][1] = bit
        else:
            ranges.append([bit, bit])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in ranges)


def versioned(version: int) -> Any:
    """Return an empty structure whose first word is its version, which includes its size."""
    buffer = ctypes.create_string_buffer(version & 0xFFFFFF)
    struct.pack_into("<I", buffer, 0, version)
    return buffer


def first_bit(words: Any) -> int | None:
    """Return the index of the lowest bit that is set; None when there is none.

    In a mask of NUMA nodes it is the CPU's node: on coherent systems GPU memory has nodes of its own, numbered after
    those of the CPUs.
    """
    for at, word in enumerate(words or ()):
        if int(word):
            return at * 64 + (int(word) & -int(word)).bit_length() - 1
    return None


def text_of(value: Any) -> str:
    """Return NVML's text as str: bytes are decoded, None is ""."""
    return value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else str(value or "")
