"""Build a libnvidia-ml.so.1 that works without GPUs, and write the state file from which it answers.

::

    library = build(folder)                              # compiled with gcc; goes first on LD_LIBRARY_PATH
    rack = FakeRack.create(folder / "rack.state", topology)
    environment = rack.environment(library, "tray-03")   # for a child that is to run on that tray
    rack.tray("tray-03").xid(gpu=2, xid=79)              # while it runs
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rackrun.errors import UsageError
from rackrun.topology.model.racks import CliqueId, Gpu, Topology, Tray

__all__ = ["CALLS", "NVML_ERRORS", "FakeRack", "FakeTray", "build"]

SOURCE = Path(__file__).with_name("nvml.c")
MAGIC = 0x6C6D766E
ONCE = 0x10000
GPUS, LINKS, EVENTS, MASK_WORDS, USERS = 16, 36, 256, 16, 4
CALLS = ("identity", "fabric", "platform", "fields", "links", "remapped", "ecc", "clocks", "affinity", "events")
"""Groups of calls that can be made to fail by themselves: see `FakeTray.fail`."""
NVML_ERRORS = {
    "NOT_SUPPORTED": 3, "NO_PERMISSION": 4, "DRIVER_NOT_LOADED": 9, "FUNCTION_NOT_FOUND": 13, "GPU_IS_LOST": 15,
    "RESET_REQUIRED": 16, "ARGUMENT_VERSION_MISMATCH": 25, "NOT_READY": 27, "UNKNOWN": 999,
}  # fmt: skip
XID_EVENT = 0x8
Says = int | dict[str, int]
"""A value or, for an array, place -> value."""
_u8, _u32, _u64, _char = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char


class _Platform(ctypes.Structure):
    _fields_ = [
        ("guid", _u8 * 16), ("chassis", _char * 16), ("slot", _u8), ("tray", _u8), ("host", _u8), ("peer", _u8),
        ("module", _u8), ("padding", _u8 * 3),
    ]  # fmt: skip


class FakeGpu(ctypes.Structure):
    """What the library answers about one GPU. Every field may be set while the library is in use."""

    _fields_ = [
        ("uuid", _char * 96), ("serial", _char * 32), ("bus_id", _char * 32), ("name", _char * 64),
        ("cluster", _u8 * 16), ("platform", _Platform),
        ("module_id", _u32), ("fabric_state", _u32), ("fabric_status", _u32), ("clique", _u32), ("fabric_mask", _u32),
        ("fabric_summary", _u32), ("links", _u32), ("link_state", _u32 * LINKS), ("remapped", _u32 * 4),
        ("recovery_action", _u32), ("sram_threshold", _u32), ("error", _u32), ("compute_mode", _u32), ("mig", _u32),
        ("user_count", _u32), ("users", _u32 * USERS), ("result", _u32 * len(CALLS)),
        ("ecc_uncorrected", _u64), ("clock_reasons", _u64), ("nodes", _u64), ("cpus", _u64 * MASK_WORDS),
    ]  # fmt: skip


class _Event(ctypes.Structure):
    _fields_ = [("gpu", _u32), ("unused", _u32), ("type", _u64), ("data", _u64)]


class FakeTray(ctypes.Structure):
    """The state of one tray.

    ``init_result`` is what nvmlInit returns; ``hang`` blocks every call while it is set; ``readings`` counts the
    readings begun so far; ``delivered`` counts how many of the ``event_count`` events were delivered; ``cuda`` is the
    newest CUDA version that the driver serves, 13000 for 13.0.
    """

    _fields_ = [
        ("name", _char * 64), ("driver", _char * 80),
        ("gpus", _u32), ("init_result", _u32), ("hang", _u32), ("fabric_version", _u32), ("event_count", _u32),
        ("calls", _u32), ("readings", _u32), ("delivered", _u32), ("cuda", _u32), ("gpu", FakeGpu * GPUS), ("event", _Event * EVENTS),
    ]  # fmt: skip

    def xid(self, gpu: int, xid: int, kind: int = XID_EVENT) -> None:
        """Let the driver report ``xid`` now, to every process that waits for events."""
        event = self.event[self.event_count % EVENTS]
        event.gpu, event.type, event.data = gpu, kind, xid
        self.event_count += 1  # last: an event is complete when it is counted

    def fail(self, gpu: int, call: str, error: str | None, *, once: bool = False) -> None:
        """Let ``call`` (of `CALLS`) return ``error`` (of `NVML_ERRORS`) from now on; None lets it answer again.

        ``once``: only the next call fails.
        """
        self.gpu[gpu].result[CALLS.index(call)] = (NVML_ERRORS[error] if error else 0) | (ONCE if once else 0)

    def put(self, gpu: int, says: Mapping[str, Says]) -> None:
        """Set what the driver answers about a GPU: fields of `FakeGpu`; of an array, only the given places."""
        for name, value in says.items():
            if isinstance(value, dict):
                array = getattr(self.gpu[gpu], name)
                for at, one in value.items():
                    array[int(at)] = one
            else:
                setattr(self.gpu[gpu], name, value)

    def said(self, gpu: int, says: Mapping[str, Says]) -> dict[str, Says]:
        """Return the present values of the fields and places that are named in ``says``."""
        return {
            name: {at: getattr(self.gpu[gpu], name)[int(at)] for at in value}
            if isinstance(value, dict)
            else getattr(self.gpu[gpu], name)
            for name, value in says.items()
        }

    def fail_all(self, gpu: int, error: str | None) -> None:
        """Let every call about this GPU return ``error``, as for a GPU that is lost; None lets them answer again."""
        self.gpu[gpu].error = NVML_ERRORS[error] if error else 0


class FakeRack:
    """The state file of a simulated rack, mapped here and in every process that loads the library."""

    def __init__(self, path: Path, trays: Mapping[str, FakeTray], address: int, size: int) -> None:
        self.path, self._trays, self._address, self._size = path, dict(trays), address, size

    @classmethod
    def create(cls, path: Path, topology: Topology, *, driver: str = "580.65.06", links: int = 18) -> FakeRack:
        """Create the state file, with all trays of ``topology`` in order.

        A GPU whose clique spans only its own host is in no fabric.
        """
        head = 16
        size = head + ctypes.sizeof(FakeTray) * len(topology.trays)
        with path.open("wb+") as file:
            file.truncate(size)
            address = _map(file.fileno(), size)
        values = (MAGIC, ctypes.sizeof(FakeTray), len(topology.trays), 0)
        ctypes.memmove(address, b"".join(value.to_bytes(4, "little") for value in values), head)
        clique_of = {seat.gpu.uuid: seat.clique for seat in topology.seats}
        trays = {}
        for number, (name, (rack, tray)) in enumerate(topology.trays.items()):
            fake = FakeTray.from_address(address + head + number * ctypes.sizeof(FakeTray))
            fake.name, fake.driver, fake.gpus, fake.fabric_version = name.encode(), driver.encode(), len(tray.gpus), 3
            fake.cuda = 13000
            for at, gpu in zip(fake.gpu, tray.gpus, strict=False):
                _describe(at, gpu, tray, rack.serial, clique_of[gpu.uuid], links)
            trays[name] = fake
        return cls(path, trays, address, size)

    @classmethod
    def open(cls, path: Path) -> FakeRack:
        """Map a state file that another process has created."""
        head, size = 16, path.stat().st_size
        with path.open("rb+") as file:
            address = _map(file.fileno(), size)
        trays = {}
        for number in range((size - head) // ctypes.sizeof(FakeTray)):
            fake = FakeTray.from_address(address + head + number * ctypes.sizeof(FakeTray))
            trays[fake.name.decode()] = fake
        return cls(path, trays, address, size)

    def __contains__(self, tray: str) -> bool:
        return tray in self._trays

    def tray(self, name: str) -> FakeTray:
        return self._trays[name]

    def environment(self, library: Path, tray: str = "") -> dict[str, str]:
        """Return the environment for a process that runs on ``tray``.

        Without ``tray`` it is for agents, each of which says itself which tray is its own. ``library`` is what `build`
        returned.
        """
        before = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library), before])),
            "FAKE_NVML_STATE": str(self.path),
            **({"FAKE_NVML_TRAY": tray} if tray else {}),
        }

    def close(self) -> None:
        """Unmap the file; its trays must not be used afterwards."""
        self._trays.clear()
        _libc.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._size))


def build(folder: Path, without: Iterable[str] = ()) -> Path:
    """Compile the library, and return the folder for LD_LIBRARY_PATH.

    The functions in ``without`` are left out, as an old driver lacks them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    options = [f"-DNO_{name}" for name in without]
    if (gcc := shutil.which("gcc")) is None:
        raise UsageError("there is no gcc, which makes the fake driver.", remedy="install it (Debian: gcc libc6-dev).")
    subprocess.run(
        [gcc, "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", *options, "-o", str(library), str(SOURCE)],
        check=True,
        timeout=60,
    )
    return folder


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def _map(fd: int, size: int) -> int:
    """Map a file by mmap(2) itself: Python's mmap keeps a file descriptor for as long as any part of it is in use."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, ctypes.c_size_t(size), protection, mmap.MAP_SHARED, fd, ctypes.c_long(0))
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def _describe(at: FakeGpu, gpu: Gpu, tray: Tray, chassis: str, clique: CliqueId, links: int) -> None:
    of: Any = at
    of.uuid, of.serial, of.name = gpu.uuid.encode(), gpu.serial.encode(), b"NVIDIA GB200"
    of.bus_id = (gpu.bdf.upper() or f"{gpu.index + 1:08X}:01:00.0").encode()
    of.module_id = gpu.module_id or gpu.index + 1
    if not clique.domain.startswith("host:"):
        of.cluster[:] = list(uuid.UUID(clique.domain).bytes)
        of.fabric_state, of.clique, of.fabric_mask, of.fabric_summary = 3, clique.clique, 0x1AA, 1
        of.links = links
        of.link_state[:links] = [1] * links
        of.platform.guid[:8] = list(uuid.uuid5(uuid.NAMESPACE_OID, gpu.uuid).bytes[:8])
        of.platform.chassis = chassis.encode()[:16]
        of.platform.slot = tray.slot if tray.slot is not None else tray.index + 1
        of.platform.tray, of.platform.host, of.platform.peer, of.platform.module = tray.index, 1, 1, of.module_id
    else:
        of.result[CALLS.index("platform")] = NVML_ERRORS["NOT_SUPPORTED"]
    of.nodes = 1 << (gpu.numa or 0)
    first, _, last = (gpu.cpus or "0-7").partition("-")
    for cpu in range(int(first), int(last or first) + 1):
        of.cpus[cpu // 64] |= 1 << cpu % 64
