"""Processor time by quota: what a rank may use, of one core, whoever runs beside it. Needs a control group that may be written."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path

__all__ = ["Quota", "QuotaUnavailable"]

PERIOD_US = 50_000


class QuotaUnavailable(RuntimeError):
    """No control group with a quota can be made here."""


class Quota:
    """A group of its own for one process. ``share`` is of one core: 0.3 is 30 %."""

    def __init__(self, pid: int, share: float) -> None:
        self._path, self._old = _make()
        self.set(share)
        self._write("cgroup.procs", str(pid))

    def set(self, share: float) -> None:
        quota = str(round(share * PERIOD_US))
        if self._old:
            self._write("cpu.cfs_period_us", str(PERIOD_US))
            self._write("cpu.cfs_quota_us", quota)
        else:
            self._write("cpu.max", f"{quota} {PERIOD_US}")

    def close(self) -> None:
        """When its process is ending: the group goes once the kernel has torn that down."""
        deadline = time.monotonic() + 10.0
        while self._path.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._path.rmdir()
                return
            time.sleep(0.02)

    def _write(self, name: str, text: str) -> None:
        (self._path / name).write_text(text)


def _make() -> tuple[Path, bool]:
    """A new group, and whether it is of the older kind of hierarchy."""
    for above, old in _hierarchies():
        path = above / f"rackrun-bench-{uuid.uuid4().hex[:8]}"
        try:
            path.mkdir()
        except OSError:
            continue
        if (path / ("cpu.cfs_quota_us" if old else "cpu.max")).exists():
            return path, old
        path.rmdir()
    raise QuotaUnavailable(
        "no control group with a processor quota may be made here; as root, or in a delegated group, it may."
    )


def _hierarchies() -> list[tuple[Path, bool]]:
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        own[controllers] = inside
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, where = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        old = kind == "cgroup" and "cpu" in options.split(",")
        inside = (
            next((path for names, path in own.items() if "cpu" in names.split(",")), "") if old else own.get("", "")
        )
        if (old or kind == "cgroup2") and inside.startswith(root):
            found.append((Path(where) / os.path.relpath(inside, root), old))
    return sorted(found, key=lambda one: one[1])
