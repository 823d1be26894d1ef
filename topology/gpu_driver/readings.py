"""What a driver reports of a tray's GPUs at one moment: facts, not judgements. `nvml` reads them, `health` judges them.

A field that the driver or the GPU does not have is None, and listed in `GpuReading.unknown`: unknown is never
unhealthy. Layouts and values: NVIDIA's nvml.h (NVML API reference, "Device Queries", "Fabric", "Field Values").
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import Literal

import msgspec

from rackrun.topology.model.racks import CliqueId

__all__ = [
    "Fabric",
    "FabricState",
    "GpuReading",
    "NvlinkState",
    "NvmlUnavailable",
    "Platform",
    "RecoveryAction",
    "RemappedRows",
    "TrayReading",
    "XidEvent",
    "fabric_faults",
    "normal_bdf",
]


class FabricState(IntEnum):
    """Progress of a GPU's registration with its fabric."""

    NOT_SUPPORTED = 0
    NOT_STARTED = 1
    IN_PROGRESS = 2
    COMPLETED = 3


class RecoveryAction(IntEnum):
    """What the driver wants done (field 230). Values above 4 changed their meaning between drivers: see `health`."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4


class NvlinkState(IntEnum):
    """State of an NVLink."""

    INACTIVE = 0
    ACTIVE = 1
    SLEEP = 2
    ACTIVE_TRAFFIC_DISABLED = 3


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's registration with its NVLink fabric."""

    state: int
    """A value of `FabricState`."""
    domain: str = ""
    """The cluster UUID; empty for a GPU that is in no fabric of several hosts."""
    clique: int = 0
    status: int = 0
    """NVML's return code of the registration; meaningful once the state is COMPLETED."""
    mask: int = 0
    """Two bits (one field: four) for each thing that may be wrong: see `fabric_faults`."""
    summary: int | None = None
    """0 not supported, 1 healthy, 2 unhealthy, 3 limited capacity; None from drivers without version 3."""

    @property
    def joined(self) -> CliqueId | None:
        """The clique, once registered with a domain; None before. As for NCCL, only domain and clique count."""
        if self.state != FabricState.COMPLETED or self.status != 0 or not self.domain:
            return None
        return CliqueId(self.domain, self.clique)


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU's physical location."""

    chassis: str
    """Serial of the rack."""
    slot: int
    """Position in the rack, counting switch trays."""
    tray: int
    """Position among the compute trays."""
    host: int
    """Number of the host in the tray."""
    module: int
    """Number of the GPU in its host, from 1."""
    guid: str = ""
    """GUID of its NVLink port, as hex."""


