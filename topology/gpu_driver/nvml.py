"""Read a tray's GPUs through nvidia-ml-py. It runs in a process of its own: see `nvml_watch`.

Every call is guarded. A field that this driver, this GPU or this binding does not have is unknown, and never makes a
GPU unhealthy. GPU_IS_LOST and RESET_REQUIRED are the driver's verdict about the GPU. A lack of permission is reported.
Any other failing call is repeated once, then reported.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from rackrun.topology.gpu_driver.nvml_layout import (
    FABRIC_V2,
    FABRIC_V3,
    PLATFORM_V2,
    SRAM_V1,
    as_ranges,
    first_bit,
    parse_fabric,
    parse_platform,
    parse_sram_threshold,
    text_of,
    versioned,
)
from rackrun.topology.gpu_driver.readings import (
    Fabric,
    GpuReading,
    NvmlUnavailable,
    Platform,
    RemappedRows,
    TrayReading,
    XidEvent,
    normal_bdf,
)

__all__ = ["Nvml"]

FIELD_LINK_STATE, FIELD_RECOVERY_ACTION = 165, 230
LINKS_MAX = 36
CPU_WORDS, NODE_WORDS = 64, 4
XID_EVENTS = 0x8
SLOWDOWNS = 0x8 | 0x40 | 0x80

NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND = 4, 9, 10, 12
FUNCTION_NOT_FOUND, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH = 13, 15, 16, 25
UNKNOWN_FIELD = frozenset({2, 3, 6, 7, FUNCTION_NOT_FOUND, VERSION_MISMATCH, 26, 27})
"""NVML's codes that mean that a field is unknown.

Invalid argument, not supported, not found, too little room, no such function, other version, deprecated, not ready.
"""
_VERDICTS: dict[int, Literal["lost", "reset_required"]] = {GPU_IS_LOST: "lost", RESET_REQUIRED: "reset_required"}

_MODES: dict[int | None, Literal["exclusive", "prohibited"]] = {1: "exclusive", 2: "prohibited", 3: "exclusive"}
"""NVML's compute mode -> its name. 1 is EXCLUSIVE_THREAD, of old drivers."""


class Nvml:
    """An open NVML. Its calls may block for ever: when the driver hangs, so does every caller."""

    def __init__(self, binding: Any) -> None:
        self._nvml = binding
        self._handles: dict[int, Any] = {}
        self._known: dict[int, GpuReading] = {}
        self._events: Any = None
        self._unheard: set[int] = set()
        """GPUs that were lost when `listen` was called."""

    @classmethod
    def open(cls) -> Nvml | NvmlUnavailable:
        """Load NVML and begin to listen. Return why NVML is not available instead of raising."""
        try:
            import pynvml
        except ImportError as error:
            return NvmlUnavailable(why="missing", what=f"{error}.", remedy="pip install nvidia-ml-py")
        try:
            pynvml.nvmlInitWithFlags(0)
            nvml = cls(pynvml)
            nvml.listen()
        except pynvml.NVMLError as error:
            return _unavailable(error)
        return nvml

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            if self._events is not None:
                self._nvml.nvmlEventSetFree(self._events)
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def read(self) -> TrayReading | NvmlUnavailable:
        """Read all GPUs of the tray. Return why nothing can be read instead of raising."""
        nvml = self._nvml
        try:
            driver = text_of(nvml.nvmlSystemGetDriverVersion())
            cuda = _Asked(nvml)("cuda", "nvmlSystemGetCudaDriverVersion_v2")
            count = int(nvml.nvmlDeviceGetCount())
            gpus = tuple(self._gpu(index) for index in range(count))
        except nvml.NVMLError as error:
            return _unavailable(error)
        if any(not gpu.verdict for gpu in gpus if gpu.index in self._unheard):
            self.listen()
        return TrayReading(driver=driver, gpus=gpus, events=self._events is not None, cuda=cuda)

    def wait(self, timeout_ms: int) -> XidEvent | None:
        """Wait for the next Xid, and read the recovery action right after it. Return None when none comes in time.

        Raises pynvml.NVMLError when events cannot be waited for.
        """
        try:
            data = self._nvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except self._nvml.NVMLError as error:
            if error.value == TIMEOUT:
                return None
            raise
        if data.eventType != XID_EVENTS:
            return None
        index = next((i for i, handle in self._handles.items() if _same(handle, data.device)), None)
        known = self._known.get(index) if index is not None else None
        action = _Asked(self._nvml).recovery_action(data.device)
        return XidEvent(
            xid=int(data.eventData),
            index=index,
            uuid=known.uuid if known else "",
            bdf=known.bdf if known else "",
            live=action,
        )

    @property
    def listens(self) -> bool:
        return self._events is not None

    @property
    def errors(self) -> type[Exception]:
        """The exception type that `wait` raises."""
        raised: type[Exception] = self._nvml.NVMLError
        return raised

    def listen(self) -> None:
        """Listen for Xids from now on, on every GPU that answers.

        Called before the first reading, so that no Xid is missed between the two, and again when waiting fails, as it
        does once a GPU is lost. Without permission or support there are no events.
        """
        nvml = self._nvml
        self._unheard.clear()
        try:
            if self._events is not None:
                self._events = nvml.nvmlEventSetFree(self._events)
            events = nvml.nvmlEventSetCreate()
            heard = [self._register(index, events) for index in range(int(nvml.nvmlDeviceGetCount()))]
            if any(heard):
                self._events = events
            else:
                nvml.nvmlEventSetFree(events)
        except nvml.NVMLError:  # if more than events is wrong, the next reading reports it
            self._events = None

    def _register(self, index: int, events: Any) -> bool:
        nvml = self._nvml
        try:
            handle = self._handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
            kinds = int(nvml.nvmlDeviceGetSupportedEventTypes(handle)) & XID_EVENTS
            if kinds:
                nvml.nvmlDeviceRegisterEvents(handle, kinds, events)
        except nvml.NVMLError as error:
            if error.value in _VERDICTS:
                self._unheard.add(index)
            return False
        return bool(kinds)

    def _gpu(self, index: int) -> GpuReading:
        asked = _Asked(self._nvml)
        handle = self._handles.get(index)
        if handle is None:
            handle = asked("handle", "nvmlDeviceGetHandleByIndex", index)
        if handle is not None:
            self._handles[index] = handle
            reading = asked.reading(index, handle)
            if index not in self._known:
                reading = asked.as_found(reading, handle)
        else:
            reading = asked.closed(index)
        known = self._known.get(index)
        if reading.uuid:
            self._known[index] = reading
        elif known is not None:  # it no longer answers, but its identity is known
            reading = _named(reading, known)
        return reading


