"""From a fault in the driver to what is to be done about it: fake library, real binding, child, machine; within a second."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

from rackrun.chaos.testbed.fake_nvml.fake_driver import FakeTray
from rackrun.protocol.gpu_health import GpuVerdict, Health, Response
from rackrun.topology.gpu_driver.nvml_watch import NvmlWatch
from rackrun.topology.gpu_driver.readings import NvmlUnavailable, TrayReading
from rackrun.topology.health.findings import preflight
from rackrun.topology.health.tray_health import GpuRepaired, TrayHealth
from tests.topology.conftest import Fake

READINGS_MAX = 3
"""One may be under way when a fault strikes, and one may come before the event that tells of it."""
GPU = 2
DEADLINE_S = 100.0


@dataclass
class Fault:
    name: str
    strike: Callable[[FakeTray], None]
    health: Health
    response: Response


def xid(number: int, live: int = 0) -> Callable[[FakeTray], None]:
    def strike(tray: FakeTray) -> None:
        tray.gpu[GPU].recovery_action = live
        tray.xid(GPU, number)

    return strike


def set_field(name: str, value: int, at: int | None = None) -> Callable[[FakeTray], None]:
    def strike(tray: FakeTray) -> None:
        if at is None:
            setattr(tray.gpu[GPU], name, value)
        else:
            getattr(tray.gpu[GPU], name)[at] = value

    return strike


def falls_off_the_bus(tray: FakeTray) -> None:
    tray.fail_all(GPU, "GPU_IS_LOST")
    tray.xid(GPU, 79)


FAULTS = [
    Fault("Xid 79", xid(79), Health.LOST, Response.FENCE),
    Fault("Xid 79, the GPU gone", falls_off_the_bus, Health.LOST, Response.FENCE),
    Fault("a fatal 149", xid(149, live=1), Health.RESET, Response.FENCE),
    Fault("a harmless 149", xid(149), Health.OK, Response.LEAVE),
    Fault("Xid 31", xid(31), Health.APP, Response.RESTART),
    Fault("a row that waits for a reset", set_field("remapped", 1, at=2), Health.DEGRADED, Response.SWAP),
    *(
        Fault(f"recovery action {action}", set_field("recovery_action", action), health, response)
        for action, health, response in [
            (1, Health.RESET, Response.FENCE), (2, Health.REBOOT, Response.FENCE), (3, Health.DRAIN_P2P, Response.FENCE),
            (4, Health.DEGRADED, Response.SWAP), (5, Health.FABRIC, Response.FENCE), (6, Health.UNKNOWN, Response.SWAP),
            (7, Health.UNKNOWN, Response.SWAP),
        ]
    ),
    Fault("a link down", set_field("link_state", 0, at=11), Health.DEGRADED, Response.SWAP),
    Fault("the fabric gone", set_field("fabric_state", 2), Health.FABRIC, Response.FENCE),
    Fault("a reset required", lambda tray: tray.fail_all(GPU, "RESET_REQUIRED"), Health.RESET, Response.FENCE),
]  # fmt: skip


class Watched:
    """A tray under watch, from the fake driver to the machine that judges."""

    def __init__(self, tray: FakeTray, watch: NvmlWatch) -> None:
        self._tray, self._watch = tray, watch
        self._well = bytes(tray.gpu[GPU])
        self._started = time.monotonic()
        self._health = TrayHealth()
        self._marks = self._readings = 0
        assert self._until_read_anew() == []

    def strike(self, fault: Fault) -> tuple[list[GpuVerdict], int]:
        """The first verdicts about it, and how many readings had come since it struck; the tray is well again afterwards."""
        fault.strike(self._tray)
        before = self._readings
        verdicts: list[GpuVerdict] = []
        if fault.health is Health.OK:
            verdicts = self._until_read_anew()
        while not verdicts and fault.health is not Health.OK:
            verdicts = self._step()[1]
        took = self._readings - before
        ctypes.memmove(ctypes.addressof(self._tray.gpu[GPU]), self._well, len(self._well))
        self._until_read_anew()
        self._health.handle(self._now_ms(), GpuRepaired(index=GPU))
        return verdicts, took

    def _until_read_anew(self) -> list[GpuVerdict]:
        """Verdicts of all that was on its way, up to a reading that began after this call."""
        self._marks += 1
        mark = f"580.{self._marks}"
        self._tray.driver = mark.encode()
        verdicts: list[GpuVerdict] = []
        driver = ""
        while driver != mark:
            driver, more = self._step()
            verdicts += more
        return verdicts

    def _step(self) -> tuple[str, list[GpuVerdict]]:
        message = self._watch.next(DEADLINE_S)
        assert message is not None
        assert not isinstance(message, NvmlUnavailable), message
        self._readings += isinstance(message, TrayReading)
        driver = message.driver if isinstance(message, TrayReading) else ""
        return driver, self._health.handle(self._now_ms(), message)

    def _now_ms(self) -> int:
        return int((time.monotonic() - self._started) * 1000)


def test_every_fault_gets_its_response_with_the_next_readings(fake: Callable[..., Fake]) -> None:
    of = fake()
    with NvmlWatch(period_ms=40, env=of.env("tray-09")) as watch:
        watched = Watched(of.tray("tray-09"), watch)
        for fault in FAULTS:
            verdicts, took = watched.strike(fault)
            if fault.health is Health.OK:
                assert verdicts == [], fault.name
                continue
            (verdict,) = verdicts
            assert (verdict.index, verdict.health, verdict.response) == (GPU, fault.health, fault.response), fault.name
            assert took <= READINGS_MAX, f"{fault.name}: {took} readings"


def test_a_spare_whose_fabric_is_not_completed_is_kept_out_until_it_is(fake: Callable[..., Fake]) -> None:
    of = fake()
    tray, seat = of.tray("tray-16"), of.topology.by_slot["tray-16/0"]
    tray.gpu[1].fabric_state = 2
    with NvmlWatch(period_ms=50, env=of.env("tray-16")) as watch:
        reading = watch.next(DEADLINE_S)
        assert isinstance(reading, TrayReading)
        assert preflight(reading, range(4), clique=seat.clique, links=18) == (
            "GPU 1: its fabric registration is in progress, not completed",
        )
        tray.gpu[1].fabric_state = 3
        while preflight(reading, range(4), clique=seat.clique, links=18):
            reading = watch.next(DEADLINE_S)
            assert isinstance(reading, TrayReading)
