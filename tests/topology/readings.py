"""Readings of healthy GPUs, for tests to change."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from rackrun.topology.gpu_driver.readings import Fabric, GpuReading, RemappedRows, TrayReading
from rackrun.topology.model.racks import CliqueId

DOMAIN = "4f2c9a1e-7d0b-4a5e-9c3f-1b8e6d2a7c90"
CLIQUE = CliqueId(DOMAIN, 32766)
FABRIC = Fabric(state=3, domain=DOMAIN, clique=32766, mask=0x1AA, summary=1)
ROWS = RemappedRows(correctable=0, uncorrectable=0, pending=False, failed=False)
UP = (1,) * 18


def gpu(index: int = 0, **changed: Any) -> GpuReading:
    healthy = GpuReading(
        index=index,
        uuid=f"GPU-{index}",
        bdf=f"{index + 8:08x}:01:00.0",
        fabric=FABRIC,
        links=UP,
        remapped=ROWS,
        recovery_action=0,
        ecc_uncorrected=0,
        sram_threshold=False,
        slowdown=0,
    )
    return replace(healthy, **changed)


def tray(*changed: GpuReading, driver: str = "580.65.06") -> TrayReading:
    """Four GPUs, those given in place of the healthy ones."""
    gpus = {index: gpu(index) for index in range(4)} | {one.index: one for one in changed}
    return TrayReading(driver=driver, gpus=tuple(gpus[index] for index in sorted(gpus)))


def down(*links: int) -> tuple[int, ...]:
    return tuple(0 if link in links else 1 for link in range(18))