class _Asked:
    """The calls of one reading of one GPU, and how they ended."""

    def __init__(self, binding: Any) -> None:
        self._nvml = binding
        self._verdict: Literal["", "lost", "reset_required"] = ""
        self._failing: list[str] = []
        self._unknown: list[str] = []
        self._refused: list[str] = []

    def __call__(self, field: str, name: str, *arguments: Any) -> Any:
        """Make a call and return its answer, or None. A GPU that the driver has lost is not asked again."""
        return self._ask(field, lambda: getattr(self._nvml, name)(*arguments), name)

    def _ask(self, field: str, call: Callable[[], Any], name: str) -> Any:
        if self._verdict == "lost":
            return None
        for again in (True, False):
            try:
                return call()
            except (AttributeError, UnicodeDecodeError):  # the binding is older than the call, or decodes bytes as text
                self._unknown.append(field)
                return None
            except self._nvml.NVMLError as error:
                code = int(error.value)
                if code in _VERDICTS:
                    self._verdict = _VERDICTS[code]
                elif code in UNKNOWN_FIELD:
                    self._unknown.append(field)
                elif code == NO_PERMISSION:
                    self._refused.append(field)
                elif again:
                    continue
                else:
                    self._failing.append(f"{name} fails with code {code}")
                return None
        return None

    def closed(self, index: int) -> GpuReading:
        """Return a reading without values, for a GPU that cannot be opened."""
        return GpuReading(index=index, **self._ended())

    def _ended(self) -> dict[str, Any]:
        return {
            "verdict": self._verdict,
            "failing": tuple(self._failing),
            "unknown": tuple(self._unknown),
            "refused": tuple(self._refused),
        }

    def reading(self, index: int, handle: Any) -> GpuReading:
        """Read all fields of one GPU."""
        pci = self("bdf", "nvmlDeviceGetPciInfo", handle)
        rows = self("remapped", "nvmlDeviceGetRemappedRows", handle)
        slow = self("slowdown", "nvmlDeviceGetCurrentClocksEventReasons", handle)
        fields: dict[str, Any] = {
            "uuid": text_of(self("uuid", "nvmlDeviceGetUUID", handle)),
            "serial": text_of(self("serial", "nvmlDeviceGetSerial", handle)),
            "name": text_of(self("name", "nvmlDeviceGetName", handle)),
            "bdf": normal_bdf(text_of(pci.busId)) if pci is not None else "",
            "module_id": self("module_id", "nvmlDeviceGetModuleId", handle),
            "fabric": self._fabric(handle),
            "platform": self._platform(handle),
            "links": self._links(handle),
            "remapped": RemappedRows(
                correctable=rows[0], uncorrectable=rows[1], pending=bool(rows[2]), failed=bool(rows[3])
            )
            if rows is not None
            else None,
            "recovery_action": self.recovery_action(handle),
            "ecc_uncorrected": self("ecc_uncorrected", "nvmlDeviceGetTotalEccErrors", handle, 1, 0),
            "sram_threshold": self._sram(handle),
            "slowdown": int(slow) & SLOWDOWNS if slow is not None else None,
            "numa": first_bit(self("numa", "nvmlDeviceGetMemoryAffinity", handle, NODE_WORDS, 0)),
            "cpus": as_ranges(self("cpus", "nvmlDeviceGetCpuAffinityWithinScope", handle, CPU_WORDS, 0)),
        }
        return GpuReading(index=index, **fields, **self._ended())

    def as_found(self, reading: GpuReading, handle: Any) -> GpuReading:
        """Add what matters before a worker uses the GPU.

        If the driver does not report a field, nothing is held against the GPU.
        """
        if reading.verdict:
            return reading
        fresh = _Asked(self._nvml)  # a failure here is not the GPU's fault
        mode = fresh("mode", "nvmlDeviceGetComputeMode", handle)
        slices = fresh("mig", "nvmlDeviceGetMigMode", handle)
        users = fresh("users", "nvmlDeviceGetComputeRunningProcesses", handle)
        return msgspec.structs.replace(
            reading,
            mode=_MODES.get(mode, ""),
            mig=slices is not None and bool(slices[0]),
            users=tuple(sorted(int(one.pid) for one in users or ())),
        )

    def recovery_action(self, handle: Any) -> int | None:
        """Return the driver's recovery action (field 230); None when it cannot be read."""
        values = self("recovery_action", "nvmlDeviceGetFieldValues", handle, [FIELD_RECOVERY_ACTION])
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            self._unknown.append("recovery_action")
            return None
        return int(values[0].value.uiVal)

    def _fabric(self, handle: Any) -> Fabric | None:
        def version(number: int) -> Callable[[], Any]:
            def call() -> bytes:
                buffer = versioned(number)
                self._nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(buffer))
                return bytes(buffer.raw)

            return call

        def newest() -> Any:
            try:
                return version(FABRIC_V3)()
            except self._nvml.NVMLError as error:
                if error.value != VERSION_MISMATCH:
                    raise
                return version(FABRIC_V2)()

        raw = self._ask("fabric", newest, "nvmlDeviceGetGpuFabricInfoV")
        return parse_fabric(raw) if raw is not None else None

    def _platform(self, handle: Any) -> Platform | None:
        buffer = versioned(PLATFORM_V2)
        if self("platform", "nvmlDeviceGetPlatformInfo", handle, ctypes.byref(buffer)) is None:
            return None
        return parse_platform(buffer.raw)

    def _sram(self, handle: Any) -> bool | None:
        buffer = versioned(SRAM_V1)
        if self("sram_threshold", "nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(buffer)) is None:
            return None
        return parse_sram_threshold(buffer.raw)

    def _links(self, handle: Any) -> tuple[int, ...] | None:
        """Read the links' states: from the field, which has four states, or from the older call, which has two."""
        wanted = [(FIELD_LINK_STATE, link) for link in range(LINKS_MAX)]
        values = self("links", "nvmlDeviceGetFieldValues", handle, wanted)
        states = []
        for value in values if values is not None else ():
            if value.nvmlReturn != 0:
                break
            states.append(int(value.value.uiVal))
        return tuple(states) or self._links_one_by_one(handle)

    def _links_one_by_one(self, handle: Any) -> tuple[int, ...] | None:
        states: list[int] = []
        for link in range(LINKS_MAX):
            try:
                states.append(int(self._nvml.nvmlDeviceGetNvLinkState(handle, link)))
            except self._nvml.NVMLError as error:
                if error.value in _VERDICTS:
                    self._verdict = _VERDICTS[int(error.value)]
                break
        self._unknown = [field for field in self._unknown if field != "links"]
        if not states:
            self._unknown.append("links")
        return tuple(states) or None


def _same(one: Any, other: Any) -> bool:
    return ctypes.cast(one, ctypes.c_void_p).value == ctypes.cast(other, ctypes.c_void_p).value


def _named(reading: GpuReading, known: GpuReading) -> GpuReading:
    return msgspec.structs.replace(
        reading,
        uuid=known.uuid,
        bdf=known.bdf,
        serial=known.serial,
        name=known.name,
        module_id=known.module_id,
        platform=known.platform,
    )


def _unavailable(error: Any) -> NvmlUnavailable:
    code = int(error.value)
    if code == LIBRARY_NOT_FOUND:
        what, remedy = "there is no libnvidia-ml.so.1.", "install NVIDIA's driver, or make its libraries visible here."
        return NvmlUnavailable(why="missing", what=what, remedy=remedy)
    if code == DRIVER_NOT_LOADED:
        what, remedy = "NVIDIA's driver is not loaded.", "load the nvidia kernel module; see dmesg."
        return NvmlUnavailable(why="no_driver", what=what, remedy=remedy)
    if code == FUNCTION_NOT_FOUND:
        what, remedy = "the driver lacks functions of NVML that every release since 2014 has.", "update the driver."
        return NvmlUnavailable(why="too_old", what=what, remedy=remedy)
    if code == NO_PERMISSION:
        what, remedy = "NVML refuses this process.", "give it access to /dev/nvidiactl and /dev/nvidia*."
        return NvmlUnavailable(why="no_permission", what=what, remedy=remedy)
    return NvmlUnavailable(
        why="failed", what=f"NVML does not start: {error} (code {code}).", remedy="see nvidia-smi and dmesg."
    )