class RemappedRows(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of memory rows that were remapped after errors."""

    correctable: int
    uncorrectable: int
    pending: bool
    """A row waits for a reset to be replaced."""
    failed: bool
    """No row was left to replace a failed one."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the driver reports of one GPU."""

    index: int
    uuid: str = ""
    """Empty when the GPU was lost before it was ever read."""
    bdf: str = ""
    """PCI address in the form of `normal_bdf`."""
    serial: str = ""
    name: str = ""
    module_id: int | None = None
    verdict: Literal["", "lost", "reset_required"] = ""
    """What calls fail with, where that is the driver's judgement of the GPU."""
    failing: tuple[str, ...] = ()
    """Calls that failed twice in a row with an unclassified error, such as ``nvmlDeviceGetUUID: UNKNOWN``."""
    unknown: tuple[str, ...] = ()
    """Fields that this driver or this GPU does not have."""
    refused: tuple[str, ...] = ()
    """Fields for which this process lacks permission."""
    fabric: Fabric | None = None
    platform: Platform | None = None
    links: tuple[int, ...] | None = None
    """`NvlinkState` of every NVLink."""
    remapped: RemappedRows | None = None
    recovery_action: int | None = None
    ecc_uncorrected: int | None = None
    """Uncorrected ECC errors since the last reset."""
    sram_threshold: bool | None = None
    """Whether there were so many SRAM errors that the GPU should be replaced."""
    slowdown: int | None = None
    """Bits of what slows the clocks: 0x8 hardware, 0x40 heat, 0x80 the power brake.

    Others are normal under load, and masked.
    """
    numa: int | None = None
    """The NUMA node of the CPU to which the GPU is attached."""
    cpus: str = ""
    """CPU cores near the GPU, such as ``0-71``."""
    mode: Literal["", "exclusive", "prohibited"] = ""
    """How many processes may compute on it: "" any number, "exclusive" one, "prohibited" none.

    This field and the following ones are only in the first reading of a process.
    """
    mig: bool = False
    """Whether the GPU is divided into slices (MIG)."""
    users: tuple[int, ...] = ()
    """Pids of the processes that compute on it, as far as this process may see them."""


class TrayReading(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the driver reports of all GPUs of a tray."""

    driver: str
    gpus: tuple[GpuReading, ...]
    events: bool = True
    """Whether Xids are reported as they happen."""
    cuda: int | None = None
    """The newest CUDA version that the driver supports: 13020 is 13.2. None when it does not say."""

    @property
    def driver_branch(self) -> int | None:
        """The driver's branch: 575 for ``575.57.08``. None when the version is not understood."""
        match = re.match(r"(\d{3,4})\.", self.driver)
        return int(match[1]) if match else None


class XidEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error that the driver has just reported for a GPU."""

    xid: int
    index: int | None = None
    uuid: str = ""
    bdf: str = ""
    live: int | None = None
    """The recovery action read right after the error; None when it could not be read."""


class NvmlUnavailable(msgspec.Struct, frozen=True, kw_only=True):
    """Why nothing can be read, and what to do about it. It says nothing about the GPUs."""

    why: Literal["missing", "no_driver", "too_old", "no_permission", "hanging", "crashed", "failed"]
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} Remedy: {self.remedy}"


_MASK_BITS = 0x3
_TRUE, _FALSE = 1, 2
_CONFIGURATION = {
    2: "wrong system GUID",
    3: "wrong chassis serial",
    4: "no partition",
    5: "too few NVLinks",
    6: "GPU firmware does not match",
    7: "wrong location",
    8: "the GPU's state is invalid",
}


def fabric_faults(mask: int) -> tuple[tuple[str, bool], ...]:
    """Return what the health mask says is wrong, each with whether it may end by itself.

    Positions and values are nvml.h's ``NVML_GPU_FABRIC_HEALTH_MASK_*``. The widths are 2 bits (one: 4). Older bindings
    have 0x11 for the widths, so theirs are not used.
    """

    def field(shift: int) -> int:
        return (mask >> shift) & _MASK_BITS

    configuration = (mask >> 8) & 0xF
    found = [
        (field(0) == _TRUE, "degraded bandwidth", False),
        (field(2) == _TRUE, "route recovery in progress", True),
        (field(4) == _TRUE, "route unhealthy", False),
        (field(6) == _TRUE, "access timeout recovery in progress", True),
        (configuration > 1, f"configuration: {_CONFIGURATION.get(configuration, configuration)}", False),
        (field(12) == _FALSE, "no partition assigned", False),
        (field(14) == _FALSE, "fabric manager disconnected", False),
    ]
    return tuple((what, passing) for wrong, what, passing in found if wrong)


_BDF = re.compile(
    r"(?:PCI:)?(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE | re.ASCII
)


def normal_bdf(text: str) -> str:
    """Return a PCI address as ``00000008:01:00.0``: a domain of eight digits, a function, lower case.

    Return ``""`` when the text is no PCI address.

    NVML writes eight digits of domain, sysfs four, and the kernel log four and no function.
    """
    match = _BDF.fullmatch(text.strip())
    if not match:
        return ""
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):08x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or '0'}"
