"""Parse the driver's messages in the kernel's log: a second source, with more detail than NVML's events.

::

    NVRM: Xid (PCI:0000:9b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
    NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 ...)
    NVRM: Xid (PCI:0000:9b:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)

A message that is cut off, or runs into another one, is parsed as far as it is certain: never half a number, never words
about another GPU. SXids, which concern NVSwitches, name no GPU and are skipped.

Source: NVIDIA, "Xid Errors", https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

import re

import msgspec

from rackrun.topology.gpu_driver.readings import normal_bdf

__all__ = ["KernelXid", "NvlinkReport", "parse_kernel_line", "parse_kmsg_record"]


class NvlinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """The details of Xids 144 to 150."""

    unit: str
    fatal: bool
    link: int
    """Index of the NVLink; -1 for no link in particular."""
    intr_info: int
    error_status: int


class KernelXid(msgspec.Struct, frozen=True, kw_only=True):
    """An Xid from the kernel's log."""

    xid: int
    bdf: str
    """PCI address in the form of `normal_bdf`."""
    text: str
    nvlink: NvlinkReport | None = None
    action: int | None = None
    """For Xid 154: the new recovery action."""


_XID = re.compile(r"NVRM: Xid \(((?:PCI:)?[0-9a-fA-F:.]+)(?: [^)]*)?\)[^:]*: (\d{1,4}), *(.*)$")
_FALLEN = re.compile(
    r"NVRM: (?:The NVIDIA )?GPU (?:at )?((?:PCI:)?[0-9a-fA-F:.]+[0-9a-fA-F]):?.*has fallen off the bus"
)
_NVLINK5 = re.compile(
    r"([A-Z0-9_/ ]+?) (Fatal|Nonfatal|Non-fatal|Link Fatal)(?: \S+){0,3} Link (-?\d+)"
    r" \((0x[0-9a-f]{1,8}) (0x[0-9a-f]{1,8})(?=[ )])",
    re.IGNORECASE,
)
_ACTION = re.compile(
    r"recovery action changed from \w+(?: \([^)]*\))? to (0x[0-9a-f]+|\d+)\b(?: \(([^)]*)\))?", re.IGNORECASE | re.ASCII
)
_ACTION_NAMES = {
    "none": 0,
    "gpu reset required": 1,
    "node reboot required": 2,
    "drain p2p": 3,
    "drain and reset": 4,
}  # the name counts where it is known: the numbers above 4 changed their meaning


def parse_kernel_line(line: str) -> KernelXid | None:
    """Parse an error that the driver reports; None for every other line. The line may begin with dmesg's time."""
    text = line.strip()
    match = _XID.search(text)
    if match is None:
        fallen = _FALLEN.search(text)
        bdf = normal_bdf(fallen[1]) if fallen else ""
        return KernelXid(xid=79, bdf=bdf, text=text) if bdf else None
    bdf, xid = normal_bdf(match[1]), int(match[2])
    said = match[3].partition("NVRM: ")[0]
    if not bdf:
        return None
    return KernelXid(
        xid=xid,
        bdf=bdf,
        text=said,
        nvlink=_nvlink(said) if 144 <= xid <= 150 else None,
        action=_action(said) if xid == 154 else None,
    )


def parse_kmsg_record(record: str) -> KernelXid | None:
    """Parse a record of ``/dev/kmsg`` (``PRIORITY,SEQUENCE,MICROSECONDS,FLAGS;TEXT``); None when it is no Xid.

    A record written by a process instead of the kernel is skipped: its priority has a facility.
    """
    head, separator, text = record.partition(";")
    priority = head.partition(",")[0]
    if not separator or not priority.isascii() or not priority.isdigit() or int(priority) >> 3:
        return None
    return parse_kernel_line(text.partition("\n")[0])


def _nvlink(said: str) -> NvlinkReport | None:
    match = _NVLINK5.match(said)
    if match is None:
        return None
    unit, severity, link, info, status = match.groups()
    return NvlinkReport(
        unit=unit,
        fatal=not severity.lower().startswith("non"),
        link=int(link),
        intr_info=int(info, 16),
        error_status=int(status, 16),
    )


def _action(said: str) -> int | None:
    match = _ACTION.search(said)
    if match is None:
        return None
    return _ACTION_NAMES.get(
        (match[2] or "").strip().lower(), int(match[1], 16 if match[1][:2].lower() == "0x" else 10)
    )
